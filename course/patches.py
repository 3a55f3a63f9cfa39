"""patches.py - what the files of course/ share: the place of the project, the lists in TOML, a text
that is replaced, processes that end with this one, and tables."""

import csv
import os
import re
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path.insert(0, str(ROOT))  # the project's own modules are importable from here on

from support.errors import BadInput

import tomllib


def read_toml(name):
    """The file `name` of the directory course/."""
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


def exercises(only=None):
    """The exercises as {name: exercise}, all or those named in "gae,clip", in the order of the
    list. Raises BadInput for an unknown name."""
    everything = read_toml("exercises.toml")
    if only is None:
        return everything
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in everything]
    if unknown or not names:
        first = unknown[0] if unknown else ""
        raise BadInput(
            f"--only {only}: there is no exercise {first!r}; there are {', '.join(everything)}"
        )
    return {name: exercise for name, exercise in everything.items() if name in names}


def replaced(text, *, old, new, change, place, advice):
    """`text` with `old`, which must be there exactly once, replaced by `new`.

    The other arguments are words for the message. change: which change this is; place: what the
    text is ("ppo.py"); advice: what to do if the change does not fit. Raises BadInput if `old` is
    missing or there more than once.
    """
    count = text.count(old)
    if count != 1:
        raise BadInput(f"{change}: its old text is {count} times in {place}, not once; {advice}")
    return text.replace(old, new)


@contextmanager
def terminable():
    """Within this block SIGTERM (a plain `kill`) raises SystemExit, so that every `finally` runs
    and the children of this process end too."""
    previous = signal.signal(signal.SIGTERM, exit_terminated)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def exit_terminated(signal_number, frame):
    """Handle SIGTERM: end with the exit code of a process that it has killed, 128 + 15."""
    sys.exit(143)


def kill(process):
    """End a process, and all that it has started in its process group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # a process that has just begun may not have a group of its own yet


def plural(count, what="exercise"):
    """A count and its noun: 1 exercise, 2 exercises."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def opened_for_writing(flag, name):
    """The file `name`, opened before the work and not after it, or, without a name, a file that
    keeps nothing. Raises BadInput if it cannot be written."""
    try:
        return open(name or os.devnull, "w", newline="", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{flag} {name}: cannot be written ({error.strerror})") from None


def write_row(csv_file, cells):
    """Write a row, and flush it, so that the file can be read while others are graded."""
    csv.writer(csv_file).writerow(cells)
    csv_file.flush()


def point_columns(part):
    """The columns of a file of points; part: what a row is about ("exercise"). points.py reads
    them."""
    return ["submission", part, "points", "of", "result"]


def markdown(columns, rows):
    """A table in Markdown."""
    head = "| " + " | ".join(map(str, columns)) + " |"
    rule = "|" + "---|" * len(columns)
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    return "\n".join([head, rule, *lines])


def with_tables(text, kind, table_named):
    """The text of a document with its tables written anew, each between two comments, <!-- KIND:
    NAME --> and <!-- KIND: end -->. table_named(name): the table, in Markdown; "" leaves what is
    there."""

    def block(match):
        opening, name, _, closing = match.groups()
        table = table_named(name)
        return f"{opening}{table}\n{closing}" if table else match[0]

    pattern = rf"(<!-- {kind}: (\w+) -->\n)(.*?)(<!-- {kind}: end -->)"
    return re.sub(pattern, block, text, flags=re.DOTALL)
