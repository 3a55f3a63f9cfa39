"""tools/judge.py - what does a judge, a language model, say of recorded dialogues?

    python -m tools.judge capabilities results/before.jsonl results/after.jsonl --judge openai:MODEL@URL
    python -m tools.judge coordinate results/before.jsonl results/after.jsonl --judge openai:MODEL@URL

    capabilities  of the assistant, from 1 to 5, for each dialogue (RLVER 3.3): empathic depth (ED),
                  core insight (CI), solution crafting (SC), dialogue guidance (DG) and style
                  adaptability (SA)
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

No score is quality: judge and user are both models. docs/measuring.md says what each number is not.
"""

from support import stats
from support.errors import BadInput

import asyncio
import sys
from collections import Counter, defaultdict
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
from tools.strategies import CODES, tag_files

# ----------------------------------------------------------------------------------------- questions


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


def analysis_of(turn):
    """What the user thought and felt about a turn's reply, {key: text}. None if the file does not
    hold it, or it was written by an earlier version."""
    found = turn["analysis"]
    try:
        if isinstance(found, dict):  # of a SAGE file, which has other names for two of the keys
            found = {**found, "target_completion": found["TargetCompletion"]}
            found["analysis"] = found["analyse"]
        else:
            found = read_analysis(found or "")
        return {key: found[key] for key in ("content", "target_completion", "activity", "analysis")}
    except (Unreadable, KeyError):
        return None


GRADES = ("F", "E", "D", "C", "B", "A")  # from strong disagreement to strong agreement


def questionnaire(grades, reversed_items, low, high):
    """[score on low..high of each item]. grades: a letter per item, in order. A, strongly agree, is
    `high` and F is `low`, in six even steps; for `reversed_items` (numbers from 1), on which a good
    friend gets an F, the other way round."""
    shares = [GRADES.index(grade) / 5 for grade in grades]
    return [
        low + (high - low) * (1 - share if i in reversed_items else share)
        for i, share in enumerate(shares, 1)
    ]


def statements(low, high, reversed_items, scales):
    """(schema, found) of a `questionnaire`; found(answer) -> {scale: its mean}. scales: {name: how
    many statements it has}, one after the other."""

    def found(answer):
        grades = answer["grades"].values()
        scores = questionnaire(grades, reversed_items, low, high)
        means, first = {}, 0
        for name, size in scales.items():
            means[name] = mean(scores[first : first + size])
            first += size
        return {**means, "overall": mean(scores)}

    grades = {str(i): GRADES for i in range(1, sum(scales.values()) + 1)}
    return {"thoughts": str, "code": str, "grades": grades}, found


CAPABILITIES = ("ED", "CI", "SC", "DG", "SA")
TOO_SHORT = ("DG", "SA")  # their score means nothing for a dialogue of fewer than three replies
CAPABILITIES_SCHEMA = {
    "reasons": dict.fromkeys(CAPABILITIES, str),
    "code": str,
    "scores": dict.fromkeys(CAPABILITIES, range(1, 6)),
}
NEEDS = ("attitude", "thoughts", "needs", "overall")
NEEDS_SCHEMA = {"reasons": str, "code": str, "scores": dict.fromkeys(NEEDS, range(11))}
BLRI_SCALES = {
    "empathic understanding": 4,
    "level of regard": 4,
    "congruence": 2,
    "unconditionality": 2,
}
UTTERANCE_SCALES = {"natural flow": 6, "attentiveness": 4, "depth of connection": 5}
# {name of the prompt: (what it is asked about, for `make_cases`: a dialogue, each line of the user,
# its record; schema, in which the scale stands; found(answer) -> {item: score})}
QUESTIONS = {
    "capabilities": (dialogue_slots, CAPABILITIES_SCHEMA, itemgetter("scores")),  # RLVER 3.3
    "needs": (line_slots, NEEDS_SCHEMA, itemgetter("scores")),  # RLVER 3.4
    "blri": (record_slots, *statements(0, 100, (12,), BLRI_SCALES)),  # SAGE 3
    "utterance": (dialogue_slots, *statements(1, 5, (4, 6), UTTERANCE_SCALES)),  # SAGE 3
}


# -------------------------------------------------------------------------------------------- scores


