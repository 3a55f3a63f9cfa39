"""CUDA, as far as it can be known: first without a GPU (`-m fake_cuda`, part of every run), on a
device that refuses what CUDA refuses (elsewhere.py); then with one (`pytest -m gpu`, skipped by
name where there is none)."""

from models import build
from models.build import make_masters
from models.checkpoint import load_optimizer_state
from models.engine import TorchEngine
from models.loading import load_model
from models.lora import AdapterView, SharedBase
from models.vllm_engine import VllmEngine
from players import local
from support import report, settings
from support.errors import BadInput, BadModel
from support.settings import Settings, resolve_settings

import asyncio
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import rlver
from elsewhere import DEVICE, elsewhere, load
from policy import (
    Critic,
    Policy,
    pack,
    recompute_activations,
    split_batch,
)
from ppo import ppo_update
from runs import go_on, rows, words
from several_ranks import SMALL, alone, make_episodes
from tabular import cfg_of, models_of

fake_cuda = pytest.mark.fake_cuda


@pytest.fixture
def device():
    with elsewhere() as place:
        yield place


def cast(module, device, dtype=torch.bfloat16):
    """Parameters in bf16, as FSDP2 gathers them on a GPU, buffers as they are; on the device."""
    for p in module.parameters():
        p.data = p.data.to(dtype)
    return module.to(device)


@fake_cuda
def test_the_device_refuses_what_cuda_refuses(device):
    """And computes what the CPU computes: else all below would prove nothing. (An index that was
    left behind CUDA would fetch, at every step; here it is refused.)"""
    a, b = torch.arange(6.0).reshape(2, 3), torch.ones(3, 2)
    there = a.to(device)
    assert torch.equal((there @ b.to(device)).cpu(), a @ b)
    for wrong in (lambda: there @ b, lambda: there[torch.tensor([0, 1])]):
        with pytest.raises(AssertionError, match="on the CPU"):
            wrong()
    with pytest.raises(RuntimeError, match="dtype"):
        there.bfloat16() @ b.to(device)


@fake_cuda
@pytest.mark.parametrize("kind", ["policy", "critic", "adapters"])
def test_log_probs_entropy_and_values_with_their_gradients(kind, tiny_dir, device):
    """In bf16, in several chunks of logits and with activations made again; what leaves is fp32,
    and what a CPU finds in bf16, gradient for gradient, but for another attention's rounding.
    Adapters, and their gradients, are fp32 on a base in bf16."""
    found = []
    for place in ("cpu", device):
        model, how = cast(load(tiny_dir)[0], place), {}
        module = Policy(model, max_logits=2**12)
        if kind == "critic":
            module = cast(Critic(model), place)
            torch.nn.init.ones_(module.head.weight)
        elif kind == "adapters":
            root = SharedBase(module, 4, critic=False)
            module, how = AdapterView(root, "policy"), {"context_fn": root.checkpoint_contexts}
        recompute_activations(model, **how)
        out = module(pack(make_episodes()).to(place))
        out = out if kind == "critic" else torch.stack(out)
        assert out.dtype == torch.float32
        out.sum().backward()
        grads = [p.grad.cpu() for p in module.parameters() if p.grad is not None]
        dtype = torch.float32 if kind == "adapters" else torch.bfloat16
        assert {grad.dtype for grad in grads} == {dtype}
        found.append([out.detach().cpu(), *grads])
    assert len(found[0]) == len(found[1]) > 10
    for one, two in zip(*found):
        assert (one - two).norm() <= 0.05 * one.norm()


