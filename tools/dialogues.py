"""tools/dialogues.py - recorded dialogues as the tools see them, and what a judge is asked about
them.

`load_dialogues` reads a result file or a run's dialogues.jsonl, and leaves out all that a judge
must not see: thoughts, and replies that were malformed and so were never sent. `make_cases` makes
of each dialogue the values that stand in a prompt's placeholders.
"""

from support.errors import BadInput
from support.files import read_json
from support.results import intention_of, recorded_dialogues
from support.rundir import profile_files
from support.settings import split_name

import contextlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import simulator
from simulator import Unreadable, as_json, read_analysis
from tools.replay import people_of

# -------------------------------------------------------------------------------- reading the files


@dataclass(frozen=True)
class Dialogue:
    """One recorded dialogue, without what a judge must not see."""

    id: str  # names the dialogue within its file
    profile_id: str  # names its user; a log has many dialogues with one user
    first_line: str  # the user's
    # [{"reply" (without its thought), "user" (the line after it), "analysis", "change",
    # "emotion"}]; the last three are None for a reply that got no emotion
    turns: list
    start: int  # the emotion before the first reply
    final: int  # the score: the emotion at the end, or 0 if the dialogue ended malformed
    task: str  # the hidden need, in words
    intention: str  # the same as one of support/results.py, INTENTIONS
    kind: str  # of that intention: rational, emotional or other
    played_by: str  # the model of the simulated user
    policy: str | None  # as a result file names it
    step: int | None  # of training; None in a result file
    split: str  # "train" or "heldout" in a run's log, "" in a result file
    profile: simulator.Profile | None  # of the user; None where only the result file has the person
    raw: dict | None  # the line of a result file as it stands there, with the person's fields


@cache
def load_dialogues(path):
    """The Dialogues of a file, in its order. Raises BadInput."""
    config = read_json(Path(path).parent / "config.json")
    files = profile_files(Path(path).parent, config.get("profiles"))
    people = {profile.id: profile for profile in people_of(files)}
    dialogues = []
    for number, recorded in enumerate(recorded_dialogues(path), 1):
        profile = people.get(recorded["profile_id"])
        if profile is None and "task" not in recorded:  # a line of a log, which names its user only
            name = recorded["profile_id"]
            raise BadInput(f"{path}: user {name!r} is not among the run's profiles")
        played_by = simulator_name(recorded, config)
        dialogues.append(make_dialogue(recorded, number, profile, played_by))
    if not any(dialogue.turns for dialogue in dialogues):
        raise BadInput(f"{path}: no dialogue in it has a reply")
    return dialogues


def make_dialogue(recorded, number, profile, played_by):
    """The Dialogue of one of `recorded_dialogues`, which stands in line `number` of its file. A
    result file says what its user needs; for a log the `profile` does."""
    if "task" in recorded:
        task, intention, kind = recorded["task"], recorded["intention"], recorded["kind"]
    else:
        task = profile.task
        intention, kind = intention_of(profile.task, profile.need)
    return Dialogue(
        id=recorded.get("id", f"{recorded['profile_id']}, line {number}"),
        profile_id=recorded["profile_id"],
        first_line=recorded["first_line"],
        turns=visible_turns(recorded),
        start=recorded["start"],
        final=round(100 * recorded["reward"]),
        task=task,
        intention=intention,
        kind=kind,
        played_by=played_by,
        policy=recorded.get("made_by", {}).get("policy"),
        step=recorded.get("step"),
        split=recorded.get("split", ""),
        profile=profile,
        raw=recorded.get("raw"),
    )


def visible_turns(recorded):
    """The turns of a recorded dialogue whose reply was sent, the reply without its thought."""
    turns = []
    for turn in recorded["turns"]:
        if turn["emotion"] is None and recorded.get("ended") == "malformed":
            continue
        after_thought = turn["reply"].rpartition("</think>")[2]
        turns.append({**turn, "reply": after_thought.partition("<think>")[0].strip()})
    return turns


