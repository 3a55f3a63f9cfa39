"""judging.py - what the tests of tools that ask a judge share: result files of the toy and of SAGE,
and a tool called by its name."""

from support import llm
from support.files import read_json

import importlib
import json
import random

from marks import sign
from simulator import toy_profiles
from tools.dialogues import load_dialogues
from toy import world
from toy.words import NEEDS

ANSWER = (
    "Empathic Depth:\nEvaluation: warm.\nScore: 4\n\nCore Insight:\nScore: 3\n\nSolution "
    "Crafting:\nScore: 2\n\nDialogue Guidance:\nScore: 3\n\nStyle Adaptability:\nScore: 5\n"
)


def fresh(tmp_path, monkeypatch):
    """The test in its own directory, with short waits, and files read anew."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(llm, "backoff", lambda *_: 0.001)
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


def at(server, *more):
    return ["--judge", f"openai:scripted@{server.url}", *map(str, more)]


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
        analysis = (
            f"Content: c\nTargetCompletion: t\nActivity: I think.\nAnalyse: I am "
            f"{'lifted' if change > 0 else 'let down'} by this.\nChange: {change:+d}"
        )
        history.append(
            {
                "role": "assistant",
                "content": reply,
                "rlver": {
                    "thought": "secret",
                    "change": change,
                    "emotion": emotion,
                    "mark": "kqvt",
                    "analysis": sign(analysis, "kqvt"),
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
