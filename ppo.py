"""ppo.py - Proximal Policy Optimisation for dialogues (RLVER 2.2; Schulman 2017), written by hand.

Pure functions on tensors first; `ppo_update`, at the bottom, is the only one that touches a model
or an optimizer. All tensors are [B, L]: B dialogues, L tokens, `mask` True where the policy sampled
the token. Everything that is not the policy's (the user's lines, the scaffold, padding) is skipped
everywhere: in the loss, GAE, whitening, entropy, KL and all means.

What RLVER uses: clip 0.2, gamma 1, lambda 1, no KL, entropy 0.001, value clip 0.5, AdamW. With one
optimizer step per rollout the ratio is 1 and the clip never acts; it takes two mini-batches or more
to see it work. Run it alone for the smallest example:  python ppo.py

Glossary of the metrics:  kl  k3 estimate of KL(pi_old, pi), measured at each mini-batch before its
own step (so 0 where there is only one);  clipfrac  share of tokens whose term the clip changes;
grad_norm  before clipping, mean over all mini-batches;  explained_variance  1 - Var(return - V) /
Var(return), 1 is a perfect critic, 0 one that knows nothing;  logp_gap  mean |log pi_engine - log
pi_old|, and logp_gap_max its maximum.
"""

from support.errors import SelfCheckFailed
from support.flags import Parser

import math
from dataclasses import dataclass
from typing import Callable

import torch


def identity(x):
    """The sum over ranks where there is one rank."""
    return x


# --------------------------------------------------------------------------------------- advantages


def place_rewards(reward, turn):
    """The reward of turn k on the last token that the policy sampled in it: [B, T], [B, L] -> [B,
    L]. `turn`: k at the tokens that the policy sampled in turn k = 1, 2, ..., 0 elsewhere.

    RLVER pays once, in the last turn. Not on the dialogue's last token: that one may be the user's,
    and a reward on a masked token is lost.
    """
    following = torch.cat([turn[:, 1:], torch.zeros_like(turn[:, :1])], dim=1)
    of_turn = torch.cat([torch.zeros_like(reward[:, :1]), reward], dim=1).gather(1, turn)  # [B, L]
    return torch.where((turn > 0) & (following != turn), of_turn, 0.0)


def gae(rewards, values, mask, gamma, lam):
    """Generalised advantage estimation over the policy's tokens, across turns (Schulman 2016,
    eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}
        return_t = A_t + V_t

    t + 1 is the *next token that the policy sampled*, however much the user said in between:
    observation tokens are no actions, so they neither have a V nor decay anything. Behind the last
    one there is nothing: V = 0 at the end, also at the turn limit, because the reward is observed
    there and nothing is left to be bootstrapped.

    rewards, values: [B, L] float; mask: [B, L] bool. Returns (advantages, returns), [B, L], 0 where
    mask is False. Example, gamma = lam = 1, one reward of 1, V = 0.5:  mask 1 1 0 0 1  ->
    advantages .5 .5 0 0 .5, returns 1 1 0 0 1.
    """
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    columns = mask.any(0).nonzero().ravel().tolist()  # elsewhere nobody acts: nothing changes
    for t in reversed(columns):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
    return advantages, torch.where(mask, advantages + values, 0.0)


def masked_mean_std(tensors, masks, reduce=identity, eps=1e-8):
    """Mean and standard deviation for whitening, over the masked entries of all `tensors` (of the
    whole batch, not of one micro-batch). `reduce` sums a tensor over ranks; this file knows nothing
    else of them. It waits for all ranks, so each calls it equally often: for the squares too, and
    also a rank that has no entry.

    Returns (mean, sqrt(variance + eps)), the variance unbiased, summed in float64, so that equal
    numbers become exactly 0. Fewer than two entries on all ranks together give (0, 1): nothing to
    whiten.
    """
    total = reduce(
        torch.stack(
            [
                sum(m.sum() for m in masks).double(),
                sum(t[m].double().sum() for t, m in zip(tensors, masks)),
            ]
        )
    )
    count, mean = total[0], total[1] / total[0].clamp(min=1)
    squares = reduce(sum(((t[m].double() - mean) ** 2).sum() for t, m in zip(tensors, masks)))
    if count < 2:
        return torch.zeros_like(mean).float(), torch.ones_like(mean).float()
    return mean.float(), (squares / (count - 1) + eps).sqrt().float()


