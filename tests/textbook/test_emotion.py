"""The emotion: its five levels, how far one reply moves it, and when a user takes leave.

"Defect N" is a line of docs/differences.md of what the released code does.
"""

from support.metrics import emotion_level

import asyncio

import pytest

from marks import Model, analysis, user_of
from simulator import (
    move_emotion,
    says_goodbye,
)


def test_an_example_by_hand():
    """A user at 65 hears a reply that moves it by +8, and one that would move it by +60."""
    user = user_of(Model([analysis("+8"), analysis("+60")]))
    user.emotion = 65
    asyncio.run(user.feel("I am here."))
    assert user.emotion == 73 and emotion_level(user.emotion) == "Emotion-A"
    asyncio.run(user.feel("Take your time."))
    assert user.emotion == 83  # by ten at most
    assert says_goodbye("I feel better now. Goodbye!")
    assert not says_goodbye("He never said goodbye.")


def test_emotion_levels():
    """SAGE: S at 100, A from 70, B from 40, C from 10, F below; a boundary belongs to the higher
    level."""
    levels = {
        100: "S",
        99: "A",
        70: "A",
        69: "B",
        40: "B",
        39: "C",
        30: "C",
        10: "C",
        9: "F",
        0: "F",
    }
    assert {e: emotion_level(e) for e in levels} == {
        e: f"Emotion-{name}" for e, name in levels.items()
    }


def test_one_reply_moves_the_emotion_by_ten_at_most():
    """Defect 25: the released code adds whatever integer it reads, so one bad answer can be the
    whole reward."""
    moves = {
        (30, 4): 34,
        (30, -4): 26,
        (30, 25): 40,
        (30, -99): 20,
        (95, 10): 100,
        (100, 3): 100,
        (4, -10): 0,
        (0, 0): 0,
    }
    assert {move: move_emotion(*move) for move in moves} == moves


def test_a_wild_answer_moves_the_user_by_ten_at_most():
    """The same in the user who hears it, and the log says what was done, not what was read."""
    user = user_of(Model([analysis("+60"), analysis("-100")]))
    assert asyncio.run(user.feel("hello"))[1] == 10 and user.emotion == 40
    assert asyncio.run(user.feel("hello"))[1] == -10 and user.emotion == 30


GOODBYES = {
    "Goodbye.": 1,
    "Thanks for listening. Goodbye!": 1,
    "I must go. Bye!": 1,
    "Okay, thanks, bye.": 1,
    "Bye-bye": 1,
    "Well... goodbye then.": 1,
    "I have to run, see you tomorrow!": 1,
    "Goodbye, Anna. 👋": 1,
    "Goodbye :)": 1,
    "I have to go now, goodbye :-)": 1,
    "Alright, bye then :D": 1,
    "This does not help me. Goodbye.": 1,
    "再见。": 1,
    "好吧，那就这样，再见！": 1,
    "我先走了，拜拜啦～": 1,
    "谢谢你。再见": 1,
    "我觉得好多了。再见！": 1,
    "再见了，朋友": 1,
    "": 0,
    "Hm.": 0,
    "He never said goodbye.": 0,
    "Goodbye is the word she used.": 0,
    "Goodbye! No, wait, one more thing.": 0,
    "She left. I could not even say goodbye to her.": 0,
    "I waved goodbye and cried.": 0,
    "Buyer beware.": 0,
    'And then she said: "Goodbye."': 0,
    'He just said, "Goodbye."': 0,
    "他只回了我两个字：再见。": 0,
    "他只说，再见。": 0,
    "他没有说再见。": 0,
    "他没有说再见": 0,
    "再见这个词她从来不说。": 0,
    "再见！不过我还想说一件事。": 0,
    "我们还能再见面吗？": 0,
    "走的时候，连再见都没说。": 0,
}


@pytest.mark.parametrize("line", GOODBYES)
def test_only_a_farewell_in_the_last_sentence_ends_the_dialogue(line):
    """The released code ends the dialogue wherever the word occurs: a user who tells of a goodbye
    is cut off, and the emotion of that moment becomes the reward."""
    assert says_goodbye(line) == bool(GOODBYES[line])
