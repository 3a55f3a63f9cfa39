"""tools/judge.py - what does a judge, a language model, say of recorded dialogues?

    python -m tools.judge capabilities results/before.jsonl results/after.jsonl --judge openai:MODEL@URL
    python -m tools.judge coordinate results/before.jsonl results/after.jsonl --judge openai:MODEL@URL

    capabilities  five rubrics of the assistant, from 1 to 5, for each dialogue (RLVER 3.3)
    needs         how much of its attitude, thoughts and hidden need each line of the user shows,
                  from 0 to 10; the judge does not see the replies (RLVER 3.4)
    blri          Barrett-Lennard relationship inventory, from 0 to 100, filled in from the user's
                  record of its thoughts (SAGE 3)
    utterance     how good the replies are as utterances in a talk, from 1 to 5 (SAGE 3)
    coordinate    where policies stand, from structured (x = -1) to creative (1) and from solution
                  (y = -1) to empathy (1): all files in one prompt, three times (SAGE 4.2)

The tables have means over dialogues, of the final emotion too; of two files also the second less
the first, paired over dialogues; of blri and utterance also the correlation with the final emotion.
--picture draws the capabilities of the files, or their places.

No score is quality: judge and user are both models. docs/judging.md says what each number is not.
"""

from support import stats
from support.errors import BadInput

import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from operator import itemgetter

import numpy as np
from matplotlib.figure import Figure

from simulator import Unreadable, as_json, read_analysis
from tools.asking import Judge, add_judge_flags, load_question, made_by
from tools.dialogues import (
    Case,
    add_files,
    check_files,
    dialogue_slots,
    make_cases,
    need_model,
    show_table,
    tool_parser,
    write_outputs,
)
from tools.strategies import CODES, strategies_of, tag_files

# ----------------------------------------------------------------------------------------- questions


@dataclass(frozen=True)
class Scoring:
    """What a judge scores; the scale stands in the schema."""

    slots_of: Callable  # what it is asked about, for `make_cases`: the dialogue, its record, lines
    schema: dict  # of an answer
    found: Callable = itemgetter("scores")  # found(answer) -> {item: score}


def line_slots(dialogue):
    """For `make_cases`: each line that a user says after a reply, with what went on in it before."""
    slots = []
    for turn in dialogue.turns:
        thought = analysis_of(turn)
        if turn["user"] and thought:
            line = as_json(turn["user"])
            slots.append({"need": dialogue.task, "thought": as_json(thought), "line": line})
    return slots


def record_slots(dialogue):
    """For `make_cases`: the user's own record of each round of a dialogue, as SAGE has it."""
    thoughts = [analysis_of(turn) for turn in dialogue.turns]
    rounds = [[thought["activity"], thought["analysis"]] for thought in thoughts if thought]
    return [{"record": as_json(rounds)}] if rounds else []


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
    try:
        if isinstance(analysis, dict):  # of a SAGE file
            return {key: analysis[name] for key, name in ANALYSIS_KEYS.items()}
        answer = read_analysis(analysis or "")
        return {key: answer[key] for key in ANALYSIS_KEYS}
    except (Unreadable, KeyError):
        return None


GRADES = ("F", "E", "D", "C", "B", "A")  # from strong disagreement to strong agreement
UNREVERSED = "overall, unreversed"


def questionnaire(grades, reversed_items, low, high):
    """[score on low..high of each item]. grades: a letter per item, in order. A, strongly agree, is
    `high` and F is `low`, in six even steps; for `reversed_items` (numbers from 1), on which a good
    friend gets an F, the other way round."""
    shares = [GRADES.index(grade) / 5 for grade in grades]
    return [
        low + (high - low) * (1 - share if i in reversed_items else share)
        for i, share in enumerate(shares, 1)
    ]


def statements(slots_of, low, high, reversed_items, scales):
    """The Scoring of a `questionnaire`. scales: {name: (its first statement, its last)}; the last
    one has all.

    Under UNREVERSED stands the mean of all items as if none were reversed: SAGE words some items
    negatively, and does not say that it reverses them."""

    def means(answer):
        grades = answer["grades"].values()
        scores = questionnaire(grades, reversed_items, low, high)
        found = {}
        for name, (first, last) in scales.items():
            found[name] = float(np.mean(scores[first - 1 : last]))
        found[UNREVERSED] = float(np.mean(questionnaire(grades, (), low, high)))
        return found

    *_, (first, last) = scales.values()
    grades = {str(i): GRADES for i in range(first, last + 1)}
    return Scoring(slots_of, {"thoughts": str, "code": str, "grades": grades}, means)


