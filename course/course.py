"""course.py - the course edition: functions of this project as homework, and experiments that go
wrong on purpose.

    python course/course.py list                            the exercises, in the order of the paper
    python course/course.py handout DIR [--only gae,clip]   the project with holes in it, for
                                                            students
    python course/course.py grade DIR|ZIP... [--csv FILE]   fill each hole with a student's function
                                                            and run its tests
    python course/course.py derive [NAME [FILE]]            the derivations; with a file, compare
                                                            its formulas with an enumeration
                                                            (derive.py)
    python course/course.py matrix [--only gae]             are the tests strong enough? every known
                                                            wrong answer must fail
    python course/course.py lab [NAME]                      break the project on purpose, and look
                                                            (labs.py)
    python course/course.py check-run DIR...                is a run right? settings, files, curves,
                                                            known mistakes (check_run.py)
    python course/course.py predict [NAME [FILE]]           write down what you expect of a change,
                                                            then make its runs (predictions.py)
    python course/course.py board [DIR...]                  the open task: measure its entries
                                                            (board.py)
    python course/course.py points FILE...                  add up the points that grade, derive,
                                                            predict and board write (points.py)

Handing out, grading and the matrix are one operation, in surgery.py: a function is found by its
name, its lines are cut out, and others are put in. A handout (handouts.py) puts in the docstring
and a `raise`. The grader (grading.py) puts a student's function into an otherwise correct project,
so that an error costs its own exercise and nothing else. The matrix (matrix.py) puts in wrong
answers. exercises.toml says what is an exercise and which tests grade it, wrong_answers.toml what
typically goes wrong. The derivations have files of their own: derivations.md, derive.py,
enumerations.py. This file is the command line.
"""

from patches import exercises
from support.errors import BadInput
from support.flags import Parser, above_zero

import sys
from pathlib import Path

import board
import check_run
import derive
import labs
import points
import predictions
from grading import grade
from handouts import handout
from matrix import check_derivations, choose, formulas_of, matrix

# {command: the function that parses its words and does it}. Their parsers stand beside what they
# do: derive.py is a program of its own in a handout, and the others have modes (--grade, --own)
# that this file need not know. The commands that share --only and --limit are parsed by
# `make_parser`, which names these five again for the list of commands in --help.
WITH_OWN_PARSER = {
    "derive": derive.main,
    "lab": labs.main,
    "predict": predictions.main,
    "board": board.main,
    "points": points.main,
}


def main(argv=None):
    """Run the command in `argv`. Returns the exit code: 0, 1 if points are missing, a wrong answer
    passes or a run is not as asked, 2 for bad input, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        return run(argv)
    except BadInput as error:
        print(f"course.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        goes_on = argv[:1] in (["lab"], ["predict"]) or argv[:2] == ["board", "--own"]
        advice = "; the same command goes on where it was" if goes_on else ""
        print(f"\nstopped{advice}", file=sys.stderr)
        return 130


def run(argv):
    """The command in `argv`. Returns the exit code; raises BadInput."""
    if argv and argv[0] in WITH_OWN_PARSER:
        return WITH_OWN_PARSER[argv[0]](argv[1:])
    args = make_parser().parse_args(argv)
    if args.command == "matrix":
        return 0 if run_matrix(args.only, args.limit) else 1
    if args.command == "check-run":
        return check_run.check_runs(args.runs, args.settings, args.replay, args.csv)
    chosen = exercises(getattr(args, "only", None))
    if args.command == "list":
        print_list(chosen)
        return 0
    if args.command == "handout":
        handout(args.directory, chosen)
        return 0
    passed = grade(args.submissions, chosen, args.limit, args.csv, args.gradescope)
    return 0 if passed else 1


def run_matrix(only, limit):
    """`course.py matrix`. True if only the right answers pass. Raises BadInput."""
    chosen, derivations = choose(only)
    formulas = formulas_of(derivations)  # first: it may raise, and the exercises take minutes
    passed = True
    if chosen:
        passed = matrix(chosen, limit)
    if formulas:
        passed = check_derivations(formulas, limit) and passed
    return passed


def print_list(chosen):
    """A line for each exercise."""
    for name, exercise in chosen.items():
        where = f"{exercise['file']}: {', '.join(exercise['functions'])}"
        print(
            f"{name:<12}{exercise['points']:>3} points {exercise['minutes']:>3} min   "
            f"{where:<66} {exercise['title']}"
        )


def make_parser():
    """The command line."""
    parser = Parser(
        prog="course.py",
        description="The course edition: homework, grading, and "
        "experiments that go wrong on purpose.",
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )

    def command(name, text):
        return commands.add_parser(name, help=text, description=text)

    command("list", "print the exercises")
    handout_command = command("handout", "write the project with holes in it, for students")
    grade_command = command("grade", "run every exercise's tests on submissions")
    matrix_command = command("matrix", "check that the tests catch every known wrong answer")
    check_run.add_arguments(
        command("check-run", "say in plain words whether runs are right, and what went wrong")
    )
    # those of WITH_OWN_PARSER: only for --help
    command("derive", "compare formulas with an enumeration (derive alone lists the derivations)")
    command("lab", "break the project on purpose, and look (lab alone lists them)")
    command("predict", "lay a prediction beside the result (predict alone lists the settings)")
    command("board", "measure entries of the open task (board alone prints the runs' command)")
    command("points", "add up the points of a class, part by part")

    handout_command.add_argument(
        "directory", metavar="DIR", type=Path, help="where to; it must not exist, or be empty"
    )
    add_grade_arguments(grade_command)
    for with_only in (handout_command, grade_command):
        with_only.add_argument(
            "--only", metavar="A,B,...", help="these exercises alone (default: all)"
        )
    matrix_command.add_argument(
        "--only", metavar="A,B,...", help="these exercises and derivations alone (default: all)"
    )
    for with_limit in (grade_command, matrix_command):
        with_limit.add_argument(
            "--limit",
            metavar="SECONDS",
            type=above_zero,
            default=30.0,
            help="time limit of an exercise's tests (default: 30)",
        )
    return parser


def add_grade_arguments(parser):
    """What `grade` alone takes."""
    parser.add_argument(
        "submissions",
        metavar="DIR|ZIP",
        type=Path,
        nargs="+",
        help="a student's copy of the handout, or its files to grade",
    )
    parser.add_argument(
        "--csv",
        metavar="FILE",
        help="write the results there too, a row per exercise and one for the total",
    )
    parser.add_argument(
        "--gradescope",
        metavar="FILE",
        help="write the results of one submission there, as Gradescope's results.json",
    )


if __name__ == "__main__":
    sys.exit(main())
