"""The critic: where it starts, and which state a value is read from."""

import copy

import numpy as np
import pytest
import torch

from agents import assert_close, random_episode, rows_of
from policy import Critic, pack


def speaking_critic(model):
    """A critic whose head is no longer zero."""
    critic = Critic(copy.deepcopy(model))
    with torch.no_grad():
        critic.head.weight.copy_(torch.linspace(-0.3, 0.3, critic.head.weight.numel())[None])
        critic.head.bias.fill_(0.5)
    return critic


def test_the_critic_starts_at_zero(tiny_model, tiny_tokenizer):
    """A random head opens with advantages that are noise."""
    batch = pack([random_episode(np.random.default_rng(4), len(tiny_tokenizer), think=True)])
    critic = Critic(copy.deepcopy(tiny_model))
    assert (critic(batch) == 0).all()
    critic(batch).sum().backward()
    # it can learn all the same
    assert critic.head.bias.grad != 0 and (critic.head.weight.grad != 0).any()


def test_the_critic_of_a_run_is_apart_from_its_policy(whole):
    """Training the one must not move the other. (With LoRA they share what is frozen.)"""
    whole("ppo")
    models = whole.models["ppo"]
    own, other = (
        {p.data_ptr() for p in m.parameters()} for m in (models.critic, models.policy.model)
    )
    assert not own & other


@pytest.mark.parametrize("think", [False, True])
def test_a_value_is_read_before_its_token_is_emitted(think, tiny_model, tiny_tokenizer):
    """A baseline that has seen the action is none, it takes the credit away. V_t is read from the
    state at token t - 1; across a turn too, where that is the last of the prompt. The yardstick is
    a row a turn, and two dialogues are side by side: padding must not leak into its neighbours."""
    rng = np.random.default_rng(1)
    episodes = [random_episode(rng, len(tiny_tokenizer), think, turns) for turns in (1, 3)]
    critic, batch = speaking_critic(tiny_model), pack(episodes)
    values, states = critic(batch), []
    for trunk, ids in rows_of(episodes):
        row = critic.body(torch.tensor([trunk + ids]), use_cache=False).last_hidden_state[0]
        states.append(row[len(trunk) - 1 : -1])
    plain, packed = critic.head(torch.cat(states))[:, 0], values[batch.action_mask]
    assert_close([packed], [plain], 1e-5)
    weights = list(critic.parameters())
    assert_close(
        *[torch.autograd.grad(v.square().mean(), weights) for v in (packed, plain)],
        1e-5,
    )
    assert (values[~batch.action_mask] == 0).all()
