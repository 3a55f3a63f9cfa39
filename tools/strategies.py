"""tools/strategies.py - which of 24 strategies replies use, what they earned (RLVER 3.6; SAGE Table
5), and where they place a policy.

    python -m tools.strategies runs/NAME/dialogues.jsonl
    python -m tools.strategies results/after.jsonl --judge openai:MODEL@URL
    python -m tools.strategies results/before.jsonl results/after.jsonl --coordinate --judge ...

uses: replies per dialogue that use a strategy, among the replies that could be read; gain: the mean
change of the emotion over n such replies; SSRR: how alike the strategies of neighbouring replies
are, 0 to 1. The grammar of the toy determines the strategies of its replies exactly, so no judge is
asked, unless --judge names one.

A gain is not what the strategy causes: a reply with three strategies counts for all three. And this
SSRR is not SAGE's, whose scores and scale are not published.

--coordinate says where policies stand beside each other, from structured (x = -1) to creative (1)
and from solution (y = -1) to empathy (1): one prompt places all FILEs by the reasons of their
successes and failures and by their strategies (SAGE 4.2, RLVER 3.7; tools/coordinate.py). Places of
different calls do not compare.
"""

from support.command_line import positive

from collections import Counter
from itertools import pairwise

from tools.asking import (
    add_judge_flags,
    ask,
    make_cases,
    need_judge,
    reply_slots,
    source_of,
)
from tools.coordinate import place_files, reason_cases
from tools.dialogues import load_dialogues
from tools.tables import (
    cell,
    check_files,
    check_picture,
    mean,
    show_table,
    tool_parser,
    write_outputs,
)
from toy.judge import toy_codes

# SAGE Table 5: the names of the 24 strategies. (The prompt judge/strategies explains them.)
NAMES = {
    "A-1": "ask for facts",
    "A-2": "ask for the state of mind",
    "A-3": "ask for solutions",
    "A-4": "ask for an opinion",
    "A-5": "rhetorical question",
    "B-1": "shallow empathy",
    "B-2": "empathy by restating",
    "B-3": "deep empathy",
    "C-1": "echo",
    "C-2": "own story",
    "D-1": "comfort",
    "D-2": "willingness to listen",
    "D-3": "venting along",
    "E-1": "affirm qualities",
    "E-2": "affirm thoughts",
    "E-3": "affirm actions",
    "E-4": "companionship",
    "F-1": "analysis of the problem",
    "F-2": "relief of emotion",
    "F-3": "professional help",
    "F-4": "general advice",
    "F-5": "specific advice",
    "G-1": "information on the problem",
    "G-2": "information on the solution",
}

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

# ------------------------------------------------------------------------------ the tags of replies
# A tagged dialogue is a list of its replies, each [codes, change of the emotion]. The codes are
# None if the judge's answer could not be read, and the change is None if the reply got no emotion.


def tag_files(args):
    """Tag each reply of the files. Returns ({file: its tagged dialogues}, the judge's answers).
    Without --judge the toy's grammar determines the strategies, and the answers are None."""
    answers, codes_of_answers = None, iter(())
    if args.judge:
        cases = make_cases(args.files, "strategies", reply_slots)  # one a reply, in their order
        answers = ask(args, cases, "strategies", SCHEMA)
        codes_of_answers = ((row["found"] or {}).get("strategies") for row in answers)

    def tagged(turn):
        codes = next(codes_of_answers) if args.judge else toy_codes(turn["reply"])
        return [codes, turn["change"]]

    return {
        path: [[tagged(turn) for turn in dialogue.turns] for dialogue in load_dialogues(path)]
        for path in args.files
    }, answers


# --------------------------------------------------------- what they earn, and how much is repeated


def strategies_of(dialogues):
    """Count over the tagged dialogues of a file: {"strategies": {group or code: `usage_of` it},
    "ssrr", "missing": replies without tags}."""
    codes_of = RLVER_GROUPS | {code: [code] for code in NAMES}
    sequences = [[codes for codes, _ in replies] for replies in dialogues]
    return {
        "strategies": {name: usage_of(codes, dialogues) for name, codes in codes_of.items()},
        "ssrr": ssrr(sequences),
        "missing": sum(sequences, []).count(None),
    }


