"""Files of results: none is overwritten or shared. Text that comes in: it is text, or refused."""

from support import answers
from support.errors import BadInput
from support.files import lock, parse_json, read_json

import errno
import fcntl
import importlib
import json
import os

import pytest

import evaluate
from result_files import SHORT, measure, our_line, write
from runs import files, refuse


@pytest.mark.parametrize(
    "text, read",
    [
        (r"\ud83d\ude00 \uD83D\uDE00 😀", "😀 😀 😀"),
        (r"\\ud83d \\\\ude00", r"\ud83d \\ude00"),  # a backslash and letters
        (r"\ud83d \uDE00 \\\ud83d", "� � \\�"),
        (r"\ude00\ud83d\ud83d\ude00", "��😀"),
        ("\udcff", "�"),  # a byte that was no UTF-8, in a flag
        (r"\ud7ff\ue000\n", "\ud7ff\ue000\n"),
    ],
)
def test_half_a_surrogate_is_replaced_and_nothing_else(text, read):
    """No log, hash or tokenizer can hold it, wherever it stands."""
    assert parse_json(f'{{"{text}": ["{text}", 0.1]}}') == {read: [read, 0.1]}
    with pytest.raises(ValueError):
        parse_json(r'"\ud83"')


@pytest.mark.parametrize("text", ["", "[]", "null", '{"steps": 1', "[" * 100_000])
def test_a_file_without_an_object_counts_as_none(text, tmp_path):
    (tmp_path / "config.json").write_text(text)
    assert read_json(tmp_path / "config.json") == {}


def test_files_that_are_not_utf_8(tmp_path, monkeypatch):
    """A prompt that an editor had saved in GBK was a traceback. A byte order mark is no letter."""
    monkeypatch.setattr(answers, "PROMPTS", tmp_path)
    (tmp_path / "zh").mkdir()
    path = tmp_path / "zh" / "complaint.txt"
    path.write_text("你好", "gbk")
    with pytest.raises(BadInput, match=f"{path}: not in UTF-8"):
        answers.load_prompt("complaint", "zh")
    assert read_json(path) == {}
    path.write_text("你好", "utf-8-sig")
    assert answers.load_prompt("complaint", "zh") == "你好"
    path.write_text(json.dumps({"a": 1}), "utf-8-sig")
    assert read_json(path) == {"a": 1}


@pytest.mark.parametrize(
    "flags",
    [
        "evaluate --score F --json F",
        "evaluate --compare F G --json G",
        "replay same-user F --json ./F",
        "strategies F --json F",
        "judge capabilities F --json F",
        "judge capabilities F --json new --picture new",
        "strategies F --coordinate --json new --picture new",
        "blind F G --out F",
    ],
)
def test_no_input_is_overwritten(flags, tmp_path, monkeypatch, capsys):
    """`--json a.jsonl` of the strategies of a.jsonl wrote its tables over the dialogues, exit 0."""
    monkeypatch.chdir(tmp_path)
    for name in "FG":
        write(tmp_path / name, *[our_line(i, [50, 60]) for i in range(3)])
    before = files(tmp_path)
    tool, *flags = flags.split()
    module = importlib.import_module(tool if tool == "evaluate" else f"tools.{tool}")
    assert module.main(flags) == 2 and "would overwrite" in capsys.readouterr().err
    assert files(tmp_path) == before


def test_two_evaluations_do_not_share_a_file(tiny_dir, tmp_path, capsys):
    """Each line stood there twice, and nothing read the file again."""
    path = tmp_path / "r.jsonl"
    path.touch()
    held = lock(path)
    flags = ["--policy", tiny_dir, *SHORT, "--limit", 1, "--out", path]
    assert "another process is at work there" in refuse(capsys, *flags, main=evaluate.main)
    os.close(held)
    assert measure(*flags) == 0 == measure(*flags)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.EBADF])
def test_without_locks_one_warning_and_on(code, tiny_dir, tmp_path, monkeypatch, capsys):
    """`[Errno 37]` without a path ended an evaluation on a file system that has no locks."""

    def flock(descriptor, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    path = tmp_path / "r.jsonl"
    assert measure("--policy", tiny_dir, *SHORT, "--limit", 1, "--out", path) == 0
    assert capsys.readouterr().err.count(f"warning: {path}: cannot be locked") == 1


def test_a_file_is_locked_by_a_descriptor_that_writes(tmp_path, monkeypatch):
    """NFSv4 makes a byte-range lock of it, and refuses an exclusive one on any other descriptor."""

    def as_nfs(descriptor, operation):
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_RDWR

    monkeypatch.setattr(fcntl, "flock", as_nfs)
    (tmp_path / "r.jsonl").touch()
    os.close(lock(tmp_path / "r.jsonl"))


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink(os.devnull, path)])
def test_results_go_to_a_file(make, tiny_dir, tmp_path, monkeypatch, capfd):
    """A pipe was waited for, for ever. Dialogues that went to /dev/null were held for nothing."""
    monkeypatch.setattr(evaluate, "hold_benchmark", None)
    make(tmp_path / "r")
    flags = ["--policy", tiny_dir, *SHORT, "--limit", 1, "--out", tmp_path / "r"]
    assert "holds no results" in refuse(capfd, *flags, main=evaluate.main)