# The five capabilities (RLVER E.3), by the names that they have in files.
CAPABILITIES = {
    "ED": "empathic depth",
    "CI": "core insight",
    "SC": "solution crafting",
    "DG": "dialogue guidance",
    "SA": "style adaptability",
}
TOO_SHORT = ("DG", "SA")  # their score means nothing for a dialogue of fewer than three replies

QUESTIONS = {  # by the names of their prompts
    "capabilities": Scoring(
        dialogue_slots,
        {
            "reasons": dict.fromkeys(CAPABILITIES, str),
            "code": str,
            "scores": dict.fromkeys(CAPABILITIES, range(1, 6)),
        },
    ),
    "needs": Scoring(
        line_slots,
        {
            "reasons": str,
            "code": str,
            "scores": dict.fromkeys(("attitude", "thoughts", "needs", "overall"), range(11)),
        },
    ),
    "blri": statements(
        record_slots,
        low=0,
        high=100,
        reversed_items=(12,),
        scales={
            "empathic understanding": (1, 4),
            "level of regard": (5, 8),
            "congruence": (9, 10),
            "unconditionality": (11, 12),
            "overall": (1, 12),
        },
    ),
    "utterance": statements(
        dialogue_slots,
        low=1,
        high=5,
        reversed_items=(4, 6),
        scales={
            "natural flow": (1, 6),
            "attentiveness": (7, 10),
            "depth of connection": (11, 15),
            "overall": (1, 15),
        },
    ),
}


# -------------------------------------------------------------------------------------------- scores

COLUMNS = ["mean", "stderr", "spread", "missing", "n", "short"]
READING = (
    "mean: over dialogues; stderr: its standard error; spread: standard deviation over repeats; "
    "missing: share of answers that could not be read; n: dialogues; short: dialogues left out, "
    "of fewer than three replies"
)


async def score_files(args, judge):
    """Ask one of QUESTIONS about each of `args.files`, and print the means. Returns what --json
    has: {"answers", "tables": {file: {item: of `score_item`}}, "paired" of two files,
    "correlations" of a questionnaire}."""
    scoring = QUESTIONS[args.question]
    cases = []
    for path in args.files:
        cases += make_cases(path, args.question, scoring.slots_of)
    question = load_question(
        args.question, args.lang, cases[0].slots, scoring.schema, found=scoring.found
    )
    await judge.check(question)
    answers = await judge.ask_all(question, cases)
    tables = {}
    for path in args.files:
        tables[path] = score_table([answer for answer in answers if answer["file"] == path])
        rows = {}
        for item, score in tables[path].items():
            rows[row_name(item)] = [score[column] for column in COLUMNS]
        show_table(f"{question.name}, {path}", COLUMNS, rows, made_by(answers) + READING)
    result = {"answers": answers, "tables": tables}
    if len(tables) == 2:
        result["paired"] = paired_differences(*tables.values())
        show_intervals("the second FILE minus the first, paired over dialogues", result["paired"])
    if UNREVERSED in tables[path]:
        result["correlations"] = correlations_of(tables)
        show_intervals("Pearson's r with the final emotion", result["correlations"])
    if args.picture:
        draw_radar(args.picture, tables)
    return result


def row_name(item):
    """How an item is called on the terminal."""
    return f"{item}, {CAPABILITIES[item]}" if item in CAPABILITIES else item


def show_intervals(title, rows):
    """Print {row: [value, low, high, n]}."""
    rows = {row_name(item): cells for item, cells in rows.items()}
    show_table(title, ["value", "from", "to", "n"], rows, "from, to: the 95 % interval over n")


def score_table(answers):
    """{item: of `score_item`} of the answers about one file, and of the final emotion. An answer is
    a row of `Judge.ask_all`: of it are read "id" and "part" (which question about which dialogue),
    "replies" and "final" (of the dialogue), and "found", {item: score} or None."""
    readable = [answer for answer in answers if answer["found"]]
    missing = 1 - len(readable) / len(answers)
    table = {}
    for item in [*readable[0]["found"], "final emotion"]:
        least = 3 if item in TOO_SHORT else 0  # replies
        scores = defaultdict(list)  # {(dialogue, part): [score, one a repeat]}
        for answer in readable:
            if answer["replies"] >= least:
                score = answer["found"].get(item, answer["final"])
                scores[answer["id"], answer["part"]].append(score)
        short = {answer["id"] for answer in answers if answer["replies"] < least}
        table[item] = {**score_item(scores), "missing": missing, "short": len(short)}
    return table


