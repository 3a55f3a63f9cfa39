"""tools/tables.py - what the tools print and write, and the flags that they share.

A tool makes its parser with `tool_parser`, prints its numbers with `show_table`, and ends with
`write_outputs`, which does what --json asks for.
"""

from support.errors import BadInput
from support.files import refuse_overwriting, write_json
from support.settings import Parser, fold

import argparse

# ------------------------------------------------------------------------------------------- tables


def show_table(title, columns, rows, reading):
    """Print a table. rows: {name: cells}; reading: how to read the table, printed below it."""
    name_width = max([len(str(name)) for name in rows], default=0) + 1
    print(f"\n{title}")
    for name, cells in {"": columns, **rows}.items():
        line = f"{name!s:{name_width}}"
        for value, column in zip(cells, columns):
            width = max(NARROWEST, len(column))
            line += f"  {cell(value):>{width}}"
        print(line)
    for line in reading.split("\n"):
        print(fold(line))


NARROWEST = 7  # characters of a column: a table of six columns fits into 80


def cell(value):
    """A value as a table has it."""
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def write_outputs(args, tool, result):
    """What --json asks for. result: what goes into the file."""
    if args.json:
        write_json(args.json, {"command": tool, **result})


# ---------------------------------------------------------------------------------- flags and files


def tool_parser(tool, about):
    """A parser for `python -m tools.TOOL` with the flags of every tool. about: its docstring."""
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
    """The files that a tool reads."""
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="a result file of evaluate.py or of SAGE, or a run's dialogues.jsonl",
    )


def check_files(args, least, inputs=(), out=None):
    """Take each of `args.files` once, and refuse fewer than `least`. Refuse outputs (--json,
    and `out`, the file of --out, if the tool has one) that would overwrite one of the
    files, one of the further `inputs`, or each other. Raises BadInput."""
    args.files = list(dict.fromkeys(args.files))
    outputs = {"--json": args.json, "--out": out}
    refuse_overwriting(outputs, [*args.files, *inputs])
    if len(args.files) < least:
        files = "one FILE" if least == 1 else f"{least} FILEs"
        raise BadInput(f"at least {files} must be named: results of evaluate.py, or a run's log")
