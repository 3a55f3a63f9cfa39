"""The course edition: that the list of exercises fits the project, and bad input.

That the tests are strong enough is another matter, and CI's: `python course/course.py matrix`.
"""

import ast
import re

import pytest

import course
from conftest import ROOT
from exercises import ALL, FUNCTIONS, NANO, source
from grading import about, name_of
from matrix import wrong_answers
from runs import refuse
from surgery import find


@pytest.mark.slow
def test_the_list_fits_the_project():
    """100 points, and 40 for a nano.py. Each exercise names functions and tests that are there, and needs only what
    stands above it. The grader quotes what a test is about."""
    trees = {path.name: ast.parse(source(path)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert [sum(e["points"] for e in some.values()) for some in (ALL, NANO)] == [100, 40]
    for i, (name, e) in enumerate((ALL | NANO).items()):
        assert set(e["needs"]) <= set(list(ALL)[:i]), name
        for test in e["tests"]:
            file, function = test.split("::")
            what = " ".join(ast.get_docstring(find(trees[file], function)).split())
            told = about(name_of(test))
            assert len(told) > 20 and what.startswith(told.removesuffix(" ...")), test
    assert all(find(ast.parse(source(file)), function) for _, file, function in FUNCTIONS)


def test_every_exercise_has_wrong_answers_that_fit_the_code():
    """Whoever edits a function learns here which wrong answers must be edited with it."""
    names = [name for name, *_ in wrong_answers(ALL | NANO)]
    assert all(names.count(name) >= 4 for name in ALL)
    assert all(names.count(name) >= 2 for name in NANO)


def test_the_project_knows_nothing_of_the_course():
    """A student who reads the scripts beside the paper meets no marker of anybody's homework."""
    markers = re.compile(r"\bexercises?\b|homework|course/|course\.py", re.IGNORECASE)
    for path in ROOT.glob("*.py"):
        assert not markers.search(source(path)), path.name


@pytest.mark.parametrize(
    "argv, said",
    [
        ("handout {full}", "not empty"),
        ("handout {full}/file/x", "cannot be written"),
        ("handout {new} --only gae,gea", "'gea'"),
        ("handout {new} --only gae,nano", "and nano, alone"),
        ("handout {new} --only nano", "begin with an empty file"),
        ("grade {full}", "is it a handout"),
        (f"grade {ROOT} --csv {{new}}/no/x.csv", "cannot be written"),
        ("lab learning-rat", "unknown"),
        ("lab k1-loss --seeds x", "seeds"),
    ],
)
def test_bad_input_is_one_line(argv, said, tmp_path, capfd):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    flags = [word.format(full=tmp_path / "full", new=tmp_path / "new") for word in argv.split()]
    assert said in refuse(capfd, *flags, main=course.main)
    assert [path.name for path in tmp_path.iterdir()] == ["full"]
