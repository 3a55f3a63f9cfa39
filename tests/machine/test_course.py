"""The course edition: what students are given, how it is graded, and that the list of exercises
fits the project.

That the tests are strong enough is another matter, and CI's: `python course/course.py matrix`.
"""

import ast
import csv
import json
import os
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "course"))
import course
import labs
from simulator import BadInput

ALL = course.exercises()
FUNCTIONS = [(name, e["file"], function) for name, e in ALL.items() for function in e["functions"]]


def source(file):
    return (ROOT / file).read_text(encoding="utf-8")


def written(text, name):
    """The text of a function in a module's text."""
    return course.text_of(text, course.find(ast.parse(text), name))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A handout of everything."""
    place = tmp_path_factory.mktemp("course") / "handout"
    assert course.main(["handout", str(place)]) == 0
    return place


# ----------------------------------------------------------------------------------------- the list


@pytest.mark.slow
def test_the_list_fits_the_project():
    """At least fourteen exercises, 100 points. Each names functions and tests that are there, needs
    only what stands above it, and its README says so too."""
    table = (ROOT / "course" / "README.md").read_text(encoding="utf-8")
    trees = {path.name: ast.parse(source(path)) for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(ALL) >= 14 and sum(e["points"] for e in ALL.values()) == 100
    for i, (name, e) in enumerate(ALL.items()):
        assert set(e["needs"]) <= set(list(ALL)[:i]), name
        assert all(
            e[field]
            for field in ("title", "section", "task", "equation", "hint", "symptom", "tests")
        ), name
        for test in e["tests"]:
            file, function = test.split("::")
            assert course.find(trees[file], function), test
        (row,) = [line for line in table.splitlines() if line.startswith(f"| `{name}` ")]
        assert (
            f"`{e['file']}`" in row
            and f"| {e['minutes']} |" in row
            and all(f"`{f}`" in row for f in e["functions"])
        )
    assert all(course.find(ast.parse(source(file)), function) for _, file, function in FUNCTIONS)


@pytest.mark.slow
def test_every_exercise_has_wrong_answers_that_fit_the_code():
    """Whoever edits a function learns here which wrong answers must be edited with it."""
    names = [name for name, *_ in course.wrong_answers(ALL)]
    assert all(names.count(name) >= 4 for name in ALL)


def test_the_project_knows_nothing_of_the_course():
    """A student who reads the scripts beside the paper meets no marker of anybody's homework."""
    for path in ROOT.glob("*.py"):
        assert not re.search(
            r"\bexercises?\b|homework|course/|course\.py", path.read_text(encoding="utf-8"), re.I
        ), path.name


# ----------------------------------------------------------------------------------------- handouts


@pytest.mark.slow
def test_a_handout_has_a_hole_for_every_exercise_and_is_else_the_project(whole):
    for name, file, function in FUNCTIONS:
        text, node = (
            (whole / file).read_text(encoding="utf-8"),
            course.find(ast.parse(source(file)), function),
        )
        hole = course.find(ast.parse(text), function)
        assert ast.unparse(hole.args) == ast.unparse(node.args) and ast.get_docstring(
            hole
        ) == ast.get_docstring(node)
        *_, last = hole.body
        assert len(hole.body) == 1 + (ast.get_docstring(node) is not None)
        assert ast.unparse(last).startswith(f"raise NotImplementedError('exercise {name}: ")
    # fill the holes, and it is the project's file again
    for file in {file for _, file, _ in FUNCTIONS}:
        text = (whole / file).read_text(encoding="utf-8")
        for _, f, function in FUNCTIONS:
            if f == file:
                text = course.put(text, function, written(source(file), function))
        assert text == source(file)
    others = {path.name for path in ROOT.glob("*.py")} - {file for _, file, _ in FUNCTIONS}
    assert others and all(
        (whole / name).read_bytes() == (ROOT / name).read_bytes() for name in others
    )
    assert (whole / "prompts" / "en" / "vanilla" / "emotion.txt").is_file()
    readme = (whole / "README.md").read_text(encoding="utf-8")
    told = " ".join(readme.split())
    assert all(
        f"### {name}: {e['title']}" in told and " ".join(e["hint"].split()) in told
        for name, e in ALL.items()
    )
    assert "{{" not in readme.replace("{{name}}", "")


