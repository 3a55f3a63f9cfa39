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
from support.errors import BadInput
from support.flags import Parser, above_zero

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
import tomllib
import types
import xml.etree.ElementTree as xml
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import labs

# of the project, for a copy; tests are cut, course/ stays here
PARTS = ["*.py", "*.txt", "LICENSE", "support", "tools", "prompts", "toy_policy", "docs"]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


# --------------------------------------------------------------------------- cutting and putting in


def find(tree, name):
    """The node of the function or method `name` ("gae", "Agent.reply") in a module's tree, or None.
    Of two the last, as for Python."""
    node = tree
    for part in name.split("."):
        named = [inner for inner in node.body if getattr(inner, "name", None) == part]
        if not named:
            return None
        node = named[-1]
    return node if isinstance(node, FUNCTIONS) else None


def lines_of(node):
    """Its lines as a slice, decorators included."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *[decorator.lineno for decorator in decorators]])
    return slice(first - 1, node.end_lineno)


def text_of(source, node):
    """Its text, moved to the left margin. (Not by textwrap.dedent: one comment in column 0 would
    hold everything where it is.)"""
    lines = source.split("\n")[lines_of(node)]
    margin = f"^ {{,{node.col_offset}}}"
    return "\n".join(re.sub(margin, "", line) for line in lines)


def put(source, name, text):
    """`source` with the function `name` replaced by `text`, at the old one's depth. (Text inside of
    a method's strings moves too.)"""
    node = find(ast.parse(source), name)
    lines = source.split("\n")
    lines[lines_of(node)] = textwrap.indent(text, " " * node.col_offset).split("\n")
    return "\n".join(lines)


def stub(source, name, message):
    """The function `name` with its signature and its docstring, and `message` raised where its
    body was."""
    node = find(ast.parse(source), name)
    lines = source.split("\n")
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
    names = [inner for inner in ast.walk(node) if isinstance(inner, ast.Name)]
    bound_here = {name.id for name in names if isinstance(name.ctx, ast.Store)}
    arguments = {inner.arg for inner in ast.walk(node) if isinstance(inner, ast.arg)}
    return {name.id for name in names} - bound_here | arguments


def bound_name(alias):
    """The name that a part of an import binds: `b` of `import a as b`, `a` of `import a.b`."""
    return (alias.asname or alias.name).split(".")[0]


def names_of(node):
    """The names that a top-level statement binds."""
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return {bound_name(alias) for alias in node.names}
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return {node.name}
    targets = getattr(node, "targets", [getattr(node, "target", node)])
    inner_nodes = [inner for target in targets for inner in ast.walk(target)]
    return {
        inner.id
        for inner in inner_nodes
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
    }


def taken_by(text):
    """The names that a piece of code takes from its module, as Python sees it: an argument or a
    local is none."""

    names = set()
    tables = [symtable.symtable(text, "student", "exec")]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            from_module = symbol.is_global() or table.get_type() == "module"
            if symbol.is_declared_global() or (symbol.is_referenced() and from_module):
                names.add(symbol.get_name())
    return names


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
    kept = []
    for block in blocks(text, r"[^\s#)\]}]"):
        if not parses(block) and block.startswith(("class ", "@")):
            head, *methods = blocks(block, r"    (?:@|async def |def )")
            whole_methods = [method for method in methods if parses("class _:\n" + method)]
            block = head + "".join(whole_methods)
        if parses(block):
            kept.append(block)
    return "".join(kept)


def blocks(text, start):
    """`text`, cut before every line that matches `start`; decorators stay with what they
    decorate."""
    pieces = []
    for piece in re.split(rf"(?m)^(?={start})", text):
        if pieces and only_decorators(pieces[-1]):
            pieces[-1] += piece
        else:
            pieces.append(piece)
    return pieces


def only_decorators(piece):
    """Whether it begins with a decorator, and what that decorates is not in it."""
    defines = re.search(r"(?m)^\s*(async def|def|class) ", piece)
    return piece.lstrip().startswith("@") and not defines