def whiten(x, mask, mean, std):
    """(x - mean) / std where mask is True, 0 elsewhere."""
    return torch.where(mask, (x - mean) / std, 0.0)


# ------------------------------------------------------------------------------------------- losses


def policy_loss(log_probs, old_log_probs, advantages, mask, clip_eps, weights=None):
    """Clipped surrogate (Schulman 2017, eq. 7), negated, *summed* over the policy's tokens:

        - sum_t w_t min(rho_t A_t, clip(rho_t, 1 - eps, 1 + eps) A_t)
        rho_t = pi(y_t) / pi_old(y_t)

    min for both signs of A: a good token gains nothing beyond 1 + eps, a bad one nothing below 1 -
    eps, but a bad token that became *more* likely is pushed back without limit. A sum, not a mean:
    the caller divides by the tokens of the whole optimizer batch, so neither the micro-batches nor
    the ranks it was cut into change the gradient.

    `weights` [B, L]: truncated importance weights of the engine, detached. Returns (loss, number of
    tokens whose term the clip changes), two tensors of one number each.
    """
    # masked before exp: inf times 0 would be a NaN gradient
    ratio = torch.where(mask, log_probs - old_log_probs, 0.0).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages
    objective = torch.minimum(unclipped, clipped)
    if weights is not None:
        objective = objective * weights
    return -objective[mask].sum(), (clipped < unclipped)[mask].sum()


def value_loss(values, old_values, returns, mask, value_clip):
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), summed over the policy's tokens. c
    = 0 or None: not clipped."""
    loss = (values - returns) ** 2
    if value_clip:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        loss = torch.maximum(loss, (near - returns) ** 2)
    return 0.5 * loss[mask].sum()


def importance_weights(old_log_probs, engine_log_probs, cap=2.0):
    """min(pi_old / pi_engine, cap), detached (truncated importance sampling; Yao et al. 2025). The
    engine that sampled and the trainer that scores are two programs; where they differ the data is
    off-policy, and this is the correction."""
    return (old_log_probs - engine_log_probs).exp().clamp(max=cap).detach()


# ----------------------------------------------------------------------------------------------- KL


def kl_penalty(log_probs, ref_log_probs, estimator, old_log_probs=None):
    """Estimate KL(pi, ref) per token from samples of pi (Schulman, "Approximating KL divergence"),
    [B, L] -> [B, L].

        k1         log pi - log ref. Unbiased, but as a loss its expected gradient is exactly 0: it
                   belongs in the *reward*, for PPO, and must not be differentiated.
        k2         (log pi - log ref)^2 / 2. As a loss, its on-policy gradient is that of KL(pi,
                   ref): right.
        k3         ref/pi - 1 - log(ref/pi), as in the GRPO paper. Unbiased and never negative as a
                   *value*; as a loss, its on-policy gradient is that of KL(ref, pi), the other
                   direction.
        k3-ratio   rho k3, with rho = pi / pi_old: the importance ratio puts the missing part of the
                   gradient back, and it is that of KL(pi, ref) (DeepSeek-V3.2).

    Without old_log_probs pi_old is pi, as a constant. Raises ValueError for another name.
    """
    log_ratio = ref_log_probs - log_probs
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio**2
    k3 = log_ratio.exp() - 1 - log_ratio
    if estimator == "k3":
        return k3
    if estimator == "k3-ratio":
        old = log_probs.detach() if old_log_probs is None else old_log_probs
        return (log_probs - old).exp() * k3
    raise ValueError(f"unknown KL estimator {estimator!r}")


def explained_variance(values, returns, masks, reduce=identity):
    """1 - Var(R - V) / Var(R) over the policy's tokens of all batches; 0 if R does not vary."""
    _, error = masked_mean_std([r - v for r, v in zip(returns, values)], masks, reduce, eps=0.0)
    _, spread = masked_mean_std(returns, masks, reduce, eps=0.0)
    return float(1 - (error / spread) ** 2) if spread > 1e-6 else 0.0


