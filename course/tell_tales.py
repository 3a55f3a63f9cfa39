"""tell_tales.py - the numbers in which a lab's mistake can be seen: one for each training step of
a run, from its metrics.jsonl or worked out from its dialogues.

Some of them ask what a dialogue was really worth. A mistake may be in the simulated user itself, so
the run's own emotions cannot answer that. The dialogue's replies are put again to the *healthy
user*: the user of the same profile from the scripts of the healthy arm, simulator.py without the
mistake. It hears the same replies in the same order and feels by the rules. (In labs.toml "own
user" is this one: the user that the dialogue was meant for.)
"""

from support.files import read_jsonl
from support.results import read_dialogues

import asyncio
import functools
import importlib.util
import sys

import numpy as np

import toy
from simulator import Profile, replay

CACHED_RUNS = 12  # more than the runs of one lab


def series(run, name):
    """One number for each step of a run: a tell-tale, or else a column of its metrics.jsonl. run:
    a Run of labs.py."""
    if name in TELL_TALES:
        return np.array(TELL_TALES[name](run), dtype=float)
    rows = read_jsonl(run.out / "metrics.jsonl")
    return np.array([row[name] for _, row, _ in rows], dtype=float)


# -------------------------------------------------------------- the dialogues, and the healthy user


def dialogues_of(run):
    """The training dialogues of a run, a list for each step."""
    return dialogues_by_step(run.out / "dialogues.jsonl")


@functools.lru_cache(maxsize=CACHED_RUNS)
def dialogues_by_step(path):
    """The training dialogues in a log, a list for each step."""
    steps = {}
    for dialogue in read_dialogues(path):
        if dialogue["split"] == "train":
            steps.setdefault(dialogue["step"], []).append(dialogue)
    return [steps[step] for step in sorted(steps)]


def recorded_finals(run):
    """The final emotions that the run was rewarded for, [step][dialogue]."""
    return [[round(100 * d["reward"]) for d in dialogues] for dialogues in dialogues_of(run)]


@functools.lru_cache(maxsize=CACHED_RUNS)
def healthy_finals(run):
    """The final emotions of the healthy users when they hear the run's replies, [step][dialogue].
    A malformed dialogue is worth 0."""
    module = load_simulator(run.healthy_twin().copy_of_scripts())
    simulator = module.make_simulator("toy")
    profiles = {row["id"]: Profile(**row) for row in toy.profiles("train")}

    async def final_emotion(dialogue):
        user = module.User(simulator, profiles[dialogue["profile_id"]])
        emotions = await replay(dialogue["first_line"], dialogue["turns"], user)
        if dialogue["ended"] == "malformed" or not emotions:
            return 0
        return emotions[-1]

    async def all_finals():
        finals = []
        for dialogues in dialogues_of(run):
            finals.append([await final_emotion(dialogue) for dialogue in dialogues])
        return finals

    return asyncio.run(all_finals())


