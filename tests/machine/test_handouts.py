"""The course edition's handouts: what students are given has a hole for every exercise, is else the
project, and holds no answer."""

import ast
import re

import pytest

import course
from conftest import ROOT
from exercises import ALL, FUNCTIONS, source, written
from several_ranks import run
from surgery import find, put


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A handout of everything."""
    place = tmp_path_factory.mktemp("course") / "handout"
    assert course.main(["handout", str(place)]) == 0
    return place


@pytest.mark.slow
def test_a_handout_has_a_hole_for_every_exercise_and_is_else_the_project(whole):
    assert not (whole / "nano.py").exists()  # it has the answers
    files = {path.name for path in ROOT.glob("*.py")} - {"nano.py"}
    files |= {file for _, file, _ in FUNCTIONS}
    texts = {file: source(whole / file) for file in files}
    for name, file, function in FUNCTIONS:
        node = find(ast.parse(source(file)), function)
        hole = find(ast.parse(texts[file]), function)
        docstring = ast.get_docstring(node)
        assert ast.unparse(hole.args) == ast.unparse(node.args)
        assert ast.get_docstring(hole) == docstring
        assert len(hole.body) == 1 + (docstring is not None)
        last = ast.unparse(hole.body[-1])
        assert last.startswith(f"raise NotImplementedError('exercise {name}: ")
    # fill the holes, and it is the project
    for _, file, function in FUNCTIONS:
        texts[file] = put(texts[file], function, written(source(file), function))
    assert texts == {file: source(file) for file in files}
    assert (whole / "prompts" / "en" / "vanilla" / "emotion.txt").is_file()
    readme = source(whole / "README.md")
    told = " ".join(readme.split())
    for name, exercise in ALL.items():
        assert f"### {name}: {exercise['title']}" in told
        assert " ".join(exercise["hint"].split()) in told
    assert "{{" not in readme.replace("{{name}}", "")


def squeeze(line):
    return re.sub(r"\s|#.*", "", line)


# lines of an answer of any agent, any engine, any user, and of whoever reads JSON
EVERYBODYS = {
    "except(ValueError,RecursionError)aserror:",
    "head=self.model.get_output_embeddings()",
}


def test_a_handout_holds_no_answer(whole):
    """No line of a solution in any file of it, nor of the model answers that are for teachers; no
    bytecode, no history, no course/."""
    files = [path for path in whole.rglob("*") if path.is_file()]
    parts = {part for path in files for part in path.relative_to(whole).parts}
    assert not parts & {".git", "course", "teacher", "__pycache__", ".cache"}
    texts = [source(path) for path in files if path.suffix not in (".png", ".safetensors")]
    held = {squeeze(line) for text in texts for line in text.splitlines()}
    answers = source("course/teacher/derivations.md").splitlines()
    for _, file, function in FUNCTIONS:
        node = find(ast.parse(source(file)), function)
        body = node.body[ast.get_docstring(node) is not None :]
        answers += source(file).split("\n")[body[0].lineno - 1 : node.end_lineno]
    told = {line for line in map(squeeze, answers) if len(line) >= 30}
    assert told & held <= EVERYBODYS
    # the whole method in one file is not told of; the tables of a derivation stand there alone
    assert not [text for text in texts if "nano.py" in text or "not handed out" in text]
    assert sum("| change, generic warm |" in text for text in texts) == 1


def test_a_handout_has_a_page_for_assistants_and_the_tasks_on_paper(whole):
    """The one under the name that assistants look for. What these pages link to is there, too."""
    readme = source(whole / "README.md")
    for page in ("AGENTS.md", "WRITEUP.md", "derivations/derivations.md"):
        for path in re.findall(r"\]\(([^)#]+)\)", source(whole / page)):
            assert (whole / page).parent.joinpath(path).is_file(), (page, path)
        assert f"`{page}`" in readme
    assert "NotImplementedError" in source(whole / "AGENTS.md")


@pytest.mark.slow
def test_what_is_not_chosen_stays_solved(tmp_path, capsys):
    """One exercise, and everything else runs."""
    assert course.main(["handout", str(tmp_path / "h"), "--only", "groups, gae"]) == 0
    for _, file, function in FUNCTIONS:
        text = written(source(tmp_path / "h" / file), function)
        is_hole = function in ("group_advantages", "gae", "place_rewards")
        assert (text != written(source(file), function)) == is_hole
    tests = {path.name: source(path) for path in (tmp_path / "h" / "tests").iterdir()}
    assert set(tests) == {"conftest.py", "tabular.py", "test_gae.py", "test_grpo.py"}
    # the fixtures that all tests of a file need are not lost
    assert "pytestmark = " in tests["test_grpo.py"]
    assert "2 exercises, 11 points" in capsys.readouterr().out


@pytest.mark.soak
def test_the_tests_of_a_handout_run_by_the_exercises_name(tmp_path):
    """As the assignment tells it: the holes fail, and what fills them passes. No table calls an
    exercise when its file is imported, which would stop all tests of the other exercises too."""
    place = tmp_path / "handout"
    course.main(["handout", str(place)])
    command = "-m pytest -q -m groups".split()
    code, out, _ = run(*command, cwd=place)
    assert "exercise groups: group_advantages is yours to write" in out
    assert code == 1 and "error" not in out.splitlines()[-1]
    (place / "grpo.py").write_text(source("grpo.py"), "utf-8")
    code, out, _ = run(*command, cwd=place)
    assert code == 0 and "warning" not in out
