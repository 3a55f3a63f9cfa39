"""support/scores.py - scores of result files, and comparisons of them (SAGE; RLVER 3): what
`evaluate.py --score` and `--compare` compute and print. No model is needed.

From top to bottom: the scores of one file; their table on the terminal; two sides compared, each of
one file or of several seeds; the comparison on the terminal.
"""

from support.errors import BadInput
from support.metrics import score_summary, scores_by, signs, signs_in_words, stderr_text
from support.results import (
    PART_NAMES,
    PURPOSE_NAMES,
    conditions_of,
    describe,
    parts_of,
    read_results,
    scale_of_settings,
    starting_policy_in_words,
)
from support.settings import made_by_rule
from support.stats import interval, sign_flips, spearman
from support.terminal import fold

import glob
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# --------------------------------------------------------------------------- scores of result files


@dataclass
class Scored:
    """A result file, and the score of each of its dialogues."""

    rows: list  # of read_results
    finals: list  # the final emotion of each row, by the rule
    rule: str  # "every" or "sage", see `final_of`
    problems: list  # what could not be used, in words


def score(path, rule=None, anyway=False, ids=None, lost=0):
    """Every table of one result file, as a dict. rule: "every", "sage" or None, see `read_scored`.
    anyway: average different simulators, too. ids: of the users that count (default: all in the
    file); lost: how many of them have no dialogue there. Raises BadInput for a file without a
    usable line, or with several simulators in it."""
    scored = read_scored(path, rule)
    rows, finals = scored.rows, scored.finals
    if ids is not None:
        finals = [final for row, final in zip(rows, finals) if row["id"] in ids]
        rows = [row for row in rows if row["id"] in ids]
    conditions = sorted({conditions_of(row) for row in rows})
    if len(conditions) > 1 and not anyway:
        raise BadInput(
            f"{path}: results of {len(conditions)} simulators or settings "
            f"({'; '.join(conditions)}) cannot be averaged; their scores do not compare. "
            "--anyway averages them all the same"
        )
    replies = [reply for row in rows for reply in row["replies"]]
    changes = [
        turn["change"] for row in rows for turn in row["turns"] if turn["change"] is not None
    ]
    malformed = sum(row["ended"] == "malformed" for row in rows)
    return {
        "file": str(path),
        "by_whom": describe(rows[0]["made_by"]),
        "policy": rows[0]["made_by"].get("policy", Path(path).name),
        "simulator": rows[0]["made_by"].get("simulator", rows[0]["simulator"]),
        "rule": scored.rule,
        **score_summary(finals),
        "malformed": 100 * malformed / len(rows),
        "turns": len(replies) / len(rows),
        "length": sum(map(len, replies)) / max(1, len(replies)),
        "positive": 100 * float(np.mean(np.array(changes) > 0)) if changes else None,
        "by": {name: scores_by(name, rows, finals) for name in parts_of(rows)},
        "signs": signs([row["replies"] for row in rows]),
        "asked": len(rows) + lost,
        "lost": lost,
        "unusable": len(scored.problems),
        "problems": scored.problems,
    }


def read_scored(path, rule=None):
    """A result file as Scored, by a rule of `final_of`. Without a rule, ours are scored by "every";
    a file of SAGE's knows only "sage". Prints a hint if the file does not say which simulator it is
    of. Raises BadInput for another rule, or for a file without a usable line."""
    rows, problems = read_results(path)
    if not rows:
        raise BadInput(f"{problems[0]} (and not one of {len(problems)} lines can be used)")
    if not rows[0]["made_by"] and not rows[0]["simulator"]:  # by SAGE, and not in SAGE's directory
        print(
            f"{path} names no simulator: compare its scores only with files of which "
            "you know that they have the same one"
        )
    by_sage = any(not row["made_by"] for row in rows)
    if by_sage and rule == "every":
        raise BadInput(
            "--rule every: SAGE's files do not score a tenth reply; only --rule sage "
            "can be had from them"
        )
    if by_sage:
        rule = "sage"
    elif rule is None:
        rule = "every"
    return Scored(rows, [final_of(row, rule) for row in rows], rule, problems)