@fake_cuda
@pytest.mark.slow
def test_an_update_of_adapters(tiny_dir, device):
    """The base frozen in bf16, adapters and their gradients in fp32, policy, critic and reference
    on one base, activations made again."""
    root = SharedBase(Policy(cast(load(tiny_dir)[0], "cpu")), 4, critic=True).to(device)
    cast(root.critic.head, device)  # FSDP2 casts what it gathers; here nobody does
    parts = [AdapterView(root, who) for who in ("policy", "critic", "reference")]
    before = {name: p.cpu().clone() for name, p in root.named_parameters()}
    recompute_activations(root.policy.model, context_fn=root.checkpoint_contexts)
    handed = models_of(
        parts[0],
        build.adamw(parts[0], 1e-2),
        parts[1],
        build.adamw(parts[1], 1e-2),
        reference=parts[2],
        ratio_limit=0.2,
    )
    minibatches = split_batch(make_episodes(), 6, 2, 60, 0, device)
    metrics = ppo_update(handed, minibatches, cfg_of(entropy_coef=0.01, kl_coef=0.1))
    assert all(np.isfinite(value) for value in metrics.values())
    for name, p in root.named_parameters():
        want = torch.float32 if "lora_" in name else torch.bfloat16
        assert p.dtype == want and p.device == device, name
        moves = "lora_B" in name or "critic.head" in name  # A has no gradient as long as B is 0
        assert torch.equal(before[name], p.cpu()) != moves or "lora_A" in name, name


@fake_cuda
def test_a_resumed_optimizer_is_where_its_parameters_are(tiny_dir, device):
    """All of it: on a GPU AdamW is fused, and counts its steps there."""
    module = cast(load(tiny_dir)[0], device, torch.float32)
    optimizer = build.adamw(module, 1e-3)
    state = {name: torch.zeros_like(p, device="cpu") for name, p in module.named_parameters()}
    state = {name: {"step": torch.tensor(3.0), "exp_avg": zero} for name, zero in state.items()}
    load_optimizer_state(module, optimizer, state)
    for p in module.parameters():
        assert {value.device for value in optimizer.state[p].values()} == {p.device}


@fake_cuda
@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--algo ppo --think --kl-coef 0.1 --lora-rank 4",  # three on one base
        "--algo grpo --reward delta --kl-coef 0.1",
    ],
)
def test_a_run_and_its_checkpoint(flags, tiny_dir, tmp_path, monkeypatch, capsys):
    """All else that a run does with tensors: the distance from the start, checkpoints, `--resume`.
    (FSDP2 moves models to the GPU; here the test does.) It is in fp32, as on an old GPU, and its
    head says so."""

    def masters(module, *_):
        make_masters(module)
        module.to(DEVICE)

    monkeypatch.setattr(rlver.ranks, "join_ranks", lambda cuda: None)
    monkeypatch.setattr(build, "make_masters", masters)
    monkeypatch.setattr(build, "load_model", load)
    monkeypatch.setattr(build, "best_device", lambda: torch.device(DEVICE))
    monkeypatch.setattr(report, "old_gpu", lambda: "Tesla T4")
    monkeypatch.setitem(build.LIMITS, torch.float32, ((1e-3, 1e-2), 1e-3))
    out = tmp_path / "run"
    first = ["--model", tiny_dir, *SMALL, *flags.split(), "--steps", 1, "--out", out]
    with elsewhere():
        assert rlver.main(words(*first)) == 0
        assert go_on(out, "--steps", 2) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("Engine: torch, in fp32 (no bf16 on Tesla T4).") == 2
    assert len(rows(out / "metrics.jsonl")) == 2
    load_model(out / "checkpoint-000002")


@fake_cuda
@pytest.mark.parametrize("old", [True, False])
def test_a_gpu_before_ampere_computes_in_fp32(old, monkeypatch):
    """A T4, Colab's: torch says that it has bf16, and emulates it, slower than fp32; vLLM refuses.
    Trainer, engine and reader ask the same function, and nobody asks a newer GPU twice."""
    for name, value in {
        "is_available": lambda: True,
        "current_device": lambda: 0,
        "is_bf16_supported": lambda including_emulation=True: including_emulation or not old,
        "get_device_name": lambda: "Tesla T4",
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)  # no matter here
    monkeypatch.setattr(settings, "vllm_is_there", lambda: True)
    asked = []

    def load(*args, **more):
        asked.append([*args, *more.values()][-1])
        raise BadModel("enough")

    for place in (build, local):
        monkeypatch.setattr(place, "load_model", load)
    cfg = Settings(model="x/y", lora_rank=4)
    for use in (
        lambda: build.Models(cfg, None, None, None, None, None),
        lambda: local.load_engine("x/y", 1.0, "policy "),
        lambda: local.LocalReader("x/y", ["yes"]),
    ):
        with pytest.raises(BadModel, match="enough"):
            use()
    assert asked == [torch.float32 if old else torch.bfloat16] * 3
    assert resolve_settings({}).engine == "torch"
    assert resolve_settings({"model": "x/y"}).engine == ("torch" if old else "vllm")
    named = {"model": "x/y", "engine": "vllm"}
    if old:
        with pytest.raises(BadInput, match="--engine vllm: .*Tesla T4; take --engine torch"):
            resolve_settings(named)
    else:
        assert resolve_settings(named).engine == "vllm"


