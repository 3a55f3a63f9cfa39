"""PPO, held against what a student would write first: loops over single tokens, in float64. Losses
and their gradients.

The policies here are tables: the distribution of a token depends on the token before it and nothing
else, so every gradient can be written down. They give log-probs, entropies and values on the user's
tokens too, where all of them must be ignored. A "defect" has the number that this mistake of the
released code has in docs/differences.md.
"""

from support.settings import SelfCheckFailed

import copy
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ppo import (
    CriticPart,
    compute_log_probs,
    explained_variance,
    gae,
    importance_weights,
    kl_penalty,
    logp_gap,
    masked_mean_std,
    optimize,
    place_rewards,
    policy_loss,
    ppo_update,
    value_loss,
    whiten,
)

VOCAB, NAN, INF = 5, float("nan"), float("inf")


class Table(nn.Module):
    """A policy: row s of the table holds the logits of the token that follows token s. `dropout`
    drops logits, as a net might."""

    def __init__(self, seed=0, dropout=0.0, vocab=VOCAB):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.logits = nn.Parameter(
            torch.randn(vocab, vocab, generator=generator, dtype=torch.float64)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, batch):
        # [B, L - 1]
        pi = torch.distributions.Categorical(logits=self.dropout(self.logits)[batch.ids[:, :-1]])
        # [B, L] each
        return F.pad(pi.log_prob(batch.ids[:, 1:]), (1, 0)), F.pad(pi.entropy(), (1, 0))


class Values(nn.Module):
    """A critic: V of a token is looked up by the token before it, and is nonsense at the
    first one."""

    def __init__(self, seed=1, scale=1.0, vocab=VOCAB):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(
            scale * torch.randn(vocab, generator=generator, dtype=torch.float64)
        )

    def forward(self, batch):
        return F.pad(self.table[batch.ids[:, :-1]], (1, 0), value=-7.0)


class Notes(torch.optim.SGD):
    """Stands still (lr 0) and notes the gradient that each of its steps was given."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.0)
        self.seen = []

    def step(self):
        self.seen.append(
            torch.cat([p.grad.flatten() for group in self.param_groups for p in group["params"]])
        )


def talk(seed, *turns, reward=None, group=0, policy=None, gap=0.0):
    """A dialogue of random tokens: turns are numbers of tokens, the user's, the policy's, the
    user's ... The engine's log-probs are the policy's, but for noise of size `gap`."""
    rng = np.random.default_rng(seed)
    sampled = torch.tensor([i % 2 == 1 for i, n in enumerate(turns) for _ in range(n)])
    turn = torch.tensor([(i + 1) // 2 * (i % 2) for i, n in enumerate(turns) for _ in range(n)])
    d = SimpleNamespace(
        ids=torch.tensor(rng.integers(0, VOCAB, len(sampled))),
        action_mask=sampled,
        turn=turn,
        group=group,
        reward=float(rng.random()) if reward is None else reward,
    )
    noise = gap * torch.tensor(rng.standard_normal(len(sampled)))
    d.engine_log_probs = (policy or Table())(SimpleNamespace(ids=d.ids[None]))[0][
        0
    ].detach() + noise
    return d


def pack(*dialogues):
    """Dialogues side by side, padded on the right: a batch as the update sees it."""
    side_by_side = lambda name: nn.utils.rnn.pad_sequence(
        [getattr(d, name) for d in dialogues], batch_first=True
    )
    return SimpleNamespace(
        **{name: side_by_side(name) for name in ("ids", "action_mask", "engine_log_probs", "turn")},
        reward=paid_last([d.reward for d in dialogues], [int(d.turn.max()) for d in dialogues]),
        group=torch.tensor([d.group for d in dialogues]),
    )


def paid_last(rewards, turns):
    """[D, T]: each dialogue's reward in its last turn, as RLVER pays."""
    placed = torch.zeros(len(turns), max(max(turns), 1), dtype=torch.float64)
    for row, reward, last in zip(placed, rewards, turns):
        row[last - 1] = reward * (last > 0)
    return placed


def turns_of(mask):
    """Every run of sampled tokens is a turn: [B, L] bool -> [B, L] long."""
    before = torch.cat([torch.zeros_like(mask[:, :1]), mask[:, :-1]], dim=1)
    return (mask & ~before).cumsum(1) * mask


def ragged(seed=0, rows=6, length=14):
    """[rows, length] random bools: gaps within the rows, padding behind, one row all True and one
    all False."""
    rng = np.random.default_rng(seed)
    mask = rng.random((rows, length)) < 0.5
    for row, end in zip(mask, rng.integers(3, length, rows)):
        row[end:] = False
    mask[0], mask[1] = True, False
    return torch.tensor(mask)


def normal(*shape, seed=0, scale=1.0, dtype=torch.float64):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def close(got, wanted, tolerance=1e-5):
    torch.testing.assert_close(
        torch.as_tensor(got).double(),
        torch.as_tensor(wanted).double(),
        rtol=tolerance,
        atol=tolerance,
    )


def weights(model):
    return copy.deepcopy(model.state_dict())


def untouched(model, before):
    return all(torch.equal(before[name], value) for name, value in model.state_dict().items())


# --------------------------------------------------------------------------------------- advantages


@pytest.mark.parametrize("gamma, lam", [(1, 1), (1, 0.95), (0.9, 1), (0.9, 0.8), (0.9, 0)])
def test_gae_is_the_sum_over_the_policys_tokens(gamma, lam):
    """Credit that decays over the user's words. Against the definition, A_t = sum_k (gamma lam)^k
    delta_{t+k}, summed over the list of the policy's tokens with everything between them cut out.
    Only lambda or gamma below 1 tells a wrong recursion from a right one."""
    mask = ragged()
    rewards, values = normal(*mask.shape, seed=1), normal(*mask.shape, seed=2)
    got = gae(rewards.masked_fill(~mask, 0), values.masked_fill(~mask, NAN), mask, gamma, lam)
    wanted = torch.zeros(2, *mask.shape, dtype=torch.float64)
    for b in range(len(mask)):
        tokens = mask[b].nonzero()[:, 0].tolist()
        # V = 0 behind the last one
        r, v = rewards[b, tokens].tolist(), values[b, tokens].tolist() + [0.0]
        delta = [r[i] + gamma * v[i + 1] - v[i] for i in range(len(r))]
        for i, t in enumerate(tokens):
            wanted[0, b, t] = sum((gamma * lam) ** k * delta[i + k] for k in range(len(r) - i))
            wanted[1, b, t] = wanted[0, b, t] + v[i]
    close(torch.stack(got), wanted)


def test_gae_by_the_numbers():
    """The recursion on paper, gamma 0.5 and lambda 0.8. Row one: V 1 2 4 3, rewards 0 1 0 2, the
    user in between; from behind, the deltas are -1, -2.5, 1, 0. Row two opens with the user and
    ends in padding: deltas 5, -2.5. In row three nobody speaks."""
    mask = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 0, 1, 0, 0], [0] * 6]).bool()
    values = torch.tensor([[1, NAN, 2, 4, NAN, 3], [NAN, 2, NAN, -1, NAN, NAN], [NAN] * 6])
    rewards = torch.tensor([[0, 0, 1, 0, 0, 2], [0, 0, 0, 4, 0, 0], [0] * 6]).float()
    advantages, returns = gae(rewards, values, mask, 0.5, 0.8)
    close(advantages, [[-0.064, 0, -0.16, -2.9, 0, -1], [0, -0.5, 0, 5, 0, 0], [0] * 6])
    close(returns, [[0.936, 0, 1.84, 1.1, 0, 2], [0, 1.5, 0, 4, 0, 0], [0] * 6])


