"""A whole PPO update by hand: numpy, one token at a time, no autograd."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from ppo import ppo_update
from tabular import VOCAB, Table, Values, cfg_of, close, models_of, pack, sgd, talk


def log_softmax(row):
    return row - np.log(np.exp(row).sum())


def tokens_of(batch, b, logits, table, log_ref, settings):
    """The policy's tokens of dialogue b: each with the token before it (s), itself (y), log pi_old
    (old), what the engine said, V (v), its reward (r), its advantage (raw) and its return."""
    ids, tokens = batch.ids[b].tolist(), []
    for t in batch.action_mask[b].nonzero()[:, 0].tolist():
        s, y = ids[t - 1], ids[t]
        engine, old = batch.engine_log_probs[b, t].item(), log_softmax(logits[s])[y]
        tokens.append(SimpleNamespace(s=s, y=y, old=old, engine=engine, v=table[s], r=0.0))
    tokens[-1].r = batch.reward[b].sum().item()
    if settings.estimator == "k1":
        for x in tokens:
            x.r -= settings.kl_coef * (x.old - log_ref[x.s, x.y])
    v = [x.v for x in tokens] + [0.0]
    delta = [x.r + settings.gamma * v[i + 1] - v[i] for i, x in enumerate(tokens)]
    for i, x in enumerate(tokens):
        x.raw = sum((settings.gamma * settings.lam) ** k * d for k, d in enumerate(delta[i:]))
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


def policy_slope(x, advantage, logits, log_ref, settings):
    """The gradient of one token's loss by its row of the logits, and what is measured of it."""
    log_pi = log_softmax(logits[x.s])
    p, log_p = np.exp(log_pi), log_pi[x.y]
    rho, h = math.exp(log_p - x.old), -(p * log_pi).sum()
    clip = settings.clip_eps
    clipped = rho > 1 + clip if advantage > 0 else rho < 1 - clip
    weight = min(math.exp(x.old - x.engine), 2.0)
    factor = 0.0 if clipped else -weight * rho * advantage
    factor += settings.kl_coef * kl_slope(settings.estimator, log_p, log_ref[x.s, x.y], rho)
    slope = factor * ((np.arange(VOCAB) == x.y) - p) + settings.entropy_coef * p * (log_pi + h)
    return slope, {"kl": rho - 1 - (log_p - x.old), "entropy": h, "clipfrac": clipped}


def value_slope(x, value, clip):
    """The derivative of one token's value loss by V, and whether the clip holds it."""
    near = x.v + min(max(value - x.v, -clip), clip)
    worse = (near - x.target) ** 2 > (value - x.target) ** 2
    held = abs(value - x.v) > clip and worse
    return 0.0 if held else value - x.target, held


def descend(weight, gradient, tokens, rate, limit):
    """One step of gradient descent on the mean over `tokens`, its norm cut to `limit`, in place.
    Returns the norm before."""
    norm = np.sqrt((gradient**2).sum()) / tokens
    weight -= rate * gradient / tokens * min(1.0, limit / (norm + 1e-6))
    return norm


def by_hand(policy, reference, critic, minibatches, **settings):
    """The PPO update once more: numpy, one token at a time, no autograd. The gradient of log pi(y |
    s) by the logits of row s is onehot(y) - pi; that of the entropy is -pi (log pi + H). Returns
    (logits, table, whether each of the limits was met somewhere, metrics)."""
    settings = SimpleNamespace(**settings)
    logits, table = policy.logits.detach().numpy().copy(), critic.table.detach().numpy().copy()
    log_ref = reference.logits.detach().log_softmax(-1).numpy()

    # Who acted, and how well: a list of tokens per mini-batch.
    steps = []
    for micros in minibatches:
        steps.append([])
        for batch in micros:
            for b in range(len(batch.ids)):
                steps[-1] += tokens_of(batch, b, logits, table, log_ref, settings)
    everyone = [x for tokens in steps for x in tokens]
    raw, v, target = (
        np.array([getattr(x, name) for x in everyone]) for name in ("raw", "v", "target")
    )
    names = ("kl", "entropy", "clipfrac", "grad_norm", "value_clipped", "critic_norm")
    seen = {name: [] for name in names}

    # One step of gradient descent per mini-batch, both models.
    for tokens in steps:
        slope, critic_slope = np.zeros_like(logits), np.zeros_like(table)
        for x in tokens:
            advantage = (x.raw - raw.mean()) / raw.std(ddof=1)
            row, measured = policy_slope(x, advantage, logits, log_ref, settings)
            slope[x.s] += row
            number, measured["value_clipped"] = value_slope(x, table[x.s], settings.value_clip)
            critic_slope[x.s] += number
            for name, value in measured.items():
                seen[name].append(value)
        limit, n = settings.max_grad_norm, len(tokens)
        seen["grad_norm"].append(descend(logits, slope, n, settings.lr, limit))
        seen["critic_norm"].append(descend(table, critic_slope, n, settings.critic_lr, limit))
    limits = {"grad_norm": limit, "critic_norm": limit, "kl": 0.01, "clipfrac": 0}
    limits["value_clipped"] = 0
    acted = {name: max(seen[name]) > limit for name, limit in limits.items()}
    gaps = [abs(x.engine - x.old) for x in everyone]
    metrics = {name: np.mean(seen[name]) for name in ("kl", "entropy", "clipfrac", "grad_norm")}
    metrics |= {
        "tokens_trained": len(everyone),
        "logp_gap": np.mean(gaps),
        "logp_gap_max": max(gaps),
        "explained_variance": 1 - np.var(target - v) / np.var(target),
    }
    return logits, table, acted, metrics


@pytest.mark.parametrize("check_ratio", [True, False])
@pytest.mark.parametrize("estimator", [None, "k1", "k2", "k3", "k3-ratio"])
def test_a_whole_update_by_hand(estimator, check_ratio, monkeypatch):
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
    )
    monkeypatch.setattr("ppo.MAX_GRAD_NORM", 0.1)
    logits, table, acted, wanted = by_hand(
        policy,
        reference,
        critic,
        minibatches,
        estimator=estimator,
        lr=20,
        critic_lr=15,
        max_grad_norm=0.1,
        **settings,
    )
    optimizers = sgd(policy, 20), sgd(critic, 15)
    models = models_of(
        policy, optimizers[0], critic, optimizers[1], reference=reference, fresh=check_ratio
    )
    got = ppo_update(models, minibatches, cfg_of(kl_estimator=estimator or "k3", **settings))
    assert all(acted.values()), acted  # else the test would not see them
    close(policy.logits.detach(), logits)
    close(critic.table.detach(), table)
    assert got == pytest.approx(wanted, rel=1e-5)