async def score_files(args, judge):
    """Ask one of QUESTIONS about each of `args.files`, and print the means. Returns what --json
    has: {"answers", "means" and "tables" of each file, see `score_file`, "paired" of two files,
    "correlations" of a questionnaire}."""
    name = args.question
    slots_of, schema, found = QUESTIONS[name]
    cases = []
    for path in args.files:
        cases += make_cases(path, name, slots_of)
    question = load_question(name, args.lang, cases[0].slots, schema, found=found)
    await judge.check(question)
    answers = await judge.ask_all(question, cases)
    means, tables = {}, {}
    reading = made_by(answers) + READING + NOTES.get(name, "")
    for path in args.files:
        of_file = [answer for answer in answers if answer["file"] == path]
        means[path], tables[path] = score_file(of_file)
        show_table(f"{name}, {path}", COLUMNS, tables[path], reading)
    result = {"answers": answers, "means": means, "tables": tables}
    if len(means) == 2:
        result["paired"] = paired_differences(*means.values())
        title = "the second FILE minus the first, paired over dialogues"
        show_table(title, COLUMNS[:4], result["paired"], made_by(answers))
    if name in ("blri", "utterance"):
        result["correlations"] = correlations_of(means)
        title = "correlation with the final emotion (Pearson's r)"
        show_table(title, COLUMNS[:4], result["correlations"], made_by(answers))
    return result


FINAL = "final emotion"  # its mean over the judged dialogues stands beside the scores
COLUMNS = ["value", "from", "to", "n", "missing"]
READING = (
    "value: mean over n dialogues; from, to: the 95 % interval; missing: share of answers that "
    "could not be read. "
)
NOTES = {
    "capabilities": "ED: empathic depth; CI: core insight; SC: solution crafting; DG: dialogue "
    "guidance; SA: style adaptability. DG and SA leave out dialogues of fewer than three replies",
    "blri": "BLRI reads the analysis that made the emotion: its high r is nearly built in",
}


def score_file(answers):
    """({item: {dialogue: its mean score}}, {item: COLUMNS}) of the answers about one file. An item's
    mean of a dialogue is over all questions about it and all repeats: it counts once. An answer is
    a row of `Judge.ask_all`: of it are read "id" and "part" (which question about which dialogue),
    "replies" and "final" (of the dialogue), and "found", {item: score} or None."""
    readable = [answer for answer in answers if answer["found"]]
    missing = 1 - len(readable) / len(answers)
    means, rows = {}, {}
    for item in [*readable[0]["found"], FINAL]:
        by_dialogue = defaultdict(list)
        for answer in readable:
            if answer["replies"] >= 3 or item not in TOO_SHORT:
                by_dialogue[answer["id"]].append(answer["found"].get(item, answer["final"]))
        means[item] = {dialogue: mean(scores) for dialogue, scores in by_dialogue.items()}
        values = list(means[item].values())
        _, low, high, n = stats.interval(np.mean, values)
        rows[item] = [mean(values), low, high, n, missing]
    return means, rows


def mean(values):
    """Their mean, None of no value."""
    return float(np.mean(values)) if values else None


def paired_differences(before, after):
    """{item: [mean, low, high, n]} of the second file's means less the first's, over the dialogues
    that are in both."""
    rows = {}
    for item, old in before.items():
        new = after[item]
        differences = [new[dialogue] - old[dialogue] for dialogue in old if dialogue in new]
        rows[item] = stats.interval(np.mean, differences)
    return rows


def correlations_of(means):
    """Pearson's r of the overall scores with the final emotion: {row: [r, low, high, n]}. means:
    {file: of `score_file`}. There are rows for each file, over its dialogues, and, of three files
    or more, one row over the files' means."""
    rows = {}
    pairs = []  # of each file [its mean score, its mean final emotion]
    for path, means_of in means.items():
        columns = [list(means_of[name].values()) for name in ("overall", FINAL)]
        rows[path] = stats.interval(stats.pearson, *columns)
        pairs.append([mean(column) for column in columns])
    if len(pairs) > 2:
        rows["over files"] = stats.interval(stats.pearson, *zip(*pairs))
    return rows


# ---------------------------------------------------------------------------------------- coordinate

REASONS = {"reasons": str, "code": str, "summary": str}
CHARACTER = {"code": str, "social_distance": str, "professional_role": str, "personality": str}
READING_OF_PLANE = (
    "x: structured (-1) to creative (1), y: solution (-1) to empathy (1), means over n answers; a "
    "place compares only with others of its call"
)


