"""course.py - the course edition: functions of this project as homework, and experiments that go
wrong on purpose.

    python course/course.py list                            the exercises, in the order of the paper
    python course/course.py handout DIR [--only gae,clip]   the project with holes in it, for
                                                            students
    python course/course.py grade DIR|ZIP... [--csv FILE]   fill each hole with a student's function
                                                            and run its tests
    python course/course.py matrix [--only gae]             are the tests strong enough? every known
                                                            wrong answer must fail
    python course/course.py lab [NAME]                      break the project on purpose, and look
                                                            (labs.py)

The scripts of the project carry no markers: a function is found by its name (`gae`, `Agent.reply`)
with `ast`, its lines are cut out and others put in. Handing out, grading and the matrix are that
one operation. A handout puts in the docstring and a `raise`; the grader puts a student's function
into an otherwise correct project, so that an error costs its own exercise and nothing else; the
matrix puts in wrong answers. exercises.toml says what is an exercise and which tests grade it,
wrong_answers.toml what typically goes wrong.
"""

from patches import HERE, ROOT, kill, read_toml, replaced, terminable
from support.settings import BadInput, Parser, above_zero

import ast
import csv
import functools
import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import stat
import symtable
import sys
import tempfile
import textwrap
import threading
import time
import types
import xml.etree.ElementTree as xml
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

import labs

# of the project, for a copy; tests are cut, course/ stays here
PARTS = ["*.py", "*.txt", "LICENSE", "support", "tools", "prompts", "toy_policy", "docs"]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


# --------------------------------------------------------------------------- cutting and putting in


def find(tree, name):
    """The node of the function or method `name` ("gae", "Agent.reply") in a module's tree, or None.
    Of two the last, as for Python."""
    for part in name.split("."):
        tree = next(
            (node for node in reversed(tree.body) if getattr(node, "name", None) == part), None
        )
        if tree is None:
            return None
    return tree if isinstance(tree, FUNCTIONS) else None


def lines_of(node):
    """Its lines as a slice, decorators included."""
    return slice(
        min([node.lineno] + [d.lineno for d in getattr(node, "decorator_list", [])]) - 1,
        node.end_lineno,
    )


def text_of(source, node):
    """Its text, moved to the left margin. (Not by textwrap.dedent: one comment in column 0 would
    hold everything where it is.)"""
    return "\n".join(
        re.sub(f"^ {{,{node.col_offset}}}", "", line) for line in source.split("\n")[lines_of(node)]
    )


def put(source, name, text):
    """`source` with the function `name` replaced by `text`, at the old one's depth. (Text inside of
    a method's strings moves too.)"""
    node, lines = find(ast.parse(source), name), source.split("\n")
    lines[lines_of(node)] = textwrap.indent(text, " " * node.col_offset).split("\n")
    return "\n".join(lines)


def stub(source, name, message):
    """The function `name` with its signature and its docstring, and `message` raised where its
    body was."""
    node, lines = find(ast.parse(source), name), source.split("\n")
    first = node.body[0]
    documented = ast.get_docstring(node) is not None
    end = first.end_lineno if documented else first.lineno - 1
    # a comment on top of the body belongs to the body
    while lines[end - 1].strip().startswith("#"):
        end -= 1
    node.end_lineno = end
    return text_of(source, node) + f"\n    raise NotImplementedError({message!r})"


def names_in(node):
    """The names that it takes from around it, the arguments of a test (its fixtures) among them."""
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name)]
    own = {n.id for n in names if isinstance(n.ctx, ast.Store)}
    return {n.id for n in names} - own | {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}


