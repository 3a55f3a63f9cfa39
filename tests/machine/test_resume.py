"""`--resume`: logs that lost their end, settings that may change when a run goes on, and runs that
are finished or still going."""

from support import rundir
from support.files import write_json
from support.settings import Settings, resolve_settings

import json
import re
import shutil

import pytest

import rlver
from policy import split_batch
from runs import alike, cut_at, files, go, go_on, metrics, numbers, refuse, rows

pytestmark = pytest.mark.usefixtures("moods")


@pytest.mark.slow
def test_the_first_ratio_is_checked_at_the_start_and_where_a_run_goes_on(
    tiny_dir, tmp_path, monkeypatch
):
    """In between, the first mini-batch gets no pass of its own for log pi_old."""
    seen, update = [], rlver.grpo_update
    monkeypatch.setattr(
        rlver,
        "grpo_update",
        lambda models, *rest: seen.append(models.fresh) or update(models, *rest),
    )
    assert go(tiny_dir, tmp_path / "out", "--steps", 2) == 0
    assert go_on(tmp_path / "out", "--steps", 3) == 0
    assert seen == [True, False, True]


def test_a_line_cut_within_a_letter_is_only_a_cut_line(whole, tmp_path):
    """A power cut knows bytes, not letters: half a Chinese character at the end of the log must not
    make the run unresumable."""
    out = shutil.copytree(whole("grpo"), tmp_path / "out")
    for name in ("metrics.jsonl", "dialogues.jsonl"):
        with open(out / name, "ab") as file:
            file.write('{"step": 5, "user": "好'.encode()[:-1])
    (out / "summary.json").unlink()  # the power went before the end
    assert go_on(out) == 0
    alike(out, whole("grpo"))


def test_a_log_that_lost_its_end_is_not_filled_up(tmp_path):
    """A checkpoint may reach the disk before the log does. To cut a file to more than its length
    writes a hole into it that no JSON reader passes."""
    run = rundir.RunDir(tmp_path / "out", resolve_settings({}))
    state = run.begin(None, [])
    run.append("metrics.jsonl", {"step": 1})
    checkpoint = tmp_path / "out" / "checkpoint-000001"
    for known, left in ((99, 12), (6, 6)):
        write_json(checkpoint / "state.json", {**state, "log_bytes": {"metrics.jsonl": known}})
        run.begin(checkpoint, [])
        assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == b'{"step": 1}\n'[:left]
    run.close()


@pytest.mark.slow
def test_what_changes_no_result_may_change_when_a_run_goes_on(
    whole, half, tmp_path, monkeypatch, capfd
):
    """A run that ran out of memory must be able to go on.
    The new values are in force and are remembered; what is learned is the same to rounding. Beside
    them what does change the result is refused as ever."""
    out, seen = shutil.copytree(half, tmp_path / "out"), []
    flags = "--tokens-per-gpu 40 --save-every 1".split()
    before = files(out)
    assert "--lr cannot change" in refuse(capfd, "--resume", out, *flags, "--lr", 1)
    assert files(out) == before

    def split(*args, max_tokens, **more):
        seen.append(max_tokens)
        return split_batch(*args, max_tokens=max_tokens, **more)

    monkeypatch.setattr(rlver, "split_batch", split)
    assert go_on(out, "--steps", 4, *flags) == 0
    assert seen == [40] * 2
    assert [p.name[-1] for p in rundir.checkpoints(out)] == ["3", "4"]
    config = json.loads((out / "config.json").read_text())
    assert (config["tokens_per_gpu"], config["save_every"], config["steps"]) == (40, 1, 4)
    assert rows(out / "dialogues.jsonl") == rows(whole("grpo") / "dialogues.jsonl")
    for row, usual in zip(metrics(out), metrics(whole("grpo")), strict=True):
        assert numbers(row) == pytest.approx(numbers(usual), rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_raised_steps_are_remembered(whole, half, tmp_path, monkeypatch, capfd):
    """Raised to 4, interrupted in step 3: the command that is printed must lead to step 4, not to
    an early end at 3."""
    out = shutil.copytree(half, tmp_path / "out")
    with monkeypatch.context() as patch:
        cut_at(3, patch)
        assert go_on(out, "--steps", 4) == 130
    [command] = re.findall(r"python rlver.py (--resume .*)\n", capfd.readouterr().err)
    assert rlver.main(command.split()) == 0
    assert metrics(out) == metrics(whole("grpo"))


@pytest.mark.slow
def test_two_processes_never_work_in_one_run(half, tmp_path, capfd):
    """Resuming a run that is still going, or whose ranks outlived a kill, would have two writers
    undo each other's files."""
    out = shutil.copytree(half, tmp_path / "out")
    settings = Settings(**json.loads((out / "config.json").read_text()))
    running = rundir.RunDir(out, settings)
    running.enter(list)
    before = files(out)
    assert go_on(out, "--steps", 3) == 2
    assert "another process is at work there" in capfd.readouterr().err
    assert files(out) == before
    running.close()
    assert go_on(out, "--steps", 3) == 0