def load_simulator(place):
    """The simulator.py of the copy of the scripts in `place`, as a module of another name than our
    own simulator."""
    name = f"healthy_simulator_{place.name}"
    spec = importlib.util.spec_from_file_location(name, place / "simulator.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# ------------------------------------------------------- rewards, against those of the healthy user


def healthy_user(run):
    """The mean final emotion of the healthy users: what the run's replies were worth."""
    return [np.mean(finals) for finals in healthy_finals(run)]


def reported_minus_healthy(run):
    """The recorded final emotion minus that of the healthy user, the mean over the dialogues: how
    far the run's reward is from what its replies were worth; 0 for a healthy arm."""
    steps = zip(recorded_finals(run), healthy_finals(run))
    return [np.mean(np.subtract(recorded, healthy)) for recorded, healthy in steps]


def wrong_reward(run):
    """Dialogues, in percent, whose recorded reward is not the one that the healthy user gives."""
    steps = zip(recorded_finals(run), healthy_finals(run))
    return [100 * np.mean(np.not_equal(recorded, healthy)) for recorded, healthy in steps]


# -------------------------------------------------------------------------------------- the replies


def not_followed(run):
    """Replies, in percent, that are no sentences of the toy's world, so that its user cannot follow
    them."""
    shares = []
    for dialogues in dialogues_of(run):
        turns = [turn for dialogue in dialogues for turn in dialogue["turns"]]
        analyses = [turn["analysis"] for turn in turns if turn["analysis"]]
        shares.append(100 * np.mean(["I cannot follow that" in text for text in analyses]))
    return shares


def thoughts_read(run):
    """Dialogues, in percent, in which the user is sent a thought."""
    return [
        100 * np.mean([has_sent_thought(dialogue) for dialogue in dialogues])
        for dialogues in dialogues_of(run)
    ]


def has_sent_thought(dialogue):
    """Whether a reply with a <think> tag was sent to the user. (A reply after which no emotion
    stands was never sent.)"""
    sent = [turn["reply"] for turn in dialogue["turns"] if turn["emotion"] is not None]
    return any("<think>" in reply for reply in sent)


def copies(run):
    """Dialogues, in percent, whose replies are word for word those of another one of their
    group."""
    shares = []
    for dialogues in dialogues_of(run):
        replies = [(d["group"], *[turn["reply"] for turn in d["turns"]]) for d in dialogues]
        shares.append(100 * np.mean([replies.count(these) > 1 for these in replies]))
    return shares


def foreign_tokens(run):
    """Tokens in the loss, in percent, that the policy did not sample."""
    return 100 * (1 - series(run, "tokens_sampled") / series(run, "tokens_trained"))


# ------------------------------------------------------------------------------------- the baseline


def baseline_shift(run):
    """How far GRPO's baseline is above the mean reward over the dialogues of a group, in stds of
    the group; the mean over the groups of a step.

    A healthy arm's baseline is that mean, so its shift is 0. The broken arm of the lab turn-rows
    takes the mean over turns: a dialogue of n turns counts n times. Groups in which all rewards are
    equal are left out.
    """
    over_turns = run.arm.startswith("broken")
    means = []
    for dialogues in dialogues_of(run):
        groups = {}
        for dialogue in dialogues:
            groups.setdefault(dialogue["group"], []).append(dialogue)
        shifts = []
        for group in groups.values():
            rewards = np.array([dialogue["reward"] for dialogue in group], dtype=float)
            turns = [len(dialogue["turns"]) for dialogue in group]
            if rewards.std() > 0:
                baseline = np.average(rewards, weights=turns if over_turns else None)
                shifts.append((baseline - rewards.mean()) / rewards.std(ddof=1))
        means.append(np.mean(shifts or [0]))
    return means


# ------------------------------------------------------- against the healthy run with the same seed


def grad_norm_apart(run):
    """How far the gradient's norm is from that of the healthy twin, as a share of it."""
    healthy_norm = series(run.healthy_twin(), "grad_norm")
    return abs(series(run, "grad_norm") / healthy_norm - 1)


def same_dialogues(run):
    """Dialogues, in percent, that are word for word those of the healthy twin."""
    shares = []
    for dialogues, healthy in zip(dialogues_of(run), dialogues_of(run.healthy_twin())):
        same = [ours["turns"] == theirs["turns"] for ours, theirs in zip(dialogues, healthy)]
        shares.append(100 * np.mean(same))
    return shares


# By the names under which the panels of labs.toml show them.
TELL_TALES = {
    "healthy_user": healthy_user,
    "reported_minus_healthy": reported_minus_healthy,
    "wrong_reward": wrong_reward,
    "not_followed": not_followed,
    "thoughts_read": thoughts_read,
    "copies": copies,
    "foreign_tokens": foreign_tokens,
    "baseline_shift": baseline_shift,
    "grad_norm_apart": grad_norm_apart,
    "same_dialogues": same_dialogues,
}
