"""Submissions, as directories and as zip files: how they are found and unpacked, and which are
refused."""

from support.errors import BadInput

import stat
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "course"))
import course
from exercises import source
from submissions import MAX_UNPACKED, opened


def zipped(place, **members):
    """A zip file of {path: text, or a ZipInfo to write it with}."""
    with zipfile.ZipFile(place, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, text in members.items():
            archive.writestr(path, text)
    return place


WANTED = {"ppo.py", "support/forms.py"}


@pytest.mark.parametrize(
    "members, found",
    [
        (["ppo.py"], "ppo.py"),
        (["support/forms.py"], "support/forms.py"),
        (
            ["h/ppo.py", "h/grpo.py", "h/support/forms.py", "h/.venv/lib/ppo.py"],
            "h/ppo.py h/support/forms.py",
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
        (["a/b/c/d/e/ppo.py"], "a/b/c/d/e/ppo.py"),
        (["a/b/c/d/e/f/ppo.py", "a/notes.txt", "old/notes.txt"], "a/b/c/d/e/f/ppo.py"),
        (["h/ppo.py", "old/2025/h/ppo.py"], "h/ppo.py"),
        (["h\\ppo.py", "h\\support\\forms.py"], "h/ppo.py h/support/forms.py"),
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
            opened(place, WANTED, scratch)
    else:
        home = opened(place, WANTED, scratch)
        there = [
            (home / file).read_text().replace("\\", "/")
            for file in sorted(WANTED)
            if (home / file).is_file()
        ]
        assert " ".join(there) == found
    assert {path.name for path in scratch.rglob("*") if path.is_file()} <= {"ppo.py", "forms.py"}


def test_two_folders_with_answers_are_a_question(tmp_path):
    """Which of them is the submission? That is the student's to say."""
    place = zipped(tmp_path / "x.zip", **{"old/ppo.py": "", "new/ppo.py": ""})
    with pytest.raises(BadInput, match="'new' and in 'old'; leave one"):
        opened(place, WANTED, tmp_path)


def test_a_link_that_leads_back_is_not_followed_for_ever(tmp_path):
    """Neither where the files are beside it nor where there are none."""
    place = tmp_path / "anna"
    (place / "work").mkdir(parents=True)
    (place / "back").symlink_to(place)
    (place / "again").symlink_to(place)
    with pytest.raises(BadInput, match="none of the files to grade is there"):
        opened(place, WANTED, tmp_path)
    (place / "work" / "ppo.py").touch()
    assert opened(place, WANTED, tmp_path) == place / "work"


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
        ("encrypted", "forms.py' in it is encrypted"),
        ("ppo.py/x/ppo.py", "no whole zip file"),
    ],
)
def test_a_bad_zip_file_is_one_line_and_writes_nothing(evil, said, tmp_path, capfd, monkeypatch):
    """Neither outside of the scratch directory nor, in the end, in it; and no other submission is
    graded first."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    place = tmp_path / "anna.zip"
    with zipfile.ZipFile(place, "w") as archive:
        archive.writestr("support/forms.py", "x = 1\n" * 99)
        archive.writestr("ppo.py", "")
        if evil == "large":
            archive.writestr("runs/weights", bytes(MAX_UNPACKED), zipfile.ZIP_DEFLATED)
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
