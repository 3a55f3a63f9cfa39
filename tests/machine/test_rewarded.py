"""What is rewarded, and when, through whole runs: a reward a turn, other advantages. The arithmetic
is tested in textbook/."""

import pytest

from runs import go, metrics, rows
from simulator import profiles_of_step, toy_profiles

pytestmark = pytest.mark.usefixtures("moods")


@pytest.mark.slow
@pytest.mark.parametrize(
    "algo, kinds",
    [
        ("grpo", ["--reward delta", *(f"--advantage {a}" for a in ("grpo", "dr-grpo", "rloo"))]),
        ("ppo", ["--reward terminal", "--reward delta"]),
    ],
)
def test_each_kind_of_reward_and_advantage_is_another_run(algo, kinds, tiny_dir, tmp_path):
    """The flag reaches the update: the same dialogues in step 1, other weights after it."""
    steps = []
    for kind in kinds:
        flags = f"--algo {algo} --steps 1 --eval-size 1 {kind}".split()
        assert go(tiny_dir, tmp_path / kind, *flags) == 0
        steps += metrics(tmp_path / kind)
    assert len({row["emotion"] for row in steps}) == 1
    assert len({row["grad_norm"] for row in steps}) == len(kinds)


@pytest.mark.slow
def test_ppo_may_hold_several_dialogues_with_each_user(tiny_dir, tmp_path):
    """By default four dialogues are with four users. With groups of two they are with the first two
    of these, from one first line each. PPO compares no dialogues, so no group of its is flat."""
    flags = ["--algo", "ppo", "--steps", 1, "--group-size=2"]
    assert go(tiny_dir, tmp_path / "out", *flags) == 0
    dialogues = rows(tmp_path / "out" / "dialogues.jsonl")
    begun = [(d["profile_id"], d["first_line"]) for d in dialogues if d["split"] == "train"]
    one, two = (user.id for user in profiles_of_step(toy_profiles("train"), 2, 0, 1))
    assert [user for user, _ in begun] == [one, one, two, two] and len(set(begun)) == 2
    (row,) = metrics(tmp_path / "out")
    assert row["zero_std_groups"] is None and row["grad_norm"] > 0
