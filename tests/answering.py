"""answering.py - what tests' own models need: to answer with the object that a prompt asks for; and
a user over such a model, whose answers a test knows by heart."""

from players.calls import Caller

import json
import re

from people import Profile
from simulator import RETRIES, Simulator, User
from toy.world import code_in

CODE = "kqvt"  # of an answer that no prompt asked for, or in place of the prompt's code
LIN = {  # a profile of the released files
    "id": "p-1",
    "player": "* 姓名：林小雨\n* 说话风格：说话直接。",
    "scene": "**事件起因**\n\n同事抢了她的功劳，领导没有过问。",
    "main_cha": "被动型",
    "cha_group": ["内向", "谦逊"],
    "task": "你希望对方用心倾听你的情绪宣泄",
}
CHAINS = [(lang, difficulty) for lang in ("en", "zh") for difficulty in ("vanilla", "challenging")]


def feeling(change, target="t", activity="a", analysis="x"):
    """An answer of f_emo, with a key that nobody reads."""
    answer = {"content": "c", "target_completion": target, "reason": target, "activity": activity}
    return json.dumps({**answer, "analysis": analysis, "code": CODE, "change": change})


def saying(line, goodbye=False):
    """An answer of f_reply."""
    answer = {"thinking": "t", "origin": "o", "revision": "r", "response": line}
    return json.dumps({**answer, "code": CODE, "goodbye": goodbye})


def coded(prompt, answer):
    """The answer with the code of this prompt."""
    return answer.replace(CODE, code_in(prompt))


class Model:
    """Stands behind a user: keeps every prompt; answers from two lists, in order, the last answer
    for ever, with the prompt's code."""

    def __init__(self, emotion=None, reply=None):
        self.answers = {
            "emotion": list(emotion or [feeling(7)]),
            "reply": list(reply or [saying("Go on.")]),
        }
        self.prompts = []

    async def __call__(self, prompt, schema=None):
        self.prompts.append(prompt)
        answers = self.answers["reply" if "<emotion_level>" in prompt else "emotion"]
        return coded(prompt, answers.pop(0) if len(answers) > 1 else answers[0])


def simulator_of(model, lang="en", difficulty="vanilla", retries=RETRIES, **shared):
    """The Simulator over `model`, any async function. shared: arguments of Caller."""
    return Simulator(Caller(model, **shared), lang, difficulty, retries)


def user_of(model, lang="en", difficulty="vanilla", **profile):
    """A user with the profile LIN, but for the fields in `profile`, over `model`."""
    return User(simulator_of(model, lang, difficulty), Profile(**{**LIN, **profile}))


def tagged(prompt, tag):
    """What stands between <tag> and </tag> in a rendered prompt. The tag must be there once, or a
    text has closed it."""
    assert prompt.count(f"<{tag}>") == prompt.count(f"</{tag}>") == 1
    return re.search(rf"<{tag}>\s*(.*?)\s*</{tag}>", prompt, re.S)[1]
