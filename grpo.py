"""grpo.py - Group Relative Policy Optimisation for dialogues (RLVER 2.2; Shao 2024). Read it as a
diff against ppo.py.

No critic: the baseline of a dialogue is the mean of its *group*, the dialogues that the same user
began with the same first line. One advantage for all tokens of a dialogue. The policy step is PPO's
own. RLVER: groups of 4, no KL.

Run it alone for the smallest example:  python grpo.py
"""
import torch

from ppo import compute_log_probs, identity, logp_gap, optimize
from support.settings import SelfCheckFailed


def group_advantages(rewards, groups, eps=1e-6):
    """A_i = (r_i - mean of its group) / (std of its group + eps), std unbiased (RLVER appendix B.3;
    Shao 2024, section 4.1).

    rewards: [D] float, one per *dialogue*; groups: [D] long, the group's id. Returns [D].

    Per dialogue, whatever its number of turns: the released code takes the statistics over turns,
    so that long dialogues weigh more. A group of one has no baseline and one without spread tells
    nothing apart: both get 0, never NaN.
    Example: rewards 0 1 | .5 .5 | .9 in groups 0 0 1 1 2 give -0.707 0.707 0 0 0.
    """
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        member = groups == group
        r = rewards[member]
        if len(r) > 1 and (r != r[0]).any():
            advantages[member] = (r - r.mean()) / (r.std() + eps)
    return advantages


def check_groups(episodes):
    """A group is one user and one first line, or its mean and std mean nothing. Raises
    SelfCheckFailed."""
    opening = {}
    for e in episodes:
        said = (e.profile_id, e.first_line)
        if opening.setdefault(e.group, said) != said:
            raise SelfCheckFailed(f"group {e.group} is broken: it holds dialogues with "
                                  f"{opening[e.group][0]} and with {e.profile_id}, or "
                                  "with two first lines")


def grpo_update(policy, optimizer, minibatches, *, reference=None, kl_coef=0.0, kl_estimator="k3",
                gap_limits=None, reduce=identity, **settings):
    """One GRPO update from one rollout; arguments as in `ppo_update`. Batches need .group [B] too.

    Raises ValueError for the k1 estimator: GRPO has no per-token reward to put it in, and in the
    loss its gradient is 0.
    """
    if kl_coef and kl_estimator == "k1":
        raise ValueError("k1 in the loss has no gradient on average, and GRPO has no per-token "
                         "reward; use k2, k3 or k3-ratio")
    batches = [batch for micros in minibatches for batch in micros]
    # 1. Before any step: log pi_old and, only if a KL is asked for, log pi_ref.
    old = compute_log_probs(policy, batches)
    gap = logp_gap(batches, old, gap_limits, reduce)
    ref = compute_log_probs(reference, batches) if kl_coef else None
    # 2. Advantages over the dialogues of each group, wherever the packing put them; then to each
    #    one's tokens.
    advantages = group_advantages(torch.cat([b.reward for b in batches]),
                                  torch.cat([b.group for b in batches]))
    advantages = [a[:, None] * b.action_mask
                  for a, b in zip(advantages.split([len(b.reward) for b in batches]), batches)]
    # 3. The policy step.
    metrics = optimize(policy, optimizer, minibatches, old, advantages, kl_coef=kl_coef,
                       kl_estimator=kl_estimator, ref=ref, reduce=reduce, **settings)
    return {**metrics, **gap, "explained_variance": None}


if __name__ == "__main__":
    from support.settings import Parser
    Parser(description="Prints the advantages of five dialogues in three groups.").parse_args()
    rewards, groups = [0.0, 1.0, 0.5, 0.5, 0.9], [0, 0, 1, 1, 2]
    print("rewards   ", rewards, "\ngroups    ", groups)
    advantages = group_advantages(torch.tensor(rewards), torch.tensor(groups))
    print("advantages", [round(a, 3) for a in advantages.tolist()])
