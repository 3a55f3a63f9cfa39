"""tools/strategies.py - which of 24 strategies replies use, and what they earned (RLVER 3.6; SAGE
Table 5).

    python -m tools.strategies runs/NAME/dialogues.jsonl
    python -m tools.strategies results/after.jsonl --judge openai:MODEL@URL

uses: replies per dialogue that use a strategy, among the replies that could be read; gain: the mean
change of the emotion over n such replies; SSRR: how alike the strategies of neighbouring replies
are, 0 to 1. On the toy the grammar tells the strategies, exactly; no judge is asked, unless --judge
names one.

A gain is not what the strategy causes: a reply with three strategies counts for all three. And this
SSRR is not SAGE's, whose scores and scale are not published.
"""

import asyncio
import re
import sys
from functools import cache
from itertools import pairwise

from tools.asking import Judge, add_judge_flags, load_question, made_by
from tools.dialogues import (
    add_files,
    are_of_toy,
    cell,
    check_files,
    load_dialogues,
    make_cases,
    need_model,
    reply_slots,
    show_table,
    tool_parser,
    write_outputs,
)
from toy import world

# SAGE Table 5: seven groups of strategies and how many each has. CODES lists all: "A-1", "A-2" ...
SAGE_GROUP_SIZES = {
    "A": 5,  # asks
    "B": 3,  # empathises: restates, or goes deeper
    "C": 2,  # tells of itself
    "D": 3,  # comforts
    "E": 4,  # affirms
    "F": 5,  # suggests, from its own view
    "G": 2,  # informs, objectively
}
CODES = [f"{letter}-{i}" for letter, size in SAGE_GROUP_SIZES.items() for i in range(1, size + 1)]

# The five groups that RLVER plots (its Table 4), in the codes of SAGE.
RLVER_GROUPS = {
    "Praise": ["E-1", "E-2", "E-3"],
    "Deep Empathy": ["B-2", "B-3", "C-1", "C-2"],
    "Emotional Venting": ["D-2", "D-3"],
    "Advice Provision": ["F-5"],
    "Problem Analysis": ["F-1"],
}

# The kinds of sentences of the toy (world.ACTS). Its "topic" talks of something else: no strategy.
TOY_CODES = {
    "analyse": "F-1",
    "advise": "F-5",
    "explain": "F-1",
    "reflect": "A-5",
    "praise": "E-1",
    "listen": "D-2",
    "empathise": "B-2",
    "side": "E-3",
    "cheer": "D-1",
    "dismiss": "F-4",
}

# ------------------------------------------------------------------------- what a strategy earns


def gain(replies, codes):
    """(mean, n) of the change over the n replies that use any of `codes` (SC(s), RLVER 3.6); mean
    None if n is 0. A reply of several strategies counts for each: association, no cause."""
    codes = set(codes)
    changes = []
    for used, change in replies:
        if used and change is not None and not codes.isdisjoint(used):
            changes.append(change)
    return (sum(changes) / len(changes) if changes else None), len(changes)


# --------------------------------------------------------------------------- how much is repeated


def similarity(a, b):
    """How alike two sequences are, 0 to 1: (s + n) / 2n, where n is the length of the longer one
    and s the score of their best global alignment, from -n to n (Needleman-Wunsch: match +1,
    mismatch and gap -1; SAGE gives no scores).

    Let S(i, j) be the best score of the first i items of a and the first j of b. Their last two
    items stand under each other, or one of them stands at a gap:

        S(i, j) = max(S(i-1, j-1) + (1 if a_i == b_j else -1), S(i-1, j) - 1, S(i, j-1) - 1)
        S(i, 0) = -i,  S(0, j) = -j
    """
    row = [-j for j in range(len(b) + 1)]  # S(0, j) for all j; in the loop S(i, j)
    for i, x in enumerate(a, 1):
        above, row = row, [-i]  # S(i-1, j) for all j; S(i, 0)
        for j, y in enumerate(b, 1):
            diagonal = above[j - 1] + (1 if x == y else -1)
            row.append(max(diagonal, above[j] - 1, row[-1] - 1))
    n = max(len(a), len(b))
    return (row[-1] + n) / (2 * n)


def ssrr(sequences):
    """Strategy sequence repetition rate (SAGE 4.2): the mean over dialogues of the mean similarity
    of neighbouring replies. sequences: per dialogue a list of replies, each a list of codes. Left
    out: dialogues of one reply, neighbours both without a strategy or one without an answer (None).
    None if nothing is left."""
    cached_similarity = cache(similarity)
    means = []
    for replies in sequences:
        similarities = []
        for a, b in pairwise(replies):
            if a is None or b is None or not (a or b):
                continue
            similarities.append(cached_similarity(tuple(a), tuple(b)))
        if similarities:
            means.append(sum(similarities) / len(similarities))
    return sum(means) / len(means) if means else None


# --------------------------------------------------------------------------------------- together
# A tagged dialogue is a list of its replies, each [codes, change of the emotion]. The codes are
# None if the judge's answer could not be read, and the change is None if the reply got no emotion.


