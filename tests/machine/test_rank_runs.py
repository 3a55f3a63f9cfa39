"""Whole runs on two ranks, and on two nodes: the same dialogues and numbers as on one, and a
checkpoint of either goes on under the other."""

import os
import re
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from runs import metrics, numbers, rows, suited
from several_ranks import ROOT, SMALL, alone, torchrun


def dialogues(out):
    return rows(out / "dialogues.jsonl")


def alike(a, b):
    """The same steps: the same dialogues word for word, the same numbers to rounding."""
    assert dialogues(a) == dialogues(b)
    assert len(metrics(a)) == len(metrics(b)) == 3
    for x, y in zip(metrics(a), metrics(b)):
        gaps = {key: y[key] for key in ("logp_gap", "logp_gap_max")}
        assert numbers({**x, **gaps}) == pytest.approx(numbers(y), abs=2e-4, rel=2e-3)


def run(ranks, tiny_dir, out, *flags):
    flags = suited(["--model", tiny_dir, *SMALL, "--out", out, *flags])
    return torchrun(ranks, "rlver.py", *flags) if ranks > 1 else alone(*flags)


@pytest.mark.soak
@pytest.mark.parametrize("algo, lora", [("grpo", 0), ("ppo", 0), ("ppo", 4)])
def test_a_run_on_two_ranks_and_its_checkpoints(algo, lora, tiny_dir, tmp_path):
    """Two ranks hold the dialogues of one; a checkpoint of either goes on under the other, moments
    of Adam, critic and adapters included."""
    more = ["--algo", algo, "--lora-rank", lora] + ["--kl-coef", 0.05] * (lora > 0)
    for ranks, name in ((1, "one"), (2, "two")):
        code, out, err = run(ranks, tiny_dir, tmp_path / name, *more)
        assert code == 0, err
        assert out.count("held-out users") == 1 and ("on 2 ranks" in out) == (ranks == 2)
    alike(tmp_path / "one", tmp_path / "two")

    def trained(out):  # it was evaluated once more at its first end
        return [d for d in dialogues(out) if d["split"] == "train"]

    for ranks, start in ((2, "one"), (1, "two")):
        there = tmp_path / f"{start}-on-{ranks}"
        code, out, err = run(3 - ranks, tiny_dir, there, *more, "--steps", 1)
        assert code == 0, err
        resume = ["--resume", there, "--steps", 3]
        code, out, err = torchrun(2, "rlver.py", *resume) if ranks == 2 else alone(*resume)
        assert code == 0, err
        assert trained(there) == trained(tmp_path / "one")
        for resumed, whole in zip(metrics(there), metrics(tmp_path / "one"), strict=True):
            assert resumed["emotion"] == whole["emotion"]
            assert resumed["grad_norm"] == pytest.approx(whole["grad_norm"], rel=2e-3)


def two_nodes(places, *flags):
    """One rank on each of two "nodes": two agents of torchrun that meet on loopback, each started
    in a directory of its own. Returns [(exit code, stderr)] of both."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = "-m torch.distributed.run --nnodes 2 --nproc-per-node 1 --master-addr 127.0.0.1"
    command = [sys.executable, *command.split(), "--master-port", str(port), "--node-rank"]
    nodes = [
        subprocess.Popen(
            [*command, str(n), ROOT / "rlver.py", *map(str, flags)],
            cwd=place,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for n, place in enumerate(places)
    ]
    try:
        with ThreadPoolExecutor(2) as pool:
            said = list(pool.map(lambda node: node.communicate(timeout=240)[1], nodes))
    finally:
        for node in nodes:
            node.kill()
    return [(node.returncode, text) for node, text in zip(nodes, said)]


@pytest.mark.soak
def test_two_nodes_need_no_shared_files_to_train_and_say_what_they_need_to_go_on(
    tiny_dir, tmp_path
):
    """`--out run` is another directory on each of them. The first writes everything; the second
    must not wait for a file that it will never see, such as the dialogues of the starting policy.
    A run that goes on needs its checkpoint on both, which is said once, in one line, and nobody
    waits for hours; with a copy of it the run goes on."""
    places = [tmp_path / "first", tmp_path / "second"]
    for place in places:
        place.mkdir()
    flags = ["--model", tiny_dir, *SMALL, "--out", "run", "--steps", 1, "--algo", "ppo"]
    nodes = two_nodes(places, *suited(flags))
    assert [code for code, _ in nodes] == [0, 0], nodes
    assert len(metrics(places[0] / "run")) == 1
    assert not list(places[1].rglob("*.json*")) and not list(places[1].rglob("checkpoint-*"))

    nodes = two_nodes(places, "--resume", "run", "--steps", 2)
    assert all(code not in (0, None) for code, _ in nodes), nodes
    told = re.findall("^rlver.py.*: .*", nodes[0][1] + nodes[1][1], re.M)
    assert len(told) == 1 and "the newest checkpoint is not on every node" in told[0], nodes
    assert not re.search(r'File ".*rlver\.py"', nodes[0][1] + nodes[1][1])  # and no traceback
    assert len(metrics(places[0] / "run")) == 1

    checkpoints = [place / "run" / "checkpoint-000001" for place in places]
    shutil.copytree(*checkpoints)
    nodes = two_nodes(places, "--resume", "run", "--steps", 2)
    assert [code for code, _ in nodes] == [0, 0], nodes
    assert [row["step"] for row in metrics(places[0] / "run")] == [1, 2]
