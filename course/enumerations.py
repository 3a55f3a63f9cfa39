"""enumerations.py - what the formulas of derivations.md are compared with: sums over all outcomes.

A derivation has several parts, and a part is a function that the student writes, a formula. The
function of the same name and with the same arguments in this file computes the same number without
the formula: it lists every outcome of a small game with its probability and adds up, in float64.
Nothing is sampled. An expectation over a continuous variable is a sum over a fine grid, and where a
limit is meant, the docstring says how it is taken.

The policy of most games chooses between the actions 1 and 2. It has one weight, theta, and
p = 1 / (1 + exp(-theta)) is the probability of action 1. So the score, d log pi(a) / d theta, is
1 - p for action 1 and -p for action 2.

At the end of the file, DERIVATIONS lists the parts and the inputs that they are tried on.
"""

import itertools
import math
from typing import Callable, NamedTuple

import numpy as np

# ----------------------------------------------------------------------------- what the games share


def score(action, p):
    """d log pi(action) / d theta."""
    return 1 - p if action == 1 else -p


def every_choice(probabilities):
    """Every sequence of actions, one for each probability of action 1 in the list. Yields
    (actions, the probability of the sequence)."""
    for actions in itertools.product((1, 2), repeat=len(probabilities)):
        chances = [p if a == 1 else 1 - p for a, p in zip(actions, probabilities)]
        yield actions, math.prod(chances)


def probability(theta):
    """The probability of action 1."""
    return 1 / (1 + math.exp(-theta))


def weight(p):
    """The theta at which action 1 has the probability p, 0 < p < 1."""
    return math.log(p / (1 - p))


def last_true(holds, low, high):
    """The number up to which `holds` is true, between `low`, where it is, and `high`, where it is
    not: bisection."""
    for _ in range(200):
        middle = (low + high) / 2
        if holds(middle):
            low = middle
        else:
            high = middle
    return low


def derivative(function, x, k):
    """d function / d x[k], exact to rounding: the imaginary part of a step of 1e-30 i."""
    moved = np.array(x, dtype=complex)
    moved[k] += 1e-30j
    return np.imag(function(moved)) / 1e-30


def log_softmax(logits):
    """log pi of logits, which may be complex."""
    return logits - np.log(np.exp(logits).sum())


# ----------------------------------------------------------------------------------------- baseline


def with_group_mean(p, r1, r2, n):
    """Sum over all 2^n groups: the gradient is the mean over the group of (r - group's mean) times
    the score."""
    total = 0.0
    for actions, chance in every_choice([p] * n):
        rewards = [r1 if a == 1 else r2 for a in actions]
        mean = sum(rewards) / n
        gradient = sum((r - mean) * score(a, p) for r, a in zip(rewards, actions)) / n
        total += chance * gradient
    return total


def variance(p, r1, r2, b):
    """The variance of (r - b) times the score, over the two actions."""
    gradients = [(r1 - b) * score(1, p), (r2 - b) * score(2, p)]
    chances = [p, 1 - p]
    mean = sum(c * g for c, g in zip(chances, gradients))
    return sum(c * (g - mean) ** 2 for c, g in zip(chances, gradients))


def best_baseline(p, r1, r2):
    """The vertex of a parabola: the variance is quadratic in b, so three of its values give the
    baseline at which it is smallest."""
    left, middle, right = (variance(p, r1, r2, b) for b in (-1.0, 0.0, 1.0))
    return (left - right) / (2 * (left - 2 * middle + right))


def worse_above(r):
    """The p above which the mean reward is a noisier baseline than 0, for the rewards 1 and r.
    Bisection between p = 1/2, where the mean is better, and p = 1."""

    def mean_is_better(p):
        mean = p + (1 - p) * r
        return variance(p, 1.0, r, mean) < variance(p, 1.0, r, 0.0)

    return last_true(mean_is_better, 0.5, 1 - 1e-6)


# ---------------------------------------------------------------------------------------- group-std


def group_gradient(p, r1, r2, n):
    """Sum over all 2^n groups: the gradient is the mean over the group of (r - mean) / std times
    the score. The std is the unbiased one, and a group of equal rewards has the gradient 0."""
    total = 0.0
    for actions, chance in every_choice([p] * n):
        if len(set(actions)) == 1:
            continue
        rewards = np.array([r1 if a == 1 else r2 for a in actions])
        advantages = (rewards - rewards.mean()) / rewards.std(ddof=1)
        scores = np.array([score(a, p) for a in actions])
        total += chance * (advantages * scores).mean()
    return total


