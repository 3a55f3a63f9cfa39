"""ppo.py - Proximal Policy Optimisation for dialogues (RLVER 2.2; Schulman 2017), written by hand.

Pure functions on tensors come first, then the update, which takes models and optimizers:
`ppo_update`, at the bottom, is the main function, and `optimize` its loop of optimizer steps.
Tensors are [B, L] unless noted: B dialogues, L tokens, `mask` True where the policy sampled the
token. All other tokens (the user's lines, the chat template, padding) are skipped everywhere: in
the loss, GAE, whitening, entropy, KL and all means.

RLVER's released code has clip 0.2, gamma 1, lambda 1, no KL, entropy 0.001, value clip 0.5, AdamW.
With one optimizer step per rollout the ratio is 1 and the clip never acts; it can act from the
second mini-batch on. Run it alone for the smallest example:  python ppo.py

The metrics of an update. "Mean" is over the policy's tokens of all mini-batches, on all ranks:

    kl                  mean k3 estimate of KL(pi_old, pi), measured at each mini-batch before its
                        own step; so it is 0 where there is only one mini-batch
    entropy             mean entropy of pi, in nats
    clipfrac            share of the tokens whose term in the loss the clip changes
    grad_norm           norm of the policy's gradient before clipping, mean over the mini-batches
    tokens_trained      number of the policy's tokens
    explained_variance  1 - Var(return - V) / Var(return): 1 for a perfect critic, 0 for one that
                        knows nothing
    logp_gap            mean |log pi_engine - log pi_old|
    logp_gap_max        its maximum, on this rank alone
"""

from support.command_line import Parser
from support.errors import SelfCheckFailed

import math

import torch
import torch.nn.functional as F

VALUE_CLIP = 0.5  # how far a value may move from the old one; only with several mini-batches
MAX_GRAD_NORM = 1.0  # the gradients of policy and critic are each clipped to this norm


def identity(x):
    """The default `reduce`: over a single rank, the sum over ranks is the tensor itself."""
    return x


# --------------------------------------------------------------------------------------- advantages


def spread_over_tokens(numbers, turn):
    """Give each token the number of its turn: [B, T], [B, L] -> [B, L].

    turn: k at the tokens that the policy sampled in turn k = 1, 2, ..., and 0 elsewhere. The tokens
    of turn 0, which are not the policy's, get 0.
    """
    by_turn = F.pad(numbers, (1, 0))  # column k: the number of turn k; column 0: zeros
    return by_turn.gather(1, turn)


def place_rewards(reward, turn):
    """Put the reward of turn k on the last token that the policy sampled in it: [B, T], [B, L] ->
    [B, L]. turn: k at the tokens that the policy sampled in turn k, 0 elsewhere.

    RLVER gives one reward, in the last turn. It is not put on the dialogue's last token: that token
    may be the user's, and a reward on a masked token is lost.
    """
    following = F.pad(turn[:, 1:], (0, 1))  # the turn of the next token in the row
    of_turn = spread_over_tokens(reward, turn)
    return torch.where((turn > 0) & (following != turn), of_turn, 0.0)


def gae(rewards, values, mask, gamma, lam):
    """Generalised advantage estimation over the policy's tokens, across turns (Schulman 2016,
    eq. 16).

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}
        return_t = A_t + V_t

    t + 1 is the *next token that the policy sampled*, however much the user said in between:
    observation tokens are no actions, so they have no V and do not decay anything. Behind the last
    sampled token V = 0, also at the turn limit: the reward is observed there, so nothing is
    bootstrapped.

    rewards, values: [B, L] float; mask: [B, L] bool. Returns (advantages, returns), [B, L], 0 where
    mask is False. Example, gamma = lam = 1, one reward of 1, V = 0.5:  mask 1 1 0 0 1  ->
    advantages .5 .5 0 0 .5, returns 1 1 0 0 1.
    """
    advantages = torch.zeros_like(rewards)
    next_value = next_advantage = torch.zeros_like(rewards[:, 0])
    columns = mask.any(0).nonzero().ravel().tolist()  # the others hold no action
    for t in reversed(columns):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * lam * next_advantage
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
    return advantages, torch.where(mask, advantages + values, 0.0)


