"""grading.py - put a student's functions into an otherwise correct project and run their tests with
pytest, in a process that has a time limit. Exercises, points and tests are listed in exercises.toml.

All exercises of a student are tried in one run. Those whose tests did not all pass there are tried
again, each alone, with all other functions correct. So an endless loop, an exit or an error in a
submission costs its own exercise and no other (at the top level: those of its file). Processes that
it starts end with it. This is no sandbox: the code runs with the rights of the person who grades.

The project's own functions are tried first. If they do not pass here, nobody is graded: right
answers would not pass either. And what they reported is what each submission must report: a test
that is not in its report has not passed.
"""

from patches import ROOT
from support.errors import BadInput, one_line

import ast
import contextlib
import csv
import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import warnings
import xml.etree.ElementTree as xml
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from handouts import copy_project, files_of_tests
from surgery import transplant

# Python 3.11 may raise SystemError where two threads parse at the same time.
PARSING = threading.Lock()
# ------------------------------------------------------------------------------ where tests are run

# A graded process gets these variables, and of the teacher's shell only those in KEPT. Any other
# one could change a grade: PYTEST_ADDOPTS selects tests, PYTHONOPTIMIZE takes the asserts out of
# the project, PYTHONPATH and PYTEST_PLUGINS bring other code in, a proxy is asked for 127.0.0.1.
KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH")  # to find Python's packages and the libraries of torch
FIXED = {
    "CUDA_VISIBLE_DEVICES": "",  # the same numbers as on a machine without a GPU
    "OMP_NUM_THREADS": "1",
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # installed plugins shuffle tests, or run a part of them
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
}

# files of a control group: microseconds that may be used in each period, and the period
QUOTA = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")