def final_of(row, rule):
    """The final emotion of a dialogue by a rule. "every": every reply is scored. "sage", as SAGE's
    own loop: if there are as many replies as are allowed, the last one is not scored (ten replies,
    nine of them scored). SAGE's files hold only that emotion; ours hold both."""
    is_full = len(row["replies"]) == row["made_by"].get("max_turns")
    ended_by_a_reply = row["ended"] in ("turn_limit", "emotion_max", "emotion_min")
    if rule == "every" or not is_full or not ended_by_a_reply:
        return row["final"]
    if len(row["emotions"]) > 1:
        return row["emotions"][-2]
    return row["made_by"].get("start", row["final"])


# --------------------------------------------------------------------- their table on the terminal


def print_score(result):
    """Print the tables of one file. result: of `score`."""
    print(f"\n{result['file']}:")
    print(f"{'':<26}{'score':>8}{'stderr':>8}{'success':>9}{'failure':>9}{'n':>6}")
    print_score_line("all", result)
    for name, values in result["by"].items():
        for value, numbers in values.items():
            # purposes have codes, all else has names
            part = PART_NAMES.get(name, name)
            print_score_line(f"{part}: {PURPOSE_NAMES.get(value, value)}", numbers)
    print(
        f"{result['turns']:.1f} replies a dialogue, {result['length']:.0f} characters a reply, "
        f"{result['malformed']:.1f} % malformed"
    )
    if result["positive"] is not None:
        print(f"{result['positive']:.1f} % of the replies lift the emotion")
    print(fold(signs_in_words(result["signs"])))
    if result["unusable"]:
        print(
            f"{result['unusable']} lines could not be used; they are named below and not in any "
            "number above"
        )
    print(fold(f"score: {what_scores_are([result['file']])}"))
    if result["rule"] == "sage":
        print("rule 'sage': as SAGE, the last of a full number of replies is not scored")
    print(fold(f"by: {starting_policy_in_words(result['by_whom'])}"))


def what_scores_are(paths):
    """What the scores of result files are, in words: their scale, and whether their users are
    played by rule. It is read off the files, because each may have been made with other
    settings."""
    settings = [row["made_by"] for path in paths for row in read_results(path)[0]]
    scales = dict.fromkeys(scale_of_settings(made_by) for made_by in settings)
    users = dict.fromkeys(made_by.get("simulator", "") for made_by in settings)
    notes = [made_by_rule(user) for user in users]
    sentences = [
        f"mean final emotion, {' or '.join(scales)}.",
        "success: 100; failure: below 10.",
        *[note for note in notes if note],
    ]
    return " ".join(sentences)


def print_score_line(name, numbers):
    """Print one line of the table. numbers: of `score_summary`; those of all users also hold how
    many are lost."""
    asked = f" of {numbers['asked']}" if numbers.get("lost") else ""
    print(
        f"{name:<26}{numbers['score']:>8.1f}{stderr_text(numbers):>8}{numbers['success']:>8.1f}%"
        f"{numbers['failure']:>8.1f}%{numbers['n']:>6}{asked}"
    )


def print_ranks(results):
    """Of files of three policies or more, each under the same two simulators, print how far the
    simulators rank the policies alike: Spearman's rho of their scores. Other files print nothing.
    results: of `score`."""
    scores = {}  # {simulator: {policy: score}}
    for result in results:
        scores.setdefault(result["simulator"], {})[result["policy"]] = result["score"]
    policies = sorted(set.intersection(*map(set, scores.values())))
    if len(scores) == 2 and len(policies) >= 3:
        columns = [[of_one[policy] for policy in policies] for of_one in scores.values()]
        rho, low, high, n = interval(spearman, *columns)
        between = "" if low is None else f" (95 % interval {low:.2f} to {high:.2f})"
        print(fold(f"\nranks of {n} policies, {' and '.join(scores)}: rho = {rho:.2f}{between}"))


# -------------------------------------------------------------------------------------- comparisons


