"""tools/needs.py - how clearly users show what they need, scored by a judge (RLVER 3.4).

    python -m tools.needs results/after.jsonl --judge openai:MODEL@URL

The judge, a language model, gives each line of the user scores from 0 to 10: how much of its
attitude, of its thoughts and of its hidden need shows in the line. The table has the means over
dialogues. The judge is told the need and reads the analysis behind the user's emotion; it does not
see the replies.

The score does not measure the assistant's quality. The scripted judge reads nothing here, so it
gives 0.
"""

import asyncio
import sys
from operator import itemgetter

from simulator import as_json
from tools.dialogues import analysis_of, make_cases
from tools.judge import add_judge_flags, load_question, score_dialogues
from tools.scores import correlations_of
from tools.tables import add_files, tool_parser, write_outputs

SCALES = ("attitude", "thoughts", "needs", "overall")
SCHEMA = {"reasons": str, "code": str, "scores": dict.fromkeys(SCALES, range(11))}


def needs_question(lang):
    """Four scores of one line of the user."""
    placeholders = ["need", "thought", "line"]
    return load_question("needs", lang, placeholders, SCHEMA, found=itemgetter("scores"))


def cases_of(path):
    """Each line that a user of a file says after a reply, with what went on in it before."""

    def slots_of(dialogue):
        slots = []
        for turn in dialogue.turns:
            thought = analysis_of(turn)
            if turn["user"] and thought:
                line = as_json(turn["user"])
                slots.append({"need": dialogue.task, "thought": as_json(thought), "line": line})
        return slots

    return make_cases(path, "needs", slots_of)


async def needs(args):
    """Ask about each line of each file, and show the means. Returns the exit code."""
    scores = await score_dialogues(args, needs_question(args.lang), cases_of)
    if scores is None:  # --plan has told the costs
        return 0
    result = {"needs": scores.as_json(), "correlations": correlations_of("needs", scores)}
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
