"""patches.py - what exercises and labs both do: find the project, read a list, replace a text, end
a process."""

import os
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
    return tomllib.loads((HERE / name).read_text(encoding="utf-8"))


def replaced(text, old, new, whose, where, advice):
    """`text` with `old`, which must be there exactly once, replaced by `new`. Raises BadInput,
    saying whose change no longer fits."""
    if text.count(old) != 1:
        raise BadInput(
            f"{whose}: its old text is {text.count(old)} times in {where}, not once; {advice}"
        )
    return text.replace(old, new)


@contextmanager
def terminable():
    """A kill (SIGTERM) ends this process as an exception does, by way of every `finally`, so that
    its children end too."""
    usual = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def kill(process):
    """A process, and whatever it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()  # it may not have come to a group of its own
