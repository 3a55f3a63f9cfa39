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
    coordinate    where a policy stands, from structured (x = -1) to creative (1) and from solution
                  (y = -1) to empathy (1), for each dialogue (after SAGE 4.2)

The tables have means over dialogues, of the final emotion too; of two files also the second less
the first, paired over dialogues; of blri and utterance also the correlation with the final emotion.
(BLRI reads the analysis that made the emotion: its high r is nearly built in.) DG and SA leave out
dialogues of fewer than three replies. --picture draws the capabilities of the files, or their
places.

No score is quality: judge and user are both models. docs/measuring.md says what each number is not.
"""

from support import stats
from support.errors import BadInput
from support.settings import positive

import contextlib
import sys
from collections import defaultdict
from operator import itemgetter

import numpy as np
from matplotlib.figure import Figure

from simulator import Unreadable, as_json, read_analysis
from tools.asking import Question, add_judge_flags, ask_files, made_by
from tools.dialogues import (
    add_files,
    check_files,
    dialogue_slots,
    need_model,
    show_table,
    tool_parser,
    write_outputs,
)

# ----------------------------------------------------------------------------------------- questions


def line_slots(dialogue):
    """For `make_cases`: each line that a user says after a reply, with what went on in it before."""
    slots = []
    for turn, thought in thoughts_of(dialogue):
        if turn["user"]:
            line = as_json(turn["user"])
            slots.append({"need": dialogue.task, "thought": as_json(thought), "line": line})
    return slots


def record_slots(dialogue):
    """For `make_cases`: the user's own record of each round of a dialogue, as SAGE has it."""
    rounds = [[thought["activity"], thought["analysis"]] for _, thought in thoughts_of(dialogue)]
    return [{"record": as_json(rounds)}] if rounds else []


THOUGHT = ("content", "target_completion", "activity", "analysis")
THOUGHT_OF_SAGE = ("content", "TargetCompletion", "activity", "analyse")


def thoughts_of(dialogue):
    """[(turn, {key: text})]: what the user thought and felt about each reply. Turns for which the
    file does not hold it, or which an earlier version wrote, are left out."""
    thoughts = []
    for turn in dialogue.turns:
        found, keys = turn["analysis"], THOUGHT_OF_SAGE
        with contextlib.suppress(Unreadable, KeyError):
            if not isinstance(found, dict):
                found, keys = read_analysis(found or ""), THOUGHT
            thoughts.append((turn, {key: found[name] for key, name in zip(THOUGHT, keys)}))
    return thoughts


GRADES = ("F", "E", "D", "C", "B", "A")  # from strong disagreement to strong agreement


def statements(low, high, reversed_items, scales):
    """(schema, found) of a questionnaire; found(answer) -> {scale: the mean score of its
    statements}. A, strongly agree, is `high` and F is `low`, in six even steps; for
    `reversed_items` (numbers from 0), on which a good friend gets an F, the other way round.
    scales: {name: how many statements it has}, one after the other."""
    ends = np.cumsum(list(scales.values()))

    def found(answer):
        shares = np.array([GRADES.index(grade) / 5 for grade in answer["grades"].values()])
        shares[reversed_items] = 1 - shares[reversed_items]
        scores = low + (high - low) * shares
        means = {name: mean(part) for name, part in zip(scales, np.split(scores, ends))}
        return {**means, "overall": mean(scores)}

    grades = {str(i + 1): GRADES for i in range(ends[-1])}
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
CHARACTER = ("reasons", "social_distance", "professional_role", "personality")
PLACE_SCHEMA = {
    **dict.fromkeys(CHARACTER, str),
    "code": str,
    "place": dict.fromkeys("xy", range(-100, 101)),  # in hundredths
}


def place_of(answer):
    """{axis: where the policy stands on it, from -1 to 1}."""
    return {axis: value / 100 for axis, value in answer["place"].items()}


# {name of the prompt: (what it is asked about, for `make_cases`: a dialogue, each line of the user,
# its record; schema, in which the scale stands; found(answer) -> {item: score})}
QUESTIONS = {
    "capabilities": (dialogue_slots, CAPABILITIES_SCHEMA, itemgetter("scores")),  # RLVER 3.3
    "needs": (line_slots, NEEDS_SCHEMA, itemgetter("scores")),  # RLVER 3.4
    "blri": (record_slots, *statements(0, 100, [11], BLRI_SCALES)),  # SAGE 3
    "utterance": (dialogue_slots, *statements(1, 5, [3, 5], UTTERANCE_SCALES)),  # SAGE 3
    "coordinate": (dialogue_slots, PLACE_SCHEMA, place_of),  # SAGE 4.2
}


