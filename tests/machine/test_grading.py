"""Grading: what is told of a result and of the points, and that what goes wrong in one exercise
costs no other."""

from patches import exercises
from support.errors import BadInput

import ast
import csv
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import course
import grading
from conftest import ROOT
from exercises import ALL, source, written
from surgery import find, put


def test_without_pytest_nobody_is_graded(tmp_path, monkeypatch):
    """In an environment with requirements.txt alone every test would end at once, and a right
    answer would get no points."""
    bare = tmp_path / "python"  # without the installed packages
    bare.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bare))
    place, table = submission(tmp_path, "ppo.py"), tmp_path / "grades.csv"
    table.write_text("of last week")
    with pytest.raises(BadInput, match="No module named .*pip install -r requirements-dev.txt"):
        grading.grade([place], {"gae": ALL["gae"]}, 30, table)
    assert table.read_text() == "of last week"


def graded(place, names, *flags):
    """Grade the submission in `place`, which must lack points: {exercise: its row of the table}."""
    table = place.with_name("grades.csv")
    words = ["grade", str(place), "--only", names, "--csv", str(table), *flags]
    assert course.main(words) == 1
    with open(table, newline="", encoding="utf-8") as file:
        return {row["exercise"]: row for row in csv.DictReader(file)}


@pytest.mark.slow
def test_a_result_says_what_its_test_is_about(tmp_path, capsys):
    """ "Tensor-likes are not close" tells a student nothing. On the terminal and in the CSV stand
    the test's name, what it is about, and what went wrong. And a function that is not there earns
    nothing: in the run of all exercises our own stands in its place, and would pass."""
    text = source("grpo.py").replace("def turn_advantages(", "def another_name(")
    head = written(text, "group_advantages").split(":\n")[0]
    text = put(text, "group_advantages", head + ":\n    return rewards - rewards.mean()")
    rows = graded(submission(tmp_path, "grpo.py", lambda _: text), "groups,turns")
    result = rows["groups"]["result"]
    assert result in capsys.readouterr().out
    assert result.startswith("test_group_advantages_by_hand: Shao 2024, section 4.1, with ")
    assert result.endswith(": AssertionError: Tensor-likes are not close!")
    assert "turn_advantages is not there" in rows["turns"]["result"]
    assert rows["total"]["points"] == "0"


# ------------------------------------------------------------------------ the machine and the shell

STRANGER = "import pytest\n\ndef pytest_runtest_setup(item):\n    pytest.skip('a stranger')\n"


@pytest.mark.slow
def test_the_shell_of_the_teacher_changes_no_grade(tmp_path, monkeypatch):
    """PYTEST_ADDOPTS for another project cost each right answer all its points, or left tests out.
    So did a plugin that loads itself, a torch.py on PYTHONPATH, a proxy; and PYTHONOPTIMIZE takes
    the asserts away. TMPDIR may lie in a project with settings of its own."""
    other = tmp_path / "other"
    (other / "x-1.dist-info").mkdir(parents=True)
    (other / "x-1.dist-info" / "METADATA").write_text("Name: x\nVersion: 1\n")
    (other / "x-1.dist-info" / "entry_points.txt").write_text("[pytest11]\nx = stranger\n")
    for name in ("stranger.py", "conftest.py"):
        (other / name).write_text(STRANGER)
    (other / "torch.py").write_text("raise SystemExit\n")
    (other / "pytest.ini").write_text("[pytest]\naddopts = -k nothing\n")
    for words in (
        "PYTEST_ADDOPTS=--cov=. PYTEST_PLUGINS=stranger PYTHONOPTIMIZE=1 PYTHONWARNINGS=error",
        f"PYTHONPATH={other} TMPDIR={other} HTTP_PROXY=http://127.0.0.1:9 FORCE_COLOR=1",
    ):
        for word in words.split():
            monkeypatch.setenv(*word.split("=", 1))
    monkeypatch.setattr("tempfile.tempdir", None)
    place = submission(tmp_path, "grpo.py", lambda text: 'X = "\\d"\n' + text)
    assert course.main(["grade", str(place), "--only", "groups"]) == 0


