"""support/results.py - what runs and evaluations leave: result files, ours and SAGE's, read, scored
and compared (SAGE; RLVER 3); and logs of dialogues. No model is needed.

From top to bottom: reading result files; the settings that they were made with;
the scores of one file and their table; two files compared; logs of runs.
rlver.py, evaluate.py, the reports and the tools read files through this one.
"""

from support.errors import BadInput
from support.files import read_jsonl
from support.metrics import score_summary, scores_by
from support.settings import print_folded, scripted_notice
from support.signs import signs, signs_in_words
from support.stats import sign_flips, spearman

import re
from pathlib import Path

import numpy as np

from emotion import BENCHMARK_TURNS, INITIAL_EMOTION, need_of, scale_in_words

# ------------------------------------------------------------------------------------- result files

# the groups of personas in the released files, and what ours call them
PERSONA_GROUPS = {"负面型": "negative", "被动型": "passive", "回避型": "avoidant"}


def read_results(path):
    """The lines of a result file, ours or SAGE's, as rows (see `parse_result`). Raises BadInput for a
    line that is no result, and for a file without any; OSError."""
    # the released files do not say who played the user: their directory does
    folders = [part for part in Path(path).resolve().parts if part.endswith("_based_simulator")]
    simulator = "".join(folders) or "unknown"
    rows = {}
    for number, raw, problem in read_jsonl(path):
        try:
            if problem:
                raise ValueError(problem)
            row = parse_result(raw, simulator)
            if row["id"] in rows:
                raise ValueError(f"id {row['id']!r} stands in an earlier line already")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise BadInput(f"{path}, line {number}: no result: {error!r}") from None
        rows[row["id"]] = row
    if not rows:
        raise BadInput(f"{path}: the file holds no result")
    return list(rows.values())


def parse_result(raw, simulator):
    """A line's object as a row:

        id, profile_id  both: of the user
        final, reward   the final emotion, and a hundredth of it
        first_line      the user's
        turns           see `turns_of`
        start           the emotion at the start
        task            the hidden need, in words
        intention       its name, a key of emotion.NEEDS, or "other"
        kind            "rational", "emotional" or "other"
        purpose         what the user comes for, one of PURPOSE_LABELS
        group           of the persona: "negative", "passive", "avoidant" or another
        made_by         the settings of the evaluation; of a SAGE file those that are known
        ended           what ended the dialogue, "" in a SAGE file
        raw             the object itself

    Raises LookupError, TypeError, AttributeError or ValueError if it is no result."""
    made_by = raw.get("rlver") or {
        "simulator": simulator,
        "start": INITIAL_EMOTION["benchmark"],
        "max_turns": BENCHMARK_TURNS,
    }
    final, history, task = raw["emo_point"], raw["history"], raw["task"]
    turns = turns_of(history, made_by["start"])
    for value in [final, *emotions_of(turns)]:
        if not 0 <= value <= 100:
            raise ValueError(f"emotion {value!r} is not in 0..100")
    intention, kind = need_of(task, raw.get("need"))
    group = raw.get("character") or "other"
    return {
        "id": raw["id"],
        "profile_id": raw["id"],
        "final": final,
        "reward": final / 100,
        "first_line": history[0]["content"],
        "turns": turns,
        "start": made_by["start"],
        "task": task,
        "intention": intention,
        "kind": kind,
        "purpose": PURPOSE_LABELS[raw.get("target") or "eq"],
        "group": PERSONA_GROUPS.get(group, group),
        "made_by": made_by,
        "ended": made_by.get("ended", ""),
        "raw": raw,
    }


def turns_of(history, start):
    """The policy's turns in the messages of a result, a list of dicts: "reply", "user" (the line
    after it, None at the end), "thought", "analysis", "change", "emotion". A value that the file
    does not hold is None. start: the emotion before the first.

    Ours stand in the policy's message, under "rlver", the analysis as the model wrote it. SAGE's
    emotion and analysis, an object, stand in the user's message that follows; its changes follow
    from the emotions."""
    turns, before = [], start
    followers = [*history[1:], {}]  # the message after each; {} after the last
    for message, follower in zip(history, followers):
        if message["role"] != "assistant":
            continue
        turn = {
            "reply": message["content"],
            "user": follower.get("content"),
            "thought": None,
            "analysis": follower.get("planning"),
            "change": None,
        }
        turn |= message.get("rlver") or {"emotion": follower.get("emotion-point")}
        if turn["emotion"] is not None:
            if turn["change"] is None:
                turn["change"] = turn["emotion"] - before
            before = turn["emotion"]
        turns.append(turn)
    return turns


