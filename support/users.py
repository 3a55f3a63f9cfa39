"""support/users.py - users as files have them, and the scale of their emotion."""

INITIAL_EMOTION = {"training": 30, "benchmark": 40}  # RLVER trains from 30; SAGE's benchmark: 40


def emotion_level(emotion):
    """The five levels of SAGE: S at 100, A from 70, B from 40, C from 10, F below. The reply hop is
    told only this name."""
    return "Emotion-" + "FCBAS"[sum(emotion >= bound for bound in (10, 40, 70, 100))]