def test_a_file_of_a_handout_without_rooms(tmp_path):
    """engine.py stood at the top: what lies there is graded, with our own imports."""
    (tmp_path / "engine.py").write_text("def f():\n    return 3\n")
    place = grading.place_of(grading.home_of(tmp_path, ["models/engine.py"]), "models/engine.py")
    assert place == tmp_path / "engine.py"


def submission(tmp_path, file, change=lambda text: text):
    """The directory of a submission: our own `file`, changed."""
    place = tmp_path / "anna"
    place.mkdir(exist_ok=True)
    (place / file).write_text(change(source(file)), "utf-8")
    return place


@pytest.mark.slow
@pytest.mark.parametrize(
    "body, said",
    [
        ("import pytest; pytest.exit('done', returncode=0)", "(exit code 0): _pytest.outcomes"),
        ("import os; os._exit(0)", "the process ended itself (exit code 0)"),
        ("import pytest; pytest.skip('done')", "done"),
        ("import os, shutil; shutil.rmtree(os.getcwd())", "the process ended itself"),
        # each test that is still to come is taken out of the session
        (
            "import gc, pytest\n"
            "    for one in gc.get_objects():\n"
            "        if type(one) is pytest.Session: del one.items[1:]",
            "did not run to its end",
        ),
    ],
)
def test_who_ends_pytest_earns_nothing(body, said, tmp_path):
    """Tests that did not run had not failed either: with exit code 0 that was all points."""
    name = "group_advantages"

    def change(text):
        head, rest = written(text, name).split(":\n", 1)
        return put(text, name, f"{head}:\n    {body}\n{rest}")

    row = graded(submission(tmp_path, "grpo.py", change), "groups")["groups"]
    assert row["points"] == "0" and said in row["result"]


def is_gone(number):
    """Has a process ended, or does it only wait for its parent to hear of it?"""
    words = ["ps", "-o", "stat=", "-p", str(number)]
    return subprocess.run(words, capture_output=True, text=True).stdout.strip() in ("", "Z")


@pytest.mark.parametrize("last, code", [("exit 3", 3), ("sleep 61", None)])
def test_what_an_answer_started_ends_with_it(last, code, tmp_path):
    """After the time limit, too. It wrote into the folder while this was removed, and all
    submissions behind it had no grades."""
    command = f"(while :; do mkdir -p $RANDOM; done) & echo $! > started; {last}"
    assert grading.run_session(["bash", "-c", command], 0.5, cwd=tmp_path) == code
    number = int((tmp_path / "started").read_text())
    assert is_gone(number)


