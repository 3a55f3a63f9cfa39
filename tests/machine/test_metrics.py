"""The numbers of a training step, and the warnings that a run gives while it trains: two mistakes
that others have made are made here, in a small real run, and the run must say so; healthy runs must
be silent.

The course has a lab for two of them: shared-seed and user-words."""

from models import build
from support.files import read_json
from support.metrics import (
    REWARD_TALK,
    batch_metrics,
    lost_needs,
    signs,
    warnings_of,
    words_of,
    zero_std_shares,
)
from support.rundir import metrics_of
from support.settings import Settings

import random

import pytest

import rlver
from benchmarks import tables
from emotion import NEEDS
from result_files import write
from rollout import Agent, Episode
from runs import ALGO, go
from toy import world

pytestmark = pytest.mark.usefixtures("moods")

# ----------------------------------------------------------------------------------- the mistakes


def one_seed(patch):
    """pytorch/torchtitan#3474: every dialogue of a group draws the same replies, no dialogue is
    better than another, and nothing is learned."""
    patch.setattr(rlver, "Agent", lambda *args, **more: Agent(*args, **{**more, "seed": 0}))


def other_weights(patch):
    """huggingface/trl#6700: the gradient looks alive, and the adapters stay as they were. Here the
    optimizer has the embeddings, which are not trained with adapters."""
    adamw = build.adamw
    patch.setattr(build, "adamw", lambda module, lr: adamw(module.model.get_input_embeddings(), lr))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake, flags, name",
    [
        (one_seed, "", "copies"),
        (other_weights, "--lora-rank 4", "still"),
    ],
)
def test_a_mistake_is_told(mistake, flags, name, tiny_dir, tmp_path, monkeypatch, capfd):
    """In its step, once, and at the end; the others are silent."""
    mistake(monkeypatch)
    assert go(tiny_dir, tmp_path / "out", *flags.split()) == 0
    [warning] = told_at_the_end(tmp_path / "out")
    assert warnings_of(metrics_of(tmp_path / "out")) == {name: warning}
    said = capfd.readouterr().out
    assert said.count("warning, step") == said.count(f": {warning} (docs/") == 1
    assert f"warning: {warning}\n" in said


def told_at_the_end(out):
    return read_json(out / "summary.json")["warnings"]


# ------------------------------------------------------------------------------------ healthy runs


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGO)
def test_a_healthy_run_is_silent(name, whole):
    assert told_at_the_end(whole(name)) == []


@pytest.mark.slow
def test_another_healthy_run_is_silent(tiny_dir, tmp_path, capfd):
    """With adapters, too."""
    out = tmp_path / "out"
    assert go(tiny_dir, out, "--lora-rank", 4) == 0
    assert told_at_the_end(out) == [] and "warning" not in capfd.readouterr().out


def test_the_measured_runs_are_silent():
    """Every training in benchmarks/runs.jsonl, as far as metrics are kept there: those of the one
    fault whose bounds are set by hand."""
    seen = 0
    for line in tables.Results(tables.ROOT / "benchmarks" / "runs.jsonl").read().values():
        columns = line.get("metrics", {})  # {metric: [a number for each step]}; some have none
        rows = [dict(zip(columns, numbers)) for numbers in zip(*columns.values())]
        assert warnings_of(rows) == {}, line["name"]
        seen += len(rows) > 20
    assert seen >= 80


# -------------------------------------------------------------------------------- the fine print

STEP = dict(
    zero_std_groups=0.0,
    repeat_across=0.3,
    kl_start=0.01,
    grad_norm=0.1,
    emotion_std=15.0,
    tokens_trained=500,
    tokens_sampled=500,
    tokens_dropped=0,
    lost_groups=0.0,
    malformed=0.0,
)


