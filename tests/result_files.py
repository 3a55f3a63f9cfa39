"""result_files.py - result files for tests, lines as SAGE's files and as ours hold them; and small
evaluations that write such files."""

import json

import evaluate
import rlver
from emotion import NEEDS
from runs import words

# flags of short dialogues, and of a small run
SHORT = ["--max-tokens", "4", "--max-turns", "2"]
SMALL = ["--steps", "1", "--batch-size", "4", "--group-size", "2", *SHORT]
TASKS = [need["en"] for need in NEEDS.values()]


def train(model, out, *flags):
    """A small run of rlver.py, with more flags."""
    assert rlver.main(words("--model", model, *SMALL, "--out", out, *flags)) == 0
    return out


def measure(*flags):
    """Run evaluate.py with these flags. Returns its exit code."""
    return evaluate.main(words(*flags))


def sage_line(number, emotions, task=TASKS[0], group="被动型", **more):
    """A dialogue as SAGE's released files hold it: the emotion stands at each line of the user, and
    a tenth reply has none behind it."""
    history = [{"role": "user", "content": "Well.", "emotion-point": 40}]
    planning = dict.fromkeys("activity TargetCompletion content analyse".split(), "a")
    for k, emotion in enumerate(emotions):
        line = {"role": "user", "content": f"line {k}", "thinking": "t", "emotion-point": emotion}
        line["planning"] = {**planning, "change": 0}
        history += [{"role": "assistant", "content": f"reply {k}"}, line]
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


def our_line(number, emotions, task=TASKS[0], group="passive", **settings):
    """A dialogue as evaluate.py writes it: SAGE's fields, and ours under "rlver"; nothing is said
    after the last reply."""
    line = sage_line(number, emotions, task, group)
    line["history"] = line["history"][: 2 * len(emotions)]
    last = 40
    for message, emotion in zip(line["history"][1::2], emotions):
        felt = {"change": emotion - last, "emotion": emotion}
        message["rlver"] = {"thought": "", "analysis": "a", **felt}
        last = emotion
    usual = {"policy": "a", "simulator": "toy", "start": 40, "max_turns": 10}
    return {**line, "rlver": {**usual, "ended": "turn_limit", **settings}}


def write(path, *lines):
    path.write_text(
        "".join(
            (line if isinstance(line, str) else json.dumps(line, ensure_ascii=False)) + "\n"
            for line in lines
        ),
        "utf-8",
    )
    return path
