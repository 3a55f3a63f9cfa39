"""The critic's loss, its gradient, and how much of the returns it explains."""

import pytest
import torch

from ppo import explained_variance, value_loss
from tabular import NAN, a_sum_over_the_policys_tokens, close, normal, ragged


@pytest.mark.parametrize(
    "value, old, target, clip, loss, gradient",
    [
        (1.0, 1.2, 2.0, 0.5, 0.5, -1.0),  # has not moved far: half of the squared error
        # moved too far, and the wrong way: pulled back
        (2.0, 1.0, 0.0, 0.5, 2.0, 2.0),
        # the right way, but too far: no pull, and no reward for it
        (2.0, 1.0, 3.0, 0.5, 1.125, 0.0),
        (-2.0, -1.0, -3.0, 0.5, 1.125, 0.0),
        # no clip
        (2.0, 1.0, 3.0, 0, 0.5, -1.0),
        (2.0, 1.0, 3.0, None, 0.5, -1.0),
    ],
)
def test_the_value_clip(value, old, target, clip, loss, gradient):
    """On paper: the loss and its gradient by V."""
    v = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    got = value_loss(
        v, torch.tensor([[old]]), torch.tensor([[target]]), torch.tensor([[True]]), clip
    )
    got.backward()
    close([float(got.detach()), float(v.grad)], [loss, gradient])


def test_the_value_loss_is_a_sum_over_the_policys_tokens():
    """What the critic says of the user's tokens is nobody's error."""
    mask, old, returns = ragged(5), *(normal(6, 14, seed=s) for s in (1, 3))
    values = (old + normal(6, 14, seed=6, scale=0.5)).requires_grad_()

    def loss(rows, dress):
        return [value_loss(dress(values)[rows], old[rows], dress(returns)[rows], mask[rows], 0.5)]

    a_sum_over_the_policys_tokens(loss, values, mask)


def test_explained_variance():
    """Returns 1 3 | 5 7 in two batches have the variance 5, errors of 1 and -1 the variance 1. It is
    1 for a critic that knows, 0 for one that says the same to everybody, below for one that is
    worse than that; and a number even where the returns do not vary or nobody spoke."""
    returns = [torch.tensor([[1, 3, NAN]]), torch.tensor([[5, 7, NAN]])]
    masks = [~r.isnan() for r in returns]
    off = [r + torch.tensor([[1, -1, NAN]]) for r in returns]
    nines = [torch.full_like(r, 9) for r in returns]
    for values, wanted in ((off, 0.8), (returns, 1), (nines, 0), ([-r for r in returns], -3)):
        close(explained_variance(values, returns, masks), wanted)
    assert explained_variance(returns, nines, masks) == 0
    assert explained_variance(returns, returns, [torch.zeros_like(m) for m in masks]) == 0
