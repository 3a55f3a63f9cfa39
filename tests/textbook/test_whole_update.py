"""A whole PPO update by hand: numpy, one token at a time, no autograd."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from ppo import VALUE_CLIP, ppo_update
from tabular import VOCAB, Table, Values, cfg_of, close, models_of, pack, sgd, talk

LIMIT, RATE, CRITIC_RATE = 0.1, 20, 15  # of the gradients' norms, and the learning rates


def log_softmax(row):
    return row - np.log(np.exp(row).sum())


def tokens_of(batch, b, logits, table, log_ref, cfg):
    """The policy's tokens of dialogue b: each with the token before it (s), itself (y), log pi_old
    (old), what the engine said, V (v), its reward (r), its advantage (raw) and its return."""
    ids, tokens = batch.ids[b].tolist(), []
    for t in batch.action_mask[b].nonzero()[:, 0].tolist():
        s, y = ids[t - 1], ids[t]
        engine, old = batch.engine_log_probs[b, t].item(), log_softmax(logits[s])[y]
        tokens.append(SimpleNamespace(s=s, y=y, old=old, engine=engine, v=table[s], r=0.0))
    tokens[-1].r = batch.reward[b].sum().item()
    if cfg.kl_estimator == "k1":
        for x in tokens:
            x.r -= cfg.kl_coef * (x.old - log_ref[x.s, x.y])
    v = [x.v for x in tokens] + [0.0]
    delta = [x.r + cfg.gamma * v[i + 1] - v[i] for i, x in enumerate(tokens)]
    for i, x in enumerate(tokens):
        x.raw = sum((cfg.gamma * cfg.lam) ** k * d for k, d in enumerate(delta[i:]))
        x.target = x.raw + x.v
    return tokens


def kl_slope(estimator, log_p, log_ref, rho):
    """The derivative of a KL estimate by log pi of its token."""
    if estimator == "k2":
        return log_p - log_ref
    if estimator == "k3":
        return 1 - math.exp(log_ref - log_p)
    if estimator == "k3-ratio":  # (rho k3)' = rho (k3 + k3')
        k3 = math.exp(log_ref - log_p) - 1 - (log_ref - log_p)
        return rho * (k3 + 1 - math.exp(log_ref - log_p))
    return 0.0


def policy_slope(x, advantage, logits, log_ref, cfg):
    """The gradient of one token's loss by its row of the logits. That of log pi(y | s) by the
    logits of row s is onehot(y) - pi; that of the entropy is -pi (log pi + H)."""
    log_pi = log_softmax(logits[x.s])
    p, log_p = np.exp(log_pi), log_pi[x.y]
    rho, h = math.exp(log_p - x.old), -(p * log_pi).sum()
    clipped = rho > 1 + cfg.clip_eps if advantage > 0 else rho < 1 - cfg.clip_eps
    weight = min(math.exp(x.old - x.engine), 2.0)
    factor = 0.0 if clipped else -weight * rho * advantage
    factor += cfg.kl_coef * kl_slope(cfg.kl_estimator, log_p, log_ref[x.s, x.y], rho)
    return factor * ((np.arange(VOCAB) == x.y) - p) + cfg.entropy_coef * p * (log_pi + h)


def value_slope(x, value, clip):
    """The derivative of one token's value loss by V: 0 where the clip holds it."""
    near = x.v + min(max(value - x.v, -clip), clip)
    worse = (near - x.target) ** 2 > (value - x.target) ** 2
    return 0.0 if abs(value - x.v) > clip and worse else value - x.target


def descend(weight, gradient, rate):
    """One step of gradient descent, the gradient's norm cut to LIMIT, in place."""
    norm = np.sqrt((gradient**2).sum())
    weight -= rate * gradient * min(1.0, LIMIT / (norm + 1e-6))


def by_hand(policy, reference, critic, minibatches, cfg):
    """The update once more. Returns (logits, table, the derivatives by V)."""
    logits, table = policy.logits.detach().numpy().copy(), critic.table.detach().numpy().copy()
    log_ref = reference.logits.detach().log_softmax(-1).numpy()

    # Who acted, and how well: a list of tokens per mini-batch.
    steps = []
    for micros in minibatches:
        steps.append([])
        for batch in micros:
            for b in range(len(batch.ids)):
                steps[-1] += tokens_of(batch, b, logits, table, log_ref, cfg)
    raw = np.array([x.raw for tokens in steps for x in tokens])

    # One step of gradient descent per mini-batch, both models.
    value_slopes = []
    for tokens in steps:
        slope, critic_slope = np.zeros_like(logits), np.zeros_like(table)
        for x in tokens:
            advantage = (x.raw - raw.mean()) / raw.std(ddof=1)
            slope[x.s] += policy_slope(x, advantage, logits, log_ref, cfg)
            value_slopes.append(value_slope(x, table[x.s], VALUE_CLIP))
            critic_slope[x.s] += value_slopes[-1]
        descend(logits, slope / len(tokens), RATE)
        descend(table, critic_slope / len(tokens), CRITIC_RATE)
    return logits, table, value_slopes


@pytest.mark.parametrize("estimator", [None, "k1", "k2", "k3", "k3-ratio"])
def test_a_whole_update_by_hand(estimator, monkeypatch):
    """All of it, against the same thing written out: three optimizer steps of two micro-batches
    each, on dialogues with user lines between and behind, gamma and lambda below 1, an engine that
    is off, both clips and the limit of the gradients at work. If a list is out of order, a mask
    missing or a sign wrong, the weights end elsewhere."""
    policy, reference, critic = Table(1), Table(2), Values(3)
    turns = [(2, 3), (1, 4, 3, 2), (2, 2, 1, 3, 4), (3, 1), (1, 5, 2), (4, 3, 1, 1), (1,) * 6]
    d = [talk(s, *t, policy=policy, gap=0.7) for s, t in enumerate(turns)]
    minibatches = [[pack(*d[:2]), pack(d[2])], [pack(d[3]), pack(d[4])], [pack(d[5]), pack(d[6])]]
    cfg = cfg_of(
        gamma=0.9,
        lam=0.8,
        entropy_coef=0.05,
        kl_coef=0.3 if estimator else 0.0,
        kl_estimator=estimator or "k3",
    )
    monkeypatch.setattr("ppo.MAX_GRAD_NORM", LIMIT)
    logits, table, value_slopes = by_hand(policy, reference, critic, minibatches, cfg)
    optimizers = sgd(policy, RATE), sgd(critic, CRITIC_RATE)
    models = models_of(policy, optimizers[0], critic, optimizers[1], reference=reference)
    metrics = ppo_update(models, minibatches, cfg)
    close(policy.logits.detach(), logits)
    close(critic.table.detach(), table)
    # all limits were met, or the test would not see them
    assert metrics["clipfrac"] > 0 and metrics["grad_norm"] > LIMIT and 0.0 in value_slopes
