"""How a student's function gets into the project's file to be graded: with all that is new at the
top level of its file, and with nothing else of what stands around it."""

import ast
import re

import pytest

from exercises import ALL, source, written
from surgery import transplant

OURS = '''"""A module."""
import math
import wsgiref


def one(x):
    """Its docstring."""
    return x


class Box:
    """A class."""

    @property
    def two(self):
        return 2


if __name__ == "__main__":
    found = one(1)
    print(found)
'''


def test_a_function_is_taken_with_what_is_new_and_nothing_else():
    """What a student did to another exercise is not taken along: it could end every test."""
    theirs = """
import numpy as np
EPS, UNUSED = 1e-8, 3

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
        ("x = 1\n\ndef one(x):\n    return x\n\nprint(one(x))", 4),
        # a name, and a local of that name
        ("def h(x):\n    return 2 * x\n\ndef one(x):\n    return h(sum(h for h in [x]))", 8),
        ('K = """a\n"""; L = 3\n\ndef one(x):\n    return x + L', 7),  # half a string on the line
        # a name of our demo
        ("def found(x):\n    return x + 2\n\ndef one(x):\n    return found(x)", 6),
        # a part of a package that we have
        ("import wsgiref.util\n\ndef one(x):\n    return len(wsgiref.util.__name__)", 12),
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


def merged(theirs):
    """The names of our file, which has two constants, with the function `one` of a student's."""
    constants = "\nLIMIT, TABLE = 7, [1]\n"
    found = {"__name__": "x"}
    exec(transplant(OURS.replace("\n\n", constants, 1), constants + theirs, ["one"]), found)
    return found


# each sets {name} to 3
STATEMENTS = {
    "AnnAssign": "{name}: int = 3",
    "Assert": "{name} = 3\nassert {name}",
    "Assign": "{name} = 3",
    "AsyncFor": "async def f(many):\n    async for {name} in many: pass\n{name} = 3",
    "AsyncFunctionDef": "@lambda f: 3\nasync def {name}(): pass",
    "AsyncWith": "async def f(one):\n    async with one: pass\n{name} = 3",
    "AugAssign": "{name} = 1\n{name} += 2",
    "Break": "for {name} in range(3, 9): break",
    "ClassDef": "@lambda c: 3\nclass {name}: pass",
    "Continue": "for {name} in range(4): continue",
    "Delete": "{name} = 3\nother = 4\ndel other",
    "Expr": "globals().update({name}=3)",
    "For": "for {name} in [3]: pass",
    "FunctionDef": "@lambda f: globals().update({name}=3)\ndef f(): pass\n@lambda f: 3\ndef {name}(): pass",
    "Global": "def f():\n    global {name}\n    {name} = 3\nf()",
    "If": "if True: {name} = 3",
    "Import": "import sys\nsys.modules['x3'] = 3\nimport x3 as {name}\ndel sys.modules['x3']",
    "ImportFrom": "from math import pi as {name}\n{name} //= 1",
    "Match": "match 3:\n    case {name}: pass",
    "Nonlocal": "def f():\n    x = 0\n    def g():\n        nonlocal x\n{name} = 3",
    "Pass": "if False: pass\nelse: {name} = 3",
    "Raise": "try: raise KeyError(3)\nexcept KeyError as error: {name} = error.args[0]",
    "Return": "@lambda f: f()\ndef {name}(): return 3",
    "Try": "try: import no.such\nexcept ImportError: {name} = 3",
    "TryStar": "try: raise KeyError\nexcept* KeyError: {name} = 3",
    "TypeAlias": "type Number = int\n{name} = 3",
    "While": "{name} = 0\nwhile {name} < 3: {name} += 1",
    "With": "import contextlib\nwith contextlib.nullcontext(3) as {name}: pass",
}
KINDS = sorted(kind.__name__ for kind in ast.stmt.__subclasses__())


@pytest.mark.parametrize("kind", KINDS)
def test_a_statement_of_any_kind_makes_new_names_and_leaves_ours(kind):
    """A grader with a list of kinds gave right answers nothing: a constant under `if`, a table that
    `for` fills, an import under `try`. The list of all kinds is Python's own."""
    new, over = (STATEMENTS[kind].format(name=name) for name in ("NEW", "LIMIT"))
    assert any(type(node).__name__ == kind for node in ast.walk(ast.parse(new)))
    assert merged(f"{new}\ndef one(x): return x + NEW")["one"](4) == 7
    got = merged(f"{over}\nSEEN = LIMIT\ndef one(x): return LIMIT\n{over}")
    assert got["one"](0) == got["SEEN"] == got["LIMIT"] == 7


@pytest.mark.parametrize(
    "change",
    [
        "LIMIT = one.of = 1",
        "LIMIT, NEW = 1, 2",
        "del LIMIT, math",
        "TABLE += [2]",
        "TABLE.clear()",
        "from math import pi as LIMIT, tau as Box",
        "from gone.since import math",
        "class Box(1): pass",
        "@1\ndef Box(): pass",
    ],
)
def test_what_our_file_binds_has_our_value(change):
    """Another exercise that is broken, or a changed constant, must not count in this one. And a
    class that inherits from ours does not inherit from a student's copy of it."""
    got = merged(f"def one(x): return x\nclass Box: pass\n{change}\nclass Mine(Box): pass")
    assert got["math"].pi > 3 and (got["LIMIT"], got["TABLE"]) == (7, [1])
    assert got["Mine"].__base__ is got["Box"] and got["Box"]().two == 2


@pytest.mark.parametrize(
    "theirs",
    [
        "from __future__ import annotations\ndef one(x: Tensor): return 3",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING: from torch import Tensor\n"
        "LIMIT = 0\nfrom __future__ import annotations\ndef one(x: Tensor): return 3",
        "from math import *\ndef one(x): return floor(pi)",
        "def one(x): return one.cache[x]\none.cache = {4: 3}",
        "import functools\ndef one(x): return 3\none = functools.cache(one)",
        "try: from no.such import one\nexcept ImportError:\n    def one(x): return 3",
        "MORE = [0] * len(TABLE)\nMORE += [1, 2]\ndef one(x): return len(MORE)",
        # ours comes first, also where its line was removed
        "def one(x, y=math.pi): return int(y)",
    ],
)
def test_what_is_new_stays_in_its_order_behind_ours(theirs):
    """The future alone goes to the top, below the docstring."""
    got = merged(theirs)
    assert got["one"](4) == 3 and got["__doc__"] == "A module."


@pytest.mark.parametrize("name", ALL)
def test_an_answer_without_anything_new_is_our_file(name):
    text = source(ALL[name]["file"])
    got = transplant(text, text, ALL[name]["functions"])
    # but for the margin of a docstring
    dumps = (re.sub(r"\\n *", " ", ast.dump(ast.parse(one))) for one in (got, text))
    assert next(dumps) == next(dumps)
