"""tools/judge.py - what does a judge, a language model, say of recorded dialogues?

    python -m tools.judge capabilities results/before.jsonl results/after.jsonl --judge openai:MODEL@URL
    python -m tools.judge coordinate results/before.jsonl results/after.jsonl --judge openai:MODEL@URL

    capabilities  of the assistant, from 1 to 5, for each dialogue (RLVER 3.3): empathic depth (ED),
                  core insight (CI), solution crafting (SC), dialogue guidance (DG) and style
                  adaptability (SA)
    needs         how much each line of the user shows of its attitude, thoughts and hidden need,
                  from 0 to 10; the judge does not see the replies (RLVER 3.4)
    blri          Barrett-Lennard relationship inventory, from 0 to 100, filled in from the user's
                  record of its thoughts (SAGE 3)
    utterance     how good the replies are as utterances in a talk, from 1 to 5 (SAGE 3)
    coordinate    where policies stand beside each other, from structured (x = -1) to creative (1) and
                  from solution (y = -1) to empathy (1): one prompt places all FILEs by the reasons
                  of their successes and failures and by their strategies (SAGE 4.2, RLVER 3.7).
                  Places of different calls do not compare.

The tables have means over dialogues, also of the final emotion. For two files they have the second
minus the first, too, paired over dialogues, and for blri and utterance the correlation with the
final emotion. (BLRI reads the analysis that made the emotion, so its high r is nearly built in.) DG
and SA leave out dialogues of fewer than three replies. --picture draws the capabilities of the
files, or their places.

No score measures quality: judge and user are models. docs/measuring.md has the limits of each one.
"""

from support.answers import Unreadable, as_json, read_answer
from support.command_line import positive
from support.errors import BadInput
from support.needs import need_of
from support.results import reading_in

import contextlib
from collections import Counter, defaultdict
from operator import itemgetter
from pathlib import Path

import numpy as np

from emotion import SUCCESS
from simulator import EMOTION_SCHEMA
from tools.asking import add_judge_flags, ask, ask_files, made_by
from tools.dialogues import (
    check_files,
    dialogue_slots,
    make_cases,
    mean,
    need_judge,
    parts_by,
    show_table,
    tool_parser,
    write_outputs,
)
from tools.stats import interval, pearson
from tools.strategies import NAMES, tag_files

# ----------------------------------------------------------------------------------------- questions


def line_slots(dialogue):
    """For `make_cases`: each line that a user says after a reply, with what the user thought before
    it."""
    return [
        {"need": dialogue.task, "thought": as_json(thought), "line": as_json(turn["user"])}
        for turn, thought in thoughts_of(dialogue)
        if turn["user"]
    ]


def record_slots(dialogue):
    """For `make_cases`: the user's own record of each round of a dialogue, as SAGE has it."""
    rounds = [[thought["activity"], thought["analysis"]] for _, thought in thoughts_of(dialogue)]
    return [{"record": as_json(rounds)}] if rounds else []


THOUGHT = "content target_completion activity analysis".split()
THOUGHT_OF_SAGE = "content TargetCompletion activity analyse".split()


def thoughts_of(dialogue):
    """[(turn, {key: text})]: what the user thought and felt about each reply. Turns for which the
    file does not hold it, or which an earlier version wrote, are left out."""
    thoughts = []
    for turn in dialogue.turns:
        found, keys = turn["analysis"] or "", THOUGHT_OF_SAGE
        with contextlib.suppress(Unreadable, KeyError):
            if isinstance(found, str):
                if reading_in(found):
                    raise BadInput(
                        f"{dialogue.id}: its feelings were read, not written (--reader): there are "
                        "no thoughts to judge"
                    )
                found, keys = read_answer(found, EMOTION_SCHEMA), THOUGHT
            thoughts.append((turn, {key: found[name] for key, name in zip(THOUGHT, keys)}))
    return thoughts


GRADES = tuple("FEDCBA")  # from strong disagreement to strong agreement


def questionnaire(grades, low, high, reversed_items):
    """The scores of the statements of a questionnaire, an array. A, strongly agree, is `high` and F
    is `low`, in six even steps. For `reversed_items` (numbers from 0), on which a good friend gets
    an F, it is the other way round."""
    shares = np.array([GRADES.index(grade) / 5 for grade in grades])
    shares[reversed_items] = 1 - shares[reversed_items]
    return low + (high - low) * shares