# What an analysis holds: {our key: SAGE's}.
ANALYSIS_KEYS = {
    "content": "content",
    "target_completion": "TargetCompletion",
    "activity": "activity",
    "analysis": "analyse",
}


def analysis_of(turn):
    """What the user thought and felt about a turn's reply, {key of ANALYSIS_KEYS: text}. None if
    the file does not hold it, or it was written by an earlier version."""
    analysis = turn["analysis"]
    with contextlib.suppress(Unreadable, KeyError):
        if isinstance(analysis, dict):  # of a SAGE file
            return {key: analysis[name] for key, name in ANALYSIS_KEYS.items()}
        answer = read_analysis(analysis or "")
        return {key: answer[key] for key in ANALYSIS_KEYS}
    return None


def simulator_name(recorded, config):
    """The model that played the user: as a result file says it, or the log's config.json."""
    name = recorded.get("made_by", {}).get("simulator") or recorded.get("simulator")
    kind, model, _ = split_name(name or config.get("simulator", "?"))
    return model or kind


def messages_of(dialogue, turns=None):
    """[{"speaker", "text"}] of a Dialogue, or of its first `turns` turns. It ends with the line
    that the user said after the last of them, if there is one."""
    messages = [("user", dialogue.first_line)]
    for turn in dialogue.turns[:turns]:
        messages.append(("assistant", turn["reply"]))
        messages.append(("user", turn["user"]))
    return [{"speaker": speaker, "text": text} for speaker, text in messages if text]


# -------------------------------------------------------------------------------------- whole files


def users_of(files):
    """The names of the simulators that played the users of these files."""
    return {load_dialogues(path)[0].played_by for path in files}


def are_of_toy(files):
    """Are all users of these files the toy's?"""
    return users_of(files) <= {"toy", "toy-weak"}


def need_model(flag, args):
    """Raise BadInput if the model that `flag` names (judge, simulator) is not given and cannot be a
    scripted one. A plan asks nobody, so it needs none."""
    if not (getattr(args, flag) or args.plan or are_of_toy(args.files)):
        raise BadInput(
            f"--{flag} is needed, openai:MODEL@URL or local:DIR: without it a script answers, "
            "which understands the toy's files only"
        )


# ---------------------------------------------------------------------- what a judge is asked about


class Case(NamedTuple):
    """One thing that a judge is asked about."""

    about: dict  # the file, the id of the dialogue, ...: this goes into the answer, for --json
    slots: dict  # what stands in the prompt's placeholders


def make_cases(path, name, slots_of, hint=""):
    """The Cases of the question `name` about a file. Raises BadInput if there is nothing to ask
    about; `hint` says why that may be.

    slots_of(dialogue) -> [what stands in the prompt's placeholders], one for each time that the
    dialogue is asked about: once if the question is about the whole, else for each reply or line.
    Which of them it is, counted from 0, is the "part" of a Case."""
    cases = []
    for dialogue in load_dialogues(path):
        for part, slots in enumerate(slots_of(dialogue)):
            about = {
                "file": path,
                "id": dialogue.id,
                "part": part,
                "replies": len(dialogue.turns),
                "final": dialogue.final,
            }
            cases.append(Case(about, slots))
    if not cases:
        raise BadInput(f"{path}: it holds nothing to ask the question {name!r} about{hint}")
    return cases


def cases_of_files(files, cases_of):
    """The Cases of all files. cases_of(path) -> those of one."""
    return [case for path in files for case in cases_of(path)]


def dialogue_slots(dialogue):
    """For `make_cases`: a dialogue as a whole. One whose first reply was malformed has no reply,
    and there is nothing to ask."""
    if not dialogue.turns:
        return []
    return [{"dialogue": as_json(messages_of(dialogue))}]


def reply_slots(dialogue):
    """For `make_cases`: each reply of a dialogue, with the dialogue before it."""
    slots = []
    for i, turn in enumerate(dialogue.turns):
        past = messages_of(dialogue, i)
        slots.append(
            {
                "dialogue": as_json(past),
                "reply": as_json(turn["reply"]),
                "line": as_json(past[-1]["text"]),
            }
        )
    return slots
