"""points.py - add up what the graders have written, and what was graded by hand.

    python course/course.py points grades.csv derivations.csv predictions.csv board.csv hand.csv

`grade`, `derive --grade`, `predict --grade` and `board` write such files with --csv. The second
column of their heads says of which part they are. A student is recognised by the name of what was
handed in: submissions/anna.zip, unpacked/anna/answers, unpacked/anna/predictions.toml and all of
unpacked/anna-board/ are of anna. A plus sign joins the names of a pair: anna+ben.zip and
anna+ben-board.zip are of anna and of ben, and both get the points.

Two parts are graded by hand: the reasons of the predictions, and the write-up. Their points stand
in a file with the columns name, part and points:

    name,part,points
    anna+ben,write-up,19
    anna,reasons,2
"""

from patches import markdown
from support.errors import BadInput
from support.flags import Parser

import csv
import re
import sys
from pathlib import Path

# {part: its points of the course's 100}, in the order of the table
PARTS = {
    "exercises": 20,
    "derivations": 30,
    "predictions": 12,
    "reasons": 3,  # of the predictions
    "write-up": 25,
    "open task": 10,
}
# {the second column of a file that a grader has written: of which part it is}
PART_OF_FILE = {
    "exercise": "exercises",
    "derivation": "derivations",
    "setting": "predictions",
    "rule": "open task",
}
BY_HAND = ("reasons", "write-up")
COLUMNS_BY_HAND = ["name", "part", "points"]
# Names in a path that are those of a part and not of a student.
NO_STUDENT = {"answers", "predictions", "entry"}
OF_BOARD = "-board"  # the end of the name of an archive of the open task


def students_of(place):
    """The students' names in the path of what was handed in: several for a pair."""
    names = [re.sub(r"\.(zip|toml)$", "", name) for name in Path(place).parts]
    if len(names) > 1 and names[-2].endswith(OF_BOARD):
        names.pop()  # the name of the entry, which may be any
    name = next((name for name in reversed(names) if name not in NO_STUDENT), str(place))
    students = [student.strip() for student in name.removesuffix(OF_BOARD).split("+")]
    return [student for student in students if student]


def read_points(path):
    """The points in a file, [(part, student, points on the scale of the course)]. Raises
    BadInput."""
    try:
        with open(path, newline="", encoding="utf-8") as file:
            head, *rows = csv.reader(file)
        rows = [row for row in rows if row]
        if head == COLUMNS_BY_HAND:
            return points_by_hand(path, rows)
        part = PART_OF_FILE[head[1]]
        return [
            (part, student, PARTS[part] * float(earned) / float(of))
            for place, name, earned, of, *_ in rows
            if name == "total"
            for student in students_of(place)
        ]
    except BadInput:  # which is a ValueError
        raise
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, IndexError, KeyError, ZeroDivisionError, csv.Error):
        raise BadInput(
            f"{path}: is no file of points; grade, derive --grade, predict --grade and board write "
            f"them with --csv, and one by hand has the columns {','.join(COLUMNS_BY_HAND)}"
        ) from None


def points_by_hand(path, rows):
    """The points of a file that the teacher has written, as `read_points` returns them. Raises
    BadInput for a part that is not graded by hand, and for too many points; ValueError for a row
    that is none."""
    points = []
    for name, part, earned in rows:
        if part not in BY_HAND:
            raise BadInput(
                f"{path}: {name}: the part is {part!r} and must be {' or '.join(BY_HAND)}"
            )
        if not 0 <= float(earned) <= PARTS[part]:
            raise BadInput(f"{path}: {name}: {part} has 0 to {PARTS[part]} points, not {earned}")
        points += [(part, student, float(earned)) for student in students_of(name)]
    return points


def add_up(paths):
    """Print the points of each student, part by part. A part that a student has not handed in
    counts 0, and is shown as -. Raises BadInput, also where a student has two totals of a part."""
    earned = {}  # {student: {part: points}}
    for path in paths:
        for part, student, points in read_points(path):
            parts_of_student = earned.setdefault(student, {})
            if part in parts_of_student:
                raise BadInput(f"{path}: {student} has points of the part {part} already; give one")
            parts_of_student[part] = points
    given = [part for part in PARTS if any(part in parts for parts in earned.values())]
    columns = ["student", *[f"{part} ({PARTS[part]})" for part in given]]
    columns.append(f"sum ({sum(PARTS[part] for part in given)})")
    rows = []
    for student, parts in sorted(earned.items()):
        cells = [f"{parts[part]:.1f}" if part in parts else "-" for part in given]
        rows.append([student, *cells, f"{sum(parts.values()):.1f}"])
    print(markdown(columns, rows))


def main(argv):
    """`course.py points`. Returns the exit code. Raises BadInput, which course.py prints."""
    parser = Parser(
        prog="course.py points",
        description="Add up the points that the other commands have written with --csv, and those "
        "of a file by hand, with the columns name,part,points.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="a file of points")
    add_up(parser.parse_args(argv).files)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
