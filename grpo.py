"""grpo.py - Group Relative Policy Optimisation for dialogues (RLVER 2.2; Shao 2024). Read it as a
diff against ppo.py.

No critic: the baseline of a dialogue is the mean of its *group*, the dialogues with the same user
and the same first line. All tokens of a dialogue have the same advantage. The policy step is PPO's.
RLVER: groups of 4, no KL.

From top to bottom: what the paper has; what --reward delta, which it does not have, does instead.
Run it alone for the smallest example:  python grpo.py
"""

from support.command_line import Parser
from support.errors import SelfCheckFailed

import torch
import torch.nn.functional as F

from ppo import log_probs_of, optimize, spread_over_tokens

# ------------------------------------------------------------------------------- what the paper has


def group_advantages(rewards, groups, kind="grpo", eps=1e-6):
    """One advantage per dialogue, against the mean of its group:

        grpo       (r_i - mean) / (std + eps), std unbiased     (RLVER appendix B.3; Shao 2024, 4.1)
        dr-grpo    r_i - mean                                   (Liu 2025)
        rloo       r_i - mean of the others                     (Ahmadian 2024)

    rewards: [D] float, one per *dialogue*; groups: [D] long, the group's id. Returns [D].

    Division by the std amplifies small differences: a group whose rewards are nearly equal then
    weighs as much as any other. dr-grpo and rloo do not divide; in a group of n they differ by the
    factor n / (n - 1). (On the toy all three end at about the same score: docs/results.md.)

    Mean and std are over dialogues, however many turns they have. (The released code takes them
    over turns in think mode, so that long dialogues weigh more.)

    If all rewards of a group are equal, no dialogue is better than another: all advantages are
    exactly 0, never NaN. A group of one gets 0, too, except with rloo: the baseline is then 0, and
    the advantage is the reward.

    Example: rewards 0 1 | .5 .5 | .9 in groups 0 0 1 1 2 give -0.707 0.707 0 0 0.
    """
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        member = groups == group
        r = rewards[member]
        n = len(r)
        if n == 1 and kind == "rloo":
            advantages[member] = r
        # Compared exactly: a reward is e_T / 100, so equal emotions are equal floats.
        elif (r != r[0]).any():
            # rloo: r - (mean of the others) = (r - mean) / ((n - 1) / n)
            scale = {"grpo": r.std() + eps, "dr-grpo": 1.0, "rloo": (n - 1) / n}[kind]
            advantages[member] = (r - r.mean()) / scale
    return advantages


def check_groups(episodes):
    """Check that all dialogues of a group have the same user and the same first line; otherwise the
    mean of the group would mean nothing. Raises SelfCheckFailed."""
    first = {}  # {group: (profile_id, first_line)}
    for e in episodes:
        profile_id, first_line = first.setdefault(e.group, (e.profile_id, e.first_line))
        if (profile_id, first_line) != (e.profile_id, e.first_line):
            raise SelfCheckFailed(
                f"group {e.group} is broken: it holds dialogues with "
                f"{profile_id} and with {e.profile_id}, or with two first lines"
            )


def grpo_update(models, minibatches, cfg, observe=None):
    """One GRPO update from one rollout. Returns the metrics of ppo.py's docstring.

    The models have a .reference, too, which is called like .policy, if there is a KL; cfg has the
    settings advantage (`group_advantages`: kind) and reward, too. All else goes to `ppo.optimize`,
    whose docstring describes it. Raises ValueError for the k1 estimator: GRPO has no per-token
    reward to put it in, and in the loss its gradient is 0 on average.
    """
    if cfg.kl_coef and cfg.kl_estimator == "k1":
        raise ValueError(
            "k1 in the loss has no gradient on average, and GRPO has no per-token "
            "reward; use k2, k3 or k3-ratio"
        )
    batches = sum(minibatches, [])  # one list of all micro-batches
    # 1. Before any step: log pi_old and, only if a KL is asked for, log pi_ref.
    old_log_probs = log_probs_of(models.policy, batches)
    ref = log_probs_of(models.reference, batches) if cfg.kl_coef else None
    # 2. Advantages within each group.
    advantages = token_advantages(batches, cfg.advantage, per_turn=cfg.reward == "delta")
    # 3. The policy step.
    metrics = optimize(models, minibatches, old_log_probs, advantages, cfg, ref, observe=observe)
    # there is no critic; the metrics have the same keys as PPO's
    return {**metrics, "explained_variance": None}