def names_of(node):
    """The names that a top-level statement binds."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return {node.name}
    targets = getattr(node, "targets", [getattr(node, "target", node)])
    return {
        n.id
        for target in targets
        for n in ast.walk(target)
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }


def taken_by(text):
    """The names that a piece of code takes from its module, as Python sees it: an argument or a
    local is none."""

    def walk(table):
        for symbol in table.get_symbols():
            if (
                symbol.is_declared_global()
                or symbol.is_referenced()
                and (symbol.is_global() or table.get_type() == "module")
            ):
                yield symbol.get_name()
        for child in table.get_children():
            yield from walk(child)

    return set(walk(symtable.symtable(text, "student", "exec")))


def parses(text):
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def readable(text):
    """What there is to read in a student's file: without those functions and methods that do not
    parse. A bracket that is never closed costs the function that it is in, though for Python the
    file ends there."""
    if parses(text):
        return text

    def blocks(text, start):
        """Cut before every line that matches `start`; decorators stay with what they decorate."""
        found = []
        for block in re.split(rf"(?m)^(?={start})", text):
            if (
                found
                and found[-1].lstrip().startswith("@")
                and not re.search(r"(?m)^\s*(async def|def|class) ", found[-1])
            ):
                found[-1] += block
            else:
                found.append(block)
        return found

    kept = []
    for block in blocks(text, r"[^\s#)\]}]"):
        if not parses(block) and block.startswith(("class ", "@")):
            head, *methods = blocks(block, r"    (?:@|async def |def )")
            block = head + "".join(m for m in methods if parses("class _:\n" + m))
        if parses(block):
            kept.append(block)
    return "".join(kept)


def transplant(source, theirs, names):
    """Put the functions `names` of a student's file into ours, with the helpers and imports that
    they use and ours lacks.

    Nothing else of the file is taken: what a student did to another function, or at the top level,
    is not this exercise's matter. Returns the new source. Raises BadInput where a function is
    missing or does not parse.
    """
    ours, text = ast.parse(source), readable(theirs)
    tree = ast.parse(text)
    functions = [(name, find(tree, name)) for name in names]
    lost = [name for name, node in functions if node is None]
    if lost:
        there = re.search(rf"def {lost[0].split('.')[-1]} *[(]", theirs)
        raise BadInput(
            f"{lost[0]} {'does not parse, or is not at the top level' if there else 'is not there'}"
        )
    known, new = set().union(*map(names_of, ours.body)), []
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):  # of `import torch, math` what is new
            node.names = [a for a in node.names if (a.asname or a.name).split(".")[0] not in known]
            new += [(names_of(node), ast.unparse(node))] if node.names else []
        elif (
            isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.Assign, ast.AnnAssign))
            and not names_of(node) & known
        ):
            whole = isinstance(node, (ast.Assign, ast.AnnAssign)) and ast.get_source_segment(
                text, node
            )
            new.append((names_of(node), whole or text_of(text, node)))
    wanted, helpers = set().union(*(taken_by(text_of(text, node)) for _, node in functions)), []
    while more := [helper for helper in new if helper not in helpers and helper[0] & wanted]:
        helpers += more
        wanted |= set().union(*(taken_by(code) for _, code in more))
    lines = source.split("\n")
    first = next(
        node for node in ours.body if getattr(node, "name", None) == names[0].split(".")[0]
    )
    lines[lines_of(first).start : lines_of(first).start] = [
        code + "\n\n" for bound, code in new if (bound, code) in helpers
    ]
    source = "\n".join(lines)
    for name, node in functions:
        source = put(source, name, text_of(text, node))
    return source


@functools.cache
def cut_tests(chosen):
    """The tests that grade the exercises named in the tuple `chosen`, and what they need of their
    files, nothing else; each test marked with its exercises. Returns {file name: text}. The rest
    stays here, because much of it holds answers."""
    everything, tests = exercises(), {}
    for exercise in chosen:
        for test in everything[exercise]["tests"]:
            tests.setdefault(test, []).append(exercise)
    sources = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
    }
    trees = {name: ast.parse(source) for name, source in sources.items()}
    todo, wanted = [tuple(test.split("::")) for test in tests], set()
    while todo:
        file, name = todo.pop()
        node = next((n for n in trees[file].body if name in names_of(n)), None)
        # None: a builtin, a fixture of conftest.py, a name of its own
        if (file, name) in wanted or node is None:
            continue
        wanted.add((file, name))
        if isinstance(node, ast.ImportFrom) and f"{node.module}.py" in trees:
            todo.append((f"{node.module}.py", name))
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            todo += [(file, other) for other in names_in(node)]
    texts = {}
    for file in sorted({file for file, _ in wanted}):
        parts, imports = [], []
        for node in trees[file].body:
            bound = {name for name in names_of(node) if (file, name) in wanted}
            if not bound:
                continue
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                node.names = [a for a in node.names if (a.asname or a.name).split(".")[0] in bound]
                imports.append(ast.unparse(node))
            else:
                marks = [
                    f"@pytest.mark.{exercise}\n"
                    for exercise in tests.get(f"{file}::{min(bound)}", [])
                ]
                parts.append("".join(marks) + text_of(sources[file], node))
        if any("pytest.mark." in part for part in parts) and "import pytest" not in imports:
            imports.append("import pytest")
        about = ast.get_docstring(trees[file]).split("\n\n")[0]
        texts[file] = (
            f'"""{about}"""\n' + "\n".join(imports) + "\n\n\n" + "\n\n\n".join(parts) + "\n"
        )
    return texts


# ---------------------------------------------------------------------------------------- exercises


def exercises(only=None):
    """The exercises, all or those named in "gae,clip", in the order of the list. Raises BadInput
    for an unknown name."""
    found = read_toml("exercises.toml")
    if only is None:
        return found
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in found]
    if unknown or not names:
        raise BadInput(
            f"--only {only}: there is no exercise {unknown[0] if unknown else ''!r}; "
            f"there are {', '.join(found)}"
        )
    return {name: found[name] for name in found if name in names}


def copy_project(place, chosen, changed):
    """A copy of the project with the scripts in `changed` {file: text} and, of the tests, those
    that grade `chosen`."""
    place.mkdir(parents=True, exist_ok=True)
    for pattern in PARTS:
        for path in ROOT.glob(pattern):
            if path.is_dir():
                shutil.copytree(
                    path, place / path.name, ignore=shutil.ignore_patterns("__pycache__", ".*")
                )
            else:
                shutil.copy(path, place / path.name)
    for file, text in changed.items():
        (place / file).write_text(text, encoding="utf-8")
    (place / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", place / "tests")
    for file, text in cut_tests(tuple(chosen)).items():
        (place / "tests" / file).write_text(text, encoding="utf-8")
        # what tests share beside conftest.py: marks.py
        for helper in re.findall(r"(?m)^from (\w+) import", text):
            if (ROOT / "tests" / f"{helper}.py").is_file():
                shutil.copy(ROOT / "tests" / f"{helper}.py", place / "tests")
    markers = "".join(f"    {name}: {exercise['title']}\n" for name, exercise in chosen.items())
    (place / "pytest.ini").write_text("[pytest]\nmarkers =\n" + markers, encoding="utf-8")


def stubs_of(chosen):
    """{file: its text with a hole in place of every function of the chosen exercises}."""
    changed = {}
    for name, exercise in chosen.items():
        file = exercise["file"]
        for function in exercise["functions"]:
            source = changed.get(file) or (ROOT / file).read_text(encoding="utf-8")
            changed[file] = put(
                source,
                function,
                stub(source, function, f"exercise {name}: {function} is yours to write"),
            )
    return changed


def check(name, exercise):
    """The command that runs an exercise's tests in a handout."""
    return f"python -m pytest -q -m {name} " + " ".join(
        sorted({"tests/" + test.split("::")[0] for test in exercise["tests"]})
    )


