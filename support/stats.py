"""support/stats.py - intervals, tests and correlations.

Nothing here knows what the numbers are of.
"""

import numpy as np

# {number of seeds: Student's t for the two-sided 95 % interval of their mean}
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


def mean_interval(values):
    """(mean, half) of 2 to 10 values, one for each seed: the 95 % interval of the mean is
    mean - half to mean + half, and half = t s / sqrt(n), where s is the standard deviation over the
    n seeds and t is Student's for n - 1 degrees of freedom. Raises ValueError for another n.

    values: [n], or [n, ...] for one interval at each step of a curve: then both are [...]."""
    values = np.array(values, dtype=float)
    n = len(values)
    if n not in T_95:
        raise ValueError(f"a 95 % interval over {n} seeds: there must be 2 to {max(T_95)}")
    half = T_95[n] * values.std(axis=0, ddof=1) / n**0.5
    return values.mean(axis=0), half


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


def reliability(finals):
    """How far scores depend on the dialogue, and not on the luck of a replay. finals: final
    emotions, [dialogues][replays]. {} where there are fewer than two of either.

    "spread": the standard deviation over the replays of one dialogue. "reliability": the share of
    the variance of scores that dialogues explain, ICC(1) (Shrout and Fleiss 1979)."""
    emotions = np.array(finals, dtype=float)
    if emotions.ndim < 2 or min(emotions.shape) < 2:
        return {}
    replays = emotions.shape[1]
    within = emotions.var(1, ddof=1).mean()  # mean square within dialogues
    between = replays * emotions.mean(1).var(ddof=1)  # mean square between dialogues
    whole = between + (replays - 1) * within
    return {
        "spread": float(within**0.5),
        "reliability": float((between - within) / whole) if whole else None,
    }


def pearson(x, y):
    """Correlation (Pearson's); NaN of two points, where it is always 1 or -1."""
    return np.corrcoef(x, y)[0, 1] if len(x) > 2 else np.nan


def spearman(x, y):
    """Correlation of ranks (Spearman's); values that are equal share a rank."""
    return pearson(doubled_ranks(x), doubled_ranks(y))


def doubled_ranks(values):
    """2 * rank - 1 of each value. Ranks are counted from 1, and equal values share the mean of
    their ranks. 2 * rank - 1 is a whole number, and correlates as the rank itself does.

    If k values are smaller and t are equal (the value itself is one of them), the ranks k + 1 to
    k + t have the mean k + (t + 1) / 2; so 2 * rank - 1 is k + (k + t)."""
    ordered = np.sort(values)
    smaller = ordered.searchsorted(values)  # k
    not_larger = ordered.searchsorted(values, "right")  # k + t
    return smaller + not_larger


def interval(statistic, *columns, draws=1000):
    """[value, low, high, n] of statistic(*columns), with its 95 % bootstrap interval over units;
    None for what cannot be computed. (Fewer than five units have no interval: most draws would be
    of one or two of them.)

    columns: one or several lists of n numbers, one number for each of n units (dialogues, say): two
    of them for a correlation."""
    columns = np.array(columns, float)  # [columns, n]
    rng = np.random.default_rng(0)
    n = columns.shape[1]
    if n < 2:
        return [None, None, None, n]
    value, low, high = None, None, None
    with np.errstate(all="ignore"):  # the correlation of a constant is NaN
        estimate = float(statistic(*columns))
        samples = rng.integers(n, size=(draws, n))  # indices of units
        estimates = [float(statistic(*columns[:, sample])) for sample in samples]
    if np.isfinite(estimate):
        value = estimate
    finite = [estimate for estimate in estimates if np.isfinite(estimate)]
    if finite and n > 4:
        low, high = np.percentile(finite, [2.5, 97.5]).tolist()
    return [value, low, high, n]
