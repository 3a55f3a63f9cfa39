"""tools/coordinate.py - is a policy structured or creative, turned to solutions or to feelings?
A judge places several policies in that plane (SAGE 4.2).

    python -m tools.coordinate results/before.jsonl results/after.jsonl --repeats 3

x goes from structured (-1) to creative (1), y from the solution (-1) to the feeling (1): the mean
over --repeats answers, and its spread. For each file the judge names the reasons for success and
failure in up to ten dialogues of either outcome, and describes the character of the policy. Then
one prompt shows it the characters of all files, with how often each strategy is used, and it places
them. Two more columns are counted, not judged: variety is 1 less SSRR, the repetition of
strategies; support is the share of strategies that turn to the feeling (groups B to E: empathy,
self-disclosure, comfort, affirmation) less that of suggestions and information (F and G).

Places of two calls do not compare: with another file in the prompt all places move.
"""

import asyncio
import sys
from statistics import fmean, stdev

from simulator import as_json
from tools.dialogues import (
    Case,
    are_of_toy,
    cases_of_files,
    dialogue_slots,
    make_cases,
    need_model,
)
from tools.judge import Judge, add_judge_flags, load_question, print_plan
from tools.scores import made_by
from tools.strategies import cases_of as reply_cases
from tools.strategies import strategies_question, tagged_dialogues
from tools.strategy_codes import CODES, strategies_of
from tools.tables import add_files, check_files, show_table, tool_parser, write_outputs

REASONS_SCHEMA = {"reasons": str, "code": str, "summary": str}
CHARACTER_SCHEMA = {
    "code": str,
    "social_distance": str,
    "professional_role": str,
    "personality": str,
}
READING = (
    "x: structured (-1) to creative (1), y: solution (-1) to empathy (1); a place compares only "
    "with others of its call. Counted, not judged: variety, 1 less the repetition of strategies "
    "(SSRR); support, the share of strategies that turn to the feeling (empathy, self-disclosure, "
    "comfort, affirmation) less that of suggestions and information"
)
COLUMNS = ["x", "spread", "y", "spread", "variety", "support"]
DIALOGUES_OF_A_KIND = 5  # whose reasons are asked for: of either outcome, of either kind of need


async def coordinate(args):
    """Ask for reasons, characters and places, and show the places. Returns the exit code."""
    check_files(args, least=2)
    need_model("judge", args)
    reasons = reasons_question(args.lang)
    # (question, its cases) of what is asked about dialogues; all else is asked about the answers
    asked_about = [(reasons, cases_of_files(args.files, reasons_cases))]
    if args.judge or not are_of_toy(args.files):  # else the toy's grammar tells the strategies
        strategies = strategies_question(args.lang)
        asked_about.append((strategies, cases_of_files(args.files, reply_cases)))
    judge = Judge(args)
    if args.plan:
        # one character for each file, and all are placed as often as --repeats says
        print_plan(judge, asked_about, more_calls=len(args.files) + args.repeats)
        return 0
    await judge.check(reasons)
    answers = {}
    for question, cases in asked_about:
        answers[question.name] = await judge.ask_all(question, cases)
    tagged = {path: tagged_dialogues(path, answers.get("strategies")) for path in args.files}
    descriptions = await describe_files(judge, args, answers["reasons"], tagged)
    answers["place"] = await ask_places(judge, args, descriptions)

    rows = place_rows(answers["place"], tagged)
    readable = [answer for answer in answers["place"] if answer["found"]]
    counted = f"{len(readable)} of {len(answers['place'])} answers read."
    show_table("coordinate", COLUMNS, rows, f"{made_by(answers['place'])}{counted} {READING}")
    result = {"placed": rows, "columns": COLUMNS, "answers": answers}
    write_outputs(args, "coordinate", result)
    return 0


async def describe_files(judge, args, reasons, tagged):
    """What the judge is shown of each file when it places them: a number, the character that it
    made of its own `reasons`, and how often each strategy is used. tagged: {file: its tagged
    dialogues}."""
    descriptions = []
    for number, path in enumerate(args.files, 1):
        character = await character_of(judge, path, reasons, args.lang)
        shares = shares_in_words(tagged[path])
        descriptions.append(f"M{number}\n{as_json(character)}\n{shares}")
    return descriptions


