"""tools/dialogues.py - what the tools share: recorded dialogues as they see them, what a judge is
asked about them, and the flags, files and tables of a tool.

`load_dialogues` reads a result file or a run's dialogues.jsonl, and leaves out all that a judge
must not see: thoughts, and malformed replies, which were never sent. A tool makes its parser with
`tool_parser`, prints its numbers with `show_table`, and ends with `write_outputs`.

A *case* is one question to a judge (`make_cases`): what it is about, and the *slots*, the values of
the prompt's placeholders. The second reply of a dialogue is a case of the prompt "paraphrase":

    ({"file": "results/r.jsonl", "id": "p7", "replies": 8, "final": 48, "part": 1},
     {"dialogue": "[{...}]", "reply": "Go on.", "line": "Well."})
"""

from support.answers import as_json
from support.command_line import Parser, print_folded
from support.errors import BadInput
from support.files import read_json, refuse_overwriting, write_json
from support.results import same_users
from support.rundir import checkpoints

import argparse
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from people import Profile, load_profiles, toy_profiles
from tools.sage import read_any_dialogues

# -------------------------------------------------------------------------------- reading the files


class Dialogue(SimpleNamespace):
    """One recorded dialogue, without what a judge must not see:

    id          names the dialogue within its file
    profile_id  names its user; a log has many dialogues with one user
    first_line  the user's first line
    turns       [{"reply" (without its thought), "user" (the line after it), "analysis", "change",
                "emotion"}]; the last three are None for a reply that got no emotion
    start       the emotion before the first reply
    final       the score: the emotion at the end, or 0 if the dialogue ended malformed
    task        the hidden need, in words
    made_by     the settings: who played the user ("simulator", as the flag names it) ...; of a
                result file its own, else those of the config.json beside it
    profile     the user's profile; of a result file only what its line holds
    person      the same as a dict, to compare people by (support.results.same_users)
    """


@cache
def load_dialogues(path):
    """The Dialogues of a file, in its order. Raises BadInput."""
    out = Path(path).parent
    config = read_json(out / "config.json")
    # the state of a run says by which prompts the users of its log were played
    [state] = [read_json(newest / "state.json") for newest in checkpoints(out)[-1:]] or [{}]
    people = sum(map(load_profiles, config.get("profiles") or ()), [])
    # A toy run may have held out more than the usual 128 (--eval-size). User i is the same person
    # for any number of users, so 1000 users include those of any usual run.
    people = people or toy_profiles("heldout", 1000) + toy_profiles("train")
    profiles = {profile.id: profile for profile in people}
    dialogues = []
    for number, row in enumerate(read_any_dialogues(path), 1):
        if "raw" in row:  # a line of a result file, which has the person in it
            profile = person_in(row["raw"])
            row["id"] = profile.id
        else:
            profile = profiles.get(row["profile_id"])
            if profile is None:
                raise BadInput(f"{path}: user {row['profile_id']!r} is not among the profiles")
            row |= {"id": f"{profile.id}, line {number}", "task": profile.task}
            ours = {"character": profile.main_cha, "traits": profile.cha_group}
            row["person"] = vars(profile) | ours
            row["made_by"] = {"user_prompts": state.get("user_prompts")}
        row |= {"turns": visible_turns(row), "profile": profile}
        row["made_by"] = config | row.get("made_by", {})
        dialogues.append(Dialogue(**row))
    if not any(dialogue.turns for dialogue in dialogues):
        raise BadInput(f"{path}: no dialogue in it has a reply")
    return dialogues


def common_users(tool, files):
    """The ids of the users who are the same in both files (`support.results.same_users`). tool: its
    name, for messages. Raises BadInput."""
    return same_users([[*map(vars, load_dialogues(path))] for path in files], f"tools.{tool}")


def person_in(raw):
    """The Profile of a result's user, as far as a simulator needs it. raw: the line of the file."""
    texts = {name: raw.get(name) or "" for name in ("id", "player", "scene", "task", "need")}
    return Profile(**texts, main_cha="", cha_group=[], target=raw.get("target") or "eq")


def visible_turns(row):
    """The turns of a recorded dialogue whose reply was sent, the reply without its thought."""
    turns = []
    for turn in row["turns"]:
        *_, after_thought = turn["reply"].rpartition("</think>")
        reply, *_ = after_thought.partition("<think>")
        turns.append(turn | {"reply": reply.strip()})
    if row.get("ended") == "malformed":
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


def make_cases(paths, name, slots_of):
    """The cases of the question `name` in some files: [(about, slots)]. about: the file, the id of
    the dialogue and more, which goes into the answer, for --json; slots: {placeholder of the
    prompt: its value}. Raises BadInput if one of the files has no case.

    slots_of(dialogue) -> [slots], one for each question about the dialogue: one question if it is
    about the whole, else one for each reply or line. The number of the question, from 0, is the
    "part"."""
    cases = []
    for path in paths:
        before = len(cases)
        for dialogue in load_dialogues(path):
            for part, slots in enumerate(slots_of(dialogue)):
                about = {
                    "file": path,
                    "id": dialogue.id,
                    "replies": len(dialogue.turns),
                    "final": dialogue.final,
                    "part": part,
                }
                cases.append((about, slots))
        if len(cases) == before:
            raise BadInput(f"{path}: it holds nothing to ask the question {name!r} about")
    return cases


def dialogue_slots(dialogue):
    """For `make_cases`: a dialogue as a whole. If its first reply was malformed, it has no reply,
    and no question is asked."""
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


def check_picture(args, has_one, which):
    """Raise BadInput if --picture is given, and there is no picture to draw (`which` says what has
    one), or matplotlib cannot write it."""
    path = args.picture
    if not path:
        return
    if not has_one:
        raise BadInput(f"--picture: only {which} one")
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise BadInput(f"--picture: {error}; pip install matplotlib") from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in kinds:
        raise BadInput(f"--picture {path}: its name should end with one of {', '.join(kinds)}")


def need_judge(args):
    """Raise BadInput if --judge is missing and the scripted judge cannot be used, because users of
    these files are not the toy's."""
    users = {load_dialogues(path)[0].made_by.get("simulator") for path in args.files}
    if not (args.judge or users <= {"toy", "toy-weak"}):
        raise BadInput("--judge is needed: the script understands the toy's files only")


def write_outputs(args, tool, result):
    """Write `result` to the file of --json, if it is given."""
    if args.json:
        write_json(args.json, {"command": tool, **result})


# ------------------------------------------------------------------------------------------- tables


def show_table(title, columns, rows, reading):
    """Print a table. rows: {name: cells}; reading: how to read the table, printed below it."""
    name_width = max(map(len, rows), default=0) + 1
    print(f"\n{title}")
    for name, cells in {"": columns, **rows}.items():
        line = f"{name:{name_width}}"
        for value, column in zip(cells, columns):
            # at least 7 characters a column: a table of six fits into 80
            line += f"  {cell(value):>{max(7, len(column))}}"
        print(line)
    for line in reading.split("\n"):
        print_folded(line)


def cell(value):
    """The text of a value in a table."""
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def parts_by(column, rows):
    """{value of the column: the rows that have it}, in the order of the rows."""
    parts = defaultdict(list)
    for row in rows:
        parts[row[column]].append(row)
    return parts


def mean(values):
    """The mean of `values`, or None without values."""
    return float(np.mean(values)) if len(values) else None
