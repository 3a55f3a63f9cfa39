"""tools/table3.py - does it matter whether one trains with the vanilla or the challenging user?
RLVER's Table 3 on the toy.

    python -m tools.table3 --out runs/table3

Two policies are trained with rlver.py, one with the vanilla user and one with the challenging one,
and each is measured with evaluate.py on both: four mean final emotions, with intervals over users.
It takes some minutes for each policy. The same command continues what was interrupted.

The intervals are over users; they do not show how much the seed of training matters.
"""

from support import stats
from support.errors import BadInput
from support.flags import natural, positive
from support.scores import what_scores_are

import asyncio
import sys
from pathlib import Path

import numpy as np

from tools.dialogues import load_dialogues
from tools.tables import Tables, check_files, tool_parser, write_outputs

LEVELS = ("vanilla", "challenging")
READING = (
    "rows: the user that the policy was trained with; columns: the user it is measured with; from, "
    "to: the 95 % interval over users, not over seeds"
)


async def table3(args):
    """Train and measure what is missing, and show the table. Returns the exit code."""
    check_files(args, least=0)
    rows, files = {}, []
    for trained in LEVELS:
        run = Path(args.out) / trained
        await train(run, trained, args)
        cells = []
        for measured in LEVELS:
            file = await measure(run, measured, args)
            files.append(file)
            finals = [dialogue.final for dialogue in load_dialogues(file)]
            mean, low, high, _ = stats.interval(np.mean, finals)
            cells += [mean, low, high]
        rows[f"trained: {trained}"] = cells
    tables = Tables()
    columns = [LEVELS[0], "from", "to", LEVELS[1], "from", "to"]
    reading = f"{READING}. Score: {what_scores_are(files)}"
    tables.show("final emotion", columns, rows, reading)
    write_outputs(args, "table3", {"table3": rows}, tables)
    return 0


async def train(run, difficulty, args):
    """Train a policy with the user of a difficulty; a run that is there goes on."""
    if (run / "config.json").exists():
        flags = ["--resume", run]
    else:
        flags = ["--think", "--difficulty", difficulty, "--out", run]
    flags += ["--seed", args.seed]
    if args.steps:
        flags += ["--steps", args.steps]
    await run_chapter("rlver.py", *flags)


async def measure(run, difficulty, args):
    """Measure the policy of a run with the user of a difficulty. Returns the result file."""
    file = f"{run}-{difficulty}.jsonl"
    flags = ["--policy", run, "--difficulty", difficulty, "--out", file, "--limit", args.limit]
    await run_chapter("evaluate.py", *flags)
    return file


async def run_chapter(script, *flags):
    """Run another chapter, with the terminal. Raises BadInput if it does not end well."""
    home = Path(__file__).resolve().parent.parent
    process = await asyncio.create_subprocess_exec(sys.executable, home / script, *map(str, flags))
    if await process.wait():
        raise BadInput(f"{script} stopped (above); when this is fixed, the same command goes on")


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("table3", __doc__)
    parser.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help="training steps of each policy (default: that of rlver.py)",
    )
    parser.add_argument(
        "--limit",
        type=positive,
        default=128,
        metavar="N",
        help="measure with the first N held-out users (default: 128)",
    )
    parser.add_argument(
        "--seed", type=natural, default=0, metavar="N", help="seed of training (default: 0)"
    )
    parser.add_argument(
        "--out",
        default="runs/table3",
        metavar="PATH",
        help="directory for both runs and the four result files (default: runs/table3)",
    )
    parser.set_defaults(files=[])
    return parser.run(lambda args: asyncio.run(table3(args)), argv)


if __name__ == "__main__":
    sys.exit(main())