def token_advantages(batches, kind, per_turn):
    """The advantage of each of the policy's tokens: a list of [B, L], one per batch, 0 elsewhere.

    batches: all that this rank has, because mini-batches and packing scatter the dialogues of a
    group over them. (A group never crosses ranks.) kind: see `group_advantages`; per_turn: does
    each turn have its own advantage (--reward delta)? Else all turns of a dialogue have the same.
    """
    groups = torch.cat([b.group for b in batches])  # [D], D dialogues
    turns = max(b.reward.shape[1] for b in batches)
    rewards = torch.cat([F.pad(b.reward, (0, turns - b.reward.shape[1])) for b in batches])
    if per_turn:
        alive = torch.cat([spoke_in_turn(b.turn, turns) for b in batches])
        advantages = turn_advantages(rewards, alive, groups, kind)  # [D, turns]
    else:
        per_dialogue = group_advantages(rewards.sum(1), groups, kind)
        advantages = per_dialogue[:, None].expand(-1, turns)  # the same in every turn
    # Cut back into batches; then each token gets its turn's advantage.
    of_batches = advantages.split([len(b.group) for b in batches])
    return [spread_over_tokens(a, b.turn) for a, b in zip(of_batches, batches)]


# ----------------------------------------------------------------- --reward delta: not in the paper


def turn_advantages(rewards, alive, groups, kind="grpo", eps=1e-6):
    """One advantage per turn: the return from turn t on, G_t, minus the mean G_t of the *others* of
    the group that still talk at turn t.

    rewards: [D, T] float, of each turn, 0 where the dialogue was over; alive: [D, T] bool, turns in
    which the policy spoke; groups: [D] long. Returns [D, T], 0 where the dialogue was over.

    Three choices (for the first two, tests/textbook/test_grpo.py enumerates a game to check them):

      * The mean of the others. If the dialogue's own return were included, only 1 - E[1 / n_t] of
        the gradient of turn t would be left, where n_t is the number of dialogues that still talk:
        half with two of them, three quarters with four. Late turns would lose most, so no learning
        rate would correct it.
      * A dialogue that is alone at turn t has the baseline 0, not the advantage 0. With the
        advantage 0, the longest dialogue of a group would give no gradient after all others have
        ended, and only P(another dialogue still talks) of the gradient of turn t would be left.
        Late turns would lose most here, too.
      * `grpo` divides by the std of the whole returns G_1 of the group, one number for all turns. A
        std for each turn would undo the differences between turns. Where the whole returns are
        equal, and in a group of one, every turn gets 0.

    dr-grpo and rloo are the same here: both take the mean of the others, and neither divides.
    """
    returns = rewards.flip(1).cumsum(1).flip(1) * alive  # [D, T]
    advantages = torch.zeros_like(returns)
    for group in groups.unique():
        member = groups == group
        g, talking = returns[member], alive[member]
        # [T], at least 1: a dialogue that is alone divides a sum of 0
        n_others = (talking.sum(0) - 1).clamp(min=1)
        returns_of_others = g.sum(0) - g  # [members, T], summed over the others
        a = (g - returns_of_others / n_others) * talking
        if kind == "grpo":
            whole = g[:, 0]
            # Not compared exactly: two dialogues may reach the same last emotion by different
            # changes, whose sums differ by rounding. Different returns are at least 0.01 apart.
            differ = (whole - whole[0]).abs().max() > 1e-4
            a = a / (whole.std() + eps) if differ else torch.zeros_like(a)
        advantages[member] = a
    return advantages


def spoke_in_turn(turn, turns):
    """Did dialogue d speak in turn t? turn: [B, L] long, of each token, 0 where it is not the
    policy's. Returns [B, turns] bool, of turns 1, 2, ..."""
    numbers = torch.arange(1, turns + 1, device=turn.device)
    return (turn[:, :, None] == numbers).any(1)


if __name__ == "__main__":
    Parser(description="Prints the advantages of five dialogues in three groups.").parse_args()
    rewards, groups = [0.0, 1.0, 0.5, 0.5, 0.9], [0, 0, 1, 1, 2]
    print("rewards   ", rewards, "\ngroups    ", groups)
    advantages = group_advantages(torch.tensor(rewards), torch.tensor(groups))
    print("advantages", [round(a, 3) for a in advantages.tolist()])
