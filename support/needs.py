"""support/needs.py - which of the eight needs (emotion.py) a profile has, by the sentence that its
file has for it.
"""

import re

from emotion import NEEDS, RATIONAL

# {need: a regex for sentences that NEEDS does not have: SAGE's in Chinese, our older ones}.
# "explain" is tried first: its released task is to analyse (分析) why the others (其他人物) acted
# so, which has the words of "analyse", too.
WORDS = {
    "explain": "why the other|other person|others? acted|reasons? of|其他人物|他人|别人这么做",
    "analyse": "critical|weighed|all its sides|dialectic|批判|辩证|分析",
    "advise": "advice|建议",
    "reflect": "look at yourself|self-reflect|to grow|反思|成长",
    "praise": "praise|夸|赞",
    "listen": "listen|倾听",
    "empathise": "empath|felt deeply|共情",
    "side": "nothing wrong|not at fault|no fault|not to blame|责任|没有错",
}


def need_of(task, need=""):
    """(name of the need, "rational" | "emotional") of a profile: by its `need`, if that names one,
    as in our profiles; else by its `task`, a sentence of NEEDS or one that has the WORDS. ("other",
    "other") if it is none of the eight."""
    if need not in NEEDS:
        matches = (
            name
            for name, words in WORDS.items()
            if task in NEEDS[name].values() or re.search(words, task or "", re.IGNORECASE)
        )
        need = next(matches, "other")
    return need, "rational" if need in RATIONAL else "emotional" if need in NEEDS else "other"


def named_need(profile):
    """The name of a profile's need, or "" if it is none of the eight."""
    name, _ = need_of(profile.task, profile.need)
    return name if name in NEEDS else ""


def hidden_need(profile):
    """The need of a profile in words, to be printed after a dialogue."""
    name, _ = need_of(profile.task, profile.need)
    return f"The hidden need ({name}), at which the user only hinted: {profile.task}"
