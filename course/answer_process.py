"""answer_process.py - the process that runs a student's formulas. derive.py starts it.

It reads one JSON object from its input, {"file", "text", "calls"}, runs the text and then each
call, [function, arguments]. It answers with lines of JSON: one when the text has been run, and one
per call, {"value": ...} or {"problem": "raises ..."}. The first problem is the last line. What is
compared with what is not known here, so an answer cannot look it up.

Like the grader, this is not a sandbox: it does not stop code that is meant to do harm.
"""

import builtins
import json
import math
import os
import resource
import sys
import textwrap

import numpy as np

ALLOWED = ("math", "numpy")  # what an answer may import
MAX_MEMORY = 3 * 2**30  # bytes
MAX_FILE = 10**8  # bytes that an answer may write to one file
MAX_CPU = 60  # seconds; derive.py keeps the time, and this is for the case that it is killed
MAX_NUMBERS = 1000  # that a function may return


class Refused(ImportError):
    """An import that an answer may not have."""

    def __init__(self, module):
        super().__init__(f"imports {module}; an answer may import math and numpy only")


class BadValue(Exception):
    """A function has returned something that is no number."""


def checked_import(name, module_globals=None, module_locals=None, fromlist=(), level=0):
    """What stands in place of __import__ for the answer, and for the answer alone: numpy goes on
    importing what it needs. Raises Refused."""
    if level or name.split(".")[0] not in ALLOWED:
        raise Refused("." * level + name)
    return builtins.__import__(name, module_globals, module_locals, fromlist)


def namespace():
    """The names that an answer begins with."""
    its_builtins = {**vars(builtins), "__import__": checked_import}
    return {
        "__name__": "answer",
        "__builtins__": its_builtins,
        "math": math,
        "np": np,
        "numpy": np,
    }


def numbers(value):
    """A function's value as a float or nested lists of floats. Raises BadValue."""
    try:
        array = np.asarray(value)
    except ValueError:
        raise BadValue("returns lists of different lengths") from None
    if isinstance(value, int) and array.dtype.kind == "O":
        raise BadValue("returns a whole number that is too large")
    if array.dtype.kind not in "biuf":
        kind = "None" if value is None else f"a {type(value).__name__}"
        raise BadValue(f"returns {kind}, not a number or an array of numbers")
    if array.size > MAX_NUMBERS:
        raise BadValue(f"returns {array.size} numbers")
    return array.astype(float).tolist()


def problem_of(error):
    """What to say of an exception, in one line."""
    if isinstance(error, (Refused, BadValue)):
        return str(error)
    message = "".join(c if c.isprintable() else " " for c in str(error))
    text = f"raises {type(error).__name__}: {message}".strip(" :")
    return textwrap.shorten(text, 160, placeholder=" ...")


def arguments(values):
    """The arguments of a call: a list of numbers becomes an array, a new one for each call."""
    return [np.array(value) if isinstance(value, list) else value for value in values]


def answers(request):
    """Run the text and then each call. Yields what is to be written, a dict for each line."""
    names = namespace()
    exec(compile(request["text"], request["file"], "exec"), names)
    yield {}
    for function, values in request["calls"]:
        if not callable(names.get(function)):
            yield {"problem": "is not there"}
            return
        yield {"value": numbers(names[function](*arguments(values)))}


def main():
    """Read the request, keep the way back, and close everything else to the answer."""
    request = json.load(sys.stdin)
    output = os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE, MAX_FILE))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU, MAX_CPU))
    try:
        for line in answers(request):
            print(json.dumps(line), file=output, flush=True)
    except BaseException as error:  # an answer may raise SystemExit or KeyboardInterrupt, too
        print(json.dumps({"problem": problem_of(error)}), file=output, flush=True)


if __name__ == "__main__":
    main()