def objective(p):
    """The integral over theta of the gradient of a large group with the rewards 1 and 0, from the
    policy that never takes action 1 (theta = -80) to the one that takes it with the probability p.

    In a large group mean and std are those of the policy, so the gradient is the expectation of
    (r - mean) / std times the score. Simpson's rule with 40,000 steps; p = 1 is theta = 80."""
    end = -80.0 if p == 0 else 80.0 if p == 1 else weight(p)
    theta, step = np.linspace(-80.0, end, 40_001, retstep=True)
    p1, p2 = 1 / (1 + np.exp(-theta)), 1 / (1 + np.exp(theta))
    mean = p1  # of the rewards 1 and 0
    std = np.sqrt(p1 * p2**2 + p2 * p1**2)
    gradient = p1 * (p2 / std) * p2 + p2 * (-mean / std) * -p1
    weights = np.full(len(theta), 2.0)
    weights[1::2] = 4.0
    weights[[0, -1]] = 1.0
    return step / 3 * (weights * gradient).sum()


def limit_gradient(pi, r):
    """The expectation of (r - mean) / std times the score of a softmax policy, which is
    (1 at the action, 0 elsewhere) - pi: a sum over the actions. Mean and std are those of the
    policy, as in a large group."""
    mean = (pi * r).sum()
    std = np.sqrt((pi * (r - mean) ** 2).sum())
    scores = np.eye(len(pi)) - pi  # row a: of action a
    return sum(pi[a] * (r[a] - mean) / std * scores[a] for a in range(len(pi)))


def curl(pi, r):
    """The derivatives of `limit_gradient` with respect to the logits, minus their transpose."""

    def gradient_at(logits):
        return limit_gradient(np.exp(log_softmax(logits)), r)

    logits = np.log(pi)
    jacobian = np.array([derivative(gradient_at, logits, i) for i in range(len(pi))])
    return jacobian - jacobian.T  # row i, column j: d g_j / d theta_i - d g_i / d theta_j


# ------------------------------------------------------------------------------------------ shaping


def extra_variance(p, up, down, q, a, b):
    """Sum over all choices of all turns: the variance of the last turn's gradient with the terminal
    reward, minus the one with the rewards of `--reward delta`. The baseline is the mean of what
    it is subtracted from."""
    chances, lasts, deltas, scores = [], [], [], []
    for actions, chance in every_choice([*p, q]):
        earlier = sum(up[i] if actions[i] == 1 else -down[i] for i in range(len(p)))
        change = a if actions[-1] == 1 else -b
        chances.append(chance)
        lasts.append((30 + earlier + change) / 100)
        deltas.append(change / 100)
        scores.append(score(actions[-1], q))
    chances, scores = np.array(chances), np.array(scores)

    def gradient_variance(returns):
        returns = np.array(returns)
        gradients = (returns - (chances * returns).sum()) * scores
        return (chances * gradients**2).sum() - (chances * gradients).sum() ** 2

    return gradient_variance(lasts) - gradient_variance(deltas)


def two_dialogues(gamma, answer):
    """Check an answer that is not unique: dialogues A and B, rows of their emotions after turns 1
    and 2. Returns "" or what is wrong with them."""
    if np.shape(answer) != (2, 2):
        return f"has the shape {np.shape(answer)}; [[A_1, A_2], [B_1, B_2]] has (2, 2)"
    terminal, delta = [], []
    for first, second in answer:
        if abs(first - 30) > 10 + 1e-9 or abs(second - first) > 10 + 1e-9:
            return "changes the emotion by more than 10 in one turn"
        terminal.append(gamma * second / 100)
        delta.append((first - 30) / 100 + gamma * (second - first) / 100)
    if not terminal[0] > terminal[1] + 1e-9:
        return f"has terminal returns of {terminal[0]:.6g} and {terminal[1]:.6g}; A must be better"
    if not delta[1] > delta[0] + 1e-9:
        return f"has delta returns of {delta[0]:.6g} and {delta[1]:.6g}; B must be better"
    return ""


