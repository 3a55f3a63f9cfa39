"""grading.py - put a student's functions into an otherwise correct project and run their tests with
pytest, in a process that has a time limit.

All exercises of a student are tried in one run. Those whose tests did not all pass there are tried
again, each alone, with all other functions correct. So an endless loop, an exit or an error in a
submission costs its own exercise and no other. This is no sandbox: the code runs with the rights of
the person who grades.
"""

from patches import ROOT
from support.errors import BadInput

import ast
import contextlib
import csv
import functools
import importlib.util
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import xml.etree.ElementTree as xml
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from handouts import copy_project, files_of_tests
from surgery import transplant

# Python 3.11 may raise SystemError where two threads parse at the same time.
PARSING = threading.Lock()


def grade(places, chosen, limit, csv_name=None):
    """Grade the submissions in the directories `places`: a table for each on the terminal, and all
    of them in the CSV file `csv_name`. limit: seconds for the tests of an exercise. True if each
    submission has all points."""
    files = {exercise["file"] for exercise in chosen.values()}
    homes = {place: home_of(place, files) for place in places}  # first: it may raise
    possible = sum(exercise["points"] for exercise in chosen.values())
    all_points = True
    with workers() as pool, open_csv(csv_name) as csv_file:
        rows = csv.writer(csv_file)
        rows.writerow(["submission", "exercise", "points", "of", "result"])
        grade_one = functools.partial(grade_student, chosen, limit)
        for place, problems in zip(homes, pool.map(grade_one, homes.values())):
            print(f"\n{place}")
            earned = 0
            for (name, exercise), problem in zip(chosen.items(), problems):
                points = 0 if problem else exercise["points"]
                earned += points
                result = problem or "passed"
                print(f"  {name:<12}{points:>3} of {exercise['points']:>2}   {result}", flush=True)
                rows.writerow([place, name, points, exercise["points"], result])
            print(f"  {'total':<12}{earned:>3} of {possible}")
            rows.writerow([place, "total", earned, possible, ""])
            csv_file.flush()  # so that it can be read while others are graded
            all_points = all_points and earned == possible
    return all_points


def home_of(place, files):
    """The directory with the `files` to grade, or some of them: `place`, or a folder in it, which a
    packing program may have added. Raises BadInput if there is no such directory."""
    for home in [place, *sorted(place.glob("*/"))]:
        if any((home / file).is_file() for file in files):
            return home
    raise BadInput(f"grade {place}: none of the files to grade is there; is it a handout?")