def emotions_of(turns):
    """The emotions after the replies that were scored."""
    return [turn["emotion"] for turn in turns if turn["emotion"] is not None]


# What users come for: the `target` of a profile. (The first is to confide a trouble, and also where
# a profile says nothing; the others are small talk.)
PURPOSE_LABELS = {
    "eq": "heart-to-heart",
    "target": "chat with an aim",
    "no-target": "chat without aim",
}


def parts_of(rows):
    """The columns by which tables part these rows. The purpose is among them only if some user
    chats, because in most files nobody does."""
    parts = ["kind", "intention", "group"]
    if any(row["purpose"] != PURPOSE_LABELS["eq"] for row in rows):
        parts.insert(0, "purpose")
    return parts


# --------------------------------------------------------------------- the settings in result files

# evaluate.py writes the settings that it measures with into each line of a result file, under
# "rlver"; in a row of `read_results` they are "made_by". These keys beside them are no settings of
# an evaluation: "ended", "traits", "cut" are of one dialogue, "held_out" follows from the policy and
# its users.
NOT_COMPARED = {"ended", "traits", "cut", "held_out"}
# The conditions in which scores compare, and how the policy replied.
CONDITIONS = ("simulator", "reader", "difficulty", "lang", "start", "max_turns", "world")
POLICY_SETTINGS = ("think", "policy_lang", "temperature", "max_tokens", "context")


def differences(made_by, settings):
    """How the settings `made_by` of a result differ from other `settings`, in words; "" if they do
    not."""
    return ", ".join(
        f"{key} {made_by.get(key)} there, {settings.get(key)} here"
        for key in {**settings, **made_by}
        if key not in NOT_COMPARED and made_by.get(key) != settings.get(key)
    )


def refuse_mixed(rows, where):
    """Raise BadInput unless all rows were made in the same conditions: who played the user, and the
    rules of the benchmark. Scores compare only then."""
    conditions = sorted({in_words(row["made_by"], CONDITIONS) for row in rows})
    if len(conditions) > 1:
        raise BadInput(
            f"{where}: results of {len(conditions)} simulators or settings do not compare "
            f"({'; '.join(conditions)})"
        )


def in_words(made_by, keys):
    """Those settings of a result that it has, in words."""
    return ", ".join(f"{key} {made_by[key]}" for key in keys if made_by.get(key) is not None)


def describe(made_by):
    """The policy and the user of a result, in words. The policy's settings are told as well,
    because the same weights may have been measured with several."""
    if "policy" not in made_by:
        return f"a SAGE result file, simulator {made_by['simulator']}"
    # The policy that a run started from is called by a directory that is soon deleted.
    start = re.fullmatch("(.*)/checkpoint-0{6}", made_by["policy"])
    policy = f"the starting policy of {start[1]}" if start else f"policy {made_by['policy']}"
    return f"{policy} ({in_words(made_by, POLICY_SETTINGS)}) with user {made_by['simulator']}"


def what_scores_are(made_by):
    """What the scores are that were made with these settings, in words: their scale, and whether
    the users are scripted."""
    return (
        f"mean final emotion, {scale_of_settings(made_by)}. success: 100; failure: below 10. "
        f"{scripted_notice(made_by['simulator'])}"
    )


def scale_of_settings(settings):
    """The scale of a result's score, in words, by the settings that it was made with ("made_by" of
    a row)."""
    return scale_in_words(settings["start"], settings["max_turns"])


# ---------------------------------------------------------------------------- the scores of a file


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
        row["rule"] = rule or "every" if "policy" in row["made_by"] else "sage"
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
        print("rule 'sage': as SAGE, the last of a full number of replies is not scored")
    print_folded(f"by: {result['by_whom']}")


