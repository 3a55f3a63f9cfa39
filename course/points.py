"""points.py - add up what the graders have written.

    python course/course.py points grades.csv derivations.csv predictions.csv board.csv

`grade`, `derive --grade`, `predict --grade` and `board` write such files with --csv. The second
column of their heads says of which part they are. A student is recognised by the name of what was
handed in: submissions/anna.zip, unpacked/anna/answers, unpacked/anna/predictions.toml and
unpacked/anna-board/anna are all of anna. What is graded by hand (the reasons of the predictions and
the write-up, 28 points) is not in the sum.
"""

from patches import markdown
from support.errors import BadInput
from support.flags import Parser

import csv
import re
import sys
from pathlib import Path
from typing import NamedTuple


class Part(NamedTuple):
    """A part of the course's 100 points that a program grades."""

    name: str
    points: float  # in the course


# {the second column of a file: of which part it is}
PARTS = {
    "exercise": Part("exercises", 20),
    "derivation": Part("derivations", 30),
    "setting": Part("predictions", 12),
    "rule": Part("open task", 10),
}
# Names in a path that are those of a part and not of a student.
NO_STUDENT = {"answers", "predictions", "entry"}


def student_of(place):
    """The student's name in the path of what was handed in."""
    names = [re.sub(r"\.(zip|toml)$", "", name) for name in Path(place).parts]
    return next((name for name in reversed(names) if name not in NO_STUDENT), str(place))


def read_points(path):
    """(the Part of a file, {student: points, on the scale of the course}). Raises BadInput."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            head, *rows = csv.reader(file)
        part = PARTS[head[1]]
        totals = [row for row in rows if row[1] == "total"]
        points = {
            student_of(place): part.points * float(earned) / float(of)
            for place, _, earned, of, *_ in totals
        }
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, IndexError, KeyError, ZeroDivisionError, csv.Error):
        raise BadInput(
            f"{path}: is no file of points; grade, derive --grade, predict --grade and board write "
            "them with --csv"
        ) from None
    return part, points


def add_up(paths):
    """Print the points of each student, part by part. A part that a student has not handed in
    counts 0, and is shown as -."""
    points = {}  # {name of a part: {student: points}}
    for path in paths:
        part, earned = read_points(path)
        if part.name in points:
            raise BadInput(f"{path}: there are two files of the part {part.name}; give one")
        points[part.name] = earned
    parts = [part for part in PARTS.values() if part.name in points]
    columns = ["student", *[f"{part.name} ({part.points})" for part in parts], "sum"]
    rows = []
    for student in sorted(set().union(*points.values())):
        earned = [points[part.name].get(student) for part in parts]
        cells = ["-" if number is None else f"{number:.1f}" for number in earned]
        rows.append([student, *cells, f"{sum(number or 0 for number in earned):.1f}"])
    print(markdown(columns, rows))


def main(argv):
    """`course.py points`. Returns the exit code. Raises BadInput, which course.py prints."""
    parser = Parser(
        prog="course.py points",
        description="Add up the points that the other commands have written with --csv.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file of points")
    add_up(parser.parse_args(argv).files)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
