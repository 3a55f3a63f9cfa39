"""The sum of a class's points: each part on the scale of the course, and each student once."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "course"))
import course
import points


@pytest.mark.parametrize(
    "place",
    [
        "submissions/anna.zip",
        "unpacked/anna",
        "unpacked/anna/answers",
        "unpacked/anna/predictions.toml",
        "predictions/anna.toml",
        "unpacked/anna-board/anna",
    ],
)
def test_a_student_is_known_by_the_name_of_what_was_handed_in(place):
    assert points.student_of(place) == "anna"


FILES = {
    "grades.csv": "submission,exercise,points,of,result\n"
    "s/anna.zip,gae,7,7,passed\ns/anna.zip,total,50,100,\ns/ben.zip,total,100,100,\n",
    "derivations.csv": "submission,derivation,points,of,result\nu/anna/answers,total,24,30,\n",
    "predictions.csv": "submission,setting,points,of,result\n"
    "u/ben/predictions.toml,total,6.5,12,\n",
    "board.csv": "submission,rule,points,of,result\nu/anna-board/anna,total,7,10,a sentence\n",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with the four files."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def test_the_parts_are_added_on_the_scale_of_the_course(place, capsys):
    """The exercises have 100 points of their own and 20 of the course's. What was not handed in is
    a dash and not a 0."""
    assert course.main(["points", *FILES]) == 0
    head, _, anna, ben = capsys.readouterr().out.splitlines()
    assert head == (
        "| student | exercises (20) | derivations (30) | predictions (12) | open task (10) | sum |"
    )
    assert anna == "| anna | 10.0 | 24.0 | - | 7.0 | 41.0 |"
    assert ben == "| ben | 20.0 | - | 6.5 | - | 26.5 |"


@pytest.mark.parametrize(
    "argv, says",
    [
        (["no.csv"], "no.csv: cannot be read (No such file or directory)"),
        (["grades.csv", "grades.csv"], "there are two files of the part exercises"),
        (["empty.csv"], "is no file of points; grade"),
        (["other.csv"], "is no file of points; grade"),
    ],
)
def test_bad_input_is_one_line(argv, says, place, capsys):
    (place / "empty.csv").write_text("")
    (place / "other.csv").write_text("a,b,c\n1,2,3\n")
    assert course.main(["points", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1


def test_the_parts_and_what_is_graded_by_hand_are_100_points():
    """28 by hand: the reasons of the predictions (3) and the write-up (25)."""
    assert sum(part.points for part in points.PARTS.values()) + 3 + 25 == 100
