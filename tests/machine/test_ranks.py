"""One node, many GPUs, seen on one machine without any: two gloo ranks under torchrun, FSDP2 for
real. What two ranks compute must be what one computes, to 1e-5; and whatever happens to one of
them, nobody waits for ever. Then whole runs on two ranks: the same dialogues and
numbers as on one, and a checkpoint of either goes on under the other.

Ranks are processes, 5 s each to start: so a test starts two ranks once and asks them many things.
This file is also their script."""

import errno
import itertools
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from support.files import lock

from runs import metrics, numbers, rows
from server import Loopback, toy_people
from several_ranks import SMALL, alone, make_episodes, torchrun
from several_ranks import run as python
from tabular import cfg_of, models_of


def update(tiny_dir, algo, dealt, ranks, rank, lora=0):
    """One update of policy and critic on this rank's part of the dialogues. lora: rank of their
    adapters, or 0. Returns (metrics, gradients of each step, weights), whole."""
    from models.build import make_masters
    from models.loading import load_model
    from models.lora import merge
    from support.ranks import all_gather_list, all_reduce_sum, full_tensor, iter_full_weights

    import ppo
    from adapters import shared
    from grpo import grpo_update
    from policy import Critic, Policy, dummy_batch, micro_batches, recompute_activations

    model, _ = load_model(tiny_dir)
    torch.manual_seed(0)
    if lora:
        root, policy, critic, reference = shared(model, rank=lora)
        modules, model = [root], policy.model
        recompute_activations(model, context_fn=root.checkpoint_contexts)
    else:
        recompute_activations(model)
        policy, reference = Policy(model), Policy(load_model(tiny_dir)[0])
        critic = Critic(load_model(tiny_dir)[0])
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
        of_step = {name: full_tensor(p.grad).clone() for name, p in module.named_parameters()}
        gradients.append(of_step)
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
    told = (grpo_update if algo == "grpo" else ppo.ppo_update)(models, cuts, cfg)
    ppo.clip_gradient = norm
    trained = itertools.chain(policy.named_parameters(), critic.named_parameters())
    weights = {name: full_tensor(p.detach()).clone() for name, p in trained}
    if lora:  # what an engine would be given
        weights |= merge(iter_full_weights(model), model)
    return told, gradients, weights


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
    from support.ranks import all_gather_list, join_ranks, on_first_rank, rank

    join_ranks(cuda=False)
    result = {}
    try:
        on_first_rank(refuse)
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
    result = torch.load(out, weights_only=True)
    # The first rank alone asks the server whether the key is right. If the error stayed there, the
    # other ranks would wait for its answer; and only one of them may print it.
    assert result["refused on ranks"] == [(0, True), (1, True)]
    return result


@pytest.mark.slow
@pytest.mark.parametrize("deal", DEALS)
@pytest.mark.parametrize("algo", ["grpo", "ppo"])
@pytest.mark.parametrize("lora", LORA)
def test_two_ranks_take_the_step_of_one(algo, deal, lora, two_ranks, tiny_dir):
    """Loss, gradients of both mini-batches, updated weights, metrics: the normaliser is that of the
    whole batch, gradients are summed and not averaged, whitening is global. And a rank without any
    dialogue takes part in every collective and adds nothing. With adapters all that is so for them,
    on one base, and for the merged weights that an engine would get."""
    told, gradients, weights = update(
        tiny_dir, algo, lambda rank: make_episodes(), 0, 0, LORA[lora]
    )
    told2, gradients2, weights2 = two_ranks[algo, deal, lora]
    assert len(gradients) == len(gradients2) == (2 if algo == "grpo" else 4)
    assert all(any(g.abs().max() > 1e-3 for g in step.values()) for step in gradients)
    torch.testing.assert_close(gradients2, gradients, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(weights2, weights, atol=1e-5, rtol=0)
    # a maximum over the rank's own tokens; the trainer takes that over ranks
    told2["logp_gap_max"] = told["logp_gap_max"]
    assert numbers(told2) == pytest.approx(numbers(told), abs=1e-5, rel=1e-4)


# ---------------------------------------------------------------------------------- errors on ranks


@pytest.mark.slow
def test_all_ranks_know_what_one_has_found_and_an_error_on_one_ends_all(tiny_dir, tmp_path):
    """Two ranks ask a server, and one request is refused: the first rank finds out what form of
    answers it takes. When one rank dies, the others sit in a collective call and would wait there
    for hours."""
    out = tmp_path / "out"
    with Loopback(formats=("json_object", "text")) as server:
        user = ["--simulator", f"openai:scripted@{server.url}", *toy_people(tmp_path)]
        flags = ["--model", tiny_dir, *SMALL, *user, "--out", out]
        code, _, err = torchrun(2, __file__, "failing", *flags, timeout=120)
        assert code != 0 and "rank 1 fell ill" in err
        assert server.refused == 1
    assert all(rows(out / f"calls{rank}.jsonl") for rank in ("", "-1"))  # both have asked


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables, told",
    [
        ("WORLD_SIZE=2", "are [None, None, '2']"),
        ("RANK=0", "are ['0', None, None]"),
        ("RANK=x LOCAL_RANK=0 WORLD_SIZE=2", "'x'"),
        ("RANK=2 LOCAL_RANK=0 WORLD_SIZE=2", "no such rank"),
        ("RANK=0 LOCAL_RANK=0 WORLD_SIZE=2", "MASTER_ADDR expected"),
        ("RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT=x", "is x"),
        ("RANK=0 LOCAL_RANK=0 WORLD_SIZE=2 MASTER_ADDR=localhost MASTER_PORT={port}", "in use"),
    ],
)
def test_a_rank_without_a_launcher_is_one_line(variables, told, tmp_path):
    """Some of torchrun's variables were left in a shell: torch's traceback, or a wait for ever."""
    with socket.socket(socket.AF_INET6) as taken:
        taken.bind(("", 0))
        taken.listen()
        variables = variables.format(port=taken.getsockname()[1])
        env = dict(pair.split("=") for pair in variables.split())
        flags = ["--steps", 0, "--out", tmp_path / "out"]
        code, _, err = python("rlver.py", *flags, env=env, timeout=60)
    [line] = [line for line in err.splitlines() if not line.startswith("[")]  # "[": torch's log
    assert code == 2 and told in line and "let torchrun set them" in line
    assert not (tmp_path / "out").exists()


