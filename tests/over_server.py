"""over_server.py - what the tests of a simulated user over a model server share: a user there, an
agent that says what it is told, and a small run."""

import functools

import rlver
import simulator
from runs import rows
from scripted import Agent
from server import toy_people
from simulator import User, make_simulator, toy_profiles

ANN = toy_profiles("train", 1)[0]
FIRST_WAIT = make_simulator("openai:m@http://127.0.0.1").wait
SMALL = [
    "--steps",
    "2",
    "--batch-size",
    "4",
    "--group-size",
    "2",
    "--max-turns",
    "2",
    "--max-tokens",
    "6",
    "--eval-size",
    "4",
    "--lr",
    "2e-3",
    "--save-every",
    "1",
]


def Script(*replies):
    return Agent(replies)


def user_at(server, retries=8, timeout=5.0, **more):
    return User(
        make_simulator(f"openai:scripted@{server.url}", retries=retries, timeout=timeout, **more),
        ANN,
    )


def retry(monkeypatch, times):
    """Let runs try so often again, and not eight times."""
    few = functools.partial(simulator.make_simulator, retries=times)
    monkeypatch.setattr(simulator, "make_simulator", few)


def run(model, url, out, *flags):
    return rlver.main(
        [
            "--model",
            str(model),
            "--simulator",
            f"openai:scripted@{url}",
            *SMALL,
            *toy_people(out.parent),
            "--out",
            str(out),
            *map(str, flags),
        ]
    )


def without_marks(out):
    """A run's dialogues, with no mark in them."""
    dialogues = rows(out / "dialogues.jsonl")
    for turn in (turn for d in dialogues for turn in d["turns"] if turn["mark"]):
        turn["analysis"] = turn["analysis"].replace(turn.pop("mark"), "")
    return dialogues
