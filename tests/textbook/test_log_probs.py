"""`Policy.forward`: log-probs and entropies of packed dialogues. The yardstick is always the
plainest way to do it: one row a turn, the model's own causal mask, nothing cached or packed.
"""

from models.engine import TorchEngine

import numpy as np
import pytest
import torch

from agents import (
    THOUGHTS,
    assert_close,
    by_rows,
    episode_of,
    gossip,
    gradients,
    random_episode,
    sampled,
    speak,
)
from policy import Policy, pack, token_scores


def test_token_scores_are_a_distribution_of_its_temperature():
    """A forgotten temperature. 1/2 1/4 1/4 is, at temperature 2, sqrt 2 : 1 : 1, and next to
    certain at 0.01; its entropy is 1.5 log 2, and at temperature 2 1.0844. In fp32, whatever the
    head computes in."""
    head, every_token = torch.nn.Identity(), torch.arange(3)
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log()
    for temperature, p, entropy in (
        (1.0, [0.5, 0.25, 0.25], 1.03972),
        (2.0, [0.41421, 0.29289, 0.29289], 1.08438),
        (1e-2, [1.0, 0.0, 0.0], 0.0),
    ):
        log_probs, entropies = token_scores(head, logits.expand(3, 3), every_token, temperature)
        wanted = [torch.tensor(p), torch.full((3,), entropy)]
        assert_close([log_probs.exp(), entropies], wanted, 1e-4)
    scores = token_scores(head, logits.bfloat16(), every_token[:1], 0.7)
    assert {score.dtype for score in scores} == {torch.float32}


@pytest.mark.parametrize(
    "name, think, temperature",
    [
        ("tiny_model", False, 1.0),
        ("tiny_model", True, 0.7),
        ("tiny_gqa_model", False, 0.7),
        ("tiny_gqa_model", True, 1.0),
    ],
)
def test_packed_is_a_row_a_turn_is_the_engine(name, think, temperature, chat, request):
    """One distribution, three ways: the same tokens must have the same log-probs where they were
    sampled (KV cache), where they are trained (packed) and by the book (a row a turn), at the
    temperature of sampling; and the same gradients, for those are what trains."""
    model = request.getfixturevalue(name)
    engine = TorchEngine(model, chat.stop_ids, temperature)
    episodes = gossip(engine, chat, think=think)
    for texts in (THOUGHTS, THOUGHTS[::-1]):
        said = [chat.text(t) + [chat.stop_id] for t in texts]
        agent, _ = speak(engine, chat, said, think=think)
        episodes.append(episode_of(agent.segments))
        assert [s.ids for s in sampled(episodes[-1])] == said  # dice and scores agree
    batch = pack(episodes)
    scores = Policy(model, temperature)(batch)
    packed = [x[batch.action_mask] for x in scores]
    assert all((x[~batch.action_mask] == 0).all() for x in scores)
    rows = by_rows(model, episodes, temperature)
    assert_close(packed, rows, 1e-5)
    assert_close(gradients(model, *packed), gradients(model, *rows), 1e-5)
    assert_close([batch.engine_log_probs[batch.action_mask]], rows[:1], 1e-4)
    other = by_rows(model, episodes, 1.7 - temperature)
    assert (other[0] - rows[0]).abs().max() > 0.1  # a wrong temperature would be seen


def test_chunks_of_logits_change_nothing_but_memory(model, tiny_tokenizer):
    """Memory that grows with the vocabulary: at one of 152,000 the logits are most of the memory.
    In chunks, each made again for the backward pass, nothing as wide as the vocabulary is kept;
    log-probs, entropy and gradients stay the same."""
    rng, vocab = np.random.default_rng(3), len(tiny_tokenizer)
    batch = pack([random_episode(rng, vocab, think=True) for _ in range(3)])

    def scored(positions):
        """Log-probs, entropies and gradients, and whether a tensor as wide as the vocabulary was
        kept for the backward pass."""
        widths = []

        def note(x):
            widths.append(x.shape[-1])
            return x

        policy = Policy(model, 0.7, max_logits=positions * vocab)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
            scores = [x[batch.action_mask] for x in policy(batch)]
        return [*scores, *gradients(model, *scores)], vocab in widths

    results, kept = {}, {}
    for positions in (10**6, 4, 1):
        results[positions], kept[positions] = scored(positions)
    assert len(results[4][0]) % 4  # the last chunk is a shorter one
    for positions in (4, 1):
        assert_close(results[positions], results[10**6], 1e-5)
    assert kept == {10**6: True, 4: False, 1: False}
