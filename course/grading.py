"""grading.py - put a student's functions into an otherwise correct project and run the tests of
each exercise, in a process of its own with limits on its time, memory and files.

An endless loop, an exit or a syntax error in a submission costs its own exercise and no other.
"""

from patches import (
    HERE,
    ROOT,
    kill,
    opened_for_writing,
    plural,
    point_columns,
    terminable,
    write_row,
)
from support.errors import BadInput

import ast
import functools
import importlib.util
import json
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import textwrap
import threading
import time
import types
import xml.etree.ElementTree as xml
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

from handouts import copy_project, files_of_tests
from submissions import opened
from surgery import transplant

MAX_MEMORY = 3 * 2**30  # bytes that the tests of an exercise may use
MAX_FILE = 10**8  # bytes that they may write to one file
MAX_SOURCE = 10**6  # bytes of a submitted file
# The process that the tests are forked from. It imports once what takes seconds to import: the
# matrix runs tests some four hundred times.
FORKSERVER = multiprocessing.get_context("forkserver")
PRELOADED = [
    "pytest",
    "numpy",
    "tqdm",
    "openai",
    "torch",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
]
RUNNING = set()  # the processes under way
# Held while a process is started or its exit code is read. To start one, multiprocessing first asks
# all others whether they have ended; two threads that read one exit code at once get it once, and
# the other one gets 255.
PROCESS_LOCK = threading.Lock()
STOPPING = threading.Event()  # set when no more processes are wanted


class Result(NamedTuple):
    """One exercise of one submission."""

    name: str
    exercise: dict
    points: int  # earned
    problem: str  # what went wrong, or ""


class Total(NamedTuple):
    """All exercises of one submission."""

    earned: int
    possible: int
    sentence: str


# -------------------------------------------------------------------- submissions, and their points


def grade(places, chosen, limit, csv_name=None, gradescope_name=None):
    """Grade the submissions `places`, directories and zip files: a table for each on the terminal,
    all of them in the CSV file `csv_name`, and a single one for Gradescope in the JSON file
    `gradescope_name`. limit: seconds for the tests of an exercise. True if each submission has all
    points."""
    began = time.monotonic()
    if gradescope_name and len(places) > 1:
        raise BadInput(
            f"--gradescope {gradescope_name}: is for one submission, not for {len(places)}"
        )
    files = {exercise["file"] for exercise in chosen.values()}
    all_points = True
    with tempfile.TemporaryDirectory(prefix="submissions-") as scratch:
        # all are opened before the first is graded: what cannot be read is told at once
        homes = []
        for number, place in enumerate(places):
            unpacked = Path(scratch) / str(number)
            unpacked.mkdir()
            homes.append(opened(place, files, unpacked))
        with (
            workers() as pool,  # first: where it refuses, no file has been written yet
            opened_for_writing("--csv", csv_name) as csv_file,
            opened_for_writing("--gradescope", gradescope_name) as gradescope_file,
        ):
            write_row(csv_file, point_columns("exercise"))
            for place, home in zip(places, homes):
                results = grade_submission(place, home, chosen, limit, pool, csv_file)
                total = total_of(results)
                all_points = all_points and total.earned == total.possible
                if gradescope_name:
                    report = gradescope_report(results)
                    json.dump(report, gradescope_file, ensure_ascii=False, indent=1)
    seconds = time.monotonic() - began
    print(f"\n{plural(len(places), 'submission')}, {plural(len(chosen))} each: {seconds:.0f} s")
    return all_points


def grade_submission(place, home, chosen, limit, pool, csv_file):
    """Grade one submission, and print and write a row for each exercise as soon as it is graded.
    place: as the user named it; home: the directory of its files. Returns the Results."""
    print(f"\n{place}")
    results = []
    problems = pool.map(lambda item: grade_exercise(home, *item, limit), chosen.items())
    for (name, exercise), problem in zip(chosen.items(), problems):
        possible = exercise["points"]
        points = 0 if problem else possible
        outcome = problem or "passed"
        print(f"  {name:<12}{points:>3} of {possible:>2}   {outcome}", flush=True)
        write_row(csv_file, [place, name, points, possible, outcome])
        results.append(Result(name, exercise, points, problem))
    total = total_of(results)
    print(f"  {'total':<12}{total.earned:>3} of {total.possible}")
    write_row(csv_file, [place, "total", total.earned, total.possible, total.sentence])
    return results


def total_of(results):
    """The Total of a submission's results."""
    passed = sum(not result.problem for result in results)
    earned = sum(result.points for result in results)
    possible = sum(result.exercise["points"] for result in results)
    sentence = f"{passed} of {plural(len(results))} passed, {earned} of {possible} points"
    return Total(earned, possible, sentence)


def gradescope_report(results):
    """The results of one submission as Gradescope reads them, from results.json."""
    total = total_of(results)
    return {
        "score": total.earned,
        "max_score": total.possible,
        "output": total.sentence,
        "tests": [
            {
                "name": f"{result.name}: {result.exercise['title']}",
                "score": result.points,
                "max_score": result.exercise["points"],
                "output": result.problem or "passed",
                "status": "failed" if result.problem else "passed",
            }
            for result in results
        ],
    }


# ----------------------------------------------------------------------------- one exercise's tests


