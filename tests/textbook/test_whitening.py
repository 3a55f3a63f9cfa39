"""Whitening advantages over the whole batch, on all ranks."""

import math

import torch

from ppo import masked_mean_std, whiten
from tabular import NAN, Ranks, close


def test_whitening_by_the_numbers():
    """1, 3, 5 and 7, in two micro-batches: mean 4, and 20 / 3 the unbiased variance. A mean and a
    spread for each micro-batch would tell every one of them that it was average. What stands
    elsewhere does not count, be it a number or NaN. With the same again on a second rank, whose
    sums `reduce` adds, they are eight numbers, and 40 / 7."""
    tensors = [torch.tensor([[1, 9.0, 3]]), torch.tensor([[5, 7.0], [NAN, NAN]])]
    masks = [torch.tensor([[1, 0, 1]]).bool(), torch.tensor([[1, 1], [0, 0]]).bool()]
    for ranks, variance in ((1, 20 / 3), (2, 40 / 7)):
        found = masked_mean_std(tensors, masks, reduce=lambda x, ranks=ranks: ranks * x)
        close(torch.stack(found), [4, math.sqrt(variance)])
    close(whiten(tensors[0], masks[0], torch.tensor(4.0), torch.tensor(2.0)), [[-1.5, 0, -0.5]])


def test_a_rank_without_a_token_takes_part():
    """A sum over ranks is one of tensors, and waits for all ranks. On the second one the policy was
    silent: it brings nothing, and has the mean and the spread of 1, 3 and 5 like the first."""
    tensors = [torch.tensor([[1.0, 3.0, 5.0]]), torch.full((1, 3), NAN)]
    masks = [torch.full((1, 3), True), torch.full((1, 3), False)]
    for got in Ranks().run(
        lambda i, reduce: masked_mean_std(tensors[i : i + 1], masks[i : i + 1], reduce)
    ):
        close([float(x) for x in got], [3, 2])


def test_whitening_of_next_to_nothing():
    """The smallest batches. The spread of one number is NaN and of none the mean is too: such a
    batch stays as it is. Equal numbers have no spread to divide by, and become 0."""
    x = torch.tensor([[0.3, NAN, 0.7]])
    for kept in ([False] * 3, [False, False, True]):
        mask = torch.tensor([kept])
        assert masked_mean_std([x], [mask]) == (0, 1)
    equal, mask = torch.full((1, 7), 0.7), torch.ones(1, 7, dtype=torch.bool)
    assert (whiten(equal, mask, *masked_mean_std([equal], [mask])) == 0).all()
