"""The 24 strategies: what is counted over tagged replies.

By hand: three replies of one dialogue, tagged

    reply               1             2          3
    strategies          E-1, A-1      E-2        none
    change of emotion   +10           -4         +3

The gain of Praise (E-1 to E-3) is the mean of the two replies that use it, (10 - 4) / 2 = 3. The
best alignment of (E-1, A-1) with (E-2) has one mismatch and one gap, so s = -2, of length n = 2,
and their similarity is (s + n) / 2n = 0. Reply 3 shares nothing with reply 2: a gap, s = -1, n = 1,
so 0. The repetition rate (SSRR) is the mean of these two, 0.
"""

import random

import pytest

from tools.strategies import (
    NAMES,
    RLVER_GROUPS,
    similarity,
    ssrr,
    strategies_of,
)
from toy import world
from toy.judge import TOY_CODES, toy_codes
from toy.words import ACTS

# --------------------------------------------------------- what they earn, and how much is repeated


REPLIES = [[["E-1", "A-1"], 10], [["E-2"], -4], [["F-5"], -2], [[], 3], [["E-1"], None], [None, 7]]


def test_all_that_tags_tell_by_hand():
    """Two dialogues on paper. Two codes of a group in one reply are one reply; a reply without an
    emotion, or without an answer of the judge, counts in no gain."""
    counts = strategies_of([REPLIES, [[["E-3", "E-1", "G-1"], -6]]])
    told = counts["strategies"]
    # one reply of seven could not be read
    uses = pytest.approx(4 / 2 / (6 / 7))
    assert told["Praise"] == {"uses": uses, "gain": (10 - 4 - 6) / 3, "n": 3}
    assert told["A-1"]["gain"] == 10 and told["G-2"]["gain"] is None and told["G-2"]["n"] == 0
    assert counts["missing"] == 1


def by_brute_force(a, b):
    """The best of all alignments, each tried."""
    if not a or not b:
        return -len(a) - len(b)
    return max(
        by_brute_force(a[1:], b[1:]) + (1 if a[0] == b[0] else -1),
        by_brute_force(a[1:], b) - 1,
        by_brute_force(a, b[1:]) - 1,
    )


def test_similarity_is_the_best_alignment():
    """Against all alignments of short sequences, one by one."""
    rng = random.Random(0)
    for _ in range(200):
        a, b = ([rng.choice("xyz") for _ in range(rng.randint(0, 4))] for _ in range(2))
        n = max(len(a), len(b))
        if n:
            assert similarity(a, b) == pytest.approx((by_brute_force(a, b) + n) / (2 * n))
            assert 0 <= similarity(a, b) == similarity(b, a) <= 1
    assert similarity("ab", "ab") == 1 and similarity("ab", "cd") == 0 == similarity("ab", "")
    assert similarity("ab", "b") == pytest.approx(0.5)  # a gap and a match: (0 + 2) / 4


def test_ssrr_by_hand():
    """Neighbours within a dialogue, then over dialogues: a long dialogue weighs no more."""
    assert ssrr([[["A-1"], ["A-1"], ["B-1"]], [["C-1"], ["C-1"]]]) == pytest.approx((0.5 + 1) / 2)
    assert ssrr([[[], [], ["A-1"]]]) == 0 and ssrr([[["A-1"]]]) is None
    assert ssrr([[["A-1"], None, ["A-1"], ["A-1"]]]) == 1  # nothing is guessed at


# ------------------------------------------------------------------------- where the tags come from


def test_there_are_24_strategies_in_7_groups():
    """SAGE's table 5 has 24 codes, from A-1 to G-2."""
    assert len(NAMES) == 24 and {code[0] for code in NAMES} == set("ABCDEFG")
    grouped = sum(RLVER_GROUPS.values(), [])
    assert len(grouped) == 11 and {*grouped, *TOY_CODES.values()} <= set(NAMES)
    assert {*TOY_CODES, "topic"} == set(ACTS)


def test_tags_of_the_toy_are_exact():
    """Every kind of sentence, said to anybody, in any company; junk is no strategy."""
    rng = random.Random(1)
    praise = world.random_sentence("praise", "boss", "lost", rng)
    for act in ACTS:
        said = world.random_sentence(act, "sister", "hurt", rng)
        expected = [TOY_CODES[act]] if act in TOY_CODES else []
        assert toy_codes(f"{said} {praise}") == [*expected, "E-1"]
    assert toy_codes("You are right and your sister.") == [] == toy_codes("")