def test_a_handout_holds_no_answer(whole):
    """No line of a solution in any file of it, be it a test, a picture's caption or the README; no
    bytecode, no history, no course/."""
    files = [path for path in whole.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {
        ".py",
        ".md",
        ".txt",
        ".html",
        ".jsonl",
        ".json",
        ".toml",
        ".csv",
        ".png",
        ".ini",
        ".jinja",
        ".safetensors",
        "",
    }
    assert not [
        path
        for path in files
        if {".git", "course", "__pycache__", ".cache"} & set(path.relative_to(whole).parts)
    ]

    def squeeze(line):
        return re.sub(r"\s|#.*", "", line)

    # of any agent, and of any engine
    everybodys = {
        "thought,visible,malformed=split_thought(text)",
        "returnReply(text,visible,thought,malformed)",
        "head=self.model.get_output_embeddings()",
        "thought,visible=take_thoughts(text)",
    }
    held = {
        squeeze(line): path.name
        for path in files
        if path.suffix not in (".png", ".safetensors")
        for line in path.read_text(encoding="utf-8").splitlines()
    }
    for name, file, function in FUNCTIONS:
        node = course.find(ast.parse(source(file)), function)
        body = node.body[ast.get_docstring(node) is not None :]
        lines = source(file).split("\n")[body[0].lineno - 1 : node.end_lineno]
        for line in map(squeeze, lines):
            assert len(line) < 30 or line not in held or line in everybodys, (
                name,
                line,
                held[line],
            )


@pytest.mark.soak
def test_nothing_in_a_handouts_tests_runs_before_its_test(whole):
    """A table that calls an exercise when its file is imported would stop all tests of the other
    exercises too."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider"],
        cwd=whole,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_what_is_not_chosen_stays_solved(tmp_path, capsys):
    """One exercise, and everything else runs."""
    assert course.main(["handout", str(tmp_path / "h"), "--only", "groups, gae"]) == 0
    for _, file, function in FUNCTIONS:
        same = written((tmp_path / "h" / file).read_text(encoding="utf-8"), function) == written(
            source(file), function
        )
        assert same != (function in ("group_advantages", "gae", "place_rewards"))
    assert sorted(path.name for path in (tmp_path / "h" / "tests").iterdir()) == [
        "conftest.py",
        "tabular.py",
        "test_gae.py",
        "test_grpo.py",
    ]
    assert "2 exercises, 11 points" in capsys.readouterr().out


@pytest.mark.soak
def test_the_tests_of_a_handout_run_by_the_exercises_name(tmp_path):
    """As the assignment tells it: the holes fail, and what fills them passes."""
    course.main(["handout", str(tmp_path / "h"), "--only", "groups"])
    command = [sys.executable, "-m", "pytest", "-q", "-m", "groups", "tests/test_grpo.py"]

    def test():
        return subprocess.run(command, cwd=tmp_path / "h", capture_output=True, text=True)

    assert "exercise groups: group_advantages is yours to write" in test().stdout
    (tmp_path / "h" / "grpo.py").write_text(source("grpo.py"), encoding="utf-8")
    result = test()
    assert result.returncode == 0 and "warning" not in result.stdout


@pytest.mark.parametrize(
    "argv, said",
    [
        (["handout", "{full}"], "not empty"),
        (["handout", "{full}/file"], "not empty"),
        (["handout", "{full}/file/x"], "cannot be written"),
        (["handout", "{new}", "--only", "gae,gea"], "'gea'"),
        (["handout", "{new}", "--only", ","], "there is no exercise"),
        (["grade", "{new}"], "no such directory"),
        (["grade", "{full}"], "is it a handout"),
        (["grade", str(ROOT), "--csv", "{new}/no/x.csv"], "cannot be written"),
        (["grade", str(ROOT), "--gradescope", "{new}/no/x.json"], "cannot be written"),
        (
            ["grade", str(ROOT), str(ROOT), "--gradescope", "{new}"],
            "is for one submission, not for 2",
        ),
        (["grade", str(ROOT), "{full}/file"], "no whole zip file"),
        (["grade", "{full}", "--limit", "0"], "above 0"),
        (["grade"], "required"),
        (["mark"], "invalid choice"),
        ([], "required"),
        (["lab", "learning-rat"], "unknown"),
        (["lab", "k1-loss", "--seeds", "x"], "seeds"),
    ],
)
def test_bad_input_is_one_line(argv, said, tmp_path, capfd):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    try:
        code = course.main(
            [word.format(full=tmp_path / "full", new=tmp_path / "new") for word in argv]
        )
    except SystemExit as end:
        code = end.code
    error = capfd.readouterr().err
    assert code == 2 and said in error and error.count("\n") == 1 and "Traceback" not in error
    assert [path.name for path in tmp_path.iterdir()] == ["full"] and (
        tmp_path / "full" / "file"
    ).read_text() == "mine"


# ------------------------------------------------------------------------------------------ grading

OURS = '''"""A module."""
import math


def one(x):
    """Its docstring."""
    return x


class Box:
    """A class."""

    @property
    def two(self):
        return 2


if __name__ == "__main__":
    print(one(1))
'''


def test_a_function_is_taken_with_its_helpers_and_nothing_else():
    """What a student did elsewhere, at the top level above all, is not taken along: it could end
    the process, or every test."""
    theirs = """
import sys
import numpy as np
EPS, UNUSED = 1e-8, 3
sys.exit(0)

def helper(x):
    return deeper(x) + EPS

def deeper(x):
    return np.abs(x)

def stranger():
    return 1

def one(x, *, more=EPS):
    return helper(x)

class Box:
    @property
    def two(self):
        return 0

    @property
    def two(self):
# a comment in column 0
        return stranger()
"""
    got = course.transplant(OURS, theirs, ["one"])
    assert (
        "sys" not in got
        and "stranger" not in got
        and got.count("def helper") == got.count("import numpy as np") == 1
    )
    assert got.index("EPS, UNUSED") < got.index("def one") and written(got, "Box.two") == written(
        OURS, "Box.two"
    )
    names = {"__name__": "x"}
    exec(got, names)
    assert names["one"](-2) == 2 + 1e-8
    got = course.transplant(OURS, theirs, ["Box.two"])
    exec(got, names)
    assert names["Box"]().two == 1 and written(got, "one") == written(OURS, "one")


@pytest.mark.parametrize(
    "theirs, wanted",
    [
        (
            "import math, cmath\n\ndef one(x):\n    return cmath.sqrt(x)",
            2,
        ),  # of an import what is new
        # a demo, with an argument's name
        ("x = 1 / 0\n\ndef one(x):\n    return x\n\nprint(one(x))", 4),
        # a name, and a local of that name
        ("def h(x):\n    return 2 * x\n\ndef one(x):\n    return h(sum(h for h in [x]))", 8),
        ('K = """a\n"""; L = 3\n\ndef one(x):\n    return x + L', 7),  # half a string on the line
        ("N = 0\n\ndef one(x):\n    global N\n    N += 1\n    return N", 1),
        (
            "class H:\n    def f(self, x): return x + E\n\nE = 1\n\ndef "
            "one(x):\n    return H().f(x)",
            5,
        ),
        ("def one(x):\n    raise NotImplementedError\n\ndef one(x):\n    return x + 9", 13),
    ],
)
def test_helpers_are_found_as_python_finds_them(theirs, wanted):
    """A right answer must not be lost to what stands around it."""
    names = {"__name__": "x"}
    exec(course.transplant(OURS, theirs, ["one"]), names)
    assert names["one"](4) == wanted


@pytest.mark.parametrize(
    "broken",
    [
        "    return (x",
        "    return x +",
        '    """never closed',
        "    return x\n      x",
        "    x = 'half",
    ],
)
def test_a_syntax_error_costs_the_function_that_it_is_in(broken):
    """For Python the file is lost from there on; for the other exercises it is not."""
    other = "\n\ndef three(x):\n    return 3\n"
    theirs = OURS.replace("    return x", broken).replace('    """Its docstring."""\n', "") + other
    assert not course.parses(theirs)
    ours = OURS + other.replace("return 3", "pass")
    got = course.transplant(ours, theirs.replace("return 2", "return 22"), ["three"])
    assert "return 3" in got and "return 2\n" in got
    assert "return 22" in course.transplant(
        ours, theirs.replace("return 2", "return 22"), ["Box.two"]
    )
    with pytest.raises(BadInput, match="does not parse"):
        course.transplant(ours, theirs, ["one"])
    method = OURS.replace("        return 2", "    " + broken) + other
    assert not course.parses(method) and "return 3" in course.transplant(ours, method, ["three"])


