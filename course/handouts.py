"""handouts.py - what students are given: a copy of the project with holes in it, the assignment,
and the tests that grade it.

exercises.toml lists the exercises and the tests that grade them. A hole is a function's docstring
and a `raise` (`stub` in surgery.py). Most of the project's tests are not handed out, because they
hold answers.
"""

from patches import HERE, ROOT, exercises, plural
from support.errors import BadInput

import ast
import functools
import re
import shutil
import tempfile
import textwrap
import tomllib
from pathlib import Path

from surgery import IMPORTS, imported_name, names_bound, put, stub, text_of

# Copied as it is. Of tests/ a part is copied (`copy_tests`), of course/ only HANDED_OUT.
COPIED = [
    "*.py",
    "*.txt",
    "LICENSE",
    "models",
    "players",
    "support",
    "tools",
    "prompts",
    "toy",
    "docs",
]
# What a copied page does not have: what tells of nano.py or of a derivation's answer, and a function
# that is an exercise. docs/small.md is left out whole: its tables are those of a derivation.
NOT_HANDED_OUT = re.compile(r"<!-- not handed out -->\n.*?<!-- handed out -->\n", re.S)
# {file of course/: its name in a handout}
HANDED_OUT = {
    "for_assistants.md": "AGENTS.md",
    "writeup.md": "WRITEUP.md",
    "derivations.md": "derivations/derivations.md",
}


# ---------------------------------------------------------------------------------------- a handout


def handout(target, chosen):
    """Write the project with holes for the `chosen` exercises to the directory `target`. It is
    built beside it and renamed, so that nobody finds half a handout."""
    target = target.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(
            f"handout {target}: is there already, and not empty; choose another directory"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".handout-") as scratch:
            place = Path(scratch) / "handout"
            copy_project(place, chosen, stubs_of(chosen))
            (place / "README.md").write_text(assignment(chosen), encoding="utf-8")
            shutil.copy(ROOT / "README.md", place / "PROJECT.md")
            for page in (place / "PROJECT.md", *place.glob("docs/*.md")):
                text = NOT_HANDED_OUT.sub("", page.read_text(encoding="utf-8"))
                page.write_text(text, encoding="utf-8")
            for file, name in HANDED_OUT.items():
                (place / name).parent.mkdir(exist_ok=True)
                shutil.copy(HERE / file, place / name)
            place.replace(target)
    except OSError as error:
        raise BadInput(f"handout {target}: cannot be written ({error.strerror})") from None
    print(f"{plural(len(chosen))}, {all_points(chosen)} points: {target / 'README.md'}")
    command = "python course/course.py grade DIR"
    if len(chosen) < len(exercises()):
        command += f" --only {','.join(chosen)}"
    print(f"to grade a copy of it: {command}")


def stubs_of(chosen):
    """{file: its text with a hole in place of every function of the chosen exercises, and nothing
    where it is taken whole}."""
    changed = {e["file"]: "" for e in chosen.values() if not e["functions"]}
    for name, exercise in chosen.items():
        file = exercise["file"]
        for function in exercise["functions"]:
            source = changed.get(file) or (ROOT / file).read_text(encoding="utf-8")
            message = f"exercise {name}: {function} is yours to write"
            changed[file] = put(source, function, stub(source, function, message))
    return changed


def copy_project(place, chosen, changed):
    """Copy the project to the directory `place`, with the scripts in `changed` {file: text} in
    place of its own and, of the tests, those that grade the `chosen` exercises."""
    place.mkdir(parents=True, exist_ok=True)
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            if path.name == "nano.py" and not set(chosen) & set(exercises("nano")):
                continue  # it has the answers
            if path.is_dir():
                left_out = shutil.ignore_patterns("__pycache__", ".*", "small.md")
                shutil.copytree(path, place / path.name, ignore=left_out)
            else:
                shutil.copy(path, place / path.name)
    for file, text in changed.items():
        (place / file).write_text(text, encoding="utf-8")
    copy_tests(place / "tests", chosen)
    (place / "pytest.ini").write_text(pytest_settings(chosen), encoding="utf-8")


def copy_tests(place, chosen):
    """Write the tests of the `chosen` exercises to `place`, with conftest.py and the helpers that
    they import (answering.py, tabular.py, ...)."""
    place.mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", place)
    for file, text in cut_tests(tuple(chosen)).items():
        (place / file).write_text(text, encoding="utf-8")
        for module in re.findall(r"(?m)^(?:from|import) (\w+)", text):
            helper = ROOT / "tests" / f"{module}.py"
            if helper.is_file():
                shutil.copy(helper, place)


def pytest_settings(chosen):
    """The pytest.ini of a copy: the project's markers, and one for each exercise. (The project's
    pyproject.toml is not copied; beside a pytest.ini pytest would not read it.)"""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    markers = list(project["tool"]["pytest"]["ini_options"]["markers"])
    markers += [f"{name}: {exercise['title']}" for name, exercise in chosen.items()]
    return "[pytest]\nmarkers =\n" + "".join(f"    {marker}\n" for marker in markers)


# ----------------------------------------------------------------------------------- the assignment


