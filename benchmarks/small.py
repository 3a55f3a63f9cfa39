"""small.py - what ten fixed policies earn from a language model that hears replies (reader.py).
tables.py calls it, and docs/small.md shows its table.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import support  # noqa: F401 - before all that may import torch

import asyncio
import os

import numpy as np
from tqdm import tqdm

import people
import simulator
from rollout import Reply, rollout

# The model that hears: a directory, or a name of the hub. (tables.py reads $READER, too.)
READER = os.environ.setdefault("READER", "Qwen/Qwen2.5-Coder-1.5B-Instruct")

# Policies that need no training: the replies of three turns, whatever is heard. None: the user's
# own line. They were written down before the weights of reader.py were: the best of them must not
# earn much, or it is all that a policy learns.
CONSTANTS = {
    "is sorry, three times": ["I'm so sorry."] * 3,
    "nothing": ["Okay."] * 3,
    "agrees": ["You're right."] * 3,
    "offers to listen, three times": ["I'm here to listen and support you."] * 3,
    "warm, names nothing": [
        "I'm so sorry to hear that.",
        "I'm so proud of you.",
        "You're not alone, I'm here for you.",
    ],
    "invites to talk": [
        "I'm here to listen and support you.",
        "It's completely normal to feel this way.",
        "Can you tell me more about what happened?",
    ],
    "asks": [
        "What happened then?",
        "How did that make you feel?",
        "What do you need most right now?",
    ],
    "praises": ["You are so strong.", "I believe in you.", "You deserve so much better than this."],
    "advises anybody": [
        "Take a deep breath and be kind to yourself.",
        "Talk about it with somebody whom you trust.",
        "Take it one step at a time, and it will get better.",
    ],
    "the user's own line": [None] * 3,
}


def constants(users=8):
    """The mean final emotion, from 30, of held-out people of the toy who hear the CONSTANTS:
    {"finals": {policy: emotion}}."""
    profiles = people.toy_profiles("heldout", users)
    model = simulator.make_simulator("toy", reader=f"local:{READER}", concurrency=users)

    async def finals_of(replies):
        """The final emotions of all people who hear these replies."""
        episodes, dropped = await rollout(
            model,
            dict(enumerate(profiles)),
            1,
            lambda number: FixedAgent(replies),
            len(replies),
            own_first_line=True,
        )
        assert not dropped, dropped
        return [episode.emotion for episode in episodes]

    async def all_means():
        await model.check_reader()
        return {
            name: float(np.mean(await finals_of(replies)))
            for name, replies in tqdm(CONSTANTS.items(), leave=False)
        }

    return {"finals": asyncio.run(all_means())}


class FixedAgent:
    """An agent that says these replies in turn, whatever it hears. None: the user's own line."""

    def __init__(self, replies):
        self.replies = iter(replies)
        self.segments, self.cut = [], 0

    async def reply(self, line):
        """As rollout.Agent.reply."""
        text = next(self.replies) or line
        return Reply(text, text, "", False)