# --------------------------------------------------------------------------------------- the update


def compute_log_probs(policy, batches):
    """log pi_old of every batch, once, before the first step, by the trainer (pi_old is not what
    the engine says)."""
    with torch.no_grad():
        return [policy(batch)[0] for batch in batches]


def old_log_probs(policy, minibatches, check_ratio=True):
    """log pi_old of every batch, before the first step; None for those of the first mini-batch
    unless `check_ratio`.

    The first mini-batch is scored by pi_old anyway: its log-probs are taken from the training pass.
    Its ratio is then 1 whatever they are, and checks nothing: a run asks for `check_ratio` at its
    start and where it is resumed."""
    batches = [batch for micros in minibatches for batch in micros]
    skip = 0 if check_ratio else len(minibatches[0])
    return [None] * skip + compute_log_probs(policy, batches[skip:])


def logp_gap(batches, old_log_probs, limits=None, reduce=identity):
    """Mean and maximum of |log pi_engine - log pi_old| over the policy's tokens (the maximum over
    this rank's own).

    limits: None, or (for the mean, for the maximum). Raises SelfCheckFailed where one is passed:
    the engine then samples from weights that are not the trainer's, or at another temperature, and
    the run would learn from somebody else's replies.
    """
    gaps = torch.cat(
        [(b.engine_log_probs - old)[b.action_mask].abs() for b, old in zip(batches, old_log_probs)]
    ).double()
    total, count = reduce(torch.stack([gaps.sum(), torch.ones_like(gaps).sum()])).tolist()
    mean = total / max(1.0, count)
    peak = gaps.max().item() if gaps.numel() else 0.0
    if limits and not (mean <= limits[0] and peak <= limits[1]):
        raise SelfCheckFailed(
            "engine and trainer disagree about the sampled tokens: log-probs "
            f"differ by {mean:.1e} on average, {peak:.1e} at most; did the "
            "weights reach the engine?"
        )
    return {"logp_gap": mean, "logp_gap_max": peak}


def check_first_ratio(log_ratio, limit):
    """Raise SelfCheckFailed unless pi and pi_old agree before the first step: log(pi / pi_old) of
    some tokens, at least one, within `limit` of 0. (NaN is not.)"""
    largest = log_ratio.abs().max()
    if not largest < limit:
        raise SelfCheckFailed(
            f"before the first step pi and pi_old differ by {largest:.1e} in "
            "log-probability; they are the same weights on the same tokens: look "
            "for dropout, temperature, masks, padding"
        )


def check_gradients(norm, critic_norm):
    """Raise SelfCheckFailed if a gradient is not finite. To be called before any step: a weight
    that is NaN once is NaN in every checkpoint to come."""
    if not math.isfinite(norm) or not math.isfinite(critic_norm):
        raise SelfCheckFailed(
            f"the gradient is not finite (norm {norm}, the critic's {critic_norm}); "
            "this step was not taken. Look at the learning rate and at the last dialogues"
        )


def clip_gradient(model, limit):
    """Clip the gradient to `limit`; returns its norm before. (Of a sharded model it is a shard of a
    sum: full_tensor() adds up.)"""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


@dataclass
class CriticPart:
    """What `optimize` needs to step a critic beside the policy."""

    model: Callable  # batch -> values [B, L]
    optimizer: torch.optim.Optimizer
    old_values: list  # of [B, L], one per batch, in the order of the batches
    returns: list  # likewise
    value_clip: float
    max_grad_norm: float = 1.0

    def loss(self, k, batch):
        """The value loss of micro-batch number k, summed over its tokens."""
        old_values, returns = self.old_values[k], self.returns[k]
        return value_loss(
            self.model(batch), old_values, returns, batch.action_mask, self.value_clip
        )