def usage_of(codes, dialogues):
    """How often tagged dialogues use any of `codes`, and what that earned (SC(s), RLVER 3.6):
    {"uses": such replies per dialogue; "gain", "n": the mean change of the emotion over the n of
    them for which it is known, None if n is 0}. A reply of several strategies counts for each: an
    association, not a cause.

    Replies whose tags could not be read (None) are not in the numerator of "uses". Its denominator
    is the number of dialogues, multiplied by the share of readable replies. None if no reply could
    be tagged."""
    replies = sum(dialogues, [])
    readable = [reply for reply in replies if reply[0] is not None]
    matches = [change for tags, change in readable if not set(codes).isdisjoint(tags)]
    changes = [change for change in matches if change is not None]
    readable_dialogues = len(dialogues) * len(readable) / max(1, len(replies))
    return {
        "uses": len(matches) / readable_dialogues if readable else None,
        "gain": mean(changes),
        "n": len(changes),
    }


def ssrr(sequences):
    """Strategy sequence repetition rate (SAGE 4.2): the mean over dialogues of the mean similarity
    of neighbouring replies. sequences: for each dialogue a list of replies, each a list of codes.
    Left out are dialogues of one reply, and neighbours of which both have no strategy or one has no
    answer (None). None if nothing is left."""
    means = []
    for replies in sequences:
        similarities = [
            similarity(a, b) for a, b in pairwise(replies) if None not in (a, b) and a + b
        ]
        if similarities:
            means.append(sum(similarities) / len(similarities))
    return sum(means) / len(means) if means else None


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


# -------------------------------------------------------------------------------------------- shown

READING = (
    "SSRR: repetition of strategies (0 to 1). uses: replies per dialogue; gain: mean change of the "
    "emotion over n replies, which goes with the strategy and need not be caused by it. Rows "
    "without a code are RLVER's groups"
)


def count_strategies(args, dialogues_of, answers):
    """Show and write what is counted over the tagged dialogues of each file. Returns the exit
    code."""
    source = source_of(answers) if answers else "The toy's grammar determines the tags exactly. "
    files = {}
    for path, dialogues in dialogues_of.items():
        files[path] = counts = strategies_of(dialogues)
        rows = {
            f"{name} {NAMES.get(name, '')}": usage.values()
            for name, usage in counts["strategies"].items()
            if usage["n"]
        }
        summary = f"SSRR {cell(counts['ssrr'])}; {counts['missing']} replies without tags. "
        reading = source + summary + READING
        show_table(f"strategies, {path}", ["uses", "gain", "n"], rows, reading)
    write_outputs(args, "strategies", {"answers": answers, "files": files})
    return 0


def shares_of(dialogues):
    """How often tagged dialogues use each strategy, in words: "A-1 50 %, A-2 0 %, ..."."""
    counts = Counter()
    for codes, _ in sum(dialogues, []):
        counts.update(codes or ())
    total = max(1, counts.total())
    return ", ".join(f"{code} {100 * counts[code] / total:.0f} %" for code in NAMES)


# --------------------------------------------------------------------------------------------- main


def strategies(args):
    """Tag the replies of the files, and count their strategies or place the files. Returns the exit
    code."""
    check_files(args, out=args.picture)
    check_picture(args, args.coordinate, "--coordinate has")
    need_judge(args)
    if not args.coordinate:
        return count_strategies(args, *tag_files(args))
    cases = reason_cases(args.files)  # refused, if there are none, before a question is asked
    dialogues_of, answers = tag_files(args)
    shares = {path: shares_of(dialogues) for path, dialogues in dialogues_of.items()}
    return place_files(args, cases, shares, answers)


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("strategies", __doc__)
    add_judge_flags(parser)
    add = parser.add_argument
    add("--coordinate", action="store_true", help="place the FILEs in a plane instead, see above")
    text = "ask for the places N times (default: 3)"
    add("--repeats", type=positive, default=3, metavar="N", help=text)
    add("--picture", metavar="FILE", help="draw the places")
    return parser.run(strategies, argv)


if __name__ == "__main__":
    raise SystemExit(main())
