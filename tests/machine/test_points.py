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
        "unpacked/anna-board/fast critic",
        "unpacked/anna-board/entry",
        "anna-board.zip",
    ],
)
def test_a_student_is_known_by_the_name_of_what_was_handed_in(place):
    assert points.students_of(place) == ["anna"]


@pytest.mark.parametrize(
    "place", ["anna+ben.zip", "u/anna+ben/answers", "u/anna+ben-board/our entry", "anna + ben"]
)
def test_a_plus_sign_joins_the_names_of_a_pair(place):
    assert points.students_of(place) == ["anna", "ben"]


FILES = {
    "grades.csv": "submission,exercise,points,of,result\n"
    "s/anna.zip,gae,7,7,passed\ns/anna.zip,total,50,100,\ns/ben.zip,total,100,100,\n",
    "derivations.csv": "submission,derivation,points,of,result\nu/anna/answers,total,24,30,\n",
    "predictions.csv": "submission,setting,points,of,result\n"
    "u/ben/predictions.toml,total,6.5,12,\n",
    "board.csv": "submission,rule,points,of,result\n"
    "u/anna+ben-board/fast critic,total,7,10,a sentence\n",
    "hand.csv": "name,part,points\nanna+ben,write-up,19\nanna,reasons,2.5\n",
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with the files."""
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
        "| student | exercises (20) | derivations (30) | predictions (12) | reasons (3) | "
        "write-up (25) | open task (10) | sum (100) |"
    )
    assert anna == "| anna | 10.0 | 24.0 | - | 2.5 | 19.0 | 7.0 | 62.5 |"
    assert ben == "| ben | 20.0 | - | 6.5 | - | 19.0 | 7.0 | 52.5 |"
    assert course.main(["points", "board.csv", "grades.csv"]) == 0
    head, *_ = capsys.readouterr().out.splitlines()
    assert head == "| student | exercises (20) | open task (10) | sum (30) |"


@pytest.mark.parametrize(
    "argv, says",
    [
        (["no.csv"], "no.csv: cannot be read (No such file or directory)"),
        (["grades.csv", "grades.csv"], "anna has points of the part exercises already; give one"),
        (["twice.csv"], "ben has points of the part derivations already; give one"),
        (["part.csv"], "ben: the part is 'exercises' and must be reasons or write-up"),
        (["much.csv"], "ben: reasons has 0 to 3 points, not 4"),
        (["word.csv"], "is no file of points; grade"),
        (["empty.csv"], "is no file of points; grade"),
        (["other.csv"], "is no file of points; grade"),
    ],
)
def test_bad_input_is_one_line(argv, says, place, capsys):
    (place / "empty.csv").write_text("")
    (place / "other.csv").write_text("a,b,c\n1,2,3\n")
    (place / "part.csv").write_text("name,part,points\nben,exercises,3\n")
    (place / "much.csv").write_text("name,part,points\nben,reasons,4\n")
    (place / "word.csv").write_text("name,part,points\nben,reasons,good\n")
    (place / "twice.csv").write_text(
        "submission,derivation,points,of,result\nu/ben/answers,total,3,30,\n"
        "u/anna+ben/answers,total,24,30,\n"
    )
    assert course.main(["points", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == "" and says in err and err.count("\n") == 1


def test_the_parts_are_100_points():
    """28 by hand: the reasons of the predictions (3) and the write-up (25). Of each other part a
    program writes a file."""
    assert sum(points.PARTS.values()) == 100
    assert sum(points.PARTS[part] for part in points.BY_HAND) == 28
    assert {*points.BY_HAND, *points.PART_OF_FILE.values()} == set(points.PARTS)
