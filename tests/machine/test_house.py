"""The house that the code lives in: who may import whom, how dense files are, and what is told about
a function before one reads it. Files are read here, and none is run."""

import ast
import graphlib
import io
import subprocess
import sys
import tokenize

import pytest

from conftest import ROOT

SCRIPTS = sorted(ROOT.glob("*.py"))
FOLDERS = {
    name: sorted(ROOT.glob(f"{name}/**/*.py"))
    for name in ("support", "toy", "tools", "course", "benchmarks", "recipes", "tests")
}
# beside the paper
TAUGHT = "rlver rollout emotion people simulator reader ppo grpo policy models lora".split()

TOKENS_PER_STATEMENT = 14


# ------------------------------------------------------------------------------------------ imports

# a module's name, as an import says it -> its file; course/ stands on the path of its own scripts
MODULES = {path.stem: path for path in SCRIPTS + FOLDERS["course"]}
for folder in ("support", "toy", "tools", "benchmarks", "recipes"):
    MODULES |= {f"{folder}.{p.stem}": p for p in FOLDERS[folder] if not p.stem.startswith("__")}


def imports_of(text):
    """The project's modules that a source imports, wherever the import stands: at the top, in a
    function, or under `if`."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names & set(MODULES)


GRAPH = {name: imports_of(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def floor_of(name):
    """The scale and the needs, which all share, below support; the toy above it; the other scripts
    above the toy, and all that uses them above those, as every program that nobody imports
    (toy/make_policy.py)."""
    if name == "emotion":
        return 0
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
    assert "\nfrom tools" not in MODULES["rlver"].read_text(encoding="utf-8")


# ------------------------------------------------------------------------------------- how it reads


@pytest.mark.parametrize("command", ["check", "format --check"])
def test_ruff_finds_nothing(command):
    """The settings are in pyproject.toml, the version in requirements-dev.txt."""
    pytest.importorskip("ruff", reason="ruff is not installed (requirements-dev.txt)")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command.split(), "--no-cache", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def measure(text):
    """(tokens without comments, docstrings and layout; statements; lines of code) of a source."""
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        node.body[0].lineno
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node) is not None
    }
    names = "COMMENT NL NEWLINE INDENT DEDENT ENDMARKER ENCODING".split()
    layout = {getattr(tokenize, name) for name in names}
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in layout
        and not (token.type == tokenize.STRING and token.start[0] in docstrings)
    ]
    lines = {n for token in tokens for n in range(token.start[0], token.end[0] + 1)}
    statements = sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
    return len(tokens), statements, len(lines)


def test_statements_are_short():
    """A statement that does what three could do must be read twice. Two statements with a name
    between them are better than one."""
    text = '"""A docstring."""\na = 1  # a comment\nb = a + 1\n'
    assert measure(text) == (3 + 5, 3, 2)  # the docstring is a statement, too
    too_dense = {}
    for path in [*SCRIPTS, *FOLDERS["support"], *FOLDERS["toy"], *FOLDERS["tools"]]:
        tokens, statements, _ = measure(path.read_text(encoding="utf-8"))
        if tokens > TOKENS_PER_STATEMENT * max(20, statements):
            too_dense[path.name] = round(tokens / statements, 1)
    assert too_dense == {}


def without_docstring(text):
    """The public functions, methods and classes of a source that say nothing about themselves."""

    def walk(node, prefix=""):
        for inner in node.body:
            if isinstance(
                inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            ) and not inner.name.startswith("_"):
                if not ast.get_docstring(inner):
                    yield prefix + inner.name
                if isinstance(inner, ast.ClassDef):
                    yield from walk(inner, f"{prefix}{inner.name}.")

    return list(walk(ast.parse(text)))


@pytest.mark.parametrize("name", TAUGHT)
def test_what_a_student_reads_says_what_it_does(name):
    """Every public function and class of the scripts that follow the paper."""
    assert without_docstring(
        "class A:\n '''a'''\n def f(self): 1\n def _g(self): 1\ndef h():\n '''h'''\n def i(): 1\n"
    ) == ["A.f"]
    assert without_docstring(MODULES[name].read_text(encoding="utf-8")) == []
