"""support/results.py - what runs and evaluations leave: result files, ours and SAGE's, read, scored
and compared (SAGE; RLVER 3); and logs of dialogues. No model is needed.

From top to bottom: hidden intentions; reading result files; the settings that they were made with;
the scores of one file and their table; two sides compared, each of one file or of several seeds;
logs of runs. rlver.py, evaluate.py, the reports and the tools read files through this one.
"""

from support.errors import BadInput
from support.files import read_jsonl
from support.metrics import (
    BENCHMARK_TURNS,
    INITIAL_EMOTION,
    scale_in_words,
    score_summary,
    scores_by,
    signs,
    signs_in_words,
    stderr_text,
)
from support.settings import fold, made_by_rule
from support.stats import sign_flips, spearman

import functools
import glob
import re
from pathlib import Path

import numpy as np

# --------------------------------------------------------------------------------------- intentions


# The eight hidden intentions (RLVER, Table 5): {name: ("rational" or "emotional", regex for its
# hidden themes: SAGE's, in Chinese, and ours, in both languages)}.
# They are tried in this order. "explain" comes before "analyse", because the released theme of
# "explain" is to analyse (分析) why the others (其他人物) acted so, which matches both.
INTENTIONS = {
    "explain": (
        "rational",
        r"why the other|other person|others? acted|reasons? of|其他人物|他人|别人这么做",
    ),
    "analyse": ("rational", r"critical|weighed|all its sides|dialectic|批判|辩证|分析"),
    "advise": ("rational", r"advice|建议"),
    "reflect": ("rational", r"look at yourself|self-reflect|to grow|反思|成长"),
    "praise": ("emotional", r"praise|夸|赞"),
    "listen": ("emotional", r"listen|倾听"),
    "empathise": ("emotional", r"empath|felt deeply|共情"),
    "side": ("emotional", r"nothing wrong|not at fault|no fault|not to blame|责任|没有错"),
}


@functools.cache
def intention_of(task, need=""):
    """(name of the intention, "rational" | "emotional") of a profile: by its `need`, if that names
    one, as in our profiles; else by the words of its hidden theme, `task`. ("other", "other") where
    it is none of the eight."""
    if need in INTENTIONS:
        return need, INTENTIONS[need][0]
    for name, (kind, words) in INTENTIONS.items():
        if re.search(words, task or "", re.IGNORECASE):
            return name, kind
    return "other", "other"


def hidden_need(profile):
    """What this person needed and only hinted at, in words: revealed when a dialogue is over."""
    name, _ = intention_of(profile.task, profile.need)
    return f"The hidden need ({name}), at which the user only hinted: {profile.task}"


# ------------------------------------------------------------------------------------- result files

# the groups of personas in the released files, and what ours call them
PERSONA_GROUPS = {"负面型": "negative", "被动型": "passive", "回避型": "avoidant"}


def read_results(path):
    """Read a result file, ours or SAGE's. Returns (rows, problems). rows: one for each usable line,
    as `parse_result` has it, and "simulator": who played the user in a SAGE file, else "". (The
    released files do not say it: their directory does, NAME_based_simulator.) problems: a sentence
    for each other line, with file and line number. Raises BadInput."""
    rows, problems, ids = [], [], set()
    parts = Path(path).resolve().parts
    simulator = "".join(part for part in parts if part.endswith("_based_simulator"))
    try:
        lines = list(read_jsonl(path))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    for number, raw, problem in lines:
        try:
            if problem:
                raise ValueError(problem)
            row = parse_result(raw)
            if row["id"] in ids:
                raise ValueError(f"id {row['id']!r} stands in an earlier line already")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            problems.append(f"{path}, line {number}: no result: {error!r}")
            continue
        ids.add(row["id"])
        rows.append({**row, "simulator": simulator})
    if not rows and not problems:
        raise BadInput(f"{path}: the file holds no result")
    return rows, problems


