"""tools/validity.py - does the score, the final emotion, agree with other measures (SAGE 3)?

    python -m tools.validity results/before.jsonl results/after.jsonl --judge openai:MODEL@URL
    python -m tools.validity results/after.jsonl --paraphrase --limit 200

A judge fills in two questionnaires about each dialogue: BLRI (Barrett-Lennard relationship
inventory, 0 to 100) about the user's record of its thoughts, and utterance quality (1 to 5) about
the dialogue. r is the correlation of their scores with the final emotion, over the dialogues of
each file and, for three files or more, over files. --paraphrase adds a second question: by how much
does the user's change of emotion differ when the same reply is put in other words?

A high r is no proof: BLRI reads the analysis from which the emotion was made. The items are written
for this project in the subscales of the originals, so scores do not compare with SAGE's. SAGE does
not say whether it reverses the negative items; the row "overall, unreversed" is the mean without
reversing them.
"""

from support import stats
from support.errors import BadInput

import asyncio
import sys
from dataclasses import dataclass

import numpy as np

from simulator import as_json
from tools.dialogues import (
    analysis_of,
    dialogue_slots,
    load_dialogues,
    make_cases,
    need_model,
    reply_slots,
)
from tools.hearing import Reply, add_user_flags, changes_felt
from tools.judge import Judge, add_judge_flags, load_question, print_plan
from tools.scores import correlations_of, made_by, score_files, show_scores
from tools.tables import add_files, check_files, show_table, tool_parser, write_outputs

GRADES = ("F", "E", "D", "C", "B", "A")  # from strong disagreement to strong agreement


@dataclass(frozen=True)
class Questionnaire:
    """Numbered statements, each graded from A, strongly agree, to F."""

    low: int  # the score of an F
    high: int  # the score of an A
    reversed_items: tuple  # numbers of the statements that speak ill of the friend
    scales: dict  # {name: (its first statement, its last)}

    @property
    def schema(self):
        """Of an answer."""
        first, last = self.scales["overall"]
        grades = {str(i): GRADES for i in range(first, last + 1)}
        return {"thoughts": str, "code": str, "grades": grades}

    def means(self, answer):
        """{scale: its mean score} of an answer.

        Under "overall, unreversed" stands the mean of all items as if none were reversed: SAGE
        words some items negatively, and does not say that it reverses them."""
        grades = answer["grades"].values()
        scores = questionnaire(grades, self.reversed_items, self.low, self.high)
        means = {}
        for name, (first, last) in self.scales.items():
            means[name] = float(np.mean(scores[first - 1 : last]))
        unreversed = questionnaire(grades, (), self.low, self.high)
        means["overall, unreversed"] = float(np.mean(unreversed))
        return means


def questionnaire(grades, reversed_items, low, high):
    """[score on low..high of each item]. grades: a letter per item, in order. A, strongly agree, is
    `high` and F is `low`, in six even steps; for `reversed_items` (numbers from 1), on which a good
    friend gets an F, the other way round."""
    shares = [GRADES.index(grade) / 5 for grade in grades]
    return [
        low + (high - low) * (1 - share if i in reversed_items else share)
        for i, share in enumerate(shares, 1)
    ]


# Barrett-Lennard relationship inventory, in the four subscales of the original.
BLRI = Questionnaire(
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
)
UTTERANCE = Questionnaire(
    low=1,
    high=5,
    reversed_items=(4, 6),
    scales={
        "natural flow": (1, 6),
        "attentiveness": (7, 10),
        "depth of connection": (11, 15),
        "overall": (1, 15),
    },
)
QUESTIONNAIRES = ("blri", "utterance")  # their names, and those of their prompts
TITLES = {"blri": "BLRI (Barrett-Lennard relationship inventory)", "utterance": "utterance quality"}
READING_OF_CORRELATIONS = (
    "r: Pearson's correlation; from, to: its 95 % interval. BLRI reads the analysis that made the "
    "emotion: its high correlation is nearly built in"
)


async def validity(args):
    """Ask the questionnaires and, with --paraphrase, for other words. Returns the exit code."""
    check_files(args, least=1)
    check_flags(args)
    if not args.difficulty:
        args.difficulty = ["vanilla"]  # of the user who hears replies, with --paraphrase
    return await ask_questionnaires(args)


def check_flags(args):
    """Raise BadInput for flags that do not go together, or would do nothing, and where a model is
    needed and not named."""
    names_a_user = bool(args.difficulty or args.simulator)
    if (names_a_user or args.limit) and not args.paraphrase:
        raise BadInput(
            "--difficulty, --simulator and --limit have no effect without --paraphrase; add it, or "
            "leave them out"
        )
    if len(args.difficulty) > 1:
        raise BadInput("--difficulty: this tool takes one difficulty; name one")
    if args.paraphrase:
        need_model("simulator", args)
    need_model("judge", args)


async def ask_questionnaires(args):
    """Ask a judge the questionnaires and, with --paraphrase, for other words, which a user hears.
    Returns the exit code."""
    asked_about = what_to_ask(args)
    judge = Judge(args)
    if args.plan:
        user_calls = 0
        if args.paraphrase:
            _, replies = asked_about["paraphrase"]
            user_calls = 2 * len(replies)  # each is heard as it was recorded, and in other words
        print_plan(judge, asked_about.values(), user_calls=user_calls)
        return 0
    answers = await ask_all(judge, asked_about)
    scores = show_questionnaires(args.files, answers)
    result = {name: scores_of_name.as_json() for name, scores_of_name in scores.items()}
    result["correlations"] = show_correlations(scores)
    if args.paraphrase:
        result["paraphrase"] = await compare_words(args, answers["paraphrase"])
    write_outputs(args, "validity", result)
    return 0


