"""tools/dialogues.py - what the tools share: recorded dialogues as they see them, what a judge is
asked about them, and the flags, files and tables of a tool.

`load_dialogues` reads a result file or a run's dialogues.jsonl, and leaves out all that a judge
must not see: thoughts, and replies that were malformed and so were never sent. `make_cases` makes
of each dialogue the values that stand in a prompt's placeholders. A tool makes its parser with
`tool_parser`, prints its numbers with `show_table`, and ends with `write_outputs`.
"""

from support.answers import as_json
from support.errors import BadInput
from support.files import read_json, refuse_overwriting, write_json
from support.results import recorded_dialogues
from support.settings import Parser, fold

import argparse
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from simulator import load_profiles, toy_profiles

# -------------------------------------------------------------------------------- reading the files


class Dialogue(SimpleNamespace):
    """One recorded dialogue, without what a judge must not see:

    id          names the dialogue within its file
    profile_id  names its user; a log has many dialogues with one user
    first_line  the user's
    turns       [{"reply" (without its thought), "user" (the line after it), "analysis", "change",
                "emotion"}]; the last three are None for a reply that got no emotion
    start       the emotion before the first reply
    final       the score: the emotion at the end, or 0 if the dialogue ended malformed
    task        the hidden need, in words
    played_by   who played the user, as --simulator names it
    profile     of the user; None where only the result file has the person
    raw         the line of a result file as it stands there, with the person's fields; else None
    """


@cache
def load_dialogues(path):
    """The Dialogues of a file, in its order. Raises BadInput."""
    config = read_json(Path(path).parent / "config.json")
    people = sum(map(load_profiles, config.get("profiles") or ()), [])
    # A toy run may have held out more than the usual 128 (--eval-size). User i is the same person
    # however many are made, so making 1000 finds those of any usual run.
    people = people or toy_profiles("heldout", 1000) + toy_profiles("train")
    profiles = {profile.id: profile for profile in people}
    dialogues = []
    for number, row in enumerate(recorded_dialogues(path), 1):
        profile = profiles.get(row["profile_id"])
        if "raw" not in row:  # a line of a log, which names its user only
            if profile is None:
                raise BadInput(f"{path}: user {row['profile_id']!r} is not among the profiles")
            row |= {"id": f"{profile.id}, line {number}", "task": profile.task, "raw": None}
        dialogue = Dialogue(**row)
        dialogue.turns = visible_turns(row)
        dialogue.final = round(100 * row["reward"])
        dialogue.played_by = row.get("made_by", config).get("simulator")
        dialogue.profile = profile
        dialogues.append(dialogue)
    if not any(dialogue.turns for dialogue in dialogues):
        raise BadInput(f"{path}: no dialogue in it has a reply")
    return dialogues


def visible_turns(recorded):
    """The turns of a recorded dialogue whose reply was sent, the reply without its thought."""
    turns = []
    for turn in recorded["turns"]:
        after_thought = turn["reply"].rpartition("</think>")[2]
        turns.append({**turn, "reply": after_thought.partition("<think>")[0].strip()})
    if recorded.get("ended") == "malformed":
        turns.pop()
    return turns


def messages_of(dialogue, turns=None):
    """[{"speaker", "text"}] of a Dialogue, or of its first `turns` turns. It ends with the line
    that the user said after the last of them, if there is one."""
    messages = [("user", dialogue.first_line)]
    for turn in dialogue.turns[:turns]:
        messages += [("assistant", turn["reply"]), ("user", turn["user"])]
    return [{"speaker": speaker, "text": text} for speaker, text in messages if text]


# ---------------------------------------------------------------------- what a judge is asked about


def make_cases(path, name, slots_of):
    """What the question `name` is asked about in a file: [(about, slots)]. about: the file, the id
    of the dialogue, ..., which goes into the answer, for --json; slots: {placeholder of the prompt:
    what stands there}. Raises BadInput if there is nothing to ask about.

    slots_of(dialogue) -> [slots], one for each time that the dialogue is asked about: once if the
    question is about the whole, else for each reply or line. Which of them it is, counted from 0,
    is the "part"."""
    cases = []
    for dialogue in load_dialogues(path):
        about = {"file": path, "id": dialogue.id}
        about |= {"replies": len(dialogue.turns), "final": dialogue.final}
        for part, slots in enumerate(slots_of(dialogue)):
            cases.append(({**about, "part": part}, slots))
    if not cases:
        raise BadInput(f"{path}: it holds nothing to ask the question {name!r} about")
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
        reply, line = as_json(turn["reply"]), as_json(past[-1]["text"])
        slots.append({"dialogue": as_json(past), "reply": reply, "line": line})
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


def check_files(args, least=1, inputs=(), out=None):
    """Take each of `args.files` once, and refuse fewer than `least`. Refuse outputs (--json, and
    `out`, the other file that a tool writes) that would overwrite one of the files, one of the
    further `inputs`, or each other. Raises BadInput."""
    args.files = list(dict.fromkeys(args.files))
    refuse_overwriting({"--json": args.json, "output": out}, [*args.files, *inputs])
    if len(args.files) < least:
        raise BadInput("name a FILE: results of evaluate.py, or a run's log")


def need_judge(args):
    """Raise BadInput if no --judge is given and the scripted one cannot serve, because users of
    these files are not the toy's."""
    users = {load_dialogues(path)[0].played_by for path in args.files}
    if not (args.judge or users <= {"toy", "toy-weak"}):
        raise BadInput("--judge is needed: the script understands the toy's files only")


def write_outputs(args, tool, result):
    """What --json asks for. result: what goes into the file."""
    if args.json:
        write_json(args.json, {"command": tool, **result})


# ------------------------------------------------------------------------------------------- tables


def show_table(title, columns, rows, reading):
    """Print a table. rows: {name: cells}; reading: how to read the table, printed below it."""
    name_width = max([len(str(name)) for name in rows], default=0) + 1
    print(f"\n{title}")
    for name, cells in {"": columns, **rows}.items():
        line = f"{name!s:{name_width}}"
        for value, column in zip(cells, columns):
            # at least 7 characters a column: a table of six fits into 80
            line += f"  {cell(value):>{max(7, len(column))}}"
        print(line)
    for line in reading.split("\n"):
        print(fold(line))


def cell(value):
    """A value as a table has it."""
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
