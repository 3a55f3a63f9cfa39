"""derive.py - the course's derivations: print a question, and compare a student's formulas with an
enumeration.

    python course/course.py derive                  the derivations, with their points
    python course/course.py derive baseline         one question
    python course/course.py derive baseline FILE    compare the functions in FILE, a Python file,
                                                    with the enumerations of the same names
    python course/course.py derive --grade DIR...   for teachers: the points of each student, whose
                                                    DIR has a file for each derivation

derivations.md has the questions, and enumerations.py computes the values without a formula. The
inputs are drawn anew each time; --seed repeats a check. FILE runs in a process of its own
(answer_process.py), which has ten seconds and never sees the enumerated values. In a handout these
files are in derivations/, and the command is `python derivations/derive.py`.
"""

from patches import HERE, kill, opened_for_writing, point_columns, terminable, write_row
from support.errors import BadInput
from support.flags import Parser, natural

import ast
import inspect
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from answer_process import ALLOWED, Refused
from enumerations import DERIVATIONS

LIMIT = 10.0  # seconds for a file
DRAWS = 8  # inputs per part, besides the fixed ones
MAX_SOURCE = 10**6  # bytes of a file
TOLERANCE = 1e-8  # relative
NOTHING = 1e-12  # a difference that is rounding, where the value is 0


# ------------------------------------------------------------------------------------ the questions


class Question(NamedTuple):
    """A section of derivations.md."""

    title: str
    points: int
    text: str

    @property
    def points_of_parts(self):
        """The points of each part, in their order."""
        return [int(points) for points in re.findall(r"(?m)^\d\. \((\d) points?\)", self.text)]


def questions():
    """The questions of derivations.md as {name: Question}. A section begins with
    "## name: title (points)"."""
    page = (HERE / "derivations.md").read_text(encoding="utf-8")
    sections = {}
    for section in re.split(r"(?m)^(?=## )", page)[1:]:
        heading = re.match(r"## ([\w-]+): (.+) \((\d+) points\)\n", section)
        if heading:
            name, title, points = heading.groups()
            sections[name] = Question(title, int(points), section.strip())
    return sections


def print_list():
    """A line for each derivation."""
    for name, question in questions().items():
        print(f"{name:<15}{question.points:>3} points   {question.title}")


# --------------------------------------------------------------------------------- a student's file


