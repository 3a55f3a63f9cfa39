"""One node, many GPUs, seen on one machine without any: two gloo ranks under torchrun, FSDP2 for
real. What two ranks compute must be what one computes, to 1e-5; and whatever happens to one of
them, nobody waits for ever. (Whole runs: test_rank_runs.py.)

Ranks are processes, 5 s each to start: so a test starts two ranks once and asks them many things.
This file is also their script."""

import itertools
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from runs import numbers, suited
from several_ranks import SMALL, make_episodes, torchrun
from tabular import cfg_of, models_of


def update(tiny_dir, algo, dealt, ranks, rank, lora=0):
    """One update of policy and critic on this rank's part of the dialogues. lora: rank of their
    adapters, or 0. Returns (metrics, gradients of each step, weights), whole."""
    from support.loading import load_model
    from support.ranks import (
        all_gather_list,
        all_reduce_sum,
        full_tensor,
        iter_full_weights,
        make_masters,
    )

    import ppo
    from adapters import shared
    from grpo import grpo_update
    from lora import merge
    from policy import Critic, Policy, dummy_batch, micro_batches, recompute_activations

    model, _ = load_model(tiny_dir)
    torch.manual_seed(0)
    if lora:
        root, policy, critic, reference = shared(model, rank=lora)
        modules, model = [root], policy.model
        recompute_activations(model, context_fn=root.checkpoint_contexts)
    else:
        recompute_activations(model)
        policy, critic, reference = Policy(model), Critic(model), Policy(load_model(tiny_dir)[0])
        torch.nn.init.normal_(critic.head.weight)
        modules = [policy, critic]
    for module in modules if ranks else ():
        make_masters(module)
    cuts = [micro_batches([e for e in dealt(rank) if e.number % 2 == i], 60) for i in range(2)]
    most = [max(column) for column in zip(*all_gather_list([[len(cut) for cut in cuts]]))]
    cuts = [cut + [dummy_batch()] * (m - len(cut)) for cut, m in zip(cuts, most)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (policy, critic)]
    gradients, norm = [], ppo.clip_gradient

    def listening(module, limit):
        gradients.append(
            {name: full_tensor(p.grad).clone() for name, p in module.named_parameters()}
        )
        return norm(module, limit)

    ppo.clip_gradient = listening
    models = models_of(
        policy,
        optimizers[0],
        critic,
        optimizers[1],
        reference=reference,
        reduce=all_reduce_sum,
        world_size=max(1, ranks),
    )
    cfg = cfg_of(entropy_coef=0.01, kl_coef=0.1, kl_estimator="k2", lam=0.9)
    metrics = (grpo_update if algo == "grpo" else ppo.ppo_update)(models, cuts, cfg)
    ppo.clip_gradient = norm
    weights = {
        name: full_tensor(p.detach()).clone()
        for m in (policy, critic)
        for name, p in m.named_parameters()
    }
    if lora:  # what an engine would be given
        weights |= merge(iter_full_weights(model), model)
    return metrics, gradients, weights


DEALS = {
    "by turns": lambda episodes, ranks, rank: [e for e in episodes if e.group % ranks == rank],
    "all to the first": lambda episodes, ranks, rank: episodes if rank == 0 else [],
}


LORA = {"whole model": 0, "adapters": 4}


def refuse():
    """What the first rank does in a check, for all of them."""
    from support.errors import SimulatorRefused

    raise SimulatorRefused("401: wrong key")


def worker(tiny_dir, out):
    """What each rank does in the test below."""
    from support.errors import SimulatorRefused
    from support.ranks import all_gather_list, broadcast, join_ranks, rank

    join_ranks(cuda=False)
    result = {}
    try:
        broadcast(refuse)
    except SimulatorRefused as error:
        result["refused on ranks"] = all_gather_list([(rank(), error.on_all_ranks)])
    for algo, name, lora in itertools.product(("grpo", "ppo"), DEALS, LORA):
        dealt = [DEALS[name](make_episodes(), 2, r) for r in range(2)]
        result[algo, name, lora] = update(tiny_dir, algo, dealt.__getitem__, 2, rank(), LORA[lora])
    if rank() == 0:
        torch.save(result, out)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def two_ranks(tiny_dir, tmp_path_factory):
    out = tmp_path_factory.mktemp("ranks") / "result.pt"
    code, _, err = torchrun(2, __file__, "worker", tiny_dir, out)
    assert code == 0, err
    return torch.load(out, weights_only=True)


