"""What is rewarded, and when, through whole runs: a reward a turn, other advantages, groups without
a lesson, a second user who watches. The arithmetic is tested in textbook/."""

from support.metrics import flat_groups
from support.plan import calls_of
from support.settings import resolve_settings

import re

import pytest

import rlver
import toy
from runs import SMALL, alike, go, go_on, metrics, refuse, rows, suited

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


def trained_in(out, step):
    """The dialogues of a training step."""
    logged = rows(out / "dialogues.jsonl")
    return [d for d in logged if (d["split"], d["step"]) == ("train", step)]


def same_for_half(reply, *_):
    """Half of all replies move nobody, so groups without spread are common."""
    change = len(reply) % 7
    return (change if change > 4 else 0), "I am in a mood"


@pytest.mark.slow
def test_groups_without_a_lesson_are_refilled(tiny_dir, tmp_path, monkeypatch):
    """--refill 2: groups without spread give their places to new users; what was sampled in vain is
    counted. Stopped and resumed it is the same run."""
    monkeypatch.setattr(toy, "judge", same_for_half)
    flags = ["--batch-size", 8, "--max-turns", 1, "--eval-every", 0, "--refill", 2]
    assert go(tiny_dir, tmp_path / "plain", *flags[:-2], "--refill", 0) == 0
    assert go(tiny_dir, tmp_path / "out", *flags) == 0
    plain, lines = metrics(tmp_path / "plain"), metrics(tmp_path / "out")
    assert all(row["refilled"] == 0 for row in plain) and any(row["flat_groups"] for row in plain)
    for row in lines:
        assert (row["tokens_sampled"] > row["tokens_trained"]) == (row["refilled"] > 0)
        assert row["episodes"] == 8
    # the first step sees the same dialogues: its flat groups, and no other, were replaced
    before, after = trained_in(tmp_path / "plain", 1), trained_in(tmp_path / "out", 1)
    kept = [d for d in before if len({x["reward"] for x in before if x["group"] == d["group"]}) > 1]
    assert kept == [d for d in after if d["group"] in {x["group"] for x in kept}]
    assert lines[0]["flat_groups"] <= plain[0]["flat_groups"] > 0 < lines[0]["refilled"]
    assert go(tiny_dir, tmp_path / "half", *flags, "--steps", 2) == 0
    assert go_on(tmp_path / "half", "--steps", 4) == 0
    alike(tmp_path / "half", tmp_path / "out")


def test_flat_groups_by_hand():
    class E:
        def __init__(self, group, reward):
            self.group, self.reward = group, reward

    assert flat_groups([E(0, 0.1), E(0, 0.1), E(2, 0.1), E(2, 0.2), E(5, 0.0), E(5, 0.0)]) == [0, 5]


@pytest.mark.slow
def test_a_second_user_watches_and_changes_nothing(tiny_dir, tmp_path, monkeypatch):
    """--watch: the same replies put to another user. What is learned is the same to the last bit;
    `watched` is what `tools.replay` says of the same dialogues."""
    monkeypatch.setattr(toy, "judge_weakly", lambda reply: 5)
    assert go(tiny_dir, tmp_path / "alone") == 0
    assert go(tiny_dir, tmp_path / "out", "--watch", "toy-weak", "--watch-every", 2) == 0
    lines, usual = metrics(tmp_path / "out"), metrics(tmp_path / "alone")
    for row, other in zip(lines, usual):
        assert other["watched"] is None
        assert row | {"seconds": 0, "watched": None} == other | {"seconds": 0}
    assert [row["watched"] is None for row in lines] == [True, False, True, False]
    told = trained_in(tmp_path / "out", 2)
    # this user gains 5 at every reply that it heard
    assert lines[1]["watched"] == sum(30 + 5 * len(d["turns"]) for d in told) / len(told)


def test_calls_of_a_watcher_are_planned():
    """Also where the run's own user is the toy's, and costs nothing."""
    base = dict(algo="grpo", watch="openai:m@http://h/v1", watch_every=5)
    cfg = resolve_settings({**base, "steps": 50})
    assert "640" not in calls_of(cfg) and f"{10 * 64 * 8:,} of --watch" in calls_of(cfg)
    assert calls_of(resolve_settings({"algo": "grpo", "watch": "toy-weak"})) == ""
    once, twice = (
        resolve_settings(
            {"algo": "grpo", "model": "m", "simulator": "openai:m@http://h", "refill": n}
        )
        for n in (0, 1)
    )
    calls = [
        int(re.search(r"most: ([\d,]+) a step", calls_of(c))[1].replace(",", ""))
        for c in (once, twice)
    ]
    assert calls[1] == 2 * calls[0]


@pytest.mark.parametrize(
    "flags, word",
    [
        ("--algo ppo --advantage rloo", "--advantage rloo"),
        ("--algo ppo --refill 1", "--refill 1"),
        ("--watch-every 2", "--watch"),
        ("--reward delta --gamma 0.9 --algo ppo", "--gamma 0.9"),
        ("--watch nobody", "nobody"),
        (
            "--watch toy --profiles prompts/profiles/en_train.jsonl --simulator "
            "openai:m@http://127.0.0.1:1/v1",
            "--watch toy",
        ),
    ],
)
def test_bad_input_is_one_line(flags, word, tiny_dir, tmp_path, capfd):
    assert word in refuse(
        capfd, *suited(["--model", tiny_dir, *SMALL[2:], "--out", tmp_path / "out", *flags.split()])
    )
    assert not (tmp_path / "out").exists()
