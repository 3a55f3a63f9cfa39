"""support/results.py - reading what runs and evaluations leave: result files, ours and SAGE's, the
settings that they were made with, and logs of dialogues.

rlver.py, evaluate.py, the reports and the tools read them through this file.
"""

from support.errors import BadInput
from support.files import read_jsonl
from support.metrics import BENCHMARK_TURNS, INITIAL_EMOTION, scale_in_words

import functools
import re
from pathlib import Path
from typing import NamedTuple

# --------------------------------------------------------------------------------------- intentions


class Intention(NamedTuple):
    """One of the eight hidden intentions (RLVER, Table 5)."""

    kind: str  # "rational" or "emotional"
    words: str  # a regex for its hidden themes: SAGE's, in Chinese, and ours, in both languages


# They are tried in this order. "explain" comes before "analyse", because the released theme of
# "explain" is to analyse (分析) why the others (其他人物) acted so, which matches both.
INTENTIONS = {
    "explain": Intention(
        "rational",
        r"why the other|other person|others? acted|reasons? of|其他人物|他人|别人这么做",
    ),
    "analyse": Intention("rational", r"critical|weighed|all its sides|dialectic|批判|辩证|分析"),
    "advise": Intention("rational", r"advice|建议"),
    "reflect": Intention("rational", r"look at yourself|self-reflect|to grow|反思|成长"),
    "praise": Intention("emotional", r"praise|夸|赞"),
    "listen": Intention("emotional", r"listen|倾听"),
    "empathise": Intention("emotional", r"empath|felt deeply|共情"),
    "side": Intention("emotional", r"nothing wrong|not at fault|no fault|not to blame|责任|没有错"),
}

# How parts of a file's users are called where people read them; all others as in files.
PART_NAMES = {"intention": "hidden need"}


@functools.cache
def intention_of(task, need=""):
    """(name of the intention, "rational" | "emotional") of a profile: by its `need`, if that names
    one, as in our profiles; else by the words of its hidden theme, `task`. ("other", "other") where
    it is none of the eight."""
    if need in INTENTIONS:
        return need, INTENTIONS[need].kind
    for name, intention in INTENTIONS.items():
        if re.search(intention.words, task or "", re.IGNORECASE):
            return name, intention.kind
    return "other", "other"


def hidden_need(profile):
    """What this person needed and only hinted at, in words: revealed when a dialogue is over."""
    name, _ = intention_of(profile.task, profile.need)
    in_brackets = "" if name == "other" else f" ({name})"
    return f"The hidden need{in_brackets}, at which the user only hinted: {profile.task}"


# ------------------------------------------------------------------------------------- result files

# the groups of personas in the released files, and what ours call them
PERSONA_GROUPS = {"负面型": "negative", "被动型": "passive", "回避型": "avoidant"}


def read_results(path):
    """Read a result file, ours or SAGE's. Returns (rows, problems). rows: one for each usable line,
    as `parse_result` has it, and "simulator": who played the user in a SAGE file, else "".
    problems: a sentence for each other line, with file and line number. Raises BadInput."""
    rows, problems, line_of_id = [], [], {}
    simulator = simulator_by_directory(path)
    try:
        for number, raw, problem in read_jsonl(path):
            try:
                row = parse_line(raw, problem, line_of_id)
            except ValueError as error:
                problems.append(f"{path}, line {number}: {error}")
                continue
            line_of_id[row["id"]] = number
            rows.append({**row, "simulator": simulator})
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    if not rows and not problems:
        raise BadInput(f"{path}: the file holds no result")
    return rows, problems


def parse_line(raw, problem, line_of_id):
    """A line of a result file as a row. raw, problem: as `read_jsonl` yields them; line_of_id: the
    lines of the ids that were read before. Raises ValueError if the line cannot be used."""
    if problem:
        raise ValueError(problem)
    row = parse_result(raw)
    if row["id"] in line_of_id:
        raise ValueError(f"id {row['id']!r} stands in line {line_of_id[row['id']]} already")
    return row


