"""support/flags.py - reading a command line: a parser that complains in one line, and types for
numbers that have bounds.
"""

from support.errors import RunError

import argparse
import json
import sys


class Parser(argparse.ArgumentParser):
    """An argument parser whose complaint is one line, not the whole usage."""

    def error(self, message):
        self.exit(2, f"{self.prog}: {message} (see --help)\n")

    def run(self, work, argv):
        """Parse the flags and call work(args). Returns the exit code. A user's mistake is printed
        in one line, without a traceback."""
        args = self.parse_intermixed_args(argv)
        try:
            return work(args)
        except (RunError, OSError) as error:
            print(f"{self.prog}: {error}", file=sys.stderr)
            return getattr(error, "exit_code", 2)
        except KeyboardInterrupt:
            print("\nstopped", file=sys.stderr)
            return 130


def checked(read, test, what, example=""):
    """A type for argparse: a function that returns read(text) if that passes `test`, and else
    complains in one line that `what` is needed, as in the `example`."""

    def check(text):
        try:
            value = read(text)
        except (ValueError, RecursionError):
            value = None
        if value is None or not test(value):
            raise argparse.ArgumentTypeError(f"{what} is needed{example}, not {text!r}")
        return value

    return check


natural = checked(int, lambda x: x >= 0, "a whole number from 0")
positive = checked(int, lambda x: x >= 1, "a whole number from 1")
above_zero = checked(float, lambda x: 0 < x < float("inf"), "a number above 0")
not_negative = checked(float, lambda x: 0 <= x < float("inf"), "a number from 0")
fraction = checked(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
emotion = checked(int, lambda x: 0 <= x <= 100, "a number from 0 to 100")
json_object = checked(
    json.loads,
    lambda value: isinstance(value, dict),
    "a JSON object",
    ", as '{\"enable_thinking\": false}'",
)
