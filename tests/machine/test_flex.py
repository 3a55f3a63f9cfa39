"""FlexAttention on packed rows. What a CPU can tell: uncompiled and without gradients it gives the
log-probs of SDPA with `tree_mask`, and its predicate is that mask. The gradients of the compiled one
are for a GPU: test_cuda.py."""

import copy
import functools

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import policy
from agents import episode_of
from policy import Critic, Policy, pack, tree_mask
from rollout import Segment
from several_ranks import make_episodes

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@functools.cache
def batch_of_all_kinds():
    """Rows of unequal length, with thoughts and without, and padding."""
    direct = episode_of([Segment([5, 6]), Segment([7, 8], 0, [-1.0, -1.0])], reward=0.5)
    return pack([*make_episodes(4), direct], multiple=64)


def dense(branch):
    """`tree_predicate` as a mask of all rows in one, [1, 1, B L, B L]."""
    return create_mask(policy.tree_predicate(branch), 1, 1, branch.numel(), branch.numel(), "cpu")


def the_predicate_is_the_mask(model, monkeypatch):
    branch = batch_of_all_kinds().branch
    assert torch.equal(dense(branch)[0, 0], torch.block_diag(*tree_mask(branch)[:, 0]).bool())


def the_forward_pass_is_that_of_sdpa(model, monkeypatch):
    """Through transformers' flex_attention, on torch's blocks, uncompiled."""
    batch, parts = batch_of_all_kinds(), (Policy(model), Critic(model))
    torch.nn.init.ones_(parts[1].head.weight)
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        right = [torch.stack([*part(batch)]) for part in parts]
        model.set_attn_implementation("flex_attention")
        found = [torch.stack([*part(batch)]) for part in parts]
    for one, two in zip(right, found):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=0)


def the_gradients_are_those_of_sdpa(model, monkeypatch):
    """With the predicate as a dense mask: torch has no gradient of FlexAttention on a CPU."""
    found = []
    for _ in range(2):
        model.zero_grad()
        torch.stack(Policy(model)(batch_of_all_kinds())).sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
        monkeypatch.setattr(policy, "uses_flex", lambda body: True)
        monkeypatch.setattr(policy, "tree_blocks", dense)
    for one, two in zip(*found):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-4)


FAULTS = {  # in who sees whom; row: in which row of the batch a token is
    "no fault": lambda sees, row, q, k: sees,
    "another row": lambda sees, row, q, k: sees | (row[q] != row[k]) & (k < q),
    "the next token": lambda sees, row, q, k: sees | (row[q] == row[k]) & (k == q + 1),
    "not the first one": lambda sees, row, q, k: sees & ((row[k - 1] == row[k]) | (k == q)),
    "the token before, of any branch": lambda sees, row, q, k: (
        sees | (row[q] == row[k]) & (k == q - 1)
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(
    "test",
    [
        the_predicate_is_the_mask,
        the_forward_pass_is_that_of_sdpa,
        the_gradients_are_those_of_sdpa,
    ],
)
def test_flex_attention(test, fault, tiny_gqa_model, monkeypatch):
    """Each of the three finds every fault in the predicate."""
    right = policy.tree_predicate

    def predicate(branch):
        row = torch.arange(branch.numel()) // branch.shape[1]
        return lambda b, h, q, k: FAULTS[fault](right(branch)(b, h, q, k), row, q, k)

    monkeypatch.setattr(policy, "tree_predicate", predicate)
    model = copy.deepcopy(tiny_gqa_model)
    if fault == "no fault":
        test(model, monkeypatch)
    else:
        with pytest.raises(AssertionError):
            test(model, monkeypatch)