def turn_rewards(emotions, gamma):
    """Solve for the rewards. The unknowns are a reward for every pair (emotion before, emotion
    after) of the given emotions, and a constant for every first emotion. Every path of one or two
    turns over these emotions is an equation: its discounted rewards, minus the constant, are its
    discounted terminal reward. The equations have one solution."""
    levels = sorted(set(emotions))
    count = len(levels)
    rows, wanted = [], []
    for turns in (1, 2):
        for path in itertools.product(range(count), repeat=turns + 1):
            row = np.zeros(count**2 + count)
            for t, (before, after) in enumerate(itertools.pairwise(path)):
                row[before * count + after] += gamma**t
            row[count**2 + path[0]] = -1.0
            rows.append(row)
            wanted.append(gamma ** (turns - 1) * levels[path[-1]] / 100)
    solution = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)[0]
    places = [levels.index(emotion) for emotion in emotions]
    return [solution[i * count + j] for i, j in itertools.pairwise(places)]


# -------------------------------------------------------------------------------------- last-talker

# Turn 1: action 1 goes on, action 2 ends the dialogue. Turn 2: one of two actions, and the end.
CHANGE_IF_ENDED = 0.3
CHANGE_IF_GOING_ON = 0.1
LAST_CHANGES = {1: 0.6, 2: -0.3}  # by the action of turn 2
CHANCE_OF_1 = 0.4  # in turn 2


def gradients_of_turns(c, n, advantage):
    """The expected gradients of the two turns' weights, [2]: a sum over all groups of n dialogues.

    c: the probability of going on. advantage: a function (the returns from the turn on of those
    who talk in it, the place of a dialogue in this list) -> its advantage.
    """
    plays = [("end",), ("on", 1), ("on", 2)]
    chances = {
        ("end",): 1 - c,
        ("on", 1): c * CHANCE_OF_1,
        ("on", 2): c * (1 - CHANCE_OF_1),
    }
    total = np.zeros(2)
    for group in itertools.product(plays, repeat=n):
        talkers = [play for play in group if play[0] == "on"]
        last = [LAST_CHANGES[play[1]] for play in talkers]
        whole = [
            CHANGE_IF_GOING_ON + LAST_CHANGES[play[1]] if play in talkers else CHANGE_IF_ENDED
            for play in group
        ]
        gradient = np.zeros(2)
        for i, play in enumerate(group):
            gradient[0] += advantage(whole, i) * score(1 if play[0] == "on" else 2, c)
        for i, play in enumerate(talkers):
            gradient[1] += advantage(last, i) * score(play[1], CHANCE_OF_1)
        total += math.prod(chances[play] for play in group) * gradient / n
    return total


def with_oneself(c, n):
    """The expected gradients with the mean of all who talk as the baseline, divided by the true
    ones, which have no baseline."""
    true = gradients_of_turns(c, n, lambda returns, i: returns[i])
    got = gradients_of_turns(c, n, lambda returns, i: returns[i] - sum(returns) / len(returns))
    return got / true


def lone_gets_zero(c, n):
    """The same with the mean of the others, and the advantage 0 for a dialogue without others."""

    def advantage(returns, i):
        others = len(returns) - 1
        return returns[i] - (sum(returns) - returns[i]) / others if others else 0.0

    true = gradients_of_turns(c, n, lambda returns, i: returns[i])
    return gradients_of_turns(c, n, advantage) / true


# ---------------------------------------------------------------------------------------- clip-mask


def clipped_gradient(ratio, advantage, eps):
    """The slope of min(rho A, clip(rho) A) as log pi moves by 1e-6 up and down (a central
    difference, good to 1e-9)."""

    def term(log_ratio):
        rho = math.exp(log_ratio)
        return min(rho * advantage, min(max(rho, 1 - eps), 1 + eps) * advantage)

    at, step = math.log(ratio), 1e-6
    return (term(at + step) - term(at - step)) / (2 * step)


def largest_rate(p, advantage, eps):
    """Take the first step at one learning rate after the other, and look whether the second
    token's ratio has left the range on the side that is clipped: bisection. Infinite if not even a
    rate of 1e9 does that."""

    def second_token_has_gradient(rate):
        # in the first step the ratio is 1; beyond 700 the policy no longer changes in float64
        step = rate * advantage * score(1, p)
        ratio = probability(max(-700.0, min(700.0, weight(p) + step))) / p
        return ratio <= 1 + eps if advantage > 0 else ratio >= 1 - eps

    if second_token_has_gradient(1e9):
        return math.inf
    high = 1.0
    while second_token_has_gradient(high):
        high *= 2
    return last_true(second_token_has_gradient, 0.0, high)


# ------------------------------------------------------------------------------------ kl-estimators


