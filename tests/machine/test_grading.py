"""Grading: what is told of a result and of the points, and that what goes wrong in one exercise
costs no other."""

from support.errors import BadInput

import csv
import importlib.util
import json
import re
import sys
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "course"))
import course
import grading
import matrix
from exercises import ALL, source, written
from surgery import put


@pytest.mark.slow
def test_without_pytest_nobody_is_graded(tmp_path, monkeypatch):
    """In an environment with requirements.txt alone every test would end at once, and a right
    answer would get no points."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "ppo.py").write_text(source("ppo.py"), encoding="utf-8")
    chosen, table = {"gae": ALL["gae"]}, tmp_path / "grades.csv"
    table.write_text("mine")
    with pytest.raises(BadInput, match="pip install -r requirements-dev.txt"):
        grading.grade([tmp_path], chosen, 30, csv_name=str(table))
    assert table.read_text() == "mine"
    with pytest.raises(BadInput, match="pip install -r requirements-dev.txt"):
        matrix.matrix(chosen, 30)


def test_an_exit_code_is_read_once(tmp_path, monkeypatch):
    """Two threads start tests and wait for them. Whoever starts a process asks for the exit codes
    of all others. If the thread of one of them was just reading its code, too, that one read
    nothing, took it for 255, and a right answer got no points. Here the first code is read slowly,
    and a second process is started in the meantime."""
    read_signed = forkserver.read_signed
    is_reading = threading.Event()
    descriptors = []

    def read_slowly(descriptor):
        descriptors.append(descriptor)
        if len(descriptors) == 2:  # the first reading is that of the new process's number
            is_reading.set()
            time.sleep(1)
        return read_signed(descriptor)

    monkeypatch.setattr(forkserver, "read_signed", read_slowly)
    first, second = tmp_path / "first", tmp_path / "second"
    for place in (first, second):
        (place / "tests").mkdir(parents=True)
        (place / "tests" / "test_fine.py").write_text("def test_fine():\n    pass\n")
    with grading.workers() as pool:
        of_first = pool.submit(grading.run_tests, first, 60)
        assert is_reading.wait(60)
        assert grading.run_tests(second, 60) == "" == of_first.result()


def test_a_result_says_what_its_test_is_about(tmp_path, capsys):
    """ "Tensor-likes are not close" tells a student nothing. On the terminal and in the CSV stand
    the test's name, what it is about, and what went wrong; at the end, how long it all took."""
    place, table = tmp_path / "anna", tmp_path / "grades.csv"
    assert course.main(["handout", str(place), "--only", "groups"]) == 0
    wrong = (
        'def group_advantages(rewards, groups, kind="grpo", eps=1e-6):\n'
        "    return rewards - rewards.mean()\n"
    )
    (place / "grpo.py").write_text(wrong, encoding="utf-8")
    assert course.main(["grade", str(place), "--only", "groups", "--csv", str(table)]) == 1
    told = capsys.readouterr().out
    with open(table, newline="", encoding="utf-8") as file:
        row, _ = csv.DictReader(file)
    assert row["points"] == "0" and row["result"] in told and len(row["result"]) < 280
    assert row["result"].startswith("test_group_advantages_by_hand: Shao 2024, section 4.1, with ")
    assert row["result"].endswith(": AssertionError: Tensor-likes are not close!")
    assert re.search(r"\n1 submission, 1 exercise each: \d+ s\n$", told)


