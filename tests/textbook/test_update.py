"""The optimizer step that PPO and GRPO share: one normaliser, however a batch was cut, and metrics
over all of it.

Held against what a student would write first: loops over single tokens, in float64. A "defect" has
the number that this mistake of the released code has in docs/differences.md.
"""

import functools
import math

import pytest
import torch

import ppo
from ppo import log_probs_of, optimize
from tabular import (
    Notes,
    Table,
    Values,
    cfg_of,
    close,
    every_outcome,
    models_of,
    normal,
    pack,
    talk,
)

pytestmark = pytest.mark.usefixtures("unclipped")

# Two dialogues, and random advantages and returns of their tokens. No test changes them.
SPEECH = pack(talk(0, 2, 5), talk(1, 3, 4))
ADVANTAGES, RETURNS = ([normal(*SPEECH.ids.shape, seed=s)] for s in (1, 2))


def gradients(
    policy, minibatches, advantages, critic=None, returns=None, old=None, ref=None, cfg=None, **more
):
    """What `optimize` makes of two models that stand still: (the policy's gradient at each step,
    the critic's, the metrics). more: of the models."""
    batches = sum(minibatches, [])
    notes, critic_notes, old_values = Notes(policy), None, None
    if critic:
        old_values, critic_notes = [critic(b).detach() for b in batches], Notes(critic)
    metrics = optimize(
        models_of(policy, notes, critic, critic_notes, **more),
        minibatches,
        old or log_probs_of(policy, batches),
        advantages,
        cfg or cfg_of(),
        ref,
        old_values,
        returns,
    )
    return notes.seen, critic_notes.seen if critic else [], metrics


def test_the_metrics_are_means_over_all_tokens_and_steps():
    """On paper, for a policy to which all five tokens are alike, and which stands still: entropy
    log 5. Four tokens with a ratio of 1; in a second mini-batch four with 1.5, which the clip
    holds, and two with 0.5, which it leaves alone. k3 of KL(pi_old, pi) is 0.5 - log 1.5 of the
    former and log 2 - 0.5 of the latter. A second rank with the same doubles the tokens, and no
    mean."""
    policy = Table()
    policy.logits.data.zero_()
    batches = [
        pack(talk(0, 2, 4, 1, policy=policy)),
        pack(talk(1, 1, 1, 1, 3, policy=policy)),
        pack(talk(2, 3, 2, policy=policy)),
    ]
    old = [o - math.log(ratio) for o, ratio in zip(log_probs_of(policy, batches), (1, 1.5, 0.5))]
    for ranks in (1, 2):
        minibatches = [batches[:1], batches[1:]]
        ones = [torch.ones(b.ids.shape) for b in batches]
        reduce = functools.partial(torch.mul, ranks)
        seen, _, metrics = gradients(policy, minibatches, ones, old=old, reduce=reduce)
        if ranks == 1:
            norms = [float(gradient.norm()) for gradient in seen]
        wanted = {
            "kl": (4 * (0.5 - math.log(1.5)) + 2 * (math.log(2) - 0.5)) / 10,
            "entropy": math.log(5),
            "clipfrac": 0.4,
            "grad_norm": sum(norms) / 2 / ranks,  # for each rank has its share of the gradient
            "tokens_trained": 10 * ranks,
        }
        assert {key: metrics[key] for key in wanted} == pytest.approx(wanted)


def test_the_gradient_does_not_depend_on_the_micro_batches():
    """A mean of means, by example: two good dialogues of 10 tokens, two bad ones of 1000. Divided
    by all 2020 tokens the mean advantage is -0.98; the mean of four micro-batches' own means is 0,
    which is another opinion of the same rollout."""
    policy, critic = Table(), Values()
    dialogues = [talk(s, 3, n, 2, policy=policy) for s, n in enumerate((10, 10, 1000, 1000))]
    ones = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]])

    def update(*cuts):
        batches = [pack(*dialogues[a:b]) for a, b in cuts]
        advantages = [ones[a:b] * batch.action_mask for (a, b), batch in zip(cuts, batches)]
        ref, cfg = log_probs_of(Table(9), batches), cfg_of(entropy_coef=0.01, kl_coef=0.1)
        return gradients(policy, [batches], advantages, critic, advantages, ref=ref, cfg=cfg)

    (whole,), (critic_whole,), wanted = update((0, 4))
    for cuts in ([(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 1), (1, 4)]):
        (gradient,), (critic_gradient,), metrics = update(*cuts)
        close(gradient, whole)
        close(critic_gradient, critic_whole)
        assert metrics == pytest.approx(wanted) and metrics["tokens_trained"] == 2020


def test_what_sharding_divides_is_multiplied_back():
    """FSDP hands out the mean of the ranks' gradients, where their sum is meant: each rank's share
    is made larger by the number of ranks, the critic's too. Else the more GPUs, the wider the limit
    on its norm."""

    def step(ranks):
        model, more = Values(), dict(cfg=cfg_of(entropy_coef=0.1), world_size=ranks)
        return gradients(Table(), [[SPEECH]], ADVANTAGES, model, RETURNS, **more)[:2]

    for of_one, of_eight in zip(step(1), step(8)):
        close(of_eight[0], 8 * of_one[0])


