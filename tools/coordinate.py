"""tools/coordinate.py - where a model places several policies in one plane: structured to creative,
solution to empathy (SAGE 4.2).

    python -m tools.coordinate results/before.jsonl results/after.jsonl --repeats 3

x goes from structured (-1) to creative (1), y from turned to the solution (-1) to turned to the
feeling (1): the mean over --repeats answers, and its spread. The judge finds reasons for success
and failure in up to ten dialogues of either outcome, makes a character of them, and is shown the
characters of all files, with how often each strategy is used, in one prompt. Beside it two counted
numbers, which are no judge's and so bear other names: variety, 1 - SSRR, and support, the share of
strategies of groups B to E less that of F and G.

A place does not compare with a place of another call: add a file, and the others move.
"""

from support.answers import Unreadable, peel
from support.strategies import CODES, strategies_of

import asyncio
import re
import sys

import numpy as np

from simulator import as_json
from tools.judge import (
    Case,
    Judge,
    Question,
    Tables,
    add_files,
    add_judge_flags,
    are_of_toy,
    check_files,
    dialogue_slots,
    load_question,
    load_template,
    made_by,
    make_cases,
    make_parser,
    need_model,
    print_plan,
    read_parts,
    read_words,
    write_outputs,
)
from tools.strategies import cases_of as reply_cases
from tools.strategies import strategies_question, tagged_dialogues

# Headers of the answers in words, as patterns.
REASONS_HEADERS = {"Reasons": "Reasons|原因", "Summary": "Summary|小结"}
CHARACTER_HEADERS = {
    "Social distance": "Social distance|社交距离",
    "Professional role": "Professional role|职业角色",
    "Personality": "Personality|人格",
}
READING = (
    "\nx: structured to creative, y: solution to empathy, -1 to 1; a place compares only with "
    "others of\nits call. Counted, not judged: variety is 1 - SSRR, support the share of B to E "
    "less that of F and G"
)
DIALOGUES_OF_A_KIND = 5  # whose reasons are asked for: of either outcome, of either kind of need


async def coordinate(args):
    """Ask for reasons, characters and places, and show the places. Returns the exit code."""
    check_files(args, least=2)
    need_model("judge", args)
    asked_about = [(reasons_question(args.lang), each_file(args, reasons_cases))]
    if args.judge or not are_of_toy(args.files):  # else the toy's grammar tells the strategies
        asked_about.append((strategies_question(args.lang), each_file(args, reply_cases)))
    judge = Judge(args)
    if args.plan:
        # one character for each file, and all are placed as often as --repeats says
        print_plan(judge, asked_about, more_calls=len(args.files) + args.repeats)
        return 0
    await judge.check(asked_about[0][0])
    answers = {}
    for question, cases in asked_about:
        answers[question.name] = await judge.ask_all(question, cases)

    models, counted = [], {}
    for number, path in enumerate(args.files, 1):
        tagged = tagged_dialogues(path, answers.get("strategies"))
        character = await character_of(judge, path, answers["reasons"], args.lang)
        models.append(f"M{number}\n{as_json(character)}\n{shares_in_words(tagged)}")
        counts = strategies_of(tagged)
        counted[path] = [counts["variety"], counts["support"]]
    spots = [f"M{number} {axis}" for number in range(1, len(models) + 1) for axis in "XY"]
    case = Case({"file": " ".join(args.files)}, {"models": "\n\n".join(models)})
    answers["place"] = await judge.ask_all(place_question(args.lang, spots), [case])

    columns = ["x", "spread", "y", "spread", "variety", "support"]
    points = [answer["found"] for answer in answers["place"] if answer["found"]]
    rows = {}
    for number, path in enumerate(args.files, 1):
        x = [point[f"M{number}X"] for point in points]
        y = [point[f"M{number}Y"] for point in points]
        rows[path] = [float(np.mean(x)), std(x), float(np.mean(y)), std(y), *counted[path]]
    read = f"{len(points)} of {len(answers['place'])} answers read."
    tables = Tables()
    tables.show("coordinate", columns, rows, f"{made_by(answers['place'])}{read}{READING}")
    result = {"placed": rows, "columns": columns, "answers": answers}
    write_outputs(args, "coordinate", result, tables)
    return 0