def failing(*flags):
    from support.errors import SelfCheckFailed

    import rlver

    choose = rlver.profiles_of_step

    def ill(users, n, seed, step):
        if rlver.ranks.rank() == 1 and step == 2:
            raise SelfCheckFailed("rank 1 fell ill")
        return choose(users, n, seed, step)

    rlver.profiles_of_step = ill
    sys.exit(rlver.main(list(flags)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, number, told",
    [
        ("write", 1, "/.trial-"),
        ("write", 2, "checkpoint-000001 could not be written ([Errno 28] No space left on device)"),
        ("begin_logs", 1, "rlver.py (rank 0): [Errno 28] No space left on device"),
        ("log_dropped", 1, "rlver.py (rank 0): [Errno 28] No space left on device"),
        ("append", 8, "rlver.py (rank 0): [Errno 28] No space left on device"),  # a line of step 1
        ("take_lock", 0, "another process is at work there"),  # held by this one
    ],
)
def test_what_the_first_rank_cannot_do_ends_all(name, number, told, tmp_path):
    """It writes for all, to a disk that is full. The others waited for it in a collective call, and
    ended with a traceback about a lost connection, or minutes later."""
    out = tmp_path / "out"
    flags = [*SMALL, "--max-tokens", 48, "--out", out]
    if not number:
        out.mkdir()
        held = lock(out)
        # nobody asks it, but the other rank waits for what the first one would find out about it
        flags += ["--simulator", "openai:nobody@http://127.0.0.1:1", *toy_people(tmp_path)]
    code, _, err = torchrun(2, __file__, "full", name, number, *flags, timeout=120)
    if not number:
        os.close(held)
    assert code == 1 and "[rank" not in err  # in front of the lines of a rank's traceback
    [line] = [line for line in err.splitlines() if line.startswith("rlver.py")]
    assert "(rank 0)" in line and told in line


def full(name, number, *flags):
    from models import checkpoint
    from support.ranks import leave_ranks, rank
    from support.rundir import RunDir

    import rlver

    place = checkpoint if name == "write" else RunDir
    function, calls = getattr(place, name), itertools.count(1)

    def fails(*args, **more):
        if rank() == 0 and next(calls) == int(number):
            raise OSError(errno.ENOSPC, "No space left on device")
        return function(*args, **more)

    setattr(place, name, fails)
    leave_ranks(rlver.main(list(flags)))


# --------------------------------------------------------------------------------------- whole runs


def dialogues(out):
    return rows(out / "dialogues.jsonl")


def alike(a, b):
    """The same steps: the same dialogues word for word, the same numbers to rounding."""
    assert dialogues(a) == dialogues(b)
    assert len(metrics(a)) == len(metrics(b)) == 4
    for x, y in zip(metrics(a), metrics(b)):
        gaps = {key: y[key] for key in ("logp_gap", "logp_gap_max")}
        assert numbers({**x, **gaps}) == pytest.approx(numbers(y), abs=2e-4, rel=2e-3)


def run(ranks, *flags):
    """A run that must end well. Returns what it printed."""
    code, out, err = torchrun(2, "rlver.py", *flags) if ranks == 2 else alone(*flags)
    assert code == 0, err
    return out


@pytest.mark.soak
@pytest.mark.parametrize("algo, lora", [("grpo", 0), ("ppo", 0), ("ppo", 4)])
def test_a_run_on_two_ranks_and_its_checkpoints(algo, lora, tiny_dir, tmp_path):
    """Two ranks hold the dialogues of one; a checkpoint of either goes on under the other, moments
    of Adam, critic and adapters included."""
    more = ["--algo", algo, "--lora-rank", lora] + ["--kl-coef", 0.05] * (algo == "ppo")
    flags = ["--model", tiny_dir, *SMALL, *more, "--steps", 4, "--save-every", 2, "--out"]
    for ranks, name in ((1, "one"), (2, "two")):
        out = run(ranks, *flags, tmp_path / name)
        assert out.count("held-out users") == 1 and ("on 2 ranks" in out) == (ranks == 2)
    alike(tmp_path / "one", tmp_path / "two")

    words, steps = dialogues(tmp_path / "one"), metrics(tmp_path / "one")
    for ranks, name in ((2, "one"), (1, "two")):
        out = tmp_path / name
        shutil.rmtree(out / "checkpoint-000004")  # as if the power had gone before it was written
        (out / "summary.json").unlink()
        assert "Step 2 is done" in run(ranks, "--resume", out)
        assert dialogues(out) == words
        for resumed, row in zip(metrics(out), steps, strict=True):
            assert resumed["emotion"] == row["emotion"]
            assert resumed["grad_norm"] == pytest.approx(row["grad_norm"], rel=2e-3)


if __name__ == "__main__":
    {"worker": worker, "failing": failing, "full": full}[sys.argv[1]](*sys.argv[2:])
    # The work is done. Torch has aborted twice while the process ended, after this line ("terminate
    # called without an active exception": a thread of its own), so it ends here.
    sys.stdout.flush()
    os._exit(0)
