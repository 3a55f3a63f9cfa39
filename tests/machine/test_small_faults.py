"""Small faults that a person met: flags that were ignored without a word, tracebacks before the
first line of ours, advice that led nowhere. Each test is one of them."""

from support.errors import BadModel
from support.loading import load_model
from support.settings import Parser

import ast
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

import rlver
from conftest import ROOT

SCRIPTS = sorted([*ROOT.glob("*.py"), *ROOT.glob("tools/[a-z]*.py")])
TOOLS = [path for path in sorted(ROOT.glob("tools/*.py")) if not path.stem.startswith("__")]
SERVER = "openai:m@http://127.0.0.1:9/v1"


def refused(capfd, main, *flags):
    """The one line, without a traceback, with which `main` refuses `flags`, by exit code 2."""
    capfd.readouterr()
    assert main([str(word) for word in flags]) == 2
    out, err = capfd.readouterr()
    assert err.count("\n") == 1 and not out, out + err
    return err


def started(*command, **more):
    """A finished process: (exit code, stdout, stderr)."""
    done = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=120,
        **{"cwd": ROOT, **more},
    )
    return done.returncode, done.stdout, done.stderr


# ------------------------------------------------------------------ flags that nobody would look at


@pytest.mark.parametrize(
    "flags",
    [
        "--gamma 1",
        "--lam 0.95",
        "--algo ppo --advantage rloo",
        "--kl-estimator k3",
        "--lora-alpha 8",
    ],
)
def test_a_flag_without_effect_is_refused(flags, capfd, tmp_path):
    """`--kl-estimator k2` without `--kl-coef` trained without a KL, and said nothing of it; half a
    day of runs "with lambda 0.9" were GRPO, which has no lambda. Also where the value is the
    default: who says it believes that it does something."""
    line = refused(capfd, rlver.main, *flags.split(), "--out", tmp_path / "out")
    assert "has no effect" in line and flags.split()[-2] in line


# ---------------------------------------------------------------------------- before the first line


def imported(path):
    """The modules that a source imports at its top, in order, by their first names."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module.partition(".")[0]


def test_support_is_imported_before_torch():
    """What support/__init__.py sets is read when torch is imported; what it says must be said
    before an import fails. So before it stands nothing but what Python itself has. (A tool may
    begin with another module of ours that does so.)"""
    others = [ROOT / "tests" / "conftest.py", *ROOT.glob("benchmarks/*.py")]
    for path in [*SCRIPTS, *TOOLS, *others]:
        ours = {"support", "simulator", "tools", "toy"} if path in TOOLS else {"support"}
        before = itertools.takewhile(lambda name, ours=ours: name not in ours, imported(path))
        assert set(before) <= sys.stdlib_module_names, path.name


@pytest.mark.parametrize(
    "given, set_to",
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7")],
)
def test_threads_do_not_spin_for_long(given, set_to):
    """Two runs of two threads each stood still on two cores. What the user has set stays."""
    env = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    code, out, _ = started(
        sys.executable,
        "-c",
        "import os, support; print(os.environ.get('GOMP_SPINCOUNT'))",
        env={**env, **given},
    )
    assert (code, out.strip()) == (0, set_to)


@pytest.mark.parametrize(
    "path", [*SCRIPTS, *TOOLS, ROOT / "support" / "__init__.py"], ids=lambda path: path.name
)
def test_an_old_python_can_read_as_far_as_the_message(path):
    """It compiles the whole of a script before it runs the first line."""
    ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 8))


INSTALL = "python3 -m venv .venv && . .venv/bin/activate && pip install -r requirements.txt\n"


@pytest.mark.parametrize(
    "trick, told",
    [
        ("sys.version_info = (3, 8, 18)", "Python 3.11 or newer is needed"),
        (
            "sys.modules['tqdm'] = sys.modules['torch'] = None",
            "not installed, or .venv is not active: torch, tqdm",
        ),
    ],
)
def test_what_is_missing_is_said_in_one_line(trick, told):
    code, out, err = started(
        sys.executable,
        "-c",
        f"import runpy, sys; {trick}; runpy.run_path('rlver.py', run_name='__main__')",
    )
    assert (code, out, err) == (2, "", f"{told}; to install all: {INSTALL}")


# --------------------------------------------------------------------------- what was said, and how


def test_the_hub_is_asked_for_a_name_with_an_owner_only(tmp_path, monkeypatch):
    """A typing error in a path cost 23 s, and six traces of retries. (The tests are offline.)"""
    monkeypatch.chdir(tmp_path)
    told = "no such directory, and not to be had from the hub"
    name = "openai-community/gpt2"
    with pytest.raises(BadModel, match=f"--model {name}: {told}"):
        load_model(name)
    Path("file").write_text("")
    for path in ("file", "nowhere", "a/b/c", "runs/nowhere", "./nowhere", "/nowhere/a"):
        with pytest.raises(BadModel, match="no such directory; "):
            load_model(path)


def test_a_program_that_saves_nothing_does_not_promise_to_go_on(capfd):
    """ "The same command goes on where it was" stood under a talk that was over."""

    def work(args):
        raise KeyboardInterrupt

    assert Parser(prog="chat").run(work, []) == 130
    assert capfd.readouterr().err == "\nstopped\n"