# -------------------------------------------------------------------------------------------- scores


def judge_files(args):
    """Ask one of QUESTIONS about each of `args.files`; print, write and draw the means. Returns the
    exit code. --json gets {"answers", "means" and "tables" of each file, see `score_file`, "paired"
    of two files}."""
    name = args.question
    check_files(args, out=args.picture)
    if args.picture and name not in ("capabilities", "coordinate"):
        raise BadInput("--picture: only capabilities and coordinate have one")
    need_model("judge", args)
    slots_of, schema, found = QUESTIONS[name]
    answers = ask_files(args, Question(name, schema, found, args.repeats), slots_of)
    means, tables = {}, {}
    for path in args.files:
        means[path], tables[path] = score_file([row for row in answers if row["file"] == path])
        if "grades" in schema:
            tables[path]["correlation"] = correlation_of(means[path])
        show_table(f"{name}, {path}", COLUMNS, tables[path], made_by(answers) + READING)
    result = {"answers": answers, "means": means, "tables": tables}
    if len(means) == 2:
        result["paired"] = paired_differences(*means.values())
        title = "the second FILE minus the first, paired over dialogues"
        show_table(title, COLUMNS[:4], result["paired"], made_by(answers))
    write_outputs(args, f"judge {name}", result)
    if args.picture:
        draw(name, tables, args.picture)
    return 0


FINAL = "final emotion"  # its mean over the judged dialogues stands beside the scores
COLUMNS = ["value", "from", "to", "n", "missing"]
READING = (
    "value: mean over n dialogues; from, to: 95 % interval; missing: share of unreadable answers; "
    "correlation: of overall score and final emotion (Pearson's r)"
)


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
        rows[item] = [mean(values), *stats.interval(np.mean, values)[1:], missing]
    return means, rows


def mean(values):
    """Their mean, None of no value."""
    return float(np.mean(values)) if len(values) else None


def paired_differences(before, after):
    """{item: [mean, low, high, n]} of the second file's means less the first's, over the dialogues
    that are in both."""
    rows = {}
    for item, old in before.items():
        new = after[item]
        differences = [new[dialogue] - old[dialogue] for dialogue in old if dialogue in new]
        rows[item] = stats.interval(np.mean, differences)
    return rows


def correlation_of(means):
    """Pearson's r of the overall scores of dialogues with their final emotions: [r, low, high, n].
    means: of `score_file`."""
    columns = [list(means[item].values()) for item in ("overall", FINAL)]
    return stats.interval(stats.pearson, *columns)


# ------------------------------------------------------------------------------------------ pictures


def draw(question, tables, picture):
    """Write the mean capabilities of each file as a picture (RLVER 3.3), or the files' places (SAGE
    4.2). tables: {file: of `score_file`}."""
    figure = Figure()
    means = {path: [row[0] for row in table.values()] for path, table in tables.items()}
    if question == "coordinate":
        axis = figure.add_subplot(
            xlim=(-1, 1),
            ylim=(-1, 1),
            xlabel="structured to creative",
            ylabel="solution to empathy",
        )
        for path, (x, y, _) in means.items():
            axis.scatter(x, y, label=path)
    else:
        axis = figure.add_subplot(projection="polar", ylim=(1, 5))
        angles = np.linspace(0, 2 * np.pi, 5, endpoint=False)
        axis.set_xticks(angles, CAPABILITIES)
        for path, (*scores, _) in means.items():
            axis.fill(angles, np.array(scores, float), alpha=0.3, label=path)
    figure.legend(loc="upper left")
    figure.savefig(picture)


# ---------------------------------------------------------------------------------------------- main


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("judge", __doc__)
    add = parser.add_argument
    add("question", choices=QUESTIONS, help="see above")
    add_files(parser)
    add_judge_flags(parser)
    text = "ask each question N times (default: 1)"
    add("--repeats", type=positive, default=1, metavar="N", help=text)
    add("--picture", metavar="FILE", help="draw the means, or the places")
    return parser.run(judge_files, argv)


if __name__ == "__main__":
    sys.exit(main())