def read_answer(path):
    """The text of a student's file. Raises BadInput where it cannot be run at all, or imports what
    it may not."""
    try:
        with open(path, "rb") as file:
            source = file.read(MAX_SOURCE + 1)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    if len(source) > MAX_SOURCE:
        raise BadInput(f"{path}: is larger than a megabyte")
    try:
        text = source.decode("utf-8-sig")
        tree = ast.parse(text)
    except UnicodeDecodeError:
        raise BadInput(f"{path}: is not UTF-8 text") from None
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        raise BadInput(f"{path}{line}: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise BadInput(f"{path}: cannot be parsed ({type(error).__name__})") from None
    for line, module in sorted(modules_imported(tree)):
        if module.split(".")[0] not in ALLOWED:
            raise BadInput(f"{path}, line {line}: {Refused(module)}")
    return text


def modules_imported(tree):
    """(line, module) of every import, wherever it stands. `from . import x` is the module "."."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "." * node.level + (node.module or "")


# ---------------------------------------------------------------------------------------- one check


class Call(NamedTuple):
    """A function of the student's file, with one choice of its inputs."""

    number: int  # of the part
    part: object
    inputs: dict

    @property
    def function(self):
        return self.part.enumerate.__name__

    def __str__(self):
        inputs = ", ".join(f"{name}={short(value)}" for name, value in self.inputs.items())
        return f"part {self.number}, {self.function}({inputs})"


def calls_of(name, seed):
    """All Calls of a derivation, part by part."""
    rng = np.random.default_rng(seed)
    calls = []
    for number, part in enumerate(DERIVATIONS[name], 1):
        drawn = [part.draw(rng) for _ in range(DRAWS)]
        calls += [Call(number, part, inputs) for inputs in [*part.edges, *drawn]]
    return calls


def check(name, text, file, seed, limit=LIMIT, part=None):
    """Compare a student's formulas with the enumerations. Returns "" or the first problem, in one
    line. text: of the student's file; file: its name; limit: seconds for all calls together; part:
    the number of the only part that is checked, or None."""
    calls = [call for call in calls_of(name, seed) if part in (None, call.number)]
    lines, ending = run_answer(text, file, calls, limit)
    if not lines:
        return f"{file}: {ending}"
    started, *answers = lines
    if "problem" in started:
        return f"{file}: {started['problem']}"
    # the call that has no answer, if there is one, is the one in which the process ended
    answers.append({"problem": ending})
    for call, answer in zip(calls, answers):
        if answer.get("problem") == "is not there":
            return f"part {call.number}: {signature(call.part)} is not in {file}"
        problem = answer.get("problem") or problem_with(call, answer["value"])
        if problem:
            return f"{call}: {problem}"
    return ""


def signature(part):
    """The first line of a function, as a student writes it: "variance(p, r1, r2, b)"."""
    names = [name for name in inspect.signature(part.enumerate).parameters if name != "answer"]
    return f"{part.enumerate.__name__}({', '.join(names)})"


def run_answer(text, file, calls, limit):
    """Run a student's file and all calls in a process of its own. Returns (the lines that it wrote,
    why there are no more of them)."""
    values = [
        [v.tolist() if isinstance(v, np.ndarray) else v for v in call.inputs.values()]
        for call in calls
    ]
    request = {
        "file": str(file),
        "text": text,
        "calls": [[call.function, v] for call, v in zip(calls, values)],
    }
    process = subprocess.Popen(
        [sys.executable, "-I", str(HERE / "answer_process.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        encoding="utf-8",
        start_new_session=True,  # whatever it starts ends with it
    )
    try:
        output, _ = process.communicate(json.dumps(request), timeout=limit)
        ending = f"the process ended itself (exit code {process.returncode})"
    except subprocess.TimeoutExpired:
        kill(process)
        output, _ = process.communicate()
        ending = f"no answer within {limit:g} s"
    finally:
        kill(process)
        process.wait()
    whole_lines = output.split("\n")[:-1]
    return [json.loads(line) for line in whole_lines], ending


def problem_with(call, value):
    """Compare a value with the enumerated one. Returns "" or what is wrong."""
    value = np.array(value, dtype=float)
    if np.isnan(value).any():
        return "your answer is nan" if value.ndim == 0 else "your answer holds a nan"
    if call.part.is_property:
        problem = call.part.enumerate(**call.inputs, answer=value)
        return f"your answer {problem}" if problem else ""
    wanted = np.array(call.part.enumerate(**call.inputs), dtype=float)
    if value.shape != wanted.shape:
        return f"your answer has the shape {value.shape}, the enumeration {wanted.shape}"
    wrong = ~np.isclose(value, wanted, rtol=TOLERANCE, atol=NOTHING)
    if not wrong.any():
        return ""
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    yours, enumerated = short(value[place]), short(wanted[place])
    if yours == enumerated:
        yours, enumerated = f"{value[place]:.12g}", f"{wanted[place]:.12g}"
    entry = f", entry {list(place)}," if place else ""
    return f"your answer{entry} is {yours}, the enumeration gives {enumerated}"


def short(value):
    """Numbers as they are printed, with six digits."""
    if np.ndim(value):
        return "[" + ", ".join(short(item) for item in value) + "]"
    return f"{value:.6g}"


# ------------------------------------------------------------------------------------- for teachers


def grade_all(places, csv_name):
    """`derive --grade`: print the points of each student, and write them to the CSV file
    `csv_name`. places: directories with a file for each derivation, baseline.py and so on. Each
    part is checked by itself, so that a wrong one costs its own points alone. Returns True if
    nothing is wrong or missing."""
    for place in places:
        if not place.is_dir():
            raise BadInput(f"derive --grade {place}: no such directory")
    with opened_for_writing("--csv", csv_name) as csv_file, terminable():
        write_row(csv_file, point_columns("derivation"))
        # a list, because all() stops at the first student who has not all points
        complete = [grade_student(place, csv_file) for place in places]
    return all(complete)


def grade_student(place, csv_file):
    """Print and write the points of the answers in the directory `place`. True if all are right."""
    total, of = 0, 0
    print(place)
    for name, question in questions().items():
        points, problem = grade_answer(name, question, place / f"{name}.py")
        total, of = total + points, of + question.points
        result = problem or "all parts agree"
        print(f"  {name:<14}{points:>3} of {question.points:>2}   {result}", flush=True)
        write_row(csv_file, [place, name, points, question.points, result])
    print(f"  {'total':<14}{total:>3} of {of:>2}")
    write_row(csv_file, [place, "total", total, of, "if the algebra is there"])
    return total == of


def grade_answer(name, question, path):
    """(points of the parts that agree, the first problem or "") of one answer, the file `path`."""
    seed = random.randrange(10**6)
    if not path.exists():
        return 0, "no file"
    try:
        text = read_answer(path)
    except BadInput as error:
        return 0, str(error)
    earned, first_problem = 0, ""
    for part, points in enumerate(question.points_of_parts, 1):
        problem = check(name, text, path.name, seed, part=part)
        if problem:
            first_problem = first_problem or f"{problem} (seed {seed})"
        else:
            earned += points
    return earned, first_problem


# -------------------------------------------------------------------------------------- the command


def main(argv):
    """`course.py derive`. Returns the exit code. Raises BadInput, which course.py prints."""
    return derive(make_parser("course.py derive").parse_args(argv))


def derive(args):
    """List the derivations, print a question, check a file, or grade. Returns the exit code: 0, or
    1 if a formula is wrong. Raises BadInput."""
    if args.grade:
        if args.name is not None:
            raise BadInput("derive --grade takes directories alone; leave out NAME")
        return 0 if grade_all(args.grade, args.csv) else 1
    if args.csv is not None:
        raise BadInput("derive --csv has the points of --grade; name directories with --grade")
    if args.name is None:
        print_list()
        return 0
    if args.name not in DERIVATIONS:
        names = ", ".join(DERIVATIONS)
        raise BadInput(f"{args.name}: there is no such derivation; there are {names}")
    if args.file is None:
        print(questions()[args.name].text)
        return 0
    text = read_answer(args.file)
    seed = random.randrange(10**6) if args.seed is None else args.seed
    with terminable():
        problem = check(args.name, text, args.file, seed)
    if problem:
        print(f"{args.name}, {problem} (seed {seed})")
        return 1
    parts = len(DERIVATIONS[args.name])
    print(f"{args.name}: all {parts} parts agree with the enumeration (seed {seed})")
    return 0


def make_parser(prog):
    """The command line."""
    parser = Parser(
        prog=prog,
        description="The derivations: print a question, or compare a student's formulas with an "
        "enumeration.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a derivation (default: list them)")
    parser.add_argument(
        "file", nargs="?", metavar="FILE", type=Path, help="a Python file with your functions"
    )
    parser.add_argument(
        "--seed", type=natural, metavar="N", help="of the inputs (default: a new one each time)"
    )
    parser.add_argument(
        "--grade",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="for teachers: the points of each DIR, which has a file NAME.py for each derivation",
    )
    parser.add_argument("--csv", metavar="FILE", help="write the points of --grade there, too")
    return parser


if __name__ == "__main__":
    sys.exit(make_parser("derive.py").run(derive, sys.argv[1:]))