def gaussian_moments(m):
    """Mean and variance of k1, k2 and k3, [3, 2]: sums over a grid of x, 0.01 apart, weighted with
    the density of pi. (For such smooth functions a sum over a grid is exact to rounding.)"""
    x = np.arange(-20.0, 20.0, 0.01)
    density = 0.01 * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)
    u = -(x**2) / 2 + (x - m) ** 2 / 2
    rows = []
    for k in (u, u**2 / 2, np.exp(-u) - 1 + u):
        mean = (density * k).sum()
        rows.append([mean, (density * (k - mean) ** 2).sum()])
    return np.array(rows)


def loss_gradients(pi, ref):
    """The expected gradients of k1, k2 and k3 as losses with respect to the logits of pi, [3, K]: a
    sum over the actions, each with the probability that pi had when it was sampled."""
    estimators = [lambda u: u, lambda u: u**2 / 2, lambda u: np.exp(-u) - 1 + u]
    actions = range(len(pi))
    gradients = np.zeros((3, len(pi)))
    for row, estimator in enumerate(estimators):
        # the default argument keeps this row's estimator: a closure would see that of the last row
        def losses(logits, estimator=estimator):
            return estimator(log_softmax(logits) - np.log(ref))

        for k in actions:
            slopes = derivative(losses, np.log(pi), k)
            gradients[row, k] = sum(pi[a] * slopes[a] for a in actions)
    return gradients


# ------------------------------------------------------------------------------------ lambda-credit


def recursion(rewards, values, lam):
    """The advantage of the first token: GAE's recursion with gamma = 1 over all tokens given."""
    advantage, next_value = 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values)):
        advantage = reward + next_value - value + lam * advantage
        next_value = value
    return advantage


def first_token(p, r1, r2, w1, w2, n, lam):
    """The expected gradient of the first token: the recursion for each action, and a sum over the
    two. The critic's value before the first token is 0.5, which must not matter."""
    return first_token_counted(p, r1, r2, w1, w2, n, lam, m=0)


def first_token_counted(p, r1, r2, w1, w2, n, lam, m):
    """The same where m tokens of the user, with the value 0, stand behind the first token, and the
    recursion runs over them too."""
    total = 0.0
    for action, chance, reward, value in ((1, p, r1, w1), (2, 1 - p, r2, w2)):
        values = [0.5] + [0.0] * m + [value] * (n - 1)
        rewards = [0.0] * (len(values) - 1) + [reward]
        total += chance * recursion(rewards, values, lam) * score(action, p)
    return total


# -------------------------------------------------------------------------------------- length-bias


def token_weights(lengths, micro):
    """The weight of one token in each of the three losses, [3, D]: the loss of a batch in which
    this token has the loss 1 and all others 0."""
    weights = np.zeros((3, len(lengths)))
    for d in range(len(lengths)):
        losses = [[0.0] * int(length) for length in lengths]
        losses[d][0] = 1.0
        weights[0, d] = np.mean(sum(losses, []))
        weights[1, d] = np.mean([np.mean(dialogue) for dialogue in losses])
        parts = [sum((x for x, k in zip(losses, micro) if k == j), []) for j in sorted(set(micro))]
        weights[2, d] = np.mean([np.mean(part) for part in parts])
    return weights


def normalised_gradient(p, a1, a2, l1, l2, n, normalise):
    """The expected gradient of a batch of n dialogues: a sum over all 2^n batches. normalise: a
    function (the terms of the dialogues, their lengths) -> the gradient."""
    total = 0.0
    for actions, chance in every_choice([p] * n):
        terms = [(a1 if a == 1 else a2) * score(a, p) for a in actions]
        lengths = [l1 if a == 1 else l2 for a in actions]
        total += chance * normalise(terms, lengths)
    return total


def per_dialogue(p, a1, a2, l1, l2, n):
    """The mean over a dialogue's tokens, then over the dialogues."""

    def normalise(terms, lengths):
        return sum(term / length for term, length in zip(terms, lengths)) / len(terms)

    return normalised_gradient(p, a1, a2, l1, l2, n, normalise)


def per_batch(p, a1, a2, l1, l2, n):
    """The sum over all tokens, divided by their number."""

    def normalise(terms, lengths):
        return sum(terms) / sum(lengths)

    return normalised_gradient(p, a1, a2, l1, l2, n, normalise)


# --------------------------------------------------------------------------------------- truncation