@pytest.mark.parametrize(
    "changed, steps, warning",
    [
        (dict(zero_std_groups=0.9, repeat_across=0.95), 3, "copies"),
        (dict(zero_std_groups=0.9, repeat_across=0.95), 2, None),  # may be chance
        (dict(zero_std_groups=1.0, repeat_across=0.95), 3, "copies"),
        (dict(zero_std_groups=1.0, repeat_across=0.5), 3, "flat"),  # earn the same by other words
        (dict(zero_std_groups=None, repeat_across=1.0), 9, None),  # PPO has no groups
        (dict(kl_start=0.0), 3, "still"),
        (dict(kl_start=0.0), 2, None),  # in bf16 the first, smallest steps may be rounded away
        (dict(grad_norm=0.0), 1, "zero gradient"),
        (dict(grad_norm=0.0, zero_std_groups=None), 1, "zero gradient"),
        # no dialogue was better than another, and nothing is learned: where do they all end?
        (dict(grad_norm=0.0, zero_std_groups=1.0), 3, "flat"),
        (dict(grad_norm=0.0, zero_std_groups=1.0, success=100.0), 3, "flat at the top"),
        (dict(grad_norm=0.0, zero_std_groups=1.0, failure=100.0), 3, "flat at the bottom"),
        (dict(grad_norm=0.0, zero_std_groups=1.0), 2, None),
        # the entropy bonus and a KL have a gradient of their own
        (dict(grad_norm=0.1, zero_std_groups=1.0, failure=100.0), 3, "flat at the bottom"),
        # PPO has no groups
        (
            dict(grad_norm=0.0, zero_std_groups=None, emotion_std=0.0, failure=100.0),
            3,
            "flat at the bottom",
        ),
        (dict(zero_std_groups=None, failure=100.0), 9, None),
        # a run of PPO that forgot </think> had 0, 11 and 52 %
        (dict(malformed=52.0), 1, "lost format"),
        (dict(malformed=11.0), 9, None),
        (dict(tokens_trained=501), 1, "foreign tokens"),
        (dict(lost_groups=0.125, zero_std_groups=0.125), 5, "lost need"),
        # a healthy run of the toy had three such steps running, and came back
        (dict(lost_groups=0.125, zero_std_groups=0.125), 4, None),
        (dict(lost_groups=0.0, zero_std_groups=0.5), 9, None),  # solved users
    ],
)
def test_in_how_many_steps_a_fault_must_be(changed, steps, warning):
    rows = [{"step": i, **STEP} for i in range(1, 12)]
    for row in rows[1 : 1 + steps]:
        row.update(changed)
    assert list(warnings_of(rows)) == ([] if warning is None else [warning])


def test_a_need_that_is_lost_is_not_in_every_batch():
    """The steps of a toy's run that lost a need, at which whole groups earned 0.09; the same number
    spread over the whole run is chance."""
    for steps, warned in (((12, 17, 18, 19, 21), True), ((2, 9, 16, 23, 30), False)):
        rows = [{**STEP, "lost_groups": 0.125 * (step in steps)} for step in range(1, 31)]
        assert list(warnings_of(rows)) == ["lost need"] * warned


def test_unreadable_answers_are_warned_of_above_one_in_a_hundred():
    """A policy that learns to bring them about has its dialogues dropped, and loses no reward."""
    row = dict(episodes=50, dropped=0, unreadable=0)
    for unreadable, warned in ((1, False), (2, True)):
        bad = dict(episodes=50 - unreadable, dropped=unreadable, unreadable=unreadable)
        assert list(warnings_of([row, bad])) == ["unreadable"] * warned


# --------------------------------------------------------------------------------- counted by hand


def test_groups_without_variance_by_hand():
    """Three of four groups earn the same within the group, one of them at a low reward."""
    rewards = {0: (0.1, 0.1), 2: (0.1, 0.2), 5: (1.0, 1.0), 7: (0.2, 0.2)}
    episodes = [Episode("p", n, "", reward=reward) for n in rewards for reward in rewards[n]]
    assert zero_std_shares(episodes) == {"zero_std_groups": 0.75, "lost_groups": 0.25}


