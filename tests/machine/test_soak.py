"""What three days of a run will meet, in minutes: kills at random moments, a server with every
fault. Run by `pytest -m soak`."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from answering import feeling, saying
from conftest import ROOT
from runs import metrics, numbers, rows
from server import Loopback, start, toy_people
from several_ranks import run

KILLS = int(os.environ.get("RLVER_KILLS", 2))
STEPS = 8 * KILLS
RUN = (
    f"--steps {STEPS} --batch-size 8 --group-size 4 --max-turns 3 --max-tokens 8 --lr 1e-3 "
    "--eval-size 4 --save-every 1"
).split()


def torchrun(*flags):
    """Two ranks. Their processes have groups of their own, so what is killed is torchrun; they must
    die with it."""
    command = [sys.executable, *"-m torch.distributed.run --standalone --nproc-per-node 2".split()]
    return subprocess.Popen(
        [*command, "rlver.py", *map(str, flags)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def children(pid):
    """The processes that `pid` has started, from /proc."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(path.parent.name))
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.soak
def test_kills_at_random_moments_lose_nothing_and_count_nothing_twice(tiny_dir, tmp_path):
    """kill -9 of both ranks, again and again: each resume continues, and the end is that of a run
    that was let alone, dialogue by dialogue. (RLVER_KILLS=20 for a longer night.)"""
    server, url = start("--latency", 0.02)
    try:
        policy = ["--model", tiny_dir, "--simulator", f"openai:scripted@{url}"]
        policy += [*RUN, *toy_people(tmp_path)]
        whole = torchrun(*policy, "--out", tmp_path / "whole")
        assert whole.wait(timeout=300) == 0, whole.stderr.read()
        rng, out, kills = random.Random(), tmp_path / "out", 0
        run = torchrun(*policy, "--out", out)

        def paid():
            return sum(path.stat().st_size for path in out.glob("calls*.jsonl"))

        while kills < KILLS:
            while not (out / "config.json").exists() and run.poll() is None:
                time.sleep(0.05)
            before = paid()
            # not while it only starts: it must have got somewhere since the last kill
            began = time.monotonic()
            while run.poll() is None and time.monotonic() - began < 60 and paid() <= before:
                time.sleep(0.02)
            time.sleep(rng.uniform(0, 1.5))
            if run.poll() is not None:
                break
            ranks = [Path(f"/proc/{pid}") for pid in children(run.pid)]
            run.kill()
            run.wait()
            deadline = time.monotonic() + 60
            while any(rank.exists() for rank in ranks):
                assert time.monotonic() < deadline, "ranks outlive torchrun"
                time.sleep(0.02)  # one that was still importing torch dies when it has
            kills += 1
            run = torchrun("--resume", out)
        assert run.wait(timeout=300) == 0, run.stderr.read()
    finally:
        server.kill()
    assert kills == KILLS
    assert rows(out / "dialogues.jsonl") == rows(tmp_path / "whole" / "dialogues.jsonl")
    assert [row["step"] for row in rows(out / "metrics.jsonl")] == list(range(1, STEPS + 1))
    keys = [row["key"] for path in out.glob("calls*.jsonl") for row in rows(path) if row]
    # and next to nothing was paid for twice: equal prompts of two dialogues
    assert len(keys) - len(set(keys)) <= 0.2 * len(keys)


@pytest.mark.soak
def test_a_run_over_a_server_with_every_fault(tmp_path):
    """30 % of calls 429, 5 % garbage, 2 % hang, half a minute without a server: no step is lost, and
    hardly a dialogue. Until one is, this is the run without faults; from then on they are two."""
    faults = ["--faults", json.dumps({"429": 0.30, "garbage": 0.05, "hang": 0.02})]
    without = run_over_server(tmp_path / "without")
    out = run_over_server(tmp_path / "with", *faults, "--outage", "[300, 30]")
    assert len(metrics(out)) == len(metrics(without)) == 2
    asked, usual = (len(rows(run / "calls.jsonl")) for run in (out, without))
    assert asked > usual > 300  # so there was garbage, and there was no server for a while
    dropped = rows(out / "dropped.jsonl") if (out / "dropped.jsonl").exists() else []
    assert len(dropped) < 0.03 * (2 + 2) * 32
    until = min([row["step"] for row in dropped], default=3)
    a, b = ([row for row in said(run) if row["step"] < until] for run in (out, without))
    assert a == b
    for x, y in zip(metrics(out)[: max(0, until - 1)], metrics(without)):
        assert numbers(x) == pytest.approx(numbers(y), rel=1e-4, abs=1e-4)


def said(out):
    """The dialogues of a run, but for the analyses: one that was asked for again has another code."""
    dialogues = rows(out / "dialogues.jsonl")
    for turn in (turn for row in dialogues for turn in row["turns"]):
        del turn["analysis"]
    return dialogues


def run_over_server(out, *server_flags):
    """The directory of two steps over a server."""
    process, url = start(*server_flags)
    command = [sys.executable, "rlver.py", "--algo", "grpo", "--think", "--steps", "2"]
    command += "--batch-size 32 --eval-size 32 --max-turns 3 --simulator-timeout 2".split()
    command += ["--out", str(out)]
    command += ["--simulator", f"openai:scripted@{url}", *toy_people(out.parent)]
    try:
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    finally:
        process.kill()
    return out


@pytest.mark.soak
def test_nano_takes_a_step_against_a_server():
    """Both algorithms: all questions of a turn are asked at once, an answer that cannot be read is
    asked for again. A request that fails ends the program."""

    def answer(prompt):
        return saying("Hm.") if "<emotion_level>" in prompt else feeling(len(prompt) % 21 - 10)

    for flags in (["--think"], ["--algo", "ppo"]):
        words = ["nano.py", *flags, "--steps", 1, "--user"]
        with Loopback(answer=answer, latency=0.1, faults={"garbage": 0.02}) as server:
            code, out, err = run(*words, f"scripted@{server.url}")
        assert code == 0 and out.count("8 held-out users: mean final emotion") == 2, err
        assert server.most > 16
    with Loopback(faults={"500": 1.0}) as server:
        code, _, err = run(*words, f"scripted@{server.url}")
    assert code == 1 and "InternalServerError" in err