def optimize(
    policy,
    optimizer,
    minibatches,
    old,
    advantages,
    *,
    clip_eps,
    entropy_coef=0.0,
    kl_coef=0.0,
    kl_estimator="k3",
    ref=None,
    max_grad_norm=1.0,
    reduce=identity,
    ranks=1,
    critic=None,
    frozen=False,
    gap_limits=None,
    ratio_limit=1e-3,
):
    """One optimizer step per mini-batch, accumulated over its micro-batches. PPO's and GRPO's
    policy step are this one.

    minibatches: a list of lists of Batch. old, advantages, ref: lists of [B, L], one per Batch, in
    the same order: log pi_old (as `old_log_probs` leaves it), A, log pi_ref. critic: None, or a
    CriticPart, stepped on the same mini-batches. ranks: by how many the sharding divides a gradient
    when it sums it. frozen: the policy is looked at, not stepped. gap_limits: of `logp_gap`. A k1
    penalty is no loss (it has been put into the rewards), and a micro-batch in which the policy is
    silent adds nothing.

    Returns {kl, entropy, clipfrac, grad_norm, tokens_trained, logp_gap, logp_gap_max}: means over
    all tokens and all steps, and the number of the tokens. Raises SelfCheckFailed before any step
    if the first ratio is not 1 (log-probs `ratio_limit` apart) or the engine disagrees, and for a
    gradient that is not finite.
    """
    old = list(old)
    sums = {"kl": 0.0, "entropy": 0.0, "clipped": 0.0, "tokens": 0.0}
    norms, k = [], 0  # k counts micro-batches
    for step, micros in enumerate(minibatches):
        # the token normaliser: of the whole mini-batch, over all ranks
        tokens = reduce(sum(b.action_mask.sum() for b in micros)).clamp(min=1)
        for batch in micros:
            mask = batch.action_mask
            log_probs, entropy = policy(batch)
            if old[k] is None:
                old[k] = log_probs.detach()
            log_ratio = (log_probs - old[k])[mask].detach()
            if step == 0 and log_ratio.numel():
                check_first_ratio(log_ratio, ratio_limit)
            loss, clipped = summed_loss(
                batch,
                log_probs,
                entropy,
                old[k],
                advantages[k],
                ref=ref[k] if ref else None,
                clip_eps=clip_eps,
                entropy_coef=entropy_coef,
                kl_coef=kl_coef,
                kl_estimator=kl_estimator,
            )
            (loss / tokens * ranks).backward()
            if critic:
                error = critic.loss(k, batch)
                (error / tokens * ranks).backward()
            sums["kl"] += kl_penalty(old[k][mask], log_probs[mask].detach(), "k3").sum().item()
            sums["entropy"] += entropy[mask].sum().item()
            sums["clipped"] += clipped.item()
            sums["tokens"] += mask.sum().item()
            k += 1
        if step == 0:
            gap = logp_gap([b for micros in minibatches for b in micros], old, gap_limits, reduce)
        norm = clip_gradient(policy, max_grad_norm)
        critic_norm = clip_gradient(critic.model, critic.max_grad_norm) if critic else 0.0
        check_gradients(norm, critic_norm)
        norms.append(norm)
        if not frozen:
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if critic:
            critic.optimizer.step()
            critic.optimizer.zero_grad(set_to_none=True)
    totals = reduce(torch.tensor(list(sums.values()), dtype=torch.float64, device=tokens.device))
    kl, entropy, clipped, trained = totals.tolist()
    count = max(1.0, trained)
    return {
        "kl": kl / count,
        "entropy": entropy / count,
        "clipfrac": clipped / count,
        "grad_norm": sum(norms) / len(norms),
        "tokens_trained": int(trained),
        **gap,
    }