def open_csv(name):
    """The CSV file `name`, or, without a name, one that keeps nothing. Raises BadInput."""
    try:
        return open(name or os.devnull, "w", newline="", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--csv {name}: cannot be written ({error.strerror})") from None


def grade_student(chosen, limit, home):
    """Grade the submission in the directory `home`: [of each chosen exercise "" or what is wrong,
    in one line]."""
    passed = passed_together(chosen, limit, home)
    return [
        "" if name in passed else grade_exercise(home, limit, name, exercise)
        for name, exercise in chosen.items()
    ]


def passed_together(chosen, limit, home):
    """The names of the exercises whose tests all pass when all functions of the submission stand in
    one project; an empty set if that run hung or broke."""
    changed, taken = {}, []  # {file: text}, the exercises whose functions are there
    for name, exercise in chosen.items():
        file = exercise["file"]
        with contextlib.suppress(OSError, SyntaxError, ValueError, BadInput):
            theirs = (home / file).read_text(encoding="utf-8-sig")
            ours = changed.get(file) or (ROOT / file).read_text(encoding="utf-8")
            with PARSING:
                changed[file] = transplant(ours, theirs, exercise["functions"])
            taken.append(name)
    with tempfile.TemporaryDirectory(prefix="exercises-") as scratch:
        place = Path(scratch) / "project"
        copy_project(place, chosen, changed)
        _, cases = run_pytest(place, 2 * limit)
    results = {}  # {test: [did this case of it pass?]}
    for test, problem in cases:
        results.setdefault(test, []).append(problem is None)
    return {
        name
        for name in taken
        if all(all(results.get(name_of(test), [False])) for test in chosen[name]["tests"])
    }


def name_of(test):
    """The name of a test in the report: FILE.NAME for FILE.py::NAME."""
    return test.replace(".py::", ".")


def grade_exercise(home, limit, name, exercise):
    """Grade one exercise of the submission in the directory `home`. Returns "" or what is wrong, in
    one line."""
    file = exercise["file"]
    try:
        theirs = (home / file).read_text(encoding="utf-8-sig")
        ours = (ROOT / file).read_text(encoding="utf-8")
        with PARSING:
            text = transplant(ours, theirs, exercise["functions"])
    except (OSError, SyntaxError, ValueError, BadInput) as error:
        # one bad file must not stop the grading of all submissions
        return f"{file}: {type(error).__name__}: {error}"
    problem = try_out(name, exercise, {file: text}, limit)
    return "not done" if f"NotImplementedError: exercise {name}:" in problem else problem


def try_out(name, exercise, changed, limit):
    """Run the tests of one exercise on a copy of the project in which the scripts in `changed`
    {file: text} stand in place of its own. Returns "" if all pass, or what went wrong."""
    with tempfile.TemporaryDirectory(prefix=f"exercise-{name}-") as scratch:
        place = Path(scratch) / "project"
        copy_project(place, {name: exercise}, changed)
        return run_tests(place, limit)


def run_tests(place, limit):
    """Run the tests of the copy at `place` with pytest. Returns "" if all passed, or what went
    wrong, in one line."""
    failure, cases = run_pytest(place, limit, "-x")
    for test, problem in cases:
        if problem is not None:
            name = test.partition(".")[2]
            parts = [name[:70], about(test), reason_of(problem)[:90]]
            return ": ".join(part for part in parts if part)
    return failure


def run_pytest(place, limit, *flags):
    """Run pytest in the copy at `place`. Returns (what went wrong with the run itself, or "",
    [(FILE.NAME of a test, its <failure>, <error> or <skipped>, or None)]). A function that ends the
    process leaves no report, so the tests have passed only if report and exit code both say so."""
    report = place / "report.xml"
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *flags]
    try:
        done = subprocess.run(
            [sys.executable, *words, "tests"],
            cwd=place,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return f"no end within {limit:g} s", []
    if not report.is_file():
        return f"the process ended itself (exit code {done.returncode})", []
    cases = []
    for case in xml.parse(report).iter("testcase"):
        file = (case.get("classname") or "").rpartition(".")[2]
        test = f"{file}.{(case.get('name') or '').split('[')[0]}"
        problems = [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]
        cases.append((test, problems[0] if problems else None))
    return f"the tests did not run (exit code {done.returncode})" if done.returncode else "", cases


def about(test):
    """What the test FILE.NAME is about: the beginning of its docstring, shortened."""
    first_paragraph = docstrings().get(test, "").split("\n\n")[0]
    return textwrap.shorten(first_paragraph, 110, placeholder=" ...")


@functools.cache
def docstrings():
    """The docstring of every test, by the names of its file and its own."""
    texts = {}
    for path in files_of_tests():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                texts[f"{path.stem}.{node.name}"] = ast.get_docstring(node) or ""
    return texts


def reason_of(problem):
    """Why a test failed, in one line. problem: <failure>, <error> or <skipped> of pytest's
    report."""
    reason = (problem.get("message") or problem.text or "").strip().split("\n")[0]
    if "collection failure" in reason:  # the file could not be imported; the last line says why
        errors = [line[1:].strip() for line in problem.text.split("\n") if line.startswith("E ")]
        return errors[-1] if errors else reason
    return reason


@contextlib.contextmanager
def workers():
    """A pool with one thread per core, each of which waits for one process. After Ctrl-C no further
    process is started. Raises BadInput without pytest, because then right answers would fail."""
    if importlib.util.find_spec("pytest") is None:
        raise BadInput("pytest is missing; pip install -r requirements-dev.txt")
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
