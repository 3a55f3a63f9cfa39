"""result_files.py - result files for tests, lines as SAGE's files and as ours hold them; and small
evaluations that write such files."""

import json

import evaluate
import rlver
from emotion import NEEDS

# flags of short dialogues, and of a small run
SHORT = ["--max-tokens", "4", "--max-turns", "2"]
SMALL = ["--steps", "1", "--batch-size", "4", "--group-size", "2", *SHORT]
TASKS = [need.task["en"] for need in NEEDS.values()]


def train(model, out, *flags):
    """A small run of rlver.py, with more flags."""
    words = ["--model", model, *SMALL, "--out", out, *flags]
    assert rlver.main([str(word) for word in words]) == 0
    return out


def measure(*flags):
    """Run evaluate.py with these flags. Returns its exit code."""
    return evaluate.main([str(flag) for flag in flags])


def sage_line(number, emotions, task=TASKS[0], group="被动型", **more):
    """A dialogue as SAGE's released files hold it: the emotion stands at each line of the user, and
    a tenth reply has none behind it."""
    history = [{"role": "user", "content": "Well.", "emotion-point": 40}]
    for k, emotion in enumerate(emotions):
        history += [
            {"role": "assistant", "content": f"reply {k}"},
            {
                "role": "user",
                "content": f"line {k}",
                "thinking": "t",
                "emotion-point": emotion,
                "planning": {
                    "activity": "a",
                    "TargetCompletion": "t",
                    "content": "c",
                    "analyse": "x",
                    "change": 0,
                },
            },
        ]
    if len(emotions) == 9:
        history.append({"role": "assistant", "content": "never scored"})
    return {
        "id": f"p{number}",
        "emo_point": emotions[-1],
        "emo_state": "Emotion-F",
        "target": "eq",
        "player": "p",
        "scene": "s",
        "character": group,
        "topic": "t",
        "task": task,
        "history": history,
        **more,
    }


def our_line(
    number,
    emotions,
    task=TASKS[0],
    group="passive",
    ended="turn_limit",
    simulator="toy",
    policy="a",
    max_turns=10,
):
    history, last = [{"role": "user", "content": "Well.", "emotion-point": 40}], 40
    for k, emotion in enumerate(emotions):
        history += [
            {
                "role": "assistant",
                "content": f"reply {k}",
                "rlver": {
                    "thought": "",
                    "change": emotion - last,
                    "emotion": emotion,
                    "analysis": "a",
                },
            }
        ]
        if k + 1 < len(emotions):
            history += [{"role": "user", "content": f"line {k}", "emotion-point": emotion}]
        last = emotion
    return {
        "id": f"p{number}",
        "emo_point": last,
        "emo_state": "E",
        "player": "p",
        "scene": "s",
        "character": group,
        "topic": "",
        "task": task,
        "history": history,
        "rlver": {
            "policy": policy,
            "simulator": simulator,
            "start": 40,
            "max_turns": max_turns,
            "ended": ended,
        },
    }


def write(path, *lines):
    path.write_text(
        "".join(
            (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)) + "\n"
            for line in lines
        ),
        encoding="utf-8",
    )
    return path


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
