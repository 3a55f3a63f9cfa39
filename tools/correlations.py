"""tools/correlations.py - correlations, AUC and their intervals. The functions do not depend on what
the numbers measure. (The comparison of two results, with its interval, is evaluate.py's.)
"""

import numpy as np


def mean_of_units(x):
    """The mean along the last axis, which is that of the units."""
    return np.mean(x, axis=-1)


def pearson(x, y):
    """Correlation (Pearson's) along the last axis; NaN of two points, where it is always 1 or -1."""
    x, y = (values - np.mean(values, axis=-1, keepdims=True) for values in (x, y))
    correlation = mean_of_units(x * y) / np.sqrt(mean_of_units(x * x) * mean_of_units(y * y))
    return correlation if x.shape[-1] > 2 else np.nan


def spearman(x, y):
    """Correlation of ranks (Spearman's)."""
    return pearson(rank_values(x), rank_values(y))


def auc(a, b):
    """The share of pairs of a number of `a` and one of `b` in which the first is larger; a tie
    counts half: 0.5 is chance."""
    differences = np.subtract.outer(a, b)
    return np.mean((differences > 0) + 0.5 * (differences == 0))


def rank_values(values):
    """The rank of each value, counted from 1; equal values share the mean of their ranks."""
    _, positions, counts = np.unique(values, return_inverse=True, return_counts=True)
    # the last of c equal values has the rank cumsum(counts), the mean lies (c - 1) / 2 before it
    return (counts.cumsum() - (counts - 1) / 2)[positions]


def interval(*columns, statistic=mean_of_units, draws=1000):
    """A statistic with its 95 % bootstrap interval over units: [value, low, high, n], value being
    statistic(*columns), None for what cannot be computed. (Fewer than five units have no interval, because most draws
    would hold only one or two of them.)

    statistic: a function of arrays [..., n] that returns [...].
    columns: one or several lists of n numbers, one number for each of n units, such as dialogues;
    two lists for a correlation."""
    columns = np.array(columns, float)  # [columns, n]
    rng = np.random.default_rng(0)
    n = columns.shape[1]
    value, low, high = None, None, None
    if n > 1:
        samples = rng.integers(n, size=(draws, n))  # indices of units
        with np.errstate(all="ignore"):  # the correlation of a constant is NaN
            estimate = statistic(*columns)
            estimates = statistic(*columns[:, samples])  # [draws]
        if np.isfinite(estimate):
            value = estimate
            if n > 4:
                low, high = np.nanpercentile(estimates, [2.5, 97.5]).tolist()
    return [value, low, high, n]
