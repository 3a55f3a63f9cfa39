"""patches.py - what the files of course/ share: the place of the project, the lists in TOML, and
the replacement of a text."""

import sys
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
    list. "nano": the checks of a nano.py, which have no functions, because the file is taken whole.
    Raises BadInput for an unknown name."""
    if only == "nano":
        return read_toml("nano.toml")
    everything = read_toml("exercises.toml")
    if only is None:
        return everything
    names = [name.strip() for name in only.split(",")]
    for name in names:
        if name not in everything:
            raise BadInput(
                f"--only {only}: there is no exercise {name!r}; there are {', '.join(everything)}; "
                "and nano, alone"
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


def plural(count, what="exercise"):
    """A count and its noun: 1 exercise, 2 exercises."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
