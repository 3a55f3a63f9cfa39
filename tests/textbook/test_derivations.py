"""The derivations of the course: the formulas of the model answers (course/teacher/derivations.md)
against sums over all outcomes of a small game. Nothing is sampled, and no sum uses a formula.

The policy of most games chooses between the actions 1 and 2 and has one weight, theta; p is the
probability of action 1.
"""

import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ppo import gae

PAGE = Path(__file__).resolve().parents[2] / "course" / "teacher" / "derivations.md"
P, R1, R2, N = 0.3, 0.9, 0.4, 4


def answers(derivation):
    """The functions of the model answer to a derivation."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {derivation}\n")[1].split("\n## ")[0]
    names = {"math": math, "np": np}
    exec(re.search(r"(?s)```python\n(.*?)```", section)[1], names)
    return SimpleNamespace(**names)


def score(action, p):
    """d log pi(action) / d theta."""
    return 1 - p if action == 1 else -p


def moments(probabilities, value):
    """Mean and variance of value(*actions) over all sequences of actions. probabilities: of
    action 1."""
    sequences = list(itertools.product((1, 2), repeat=len(probabilities)))
    chances = [
        math.prod(p if a == 1 else 1 - p for a, p in zip(actions, probabilities))
        for actions in sequences
    ]
    return weighted_moments(chances, np.array([value(*actions) for actions in sequences]))


def normal_moments(value):
    """Mean and variance of value(x) for a standard normal x, on a fine grid."""
    x = torch.arange(-14, 14, 1e-4, dtype=torch.float64)
    density = 1e-4 * torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    return weighted_moments(density, value(x))


def weighted_moments(chances, values):
    mean = np.tensordot(chances, values, 1)
    return np.array([mean, np.tensordot(chances, (values - mean) ** 2, 1)])


def close(number):
    return pytest.approx(number, rel=1e-6, abs=1e-9)


def gradient_of_group(advantages_of):
    """The expected gradient of a group of N, for a function rewards -> advantages."""

    def gradient(*actions):
        rewards = np.array([R1 if a == 1 else R2 for a in actions])
        return np.mean(advantages_of(rewards) * [score(a, P) for a in actions])

    return moments([P] * N, gradient)[0]


def test_baseline():
    answer = answers("baseline")
    assert answer.with_group_mean(P, R1, R2, N) == close(
        gradient_of_group(lambda rewards: rewards - rewards.mean())
    )

    def noise(p, r1, r2, b):
        return moments([p], lambda a: ((r1 if a == 1 else r2) - b) * score(a, p))[1]

    assert answer.variance(P, R1, R2, 0.1) == close(noise(P, R1, R2, 0.1))
    assert noise(P, R1, R2, answer.best_baseline(P, R1, R2)) == close(0)
    p = answer.worse_above(0.2)  # there the mean reward and no baseline are equally noisy
    assert noise(p, 1, 0.2, p + (1 - p) * 0.2) == close(noise(p, 1, 0.2, 0))


def test_group_std():
    answer = answers("group-std")
    assert answer.group_gradient(P, R1, R2, N) == close(
        gradient_of_group(lambda r: (r - r.mean()) / (r.std(ddof=1) or 1))
    )

    def limit(logits, r):
        """Mean and std are those of the policy, as in a large group."""
        pi = logits.softmax(0)
        centred = r - pi @ r
        return pi * centred / (pi @ centred**2).sqrt() @ (torch.eye(len(r)) - pi)

    pi, r = torch.tensor([[0.2, 0.5, 0.3], [0.1, 0.7, 0.4]], dtype=torch.float64)
    assert answer.limit_gradient(pi.numpy(), r.numpy()) == close(limit(pi.log(), r).numpy())
    jacobian = torch.autograd.functional.jacobian(lambda logits: limit(logits, r), pi.log())
    assert answer.curl(pi.numpy(), r.numpy()) == close((jacobian.T - jacobian).numpy())
    slope = (answer.objective(P + 1e-5) - answer.objective(P - 1e-5)) / 2e-5 * P * (1 - P)
    two = limit(torch.tensor([P, 1 - P]).log(), torch.tensor([1.0, 0.0]))
    assert slope == pytest.approx(two[0].item())


def test_shaping():
    answer = answers("shaping")
    p, up, down, q = np.array([0.3, 0.6]), np.array([4.0, 7.0]), np.array([5.0, 2.0]), 0.2

    def noise(of_earlier):
        """The variance of the last turn's gradient; of_earlier: whether it is paid those, too."""

        def change(*actions):
            earlier = sum(u if a == 1 else -d for a, u, d in zip(actions, up, down))
            return (of_earlier * (30 + earlier) + (6 if actions[-1] == 1 else -3)) / 100

        mean, _ = moments([*p, q], change)
        return moments([*p, q], lambda *a: (change(*a) - mean) * score(a[-1], q))[1]

    assert answer.extra_variance(p, up, down, q, 6, 3) == close(noise(True) - noise(False))
    for gamma in (0.1, 0.5, 0.99):
        (a1, a2), (b1, b2) = answer.two_dialogues(gamma)
        assert max(abs(x) for x in (a1 - 30, a2 - a1, b1 - 30, b2 - b1)) <= 10 + 1e-9
        assert a2 > b2 and a1 - 30 + gamma * (a2 - a1) < b1 - 30 + gamma * (b2 - b1)
        constants = []  # what the return has beside the discounted terminal reward
        for path in ([35], [35, 28], [21, 44, 50]):
            rewards = answer.turn_rewards(np.array([30.0, *path]), gamma)
            discounts = gamma ** np.arange(len(path))
            constants.append(discounts @ rewards - discounts[-1] * path[-1] / 100)
        assert constants == close([constants[0]] * 3)