def test_the_users_lines_do_not_decay_the_reward():
    """The same as an example: 20 sampled tokens, 150 of the user, 20 sampled, one reward of 1 at
    the end, V = 0. At lambda 0.95 the first token gets 0.95^39 = 0.135; decaying over what the user
    said leaves 6e-5 of it. At lambda 1, RLVER's, nobody would notice."""
    mask = torch.tensor([[True] * 20 + [False] * 150 + [True] * 20])
    rewards = place_rewards(torch.tensor([[0.0, 1.0]]), turns_of(mask))
    for gamma, lam in ((1, 0.95), (0.95, 1)):
        advantages, _ = gae(rewards, torch.zeros(mask.shape), mask, gamma, lam)
        close(advantages[0, [0, 19, 170, 189]], [0.95**39, 0.95**20, 0.95**19, 1])
    close(gae(rewards, torch.zeros(mask.shape), mask, 1, 1)[0], mask)


def test_at_lambda_and_gamma_1_the_sum_telescopes():
    """RLVER's setting: whatever the critic says, the advantage is the dialogue's reward minus V,
    and the return is the reward."""
    mask, values, reward = ragged(3), normal(6, 14, seed=4), normal(6, seed=5)
    turn = turns_of(mask)
    rewards = place_rewards(paid_last(reward.tolist(), turn.amax(1).tolist()), turn)
    advantages, returns = gae(rewards, values, mask, 1, 1)
    close(returns, reward[:, None] * mask)
    close(advantages, (reward[:, None] - values) * mask)


def test_the_reward_stands_on_the_last_policy_token():
    """Defect 23: the user had the last word, the released code puts the reward on it, and under a
    mask it is lost. Also where the dialogue is padded, and nowhere if the policy never spoke."""
    mask = torch.tensor(
        [[0, 1, 1, 0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1], [0] * 8]
    ).bool()
    reward = torch.tensor([0.9, 0.2, 0.4, 0.7])
    placed = place_rewards(paid_last(reward.tolist(), [2, 1, 1, 0]).float(), turns_of(mask))
    wanted = torch.zeros(4, 8)
    wanted[0, 5], wanted[1, 2], wanted[2, 7] = 0.9, 0.2, 0.4
    assert torch.equal(placed, wanted)
    advantages, _ = gae(placed, torch.zeros(4, 8), mask, 1, 1)
    close(advantages, reward[:, None] * mask)  # it arrives at every token of the dialogue


def test_each_turn_is_paid_on_its_last_token():
    """A reward a turn, --reward delta: two of three turns end where the user begins to speak, one
    at the end of the row. gamma = lambda = 1: every token gets what is still to come."""
    turn = torch.tensor([[1, 1, 0, 2, 2, 0, 3], [0, 0, 1, 1, 0, 0, 0]])
    placed = place_rewards(torch.tensor([[0.1, -0.2, 0.4], [0.3, 0.0, 0.0]]), turn)
    close(placed, [[0, 0.1, 0, 0, -0.2, 0, 0.4], [0, 0, 0, 0.3, 0, 0, 0]])
    advantages, returns = gae(placed, torch.zeros(2, 7), turn > 0, 1, 1)
    close(returns, [[0.3, 0.3, 0, 0.2, 0.2, 0, 0.4], [0, 0, 0.3, 0.3, 0, 0, 0]])


def test_whitening_is_over_the_whole_batch():
    """Whitening by micro-batch. Against numpy, over the policy's tokens of all micro-batches
    together: a mean and a spread for each would tell every micro-batch that it was average. What
    stands elsewhere does not count, be it NaN."""
    masks = [ragged(1), ragged(2, length=9)]
    tensors = [normal(6, 14, seed=1) + 5, 3 * normal(6, 9, seed=2)]
    tensors = [t.masked_fill(~m, NAN) for t, m in zip(tensors, masks)]
    flat = np.concatenate([t[m].numpy() for t, m in zip(tensors, masks)])
    mean, std = masked_mean_std(tensors, masks)
    close(mean, flat.mean())
    close(std, flat.std(ddof=1))
    white = [whiten(t, m, mean, std) for t, m in zip(tensors, masks)]
    assert all((w[~m] == 0).all() for w, m in zip(white, masks))
    close(torch.cat([w[m] for w, m in zip(white, masks)]), (flat - flat.mean()) / flat.std(ddof=1))


def test_whitening_by_the_numbers():
    """1, 3, 5 and 7, in two micro-batches: mean 4, and 20 / 3 the unbiased variance. With the same
    again on a second rank, whose sums `reduce` adds, they are eight numbers, and 40 / 7."""
    tensors, masks = (
        [torch.tensor([[1, NAN, 3]]), torch.tensor([[5, 7.0], [NAN, NAN]])],
        [torch.tensor([[True, False, True]]), torch.tensor([[True, True], [False, False]])],
    )
    close([float(x) for x in masked_mean_std(tensors, masks)], [4, math.sqrt(20 / 3)])
    close(
        [float(x) for x in masked_mean_std(tensors, masks, reduce=lambda x: 2 * x)],
        [4, math.sqrt(40 / 7)],
    )
    close(whiten(tensors[0], masks[0], torch.tensor(4.0), torch.tensor(2.0)), [[-1.5, 0, -0.5]])


def test_a_rank_without_a_token_takes_part():
    """A sum over ranks is one of tensors, and waits for all ranks. On the second one the policy was
    silent: it brings nothing, and has the mean and the spread of 1, 3 and 5 like the first."""
    tensors = [torch.tensor([[1.0, 3.0, 5.0]]), torch.full((1, 3), NAN)]
    masks = [torch.full((1, 3), True), torch.full((1, 3), False)]
    for got in Ranks().run(
        lambda i, reduce: masked_mean_std(tensors[i : i + 1], masks[i : i + 1], reduce)
    ):
        close([float(x) for x in got], [3, 2])


def test_whitened_numbers_have_mean_0_and_spread_1():
    """Whatever they were, and nowhere else than at the policy's tokens; micro-batches that differ
    still differ afterwards."""
    masks = [ragged(1), ragged(2, length=9)]
    tensors = [normal(6, 14, seed=1) - 300, 70 * normal(6, 9, seed=2)]
    white = [whiten(t, m, *masked_mean_std(tensors, masks)) for t, m in zip(tensors, masks)]
    together = torch.cat([w[m] for w, m in zip(white, masks)])
    close([together.mean(), together.std()], [0, 1])
    assert white[0][masks[0]].mean() < -0.5 and white[1][masks[1]].mean() > 0.5
    assert all((w[~m] == 0).all() for w, m in zip(white, masks))


