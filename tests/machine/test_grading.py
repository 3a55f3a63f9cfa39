"""Grading: what is told of a result and of the points, and that what goes wrong in one exercise
costs no other."""

from support.errors import BadInput

import csv
import importlib.util

import pytest

import course
import grading
from exercises import ALL, source, written
from surgery import put


def test_without_pytest_nobody_is_graded(tmp_path, monkeypatch):
    """In an environment with requirements.txt alone every test would end at once, and a right
    answer would get no points."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "ppo.py").write_text(source("ppo.py"), encoding="utf-8")
    with pytest.raises(BadInput, match="pip install -r requirements-dev.txt"):
        grading.grade([tmp_path], {"gae": ALL["gae"]}, 30)


def graded(place, names, *flags):
    """Grade the submission in `place`, which must lack points: {exercise: its row of the table}."""
    table = place.with_name("grades.csv")
    words = ["grade", str(place), "--only", names, "--csv", str(table), *flags]
    assert course.main(words) == 1
    with open(table, newline="", encoding="utf-8") as file:
        return {row["exercise"]: row for row in csv.DictReader(file)}


@pytest.mark.slow
def test_a_result_says_what_its_test_is_about(tmp_path, capsys):
    """ "Tensor-likes are not close" tells a student nothing. On the terminal and in the CSV stand
    the test's name, what it is about, and what went wrong. And a function that is not there earns
    nothing: in the run of all exercises our own stands in its place, and would pass."""
    text = source("grpo.py").replace("def turn_advantages(", "def another_name(")
    head = written(text, "group_advantages").split(":\n")[0]
    text = put(text, "group_advantages", head + ":\n    return rewards - rewards.mean()")
    place = tmp_path / "anna"
    place.mkdir()
    (place / "grpo.py").write_text(text, encoding="utf-8")
    rows = graded(place, "groups,turns")
    result = rows["groups"]["result"]
    assert result in capsys.readouterr().out
    assert result.startswith("test_group_advantages_by_hand: Shao 2024, section 4.1, with ")
    assert result.endswith(": AssertionError: Tensor-likes are not close!")
    assert "turn_advantages is not there" in rows["turns"]["result"]
    assert rows["total"]["points"] == "0"


@pytest.mark.soak
def test_what_goes_wrong_costs_its_own_exercise_only(tmp_path):
    """An endless loop, two ways to end the process, a syntax error, a missing file, one that is no
    text, and edited tests; beside an answer that is right, in the same file."""
    names = "whiten,clip,value,kl,thought,groups,fill,gae"
    place = tmp_path / "anna"
    course.main(["handout", str(place), "--only", names])
    bodies = {
        "whiten": "    import os\n    os._exit(0)",
        "value_loss": "    while True:\n        pass",
        "policy_loss": "    raise SystemExit(0)",
        "gae": '    raise NotImplementedError("exercise gae: yours")',
    }
    text = source("ppo.py")
    for function, body in bodies.items():
        text = put(text, function, written(text, function).split(":\n")[0] + ":\n" + body)
    (place / "ppo.py").write_text(text, encoding="utf-8")
    (place / "rollout.py").write_text("def split_thought(text:\n    pass\n", encoding="utf-8")
    (place / "grpo.py").unlink()
    (place / "support" / "answers.py").write_bytes(b"\xff\xfe\x00")
    for path in (place / "tests").iterdir():
        path.write_text("def test_fine():\n    pass\n", encoding="utf-8")
    rows = graded(place, names, "--limit", "30")
    results = {name: row["result"] for name, row in rows.items()}
    assert results["kl"] == "passed" and results["value"] == "no end within 30 s"
    assert results["gae"] == "not done"
    assert results["whiten"] == "the process ended itself (exit code 0)"
    assert "SystemExit" in results["clip"]
    assert "rollout.py: SyntaxError" in results["thought"]
    assert "grpo.py: FileNotFoundError" in results["groups"]
    assert "answers.py: UnicodeDecodeError" in results["fill"]
    assert rows["total"]["points"] == str(ALL["kl"]["points"])