def test_last_talker():
    """The factors that test_grpo.py enumerates, for c = 0.3 and three dialogues."""
    answer = answers("last-talker")
    assert answer.with_oneself(0.3, 3) == close([2 / 3, 0.27])
    assert answer.lone_gets_zero(0.3, 3) == close([1, 0.51])


def test_clip_mask():
    answer = answers("clip-mask")
    for ratio, advantage in itertools.product((0.7, 0.9, 1.1, 1.3), (-0.5, 0.5)):
        log_ratio = torch.tensor(math.log(ratio), requires_grad=True)
        rho = log_ratio.exp()
        torch.min(rho * advantage, rho.clamp(0.8, 1.2) * advantage).backward()
        assert answer.clipped_gradient(ratio, advantage, 0.2) == close(log_ratio.grad.item())
        theta = math.log(P / (1 - P)) + answer.largest_rate(P, advantage, 0.2) * advantage * (1 - P)
        assert 1 / (1 + math.exp(-theta)) / P == close(1 + math.copysign(0.2, advantage))
    assert answer.largest_rate(0.9, 0.5, 0.2) == math.inf  # 0.9 * 1.2 is no probability


def test_kl_estimators():
    answer = answers("kl-estimators")
    m = 0.8
    pi, ref = torch.tensor([[0.2, 0.5, 0.3], [0.4, 0.4, 0.2]], dtype=torch.float64)
    estimators = (lambda u: u, lambda u: u**2 / 2, lambda u: (-u).exp() - 1 + u)
    gradients = answer.loss_gradients(pi.numpy(), ref.numpy())
    for moment, gradient, k in zip(answer.gaussian_moments(m), gradients, estimators):
        assert moment == close(normal_moments(lambda x, k=k: k(-(x**2) / 2 + (x - m) ** 2 / 2)))
        logits = pi.log().requires_grad_()
        (pi @ k(logits.log_softmax(0) - ref.log())).backward()
        assert gradient == close(logits.grad.numpy())


def test_lambda_credit():
    """By the project's own `gae`; where the user's tokens are counted, the mask has them."""
    answer = answers("lambda-credit")
    w1, w2, n, m, lam = 0.7, 0.2, 5, 3, 0.9
    for users, expected in (
        (0, answer.first_token(P, R1, R2, w1, w2, n, lam)),
        (m, answer.first_token_counted(P, R1, R2, w1, w2, n, lam, m)),
    ):
        values = torch.tensor([[0.5] + [0.0] * users + [w] * (n - 1) for w in (w1, w2)])
        rewards = torch.zeros_like(values)
        rewards[:, -1] = torch.tensor([R1, R2])
        advantages, _ = gae(rewards, values, torch.ones_like(values).bool(), gamma=1.0, lam=lam)
        first = advantages[:, 0].tolist()
        enumerated, _ = moments([P], lambda a, first=first: first[a - 1] * score(a, P))
        assert expected == pytest.approx(enumerated, abs=1e-6)


def test_length_bias():
    answer = answers("length-bias")
    lengths, micro = np.array([2, 5, 3]), np.array([0, 1, 0])
    for d, weights in enumerate(np.transpose(answer.token_weights(lengths, micro))):
        losses = [np.zeros(length) for length in lengths]
        losses[d][0] = 1  # the token whose weight it is
        parts = [np.concatenate([losses[0], losses[2]]), losses[1]]
        means = [np.concatenate(losses).mean(), np.mean([x.mean() for x in losses])]
        assert list(weights) == close([*means, np.mean([x.mean() for x in parts])])

    def gradients(*actions):
        terms = np.array([(-0.5 if a == 1 else 0.8) * score(a, P) for a in actions])
        tokens = np.array([4 if a == 1 else 11 for a in actions])
        return np.mean(terms / tokens), terms.sum() / tokens.sum()

    expected = [f(P, -0.5, 0.8, 4, 11, N) for f in (answer.per_dialogue, answer.per_batch)]
    assert expected == close(list(moments([P] * N, gradients)[0]))


def test_truncation():
    answer = answers("truncation")
    m, c = 0.9, 1.7
    assert answer.truncated(m, c) == close(
        normal_moments(lambda x: (m * x - m**2 / 2).exp().clamp(max=c))
    )
    for p, q in ((0.9, 0.3), (0.1, 0.7), (0.5, 0.5)):
        weights = min(p / q, c), min((1 - p) / (1 - q), c)
        enumerated, _ = moments([q], lambda a, w=weights, p=p: w[a - 1] * 0.5 * score(a, p))
        assert answer.constant_reward(p, q, 0.5, c) == close(enumerated)
