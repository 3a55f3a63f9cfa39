"""grpo.py - Group Relative Policy Optimisation for dialogues (RLVER 2.2; Shao 2024). Read it as a
diff against ppo.py.

No critic: the baseline of a dialogue is the mean of its *group*, the dialogues that the same user
began with the same first line. One advantage for all tokens of a dialogue, or of a turn where each
turn is paid. The policy step is PPO's own. RLVER: groups of 4, no KL. Run it alone
for the smallest example:  python grpo.py
"""

from support.errors import SelfCheckFailed
from support.flags import Parser

import torch
import torch.nn.functional as F

from ppo import compute_log_probs, old_log_probs, optimize


def group_advantages(rewards, groups, kind="grpo", eps=1e-6):
    """One advantage a dialogue, against the mean of its group:

        grpo       (r_i - mean) / (std + eps), std unbiased     (RLVER appendix B.3; Shao 2024, 4.1)
        dr-grpo    r_i - mean                                   (Liu 2025)
        rloo       r_i - mean of the others                     (Ahmadian 2024)

    rewards: [D] float, one per *dialogue*; groups: [D] long, the group's id. Returns [D].

    Without the std a group whose rewards are nearly equal weighs no more than it should. Within a
    group of n rloo is dr-grpo times n / (n - 1): one learning rate apart, and under Adam, which
    divides by the gradient's size, apart by clipping and the entropy bonus alone.

    Per dialogue, whatever its number of turns: the released code takes the statistics over turns,
    so that long dialogues weigh more. A group without spread tells nothing apart and gets 0, never
    NaN; so does a group of one, but for rloo, whose baseline without others is 0.
    Example: rewards 0 1 | .5 .5 | .9 in groups 0 0 1 1 2 give -0.707 0.707 0 0 0.
    """
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        member = groups == group
        r = rewards[member]
        n = len(r)
        if n == 1 and kind == "rloo":
            advantages[member] = r
        elif (r != r[0]).any():
            scale = {"grpo": r.std() + eps, "dr-grpo": 1.0, "rloo": (n - 1) / n}[kind]
            advantages[member] = (r - r.mean()) / scale
    return advantages


def turn_advantages(rewards, alive, groups, kind="grpo", eps=1e-6):
    """One advantage a turn: the return from turn t on, G_t, against the mean G_t of the *others* of
    the group that still talk at turn t.

    rewards: [D, T] float, of each turn, 0 where the dialogue was over; alive: [D, T] bool, turns in
    which it spoke; groups: [D]. Returns [D, T], 0 where the dialogue was over.

    The others', because a mean that contains one's own return shrinks turn t to 1 - E[1 / n_t] of
    its gradient, n_t being those still talking: unevenly, late turns most. One that is alone has
    the baseline 0, not the advantage 0, which would depend on its own choice to go on and so be
    biased (tests/textbook/test_grpo.py enumerates a game to see it). `grpo` divides by the std of
    the group's whole returns, one number for all turns: a std for each turn would undo the
    differences between them. Where the whole returns are equal, and in a group of one, it gives 0
    for every turn. With the others' mean, dr-grpo and rloo are the same here.
    """
    returns = rewards.flip(1).cumsum(1).flip(1) * alive  # [D, T]
    advantages = torch.zeros_like(returns)
    for group in groups.unique():
        member = groups == group
        g, talking = returns[member], alive[member]
        others = (talking.sum(0) - 1).clamp(min=1)
        a = (g - (g.sum(0) - g) / others) * talking
        if kind == "grpo":
            whole = g[:, 0]
            # Equal whole returns are equal to rounding: the same emotion is reached by other sums.
            differ = (whole - whole[0]).abs().max() > 1e-4
            a = a / (whole.std() + eps) if differ else torch.zeros_like(a)
        advantages[member] = a
    return advantages


def spoke_in_turn(turn, turns):
    """Did dialogue d speak in turn t? turn: [B, L] long, of each token, 0 where it is not the
    policy's. Returns [B, turns] bool, of turns 1, 2, ..."""
    numbers = torch.arange(1, turns + 1, device=turn.device)
    return (turn[:, :, None] == numbers).any(1)


def check_groups(episodes):
    """A group is one user and one first line, or its mean means nothing. Raises SelfCheckFailed."""
    begun = {}  # group: its user and its first line
    for e in episodes:
        profile_id, first_line = begun.setdefault(e.group, (e.profile_id, e.first_line))
        if (profile_id, first_line) != (e.profile_id, e.first_line):
            raise SelfCheckFailed(
                f"group {e.group} is broken: it holds dialogues with "
                f"{profile_id} and with {e.profile_id}, or with two first lines"
            )


def grpo_update(
    policy,
    optimizer,
    minibatches,
    *,
    kind="grpo",
    per_turn=False,
    reference=None,
    kl_coef=0.0,
    kl_estimator="k3",
    check_ratio=True,
    **settings,
):
    """One GRPO update from one rollout; arguments as in `ppo_update`. Batches need .group [B] too.

    kind: of advantage, as in `group_advantages`. per_turn: one advantage a turn, for rewards that
    are paid by the turn. Raises ValueError for the k1 estimator: GRPO has no per-token reward to
    put it in, and in the loss its gradient is 0.
    """
    if kl_coef and kl_estimator == "k1":
        raise ValueError(
            "k1 in the loss has no gradient on average, and GRPO has no per-token "
            "reward; use k2, k3 or k3-ratio"
        )
    batches = [batch for micros in minibatches for batch in micros]
    # 1. Before any step: log pi_old and, only if a KL is asked for, log pi_ref.
    old = old_log_probs(policy, minibatches, check_ratio)
    ref = compute_log_probs(reference, batches) if kl_coef else None
    # 2. Advantages within each group, wherever the packing put its dialogues; then to the tokens.
    groups = torch.cat([b.group for b in batches])
    turns = max(b.reward.shape[1] for b in batches)
    rewards = torch.cat([F.pad(b.reward, (0, turns - b.reward.shape[1])) for b in batches])
    if per_turn:
        alive = torch.cat([spoke_in_turn(b.turn, turns) for b in batches])
        advantages = turn_advantages(rewards, alive, groups, kind)
    else:
        advantages = group_advantages(rewards.sum(1), groups, kind)[:, None].expand(-1, turns)
    sizes = [len(b.group) for b in batches]
    advantages = [
        F.pad(a, (1, 0)).gather(1, b.turn)  # a column in front for turn 0: not the policy's tokens
        for a, b in zip(advantages.split(sizes), batches)
    ]
    # 3. The policy step.
    metrics = optimize(
        policy,
        optimizer,
        minibatches,
        old,
        advantages,
        kl_coef=kl_coef,
        kl_estimator=kl_estimator,
        ref=ref,
        **settings,
    )
    return {**metrics, "explained_variance": None}


if __name__ == "__main__":
    Parser(description="Prints the advantages of five dialogues in three groups.").parse_args()
    rewards, groups = [0.0, 1.0, 0.5, 0.5, 0.9], [0, 0, 1, 1, 2]
    print("rewards   ", rewards, "\ngroups    ", groups)
    advantages = group_advantages(torch.tensor(rewards), torch.tensor(groups))
    print("advantages", [round(a, 3) for a in advantages.tolist()])
