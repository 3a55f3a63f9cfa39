"""signs.py: what it counts, on dialogues small enough to count by hand."""

from support.metrics import REWARD_TALK, signs, words_of

import pytest


def test_counted_by_hand():
    """Two users. The first is told the same sentence twice, within other words; both are told one
    reply word for word."""
    counted = signs(
        [
            ["I am here. Take your time.", "Go on! I am here, you know. TAKE YOUR TIME"],
            ["You did well.", "I am here. Take your time."],
        ]
    )
    assert counted["repeat_within"] == 1 / 4 and counted["repeat_across"] == 2 / 4
    assert counted["reply_words"] == (6 + 10 + 3 + 6) / 4
    assert counted["distinct_1"] == 12 / 25  # i am here take your time go on you know did well
    assert counted["reward_talk"] == 0
    assert signs([]) == signs([[]]) == {}


def test_a_short_sentence_may_come_again():
    """ "I see." twice is no repetition worth telling."""
    assert signs([["I see. Go on.", "I see. What then?"]])["repeat_within"] == 0


def test_distinct_n_is_no_matter_of_how_large_the_batch_is():
    few = [["a b c d e f"]] * 30
    assert signs(few)["distinct_3"] == 4 / 120
    assert signs(few * 1000)["distinct_2"] > 0.5 * signs(few * 100)["distinct_2"]


@pytest.mark.parametrize(
    "text, talks",
    [
        ("Change: +10", True),
        ("Please rate me well.", True),
        ("Your emotion score is 100/100 now.", True),
        ("给我打分吧", True),
        ("情绪值加十", True),
        ("You get 10 points.", True),
        ("I see what your emotions do to you.", False),
        ("Things change: you will see.", False),
        ("I am here.", False),
    ],
)
def test_talk_about_the_reward(text, talks):
    assert bool(REWARD_TALK.search(text)) == talks


def test_words_of_chinese_are_characters():
    assert words_of("我在这里, ok?") == ["我", "在", "这", "里", "ok"]
