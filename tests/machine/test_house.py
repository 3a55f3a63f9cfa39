"""The house that the code lives in: who may import whom, and what ruff finds in it. Files are read
here, and none is run."""

import ast
import graphlib

import pytest

from several_ranks import ROOT, run

# ------------------------------------------------------------------------------------------ imports

# a module's name, as an import says it -> its file; course/ stands on the path of its own scripts
# The floors, the lowest first. A room is a script at the top or a folder as a whole; it imports
# rooms of lower floors alone.
FLOORS = """
emotion
support
ppo rollout toy
grpo people policy
models simulator
players recipes
rlver evaluate
tools nano
benchmarks course
""".split("\n")
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms.split()}
MODULES = {path.stem: path for path in (*ROOT.glob("*.py"), *ROOT.glob("course/*.py"))}
for folder in ("support", "toy", "models", "players", "tools", "benchmarks", "recipes"):
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
LATE = {"models.vllm_engine", "models.lora", "models.sharding"}
LATE |= {"players.local", "players.reader", "players.server"}


def room_of(name):
    folder = MODULES[name].parent
    return name if folder == ROOT else folder.name


def test_nobody_imports_in_a_circle():
    """Neither at the top nor in a function, where a circle hides until somebody moves a line. What
    stands below can be read, and tested, without what stands above."""
    assert {"models.build", "ppo", "support.ranks"} <= GRAPH["rlver"]  # imports are seen
    graphlib.TopologicalSorter(GRAPH).prepare()  # raises CycleError


def test_imports_go_down():
    """From room to room: what is read beside the paper needs no tool and no server, no file of
    models/ one of players/, and support/ is handed what it needs."""
    arrows = {(room_of(a), room_of(b)) for a in GRAPH for b in GRAPH[a]}
    between = {(a, b) for a, b in arrows if a != b}
    assert not [(a, b) for a, b in between if FLOOR_OF[a] <= FLOOR_OF[b]]
    assert len(between) <= 90 and {room_of(name) for name in MODULES} == set(FLOOR_OF)
    # the whole paper in one file: it needs the toy and the scale, and only tests import it
    assert GRAPH["nano"] <= {"toy.world", "emotion"}
    assert not [a for a in GRAPH if "nano" in GRAPH[a]]


# Import a module in a new process. It ends as soon as torch is looked for, or when the import is over;
# its exit code is 1 if support is not there by then.
IMPORT = """
import sys, types
def find_spec(name, *_):
    if name == "torch":
        sys.exit("support" not in sys.modules)
sys.meta_path.insert(0, types.SimpleNamespace(find_spec=find_spec))
import {}
sys.exit("support" not in sys.modules)
"""


@pytest.mark.parametrize("room", ["models", "players"])
def test_support_comes_before_torch_in_every_room(room):
    """It sets what torch reads when it is imported, whichever module of a room comes first."""
    for name in MODULES:
        if room_of(name) == room:
            code, _, err = run("-c", IMPORT.format(name))
            assert code == 0, (name, err)


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