def print_table(table):
    """Print a table of scores, {name of a line: numbers of `score_summary`}; those of all users also
    hold how many are lost."""
    print(f"{'':<26}{'score':>8}{'stderr':>8}{'success':>9}{'failure':>9}{'n':>6}")
    for name, numbers in table.items():
        lost = numbers.get("lost")
        asked = f" of {numbers['n'] + lost}" if lost else ""
        shown = "-" if numbers["stderr"] is None else f"{numbers['stderr']:.1f}"
        print(
            f"{name:<26}{numbers['score']:>8.1f}{shown:>8}{numbers['success']:>8.1f}%"
            f"{numbers['failure']:>8.1f}%{numbers['n']:>6}{asked}"
        )


def print_ranks(results):
    """Of files of three policies or more, each under the same two simulators, print how far the
    simulators rank the policies alike: Spearman's rho of their scores. Other files print nothing.
    results: of `score`."""
    scores = {(result["simulator"], result["policy"]): result["score"] for result in results}
    simulators, policies = (sorted(set(names)) for names in zip(*scores))
    if len(simulators) != 2 or len(policies) < 3 or len(scores) != 2 * len(policies):
        return
    rho = spearman(*[[scores[who, policy] for policy in policies] for who in simulators])
    who = f"{len(policies)} policies, {' and '.join(simulators)}"
    print_folded(f"\nranks of {who}: rho = {rho:.2f}")


# -------------------------------------------------------------------------------------- comparisons


def compare(path_before, path_after, rule=None, ids=None, draws=10_000):
    """How do the results after differ from those before? Paired on the users that both files hold,
    and of these on `ids`, if any are given; every difference is after minus before.

    The interval is the 2.5 to 97.5 percentile of a bootstrap over users. p: sign flips of the
    users' differences, two-sided. Raises BadInput."""
    files = [read_scored(path, rule) for path in (path_before, path_after)]
    refuse_mixed([row for rows in files for row in rows], "--compare")
    finals = [{row["id"]: row["final"] for row in rows} for rows in files]
    common = finals[0].keys() & finals[1].keys()
    ids = sorted(common if ids is None else common & ids)
    n = len(ids)
    if n < 2:
        raise BadInput("--compare: the files have fewer than two users in common")
    before, after = (np.array([final[user_id] for user_id in ids]) for final in finals)
    differences = after - before
    mean = differences.mean()
    rng = np.random.default_rng(0)
    samples = rng.integers(n, size=(draws, n))  # indices of users
    low, high = np.percentile(differences[samples].mean(1), [2.5, 97.5]).tolist()
    made_before, made_after = (rows[0]["made_by"] for rows in files)
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
        "p": sign_flips(differences, rng, draws),
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
    print("One training run each; other seeds vary, which the interval does not show.")
    print_folded(f"score: {result['scale']}")
    print_folded(f"before: {result['a_by']}")
    print_folded(f"after: {result['b_by']}")


# ---------------------------------------------------------------------------------- logs of a run


def metrics_of(out):
    """The readable lines of a run's metrics.jsonl; [] for a run that has done no step yet."""
    path = out / "metrics.jsonl"
    lines = read_jsonl(path) if path.exists() else []
    return [row for _, row, _ in lines if row]


def recorded_dialogues(path):
    """The dialogues of a log (a run's dialogues.jsonl) or of a result file, a list, all of them in
    the log's form, with the emotion that they started from: the training's, if a log does not say
    it. Raises BadInput."""
    with open(path, "rb") as file:
        is_result_file = b'"history"' in file.readline()
    if is_result_file:
        return read_results(path)
    dialogues = []
    needed = {"profile_id", "first_line", "turns", "reward"}
    for number, row, problem in read_jsonl(path):
        if problem or not isinstance(row, dict) or needed - row.keys():
            raise BadInput(f"{path}, line {number}: not a line of a run's dialogues.jsonl")
        dialogues.append({"start": INITIAL_EMOTION["training"], **row})
    return dialogues