def assignment(chosen):
    """The README of a handout: assignment.md with its four placeholders filled."""
    text = (HERE / "assignment.md").read_text(encoding="utf-8")
    first_name, first_exercise = next(iter(chosen.items()))
    text = text.replace("{{count}}", plural(len(chosen)))
    text = text.replace("{{points}}", str(all_points(chosen)))
    # padded: a comment follows on its line
    text = text.replace("{{check}}", f"{check_command(first_name, first_exercise):<60}")
    descriptions = [describe(name, exercise) for name, exercise in chosen.items()]
    return text.replace("{{exercises}}", "\n".join(descriptions))


def describe(name, exercise):
    """One exercise in the assignment, as Markdown."""

    def fill(text):
        words = " ".join(text.split())
        return textwrap.fill(words, 130, break_on_hyphens=False, break_long_words=False)

    functions = ", ".join(f"`{function}`" for function in exercise["functions"])
    needs = f" Needs: {', '.join(exercise['needs'])}." if exercise["needs"] else ""
    return "\n\n".join(
        [
            f"### {name}: {exercise['title']} ({exercise['points']} points, {exercise['minutes']} "
            "minutes)",
            fill(f"`{exercise['file']}`: {functions}. {exercise['section']}.{needs}"),
            fill(exercise["task"]),
            textwrap.indent(exercise["equation"].strip(), "    "),
            fill(f"*Hint.* {exercise['hint']}"),
            fill(f"*If it is wrong.* {exercise['symptom']}"),
            f"Check: `{check_command(name, exercise)}`\n",
        ]
    )


def check_command(name, exercise):
    """The command that runs an exercise's tests in a handout."""
    files = {"tests/" + test.split("::")[0] for test in exercise["tests"]}
    return f"python -m pytest -q -m {name} {' '.join(sorted(files))}"


def all_points(chosen):
    """The points of the exercises together."""
    return sum(exercise["points"] for exercise in chosen.values())


# --------------------------------------------------------------------------- the tests, cut to size


@functools.cache
def cut_tests(chosen):
    """The tests that grade the exercises named in the tuple `chosen`, and what they use of their
    files, nothing else; each test is marked with the exercises that it grades. Returns
    {file name: text}."""
    everything = exercises() | exercises("nano")
    exercises_of = {}  # "file::test": the names of the exercises that it grades
    for exercise in chosen:
        for test in everything[exercise]["tests"]:
            exercises_of.setdefault(test, []).append(exercise)
    sources = {path.name: path.read_text(encoding="utf-8") for path in files_of_tests()}
    trees = {file: ast.parse(source) for file, source in sources.items()}
    wanted = names_wanted(trees, [tuple(test.split("::")) for test in exercises_of])
    return {
        file: cut_file(file, sources[file], trees[file], wanted, exercises_of)
        for file in sorted({file for file, _ in wanted})
    }


def files_of_tests():
    """The project's files of tests."""
    return sorted((ROOT / "tests").rglob("test_*.py"))


def names_wanted(trees, tests):
    """{(file, name)} of the tests and of all that they use, directly or not, at the top levels of
    the files of tests. trees: {file: module}; tests: [(file, name)]."""
    # A file's pytestmark names fixtures that all of its tests need.
    todo, wanted = [*tests, *((file, "pytestmark") for file, _ in tests)], set()

    @functools.cache
    def nodes_of(file):  # {name: the first statement that binds it}
        return {name: node for node in trees[file].body[::-1] for name in names_bound(node)}

    while todo:
        file, name = todo.pop()
        node = nodes_of(file).get(name)
        # None: a builtin, a fixture of conftest.py, or a name that the test itself binds
        if (file, name) in wanted or node is None:
            continue
        wanted.add((file, name))
        if isinstance(node, ast.ImportFrom) and f"{node.module}.py" in trees:
            todo.append((f"{node.module}.py", name))
        elif not isinstance(node, IMPORTS):
            todo += [(file, used) for used in names_used(node)]
    return wanted


def names_used(node):
    """The names that a function or statement uses but does not assign. The arguments of a function
    are among them, because those of a test are its fixtures."""
    names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    assigned = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    arguments = {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
    return {name.id for name in names} - assigned | arguments


def cut_file(file, source, tree, wanted, exercises_of):
    """The text of a file of tests with only the names that are `wanted`: the first paragraph of its
    docstring, its imports, and the definitions, each test under its exercises' markers."""
    definitions, imports = [], []
    for node in tree.body:
        bound = {name for name in names_bound(node) if (file, name) in wanted}
        if not bound:
            continue
        if isinstance(node, IMPORTS):
            node.names = [alias for alias in node.names if imported_name(alias) in bound]
            imports.append(ast.unparse(node))
        else:
            # a test binds one name; an assignment, which may bind several, bears no marker
            graded = exercises_of.get(f"{file}::{min(bound)}", [])
            markers = "".join(f"@pytest.mark.{exercise}\n" for exercise in graded)
            definitions.append(markers + text_of(source, node))
    has_markers = any("pytest.mark." in definition for definition in definitions)
    if has_markers and "import pytest" not in imports:
        imports.append("import pytest")
    about_file = ast.get_docstring(tree).split("\n\n")[0]
    head = f'"""{about_file}"""\n' + "\n".join(imports)
    return head + "\n\n\n" + "\n\n\n".join(definitions) + "\n"