def transplant(source, theirs, names):
    """Put the functions `names` of a student's file into ours, with the helpers and imports that
    they use and ours lacks.

    Nothing else of the file is taken: what a student did to another function, or at the top level,
    is not this exercise's matter. Returns the new source. Raises BadInput where a function is
    missing or does not parse.
    """
    ours = ast.parse(source)
    text = readable(theirs)
    tree = ast.parse(text)
    functions = {name: find(tree, name) for name in names}
    for name, node in functions.items():
        if node is None:
            raise BadInput(f"{name} {why_missing(theirs, name)}")
    function_texts = {name: text_of(text, node) for name, node in functions.items()}
    known = set().union(*map(names_of, ours.body))
    helpers = needed(additions(tree, text, known), function_texts.values())
    top = names[0].split(".")[0]
    first = next(node for node in ours.body if getattr(node, "name", None) == top)
    lines = source.split("\n")
    start = lines_of(first).start
    lines[start:start] = [helper.text + "\n\n" for helper in helpers]
    source = "\n".join(lines)
    for name, function_text in function_texts.items():
        source = put(source, name, function_text)
    return source


def why_missing(theirs, name):
    """What to say of a function that was not read from a student's file."""
    if re.search(rf"def {name.split('.')[-1]} *[(]", theirs):
        return "does not parse, or is not at the top level"
    return "is not there"


class Addition(NamedTuple):
    """A top-level statement of a student's file that ours lacks."""

    names: set  # that it binds
    text: str


def additions(tree, text, known):
    """The imports, functions, classes and assignments of a student's file that bind none of the
    names `known` to ours. Of an import, what is new."""
    new = []
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names = [alias for alias in node.names if bound_name(alias) not in known]
            if node.names:
                new.append(Addition(names_of(node), ast.unparse(node)))
        elif names_of(node) & known:
            continue
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            segment = ast.get_source_segment(text, node)
            new.append(Addition(names_of(node), segment or text_of(text, node)))
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            new.append(Addition(names_of(node), text_of(text, node)))
    return new


def needed(candidates, function_texts):
    """Those of the additions that the functions use, and those that these use, in their order."""
    wanted = set().union(*map(taken_by, function_texts))
    chosen = []
    while more := [new for new in candidates if new not in chosen and new.names & wanted]:
        chosen += more
        wanted |= set().union(*(taken_by(new.text) for new in more))
    return [new for new in candidates if new in chosen]


# --------------------------------------------------------------------------------- cutting of tests


@functools.cache
def cut_tests(chosen):
    """The tests that grade the exercises named in the tuple `chosen`, and what they need of their
    files, nothing else; each test marked with its exercises. Returns {file name: text}. The rest
    stays here, because much of it holds answers."""
    everything = exercises()
    graded = {}  # "file::test": the exercises that it grades
    for exercise in chosen:
        for test in everything[exercise]["tests"]:
            graded.setdefault(test, []).append(exercise)
    sources = {path.name: path.read_text(encoding="utf-8") for path in files_of_tests()}
    trees = {file: ast.parse(source) for file, source in sources.items()}
    wanted = names_wanted(trees, [tuple(test.split("::")) for test in graded])
    return {
        file: cut_file(file, sources[file], trees[file], wanted, graded)
        for file in sorted({file for file, _ in wanted})
    }


def files_of_tests():
    """The project's files of tests."""
    return sorted((ROOT / "tests").rglob("test_*.py"))


def names_wanted(trees, tests):
    """{(file, name)} of the tests and of all that they use of these files' top levels. trees:
    {file: module}; tests: [(file, name)]."""
    todo, wanted = list(tests), set()
    while todo:
        file, name = todo.pop()
        node = next((node for node in trees[file].body if name in names_of(node)), None)
        # None: a builtin, a fixture of conftest.py, a name that it binds itself
        if (file, name) in wanted or node is None:
            continue
        wanted.add((file, name))
        if isinstance(node, ast.ImportFrom) and f"{node.module}.py" in trees:
            todo.append((f"{node.module}.py", name))
        elif not isinstance(node, (ast.Import, ast.ImportFrom)):
            todo += [(file, used) for used in names_in(node)]
    return wanted


