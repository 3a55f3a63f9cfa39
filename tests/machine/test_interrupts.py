"""Runs that are interrupted or killed, at any moment: what goes on afterwards is the same run."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from conftest import ROOT
from runs import SMALL, alike, cut_at, go, go_on, suited

pytestmark = pytest.mark.usefixtures("moods")


@pytest.mark.slow
@pytest.mark.parametrize(
    "algo, line",
    [
        pytest.param("grpo", 3, id="grpo, in the first evaluation: no checkpoint yet"),
        pytest.param("grpo", 6, id="grpo, in step 1"),
        pytest.param(
            "grpo",
            19,
            id="grpo, in step 3, which stands in dialogues.jsonl but not in metrics.jsonl",
        ),
        pytest.param("grpo", 31, id="grpo, in the evaluation after"),
        pytest.param("ppo", 19, id="ppo, in step 3: critic and optimizers too"),
    ],
)
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(
    algo, line, whole, tiny_dir, tmp_path, monkeypatch, capfd
):
    """Runs are killed; what goes on must be the same run: weights, both optimizers with their
    moments, the critic, the luck, the users' order, and no line twice. Ctrl-C says how to go on."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        cut_at(line, patch)
        assert go(tiny_dir, out, "--algo", algo) == 130
    said = capfd.readouterr().err
    assert f"python rlver.py --resume {out}\n" in said and "Traceback" not in said
    assert not (out / "summary.json").exists()
    assert go_on(out) == 0
    alike(out, whole(algo))


MOODY = (
    "import sys, zlib; from toy import world; world.score_reply = lambda reply, *_: (zlib.crc32(reply.encode()) % 21 - "
    "10, 'I am in a mood'); import rlver; sys.exit(rlver.main(sys.argv[1:]))"
)


# (algorithm, the file that says that the moment has come, its lines by then, the signal). Each
# costs a process that imports torch.
KILLS = [
    ("ppo", "metrics.jsonl", 3, signal.SIGKILL),
    ("grpo", "metrics.jsonl", 1, signal.SIGINT),
    pytest.param("grpo", "config.json", 1, signal.SIGKILL, marks=pytest.mark.soak),
    pytest.param("ppo", "dialogues.jsonl", 10, signal.SIGKILL, marks=pytest.mark.soak),
]


@pytest.mark.slow
@pytest.mark.parametrize("algo, name, size, kind", KILLS)
def test_a_killed_run_goes_on(algo, name, size, kind, whole, tiny_dir, tmp_path):
    """SIGKILL, which no handler sees, at three moments of a process of its own; then half a line by
    hand in both logs, as after a power cut. And one SIGINT, as the terminal sends it, mostly while
    dialogues are held, deep inside asyncio: it must not be taken for a failure of the simulator."""
    # as many threads, the same sums
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(ROOT)}
    out = tmp_path / "killed"
    flags = suited(["--model", tiny_dir, *SMALL, "--algo", algo, "--out", out])
    process = subprocess.Popen(
        [sys.executable, "-c", MOODY, *flags],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )

    def lines():
        return (out / name).read_bytes().count(b"\n") if (out / name).exists() else 0

    while process.poll() is None and lines() < size:
        time.sleep(0.001)
    process.send_signal(kind)
    said = process.communicate()[1].decode()
    assert process.returncode == (130 if kind == signal.SIGINT else -kind), (
        f"the run was over too soon\n{said}"
    )
    if kind == signal.SIGINT:
        assert said.endswith(f"--resume {out}\n")  # the advice is the last thing on the screen
    for log in ("metrics.jsonl", "dialogues.jsonl"):
        if (out / log).exists():
            with open(out / log, "a") as file:
                file.write('{"step": 1, "rew')
    assert go_on(out) == 0
    alike(out, whole(algo))