def masked_mean_std(tensors, masks, reduce=identity, eps=1e-8):
    """Mean and standard deviation for whitening, over the masked entries of all `tensors` (of the
    whole batch, not of one micro-batch). Returns (mean, sqrt(variance + eps)), the variance
    unbiased. Fewer than two entries on all ranks together give (0, 1): nothing to whiten.

    `reduce` sums a tensor over ranks. It is a collective: every rank must call it equally often,
    twice here, even a rank without entries. Sums are float64, so that whitening a batch of equal
    numbers gives exactly 0.
    """
    count = sum(m.sum() for m in masks).double()
    total = sum(t[m].double().sum() for t, m in zip(tensors, masks))
    count, total = reduce(torch.stack([count, total]))
    mean = total / count.clamp(min=1)
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

    `weights` [B, L]: truncated importance weights of the engine, detached. Returns (loss, the
    tokens whose term the clip changes, [B, L] bool).
    """
    # masked before exp: inf times 0 would be a NaN gradient
    ratio = torch.where(mask, log_probs - old_log_probs, 0.0).exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - clip_eps, 1 + clip_eps) * advantages
    objective = torch.minimum(unclipped, clipped)
    if weights is not None:
        objective = objective * weights
    return -objective[mask].sum(), (clipped < unclipped) & mask


def value_loss(values, old_values, returns, mask, value_clip):
    """0.5 max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2), summed over the policy's tokens.
    value_clip: c; at 0 or None V is not clipped."""
    loss = (values - returns) ** 2
    if value_clip:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        loss = torch.maximum(loss, (near - returns) ** 2)
    return 0.5 * loss[mask].sum()


def importance_weights(old_log_probs, engine_log_probs, cap=2.0):
    """min(pi_old / pi_engine, cap), detached (truncated importance sampling; Yao et al. 2025). The
    engine that samples and the trainer that scores are two programs. Where their log-probs differ,
    the data is off-policy, and these weights are the correction."""
    return (old_log_probs - engine_log_probs).exp().clamp(max=cap).detach()


# ----------------------------------------------------------------------------------------------- KL


def kl_penalty(log_probs, ref_log_probs, estimator, old_log_probs=None):
    """Estimate KL(pi, ref) per token from samples of pi (Schulman, "Approximating KL divergence"),
    [B, L] -> [B, L].

        k1         log pi - log ref. Unbiased, but as a loss its on-policy gradient is 0 in
                   expectation: it belongs in the *reward*, for PPO, and must not be differentiated.
        k2         (log pi - log ref)^2 / 2. As a loss, its on-policy gradient is that of KL(pi,
                   ref), the right one.
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
    errors = [r - v for r, v in zip(returns, values)]
    _, error_std = masked_mean_std(errors, masks, reduce, eps=0.0)
    _, return_std = masked_mean_std(returns, masks, reduce, eps=0.0)
    return float(1 - (error_std / return_std) ** 2) if return_std > 1e-6 else 0.0


# --------------------------------------------------------------------------------------- the update


def log_probs_of(policy, batches):
    """log pi of the policy's tokens in every batch, without a gradient: a list of [B, L]."""
    with torch.no_grad():
        return [policy(batch)[0] for batch in batches]


def logp_gap(batches, old_log_probs, limits=None, reduce=identity):
    """Mean and maximum of |log pi_engine - log pi_old| over the policy's tokens (the maximum over
    those of this rank).

    limits: None, or (limit of the mean, limit of the maximum). Raises SelfCheckFailed where one is
    exceeded: the engine then samples from weights that are not the trainer's, or at another
    temperature, and the run would learn from the replies of another policy.
    """
    gaps_of_batches = []
    for batch, old in zip(batches, old_log_probs):
        gap = (batch.engine_log_probs - old).abs()
        gaps_of_batches.append(gap[batch.action_mask])
    gaps = torch.cat(gaps_of_batches).double()
    total, count = reduce(torch.stack([gaps.sum(), torch.ones_like(gaps).sum()])).tolist()
    mean = total / max(1.0, count)
    peak = gaps.max().item() if gaps.numel() else 0.0
    # "not <=" instead of ">": an engine can return NaN, and every comparison with NaN is False
    if limits and not (mean <= limits[0] and peak <= limits[1]):
        raise SelfCheckFailed(
            "engine and trainer disagree about the sampled tokens: log-probs "
            f"differ by {mean:.1e} on average, {peak:.1e} at most; did the "
            "weights reach the engine?"
        )
    return {"logp_gap": mean, "logp_gap_max": peak}


