"""support/results.py - reading what runs and evaluations leave: result files, ours and SAGE's, and
logs of dialogues.

rlver.py, evaluate.py, the reports and the tools read them through this file.
"""

from support.answers import is_mark
from support.errors import BadInput
from support.rundir import read_jsonl
from support.users import INITIAL_EMOTION

import functools
import re
from pathlib import Path

# The hidden intentions (RLVER Table 5) by the words that tell them from each other, in the order in
# which they are tried.
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
SAGE_SECTIONS = ("Content", "TargetCompletion", "Activity", "Analyse", "Change")
GROUPS = {"负面型": "negative", "被动型": "passive", "回避型": "avoidant"}


@functools.cache
def intention_of(task, need=""):
    """(intention, "rational" | "emotional") of a profile: its `need`, which our profiles carry,
    else by the words of its `task`; both "other" where that is none of SAGE's eight."""
    if need in INTENTIONS:
        return need, INTENTIONS[need][0]
    for name, (kind, words) in INTENTIONS.items():
        if re.search(words, task or "", re.IGNORECASE):
            return name, kind
    return "other", "other"


# ------------------------------------------------------------------------------------- result files


def read_results(path):
    """Read a result file, ours or SAGE's. Returns (rows, problems): what could not be used is named
    with file and line, and counted.

    Row: as `parse_result` has it, and "simulator": who played the user in a SAGE file, else ""."""
    rows, problems, line_of = [], [], {}
    simulator = simulator_by_directory(path)
    try:
        for number, raw, problem in read_jsonl(path):
            try:
                if problem:
                    raise ValueError(problem)
                row = {**parse_result(raw), "simulator": simulator}
                if row["id"] in line_of:
                    raise ValueError(
                        f"id {row['id']!r} stands in line {line_of[row['id']]} already"
                    )
                line_of[row["id"]] = number
                rows.append(row)
            except ValueError as error:
                problems.append(f"{path}, line {number}: {error}")
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    if not rows and not problems:
        raise BadInput(f"{path}: the file holds no result")
    return rows, problems


def simulator_by_directory(path):
    """Who played the user, "" if nothing says so: SAGE's released files tell it only by their
    directory."""
    for part in Path(path).resolve().parts:
        if part.endswith("_based_simulator"):
            return part
    return ""


def parse_result(raw):
    """A line's object as a row: {"id", "final", "emotions" (after each scored reply), "replies"
    (texts), "turns" (see `turns_of`), "start", "intention", "kind", "world", "purpose" (the
    profile's target), "group", "made_by", "ended", "raw"}. Raises ValueError saying what is wrong
    with it."""
    refuse_malformed(raw)
    turns = turns_of(raw["history"])
    scored = [turn for turn in turns if turn["emotion"] is not None]
    emotions = [turn["emotion"] for turn in scored]
    for value in [raw["emo_point"], *emotions]:
        if not isinstance(value, (int, float)) or not 0 <= value <= 100:
            raise ValueError(f"emotion {value!r} is not in 0..100")
    made_by = raw["rlver"] if isinstance(raw.get("rlver"), dict) else {}
    start = made_by.get("start", INITIAL_EMOTION["benchmark"])
    for before, turn in zip([start, *emotions], scored):
        if turn["change"] is None:
            turn["change"] = turn["emotion"] - before
    need = raw.get("need")
    intention, kind = intention_of(raw["task"], need if isinstance(need, str) else "")
    group = raw.get("character") or raw.get("main_cha") or "other"
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
        "group": GROUPS.get(group, group) if isinstance(group, str) else "other",
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


def turns_of(history):
    """The policy's replies in a result's messages: [{"reply", "user" (the line after it, or None),
    "thought", "analysis", "change", "mark", "emotion"}], None where the file does not say it."""
    turns = []
    for message, after in zip(history, [*history[1:], {}]):
        if message["role"] != "assistant":
            continue
        ours = message.get("rlver") if isinstance(message.get("rlver"), dict) else {}
        turn = {"reply": message["content"], "user": after.get("content")}
        for key in ("thought", "analysis", "change", "mark", "emotion"):
            turn[key] = ours.get(key)
        if not is_mark(turn["mark"]):
            turn["mark"] = None
        if turn["emotion"] is None and "emotion-point" in after:  # SAGE's stands a line later
            turn["emotion"] = after["emotion-point"]
            turn["analysis"] = analysis_by_sage(after)
        turns.append(turn)
    return turns


def analysis_by_sage(message):
    """What the user felt about a reply, from the message that followed it in a SAGE file."""
    planning = message["planning"] if isinstance(message.get("planning"), dict) else {}
    sections = [(key, planning.get(key) or planning.get(key.lower())) for key in SAGE_SECTIONS]
    return "\n".join(f"{key}: {text}" for key, text in sections)


def world_of(target):
    """What a profile's `target` says, as columns of the tables."""
    target = target if isinstance(target, str) and target else "eq"
    return {"purpose": target, "world": "heart-to-heart" if target == "eq" else "chit-chat"}


def parts_of(rows):
    """What tables tell apart: who chats has no hidden need, and most files hold no chit-chat."""
    parts = ["kind", "intention", "group"]
    if any(row["purpose"] != "eq" for row in rows):
        return ["world", "purpose", *parts]
    return parts


def comparison_key(row):
    """What a score is measured with: only scores of the same compare."""
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
    """Who made a result, with all that tells it from another one of the same weights."""
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


# -------------------------------------------------------------------------------- logs of dialogues


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


def recorded_dialogues(path):
    """The dialogues of a log or of a result file, in the log's form, with the emotion that they
    started from."""
    with open(path, "rb") as file:
        first = file.readline()
    if b'"history"' not in first:
        for dialogue in read_dialogues(path):
            yield {**dialogue, "start": dialogue.get("start", INITIAL_EMOTION["training"])}
        return
    rows, problems = read_results(path)
    if problems:
        raise BadInput(problems[0])
    for row in rows:
        yield {
            **row,
            "profile_id": row["id"],
            "reward": row["final"] / 100,
            "first_line": row["raw"]["history"][0]["content"],
            "user": comparison_key(row),
            "task": row["raw"]["task"],
        }