def test_whitening_of_next_to_nothing():
    """The smallest batches. The spread of one number is NaN and of none the mean is too: such a
    batch stays as it is. Equal numbers have no spread to divide by, and become 0."""
    x = torch.tensor([[0.3, NAN, 0.7]])
    for kept in ([False] * 3, [False, False, True]):
        mask = torch.tensor([kept])
        assert [float(s) for s in masked_mean_std([x], [mask])] == [0, 1]
        assert torch.equal(
            whiten(x, mask, *masked_mean_std([x], [mask])), torch.where(mask, x, 0.0)
        )
    mask = torch.ones(1, 7, dtype=torch.bool)
    assert (
        whiten(torch.full((1, 7), 0.7), mask, *masked_mean_std([torch.full((1, 7), 0.7)], [mask]))
        == 0
    ).all()


# ------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize(
    "advantage, ratio, loss, gradient, clipped",
    [
        (+2, 0.5, -1.0, -1.0, 0),
        (+2, 0.9, -1.8, -1.8, 0),
        (+2, 1.1, -2.2, -2.2, 0),
        (+2, 1.3, -2.4, 0.0, 1),
        (+2, 9.0, -2.4, 0.0, 1),  # a good token gains nothing beyond 1.2
        (-2, 0.5, +1.6, 0.0, 1),  # a bad one nothing below 0.8
        (-2, 0.9, +1.8, +1.8, 0),
        (-2, 1.1, +2.2, +2.2, 0),
        # but one that became more likely is pushed back without limit
        (-2, 1.3, +2.6, +2.6, 0),
        (-2, 9.0, +18.0, +18.0, 0),
    ],
)
def test_the_clip(advantage, ratio, loss, gradient, clipped):
    """The side that is clipped: min for both signs of the advantage. The loss and its gradient by
    log pi, worked out by hand, clip 0.2; the gradient is rho times the advantage, or nothing."""
    log_probs = torch.tensor([[math.log(ratio) - 1.5]], dtype=torch.float64, requires_grad=True)
    got, count = policy_loss(
        log_probs,
        torch.tensor([[-1.5]]),
        torch.tensor([[float(advantage)]]),
        torch.tensor([[True]]),
        0.2,
    )
    got.backward()
    close([float(got.detach()), float(log_probs.grad)], [loss, gradient])
    # a tensor of one number, like the loss: who calls it takes the number out
    assert torch.is_tensor(count) and count.shape == () and count == clipped


def a_sum_over_the_policys_tokens(loss, x, mask):
    """A leaking mask, a mean of means: the user's tokens and the padding add nothing to a loss, nor
    to its gradient by `x`, nor to a count; and the sums of two halves are the sum of the whole,
    which no mean of means is. `loss(rows, dress)` returns the loss and counts, of some rows,
    `dress` put on everything that has a value off the mask. Returns what it is of the whole."""
    hide = lambda t: t.masked_fill(~mask, 30.0)  # e^30 would show

    def look(rows, dress=lambda t: t):
        total, *counts = loss(rows, dress)
        return total.detach(), *counts, *torch.autograd.grad(total, x)

    whole = look(slice(0, 6))
    for got, wanted in zip(look(slice(0, 6), hide), whole):
        close(got, wanted)
    for first, second, wanted in zip(look(slice(0, 2)), look(slice(2, 6)), whole):
        close(first + second, wanted)
    assert (whole[-1][~mask] == 0).all() and (whole[-1][mask] != 0).any()
    return whole


def test_the_policy_loss_is_a_sum_over_the_policys_tokens():
    """And a log-prob off the mask may be as far away as it likes: exp comes after the mask, or the
    gradient is NaN."""
    mask, old, advantages, w = ragged(5), *(normal(6, 14, seed=s) for s in (1, 2, 4))
    new = (old + normal(6, 14, seed=5, scale=0.5)).requires_grad_()
    _, clipped, gradient = a_sum_over_the_policys_tokens(
        lambda rows, dress: policy_loss(
            dress(new)[rows], old[rows], dress(advantages)[rows], mask[rows], 0.2, dress(w)[rows]
        ),
        new,
        mask,
    )
    assert clipped > 0
    # e^10000 is infinite, and infinity times 0 is NaN
    far = torch.where(mask, new.detach(), 1e4).requires_grad_()
    policy_loss(far, old, advantages, mask, 0.2, w)[0].backward()
    close(far.grad, gradient)


def test_the_value_loss_is_a_sum_over_the_policys_tokens():
    """What the critic says of the user's tokens is nobody's error."""
    mask, old, returns = ragged(5), *(normal(6, 14, seed=s) for s in (1, 3))
    values = (old + normal(6, 14, seed=6, scale=0.5)).requires_grad_()
    loss = lambda rows, dress: [
        value_loss(dress(values)[rows], old[rows], dress(returns)[rows], mask[rows], 0.5)
    ]
    a_sum_over_the_policys_tokens(loss, values, mask)


def test_each_token_has_its_own_weight():
    """An importance weight is a factor of its token's part of the loss, and of nothing else; the
    clip does not see it."""
    new, old = (normal(1, 4, seed=s, scale=0.5) for s in (1, 2))
    advantages, w, mask = (
        normal(1, 4, seed=3),
        torch.tensor([[2.0, 0.5, 0.0, 1.0]]),
        torch.ones(1, 4, dtype=torch.bool),
    )
    single = [
        policy_loss(
            new[:, i : i + 1], old[:, i : i + 1], advantages[:, i : i + 1], mask[:, :1], 0.2
        )
        for i in range(4)
    ]
    loss, clipped = policy_loss(new, old, advantages, mask, 0.2, w)
    close(loss, 2 * single[0][0] + 0.5 * single[1][0] + single[3][0])
    assert clipped == sum(n for _, n in single) > 0


@pytest.mark.parametrize(
    "value, old, target, clip, loss, gradient",
    [
        (1.0, 1.2, 2.0, 0.5, 0.5, -1.0),  # has not moved far: half of the squared error
        # moved too far, and the wrong way: pulled back
        (2.0, 1.0, 0.0, 0.5, 2.0, 2.0),
        (0.0, 1.0, 3.0, 0.5, 4.5, -3.0),
        # the right way, but too far: no pull, and no reward for it
        (2.0, 1.0, 3.0, 0.5, 1.125, 0.0),
        (0.0, 1.0, -1.0, 0.5, 1.125, 0.0),
        # a distance, not a share: however large V is, and below 0
        (3.0, 2.0, 4.0, 0.5, 1.125, 0.0),
        (-1.0, -2.0, 0.0, 0.5, 1.125, 0.0),
        (2.0, 1.0, 3.0, 0, 0.5, -1.0),
        (2.0, 1.0, 3.0, None, 0.5, -1.0),
    ],
)  # no clip
def test_the_value_clip(value, old, target, clip, loss, gradient):
    """On paper: the loss and its gradient by V."""
    v = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    got = value_loss(
        v, torch.tensor([[old]]), torch.tensor([[target]]), torch.tensor([[True]]), clip
    )
    got.backward()
    close([float(got.detach()), float(v.grad)], [loss, gradient])


@pytest.mark.parametrize("clip", [0.5, 0, None])
def test_the_value_loss(clip):
    """The worse of two errors, where V stands and where it would stand had it moved by no more than
    the clip. On a grid, against the cases written out: no gradient where the clipped error is the
    worse one, for that does not depend on V. 0 and None: no clip."""
    grid = [
        (v, o, r) for v in np.linspace(-2, 2, 9) for o in (-0.9, 0.1) for r in (-1.8, 0.03, 1.2)
    ]
    v, o, r = (torch.tensor(column, dtype=torch.float64)[None] for column in zip(*grid))
    v.requires_grad_()
    loss = value_loss(v, o, r, torch.ones(v.shape, dtype=torch.bool), clip)
    loss.backward()
    total, gradient = 0.0, []
    for value, old, target in grid:
        error, slope = (value - target) ** 2, value - target
        if clip and abs(value - old) > clip:
            near = old + math.copysign(clip, value - old)
            if (near - target) ** 2 > error:
                error, slope = (near - target) ** 2, 0.0
        total, gradient = total + 0.5 * error, gradient + [slope]
    close(loss.detach(), total)
    close(v.grad[0], gradient)
    assert (0.0 in gradient) == bool(clip)