def describe(name, exercise):
    """An exercise as the assignment tells it."""
    fill = lambda text: textwrap.fill(
        " ".join(text.split()), 130, break_on_hyphens=False, break_long_words=False
    )
    functions = ", ".join(f"`{function}`" for function in exercise["functions"])
    needs = f" Needs: {', '.join(exercise['needs'])}." if exercise["needs"] else ""
    return "\n\n".join(
        [
            f"### {name}: {exercise['title']} ({exercise['points']} points, {exercise['minutes']} "
            "minutes)",
            fill(f"`{exercise['file']}`: {functions}. {exercise['section']}.{needs}"),
            fill(exercise["task"]),
            textwrap.indent(exercise["equation"].strip(), "    "),
            fill(f"*Hint.* {exercise['hint']}"),
            fill(f"*If it is wrong.* {exercise['symptom']}"),
            f"Check: `{check(name, exercise)}`\n",
        ]
    )


def plural(count, what="exercise"):
    return f"{count} {what}{'s' * (count != 1)}"


def handout(target, chosen):
    """Write the project with holes to the directory `target`: built beside and renamed, so that
    there is a whole one or none."""
    target = target.resolve()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(
            f"handout {target}: is there already, and not empty; choose another directory"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".handout-") as scratch:
            place = Path(scratch) / "handout"
            copy_project(place, chosen, stubs_of(chosen))
            points = sum(exercise["points"] for exercise in chosen.values())
            text = (HERE / "assignment.md").read_text(encoding="utf-8")
            text = text.replace("{{count}}", plural(len(chosen))).replace("{{points}}", str(points))
            text = text.replace("{{check}}", f"{check(*next(iter(chosen.items()))):<60}")
            text = text.replace(
                "{{exercises}}", "\n".join(describe(*item) for item in chosen.items())
            )
            (place / "README.md").write_text(text, encoding="utf-8")
            shutil.copy(ROOT / "README.md", place / "PROJECT.md")
            place.replace(target)
    except OSError as error:
        raise BadInput(f"handout {target}: cannot be written ({error.strerror})") from None
    print(f"{plural(len(chosen))}, {points} points: {target / 'README.md'}")
    print(
        "to grade a copy of it: python course/course.py grade COPY"
        + f" --only {','.join(chosen)}" * (len(chosen) < len(exercises()))
    )