def test_a_function_that_is_gone_is_named():
    for theirs in ("", "one = 1", "class one: pass", "\0", "def ones(x): return x"):
        with pytest.raises(BadInput, match="one is not there"):
            course.transplant(OURS, theirs, ["one"])


@pytest.mark.slow
def test_every_test_that_grades_says_what_it_is_about():
    """The grader quotes it, as the title of an exercise's result."""
    for exercise in ALL.values():
        for test in exercise["tests"]:
            said = course.about(test.split("::")[1])
            assert 20 < len(said) <= 110 and "\n" not in said, test
    assert course.about("test_that_is_not_there") == ""


@pytest.mark.slow
def test_a_result_says_what_its_test_is_about(tmp_path, capsys):
    """ "Tensor-likes are not close" tells a student nothing. On the terminal and in the CSV stand
    the test's name, what it is about, and what went wrong; at the end, how long it all took."""
    place, table = tmp_path / "anna", tmp_path / "grades.csv"
    assert course.main(["handout", str(place), "--only", "groups"]) == 0
    wrong = (
        'def group_advantages(rewards, groups, kind="grpo", eps=1e-6):\n'
        "    return rewards - rewards.mean()\n"
    )
    (place / "grpo.py").write_text(wrong, encoding="utf-8")
    assert course.main(["grade", str(place), "--only", "groups", "--csv", str(table)]) == 1
    told = capsys.readouterr().out
    with open(table, newline="", encoding="utf-8") as file:
        row, _ = csv.DictReader(file)
    assert row["points"] == "0" and row["result"] in told and len(row["result"]) < 280
    assert row["result"].startswith("test_group_advantages_by_hand: Shao 2024, section 4.1, with ")
    assert row["result"].endswith(": AssertionError: Tensor-likes are not close!")
    assert re.search(r"\n1 submission, 1 exercise each: \d+ s\n$", told)


