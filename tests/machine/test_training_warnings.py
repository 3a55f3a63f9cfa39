"""The warnings that a run gives while it trains (support/metrics.py): each mistake that others have
made is made here once, in a small real run, and the run must say so; healthy runs must be silent.

The course has a lab for three of them: shared-seed, still-adapter and user-words."""

from support.metrics import WARNINGS, warnings_of

import dataclasses
import json

import pytest

import lora
import models
import ppo
import rlver
from benchmarks import tables
from policy import Agent
from runs import go

pytestmark = pytest.mark.usefixtures("moods")

COPIES, STILL, ZERO, FOREIGN, UNREADABLE = (sentence for _, _, sentence in WARNINGS)
ADAPTERS = ["--lora-rank", 4]


def found_in(out):
    """The warnings of a finished run."""
    return json.loads((out / "summary.json").read_text())["warnings"]


def warned_of(rows):
    return list(warnings_of(rows).values())


# ----------------------------------------------------------------------------------- the mistakes


def test_one_seed_for_all_dialogues(tiny_dir, tmp_path, monkeypatch, capfd):
    """pytorch/torchtitan#3474: every dialogue of a group draws the same replies, no dialogue is
    better than another, and nothing is learned. It is said at the third step, and once."""
    monkeypatch.setattr(rlver, "Agent", lambda *args, **more: Agent(*args, **{**more, "seed": 0}))
    assert go(tiny_dir, tmp_path / "out") == 0
    assert found_in(tmp_path / "out") == [COPIES]
    said = capfd.readouterr().out
    assert f"warning, step 3: {COPIES}" in said and said.count("warning, step") == 1
    assert f"warning: {COPIES}\n" in said


def test_an_optimizer_that_holds_other_weights(tiny_dir, tmp_path, monkeypatch):
    """huggingface/trl#6700: the gradient looks alive, and the adapters stay as they were."""
    adamw = models.adamw
    monkeypatch.setattr(models, "adamw", lambda module, lr: adamw(frozen_part(module.model), lr))
    assert go(tiny_dir, tmp_path / "out", *ADAPTERS) == 0
    assert found_in(tmp_path / "out") == [STILL]


def frozen_part(model):
    """The embeddings of a model: with adapters they are not trained."""
    return model.get_input_embeddings()


def test_adapters_that_both_begin_at_zero(tiny_dir, tmp_path, monkeypatch):
    """The gradient of A is a product with B, and that of B one with A."""
    add_adapters = lora.add_adapters

    def add_zeros(model, *args):
        switch = add_adapters(model, *args)
        for name, p in model.named_parameters():
            if ".lora_A." in name:
                p.data.zero_()
        return switch

    monkeypatch.setattr(lora, "add_adapters", add_zeros)
    assert go(tiny_dir, tmp_path / "out", *ADAPTERS) == 0
    assert found_in(tmp_path / "out") == [ZERO]


def test_the_users_words_in_the_loss(tiny_dir, tmp_path, monkeypatch):
    """huggingface/trl#4975: all that follows the first prompt is trained. The comparison with the
    engine, which has no log-probs of these tokens, would stop the run; it is left out."""
    split_batch = rlver.split_batch

    def without_mask(*args, **settings):
        return [
            [with_the_users_words(batch) for batch in micros]
            for micros in split_batch(*args, **settings)
        ]

    monkeypatch.setattr(rlver, "split_batch", without_mask)
    monkeypatch.setattr(ppo, "logp_gap", lambda *_: {"logp_gap": 0.0, "logp_gap_max": 0.0})
    assert go(tiny_dir, tmp_path / "out") == 0
    assert found_in(tmp_path / "out") == [FOREIGN]


def with_the_users_words(batch):
    """A batch in which every token behind the first sampled one counts as sampled."""
    turn = batch.turn.cummax(1).values * (batch.branch >= 0)
    return dataclasses.replace(batch, turn=turn, action_mask=turn > 0)


# ------------------------------------------------------------------------------------ healthy runs


@pytest.mark.parametrize(
    "flags",
    [
        "--algo grpo",
        "--algo grpo --think",
        "--algo ppo",
        "--algo ppo --think",
        "--algo grpo --lora-rank 4",
        "--algo ppo --lora-rank 4",
    ],
)
def test_a_healthy_run_is_silent(flags, tiny_dir, tmp_path, capfd):
    assert go(tiny_dir, tmp_path / "out", *flags.split()) == 0
    assert found_in(tmp_path / "out") == [] and "warning" not in capfd.readouterr().out


def test_the_measured_runs_are_silent():
    """Every training in benchmarks/runs.jsonl, as far as metrics are kept there: those of the one
    fault whose bounds are set by hand."""
    seen = 0
    for line in tables.Results(tables.ROOT / "benchmarks" / "runs.jsonl").read().values():
        rows = rows_of(line.get("metrics", {}))  # some lines are of no training
        assert warned_of(rows) == [], line["name"]
        seen += len(rows) > 20
    assert seen > 40


def rows_of(columns):
    """The lines of metrics.jsonl: {metric: [a number for each step]} -> a dict for each step."""
    return [dict(zip(columns, numbers)) for numbers in zip(*columns.values())]


# -------------------------------------------------------------------------------- the fine print

STEP = dict(
    flat_groups=0.0,
    repeat_across=0.3,
    kl_start=0.01,
    grad_norm=0.1,
    emotion_std=15.0,
    tokens_trained=500,
    tokens_sampled=500,
)


@pytest.mark.parametrize(
    "changed, steps, warning",
    [
        (dict(flat_groups=0.9, repeat_across=0.95), 3, COPIES),
        (dict(flat_groups=0.9, repeat_across=0.95), 2, None),  # may be chance
        (dict(flat_groups=1.0, repeat_across=0.5), 9, None),  # earn the same by other words
        (dict(flat_groups=None, repeat_across=1.0), 9, None),  # PPO has no groups
        (dict(kl_start=0.0), 3, STILL),
        (dict(kl_start=0.0), 2, None),  # in bf16 the first, smallest steps may be rounded away
        (dict(grad_norm=0.0), 1, ZERO),
        (dict(grad_norm=0.0, flat_groups=None), 1, ZERO),
        (dict(grad_norm=0.0, flat_groups=1.0), 9, None),  # no dialogue was better than another
        (dict(grad_norm=0.0, flat_groups=None, emotion_std=0.0), 9, None),
        (dict(tokens_trained=501), 1, FOREIGN),
    ],
)
def test_in_how_many_steps_a_fault_must_be(changed, steps, warning):
    rows = [{"step": i, **STEP} for i in range(1, 12)]
    for row in rows[1 : 1 + steps]:
        row.update(changed)
    assert warned_of(rows) == ([] if warning is None else [warning])


@pytest.mark.parametrize("unreadable, warned", [(1, False), (2, True)])
def test_unreadable_answers_are_warned_of_above_one_in_a_hundred(unreadable, warned):
    """A policy that learns to bring them about has its dialogues dropped, and loses no reward."""
    rows = [{"step": i, **STEP, "episodes": 50, "dropped": 0, "unreadable": 0} for i in (1, 2)]
    rows[1].update(episodes=50 - unreadable, dropped=unreadable, unreadable=unreadable)
    assert warned_of(rows) == [UNREADABLE] * warned