# -------------------------------------------------------------------------------------- submissions

UNPACKED = 50 * 10**6  # bytes that a zip file may hold; all of a handout has a million


def unpack(archive, files, scratch):
    """Unpack those of the `files` that the zip file `archive` holds, at any depth, into the
    directory `scratch`. Nothing else of it is written. Raises BadInput for a file that is no whole
    zip, and for one that reaches out of its directory or is too large, whatever is in it."""
    try:
        with zipfile.ZipFile(archive) as zipped:
            members = zipped.infolist()
            # some programs of Windows write a backslash
            paths = [PurePosixPath(member.filename.replace("\\", "/")) for member in members]
            for member, path in zip(members, paths):
                kind = stat.S_IFMT(member.external_attr >> 16)  # 0: it was not made by a Unix
                outside = path.is_absolute() or ".." in path.parts or ":" in (*path.parts, "")[0]
                wrong = (
                    "leads out of it"
                    if outside
                    else "is encrypted"
                    if member.flag_bits & 1
                    else "is a link or a device"
                    if kind not in (0, stat.S_IFREG, stat.S_IFDIR)
                    else ""
                )
                if wrong:
                    raise BadInput(f"grade {archive}: {member.filename[:60]!r} in it {wrong}")
            # zipfile stops reading where a file is longer than it says
            if sum(member.file_size for member in members) > UNPACKED:
                raise BadInput(
                    f"grade {archive}: larger than {UNPACKED // 10**6} MB when "
                    "unpacked; leave .venv and runs out"
                )
            for member, path in zip(members, paths):
                if not member.is_dir() and any(path.match(file) for file in files):
                    (scratch / path).parent.mkdir(parents=True, exist_ok=True)
                    with zipped.open(member) as packed, open(scratch / path, "wb") as file:
                        shutil.copyfileobj(packed, file)
    except BadInput:
        raise
    except Exception as error:  # each of the many ways to be broken has one of its own
        told = " ".join(str(error).split())[:90] or type(error).__name__
        raise BadInput(f"grade {archive}: no whole zip file ({told})") from None


