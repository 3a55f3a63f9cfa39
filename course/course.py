"""course.py - the course edition: functions of this project as homework, and experiments that go
wrong on purpose.

    python course/course.py list                            the exercises, in the order of the paper
    python course/course.py handout DIR [--only gae,clip]   the project with holes in it, for
                                                            students
    python course/course.py grade DIR... [--csv FILE]       fill each hole with a student's function
                                                            and run its tests
    python course/course.py grade DIR... --only nano        a student's own nano.py (nano.md)
    python course/course.py matrix [--only gae]             are the tests strong enough? every known
                                                            wrong answer must fail
    python course/course.py lab [NAME]                      break the project on purpose, and look
                                                            (labs.py)

Handing out, grading and the matrix are one operation, in surgery.py: a function is found by its
name, its lines are cut out, and others are put in. A handout (handouts.py) puts in the docstring
and a `raise`. The grader (grading.py) puts a student's function into an otherwise correct project,
so that an error costs its own exercise and nothing else. The matrix (matrix.py) puts in wrong
answers. exercises.toml lists the exercises and the tests that grade them, wrong_answers.toml
typical mistakes. This file is the command line.
"""

from patches import exercises
from support.command_line import Parser, above_zero, natural, positive
from support.errors import WITH_A_MESSAGE, BadInput, explain

import signal
import sys
from pathlib import Path

import labs
from grading import grade
from handouts import handout
from matrix import matrix


def main(argv=None):
    """Run the command in `argv`. Returns the exit code: 0, 1 if points are missing or a wrong
    answer passes, 2 for bad input, 130 after Ctrl-C."""
    args = make_parser().parse_args(argv)
    try:
        return run(args)
    except WITH_A_MESSAGE as error:
        code, message = explain(error, program="course.py")
        print(message, file=sys.stderr)
        return code


def run(args):
    """Do the command. Returns the exit code; raises BadInput."""
    if args.command == "lab":
        labs.main(args.name, args.seeds, args.steps, args.show)
        return 0
    chosen = exercises(getattr(args, "only", None))
    if args.command == "list":
        print_list(chosen)
        print("nano         40 points two weeks  nano.py, from an empty file: course/nano.md")
    elif args.command == "handout" and args.only == "nano":
        raise BadInput("handout --only nano: it has no holes: students begin with an empty file")
    elif args.command == "handout":
        handout(Path(args.directory), chosen)
    elif args.command == "grade":
        submissions = [Path(directory) for directory in args.submissions]
        return 0 if grade(submissions, chosen, args.limit, args.csv) else 1
    elif args.command == "matrix":
        everything = chosen if args.only else chosen | exercises("nano")
        return 0 if matrix(everything, args.limit) else 1
    return 0


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
        description="The course edition: homework, grading, and experiments that go wrong on "
        "purpose.",
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
    lab_command = command("lab", "break the project on purpose, and look (lab alone lists them)")

    handout_command.add_argument(
        "directory", metavar="DIR", help="where it is written; it must be new or empty"
    )
    grade_command.add_argument(
        "submissions", metavar="DIR", nargs="+", help="a student's copy of the handout"
    )
    grade_command.add_argument("--csv", metavar="FILE", help="write the results there too")
    for with_only in (handout_command, grade_command, matrix_command):
        with_only.add_argument(
            "--only", metavar="A,B,...", help="these exercises alone (default: all)"
        )
    for with_limit in (grade_command, matrix_command):
        with_limit.add_argument(
            "--limit",
            metavar="SECONDS",
            type=above_zero,
            default=60.0,
            help="time limit of an exercise's tests (default: 60)",
        )
    lab_command.add_argument("name", nargs="?", metavar="NAME", help="a lab (default: list them)")
    lab_command.add_argument(
        "--seeds",
        type=lambda text: [natural(seed) for seed in text.split(",")],
        metavar="S,S",
        help="seeds of the runs (default: the lab's own, mostly 0,1,2)",
    )
    lab_command.add_argument(
        "--steps", type=positive, metavar="N", help="training steps (default: the lab's own)"
    )
    lab_command.add_argument(
        "--show", action="store_true", help="print the mistake as a diff, and run nothing"
    )
    return parser


if __name__ == "__main__":
    # as Ctrl-C: what it started ends, too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(main())