# ----------------------------------------------------------------------------------------------- KL


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum()


def two_distributions():
    """Logits that want a gradient, and log pi and log ref over 6 outcomes: small enough to try
    every one."""
    logits = normal(6, seed=1).requires_grad_()
    return logits, logits.log_softmax(-1), normal(6, seed=2).log_softmax(-1)


@pytest.mark.parametrize(
    "estimator, place, direction",
    [
        ("k1", "loss", "none"),
        ("k1", "reward", "KL(pi, ref)"),
        ("k2", "loss", "KL(pi, ref)"),
        ("k3", "loss", "KL(ref, pi)"),
        ("k3-ratio", "loss", "KL(pi, ref)"),
    ],
)
def test_which_gradient_each_kl_estimator_has(estimator, place, direction):
    """An unbiased estimate of the KL need not have its gradient. The exact expectation over samples
    of pi: in the loss the estimate itself is differentiated, in the reward it weighs grad log pi.
    What the docstring claims, and nothing else, is true."""
    logits, log_pi, log_ref = two_distributions()
    penalty = kl_penalty(log_pi, log_ref, estimator)
    per_sample = penalty if place == "loss" else penalty.detach() * log_pi
    (got,) = torch.autograd.grad(
        (log_pi.detach().exp() * per_sample).sum(), logits, retain_graph=True
    )
    truth = {
        "KL(pi, ref)": torch.autograd.grad(kl(log_pi, log_ref), logits, retain_graph=True)[0],
        "KL(ref, pi)": torch.autograd.grad(kl(log_ref, log_pi), logits)[0],
        "none": torch.zeros(6),
    }
    close(got, truth[direction], 1e-9)
    assert all((got - truth[other]).abs().max() > 0.1 for other in truth if other != direction)


def test_k3_with_the_ratio_is_right_off_policy_too():
    """The ratio does what it does in the policy loss: samples of pi_old, weighed by pi / pi_old,
    stand for samples of pi. From the second mini-batch on this is the only one of the four with the
    gradient of KL(pi, ref)."""
    logits, log_pi, log_ref = two_distributions()
    log_old = normal(6, seed=3).log_softmax(-1)
    (wanted,) = torch.autograd.grad(kl(log_pi, log_ref), logits, retain_graph=True)
    for estimator in ("k1", "k2", "k3", "k3-ratio"):
        penalty = kl_penalty(log_pi, log_ref, estimator, log_old)
        (got,) = torch.autograd.grad((log_old.exp() * penalty).sum(), logits, retain_graph=True)
        assert torch.allclose(got, wanted, atol=1e-9) == (estimator == "k3-ratio")


def test_kl_estimates_as_values():
    """k1 and k3 are unbiased, k3 is never negative; a name that is misspelt must not silently be
    another estimator."""
    _, log_pi, log_ref = two_distributions()
    log_pi = log_pi.detach()
    for estimator in ("k1", "k3", "k3-ratio"):
        close((log_pi.exp() * kl_penalty(log_pi, log_ref, estimator)).sum(), kl(log_pi, log_ref))
    assert (kl_penalty(log_pi, log_ref, "k3") > 0).all() and (
        kl_penalty(log_pi, log_ref, "k1") < 0
    ).any()
    assert all(
        (kl_penalty(log_pi, log_pi, estimator) == 0).all()
        for estimator in ("k1", "k2", "k3", "k3-ratio")
    )
    with pytest.raises(ValueError):
        kl_penalty(log_pi, log_ref, "K3")


def every_outcome(reward=0.0):
    """A rollout without luck: the policy is (1/2, 1/4, 1/4) behind token 0, and four dialogues of
    one token hold just that. Means over it are expectations. Returns (policy, reference, batch)."""
    policy, reference = Table(vocab=3), Table(7, vocab=3)
    policy.logits.data[0] = torch.tensor([0.5, 0.25, 0.25]).log()
    batch = SimpleNamespace(
        ids=torch.tensor([[0, 0], [0, 0], [0, 1], [0, 2]]),
        action_mask=torch.tensor([[False, True]] * 4),
        turn=torch.tensor([[0, 1]] * 4),
        reward=torch.full((4, 1), reward, dtype=torch.float64),
        group=torch.zeros(4).long(),
    )
    batch.engine_log_probs = policy(batch)[0].detach()
    return policy, reference, batch


@pytest.mark.parametrize(
    "estimator, direction", [("k1", "pi"), ("k2", "pi"), ("k3", "ref"), ("k3-ratio", "pi")]
)
def test_the_kl_gradient_that_ppo_takes(estimator, direction):
    """The KL's direction through `ppo_update`, where the rewards are equal and the KL is all that
    is left: the step is against the gradient of the KL, not along it, k1 through the reward
    (whitened, hence on another scale) and the others in the loss."""
    policy, reference, batch = every_outcome()
    critic, notes = Values(scale=0, vocab=3), Notes(policy)
    ppo_update(
        policy,
        notes,
        critic,
        Notes(critic),
        [[batch]],
        clip_eps=0.2,
        max_grad_norm=INF,
        reference=reference,
        kl_coef=0.3,
        kl_estimator=estimator,
    )
    log_pi, log_ref = policy.logits[0].log_softmax(-1), reference.logits[0].detach().log_softmax(-1)
    (exact,) = torch.autograd.grad(
        kl(log_pi, log_ref) if direction == "pi" else kl(log_ref, log_pi), policy.logits
    )
    scale = (
        1 / (0.3 * (log_pi - log_ref)[[0, 0, 1, 2]].detach().std()) if estimator == "k1" else 1.0
    )
    close(notes.seen[0], 0.3 * scale * exact.flatten())


# --------------------------------------------------------------------------------------- the update


def test_importance_weights():
    """An engine that is not quite the trainer: min(pi_old / pi_engine, 2), and a constant: a weight
    that is differentiated is another loss."""
    old = torch.tensor([-1.0, -1.0, -1.0, -3.0]).requires_grad_()
    engine = torch.tensor([-1.0, -1.5, -9.0, -1.0]).requires_grad_()
    w = importance_weights(old, engine)
    close(w, [1, math.exp(0.5), 2, math.exp(-2)])
    assert not w.requires_grad


