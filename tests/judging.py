"""judging.py - what the tests of tools that ask a judge share: result files of the toy and of SAGE,
a model that answers as a test says, and a tool called by its name."""

from players import server
from players.check import CHECK_REPLIES
from support.files import read_json

import importlib
import json
import random

import result_files
from answering import coded, feeling
from emotion import NEEDS
from people import toy_profiles
from result_files import our_line, sage_line
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
        server, "ServerModel", lambda name, url, *how: MODELS[url].at(name, url, *how)
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
    return str(result_files.write(path, *rows))


def toy_result(number, acts, rng):
    """A result file's line: the toy's own user, and replies of the kinds `acts`."""
    profile = toy_profiles("heldout", 64)[number]
    scene = world.read_scene(profile.scene, profile.task)
    changes, emotions = [8 if act == scene.need else -6 for act in acts], [40]
    for change in changes:
        emotions.append(min(100, max(0, emotions[-1] + change)))
    row = our_line(number, emotions[1:], profile.task, profile.main_cha, difficulty="vanilla")
    row |= {"id": profile.id, "player": profile.player, "scene": profile.scene}
    first, *history = row["history"]
    first["content"] = scene.story
    for k, (act, change) in enumerate(zip(acts, changes)):
        reply, *line = history[2 * k : 2 * k + 2]
        reply["content"] = world.random_sentence(act, scene.person, scene.feeling, rng)
        felt = f"I am {'lifted' if change > 0 else 'let down'} by this."
        analysis = feeling(change, activity="I think.", analysis=felt)
        reply["rlver"] |= {"thought": "secret", "change": change, "analysis": analysis}
        for message in line:
            message["content"] = f"Go on. {scene.cues[k % 3]}"
    return row


def good_file(tmp_path):
    """Eight dialogues in which every reply is what the user needs."""
    rng = random.Random(1)
    return write(
        tmp_path / "good.jsonl",
        [toy_result(i, [need] * 8, rng) for i, need in enumerate(NEEDS)],
    )


def bad_file(tmp_path):
    """The same users, cheered up."""
    rng = random.Random(2)
    return write(
        tmp_path / "bad.jsonl", [toy_result(i, ["cheer", "dismiss"] * 3, rng) for i in range(8)]
    )


def sage(tmp_path, count=2, emotions=(45, 40, 55)):
    """A file as SAGE released them: emotions stand at the user's lines, a thought in a reply."""
    rows = []
    for number in range(count):
        row = sage_line(number, emotions, "你希望对方用心倾听你的情绪宣泄")
        first, *history = row["history"]
        first["content"] = "我很难过。"
        for k, (reply, line) in enumerate(zip(history[::2], history[1::2])):
            reply["content"] = f"<think>secret</think>我在听{number}{k}。"
            line |= {"content": "嗯。", "thinking": "想被听见"}
            line["planning"] |= {"activity": "心里一暖", "change": 99}
        row["history"].append({"role": "assistant", "content": "再说说。"})
        rows.append(row)
    return write(tmp_path / "sage.jsonl", rows)
