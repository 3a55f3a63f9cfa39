"""GRPO, where it is not PPO: the baseline is the group's. The policy step is PPO's own and is
tested there."""

import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from grpo import group_advantages, grpo_update, turn_advantages
from tabular import (
    Notes,
    Table,
    cfg_of,
    close,
    every_outcome,
    kl,
    models_of,
    pack,
    talk,
)

pytestmark = pytest.mark.usefixtures("unclipped")


def gradients(minibatches, policy=None, cfg=None, **fields):
    """The policy's gradient at each step of a GRPO update that does not move, and the metrics.
    fields: of the models."""
    policy = policy or Table()
    notes = Notes(policy)
    metrics = grpo_update(models_of(policy, notes, **fields), minibatches, cfg or cfg_of())
    return notes.seen, metrics


def score_sum(dialogue, policy):
    """The sum over a dialogue's policy tokens of grad log pi, onehot - pi in the row of the token
    before. One token at a time."""
    pi, total = policy.logits.detach().softmax(-1), torch.zeros_like(policy.logits)
    for before, token, sampled in zip(
        dialogue.ids[:-1], dialogue.ids[1:], dialogue.action_mask[1:]
    ):
        if sampled:
            total[before] += torch.eye(len(pi))[token] - pi[before]
    return total.flatten()


# --------------------------------------------------------------------------------------- advantages


def test_group_advantages_by_hand():
    """Shao 2024, section 4.1, with the unbiased std: 0 and 1 are 0.707 apart from their mean in
    units of it (1 with the biased one). The mean is the group's own, not the batch's. An id is only
    a name: any number, and its members stand anywhere."""
    rewards = torch.tensor([0.2, 0.0, 0.5, 0.4, 1.0, 0.5, 0.9, 0.9])
    groups = torch.tensor([9, -5, 10**9, 9, -5, 10**9, 9, 3])
    std = math.sqrt((0.3**2 + 0.1**2 + 0.4**2) / 2)
    close(
        group_advantages(rewards, groups),
        [-0.3 / std, -0.70711, 0, -0.1 / std, 0.70711, 0, 0.4 / std, 0],
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 7, 16])
def test_a_group_without_spread_says_nothing(size):
    """Groups without spread. torch's std of one number is NaN. And equal rewards are not quite
    their own mean in floats: the difference over a std of next to nothing was somebody's advantage
    of a million. Both get exactly 0."""
    for k in range(101):  # every reward that there is: e_T / 100
        advantages = group_advantages(
            torch.full((size,), k / 100), torch.zeros(size, dtype=torch.long)
        )
        assert (advantages == 0).all(), (k, advantages)


def test_long_dialogues_weigh_no_more():
    """Defect 20: the released code has a row per turn and takes the group's statistics over rows,
    so the long dialogue's reward becomes the mean. Here a dialogue of eight turns and one of one
    turn are a half apart from their mean, all their tokens alike."""
    policy = Table()
    short, long = talk(0, 2, 1, reward=0.0), talk(1, *[1, 2] * 8, reward=1.0)
    (gradient,), metrics = gradients([[pack(short, long)]])
    assert metrics["tokens_trained"] == 17
    a = 0.5 / (math.sqrt(0.5) + 1e-6)
    close(gradient, a * (score_sum(short, policy) - score_sum(long, policy)) / 17)


def test_the_three_advantages_of_a_group():
    """On paper, rewards 0 1 | .2 .2 | .9 and a group of four. Dr. GRPO leaves the std out;
    leave-one-out is Dr. GRPO times n / (n - 1), and alone has nothing taken off."""
    rewards = torch.tensor([0.0, 1.0, 0.2, 0.2, 0.9, 0.1, 0.2, 0.3, 0.6])
    groups = torch.tensor([0, 0, 1, 1, 2, 3, 3, 3, 3])
    dr, rloo = (group_advantages(rewards, groups, kind) for kind in ("dr-grpo", "rloo"))
    close(dr, [-0.5, 0.5, 0, 0, 0, -0.2, -0.1, 0, 0.3])
    close(rloo, [-1, 1, 0, 0, 0.9, -0.8 / 3, -0.4 / 3, 0, 0.4])
    assert (dr[2:4] == 0).all() and (rloo[2:4] == 0).all()