def simulator_by_directory(path):
    """Who played the user in a SAGE file: the name of its directory, because the released files do
    not say it. "" if the directory has no such name."""
    for part in Path(path).resolve().parts:
        if part.endswith("_based_simulator"):
            return part
    return ""


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

    Raises ValueError saying what is wrong with it."""
    refuse_malformed(raw)
    turns = turns_of(raw["history"])
    scored = [turn for turn in turns if turn["emotion"] is not None]
    emotions = [turn["emotion"] for turn in scored]
    for value in [raw["emo_point"], *emotions]:
        if not isinstance(value, (int, float)) or not 0 <= value <= 100:
            raise ValueError(f"emotion {value!r} is not in 0..100")
    made_by = raw["rlver"] if isinstance(raw.get("rlver"), dict) else {}
    start = made_by.get("start", INITIAL_EMOTION["benchmark"])
    fill_in_changes(scored, start)
    need = raw.get("need")
    intention, kind = intention_of(raw["task"], need if isinstance(need, str) else "")
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
        "group": PERSONA_GROUPS.get(group, group) if isinstance(group, str) else "other",
        "made_by": made_by,
        "ended": made_by.get("ended", ""),
        "raw": raw,
    }


def refuse_malformed(raw):
    """Raise ValueError if a line's object lacks what every result has."""
    if not isinstance(raw, dict):
        raise ValueError("a JSON object is needed")
    for name, kind in (("id", str), ("emo_point", (int, float)), ("history", list), ("task", str)):
        if name not in raw:
            raise ValueError(f"field {name!r} is missing")
        if not isinstance(raw[name], kind) or isinstance(raw[name], bool):
            raise ValueError(f"field {name!r} is a {type(raw[name]).__name__}")
    for message in raw["history"]:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("content"), str)
            or message.get("role") not in ("user", "assistant")
        ):
            raise ValueError("field 'history' holds something that is no message")


def fill_in_changes(scored, start):
    """Set the "change" of scored turns that have none, as in a SAGE file, from their emotions."""
    before = start
    for turn in scored:
        if turn["change"] is None:
            turn["change"] = turn["emotion"] - before
        before = turn["emotion"]


def turns_of(history):
    """The policy's turns in the messages of a result, a list of dicts: "reply", "user" (the line
    after it, None at the end), "thought", "analysis", "change", "emotion". A value that the file
    does not hold is None.

    Ours stand in the policy's message, under "rlver", the analysis as the model wrote it. SAGE's
    emotion and analysis, an object, stand in the user's message that follows."""
    turns = []
    followers = [*history[1:], {}]  # the message after each; {} after the last
    for message, follower in zip(history, followers):
        if message["role"] != "assistant":
            continue
        ours = message.get("rlver") if isinstance(message.get("rlver"), dict) else {}
        turn = {"reply": message["content"], "user": follower.get("content")}
        for key in ("thought", "analysis", "change", "emotion"):
            turn[key] = ours.get(key)
        if turn["emotion"] is None and "emotion-point" in follower:
            turn["emotion"] = follower["emotion-point"]
            turn["analysis"] = follower.get("planning")
        turns.append(turn)
    return turns


def world_of(target):
    """The columns "purpose" and "world" of the tables, by the `target` of a profile: what the user
    comes for. "eq" (also where a profile says nothing) is to confide a trouble: heart-to-heart.
    "target" and "no-target" are small talk, with and without an aim: chit-chat."""
    purpose = target if isinstance(target, str) and target else "eq"
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


