"""Intervals, correlations, reliability and agreement, by hand."""

from support.stats import interval, pearson, spearman

import numpy as np
import pytest

from tools.blind import holm, krippendorff
from tools.replay import reliability


def test_ranks_by_hand():
    """An outlier is one rank above the next; a tie shares rank 1.5."""
    assert spearman([1, 2, 30], [1, 20, 21]) == pytest.approx(1)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(3**0.5 / 2)
    assert spearman([3, 1, 2], [10, 30, 20]) == pytest.approx(-1)


def test_reliability_is_the_share_that_dialogues_explain():
    """By hand: finals (40, 60) and (80, 100): within 200, between 2 x 800, so ICC is 1400 / 1800."""
    assert reliability([[40, 60], [80, 100]]) == {
        "spread": pytest.approx(200**0.5),
        "reliability": pytest.approx(1400 / 1800),
    }
    assert reliability([[40], [80]]) == {} == reliability([]) == reliability([[40, 60]])
    assert reliability([[40, 40], [40, 40]])["reliability"] is None


def test_krippendorffs_alpha_by_hand():
    """Two raters, four items: values x x | x y | y y | y y. Observed: 2 of 8 ordered pairs differ.
    Expected: 3 x and 5 y make 30 of 56. alpha = 1 - (2/8) / (30/56). An item that one rater left
    out says nothing."""
    units = [["x", "x"], ["x", "y"], ["y", "y"], ["y", "y"]]
    assert krippendorff(units) == pytest.approx(1 - (2 / 8) / (30 / 56))
    assert krippendorff([*units, ["x"]]) == pytest.approx(krippendorff(units))
    assert krippendorff([["x", "x"], ["y", "y"]]) == 1 and krippendorff([["x", "x"]]) is None
    # three raters: the unit's pairs are divided by two
    assert krippendorff([["x", "x", "y"], ["y", "y", "y"]]) == pytest.approx(1 - (4 / 2) / (16 / 5))


def test_holms_correction_by_hand():
    """0.01 x 3, 0.02 x 2, 0.03 x 1, the last not below the one before it; at most 1."""
    assert holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert holm([0.6, 0.7]) == pytest.approx([1, 1]) and holm([]) == []


@pytest.mark.parametrize(
    "statistic, columns, told",
    [
        (np.mean, [[3]], [None, None, None, 1]),
        (np.mean, [[1, 2, 3, 6]], [3, None, None, 4]),  # four units are too few
        (pearson, [[1, 1, 1], [1, 2, 3]], [None, None, None, 3]),
        (pearson, [[1, 2], [3, 5]], [None, None, None, 2]),
    ],
)
def test_what_can_not_be_told_is_none(statistic, columns, told):
    """One unit has no interval; what does not vary has no correlation."""
    assert interval(statistic, *columns) == told


@pytest.mark.slow
def test_intervals_cover_as_often_as_they_say():
    """Of 200 means of 30 draws from a normal, the 95 % interval holds the truth in about 95 % (here
    more than 88, for 30 are few): the chance to see fewer is below 1e-4 at a coverage of 94 %."""
    rng = np.random.default_rng(3)
    held = 0
    for _ in range(200):
        _, low, high, _ = interval(np.mean, rng.normal(2, 1, 30), draws=200)
        held += low < 2 < high
    assert 176 <= held < 200
