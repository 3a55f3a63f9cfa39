"""ref_perplexity: would the starting model have spoken like that?

    exp( - 1/N  sum over the policy's N tokens of  log pi_ref(token | the dialogue before it) )

at temperature 1, whatever the policy samples at. By hand: two tokens to which the starting model
gives 1/2 and 1/8 have the perplexity (2 * 8)^(1/2) = 4: as surprising as drawing each of them from
four.
"""

import copy
import math

import numpy as np
import pytest
import torch

from adapters import shared
from agents import random_episode, rows_of
from models import Reference
from policy import Policy, dummy_batch, pack


def made_up(think, count=4, seed=3):
    """Dialogues of unequal length, of random ids."""
    rng = np.random.default_rng(seed)
    return [random_episode(rng, 300, think, turns=1 + n % 3) for n in range(count)]


def by_hand(model, episodes):
    """The formula in float64, a token at a time: what it is given is the whole text before it."""
    model = copy.deepcopy(model).double()
    surprise, tokens = 0.0, 0
    for history, ids in rows_of(episodes):
        for n, token in enumerate(ids):
            with torch.no_grad():
                logits = model(torch.tensor([history + ids[:n]])).logits[0, -1]
            surprise -= logits.log_softmax(-1)[token].item()
            tokens += 1
    return math.exp(surprise / tokens)


def whole_model(model):
    """A reference that is a model of its own, as where the whole policy is trained."""
    return Reference(Policy(model, 0.7))


def under_adapters(model):
    """A reference that is the base below adapters which have learnt something."""
    return Reference(shared(model)[3])


def ask(reference, *batches):
    with torch.no_grad():
        for batch in batches:
            reference(batch)


def test_the_example_by_hand():
    batch = pack(made_up(think=False, count=1))
    batch.action_mask[:] = False
    batch.action_mask[0, [2, 5]] = True
    at_1 = torch.zeros(batch.ids.shape)
    at_1[0, [2, 5]] = torch.tensor([1 / 2, 1 / 8]).log()
    at_1[0, 3] = -7.0  # the user's token: nobody asks how likely it was
    reference = Reference(lambda _, as_reference: (torch.zeros(batch.ids.shape), at_1))
    ask(reference, batch)
    assert reference.take_perplexity() == pytest.approx(4)


@pytest.mark.parametrize("think", [False, True], ids=["direct", "think"])
@pytest.mark.parametrize("kind", [whole_model, under_adapters])
def test_it_is_the_formula_at_temperature_1(kind, think, tiny_model):
    """Although the policy samples at 0.7, and the KL, which the same pass serves, compares it with
    the reference there: a number that depends on the temperature of a run could not be compared
    with another run's. Thoughts count, and each is given what it was given when it was sampled."""
    episodes = made_up(think)
    batch, reference = pack(episodes), kind(tiny_model)
    with torch.no_grad():
        log_probs, nothing = reference(batch)
        assert torch.equal(log_probs, Policy(tiny_model, 0.7)(batch)[0]) and nothing is None
    assert reference.take_perplexity() == pytest.approx(by_hand(tiny_model, episodes), rel=1e-4)


def test_every_token_of_a_step_counts_the_same(tiny_model):
    """Whatever micro-batch it is in, and in whatever chunk of logits: not the mean of the means,
    in which a short micro-batch would weigh as much as a long one. And no token of an earlier step;
    without replies there is none, and a 0 or a 1 would be a lie."""
    three_a_chunk = 3 * tiny_model.config.vocab_size
    reference = Reference(Policy(tiny_model, 0.7, max_logits=three_a_chunk))
    for seed in (4, 5):
        ask(reference, dummy_batch())
        assert reference.take_perplexity() is None
        episodes = made_up(think=False, count=6, seed=seed)
        ask(reference, pack(episodes[:1]), dummy_batch(), pack(episodes[1:]))
        assert reference.take_perplexity() == pytest.approx(by_hand(tiny_model, episodes), rel=1e-4)
