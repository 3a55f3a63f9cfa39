"""A step made again: the same dialogues, the update's own numbers, and no file of the run changed."""

from models.loading import load_model
from support.files import lock
from support.settings import Settings

import os
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from grpo import group_advantages
from policy import Policy, pack
from ppo import log_probs_of
from rollout import Episode, Segment, Turn
from runs import files, go, metrics, output_of, refuse
from server import Loopback, toy_people
from tools import lens

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("moods")]
EQUAL = "all rewards are equal: no dialogue is better, nothing is learned from this group"
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
    monkeypatch.setattr(
        lens, "write_page", lambda *a, **k: calls.append((a, k)) or write_page(*a, **k)
    )
    html = look(capfd, out)
    [((_, models, _, group), shown)] = calls
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
    models.chat.decode = lambda ids: "</style>&\u202e"
    group[0][1][0].text = "</style>&\u202e"
    html = write_page(*calls[0][0], **shown).read_text("utf-8")
    assert html.count("</style>") == 1 and "&lt;/style&gt;&amp;\u202e" in html


def page_of(out, moves, rewards=(0.3, 0.5), kind="grpo"):
    """The page of a group of invented dialogues: in each the words w0, w1, ... moved by `moves`."""
    advantages = group_advantages(torch.tensor(rewards), torch.zeros(len(rewards)).long(), kind)
    group, n = [], len(moves)
    for number, (reward, advantage) in enumerate(zip(rewards, advantages.tolist())):
        words = []
        for i, move in enumerate(moves):
            old = -0.01 if i == 5 else -3  # w5 is likely
            numbers = 1, reward, 0, advantage, old, old, old + move, 1, False, 0
            words.append(lens.Word(f" w{i}", f" w{i + 1}", *numbers))
        episode = Episode("", 0, "", number, [Turn("", "")], [Segment([0] * n, 1, [0] * n)])
        group.append((replace(episode, reward=reward), words))
    cfg = Settings(algo="grpo", advantage=kind, minibatches=1)
    models = SimpleNamespace(cfg=cfg, chat=None)
    profile = SimpleNamespace(id="", player="", task="", need="")
    around = {"people": [(profile, {})], "words": {}, "silence": "nobody"}
    shown = {"number": 1, "profiles": [profile], "around": around, "difference": ""}
    return lens.write_page(out, models, {0: group}, group, **shown).read_text("utf-8")


@pytest.mark.parametrize(
    "rewards, kind, told",
    [
        ([0.3, 0.3, 0.3], "grpo", EQUAL),
        ([0.3, 0.3], "rloo", EQUAL),
        ([0.3, 0.3], "dr-grpo", EQUAL),
        ([0.3], "grpo", "no other dialogue to compare this one with: nothing is learned"),
        ([0.3], "rloo", "no other dialogue to compare this one with."),
        ([0.3, 0.5], "grpo", "(0.30 − 0.4000) / 0.1414"),
        ([0.3, 0.5], "rloo", "0.30 − 0.5000 (of the others)"),
    ],
)
def test_how_an_advantage_came_about(rewards, kind, told, tmp_path):
    """A group of equal rewards was (0.30 - 0.3000) / 0.0000, and what is left of one in which
    dialogues were dropped, nan."""
    html = page_of(tmp_path, [0.1], rewards, kind)
    assert told in html and "nan" not in html and (EQUAL in html) == (told == EQUAL)


def test_the_shade_is_the_rank_of_the_move(tmp_path):
    """In a late step one word moved by 2.256 and the others by less than an eighth of that: all of
    them were white. A move of 0.000 is white, and equal moves have one shade."""
    moves = [2.256, -0.2, 0.1, 0.1, -0.15, -0.02, 0.002, 0.001, 0.0004, 0.0]
    html = page_of(tmp_path, moves)
    words = re.findall(r'<b tabindex="0"(?: class="(\w+)" style="--s: (.*?)")? title="', html)
    sides = "up down up up down down up up".split()
    shades = [4, 3, 2, 2, 2, 1, 1, 1]
    expected = [(side, str(n / 8)) for side, n in zip(sides, shades)] + 2 * [("", "")]
    assert words == 2 * expected  # all have the tab key
    assert ".policy :focus::after { content: attr(title);" in html
    for legend in ("&lt; 0.0005", "0.001–0.020", "0.100–0.150", "0.200–0.200", "2.256–2.256"):
        assert f"<td>{legend}</td>" in html
    text = " ".join(re.sub("<.*?>", "", html).split())
    up = "up most: w0 w1 0.050 to 0.475 (turn 1), w2 w3 0.050 to 0.055 (turn 1), w3"
    down = "down most: w5 w6 0.990 to 0.970 (turn 1), w1 w2 0.050 to 0.041 (turn 1), w4"
    assert text.count(up) == text.count(down) == 2  # by log pi w5 would be the last
    still = page_of(tmp_path, [0.0, 0.0])  # without a gradient nothing moves
    assert "moved 0 of them" in still and "most: none" in " ".join(still.split())


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