def conditions_of(row):
    """The conditions of a dialogue, in words: who played the user, and the rules of the benchmark.
    Scores compare only if their conditions are the same."""
    made_by = row["made_by"]
    if not made_by:
        return f"simulator {row['simulator']}, by SAGE" if row["simulator"] else "SAGE's own"
    settings = [
        f"{key} {made_by[key]}"
        for key in ("simulator", "difficulty", "lang", "start", "max_turns", "world")
        if made_by.get(key) is not None
    ]
    return ", ".join(settings) or "SAGE's own"


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


# --------------------------------------------------------------------- the settings in result files

# evaluate.py writes the settings that it measures with into each line of a result file, under
# "rlver"; in a row of `read_results` they are "made_by". These keys beside them are no settings of
# an evaluation: "ended" and "traits" are of one dialogue, "held_out" follows from the policy and
# its users.
NOT_COMPARED = {"ended", "traits", "held_out"}


def differences_of_rows(rows, new_settings):
    """`differences_between` the settings of each row of `read_results` and `new_settings`, each
    difference once."""
    differences = []
    for row in rows:
        for difference in differences_between(row["made_by"], new_settings):
            if difference not in differences:
                differences.append(difference)
    return differences


def differences_between(old_settings, new_settings):
    """How the settings of old results differ from those of new ones: [a difference in words]."""
    differences = []
    for key in dict.fromkeys([*new_settings, *old_settings]):
        old, new = old_settings.get(key), new_settings.get(key)
        if key in NOT_COMPARED or old == new:
            continue
        if key == "users":
            differences.append("other users")
        else:
            differences.append(f"{key} {old} there, {new} here")
    return differences


def scale_of_settings(settings):
    """The scale of a result's score, in words, by the settings that it was made with ("made_by" of
    a row). SAGE's files do not say it: they are of the benchmark."""
    start = settings.get("start", INITIAL_EMOTION["benchmark"])
    return scale_in_words(start, settings.get("max_turns", BENCHMARK_TURNS))


# ---------------------------------------------------------------------------------- logs of a run


def metrics_of(out):
    """The readable lines of a run's metrics.jsonl; [] for a run that has done no step yet."""
    path = out / "metrics.jsonl"
    if not path.exists():
        return []
    return [row for _, row, _ in read_jsonl(path) if row]


# -------------------------------------------------------------------------------- logs of dialogues


def recorded_dialogues(path):
    """Yield the dialogues of a log (a run's dialogues.jsonl) or of a result file, all of them in
    the log's form, with the emotion that they started from. Raises BadInput."""
    if is_result_file(path):
        yield from dialogues_of_results(path)
    else:
        yield from logged_dialogues(path)


def is_result_file(path):
    """Is it a result file, not a log of dialogues? A line of a result file has the key "history",
    a line of a log has not. The key cannot be a part of a text, where its quotes would be escaped;
    so the line need not be parsed."""
    with open(path, "rb") as file:
        first_line = file.readline()
    return b'"history"' in first_line


def logged_dialogues(path):
    """`recorded_dialogues` of a log. A run starts at the training's initial emotion, if its log
    does not say it."""
    for dialogue in read_dialogues(path):
        yield {**dialogue, "start": dialogue.get("start", INITIAL_EMOTION["training"])}


def read_dialogues(path):
    """The lines of a run's dialogues.jsonl. Raises BadInput naming the line that is none."""
    if not Path(path).is_file():
        raise BadInput(f"{path}: no such file")
    dialogues = []
    for number, row, problem in read_jsonl(path):
        if (
            problem
            or not isinstance(row, dict)
            or not {"profile_id", "first_line", "turns"} <= set(row)
        ):
            raise BadInput(f"{path}, line {number}: not a line of a run's dialogues.jsonl")
        dialogues.append(row)
    if not dialogues:
        raise BadInput(f"{path}: the file holds no dialogue")
    return dialogues


def dialogues_of_results(path):
    """`recorded_dialogues` of a result file, all of whose lines must be usable."""
    rows, problems = read_results(path)
    if problems:
        raise BadInput(problems[0])
    for row in rows:
        yield dialogue_of_result(row)


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