@pytest.mark.slow
@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("algo", ["grpo", "ppo"])
@pytest.mark.parametrize("lora", LORA)
def test_two_ranks_take_the_step_of_one(algo, deal, lora, two_ranks, tiny_dir):
    """Loss, gradients of both mini-batches, updated weights, metrics: the normaliser is that of the
    whole batch, gradients are summed and not averaged, whitening is global. And a rank without any
    dialogue takes part in every collective and adds nothing. With adapters all that is so for them,
    on one base, and for the merged weights that an engine would get."""
    metrics, gradients, weights = update(
        tiny_dir, algo, lambda rank: make_episodes(), 0, 0, LORA[lora]
    )
    metrics2, gradients2, weights2 = two_ranks[algo, deal, lora]
    assert len(gradients) == len(gradients2) == (2 if algo == "grpo" else 4)
    assert all(any(g.abs().max() > 1e-3 for g in step.values()) for step in gradients)
    torch.testing.assert_close(gradients2, gradients, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weights2, weights, atol=1e-5, rtol=0)
    # a maximum over the rank's own tokens; the trainer takes that over ranks
    metrics2["logp_gap_max"] = metrics["logp_gap_max"]
    assert numbers(metrics2) == pytest.approx(numbers(metrics), abs=1e-5, rel=1e-4)


# ---------------------------------------------------------------------------------- errors on ranks


@pytest.mark.slow
def test_what_the_first_rank_raises_for_all_is_raised_on_all(two_ranks):
    """The first rank alone asks the server whether the key is right. If the error stayed there, the
    other ranks would wait for its answer; and only one of them may print it."""
    assert two_ranks["refused on ranks"] == [(0, True), (1, True)]


@pytest.mark.slow
def test_an_error_on_one_rank_ends_all_with_its_message(tiny_dir, tmp_path):
    """The others sit in a collective call and would wait there for hours."""
    code, _, err = torchrun(2, __file__, "failing", tiny_dir, tmp_path / "out", timeout=120)
    assert code != 0 and "rank 1 fell ill" in err


def failing(tiny_dir, out):
    from support.errors import SelfCheckFailed

    import rlver

    choose = rlver.profiles_of_step

    def ill(users, n, seed, step):
        if rlver.ranks.rank() == 1 and step == 2:
            raise SelfCheckFailed("rank 1 fell ill")
        return choose(users, n, seed, step)

    rlver.profiles_of_step = ill
    sys.exit(rlver.main(suited(["--model", tiny_dir, *SMALL, "--out", out])))


# ------------------------------------------------------------------------------------------ loading


def resident():
    """Bytes of this process that are no page of a file: such a page is read when it is looked at
    and can be dropped again, so that eight ranks share one."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s*(\d+)", status)[1])


def loading(model_dir, out):
    """What each rank does in the test below: the models of a PPO run, but for an engine."""
    from support.ranks import all_gather_list, join_ranks, rank
    from support.settings import resolve_settings

    import asyncio
    import threading

    import models

    models.TorchEngine = lambda *_, **__: SimpleNamespace(move=lambda *_: None)
    join_ranks(cuda=False)
    cfg = resolve_settings({"model": model_dir, "algo": "ppo", "think": False})
    before = most = resident()
    done = threading.Event()

    def watch():
        nonlocal most
        while not done.wait(0.002):
            most = max(most, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    made = models.Models(cfg, None, None, asyncio.Runner())
    done.set()
    watcher.join()
    numbers = [sum(p.numel() for p in m.parameters()) for m in (made.policy, made.critic)]
    block = made.policy.model.get_input_embeddings().weight.numel()
    found = all_gather_list([most - before])
    if rank() == 0:
        Path(out).write_text(
            json.dumps({"whole": 4 * sum(numbers), "block": 4 * block, "grown": found})
        )
    torch.distributed.destroy_process_group()


@pytest.mark.soak
@pytest.mark.skipif(sys.platform != "linux", reason="/proc says what is resident")
def test_loading_needs_no_second_copy_in_fp32(tiny_tokenizer, tmp_path):
    """Policy and critic in the shape of Qwen2.5 0.5B, stored in bf16: the file is mapped, and block
    by block becomes fp32 and a shard. So a rank grows by its shard and the largest block (the
    embedding, which is the root's), and not by two whole models."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        vocab_size=151936,
        tie_word_embeddings=True,
    )
    place, out = tmp_path / "model", tmp_path / "out.json"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(place)
    tiny_tokenizer.save_pretrained(place)
    # what is freed goes back at once: glibc would keep most of a matrix of 17 MB for later
    env = {"MALLOC_MMAP_THRESHOLD_": "1000000"}
    code, _, err = torchrun(2, __file__, "loading", place, out, env=env)
    assert code == 0, err
    found = json.loads(out.read_text())
    for grown in found["grown"]:
        assert grown <= 1.2 * found["whole"] / 2 + found["block"], found
    assert sum(found["grown"]) <= 1.5 * found["whole"], found


if __name__ == "__main__":
    {"worker": worker, "failing": failing, "loading": loading}[sys.argv[1]](*sys.argv[2:])
    # The work is done. Torch has aborted twice while the process ended, after this line ("terminate
    # called without an active exception": a thread of its own), so it ends here.
    sys.stdout.flush()
    os._exit(0)
