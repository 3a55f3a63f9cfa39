"""scoring.py - the scores of result files, ours and SAGE's, and the comparison of two files (SAGE;
RLVER 3). No model is needed: support/results.py reads the files.
"""

from support.command_line import print_folded
from support.errors import BadInput
from support.metrics import score_summary, scores_by
from support.printing import print_table
from support.results import (
    describe,
    emotions_of,
    parts_of,
    read_results,
    refuse_mixed,
    what_scores_are,
)
from support.signs import signs, signs_in_words
from support.stats import sign_flips, spearman

from pathlib import Path

import numpy as np

# ---------------------------------------------------------------------- the scores of a result file


def score(path, rule=None, anyway=False, ids=None, lost=0):
    """Every table of one result file, as a dict. rule: "every", "sage" or None, see `read_scored`.
    anyway: average different simulators, too. ids: of the users that count (default: all in the
    file); lost: how many of them have no dialogue there. Raises BadInput for a file without a
    usable line, or with several simulators in it."""
    rows = [row for row in read_scored(path, rule) if ids is None or row["id"] in ids]
    if not anyway:
        refuse_mixed(rows, path)
    made_by = rows[0]["made_by"]
    turns = [turn for row in rows for turn in row["turns"]]
    changes = [turn["change"] for turn in turns if turn["change"] is not None]
    return {
        "file": str(path),
        "by_whom": describe(made_by),
        "policy": made_by.get("policy", Path(path).name),
        "simulator": made_by["simulator"],
        "scale": what_scores_are(made_by),
        "rule": rows[0]["rule"],
        **score_summary([row["final"] for row in rows]),
        "malformed": 100 * sum(row["ended"] == "malformed" for row in rows) / len(rows),
        "cut": 100 * sum(row["made_by"].get("cut", 0) for row in rows) / max(1, len(turns)),
        "turns": len(turns) / len(rows),
        "positive": 100 * np.mean(np.array(changes) > 0) if changes else None,
        "by": {name: scores_by(name, rows) for name in parts_of(rows)},
        "signs": signs([[turn["reply"] for turn in row["turns"]] for row in rows]),
        "lost": lost,
    }


def read_scored(path, rule=None):
    """`read_results`, each row with the "rule" that it is scored by and with the "final" of this
    rule (see `final_of`). Without a rule, ours are scored by "every"; SAGE's always by "sage",
    because they do not hold the emotion after a tenth reply."""
    rows = read_results(path)
    for row in rows:
        is_ours = "policy" in row["made_by"]
        row["rule"] = (rule or "every") if is_ours else "sage"
        row["final"] = final_of(row)
    return rows


def final_of(row):
    """The final emotion of a dialogue by its "rule". "every": every reply is scored. "sage", as
    SAGE's own loop: if there are as many replies as are allowed, the last one is not scored (ten
    replies, nine of them scored). SAGE's files hold only that emotion; ours hold both."""
    turns = row["turns"]  # the last emotion is None if it was not scored, or malformed
    is_full = len(turns) == row["made_by"]["max_turns"]
    if row["rule"] == "every" or not is_full or turns[-1]["emotion"] is None:
        return row["final"]
    return [row["start"], *emotions_of(turns)][-2]


def print_score(result):
    """Print the tables of one file. result: of `score`."""
    print(f"\n{result['file']}:")
    table = {"all": result}
    for part, values in result["by"].items():
        for value, numbers in values.items():
            table[f"{part}: {value}"] = numbers
    print_table(table)
    print(
        f"{result['turns']:.1f} replies a dialogue; {result['malformed']:.1f} % malformed; "
        f"{result['cut']:.1f} % of the replies cut by --max-tokens or empty"
    )
    if result["positive"] is not None:
        print(f"{result['positive']:.1f} % of the replies lift the emotion")
    print_folded(signs_in_words(result["signs"]))
    print_folded(f"score: {result['scale']}")
    if result["rule"] == "sage":
        print("rule 'sage': as in SAGE, the last reply of a full-length dialogue is not scored")
    print_folded(f"by: {result['by_whom']}")


def print_ranks(results):
    """Print how similarly two simulators rank the policies: Spearman's rho of their scores. Print
    nothing unless there are three policies or more, each with a score by both simulators.
    results: of `score`."""
    scores = {(result["simulator"], result["policy"]): result["score"] for result in results}
    simulators, policies = (sorted(set(names)) for names in zip(*scores))
    if len(simulators) != 2 or len(policies) < 3 or len(scores) != 2 * len(policies):
        return
    rho = spearman(*[[scores[who, policy] for policy in policies] for who in simulators])
    who = f"{len(policies)} policies, {' and '.join(simulators)}"
    print_folded(f"\nranks of {who}: rho = {rho:.2f}")


# ------------------------------------------------------------------------ two result files compared


def compare(path_before, path_after, rule=None, ids=None, draws=10_000):
    """Compare the results after with those before, paired on the users that both files hold, and
    of these on `ids`, if any are given; every difference is after minus before.

    The interval is the 2.5 to 97.5 percentile of a bootstrap over users. p: sign flips of the
    users' differences, two-sided. Raises BadInput."""
    scored = [read_scored(path, rule) for path in (path_before, path_after)]
    refuse_mixed([row for rows in scored for row in rows], "--compare")
    finals = [{row["id"]: row["final"] for row in rows} for rows in scored]
    common = finals[0].keys() & finals[1].keys()
    ids = sorted(common if ids is None else common & ids)
    n = len(ids)
    if n < 2:
        raise BadInput("--compare: the files have fewer than two users in common")
    before, after = (np.array([final[user_id] for user_id in ids]) for final in finals)
    gains = after - before
    mean = gains.mean()
    rng = np.random.default_rng(0)
    samples = rng.integers(n, size=(draws, n))  # indices of users
    low, high = np.percentile(gains[samples].mean(1), [2.5, 97.5]).tolist()
    made_before, made_after = (rows[0]["made_by"] for rows in scored)
    return {
        "a": path_before,
        "b": path_after,
        "a_by": describe(made_before),
        "b_by": describe(made_after),
        "scale": what_scores_are(made_after),
        "score_a": before.mean(),
        "score_b": after.mean(),
        "difference": mean,
        "interval": [low, high],
        "p": sign_flips(gains, rng, draws),
        "n": n,
        "sentence": verdict(mean, low, high, n),
    }


def verdict(difference, low, high, n):
    """What a difference with its interval says, in words."""
    if low <= 0 <= high:
        return f"no difference can be told at n = {n}"
    if difference > 0:
        return f"after is better by {difference:.1f}, {low:.1f} to {high:.1f}"
    return f"before is better by {-difference:.1f}, {-high:.1f} to {-low:.1f}"


def print_comparison(result):
    """Print a comparison. result: of `compare`."""
    low, high = result["interval"]
    print_folded(
        f"before {result['score_a']:.1f}, after {result['score_b']:.1f}, after minus before "
        f"{result['difference']:+.1f} (95 % interval {low:+.1f} to {high:+.1f}, p = "
        f"{result['p']:.4f}, n = {result['n']}): {result['sentence']}."
    )
    print("The interval does not include the variation between training runs (seeds).")
    print_folded(f"score: {result['scale']}")
    print_folded(f"before: {result['a_by']}")
    print_folded(f"after: {result['b_by']}")