def expected_gradient(advantages, n=3):
    """The expected gradient of sum_t A_t log pi_t over all groups of `n` dialogues of a small game:
    no sampling, every group by its probability. In turn 1 the policy goes on, with probability
    0.3, and is paid 0.1, or ends the dialogue and is paid 0.3; in turn 2 it takes 0.6, with
    probability 0.4, or -0.3. Each turn has a weight of its own; its score is 1 - p or -p."""
    p, *paid = torch.tensor([[0.3, 0.4], [0.1, 0.6], [0.3, -0.3]], dtype=torch.float64)
    total = torch.zeros_like(p)
    for actions in itertools.product((True, False), repeat=2 * n):
        likely = torch.tensor(actions).view(n, 2)
        alive = torch.stack([torch.ones(n).bool(), likely[:, 0]], dim=1)
        chance = torch.where(likely, p, 1 - p).prod()
        a = advantages(torch.where(likely, *paid) * alive, alive)
        total += chance * (a * torch.where(likely, 1 - p, -p)).sum(0) / n
    return total


def test_which_baseline_a_turn_may_have():
    """verl#7244: a baseline per turn is biased where the policy decides when to stop. Four
    baselines are compared with the exact gradient, which is a sum over all outcomes. The mean of
    the others who still talk (0 if nobody does) is exact. The same mean with oneself in it shrinks
    the two turns unevenly, by 1 - E[1 / n_t]. An advantage of 0 for one who talks alone costs the
    second turn P(nobody else talks). The mean of the others' whole returns, one baseline for all
    turns, is exact too; which of the two is less noisy depends on the game. In dialogues what is
    still to come gets less with every turn, and the mean at the same turn knows that."""

    def to_go(rewards, alive):
        return rewards.flip(1).cumsum(1).flip(1) * alive

    def of_others(rewards, alive):
        return turn_advantages(rewards, alive, torch.zeros(3), "rloo")

    def with_oneself(rewards, alive):
        g = to_go(rewards, alive)
        return (g - g.sum(0) / alive.sum(0).clamp(min=1)) * alive

    def lone_gets_nothing(rewards, alive):
        return of_others(rewards, alive) * (alive.sum(0) > 1)

    def whole_returns(rewards, alive):
        g = to_go(rewards, alive)
        return (g - (g[:, :1].sum() - g[:, :1]) / 2) * alive

    exact = expected_gradient(to_go)
    for advantages, factors in (
        (of_others, [1, 1]),
        (with_oneself, [2 / 3, 0.27]),
        (lone_gets_nothing, [1, 0.51]),
        (whole_returns, [1, 1]),
    ):
        factor = torch.tensor(factors, dtype=torch.float64)
        close(expected_gradient(advantages), factor * exact, 1e-12)


def test_turn_advantages_by_hand():
    """Deltas of users 4, 9 and 5. Returns to go of 4: 0.6 0.5, 0.2 -; of 9: 0.3; of 5: 0.4 0.2, 0.6
    0.6, 0.5 -. Who has left is not in the mean of those who still talk, not even as a 0. `grpo`
    divides by the std of the whole returns: sqrt(0.08) for user 4, 0.1 for user 5; where there is
    none, for user 9, it gives 0."""
    rewards = torch.tensor([[0.1, 0.5], [0.2, 0], [0.3, 0], [0.2, 0.2], [0, 0.6], [0.5, 0]])
    alive = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 1], [1, 1], [1, 0]]).bool()
    groups = torch.tensor([4, 4, 9, 5, 5, 5])
    wanted = torch.tensor(
        [[0.4, 0.5], [-0.4, 0], [0.3, 0], [-0.15, -0.4], [0.15, 0.4], [0, 0]],
    )
    for kind in ("dr-grpo", "rloo"):
        close(turn_advantages(rewards, alive, groups, kind), wanted)
    scale = torch.tensor([math.sqrt(0.08)] * 2 + [math.inf] + [0.1] * 3)
    close(turn_advantages(rewards, alive, groups), wanted / scale[:, None], 1e-4)


def test_equal_whole_returns_are_equal_to_rounding():
    """Four dialogues that end at 100 by way of other emotions: their deltas add up to 0.7 and to
    0.69999999. Compared bit by bit they differed, and a std of 4e-8 made advantages of 1e5."""
    ways = torch.tensor(
        [(30, 40, 70, 100), (30, 35, 60, 100), (30, 50, 77, 100), (30, 44, 81, 100)]
    )
    rewards = ways.diff(dim=1) / 100
    whole = rewards.flip(1).cumsum(1)[:, -1]
    assert len(set(whole.tolist())) > 1  # or this shows nothing
    alive, groups = torch.ones(4, 3, dtype=torch.bool), torch.zeros(4, dtype=torch.long)
    assert turn_advantages(rewards, alive, groups).abs().max() == 0