def score_item(scores):
    """What the dialogues of a file got for one item. scores: {(dialogue, part): [score, one a
    repeat]}. Returns

    {"mean": over dialogues, None if none is left; "stderr": its standard error; "spread": standard
    deviation over the repeats of a question, averaged; "n": dialogues; "means": {dialogue: its mean
    over all questions about it and all repeats, so that it counts once}}"""
    by_dialogue = defaultdict(list)
    for (dialogue, _), repeats in scores.items():
        by_dialogue[dialogue] += repeats
    means = {dialogue: float(np.mean(values)) for dialogue, values in by_dialogue.items()}
    spreads = [std(repeats) for repeats in scores.values() if len(repeats) > 1]
    values = list(means.values())
    return {
        "mean": mean(values),
        "stderr": std(values) / len(values) ** 0.5 if len(values) > 1 else None,
        "spread": mean(spreads),
        "n": len(values),
        "means": means,
    }


def mean(values):
    """Their mean, None of no value."""
    return float(np.mean(values)) if values else None


def std(values):
    """Their standard deviation, None of a single one."""
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def paired_differences(before, after):
    """{item: [mean, low, high, n]} of the second `score_table` less the first, over the dialogues
    that are in both."""
    rows = {}
    for item in before:
        old, new = before[item]["means"], after[item]["means"]
        differences = [new[dialogue] - old[dialogue] for dialogue in old if dialogue in new]
        rows[item] = stats.interval(np.mean, differences)
    return rows


def correlations_of(tables):
    """Pearson's r of the overall scores with the final emotion: {row: [r, low, high, n]}. tables:
    {file: its `score_table`}. There are rows for each file, over its dialogues, and, of three files
    or more, rows over the files' means."""
    rows = {}
    for item in ("overall", UNREVERSED):
        for path, table in tables.items():
            columns = [table[name]["means"].values() for name in (item, "final emotion")]
            rows[f"{item}, {path}"] = stats.interval(stats.pearson, *map(list, columns))
        if len(tables) > 2:
            pairs = [
                (table[item]["mean"], table["final emotion"]["mean"]) for table in tables.values()
            ]
            rows[f"{item}, over files"] = stats.interval(stats.pearson, *zip(*pairs))
    return rows


# ---------------------------------------------------------------------------------------- coordinate

REASONS = {"reasons": str, "code": str, "summary": str}
CHARACTER = {"code": str, "social_distance": str, "professional_role": str, "personality": str}
PLANE = ["x", "spread", "y", "spread", "variety", "support"]
READING_OF_PLANE = (
    "x: structured (-1) to creative (1), y: solution (-1) to empathy (1); a place compares only "
    "with others of its call. Counted, not judged: variety, 1 less the repetition of strategies "
    "(SSRR); support, the share of strategies that turn to the feeling (empathy, self-disclosure, "
    "comfort, affirmation) less that of suggestions and information"
)


async def place_files(args, judge):
    """Ask for the reasons of success and failure of each file, of them for a character, and, in one
    prompt, for the places of all. Returns what --json has: {"placed": {file: PLANE}, "answers"}."""
    tags, tagged = await tag_files(args, judge)

    async def ask(name, schema, cases, repeated=False):
        question = load_question(name, args.lang, cases[0].slots, schema, repeated=repeated)
        return await judge.ask_all(question, cases)

    cases = []
    for path in args.files:
        cases += outcome_cases(path)
    reasons = await ask("reasons", REASONS, cases)

    cases = []
    for path in args.files:
        notes = [row["found"] for row in reasons if row["file"] == path and row["found"]]
        cases.append(Case({"file": path}, {"reasons": as_json(notes)}))
    characters = await ask("character", CHARACTER, cases)

    shown = {}  # {"M1" for the first file: what the judge is shown of it}
    for number, row in enumerate(characters, 1):
        shares = shares_in_words(tagged[row["file"]])
        shown[f"M{number}"] = f"{as_json(row['found'])}\n{shares}"
    models = "\n\n".join(f"{name}\n{text}" for name, text in shown.items())
    case = Case({"file": " ".join(args.files)}, {"models": models})
    answers = await ask("place", place_schema(shown), [case], repeated=True)

    places = [answer["found"]["places"] for answer in answers if answer["found"]]
    rows = {}
    for name, path in zip(shown, args.files):
        x = [place[name]["x"] / 100 for place in places]
        y = [place[name]["y"] / 100 for place in places]
        counts = strategies_of(tagged[path])
        rows[path] = [mean(x), std(x), mean(y), std(y), counts["variety"], counts["support"]]
    counted = f"{len(places)} of {len(answers)} answers read. "
    show_table("coordinate", PLANE, rows, made_by(answers) + counted + READING_OF_PLANE)
    if args.picture:
        draw_plane(args.picture, rows)
    return {"placed": rows, "answers": {"strategies": tags, "reasons": reasons, "place": answers}}


