"""tools/strategies.py - which of 24 strategies replies use, and what they earned (RLVER 3.6; SAGE
Table 5).

    python -m tools.strategies runs/NAME/dialogues.jsonl
    python -m tools.strategies results/after.jsonl --judge openai:MODEL@URL

uses: replies per dialogue that use a strategy, among the replies that could be read; gain: the mean
change of the emotion over n such replies; SSRR: how alike the strategies of neighbouring replies
are, 0 to 1. The grammar of the toy determines the strategies of its replies exactly, so no judge is
asked, unless --judge names one.

A gain is not what the strategy causes: a reply with three strategies counts for all three. And this
SSRR is not SAGE's, whose scores and scale are not published.
"""

import re
from itertools import pairwise

from tools.asking import add_judge_flags, ask_files, load_text, made_by
from tools.dialogues import (
    cell,
    check_files,
    load_dialogues,
    mean,
    need_judge,
    reply_slots,
    show_table,
    tool_parser,
    write_outputs,
)
from toy.judge import toy_codes

# SAGE Table 5: {code: name} of the 24 strategies, as the prompt lists them: "(A-1) ask for facts:".
NAMES = dict(re.findall(r"^\((.-\d)\) ([^:]+)", load_text("judge/strategies", "en"), re.M))

# The five groups that RLVER plots (its Table 4), in the codes of SAGE.
RLVER_GROUPS = {
    "Praise": ["E-1", "E-2", "E-3"],
    "Deep Empathy": ["B-2", "B-3", "C-1", "C-2"],
    "Emotional Venting": ["D-2", "D-3"],
    "Advice Provision": ["F-5"],
    "Problem Analysis": ["F-1"],
}

# Of a judge's answer about a reply: its strategies, in the order of its paragraphs.
SCHEMA = {"thoughts": str, "code": str, "strategies": [tuple(NAMES)]}

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
    out are dialogues of one reply, and neighbours of which both have no strategy or one has no
    answer (None). None if nothing is left."""
    means = []
    for replies in sequences:
        similarities = [
            similarity(a, b) for a, b in pairwise(replies) if None not in (a, b) and a + b
        ]
        if similarities:
            means.append(sum(similarities) / len(similarities))
    return sum(means) / len(means) if means else None


# --------------------------------------------------------------------------------------- together
# A tagged dialogue is a list of its replies, each [codes, change of the emotion]. The codes are
# None if the judge's answer could not be read, and the change is None if the reply got no emotion.


def strategies_of(dialogues):
    """All that is counted over tagged dialogues: {"strategies": {group or code: `usage_of` it},
    "ssrr", "missing": replies without tags}."""
    codes_of = RLVER_GROUPS | {code: [code] for code in NAMES}
    tags = [[used for used, _ in replies] for replies in dialogues]
    return {
        "strategies": {name: usage_of(codes, dialogues) for name, codes in codes_of.items()},
        "ssrr": ssrr(tags),
        "missing": sum(tags, []).count(None),
    }


def usage_of(codes, dialogues):
    """{"uses": replies per dialogue that use any of `codes`; "gain", "n": the mean change of the
    emotion over the n replies of these for which it is known (SC(s), RLVER 3.6), None if n is 0}. A
    reply of several strategies counts for each: an association, not a cause.

    Replies whose tags could not be read (None) are not in the numerator of "uses". Its denominator
    is the number of dialogues, multiplied by the share of readable replies. None if no reply could
    be tagged."""
    replies = sum(dialogues, [])
    readable = [reply for reply in replies if reply[0] is not None]
    users = [change for used, change in readable if not set(codes).isdisjoint(used)]
    changes = [change for change in users if change is not None]
    counted_dialogues = len(dialogues) * len(readable) / max(1, len(replies))
    return {
        "uses": len(users) / counted_dialogues if readable else None,
        "gain": mean(changes),
        "n": len(changes),
    }


# -------------------------------------------------------------------------------------- what is shown

READING = (
    "SSRR: repetition of strategies (0 to 1). uses: replies per dialogue; gain: mean change of the "
    "emotion over n replies, which goes with the strategy and need not be caused by it. Rows "
    "without a code are RLVER's groups"
)


def tag_files(args):
    """({file: its tagged dialogues}, the judge's answers). Without --judge the toy's grammar
    determines the strategies, and the answers are None."""
    answers = None
    if args.judge:
        answers = ask_files(args, reply_slots, "strategies", SCHEMA)
    tags = iter(answers or ())
    tagged = {}
    for path in args.files:
        tagged[path] = []
        for dialogue in load_dialogues(path):
            replies = []
            for turn in dialogue.turns:
                used = toy_codes(turn["reply"])
                if answers:
                    used = (next(tags)["found"] or {}).get("strategies")
                replies.append([used, turn["change"]])
            tagged[path].append(replies)
    return tagged, answers


def strategies(args):
    """Tag each reply of each file, and show what is counted. Returns the exit code."""
    check_files(args)
    need_judge(args)
    tagged, answers = tag_files(args)
    source = made_by(answers) if answers else "The toy's grammar determines the tags exactly. "
    files = {}
    for path, dialogues in tagged.items():
        files[path] = counts = strategies_of(dialogues)
        rows = {
            f"{name} {NAMES.get(name, '')}": usage.values()
            for name, usage in counts["strategies"].items()
            if usage["n"]
        }
        told = f"SSRR {cell(counts['ssrr'])}; {counts['missing']} replies without tags. "
        show_table(f"strategies, {path}", ["uses", "gain", "n"], rows, source + told + READING)
    write_outputs(args, "strategies", {"answers": answers, "files": files})
    return 0


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("strategies", __doc__)
    add_judge_flags(parser)
    return parser.run(strategies, argv)


if __name__ == "__main__":
    raise SystemExit(main())