def statements(low, high, reversed_items, scales):
    """(schema, found) of a questionnaire; found(answer) -> {scale: the mean score of its
    statements}. scales: {name: how many statements it has}, one after the other."""
    ends = np.cumsum(list(scales.values()))

    def found(answer):
        scores = questionnaire(answer["grades"].values(), low, high, reversed_items)
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
ASPECTS = ("attitude", "thoughts", "needs", "overall")
NEEDS_SCHEMA = {"reasons": str, "code": str, "scores": dict.fromkeys(ASPECTS, range(11))}
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
    "blri": (record_slots, *statements(0, 100, [11], BLRI_SCALES)),  # SAGE 3
    "utterance": (dialogue_slots, *statements(1, 5, [3, 5], UTTERANCE_SCALES)),  # SAGE 3
}


# -------------------------------------------------------------------------------------------- scores


def judge_files(args):
    """Ask one of QUESTIONS about each of `args.files`, and print the means. Returns what --json
    gets: {"answers", "means" and "tables" of each file, see `score_file`, "paired" of two
    files}."""
    name = args.question
    slots_of, schema, found = QUESTIONS[name]
    answers = ask_files(args, slots_of, name, schema, found, args.repeats or 1)
    means, tables = {}, {}
    for path, rows in parts_by("file", answers).items():
        means[path], tables[path] = score_file(rows)
        if "grades" in schema:
            tables[path]["correlation"] = correlation_of(means[path])
        show_table(f"{name}, {path}", COLUMNS, tables[path], made_by(answers) + READING)
    result = {"answers": answers, "means": means, "tables": tables}
    if len(means) == 2:
        result["paired"] = paired_differences(*means.values())
        title = "the second FILE minus the first, paired over dialogues"
        show_table(title, COLUMNS[:4], result["paired"], made_by(answers))
    return result


FINAL = "final emotion"  # its mean over the judged dialogues stands beside the scores
COLUMNS = ["value", "from", "to", "n", "missing"]
READING = (
    "value: mean over n dialogues; from, to: 95 % interval; missing: share of unreadable answers; "
    "correlation: of overall score and final emotion (Pearson's r)"
)


def score_file(answers):
    """({item: {dialogue: its mean score}}, {item: COLUMNS}) of the answers about one file. A
    dialogue's mean is over all questions about it and all repeats, so each dialogue counts once. An
    answer is a row of `Judge.ask_all`, of which these are read: "id", "replies" and "final" (of the
    dialogue), and "found", {item: score} or None."""
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
        rows[item] = [mean(values), *interval(np.mean, values)[1:], missing]
    return means, rows


def paired_differences(before, after):
    """{item: [mean, low, high, n]} of the second file's means minus the first's, over the dialogues
    that are in both."""
    rows = {}
    for item, old in before.items():
        new = after[item]
        differences = [new[dialogue] - old[dialogue] for dialogue in old if dialogue in new]
        rows[item] = interval(np.mean, differences)
    return rows


def correlation_of(means):
    """Pearson's r of the overall scores of dialogues with their final emotions: [r, low, high, n].
    means: of `score_file`."""
    columns = [list(means[item].values()) for item in ("overall", FINAL)]
    return interval(pearson, *columns)


# ---------------------------------------------------------------------------------------- coordinate

REASONS = dict.fromkeys(("reasons", "code", "summary"), str)
CHARACTER = dict.fromkeys(("code", "social_distance", "professional_role", "personality"), str)
PLACE = dict.fromkeys("xy", range(-100, 101))  # in hundredths


def place_schema(models):
    """The schema of an answer with the places of these models, M1, M2, ..."""
    return {"comparison": str, "code": str, "places": dict.fromkeys(models, PLACE)}


def outcome_slots(dialogue):
    """For `make_cases`: a dialogue that ended in success or in failure."""
    if 10 <= dialogue.final < 100:
        return []
    outcome = "success" if dialogue.final >= SUCCESS else "failure"
    _, kind = need_of(dialogue.task, dialogue.profile.need)
    return [slots | {"outcome": outcome, "kind": kind} for slots in dialogue_slots(dialogue)]


