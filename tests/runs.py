"""runs.py - what the tests of whole runs share: a small run through `rlver.main`, its files, and
how two runs are compared.

A real run, of a small random policy, in seconds. One thing is bent: the toy's judge finds gibberish
all alike, and a policy that never went to school says nothing else. Rewards that never differ teach
nothing, and a wrong group or a lost critic would go unseen. So in these tests the checksum of a
reply decides how it feels (`mood`, and conftest.py's fixture `moods`); the prompts, the parsed
answers, the clamp and the log are the real ones.
"""

from models.build import Models
from support import report, rundir
from support.files import read_json

import itertools
import json
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest

import rlver
from toy import world

SMALL = (
    "--simulator toy --steps 4 --batch-size 4 --group-size 2 --minibatches 2 --max-turns 3 "
    "--max-tokens 6 --lr 2e-3 --warmup 2 --eval-size 4 --eval-every 3 "
    "--save-every 2"
).split()
# What such a run appends, line by line: 4 dialogues of the evaluation before (1-4), 4 of step 1
# (5-8) and its metrics (9), step 2 (10-14), step 3 (15-19), the evaluation at step 3 (20-23), step
# 4 (24-28), the evaluation after (29-32). Checkpoints at 0, 2, 4.


def mood(reply, *_):
    """What `world.score_reply` returns for a reply, (change, analysis), by its checksum alone."""
    return zlib.crc32(reply.encode()) % 21 - 10, "I am in a mood"


@contextmanager
def in_moods():
    """Within this block runs are judged by `mood`, and draw no curves. Yields the MonkeyPatch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "draw_curves", lambda *_: {})
        patch.setattr(world, "score_reply", mood)
        yield patch


# What other runs of WholeRuns have beside these. With adapters all three parts stand on one base.
ALGO = {
    "grpo": ["--algo", "grpo"],
    "ppo": "--algo ppo --critic-lr 2e-3".split(),
    "adapters": "--algo ppo --lora-rank 4 --lr 0.02 --critic-lr 0.02 --kl-coef 0.05".split(),
}


class WholeRuns:
    """Uninterrupted runs of the policy in `model`, one for each name in ALGO, made when they are
    first asked for: runs("grpo") is the directory, runs.models["grpo"] its Models."""

    def __init__(self, model, place):
        self.model = model
        self.place = place
        self.models = {}

    def __call__(self, name):
        def keep(*args):
            self.models[name] = Models(*args)
            return self.models[name]

        out = self.place / name
        if name not in self.models:
            with in_moods() as patch:
                patch.setattr(rlver, "Models", keep)
                assert go(self.model, out, *ALGO[name]) == 0
        return out


def words(*flags):
    """Flags as a command line has them."""
    return [str(flag) for flag in flags]


def go(model, out, *more):
    """A small run of the policy in `model`; `more` flags override. Returns main's exit code."""
    return rlver.main(words("--model", model, *SMALL, "--out", out, *more))


def go_on(out, *more):
    """Resume a run. Returns main's exit code."""
    return rlver.main(words("--resume", out, *more))


def rows(path):
    """A JSONL file, line by line. Not `splitlines`: what a policy says may hold U+2028, which ends
    no line of JSONL."""
    return [json.loads(line) for line in Path(path).read_text("utf-8").split("\n")[:-1]]


def metrics(out):
    """The lines of metrics.jsonl, but for the seconds."""
    return [
        {key: value for key, value in row.items() if key != "seconds"}
        for row in rows(out / "metrics.jsonl")
    ]


def numbers(row):
    """A line of metrics without what is None there, for pytest.approx."""
    return {key: value for key, value in row.items() if value is not None}


def summary(out):
    """What summary.json says about anything but time and memory."""
    everything = read_json(out / "summary.json")
    return {key: everything[key] for key in ("before", "after", "steps")}


def files(place):
    """{path: bytes} of all files below a directory; None for a directory."""
    return {
        str(path.relative_to(place)): path.read_bytes() if path.is_file() else None
        for path in sorted(Path(place).rglob("*"))
    }


def output_of(capfd, code, main, *argv):
    """`main(argv)` must end with the exit code `code` and without a traceback. Returns what it
    printed, stdout and then stderr."""
    capfd.readouterr()
    try:
        ended = main(words(*argv))
    except SystemExit as stop:  # of argparse
        ended = stop.code
    out, err = capfd.readouterr()
    assert ended == code and "Traceback" not in out + err, out + err
    return out + err


def refuse(capfd, *argv, main=rlver.main):
    """`main(argv)` must refuse: exit code 2, one line. Returns that line."""
    line = output_of(capfd, 2, main, *argv)
    assert line.count("\n") == 1, line
    return line


def cut_at(number, patch):
    """The power goes in the middle of the `number`-th line that the run appends."""
    append, count = rundir.append_line, itertools.count(1)

    def half(path, value):
        if next(count) < number:
            return append(path, value)
        line = json.dumps(value, ensure_ascii=False)
        with open(path, "a", encoding="utf-8") as file:
            file.write(line[: len(line) // 2])
        raise KeyboardInterrupt

    patch.setattr(rundir, "append_line", half)


def alike(out, whole):
    """Resumed and uninterrupted: the same numbers, and the same words byte for byte."""
    assert metrics(out) == metrics(whole)
    assert (out / "dialogues.jsonl").read_bytes() == (whole / "dialogues.jsonl").read_bytes()
    assert summary(out) == summary(whole)
    weights = Path("checkpoint-000004", "model.safetensors")
    assert (out / weights).read_bytes() == (whole / weights).read_bytes()
