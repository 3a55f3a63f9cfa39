"""Draw the report and the learning curve of a run once more, from its logs. The numbers are those
that the run wrote down: nothing is measured again, and no model is needed.

    python -m tools.report runs/NAME
"""

from support.errors import BadInput
from support.files import read_json
from support.flags import Parser
from support.report import draw_run
from support.rundir import newest_state

import sys
from pathlib import Path

from evaluate import heldout_of_run


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    return make_parser().run(run, argv)


def make_parser():
    """The flags of this tool."""
    parser = Parser(
        prog="python -m tools.report", description="Write a run's report and picture once more."
    )
    parser.add_argument("run", help="directory of the run", metavar="RUN")
    return parser


def run(args):
    """report.html and learning_curve.png of a run, from its logs."""
    place = Path(args.run)
    config = read_json(place / "config.json")
    if "algo" not in config:
        raise BadInput(f"{place}: there is no run here (config.json is missing or unreadable)")
    people = heldout_of_run(place, config, config["simulator"])
    draw_run(place, newest_state(place), people)
    print(f"written: {place / 'report.html'}, {place / 'learning_curve.png'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
