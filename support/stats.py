"""support/stats.py - intervals, tests, correlations and agreement: what is said about numbers.

Nothing here knows what the numbers are of.
"""

import math
from itertools import combinations

import numpy as np


def sign_flips(differences, rng, draws):
    """The two-sided p of a mean of paired differences, by flipping their signs at random: how often
    it comes out as far from 0 if neither side is better."""
    n = len(differences)
    flips = (rng.integers(0, 2, size=(draws, n), dtype=np.int8) * 2 - 1) @ differences / n
    far = np.abs(flips) >= abs(differences.mean()) - 1e-9
    return float((1 + far.sum()) / (1 + draws))


def paired(before, after, draws=10_000):
    """Two lists of scores of the same problems: {"n", "before", "after", "p", "test", "difference",
    "interval"}. Scores that are all right or wrong, 1 or 0, are tested by `mcnemar`; shares (pass@1
    over 16 samples) by sign flips of the differences. The interval is the 2.5 to 97.5 percentile of
    a bootstrap over problems."""
    x, y, rng = np.array(before), np.array(after), np.random.default_rng(0)
    differences, n = y - x, len(x)
    if np.isin([x, y], [0, 1]).all():
        to_right, to_wrong = int((differences > 0).sum()), int((differences < 0).sum())
        p, test = mcnemar(to_right, to_wrong), f"McNemar, +{to_right} -{to_wrong}"
    else:
        p, test = sign_flips(differences, rng, draws), "sign flips"
    boot = [differences[rng.integers(n, size=n)].mean() for _ in range(draws)]
    return {
        "n": n,
        "before": float(x.mean()),
        "after": float(y.mean()),
        "p": p,
        "test": test,
        "difference": float(differences.mean()),
        "interval": np.percentile(boot, [2.5, 97.5]).tolist(),
    }


def mcnemar(b, c):
    """The two-sided p of McNemar's exact test. Of the problems that changed sides, b to right and c
    to wrong, each went either way with probability 1/2 if training did nothing: p is a binomial
    tail, doubled."""
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2 ** (b + c))


def reliability(finals):
    """Of final emotions, [dialogues][replays]: "spread", the standard deviation of one dialogue's
    over its replays, and "reliability" of the reward, the share of the variance of scores that
    dialogues explain, ICC(1) (Shrout and Fleiss 1979). {} where they cannot be had."""
    x = np.array(finals, dtype=float)
    if x.ndim < 2 or min(x.shape) < 2:
        return {}
    within, between = x.var(1, ddof=1).mean(), x.shape[1] * x.mean(1).var(ddof=1)
    whole = between + (x.shape[1] - 1) * within
    return {
        "spread": float(within**0.5),
        "reliability": float((between - within) / whole) if whole else None,
    }


def pearson(x, y):
    """Correlation (Pearson's); of two points, which is always 1 or -1, none."""
    return np.corrcoef(x, y)[0, 1] if len(x) > 2 else np.nan


def spearman(x, y):
    """Correlation of ranks (Spearman's); ties share theirs."""
    return pearson(
        *(np.sort(v).searchsorted(v) + np.sort(v).searchsorted(v, "right") for v in (x, y))
    )


def interval(statistic, *columns, draws=1000):
    """[value, low, high, n] of statistic(*columns), n units in a row each, with its 95 % bootstrap
    interval over units; None where there is no telling. (Of fewer than five units most draws are of
    one or two.)"""
    columns, rng = np.array(columns, float), np.random.default_rng(0)
    if (n := columns.shape[1]) < 2:
        return [None, None, None, n]
    with np.errstate(all="ignore"):  # what does not vary has no correlation
        found = [
            float(statistic(*columns[:, i]))
            for i in [np.arange(n), *rng.integers(n, size=(draws, n))]
        ]
    drawn = [x for x in found[1:] if np.isfinite(x) and n > 4]
    return [
        found[0] if np.isfinite(found[0]) else None,
        *(np.percentile(drawn, [2.5, 97.5]).tolist() if drawn else [None, None]),
        n,
    ]


def krippendorff(units):
    """Krippendorff's alpha for nominal ratings, 1 - observed / expected disagreement. units: of
    each pair its ratings; one rating alone says nothing. None if nothing differs."""
    units = [unit for unit in units if unit[1:]]
    differ = lambda ratings: 2 * sum(a != b for a, b in combinations(ratings, 2))
    every = [rating for unit in units for rating in unit]
    expected = differ(every) / (len(every) - 1) if every else 0
    observed = sum(differ(unit) / (len(unit) - 1) for unit in units)
    return 1 - observed / expected if expected else None


def holm(p_values):
    """Holm's correction: the k'th smallest of m times m - k + 1, at most 1, never below the one
    before it."""
    corrected, largest = [0.0] * len(p_values), 0.0
    for k, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        corrected[i] = largest = max(largest, min(1.0, (len(p_values) - k) * p_values[i]))
    return corrected