def test_importance_weights_are_in_the_policy_loss_only():
    """An engine that is off by some e-folds weighs each token's part of the policy loss, up to 2;
    the entropy, the KL and the critic are sums over what was sampled, whoever sampled it, and stay
    as they are."""
    policy, critic = Table(), Values()
    exact, off = (
        pack(*(talk(s, 2, 5, 3, 4, policy=policy, gap=gap) for s in range(4))) for gap in (0.0, 1.5)
    )
    old, ref = compute_log_probs(policy, [exact]), compute_log_probs(Table(9), [exact])
    returns = [normal(*exact.ids.shape, seed=8)]

    def gradients(batch, advantages, **more):
        notes, critic_notes = Notes(policy), Notes(critic)
        optimize(
            policy,
            notes,
            [[batch]],
            old,
            [advantages],
            clip_eps=0.2,
            ref=ref,
            max_grad_norm=INF,
            critic=CriticPart(critic, critic_notes, [critic(batch).detach()], returns, 0.5, INF),
            **more,
        )
        return notes.seen[0], critic_notes.seen[0]

    none = torch.zeros(exact.ids.shape, dtype=torch.float64)
    for name in ("k2", "k3", "k3-ratio"):
        for a, b in zip(
            gradients(exact, none, entropy_coef=0.3, kl_coef=0.5, kl_estimator=name),
            gradients(off, none, entropy_coef=0.3, kl_coef=0.5, kl_estimator=name),
        ):
            assert torch.equal(a, b) and a.abs().max() > 1e-3
    advantages = normal(*exact.ids.shape, seed=5)
    w = (old[0] - off.engine_log_probs).exp()
    assert (w[off.action_mask] > 2).any() and (w[off.action_mask] < 1).any()
    # the same thing: at ratio 1 they are factors alike
    weighed, _ = gradients(exact, advantages * w.clamp(max=2))
    close(gradients(off, advantages)[0], weighed)


@pytest.mark.parametrize("cut", [[1, 1, 1, 1], [2, 2], [1, 3]])
def test_the_gradient_does_not_depend_on_the_micro_batches(cut):
    """A mean of means, by example: two good dialogues of 10 tokens, two bad ones of 1000. Divided
    by all 2020 tokens the mean advantage is -0.98; the mean of four micro-batches' own means is 0,
    which is another opinion of the same rollout."""
    policy, critic = Table(), Values()
    advantage = [1.0, 1.0, -1.0, -1.0]
    dialogues = [talk(s, 3, n, 2, policy=policy) for s, n in enumerate((10, 10, 1000, 1000))]

    def update(sizes):
        rest = list(zip(dialogues, advantage))
        cuts = [[rest.pop(0) for _ in range(n)] for n in sizes]
        batches = [pack(*(d for d, _ in part)) for part in cuts]
        advantages = [
            torch.tensor([[a] for _, a in part]) * b.action_mask for part, b in zip(cuts, batches)
        ]
        notes, critic_notes, old = Notes(policy), Notes(critic), compute_log_probs(policy, batches)
        metrics = optimize(
            policy,
            notes,
            [batches],
            old,
            advantages,
            clip_eps=0.2,
            entropy_coef=0.01,
            max_grad_norm=INF,
            ref=compute_log_probs(Table(9), batches),
            kl_coef=0.1,
            critic=CriticPart(
                critic, critic_notes, [critic(b).detach() for b in batches], advantages, 0.5, INF
            ),
        )
        return notes.seen, critic_notes.seen, metrics

    (gradient,), (critic_gradient,), metrics = update(cut)
    (whole,), (critic_whole,), wanted = update([4])
    close(gradient, whole)
    close(critic_gradient, critic_whole)
    assert metrics == pytest.approx(wanted) and metrics["tokens_trained"] == 2020

    # And it is the mean over the tokens: of V - R for the critic, one token after the other.
    by_hand = torch.zeros(VOCAB, dtype=torch.float64)
    for d, a in zip(dialogues, advantage):
        for before, sampled in zip(d.ids[:-1], d.action_mask[1:]):
            by_hand[before] += (critic.table[before].item() - a) / 2020 if sampled else 0.0
    close(critic_gradient, by_hand)


def test_a_gradient_is_of_its_own_step():
    """Two mini-batches of the same dialogues, under weights that stand still: both steps see the
    same gradient. One that is not reset brings the first along into the second."""
    policy, critic, batch = Table(), Values(), pack(talk(0, 2, 5), talk(1, 3, 4))
    notes, critic_notes, old = Notes(policy), Notes(critic), compute_log_probs(policy, [batch] * 2)
    optimize(
        policy,
        notes,
        [[batch], [batch]],
        old,
        [normal(*batch.ids.shape, seed=1)] * 2,
        clip_eps=0.2,
        max_grad_norm=INF,
        critic=CriticPart(
            critic,
            critic_notes,
            [critic(batch).detach()] * 2,
            [normal(*batch.ids.shape, seed=2)] * 2,
            0.5,
            INF,
        ),
    )
    for seen in (notes.seen, critic_notes.seen):
        assert len(seen) == 2 and torch.equal(*seen) and seen[0].abs().max() > 1e-3


class Ranks:
    """Two ranks as two threads; `reduce` gives both the sum of what the two brought."""

    def __init__(self):
        self.brought, self.barrier = [None, None], threading.Barrier(2, timeout=10)

    def run(self, work):
        def rank(i):
            def reduce(x):
                self.brought[i] = x.clone()  # as all ranks' sum does: of tensors
                self.barrier.wait()
                total = self.brought[0] + self.brought[1]
                self.barrier.wait()  # nobody brings the next one before both have seen this one
                return total

            return work(i, reduce)

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(rank, range(2)))


def test_two_ranks_are_one():
    """Every rank whitens with everybody's mean and divides by everybody's tokens, so that two
    halves, of unequal size here, make the gradient of the whole. A sum that forgets to be reduced
    trains two models on two opinions."""
    masks, tensors = (
        [ragged(1), ragged(2, length=9)],
        [normal(6, 14, seed=1) + 5, 3 * normal(6, 9, seed=2)],
    )
    wanted = masked_mean_std(tensors, masks)
    for got in Ranks().run(
        lambda i, reduce: masked_mean_std(tensors[i : i + 1], masks[i : i + 1], reduce)
    ):
        close(torch.stack(got), torch.stack(wanted))

    dialogues = [talk(s, 2, 3 + s, 2, 4) for s in range(6)]
    # [rank][micro-batch]
    share = [
        [pack(*dialogues[:1]), pack(dialogues[1])],
        [pack(*dialogues[2:4]), pack(*dialogues[4:])],
    ]

    def update(batches, **more):
        policy, critic = Table(), Values()
        notes, critic_notes = Notes(policy), Notes(critic)
        ppo_update(
            policy,
            notes,
            critic,
            critic_notes,
            [batches],
            clip_eps=0.2,
            entropy_coef=0.01,
            max_grad_norm=INF,
            **more,
        )
        return torch.cat(notes.seen + critic_notes.seen)

    halves = Ranks().run(lambda i, reduce: update(share[i], reduce=reduce))
    close(halves[0] + halves[1], update(share[0] + share[1]))


def update(policy, batches, critic=None, **settings):
    """A PPO update with one mini-batch per batch, and SGD that moves."""
    critic = critic or Values()
    return ppo_update(
        policy,
        torch.optim.SGD(policy.parameters(), lr=1.0),
        critic,
        torch.optim.SGD(critic.parameters(), lr=1.0),
        [[batch] for batch in batches],
        clip_eps=0.2,
        **settings,
    )


