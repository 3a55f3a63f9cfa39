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


def expectation(probabilities, value):
    """The mean of value(actions) over all sequences of actions. probabilities: of action 1."""
    total = 0.0
    for actions in itertools.product((1, 2), repeat=len(probabilities)):
        chances = [p if a == 1 else 1 - p for a, p in zip(actions, probabilities)]
        total += math.prod(chances) * value(actions)
    return total


def variance(probabilities, value):
    mean = expectation(probabilities, value)
    return expectation(probabilities, lambda actions: (value(actions) - mean) ** 2)


def close(number):
    return pytest.approx(number, rel=1e-6, abs=1e-9)


def gradient_of_group(advantages_of):
    """The expected gradient of a group of N, for a function rewards -> advantages."""

    def gradient(actions):
        rewards = np.array([R1 if a == 1 else R2 for a in actions])
        return np.mean(advantages_of(rewards) * [score(a, P) for a in actions])

    return expectation([P] * N, gradient)


def test_baseline():
    answer = answers("baseline")
    assert answer.with_group_mean(P, R1, R2, N) == close(
        gradient_of_group(lambda rewards: rewards - rewards.mean())
    )

    def noise(p, r1, r2, b):
        return variance([p], lambda a: ((r1 if a == (1,) else r2) - b) * score(a[0], p))

    assert answer.variance(P, R1, R2, 0.1) == close(noise(P, R1, R2, 0.1))
    best = answer.best_baseline(P, R1, R2)
    assert noise(P, R1, R2, best) < min(noise(P, R1, R2, best + step) for step in (-1e-3, 1e-3))
    p = answer.worse_above(0.2)  # there the mean reward and no baseline are equally noisy
    assert noise(p, 1, 0.2, p + (1 - p) * 0.2) == close(noise(p, 1, 0.2, 0))


def test_group_std():
    answer = answers("group-std")

    def advantages(rewards):
        return (rewards - rewards.mean()) / (rewards.std(ddof=1) or 1)

    assert answer.group_gradient(P, R1, R2, N) == close(gradient_of_group(advantages))

    def limit(logits, r):
        """Mean and std are those of the policy, as in a large group."""
        pi = np.exp(logits) / np.exp(logits).sum()
        mean = (pi * r).sum()
        std = np.sqrt((pi * (r - mean) ** 2).sum())
        return sum(p * (x - mean) / std * (row - pi) for p, x, row in zip(pi, r, np.eye(len(r))))

    pi, r = np.array([0.2, 0.5, 0.3]), np.array([0.1, 0.7, 0.4])
    assert answer.limit_gradient(pi, r) == close(limit(np.log(pi), r))
    steps = 1e-5 * np.eye(3)
    slopes = [limit(np.log(pi) + d, r) - limit(np.log(pi) - d, r) for d in steps]
    jacobian = np.array(slopes) / 2e-5
    assert answer.curl(pi, r) == close(jacobian - jacobian.T)
    low, high = (1 / (1 + math.exp(-theta)) for theta in (-1 - 1e-5, -1 + 1e-5))
    slope = (answer.objective(high) - answer.objective(low)) / 2e-5
    assert slope == close(limit(np.array([-1.0, 0.0]), np.array([1.0, 0.0]))[0])


def test_shaping():
    answer = answers("shaping")
    p, up, down, q = np.array([0.3, 0.6]), np.array([4.0, 7.0]), np.array([5.0, 2.0]), 0.2

    def noise(of_earlier):
        """The variance of the last turn's gradient; of_earlier: whether it is paid those, too."""

        def change(actions):
            earlier = sum(u if a == 1 else -d for a, u, d in zip(actions, up, down))
            return (of_earlier * (30 + earlier) + (6 if actions[-1] == 1 else -3)) / 100

        mean = expectation([*p, q], change)
        return variance([*p, q], lambda actions: (change(actions) - mean) * score(actions[-1], q))

    assert answer.extra_variance(p, up, down, q, 6, 3) == close(noise(True) - noise(False))
    for gamma in (0.1, 0.5, 0.99):
        (a1, a2), (b1, b2) = answer.two_dialogues(gamma)
        assert max(abs(x) for x in (a1 - 30, a2 - a1, b1 - 30, b2 - b1)) <= 10 + 1e-9
        assert a2 > b2 and a1 - 30 + gamma * (a2 - a1) < b1 - 30 + gamma * (b2 - b1)
        constants = []  # what the return has beside the discounted terminal reward
        for path in ([35], [35, 28], [21, 44, 50]):
            rewards = answer.turn_rewards(np.array([30.0, *path]), gamma)
            discounts = gamma ** np.arange(len(path))
            constants.append((discounts * rewards).sum() - discounts[-1] * path[-1] / 100)
        assert constants == close([constants[0]] * 3)