def truncated(m, c):
    """Mean and variance of min(w, c), [2]: Gauss-Legendre quadrature on each side of the point
    where w reaches c, because a grid does not fit a function with a kink."""
    kink = (math.log(c) + m**2 / 2) / m
    nodes, weights = np.polynomial.legendre.leggauss(200)
    first, second = 0.0, 0.0
    for low, high in ((-14.0, kink), (kink, 14.0)):
        x = (high + low) / 2 + (high - low) / 2 * nodes
        density = np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * weights * (high - low) / 2
        w = np.minimum(np.exp(m * x - m**2 / 2), c)
        first += (density * w).sum()
        second += (density * w**2).sum()
    return np.array([first, second - first**2])


def constant_reward(p, q, r, c):
    """The sum over the two actions of q(a) min(pi(a) / q(a), c) r times the score."""
    total = 0.0
    for action, pi, engine in ((1, p, q), (2, 1 - p, 1 - q)):
        total += engine * min(pi / engine, c) * r * score(action, p)
    return total


# ----------------------------------------------------------------------- the parts and their inputs


class Part(NamedTuple):
    """One function that a student writes."""

    enumerate: Callable  # of the same name and arguments; returns what the student's must return
    draw: Callable  # a numpy Generator -> {argument: value}, drawn anew for each check
    edges: tuple = ()  # inputs that every check tries too
    # several answers are right: `enumerate` also takes the answer, and returns what is wrong, or ""
    is_property: bool = False


def between(rng, low, high, digits=2):
    """A number that is short enough for a pocket calculator."""
    return round(float(rng.uniform(low, high)), digits)


def chance(rng):
    """A probability that is neither 0 nor 1."""
    return between(rng, 0.05, 0.95)


def chances(rng, count):
    """Probabilities of `count` actions, none below 0.02: 1, cut into as many pieces."""
    cuts = np.sort(rng.choice(np.arange(1, 50), count - 1, replace=False)) / 50
    return np.round(np.diff([0.0, *cuts, 1.0]), 2)


def two_rewards(rng):
    """Two rewards at least 0.1 apart."""
    r1 = between(rng, 0, 1)
    gap = between(rng, 0.1, 0.5)
    return {"r1": r1, "r2": round(r1 - gap if r1 >= 0.5 else r1 + gap, 2)}


def spread_rewards(rng, count):
    """Rewards of `count` actions, each at least 0.05 from the others."""
    rewards = 0.05 * rng.choice(21, count, replace=False)
    return np.round(rewards, 2)


def draw_group(rng):
    return {"p": chance(rng), **two_rewards(rng), "n": int(rng.integers(2, 9))}


def draw_variance(rng):
    return {"p": chance(rng), **two_rewards(rng), "b": between(rng, -1, 1)}


def draw_two_actions(rng):
    return {"p": chance(rng), **two_rewards(rng)}


def draw_worse(rng):
    return {"r": between(rng, 0, 0.45)}


def draw_p(rng):
    return {"p": chance(rng)}


def draw_actions(rng):
    count = int(rng.integers(2, 6))
    return {"pi": chances(rng, count), "r": spread_rewards(rng, count)}


def draw_turns(rng):
    earlier = int(rng.integers(1, 6))
    return {
        "p": np.round(rng.uniform(0.05, 0.95, earlier), 2),
        "up": rng.integers(0, 11, earlier).astype(float),
        "down": rng.integers(1, 11, earlier).astype(float),
        "q": chance(rng),
        "a": float(rng.integers(0, 11)),
        "b": float(rng.integers(0, 11)),
    }


def draw_gamma(rng):
    return {"gamma": between(rng, 0.3, 0.999, 3)}


def draw_path(rng):
    emotions = 30 + np.cumsum(rng.integers(1, 11, int(rng.integers(2, 5))))
    return {"emotions": rng.permutation(emotions).astype(float), **draw_gamma(rng)}


def draw_talkers(rng):
    return {"c": chance(rng), "n": int(rng.integers(2, 6))}


def draw_ratio(rng):
    eps = between(rng, 0.1, 0.3)
    offset = rng.choice([-1.9, -1.1, -0.9, 0.0, 0.9, 1.1, 1.9])  # in units of eps: never at a kink
    advantage = between(rng, 0.1, 2) * float(rng.choice([-1, 1]))
    return {"ratio": round(1 + eps * float(offset), 4), "advantage": advantage, "eps": eps}


def draw_step(rng):
    advantage = between(rng, 0.1, 2) * float(rng.choice([-1, 1]))
    return {"p": between(rng, 0.02, 0.8), "advantage": advantage, "eps": between(rng, 0.1, 0.2)}


