"""tools/judge.py - what does a judge, a language model, say of recorded dialogues?

    python -m tools.judge capabilities results/before.jsonl results/after.jsonl --judge ...

    capabilities  of the assistant, from 1 to 5, for each dialogue (RLVER 3.3): empathic depth (ED),
                  core insight (CI), solution crafting (SC), dialogue guidance (DG) and style
                  adaptability (SA)
    needs         how much each line of the user shows of its attitude, thoughts and hidden need,
                  from 0 to 10; the judge does not see the replies (RLVER 3.4)
    blri          Barrett-Lennard relationship inventory, from 0 to 100, filled in from the user's
                  record of its thoughts (SAGE 3)
    utterance     how good the replies are as utterances in a talk, from 1 to 5 (SAGE 3)

The tables have means over dialogues, also of the final emotion. For two files they have the second
minus the first, too, paired over dialogues, and for blri and utterance the correlation with the
final emotion. (BLRI reads the analysis that made the emotion, so its high r is nearly built in.) DG
and SA leave out dialogues of fewer than three replies.

No score measures quality: judge and user are models. docs/measuring.md has the limits of each one.
"""

from support.answers import Unreadable, as_json, read_answer
from support.command_line import positive
from support.errors import BadInput
from support.results import reading_in

import contextlib
from collections import defaultdict
from functools import partial
from operator import itemgetter
from typing import Callable, NamedTuple

import numpy as np

from simulator import EMOTION_SCHEMA
from tools.asking import add_judge_flags, ask, dialogue_slots, make_cases, need_judge, source_of
from tools.correlations import interval, pearson
from tools.dialogues import common_users, load_dialogues
from tools.tables import (
    check_files,
    check_picture,
    mean,
    parts_by,
    show_table,
    tool_parser,
    write_outputs,
)

# ------------------------------------------------------------------------------ what is asked about


def line_slots(dialogue):
    """The slots of a question about each line that a user says after a reply, with what the user
    thought before it."""
    return [
        {"need": dialogue.task, "thought": as_json(thought), "line": as_json(turn["user"])}
        for turn, thought in thoughts_of(dialogue)
        if turn["user"]
    ]


def record_slots(dialogue):
    """The slots of one question about a dialogue: the user's own record of each round, as SAGE has
    it."""
    rounds = [[thought["activity"], thought["analysis"]] for _, thought in thoughts_of(dialogue)]
    return [{"record": as_json(rounds)}] if rounds else []


# What a judge is shown of a user's analysis: {our key: SAGE's}.
THOUGHT = {
    "content": "content",
    "target_completion": "TargetCompletion",
    "activity": "activity",
    "analysis": "analyse",
}


def thoughts_of(dialogue):
    """What the user thought and felt about each reply: [(turn, {key: text})]. Turns for which the
    file does not hold it, or which an earlier version wrote, are left out. Raises BadInput."""
    thoughts = []
    for turn in dialogue.turns:
        with contextlib.suppress(Unreadable, KeyError):
            thoughts.append((turn, thought_in(turn["analysis"] or "", dialogue.id)))
    return thoughts


def thought_in(analysis, dialogue_id):
    """What a recorded analysis says, {key: text}: SAGE's, an object, or ours, an answer to f_emo.
    Raises BadInput, Unreadable or KeyError."""
    if isinstance(analysis, dict):
        return {key: analysis[name] for key, name in THOUGHT.items()}
    if reading_in(analysis):
        raise BadInput(
            f"{dialogue_id}: its feelings were read, not written (--reader): there are no thoughts "
            "to judge"
        )
    answer = read_answer(analysis, EMOTION_SCHEMA)
    return {key: answer[key] for key in THOUGHT}


# ----------------------------------------------------------------------------------- questionnaires

GRADES = tuple("FEDCBA")  # from strong disagreement to strong agreement


def questionnaire(grades, low, high, reversed_items):
    """The scores of a questionnaire's statements, an array. A, strongly agree, is `high` and F
    is `low`, in six even steps. For `reversed_items` (numbers from 0), on which a good policy gets
    an F, it is the other way round."""
    shares = np.array([GRADES.index(grade) / 5 for grade in grades])
    shares[reversed_items] = 1 - shares[reversed_items]
    return low + (high - low) * shares


def grades_schema(scales):
    """The schema of a questionnaire that is filled in: {"thoughts", "code", "grades": {"1": a letter,
    "2": ...}}. scales: {name: how many statements it has}, one after the other."""
    grades = {str(i + 1): GRADES for i in range(sum(scales.values()))}
    return {"thoughts": str, "code": str, "grades": grades}


def scales_of(low, high, reversed_items, scales, answer):
    """The scores of a questionnaire that a judge has filled in: {scale: the mean of its statements},
    and "overall", the mean of all statements. answer: with `grades_schema(scales)`; low, high and
    reversed_items go to `questionnaire`."""
    scores = questionnaire(answer["grades"].values(), low, high, reversed_items)
    parts = np.split(scores, np.cumsum(list(scales.values())))
    means = {name: mean(part) for name, part in zip(scales, parts)}
    return {**means, "overall": mean(scores)}


# ------------------------------------------------------------------------------- the four questions

CAPABILITIES = ("ED", "CI", "SC", "DG", "SA")
TOO_SHORT = ("DG", "SA")  # their score means nothing for a dialogue of fewer than three replies
ASPECTS = ("attitude", "thoughts", "needs", "overall")
# {scale: how many statements it has}
BLRI = {"empathic understanding": 4, "level of regard": 4, "congruence": 2, "unconditionality": 2}
UTTERANCE = {"natural flow": 6, "attentiveness": 4, "depth of connection": 5}


