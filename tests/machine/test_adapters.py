"""Runs with --lora-rank: what a checkpoint holds, who can read it, how such a run goes on. (On two
ranks: test_ranks.py and test_rank_runs.py.) As in runs.py the checksum of a reply decides how it
feels, so that there is something to learn from."""

from support.errors import BadInput

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from engine import VllmEngine
from runs import alike, cut_at, go, go_on, metrics

pytestmark = pytest.mark.usefixtures("moods")

LORA = ["--lora-rank", 4, "--lr", 0.02, "--critic-lr", 0.02]
PPO = ["--algo", "ppo", "--kl-coef", 0.05]


@pytest.fixture(scope="module")
def whole(tiny_dir, tmp_path_factory):
    """An uninterrupted run of PPO with a KL: all three parts on one base."""
    out = tmp_path_factory.mktemp("lora") / "ppo"
    assert go(tiny_dir, out, *LORA, *PPO) == 0
    return out


IDS = torch.arange(3, 60)[None]


def test_a_checkpoint_is_a_plain_model_and_peft_finds_its_adapter(whole, tiny_dir):
    """Whoever reads the checkpoint sees the trained policy: transformers, which knows nothing of
    the adapter in a folder of its own, and the base with that folder by the package peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    place = whole / "checkpoint-000004"
    plain = AutoModelForCausalLM.from_pretrained(place)
    names, wanted = (list(load_file(p / "model.safetensors")) for p in (place, tiny_dir))
    assert names == wanted
    base = AutoModelForCausalLM.from_pretrained(tiny_dir)
    with torch.no_grad():
        merged, start = plain(IDS).logits, base(IDS).logits
        found = PeftModel.from_pretrained(base, place / "adapter")(IDS).logits
    assert (merged - start).abs().max() > 1e-2
    torch.testing.assert_close(found, merged, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "flags, in_evaluations, in_steps",
    [
        ("--lora-rank 4", True, False),
        ("--kl-coef 0.05", True, True),
    ],
)
def test_how_surprising_the_replies_are_to_the_start(
    flags, in_evaluations, in_steps, tiny_dir, tmp_path
):
    """ref_perplexity: with adapters the starting policy is in memory, so every evaluation asks it.
    A training step does so only where the KL has asked it anyway. (The formula:
    textbook/test_perplexity.py.)"""
    out = tmp_path / "out"
    assert go(tiny_dir, out, *flags.split(), "--steps", 2) == 0
    evaluations = json.loads((out / "summary.json").read_text())["evaluations"]
    for rows, is_there in ((evaluations, in_evaluations), (metrics(out), in_steps)):
        assert [row["ref_perplexity"] is not None for row in rows] == [is_there] * 2


@pytest.mark.slow
def test_a_checkpoint_starts_another_run_with_adapters_of_another_rank(whole, tmp_path):
    """It is a model like any other; its own adapters are merged and done with."""
    assert go(whole / "checkpoint-000004", tmp_path / "out", "--lora-rank", 2, "--steps", 1) == 0


@pytest.mark.slow
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(whole, tiny_dir, tmp_path, monkeypatch):
    """Adapters, the critic's and its head, the moments of both optimizers; the base comes from
    --model, the engine's merged weights are made again."""
    with monkeypatch.context() as patch:
        cut_at(19, patch)
        assert go(tiny_dir, tmp_path / "out", *LORA, *PPO) == 130
    assert go_on(tmp_path / "out") == 0
    alike(tmp_path / "out", whole)


def test_an_engine_share_without_room_is_one_line(tiny_dir, monkeypatch):
    """The first of what vLLM says."""

    def refuse(**_):
        raise ValueError("No available memory\nand so on")

    vllm = SimpleNamespace(LLM=refuse, SamplingParams=None)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    with pytest.raises(BadInput, match="--engine-memory 0.1: vLLM: No available memory$"):
        VllmEngine(tiny_dir, 2, context=64, memory_share=0.1)
