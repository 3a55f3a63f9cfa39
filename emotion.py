"""emotion.py - what a user feels, as a number; what a dialogue starts from and how it ends; and
what a user may need (SAGE 2.1; RLVER 2.1, Table 5).

Training, evaluation, users and tools share this scale, these rules and these needs.
"""

import bisect
from dataclasses import dataclass

# ------------------------------------------------------------------------------------------ the scale

# The emotion is a whole number from 0 to 100.
MAX_CHANGE = 10  # SAGE: one reply moves the emotion by 10 at most
SUCCESS = 100  # at this emotion (level S) a dialogue ends, and scores count a success
# Below this emotion (level F) the user may say goodbye, a dialogue of the benchmark ends, and
# scores count a failure.
FAILURE_BELOW = 10
# The lowest emotions of SAGE's levels C, B, A and S.
LEVELS = (FAILURE_BELOW, 40, 70, SUCCESS)


def clamp_change(change):
    """The change, limited to +-10 (RLVER appendix E.1): otherwise one misread number could decide a
    whole dialogue."""
    return min(MAX_CHANGE, max(-MAX_CHANGE, change))


def move_emotion(emotion, change):
    """e_t = e_{t-1} + change, clamped to 0..100. change: clamped already."""
    return min(100, max(0, emotion + change))


def emotion_level(emotion):
    """SAGE's level of an emotion from 0 to 100: "Emotion-S" (best) to "Emotion-F". f_reply is told
    only this name, not the number."""
    return "Emotion-" + "FCBAS"[bisect.bisect(LEVELS, emotion)]


def scale_in_words(start, max_turns):
    """The scale of a score: "from 30, 8 replies". It is printed with every score, because a
    dialogue that starts higher, or has more replies, ends higher."""
    return f"from {start}, {max_turns} {'reply' if max_turns == 1 else 'replies'}"


# ------------------------------------------------------------------------------------------ the rules


@dataclass(frozen=True)
class Rules:
    """What a dialogue starts from and how it ends. (`dataclasses.replace` makes variants.)"""

    start: int  # the emotion before the first reply, e_0
    floor: int  # the dialogue ends below this emotion
    max_turns: int  # replies, at most
    # Does it open with the profile's own first line, if there is one? Else the user's model makes
    # the first line.
    own_first_line: bool


# RLVER trains from 30 (in a run --max-turns decides); SAGE's benchmark starts at 40 and gives a
# dialogue up at level F.
TRAINING = Rules(start=30, floor=1, max_turns=8, own_first_line=False)
BENCHMARK = Rules(start=40, floor=FAILURE_BELOW, max_turns=10, own_first_line=True)


# ------------------------------------------------------------------------------------------ the needs

# The eight hidden needs (RLVER, Table 5; SAGE calls them intentions): what a user wants from a
# talk, but does not say. A profile has the name of one in `need` and its sentence in `task`.
# {need: {language: its sentence}}
RATIONAL = {
    "analyse": {
        "en": "You want the problem weighed critically, from all its sides.",
        "zh": "你想有人陪你把这件事掰开来看，正面反面都掂量一遍。",
    },
    "advise": {
        "en": "You want advice that really helps with the present trouble.",
        "zh": "你想要一个真正用得上的主意，好把眼前这一关过去。",
    },
    "explain": {
        "en": "You want to understand why the other person acted so.",
        "zh": "你想弄明白那个人当时为什么要那样做。",
    },
    "reflect": {
        "en": "You want to be guided to look at yourself and to grow.",
        "zh": "你想有人引着你看看自己，从这件事里长进一点。",
    },
}
EMOTIONAL = {
    "praise": {
        "en": "You want sincere praise for what you did.",
        "zh": "你想有人真心夸一夸你做过的那些具体的事。",
    },
    "listen": {
        "en": "You want somebody to listen while you let it out.",
        "zh": "你想有人耐心听你把憋着的话全倒出来。",
    },
    "empathise": {
        "en": "You want your feeling to be felt deeply, not simply soothed.",
        "zh": "你想有人深深懂得你心里的滋味，而不只是劝你几句。",
    },
    "side": {
        "en": "You did nothing wrong, and you want that to be said.",
        "zh": "你没有做错什么，也没有责任，你想让对方也这么认为。",
    },
}
NEEDS = RATIONAL | EMOTIONAL