def grade_exercise(home, name, exercise, limit):
    """Grade one exercise of the submission in the directory `home`. Returns "" or what is wrong, in
    one line."""
    file = exercise["file"]
    try:
        if not (home / file).is_file():
            return f"{file} is missing"
        if (home / file).stat().st_size > MAX_SOURCE:
            return f"{file} is larger than a megabyte"
        theirs = (home / file).read_text(encoding="utf-8-sig")  # newlines of any system become \n
        # a tab in front of a line counts as four spaces
        theirs = re.sub(r"(?m)^\t+", lambda tabs: 4 * " " * len(tabs[0]), theirs)
        text = transplant((ROOT / file).read_text(encoding="utf-8"), theirs, exercise["functions"])
    except UnicodeDecodeError:
        return f"{file} is not UTF-8 text"
    except BadInput as error:
        return f"{file}: {error}"
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # one bad file must not stop the grading of all submissions
        return f"{file} cannot be read ({type(error).__name__})"
    problem = try_out(name, exercise, {file: text}, limit)
    return "not done" if f"NotImplementedError: exercise {name}:" in problem else problem


def try_out(name, exercise, changed, limit):
    """Run the tests of one exercise on a copy of the project in which the scripts in `changed`
    {file: text} stand in place of its own. Returns "" if all pass, or what went wrong."""
    prefix = f"exercise-{name}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as scratch:
        place = Path(scratch) / "project"
        copy_project(place, {name: exercise}, changed)
        return run_tests(place, limit)


def run_tests(place, limit):
    """Run the tests of the copy at `place` in a process of its own. Returns "" if all passed, or
    what went wrong, in one line."""
    report = place / "report.xml"
    # the limit of processor time is for the case that the grader is killed and cannot keep the time
    cpu_seconds = int(4 * limit) + 1
    process = FORKSERVER.Process(target=tests_process, args=(place, report, cpu_seconds))
    with PROCESS_LOCK:
        process.start()
    RUNNING.add(process)
    if STOPPING.is_set():  # workers() may have killed all others before this one was in the set
        kill(process)
    wait([process.sentinel], limit)
    with PROCESS_LOCK:
        exit_code = process.exitcode  # None: it is still at work
    kill(process)  # and whatever the tests have left running
    with PROCESS_LOCK:
        process.join()
    RUNNING.discard(process)
    if exit_code is None:
        return f"no end within {limit:g} s"
    return problem_in(report, exit_code)


def problem_in(report, exit_code):
    """The first problem that pytest's JUnit report tells of, in one line: the test that failed,
    what it is about, and what went wrong. "" if all passed. A function that ends the process leaves
    no report, so the tests have passed only if report and exit code both say so."""
    try:
        cases = list(xml.parse(report).iter("testcase"))
    except (OSError, xml.ParseError):
        return f"the process ended itself (exit code {exit_code})"
    for case in cases:
        for problem in [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]:
            name = case.get("name") or ""
            parts = [name[:70], about(name.split("[")[0]), reason_of(problem)[:90]]
            return ": ".join(part for part in parts if part)
    if exit_code != 0 or not cases:
        return f"the tests did not run (exit code {exit_code})"
    return ""


def about(test):
    """What the test of that name is about: the beginning of its docstring, in part of a line."""
    first_paragraph = docstrings().get(test, "").split("\n\n")[0]
    return textwrap.shorten(first_paragraph, 110, placeholder=" ...")


@functools.cache
def docstrings():
    """The docstring of every test, by its name."""
    texts = {}
    for path in files_of_tests():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                texts[node.name] = ast.get_docstring(node) or ""
    return texts


def reason_of(problem):
    """Why a test failed, in one line. problem: <failure>, <error> or <skipped> of pytest's
    report."""
    reason = (problem.get("message") or problem.text or "").strip().split("\n")[0]
    if "collection failure" in reason:  # the file could not be imported; the last line says why
        lines = (problem.text or "").split("\n")
        errors = [line[1:].strip() for line in lines if line.startswith("E ")]
        return errors[-1] if errors else reason
    return reason


# ------------------------------------------------------------------------------------ the processes


@contextmanager
def workers():
    """A pool with one thread per core, each of which waits for one process. However the block ends,
    by Ctrl-C or a kill too, no process is left running. Raises BadInput without pytest, because
    then every exercise would fail, right or wrong."""
    if importlib.util.find_spec("pytest") is None:
        raise BadInput("pytest is missing; pip install -r requirements-dev.txt")
    pool = ThreadPoolExecutor(os.cpu_count())
    STOPPING.clear()
    # for the fork server and its children: a second thread would only wait for the first
    os.environ["OMP_NUM_THREADS"] = "1"
    FORKSERVER.set_forkserver_preload(PRELOADED)
    with terminable():
        try:
            yield pool
        finally:
            STOPPING.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(RUNNING):
                kill(process)
            pool.shutdown()


def tests_process(place, report, cpu_seconds):
    """What the forked process does: run pytest in the copy at `place`, as `python -m pytest` would,
    within the limits, and write its report to the file `report`."""
    os.setsid()  # a session of its own: whatever it starts ends with it
    output = os.open(place / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # a loop that collects or prints must not take the machine with it
    resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE, MAX_FILE))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_seconds, cpu_seconds))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(place)
    os.environ.update(PYTHONPATH="", PYTEST_ADDOPTS="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    sys.dont_write_bytecode = True
    forget_project()
    sys.path.insert(0, str(place))
    import pytest

    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", f"--junitxml={report}", "tests"]))


def forget_project():
    """Forget the project that the grader runs from: its modules and its place on the path. The copy
    has its own."""
    homes = {str(home) for home in (ROOT, ROOT / "support", HERE)}
    for name, module in list(sys.modules.items()):
        if os.path.dirname(getattr(module, "__file__", None) or "") in homes:
            del sys.modules[name]
    # every program has a __main__, and the project looks there for the program's name
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path[:] = [path for path in sys.path if Path(path).resolve() not in (ROOT, HERE)]