def draw_shift(rng):
    return {"m": between(rng, 0.1, 1.6) * float(rng.choice([-1, 1]))}


def draw_policies(rng):
    count = int(rng.integers(2, 6))
    return {"pi": chances(rng, count), "ref": chances(rng, count)}


def draw_credit(rng):
    w1, w2 = two_rewards(rng).values()
    return {
        "p": chance(rng),
        **two_rewards(rng),
        "w1": w1,
        "w2": w2,
        "n": int(rng.integers(1, 40)),
        "lam": between(rng, 0.7, 1),
    }


def draw_counted(rng):
    inputs = draw_credit(rng)
    return {**inputs, "n": inputs["n"] + 1, "m": int(rng.integers(1, 40))}


def draw_batch(rng):
    lengths = rng.integers(1, 30, 5).astype(float)
    # micro-batches 0, 0, 1, 1 and a fifth dialogue in one of the two, in any order
    micro = rng.permutation([0, 0, 1, 1, int(rng.integers(0, 2))])  # integers: they may be indices
    return {"lengths": lengths, "micro": micro}


def draw_lengths(rng):
    advantages = [between(rng, 0.1, 1) * float(rng.choice([-1, 1])) for _ in range(2)]
    return {
        "p": chance(rng),
        "a1": advantages[0],
        "a2": advantages[1],
        "l1": int(rng.integers(1, 10)),
        "l2": int(rng.integers(10, 100)),
        "n": int(rng.integers(1, 8)),
    }


def draw_truncation(rng):
    return {"m": between(rng, 0.1, 1.5), "c": between(rng, 1.1, 4)}


def draw_engine(rng):
    return {
        "p": chance(rng),
        "q": chance(rng),
        "r": between(rng, 0.1, 1),
        "c": between(rng, 1.05, 2.5),
    }


# {name: its parts}, in the order of derivations.md
DERIVATIONS = {
    "baseline": [
        Part(with_group_mean, draw_group, edges=({"p": 0.99, "r1": 0.2, "r2": 0.7, "n": 3},)),
        Part(variance, draw_variance, edges=({"p": 0.01, "r1": 0.2, "r2": 0.7, "b": 0.1},)),
        Part(best_baseline, draw_two_actions),
        Part(worse_above, draw_worse),
    ],
    "group-std": [
        Part(group_gradient, draw_group, edges=({"p": 0.99, "r1": 0.2, "r2": 0.7, "n": 3},)),
        Part(objective, draw_p, edges=({"p": 0.0}, {"p": 1.0})),
        Part(limit_gradient, draw_actions),
        Part(curl, draw_actions),
    ],
    "shaping": [
        Part(extra_variance, draw_turns),
        Part(
            two_dialogues,
            draw_gamma,
            edges=({"gamma": 0.1}, {"gamma": 0.99}),
            is_property=True,
        ),
        Part(turn_rewards, draw_path),
    ],
    "last-talker": [
        Part(with_oneself, draw_talkers),
        Part(lone_gets_zero, draw_talkers),
    ],
    "clip-mask": [
        Part(
            clipped_gradient,
            draw_ratio,
            edges=tuple(
                {"ratio": ratio, "advantage": advantage, "eps": 0.2}
                for ratio in (0.7, 1.0, 1.3)
                for advantage in (-0.5, 0.5)
            ),
        ),
        Part(
            largest_rate,
            draw_step,
            edges=(
                {"p": 0.9, "advantage": 0.5, "eps": 0.2},
                {"p": 0.9, "advantage": -0.5, "eps": 0.2},
            ),
        ),
    ],
    "kl-estimators": [
        Part(gaussian_moments, draw_shift),
        Part(loss_gradients, draw_policies),
    ],
    "lambda-credit": [
        Part(first_token, draw_credit),
        Part(first_token_counted, draw_counted),
    ],
    "length-bias": [
        Part(token_weights, draw_batch),
        Part(per_dialogue, draw_lengths),
        Part(per_batch, draw_lengths),
    ],
    "truncation": [
        Part(truncated, draw_truncation),
        Part(
            constant_reward,
            draw_engine,
            edges=(
                {"p": 0.9, "q": 0.3, "r": 0.5, "c": 2.0},
                {"p": 0.1, "q": 0.7, "r": 0.5, "c": 2.0},
            ),
        ),
    ],
}
