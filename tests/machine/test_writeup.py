"""The written half of the course: its points, its six weeks, and the numbers of the write-up's
page, which all follow from the reference runs."""

from support.stats import T_95

import itertools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import tables
from exercises import ALL

ROOT = Path(__file__).resolve().parent.parent.parent
COURSE = ROOT / "course"
README, WRITEUP, RUBRIC = (
    (COURSE / name).read_text(encoding="utf-8")
    for name in ("README.md", "writeup.md", "teacher/rubric.md")
)
WORDS = " ".join(WRITEUP.replace("\n>", "\n").split())  # without line ends and marks of quotation


def rows_of(text, heading):
    """The cells of the first table below a heading of a page, its two head lines left out."""
    below = f"\n{text}".split(f"\n{heading}\n", 1)[1]
    table = re.search(r"(?m)(?:^\|.*\n)+", below)[0]
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")[2:-1]
    ]


# -------------------------------------------------------------------------------- points and weeks


def test_the_parts_of_the_course_are_worth_100_points():
    """The exercises' own points are scaled by the number that the page says."""
    points = {row[0]: int(row[1]) for row in rows_of(README, "## 100 points")}
    assert sum(points.values()) == 100
    graded = sum(exercise["points"] for exercise in ALL.values())
    assert f"its {graded} points divided by {graded // points['exercises']}" in README
    assert points["exercises"] == 20 and points["write-up"] == 25


def test_page_and_rubric_of_the_write_up_agree():
    """Six criteria, in the same order, with the same points; 25 in all."""
    on_page = [int(row[1]) for row in rows_of(WRITEUP, "# The write-up")]
    in_rubric = [int(row[1]) for row in rows_of(RUBRIC, "# Rubric of the write-up")]
    assert on_page == in_rubric and sum(on_page) == 25


def test_each_criterion_has_four_levels_and_an_example_of_each():
    for name, points, *levels in rows_of(RUBRIC, "# Rubric of the write-up"):
        heading = next(line for line in RUBRIC.splitlines() if line.startswith(f"## {name} ("))
        assert heading.startswith(f"## {name} ({points}): ")
        rows = rows_of(RUBRIC, heading)
        assert [row[0] for row in rows] == [
            f"{word}, {level}" for word, level in zip(("full", "good", "weak", "none"), levels)
        ]
        numbers = [int(level) for level in levels]
        assert numbers[0] == int(points) and numbers[-1] == 0
        assert numbers == sorted(set(numbers), reverse=True)
        assert all(what and example.startswith('"') for _, what, example in rows)


def test_the_six_weeks_have_every_exercise_once_and_none_too_early():
    """An exercise whose tests need another one is not set before it."""
    week_of = {}
    for week, _, _, exercises, minutes, *_ in rows_of(README, "## Six weeks"):
        names = re.findall(r"`(\w+)`", exercises)
        assert not set(names) & set(week_of)
        week_of |= dict.fromkeys(names, int(week))
        assert sum(ALL[name]["minutes"] for name in names) == int(minutes), week
    assert set(week_of) == set(ALL)
    for name, exercise in ALL.items():
        assert all(week_of[needed] <= week_of[name] for needed in exercise["needs"]), name


# ---------------------------------------------------------------------- the numbers of the example


