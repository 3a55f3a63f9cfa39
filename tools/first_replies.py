"""tools/first_replies.py - does a policy fit its first reply to the user? All users feel the first
reply to each of them: a comfort that fits anybody moves all alike. For tools/lens.py; it is no tool
itself.
"""

from support.needs import named_need

import asyncio

import numpy as np

from emotion import TRAINING
from tools.tables import mean


def one_of_each_need(rows, profiles):
    """The first of `profiles` of each need in `rows`, lines of dialogues.jsonl, at most eight:
    [(Profile, its dialogue)]. (Those whose need has no name count each.)"""
    profile_of, chosen = {profile.id: profile for profile in profiles}, {}
    for row in rows:
        profile = profile_of[row["profile_id"]]
        chosen.setdefault(named_need(profile) or profile.id, (profile, row))
    return list(chosen.values())[:8]


async def felt_by_all(simulator, pairs, replies):
    """Let all users feel each of `replies`, first replies to the users of `pairs` ([(Profile,
    dialogue)], `one_of_each_need`), each user behind its own first line. Returns (changes of the
    emotion, a list [reply][user]; the mean change of those to whom the replies were said, the
    diagonal; that of the others, None if there is nobody else). Raises SimulatorFailed."""

    async def change(i, j):
        profile, row = pairs[j]
        user = simulator.user(profile, TRAINING.start, f"first reply {i} heard by {j}")
        user.add("me", row["first_line"])
        _, change = await user.feel(replies[i])
        return change

    n = len(pairs)
    changes = await asyncio.gather(*[change(i, j) for i in range(n) for j in range(n)])
    changes = np.reshape(changes, (n, n))
    own = changes.diagonal().mean()
    return changes.tolist(), own, mean(changes[~np.eye(n, dtype=bool)])
