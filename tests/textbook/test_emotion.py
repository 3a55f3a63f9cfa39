"""The emotion: its five levels, and how far one reply moves it.

"Defect N" is a line of docs/differences.md of what the released code does.
"""

import asyncio

from answering import Model, feeling, user_of
from emotion import clamp_change, emotion_level, move_emotion


def test_an_example_by_hand():
    """A user at 65 hears a reply that moves it by +8, and three that would move it by +60."""
    user = user_of(Model([feeling(8), *[feeling(60)] * 3]))
    user.emotion = 65
    asyncio.run(user.feel("I am here."))
    assert user.emotion == 73 and emotion_level(user.emotion) == "Emotion-A"
    _, change = asyncio.run(user.feel("Take your time."))
    assert (change, user.emotion) == (10, 83)  # the log says what was done, not what was read
    for emotion in (93, 100):
        asyncio.run(user.feel("Go on."))
        assert user.emotion == emotion


def test_emotion_levels():
    """SAGE: S at 100, A from 70, B from 40, C from 10, F below; a boundary belongs to the higher
    level."""
    emotions = (100, 99, 70, 69, 40, 39, 30, 10, 9, 0)
    assert "".join(emotion_level(e)[-1] for e in emotions) == "SAABBCCCFF"


def test_one_reply_moves_the_emotion_by_ten_at_most():
    """Defect 25: the released code adds whatever integer it reads, so one bad answer can be the
    whole reward."""
    moves = {(30, -4): 26, (30, 25): 40, (30, -99): 20, (95, 10): 100, (4, -10): 0}
    assert {(e, c): move_emotion(e, clamp_change(c)) for e, c in moves} == moves