def test_a_turns_advantage_reaches_its_own_tokens():
    """Through the update: each policy token's gradient is weighed by its turn's advantage, whatever
    the micro-batch it was packed into."""
    policy = Table()
    d = [talk(s, 2, 2, 1, 3) for s in range(3)]
    deltas = torch.tensor([[0.1, 0.5], [0.2, -0.3], [0.0, 0.1]], dtype=torch.float64)
    batches = [pack(*d[:2]), pack(d[2])]
    batches[0].reward, batches[1].reward = deltas[:2], deltas[2:]
    alive = torch.ones(3, 2, dtype=torch.bool)
    wanted = turn_advantages(deltas, alive, torch.zeros(3, dtype=torch.long), "rloo")
    (gradient,), metrics = gradients([batches], policy, cfg_of(advantage="rloo", reward="delta"))
    total = torch.zeros_like(gradient)
    for i, x in enumerate(d):
        for k in (1, 2):
            part = SimpleNamespace(ids=x.ids, action_mask=x.turn == k)
            total -= wanted[i, k - 1] * score_sum(part, policy)
    close(gradient, total / metrics["tokens_trained"])


# --------------------------------------------------------------------------------------- the update


def test_a_group_is_a_group_wherever_packing_put_it():
    """Micro-batches are cut by length, mini-batches by lot, so a group is scattered over all of
    them. Its statistics must not be: the gradients of any cut add up to those of the sorted
    whole."""
    policy = Table()
    d = [talk(s, 2, 2 + s % 3, 1, 3, group=(7, 3)[s % 2]) for s in range(6)]
    rewards, groups = torch.tensor([x.reward for x in d]), torch.tensor([x.group for x in d])
    advantages = group_advantages(rewards, groups)
    wanted = -sum(a * score_sum(x, policy) for a, x in zip(advantages, d))
    for cut in (
        [[pack(*sorted(d, key=lambda x: x.group))]],
        [[pack(d[5], d[0]), pack(d[2])], [pack(d[1])], [pack(d[3], d[4])]],
    ):
        steps, _ = gradients(cut)
        sizes = [sum(int(b.action_mask.sum()) for b in micros) for micros in cut]
        close(sum(step * size for step, size in zip(steps, sizes)), wanted)


@pytest.mark.parametrize("estimator, direction", [("k2", "pi"), ("k3", "ref"), ("k3-ratio", "pi")])
def test_the_kl_gradient_that_grpo_takes(estimator, direction):
    """A KL that pulls the wrong way. A group without spread has no advantage, and what is left of
    the step is the KL's: against the reference, not pi_old, and in the direction that the estimator
    has. k3 is the GRPO paper's, and goes the other way round."""
    policy, reference, batch = every_outcome(reward=0.4)
    (gradient,), _ = gradients(
        [[batch]], policy, cfg_of(kl_coef=0.3, kl_estimator=estimator), reference=reference
    )
    log_pi, log_ref = policy.logits[0].log_softmax(-1), reference.logits[0].detach().log_softmax(-1)
    (exact,) = torch.autograd.grad(
        kl(log_pi, log_ref) if direction == "pi" else kl(log_ref, log_pi), policy.logits
    )
    close(gradient, 0.3 * exact.flatten())


def test_pi_old_is_what_the_trainer_says():
    """One policy, three log-probs. Where the engine is off, its own are still not pi_old: the first
    ratio is 1, and the gap is a metric."""
    _, metrics = gradients([[pack(talk(0, 2, 3, gap=1.0), talk(1, 1, 4, gap=1.0))]])
    assert metrics["kl"] == 0 and metrics["logp_gap"] > 0.1


def test_k1_is_refused():
    """A KL that is none: k1 in the loss does nothing on average, and there is no per-token reward
    to put it in. Better an error than a KL of no effect; where no KL is asked for, its name does
    not matter."""
    minibatches = [[pack(talk(0, 2, 3), talk(1, 1, 4))]]
    with pytest.raises(ValueError, match="k1"):
        gradients(minibatches, cfg=cfg_of(kl_coef=0.1, kl_estimator="k1"), reference=Table(9))
    gradients(minibatches, cfg=cfg_of(kl_coef=0.0, kl_estimator="k1"))