def strategies_of(dialogues):
    """All that is counted over tagged dialogues: {"strategies": {group or code: `usage_of` it},
    "ssrr", "missing": replies without tags}."""
    codes_of = RLVER_GROUPS | {code: [code] for code in CODES}
    tags = [[used for used, _ in replies] for replies in dialogues]
    return {
        "strategies": {name: usage_of(codes, dialogues) for name, codes in codes_of.items()},
        "ssrr": ssrr(tags),
        "missing": sum(tags, []).count(None),
    }


def usage_of(codes, dialogues):
    """{"uses": replies per dialogue that use any of `codes`; "gain", "n": the `gain` of these
    replies and their number}.

    A reply whose tags could not be read (None) is in no numerator of "uses". So it is in no
    denominator either: a dialogue counts only as much as the share of readable replies. None if no
    reply could be tagged."""
    replies = sum(dialogues, [])
    readable = [used for used, _ in replies if used is not None]
    uses = sum(not set(codes).isdisjoint(used) for used in readable)
    counted_dialogues = len(readable) / max(1, len(replies)) * len(dialogues)
    mean, n = gain(replies, codes)
    return {"uses": uses / counted_dialogues if readable else None, "gain": mean, "n": n}


# ------------------------------------------------------------------------- where the tags come from


def toy_codes(reply):
    """The strategies of a reply in the toy's grammar, exact: the kinds of its sentences."""
    kinds = [world.act_of(sentence) for sentence in world.split_sentences(reply)]
    return [TOY_CODES[kind] for kind in kinds if kind in TOY_CODES]


def strategies_question(lang):
    """The strategies of one reply, in the order of its paragraphs. A reply has its strategies, so
    it is asked about once."""
    placeholders = ["dialogue", "line", "reply"]
    schema = {"thoughts": str, "code": str, "strategies": [tuple(CODES)]}
    return load_question("strategies", lang, placeholders, schema, repeated=False)


async def tag_files(args, judge):
    """(the judge's answers about each reply of `args.files`, {file: its tagged dialogues}). The
    answers are None where the toy's grammar tells the strategies."""
    answers = None
    if args.judge or not are_of_toy(args.files):
        question = strategies_question(args.lang)
        cases = []
        for path in args.files:
            cases += make_cases(path, "strategies", reply_slots)
        await judge.check(question)
        answers = await judge.ask_all(question, cases)
    return answers, {path: tagged_dialogues(path, answers) for path in args.files}


def tagged_dialogues(path, answers):
    """The tagged dialogues of a file: by a judge's `answers`, or, None, by the toy's grammar."""
    codes_of = {}  # of each reply that the judge could tag
    for answer in answers or ():
        if answer["file"] == path and answer["found"]:
            codes_of[answer["id"], answer["part"]] = answer["found"]["strategies"]
    tagged = []
    for dialogue in load_dialogues(path):
        replies = []
        for i, turn in enumerate(dialogue.turns):
            codes = codes_of.get((dialogue.id, i)) if answers else toy_codes(turn["reply"])
            replies.append([codes, turn["change"]])
        tagged.append(replies)
    return tagged


# -------------------------------------------------------------------------------------- what is shown

READING = (
    "uses: replies per dialogue; gain: mean change of the emotion over n replies, which goes with "
    "the strategy and need not be caused by it. Rows without a code are RLVER's groups"
)


async def strategies(args):
    """Tag each reply of each file, and show what is counted. Returns the exit code."""
    check_files(args, least=1)
    need_model("judge", args)
    answers, tagged = await tag_files(args, Judge(args))
    files = {path: strategies_of(dialogues) for path, dialogues in tagged.items()}
    for path, counts in files.items():
        show_strategies(path, counts, answers, names_of_codes(args.lang))
    write_outputs(args, "strategies", {"answers": answers, "files": files})
    return 0


def names_of_codes(lang):
    """{code: name} of the 24 strategies, as the prompt lists them: "(A-1) ask for facts: ..."."""
    template = strategies_question(lang).template
    return dict(re.findall(r"^\(([A-G]-\d)\) ([^:：\n]+)", template, re.M))


def show_strategies(path, counts, answers, names):
    """Show what was counted in one file. names: {code of a strategy: its name}."""
    rows = {}
    for name, usage in counts["strategies"].items():
        if usage["n"]:
            row = f"{name} {names[name]}" if name in names else name
            rows[row] = usage.values()
    source = "The toy's grammar tells the strategies, exactly. "
    if answers:
        source = f"{made_by(answers)}{counts['missing']} answers could not be read. "
    repetition = f"Repetition of strategies (SSRR, 0 to 1): {cell(counts['ssrr'])}. "
    columns = ["uses", "gain", "n"]
    show_table(f"strategies, {path}", columns, rows, f"{source}{repetition}{READING}")


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("strategies", __doc__)
    add_files(parser)
    add_judge_flags(parser)
    return parser.run(lambda args: asyncio.run(strategies(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
