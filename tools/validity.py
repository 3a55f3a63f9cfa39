"""tools/validity.py - does the final emotion, the score, mean what it stands for (SAGE 3)?

    python -m tools.validity results/before.jsonl results/after.jsonl --judge openai:MODEL@URL
    python -m tools.validity results/after.jsonl --paraphrase --limit 200
    python -m tools.validity results/one/*.jsonl results/two/*.jsonl     (of two simulators)

r: how far two questionnaires' scores go with the final emotion, over the dialogues of each file
and, of three files or more, over files. BLRI (Barrett-Lennard, 0 to 100) is asked of the user's own
record, utterance quality (1 to 5) of the dialogue. With --paraphrase: how far the change of one
user moves when the same reply is put in other words. Files of two simulators are ranked instead:
the correlation of ranks over policies, and over the dialogues of each policy.

A high r is no proof: BLRI reads the analysis from which the emotion was made. The items are written
for this project in the subscales of the originals, so scores do not compare with SAGE's. SAGE does
not say that it reverses the negative ones; "overall, unreversed" is without.
"""

from support import stats
from support.answers import unmarked_sections
from support.errors import BadInput

import asyncio
import contextlib
import sys
from pathlib import Path

import numpy as np

from simulator import EMOTION_HEADERS, as_json, parse_emotion
from tools.acceptance import NO_EFFECT, WHO_HEARS, add_user_flags, changes_felt
from tools.judge import (
    Judge,
    Questionnaire,
    Tables,
    add_files,
    add_judge_flags,
    check_files,
    correlations_of,
    dialogue_slots,
    load_dialogues,
    load_question,
    made_by,
    make_cases,
    make_parser,
    need_model,
    print_plan,
    read_words,
    reply_slots,
    score_files,
    show_scores,
    users_of,
    write_outputs,
)

# Barrett-Lennard relationship inventory, in the four subscales of the original.
BLRI = Questionnaire(
    low=0,
    high=100,
    items=12,
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
    items=15,
    reversed_items=(4, 6),
    scales={
        "natural flow": (1, 6),
        "attentiveness": (7, 10),
        "depth of connection": (11, 15),
        "overall": (1, 15),
    },
)
PARAPHRASE_HEADERS = {"Reply": "Reply|回复"}
READING = "BLRI reads the analysis that made the emotion: its high correlation is nearly built in"
READING_OF_RANKS = (
    "SAGE's policies are ranked alike by four users; single dialogues are not (r 0.2 to 0.5)"
)


async def validity(args):
    """Questionnaires, and with --paraphrase other words; of two simulators the ranks. Returns the
    exit code."""
    check_files(args, least=1)
    ranking = len(users_of(args.files)) > 1
    check_flags(args, ranking)
    asked_about = [] if ranking else questions_and_cases(args)
    judge = Judge(args)
    if args.plan:
        replies = asked_about[-1][1] if args.paraphrase else []
        # each reply is heard as it was said, and in other words
        print_plan(judge, asked_about, user_calls=2 * len(replies))
        return 0
    tables = Tables()
    if ranking:
        result = {"ranks": compare_ranks(args.files, tables)}
    else:
        result = await score_questionnaires(args, judge, asked_about, tables)
    write_outputs(args, "validity", result, tables)
    return 0


def check_flags(args, ranking):
    """Raise BadInput for flags that would do nothing, and where a model is needed and not named.
    ranking: are the files of two simulators? Fill in the difficulty of --paraphrase."""
    if args.paraphrase:
        args.difficulty = args.difficulty or ["vanilla"]
    hearing = args.difficulty or args.simulator
    if hearing and (not args.paraphrase or len(args.difficulty) > 1 or ranking):
        raise BadInput(WHO_HEARS)
    if (args.judge and ranking) or (args.limit and not args.paraphrase):
        raise BadInput(NO_EFFECT)
    if args.paraphrase:
        need_model("simulator", args)
    if not ranking:
        need_model("judge", args)


def questions_and_cases(args):
    """[(question, its cases)]: the two questionnaires and, last, with --paraphrase the replies of
    the first file, as many as are wanted."""
    asked_about = []
    for question, cases_of in (
        (blri_question(args.lang), blri_cases),
        (utterance_question(args.lang), utterance_cases),
    ):
        asked_about.append((question, [case for path in args.files for case in cases_of(path)]))
    if args.paraphrase:
        cases = paraphrase_cases(args.files[0])[: args.limit]
        asked_about.append((paraphrase_question(args.lang), cases))
    return asked_about


async def score_questionnaires(args, judge, asked_about, tables):
    """Ask the questions, show what is scored in each file and how far it goes with the final
    emotion; and what other words do. Returns the result for --json."""
    await judge.check(asked_about[0][0])
    answers = {}
    for question, cases in asked_about:
        answers[question.name] = await judge.ask_all(question, cases)
    result, correlations = {}, {}
    for name in ("blri", "utterance"):
        result[name] = score_files(args.files, answers[name])
        show_scores(tables, name, result[name])
        correlations |= correlations_of(name, result[name])
    tables.show(
        "correlation with the final emotion", ["r", "from", "to", "n"], correlations, READING
    )
    if args.paraphrase:
        result["paraphrase"] = await compare_words(args, answers["paraphrase"], tables)
    return result | {"correlations": correlations}


