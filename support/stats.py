"""support/stats.py - intervals, tests, correlations and the agreement of raters.

Nothing here knows what the numbers are of.
"""

import math

import numpy as np


def sign_flips(differences, rng, draws):
    """The two-sided p of a mean of paired differences, by flipping their signs at random: how often
    it comes out as far from 0 if neither side is better."""
    n = len(differences)
    signs = rng.integers(0, 2, size=(draws, n), dtype=np.int8) * 2 - 1  # -1 or 1
    means = signs @ differences / n
    # A mean that is equal but for rounding counts as far: hence the 1e-9.
    far = np.abs(means) >= abs(differences.mean()) - 1e-9
    # The differences as they are were one of the draws: so p is never 0.
    return float((1 + far.sum()) / (1 + draws))


def mcnemar(b, c):
    """The two-sided p of McNemar's exact test. Of the problems that changed sides, b to right and c
    to wrong, each went either way with probability 1/2 if training did nothing: p is a binomial
    tail, doubled."""
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2 ** (b + c))


def pearson(x, y):
    """Correlation (Pearson's); NaN of two points, where it is always 1 or -1."""
    return np.corrcoef(x, y)[0, 1] if len(x) > 2 else np.nan


def spearman(x, y):
    """Correlation of ranks (Spearman's)."""
    return pearson(ranks(x), ranks(y))


def ranks(values):
    """The rank of each value, counted from 1; equal values share the mean of their ranks."""
    _, positions, counts = np.unique(values, return_inverse=True, return_counts=True)
    # the last of c equal values has the rank cumsum(counts), the mean lies (c - 1) / 2 before it
    return (counts.cumsum() - (counts - 1) / 2)[positions]


def interval(statistic, *columns, draws=1000):
    """[value, low, high, n] of statistic(*columns), with its 95 % bootstrap interval over units;
    None for what cannot be computed. (Fewer than five units have no interval: most draws would be
    of one or two of them.)

    columns: one or several lists of n numbers, one number for each of n units (dialogues, say): two
    of them for a correlation."""
    columns = np.array(columns, float)  # [columns, n]
    rng = np.random.default_rng(0)
    n = columns.shape[1]
    value, low, high = None, None, None
    if n > 1:
        samples = rng.integers(n, size=(draws, n))  # indices of units
        with np.errstate(all="ignore"):  # the correlation of a constant is NaN
            estimate = statistic(*columns)
            estimates = [statistic(*columns[:, sample]) for sample in samples]
        if np.isfinite(estimate):
            value = estimate
            if n > 4:
                low, high = np.nanpercentile(estimates, [2.5, 97.5]).tolist()
    return [value, low, high, n]


def krippendorff(units):
    """Krippendorff's alpha for nominal ratings, 1 - observed / expected disagreement. units: of
    each unit the list of its ratings; a unit with one rating is left out. None if nothing differs.

    Both disagreements are means over all n ratings; their common factor 1 / n is left out."""
    units = [np.array(unit) for unit in units if len(unit) > 1]
    observed = sum(disagreement(unit) for unit in units)
    expected = disagreement(np.concatenate(units)) if units else 0
    return float(1 - observed / expected) if expected else None


def disagreement(ratings):
    """The number of ordered pairs of n ratings that differ, divided by n - 1."""
    return (ratings[:, None] != ratings).sum() / (len(ratings) - 1)
