"""The clipped policy loss, its gradient, and the weights of its tokens."""

import math

import pytest
import torch

from ppo import importance_weights, policy_loss
from tabular import a_sum_over_the_policys_tokens, close, normal, ragged


@pytest.mark.parametrize(
    "advantage, ratio, loss, gradient, clipped",
    [
        (+2, 0.5, -1.0, -1.0, 0),
        (+2, 1.1, -2.2, -2.2, 0),
        (+2, 1.3, -2.4, 0.0, 1),  # a good token gains nothing beyond 1.2
        (-2, 0.5, +1.6, 0.0, 1),  # a bad one nothing below 0.8
        (-2, 0.9, +1.8, +1.8, 0),
        # but one that became more likely is pushed back without limit
        (-2, 9.0, +18.0, +18.0, 0),
    ],
)
def test_the_clip(advantage, ratio, loss, gradient, clipped):
    """The side that is clipped: min for both signs of the advantage. The loss and its gradient by
    log pi, worked out by hand, clip 0.2; the gradient is rho times the advantage, or nothing. An
    importance weight, here 3, is a factor of the token's loss; the clip does not see it."""
    log_probs = torch.tensor([[math.log(ratio) - 1.5]], dtype=torch.float64, requires_grad=True)
    old, mask = torch.tensor([[-1.5]]), torch.tensor([[True]])
    advantages = torch.tensor([[float(advantage)]])
    for weight in (1.0, 3.0):
        weights = torch.tensor([[weight]])
        got, count = policy_loss(log_probs, old, advantages, mask, 0.2, weights)
        (slope,) = torch.autograd.grad(got, log_probs)
        close([got.item(), slope.item()], [weight * loss, weight * gradient])
        assert count.sum().item() == clipped


def test_the_policy_loss_is_a_sum_over_the_policys_tokens():
    """And a log-prob off the mask may be as far away as it likes: exp comes after the mask, or the
    gradient is NaN."""
    mask, old, advantages, w = ragged(5), *(normal(6, 14, seed=s) for s in (1, 2, 4))
    new = (old + normal(6, 14, seed=5, scale=0.5)).requires_grad_()

    def loss_and_count(rows, dress):
        parts = dress(new)[rows], old[rows], dress(advantages)[rows], mask[rows]
        loss, clipped = policy_loss(*parts, 0.2, dress(w)[rows])
        return loss, clipped.sum()

    _, clipped, gradient = a_sum_over_the_policys_tokens(loss_and_count, new, mask)
    assert clipped > 0
    # e^10000 is infinite, and infinity times 0 is NaN
    far = torch.where(mask, new.detach(), 1e4).requires_grad_()
    policy_loss(far, old, advantages, mask, 0.2, w)[0].backward()
    close(far.grad, gradient)


def test_importance_weights():
    """An engine that is not quite the trainer: min(pi_old / pi_engine, 2), and a constant: a weight
    that is differentiated is another loss."""
    old = torch.tensor([-1.0, -1.0, -1.0, -3.0]).requires_grad_()
    engine = torch.tensor([-1.0, -1.5, -9.0, -1.0]).requires_grad_()
    w = importance_weights(old, engine)
    close(w, [1, math.exp(0.5), 2, math.exp(-2)])
    assert not w.requires_grad