def check_first_ratio(log_probs, old_log_probs, mask, limit):
    """Check that pi and pi_old agree before the first step: log(pi / pi_old) must be within `limit`
    of 0 for each of the policy's tokens, and not NaN. All [B, L]. Raises SelfCheckFailed."""
    log_ratio = (log_probs - old_log_probs)[mask].detach()
    if not log_ratio.numel():  # the policy says nothing in this micro-batch
        return
    largest = log_ratio.abs().max()
    if not largest < limit:
        raise SelfCheckFailed(
            f"before the first step pi and pi_old differ by {largest:.1e} in "
            "log-probability; they are the same weights on the same tokens: look "
            "for dropout, temperature, masks, padding"
        )


def check_gradients(norm, critic_norm):
    """Check that the gradients are finite, before each step: once a weight is NaN, it stays NaN in
    all later checkpoints. Raises SelfCheckFailed."""
    if not math.isfinite(norm) or not math.isfinite(critic_norm):
        raise SelfCheckFailed(
            f"the gradient is not finite (norm {norm}, the critic's {critic_norm}); "
            "this step was not taken. Look at the learning rate and at the last dialogues"
        )


def clip_gradient(model, limit):
    """Clip the gradient to the norm `limit`. Returns its norm before. (Where FSDP shards the model,
    the norm is sharded too, and full_tensor() puts it together.)"""
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
    return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)