def summed_loss(
    batch,
    log_probs,
    entropy,
    old,
    advantages,
    *,
    ref,
    clip_eps,
    entropy_coef,
    kl_coef,
    kl_estimator,
):
    """The policy's loss in one micro-batch, summed over its tokens: policy loss, entropy bonus and
    KL penalty. All tensors are [B, L]; `ref` is None where there is no KL.

    The engine's importance weights are in the policy loss only. A k1 penalty is no loss. Returns
    (loss, number of tokens whose term the clip changes).
    """
    mask = batch.action_mask
    weights = importance_weights(old, batch.engine_log_probs)
    loss, clipped = policy_loss(log_probs, old, advantages, mask, clip_eps, weights)
    loss = loss - entropy_coef * entropy[mask].sum()
    if kl_coef and kl_estimator != "k1":
        kl = kl_penalty(log_probs, ref, kl_estimator, old)
        loss = loss + kl_coef * kl[mask].sum()
    return loss, clipped


def ppo_update(
    policy,
    optimizer,
    critic,
    critic_optimizer,
    minibatches,
    *,
    gamma=1.0,
    lam=1.0,
    value_clip=0.5,
    reference=None,
    kl_coef=0.0,
    kl_estimator="k3",
    check_ratio=True,
    reduce=identity,
    **settings,
):
    """One PPO update. policy(batch) -> (log_probs, entropy), critic(batch) -> values; all [B, L].

    minibatches: a list (optimizer steps) of lists (micro-batches) of batches with .action_mask,
    .engine_log_probs, .turn [B, L] and .reward [B, T].
    """
    batches = [batch for micros in minibatches for batch in micros]
    masks = [batch.action_mask for batch in batches]
    # 1. Before any step: log pi_old, V_old and, only if a KL is asked for, log pi_ref.
    kl_in_rewards = kl_coef and kl_estimator == "k1"  # such rewards need log pi_old
    old = old_log_probs(policy, minibatches, check_ratio or kl_in_rewards)
    ref = compute_log_probs(reference, batches) if kl_coef else None
    with torch.no_grad():
        old_values = [critic(batch) for batch in batches]
    # 2. The reward on the last policy token of its turn, a k1 penalty on all of them.
    rewards = [place_rewards(batch.reward, batch.turn) for batch in batches]
    if kl_in_rewards:
        penalties = [kl_penalty(o, f, "k1") for o, f in zip(old, ref)]
        rewards = [r - kl_coef * p * m for r, p, m in zip(rewards, penalties, masks)]
    # 3. Advantages, whitened over the whole batch.
    advantages, returns = zip(
        *[gae(r, v, m, gamma, lam) for r, v, m in zip(rewards, old_values, masks)]
    )
    mean, std = masked_mean_std(advantages, masks, reduce)
    advantages = [whiten(a, m, mean, std) for a, m in zip(advantages, masks)]
    # 4. Policy and critic step on the same mini-batches.
    critic_part = CriticPart(
        model=critic,
        optimizer=critic_optimizer,
        old_values=old_values,
        returns=returns,
        value_clip=value_clip,
        max_grad_norm=settings.get("max_grad_norm", 1.0),
    )
    metrics = optimize(
        policy,
        optimizer,
        minibatches,
        old,
        advantages,
        kl_coef=kl_coef,
        ref=ref,
        kl_estimator=kl_estimator,
        reduce=reduce,
        critic=critic_part,
        **settings,
    )
    return {**metrics, "explained_variance": explained_variance(old_values, returns, masks, reduce)}


if __name__ == "__main__":
    Parser(description="Prints GAE's advantages and returns for five tokens.").parse_args()
    turn = torch.tensor([[1, 1, 0, 0, 2]])
    mask, reward = turn > 0, torch.tensor([[0.0, 1.0]])
    print("Tokens: 2 of the policy, 2 of the user, 1 of the policy; reward 1 at the end; V = 0.5.")
    for lam in (1.0, 0.5):
        result = gae(place_rewards(reward, turn), 0.5 * mask, mask, gamma=1.0, lam=lam)
        print(f"lambda {lam}:  advantages {result[0][0].tolist()}  returns {result[1][0].tolist()}")
