"""What stops a run before a weight moves: a first ratio that is not 1, an engine that disagrees, a
gradient that is not finite.
"""

from support.errors import SelfCheckFailed

import pytest
import torch

from ppo import log_probs_of, logp_gap
from tabular import INF, NAN, Table, Values, close, pack, talk, untouched, update, weights


def test_engine_and_trainer_must_agree():
    """Defect 27: from its second step the released code sampled gibberish, from weights that were
    not the trainer's. Mean and maximum are over the policy's tokens, each has its limit, and NaN,
    which an engine can return, passes none."""
    batches = [pack(talk(0, 2, 4, 3), talk(1, 1, 2)), pack(talk(2, 3, 3))]
    old = log_probs_of(Table(), batches)
    assert logp_gap(batches, old, (1e-12, 1e-12)) == {"logp_gap": 0, "logp_gap_max": 0}
    for b in batches:
        # nobody's business
        b.engine_log_probs = torch.where(b.action_mask, b.engine_log_probs, 50.0)
    batches[0].engine_log_probs[0, 2] += 0.4
    batches[1].engine_log_probs[0, 5] -= 0.5
    found = logp_gap(batches, old, (0.11, 0.51))
    close([found["logp_gap"], found["logp_gap_max"]], [0.9 / 9, 0.5])
    for limits in ((0.09, 0.51), (0.11, 0.49)):
        with pytest.raises(SelfCheckFailed):
            logp_gap(batches, old, limits)
    assert logp_gap(batches, old)["logp_gap_max"] > 0.49  # without limits it is measured, no more
    batches[0].engine_log_probs[0, 3] = NAN
    with pytest.raises(SelfCheckFailed):
        logp_gap(batches, old, (INF, INF))


def test_the_first_ratio_must_be_1():
    """Dropout that was left on: before the first step pi and pi_old are the same weights on the
    same tokens. Dropout, left on, makes them two policies; the update must stop before it moves
    anything. Afterwards the ratio may go where it wants."""
    batches = [pack(talk(s, 2, 5, 3, 4), talk(s + 9, 1, 6)) for s in range(2)]
    policy, critic = Table(dropout=0.5), Values()
    before, critic_before = weights(policy), weights(critic)
    with pytest.raises(SelfCheckFailed):
        update(policy, batches, critic)
    assert untouched(policy, before) and untouched(critic, critic_before)
    metrics = update(policy.eval(), batches)
    # the second mini-batch was past a ratio of 1
    assert metrics["kl"] > 1e-4 and not untouched(policy, before)


def test_all_tokens_are_scored_before_the_first_step():
    """log pi_old is of the policy that was rolled out, also in the last mini-batch, which is passed
    when the policy has moved. And an engine with other weights is found out before any step."""
    batches, passes = [pack(talk(s, 2, 5), talk(s + 9, 1, 6)) for s in range(3)], []
    policy = Table()
    policy.register_forward_hook(
        lambda module, args, out: passes.append([args[0] is b for b in batches].index(True))
    )
    update(policy, batches)
    assert passes == [0, 1, 2] * 2
    before = weights(policy)  # moved since the engine's log-probs were those of the first
    with pytest.raises(SelfCheckFailed, match="engine"):
        update(policy, batches, gap_limits=(1e-4, 1e-2))
    assert untouched(policy, before)


@pytest.mark.parametrize("broken", ["policy", "critic"])
@pytest.mark.parametrize("slope", [NAN, INF])
def test_a_broken_gradient_stops_before_the_weights_do(slope, broken):
    """Clipping a NaN gradient makes every weight NaN, clipping an infinite one too (0 times
    infinity), and the night's checkpoints after it. Stop, with both models as they were, whichever
    of the two it is: the loss itself may look fine."""
    policy, critic = Table(), Values()
    before, critic_before = weights(policy), weights(critic)
    list((policy if broken == "policy" else critic).parameters())[0].register_hook(
        lambda gradient: gradient * slope
    )
    with pytest.raises(SelfCheckFailed):
        update(policy, [pack(talk(0, 2, 5), talk(1, 2, 5))], critic)
    assert untouched(policy, before) and untouched(critic, critic_before)
