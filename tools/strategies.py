"""tools/strategies.py - which of 24 strategies replies use, and what they earned (RLVER 3.6; SAGE
Table 5).

    python -m tools.strategies runs/NAME/dialogues.jsonl
    python -m tools.strategies results/after.jsonl --judge openai:MODEL@URL

uses: replies per dialogue that use a strategy, among the replies that could be read; gain: the mean
change of the emotion over n such replies; asked: the same in dialogues whose hidden need asks for
the strategy; SSRR: how alike the strategies of neighbouring replies are, 0 to 1. For a run's
log the tool also prints uses and gains over the steps. On the toy the grammar tells the strategies,
exactly; no judge is asked, unless --judge names one.

A gain is not what the strategy causes: a reply with three strategies counts for all three. And this
SSRR is not SAGE's, whose scores and scale are not published.
"""

import asyncio
import re
import sys

from tools.dialogues import (
    are_of_toy,
    cases_of_files,
    load_dialogues,
    make_cases,
    need_model,
    reply_slots,
)
from tools.judge import Judge, add_judge_flags, load_question, print_plan
from tools.scores import made_by
from tools.strategy_codes import CODES, RLVER_GROUPS, steps_of, strategies_of, toy_codes
from tools.tables import add_files, cell, check_files, show_table, tool_parser, write_outputs

# The codes of a reply's strategies, in the order of its paragraphs.
SCHEMA = {"thoughts": str, "code": str, "strategies": [tuple(CODES)]}
READING = (
    "uses: replies per dialogue; gain: mean change of the emotion over n replies, which goes with "
    "the strategy and need not be caused by it; asked: the same in dialogues whose hidden need "
    "asks for it. Rows without a code are RLVER's groups of strategies"
)
READING_OF_STEPS = {
    "uses": "uses: replies per dialogue that use a strategy of the group",
    "gain": "gain: mean change of the emotion over these replies",
}


async def strategies(args):
    """Tag each reply of each file, and show what is counted. Returns the exit code."""
    check_files(args, least=1)
    need_model("judge", args)
    is_judged = bool(args.judge) or not are_of_toy(args.files)
    question = strategies_question(args.lang)
    cases = cases_of_files(args.files, cases_of) if is_judged else []
    judge = Judge(args)
    if args.plan:
        print_plan(judge, [(question, cases)])
        return 0
    answers = None
    if is_judged:
        await judge.check(question)
        answers = await judge.ask_all(question, cases)
    result = {"answers": {"strategies": answers} if is_judged else {}, "files": {}}
    for path in args.files:
        counts = count_strategies(path, answers)
        show_strategies(path, counts, answers, names_of_codes(question.template))
        result["files"][path] = counts
    write_outputs(args, "strategies", result)
    return 0


def count_strategies(path, answers):
    """What is counted in one file: all of `strategies_of`; "missing", the judge's answers that
    could not be read; "steps", the same over the steps of a training log; and "tagged", the
    dialogues with their tags."""
    tagged = tagged_dialogues(path, answers)
    found = [answer["found"] for answer in answers or () if answer["file"] == path]
    return {
        **strategies_of(tagged),
        "missing": found.count(None),
        "steps": steps_of(tagged),
        "tagged": tagged,
    }


def show_strategies(path, counts, answers, names):
    """Show what `count_strategies` counted in one file. names: {code of a strategy: its name}."""
    rows = {}
    for name, usage in counts["strategies"].items():
        if usage["n"]:
            row = f"{name} {names[name]}" if name in names else name
            rows[row] = [usage[key] for key in ("uses", "gain", "n", "asked", "asked_n")]
    source = "Made by rule: the toy's grammar tells the strategies, exactly. "
    if answers:
        source = f"{made_by(answers)}{counts['missing']} answers could not be read. "
    repetition = f"Repetition of strategies (SSRR, 0 to 1): {cell(counts['ssrr'])}. "
    show_table(
        f"strategies, {path}",
        ["uses", "gain", "n", "gain asked", "n asked"],
        rows,
        f"{source}{repetition}{READING}",
    )
    if len(counts["steps"]) > 1:
        for key in ("uses", "gain"):
            rows = {}
            for step, counts_of_step in counts["steps"].items():
                usage_of = counts_of_step["strategies"]
                rows[step] = [usage_of[name][key] for name in RLVER_GROUPS]
            title = f"{key} in each tenth of the training, by its last step"
            show_table(title, list(RLVER_GROUPS), rows, READING_OF_STEPS[key])


def tagged_dialogues(path, answers):
    """The dialogues of a file with the strategies of each reply, as tools/strategy_codes.py wants
    them: by a judge's `answers`, or, None, by the toy's grammar."""
    codes_of = {}  # of each reply that the judge could tag
    for answer in answers or ():
        if answer["file"] == path and answer["found"]:
            codes_of[answer["id"], answer["part"]] = answer["found"]["strategies"]
    tagged = []
    for dialogue in load_dialogues(path):
        replies = []
        for i, turn in enumerate(dialogue.turns):
            if answers is None:
                codes = toy_codes(turn["reply"])
            else:
                codes = codes_of.get((dialogue.id, i))
            replies.append([codes, turn["change"]])
        tagged.append(
            {
                "id": dialogue.id,
                "intention": dialogue.intention,
                "step": dialogue.step,
                "split": dialogue.split,
                "replies": replies,
            }
        )
    return tagged


# ------------------------------------------------------------------------------ asking for the tags


def strategies_question(lang):
    """The strategies of one reply. A reply has its strategies, so it is asked about once."""
    placeholders = ["dialogue", "line", "reply"]
    return load_question("strategies", lang, placeholders, SCHEMA, repeated=False)


def names_of_codes(template):
    """{code: name} of the 24 strategies, as the prompt lists them: "(A-1) ask for facts: ..."."""
    return dict(re.findall(r"^\(([A-G]-\d)\) ([^:：\n]+)", template, re.M))


def cases_of(path):
    """Each reply of a file."""
    return make_cases(path, "strategies", reply_slots)


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("strategies", __doc__)
    add_files(parser)
    add_judge_flags(parser)
    return parser.run(lambda args: asyncio.run(strategies(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
