"""Policies, critics and dialogues for tests of PPO and GRPO, so small that every gradient can be
written down.

The policies are tables: the distribution of a token depends on the token before it and nothing
else. They give log-probs, entropies and values on the user's tokens too, where all of them must be
ignored.
"""

from support.settings import Settings

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from ppo import identity, ppo_update

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

    def side_by_side(name):
        return nn.utils.rnn.pad_sequence([getattr(d, name) for d in dialogues], batch_first=True)

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


def a_sum_over_the_policys_tokens(loss, x, mask):
    """A leaking mask, a mean of means: the user's tokens and the padding add nothing to a loss, nor
    to its gradient by `x`, nor to a count; and the sums of two halves are the sum of the whole,
    which no mean of means is. `loss(rows, dress)` returns the loss and counts, of some rows,
    `dress` put on everything that has a value off the mask. Returns what it is of the whole."""

    def hide(t):
        return t.masked_fill(~mask, 30.0)  # e^30 would show

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


def kl(log_p, log_q):
    return (log_p.exp() * (log_p - log_q)).sum()


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


def cfg_of(**changed):
    """A run's settings, some of them `changed`. Entropy is not paid for, unless a test asks."""
    return Settings(**{"entropy_coef": 0.0, **changed})


def models_of(policy=None, optimizer=None, critic=None, critic_optimizer=None, **changed):
    """What an update is handed in place of a run's Models, as in a first step on one rank."""
    fields = dict(
        policy=policy,
        optimizer=optimizer,
        critic=critic,
        critic_optimizer=critic_optimizer,
        reference=None,
        reduce=identity,
        world_size=1,
        gap_limits=None,
        ratio_limit=1e-3,
    )
    return SimpleNamespace(**fields | changed)


def sgd(model, lr=1.0):
    """An optimizer that moves."""
    return torch.optim.SGD(model.parameters(), lr=lr)


def update(policy, batches, critic=None, cfg=None, **fields):
    """A PPO update with one mini-batch per batch, and SGD that moves. fields: of the models."""
    critic = critic or Values()
    models = models_of(policy, sgd(policy), critic, sgd(critic), **fields)
    return ppo_update(models, [[batch] for batch in batches], cfg or cfg_of())
