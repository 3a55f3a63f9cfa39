"""How a student's function gets into the project's file to be graded: with its helpers, and with
nothing else of what stands around it."""

import pytest

from exercises import written
from surgery import transplant

OURS = '''"""A module."""
import math


def one(x):
    """Its docstring."""
    return x


class Box:
    """A class."""

    @property
    def two(self):
        return 2


if __name__ == "__main__":
    print(one(1))
'''


def test_a_function_is_taken_with_its_helpers_and_nothing_else():
    """What a student did elsewhere, at the top level above all, is not taken along: it could end
    the process, or every test."""
    theirs = """
import sys
import numpy as np
EPS, UNUSED = 1e-8, 3
sys.exit(0)

def helper(x):
    return deeper(x) + EPS

def deeper(x):
    return np.abs(x)

def stranger():
    return 1

def one(x, *, more=EPS):
    return helper(x)

class Box:
    @property
    def two(self):
        return 0

    @property
    def two(self):
# a comment in column 0
        return stranger()
"""
    got = transplant(OURS, theirs, ["one"])
    assert "sys" not in got and "stranger" not in got
    assert got.count("def helper") == got.count("import numpy as np") == 1
    assert got.index("EPS, UNUSED") < got.index("def one")
    assert written(got, "Box.two") == written(OURS, "Box.two")
    names = {"__name__": "x"}
    exec(got, names)
    assert names["one"](-2) == 2 + 1e-8
    got = transplant(OURS, theirs, ["Box.two"])
    exec(got, names)
    assert names["Box"]().two == 1 and written(got, "one") == written(OURS, "one")


def test_a_method_keeps_its_tabs_and_its_strings():
    """Its first line had our spaces and the others tabs; and a string of several lines got four
    spaces more."""
    names = {"__name__": "x"}
    theirs = 'class Box:\n\t@property\n\tdef two(self):\n\t\treturn """a\nb"""\n'
    exec(transplant(OURS, theirs, ["Box.two"]), names)
    assert names["Box"]().two == "a\nb"


@pytest.mark.parametrize(
    "theirs, wanted",
    [
        (
            "import math, cmath\n\ndef one(x):\n    return cmath.sqrt(x)",
            2,
        ),  # of an import what is new
        # a demo, with an argument's name
        ("x = 1 / 0\n\ndef one(x):\n    return x\n\nprint(one(x))", 4),
        # a name, and a local of that name
        ("def h(x):\n    return 2 * x\n\ndef one(x):\n    return h(sum(h for h in [x]))", 8),
        ('K = """a\n"""; L = 3\n\ndef one(x):\n    return x + L', 7),  # half a string on the line
        ("N = 0\n\ndef one(x):\n    global N\n    N += 1\n    return N", 1),
        (
            "class H:\n    def f(self, x): return x + E\n\nE = 1\n\ndef "
            "one(x):\n    return H().f(x)",
            5,
        ),
        ("def one(x):\n    raise NotImplementedError\n\ndef one(x):\n    return x + 9", 13),
        (
            "@(lambda f: f)\ndef one(x, g=lambda y: y \\\n\t+ E):\n\tdef h():\n\t  return g(x)\n\n\treturn h()\n\nE = 1",
            5,
        ),
    ],
)
def test_helpers_are_found_as_python_finds_them(theirs, wanted):
    """A right answer must not be lost to what stands around it."""
    names = {"__name__": "x"}
    exec(transplant(OURS, theirs, ["one"]), names)
    assert names["one"](4) == wanted