async def ask_places(judge, args, descriptions):
    """The judge's answers that place all files, one a repeat: `coordinates` under "found"."""
    question = place_question(args.lang, len(descriptions))
    case = Case({"file": " ".join(args.files)}, {"models": "\n\n".join(descriptions)})
    return await judge.ask_all(question, [case])


def place_rows(answers, tagged):
    """{file: [x, its spread, y, its spread, variety, support]}: the first four over the answers,
    the others counted in the tagged dialogues."""
    places = [answer["found"] for answer in answers if answer["found"]]
    rows = {}
    for number, (path, dialogues) in enumerate(tagged.items(), 1):
        x = [place[f"M{number}X"] for place in places]
        y = [place[f"M{number}Y"] for place in places]
        counts = strategies_of(dialogues)
        judged = [fmean(x), std(x), fmean(y), std(y)]
        rows[path] = [*judged, counts["variety"], counts["support"]]
    return rows


def std(values):
    """The standard deviation of the answers to one question, None of a single one."""
    return stdev(values) if len(values) > 1 else None


# ------------------------------------------------------------------------------------ the questions


def reasons_question(lang):
    """What in the assistant's way of replying led to the end of one dialogue, in words."""
    placeholders = ["dialogue", "outcome"]
    return load_question("reasons", lang, placeholders, REASONS_SCHEMA, repeated=False)


def reasons_cases(path):
    """Of a file the dialogues that ended in success or failure: of either outcome and of either
    kind of need the first five (SAGE)."""

    def slots_of(dialogue):
        if dialogue.final >= 100:
            outcome = "success"
        elif dialogue.final <= 10:
            outcome = "failure"
        else:
            return []
        # The prompt has no placeholder for the kind of need; here it is kept for the choice below.
        extra = {"outcome": outcome, "kind": dialogue.kind}
        return [slots | extra for slots in dialogue_slots(dialogue)]

    hint = ": no dialogue ends at 100, or at 10 and below"
    cases = make_cases(path, "reasons", slots_of, hint)
    groups = {}
    for case in cases:
        groups.setdefault((case.slots["outcome"], case.slots["kind"]), []).append(case)
    return [case for group in groups.values() for case in group[:DIALOGUES_OF_A_KIND]]


def character_question(lang):
    """What character the reasons for success and failure make, in words."""
    return load_question("character", lang, ["reasons"], CHARACTER_SCHEMA, repeated=False)


async def character_of(judge, path, reasons, lang):
    """The character of the assistant of one file, {key of CHARACTER_SCHEMA: text}, made of the
    readable `reasons`. Raises BadInput if the answer cannot be read."""
    notes = [row["found"] for row in reasons if row["file"] == path and row["found"]]
    case = Case({"file": path}, {"reasons": as_json(notes)})
    (answer,) = await judge.ask_all(character_question(lang), [case])
    return answer["found"]


def shares_in_words(tagged):
    """How often each of the 24 strategies is used in tagged dialogues: "A-1 12 %, A-2 0 %, ..."."""
    used = []
    for dialogue in tagged:
        for codes, _ in dialogue["replies"]:
            used += codes or ()
    n = max(1, len(used))
    return ", ".join(f"{code} {100 * used.count(code) / n:.0f} %" for code in CODES)


def place_question(lang, files):
    """The Question about the places of all files in one answer. files: how many there are."""
    place = {"x": range(-100, 101), "y": range(-100, 101)}
    places = {f"M{number}": place for number in range(1, files + 1)}
    schema = {"comparison": str, "code": str, "places": places}
    return load_question("place", lang, ["models"], schema, found=coordinates)


def coordinates(answer):
    """{"M1X": x of the first file, from -1 to 1, "M1Y": its y, "M2X": ...} of an answer, which has
    whole hundredths."""
    found = {}
    for name, place in answer["places"].items():
        found[f"{name}X"] = place["x"] / 100
        found[f"{name}Y"] = place["y"] / 100
    return found


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("coordinate", __doc__)
    add_files(parser)
    add_judge_flags(parser, repeats=3)
    return parser.run(lambda args: asyncio.run(coordinate(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