# --------------------------------------------------------------------------------------- with a GPU


def gpu(test):
    """Marked, and skipped where there is none."""
    there = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
    return pytest.mark.gpu(there(test))


@gpu
def test_log_probs_and_gradients_of_the_gpu_are_those_of_the_cpu(tiny_dir):
    """In bf16 against fp32, with rows of a length that is padded up to 128; and the same kernel on
    the same tokens gives the same bits, with a gradient or without, so the first ratio is 1."""
    batch, found = pack(make_episodes(), multiple=128), []
    for place in ("cpu", "cuda"):
        policy, there = Policy(load_model(tiny_dir)[0]), batch.to(place)
        if place == "cuda":
            cast(policy.model, place)
        log_probs = policy(there)[0]
        log_probs.sum().backward()
        with torch.no_grad():
            assert torch.equal(log_probs, policy(there)[0])
        grads = torch.cat([p.grad.float().flatten().cpu() for p in policy.parameters()])
        found.append((log_probs[there.action_mask].detach().cpu(), grads))
    (right, right_grads), (log_probs, grads) = found
    assert batch.ids.shape[1] % 128 == 0 and (log_probs - right).abs().mean() < 0.05
    assert (grads - right_grads).norm() <= 0.1 * right_grads.norm()


@gpu
@pytest.mark.parametrize("flags", ["--algo ppo --think --kl-coef 0.1", "--algo grpo --lora-rank 4"])
def test_a_run_on_the_gpu(flags, tiny_dir, tmp_path):
    """The self-checks hold in bf16: gap, first ratio, what is sampled after a sync; FSDP2 alone on
    NCCL, a checkpoint, and `--resume`."""
    out = tmp_path / "run"
    for more in (
        ["--model", tiny_dir, *SMALL, *flags.split(), "--steps", 2, "--out", out],
        ["--resume", out, "--steps", 3],
    ):
        code, _, err = alone(*more)
        assert code == 0, err
    assert len(rows(out / "metrics.jsonl")) == 3


@gpu
def test_an_engine_that_sleeps_gives_its_cache_back(tiny_dir):
    model = load_model(tiny_dir)[0]
    engine = TorchEngine(model, {2}, device=torch.device("cuda"), dtype=torch.bfloat16)
    asyncio.run(engine.generate([5, 6], 2, np.random.default_rng(0), key=0))  # what CUDA keeps
    engine.sleep()
    empty = torch.cuda.memory_allocated()
    asyncio.run(engine.generate(list(range(3, 40)), 4, np.random.default_rng(0), key=0))
    assert torch.cuda.memory_allocated() > empty
    engine.sleep()
    assert torch.cuda.memory_allocated() == empty


def test_vllm_takes_what_is_free(tiny_dir, monkeypatch):
    """evaluate.py asked for 0.9 of a GPU on which the user's model was already. Its refusal named a
    flag that evaluate.py lacks, without the reason, which stands in vLLM's second line."""

    def refuse(gpu_memory_utilization, **settings):
        assert settings["trust_remote_code"] is False
        raise ValueError(f"no room\nin {gpu_memory_utilization:.3g}")

    fake = SimpleNamespace(LLM=refuse, SamplingParams=None)
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60, 80))
    with pytest.raises(BadModel, match="evaluate.py 0.9 of what is free.*no room in 0.675"):
        VllmEngine(tiny_dir, {0}, context=512)
