"""The course edition: that the list of exercises fits the project, its labs, and bad input.

That the tests are strong enough is another matter, and CI's: `python course/course.py matrix`.
"""

import ast
import re

import pytest

import course
import labs
from conftest import ROOT
from exercises import ALL, FUNCTIONS, source
from grading import about, name_of
from matrix import wrong_answers
from surgery import find

README = (ROOT / "course" / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_list_fits_the_project():
    """100 points. Each exercise names functions and tests that are there, and needs only what
    stands above it. The grader quotes what a test is about."""
    trees = {path.name: ast.parse(source(path)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert sum(e["points"] for e in ALL.values()) == 100
    for i, (name, e) in enumerate(ALL.items()):
        assert set(e["needs"]) <= set(list(ALL)[:i]), name
        for test in e["tests"]:
            file, function = test.split("::")
            what = " ".join(ast.get_docstring(find(trees[file], function)).split())
            told = about(name_of(test))
            assert len(told) > 20 and what.startswith(told.removesuffix(" ...")), test
    assert all(find(ast.parse(source(file)), function) for _, file, function in FUNCTIONS)


def test_every_exercise_has_wrong_answers_that_fit_the_code():
    """Whoever edits a function learns here which wrong answers must be edited with it."""
    names = [name for name, *_ in wrong_answers(ALL)]
    assert all(names.count(name) >= 4 for name in ALL)


def test_the_six_weeks_have_every_exercise_once_and_none_too_early():
    """An exercise whose tests need another one is not set before it."""
    weeks = re.findall(r"(?m)^\| (\d) \|.*$", README.split("## Six weeks")[1])
    rows = [row for row in README.splitlines() if re.match(r"\| \d \|", row)]
    week_of = {}
    for week, row in zip(weeks, rows, strict=True):
        names = re.findall(r"`(\w+)`", row.split("|")[3])
        assert not set(names) & set(week_of)
        week_of |= dict.fromkeys(names, int(week))
    assert set(week_of) == set(ALL)
    for name, exercise in ALL.items():
        assert all(week_of[needed] <= week_of[name] for needed in exercise["needs"]), name


def test_the_project_knows_nothing_of_the_course():
    """A student who reads the scripts beside the paper meets no marker of anybody's homework."""
    for path in ROOT.glob("*.py"):
        assert not re.search(
            r"\bexercises?\b|homework|course/|course\.py", path.read_text(encoding="utf-8"), re.I
        ), path.name


@pytest.mark.parametrize(
    "argv, said",
    [
        (["handout", "{full}"], "not empty"),
        (["handout", "{full}/file/x"], "cannot be written"),
        (["handout", "{new}", "--only", "gae,gea"], "'gea'"),
        (["grade", "{full}"], "is it a handout"),
        (["grade", str(ROOT), "--csv", "{new}/no/x.csv"], "cannot be written"),
        (["lab", "learning-rat"], "unknown"),
        (["lab", "k1-loss", "--seeds", "x"], "seeds"),
    ],
)
def test_bad_input_is_one_line(argv, said, tmp_path, capfd):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    try:
        code = course.main(
            [word.format(full=tmp_path / "full", new=tmp_path / "new") for word in argv]
        )
    except SystemExit as end:
        code = end.code
    error = capfd.readouterr().err
    assert code == 2 and said in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_the_patches_of_every_lab_fit_the_code():
    """And break something, but not the syntax."""
    seen = set()  # most of the files in most of the arms are the project's own
    for name, lab in labs.load_labs().items():
        arms = [labs.scripts_of(lab, arm) for arm in lab["arms"]]
        for number, scripts in enumerate(arms):
            own_flags = len(set(lab["arms"].values())) > 1
            assert number == 0 or scripts != arms[0] or own_flags, name
            new = {text for file, text in scripts.items() if file.endswith(".py")} - seen
            assert all(ast.parse(text) for text in new if text), name
            seen |= new
        assert (ROOT / "course" / "pictures" / f"{name}.png").is_file(), name
        assert f"| `{name}` | {lab['title']}" in README, name


@pytest.mark.parametrize(
    "name, flags, seeds",
    [("k1-loss", [], [0, 1, 2]), ("shared-seed", [], [0]), ("k1-loss", ["--seeds", "7"], [7])],
)
def test_a_lab_asks_before_it_shows(name, flags, seeds, tmp_path, capsys, monkeypatch):
    """It makes the runs that its text is about, or says that they are others. (No run is made.)"""
    made = []

    def make(runs):
        made.extend(runs)
        told = capsys.readouterr().out
        assert "which way, and by how much?" in told and "What to see" not in told

    monkeypatch.setattr(labs, "RUNS", tmp_path)
    monkeypatch.setattr(labs, "series", lambda run, what: [1.0, 2.0])
    monkeypatch.setattr(labs, "draw", lambda *_: None)
    monkeypatch.setattr(labs, "make_runs", make)
    assert course.main(["lab", name, *flags]) == 0
    assert sorted({run.seed for run in made}) == seeds
    assert ("about other seeds or steps" in capsys.readouterr().out) == bool(flags)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["weak-scorer", "mixed-users"])
def test_a_lab_runs(name, tmp_path, capsys, monkeypatch):
    """Two arms, two steps, one picture; asked for again, the runs are found. In the healthy arm the
    healthy user feels what was recorded."""
    monkeypatch.setattr(labs, "RUNS", tmp_path)
    for _ in range(2):
        assert course.main(["lab", name, "--seeds", "0", "--steps", "2"]) == 0
    assert "2 runs, 0 of them to be made" in capsys.readouterr().out
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    healthy = labs.Run(labs.load_labs()[name], "healthy", 0, 2)
    assert labs.series(healthy, "reported_minus_healthy").tolist() == [0, 0]