def test_the_metrics_are_means_over_all_tokens_and_steps():
    """On paper, for a policy to which all five tokens are alike, and which stands still: entropy
    log 5. Four tokens with a ratio of 1; in a second mini-batch four with 1.5, which the clip
    holds, and two with 0.5, which it leaves alone. k3 of KL(pi_old, pi) is 0.5 - log 1.5 of the
    former and log 2 - 0.5 of the latter. A second rank with the same doubles the tokens, and no
    mean."""
    policy = Table()
    policy.logits.data.zero_()
    batches = [
        pack(talk(0, 2, 4, 1, policy=policy)),
        pack(talk(1, 1, 1, 1, 3, policy=policy)),
        pack(talk(2, 3, 2, policy=policy)),
    ]
    old = [
        o - math.log(ratio) for o, ratio in zip(compute_log_probs(policy, batches), (1, 1.5, 0.5))
    ]
    for ranks in (1, 2):
        notes = Notes(policy)
        metrics = optimize(
            policy,
            notes,
            [batches[:1], batches[1:]],
            old,
            [torch.ones(b.ids.shape) for b in batches],
            clip_eps=0.2,
            max_grad_norm=INF,
            reduce=lambda x: ranks * x,
        )
        norms = [float(gradient.norm()) for gradient in notes.seen]
        wanted = {
            "kl": (4 * (0.5 - math.log(1.5)) + 2 * (math.log(2) - 0.5)) / 10,
            "entropy": math.log(5),
            "clipfrac": 0.4,
            "grad_norm": sum(norms) / 2,
            "tokens_trained": 10 * ranks,
        }
        assert {key: metrics[key] for key in wanted} == pytest.approx(wanted)


def test_each_model_has_its_own_limit_and_a_frozen_policy_only_looks_on():
    """A norm is cut to the limit of its own model. And while the critic warms up, the policy is
    looked at, measured, and left as it is: its metrics are those of a policy that was about to
    move, and a second look finds the gradient of the first, not twice as much."""

    def step(count=1, **more):
        policy, critic, batch = Table(), Values(), pack(talk(0, 2, 5), talk(1, 3, 4))
        before, critic_before, old = (
            weights(policy),
            weights(critic),
            compute_log_probs(policy, [batch]),
        )
        metrics = optimize(
            policy,
            torch.optim.SGD(policy.parameters(), lr=1.0),
            [[batch]] * count,
            old * count,
            [normal(*batch.ids.shape, seed=1)] * count,
            clip_eps=0.2,
            max_grad_norm=0.02,
            critic=CriticPart(
                critic,
                torch.optim.SGD(critic.parameters(), lr=1.0),
                [critic(batch).detach()] * count,
                [normal(*batch.ids.shape, seed=2)] * count,
                0.5,
                0.03,
            ),
            **more,
        )
        return metrics, *[
            math.sqrt(
                sum(((value - was[name]) ** 2).sum() for name, value in model.state_dict().items())
            )
            for model, was in ((policy, before), (critic, critic_before))
        ]

    moving, looking = step(), step(frozen=True)
    close(moving[1:], [0.02, 0.03], 1e-4)
    close(looking[1:], [0, 0.03], 1e-4)
    assert moving[0] == looking[0] and moving[0]["grad_norm"] > 0.1
    close(step(2, frozen=True)[0]["grad_norm"], looking[0]["grad_norm"])


def test_the_entropy_is_a_bonus():
    """A step goes up the entropy, not down: where nothing else is to be learned, a policy forgets
    its preferences, a little. With the wrong sign it would only grow more certain of what it does
    already. The mean is over the policy's tokens, here all behind token 0."""
    policy, _, batch = every_outcome()
    notes = Notes(policy)
    optimize(
        policy,
        notes,
        [[batch]],
        compute_log_probs(policy, [batch]),
        [torch.zeros(batch.ids.shape)],
        clip_eps=0.2,
        entropy_coef=0.3,
        max_grad_norm=INF,
    )
    (up,) = torch.autograd.grad(
        torch.distributions.Categorical(logits=policy.logits[0]).entropy(), policy.logits
    )
    close(notes.seen[0], -0.3 * up.flatten())


def test_k1_is_no_loss():
    """k1 belongs in the reward, where it has been put before a step is taken. In the loss its
    gradient is 0 on average and noise in every batch; so a step of k1 is the step without it, and
    that of the others is not."""
    policy, batch = Table(), pack(talk(0, 2, 5), talk(1, 3, 4))
    old, ref, advantages = (
        compute_log_probs(policy, [batch]),
        compute_log_probs(Table(9), [batch]),
        [normal(*batch.ids.shape, seed=1)],
    )

    def gradient(estimator, kl_coef=0.3):
        notes = Notes(policy)
        optimize(
            policy,
            notes,
            [[batch]],
            old,
            advantages,
            clip_eps=0.2,
            max_grad_norm=INF,
            ref=ref,
            kl_coef=kl_coef,
            kl_estimator=estimator,
        )
        return notes.seen[0]

    without = gradient("k3", 0.0)
    close(gradient("k1"), without)
    assert all(
        (gradient(estimator) - without).abs().max() > 1e-2 for estimator in ("k2", "k3", "k3-ratio")
    )


def test_a_micro_batch_in_which_the_policy_is_silent_adds_nothing():
    """A rank that has fewer micro-batches than another runs one in which nobody speaks. No mean of
    nothing, no maximum of nothing: the step is what it is without it, and a step of nothing else is
    none."""

    def step(*micros):
        policy, critic = Table(), Values()
        notes, critic_notes, old = Notes(policy), Notes(critic), compute_log_probs(policy, micros)
        metrics = optimize(
            policy,
            notes,
            [list(micros)],
            old,
            [torch.ones(b.ids.shape) for b in micros],
            clip_eps=0.2,
            entropy_coef=0.1,
            max_grad_norm=INF,
            critic=CriticPart(
                critic,
                critic_notes,
                [critic(b).detach() for b in micros],
                [torch.ones(b.ids.shape) for b in micros],
                0.5,
                INF,
            ),
        )
        # to take no step at all is right as well
        return torch.cat(notes.seen + critic_notes.seen or [torch.zeros(1)]), metrics

    speech, silence = pack(talk(0, 2, 5), talk(1, 3, 4)), pack(talk(2, 3))
    (wanted, told), (got, said), (none, nothing) = (
        step(speech),
        step(silence, speech, silence),
        step(silence),
    )
    close(got, wanted)
    assert said == pytest.approx(told) and (none == 0).all() and set(nothing.values()) == {0}


def test_what_sharding_divides_is_multiplied_back():
    """FSDP hands out the mean of the ranks' gradients, where their sum is meant: each rank's share
    is made larger by the number of ranks, the critic's too. Else the more GPUs, the wider the limit
    on its norm."""

    def gradients(ranks):
        policy, critic, batch = Table(), Values(), pack(talk(0, 2, 5), talk(1, 3, 4))
        notes, critic_notes = Notes(policy), Notes(critic)
        optimize(
            policy,
            notes,
            [[batch]],
            compute_log_probs(policy, [batch]),
            [normal(*batch.ids.shape, seed=1)],
            clip_eps=0.2,
            entropy_coef=0.1,
            max_grad_norm=INF,
            ranks=ranks,
            critic=CriticPart(
                critic,
                critic_notes,
                [critic(batch).detach()],
                [normal(*batch.ids.shape, seed=2)],
                0.5,
                INF,
            ),
        )
        return torch.cat(notes.seen + critic_notes.seen)

    close(gradients(8), 8 * gradients(1))


