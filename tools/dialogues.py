"""tools/dialogues.py - what the tools share: recorded dialogues as they see them, what a judge is
asked about them, and the flags, files and tables of a tool.

`load_dialogues` reads a result file or a run's dialogues.jsonl, and leaves out all that a judge
must not see: thoughts, and replies that were malformed and so were never sent. `make_cases` makes
of each dialogue the values that stand in a prompt's placeholders. A tool makes its parser with
`tool_parser`, prints its numbers with `show_table`, and ends with `write_outputs`.
"""

from support.errors import BadInput
from support.files import read_json, refuse_overwriting, write_json
from support.results import intention_of, recorded_dialogues
from support.settings import Parser, fold

import argparse
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from simulator import Profile, as_json, load_profiles, toy_profiles

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
    played_by: str  # who played the user, as --simulator names it
    step: int | None  # of training; None in a result file
    split: str | None  # "train" or "heldout" in a run's log, None in a result file
    profile: Profile | None  # of the user; None where only the result file has the person
    raw: dict | None  # the line of a result file as it stands there, with the person's fields


# What is kept of a dialogue of `recorded_dialogues` as it is.
KEPT = "id profile_id first_line start task intention kind step split raw".split()


@cache
def load_dialogues(path):
    """The Dialogues of a file, in its order. Raises BadInput."""
    config = read_json(Path(path).parent / "config.json")
    people = {profile.id: profile for profile in people_of(config.get("profiles"))}
    dialogues = []
    for number, recorded in enumerate(recorded_dialogues(path), 1):
        profile = people.get(recorded["profile_id"])
        if "task" not in recorded:  # a line of a log, which names its user only
            if profile is None:
                name = recorded["profile_id"]
                raise BadInput(f"{path}: user {name!r} is not among the run's profiles")
            recorded["id"] = f"{profile.id}, line {number}"
            recorded["task"] = profile.task
            recorded["intention"], recorded["kind"] = intention_of(profile.task, profile.need)
        settings = {**config, **recorded.get("made_by", {})}  # a result file has its own
        dialogue = Dialogue(
            **{key: recorded.get(key) for key in KEPT},
            turns=visible_turns(recorded),
            final=round(100 * recorded["reward"]),
            played_by=settings.get("simulator", ""),
            profile=profile,
        )
        dialogues.append(dialogue)
    if not any(dialogue.turns for dialogue in dialogues):
        raise BadInput(f"{path}: no dialogue in it has a reply")
    return dialogues


def people_of(paths):
    """All profiles of the files `paths`. Without any file: all users of the toy that a recorded
    dialogue may be with."""
    people = [profile for path in paths or () for profile in load_profiles(path)]
    if people:
        return people
    # A run may have held out more than the usual 128 (--eval-size). User i is the same person
    # however many are made, so making 1000 finds those of any usual run.
    return toy_profiles("heldout", 1000) + toy_profiles("train")


def visible_turns(recorded):
    """The turns of a recorded dialogue whose reply was sent, the reply without its thought."""
    turns = []
    for turn in recorded["turns"]:
        if turn["emotion"] is None and recorded.get("ended") == "malformed":
            continue
        after_thought = turn["reply"].rpartition("</think>")[2]
        turns.append({**turn, "reply": after_thought.partition("<think>")[0].strip()})
    return turns


def messages_of(dialogue, turns=None):
    """[{"speaker", "text"}] of a Dialogue, or of its first `turns` turns. It ends with the line
    that the user said after the last of them, if there is one."""
    messages = [("user", dialogue.first_line)]
    for turn in dialogue.turns[:turns]:
        messages += [("assistant", turn["reply"]), ("user", turn["user"])]
    return [{"speaker": speaker, "text": text} for speaker, text in messages if text]


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
        about = {"file": path, "id": dialogue.id}
        about |= {"replies": len(dialogue.turns), "final": dialogue.final}
        for part, slots in enumerate(slots_of(dialogue)):
            cases.append(Case({**about, "part": part}, slots))
    if not cases:
        raise BadInput(f"{path}: it holds nothing to ask the question {name!r} about{hint}")
    return cases


def dialogue_slots(dialogue):
    """For `make_cases`: a dialogue as a whole. One whose first reply was malformed has no reply,
    and there is nothing to ask."""
    return [{"dialogue": as_json(messages_of(dialogue))}] if dialogue.turns else []


def reply_slots(dialogue):
    """For `make_cases`: each reply of a dialogue, with the dialogue before it."""
    slots = []
    for i, turn in enumerate(dialogue.turns):
        past = messages_of(dialogue, i)
        said = {"dialogue": past, "reply": turn["reply"], "line": past[-1]["text"]}
        slots.append({name: as_json(value) for name, value in said.items()})
    return slots


# ---------------------------------------------------------------------------------- flags and files


def tool_parser(tool, about):
    """A parser for `python -m tools.TOOL` with the flags of every tool. about: its docstring."""
    parser = Parser(
        prog=f"python -m tools.{tool}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the tables and all that they were made of to FILE"
    )
    return parser


def add_files(parser):
    """The files that a tool reads."""
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="a result file of evaluate.py or of SAGE, or a run's dialogues.jsonl",
    )


def check_files(args, least, inputs=(), out=None):
    """Take each of `args.files` once, and refuse fewer than `least`. Refuse outputs (--json, and
    `out`, the other file that a tool writes) that would overwrite one of the files, one of the
    further `inputs`, or each other. Raises BadInput."""
    args.files = list(dict.fromkeys(args.files))
    refuse_overwriting({"--json": args.json, "output": out}, [*args.files, *inputs])
    if len(args.files) < least:
        files = "one FILE" if least == 1 else f"{least} FILEs"
        raise BadInput(f"at least {files} must be named: results of evaluate.py, or a run's log")


def are_of_toy(files):
    """Are all users of these files the toy's?"""
    return {load_dialogues(path)[0].played_by for path in files} <= {"toy", "toy-weak"}


def need_model(flag, args):
    """Raise BadInput if the model that `flag` names (judge, simulator) is not given and cannot be a
    scripted one."""
    if not (getattr(args, flag) or are_of_toy(args.files)):
        raise BadInput(
            f"--{flag} is needed, openai:MODEL@URL or local:DIR: without it a script answers, "
            "which understands the toy's files only"
        )


def write_outputs(args, tool, result):
    """What --json asks for. result: what goes into the file."""
    if args.json:
        write_json(args.json, {"command": tool, **result})


# ------------------------------------------------------------------------------------------- tables

MIN_WIDTH = 7  # characters of a column: a table of six columns fits into 80


def show_table(title, columns, rows, reading):
    """Print a table. rows: {name: cells}; reading: how to read the table, printed below it."""
    name_width = max([len(str(name)) for name in rows], default=0) + 1
    print(f"\n{title}")
    for name, cells in {"": columns, **rows}.items():
        line = f"{name!s:{name_width}}"
        for value, column in zip(cells, columns):
            line += f"  {cell(value):>{max(MIN_WIDTH, len(column))}}"
        print(line)
    for line in reading.split("\n"):
        print(fold(line))


def cell(value):
    """A value as a table has it."""
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