def opened(place, files, scratch):
    """The directory that holds the `files` (those of them that are there) of the submission
    `place`: a directory or a zip file, unpacked into `scratch`, or a folder in it, as a program
    that packs or unpacks leaves one. Raises BadInput."""
    if place.is_file():
        unpack(place, files, scratch)
    elif not place.is_dir():
        raise BadInput(f"grade {place}: no such directory or zip file")
    holds = lambda folder: any((folder / file).is_file() for file in files)
    home = scratch if place.is_file() else place
    try:
        for _ in range(5):
            if holds(home):
                return home
            # neither .venv nor __MACOSX
            folders = [
                path
                for path in sorted(home.iterdir())
                if path.is_dir() and not path.name.startswith((".", "__"))
            ]
            folders = [path for path in folders if holds(path)] or folders
            if len(folders) != 1:
                break
            (home,) = folders
    except OSError as error:
        raise BadInput(f"grade {place}: cannot be read ({error.strerror})") from None
    several = [path.name for path in folders if holds(path)]
    raise BadInput(
        f"grade {place}: "
        + (
            f"there are files to grade in "
            f"{' and in '.join(map(repr, several[:3]))}; leave one of them"
            if several
            else "none of the files to grade is there; is it a handout?"
        )
    )


# ------------------------------------------------------------------------------------------ grading

# bytes that the tests of an exercise may use, and write to a file
MEMORY, FILE = 3 * 2**30, 10**8
RUNNING, OVER = set(), threading.Event()  # the processes under way; set when no more are wanted


@contextmanager
def workers():
    """A pool with one thread per core. Whatever goes wrong, Ctrl-C and a kill included, leaves
    nothing running."""
    pool = ThreadPoolExecutor(os.cpu_count())
    OVER.clear()
    os.environ["OMP_NUM_THREADS"] = "1"  # for the nursery; a second thread would only wait
    NURSERY.set_forkserver_preload(IMPORTED)
    with terminable():
        try:
            yield pool
        finally:
            OVER.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(RUNNING):
                kill(process)
            pool.shutdown()