def outcome_cases(path):
    """The Cases of a file about the reasons: of success and of failure, of either kind of need, the
    first five dialogues (SAGE). Raises BadInput for none."""
    taken = Counter()

    def slots_of(dialogue):
        if 10 < dialogue.final < 100 or not dialogue.turns:
            return []
        outcome = "success" if dialogue.final >= 100 else "failure"
        taken[outcome, dialogue.kind] += 1
        if taken[outcome, dialogue.kind] > 5:
            return []
        return [{**slots, "outcome": outcome} for slots in dialogue_slots(dialogue)]

    return make_cases(path, "reasons", slots_of, ": no dialogue ends at 100, or at 10 and below")


def shares_in_words(tagged):
    """How often each of the 24 strategies is used in tagged dialogues: "A-1 12 %, A-2 0 %, ..."."""
    used = []
    for dialogue in tagged:
        for codes, _ in dialogue["replies"]:
            used += codes or ()
    n = max(1, len(used))
    return ", ".join(f"{code} {100 * used.count(code) / n:.0f} %" for code in CODES)


def place_schema(names):
    """Of an answer that places all files, called `names`, in whole hundredths."""
    place = {"x": range(-100, 101), "y": range(-100, 101)}
    return {"comparison": str, "code": str, "places": dict.fromkeys(names, place)}


# ------------------------------------------------------------------------------------------ pictures


def draw_radar(picture, tables):
    """Write the mean of each capability of each file as a picture (RLVER 3.3)."""
    angles = np.linspace(0, 2 * np.pi, len(CAPABILITIES), endpoint=False)
    figure = Figure()
    axis = figure.add_subplot(projection="polar")
    for path, table in tables.items():
        means = [table[item]["mean"] for item in CAPABILITIES]
        axis.fill(angles, np.array(means, float), alpha=0.3, label=path)
    axis.set_xticks(angles, CAPABILITIES.values())
    axis.set_ylim(1, 5)
    axis.legend()
    figure.savefig(picture)


def draw_plane(picture, rows):
    """Write the places of the files as a picture. rows: of `place_files`."""
    figure = Figure()
    axis = figure.add_subplot(xlim=(-1, 1), ylim=(-1, 1))
    axis.set(xlabel="structured to creative", ylabel="solution to empathy")
    for path, (x, _, y, *_) in rows.items():
        axis.scatter(x, y, label=path)
    axis.legend()
    figure.savefig(picture)


# ---------------------------------------------------------------------------------------------- main


async def ask_question(args):
    """Ask what `args` say, show it and write it. Returns the exit code."""
    is_coordinate = args.question == "coordinate"
    check_files(args, least=2 if is_coordinate else 1, out=args.picture)
    if args.picture and args.question not in ("capabilities", "coordinate"):
        raise BadInput("--picture: only capabilities and coordinate have one")
    need_model("judge", args)
    args.repeats = args.repeats or (3 if is_coordinate else 1)
    work = place_files if is_coordinate else score_files
    result = await work(args, Judge(args))
    write_outputs(args, f"judge {args.question}", result)
    return 0


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("judge", __doc__)
    parser.add_argument("question", choices=[*QUESTIONS, "coordinate"], help="see above")
    add_files(parser)
    add_judge_flags(parser, repeats=None)
    parser.add_argument("--picture", metavar="FILE", help="draw the means, or the places")
    return parser.run(lambda args: asyncio.run(ask_question(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