def processors(root=Path("/")):
    """How many processors this process may use, at least 1: those of its CPU affinity, or fewer if
    a control group (a container's, a batch job's) has a smaller share of time. `os.cpu_count` has
    those of the whole machine: more processes than processors, and right answers run out of time.
    root: where the system's files are."""
    count, groups = os.cpu_count(), root / "sys/fs/cgroup"
    with contextlib.suppress(AttributeError, OSError):  # macOS; Linux without control groups
        count = len(os.sched_getaffinity(0))
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            own = line.split(":", 2)[2].strip("/")
            for group in (groups / own, groups / "cpu" / own):  # version 2, version 1
                for place in (group, *group.parents):  # none has more than those above it
                    text = " ".join(f.read_text() for name in QUOTA for f in place.glob(name))
                    if numbers := re.match(r"(\d+)\s+(\d+)", text):  # not "max", not -1
                        count = min(count, int(numbers[1]) // int(numbers[2]))
    return max(1, count)


PROCESSORS = processors()
FREE = threading.Semaphore(PROCESSORS)
# Held while a thread waits for processors, so that one that needs all of them is not overtaken.
NEXT = threading.Lock()


@contextlib.contextmanager
def taking(count):
    """A context that holds `count` of the PROCESSORS. With all of them, nothing else runs beside it."""
    with NEXT:
        for _ in range(count):
            FREE.acquire()
    try:
        yield
    finally:
        FREE.release(count)


STOPPED = threading.Event()  # what runs ends, and nothing more begins


@contextlib.contextmanager
def workers():
    """A pool of PROCESSORS threads. After Ctrl-C, which a process in a session of its own does not
    notice, they end what they run."""
    pool = ThreadPoolExecutor(PROCESSORS)
    try:
        yield pool
    finally:
        STOPPED.set()
        pool.shutdown(cancel_futures=True)
        STOPPED.clear()


# ---------------------------------------------------------------------------------------- the grades


def grade(places, chosen, limit, csv_name=None):
    """Grade the submissions in the directories `places`: a table for each on the terminal, and all
    of them in the CSV file `csv_name`. limit: seconds for the tests of an exercise. True if each
    submission has all points."""
    files = {exercise["file"] for exercise in chosen.values()}
    homes = {place: home_of(place, files) for place in places}  # first: it may raise
    possible = sum(exercise["points"] for exercise in chosen.values())
    all_points = True
    with open_csv(csv_name) as csv_file, workers() as pool:
        cases = cases_of(chosen)  # may raise: an earlier table is still there
        if csv_name:
            csv_file.truncate(0)
        rows = csv.writer(csv_file)
        rows.writerow(["submission", "exercise", "points", "of", "result"])
        grade_one = functools.partial(grade_student, chosen, cases, limit)
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
        if any(place_of(home, file).is_file() for file in files):
            return home
    raise BadInput(f"grade {place}: none of the files to grade is there; is it a handout?")


def place_of(home, file):
    """Where a submission has a file. In handouts of an earlier version engine.py had no folder."""
    is_old = not (home / file).exists() and (home / Path(file).name).exists()
    return home / (Path(file).name if is_old else file)


def open_csv(name):
    """The CSV file `name` as it is, or, without a name, one that keeps nothing. Raises BadInput."""
    try:
        return open(name or os.devnull, "a", newline="", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"--csv {name}: cannot be written ({error.strerror})") from None


def cases_of(chosen):
    """{exercise: the names of the cases of its tests}, as the project's own functions report them.
    Raises BadInput if one of them does not pass."""
    failure, reported = run_pytest(chosen, {}, set(), None)
    if problem := what_failed(failure, reported):
        raise BadInput(
            f"nobody can be graded here, because the project's own functions fail: {problem}; "
            "pip install -r requirements-dev.txt, or repair the project"
        )
    cases = {}
    for name, exercise in chosen.items():
        tests = [name_of(test) for test in exercise["tests"]]
        cases[name] = {case for case in reported if case.split("[")[0] in tests}
    return cases


def grade_student(chosen, cases, limit, home):
    """Grade the submission in the directory `home`: [of each chosen exercise "" or what is wrong,
    in one line]. cases: of `cases_of`."""
    passed = passed_together(chosen, cases, limit, home)
    return [
        "" if name in passed else grade_exercise(home, limit, name, exercise, cases[name])
        for name, exercise in chosen.items()
    ]


def passed_together(chosen, cases, limit, home):
    """The names of the exercises whose tests all pass when all functions of the submission stand in
    one project."""
    changed, taken = {}, {}  # {file: text}, the exercises whose functions are there
    for name, exercise in chosen.items():
        with contextlib.suppress(Exception):
            changed |= answered(home, exercise, taken.values())
            taken[name] = exercise
    return taken.keys() & passing(chosen, cases, limit, changed)


def passing(chosen, cases, limit, changed):
    """The names of the exercises whose tests all pass in one run, with the scripts in `changed`
    {file: text}; an empty set if that run hung or broke."""
    reported = {}
    with contextlib.suppress(Exception), taking(1):
        _, reported = run_pytest(chosen, changed, set(), 2 * limit)
    passed = {case for case, problems in reported.items() if not problems}
    return {name for name in chosen if cases[name] and cases[name] <= passed}


def answered(home, exercise, others):
    """{file: its text with the functions of the submission in `home`: those of an exercise, and of
    the `others` in its file; or all of it, if the exercise has no functions}. What an editor did to
    a file costs no points: a mark at its beginning, other line ends, and, in a comment say, bytes
    that are no UTF-8."""
    file = exercise["file"]
    theirs = place_of(home, file).read_text(encoding="utf-8-sig", errors="replace")
    if not exercise["functions"]:
        return {file: theirs}
    ours = (ROOT / file).read_text(encoding="utf-8")
    together = [one for one in (*others, exercise) if one["file"] == file]
    functions = [function for one in together for function in one["functions"]]
    with PARSING, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # with PYTHONWARNINGS=error "\d" would be a syntax error
        return {file: transplant(ours, theirs, functions)}


def name_of(test):
    """The name of a test in the report: FILE.NAME for FILE.py::NAME."""
    return test.replace(".py::", ".")


def grade_exercise(home, limit, name, exercise, cases):
    """Grade one exercise of the submission in the directory `home`. Returns "" or what is wrong, in
    one line."""
    try:
        changed = answered(home, exercise, {})
        problem = try_out(name, exercise, changed, cases, limit)
    except Exception as error:
        # One bad file must not stop the grading of all submissions. (Python has RecursionError and
        # MemoryError, too, for an expression that is nested too deep.)
        return f"{exercise['file']}: {type(error).__name__}: {one_line(error)}"
    return "not done" if f"NotImplementedError: exercise {name}:" in problem else problem


def try_out(name, exercise, changed, cases, limit):
    """Run the tests of one exercise on a copy of the project in which the scripts in `changed`
    {file: text} stand in place of its own. Returns "" if all `cases` pass, or what went wrong. If
    nothing is reported, the tests are run once more with nothing beside them: others may have taken
    the time, or the memory."""
    for count in (1, PROCESSORS):
        with taking(count):
            failure, reported = run_pytest({name: exercise}, changed, cases, limit, "-x")
        if reported:
            break
    return what_failed(failure, reported)


def what_failed(failure, reported):
    """What `run_pytest` returned, in one line: the first test that failed, or the `failure`."""
    for case, problems in reported.items():
        for problem in problems:
            test = case.split("[")[0]
            parts = [test.partition(".")[2][:70], about(test), reason_of(problem)[:90]]
            return ": ".join(part for part in parts if part)
    return failure


def run_pytest(chosen, changed, cases, limit, *flags):
    """Run the tests of the `chosen` exercises on a copy of the project with the scripts in `changed`
    {file: text}. Returns (what went wrong with the run itself, or "", {FILE.NAME[PARAMETERS] of a
    case: its <failure>, <error> or <skipped>}).

    A function can end the process, or pytest alone with exit code 0. So the tests have passed only
    if the exit code says so and all `cases` are in the report."""
    with scratch_folder() as scratch, tempfile.TemporaryFile() as output:
        place = Path(scratch) / "project"
        with PARSING:  # the tests are parsed and cut
            copy_project(place, chosen, changed)
        words = "-m pytest -qq -c pytest.ini --rootdir . -p no:cacheprovider tests".split()
        kept = {name: os.environ[name] for name in KEPT if name in os.environ}
        code = run_session(
            [sys.executable, *words, "--junitxml=report.xml", *flags],
            limit,
            cwd=place,
            env={**kept, **FIXED, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            # not a pipe, which ends only after all processes that the tests have started
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        if code is None:
            return f"no end within {limit:g} s", {}
        output.seek(0)
        text = output.read().decode(errors="replace")
        last = re.split(r"[\r\n]+!* *", text.strip("!\r\n "))[-1][:90]
        said = f"(exit code {code}): {last}".rstrip(": ")
        try:
            tree = xml.parse(place / "report.xml")
        except (OSError, xml.ParseError):
            return f"the process ended itself {said}", {}
    failure, reported = "", {}
    for case in tree.iter("testcase"):
        name = f"{(case.get('classname') or '').rpartition('.')[2]}.{case.get('name')}"
        problems = [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]
        reported.setdefault(name, []).extend(problems)
    missing = cases - reported.keys()
    if missing or code:
        failure = f"{min(missing, default='pytest')} did not run to its end {said}"
    return failure, reported


@contextlib.contextmanager
def scratch_folder():
    """The name of a temporary folder. One that cannot be removed in the end is left, with a line."""
    folder = tempfile.TemporaryDirectory(prefix="exercises-")
    try:
        yield folder.name
    finally:
        try:
            folder.cleanup()
        except Exception as error:  # RecursionError, too
            print(f"{folder.name} is left: {one_line(error)}", file=sys.stderr)


def run_session(command, limit, **where):
    """Run a command in a session of its own, and end all processes of its group. Returns its exit
    code, or None if it has not ended within `limit` seconds (None: no limit)."""
    began = time.monotonic()
    process = subprocess.Popen(command, start_new_session=True, **where)
    try:
        while process.poll() is None:
            if limit and time.monotonic() - began > limit:
                return None
            if STOPPED.wait(0.05):
                raise KeyboardInterrupt
        return process.returncode
    finally:
        # again and again: it takes a moment, in which one may start another
        with contextlib.suppress(OSError):  # none is left
            for _ in range(50):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                time.sleep(0.02)


def about(test):
    """What the test FILE.NAME is about: the beginning of its docstring, shortened."""
    with PARSING:
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
    if reason in ("collection failure", "internal error"):  # no file of tests could be imported
        last = problem.text.strip().split("\n")[-1]
        return f"the top level raises {last.removeprefix('E ').strip()}"
    return reason
