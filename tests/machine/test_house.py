"""The house that the code lives in: who may import whom, how wide and how dense files are, and what
is told about a function before one reads it. Nothing of the project is run here; its files are
read."""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CHAPTERS, SUPPORT, TOOLS, COURSE = (
    sorted(ROOT.glob(f"{place}*.py")) for place in ("", "support/", "tools/", "course/")
)
# a module's name, as an import says it -> its file; course/ stands on the path of its own scripts
MODULES = {
    **{path.stem: path for path in CHAPTERS + COURSE},
    **{f"support.{path.stem}": path for path in SUPPORT if path.stem != "__init__"},
    **{f"tools.{path.stem}": path for path in TOOLS if not path.stem.startswith("__")},
}
CALLED_LAZILY = {"rlver": {"tools.report"}}
TAUGHT = ("rlver", "simulator", "ppo", "grpo", "policy", "models", "lora")

# The most tokens per statement that a file may have: above them, lines are packed.
DENSEST_CHAPTER = 13
DENSEST_OTHER = 14
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
# Words that once named everything, so that they name nothing.
VAGUE = {"own", "found", "said", "told"}


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


def circle_in(graph):
    """The first circle that is found in {name: names}, as a list of names, or None."""
    done = set()

    def walk(name, path):
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for neighbour in sorted(graph[name]):
                if circle := walk(neighbour, [*path, name]):
                    return circle
            done.add(name)
        return None

    for name in sorted(graph):
        if circle := walk(name, []):
            return circle
    return None


