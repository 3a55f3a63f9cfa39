"""Packing: a dialogue as one row, who sees whom in it, what each turn is paid, and rows side by
side in batches. The example by hand is that of Batch's docstring."""

import numpy as np
import pytest

from agents import episode_of, random_episode
from policy import micro_batches, pack, tree_mask
from rollout import Segment, Turn


def test_packing_by_the_worked_example():
    """The example in Batch's docstring, and who sees whom token by token: a sampled token its
    history and its own turn so far, a token of the trunk the trunk before it, padding itself."""
    p, q, a, b, r, s, c, pad = 1, 2, 11, 12, 3, 4, 21, 0
    thinking = episode_of(
        [
            Segment([p, q]),
            Segment([a, b], 1, [-1.0, -2.0]),
            Segment([r]),
            Segment([s]),
            Segment([c], 2, [-3.0]),
        ],
        reward=0.5,
        group=7,
    )
    short = episode_of([Segment([p]), Segment([a], 0, [-4.0])], reward=1.0, group=8)
    batch = pack([thinking, short])
    assert batch.ids.tolist() == [[p, q, a, b, r, s, c], [p, a] + [pad] * 5]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 2, 3, 4], [0, 1] + [0] * 5]
    assert batch.action_mask.int().tolist() == [[0, 0, 1, 1, 0, 0, 1], [0, 1] + [0] * 5]
    assert batch.engine_log_probs.tolist() == [[0, 0, -1, -2, 0, 0, -3], [0, -4] + [0] * 5]
    assert batch.reward.tolist() == [[0, 0.5], [1, 0]] and batch.group.tolist() == [7, 8]
    mask = tree_mask(batch.branch)[:, 0]
    for row, sees in (
        (0, [[p], [p, q], [p, q, a], [p, q, a, b], [p, q, r], [p, q, r, s], [p, q, r, s, c]]),
        (1, [[p], [p, a]] + [[pad]] * 5),
    ):
        assert [batch.ids[row][past].tolist() for past in mask[row]] == sees


def paid(*emotions, reward):
    """A thinking dialogue with these emotions after its turns, None for a malformed one."""
    segments, at, turns = [Segment([1, 2])], [30, *emotions], []
    for k, e in enumerate(emotions):
        segments += [Segment([3, 4], branch=k + 1, log_probs=[-1.0, -1.0]), Segment([5])]
        # the user said +10 or -10; at the limits it was moved less
        change = None if e is None else 10 if e > at[k] else -10
        turns.append(Turn("Hm.", "", emotion=e, change=change))
    return episode_of(segments, turns=turns, reward=reward)


def test_what_each_turn_is_paid():
    """Terminal: all of it in the last. Delta: how far the emotion moved from where it stood. The
    changes add up to e_T - e_0; one that the clamp at 100 cut short counts as far as it went; a
    malformed reply takes back what was earned."""
    good, bad = paid(40, 36, 95, 100, reward=1.0), paid(40, 50, None, reward=0.0)
    assert good.turn_rewards() == [0, 0, 0, 1.0] and bad.turn_rewards() == [0, 0, 0]
    for episode, deltas in (
        (good, [0.1, -0.04, 0.59, 0.05]),
        (bad, [0.1, 0.1, -0.5]),
        (paid(None, reward=0.0), [-0.3]),
        (paid(20, 0, reward=0.0), [-0.1, -0.2]),
    ):
        assert np.allclose(episode.turn_rewards("delta"), deltas)


def test_turns_of_either_kind_are_counted_and_paid_as_was_asked():
    """A reply in the sequence, and a thinking one: the template's opening, 9, stands in front of
    the sampled tokens on their branch; they go on behind it, and it is no action. Each turn is paid
    for its own change, and the padding up to the next multiple is nobody's."""
    segments = [
        Segment([1, 2]),
        Segment([3], 0, [-1.0]),
        Segment([5]),
        Segment([9], 1),
        Segment([3, 4], 1, [-1.0, -1.0]),
        Segment([6]),
    ]
    turns = [Turn("Hm.", "", emotion=40), Turn("Hm.", "", emotion=36)]
    episode = episode_of(segments, reward=0.36, turns=turns)
    batch = pack([episode], "delta", multiple=5)
    assert batch.ids.tolist() == [[1, 2, 3, 5, 9, 3, 4, 6, 0, 0]]
    assert batch.turn.tolist() == [[0, 0, 1, 0, 0, 2, 2, 0, 0, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 4, 5, 6, 4, 0, 0]]
    assert batch.branch.tolist() == [[0, 0, 0, 0, 1, 1, 1, 0, -1, -1]]
    assert (batch.action_mask == (batch.turn > 0)).all()
    assert batch.reward[0].tolist() == pytest.approx([0.1, -0.04])
    assert pack([episode]).reward[0].tolist() == pytest.approx([0, 0.36])


def test_micro_batches_lose_no_dialogue_and_keep_the_budget():
    """The split is for memory only. Every dialogue is in exactly one batch, with its own reward and
    group; only one that is longer than the budget by itself may pass it, and then alone."""
    rng = np.random.default_rng(2)
    episodes = [random_episode(rng, 100, think=False, turns=1 + i % 8) for i in range(40)]
    for i, e in enumerate(episodes):
        e.reward, e.group = i / 64, i  # numbers that fp32 holds exactly
    for budget in (1, 60, 300, 10**6):
        batches = micro_batches(episodes, budget)
        assert sorted(int(g) for b in batches for g in b.group) == list(range(40))
        for b in batches:
            assert b.ids.numel() <= budget or len(b.group) == 1
            for row, i in enumerate(b.group.tolist()):
                ids = b.ids[row][b.branch[row] >= 0].tolist()
                assert ids == sum((s.ids for s in episodes[i].segments), [])
                assert b.reward[row].sum() == i / 64
    assert len(micro_batches(episodes, 1)) == 40 and len(micro_batches(episodes, 10**6)) == 1
    # on a GPU each new shape is planned for: the padding up to 128 counts against the budget
    cuts = micro_batches(episodes[:4], 256, multiple=128)
    assert [batch.ids.shape for batch in cuts] == [(2, 128), (2, 128)]