async def place_files(args, judge):
    """Ask for the reasons of success and failure of each file, of them for a character, and, in one
    prompt, for the places of all. Returns what --json has: {"placed": {file: [x, y, n]},
    "answers"}."""
    cases_of = {path: outcome_cases(path) for path in args.files}  # before anything is paid for
    tags, tagged = await tag_files(args, judge)
    reasons, shown = [], []  # shown: what the judge is shown of each file
    for number, path in enumerate(args.files, 1):
        answers = await ask(judge, "reasons", REASONS, cases_of[path])
        notes = [answer["found"] for answer in answers if answer["found"]]
        case = Case({"file": path}, {"reasons": as_json(notes)})
        (answer,) = await ask(judge, "character", CHARACTER, [case])
        shares = shares_in_words(tagged[path])
        shown.append(f"M{number}\n{as_json(answer['found'])}\n{shares}")
        reasons += answers

    schema = place_schema(len(shown))
    case = Case({"file": " ".join(args.files)}, {"models": "\n\n".join(shown)})
    answers = await ask(judge, "place", schema, [case], repeated=True)
    found = [answer["found"]["places"] for answer in answers if answer["found"]]
    rows = {}
    for name, path in zip(schema["places"], args.files):
        rows[path] = [mean([place[name][axis] / 100 for place in found]) for axis in "xy"]
        rows[path].append(len(found))
    show_table("coordinate", ["x", "y", "n"], rows, made_by(answers) + READING_OF_PLANE)
    return {"placed": rows, "answers": {"strategies": tags, "reasons": reasons, "place": answers}}


async def ask(judge, name, schema, cases, repeated=False):
    """The judge's answers to the question `name` about these cases."""
    question = load_question(name, judge.lang, cases[0].slots, schema, repeated=repeated)
    return await judge.ask_all(question, cases)


def outcome_cases(path):
    """The Cases of a file about the reasons: of success and of failure, of either kind of need, the
    first five dialogues (SAGE). Raises BadInput for none."""
    taken = Counter()

    def slots_of(dialogue):
        if 10 < dialogue.final < 100 or not dialogue.turns:
            return []
        outcome = "success" if dialogue.final >= 100 else "failure"
        taken[outcome, dialogue.kind] += 1
        whole = dialogue_slots(dialogue) if taken[outcome, dialogue.kind] <= 5 else []
        return [{**slots, "outcome": outcome} for slots in whole]

    return make_cases(path, "reasons", slots_of, ": no dialogue ends at 100, or at 10 and below")


def place_schema(files):
    """Of an answer with the places of so many files, in hundredths."""
    place = {"x": range(-100, 101), "y": range(-100, 101)}
    places = {f"M{number}": place for number in range(1, files + 1)}
    return {"comparison": str, "code": str, "places": places}


def shares_in_words(tagged):
    """How often each of the 24 strategies is used in tagged dialogues: "A-1 12 %, A-2 0 %, ..."."""
    used = []
    for codes, _ in sum(tagged, []):
        used += codes or ()
    n = max(1, len(used))
    return ", ".join(f"{code} {100 * used.count(code) / n:.0f} %" for code in CODES)


# ------------------------------------------------------------------------------------------ pictures


def draw(result, picture):
    """Write the mean of each capability of each file as a picture (RLVER 3.3), or the files' places
    (SAGE 4.2). result: of `score_files` or `place_files`."""
    figure = Figure()
    if "placed" in result:
        axis = figure.add_subplot(xlim=(-1, 1), ylim=(-1, 1))
        axis.set(xlabel="structured to creative", ylabel="solution to empathy")
        for path, (x, y, _) in result["placed"].items():
            axis.scatter(x, y, label=path)
    else:
        axis = figure.add_subplot(projection="polar")
        angles = np.linspace(0, 2 * np.pi, len(CAPABILITIES), endpoint=False)
        axis.set_xticks(angles, CAPABILITIES)
        for path, table in result["tables"].items():
            means = [table[item][0] for item in CAPABILITIES]
            axis.fill(angles, np.array(means, float), alpha=0.3, label=path)
        axis.set_ylim(1, 5)
    figure.legend(loc="upper left")
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
    if args.picture:
        draw(result, args.picture)
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