@pytest.mark.slow
def test_what_is_told_of_the_points(tmp_path, capsys):
    """The exit code says whether any are missing, the last line of the table and of the CSV how
    many there are, and Gradescope's file all of it, of one submission."""
    for name, kl in (("anna", source("ppo.py")), ("ben", "def kl_penalty(*_):\n    return 0\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ppo.py").write_text(kl, encoding="utf-8")
        (tmp_path / name / "grpo.py").write_text(source("grpo.py"), encoding="utf-8")
    table, report = tmp_path / "grades.csv", tmp_path / "results.json"

    def grade(*more):
        return course.main(["grade", *map(str, more), "--only", "kl,groups"])

    assert grade(tmp_path / "anna", "--gradescope", report) == 0
    assert {key: json.loads(report.read_text())[key] for key in ("score", "max_score")} == {
        "score": 8,
        "max_score": 8,
    }
    assert grade(tmp_path / "ben", "--gradescope", report) == 1
    results = json.loads(report.read_text(encoding="utf-8"))
    assert set(results) == {"score", "max_score", "output", "tests"} and results["max_score"] == 8
    assert results["score"] == 4 and results["output"] == "1 of 2 exercises passed, 4 of 8 points"
    assert [
        (test["name"].split(":")[0], test["score"], test["max_score"], test["status"])
        for test in results["tests"]
    ] == [("kl", 0, 4, "failed"), ("groups", 4, 4, "passed")]
    assert (
        results["tests"][0]["output"].startswith("test_")
        and results["tests"][1]["output"] == "passed"
    )
    capsys.readouterr()
    assert grade(tmp_path / "anna", tmp_path / "ben", "--csv", table) == 1
    with open(table, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["exercise"] == "total"]
    assert "total" not in ALL
    assert [
        (Path(row["submission"]).name, row["points"], row["of"], row["result"]) for row in rows
    ] == [
        ("anna", "8", "8", "2 of 2 exercises passed, 8 of 8 points"),
        ("ben", "4", "8", results["output"]),
    ]
    assert re.findall(r"\n  total +(\d+) of +(\d+)\n", capsys.readouterr().out) == [
        ("8", "8"),
        ("4", "8"),
    ]


@pytest.mark.soak
def test_what_goes_wrong_costs_its_own_exercise_only(tmp_path, capsys):
    """An endless loop, one that eats memory, two ways to end the process, a syntax error, a missing
    file, one that is no text, and edited tests; beside an answer that is right, in the same file. A
    student's process is not the grader's."""
    place = tmp_path / "anna"
    course.main(["handout", str(place), "--only", "gae,whiten,clip,value,kl,groups,fill,thought"])

    def write(file, **bodies):
        text = source(file)
        for function, body in bodies.items():
            text = put(text, function, written(text, function).split(":\n")[0] + ":\n" + body)
        (place / file).write_text(text, encoding="utf-8")

    write(
        "policy.py", split_thought="    x = []\n    while True:\n        x.append(bytes(10 ** 9))"
    )
    write(
        "ppo.py",
        whiten="    import os\n    os._exit(0)",
        value_loss="    while True:\n        pass",
        policy_loss="    raise SystemExit(0)",
        gae="    return rewards[",
    )
    (place / "grpo.py").unlink()
    (place / "simulator.py").write_bytes(b"\xff\xfe\x00")
    for path in (place / "tests").iterdir():
        path.write_text("def test_fine():\n    pass\n", encoding="utf-8")
    untouched = tmp_path / "ben"
    course.main(["handout", str(untouched), "--only", "kl,groups"])
    (untouched / "ppo.py").write_text(source("ppo.py"), encoding="utf-8")
    table = tmp_path / "grades.csv"
    assert (
        course.main(
            [
                "grade",
                str(place),
                str(untouched),
                "--only",
                "gae,whiten,clip,value,kl,groups,fill,thought",
                "--limit",
                "20",
                "--csv",
                str(table),
            ]
        )
        == 1
    )
    with open(table, newline="", encoding="utf-8") as file:
        found = {
            (Path(row["submission"]).name, row["exercise"]): (int(row["points"]), row["result"])
            for row in csv.DictReader(file)
        }
    anna = {name: result for (who, name), result in found.items() if who == "anna"}
    total, _ = anna.pop("total")
    points = {name: exercise["points"] for name, exercise in ALL.items()}
    assert anna["kl"] == (points["kl"], "passed")
    assert anna["gae"] == (0, "ppo.py: gae does not parse, or is not at the top level") and anna[
        "groups"
    ] == (0, "grpo.py is missing")
    assert anna["fill"] == (0, "simulator.py is not UTF-8 text") and anna["value"] == (
        0,
        "no end within 20 s",
    )
    assert (
        anna["whiten"] == (0, "the process ended itself (exit code 0)")
        and "SystemExit" in anna["clip"][1]
        and anna["clip"][0] == 0
    )
    assert anna["thought"][0] == 0 and "MemoryError" in anna["thought"][1]
    assert found["ben", "kl"] == (points["kl"], "passed")
    assert found["ben", "groups"] == (0, "not done")
    assert total == sum(earned for earned, _ in anna.values())
    assert f" {total} of {sum(points[name] for name in anna)}\n" in capsys.readouterr().out
