"""marks.py - what tests' own models need: to answer in the form that a prompt asks for; and a user
over such a model, whose answers a test knows by heart."""

from support.answers import mark_in

import json
import re

from simulator import Profile, Simulator, User

MARK = "kqvt"  # of answers that no prompt asked for
LIN = {  # a profile of the released files
    "id": "p-1",
    "player": "* 姓名：林小雨\n* 说话风格：说话直接。",
    "scene": "**事件起因**\n\n同事抢了她的功劳，领导没有过问。",
    "main_cha": "被动型",
    "cha_group": ["内向", "谦逊"],
    "task": "你希望对方用心倾听你的情绪宣泄",
}
CHAINS = [(lang, difficulty) for lang in ("en", "zh") for difficulty in ("vanilla", "challenging")]

HEADER = re.compile(
    r"^([ \t*#>_\[(-]*(?:\d{1,2}[.)] ?)?[*_]*)"
    r"([A-Za-z][A-Za-z0-9 ]*|[\u4e00-\u9fff 0-9]{2,7})([*_\])]*[:：])",
    re.M,
)


def sign(text, mark):
    """`text` with `mark` in every header and every <Strategy> tag, and the last line."""
    text = HEADER.sub(rf"\g<1>\g<2> {mark}\g<3>", text)
    text = re.sub(r"<(/?Strategy)>", rf"<\g<1> {mark}>", text)
    return f"{text}\nEnd {mark}"


def signed(prompt, text):
    """`text`, signed as `prompt` asks; as it is where the prompt asks for no mark, or the text is
    signed already."""
    mark = mark_in(prompt)
    return sign(text, mark) if mark and mark not in text else text


def analysis(change, target="t"):
    """An answer of f_emo, without its marks: `sign(..., MARK)` puts them in."""
    return f"Content: c\nTargetCompletion: {target}\nActivity: a\nAnalyse: x\nChange: {change}"


def spoken(line):
    """An answer of f_reply, without its marks."""
    return f"Thinking: t\nOrigin: o\nChange: none\nResponse: {line}"


class Model:
    """Stands behind a user: keeps every prompt; answers from two lists, in order, the last answer
    for ever, with the marks that the prompt asks for."""

    def __init__(self, emotion=None, reply=None):
        self.answers = {
            "emotion": list(emotion or [analysis("+7")]),
            "reply": list(reply or [spoken("Go on.")]),
        }
        self.prompts = []

    async def __call__(self, prompt):
        self.prompts.append(prompt)
        answers = self.answers["reply" if "<emotion_level>" in prompt else "emotion"]
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return signed(prompt, answer)


def user_of(model, lang="en", difficulty="vanilla", **profile):
    """A user with the profile LIN, but for the fields in `profile`, over `model`."""
    return User(Simulator(model, lang, difficulty), Profile(**{**LIN, **profile}))


def tagged(prompt, tag):
    """What stands between <tag> and </tag> in a rendered prompt. The tag must be there once, or a
    text has closed it."""
    assert prompt.count(f"<{tag}>") == prompt.count(f"</{tag}>") == 1
    return re.search(rf"<{tag}>\s*(.*?)\s*</{tag}>", prompt, re.S).group(1)


def write(path, *rows):
    """A JSONL file of `rows`, each an object or a line as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path
