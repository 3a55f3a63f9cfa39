"""Correlations and agreement, by hand."""

import pytest

from tools.blind import krippendorff
from tools.correlations import spearman


def test_ranks_by_hand():
    """An outlier is one rank above the next; a tie shares rank 1.5."""
    assert spearman([1, 2, 30], [1, 20, 21]) == pytest.approx(1)
    assert spearman([1, 1, 2], [1, 2, 3]) == pytest.approx(3**0.5 / 2)


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
