"""The course edition's handouts: what students are given has a hole for every exercise, is else the
project, and holds no answer."""

import ast
import os
import re
import subprocess
import sys

import pytest

import course
from conftest import ROOT
from exercises import ALL, FUNCTIONS, source, written
from surgery import find, put


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A handout of everything."""
    place = tmp_path_factory.mktemp("course") / "handout"
    assert course.main(["handout", str(place)]) == 0
    return place


@pytest.mark.slow
def test_a_handout_has_a_hole_for_every_exercise_and_is_else_the_project(whole):
    for name, file, function in FUNCTIONS:
        text, node = (
            (whole / file).read_text(encoding="utf-8"),
            find(ast.parse(source(file)), function),
        )
        hole = find(ast.parse(text), function)
        assert ast.unparse(hole.args) == ast.unparse(node.args) and ast.get_docstring(
            hole
        ) == ast.get_docstring(node)
        *_, last = hole.body
        assert len(hole.body) == 1 + (ast.get_docstring(node) is not None)
        assert ast.unparse(last).startswith(f"raise NotImplementedError('exercise {name}: ")
    # fill the holes, and it is the project's file again
    for file in {file for _, file, _ in FUNCTIONS}:
        text = (whole / file).read_text(encoding="utf-8")
        for _, f, function in FUNCTIONS:
            if f == file:
                text = put(text, function, written(source(file), function))
        assert text == source(file)
    others = {path.name for path in ROOT.glob("*.py")} - {file for _, file, _ in FUNCTIONS}
    assert others and all(
        (whole / name).read_bytes() == (ROOT / name).read_bytes() for name in others
    )
    assert (whole / "prompts" / "en" / "vanilla" / "emotion.txt").is_file()
    readme = (whole / "README.md").read_text(encoding="utf-8")
    told = " ".join(readme.split())
    assert all(
        f"### {name}: {e['title']}" in told and " ".join(e["hint"].split()) in told
        for name, e in ALL.items()
    )
    assert "{{" not in readme.replace("{{name}}", "")


def test_a_handout_holds_no_answer(whole):
    """No line of a solution in any file of it; no bytecode, no history, no course/."""
    files = [path for path in whole.rglob("*") if path.is_file()]
    assert not [
        path
        for path in files
        if {".git", "course", "__pycache__", ".cache"} & set(path.relative_to(whole).parts)
    ]

    def squeeze(line):
        return re.sub(r"\s|#.*", "", line)

    # of any agent, of any engine, and of whoever reads JSON
    everybodys = {
        "except(ValueError,RecursionError)aserror:",
        "thought,visible,malformed=split_thought(text)",
        "returnReply(text,visible,thought,malformed)",
        "head=self.model.get_output_embeddings()",
        "thought,visible=take_thoughts(text)",
    }
    held = {
        squeeze(line): path.name
        for path in files
        if path.suffix not in (".png", ".safetensors")
        for line in path.read_text(encoding="utf-8").splitlines()
    }
    for name, file, function in FUNCTIONS:
        node = find(ast.parse(source(file)), function)
        body = node.body[ast.get_docstring(node) is not None :]
        lines = source(file).split("\n")[body[0].lineno - 1 : node.end_lineno]
        for line in map(squeeze, lines):
            assert len(line) < 30 or line not in held or line in everybodys, (
                name,
                line,
                held[line],
            )


def test_a_handout_has_a_page_for_assistants_and_the_tasks_on_paper(whole):
    """The one under the name that assistants look for. What these pages link to is there, too."""
    readme = (whole / "README.md").read_text(encoding="utf-8")
    for page in ("AGENTS.md", "WRITEUP.md", "derivations/derivations.md"):
        place = whole / page
        for path in re.findall(r"\]\(([^)#]+)\)", place.read_text(encoding="utf-8")):
            assert (place.parent / path).is_file(), (page, path)
        assert f"`{page}`" in readme
    assert "NotImplementedError" in (whole / "AGENTS.md").read_text(encoding="utf-8")


def test_what_is_for_teachers_stays_with_them(whole):
    """No long line of the model answers is in a handout."""
    page = (ROOT / "course" / "teacher" / "derivations.md").read_text(encoding="utf-8")
    lines = {line.strip() for line in page.splitlines() if len(line.strip()) >= 60}
    for path in whole.rglob("*.*"):
        assert "teacher" not in path.relative_to(whole).parts
        if path.suffix in (".md", ".py", ".toml", ".txt"):
            held = {line.strip() for line in path.read_text(encoding="utf-8").splitlines()}
            assert not lines & held, path


@pytest.mark.soak
def test_nothing_in_a_handouts_tests_runs_before_its_test(whole):
    """A table that calls an exercise when its file is imported would stop all tests of the other
    exercises too."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"],
        cwd=whole,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_what_is_not_chosen_stays_solved(tmp_path, capsys):
    """One exercise, and everything else runs."""
    assert course.main(["handout", str(tmp_path / "h"), "--only", "groups, gae"]) == 0
    for _, file, function in FUNCTIONS:
        same = written((tmp_path / "h" / file).read_text(encoding="utf-8"), function) == written(
            source(file), function
        )
        assert same != (function in ("group_advantages", "gae", "place_rewards"))
    assert sorted(path.name for path in (tmp_path / "h" / "tests").iterdir()) == [
        "conftest.py",
        "tabular.py",
        "test_gae.py",
        "test_grpo.py",
    ]
    assert "2 exercises, 11 points" in capsys.readouterr().out
    # the fixtures that all tests of a file need are not lost
    assert "pytestmark = " in (tmp_path / "h" / "tests" / "test_grpo.py").read_text(
        encoding="utf-8"
    )


@pytest.mark.soak
def test_the_tests_of_a_handout_run_by_the_exercises_name(tmp_path):
    """As the assignment tells it: the holes fail, and what fills them passes."""
    course.main(["handout", str(tmp_path / "h"), "--only", "groups"])
    command = [sys.executable, "-m", "pytest", "-q", "-m", "groups", "tests/test_grpo.py"]

    def test():
        return subprocess.run(command, cwd=tmp_path / "h", capture_output=True, text=True)

    assert "exercise groups: group_advantages is yours to write" in test().stdout
    (tmp_path / "h" / "grpo.py").write_text(source("grpo.py"), encoding="utf-8")
    result = test()
    assert result.returncode == 0 and "warning" not in result.stdout
