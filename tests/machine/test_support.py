"""What support/__init__.py does before torch is imported, and before the first line of ours."""

import support

import ast
import itertools
import os
import runpy
import sys

import pytest

from conftest import ROOT

# A module that is no program is imported by one of these, and so later.
TOOLS = [path for path in ROOT.glob("tools/*.py") if "__main__" in path.read_text("utf-8")]
# nano.py stands alone, and ends in Python's own tracebacks
PROGRAMS = [*{*ROOT.glob("*.py")} - {ROOT / "nano.py"}, *TOOLS]


def imported(path):
    """The modules that a source imports at its top, in order, by their first names."""
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def test_support_is_imported_before_torch():
    """What support/__init__.py sets is read when torch is imported; what it says must be said
    before an import fails. So before it stands nothing but what Python itself has. (The rooms
    import it first, and a tool may begin with another module of ours that does so.)"""
    others = [ROOT / "tests" / "conftest.py", *ROOT.glob("benchmarks/*.py")]
    for path in [*PROGRAMS, *others]:
        ours = {"support", "models", "players"}
        ours |= {"simulator", "tools", "toy"} if path in TOOLS else set()
        before = itertools.takewhile(lambda name, ours=ours: name not in ours, imported(path))
        assert set(before) <= sys.stdlib_module_names, path.name


def test_an_old_python_can_read_as_far_as_the_message():
    """It compiles the whole of a script before it runs the first line."""
    for path in [*PROGRAMS, ROOT / "support" / "__init__.py"]:
        ast.parse(path.read_text("utf-8"), path, feature_version=(3, 8))


@pytest.mark.parametrize("given", [None, "7"])
def test_threads_do_not_spin_for_long(given, monkeypatch):
    """Two runs of two threads each stood still on two cores. What the user has set stays."""
    monkeypatch.delenv("GOMP_SPINCOUNT")
    if given:
        monkeypatch.setenv("GOMP_SPINCOUNT", given)
    runpy.run_path(support.__file__)
    assert os.environ["GOMP_SPINCOUNT"] == (given or "1000")


def test_what_is_missing_is_said_in_one_line(monkeypatch, capsys):
    """Not in a traceback, with which every other program would begin."""

    def said():
        with pytest.raises(SystemExit, match="2"):
            runpy.run_path(support.__file__)
        (line,) = capsys.readouterr().err.splitlines()
        return line

    for name in ("tqdm", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    assert said().startswith("not installed, or .venv is not active: torch, tqdm; to install all: ")
    monkeypatch.setattr(sys, "version_info", (3, 8, 18))
    assert said().startswith(
        "Python 3.11 or newer is needed (here as python3); to install all: python3 -m venv .venv"
    )