def optimize(  # noqa: PLR0915 - one function, to be read from top to bottom
    models,
    minibatches,
    old_log_probs,
    advantages,
    cfg,
    ref=None,
    old_values=None,
    returns=None,
    observe=None,
):
    """One optimizer step per mini-batch, its gradient accumulated over its micro-batches. PPO and
    GRPO share it.

    models         .policy(batch) -> (log_probs, entropy), [B, L] each, and .optimizer;
                   .critic(batch) -> values, [B, L], and .critic_optimizer, for PPO;
                   .reduce sums a tensor over ranks, .world_size is their number;
                   .gap_limits of `logp_gap`, .ratio_limit of `check_first_ratio`
    minibatches    a list (optimizer steps) of lists (micro-batches) of policy.Batch
    cfg            the settings clip_eps, entropy_coef, kl_coef, kl_estimator
    observe        observe(batch, old_log_probs, log_probs, entropy, advantages, old_values, the
                   tokens that the clip changes), [B, L] each, is called for each micro-batch

    Lists with one [B, L] for each micro-batch, in their order, made before the first step:

    old_log_probs  log pi_old, scored by the trainer, not by the engine
    advantages     A
    ref            log pi_ref; None if kl_coef is 0
    old_values     V_old; None for GRPO
    returns        R; None for GRPO. Without returns no critic is trained

    Returns the metrics of the module's docstring, except explained_variance. Raises
    SelfCheckFailed before the first step, if a first ratio is not 1 or if the engine disagrees with
    the trainer; and before any step whose gradient is not finite.
    """
    policy, optimizer = models.policy, models.optimizer
    critic = models.critic if returns else None
    batches = sum(minibatches, [])  # one list of all micro-batches
    gap = logp_gap(batches, old_log_probs, models.gap_limits, models.reduce)
    sums = torch.zeros(4, dtype=torch.float64)  # this rank's KL, entropy, clipped, tokens
    norms = []
    k = 0  # the number of the micro-batch, over all mini-batches
    for step, micros in enumerate(minibatches):
        # The loss is a mean over the policy's tokens of the whole mini-batch, on all ranks. A mean
        # of means of micro-batches would weigh the tokens of small micro-batches more.
        tokens = models.reduce(sum(batch.action_mask.sum() for batch in micros)).clamp(min=1)
        for batch in micros:
            mask, old, advantage = batch.action_mask, old_log_probs[k], advantages[k]
            log_probs, entropy = policy(batch)
            if step == 0:
                check_first_ratio(log_probs, old, mask, models.ratio_limit)

            # Sum the losses over the tokens. The engine's importance weights are in the policy
            # loss only. A k1 penalty is no loss: PPO puts it into the rewards.
            weights = importance_weights(old, batch.engine_log_probs)
            loss, clipped = policy_loss(log_probs, old, advantage, mask, cfg.clip_eps, weights)
            loss = loss - cfg.entropy_coef * entropy[mask].sum()
            if cfg.kl_coef and cfg.kl_estimator != "k1":
                penalty = kl_penalty(log_probs, ref[k], cfg.kl_estimator, old)
                loss = loss + cfg.kl_coef * penalty[mask].sum()

            # Backward: gradients add up over the micro-batches. FSDP averages them over the ranks,
            # but their sum is needed, so the loss is multiplied by the number of ranks.
            (loss / tokens * models.world_size).backward()
            if critic:
                values = critic(batch)
                critic_loss = value_loss(values, old_values[k], returns[k], mask, VALUE_CLIP)
                (critic_loss / tokens * models.world_size).backward()

            # The tokens are samples of pi_old, so this is KL(pi_old, pi).
            kl = kl_penalty(old[mask], ref_log_probs=log_probs[mask].detach(), estimator="k3")
            counts = [kl.sum(), entropy[mask].sum(), clipped.sum(), mask.sum()]
            sums += torch.stack(counts).detach().cpu()
            if observe:
                now = log_probs.detach(), entropy.detach()
                observe(batch, old, *now, advantage, old_values and old_values[k], clipped)
            k += 1

        # Clip, and step.
        norm = clip_gradient(policy, MAX_GRAD_NORM)
        critic_norm = clip_gradient(critic, MAX_GRAD_NORM) if critic else 0.0
        check_gradients(norm, critic_norm)
        norms.append(norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if critic:
            models.critic_optimizer.step()
            models.critic_optimizer.zero_grad(set_to_none=True)

    totals = models.reduce(sums.to(tokens.device)).tolist()
    means = [total / max(1.0, totals[3]) for total in totals[:3]]
    return {
        **dict(zip(("kl", "entropy", "clipfrac"), means)),
        "grad_norm": sum(norms) / len(norms),
        "tokens_trained": int(totals[3]),
        **gap,
    }


def ppo_update(models, minibatches, cfg, observe=None):
    """One PPO update from one rollout. Returns the metrics of the module's docstring.

    The models have a .reference, too, which is called like .policy, if there is a KL; cfg has the
    settings gamma and lam, too. All else goes to `optimize`, whose docstring describes it.
    """
    batches = sum(minibatches, [])  # one list of all micro-batches
    masks = [batch.action_mask for batch in batches]
    # 1. Before any step: log pi_old, V_old and, only if a KL is asked for, log pi_ref.
    old_log_probs = log_probs_of(models.policy, batches)
    ref = log_probs_of(models.reference, batches) if cfg.kl_coef else None
    with torch.no_grad():
        old_values = [models.critic(batch) for batch in batches]
    # 2. The reward on the last policy token of its turn, a k1 penalty on every policy token.
    rewards = [place_rewards(batch.reward, batch.turn) for batch in batches]
    if cfg.kl_coef and cfg.kl_estimator == "k1":
        for k, mask in enumerate(masks):
            penalty = kl_penalty(old_log_probs[k], ref[k], "k1")
            rewards[k] = rewards[k] - cfg.kl_coef * penalty * mask
    # 3. Advantages, whitened over the whole batch.
    estimates = [gae(r, v, m, cfg.gamma, cfg.lam) for r, v, m in zip(rewards, old_values, masks)]
    advantages, returns = zip(*estimates)
    mean, std = masked_mean_std(advantages, masks, models.reduce)
    advantages = [whiten(a, m, mean, std) for a, m in zip(advantages, masks)]
    # 4. Policy and critic step on the same mini-batches.
    metrics = optimize(
        models, minibatches, old_log_probs, advantages, cfg, ref, old_values, returns, observe
    )
    variance = explained_variance(old_values, returns, masks, models.reduce)
    return {**metrics, "explained_variance": variance}


if __name__ == "__main__":
    Parser(description="Prints GAE's advantages and returns for five tokens.").parse_args()
    turn = torch.tensor([[1, 1, 0, 0, 2]])
    mask, reward = turn > 0, torch.tensor([[0.0, 1.0]])
    print("Tokens: 2 of the policy, 2 of the user, 1 of the policy; reward 1 at the end; V = 0.5.")
    for lam in (1.0, 0.5):
        rewards = place_rewards(reward, turn)
        advantages, returns = gae(rewards, 0.5 * mask, mask, gamma=1.0, lam=lam)
        print(f"lambda {lam}:  advantages {advantages[0].tolist()}  returns {returns[0].tolist()}")