# ------------------------------------------------------------------------------------ what is asked


def what_to_ask(args):
    """{name: (Question, its cases)}: the two questionnaires about all files and, with --paraphrase,
    the replies of the first file, as many as --limit says."""
    questions = load_questions(args.lang)
    asked_about = {}
    for name in QUESTIONNAIRES:
        cases = []
        for path in args.files:
            cases += cases_of(path, name)
        asked_about[name] = (questions[name], cases)
    if args.paraphrase:
        cases = cases_of(args.files[0], "paraphrase")[: args.limit]
        asked_about["paraphrase"] = (questions["paraphrase"], cases)
    return asked_about


async def ask_all(judge, asked_about):
    """{name: the judge's answers}. asked_about: of `what_to_ask`."""
    blri, _ = asked_about["blri"]
    await judge.check(blri)
    answers = {}
    for name, (question, cases) in asked_about.items():
        answers[name] = await judge.ask_all(question, cases)
    return answers


def load_questions(lang):
    """{name: Question}: what the user's own record says of the assistant, how good its replies are
    as utterances in a talk, and one reply in other words."""
    return {
        "blri": load_question("blri", lang, ["record"], BLRI.schema, found=BLRI.means),
        "utterance": load_question(
            "utterance", lang, ["dialogue"], UTTERANCE.schema, found=UTTERANCE.means
        ),
        "paraphrase": load_question(
            "paraphrase", lang, ["dialogue", "reply"], {"code": str, "text": str}, repeated=False
        ),
    }


def cases_of(path, name):
    """The cases of the question `name` about a file."""
    slots_of = {"blri": record_slots, "utterance": dialogue_slots, "paraphrase": reply_slots}
    return make_cases(path, name, slots_of[name])


# ------------------------------------------- first question: do questionnaires go with the emotion?


def record_slots(dialogue):
    """For `make_cases`: the user's own record of each round of a dialogue, as SAGE has it."""
    thoughts = [analysis_of(turn) for turn in dialogue.turns]
    rounds = [[thought["activity"], thought["analysis"]] for thought in thoughts if thought]
    return [{"record": as_json(rounds)}] if rounds else []


def show_questionnaires(files, answers):
    """Show what each questionnaire scored in each file. answers: of `ask_all`. Returns {name of the
    questionnaire: FileScores}."""
    scores = {}
    for name in QUESTIONNAIRES:
        scores[name] = score_files(files, answers[name])
        show_scores(TITLES[name], scores[name], {})
    return scores


def show_correlations(scores):
    """Show how far the scores of `show_questionnaires` go with the final emotion. Returns {row of
    the table: [r, from, to, n]}."""
    rows, shown = {}, {}  # the same numbers by the names of --json and of the terminal
    for name in QUESTIONNAIRES:
        title, _, _ = TITLES[name].partition(" (")
        for row, cells in correlations_of(name, scores[name]).items():
            rows[row] = cells
            shown[title + row.removeprefix(name)] = cells
    show_table(
        "correlation with the final emotion",
        ["r", "from", "to", "n"],
        shown,
        made_by(scores["blri"].answers) + READING_OF_CORRELATIONS,
    )
    return rows


# ------------------------- second question: how far does the change move with the words of a reply?


async def compare_words(args, answers):
    """How far does the change of one user move when the same reply is put in other words? answers:
    the judge's, with the other words. Returns {row: [mean, from, to, n]}, and shows it."""
    (level,) = args.difficulty  # `check_flags` refuses two
    dialogue_of = {dialogue.id: dialogue for dialogue in load_dialogues(args.files[0])}
    as_recorded, in_other_words = [], []
    for answer in answers:
        if answer["found"]:
            dialogue, i = dialogue_of[answer["id"]], answer["part"]
            as_recorded.append(Reply(dialogue, i, dialogue.turns[i]["reply"]))
            in_other_words.append(Reply(dialogue, i, answer["found"]["text"]))
    changes = await changes_felt(args, as_recorded)
    changes_reworded = await changes_felt(args, in_other_words)
    moved, same_sign = [], []  # one value for each reply that was heard both ways
    for before, after in zip(changes[level], changes_reworded[level]):
        if before is not None and after is not None:
            moved.append(abs(before - after))
            same_sign.append(np.sign(before) == np.sign(after))
    rows = {
        "moved": stats.interval(np.mean, moved),
        "same sign": stats.interval(np.mean, same_sign),
    }
    show_table(
        "the same reply in other words",
        ["mean", "from", "to", "n"],
        rows,
        f"{made_by(answers)}moved: by how many points the change of the emotion differs; same "
        "sign: how often both change it in the same direction",
    )
    return rows


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("validity", __doc__)
    add_files(parser)
    parser.add_argument(
        "--paraphrase",
        action="store_true",
        help="also say the replies of the first FILE in other words, to see whether the user feels "
        "the same about them",
    )
    add_user_flags(parser, default_difficulty="vanilla")
    add_judge_flags(parser)
    return parser.run(lambda args: asyncio.run(validity(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
