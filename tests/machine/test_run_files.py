"""What a run leaves: its metrics, dialogues, summary and settings say what happened in it, and the
seed decides all of it."""

import json
from statistics import mean, stdev
from types import SimpleNamespace

import pytest

from runs import files, go, metrics, mood, rows, summary
from server import people
from simulator import profiles_of_step, toy_profiles
from tools import replay

pytestmark = pytest.mark.usefixtures("moods")


@pytest.mark.slow
def test_metrics_have_one_line_per_step_and_all_their_keys(whole):
    """A log with a step twice, or without the health metrics, cannot be plotted or trusted."""
    for algo in ("grpo", "ppo"):
        lines = rows(whole(algo) / "metrics.jsonl")
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
        for line in lines:
            # no critic, nothing to explain
            assert (line["explained_variance"] is None) == (algo == "grpo")
            assert line["logp_gap"] < 1e-4 and line["dropped"] == 0 and line["seconds"] > 0
            assert 0 < line["tokens_trained"] == line["tokens_sampled"] <= 4 * 3 * 6
            assert line["kl"] > 0  # of two mini-batches the second has a ratio that is not 1


def test_dialogues_are_written_word_for_word(whole):
    """Whoever doubts a reward must be able to read what was said for it: every dialogue, with the
    analysis behind each change."""
    lines = rows(whole("grpo") / "dialogues.jsonl")
    parts = "0 heldout, 1 train, 2 train, 3 train, 3 heldout, 4 train, 4 heldout".split(", ")
    written = [f"{line['step']} {line['split']}" for line in lines]
    assert written == [part for part in parts for _ in range(4)]
    known = {split: {p.id: p for p in toy_profiles(split)} for split in ("train", "heldout")}
    for line in lines:
        assert line["profile_id"] in known[line["split"]] and 1 <= len(line["turns"]) <= 3
        emotion = 30
        for turn in line["turns"]:
            change = json.loads(turn["analysis"])["change"]
            assert change == turn["change"] == mood(turn["reply"])[0]
            emotion += turn["change"]
            assert turn["emotion"] == emotion
        assert line["ended"] in ("turn_limit", "goodbye", "emotion_min")
        # the last reply is scored, and not answered at the limit
        assert all(turn["user"] for turn in line["turns"][:-1])
    # a group is one user and one first line; two groups of a batch are two users
    for step in (1, 2, 3, 4):
        batch = [line for line in lines if line["step"] == step and line["split"] == "train"]
        assert [line["group"] for line in batch] == [0, 0, 1, 1]
        assert len({(line["group"], line["profile_id"], line["first_line"]) for line in batch}) == 2


def test_rewards_are_the_final_emotion_and_replay_exactly(whole):
    """Verifiable emotion rewards, the V and E of the name: the recorded replies, put to the same
    user again, give the same emotions; the last one / 100 is the reward, in the log and in the
    metrics."""
    out = whole("grpo")
    assert replay.main([str(out / "dialogues.jsonl")]) == 0
    lines = rows(out / "dialogues.jsonl")
    assert all(line["reward"] == line["turns"][-1]["emotion"] / 100 for line in lines)
    assert len({line["reward"] for line in lines}) > 5  # or this test would show nothing
    for row in metrics(out):
        assert row["reward"] == pytest.approx(
            mean(
                line["reward"]
                for line in lines
                if line["step"] == row["step"] and line["split"] == "train"
            ),
            abs=1e-12,
        )


def test_the_summary_is_what_the_dialogues_say(whole):
    """A score that cannot be computed again from the log is a claim. Before and after, from
    dialogues.jsonl alone."""
    out = whole("grpo")
    told = json.loads((out / "summary.json").read_text())
    assert told["steps"] == 4
    for name, step in (("before", 0), ("after", 4)):
        lines = [
            line
            for line in rows(out / "dialogues.jsonl")
            if (line["split"], line["step"]) == ("heldout", step)
        ]
        final = [line["turns"][-1]["emotion"] for line in lines]
        assert told[name] == pytest.approx(
            {
                "step": step,
                "dropped": 0,
                "unreadable": 0,
                "tokens_dropped": 0,
                "score": mean(final),
                "stderr": stdev(final) / len(final) ** 0.5,
                "success": 100 * mean(e >= 100 for e in final),
                "failure": 100 * mean(e < 10 for e in final),
                "malformed": 0,
                "n": 4,
                "ref_perplexity": None,  # no adapters, no KL: the start is not in memory
            }
        )
        assert told[name]["score"] == pytest.approx(mean(100 * line["reward"] for line in lines))


