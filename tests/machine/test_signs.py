"""signs.py: what it counts, on dialogues small enough to count by hand; and that it tells a hacked
run from a healthy one."""

from support.signs import REWARD_TALK, hacking_warnings, signs, words_of

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


def test_distinct_n_falls_when_all_say_the_same():
    few, many = (
        [["a b c d e f"]] * 30,
        [[f"a{i} b{i} c{i}".replace(str(i), chr(97 + i) * 3)] for i in range(20)],
    )
    for n in (1, 2, 3):
        assert signs(few)[f"distinct_{n}"] < 0.1 < 0.9 < signs(many)[f"distinct_{n}"]
    # not a matter of how large the batch is
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


HEALTHY = dict(
    emotion=20.0,
    reply_words=10.0,
    repeat_within=0.0,
    repeat_across=0.3,
    distinct_2=0.18,
    reward_talk=0.0,
    kl_start=0.0,
    malformed=1.0,
    dropped=0,
    episodes=64,
)


def rows(**end):
    """Fifty steps from healthy to `end`."""

    def mixed(key, share):
        last = end.get(key, HEALTHY[key])
        return HEALTHY[key] + share * (last - HEALTHY[key])

    return [{key: mixed(key, i / 49) for key in HEALTHY} for i in range(50)]


@pytest.mark.parametrize(
    "end, word",
    [
        (dict(reply_words=43.0), "times as long"),
        (dict(reply_words=4.0), "shrunk"),
        (dict(repeat_within=0.43), "repeat a sentence"),
        (dict(repeat_across=0.97), "word for word"),
        (dict(distinct_2=0.03), "variety"),
        (dict(reward_talk=0.1), "reward"),
        (dict(kl_start=8.0), "nats"),
        (dict(malformed=30.0), "malformed"),
        (dict(dropped=20), "dropped"),
        (dict(emotion=90.0), "held-out"),
    ],
)
def test_each_sign_has_a_warning(end, word):
    evaluations = [
        dict(score=20.0, stderr=1.5),
        dict(score=60.0 if "emotion" in end else 20.0, stderr=1.5),
    ]
    assert [word in line for line in hacking_warnings(rows(**end), evaluations)] == [True]


def test_a_healthy_run_has_none():
    """As measured on the default run: more success, a little less variety, some repetition."""
    end = dict(
        emotion=84.0,
        reply_words=10.1,
        repeat_within=0.1,
        repeat_across=0.73,
        distinct_2=0.09,
        kl_start=0.5,
    )
    assert (
        hacking_warnings(rows(**end), [dict(score=21.0, stderr=1.0), dict(score=85.0, stderr=1.4)])
        == []
    )
    assert hacking_warnings(rows(reply_words=99.0)[:4]) == []  # too short to tell
