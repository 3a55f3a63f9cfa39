"""support/command_line.py - what the command lines of all programs share: a parser that complains
in one line, types for numbers that have bounds, and the names of models.
"""

from support.errors import WITH_A_MESSAGE, BadInput, explain, without_passwords
from support.files import parse_json

import argparse
import asyncio
import contextlib
import math
import os
import re
import sys
import textwrap
import threading
from functools import partial
from urllib.parse import urlsplit

# --------------------------------------------------------------------------------------- the parser

WIDTH = 80  # columns of a usual terminal


def fold(text, width=WIDTH):
    """A paragraph in lines of `width` columns. Paths and flags stay whole, so that they can be
    copied."""
    return textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)


def print_folded(text):
    """Print a paragraph, at once."""
    print(fold(text), flush=True)


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, without the usage. A flag without a
    type of its own is a `path_or_name`.

    It also sets up the standard streams. The terminal shows "?" for a character that it lacks. What
    is typed and is no text, such as the rest of a Chinese character of which one byte was erased,
    is read as U+FFFD; otherwise it would end the program here, in a tokenizer or in a log."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register("type", None, path_or_name)
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            # a stream that is no file cannot do it, nor one that is closed or was read already
            with contextlib.suppress(AttributeError, ValueError):
                stream.reconfigure(errors="replace")

    def error(self, message):
        """End the program with exit code 2."""
        self.exit(2, without_passwords(f"{self.prog}: {message} (see --help)\n"))

    def run(self, work, argv):
        """Parse the flags and call work(args). Returns the exit code. A user's mistake is printed
        in one line, without a traceback."""
        args = self.parse_intermixed_args(argv)
        try:
            return work(args)
        except WITH_A_MESSAGE as error:
            code, message = explain(error, program=self.prog)
            print(message, file=sys.stderr)
            return code


def read_checked(read, test, what, text):
    """The value of a flag, read(text), if it passes `test`. Otherwise the error says in one line
    that `what` is needed."""
    try:
        value = read(text)
        if test(value):
            return value
    except ValueError:
        pass  # what `read` cannot read
    raise argparse.ArgumentTypeError(f"{what} is needed, not {text!r}")


def refuse_nesting(in_main_thread=False):
    """Refuse to run inside an asyncio loop, because a program starts its own. in_main_thread: also
    in any thread but the main one, which alone can handle signals."""
    inside = ""
    if in_main_thread and threading.current_thread() is not threading.main_thread():
        inside = "a thread"
    with contextlib.suppress(RuntimeError):  # no loop is running
        asyncio.get_running_loop()
        inside = "an asyncio loop, as a notebook has one"
    if inside:
        raise BadInput(f"cannot run in {inside}; run it as a command (in a notebook: !python ...)")


# types for argparse, each a function of the text
natural = partial(read_checked, int, lambda x: x >= 0, "a whole number from 0")
positive = partial(read_checked, int, lambda x: x >= 1, "a whole number from 1")
above_zero = partial(read_checked, float, lambda x: 0 < x < math.inf, "a number above 0")
not_negative = partial(read_checked, float, lambda x: 0 <= x < math.inf, "a number from 0")
fraction = partial(read_checked, float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
emotion_value = partial(read_checked, int, lambda x: 0 <= x <= 100, "a whole number from 0 to 100")
json_object = partial(read_checked, parse_json, lambda x: isinstance(x, dict), "a JSON object")


# A path that is not empty, does not begin with a ~, and has no byte that is not UTF-8: Python reads
# such a byte as half a surrogate pair.
USABLE_PATH = re.compile(r"(?!~)[^\ud800-\udfff]+")


def path_or_name(text, change=os.path.expanduser):
    """A path or a model's name, with the home directory in place of its ~. (A shell does so only at
    the beginning of a word, and not in --out=~/run or local:~/model.) change: what is done to the
    path.

    Bytes of a file name that are no UTF-8 are refused: they would end the program where the name is
    logged as JSON. What keeps its ~ has no such home; ./~x names a file ~x."""
    place = text.removeprefix("local:")
    return text.removesuffix(place) + read_checked(
        change,
        USABLE_PATH.fullmatch,
        "a path or name in UTF-8, in which ~ is a home directory,",
        place,
    )


# ------------------------------------------------------------------------------- names of models

# The --simulator names of scripted users, and what the scripts are. They cost nothing, log no
# calls, and can play only the profiles that were made for them.
SCRIPTED = {
    "toy": "a script. It knows a small grammar and cannot judge comfort",
    "toy-weak": "a script. It counts words and is made to be hacked",
}


def scripted_notice(simulator_name, reader=None):
    """A sentence that says that this user is scripted, or "". reader: the name of its reader."""
    if simulator_name not in SCRIPTED:
        return ""
    if reader:
        return f"The user {simulator_name} speaks by a script; what it feels is read from {reader}."
    return f"The user {simulator_name} is {SCRIPTED[simulator_name]}."


def split_name(name):
    """The parts (kind, model, address) of a --simulator value: it is split at the first ":" and,
    for openai, the last "@"."""
    kind, _, rest = name.partition(":")
    if kind != "openai":
        return kind, rest, ""
    model, _, url = rest.rpartition("@")
    with contextlib.suppress(ValueError):  # of a port, or an address in brackets
        if model and re.match(r"https?://[^\s/]", url) and urlsplit(url).port != 0:
            return kind, model, url
    raise BadInput(
        f"{name}: openai:MODEL@URL is needed, the URL with http:// or https:// and no password"
    )


def from_anywhere(name):
    """A path, or a model's name. What exists becomes an absolute path: a run may be resumed, and its
    config.json read, from another directory. (The path may stand behind "local:".)"""
    name = path_or_name(name)
    is_there = name not in SCRIPTED and os.path.exists(name.removeprefix("local:"))
    return path_or_name(name, os.path.abspath) if is_there else name