GRAPH = {name: imports_of(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def test_the_test_sees_imports_and_circles():
    """Or the next two would pass on anything."""
    text = (
        "import toy, sys\n"
        "def f():\n    from support import ranks\n    from support.llm import Clock\n"
    )
    assert imports_of(text) == {"toy", "support.ranks", "support.llm"}
    assert circle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
    assert {"models", "ppo", "support.ranks"} <= GRAPH["rlver"] and "toy" in GRAPH["simulator"]
    assert {"simulator", "support.stats", "tools.judge"} <= GRAPH["tools.validity"]


def test_nobody_imports_in_a_circle():
    """Neither at the top nor in a function, where a circle hides until somebody moves a line. What
    stands below can be read, and tested, without what stands above."""
    assert circle_in(GRAPH) is None


def test_the_machine_room_knows_no_chapter():
    """support/ is handed what it needs. One import of a chapter, and nobody can read the chapter
    without the machine, nor use the machine without the chapter."""
    for name, modules in GRAPH.items():
        if name.startswith("support."):
            above = {module for module in modules if not module.startswith("support.")}
            assert above == set(), name


def test_chapters_know_neither_tools_nor_the_course():
    """Both stand above the chapters: a reader of the chapters needs neither. A run calls the report
    at its end, and imports it there."""
    at_the_top = re.findall(r"^(?:from|import) (\S+)", MODULES["rlver"].read_text("utf-8"), re.M)
    assert not [name for name in at_the_top if name.startswith("tools")]
    for path in CHAPTERS:
        above = {module for module in GRAPH[path.stem] if MODULES[module] in TOOLS + COURSE}
        assert above == CALLED_LAZILY.get(path.stem, set()), path.name


def test_no_chapter_knows_a_tool():
    """tools -> chapters -> support: what is read beside the paper needs no tool, and what the tools
    share does not need one of them."""
    files = {name for name in GRAPH if name.startswith("tools.")}
    tools = {name for name in files if "\ndef main(" in MODULES[name].read_text(encoding="utf-8")}
    shared = files - tools
    below = {name: GRAPH[name] & files for name in set(GRAPH) - files}
    assert {name: modules for name, modules in below.items() if modules} == CALLED_LAZILY
    assert {name for name in shared if GRAPH[name] & tools} == set()
    assert 8 < len(tools) <= 14 and len(shared) > 4


def test_no_line_is_wider_than_a_screen():
    """100 columns in every Python file: two of them stand beside each other, or beside a paper."""
    files = [*CHAPTERS, *SUPPORT, *TOOLS, *COURSE, *sorted(ROOT.glob("tests/**/*.py"))]
    assert len(files) > 30
    assert [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1)
        if len(line) > 100
    ] == []


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff_finds_nothing(command):
    """The settings are in pyproject.toml, the version in requirements-dev.txt."""
    pytest.importorskip("ruff", reason="ruff is not installed (requirements-dev.txt)")
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def tokens_per_statement(text):
    """How densely a source is packed, comments and docstrings apart."""
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstring_lines = set()
    statements = 0
    for node in ast.walk(tree):
        statements += isinstance(node, ast.stmt)
        if isinstance(node, documented) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            docstring_lines |= set(range(docstring.lineno, docstring.end_lineno + 1))
    tokens = [
        token
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in LAYOUT and token.start[0] not in docstring_lines
    ]
    return len(tokens) / max(1, statements)


def test_statements_are_short():
    """A statement that does what three could do must be read twice. Two statements with a name
    between them are better than one."""
    text = '"""A docstring."""\na = 1  # a comment\nb = a + 1\n'
    assert tokens_per_statement(text) == (3 + 5) / 3  # the docstring is a statement, too
    too_dense = {}
    for path in CHAPTERS + SUPPORT + TOOLS:
        density = tokens_per_statement(path.read_text(encoding="utf-8"))
        if density > (DENSEST_CHAPTER if path in CHAPTERS else DENSEST_OTHER):
            too_dense[str(path.relative_to(ROOT))] = round(density, 1)
    assert too_dense == {}


def vague_names(text):
    """The names in a source, of variables, arguments and attributes, that are one of VAGUE."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Name):
            names.append((node.lineno, node.id))
        elif isinstance(node, ast.arg):
            names.append((node.lineno, node.arg))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.attr))
    return [f"{line}: {name}" for line, name in sorted(set(names)) if name in VAGUE]


def test_things_have_names_of_their_own():
    """`own`, `found`, `said` and `told` each stood for a hundred different things."""
    text = "def f(told):\n    self.said = told\n    return [own.found for own in told]\n"
    assert vague_names(text) == ["1: told", "2: said", "2: told", "3: own", "3: told"]
    vague = {}
    for path in CHAPTERS + SUPPORT + TOOLS:
        names = vague_names(path.read_text(encoding="utf-8"))
        if names:
            vague[str(path.relative_to(ROOT))] = names
    assert vague == {}


def test_the_loop_is_soon_in_view():
    """Who opens rlver.py sees the dialogue, the rollout and the loop without much scrolling."""
    lines = (ROOT / "rlver.py").read_text(encoding="utf-8").split("\n")
    assert next(i for i, line in enumerate(lines, 1) if "def train(self" in line) <= 250


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
    """Every public function and class of the chapters that follow the paper."""
    assert without_docstring(
        "class A:\n '''a'''\n def f(self): 1\n def _g(self): 1\ndef h():\n '''h'''\n def i(): 1\n"
    ) == ["A.f"]
    assert without_docstring(MODULES[name].read_text(encoding="utf-8")) == []


@pytest.mark.slow
def test_comments_lead_to_lists_that_are_there():
    """ "Pitfall 4.12" says something only to who has the list. Whoever has the repository alone
    must be able to follow every reference; docs/differences.md numbers the defects."""
    for path in [*CHAPTERS, *SUPPORT, *TOOLS, *COURSE, *sorted(ROOT.glob("tests/**/*.py"))]:
        if path.name == "test_house.py":
            continue
        text = path.read_text(encoding="utf-8")
        words = [
            t.string
            for t in tokenize.generate_tokens(io.StringIO(text).readline)
            if t.type in (tokenize.COMMENT, tokenize.STRING)
        ]
        for word in words:
            assert not re.search(r"[Pp]itfalls? \d|\bDesign:|\b4\.19\b", word), (path.name, word)