def each_file(args, cases_of):
    """The cases of all files. cases_of(path) -> those of one."""
    return [case for path in args.files for case in cases_of(path)]


def std(values):
    """The standard deviation of the answers to one question, None of a single one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


# ------------------------------------------------------------------------------------ the questions


def reasons_question(lang):
    """What in the assistant's way of replying led to the end of one dialogue, in words."""

    def read(text, mark):
        return read_words(text, REASONS_HEADERS, mark)

    return load_question("reasons", lang, ["dialogue", "outcome"], read, repeated=False)


def reasons_cases(path):
    """Of a file the dialogues that ended in success or failure: of either outcome and of either
    kind of need the first five (SAGE)."""

    def slots_of(dialogue):
        if dialogue["final"] >= 100:
            outcome = "success"
        elif dialogue["final"] <= 10:
            outcome = "failure"
        else:
            return []
        # The prompt has no placeholder for the kind of need; here it is kept for the choice below.
        extra = {"outcome": outcome, "kind": dialogue["kind"]}
        return [slots | extra for slots in dialogue_slots(dialogue)]

    hint = ": no dialogue ends at 100, or at 10 and below"
    cases = make_cases(path, "reasons", slots_of, hint)
    groups = {}
    for case in cases:
        groups.setdefault((case.slots["outcome"], case.slots["kind"]), []).append(case)
    return [case for group in groups.values() for case in group[:DIALOGUES_OF_A_KIND]]


def character_question(lang):
    """What character the reasons for success and failure make, in words."""

    def read(text, mark):
        return read_words(text, CHARACTER_HEADERS, mark)

    return load_question("character", lang, ["reasons"], read, repeated=False)


async def character_of(judge, path, reasons, lang):
    """The character of the assistant of one file, in words, made of the reasons that were found.
    Raises BadInput if the answer cannot be read."""
    texts = [
        answer["found"]["text"] for answer in reasons if answer["file"] == path and answer["found"]
    ]
    case = Case({"file": path}, {"reasons": as_json(texts)})
    (answer,) = await judge.ask_all(character_question(lang), [case])
    return answer["found"]["text"]


def shares_in_words(tagged):
    """How often each of the 24 strategies is used in tagged dialogues: "A-1 12 %, A-2 0 %, ..."."""
    used = [code for d in tagged for codes, _ in d["replies"] for code in codes or ()]
    return ", ".join(f"{code} {100 * used.count(code) / max(1, len(used)):.0f} %" for code in CODES)


def place_question(lang, spots):
    """The places of all files in one answer. spots: what is asked for, "M1 X", "M1 Y", "M2 X"."""
    template = load_template("place", lang, ["models", "form"])
    # The lines of the form become part of the template: they bear the mark, as all headers do.
    form = "\n".join(f"{spot} {{{{mark}}}}: [-1 to 1]" for spot in spots)
    headers = {spot.replace(" ", ""): spot for spot in spots}

    def read(text, mark):
        return read_parts(text, headers, mark, parse_place)

    return Question("place", template.replace("{{form}}", form), read)


def parse_place(line):
    """The decimal from -1 to 1 that stands alone on a line. Raises ValueError for all else."""
    place = re.fullmatch(r"([+-]?) ?(\d+(?:\.\d+)?|\.\d+)", peel(line))
    if place is None or float(place.group(2)) > 1:
        raise Unreadable("value", f"no decimal from -1 to 1 alone on its line: {line[:60]!r}")
    return float(place.group(1) + place.group(2))


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = make_parser("coordinate", __doc__)
    add_files(parser)
    add_judge_flags(parser, repeats=3)
    return parser.run(lambda args: asyncio.run(coordinate(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
