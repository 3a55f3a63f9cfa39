"""tools/capabilities.py - five capabilities of the assistant, scored by a judge (RLVER 3.3).

    python -m tools.capabilities results/before.jsonl results/after.jsonl --judge openai:MODEL@URL

The judge, a language model, gives each dialogue a score from 1 to 5 on five rubrics (RLVER E.3):
empathic depth (ED), core insight (CI), solution crafting (SC), dialogue guidance (DG) and style
adaptability (SA). The table has the mean over dialogues. stderr is over dialogues, spread over the
repeats of one question. For two files the second less the first is shown too, paired over
dialogues.

The score is not quality: judge and user are both models. Differences of 0.3 need the paired table.
Dialogues of fewer than three replies show no guidance and no adaptation: DG and SA leave them out
and count them as short.
"""

import asyncio
import sys
from operator import itemgetter

from tools.dialogues import dialogue_slots, make_cases
from tools.judge import add_judge_flags, load_question, score_dialogues
from tools.tables import add_files, tool_parser, write_outputs

# The five capabilities (RLVER E.3), by the names that they have in files.
CAPABILITIES = {
    "ED": "empathic depth",
    "CI": "core insight",
    "SC": "solution crafting",
    "DG": "dialogue guidance",
    "SA": "style adaptability",
}
SCHEMA = {
    "reasons": dict.fromkeys(CAPABILITIES, str),
    "code": str,
    "scores": dict.fromkeys(CAPABILITIES, range(1, 6)),
}
TOO_SHORT = ("DG", "SA")  # their score means nothing for a dialogue of fewer than three replies
# How the capabilities are called on the terminal.
NAMES = {code: f"{code}, {name}" for code, name in CAPABILITIES.items()}


def capabilities_question(lang):
    """Five scores of a dialogue as a whole."""
    return load_question("capabilities", lang, ["dialogue"], SCHEMA, found=itemgetter("scores"))


def cases_of(path):
    """Each dialogue of a file."""
    return make_cases(path, "capabilities", dialogue_slots)


async def capabilities(args):
    """Ask about each dialogue of each file, and show the means. Returns the exit code."""
    scores = await score_dialogues(
        args, capabilities_question(args.lang), cases_of, TOO_SHORT, NAMES
    )
    if scores is None:  # --plan has told the costs
        return 0
    write_outputs(args, "capabilities", {"capabilities": scores.as_json(), "correlations": {}})
    return 0


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("capabilities", __doc__)
    add_files(parser)
    add_judge_flags(parser)
    return parser.run(lambda args: asyncio.run(capabilities(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
