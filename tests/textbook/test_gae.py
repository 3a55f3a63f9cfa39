"""Rewards on their tokens, and advantages across turns.

Examples computed by hand, and the closed form at gamma = lambda = 1. A "defect" has
the number that this mistake of the released code has in docs/differences.md.
"""

import torch

from ppo import gae, place_rewards
from tabular import NAN, close, normal, paid_last, ragged, turns_of


def test_gae_by_the_numbers():
    """The recursion on paper, gamma 0.5 and lambda 0.8. Row one: V 1 2 4 3, rewards 0 1 0 2, the
    user in between; from behind, the deltas are -1, -2.5, 1, 0. Row two opens with the user and
    ends in padding: deltas 5, -2.5. In row three nobody speaks."""
    mask = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 0, 1, 0, 0], [0] * 6]).bool()
    values = torch.tensor([[1, NAN, 2, 4, NAN, 3], [NAN, 2, NAN, -1, NAN, NAN], [NAN] * 6])
    rewards = torch.tensor([[0, 0, 1, 0, 0, 2], [0, 0, 0, 4, 0, 0], [0] * 6]).float()
    advantages, returns = gae(rewards, values, mask, 0.5, 0.8)
    close(advantages, [[-0.064, 0, -0.16, -2.9, 0, -1], [0, -0.5, 0, 5, 0, 0], [0] * 6])
    close(returns, [[0.936, 0, 1.84, 1.1, 0, 2], [0, 1.5, 0, 4, 0, 0], [0] * 6])


def test_the_users_lines_do_not_decay_the_reward():
    """A dialogue of 20 sampled tokens, 150 of the user and 20 sampled, with one reward of 1 at the
    end and V = 0. At lambda 0.95 the first token gets 0.95^39 = 0.135; decaying over what the user
    said leaves 6e-5 of it. At lambda 1, RLVER's, nobody would notice."""
    mask = torch.tensor([[True] * 20 + [False] * 150 + [True] * 20])
    rewards = place_rewards(torch.tensor([[0.0, 1.0]]), turns_of(mask))
    for gamma, lam in ((1, 0.95), (0.95, 1)):
        advantages, _ = gae(rewards, torch.zeros(mask.shape), mask, gamma, lam)
        close(advantages[0, [0, 19, 170, 189]], [0.95**39, 0.95**20, 0.95**19, 1])
    close(gae(rewards, torch.zeros(mask.shape), mask, 1, 1)[0], mask)


def test_at_lambda_and_gamma_1_the_sum_telescopes():
    """RLVER's setting: whatever the critic says, the advantage is the dialogue's reward minus V,
    and the return is the reward."""
    mask, values, reward = ragged(3), normal(6, 14, seed=4), normal(6, seed=5)
    turn = turns_of(mask)
    rewards = place_rewards(paid_last(reward.tolist(), turn.amax(1).tolist()), turn)
    advantages, returns = gae(rewards, values, mask, 1, 1)
    close(returns, reward[:, None] * mask)
    close(advantages, (reward[:, None] - values) * mask)


def test_the_reward_stands_on_the_last_policy_token():
    """Defect 23: the user had the last word, the released code puts the reward on it, and under a
    mask it is lost. Also where the dialogue is padded, and nowhere if the policy never spoke."""
    mask = torch.tensor(
        [[0, 1, 1, 0, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1], [0] * 8]
    ).bool()
    reward = torch.tensor([0.9, 0.2, 0.4, 0.7])
    placed = place_rewards(paid_last(reward.tolist(), [2, 1, 1, 0]).float(), turns_of(mask))
    wanted = torch.zeros(4, 8)
    wanted[0, 5], wanted[1, 2], wanted[2, 7] = 0.9, 0.2, 0.4
    assert torch.equal(placed, wanted)


def test_each_turn_is_paid_on_its_last_token():
    """A reward a turn, --reward delta: two of three turns end where the user begins to speak, one
    at the end of the row. gamma = lambda = 1: every token gets what is still to come."""
    turn = torch.tensor([[1, 1, 0, 2, 2, 0, 3]])
    placed = place_rewards(torch.tensor([[0.1, -0.2, 0.4]]), turn)
    close(placed, [[0, 0.1, 0, 0, -0.2, 0, 0.4]])
    _, returns = gae(placed, torch.zeros(1, 7), turn > 0, 1, 1)
    close(returns, [[0.3, 0.3, 0, 0.2, 0.2, 0, 0.4]])