def test_the_first_ratio_must_be_1():
    """Dropout that was left on: before the first step pi and pi_old are the same weights on the
    same tokens. Dropout, left on, makes them two policies; the update must stop before it moves
    anything. Afterwards the ratio may go where it wants."""
    batches = [pack(talk(s, 2, 5, 3, 4), talk(s + 9, 1, 6)) for s in range(2)]
    policy, critic = Table(dropout=0.5), Values()
    before, critic_before = weights(policy), weights(critic)
    with pytest.raises(SelfCheckFailed):
        update(policy, batches, critic)
    assert untouched(policy, before) and untouched(critic, critic_before)
    metrics = update(policy.eval(), batches)
    # the second mini-batch was past a ratio of 1
    assert metrics["kl"] > 1e-4 and not untouched(policy, before)


def test_the_first_mini_batch_is_passed_once_and_the_engine_still_checked():
    """Once the ratio has been seen to be 1, log pi_old of the first mini-batch comes from the pass
    that trains it; a k1 reward needs it before. And an engine with other weights is found out
    there, too, before any step."""
    batches, passes = [pack(talk(s, 2, 5), talk(s + 9, 1, 6)) for s in range(3)], []
    policy = Table()
    policy.register_forward_hook(
        lambda module, args, out: passes.append([args[0] is b for b in batches].index(True))
    )
    k1 = dict(reference=Table(9), kl_coef=0.1, kl_estimator="k1")
    for settings, wanted in (
        ({}, [0, 1, 2] * 2),
        ({"check_ratio": False}, [1, 2, 0, 1, 2]),
        ({"check_ratio": False, **k1}, [0, 1, 2] * 2),
    ):
        update(policy, batches, **settings)
        assert passes == wanted
        passes.clear()
    for check_ratio in (True, False):
        policy, critic = Table(), Values()
        before, critic_before = weights(policy), weights(critic)
        with pytest.raises(SelfCheckFailed, match="engine"):
            update(
                policy,
                [pack(talk(0, 2, 5, gap=1.0))],
                critic,
                gap_limits=(1e-4, 1e-2),
                check_ratio=check_ratio,
            )
        assert untouched(policy, before) and untouched(critic, critic_before)


@pytest.mark.parametrize("broken", ["policy", "critic"])
@pytest.mark.parametrize("slope", [NAN, INF])
def test_a_broken_gradient_stops_before_the_weights_do(slope, broken):
    """Clipping a NaN gradient makes every weight NaN, clipping an infinite one too (0 times
    infinity), and the night's checkpoints after it. Stop, with both models as they were, whichever
    of the two it is: the loss itself may look fine."""
    policy, critic = Table(), Values()
    before, critic_before = weights(policy), weights(critic)
    list((policy if broken == "policy" else critic).parameters())[0].register_hook(
        lambda gradient: gradient * slope
    )
    with pytest.raises(SelfCheckFailed):
        update(policy, [pack(talk(0, 2, 5), talk(1, 2, 5))], critic)
    assert untouched(policy, before) and untouched(critic, critic_before)


def test_a_reward_that_is_no_number_stops_the_update():
    """One NaN, whitened over the batch, is everybody's advantage."""
    policy, critic = Table(), Values()
    before, critic_before = weights(policy), weights(critic)
    with pytest.raises(SelfCheckFailed, match="gradient"):
        update(policy, [pack(talk(0, 2, 5)), pack(talk(1, 2, 5, reward=NAN))], critic)
    assert untouched(policy, before) and untouched(critic, critic_before)


def test_engine_and_trainer_must_agree():
    """Defect 27: from its second step the released code sampled gibberish, from weights that were
    not the trainer's. Mean and maximum are over the policy's tokens, each has its limit, and NaN,
    which an engine can return, passes none."""
    batches = [pack(talk(0, 2, 4, 3), talk(1, 1, 2)), pack(talk(2, 3, 3))]
    old = compute_log_probs(Table(), batches)
    assert logp_gap(batches, old, (1e-12, 1e-12)) == {"logp_gap": 0, "logp_gap_max": 0}
    for b in batches:
        # nobody's business
        b.engine_log_probs = torch.where(b.action_mask, b.engine_log_probs, 50.0)
    batches[0].engine_log_probs[0, 2] += 0.4
    batches[1].engine_log_probs[0, 5] -= 0.5
    found = logp_gap(batches, old, (0.11, 0.51))
    close([found["logp_gap"], found["logp_gap_max"]], [0.9 / 9, 0.5])
    for limits in ((0.09, 0.51), (0.11, 0.49)):
        with pytest.raises(SelfCheckFailed):
            logp_gap(batches, old, limits)
    policy = Table()
    before = weights(policy)
    with pytest.raises(SelfCheckFailed):
        update(policy, batches, gap_limits=(0.11, 0.49))
    assert untouched(policy, before)
    assert logp_gap(batches, old)["logp_gap_max"] > 0.49  # without limits it is measured, no more
    batches[0].engine_log_probs[0, 3] = NAN
    with pytest.raises(SelfCheckFailed):
        logp_gap(batches, old, (INF, INF))


def test_grad_norm_is_the_mean_over_all_mini_batches():
    """Defect 28: an indentation, and the released code logs the last mini-batch's norm alone. And
    it is the norm before clipping: the one after never says more than the limit."""
    batches = [pack(talk(0, 2, 9)), pack(talk(1, 2, 3), talk(2, 2, 4)), pack(talk(3, 1, 5))]
    policy = Table()

    def optimise_at(chosen, limit):
        notes, scale = Notes(policy), [1.0, 4.0, 0.2]
        metrics = optimize(
            policy,
            notes,
            [[batches[i]] for i in chosen],
            compute_log_probs(policy, [batches[i] for i in chosen]),
            [scale[i] * batches[i].action_mask for i in chosen],
            clip_eps=0.2,
            max_grad_norm=limit,
        )
        return metrics["grad_norm"], [float(g.norm()) for g in notes.seen]

    mean, norms = optimise_at([0, 1, 2], INF)
    assert max(norms) > 2 * min(norms)
    close(mean, sum(norms) / 3)
    clipped_mean, clipped = optimise_at([0, 1, 2], 0.01)
    close(clipped, [0.01] * 3)
    close(clipped_mean, mean)
    close([optimise_at([i], INF)[0] for i in range(3)], norms)


def test_explained_variance():
    """1 for a critic that knows, 0 for one that says the same to everybody, below for one that is
    worse than that; over the policy's tokens of all batches, and a number even where the returns do
    not vary."""
    masks = [ragged(1), ragged(2, length=9)]
    returns = [normal(6, 14, seed=1), 2 + normal(6, 9, seed=2)]
    values = [r + normal(*r.shape, seed=3) for r in returns]
    v, r = (np.concatenate([x[m].numpy() for x, m in zip(xs, masks)]) for xs in (values, returns))
    values = [x.masked_fill(~m, NAN) for x, m in zip(values, masks)]
    close(explained_variance(values, returns, masks), 1 - np.var(r - v) / np.var(r))
    close(explained_variance(returns, returns, masks), 1)
    close(explained_variance([torch.full_like(r, 9) for r in returns], returns, masks), 0)
    close(explained_variance([-r for r in returns], returns, masks), -3)
    assert explained_variance(values, [torch.ones_like(r) for r in returns], masks) == 0
    assert explained_variance(values, returns, [torch.zeros_like(m) for m in masks]) == 0


