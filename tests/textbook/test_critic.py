"""The critic: where it starts, which state a value is read from, and that a dialogue's scores do
not depend on its batch.
"""

import dataclasses

import numpy as np
import pytest
import torch

from agents import assert_close, episode_of, gradients, random_episode, rows_of
from policy import Critic, Policy, Segment, pack


def speaking_critic(model):
    """A critic whose head is no longer zero."""
    critic = Critic(model)
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-0.3, 0.3, critic.head.weight.numel())[None])
        critic.head.bias.fill_(0.5)
    return critic


def test_the_critic_starts_at_zero_and_apart_from_the_policy(tiny_model, tiny_tokenizer):
    """How a critic starts: a random head opens with advantages that are noise. Its body is a copy
    of the policy's: training it must not move the policy."""
    batch = pack([random_episode(np.random.default_rng(4), len(tiny_tokenizer), think=True)])
    critic = Critic(tiny_model)
    assert (critic(batch) == 0).all()
    critic(batch).sum().backward()
    # it can learn all the same
    assert critic.head.bias.grad != 0 and (critic.head.weight.grad != 0).any()
    own, the_policys = ({p.data_ptr() for p in m.parameters()} for m in (critic, tiny_model))
    assert not own & the_policys
    assert_close(
        [speaking_critic(tiny_model).body.embed_tokens.weight],
        [tiny_model.base_model.embed_tokens.weight],
        1e-9,
    )


@pytest.mark.parametrize("think", [False, True])
def test_a_value_is_read_before_its_token_is_emitted(think, tiny_model):
    """A baseline that has seen the action is none, it takes the credit away. V_t moves with token
    t - 1 and not with token t; across a turn too, where token t - 1 is the last of the prompt."""
    episode = episode_of(
        [
            Segment([5, 6, 7]),
            Segment([8, 9], 1 * think, [0.0, 0.0]),
            Segment([10, 11]),
            Segment([12, 13, 14], 2 * think, [0.0] * 3),
        ]
    )
    critic, batch = speaking_critic(tiny_model), pack([episode])
    values = critic(batch)[0]
    states = [
        critic.body(torch.tensor([trunk + ids]), use_cache=False).last_hidden_state[
            0, len(trunk) - 1 : -1
        ]
        for trunk, ids in rows_of([episode])
    ]
    plain = critic.head(torch.cat(states))[:, 0]
    assert_close([values[batch.action_mask[0]]], [plain], 1e-5)
    weights = list(critic.parameters())
    assert_close(
        *[
            torch.autograd.grad(v.square().mean(), weights)
            for v in (values[batch.action_mask[0]], plain)
        ],
        1e-5,
    )
    for t in (3, 4, 7, 8, 9):
        for changed, moves in ((t, False), (t - 1, True)):
            ids = batch.ids.clone()
            ids[0, changed] = 99
            assert (
                (critic(dataclasses.replace(batch, ids=ids))[0, t] - values[t]).abs() > 1e-3
            ) == moves


@pytest.mark.parametrize("think", [False, True])
def test_a_dialogue_in_a_batch_is_what_it_is_alone(think, tiny_model, tiny_tokenizer):
    """Rows of many lengths. Padding must neither leak into its neighbours nor be a softmax over
    nothing, which in some kernels is NaN and would reach every weight by the backward pass. Off the
    policy's tokens all is exactly 0."""
    rng = np.random.default_rng(1)
    episodes = [random_episode(rng, len(tiny_tokenizer), think, turns) for turns in (1, 5, 2, 3)]
    policy, critic = Policy(tiny_model), speaking_critic(tiny_model)
    batch = pack(episodes)
    together = [*policy(batch), critic(batch)]
    for i, episode in enumerate(episodes):
        single = pack([episode])
        alone = [*policy(single), critic(single)]
        assert_close([x[i, : single.ids.shape[1]] for x in together], [x[0] for x in alone], 1e-5)
    for x in together:
        assert (x[~batch.action_mask] == 0).all() and (x[batch.action_mask] != 0).all()
    assert all(
        g.isfinite().all()
        for g in gradients(tiny_model, *[x[batch.action_mask] for x in together[:2]])
    )