# ------------------------------------------------------------------------------------ the questions


def blri_question(lang):
    """What the user's own record says of the assistant."""
    return load_question("blri", lang, ["record"], BLRI.read)


def blri_cases(path):
    """Each dialogue of a file: the user's own record of each round, as SAGE has it."""

    def slots_of(dialogue):
        rounds = []
        for turn in dialogue["turns"]:
            with contextlib.suppress(ValueError):  # a record of other sections
                sections = analysis_sections(turn)
                rounds.append([sections["Activity"], sections["Analyse"]])
        return [{"record": as_json(rounds)}] if rounds else []

    return make_cases(path, "blri", slots_of)


def analysis_sections(turn):
    """{name: text} of the analysis behind a turn's change. Files of SAGE and of earlier runs have
    no mark, so they are read without. Raises ValueError."""
    if turn.get("mark"):
        sections, _ = parse_emotion(turn["analysis"], turn["mark"])
        return sections
    return unmarked_sections(turn["analysis"] or "", EMOTION_HEADERS)


def utterance_question(lang):
    """How good the assistant's replies are as utterances in a talk."""
    return load_question("utterance", lang, ["dialogue"], UTTERANCE.read)


def utterance_cases(path):
    """Each dialogue of a file."""
    return make_cases(path, "utterance", dialogue_slots)


def paraphrase_question(lang):
    """One reply in other words."""

    def read(text, mark):
        return read_words(text, PARAPHRASE_HEADERS, mark)

    return load_question("paraphrase", lang, ["dialogue", "reply"], read, repeated=False)


def paraphrase_cases(path):
    """Each reply of a file."""
    return make_cases(path, "paraphrase", reply_slots)


# ----------------------------------------------------------------------------- beside the questions


async def compare_words(args, answers, tables):
    """How far does the change of one user move when the same reply is put in other words? Returns
    {row: [mean, from, to, n]}, and shows it."""
    dialogue_of = {dialogue["id"]: dialogue for dialogue in load_dialogues(args.files[0])}
    recorded, reworded = [], []
    for answer in answers:
        if answer["found"]:
            dialogue, i = dialogue_of[answer["id"]], answer["part"]
            recorded.append((dialogue, i, dialogue["turns"][i]["reply"]))
            reworded.append((dialogue, i, answer["found"]["text"]))
    (changes_recorded,) = (await changes_felt(args, recorded)).values()
    (changes_reworded,) = (await changes_felt(args, reworded)).values()
    pairs = [pair for pair in zip(changes_recorded, changes_reworded) if None not in pair]
    before, after = np.array(pairs, float).reshape(-1, 2).T
    rows = {
        "moved": stats.interval(np.mean, abs(before - after)),
        "same sign": stats.interval(np.mean, np.sign(before) == np.sign(after)),
    }
    tables.show(
        "the same reply in other words",
        ["mean", "from", "to", "n"],
        rows,
        f"{made_by(answers)}moved: absolute difference of the change",
    )
    return rows


def compare_ranks(files, tables):
    """The same policies under two simulators: are policies ranked alike, and their dialogues?
    Returns {row: [r, from, to, n]}, and shows it. Raises BadInput."""
    finals = final_emotions(files)
    common = sorted(set.intersection(*map(set, finals.values())))
    if len(finals) != 2 or not common:
        raise BadInput(
            f"{'; '.join(finals)}: files of one policy or more under two simulators are needed"
        )
    one, two = finals.values()
    rows = {}
    if len(common) > 1:
        means = [[np.mean(list(side[name].values())) for name in common] for side in (one, two)]
        rows["over policies"] = stats.interval(stats.spearman, *means)
    for name in common:
        ids = sorted(set(one[name]) & set(two[name]))
        emotions = [[side[name][i] for i in ids] for side in (one, two)]
        rows[name] = stats.interval(stats.spearman, *emotions)
    tables.show(
        f"ranks, {' against '.join(finals)}", ["r", "from", "to", "n"], rows, READING_OF_RANKS
    )
    return rows


def final_emotions(files):
    """{simulator: {policy: {profile: final emotion}}} of result files. Raises BadInput for a
    run's log."""
    finals = {}
    for path in files:
        dialogues = load_dialogues(path)
        first = dialogues[0]
        if first["split"]:
            raise BadInput(f"{path}: a run's log; ranks are of result files")
        policy = first.get("made_by", {}).get("policy", Path(path).name)
        policies = finals.setdefault(first["user"], {})
        policies[policy] = {dialogue["profile_id"]: dialogue["final"] for dialogue in dialogues}
    return finals


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = make_parser("validity", __doc__)
    add_files(parser)
    parser.add_argument(
        "--paraphrase",
        action="store_true",
        help="also the first FILE's replies in other words",
    )
    add_user_flags(parser, "vanilla")
    add_judge_flags(parser)
    return parser.run(lambda args: asyncio.run(validity(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
