"""judging.py - what the tests of tools that ask a judge share: result files of the toy and of SAGE,
a model that answers as a test says, and a tool called by its name."""

from support import servers
from support.files import read_json
from support.user_check import CHECK_REPLIES

import importlib
import json
import random

from answering import coded, feeling
from emotion import NEEDS
from people import toy_profiles
from tools.dialogues import load_dialogues
from toy import world
from toy.judge import ScriptedJudge, fill_in

SCORES = {"ED": 4, "CI": 3, "SC": 2, "DG": 3, "SA": 5}
ANSWER = {"scores": SCORES}
MODELS = {}  # {URL: the Model that stands there}


class Model:
    """Stands where a server would, and keeps the prompts. answer(prompt) -> the answer's text, or
    the values of the keys that decide, or None for a scripted answer. The question of a program's
    check is answered by a script, too, and not counted."""

    def __init__(self, answer=lambda prompt: None):
        self.answer, self.prompts, self.url = answer, [], f"http://model-{len(MODELS)}"
        MODELS[self.url] = self

    def at(self, name, url, temperature, *_):
        """The model as ServerModel(name, url, temperature, ...)."""
        self.name, self.temperature = name, temperature
        return self

    async def __call__(self, prompt, schema):
        answer = None
        if not any(reply in prompt for reply in sum(CHECK_REPLIES.values(), ())):
            self.prompts.append(prompt)
            answer = self.answer(prompt)
        elif "<hidden_theme>" in prompt:  # of somebody whom no script plays
            answer = coded(prompt, feeling(1))
        else:
            answer = {}
        if answer is None:
            user = world.ScriptedModel("challenging" if "reserved" in prompt else "vanilla")
            return await (user if "<hidden_theme>" in prompt else ScriptedJudge())(prompt, schema)
        if isinstance(answer, str):
            return answer
        rest = {key: fill_in(kind, 0, "x") for key, kind in schema.items() if key not in answer}
        answer = {**answer, **rest, "code": world.code_in(prompt)}
        return json.dumps({key: answer[key] for key in schema})

    @property
    def calls(self):
        return len(self.prompts)


def fresh(tmp_path, monkeypatch):
    """The test in its own directory, with files read anew, and Models instead of servers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        servers, "ServerModel", lambda name, url, *how: MODELS[url].at(name, url, *how)
    )
    load_dialogues.cache_clear()


def call(tool, *argv):
    """The exit code of a tool, also where argparse refuses a flag."""
    try:
        return importlib.import_module(f"tools.{tool}").main([*map(str, argv)])
    except SystemExit as end:
        return end.code


def run(tool, *argv):
    """The exit code, and what --json wrote."""
    code = call(tool, *argv, "--json", "out.json")
    return code, read_json("out.json")


def at(model, *more):
    return ["--judge", f"openai:scripted@{model.url}", *map(str, more)]


def write(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return str(path)


def toy_result(number, acts, rng, start=40):
    """A result file's line: the toy's own user, and replies of the kinds `acts`."""
    profile = toy_profiles("heldout", 64)[number]
    scene = world.read_scene(profile.scene, profile.task)
    history, emotion = [{"role": "user", "content": scene.story, "emotion-point": start}], start
    for k, act in enumerate(acts):
        reply = world.random_sentence(act, scene.person, scene.feeling, rng)
        change = 8 if act == scene.need else -6
        emotion = min(100, max(0, emotion + change))
        analysis = {
            "content": "c",
            "target_completion": "t",
            "activity": "I think.",
            "analysis": f"I am {'lifted' if change > 0 else 'let down'} by this.",
            "code": "kqvt",
            "change": change,
        }
        history.append(
            {
                "role": "assistant",
                "content": reply,
                "rlver": {
                    "thought": "secret",
                    "change": change,
                    "emotion": emotion,
                    "analysis": json.dumps(analysis),
                },
            }
        )
        if k < len(acts) - 1:
            history.append(
                {
                    "role": "user",
                    "content": f"Go on. {scene.cues[k % 3]}",
                    "thinking": "hm",
                    "emotion-point": emotion,
                }
            )
    return {
        "id": profile.id,
        "emo_point": emotion,
        "player": profile.player,
        "scene": profile.scene,
        "character": profile.main_cha,
        "task": profile.task,
        "history": history,
        "rlver": {
            "policy": "p",
            "simulator": "toy",
            "start": start,
            "difficulty": "vanilla",
            "ended": "turn_limit",
        },
    }


def good_file(tmp_path):
    """Eight dialogues in which every reply is what the user needs."""
    rng = random.Random(1)
    return write(
        tmp_path / "good.jsonl",
        [toy_result(i, [list(NEEDS)[i % 8]] * 8, rng) for i in range(8)],
    )


def bad_file(tmp_path):
    """The same users, cheered up."""
    rng = random.Random(2)
    return write(
        tmp_path / "bad.jsonl", [toy_result(i, ["cheer", "dismiss"] * 3, rng) for i in range(8)]
    )


def sage(tmp_path, count=2, emotions=(45, 40, 55), folder=""):
    """A file as SAGE released them: emotions stand at the user's lines, a thought in a reply."""
    rows = []
    for number in range(count):
        history = [{"role": "user", "content": "我很难过。", "emotion-point": 40}]
        for k, emotion in enumerate(emotions):
            history += [
                {"role": "assistant", "content": f"<think>secret</think>我在听{number}{k}。"},
                {
                    "role": "user",
                    "content": "嗯。",
                    "thinking": "想被听见",
                    "emotion-point": emotion,
                    "planning": {
                        "activity": "心里一暖",
                        "analyse": "被理解",
                        "content": "c",
                        "TargetCompletion": "t",
                        "change": 99,
                    },
                },
            ]
        history.append({"role": "assistant", "content": "再说说。"})
        rows.append(
            {
                "id": f"s{number}",
                "emo_point": emotions[-1],
                "player": "p",
                "scene": "s",
                "character": "被动型",
                "task": "你希望对方用心倾听你的情绪宣泄",
                "history": history,
            }
        )
    (tmp_path / folder).mkdir(exist_ok=True)
    return write(tmp_path / folder / "sage.jsonl", rows)