def parse_result(raw):
    """A line's object as a row:

        id          of the user
        final       the final emotion
        emotions    after each reply that was scored
        replies     the policy's replies, texts
        turns       see `turns_of`
        start       the emotion at the start
        intention   see `intention_of`
        kind        "rational", "emotional" or "other"
        purpose     what the user comes for, see `world_of`
        world       "heart-to-heart" or "chit-chat"
        group       of the persona: "negative", "passive", "avoidant" or another
        made_by     the settings of the evaluation, {} in a SAGE file
        ended       what ended the dialogue, "" in a SAGE file
        raw         the object itself

    Raises LookupError, TypeError, AttributeError or ValueError if it is no result."""
    made_by = raw.get("rlver") or {}
    start = made_by.get("start", INITIAL_EMOTION["benchmark"])
    turns = turns_of(raw["history"], start)
    emotions = [turn["emotion"] for turn in turns if turn["emotion"] is not None]
    for value in [raw["emo_point"], *emotions]:
        if not isinstance(value, (int, float)) or not 0 <= value <= 100:
            raise ValueError(f"emotion {value!r} is not in 0..100")
    intention, kind = intention_of(raw["task"], raw.get("need"))
    group = raw.get("character") or "other"
    return {
        "id": raw["id"],
        "final": raw["emo_point"],
        "emotions": emotions,
        "replies": [turn["reply"] for turn in turns],
        "turns": turns,
        "start": start,
        "intention": intention,
        "kind": kind,
        **world_of(raw.get("target")),
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
        emotion, planning = follower.get("emotion-point"), follower.get("planning")
        ours = message.get("rlver") or {"emotion": emotion, "analysis": planning}
        turn = {"reply": message["content"], "user": follower.get("content")}
        for key in ("thought", "analysis", "change", "emotion"):
            turn[key] = ours.get(key)
        if turn["emotion"] is not None:
            if turn["change"] is None:
                turn["change"] = turn["emotion"] - before
            before = turn["emotion"]
        turns.append(turn)
    return turns


def world_of(target):
    """The columns "purpose" and "world" of the tables, by the `target` of a profile: what the user
    comes for. "eq" (also where a profile says nothing) is to confide a trouble: heart-to-heart.
    "target" and "no-target" are small talk, with and without an aim: chit-chat."""
    purpose = target or "eq"
    return {"purpose": purpose, "world": "heart-to-heart" if purpose == "eq" else "chit-chat"}


# The purposes of `world_of`, as tables on the terminal name them.
PURPOSE_NAMES = {
    "eq": "heart-to-heart",
    "target": "chat with an aim",
    "no-target": "chat without aim",
}


def parts_of(rows):
    """The columns by which tables part these rows. World and purpose are among them only if some
    user chats, because in most files nobody does."""
    parts = ["kind", "intention", "group"]
    if any(row["purpose"] != "eq" for row in rows):
        return ["world", "purpose", *parts]
    return parts


# --------------------------------------------------------------------- the settings in result files

# evaluate.py writes the settings that it measures with into each line of a result file, under
# "rlver"; in a row of `read_results` they are "made_by". These keys beside them are no settings of
# an evaluation: "ended" and "traits" are of one dialogue, "held_out" follows from the policy and
# its users.
NOT_COMPARED = {"ended", "traits", "held_out"}


def differences(rows, settings):
    """How the settings of rows of `read_results` differ from other `settings`, in words, each
    difference once; "" if they do not."""
    found = {}
    for row in rows:
        made_by = row["made_by"]
        for key in {**settings, **made_by}:
            if key not in NOT_COMPARED and made_by.get(key) != settings.get(key):
                found[key] = f"{key} {made_by.get(key)} there, {settings.get(key)} here"
    return ", ".join(found.values())


def refuse_mixed(rows, where):
    """Raise BadInput unless all rows were made in the same conditions: who played the user, and the
    rules of the benchmark. Scores compare only then."""
    conditions = sorted({conditions_of(row) for row in rows})
    if len(conditions) > 1:
        raise BadInput(
            f"{where}: results of {len(conditions)} simulators or settings do not compare "
            f"({'; '.join(conditions)})"
        )


def conditions_of(row):
    """The conditions of a dialogue, in words."""
    made_by = row["made_by"] or {"simulator": row["simulator"] or "of SAGE"}
    return ", ".join(
        f"{key} {made_by[key]}"
        for key in ("simulator", "difficulty", "lang", "start", "max_turns", "world")
        if made_by.get(key) is not None
    )


def describe(made_by):
    """The policy and the user of a result, in words. The policy's settings are told as well,
    because the same weights may have been measured with several."""
    if not made_by:
        return "a SAGE result file"
    settings = []
    if "think" in made_by:
        settings.append("thinking" if made_by["think"] else "direct")
    for key in ("policy_lang", "temperature", "max_tokens", "context"):
        if made_by.get(key) is not None:
            settings.append(f"{key.replace('_', ' ')} {made_by[key]}")
    in_brackets = f" ({', '.join(settings)})" if settings else ""
    policy, simulator = made_by.get("policy", "?"), made_by.get("simulator", "?")
    return f"policy {policy}{in_brackets} with user {simulator}"


def starting_policy_in_words(description):
    """A description of `describe` for people to read. Results call the policy that a run started
    from RUN/checkpoint-000000, a directory that is soon deleted."""
    return re.sub(r"^policy (.*)/checkpoint-0{6}(?= )", r"the starting policy of \1", description)


def scale_of_settings(settings):
    """The scale of a result's score, in words, by the settings that it was made with ("made_by" of
    a row). SAGE's files do not say it: they are of the benchmark."""
    start = settings.get("start", INITIAL_EMOTION["benchmark"])
    return scale_in_words(start, settings.get("max_turns", BENCHMARK_TURNS))


# ---------------------------------------------------------------------------- the scores of a file


def score(path, rule=None, anyway=False, ids=None, lost=0):
    """Every table of one result file, as a dict. rule: "every", "sage" or None, see `read_scored`.
    anyway: average different simulators, too. ids: of the users that count (default: all in the
    file); lost: how many of them have no dialogue there. Raises BadInput for a file without a
    usable line, or with several simulators in it."""
    rows, problems, rule = read_scored(path, rule)
    rows = [row for row in rows if ids is None or row["id"] in ids]
    if not anyway:
        refuse_mixed(rows, path)
    finals = [row["final"] for row in rows]
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
        "rule": rule,
        **score_summary(finals),
        "malformed": 100 * malformed / len(rows),
        "turns": len(replies) / len(rows),
        "length": sum(map(len, replies)) / max(1, len(replies)),
        "positive": 100 * float(np.mean(np.array(changes) > 0)) if changes else None,
        "by": {name: scores_by(name, rows, finals) for name in parts_of(rows)},
        "signs": signs([row["replies"] for row in rows]),
        "asked": len(rows) + lost,
        "lost": lost,
        "unusable": len(problems),
        "problems": problems,
    }


