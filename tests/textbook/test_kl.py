"""Estimators of the KL: their values, and which gradient each of them has."""

import pytest
import torch

from ppo import kl_penalty
from tabular import close, kl, normal


def two_distributions():
    """Logits that want a gradient, and log pi and log ref over 6 outcomes: small enough to try
    every one."""
    logits = normal(6, seed=1).requires_grad_()
    return logits, logits.log_softmax(-1), normal(6, seed=2).log_softmax(-1)


ESTIMATORS = ("k1", "k2", "k3", "k3-ratio")


def test_kl_estimates_as_values():
    """k1 and k3 are unbiased, k3 is never negative; a name that is misspelt must not silently be
    another estimator."""
    _, log_pi, log_ref = two_distributions()
    log_pi = log_pi.detach()
    for estimator in ("k1", "k3", "k3-ratio"):
        close((log_pi.exp() * kl_penalty(log_pi, log_ref, estimator)).sum(), kl(log_pi, log_ref))
    assert (kl_penalty(log_pi, log_ref, "k3") > 0).all()
    for estimator in ESTIMATORS:
        assert (kl_penalty(log_pi, log_pi, estimator) == 0).all()
    with pytest.raises(ValueError):
        kl_penalty(log_pi, log_ref, "K3")


@pytest.mark.parametrize(
    "estimator, place, direction",
    [
        ("k1", "loss", "none"),
        ("k1", "reward", "KL(pi, ref)"),
        ("k2", "loss", "KL(pi, ref)"),
        ("k3", "loss", "KL(ref, pi)"),
        ("k3-ratio", "loss", "KL(pi, ref)"),
    ],
)
def test_which_gradient_each_kl_estimator_has(estimator, place, direction):
    """An unbiased estimate of the KL need not have its gradient. The exact expectation over samples
    of pi: in the loss the estimate itself is differentiated, in the reward it weighs grad log pi.
    What the docstring claims, and nothing else, is true."""
    logits, log_pi, log_ref = two_distributions()
    penalty = kl_penalty(log_pi, log_ref, estimator)
    per_sample = penalty if place == "loss" else penalty.detach() * log_pi
    (got,) = torch.autograd.grad(
        (log_pi.detach().exp() * per_sample).sum(), logits, retain_graph=True
    )
    truth = {
        "KL(pi, ref)": torch.autograd.grad(kl(log_pi, log_ref), logits, retain_graph=True)[0],
        "KL(ref, pi)": torch.autograd.grad(kl(log_ref, log_pi), logits)[0],
        "none": torch.zeros(6),
    }
    close(got, truth[direction], 1e-9)
    assert all((got - truth[other]).abs().max() > 0.1 for other in truth if other != direction)


def test_k3_with_the_ratio_is_right_off_policy_too():
    """The ratio does what it does in the policy loss: samples of pi_old, weighed by pi / pi_old,
    stand for samples of pi. From the second mini-batch on this is the only one of the four with the
    gradient of KL(pi, ref)."""
    logits, log_pi, log_ref = two_distributions()
    log_old = normal(6, seed=3).log_softmax(-1)
    (wanted,) = torch.autograd.grad(kl(log_pi, log_ref), logits, retain_graph=True)
    for estimator in ESTIMATORS:
        penalty = kl_penalty(log_pi, log_ref, estimator, log_old)
        (got,) = torch.autograd.grad((log_old.exp() * penalty).sum(), logits, retain_graph=True)
        assert torch.allclose(got, wanted, atol=1e-9) == (estimator == "k3-ratio")
