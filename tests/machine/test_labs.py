"""The labs of the course: their patches fit the code, and a lab asks before it shows."""

import ast
import re

import pytest

import course
import labs
from exercises import ALL, ROOT, source

README = source("course/README.md")


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


def test_the_weeks_and_the_points_add_up():
    """Each exercise in one week, with the hours that its week takes; each lab in one; all points."""
    weeks = [row.split("|")[3:7] for row in re.findall(r"^\| [1-6] \|.*$", README, re.M)]
    named = [re.findall(r"`(\w+)`", exercises) for exercises, *_ in weeks]
    assert sorted(sum(named, [])) == sorted(ALL)
    for names, (_, hours, *_) in zip(named, weeks):
        assert not names or float(hours) == round(sum(ALL[n]["minutes"] for n in names) / 60, 1)
    told = re.findall(r"^\| [1-6] \|.*\| (.*?) \|$", README, re.M)
    assert set(", ".join(told).split(", ")) >= set(labs.load_labs())
    points = [sum(exercise["points"] for exercise in ALL.values())]
    for page, number in (
        ("derivations", r"^## .*\((\d+) points\)"),
        ("writeup", r"\((\d+) points\)"),
    ):
        points.append(sum(map(int, re.findall(number, source(f"course/{page}.md"), re.M))))
    assert f"There are {sum(points)} points: {points[0]}" in README


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
@pytest.mark.parametrize("name", ["weak-scorer", "mixed-users", "one-question-missing"])
def test_a_lab_runs(name, tiny_dir, taught, tmp_path, capsys, monkeypatch):
    """Two arms, two steps, one picture; asked for again, the runs are found. In the healthy arm the
    healthy user feels what was recorded. (Tiny models stand for the real ones.)"""
    monkeypatch.setattr(labs, "RUNS", tmp_path)
    monkeypatch.setenv("READER", str(taught))
    monkeypatch.setenv("RLVER_CACHE", str(tmp_path))
    (tmp_path / "smollm2").symlink_to(tiny_dir)
    for _ in range(2):
        assert course.main(["lab", name, "--seeds", "0", "--steps", "2"]) == 0
    assert "2 runs, 0 of them to be made" in capsys.readouterr().out
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000
    healthy = labs.Run(labs.load_labs()[name], "healthy", 0, 2)
    assert labs.series(healthy, "reported_minus_healthy").tolist() == [0, 0]
