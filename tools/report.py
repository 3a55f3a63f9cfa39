"""tools/report.py - draw the page and the picture of a run again, or of an unfinished run.

    python -m tools.report runs/NAME

It writes report.html and learning_curve.png into runs/NAME.
"""

from support.command_line import Parser
from support.errors import BadInput
from support.report import draw
from support.rundir import settings_of_run

from pathlib import Path

from people import heldout_of_run


def draw_again(args):
    """Draw the run that the flags name. Returns the exit code; raises BadInput."""
    out = Path(args.path)
    config = settings_of_run(out)
    if not config:
        raise BadInput(f"{args.path}: there is no run here (config.json is missing or unreadable)")
    return 0 if draw(args.path, heldout_of_run(out, config)) else 2


def main(argv=None):
    """Draw what the command line names. Returns the exit code."""
    parser = Parser(
        prog="python -m tools.report",
        description="Draw the page and the picture of a run, from its own files.",
    )
    parser.add_argument("path", help="directory of a run", metavar="RUN")
    return parser.run(draw_again, argv)


if __name__ == "__main__":
    raise SystemExit(main())