@pytest.mark.parametrize("error", [OSError(39, "Directory not empty"), RecursionError("too deep")])
def test_a_folder_that_cannot_be_removed_is_left_with_a_line(error, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(tempfile.TemporaryDirectory, "cleanup", raises(error))
        with grading.scratch_folder() as name:
            pass
    assert capsys.readouterr().err == f"{name} is left: {error}\n"
    os.rmdir(name)


def raises(error):
    """A function that raises the error, whatever it is called with."""

    def function(*_, **__):
        raise error

    return function


@pytest.mark.parametrize("error", [OSError(28, "No space left"), RecursionError("too deep")])
def test_a_submission_that_cannot_be_tried_costs_no_other(error, tmp_path, monkeypatch):
    def run_pytest(chosen, changed, cases, limit, *flags):
        if "anna" in str(changed):
            raise error
        return "", {"test_grpo.test_group_advantages_by_hand": []}

    exercise = {**ALL["groups"], "tests": ["test_grpo.py::test_group_advantages_by_hand"]}
    monkeypatch.setattr(grading, "run_pytest", run_pytest)
    submission(tmp_path, "grpo.py", lambda text: text + "\nAUTHOR = 'anna'\n")
    (tmp_path / "ben").mkdir()
    (tmp_path / "ben" / "grpo.py").write_text(source("grpo.py"), "utf-8")
    table = tmp_path / "grades.csv"
    grading.grade([tmp_path / "anna", tmp_path / "ben"], {"groups": exercise}, 30, table)
    anna, _, ben, _ = csv.DictReader(table.open(encoding="utf-8"))
    assert anna["result"] == f"grpo.py: {type(error).__name__}: {error}"
    assert ben["result"] == "passed"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_runs_ends_when_the_grading_is_stopped(number, tmp_path):
    """A session of its own does not hear the Ctrl-C of the terminal."""
    started = tmp_path / "started"
    loop = f"\nimport os\nopen({str(started)!r}, 'w').write(str(os.getpid()))\nwhile 1: pass\n"
    place = submission(tmp_path, "grpo.py", lambda text: text + loop)
    words = [sys.executable, "course/course.py", "grade", str(place), "--only", "groups"]
    with subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        while not (started.exists() and started.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(number)
        assert process.communicate(timeout=20)[1] == "\nstopped\n" and process.returncode == 130
    assert is_gone(int(started.read_text()))


@pytest.mark.parametrize(
    "files, count",
    [
        ({"cpu.max": "max 100000"}, 2),
        ({"cpu.max": "150000 100000"}, 1),
        ({"box/cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000", "box/cpu.max": "max 100000"}, 1),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ({"cpu/box/cpu.cfs_quota_us": "99999\n", "cpu/box/cpu.cfs_period_us": "100000\n"}, 1),
        ({}, 2),
    ],
)
def test_processors_are_those_that_this_process_may_use(files, count, tmp_path, monkeypatch):
    """Eight answers at once on the one processor of a container: right ones ran out of time."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5})
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    files = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in {**files, "proc/self/cgroup": "1:cpu:/box\n0::/box\n"}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert grading.processors(tmp_path) == count


@pytest.mark.slow
def test_what_ran_out_of_time_is_tried_once_more_alone(tmp_path, monkeypatch):
    """A busy machine must cost nobody points. While the second run lasts no other one begins."""
    monkeypatch.setattr(grading, "PROCESSORS", 2)
    monkeypatch.setattr(grading, "FREE", threading.Semaphore(2))
    log = tmp_path / "log"
    log.touch()

    def try_one(who):
        head, body = written(source("grpo.py"), "group_advantages").split(":\n", 1)
        first = f"""
    import os, pathlib, time
    log = pathlib.Path({str(log)!r})
    runs = log.read_text().count("begins")
    if str(os.getpid()) not in log.read_text():
        log.write_text(log.read_text() + f"{who} begins {{os.getpid()}} ")
        time.sleep([60, 3, 0][runs])
        log.write_text(log.read_text() + "and ends ")
"""
        text = put(source("grpo.py"), "group_advantages", f"{head}:{first}{body}")
        return grading.try_out("groups", ALL["groups"], {"grpo.py": text}, set(), 10)

    with ThreadPoolExecutor() as pool:
        slow = pool.submit(try_one, "slow")
        while log.read_text().count("begins") < 2:
            assert not slow.done()
            time.sleep(0.05)
        assert pool.submit(try_one, "next").result() == slow.result() == ""
    words = [word for word in log.read_text().split() if word.isalpha()]
    assert words == "slow begins slow begins and ends next begins and ends".split()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("    ", "\t").encode(),
        lambda text: b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode(),
        lambda text: ("# Jos\u00e9\n\x0c" + text).encode("latin-1", "replace"),
    ],
)
def test_what_an_editor_did_costs_nothing(change, tmp_path):
    """Tabs, a mark at the beginning, other line ends, a form feed, a name in Latin-1."""
    for exercise in (ALL["groups"], ALL["dialogue"], ALL["reaction"]):
        (tmp_path / exercise["file"]).write_bytes(change(source(exercise["file"])))
        (text,) = grading.answered(tmp_path, exercise, {}).values()
        for name in exercise["functions"]:
            nodes = [find(ast.parse(t), name) for t in (source(exercise["file"]), text)]
            ours, theirs = (list(map(ast.unparse, node.body[1:])) for node in nodes)
            assert ours == theirs


@pytest.mark.slow
def test_a_nano_is_graded_whole(tmp_path):
    """As it is, with helpers of other names."""
    place = submission(tmp_path, "nano.py", lambda text: text.replace("padded", "side_by_side"))
    assert course.main(["grade", str(place), "--only", "nano", "--limit", "240"]) == 0


@pytest.mark.soak
@pytest.mark.parametrize(
    "text, limit, said",
    [
        ("", 240, "AttributeError: module 'nano' has no attribute"),
        ("while True: pass", 2, "no end within 2 s"),
    ],
)
def test_a_nano_that_is_empty_or_never_ends_earns_nothing(text, limit, said, tmp_path):
    chosen = {name: exercises("nano")[name] for name in ("nano_format", "nano_step")}
    home = submission(tmp_path, "nano.py", lambda _: text)
    problems = grading.grade_student(chosen, grading.cases_of(chosen), limit, home)
    assert len(problems) == 2 and all(said in problem for problem in problems)


@pytest.mark.slow
def test_a_top_level_that_raises_costs_the_exercises_of_its_file(tmp_path):
    """And says so; those of the other files lose nothing."""
    place = submission(tmp_path, "ppo.py", lambda text: text + "\nLIMITS = [1]\nLIMITS[1]\n")
    submission(tmp_path, "grpo.py", lambda text: text + "\nraise SystemExit('done')\n")
    submission(tmp_path, "rollout.py")
    rows = graded(place, "kl,groups,thought")
    assert [rows[name]["points"] for name in ("kl", "groups")] == ["0", "0"]
    assert rows["kl"]["result"].endswith("the top level raises IndexError: list index out of range")
    assert rows["groups"]["result"].endswith("the top level raises SystemExit: done")
    assert rows["thought"]["result"] == "passed"


@pytest.mark.soak
def test_an_endless_loop_at_the_top_costs_the_exercises_of_its_file(tmp_path):
    place = submission(tmp_path, "ppo.py", lambda text: text + "\nwhile True: pass\n")
    submission(tmp_path, "grpo.py")
    rows = graded(place, "kl,groups", "--limit", "15")
    assert rows["groups"]["result"] == "passed"
    assert rows["kl"]["result"] == "no end within 15 s"


@pytest.mark.soak
def test_what_goes_wrong_costs_its_own_exercise_only(tmp_path):
    """An endless loop, two ways to end the process, a syntax error, a missing file, one that is no
    text, and edited tests; beside an answer that is right, in the same file."""
    names = "whiten,clip,value,kl,thought,groups,fill,gae"
    place = tmp_path / "anna"
    course.main(["handout", str(place), "--only", names])
    bodies = {
        "whiten": "    import os\n    os._exit(0)",
        "value_loss": "    while True:\n        pass",
        "policy_loss": "    raise SystemExit(0)",
        "gae": '    raise NotImplementedError("exercise gae: yours")',
    }
    text = source("ppo.py")
    for function, body in bodies.items():
        text = put(text, function, written(text, function).split(":\n")[0] + ":\n" + body)
    (place / "ppo.py").write_text(text, "utf-8")
    (place / "rollout.py").write_text("def split_thought(text:\n    pass\n", "utf-8")
    (place / "grpo.py").unlink()
    (place / "support" / "answers.py").write_bytes(b"\xff\xfe\x00")
    for path in (place / "tests").iterdir():
        path.write_text("def test_fine():\n    pass\n", "utf-8")
    rows = graded(place, names, "--limit", "15")
    results = {name: row["result"] for name, row in rows.items()}
    assert results["kl"] == "passed" and results["value"] == "no end within 15 s"
    assert results["gae"] == "not done"
    assert results["whiten"] == "the process ended itself (exit code 0)"
    assert "SystemExit" in results["clip"]
    assert "rollout.py: SyntaxError" in results["thought"]
    assert "grpo.py: FileNotFoundError" in results["groups"]
    assert "answers.py: SyntaxError" in results["fill"]
    assert rows["total"]["points"] == str(ALL["kl"]["points"])
