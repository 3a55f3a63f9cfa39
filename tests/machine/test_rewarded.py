"""What is rewarded, and when, through whole runs: a reward a turn, other advantages. The arithmetic
is tested in textbook/."""

from support.metrics import flat_groups

import pytest

import rlver
from runs import SMALL, go, metrics, refuse, rows, suited

pytestmark = pytest.mark.usefixtures("moods")


def deltas(turns):
    return [(b - a) / 100 for a, b in zip([30] + turns, turns)]


@pytest.mark.slow
@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_deltas_reach_the_update(algo, tiny_dir, tmp_path, monkeypatch):
    """--reward delta: what the update is given is what stands in the log, turn by turn."""
    seen, name = [], f"{algo}_update"
    update = getattr(rlver, name)

    def noted(*args, **more):
        minibatches = next(a for a in args if isinstance(a, list))
        seen.append(
            [
                b.reward[i, : b.turn[i].max()].tolist()
                for micros in minibatches
                for b in micros
                for i in range(len(b.ids))
            ]
        )
        return update(*args, **more)

    monkeypatch.setattr(rlver, name, noted)
    assert go(tiny_dir, tmp_path / "out", "--algo", algo, "--reward", "delta", "--steps", 2) == 0
    logged = [d for d in rows(tmp_path / "out" / "dialogues.jsonl") if d["split"] == "train"]
    for step, given in enumerate(seen, 1):
        wanted = [
            deltas([t["emotion"] or 0 for t in d["turns"]]) for d in logged if d["step"] == step
        ]
        assert sorted(map(str, [[round(x, 4) for x in row] for row in given])) == sorted(
            map(str, [[round(x, 4) for x in row] for row in wanted])
        )


@pytest.mark.slow
def test_each_kind_of_advantage_is_another_run(tiny_dir, tmp_path):
    """The flag reaches the update: the same dialogues in step 1, other weights after it."""
    steps = {}
    for kind in ("grpo", "dr-grpo", "rloo"):
        assert (
            go(tiny_dir, tmp_path / kind, "--advantage", kind, "--steps", 1, "--eval-size", 1) == 0
        )
        steps[kind] = metrics(tmp_path / kind)[0]
    assert len({row["emotion"] for row in steps.values()}) == 1
    assert len({row["grad_norm"] for row in steps.values()}) == 3


def test_flat_groups_by_hand():
    class E:
        def __init__(self, group, reward):
            self.group, self.reward = group, reward

    assert flat_groups([E(0, 0.1), E(0, 0.1), E(2, 0.1), E(2, 0.2), E(5, 0.0), E(5, 0.0)]) == [0, 5]


@pytest.mark.parametrize(
    "flags, word",
    [
        ("--algo ppo --advantage rloo", "--advantage has no effect without --algo grpo"),
        ("--reward delta --gamma 0.9 --algo ppo", "--gamma 0.9"),
    ],
)
def test_bad_input_is_one_line(flags, word, tiny_dir, tmp_path, capfd):
    assert word in refuse(
        capfd, *suited(["--model", tiny_dir, *SMALL[2:], "--out", tmp_path / "out", *flags.split()])
    )
    assert not (tmp_path / "out").exists()