@functools.cache
def docstrings():
    """The docstring of every test, by its name."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
    ]
    return {
        node.name: ast.get_docstring(node) or ""
        for tree in trees
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
    }


def about(test):
    """What the test of that name is about, as its docstring begins, in part of a line."""
    first = docstrings().get(test, "").split("\n\n")[0]
    return textwrap.shorten(first, 110, placeholder=" ...")


# One process imports what takes seconds to import, and each run of tests is forked from it: the
# matrix has some four hundred.
NURSERY = multiprocessing.get_context("forkserver")
IMPORTED = [
    "pytest",
    "numpy",
    "tqdm",
    "openai",
    "torch",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.models.qwen2.modeling_qwen2",
]


def tests_process(place, report, seconds):
    """What the forked process does: pytest in the copy at `place`, as `python -m pytest` would. Of
    the grader's own modules it forgets all, the copy has its own."""
    os.setsid()  # a session of its own: whatever it starts ends with it
    output = os.open(place / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for source, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    # a loop that collects or prints must not take the machine with it; the last is for the case
    # that the grader is killed before it can keep the time
    for what, most in (
        (resource.RLIMIT_DATA, MEMORY),
        (resource.RLIMIT_FSIZE, FILE),
        (resource.RLIMIT_CPU, seconds),
    ):
        resource.setrlimit(what, (most, most))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(place)
    os.environ.update(PYTHONPATH="", PYTEST_ADDOPTS="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    sys.dont_write_bytecode = True
    homes = {str(home) for home in (ROOT, ROOT / "support", HERE)}
    for name, module in list(sys.modules.items()):
        if os.path.dirname(getattr(module, "__file__", None) or "") in homes:
            del sys.modules[name]
    # every program has one, and the project looks there for who it is
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path[:] = [str(place)] + [
        path for path in sys.path if Path(path).resolve() not in (ROOT, HERE)
    ]
    import pytest

    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", f"--junitxml={report}", "tests"]))


def run_tests(place, limit):
    """Run the tests of the copy at `place` in a process of its own. Returns "" if all of them
    passed, else one line: the test that failed, what it is about, and what went wrong. What counts
    is pytest's report and its exit code together: a function that ends the process leaves none."""
    report = place / "report.xml"
    process = NURSERY.Process(target=tests_process, args=(place, report, int(4 * limit) + 1))
    process.start()
    RUNNING.add(process)
    if OVER.is_set():  # it was started too late to be seen
        kill(process)
    process.join(limit)
    code = process.exitcode  # None: it is still at work
    kill(process)  # also what a test that is over has left running
    process.join()
    RUNNING.discard(process)
    if code is None:
        return f"no end within {limit:g} s"
    try:
        cases = list(xml.parse(report).iter("testcase"))
    except (OSError, xml.ParseError):
        return f"the process ended itself (exit code {code})"
    for case in cases:
        for bad in [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]:
            said = (bad.get("message") or bad.text or "").strip().split("\n")[0]
            # the file could not be imported; its last word says why
            if "collection failure" in said:
                said = (
                    [
                        line[1:].strip()
                        for line in (bad.text or "").split("\n")
                        if line.startswith("E ")
                    ]
                    or [said]
                )[-1]
            name = case.get("name") or ""
            words = [name[:70], about(name.split("[")[0]), said[:90]]
            return ": ".join(word for word in words if word)
    return "" if code == 0 and cases else f"the tests did not run (exit code {code})"


def try_out(name, exercise, changed, limit):
    """Run the tests of one exercise on a copy of the project with other scripts."""
    with tempfile.TemporaryDirectory(
        prefix=f"exercise-{name}-", ignore_cleanup_errors=True
    ) as scratch:
        place = Path(scratch) / "project"
        copy_project(place, {name: exercise}, changed)
        return run_tests(place, limit)


def grade_one(place, name, exercise, limit):
    """One exercise of the submission at `place`. Returns "" or what is wrong, one line."""
    file = exercise["file"]
    try:
        if not (place / file).is_file():
            return f"{file} is missing"
        if (place / file).stat().st_size > 10**6:
            return f"{file} is larger than a megabyte"
        theirs = (place / file).read_text(encoding="utf-8-sig")  # newlines of any system become \n
        theirs = re.sub(r"(?m)^\t+", lambda tabs: 4 * " " * len(tabs[0]), theirs)
        text = transplant((ROOT / file).read_text(encoding="utf-8"), theirs, exercise["functions"])
    except UnicodeDecodeError:
        return f"{file} is not UTF-8 text"
    except BadInput as error:
        return f"{file}: {error}"
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        # of one file, not of all submissions
        return f"{file} cannot be read ({type(error).__name__})"
    said = try_out(name, exercise, {file: text}, limit)
    return "not done" if f"NotImplementedError: exercise {name}:" in said else said


def gradescope(results, earned, total):
    """What Gradescope reads, results.json, of one submission: `results` are (name, exercise,
    points, what went wrong), of each exercise."""
    passed = sum(not problem for *_, problem in results)
    return {
        "score": earned,
        "max_score": total,
        "output": f"{passed} of {plural(len(results))} passed, {earned} of {total} points",
        "tests": [
            {
                "name": f"{name}: {exercise['title']}",
                "score": points,
                "max_score": exercise["points"],
                "output": problem or "passed",
                "status": "failed" if problem else "passed",
            }
            for name, exercise, points, problem in results
        ],
    }


def to_write(flag, name):
    """The file `name`, open before the work and not after it. Raises BadInput."""
    try:
        return open(name or os.devnull, "w", newline="", encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{flag} {name}: cannot be written ({error.strerror})") from None


def grade(places, chosen, limit, table=None, scope=None):
    """Grade the submissions `places`, directories and zip files: a table for each on the terminal,
    all in the CSV file `table`, and one for Gradescope in the JSON file `scope`. True if each has
    all points."""
    began, total = time.monotonic(), sum(e["points"] for e in chosen.values())
    if scope and len(places) > 1:
        raise BadInput(f"--gradescope {scope}: is for one submission, not for {len(places)}")
    files, full = {exercise["file"] for exercise in chosen.values()}, True
    with tempfile.TemporaryDirectory(prefix="submissions-") as scratch:
        homes = []
        for i, place in enumerate(places):
            (Path(scratch) / str(i)).mkdir()
            homes.append(opened(place, files, Path(scratch) / str(i)))
        with (
            to_write("--csv", table) as file,
            to_write("--gradescope", scope) as report,
            workers() as pool,
        ):
            rows = csv.writer(file)
            rows.writerow(["submission", "exercise", "points", "of", "result"])
            for place, home in zip(places, homes):
                found = pool.map(lambda item: grade_one(home, *item, limit), chosen.items())
                print(f"\n{place}")
                results = []
                for (name, exercise), problem in zip(chosen.items(), found):
                    points = 0 if problem else exercise["points"]
                    results.append((name, exercise, points, problem))
                    print(
                        f"  {name:<12}{points:>3} of {exercise['points']:>2}   "
                        f"{problem or 'passed'}",
                        flush=True,
                    )
                    rows.writerow([place, name, points, exercise["points"], problem or "passed"])
                    file.flush()
                earned = sum(points for _, _, points, _ in results)
                full = full and earned == total
                told = gradescope(results, earned, total)
                print(f"  {'total':<12}{earned:>3} of {total}")
                rows.writerow([place, "total", earned, total, told["output"]])
                file.flush()
            json.dump(told, report, ensure_ascii=False, indent=1)
    print(
        f"\n{plural(len(places), 'submission')}, {plural(len(chosen))} each: "
        f"{time.monotonic() - began:.0f} s"
    )
    return full


# --------------------------------------------------------------------- are the tests strong enough?


def wrong_answers(chosen):
    """(exercise, name, {file: text}) of every wrong answer. Raises BadInput for one that no longer
    fits the project's code."""
    for name, answers in read_toml("wrong_answers.toml").items():
        if name not in chosen:
            continue
        exercise = chosen[name]
        source = (ROOT / exercise["file"]).read_text(encoding="utf-8")
        tree = ast.parse(source)
        for answer in answers:
            function = answer.get("function", exercise["functions"][0])
            whose = f"wrong_answers.toml, {name}, {answer['name']!r}"
            wrong = replaced(
                text_of(source, find(tree, function)),
                answer["old"],
                answer["new"],
                whose,
                function,
                "the function was edited, so the answer must be",
            )
            if not parses(wrong):
                raise BadInput(f"{whose}: does not parse; a wrong answer must run")
            yield name, answer["name"], {exercise["file"]: put(source, function, wrong)}


SOLVED, ALONE = "the solution", "the solution, and of the rest only what it needs"


def matrix(chosen, limit):
    """Every exercise's tests against the stub, the solution and every wrong answer. True if the
    solution alone passes: also in a handout in which nothing is done but the exercise and those
    that it `needs`."""
    everything = exercises()

    def with_needs(name):
        return {name}.union(*map(with_needs, everything[name]["needs"]))

    todo = [
        item
        for name, exercise in chosen.items()
        for item in [
            (name, "the stub", stubs_of({name: exercise})),
            (name, SOLVED, {}),
            (
                name,
                ALONE,
                stubs_of({n: e for n, e in everything.items() if n not in with_needs(name)}),
            ),
        ]
    ]
    todo += wrong_answers(chosen)
    # a stable sort: the stub comes first, wrong answers last
    todo.sort(key=lambda item: list(chosen).index(item[0]))
    bad, last = [], None
    with workers() as pool:
        for (name, answer, _), said in zip(
            todo, pool.map(lambda item: try_out(item[0], chosen[item[0]], item[2], limit), todo)
        ):
            if name != last:
                print(f"\n{name}: {chosen[name]['title']}")
                last = name
            right = (said == "") == (answer in (SOLVED, ALONE))
            bad += [] if right else [f"{name}, {answer}"]
            print(f"  {'' if right else 'NO: '}{answer:<60} {said or 'passes'}"[:200], flush=True)
    print(
        f"\n{plural(len(chosen))}, {len(todo) - 3 * len(chosen)} wrong answers: "
        + (f"not as they should be: {'; '.join(bad)}" if bad else "only the solutions pass")
    )
    return not bad


# --------------------------------------------------------------------------------------------- main


def listing(chosen):
    for name, exercise in chosen.items():
        where = f"{exercise['file']}: {', '.join(exercise['functions'])}"
        print(
            f"{name:<12}{exercise['points']:>3} points {exercise['minutes']:>3} min   "
            f"{where:<66} {exercise['title']}"
        )


def run(argv):
    """The command in `argv`. Returns the exit code; raises BadInput."""
    if argv[:1] == ["lab"]:
        return labs.main(argv[1:])
    parser = Parser(
        prog="course.py",
        description="The course edition: homework, grading, and "
        "experiments that go wrong on purpose.",
    )
    commands = parser.add_subparsers(
        dest="command", metavar="COMMAND", required=True, parser_class=Parser
    )
    tools = {
        name: commands.add_parser(name, help=text, description=text)
        for name, text in [
            ("list", "print the exercises"),
            ("handout", "write the project with holes in it, for students"),
            ("grade", "run every exercise's tests on submissions"),
            ("matrix", "check that the tests catch every known wrong answer"),
            ("lab", "break the project on purpose, and look (lab alone lists them)"),
        ]
    }
    tools["handout"].add_argument(
        "directory", metavar="DIR", type=Path, help="where to; it must not exist, or be empty"
    )
    tools["grade"].add_argument(
        "submissions",
        metavar="DIR|ZIP",
        type=Path,
        nargs="+",
        help="a student's copy of the handout, or its files to grade",
    )
    tools["grade"].add_argument(
        "--csv",
        metavar="FILE",
        help="write the results there too, a row per exercise and one for the total",
    )
    tools["grade"].add_argument(
        "--gradescope",
        metavar="FILE",
        help="write the results of one submission there, as Gradescope's results.json",
    )
    for name in ("handout", "grade", "matrix"):
        tools[name].add_argument(
            "--only", metavar="A,B,...", help="these exercises alone (default: all)"
        )
    for name in ("grade", "matrix"):
        tools[name].add_argument(
            "--limit",
            metavar="SECONDS",
            type=above_zero,
            default=30.0,
            help="time limit of an exercise's tests (default: 30)",
        )
    args = parser.parse_args(argv)
    chosen = exercises(getattr(args, "only", None))
    if args.command == "list":
        listing(chosen)
    elif args.command == "handout":
        handout(args.directory, chosen)
    elif args.command == "grade":
        return 0 if grade(args.submissions, chosen, args.limit, args.csv, args.gradescope) else 1
    else:
        return 0 if matrix(chosen, args.limit) else 1
    return 0


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    try:
        return run(argv)
    except BadInput as error:
        print(f"course.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "\nstopped" + "; the same command goes on where it was" * (argv[:1] == ["lab"]),
            file=sys.stderr,
        )
        return 130


if __name__ == "__main__":
    sys.exit(main())