def cut_file(file, source, tree, wanted, graded):
    """The text of a file of tests with nothing but the names that are wanted."""
    parts, imports = [], []
    for node in tree.body:
        bound = {name for name in names_of(node) if (file, name) in wanted}
        if not bound:
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            node.names = [alias for alias in node.names if bound_name(alias) in bound]
            imports.append(ast.unparse(node))
        else:
            marks = graded.get(f"{file}::{min(bound)}", [])
            decorators = "".join(f"@pytest.mark.{exercise}\n" for exercise in marks)
            parts.append(decorators + text_of(source, node))
    if any("pytest.mark." in part for part in parts) and "import pytest" not in imports:
        imports.append("import pytest")
    about_file = ast.get_docstring(tree).split("\n\n")[0]
    head = f'"""{about_file}"""\n' + "\n".join(imports)
    return head + "\n\n\n" + "\n\n\n".join(parts) + "\n"


# ---------------------------------------------------------------------------------------- exercises


def exercises(only=None):
    """The exercises, all or those named in "gae,clip", in the order of the list. Raises BadInput
    for an unknown name."""
    everything = read_toml("exercises.toml")
    if only is None:
        return everything
    names = [name.strip() for name in only.split(",") if name.strip()]
    unknown = [name for name in names if name not in everything]
    if unknown or not names:
        first = unknown[0] if unknown else ""
        raise BadInput(
            f"--only {only}: there is no exercise {first!r}; there are {', '.join(everything)}"
        )
    return {name: exercise for name, exercise in everything.items() if name in names}


def copy_project(place, chosen, changed):
    """A copy of the project with the scripts in `changed` {file: text} and, of the tests, those
    that grade `chosen`."""
    place.mkdir(parents=True, exist_ok=True)
    for pattern in PARTS:
        for path in ROOT.glob(pattern):
            if path.is_dir():
                no_caches = shutil.ignore_patterns("__pycache__", ".*")
                shutil.copytree(path, place / path.name, ignore=no_caches)
            else:
                shutil.copy(path, place / path.name)
    for file, text in changed.items():
        (place / file).write_text(text, encoding="utf-8")
    (place / "tests").mkdir()
    shutil.copy(ROOT / "tests" / "conftest.py", place / "tests")
    for file, text in cut_tests(tuple(chosen)).items():
        (place / "tests" / file).write_text(text, encoding="utf-8")
        # modules that tests share, beside conftest.py: marks.py
        for module in re.findall(r"(?m)^from (\w+) import", text):
            if (ROOT / "tests" / f"{module}.py").is_file():
                shutil.copy(ROOT / "tests" / f"{module}.py", place / "tests")
    (place / "pytest.ini").write_text(pytest_settings(chosen), encoding="utf-8")


def pytest_settings(chosen):
    """The pytest.ini of a copy: the project's markers, and one for each exercise. (The project's
    pyproject.toml stays here; beside a pytest.ini it would not be read.)"""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    markers = list(project["tool"]["pytest"]["ini_options"]["markers"])
    markers += [f"{name}: {exercise['title']}" for name, exercise in chosen.items()]
    return "[pytest]\nmarkers =\n" + "".join(f"    {marker}\n" for marker in markers)


def stubs_of(chosen):
    """{file: its text with a hole in place of every function of the chosen exercises}."""
    changed = {}
    for name, exercise in chosen.items():
        file = exercise["file"]
        for function in exercise["functions"]:
            source = changed.get(file) or (ROOT / file).read_text(encoding="utf-8")
            message = f"exercise {name}: {function} is yours to write"
            changed[file] = put(source, function, stub(source, function, message))
    return changed