@pytest.mark.slow
def test_config_picture_and_checkpoints_are_there(whole):
    """config.json says what was run, defaults included, so that it can be run again; the picture
    is one."""
    out = whole("ppo")
    cfg = json.loads((out / "config.json").read_text())
    shown = {"algo": "ppo", "lr": 2e-3, "gamma": 1.0, "max_turns": 3, "think": False}
    assert shown.items() <= cfg.items()
    assert (out / "learning_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "report.html" in files(out) and not [x for x in files(out) if x.startswith(".")]


def test_no_steps_means_evaluation_only_and_one_file_of_profiles_is_split(tiny_dir, tmp_path):
    """`--steps 0` measures a model and changes nothing. Of a single file the last fifth is held
    out: a score on people that were trained on would be no score."""
    assert (
        go(
            tiny_dir,
            tmp_path / "out",
            "--steps",
            0,
            "--profiles",
            people(tmp_path / "people.jsonl", count=10),
        )
        == 0
    )
    told = summary(tmp_path / "out")
    assert told["before"] == told["after"] and told["before"]["n"] == 2 and told["steps"] == 0
    assert [
        (line["split"], line["profile_id"]) for line in rows(tmp_path / "out" / "dialogues.jsonl")
    ] == [("heldout", "toy-train-0008"), ("heldout", "toy-train-0009")]
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
    assert (tmp_path / "out" / "checkpoint-000000" / "model.safetensors").read_bytes() == (
        tiny_dir / "model.safetensors"
    ).read_bytes()


@pytest.mark.slow
def test_the_seed_decides_everything(whole, tiny_dir, tmp_path):
    """Same seed, same run; another seed, another run. The number of steps is not part of the
    luck."""
    assert go(tiny_dir, tmp_path / "same", "--steps", 1) == 0
    assert go(tiny_dir, tmp_path / "other", "--steps", 1, "--seed", 1) == 0
    assert metrics(tmp_path / "same") == metrics(whole("grpo"))[:1]
    assert metrics(tmp_path / "other")[0]["reward"] != metrics(whole("grpo"))[0]["reward"]
    said = [
        [
            turn["reply"]
            for line in rows(tmp_path / name / "dialogues.jsonl")[:4]
            for turn in line["turns"]
        ]
        for name in ("same", "other")
    ]
    # the evaluation before training has its luck from the seed too
    assert not set(said[0]) & set(said[1])


def test_every_user_is_visited_once_per_pass():
    """Drawing with replacement would train on some users three times and on a third never. And a
    step's users follow from its number alone, or a resumed run would meet others."""
    folk = [SimpleNamespace(id=i, need="") for i in range(7)]

    def ids(count, seed, step, people=folk):
        return [who.id for who in profiles_of_step(people, count, seed, step)]

    visits = [who for step in range(1, 22) for who in ids(3, 5, step)]
    passes = [visits[i : i + 7] for i in range(0, 63, 7)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert len({tuple(one) for one in passes}) > 7  # each in an order of its own
    assert ids(3, 5, 20) == visits[57:60] != ids(3, 6, 20)
    assert sorted(ids(14, 5, 1)) == sorted([*range(7)] * 2)  # more dialogues than users


def test_every_step_has_all_needs():
    """Without it a need was in no batch of a few steps running, what is said to its users changed
    unpaid, and one run of eleven lost a need for ever. Of each need everybody is met once a
    pass."""
    folk = toy_profiles("train", 24)  # three of each of eight needs
    steps = [profiles_of_step(folk, 8, 0, step) for step in range(1, 4)]
    assert all(len({person.need for person in step}) == 8 for step in steps)
    assert len({person.id for step in steps for person in step}) == 24