def read_scored(path, rule=None):
    """(rows of a result file, problems, rule) as of `read_results`, with "final" by a rule of
    `final_of`. Without a rule, ours are scored by "every"; a file of SAGE's knows only "sage".
    Prints a hint if the file does not say which simulator it is of. Raises BadInput for another
    rule, or for a file without a usable line."""
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
    rule = rule or ("sage" if by_sage else "every")
    return [{**row, "final": final_of(row, rule)} for row in rows], problems, rule


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


def print_score(result):
    """Print the tables of one file. result: of `score`."""
    print(f"\n{result['file']}:")
    table = {"all": result}
    for name, values in result["by"].items():
        part = "hidden need" if name == "intention" else name
        for value, numbers in values.items():
            # purposes have codes, all else has names
            table[f"{part}: {PURPOSE_NAMES.get(value, value)}"] = numbers
    print_table(table)
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


def print_table(table):
    """Print a table of scores, {name of a line: numbers of `score_summary`}; those of all users also
    hold how many are lost."""
    print(f"{'':<26}{'score':>8}{'stderr':>8}{'success':>9}{'failure':>9}{'n':>6}")
    for name, numbers in table.items():
        asked = f" of {numbers['asked']}" if numbers.get("lost") else ""
        print(
            f"{name:<26}{numbers['score']:>8.1f}{stderr_text(numbers):>8}"
            f"{numbers['success']:>8.1f}%{numbers['failure']:>8.1f}%{numbers['n']:>6}{asked}"
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
        who = f"{len(policies)} policies, {' and '.join(scores)}"
        print(fold(f"\nranks of {who}: rho = {spearman(*columns):.2f}"))


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
    rows_of_files = [rows for rows, _, _ in files_before + files_after]
    refuse_mixed([row for rows in rows_of_files for row in rows], "--compare")
    common = set.intersection(*[{row["id"] for row in rows} for rows in rows_of_files])
    ids = sorted(common if ids is None else common & set(ids))
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
        "a_by": describe(files_before[-1][0][0]["made_by"]),
        "b_by": describe(files_after[-1][0][0]["made_by"]),
        "score_a": float(scores_before.mean()),
        "score_b": float(scores_after.mean()),
        "difference": mean,
        "interval": [low, high],
        "p": sign_flips(differences, rng, draws),
        "n": len(ids),
        "seeds": [len(scores_before), len(scores_after)],
        "sentence": verdict(mean, low, high, len(ids)),
        "problems": [problem for file in files_before + files_after for problem in file[1]],
    }


def scores_of(files, ids):
    """The final emotions of the users `ids` in several files of `read_scored`, [seeds, users]."""
    scores = []
    for rows, _, _ in files:
        final_by_id = {row["id"]: row["final"] for row in rows}
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


# ---------------------------------------------------------------------------------- logs of a run


def metrics_of(out):
    """The readable lines of a run's metrics.jsonl; [] for a run that has done no step yet."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return []
    return [row for _, row, _ in read_jsonl(path) if row]


def recorded_dialogues(path):
    """The dialogues of a log (a run's dialogues.jsonl) or of a result file, a list, all of them in
    the log's form, with the emotion that they started from: the training's, if a log does not say
    it. Raises BadInput."""
    with open(path, "rb") as file:
        is_result_file = b'"history"' in file.readline()
    if is_result_file:
        rows, problems = read_results(path)
        if problems:
            raise BadInput(problems[0])
        return [dialogue_of_result(row) for row in rows]
    dialogues = []
    for number, row, problem in read_jsonl(path):
        if problem or "first_line" not in row or "turns" not in row:
            raise BadInput(f"{path}, line {number}: not a line of a run's dialogues.jsonl")
        dialogues.append({"start": INITIAL_EMOTION["training"], **row})
    if not dialogues:
        raise BadInput(f"{path}: the file holds no dialogue")
    return dialogues


def dialogue_of_result(row):
    """A row of `read_results` with the keys of a line of dialogues.jsonl."""
    return {
        **row,
        "profile_id": row["id"],
        "reward": row["final"] / 100,
        "first_line": row["raw"]["history"][0]["content"],
        "user": conditions_of(row),
        "task": row["raw"]["task"],
    }