def check(name, exercise):
    """The command that runs an exercise's tests in a handout."""
    files = {"tests/" + test.split("::")[0] for test in exercise["tests"]}
    return f"python -m pytest -q -m {name} {' '.join(sorted(files))}"


def describe(name, exercise):
    """An exercise as the assignment tells it."""

    def fill(text):
        words = " ".join(text.split())
        return textwrap.fill(words, 130, break_on_hyphens=False, break_long_words=False)

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
    """A count and its noun: 1 exercise, 2 exercises."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


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
    command = "python course/course.py grade COPY"
    if len(chosen) < len(exercises()):
        command += f" --only {','.join(chosen)}"
    print(f"to grade a copy of it: {command}")


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
                danger = danger_of(member, path)
                if danger:
                    raise BadInput(f"grade {archive}: {member.filename[:60]!r} in it {danger}")
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
    except Exception as error:  # each of the many ways to be broken raises another one
        reason = " ".join(str(error).split())[:90] or type(error).__name__
        raise BadInput(f"grade {archive}: no whole zip file ({reason})") from None


def danger_of(member, path):
    """Why a file in a zip file must not be unpacked, in words, or ""."""
    if path.is_absolute() or ".." in path.parts or ":" in (*path.parts, "")[0]:
        return "leads out of it"
    if member.flag_bits & 1:
        return "is encrypted"
    file_type = stat.S_IFMT(member.external_attr >> 16)  # 0: it was not made by a Unix
    if file_type not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a link or a device"
    return ""


def opened(place, files, scratch):
    """The directory that holds the `files` (those of them that are there) of the submission
    `place`: a directory or a zip file, unpacked into `scratch`, or a folder in it, as a program
    that packs or unpacks leaves one. Raises BadInput."""
    if place.is_file():
        unpack(place, files, scratch)
    elif not place.is_dir():
        raise BadInput(f"grade {place}: no such directory or zip file")

    def holds_files(folder):
        return any((folder / file).is_file() for file in files)

    home = scratch if place.is_file() else place
    try:
        for _ in range(5):
            if holds_files(home):
                return home
            folders = folders_in(home)
            with_files = [folder for folder in folders if holds_files(folder)]
            candidates = with_files or folders
            if len(candidates) != 1:
                break
            (home,) = candidates
    except OSError as error:
        raise BadInput(f"grade {place}: cannot be read ({error.strerror})") from None
    several = [path.name for path in candidates if holds_files(path)]
    if several:
        names = " and in ".join(map(repr, several[:3]))
        raise BadInput(f"grade {place}: there are files to grade in {names}; leave one of them")
    raise BadInput(f"grade {place}: none of the files to grade is there; is it a handout?")


def folders_in(place):
    """The directories in `place`, but for .venv, __MACOSX and their like."""
    folders = [path for path in sorted(place.iterdir()) if path.is_dir()]
    return [path for path in folders if not path.name.startswith((".", "__"))]


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
    texts = {}
    for path in files_of_tests():
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef):
                texts[node.name] = ast.get_docstring(node) or ""
    return texts


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
    """The work of the forked process: pytest in the copy at `place`, as `python -m pytest` would
    run it."""
    os.setsid()  # a session of its own: whatever it starts ends with it
    output = os.open(place / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    # a loop that collects or prints must not take the machine with it
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE, FILE))
    # for the case that the grader is killed before it can keep the time
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(place)
    os.environ.update(PYTHONPATH="", PYTEST_ADDOPTS="", PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    sys.dont_write_bytecode = True
    forget_project()
    sys.path.insert(0, str(place))
    import pytest

    sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", f"--junitxml={report}", "tests"]))


def forget_project():
    """Forget the project that the grader runs from: its modules and its place on the path. A copy
    has its own."""
    homes = {str(home) for home in (ROOT, ROOT / "support", HERE)}
    for name, module in list(sys.modules.items()):
        if os.path.dirname(getattr(module, "__file__", None) or "") in homes:
            del sys.modules[name]
    # every program has a __main__, and the project looks there for the program's name
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.path[:] = [path for path in sys.path if Path(path).resolve() not in (ROOT, HERE)]


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
        for problem in [*case.iter("failure"), *case.iter("error"), *case.iter("skipped")]:
            name = case.get("name") or ""
            parts = [name[:70], about(name.split("[")[0]), reason_of(problem)[:90]]
            return ": ".join(part for part in parts if part)
    return "" if code == 0 and cases else f"the tests did not run (exit code {code})"


def reason_of(problem):
    """Why a test failed, in one line. problem: <failure>, <error> or <skipped> of pytest's
    report."""
    reason = (problem.get("message") or problem.text or "").strip().split("\n")[0]
    if "collection failure" in reason:  # the file could not be imported; the last line says why
        lines = (problem.text or "").split("\n")
        errors = [line[1:].strip() for line in lines if line.startswith("E ")]
        return errors[-1] if errors else reason
    return reason


def try_out(name, exercise, changed, limit):
    """Run the tests of one exercise on a copy of the project with other scripts."""
    prefix = f"exercise-{name}-"
    with tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True) as scratch:
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
    problem = try_out(name, exercise, {file: text}, limit)
    return "not done" if f"NotImplementedError: exercise {name}:" in problem else problem


class Result(NamedTuple):
    """One exercise of one submission."""

    name: str
    exercise: dict
    points: int  # earned
    problem: str  # what went wrong, or ""


def gradescope(results):
    """What Gradescope reads, results.json, of the results of one submission."""
    passed = sum(not result.problem for result in results)
    earned = sum(result.points for result in results)
    total = sum(result.exercise["points"] for result in results)
    return {
        "score": earned,
        "max_score": total,
        "output": f"{passed} of {plural(len(results))} passed, {earned} of {total} points",
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
    began = time.monotonic()
    if scope and len(places) > 1:
        raise BadInput(f"--gradescope {scope}: is for one submission, not for {len(places)}")
    files = {exercise["file"] for exercise in chosen.values()}
    all_points = True
    with tempfile.TemporaryDirectory(prefix="submissions-") as scratch:
        homes = []
        for number, place in enumerate(places):
            unpacked = Path(scratch) / str(number)
            unpacked.mkdir()
            homes.append(opened(place, files, unpacked))
        with (
            to_write("--csv", table) as csv_file,
            to_write("--gradescope", scope) as scope_file,
            workers() as pool,
        ):
            rows = csv.writer(csv_file)
            rows.writerow(["submission", "exercise", "points", "of", "result"])
            for place, home in zip(places, homes):
                print(f"\n{place}")
                results = []
                for result in graded(home, chosen, limit, pool):
                    results.append(result)
                    name, points, of = result.name, result.points, result.exercise["points"]
                    outcome = result.problem or "passed"
                    print(f"  {name:<12}{points:>3} of {of:>2}   {outcome}", flush=True)
                    rows.writerow([place, name, points, of, outcome])
                    csv_file.flush()
                summary = gradescope(results)
                earned, total = summary["score"], summary["max_score"]
                all_points = all_points and earned == total
                print(f"  {'total':<12}{earned:>3} of {total}")
                rows.writerow([place, "total", earned, total, summary["output"]])
                csv_file.flush()
            json.dump(summary, scope_file, ensure_ascii=False, indent=1)
    print(
        f"\n{plural(len(places), 'submission')}, {plural(len(chosen))} each: "
        f"{time.monotonic() - began:.0f} s"
    )
    return all_points


def graded(home, chosen, limit, pool):
    """Grade the submission whose files are in the directory `home`: yields a Result for each
    exercise, as soon as it is there."""
    problems = pool.map(lambda item: grade_one(home, *item, limit), chosen.items())
    for (name, exercise), problem in zip(chosen.items(), problems):
        points = 0 if problem else exercise["points"]
        yield Result(name, exercise, points, problem)


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


STUB, SOLVED, ALONE = "the stub", "the solution", "the solution, and of the rest only what it needs"


class Trial(NamedTuple):
    """The project with one function changed, to be tested."""

    exercise: str
    answer: str  # STUB, SOLVED, ALONE, or the name of a wrong answer
    changed: dict  # {file: text}


def trials(chosen):
    """All Trials of the chosen exercises: of each the stub first, then the solution, as it is and
    in a handout in which nothing is done but the exercise and those that it `needs`, then wrong
    answers."""
    everything = exercises()

    def with_needs(name):
        return {name}.union(*map(with_needs, everything[name]["needs"]))

    todo = []
    for name, exercise in chosen.items():
        done = with_needs(name)
        others = {other: everything[other] for other in everything if other not in done}
        todo.append(Trial(name, STUB, stubs_of({name: exercise})))
        todo.append(Trial(name, SOLVED, {}))
        todo.append(Trial(name, ALONE, stubs_of(others)))
    todo += [Trial(*wrong_answer) for wrong_answer in wrong_answers(chosen)]
    # a stable sort: within an exercise the order stays
    todo.sort(key=lambda trial: list(chosen).index(trial.exercise))
    return todo


def matrix(chosen, limit):
    """Every exercise's tests against its `trials`. True if the solution alone passes."""
    todo = trials(chosen)
    unexpected = []
    last_name = None

    def run_trial(trial):
        return try_out(trial.exercise, chosen[trial.exercise], trial.changed, limit)

    with workers() as pool:
        for trial, problem in zip(todo, pool.map(run_trial, todo)):
            if trial.exercise != last_name:
                print(f"\n{trial.exercise}: {chosen[trial.exercise]['title']}")
                last_name = trial.exercise
            passed = problem == ""
            as_expected = passed == (trial.answer in (SOLVED, ALONE))
            if not as_expected:
                unexpected.append(f"{trial.exercise}, {trial.answer}")
            prefix = "" if as_expected else "NO: "
            line = f"  {prefix}{trial.answer:<60} {problem or 'passes'}"
            print(line[:200], flush=True)
    summary = "only the solutions pass"
    if unexpected:
        summary = f"not as they should be: {'; '.join(unexpected)}"
    wrong_count = len(todo) - 3 * len(chosen)
    print(f"\n{plural(len(chosen))}, {wrong_count} wrong answers: {summary}")
    return not unexpected


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
    args = make_parser().parse_args(argv)
    chosen = exercises(getattr(args, "only", None))
    if args.command == "list":
        listing(chosen)
        return 0
    if args.command == "handout":
        handout(args.directory, chosen)
        return 0
    if args.command == "grade":
        passed = grade(args.submissions, chosen, args.limit, args.csv, args.gradescope)
    else:
        passed = matrix(chosen, args.limit)
    return 0 if passed else 1


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
    # labs.py has its own parser; here its name stands in the help
    command("lab", "break the project on purpose, and look (lab alone lists them)")
    handout_command.add_argument(
        "directory", metavar="DIR", type=Path, help="where to; it must not exist, or be empty"
    )
    grade_command.add_argument(
        "submissions",
        metavar="DIR|ZIP",
        type=Path,
        nargs="+",
        help="a student's copy of the handout, or its files to grade",
    )
    grade_command.add_argument(
        "--csv",
        metavar="FILE",
        help="write the results there too, a row per exercise and one for the total",
    )
    grade_command.add_argument(
        "--gradescope",
        metavar="FILE",
        help="write the results of one submission there, as Gradescope's results.json",
    )
    for with_only in (handout_command, grade_command, matrix_command):
        with_only.add_argument(
            "--only", metavar="A,B,...", help="these exercises alone (default: all)"
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


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    try:
        return run(argv)
    except BadInput as error:
        print(f"course.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        advice = "; the same command goes on where it was" if argv[:1] == ["lab"] else ""
        print(f"\nstopped{advice}", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
