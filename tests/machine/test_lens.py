"""A step made again: the same dialogues, the update's own numbers, and no file of the run changed."""

from models.loading import load_model
from support.files import lock
from support.settings import Settings

import os
import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from grpo import group_advantages
from policy import Policy, pack
from ppo import log_probs_of
from runs import files, go, metrics, output_of, refuse
from server import Loopback, toy_people
from tools import lens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("moods")]
SAME = "All replies and emotions are the same as in the run."


def look(capfd, out, *flags):
    """The page of a run, of which no other file may have changed."""

    def state():
        return {path: path.stat().st_mtime_ns for path in out.iterdir()}, files(out)

    before = state()
    printed = output_of(capfd, 0, lens.main, out, *flags)
    html = (out / "lens.html").read_text("utf-8")
    (out / "lens.html").unlink()
    assert before == state() and (SAME in printed) == (SAME in html)
    return html


@pytest.mark.parametrize(
    "flags",
    ["--algo grpo --think", "--algo grpo --reward delta", "--algo ppo", "--algo ppo --lora-rank 4"],
)
def test_the_numbers_are_the_updates(flags, tiny_dir, tmp_path, capfd, monkeypatch):
    """What the page says of log pi after the step is what the next checkpoint's weights say, in which
    nothing of the page had a hand. And a reply may hold whatever a page is made of."""
    out = tmp_path / "out"
    assert go(tiny_dir, out, *flags.split(), "--steps", 2, "--save-every", 1) == 0
    calls, write_page = [], lens.write_page
    monkeypatch.setattr(lens, "write_page", lambda *args: calls.append(args) or write_page(*args))
    html = look(capfd, out)
    [(step, group, *_)] = calls
    row = metrics(out)[1]
    n_clipped, total = round(row["clipfrac"] * row["tokens_trained"]), row["tokens_trained"]
    assert f"{n_clipped} of the {total} words" in html and SAME in html
    said = re.findall(r"log pi -?\d+\.\d+, after the step (-?\d+\.\d+)", html)
    policy, right = Policy(load_model(out / "checkpoint-000002")[0]), []
    for episode, _ in group:
        batch = pack([episode])
        [log_probs] = log_probs_of(policy, [batch])
        right += log_probs[batch.action_mask].tolist()
    assert [float(text) for text in said] == pytest.approx(right, abs=1e-3)
    assert min(right) < -0.1
    step.models.chat.decode = lambda ids: "</style>&\u202e"
    html = write_page(*calls[0]).read_text("utf-8")
    assert html.count("</style>") == 1 and "&lt;/style&gt;&amp;\u202e" in html


@pytest.mark.parametrize(
    "rewards, kind, told",
    [
        (
            [0.3, 0.3, 0.3],
            "grpo",
            "+0.000: all rewards are equal: no dialogue is better, nothing is",
        ),
        ([0.3, 0.3], "rloo", "+0.000: all rewards are equal"),
        ([0.3, 0.3], "dr-grpo", "+0.000: all rewards are equal"),
        ([0.3], "grpo", "+0.000: the group has no other dialogue"),
        ([0.3], "rloo", "+0.300: the group has no other dialogue"),
        ([0.3, 0.5], "grpo", "(0.30 − 0.4000) / 0.1414 = -0.707"),
        ([0.3, 0.5], "rloo", "0.30 − 0.5000 (of the others) = -0.200"),
    ],
)
def test_how_an_advantage_came_about(rewards, kind, told):
    """A group of equal rewards was (0.30 - 0.3000) / 0.0000, and what is left of one in which
    dialogues were dropped, nan."""
    advantages = group_advantages(torch.tensor(rewards), torch.zeros(len(rewards)).long(), kind)
    group = [
        (SimpleNamespace(reward=reward), dict.fromkeys(("value", "reward", "advantage"), a[None]))
        for reward, a in zip(rewards, advantages)
    ]
    [line] = lens.explain(*group[0], group, Settings(algo="grpo", advantage=kind))
    assert line.startswith(told)


def test_a_run_between_two_checkpoints_and_one_that_is_running(half, tmp_path, capfd):
    out = shutil.copytree(half, tmp_path / "out")
    shutil.rmtree(out / "checkpoint-000000")
    with open(out / "dialogues.jsonl", "ab") as file:
        file.write(b'{"step": 3, "us')
    assert "does not have this step" in look(capfd, out)  # step 3, behind checkpoint 2
    assert SAME in look(capfd, out, "--step", 1)
    assert "these steps can be made: 1, 3" in refuse(capfd, out, "--step", 2, main=lens.main)
    assert "--group 9: the groups" in refuse(capfd, out, "--group", 9, main=lens.main)
    running = lock(out)
    assert "another process is at work" in refuse(capfd, out, main=lens.main)
    os.close(running)
    (out / "dialogues.jsonl").write_text("5\n")
    assert "no dialogue with a held-out user" in refuse(capfd, out, main=lens.main)


def test_a_server_is_asked_only_on_request_and_once(tiny_dir, tmp_path, capfd, quick):
    """The answers of the run are in its log, even if it ends in half a line."""
    out = tmp_path / "out"
    with Loopback() as server:
        user = ["--simulator", f"openai:scripted@{server.url}", *toy_people(tmp_path)]
        assert go(tiny_dir, out, *user, "--steps", 1) == 0
        with open(out / "calls.jsonl", "ab") as file:
            file.write(b'{"key": "')
        calls = server.calls
        html = look(capfd, out)
        assert SAME in html and "asked only with --ask" in html and server.calls == calls
        assert lens.main([str(out), "--ask"]) == 0 and server.calls > calls
        requests = server.requests
        assert lens.main([str(out), "--ask"]) == 0 and server.requests == requests
    assert "After this step: " in (out / "lens.html").read_text("utf-8")