class Question(NamedTuple):
    """What is asked, with the prompt of its name, and what the answer means."""

    slots_of: Callable  # what it is asked about: a dialogue, each line of the user or its record
    schema: dict  # of the answer; the scale stands in it
    scores_of: Callable  # scores_of(answer) -> {item: score}


QUESTIONS = {
    "capabilities": Question(  # RLVER 3.3
        dialogue_slots,
        {
            "reasons": dict.fromkeys(CAPABILITIES, str),
            "code": str,
            "scores": dict.fromkeys(CAPABILITIES, range(1, 6)),
        },
        itemgetter("scores"),
    ),
    "needs": Question(  # RLVER 3.4
        line_slots,
        {"reasons": str, "code": str, "scores": dict.fromkeys(ASPECTS, range(11))},
        itemgetter("scores"),
    ),
    "blri": Question(  # SAGE 3
        record_slots, grades_schema(BLRI), partial(scales_of, 0, 100, [11], BLRI)
    ),
    "utterance": Question(  # SAGE 3
        dialogue_slots, grades_schema(UTTERANCE), partial(scales_of, 1, 5, [3, 5], UTTERANCE)
    ),
}


# ------------------------------------------------------------------------------------------- scores

FINAL = "final emotion"  # its mean over the judged dialogues stands beside the scores
COLUMNS = ["value", "from", "to", "n", "missing"]
READING = (
    "value: mean over n dialogues; from, to: 95 % interval; missing: share of unreadable answers; "
    "correlation: of overall score and final emotion (Pearson's r)"
)


def score_file(answers):
    """The scores of one file, of the answers about it (rows of `ask`): ({item: {id of a dialogue: its
    mean score}}, the table, {item: a list of the COLUMNS}). A dialogue's mean is over all questions
    about it and all repeats, so each dialogue counts once."""
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
        rows[item] = [mean(values), *interval(values)[1:], missing]
    return means, rows


def same_dialogues(files):
    """The ids of the first file's dialogues with users who are the same in the second. Raises
    BadInput."""
    users = common_users("judge", files)
    return {dialogue.id for dialogue in load_dialogues(files[0]) if dialogue.profile_id in users}


def paired_differences(before, after, pairs):
    """The second file's means minus the first's, over the dialogues that are in both, and in `pairs`:
    {item: [mean, low, high, n]}. before, after: of `score_file`."""
    rows = {}
    for item, old in before.items():
        new = after[item]
        common = [dialogue for dialogue in old if dialogue in new and dialogue in pairs]
        differences = [new[dialogue] - old[dialogue] for dialogue in common]
        rows[item] = interval(differences)
    return rows


def correlation_of(means):
    """Pearson's r of the dialogues' overall scores with their final emotions: [r, low, high, n].
    means: of `score_file`."""
    columns = (list(means[item].values()) for item in ("overall", FINAL))
    return interval(*columns, statistic=pearson)


def draw(tables, picture):
    """Draw the mean capabilities of each file, {file: its table}, as a polar plot (RLVER 3.3)."""
    from matplotlib.figure import Figure

    figure = Figure()
    axis = figure.add_subplot(projection="polar", ylim=(1, 5))
    angles = np.linspace(0, 2 * np.pi, 5, endpoint=False)
    axis.set_xticks(angles, CAPABILITIES)
    for path, table in tables.items():
        means = [table[item][0] for item in CAPABILITIES]
        axis.fill(angles, np.array(means, float), alpha=0.3, label=path)
    figure.legend(loc="upper left")
    figure.savefig(picture)


# --------------------------------------------------------------------------------------------- main


def judge(args):
    """Ask one of QUESTIONS about each of the files; print, write and draw the means. Returns the
    exit code. --json gets {"answers", "means" and "tables" of each file, see `score_file`, "paired"
    of two files}."""
    name = args.question
    check_files(args, out=args.picture)
    check_picture(args, name == "capabilities", "capabilities have")
    need_judge(args)
    slots_of, schema, scores_of = QUESTIONS[name]
    cases = make_cases(args.files, name, slots_of)
    pairs = same_dialogues(args.files) if len(args.files) == 2 else None
    answers = ask(args, cases, name, schema, scores_of, args.repeats)
    means, tables = {}, {}
    for path, rows in parts_by("file", answers).items():
        means[path], tables[path] = score_file(rows)
        if "grades" in schema:
            tables[path]["correlation"] = correlation_of(means[path])
        show_table(f"{name}, {path}", COLUMNS, tables[path], source_of(answers) + READING)
    result = {"answers": answers, "means": means, "tables": tables}
    if len(means) == 2:
        result["paired"] = paired_differences(*means.values(), pairs)
        show_table(
            "the second FILE minus the first, paired over dialogues",
            COLUMNS[:4],
            result["paired"],
            source_of(answers),
        )
    write_outputs(args, f"judge {name}", result)
    if args.picture:
        draw(tables, args.picture)
    return 0


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("judge", __doc__)
    add = parser.add_argument
    add("question", choices=QUESTIONS, help="see above")
    add_judge_flags(parser)
    add(
        "--repeats",
        type=positive,
        default=1,
        metavar="N",
        help="ask each question N times (default: 1)",
    )
    add("--picture", metavar="FILE", help="draw the means of the capabilities")
    return parser.run(judge, argv)


if __name__ == "__main__":
    raise SystemExit(main())
