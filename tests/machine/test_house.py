"""The house that the code lives in: who may import whom, and what ruff finds in it. Files are read
here, and none is run."""

import ast
import graphlib

import pytest

from several_ranks import ROOT, run

# ------------------------------------------------------------------------------------------ imports

# a module's name, as an import says it -> its file; course/ stands on the path of its own scripts
MODULES = {path.stem: path for path in (*ROOT.glob("*.py"), *ROOT.glob("course/*.py"))}
for folder in ("support", "toy", "tools", "benchmarks", "recipes"):
    paths = ROOT.glob(f"{folder}/[!_]*.py")
    MODULES |= {f"{folder}.{path.stem}": path for path in paths}


def imports_of(tree):
    """The project's modules that a source, or a part of it, imports, wherever the import stands: at
    the top, in a function, or under `if`."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names & set(MODULES)


TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}
GRAPH = {name: imports_of(tree) for name, tree in TREES.items()}
# What most runs do without is imported within a function, at one place: vLLM, models that are not
# trained (which loads torch), a reader, adapters, models on a server, sharding.
LATE = {"vllm_engine", "local", "reader", "lora", "support.servers", "support.sharding"}


def floor_of(name):
    """The scale and the needs, which all share, below support; the toy above it; the other scripts
    above the toy, and all that uses them above those, as every program that nobody imports
    (toy/make_policy.py)."""
    if name == "emotion":
        return 0
    if name == "support.user_check":  # it needs people, and moves to the room players
        return 3
    if name not in set().union(*GRAPH.values()):
        return 4
    return {"support": 1, "toy": 2, ROOT.name: 3}.get(MODULES[name].parent.name, 4)


def test_nobody_imports_in_a_circle():
    """Neither at the top nor in a function, where a circle hides until somebody moves a line. What
    stands below can be read, and tested, without what stands above."""
    assert {"models", "ppo", "support.ranks"} <= GRAPH["rlver"]  # imports are seen
    graphlib.TopologicalSorter(GRAPH).prepare()  # raises CycleError


def test_imports_go_in_one_direction():
    """tools, benchmarks, course, recipes -> scripts -> toy -> support -> emotion.py: what is read
    beside the paper needs no tool, and support/ is handed what it needs."""
    assert not [(a, b) for a in GRAPH for b in GRAPH[a] if floor_of(b) > floor_of(a)]
    assert "\nfrom tools" not in MODULES["rlver"].read_text("utf-8")


def test_six_modules_are_imported_within_a_function_each_at_one_place():
    """A reader looks for imports at the top. Every exception is one more thing to know, and what is
    imported late in two files has no one place that says why."""
    late = []
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                late += imports_of(node)
    assert sorted(late) == sorted(LATE)


# ------------------------------------------------------------------------------------- how it reads


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_ruff_finds_nothing(command):
    """The settings are in pyproject.toml, the version in requirements-dev.txt. Every public function
    and class of the scripts, which are read beside the paper, has a docstring."""
    pytest.importorskip("ruff", reason="ruff is not installed (requirements-dev.txt)")
    code, out, err = run("-m", "ruff", *command.split(), "--no-cache", ".")
    assert code == 0, out + err
