"""small.py - what is measured of the small language model and of the user with learned feelings:
how well that user tells good replies from bad ones, what fixed replies earn, and what is kept of a
run. tables.py calls it, and docs/small.md shows its tables.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from support.metrics import signs
from support.results import recorded_dialogues
from support.stats import auc, spearman

import asyncio
import random
import re

import matplotlib.pyplot as plt
import numpy as np

import simulator
from policy import Reply
from rlver import converse
from toy import world
from toy.feelings import feel
from toy.words import ACTS

# Those of recipes/smollm2.sh, which makes the model, too.
FLAGS = (
    "--model .cache/smollm2 --simulator feelings --steps 24 --save-every 4 --batch-size 24 "
    "--max-turns 3 --max-tokens 40 --temperature 0.7 --lora-rank 16 --lr 7e-4 --warmup 2 "
    "--minibatches 1 --kl-coef 0.006 --tokens-per-gpu 512 --eval-size 64"
)
OF_ALGO = {"grpo": "--group-size 6", "ppo": "--critic-lr 2e-3"}
SHOWN = 7  # held-out users whose dialogues are kept: about twenty replies

# What needs no training: the replies of three turns. None: the user's own line.
CONSTANTS = {
    '"I\'m so sorry." three times': ["I'm so sorry."] * 3,
    '"Okay." three times': ["Okay."] * 3,
    "three warm sentences in turn that name nothing": [
        "I'm so sorry to hear that.",
        "I'm so proud of you.",
        "You're not alone, I'm here for you.",
    ],
    "the user's own line": [None] * 3,
}


# ----------------------------------------------------------------------- how good is the user's ear


def separation():
    """How well the changes of emotion tell ten kinds of replies apart, by the 120 replies to the
    toy's people that set no weight: {"kinds": [names], "means": [mean change of a kind],
    "auc": [[AUC of two kinds]]}. The AUC of two kinds is the share of pairs in which the reply of
    the first lifts more, where a tie counts half: 0.5 is chance."""
    changes = {}  # {kind: [change of each reply]}
    for row in simulator.known_replies("test"):
        scene = world.read_scene(row["profile"].scene, row["profile"].task)
        change, _ = feel(row["reply"], scene, row["earlier"])
        changes.setdefault(row["kind"], []).append(change)
    kinds = sorted(changes, key=lambda kind: -np.mean(changes[kind]))
    return {
        "kinds": kinds,
        "means": [np.mean(changes[kind]) for kind in kinds],
        "auc": [[auc(changes[a], changes[b]) for b in kinds] for a in kinds],
    }


def agreement(count=1000):
    """The rank correlation of the two users, the toy's and the one with learned feelings, over
    `count` random sentences of the toy, each said to a held-out user."""
    rng = random.Random(0)
    people = world.profiles("heldout")
    by_rule, by_feeling = [], []
    for _ in range(count):
        person = rng.choice(people)
        scene = world.read_scene(person["scene"], person["task"])
        reply = world.random_sentence(rng.choice(list(ACTS)), scene.person, scene.feeling, rng)
        change, _ = world.score_reply(reply, scene.need, scene.person, scene.feeling, [], False)
        by_rule.append(change)
        by_feeling.append(feel(reply, scene)[0])
    return {"spearman": float(spearman(by_rule, by_feeling)), "replies": count}


def constants(users=64):
    """The mean final emotion of held-out users who hear the CONSTANTS: {"finals": {what is said:
    emotion}}."""
    profiles = [simulator.Profile(**row) for row in world.profiles("heldout", users)]
    finals = {}
    for name, replies in CONSTANTS.items():
        finals[name] = float(np.mean(asyncio.run(final_emotions(profiles, replies))))
    return {"finals": finals}


async def final_emotions(profiles, replies):
    """The final emotions of users, from a start of 30, who hear these replies. None: their own last
    line."""
    model = simulator.make_simulator("feelings")
    finals = []
    for profile in profiles:
        user = simulator.User(model, profile, simulator.INITIAL_EMOTION["training"])
        episode = await converse(FixedAgent(replies), user, await user.open(), len(replies))
        finals.append(episode.emotion)
    return finals


class FixedAgent:
    """An agent that says these replies in turn, whatever it hears. None: the user's own line."""

    def __init__(self, replies):
        self.replies = iter(replies)
        self.segments, self.cut = [], 0

    async def reply(self, line):
        """As policy.Agent.reply."""
        text = next(self.replies) or line
        return Reply(text, text, "", False)


# ------------------------------------------------------------------------------ what is kept of runs


def details(place):
    """What is kept of a run beside what tables.py keeps of each, from its directory `place`."""
    rows = list(recorded_dialogues(place / "dialogues.jsonl"))
    trained = [row for row in rows if row["split"] == "train"]
    heldout = [row for row in rows if row["split"] == "heldout"]
    steps = [min(row["step"] for row in heldout), max(row["step"] for row in heldout)]
    ends = [[row for row in heldout if row["step"] == step] for step in steps]
    return {
        "finals": [[100 * row["reward"] for row in rows] for rows in ends],
        "distinct_2": [signs([replies_of(row) for row in rows])["distinct_2"] for rows in ends],
        "dialogues": [[lines_of(row) for row in rows[:SHOWN]] for rows in ends],
        "terms": terms_by_step(trained),
    }


def replies_of(dialogue):
    """The policy's replies of a recorded dialogue."""
    return [turn["reply"] for turn in dialogue["turns"]]


def lines_of(dialogue):
    """A dialogue as people read it: the user's first line, then reply and emotion, and line."""
    lines = [dialogue["first_line"]]
    for turn in dialogue["turns"]:
        lines += [[turn["reply"], turn["emotion"]], turn.get("user")]
    return lines


def terms_by_step(dialogues):
    """{term: [its mean over the replies of a training step]}, as the analyses name them."""
    found = {}  # {term: {step: [values]}}
    for dialogue in dialogues:
        for turn in dialogue["turns"]:
            for name, value in re.findall(r"(\w+) ([+-]\d\.\d\d)", turn["analysis"] or ""):
                found.setdefault(name, {}).setdefault(dialogue["step"], []).append(float(value))
    return {name: [np.mean(steps[step]) for step in sorted(steps)] for name, steps in found.items()}


def draw_terms(line, path):
    """The picture of the terms of the formula over the training steps of a run's line."""
    figure, axes = plt.subplots(figsize=(8, 4))
    for name, values in line["terms"].items():
        if name != "silence":
            axes.plot(range(1, len(values) + 1), values, label=name)
    axes.set(xlabel="training step", ylabel="mean over the replies", ylim=(-0.05, 1.35))
    axes.legend(ncols=3)
    figure.savefig(path)


def mean_gain(lines, draws=10_000):
    """[mean gain, low, high] of runs of several seeds: after minus before of the same user, with a
    95 % bootstrap interval over seeds and, within a seed, over users."""
    gains = np.array([np.subtract(*line["finals"][::-1]) for line in lines])  # [seeds, users]
    rng = np.random.default_rng(0)
    seeds, users = gains.shape
    means = []
    for _ in range(draws):
        drawn = rng.integers(seeds, size=seeds)
        of_users = rng.integers(users, size=(seeds, users))
        means.append(gains[drawn[:, None], of_users].mean())
    return [float(gains.mean()), *np.percentile(means, [2.5, 97.5]).tolist()]


# What needs no run, by the names of the lines in runs.jsonl.
COMPUTED = {
    "feelings-replies": separation,
    "feelings-toy": agreement,
    "feelings-constants": constants,
}
