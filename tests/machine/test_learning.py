"""The toy learns: from its judge what is meant, and from a weak scorer what is not. Here the toy's
own judge and its own policy are at work, in processes beside the tests (learning.py)."""

import pytest

from runs import metrics, summary
from simulator import make_simulator, toy_profiles
from tools.replay import consistency


@pytest.mark.slow
def test_it_learns(learnt):
    """The point of it all: on users with other people, events, feelings and wordings the score
    rises by far more than its error."""
    told = summary(learnt)
    assert told["after"]["score"] - told["before"]["score"] >= 30
    # some runs garble a thought in six for a few steps; such a dialogue has 0 points in the score
    assert told["after"]["malformed"] < 20 and told["after"]["n"] == 64
    known = {p.id: p for p in toy_profiles("train") + toy_profiles("heldout")}
    again = consistency(learnt / "dialogues.jsonl", make_simulator("toy"), known)
    assert again["dialogues"] == 2 * 64 + 20 * 64 and not again["found"]


@pytest.mark.slow
def test_a_weak_scorer_is_hacked(hacked):
    """The lesson of `--simulator toy-weak`: the reward climbs, and a strict user who hears the same
    replies does not agree."""
    known = {p.id: p for p in toy_profiles("train") + toy_profiles("heldout")}
    scores = consistency(hacked / "dialogues.jsonl", make_simulator("toy"), known)["scores"]
    (weak_before, strict_before), (weak_after, strict_after) = scores[0], scores[26]
    assert weak_after - weak_before >= 30 and strict_after - strict_before <= 10
    lengths = [row["reply_tokens"] for row in metrics(hacked)]
    assert lengths[-1] > 1.5 * lengths[0]
