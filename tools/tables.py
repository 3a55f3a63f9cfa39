"""tools/tables.py - the flags, files and tables of a tool. It is no tool itself.

A tool makes its parser with `tool_parser`, looks at its files with `check_files`, prints its numbers
with `show_table`, and ends with `write_outputs`.
"""

from support.command_line import Parser, print_folded
from support.errors import BadInput
from support.files import refuse_overwriting, write_json

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np

# ---------------------------------------------------------------------------------- flags and files


def tool_parser(tool, about):
    """The parser of `python -m tools.TOOL`, with --json, which every tool has. about: the tool's
    docstring, its help."""
    parser = Parser(
        prog=f"python -m tools.{tool}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", metavar="FILE", help="write the tables and all that they were made of to FILE"
    )
    return parser


def add_files(parser):
    """Add the files that a tool reads to its parser."""
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="a result file of evaluate.py or of SAGE, or a run's dialogues.jsonl",
    )


def check_files(args, least=1, inputs=(), out=None):
    """Take each of `args.files` once. Raises BadInput if they are fewer than `least`, or if an
    output (--json, and `out`, the other file that a tool writes) would overwrite one of them, one
    of the further `inputs`, or the other output."""
    args.files = list(dict.fromkeys(args.files))
    refuse_overwriting({"--json": args.json, "output": out}, [*args.files, *inputs])
    if len(args.files) < least:
        raise BadInput("name a FILE: results of evaluate.py, or a run's log")


def check_picture(args, has_one, which):
    """Refuse a --picture that cannot be drawn: raise BadInput if there is none to draw (`which` says
    what has one), or matplotlib cannot write it."""
    path = args.picture
    if not path:
        return
    if not has_one:
        raise BadInput(f"--picture: only {which} one")
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ImportError as error:
        raise BadInput(f"--picture: {error}; pip install matplotlib") from None
    kinds = FigureCanvasBase.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in kinds:
        raise BadInput(f"--picture {path}: its name should end with one of {', '.join(kinds)}")


def write_outputs(args, tool, result):
    """Write `result` to the file of --json, if it is given."""
    if args.json:
        write_json(args.json, {"command": tool, **result})


# ------------------------------------------------------------------------------------------- tables


def show_table(title, columns, rows, reading):
    """Print a table. rows: {name: cells}; reading: how to read it, printed below."""
    name_width = max(map(len, rows), default=0) + 1
    print(f"\n{title}")
    for name, cells in {"": columns, **rows}.items():
        line = f"{name:{name_width}}"
        for value, column in zip(cells, columns):
            # at least 7 characters a column: a table of six fits into 80
            line += f"  {cell(value):>{max(7, len(column))}}"
        print(line)
    for line in reading.split("\n"):
        print_folded(line)


def cell(value):
    """The text of a value in a table."""
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def parts_by(column, rows):
    """{value of the column: the rows that have it}, in the order of the rows."""
    parts = defaultdict(list)
    for row in rows:
        parts[row[column]].append(row)
    return parts


def mean(values):
    """The mean of `values`, or None without values."""
    return float(np.mean(values)) if len(values) else None
