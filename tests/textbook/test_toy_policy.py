"""The toy's starting policies: the corpus that they are taught, and that what is
shipped is of the recipe in recipes/make_toy_policy.py."""

from models.loading import load_model

import json
import random

import torch

from recipes import make_toy_policy
from toy import world
from toy.words import ACTS, CUES, FEELING_WORDS, PERSON_WORDS, WORD_IN_THOUGHT, Act
from toy.world import act_of, split_sentences


def test_the_base_policy_is_taught_all_the_words_and_not_the_use_of_them():
    """Supervised training plants the language, held-out words too: what is left for RL is which
    kind of sentence helps whom. Were the corpus already good at that, or not legible, RL could show
    nothing."""
    rng = random.Random(0)
    wants = {f"wants {word}" for word in WORD_IN_THOUGHT.values()}
    turns = [turn for _ in range(400) for turn in make_toy_policy.corpus_dialogue(rng, good=0.17)]
    heard, replies = " ".join(line for line, *_ in turns), [reply for *_, reply in turns]
    acts = [[act_of(s) for s in split_sentences(reply)] for reply in replies]
    assert all(None not in acts_of_reply for acts_of_reply in acts)
    assert {acts_of_reply[0] for acts_of_reply in acts} == set(ACTS)
    words = {w for reply in replies for w in world.tokens_of(reply)}
    assert words >= PERSON_WORDS | FEELING_WORDS
    cues = [cue for splits in CUES.values() for lines in splits.values() for cue in lines]
    assert all(cue in heard for cue in cues)
    assert "Goodbye" not in heard
    assert {thought.split(", ")[2] for _, thought, _ in turns} == wants


def test_what_is_shipped_is_of_the_recipe_that_is_shipped():
    """The digests beside the shipped policies are those of the code: who edits the recipe makes
    them again (python recipes/make_toy_policy.py)."""
    digests = json.loads((world.POLICY / "recipe.json").read_text())
    for think, mode in ((True, "think"), (False, "direct")):
        assert digests[mode] == make_toy_policy.digest_of_recipe(think)
        model, tokenizer = load_model(world.POLICY / mode)
        assert all(p.dtype == torch.float32 for p in model.parameters())
        assert {
            key: getattr(model.config, key) for key in make_toy_policy.MODEL
        } == make_toy_policy.MODEL
        assert tokenizer.chat_template == make_toy_policy.CHAT_TEMPLATE
    size = sum(path.stat().st_size for path in world.POLICY.rglob("*") if path.is_file())
    assert size < 6_000_000


def test_the_digest_is_of_what_the_recipe_yields(monkeypatch):
    """An edit of a word, a number or the template asks for another policy; a comment does not."""
    digest = make_toy_policy.digest_of_recipe(True)
    assert (
        digest == make_toy_policy.digest_of_recipe(True) != make_toy_policy.digest_of_recipe(False)
    )
    for change in (
        lambda patch: patch.setitem(make_toy_policy.MODEL, "hidden_size", 64),
        lambda patch: patch.setattr(
            make_toy_policy, "CHAT_TEMPLATE", make_toy_policy.CHAT_TEMPLATE + " "
        ),
        lambda patch: patch.setitem(ACTS, "topic", Act(["So,"], ["what now"], ["?"])),
    ):
        with monkeypatch.context() as patch:
            change(patch)
            assert make_toy_policy.digest_of_recipe(True) != digest