def test_a_need_that_ppo_has_lost_by_hand():
    """PPO compares no dialogues, so it is asked by needs: a need whose last sixteen dialogues or
    more, over steps, were all below 0.2 is lost, equal or not; one of 0.2 among them brings it
    back. Fifteen do not count, and neither do people whose need has no name. A step of the paper
    has four dialogues of a need, so a rule for one step could never fire."""
    needs = ["praise", "listen", "advise", ""]
    rewards = {0: [0.0, 0.01, 0.02, 0.19], 1: [0.5] * 4, 2: [0, 0, 0, 0.2], 3: [0.0] * 4}
    failed, found = {}, []
    episodes = [Episode("p", k, "", reward=r) for k in rewards for r in rewards[k]]
    for _ in range(5):
        step = [*episodes, *episodes[4:8] * 2]  # most dialogues are good
        of_ppo = batch_metrics(step, needs, Settings(algo="ppo"), failed)
        assert of_ppo["zero_std_groups"] is None
        found.append(of_ppo["lost_groups"])
    assert found == [0, 0, 0, 1 / 3, 1 / 3] and failed == {"praise": 20, "listen": 0, "advise": 0}
    # where most dialogues of a step are low, no need is worse than others; a good one ends it
    assert lost_needs(episodes[:1] * 3 + episodes[4:6], needs, failed)["lost_groups"] == 0
    assert lost_needs(episodes[:1] + episodes[4:6], needs, failed)["lost_groups"] == 1 / 3
    assert lost_needs([Episode("p", 0, "", reward=0.2)], needs, failed)["lost_groups"] == 0
    assert lost_needs(episodes[-1:], needs, {})["lost_groups"] is None


def test_low_dialogues_of_a_need_are_counted_over_steps(tiny_dir, tmp_path, monkeypatch):
    """Of people whose file names no need, too; a checkpoint keeps the counts for a resumed run."""
    monkeypatch.setattr(world, "score_reply", lambda *_: (-10, "bad"))
    people = world.profiles("train", 4)
    path = write(tmp_path / "p.jsonl", *[{**row, "need": ""} for row in people])
    rest = write(tmp_path / "q.jsonl", *world.profiles("heldout", 1))
    flags = [*ALGO["ppo"], "--group-size", 1, "--steps", 2, "--profiles", path, rest]
    assert go(tiny_dir, tmp_path / "out", *flags) == 0
    state = read_json(tmp_path / "out" / "checkpoint-000002" / "state.json")
    assert state["failed"] == {row["need"]: 2 for row in people}


@pytest.mark.parametrize(
    "low, of_praise, warned",
    [
        (0.05, 1.0, True),  # lost at the paper's batch of 32, four dialogues of each need
        (0.4, 1.0, True),
        (0.2, 0.6, False),  # a hard need
        (0.5, 0.5, False),
        (0.85, 0.85, False),  # before training nearly all fail
        (1.0, 1.0, False),
    ],
)
def test_a_lost_need_is_told_from_bad_luck(low, of_praise, warned):
    """Against simulation, 40 steps of ten runs. low, of_praise: the probability that a dialogue is
    low. Alone, four low dialogues of a need are nothing: at 0.5 every third step has some."""
    for seed in range(10):
        rng, failed, rows = random.Random(seed), {}, []
        for step in range(40):
            chances = [of_praise if need == "praise" else low for need in [*NEEDS] * 4]
            rewards = [0.1 if rng.random() < chance else 0.9 for chance in chances]
            episodes = [Episode("p", k, "", reward=r) for k, r in enumerate(rewards)]
            rows.append({"step": step, **lost_needs(episodes, [*NEEDS] * 4, failed)})
        assert ("lost need" in warnings_of(rows)) == warned


def test_signs_by_hand():
    """Two users. The first is told the same sentence twice, within other words; both are told one
    reply word for word. A short sentence may come again."""
    counted = signs(
        [
            ["I am here. Take your time.", "Go on! I am here, you know. TAKE YOUR TIME"],
            ["You did well.", "I am here. Take your time."],
        ]
    )
    assert counted == {
        "repeat_within": 1 / 4,
        "repeat_across": 2 / 4,
        "reply_words": (6 + 10 + 3 + 6) / 4,
        "reward_talk": 0,
        "distinct_2": 12 / 21,
    }
    assert signs([]) == signs([[]]) == {}
    assert signs([["I see. Go on.", "I see. What then?"]])["repeat_within"] == 0
    assert words_of("我在这里, ok?") == ["我", "在", "这", "里", "ok"]


def test_talk_about_the_reward():
    talk = ["Change: +10", "Please rate me.", "Now it is 100/100.", "给我打分吧", "情绪值加十"]
    assert all(map(REWARD_TALK.search, talk))
    others = [
        "I see what your emotions do to you.",
        "Things change: you will see.",
        "A rewarding hobby.",
    ]
    assert not any(map(REWARD_TALK.search, others))