def place_files(args):
    """Ask for the reasons of successes and failures, the first five of each for either kind of
    need. From these ask for the character of each file's policy, and for the places of all in one
    prompt. Returns what --json gets: {"placed": {file: [x, y, number of answers]}, "answers"}."""
    cases, taken = [], Counter()
    for about, slots in make_cases(args.files, "reasons", outcome_slots):
        group = about["file"], slots["outcome"], slots["kind"]
        taken[group] += 1
        if taken[group] <= 5:
            cases.append((about, slots))
    reasons = ask(args, cases, "reasons", REASONS)
    cases = []
    for path, rows in parts_by("file", reasons).items():
        notes = [row["found"] for row in rows if row["found"]]
        cases.append(({"file": path}, {"reasons": as_json(notes)}))
    characters = ask(args, cases, "character", CHARACTER)
    tagged, tags = tag_files(args)
    models = {}  # {name: what the judge is shown of it}
    for number, row in enumerate(characters, 1):
        used = Counter()
        for codes, _ in sum(tagged[row["file"]], []):
            used.update(codes or ())
        shares = [f"{code} {100 * used[code] / max(1, used.total()):.0f} %" for code in NAMES]
        models[f"M{number}"] = f"{as_json(row['found'])}\n{', '.join(shares)}"
    shown = "\n\n".join(f"{name}\n{text}" for name, text in models.items())
    cases = [({"file": " ".join(args.files)}, {"models": shown})]
    schema, repeats = place_schema(models), args.repeats or 3
    answers = ask(args, cases, "place", schema, itemgetter("places"), repeats)
    found = [row["found"] for row in answers if row["found"]]
    placed = {}
    for name, path in zip(models, args.files):
        x, y = (mean([places[name][axis] / 100 for places in found]) for axis in "xy")
        placed[path] = [x, y, len(found)]
    show_table("coordinate", ["x", "y", "n"], placed, made_by(answers))
    answers = {"reasons": reasons, "character": characters, "strategies": tags, "place": answers}
    return {"placed": placed, "answers": answers}


# ------------------------------------------------------------------------------------------ pictures


def draw(result, picture):
    """Write the mean capabilities of each file as a picture (RLVER 3.3), or the files' places (SAGE
    4.2). result: of `judge_files` or `place_files`."""
    from matplotlib.figure import Figure

    figure = Figure()
    if "placed" in result:
        axis = figure.add_subplot(
            xlim=(-1, 1),
            ylim=(-1, 1),
            xlabel="structured to creative",
            ylabel="solution to empathy",
        )
        for path, (x, y, _) in result["placed"].items():
            axis.scatter(x, y, label=path)
    else:
        axis = figure.add_subplot(projection="polar", ylim=(1, 5))
        angles = np.linspace(0, 2 * np.pi, 5, endpoint=False)
        axis.set_xticks(angles, CAPABILITIES)
        for path, table in result["tables"].items():
            means = [table[item][0] for item in CAPABILITIES]
            axis.fill(angles, np.array(means, float), alpha=0.3, label=path)
    figure.legend(loc="upper left")
    figure.savefig(picture)


# ---------------------------------------------------------------------------------------------- main


def judge(args):
    """Ask what `args` say; print, write and draw it. Returns the exit code."""
    name = args.question
    check_files(args, out=args.picture)
    if args.picture:
        if name not in ("capabilities", "coordinate"):
            raise BadInput("--picture: only capabilities and coordinate have one")
        try:
            from matplotlib.backend_bases import FigureCanvasBase
        except ImportError as error:
            raise BadInput(f"--picture: {error}; pip install matplotlib") from None
        kinds = FigureCanvasBase.get_supported_filetypes()
        if Path(args.picture).suffix[1:].lower() not in kinds:
            raise BadInput(
                f"--picture {args.picture}: its name should end with one of {', '.join(kinds)}"
            )
    need_judge(args)
    result = place_files(args) if name == "coordinate" else judge_files(args)
    write_outputs(args, f"judge {name}", result)
    if args.picture:
        draw(result, args.picture)
    return 0


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("judge", __doc__)
    add = parser.add_argument
    add("question", choices=[*QUESTIONS, "coordinate"], help="see above")
    add_judge_flags(parser)
    text = "ask each question N times (default: 1, for places 3)"
    add("--repeats", type=positive, metavar="N", help=text)
    add("--picture", metavar="FILE", help="draw the means, or the places")
    return parser.run(judge, argv)


if __name__ == "__main__":
    raise SystemExit(main())