def by_hand(
    policy,
    reference,
    critic,
    minibatches,
    *,
    gamma,
    lam,
    clip_eps,
    entropy_coef,
    kl_coef,
    estimator,
    value_clip,
    max_grad_norm,
    lr,
    critic_lr,
):
    """The PPO update once more: numpy, one token at a time, no autograd. The gradient of log pi(y |
    s) by the logits of row s is onehot(y) - pi; that of the entropy is -pi (log pi + H). Returns
    (logits, table, whether each of the limits was met somewhere, metrics)."""
    logits, table = policy.logits.detach().numpy().copy(), critic.table.detach().numpy().copy()
    log_pi = lambda s: logits[s] - np.log(np.exp(logits[s]).sum())
    log_ref = reference.logits.detach().log_softmax(-1).numpy()

    # Who acted, and how well: a list of tokens per mini-batch.
    steps = []
    for micros in minibatches:
        steps.append([])
        for batch in micros:
            for b in range(len(batch.ids)):
                ids, tokens = batch.ids[b].tolist(), []
                for t in batch.action_mask[b].nonzero()[:, 0].tolist():
                    s, y = ids[t - 1], ids[t]
                    engine = batch.engine_log_probs[b, t].item()
                    tokens.append(
                        SimpleNamespace(
                            s=s, y=y, old=log_pi(s)[y], engine=engine, v=table[s], r=0.0
                        )
                    )
                tokens[-1].r = batch.reward[b].sum().item()
                if estimator == "k1":
                    for x in tokens:
                        x.r -= kl_coef * (x.old - log_ref[x.s, x.y])
                v = [x.v for x in tokens] + [0.0]
                delta = [x.r + gamma * v[i + 1] - v[i] for i, x in enumerate(tokens)]
                for i, x in enumerate(tokens):
                    x.raw = sum((gamma * lam) ** k * d for k, d in enumerate(delta[i:]))
                    x.target = x.raw + x.v
                steps[-1] += tokens
    everyone = [x for tokens in steps for x in tokens]
    raw, v, target = (
        np.array([getattr(x, name) for x in everyone]) for name in ("raw", "v", "target")
    )
    gaps = [abs(x.engine - x.old) for x in everyone]
    seen = {
        "kl": [],
        "entropy": [],
        "clipfrac": [],
        "grad_norm": [],
        "value_clipped": [],
        "critic_norm": [],
    }

    # One step of gradient descent per mini-batch, both models.
    for tokens in steps:
        slope, critic_slope = np.zeros_like(logits), np.zeros_like(table)
        for x in tokens:
            log_p, advantage = log_pi(x.s), (x.raw - raw.mean()) / raw.std(ddof=1)
            p, lp, ref = np.exp(log_p), log_p[x.y], log_ref[x.s, x.y]
            rho, h = math.exp(lp - x.old), -(p * log_p).sum()
            clipped = rho > 1 + clip_eps if advantage > 0 else rho < 1 - clip_eps
            factor = 0.0 if clipped else -min(math.exp(x.old - x.engine), 2.0) * rho * advantage
            if estimator == "k2":
                factor += kl_coef * (lp - ref)
            elif estimator == "k3":
                factor += kl_coef * (1 - math.exp(ref - lp))
            elif estimator == "k3-ratio":  # (rho k3)' = rho (k3 + k3')
                factor += (
                    kl_coef * rho * (math.exp(ref - lp) - 1 - (ref - lp) + 1 - math.exp(ref - lp))
                )
            slope[x.s] += factor * ((np.arange(VOCAB) == x.y) - p) + entropy_coef * p * (log_p + h)
            value = table[x.s]
            near = x.v + min(max(value - x.v, -value_clip), value_clip)
            stuck = (
                abs(value - x.v) > value_clip and (near - x.target) ** 2 > (value - x.target) ** 2
            )
            critic_slope[x.s] += 0.0 if stuck else value - x.target
            for name, number in (
                ("kl", rho - 1 - (lp - x.old)),
                ("entropy", h),
                ("clipfrac", clipped),
                ("value_clipped", stuck),
            ):
                seen[name].append(number)
        for name, weight, gradient, rate in (
            ("grad_norm", logits, slope, lr),
            ("critic_norm", table, critic_slope, critic_lr),
        ):
            norm = np.sqrt((gradient**2).sum()) / len(tokens)
            seen[name].append(norm)
            weight -= rate * gradient / len(tokens) * min(1.0, max_grad_norm / (norm + 1e-6))
    limits = {
        "grad_norm": max_grad_norm,
        "critic_norm": max_grad_norm,
        "kl": 0.01,
        "clipfrac": 0,
        "value_clipped": 0,
    }
    acted = {name: max(seen[name]) > limit for name, limit in limits.items()}
    metrics = {name: np.mean(seen[name]) for name in ("kl", "entropy", "clipfrac", "grad_norm")}
    metrics |= {
        "tokens_trained": len(everyone),
        "logp_gap": np.mean(gaps),
        "logp_gap_max": max(gaps),
    }
    return (
        logits,
        table,
        acted,
        {**metrics, "explained_variance": 1 - np.var(target - v) / np.var(target)},
    )


@pytest.mark.parametrize("check_ratio", [True, False])
@pytest.mark.parametrize("estimator", [None, "k1", "k2", "k3", "k3-ratio"])
def test_a_whole_update_by_hand(estimator, check_ratio):
    """All of it, against the same thing written out: three optimizer steps of two micro-batches
    each, on dialogues with user lines between and behind, gamma and lambda below 1, an engine that
    is off, both clips and both limits of the gradients at work. If a list is out of order, a mask
    missing or a sign wrong, the weights end elsewhere; so they do if log pi_old of the first
    mini-batch, which its own pass finds unless the ratio is to be checked, is anything else."""
    policy, reference, critic = Table(1), Table(2), Values(3)
    turns = [
        (2, 3),
        (1, 4, 3, 2),
        (2, 2, 1, 3, 4),
        (3, 1),
        (1, 5, 2),
        (2, 1, 2, 2),
        (1, 2, 5),
        (2, 6),
        (4, 3, 1, 1),
        (1,) * 6,
    ]
    d = [talk(s, *t, policy=policy, gap=0.7) for s, t in enumerate(turns)]
    minibatches = [
        [pack(*d[:2]), pack(d[2])],
        [pack(d[3]), pack(*d[4:7])],
        [pack(d[7], d[8]), pack(d[9])],
    ]
    settings = dict(
        gamma=0.9,
        lam=0.8,
        clip_eps=0.2,
        entropy_coef=0.05,
        kl_coef=0.3 if estimator else 0.0,
        value_clip=0.5,
        max_grad_norm=0.1,
    )
    logits, table, acted, wanted = by_hand(
        policy, reference, critic, minibatches, estimator=estimator, lr=20, critic_lr=15, **settings
    )
    got = ppo_update(
        policy,
        torch.optim.SGD(policy.parameters(), lr=20),
        critic,
        torch.optim.SGD(critic.parameters(), lr=15),
        minibatches,
        reference=reference,
        kl_estimator=estimator or "k3",
        check_ratio=check_ratio,
        **settings,
    )
    assert all(acted.values()), acted  # else the test would not see them
    close(policy.logits.detach(), logits)
    close(critic.table.detach(), table)
    assert got == pytest.approx(wanted, rel=1e-5)