def test_last_talker():
    answer = answers("last-talker")
    c, n = 0.3, 3
    chances = {"end": 1 - c, "on 1": c * 0.4, "on 2": c * 0.6}  # the second turn's action 1: 0.4
    last = {"on 1": 0.6, "on 2": -0.3}

    def gradients(advantage):
        """Of both turns, over all groups. advantage: (returns of those who talk, place) -> its."""
        total = np.zeros(2)
        for group in itertools.product(chances, repeat=n):
            whole = [0.1 + last[play] if play in last else 0.3 for play in group]
            talkers = [play for play in group if play in last]
            to_go = [last[play] for play in talkers]
            first = [advantage(whole, i) * score(1 + (x == "end"), c) for i, x in enumerate(group)]
            second = [advantage(to_go, i) * score(int(x[-1]), 0.4) for i, x in enumerate(talkers)]
            total += math.prod(map(chances.get, group)) * np.array([sum(first), sum(second)]) / n
        return total

    true = gradients(lambda returns, i: returns[i])
    with_oneself = gradients(lambda returns, i: returns[i] - np.mean(returns))
    assert answer.with_oneself(c, n) == close(list(with_oneself / true))

    def lone_gets_zero(returns, i):
        others = returns[:i] + returns[i + 1 :]
        return returns[i] - np.mean(others) if others else 0

    assert answer.lone_gets_zero(c, n) == close(list(gradients(lone_gets_zero) / true))


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
    estimators = [lambda u: u, lambda u: u**2 / 2, lambda u: (-u).exp() - 1 + u]
    m = 0.8
    x = torch.arange(-20, 20, 0.01, dtype=torch.float64)
    density = 0.01 * torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    pi, ref = np.array([0.2, 0.5, 0.3]), np.array([0.4, 0.4, 0.2])
    moments, gradients = answer.gaussian_moments(m), answer.loss_gradients(pi, ref)
    for row, estimator in enumerate(estimators):
        k = estimator(-(x**2) / 2 + (x - m) ** 2 / 2)
        mean = (density * k).sum()
        assert moments[row] == close([mean.item(), (density * (k - mean) ** 2).sum().item()])
        logits = torch.tensor(np.log(pi), requires_grad=True)
        losses = estimator(logits.log_softmax(0) - torch.tensor(ref).log())
        (torch.tensor(pi) * losses).sum().backward()
        assert gradients[row] == close(logits.grad.numpy())


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
        of_1, of_2 = advantages[:, 0].tolist()
        enumerated = P * of_1 * score(1, P) + (1 - P) * of_2 * score(2, P)
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
    advantage, length = {1: -0.5, 2: 0.8}, {1: 4, 2: 11}

    def terms(actions):
        return [advantage[a] * score(a, P) for a in actions]

    def per_dialogue(actions):
        return np.mean([x / length[a] for x, a in zip(terms(actions), actions)])

    def per_batch(actions):
        return sum(terms(actions)) / sum(length[a] for a in actions)

    for name, gradient in (("per_dialogue", per_dialogue), ("per_batch", per_batch)):
        expected = getattr(answer, name)(P, -0.5, 0.8, 4, 11, N)
        assert expected == close(expectation([P] * N, gradient)), name


def test_truncation():
    answer = answers("truncation")
    m, c = 0.9, 1.7
    x = np.arange(-14, 14, 1e-4)
    density = 1e-4 * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    w = np.minimum(np.exp(m * x - m**2 / 2), c)
    mean = (density * w).sum()
    assert answer.truncated(m, c) == close([mean, (density * (w - mean) ** 2).sum()])
    for p, q in ((0.9, 0.3), (0.1, 0.7), (0.5, 0.5)):
        of_1, of_2 = (min(w, c) * 0.5 for w in (p / q, (1 - p) / (1 - q)))
        enumerated = q * of_1 * score(1, p) + (1 - q) * of_2 * score(2, p)
        assert answer.constant_reward(p, q, 0.5, c) == close(enumerated)
