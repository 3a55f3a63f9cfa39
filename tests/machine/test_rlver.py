"""Whole runs: what flags change of them, what their checkpoints are to others, and that the toy
learns. The arithmetic is tested in textbook/, the files of a run in test_rundir.py."""

from players import policies, users
from support.results import recorded_dialogues

import asyncio
import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from answering import feeling
from people import profiles_of_step, toy_profiles
from result_files import measure
from runs import go, metrics, rows, summary
from server import toy_people
from tools import replay
from tools.replay import final_score, replay_all


@pytest.mark.slow
@pytest.mark.parametrize(
    "algo, kinds",
    [
        ("grpo", ["--reward delta", *(f"--advantage {a}" for a in ("grpo", "dr-grpo", "rloo"))]),
        ("ppo", ["--reward terminal", "--reward delta"]),
    ],
)
def test_each_kind_of_reward_and_advantage_is_another_run(algo, kinds, moods, tiny_dir, tmp_path):
    """The flag reaches the update: the same dialogues in step 1, other weights after it."""
    steps = []
    for kind in kinds:
        flags = f"--algo {algo} --steps 1 --eval-size 1 {kind}".split()
        assert go(tiny_dir, tmp_path / kind, *flags) == 0
        steps += metrics(tmp_path / kind)
    assert len({row["emotion"] for row in steps}) == 1
    assert len({row["grad_norm"] for row in steps}) == len(kinds)


@pytest.mark.slow
def test_ppo_may_hold_several_dialogues_with_each_user(whole):
    """With groups of two, four dialogues are with two users, from one first line each. PPO compares
    no dialogues, so no group of its is flat."""
    lines = rows(whole("ppo") / "dialogues.jsonl")
    begun = [(d["profile_id"], d["first_line"]) for d in lines if d["split"] == "train"][:4]
    one, two = (user.id for user in profiles_of_step(toy_profiles("train"), 2, 0, 1))
    assert [user for user, _ in begun] == [one, one, two, two] and len(set(begun)) == 2
    assert metrics(whole("ppo"))[0]["zero_std_groups"] is None


@pytest.mark.slow
def test_a_checkpoint_of_adapters_is_a_plain_model_and_peft_finds_its_adapter(whole, tiny_dir):
    """Whoever reads the checkpoint sees the trained policy: transformers, which knows nothing of
    the adapter in a folder of its own, and the base with that folder by the package peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    out = whole("adapters")
    place = out / "checkpoint-000004"
    plain = AutoModelForCausalLM.from_pretrained(place)
    names, wanted = (list(load_file(p / "model.safetensors")) for p in (place, tiny_dir))
    assert names == wanted
    base = AutoModelForCausalLM.from_pretrained(tiny_dir)
    ids = torch.arange(3, 60)[None]
    with torch.no_grad():
        merged, start = plain(ids).logits, base(ids).logits
        found = PeftModel.from_pretrained(base, place / "adapter")(ids).logits
    assert (merged - start).abs().max() > 1e-2
    torch.testing.assert_close(found, merged, atol=1e-4, rtol=0)


@dataclasses.dataclass
class Cat:
    """A stranger's user."""

    profile: object
    emotion: int
    thoughts: tuple = ("Fish?",) * 10  # for evaluate.py, as an analysis in the form of f_emo

    async def feel(self, reply):
        self.emotion += 1
        return feeling(1), 1

    async def answer(self):
        return "Meow.", False

    async def open(self):
        return "Meow."

    def copy(self, name):
        return dataclasses.replace(self)


@pytest.mark.slow
def test_a_simulator_of_ones_own_needs_no_more_than_users(tiny_dir, tmp_path, monkeypatch):
    """It has no caller and no model, so there is nothing to check before the first dialogue."""
    cats = SimpleNamespace(user=lambda profile, start, name: Cat(profile, start))
    for module in (users, policies):
        monkeypatch.setattr(module, "make_simulator", lambda *_, **__: cats)
    out, flags = tmp_path / "run", ["--simulator", "openai:cat@http://h", *toy_people(tmp_path)]
    assert go(tiny_dir, out, "--steps", 1, "--eval-size", 1, *flags) == 0
    assert measure("--policy", out, "--limit", 1, "--out", tmp_path / "r.jsonl") == 0
    [said] = rows(tmp_path / "r.jsonl")
    assert said["history"][2]["content"] == "Meow." and "served" not in said["rlver"]


# The toy's own judge and its own policy, in processes beside the tests (conftest.py).


@pytest.mark.slow
def test_it_learns(learnt):
    """The point of it all: on users with other people, events, feelings and wordings the score
    rises by far more than its error. And the curve of it is drawn."""
    told = summary(learnt)
    assert told["after"]["score"] - told["before"]["score"] >= 30
    # some runs garble a thought in six for a few steps; such a dialogue has 0 points in the score
    assert told["after"]["malformed"] < 20 and told["after"]["n"] == 64
    assert (learnt / "learning_curve.png").exists() and (learnt / "report.html").exists()
    assert len(rows(learnt / "dialogues.jsonl")) == 2 * 64 + 12 * 64
    assert replay.main(["same-user", str(learnt / "dialogues.jsonl")]) == 0


@pytest.mark.slow
def test_a_weak_scorer_is_hacked(hacked):
    """The lesson of `--simulator toy-weak`: the reward climbs, and a strict user who hears the same
    replies does not agree."""
    known = {p.id: p for p in toy_profiles("train") + toy_profiles("heldout")}
    lines = [d for d in recorded_dialogues(hacked / "dialogues.jsonl") if d["split"] == "heldout"]
    heard = asyncio.run(replay_all(lines, users.make_simulator("toy"), known))
    weak, strict = {}, {}  # {step: final emotions}
    for row, felt in zip(lines, heard):
        weak.setdefault(row["step"], []).append(100 * row["reward"])
        strict.setdefault(row["step"], []).append(final_score(row, felt))
    assert np.mean(weak[16]) - np.mean(weak[0]) >= 30
    assert np.mean(strict[16]) - np.mean(strict[0]) <= 10
    lengths = [row["reply_tokens"] for row in metrics(hacked)]
    assert lengths[-1] > 1.5 * lengths[0]