@pytest.mark.slow
def test_what_is_told_of_the_points(tmp_path, capsys):
    """The exit code says whether any are missing, the last line of the table and of the CSV how
    many there are, and Gradescope's file all of it, of one submission."""
    for name, kl in (("anna", source("ppo.py")), ("ben", "def kl_penalty(*_):\n    return 0\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "ppo.py").write_text(kl, encoding="utf-8")
        (tmp_path / name / "grpo.py").write_text(source("grpo.py"), encoding="utf-8")
    table, report = tmp_path / "grades.csv", tmp_path / "results.json"

    def grade(*more):
        return course.main(["grade", *map(str, more), "--only", "kl,groups"])

    assert grade(tmp_path / "anna", "--gradescope", report) == 0
    assert {key: json.loads(report.read_text())[key] for key in ("score", "max_score")} == {
        "score": 8,
        "max_score": 8,
    }
    assert grade(tmp_path / "ben", "--gradescope", report) == 1
    results = json.loads(report.read_text(encoding="utf-8"))
    assert set(results) == {"score", "max_score", "output", "tests"} and results["max_score"] == 8
    assert results["score"] == 4 and results["output"] == "1 of 2 exercises passed, 4 of 8 points"
    assert [
        (test["name"].split(":")[0], test["score"], test["max_score"], test["status"])
        for test in results["tests"]
    ] == [("kl", 0, 4, "failed"), ("groups", 4, 4, "passed")]
    assert (
        results["tests"][0]["output"].startswith("test_")
        and results["tests"][1]["output"] == "passed"
    )
    capsys.readouterr()
    assert grade(tmp_path / "anna", tmp_path / "ben", "--csv", table) == 1
    with open(table, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["exercise"] == "total"]
    assert "total" not in ALL
    assert [
        (Path(row["submission"]).name, row["points"], row["of"], row["result"]) for row in rows
    ] == [
        ("anna", "8", "8", "2 of 2 exercises passed, 8 of 8 points"),
        ("ben", "4", "8", results["output"]),
    ]
    assert re.findall(r"\n  total +(\d+) of +(\d+)\n", capsys.readouterr().out) == [
        ("8", "8"),
        ("4", "8"),
    ]


def zipped(place, **members):
    """A zip file of {path: text, or a ZipInfo to write it with}."""
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in members.items():
            archive.writestr(path, text)
    return place


WANTED = {"ppo.py", "tools/judge.py"}


@pytest.mark.parametrize(
    "members, found",
    [
        (["ppo.py"], "ppo.py"),
        (["tools/judge.py"], "tools/judge.py"),
        (
            ["h/ppo.py", "h/grpo.py", "h/tools/judge.py", "h/.venv/lib/ppo.py"],
            "h/ppo.py h/tools/judge.py",
        ),
        (
            [
                "a/b/ppo.py",
                "a/report.txt",
                "notes.txt",
                "__MACOSX/a/b/._ppo.py",
                "__MACOSX/ppo.py",
                ".DS_Store",
                "a/b/old/ppo.py",
            ],
            "a/b/ppo.py",
        ),
        (["h\\ppo.py", "h\\tools\\judge.py"], "h/ppo.py h/tools/judge.py"),
        (["grpo.py", "h/simulator.py"], None),
        ([], None),
        (["__MACOSX/ppo.py"], None),
    ],
)
@pytest.mark.parametrize("kind", ["zip", "directory"])
def test_a_submission_is_found_in_its_folder(kind, members, found, tmp_path):
    """As a zip file or as a directory; packed with the folder or without it, on any system, and
    with what systems leave there. Of a zip file what is not graded is not unpacked."""
    place, scratch = tmp_path / "anna", tmp_path / "scratch"
    scratch.mkdir()
    if kind == "zip":
        zipped(place, **{path: path for path in members})
    else:
        place.mkdir()
        for path in members:
            path = place / path.replace("\\", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(str(path.relative_to(place)))
    if found is None:
        with pytest.raises(BadInput, match="none of the files to grade is there"):
            course.opened(place, WANTED, scratch)
    else:
        home = course.opened(place, WANTED, scratch)
        there = [
            (home / file).read_text().replace("\\", "/")
            for file in sorted(WANTED)
            if (home / file).is_file()
        ]
        assert " ".join(there) == found
    assert {path.name for path in scratch.rglob("*") if path.is_file()} <= {"ppo.py", "judge.py"}


def test_two_folders_with_answers_are_a_question(tmp_path):
    """Which of them is the submission? That is the student's to say."""
    place = zipped(tmp_path / "x.zip", **{"old/ppo.py": "", "new/ppo.py": ""})
    with pytest.raises(BadInput, match="'new' and in 'old'; leave one"):
        course.opened(place, WANTED, tmp_path)


def link(path):
    info = zipfile.ZipInfo(path)
    info.external_attr = (stat.S_IFLNK | 0o777) << 16
    return info


@pytest.mark.parametrize(
    "evil, said",
    [
        ("../ppo.py", "leads out of it"),
        ("h/../../ppo.py", "leads out of it"),
        ("/tmp/ppo.py", "leads out of it"),
        ("..\\ppo.py", "leads out of it"),
        ("\\ppo.py", "leads out of it"),
        ("C:\\ppo.py", "leads out of it"),
        ("\n/../../ppo.py", "leads out of it"),
        (link("grpo.py"), "'grpo.py' in it is a link"),
        (link("h"), "'h' in it is a link"),
        ("large", "larger than 50 MB"),
        ("cut", "no whole zip file"),
        ("changed", "no whole zip file (Bad CRC"),
        ("encrypted", "judge.py' in it is encrypted"),
        ("ppo.py/x/ppo.py", "no whole zip file"),
    ],
)
def test_a_bad_zip_file_is_one_line_and_writes_nothing(evil, said, tmp_path, capfd, monkeypatch):
    """Neither outside of the scratch directory nor, in the end, in it; and no other submission is
    graded first."""
    monkeypatch.setattr(course.tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    place = tmp_path / "anna.zip"
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr("tools/judge.py", "x = 1\n" * 99)
        archive.writestr("ppo.py", "")
        if evil == "large":
            archive.writestr("runs/weights", bytes(course.UNPACKED), zipfile.ZIP_DEFLATED)
        elif evil not in ("cut", "changed", "encrypted"):
            archive.writestr(evil, "../../ppo.py")
    data = place.read_bytes()
    if evil == "cut":
        data = data[:-30]
    elif evil == "changed":
        data = data.replace(b"x = 1", b"x = 2", 1)
    elif evil == "encrypted":
        for at in (data.index(b"PK\3\4") + 6, data.index(b"PK\1\2") + 8):
            data = data[:at] + bytes([data[at] | 1]) + data[at + 1 :]
    place.write_bytes(data)
    assert (
        course.main(
            [
                "grade",
                str(ROOT),
                str(place),
                "--only",
                "gae,judge",
                "--csv",
                str(tmp_path / "x.csv"),
            ]
        )
        == 2
    )
    told = capfd.readouterr()
    assert told.err.count("\n") == 1 and said in told.err and str(place) in told.err
    assert told.out == "" and len(told.err) < 300
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["anna.zip", "scratch"]


@pytest.mark.slow
def test_a_zip_file_is_graded(tmp_path, capsys):
    """A handout, done, packed with its folder by a Mac."""
    place = zipped(
        tmp_path / "anna.zip",
        **{"handout/grpo.py": source("grpo.py"), "__MACOSX/x": "", "handout/README.md": ""},
    )
    assert course.main(["grade", str(place), "--only", "groups"]) == 0
    assert f"\n{place}\n  groups " in capsys.readouterr().out


@pytest.mark.soak
def test_what_goes_wrong_costs_its_own_exercise_only(tmp_path, capsys):
    """An endless loop, one that eats memory, two ways to end the process, a syntax error, a missing
    file, one that is no text, and edited tests; beside an answer that is right, in the same file. A
    student's process is not the grader's."""
    place = tmp_path / "anna"
    course.main(["handout", str(place), "--only", "gae,whiten,clip,value,kl,groups,fill,thought"])

    def write(file, **bodies):
        text = source(file)
        for function, body in bodies.items():
            text = course.put(
                text, function, written(text, function).split(":\n")[0] + ":\n" + body
            )
        (place / file).write_text(text, encoding="utf-8")

    write(
        "policy.py", split_thought="    x = []\n    while True:\n        x.append(bytes(10 ** 9))"
    )
    write(
        "ppo.py",
        whiten="    import os\n    os._exit(0)",
        value_loss="    while True:\n        pass",
        policy_loss="    raise SystemExit(0)",
        gae="    return rewards[",
    )
    (place / "grpo.py").unlink()
    (place / "simulator.py").write_bytes(b"\xff\xfe\x00")
    for path in (place / "tests").iterdir():
        path.write_text("def test_fine():\n    pass\n", encoding="utf-8")
    untouched = tmp_path / "ben"
    course.main(["handout", str(untouched), "--only", "kl,groups"])
    (untouched / "ppo.py").write_text(source("ppo.py"), encoding="utf-8")
    table = tmp_path / "grades.csv"
    assert (
        course.main(
            [
                "grade",
                str(place),
                str(untouched),
                "--only",
                "gae,whiten,clip,value,kl,groups,fill,thought",
                "--limit",
                "20",
                "--csv",
                str(table),
            ]
        )
        == 1
    )
    with open(table, newline="", encoding="utf-8") as file:
        found = {
            (Path(row["submission"]).name, row["exercise"]): (int(row["points"]), row["result"])
            for row in csv.DictReader(file)
        }
    anna = {name: result for (who, name), result in found.items() if who == "anna"}
    total, _ = anna.pop("total")
    points = {name: exercise["points"] for name, exercise in course.exercises().items()}
    assert anna["kl"] == (points["kl"], "passed")
    assert anna["gae"] == (0, "ppo.py: gae does not parse, or is not at the top level") and anna[
        "groups"
    ] == (0, "grpo.py is missing")
    assert anna["fill"] == (0, "simulator.py is not UTF-8 text") and anna["value"] == (
        0,
        "no end within 20 s",
    )
    assert (
        anna["whiten"] == (0, "the process ended itself (exit code 0)")
        and "SystemExit" in anna["clip"][1]
        and anna["clip"][0] == 0
    )
    assert anna["thought"][0] == 0 and "MemoryError" in anna["thought"][1]
    assert found["ben", "kl"] == (points["kl"], "passed")
    assert found["ben", "groups"] == (0, "not done")
    assert total == sum(earned for earned, _ in anna.values())
    assert f" {total} of {sum(points[name] for name in anna)}\n" in capsys.readouterr().out


# --------------------------------------------------------------------------------------------- labs


def test_the_patches_of_every_lab_fit_the_code():
    """And break something, but not the syntax."""
    seen = set()  # most of the files in most of the arms are the project's own
    for name, lab in labs.load_labs().items():
        healthy, broken = (labs.scripts_of(lab, arm) for arm in ("healthy", "broken"))
        assert healthy != broken or len(set(lab["arms"].values())) > 1, name
        for scripts in (healthy, broken):
            new = {text for file, text in scripts.items() if file.endswith(".py")} - seen
            assert all(course.parses(text.decode()) for text in new), name
            seen |= new
        assert len(lab["see"]) > 80 and len(lab["why"]) > 80 and len(lab["questions"]) >= 2, name
        assert (ROOT / "course" / "pictures" / f"{name}.png").is_file(), name
        readme = (ROOT / "course" / "README.md").read_text(encoding="utf-8")
        assert "{{" not in readme and f"### {name}: {lab['title']}" in readme, name
        assert all(
            f"* {question} " in " ".join(readme.split()) + " " for question in lab["questions"]
        ), name


@pytest.mark.parametrize(
    "flags, told",
    [
        ([], ""),
        (["--steps", "20", "--seeds", "0,1,2"], ""),
        (["--steps", "2"], "2 steps and seeds 0, 1, 2"),
        (["--seeds", "7"], "20 steps and seed 7"),
        (["--steps", "1", "--seeds", "1,0"], "1 step and seeds 1, 0"),
    ],
)
def test_a_labs_words_are_about_the_runs_that_were_measured(
    flags, told, tmp_path, capsys, monkeypatch
):
    """At another length, or with other seeds, its numbers are not to be looked for: it says so, in
    front of them. (No run is made here.)"""
    monkeypatch.setattr(labs, "RUNS", tmp_path)
    monkeypatch.setattr(labs, "make_runs", lambda runs: None)
    monkeypatch.setattr(labs, "series", lambda run, what: [1.0, 2.0])
    monkeypatch.setattr(labs, "draw", lambda *_: None)
    assert course.main(["lab", "k1-loss", *flags]) == 0
    above, _, below = capsys.readouterr().out.partition("What to see\n")
    assert "k2 holds the policy near its start" in below
    assert ("written about 20 steps and seeds 0, 1, 2" in above) == bool(told) and told in above


@pytest.mark.soak
@pytest.mark.parametrize("name", ["mixed-users", "no-format-check"])
def test_a_lab_runs(name, tmp_path, capsys, monkeypatch):
    """Two arms, two steps, one picture; asked for again, the runs are found."""
    monkeypatch.setattr(labs, "RUNS", tmp_path)
    for _ in range(2):
        assert (
            course.main(
                ["lab", name, "--seeds", "0", "--steps", "2", "--out", str(tmp_path / "x.png")]
            )
            == 0
        )
    told = capsys.readouterr().out
    assert (
        "What to see" in told
        and "2 of 2 runs are there already" in told
        and (tmp_path / "x.png").stat().st_size > 10_000
    )
