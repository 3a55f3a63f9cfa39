"""The course edition: that the list of exercises fits the project, its labs, and bad input.

That the tests are strong enough is another matter, and CI's: `python course/course.py matrix`.
"""

import ast
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "course"))
import course
import labs
from exercises import ALL, FUNCTIONS, source
from grading import about
from matrix import wrong_answers
from surgery import find, parses

# ----------------------------------------------------------------------------------------- the list


@pytest.mark.slow
def test_the_list_fits_the_project():
    """At least fourteen exercises, 100 points. Each names functions and tests that are there, needs
    only what stands above it, and its README says so too."""
    table = (ROOT / "course" / "README.md").read_text(encoding="utf-8")
    trees = {path.name: ast.parse(source(path)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(ALL) >= 14 and sum(e["points"] for e in ALL.values()) == 100
    for i, (name, e) in enumerate(ALL.items()):
        assert set(e["needs"]) <= set(list(ALL)[:i]), name
        assert all(
            e[field]
            for field in ("title", "section", "task", "equation", "hint", "symptom", "tests")
        ), name
        for test in e["tests"]:
            file, function = test.split("::")
            assert find(trees[file], function), test
        (row,) = [line for line in table.splitlines() if line.startswith(f"| `{name}` ")]
        assert (
            f"`{e['file']}`" in row
            and f"| {e['minutes']} |" in row
            and all(f"`{f}`" in row for f in e["functions"])
        )
    assert all(find(ast.parse(source(file)), function) for _, file, function in FUNCTIONS)


@pytest.mark.slow
def test_every_exercise_has_wrong_answers_that_fit_the_code():
    """Whoever edits a function learns here which wrong answers must be edited with it."""
    names = [name for name, *_ in wrong_answers(ALL)]
    assert all(names.count(name) >= 4 for name in ALL)


@pytest.mark.slow
def test_every_test_that_grades_says_what_it_is_about():
    """The grader quotes it, as the title of an exercise's result."""
    for exercise in ALL.values():
        for test in exercise["tests"]:
            said = about(test.split("::")[1])
            assert 20 < len(said) <= 110 and "\n" not in said, test
    assert about("test_that_is_not_there") == ""


def test_the_project_knows_nothing_of_the_course():
    """A student who reads the scripts beside the paper meets no marker of anybody's homework."""
    for path in ROOT.glob("*.py"):
        assert not re.search(
            r"\bexercises?\b|homework|course/|course\.py", path.read_text(encoding="utf-8"), re.I
        ), path.name


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "argv, said",
    [
        (["handout", "{full}"], "not empty"),
        (["handout", "{full}/file"], "not empty"),
        (["handout", "{full}/file/x"], "cannot be written"),
        (["handout", "{new}", "--only", "gae,gea"], "'gea'"),
        (["handout", "{new}", "--only", ","], "there is no exercise"),
        (["grade", "{new}"], "no such directory"),
        (["grade", "{full}"], "is it a handout"),
        (["grade", str(ROOT), "--csv", "{new}/no/x.csv"], "cannot be written"),
        (["grade", str(ROOT), "--gradescope", "{new}/no/x.json"], "cannot be written"),
        (
            ["grade", str(ROOT), str(ROOT), "--gradescope", "{new}"],
            "is for one submission, not for 2",
        ),
        (["grade", str(ROOT), "{full}/file"], "no whole zip file"),
        (["grade", "{full}", "--limit", "0"], "above 0"),
        (["grade"], "required"),
        (["mark"], "invalid choice"),
        ([], "required"),
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
    assert code == 2 and said in error and error.count("\n") == 1 and "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["full"] and (
        tmp_path / "full" / "file"
    ).read_text() == "mine"


# --------------------------------------------------------------------------------------------- labs


def test_the_patches_of_every_lab_fit_the_code():
    """And break something, but not the syntax."""
    seen = set()  # most of the files in most of the arms are the project's own
    for name, lab in labs.load_labs().items():
        healthy, broken = (labs.scripts_of(lab, arm) for arm in ("healthy", "broken"))
        assert healthy != broken or len(set(lab["arms"].values())) > 1, name
        for scripts in (healthy, broken):
            new = {text for file, text in scripts.items() if file.endswith(".py")} - seen
            assert all(parses(text.decode()) for text in new), name
            seen |= new
        assert len(lab["see"]) > 80 and len(lab["why"]) > 80 and len(lab["questions"]) >= 2, name
        assert (ROOT / "course" / "pictures" / f"{name}.png").is_file(), name
        readme = (ROOT / "course" / "README.md").read_text(encoding="utf-8")
        assert "{{" not in readme and f"### {name}: {lab['title']}" in readme, name
        assert all(
            f"* {question} " in " ".join(readme.split()) + " " for question in lab["questions"]
        ), name


def test_the_page_has_the_recorded_times_of_the_labs():
    """Each lab ends with the place of its picture and its seconds."""
    page = (ROOT / "course" / "README.md").read_text(encoding="utf-8")
    section = " ".join(page.split("### How long they take\n")[1].split())
    lines = (ROOT / "docs" / "reference" / "runs.jsonl").read_text(encoding="utf-8").splitlines()
    seconds = {}
    for run in map(json.loads, lines):
        if run["part"] == "labs":
            lab = run["name"].removeprefix("lab-")
            (seconds[lab],) = re.findall(r"the picture is .*\((\d+) s\)", run["output"])
    assert set(seconds) == set(labs.load_labs())
    low, high = re.search(r"the others from (\d+) s \([\w-]+\) to (\d+) s", section).groups()
    for lab, time in seconds.items():
        if lab in section:
            assert f"{time} s" in section, lab
        else:
            assert int(low) < int(time) < int(high), lab


@pytest.mark.parametrize(
    "flags, told",
    [
        ([], ""),
        (["--steps", "20", "--seeds", "0,1,2"], ""),
        (["--steps", "2"], "2 steps and seeds 0, 1, 2"),
        (["--seeds", "7"], "20 steps and seed 7"),
        (["--steps", "1", "--seeds", "1,0"], "1 step and seeds 1, 0"),
    ],
)
def test_a_labs_words_are_about_the_runs_that_were_measured(
    flags, told, tmp_path, capsys, monkeypatch
):
    """At another length, or with other seeds, its numbers are not to be looked for: it says so, in
    front of them. (No run is made here.)"""
    monkeypatch.setattr(labs, "RUNS", tmp_path)
    monkeypatch.setattr(labs, "make_runs", lambda runs: None)
    monkeypatch.setattr(labs, "series", lambda run, what: [1.0, 2.0])
    monkeypatch.setattr(labs, "draw", lambda *_: None)
    assert course.main(["lab", "k1-loss", *flags]) == 0
    above, _, below = capsys.readouterr().out.partition("What to see\n")
    assert "k2 holds the policy near its start" in below
    assert ("written about 20 steps and seeds 0, 1, 2" in above) == bool(told) and told in above


@pytest.mark.parametrize(
    "name, flags, seeds",
    [
        ("k1-loss", [], [0, 1, 2]),
        ("shared-seed", [], [0]),
        ("shared-seed", ["--seeds", "0,1"], [0, 1]),
    ],
)
def test_a_lab_says_which_seeds_it_needs(name, flags, seeds, tmp_path, capsys, monkeypatch):
    """Where an effect is exact, one seed is enough, and the lab's text is about that one."""
    monkeypatch.setattr(labs, "RUNS", tmp_path)
    monkeypatch.setattr(labs, "series", lambda run, what: [1.0, 2.0])
    monkeypatch.setattr(labs, "draw", lambda *_: None)
    made = []
    monkeypatch.setattr(labs, "make_runs", made.extend)
    assert course.main(["lab", name, *flags]) == 0
    told = capsys.readouterr().out
    assert sorted({run.seed for run in made}) == seeds
    assert ("was written about" in told) == bool(flags)
    assert ("Where it happened\n" in told and "https://github.com/" in told) == (
        name == "shared-seed"
    )


@pytest.mark.soak
@pytest.mark.parametrize("name", ["mixed-users", "no-format-check"])
def test_a_lab_runs(name, tmp_path, capsys, monkeypatch):
    """Two arms, two steps, one picture; asked for again, the runs are found."""
    monkeypatch.setattr(labs, "RUNS", tmp_path)
    for _ in range(2):
        assert (
            course.main(
                ["lab", name, "--seeds", "0", "--steps", "2", "--out", str(tmp_path / "x.png")]
            )
            == 0
        )
    told = capsys.readouterr().out
    assert (
        "What to see" in told
        and "2 of 2 runs are there already" in told
        and (tmp_path / "x.png").stat().st_size > 10_000
    )
