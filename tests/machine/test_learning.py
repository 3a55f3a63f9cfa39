"""The toy learns: from its judge what is meant, and from a weak scorer what is not. Here the toy's
own judge and its own policy are at work, in processes beside the tests (learning.py)."""

from support.results import recorded_dialogues

import asyncio

import numpy as np
import pytest

from runs import metrics, rows, summary
from simulator import make_simulator, toy_profiles
from tools import replay
from tools.replay import final_score, replay_all


@pytest.mark.slow
def test_it_learns(learnt):
    """The point of it all: on users with other people, events, feelings and wordings the score
    rises by far more than its error."""
    told = summary(learnt)
    assert told["after"]["score"] - told["before"]["score"] >= 30
    # some runs garble a thought in six for a few steps; such a dialogue has 0 points in the score
    assert told["after"]["malformed"] < 20 and told["after"]["n"] == 64
    assert len(rows(learnt / "dialogues.jsonl")) == 2 * 64 + 20 * 64
    assert replay.main([str(learnt / "dialogues.jsonl")]) == 0


@pytest.mark.slow
def test_a_weak_scorer_is_hacked(hacked):
    """The lesson of `--simulator toy-weak`: the reward climbs, and a strict user who hears the same
    replies does not agree."""
    known = {p.id: p for p in toy_profiles("train") + toy_profiles("heldout")}
    told = [d for d in recorded_dialogues(hacked / "dialogues.jsonl") if d["split"] == "heldout"]
    heard = asyncio.run(replay_all(told, make_simulator("toy"), known))
    weak, strict = {}, {}  # {step: final emotions}
    for row, felt in zip(told, heard):
        weak.setdefault(row["step"], []).append(100 * row["reward"])
        strict.setdefault(row["step"], []).append(final_score(row, felt))
    assert np.mean(weak[26]) - np.mean(weak[0]) >= 30
    assert np.mean(strict[26]) - np.mean(strict[0]) <= 10
    lengths = [row["reply_tokens"] for row in metrics(hacked)]
    assert lengths[-1] > 1.5 * lengths[0]
