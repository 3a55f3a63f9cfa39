"""tools/foils.py: is a reply its own person's, or anybody's?"""

from support.answers import load_prompt
from support.chat_format import ChatFormat
from support.errors import BadInput
from support.loading import load_model

import asyncio
import copy
import math
import random

import numpy as np
import pytest
import torch

from reader import known_replies
from tools import foils

ROWS = known_replies("foils")


class Ear:
    """In the place of a Reader: a change for each pair of a person and a dialogue."""

    def questions(self, profile, dialogue):
        return f"{profile.id} {dialogue}"

    async def hear(self, prompts):
        return {"sum": random.Random(prompts).uniform(-12, 12)}


def test_a_foil_has_another_story_and_need():
    """And all replies to a person have the same foils, wherever they stand."""
    people = {row["user"]: row["profile"] for row in ROWS}
    assert len(ROWS) == 144 and len(people) == 16
    drawn = foils.draw_foils(ROWS, 5)
    for user, others in drawn.items():
        assert len({row["user"] for row in others}) == 5
        assert people[user].need not in [row["profile"].need for row in others]
    one_each = [row for row in ROWS if row["kind"] == "echo"]
    for user, others in foils.draw_foils(one_each, 5).items():
        assert [row["user"] for row in others] == [row["user"] for row in drawn[user]]
    with pytest.raises(BadInput, match="--foils 15: only 14 can hear the replies to en-train-01"):
        foils.draw_foils(ROWS, 15)


@pytest.mark.slow
def test_the_signals_are_those_of_the_formulas(tiny_dir):
    """In float loops. A foil hears the reply behind its own first line, and behind the same earlier
    replies. The change is not rounded, and lies between -10 and 10."""
    rows = copy.deepcopy(ROWS[:54:18])  # three people, of three needs
    rows[0]["dialogue"][1:1] = [{"speaker": "friend", "text": "Go on."}]
    drawn, scorer = foils.draw_foils(rows, 2), foils.load_scorer(tiny_dir)
    found = asyncio.run(foils.measure_foils(rows, Ear(), drawn, scorer))
    model, tokenizer = load_model(tiny_dir)
    chat = ChatFormat(tokenizer, load_prompt("policy_direct", "en"))

    def likelihood(dialogue):
        first, *earlier, reply = [turn["text"] for turn in dialogue]
        ids, log_probs = chat.first_prompt(first), []
        for text in earlier:
            ids = ids + chat.past_reply(text) + chat.next_prompt("")
        for token in chat.text(reply):
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1].double()
            log_probs.append(logits.log_softmax(-1)[token].item())
            ids = [*ids, token]
        return np.mean(log_probs)

    def change(row, dialogue):
        moved = random.Random(f"{row['profile'].id} {dialogue}").uniform(-12, 12)
        return min(10, max(-10, moved))

    for row, result in zip(rows, found, strict=True):
        others = drawn[row["user"]]
        dialogues = [[other["dialogue"][0], *row["dialogue"][1:]] for other in (row, *others)]
        own, *foreign = [change(*pair) for pair in zip((row, *others), dialogues)]
        lik, *of_others = map(likelihood, dialogues)
        lik -= math.log((math.exp(of_others[0]) + math.exp(of_others[1])) / 2)
        bonus = 25 * min(0.6, max(0, lik)) / (1 + math.exp(-own - 3))
        wanted = [own, own - sum(foreign) / 2, lik, own + bonus]
        assert [result[name] for name in foils.SIGNALS] == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("worst, passed", [("echo", True), ("cold", True), ("to the point", False)])
def test_the_gate_counts_pairs_within_a_person(worst, passed, capsys):
    """People differ by more than replies do: over all pairs nothing is seen."""
    order = [
        "to the point",
        "advice needed",
        "generic warm",
        "cold",
        "dismissive",
        "off topic",
        "echo",
    ]
    order = [kind for kind in order if kind != worst] + [worst]
    found = []
    for used in ("foils", "test"):
        for person in range(16):
            for k, kind in enumerate(order):
                x = 100.0 * person - k
                found.append({"used": used, "user": person, "kind": kind, "worth": x, "own": -x})
    gate = foils.show_foils(found)["gate"]
    assert all(gate.values()) == passed and ("missed" in capsys.readouterr().out) == (not passed)
    assert foils.aucs(found, "worth", ["to the point"], ["cold"])[0] == pytest.approx(0.5, abs=0.05)
    # three people: no interval
    assert set(foils.show_foils(found[:21])["gate"].values()) == {None}
    for row in found:
        del row["worth"]
    assert foils.show_foils(found)["gate"] == {}
