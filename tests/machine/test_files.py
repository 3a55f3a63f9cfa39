"""Files of results: none is overwritten or shared."""

from support.files import lock

import importlib
import os

import pytest

from result_files import SHORT, measure, our_line, write
from runs import files


@pytest.mark.parametrize(
    "flags",
    [
        "evaluate --score F --json F",
        "evaluate --compare F G --json G",
        "replay F --json ./F",
        "strategies F --json F",
        "judge capabilities F --json F",
        "judge capabilities F --json new --picture new",
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
    assert measure(*flags) == 2
    assert "another process is at work there" in capsys.readouterr().err
    os.close(held)
    assert measure(*flags) == 0 == measure(*flags)