def compare(paths_before, paths_after, rule=None, ids=None, draws=10_000):
    """How do the results after differ from those before? Paired on the users that all files of both
    sides hold, and of these on `ids`, if any are given; every difference is after minus before.

    paths_before, paths_after: lists of result files, one per seed. The difference of a user is that
    of its means over seeds. The interval is the 2.5 to 97.5 percentile of a bootstrap over users,
    and over the seeds of each side where there are several (a difference between two single runs
    says nothing about two methods). p: sign flips of the users' differences, two-sided; it takes
    the seeds as given. Raises BadInput."""
    files_before = [read_scored(path, rule) for path in paths_before]
    files_after = [read_scored(path, rule) for path in paths_after]
    files = files_before + files_after
    conditions = {conditions_of(row) for file in files for row in file.rows}
    if len(conditions) > 1:
        raise BadInput(
            "--compare: results of different simulators or settings "
            f"({'; '.join(sorted(conditions))}) do not compare"
        )
    ids = [user for user in common_ids(files) if ids is None or user in ids]
    if len(ids) < 2:
        raise BadInput("--compare: the files have fewer than two users in common")
    scores_before = scores_of(files_before, ids)  # [seeds before, users]
    scores_after = scores_of(files_after, ids)  # [seeds after, users]
    differences = scores_after.mean(0) - scores_before.mean(0)  # [users]
    mean = float(differences.mean())
    rng = np.random.default_rng(0)
    low, high = bootstrap_of_seeds(scores_before, scores_after, rng, draws)
    return {
        "a": paths_before,
        "b": paths_after,
        "a_by": describe(files_before[-1].rows[0]["made_by"]),
        "b_by": describe(files_after[-1].rows[0]["made_by"]),
        "score_a": float(scores_before.mean()),
        "score_b": float(scores_after.mean()),
        "difference": mean,
        "interval": [low, high],
        "p": sign_flips(differences, rng, draws),
        "n": len(ids),
        "seeds": [len(scores_before), len(scores_after)],
        "sentence": verdict(mean, low, high, len(ids)),
        "problems": [problem for file in files for problem in file.problems],
    }


def common_ids(files):
    """The ids of the users that all of these Scored files hold, sorted."""
    return sorted(set.intersection(*[{row["id"] for row in file.rows} for file in files]))


def scores_of(files, ids):
    """The final emotions of the users `ids` in several Scored files, [seeds, users]."""
    scores = []
    for file in files:
        final_by_id = {row["id"]: final for row, final in zip(file.rows, file.finals)}
        scores.append([final_by_id[user_id] for user_id in ids])
    return np.array(scores, dtype=float)


def bootstrap_of_seeds(scores_before, scores_after, rng, draws):
    """The 95 % interval (low, high) of mean(after) - mean(before), both [seeds, users]: each draw
    takes the same users of both sides, and draws the seeds of each side that has several."""

    def draw_seeds(scores):
        if len(scores) == 1:
            return scores
        return scores[rng.integers(len(scores), size=len(scores))]

    differences = np.empty(draws)
    user_count = scores_before.shape[1]
    for draw in range(draws):
        users = rng.integers(user_count, size=user_count)
        before, after = draw_seeds(scores_before), draw_seeds(scores_after)
        differences[draw] = after[:, users].mean() - before[:, users].mean()
    low, high = np.percentile(differences, [2.5, 97.5])
    return float(low), float(high)


def verdict(difference, low, high, n):
    """What a difference with its interval says, in words."""
    if low <= 0 <= high:
        return f"no difference can be told at n = {n}"
    if difference > 0:
        return f"after is better by {difference:.1f}, {low:.1f} to {high:.1f}"
    return f"before is better by {-difference:.1f}, {-high:.1f} to {-low:.1f}"


def files_of_side(names):
    """The result files that a side of --compare names: one file, or one per seed, with commas
    between them or as a pattern."""
    paths = []
    for name in names.split(","):
        paths += sorted(glob.glob(name)) or [name]
    return paths


def print_comparison(result, named=True):
    """Print a comparison. result: of `compare`. named: also whose scores they are, and on which
    scale."""
    low, high = result["interval"]
    print(
        fold(
            f"before {result['score_a']:.1f}, after {result['score_b']:.1f}, after minus before "
            f"{result['difference']:+.1f} (95 % interval {low:+.1f} to {high:+.1f}, p = "
            f"{result['p']:.4f}, n = {result['n']}): {result['sentence']}."
        )
    )
    print(fold(seeds_in_words(*result["seeds"])))
    if not named:
        return
    print(fold(f"score: {what_scores_are(result['a'] + result['b'])}"))
    print(fold(f"before: {starting_policy_in_words(result['a_by'])}"))
    print(fold(f"after: {starting_policy_in_words(result['b_by'])}"))


def seeds_in_words(before, after):
    """On how many training runs each side of a comparison stands."""
    if before == after == 1:
        return "One training run each; other seeds vary, which the interval does not show."
    return f"{before} and {after} seeds."
