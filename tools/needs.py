"""tools/needs.py - how clearly users show what they need, scored by a judge (RLVER 3.4).

    python -m tools.needs results/after.jsonl --judge openai:MODEL@URL

The judge, a language model, gives each line of the user scores from 0 to 10: how much of its
attitude, of its thoughts and of its hidden need shows in the line. The table has the means over
dialogues. The judge is told the need and reads the analysis behind the user's emotion; it does not
see the replies.

The score does not measure the assistant's quality. The scripted judge reads nothing here, so it
gives 0.
"""

from support.answers import before_end
from support.forms import Rubric

import asyncio
import sys

from simulator import as_json
from tools.dialogues import make_cases
from tools.judge import add_judge_flags, load_question, score_dialogues
from tools.scores import correlations_of
from tools.tables import add_files, tool_parser, write_outputs

RUBRIC = Rubric(
    low=0,
    high=10,
    parts={
        "attitude": "Attitude(?: expression)?|态度",
        "thoughts": "Thoughts?(?: expression)?|想法",
        "needs": "Needs?(?: expression)?|需求|需要",
        "overall": "Overall|Summary|总体|总分",
    },
)


def needs_question(lang):
    """Four scores of one line of the user."""
    return load_question("needs", lang, ["need", "thought", "line"], RUBRIC.read)


def cases_of(path):
    """Each line that a user of a file says after a reply, with what went on in it before."""

    def slots_of(dialogue):
        return [
            {
                "need": dialogue.task,
                "thought": as_json(analysis_of(turn)),
                "line": as_json(turn["user"]),
            }
            for turn in dialogue.turns
            if turn["user"]
        ]

    return make_cases(path, "needs", slots_of)


def analysis_of(turn):
    """The analysis behind a turn's change, without what may stand behind its End."""
    return before_end(turn["analysis"], turn["mark"]) if turn.get("mark") else turn["analysis"]


async def needs(args):
    """Ask about each line of each file, and show the means. Returns the exit code."""
    scores = await score_dialogues(args, needs_question(args.lang), cases_of)
    if scores is None:  # --plan has told the costs
        return 0
    correlations = correlations_of("needs", scores)
    result = {"needs": scores.as_json(), "correlations": correlations}
    write_outputs(args, "needs", result)
    return 0


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("needs", __doc__)
    add_files(parser)
    add_judge_flags(parser)
    return parser.run(lambda args: asyncio.run(needs(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