def test_a_micro_batch_in_which_the_policy_is_silent_adds_nothing():
    """A rank that has fewer micro-batches than another runs one in which nobody speaks. No mean of
    nothing, no maximum of nothing: the step is what it is without it, and a step of nothing else is
    none."""

    def step(*micros):
        ones, cfg = [torch.ones(b.ids.shape) for b in micros], cfg_of(entropy_coef=0.1)
        seen, of_critic, metrics = gradients(Table(), [list(micros)], ones, Values(), ones, cfg=cfg)
        # to take no step at all is right as well
        return torch.cat(seen + of_critic or [torch.zeros(1)]), metrics

    silence = pack(talk(2, 3))
    (wanted, told), (got, said) = step(SPEECH), step(silence, SPEECH, silence)
    close(got, wanted)
    assert said == pytest.approx(told)
    none, nothing = step(silence)
    assert (none == 0).all() and set(nothing.values()) == {0}


def test_importance_weights_are_in_the_policy_loss_only():
    """An engine that is off by some e-folds weighs each token's part of the policy loss, up to 2;
    the entropy, the KL and the critic are sums over what was sampled, whoever sampled it, and stay
    as they are."""
    policy, critic = Table(), Values()
    batch = pack(*(talk(s, 2, 5, 3, 4) for s in range(4)))
    old, ref = log_probs_of(policy, [batch]), log_probs_of(Table(9), [batch])
    shape = batch.ids.shape
    returns, advantages, gap = [normal(*shape, seed=8)], normal(*shape, seed=5), normal(*shape)
    cfg = cfg_of(entropy_coef=0.3, kl_coef=0.5)

    def step(gap, advantages):
        batch.engine_log_probs = old[0] - gap
        seen, of_critic, _ = gradients(
            policy, [[batch]], [advantages], critic, returns, old, ref, cfg
        )
        return torch.cat(seen + of_critic)

    assert torch.equal(step(gap, 0 * advantages), step(0 * gap, 0 * advantages))
    assert (gap.exp() > 2).any() and (gap < 0).any()
    # the same thing: at ratio 1 they are factors alike
    close(step(gap, advantages), step(0 * gap, advantages * gap.exp().clamp(max=2)))


def test_k1_is_no_loss():
    """k1 belongs in the reward, where it has been put before a step is taken. In the loss its
    gradient is 0 on average and noise in every batch; so a step of k1 is the step without it, and
    that of the others is not."""
    ref = log_probs_of(Table(9), [SPEECH])

    def gradient(estimator, kl_coef=0.3):
        cfg = cfg_of(kl_coef=kl_coef, kl_estimator=estimator)
        (seen,), *_ = gradients(Table(), [[SPEECH]], ADVANTAGES, ref=ref, cfg=cfg)
        return seen

    without = gradient("k3", 0.0)
    close(gradient("k1"), without)
    for estimator in ("k2", "k3", "k3-ratio"):
        assert (gradient(estimator) - without).abs().max() > 1e-2


def test_the_entropy_is_a_bonus():
    """A step goes up the entropy, not down: where nothing else is to be learned, a policy forgets
    its preferences, a little. With the wrong sign it would only grow more certain of what it does
    already. The mean is over the policy's tokens, here all behind token 0."""
    policy, _, batch = every_outcome()
    nothing = [torch.zeros(batch.ids.shape)]
    (seen,), *_ = gradients(policy, [[batch]], nothing, cfg=cfg_of(entropy_coef=0.3))
    (up,) = torch.autograd.grad(
        torch.distributions.Categorical(logits=policy.logits[0]).entropy(), policy.logits
    )
    close(seen, -0.3 * up.flatten())


def test_each_model_is_clipped_by_itself(monkeypatch):
    """Each norm is cut to the limit, and not that of both models together. The metric is the norm
    before: the one after never says more than the limit."""
    monkeypatch.setattr(ppo, "MAX_GRAD_NORM", 0.02)
    seen, of_critic, metrics = gradients(Table(), [[SPEECH]], ADVANTAGES, Values(), RETURNS)
    close([seen[0].norm(), of_critic[0].norm()], [0.02, 0.02], 1e-4)
    assert metrics["grad_norm"] > 0.1


def test_grad_norm_is_the_mean_over_all_mini_batches():
    """Defect 28: an indentation, and the released code logs the last mini-batch's norm alone. Each
    gradient is that of its own mini-batch: one that is not reset brings the last one along."""
    batches = [pack(talk(0, 2, 9)), pack(talk(1, 2, 3), talk(2, 2, 4)), pack(talk(3, 1, 5))]
    advantages = [scale * b.action_mask for scale, b in zip((1.0, 4.0, 0.2), batches)]
    seen, _, metrics = gradients(Table(), [[batch] for batch in batches], advantages)
    norms = [float(gradient.norm()) for gradient in seen]
    assert max(norms) > 2 * min(norms)
    close(metrics["grad_norm"], sum(norms) / 3)
    for batch, advantage, norm in zip(batches, advantages, norms):
        close(gradients(Table(), [[batch]], [advantage])[2]["grad_norm"], norm)