@pytest.fixture
def spread(tmp_path):
    """Runs the page's script in a directory with the project's support/ and docs/: spread(old=new)
    returns what it prints, after the lines that begin with `old =` were changed to `new`."""
    for name in ("benchmarks", "support"):
        (tmp_path / name).symlink_to(ROOT / name)
    (script,) = re.findall(r"(?s)```python\n(.*?)```", WRITEUP)

    def run(**values):
        text = script
        for name, value in values.items():
            text, count = re.subn(rf"(?m)^{name} = .*", f"{name} = {value!r}", text)
            assert count == 1, name
        (tmp_path / "spread.py").write_text(text, encoding="utf-8")
        command = [sys.executable, "spread.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "spread.png").read_bytes()[:4] == b"\x89PNG"
        return done.stdout

    return run


@pytest.mark.slow
def test_the_example_prints_what_the_page_shows(spread):
    shown = re.search(r"(?s)> ```\n(.*?)> ```", WRITEUP)[1].replace("> ", "", 1)
    assert spread() == shown.replace("\n> ", "\n")


@pytest.mark.slow
def test_the_examples_sentences_are_what_the_script_prints(spread):
    """The interval in words, another goal, and what three seeds alone would have said."""
    mean, half = difference(spread())
    assert f"{-mean:.0f} dialogues fewer" in WORDS
    assert f"(95 %: {-mean - half:.0f} to {-mean + half:.0f} fewer, five pairs)" in WORDS
    mean, half = difference(spread(SEEDS=[0, 1, 2]))
    assert f"would have given {-mean:.0f} ± {half:.0f} fewer" in WORDS
    assert f"between {-mean + half:.0f} fewer and {mean + half:.0f} more" in WORDS
    assert f"The middle is {-mean:.0f} fewer" in WORDS
    mean, half = difference(spread(GOAL=75))
    assert f"with `GOAL = 75` the script prints {-mean} ± {half} fewer" in WORDS


@pytest.mark.slow
def test_a_goal_that_is_reached_before_training_is_refused(spread):
    """There is no evaluation before the first one."""
    with pytest.raises(AssertionError, match="GOAL is 10, and a run begins at 2") as failure:
        spread(GOAL=10)
    assert "Traceback" not in str(failure.value)


def difference(printed):
    """The first difference that the script prints, as (mean, half of the interval)."""
    mean, half = re.search(r"difference +(-?[\d.]+) ± ([\d.]+)", printed).groups()
    return float(mean), float(half)


@pytest.mark.slow
def test_the_script_reads_a_students_runs(spread, tmp_path):
    """By hand: 20, 70, 80 at the steps 0, 5, 10 reaches 60 after four fifths of five steps of 64
    dialogues; 10 points more reach it earlier. A run that never does makes a nan, and no number."""
    for name, scores in (("base", (20, 70, 80)), ("change", (30, 80, 90))):
        for seed in (0, 1):
            run = tmp_path / "runs" / f"{name}-{seed}"
            run.mkdir(parents=True)
            evaluations = [{"step": 5 * i, "score": score + seed} for i, score in enumerate(scores)]
            (run / "summary.json").write_text(json.dumps({"evaluations": evaluations}))
    arms = {"base": "base-{}", "change": "change-{}"}
    printed = spread(ARMS=arms, SEEDS=[0, 1])
    assert re.search(r"base +252\.8 ± [\d.]+ +256\.0 +249\.6\n", printed)
    assert re.search(r"difference +-64\.0 ± 0\.0 +-64\.0 +-64\.0\n", printed)
    assert "nan" in spread(ARMS=arms, SEEDS=[0, 1], GOAL=95)


def test_the_pages_numbers_about_seeds_follow_from_the_reference_runs():
    """How far runs differ that differ in the seed alone; how wide an interval is; how long a run
    takes."""
    measured = tables.Results(ROOT / "benchmarks" / "runs.jsonl").read()
    scores = [tables.last(line) for line in tables.seeds_of(measured, "grpo-direct")]
    gaps = [abs(a - b) for a, b in itertools.combinations(scores, 2)]
    assert (
        f"differ by {np.mean(gaps):.1f} points from each other on average, and by "
        f"{max(gaps):.1f} at most" in WORDS
    )
    triples = [set(triple) for triple in itertools.combinations(range(10), 3)]
    sets = [(a, b) for a, b in itertools.combinations(triples, 2) if not a & b]
    means = [[np.mean([scores[i] for i in triple]) for triple in pair] for pair in sets]
    share = np.mean([abs(a - b) > 1 for a, b in means])
    assert f"differ by more than a point in {100 * share:.0f} % of all cases" in WORDS
    widths = {n: T_95[n] / n**0.5 for n in (2, 3, 5, 10)}
    assert (
        f"{widths[2]:.1f} s for two seeds, {widths[3]:.1f} s for three, {widths[5]:.1f} s for "
        f"five and {widths[10]:.1f} s for ten" in WORDS
    )
    for variant, words in tables.NAMES.items():
        lines = [line for name, line in measured.items() if line["part"] == "rewards"]
        seconds = [x["seconds"] for x in lines if x["name"].startswith(variant)]
        assert f"{min(seconds):.0f} to {max(seconds):.0f} s with `{words}`" in WORDS


@pytest.mark.skipif(not shutil.which("zip"), reason="zip is not installed")
def test_the_archive_of_runs_holds_five_files_of_each(tmp_path):
    """The command of the page; checkpoints, which have a config.json too, and pages stay behind."""
    listed = next(part for part in WRITEUP.split("\n* ") if part.startswith("From the directory"))
    names = set(re.findall(r"`(\w+\.jsonl?)`", listed))
    assert len(names) == 5
    for run in ("runs/base-0", "runs/change-0"):
        (tmp_path / run / "checkpoint-000030").mkdir(parents=True)
        for name in [*names, "report.html", "start.json", "checkpoint-000030/config.json"]:
            (tmp_path / run / name).write_text("x")
    command = re.search(r"(?m)^zip .*$", WRITEUP)[0].replace("NAME", "anna")
    assert subprocess.run(command, shell=True, cwd=tmp_path).returncode == 0
    shutil.unpack_archive(tmp_path / "anna-runs.zip", tmp_path / "unpacked")
    files = [path for path in (tmp_path / "unpacked").rglob("*") if path.is_file()]
    assert len(files) == 10 and {path.name for path in files} == names
