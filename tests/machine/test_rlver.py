"""rlver.py as its user meets it: settings, bad input, what a run leaves, going on after a power
cut, the self-checks, learning.

Everything here is a real run through `rlver.main`, of a small random policy, in seconds. One thing
is bent: the toy's judge finds gibberish all alike, and a policy that never went to school says
nothing else. Rewards that never differ teach nothing, and a wrong group or a lost critic would go
unseen. So here the checksum of a reply decides how it feels (`moods`); the prompts, the parsed
answers, the clamp and the log are the real ones. The learning runs have the real judge and the
toy's own policy.
"""

from support import report, rundir
from support.chat_format import ChatFormat
from support.settings import SelfCheckFailed, Settings, make_parser, resolve_settings

import copy
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from statistics import mean, stdev

import pytest
import torch
from safetensors.torch import load_file

import evaluate
import rlver
import simulator
import toy
from conftest import make_tiny_model, suited
from engine import TorchEngine
from grpo import check_groups
from policy import Episode
from server import people
from simulator import User, load_prompt, make_simulator, profiles_of_step, toy_profiles
from tools.replay import consistency

ROOT = Path(__file__).resolve().parent.parent.parent
JUDGE, DRAW = toy.judge, report.learning_curve
SMALL = (
    "--simulator toy --steps 4 --batch-size 4 --group-size 2 --minibatches 2 --max-turns 3 "
    "--max-tokens 6 --lr 2e-3 --critic-lr 2e-3 --warmup 2 --eval-size 4 --eval-every 3 "
    "--save-every 2"
).split()
# What such a run appends, line by line: 4 dialogues of the evaluation before (1-4), 4 of step 1
# (5-8) and its metrics (9), step 2 (10-14), step 3 (15-19), the evaluation at step 3 (20-23), step
# 4 (24-28), the evaluation after (29-32). Checkpoints at 0, 2, 4.

METRICS = {
    "step",
    "reward",
    "emotion",
    "success",
    "failure",
    "malformed",
    "dropped",
    "kl",
    "entropy",
    "clipfrac",
    "grad_norm",
    "explained_variance",
    "logp_gap",
    "tokens_sampled",
    "tokens_trained",
    "seconds",
}


def mood(reply, *_):
    return zlib.crc32(reply.encode()) % 21 - 10, "I am in a mood"


@pytest.fixture(scope="module", autouse=True)
def moods(no_pictures):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "judge", mood)
        yield


def go(model, out, *more):
    """A small run of the policy in `model`; `more` flags override. Returns main's exit code."""
    return rlver.main(suited(["--model", model, *SMALL, "--out", out, *more]))


def go_on(out, *more):
    return rlver.main(["--resume", str(out), *map(str, more)])


@pytest.fixture(scope="module")
def whole(tiny_dir, tmp_path_factory):
    """Uninterrupted runs, one per algorithm, made when asked for: whole("grpo") is the directory,
    whole.trainers["grpo"] the Trainer."""
    made = {}

    def run(algo):
        class Seen(rlver.Trainer):
            def __init__(self, *args, **more):
                run.trainers[algo] = self
                super().__init__(*args, **more)

        if algo not in made:
            made[algo] = tmp_path_factory.mktemp("whole") / algo
            with pytest.MonkeyPatch.context() as patch:
                if algo == "ppo":  # one picture is enough
                    patch.setattr(report, "learning_curve", DRAW)
                patch.setattr(rlver, "Trainer", Seen)
                assert go(tiny_dir, made[algo], "--algo", algo) == 0
        return made[algo]

    run.trainers = {}
    return run


@pytest.fixture(scope="module")
def half(tiny_dir, tmp_path_factory):
    """A run of two steps; copy it before you go on with it."""
    out = tmp_path_factory.mktemp("half") / "out"
    assert go(tiny_dir, out, "--steps", 2) == 0
    return out


def rows(path):
    """A JSONL file, line by line. Not `splitlines`: what a policy says may hold U+2028, which ends
    no line of JSONL."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def metrics(out):
    return [
        {key: value for key, value in row.items() if key != "seconds"}
        for row in rows(out / "metrics.jsonl")
    ]


def summary(out):
    """What summary.json says about anything but time and memory."""
    told = json.loads((out / "summary.json").read_text())
    return {key: told[key] for key in ("before", "after", "steps", "tokens")}


def files(place):
    return {
        str(path.relative_to(place)): path.read_bytes() if path.is_file() else None
        for path in sorted(Path(place).rglob("*"))
    }


def refuse(capfd, *argv):
    """`main(argv)` must refuse: exit code 2, one line on stderr. Returns that line."""
    capfd.readouterr()
    try:
        code = rlver.main([str(word) for word in argv])
    except SystemExit as stop:
        code = stop.code
    said = capfd.readouterr().err
    assert code == 2, said
    assert said.count("\n") == 1 and "Traceback" not in said, said
    return said


# ----------------------------------------------------------------------------------------- settings


def test_help_explains_every_flag_and_names_both_defaults(capsys):
    """`--help` is the manual: a flag without a text, or a default that is not the one in force,
    sends people to the source."""
    parser = make_parser()
    with pytest.raises(SystemExit) as stop:
        rlver.main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert stop.value.code == 0 and "toy / real model" in said
    for action in parser._actions:
        assert action.help.partition("(default")[0].strip(), action.dest
        assert action.option_strings[-1] in said
    for setting in dataclasses.fields(Settings):
        texts = [action.help for action in parser._actions if action.dest == setting.name]
        # the one setting without a flag: the model says how long its context is
        assert texts or setting.name == "context"
        for model in ("toy", "some/dir"):
            for algo in ("ppo", "grpo"):
                for think in (True, None):
                    value = getattr(
                        resolve_settings(dict(model=model, algo=algo, think=think)), setting.name
                    )
                    if (
                        texts
                        and value
                        and setting.metadata["toy"] is not setting.default
                        and (algo, setting.name) != ("ppo", "group_size")
                    ):
                        assert str(value) in texts[0].partition("(default: ")[2], texts[0]


@pytest.mark.parametrize("algo", ["ppo", "grpo"])
def test_defaults_of_a_real_model_are_the_papers(algo):
    """RLVER appendix B and the released script: who trains a real model and names no flag gets the
    paper's run, not the toy's."""
    cfg = resolve_settings(vars(make_parser().parse_args(["--algo", algo, "--model", "some/dir"])))
    paper = dict(
        steps=350,
        max_turns=8,
        lr=1e-6,
        critic_lr=5e-6,
        warmup=50,
        gamma=1.0,
        lam=1.0,
        clip_eps=0.2,
        value_clip=0.5,
        kl_coef=0.0,
        entropy_coef=0.001,
        temperature=1.0,
        minibatches=1,
        eval_size=100,
        max_tokens=5000,
        batch_size={"ppo": 32, "grpo": 32 * 4}[algo],
        group_size={"ppo": 1, "grpo": 4}[algo],
    )
    assert {key: getattr(cfg, key) for key in paper} == paper
    assert cfg.think is False


def test_ppo_and_grpo_get_the_same_dialogues_and_the_same_number_of_updates():
    """Defect 22: eight updates a step in one mode and one in the other make a comparison of them
    worthless."""
    for model in ("toy", "some/dir"):
        for think in ([], ["--think"]):
            both = [
                resolve_settings(
                    vars(
                        make_parser().parse_args(
                            ["--algo", algo, "--model", model, "--batch-size", "32", *think]
                        )
                    )
                )
                for algo in ("ppo", "grpo")
            ]
            assert (
                both[0].minibatches == both[1].minibatches
                and both[0].batch_size == both[1].batch_size == 32
            )


# ---------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "flags, word",
    [
        ("--algo dpo", "--algo"),
        ("--kl-estimator k4", "--kl-estimator"),
        ("--difficulty hard", "--difficulty"),
        ("--lang fr", "--lang"),
        ("--steps -1", "--steps"),
        ("--batch-size 0", "--batch-size"),
        ("--lr -1e-3", "--lr"),
        ("--lr nan", "--lr"),
        ("--temperature 0", "--temperature"),
        ("--gamma 1.5", "--gamma"),
        ("--kl-coef -0.1", "--kl-coef"),
        ("--seed one", "--seed"),
        ("--learning-rate 1", "--learning-rate"),
        ("--batch-size 6 --group-size 4", "--group-size 4"),
        ("--algo grpo --kl-coef 0.1 --kl-estimator k1", "k1"),
        ("--algo ppo --batch-size 2 --minibatches 3", "--minibatches 3"),
        ("--simulator gpt", "--simulator gpt"),
        ("--lang zh", "--lang zh"),
        ("--template-args {", "--template-args"),
        ("--template-args [1]", "a JSON object is needed"),
        ("--profiles a.jsonl", "a.jsonl"),
        ("--profiles good.jsonl missing.jsonl", "missing.jsonl"),
        ("--profiles empty.jsonl", "empty.jsonl"),
        ("--profiles half.jsonl", "half.jsonl, line 3"),
        ("--profiles fieldless.jsonl", "fieldless.jsonl, line 2: field 'task'"),
        ("--profiles one.jsonl", "one.jsonl"),
        ("--profiles chinese.jsonl", "profile"),
        ("--profiles good.jsonl chinese.jsonl", "profile"),
        ("--profiles good.jsonl good.jsonl good.jsonl", "--profiles"),
        ("--out file", "--out file"),
        ("--resume nothing", "--resume nothing"),
        ("--resume .", "--resume ."),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(
    flags, word, tiny_dir, tmp_path, monkeypatch, capfd
):
    """Exit code 2 and one line that names the flag, the file, the line, the field; no traceback, no
    directory, no file changed. A run that dies of bad input after an hour of setting up, or leaves
    an empty directory that the next try trips over, costs more than the mistake."""
    monkeypatch.chdir(tmp_path)
    good = people(Path("good.jsonl"), count=10).read_text().splitlines(keepends=True)
    Path("one.jsonl").write_text(good[0])
    Path("empty.jsonl").write_text("\n")
    Path("half.jsonl").write_text("".join(good[:3])[:-40])
    Path("fieldless.jsonl").write_text(
        good[0] + json.dumps({k: v for k, v in json.loads(good[1]).items() if k != "task"}) + "\n"
    )
    Path("chinese.jsonl").write_text(
        "".join(
            json.dumps(
                {
                    "id": f"p-{i}",
                    "player": "* 姓名：林小雨",
                    "scene": "**事件起因**\n\n同事抢了她的功劳。",
                    "main_cha": "被动型",
                    "cha_group": ["内向"],
                    "task": "你希望对方用心倾听你的情绪宣泄",
                },
                ensure_ascii=False,
            )
            + "\n"
            for i in range(4)
        ),
        encoding="utf-8",
    )
    Path("file").write_text("not a directory")
    before = files(".")
    assert word in refuse(capfd, "--model", tiny_dir, "--steps", 1, *flags.split())
    assert files(".") == before


@pytest.mark.parametrize(
    "lacking, word",
    [
        pytest.param("model.safetensors", "model.safetensors", id="no weights"),
        pytest.param("chat_template.jinja", "chat template", id="no chat template"),
        pytest.param("half", "half", id="half a weights file"),
        pytest.param(None, "absent", id="not there"),
    ],
)
def test_a_model_directory_that_cannot_be_used_is_one_line(
    lacking, word, tiny_dir, tmp_path, monkeypatch, capfd
):
    """An interrupted download has a config and no weights, or half of them; a base model has no
    chat template. Say which it is."""
    monkeypatch.chdir(tmp_path)
    place = tmp_path / (lacking or "absent")
    if lacking:
        shutil.copytree(tiny_dir, place)
        weights = place / "model.safetensors"
        if lacking == "half":
            weights.write_bytes(weights.read_bytes()[: len(weights.read_bytes()) // 2])
        else:
            (place / lacking).unlink()
    line = refuse(capfd, "--model", place, *suited(SMALL), "--out", "out")
    assert str(place) in line and word in line


def test_a_bad_model_leaves_no_run_behind(tmp_path, capfd):
    """With a config.json left behind, the corrected command is refused too: "--out exists and is
    not empty"."""
    refuse(capfd, "--model", tmp_path / "absent", "--out", tmp_path / "out")
    assert files(tmp_path) == {}


def test_an_output_directory_that_cannot_be_made_is_one_line(tiny_dir, tmp_path, capfd):
    """A place below a file, a full or read-only disk: not a reason for a traceback."""
    (tmp_path / "file").write_text("not a directory")
    assert "out" in refuse(
        capfd, "--model", tiny_dir, *suited(SMALL), "--out", tmp_path / "file" / "out"
    )


@pytest.mark.slow
def test_another_run_is_never_written_over(whole, tiny_dir, capfd):
    """Three days of dialogues must survive an arrow-up and a return."""
    out = whole("grpo")
    before = files(out)
    assert "--resume" in refuse(capfd, "--model", tiny_dir, *suited(SMALL), "--out", out)
    assert files(out) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--lr 1",
        "--algo ppo",
        "--think",
        "--seed 1",
        "--temperature 0.5",
        "--out elsewhere",
        "--batch-size 8",
    ],
)
def test_a_resumed_run_keeps_its_settings(flags, whole, tmp_path, monkeypatch, capfd):
    """Half a run at one temperature and half at another is neither. The flag in the way is named;
    nothing is written."""
    monkeypatch.chdir(tmp_path)
    out = whole("grpo")
    before = files(out)
    assert flags.split()[0] in refuse(capfd, "--resume", out, *flags.split())
    assert files(out) == before and files(tmp_path) == {}


@pytest.mark.slow
def test_fewer_steps_than_are_done_are_refused(whole, tmp_path, capfd):
    """Steps cannot be taken back; and the refusal must not be remembered, or the run refuses to go
    on for good."""
    out = shutil.copytree(whole("grpo"), tmp_path / "out")
    before = files(out)
    assert "--steps 3" in refuse(capfd, "--resume", out, "--steps", 3)
    assert files(out) == before


def test_a_checkpoint_is_no_run(whole, capfd):
    """`--resume runs/x/checkpoint-000040` is the obvious slip, and a checkpoint holds a
    config.json: the model's."""
    assert "there is no run here" in refuse(capfd, "--resume", whole("grpo") / "checkpoint-000004")


# -------------------------------------------------------------------------------- what a run leaves


@pytest.mark.slow
def test_metrics_have_one_line_per_step_and_all_their_keys(whole):
    """A log with a step twice, or without the health metrics, cannot be plotted or trusted."""
    for algo in ("grpo", "ppo"):
        lines = rows(whole(algo) / "metrics.jsonl")
        assert [line["step"] for line in lines] == [1, 2, 3, 4]
        for line in lines:
            assert METRICS <= set(line)
            # no critic, nothing to explain
            assert (line["explained_variance"] is None) == (algo == "grpo")
            assert line["logp_gap"] < 1e-4 and line["dropped"] == 0 and line["seconds"] > 0
            assert 0 < line["tokens_trained"] == line["tokens_sampled"] <= 4 * 3 * 6
            assert line["kl"] > 0  # of two mini-batches the second has a ratio that is not 1


def test_dialogues_are_written_word_for_word(whole):
    """Whoever doubts a reward must be able to read what was said for it: every dialogue, with the
    analysis behind each change."""
    lines = rows(whole("grpo") / "dialogues.jsonl")
    assert [(line["step"], line["split"]) for line in lines] == [
        (step, split)
        for step, split in (
            (0, "heldout"),
            (1, "train"),
            (2, "train"),
            (3, "train"),
            (3, "heldout"),
            (4, "train"),
            (4, "heldout"),
        )
        for _ in range(4)
    ]
    known = {split: {p.id: p for p in toy_profiles(split)} for split in ("train", "heldout")}
    for line in lines:
        assert {
            "step",
            "split",
            "profile_id",
            "group",
            "first_line",
            "turns",
            "ended",
            "reward",
        } <= set(line)
        assert line["profile_id"] in known[line["split"]] and 1 <= len(line["turns"]) <= 3
        emotion = 30
        for turn in line["turns"]:
            assert set(turn) == {
                "reply",
                "thought",
                "user",
                "analysis",
                "change",
                "mark",
                "emotion",
            }
            assert (
                turn["change"] == mood(turn["reply"])[0]
                and f"Change {turn['mark']}: {turn['change']:+d}" in turn["analysis"]
            )
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
    known = {p.id: p for p in toy_profiles("train") + toy_profiles("heldout")}
    again = consistency(out / "dialogues.jsonl", make_simulator("toy"), known)
    assert (
        again["dialogues"] == 28 < again["turns"]
        and again["emotion"] == again["final"] == 1
        and not again["found"]
    )
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


@pytest.mark.slow
def test_a_malformed_thought_is_worth_nothing_and_never_sent(tiny_dir, tmp_path):
    """RLVER 2.3, defect 26. A random policy never closes a thought: every dialogue ends at its
    first reply, with reward 0, and the user was told nothing."""
    assert go(tiny_dir, tmp_path / "out", "--think", "--steps", 1) == 0
    for line in rows(tmp_path / "out" / "dialogues.jsonl"):
        [turn] = line["turns"]
        assert (line["ended"], line["reward"], turn["user"], turn["analysis"], turn["emotion"]) == (
            "malformed",
            0,
            None,
            None,
            None,
        )
        assert turn["reply"]  # as it was sampled, for whoever wants to know what went wrong
    [row] = metrics(tmp_path / "out")
    assert (row["malformed"], row["failure"], row["reward"], row["emotion"]) == (100, 100, 0, 0)


def test_the_summary_is_what_the_dialogues_say(whole):
    """A score that cannot be computed again from the log is a claim. Before and after, from
    dialogues.jsonl alone."""
    out = whole("grpo")
    told = json.loads((out / "summary.json").read_text())
    assert set(told) >= {"before", "after", "steps", "seconds", "tokens", "peak_rss_mb"}
    assert set(told["seconds"]) == {
        "toy_policy",
        "rollout",
        "simulator",
        "update",
        "evaluate",
        "total",
    }
    assert told["steps"] == 4 and told["peak_rss_mb"] > 0
    for name, step in (("before", 0), ("after", 4)):
        lines = [
            line
            for line in rows(out / "dialogues.jsonl")
            if (line["split"], line["step"]) == ("heldout", step)
        ]
        final = [line["turns"][-1]["emotion"] for line in lines]
        assert told[name] == pytest.approx(
            {
                "dropped": 0,
                "unreadable": 0,
                "score": mean(final),
                "stderr": stdev(final) / len(final) ** 0.5,
                "success": 100 * mean(e >= 100 for e in final),
                "failure": 100 * mean(e < 10 for e in final),
                "malformed": 0,
                "n": 4,
            }
        )
        assert told[name]["score"] == pytest.approx(mean(100 * line["reward"] for line in lines))
    for key in ("sampled", "trained"):
        assert told["tokens"][key] == sum(row[f"tokens_{key}"] for row in metrics(out))


def test_the_checkpoint_is_a_model_that_holds_the_trained_weights(whole, tiny_dir):
    """What is trained and what is saved are two things until somebody compares them; transformers
    must load it without this code. The engine, a third copy, is compared too. Two checkpoints are
    kept."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = whole("grpo") / "checkpoint-000004"
    models = whole.trainers["grpo"].models
    saved, start = (AutoModelForCausalLM.from_pretrained(d).state_dict() for d in (place, tiny_dir))
    for held in (models.policy.model.state_dict(), models.engine.model.state_dict()):
        assert set(saved) == set(held) == set(start)
        assert all(torch.equal(saved[name], held[name]) for name in saved)
    # every tensor has been trained
    assert not any(torch.equal(saved[name], start[name]) for name in saved)
    words = [AutoTokenizer.from_pretrained(d) for d in (place, tiny_dir)]
    chat = [{"role": "user", "content": "Hm. <think> Grüße"}]
    assert words[0](chat[0]["content"])["input_ids"] == words[1](chat[0]["content"])["input_ids"]
    assert words[0].apply_chat_template(chat, tokenize=False) == words[1].apply_chat_template(
        chat, tokenize=False
    )
    assert sorted(p.name for p in place.parent.glob("*checkpoint*")) == [
        "checkpoint-000002",
        "checkpoint-000004",
    ]


@pytest.mark.slow
def test_config_picture_and_checkpoints_are_there(whole):
    """config.json says what was run, defaults included, so that it can be run again; the picture
    is one."""
    out = whole("ppo")
    cfg = json.loads((out / "config.json").read_text())
    assert (
        cfg["algo"],
        cfg["lr"],
        cfg["gamma"],
        cfg["entropy_coef"],
        cfg["max_turns"],
        cfg["think"],
    ) == ("ppo", 2e-3, 1.0, 0.001, 3, False)
    assert (out / "learning_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert sorted(files(out)) == sorted(
        [name for name in files(out) if name.startswith("checkpoint-")]
        + [
            # and no scratch file
            "config.json",
            "dialogues.jsonl",
            "heldout.json",
            "learning_curve.png",
            "metrics.jsonl",
            "report.html",
            "start.json",
            "summary.json",
        ]
    )


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
    assert (
        told["before"] == told["after"]
        and told["before"]["n"] == 2
        and told["steps"] == told["tokens"]["sampled"] == 0
    )
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


@pytest.mark.slow
def test_all_log_probs_are_those_of_the_sampling_temperature(tiny_dir, tmp_path):
    """A forgotten temperature: scored at temperature 1 what was sampled at 0.7, and pi_old is no
    policy that ever acted."""
    assert go(tiny_dir, tmp_path / "out", "--temperature", 0.7, "--steps", 2) == 0
    assert all(row["logp_gap"] < 1e-4 for row in rows(tmp_path / "out" / "metrics.jsonl"))


def test_every_user_is_visited_once_per_pass():
    """Drawing with replacement would train on some users three times and on a third never. And a
    step's users follow from its number alone, or a resumed run would meet others."""
    folk = list(range(7))
    visits = [who for step in range(1, 22) for who in profiles_of_step(folk, 3, seed=5, step=step)]
    passes = [visits[i : i + 7] for i in range(0, 63, 7)]
    assert all(sorted(one) == folk for one in passes)
    assert len({tuple(one) for one in passes}) > 7  # each in an order of its own
    assert profiles_of_step(folk, 3, 5, 20) == visits[57:60] != profiles_of_step(folk, 3, 6, 20)
    assert sorted(profiles_of_step(folk, 14, 5, 1)) == sorted(folk * 2)  # more dialogues than users


# ------------------------------------------------------------------------- a run that was cut short


def cut_at(number, patch, error=KeyboardInterrupt, middle=lambda line: len(line) // 2):
    """The power goes in the middle of the `number`-th line that the run appends."""
    append, count = rundir.append_line, iter(range(1, 10**6))

    def half(path, value):
        if next(count) < number:
            return append(path, value)
        line = json.dumps(value, ensure_ascii=False).encode()
        with open(path, "ab") as file:
            file.write(line[: middle(line)])
        raise error

    patch.setattr(rundir, "append_line", half)


def alike(out, whole):
    """Resumed and uninterrupted: the same numbers, and the same words byte for byte."""
    assert metrics(out) == metrics(whole)
    assert (out / "dialogues.jsonl").read_bytes() == (whole / "dialogues.jsonl").read_bytes()
    assert summary(out) == summary(whole)
    weights = [
        (place / "checkpoint-000004" / "model.safetensors").read_bytes() for place in (out, whole)
    ]
    assert weights[0] == weights[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "algo, line",
    [
        pytest.param("grpo", 3, id="grpo, in the first evaluation: no checkpoint yet"),
        pytest.param("grpo", 6, id="grpo, in step 1"),
        pytest.param(
            "grpo",
            19,
            id="grpo, in step 3, which stands in dialogues.jsonl but not in metrics.jsonl",
        ),
        pytest.param("grpo", 31, id="grpo, in the evaluation after"),
        pytest.param("ppo", 19, id="ppo, in step 3: critic and optimizers too"),
    ],
)
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(
    algo, line, whole, tiny_dir, tmp_path, monkeypatch, capfd
):
    """Runs are killed; what goes on must be the same run: weights, both optimizers with their
    moments, the critic, the luck, the users' order, and no line twice. Ctrl-C says how to go on."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        cut_at(line, patch)
        assert go(tiny_dir, out, "--algo", algo) == 130
    said = capfd.readouterr().err
    assert f"python rlver.py --resume {out}\n" in said and "Traceback" not in said
    assert not (out / "summary.json").exists()
    assert go_on(out) == 0
    alike(out, whole(algo))


@pytest.mark.slow
def test_the_first_ratio_is_checked_at_the_start_and_where_a_run_goes_on(
    tiny_dir, tmp_path, monkeypatch
):
    """In between, the first mini-batch gets no pass of its own for log pi_old."""
    seen, update = [], rlver.grpo_update
    monkeypatch.setattr(
        rlver,
        "grpo_update",
        lambda *args, **more: seen.append(more["check_ratio"]) or update(*args, **more),
    )
    assert go(tiny_dir, tmp_path / "out", "--steps", 2) == 0
    assert go_on(tmp_path / "out", "--steps", 3) == 0
    assert seen == [True, False, True]


@pytest.mark.slow
def test_an_interrupt_inside_a_dialogue_is_an_interrupt(
    whole, tiny_dir, tmp_path, monkeypatch, capfd
):
    """Ctrl-C mostly comes while dialogues are held, deep inside asyncio, with others waiting for
    their turn: it must not be taken for a failure of the simulator or of the engine, and not
    hang."""
    calls, answer = iter(range(1000)), toy.ScriptedModel.__call__

    async def tired(self, prompt):
        if next(calls) == 30:  # in step 1: the evaluation before asks at most 4 * (1 + 3 + 2) times
            signal.raise_signal(signal.SIGINT)
        return await answer(self, prompt)

    with monkeypatch.context() as patch:
        patch.setattr(toy.ScriptedModel, "__call__", tired)
        assert go(tiny_dir, tmp_path / "out") == 130
    said = capfd.readouterr().err
    assert f"--resume {tmp_path / 'out'}\n" in said and "Traceback" not in said
    assert len(rows(tmp_path / "out" / "dialogues.jsonl")) == 4
    assert go_on(tmp_path / "out") == 0
    alike(tmp_path / "out", whole("grpo"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_falls_into_a_destructor_is_not_lost(
    tiny_dir, tmp_path, monkeypatch, capfd
):
    """Python prints an exception of a destructor and goes on: a run was told to stop, and trained
    for another five minutes."""
    calls, answer = iter(range(1000)), toy.ScriptedModel.__call__

    class Falls:
        def __del__(self):
            signal.raise_signal(signal.SIGINT)

    async def tired(self, prompt):
        if next(calls) == 30:
            Falls()
        return await answer(self, prompt)

    monkeypatch.setattr(toy.ScriptedModel, "__call__", tired)
    assert go(tiny_dir, tmp_path / "out") == 130
    assert f"--resume {tmp_path / 'out'}\n" in capfd.readouterr().err
    assert len(rows(tmp_path / "out" / "metrics.jsonl")) == 1


def test_an_interrupt_while_the_toys_policy_is_made_leaves_a_run(
    tiny_dir, tmp_path, monkeypatch, capfd
):
    """The first start takes a minute before anything is trained: a Ctrl-C in it should cost nothing
    but that minute."""

    def busy(think, quiet):
        raise KeyboardInterrupt

    monkeypatch.setattr(toy, "base_policy", busy)
    assert rlver.main(suited([*SMALL, "--steps", 0, "--out", tmp_path / "out"])) == 130
    assert f"--resume {tmp_path / 'out'}\n" in capfd.readouterr().err
    monkeypatch.setattr(toy, "base_policy", lambda think, quiet: tiny_dir)
    assert go_on(tmp_path / "out") == 0
    assert summary(tmp_path / "out")["after"]["n"] == 4


def test_a_line_cut_within_a_letter_is_only_a_cut_line(whole, tmp_path):
    """A power cut knows bytes, not letters: half a Chinese character at the end of the log must not
    make the run unresumable."""
    out = shutil.copytree(whole("grpo"), tmp_path / "out")
    for name in ("metrics.jsonl", "dialogues.jsonl"):
        with open(out / name, "ab") as file:
            file.write('{"step": 5, "user": "好'.encode()[:-1])
    (out / "summary.json").unlink()  # the power went before the end
    assert go_on(out) == 0
    alike(out, whole("grpo"))


@pytest.mark.slow
def test_a_log_that_lost_its_end_is_not_filled_up(whole, tmp_path, capfd):
    """A checkpoint may reach the disk before the log does. What is lost is lost: say so in a line
    that names the file, and touch nothing, above all write no hole into the log (which is what
    cutting a file to more than its length does) that no JSON reader passes."""
    out = shutil.copytree(whole("grpo"), tmp_path / "out")
    (out / "summary.json").unlink()  # a finished run would not go on at all
    for name in ("dialogues.jsonl", "metrics.jsonl"):
        log = (out / name).read_bytes()
        (out / name).write_bytes(log[:1000])
        before = files(out)
        assert f"{name} has lost its end (1000 bytes" in refuse(capfd, "--resume", out)
        assert files(out) == before
        (out / name).write_bytes(log)
    assert go_on(out) == 0  # put back, as the line says
    alike(out, whole("grpo"))


@pytest.mark.slow
def test_a_checkpoint_that_could_not_be_written_leaves_the_one_before(
    whole, tiny_dir, tmp_path, monkeypatch, capfd
):
    """Disk full while saving: write beside and rename. Written in place, the run's only good state
    would be the first thing lost. And it is told in one line: a full disk is no bug of ours."""
    from transformers import AutoModelForCausalLM

    save, calls, out = torch.save, iter(range(9)), tmp_path / "out"

    def full(value, path):
        if next(calls) < 2:
            return save(value, path)
        Path(path).write_bytes(b"half")
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        assert go(tiny_dir, out) == 1  # by the third save, at step 4
    line = capfd.readouterr().err.splitlines()[-1]
    assert "self-check" not in line and "make room, then: python rlver.py --resume" in line
    assert "checkpoint-000004 could not be written (no space left on device)" in line
    assert [p.name for p in rundir.checkpoints(out)] == ["checkpoint-000000", "checkpoint-000002"]
    AutoModelForCausalLM.from_pretrained(out / "checkpoint-000002")
    assert go_on(out) == 0
    alike(out, whole("grpo"))


@pytest.mark.slow
def test_steps_can_be_raised(whole, half, tmp_path):
    """Two steps, then two more, are four steps."""
    out = shutil.copytree(half, tmp_path / "out")
    assert go_on(out, "--steps", 4) == 0
    alike(out, whole("grpo"))


@pytest.mark.slow
def test_what_changes_no_result_may_change_when_a_run_goes_on(
    whole, half, tmp_path, monkeypatch, capfd
):
    """A run that ran out of memory, or whose simulator was asked too much, must be able to go on.
    The new values are in force and are remembered; what is learned is the same to rounding. Beside
    them what does change the result is refused as ever."""
    out, seen = shutil.copytree(half, tmp_path / "out"), {}
    new = {
        "tokens_per_gpu": 40,
        "save_every": 1,
        "keep": 1,
        "rollout_timeout": 600.0,
        "simulator_concurrency": 3,
    }
    flags = [
        word for key, value in new.items() for word in ("--" + key.replace("_", "-"), str(value))
    ]
    before = files(out)
    assert "--lr cannot change" in refuse(capfd, "--resume", out, *flags, "--lr", 1)
    assert files(out) == before

    def listen(owner, name, key, take):
        function = getattr(owner, name)

        def heard(*args, **more):
            seen.setdefault(key, []).append(take(args, more))
            return function(*args, **more)

        monkeypatch.setattr(owner, name, heard)

    listen(rlver, "split_batch", "tokens_per_gpu", lambda args, more: args[3])
    listen(rundir.RunDir, "save_checkpoint", "save_every", lambda args, more: args[1]["step"])
    listen(rlver, "rollout", "rollout_timeout", lambda args, more: more["timeout"])
    listen(
        simulator, "make_simulator", "simulator_concurrency", lambda args, more: more["concurrency"]
    )
    assert go_on(out, "--steps", 4, *flags) == 0
    assert seen == {
        "tokens_per_gpu": [40] * 2,
        "save_every": [3, 4],
        "rollout_timeout": [600.0] * 4,
        "simulator_concurrency": [3],
    }
    assert [p.name for p in rundir.checkpoints(out)] == ["checkpoint-000004"]
    config = json.loads((out / "config.json").read_text())
    assert {key: config[key] for key in new} == new and config["steps"] == 4
    assert rows(out / "dialogues.jsonl") == rows(whole("grpo") / "dialogues.jsonl")
    for row, usual in zip(metrics(out), metrics(whole("grpo")), strict=True):
        for key in row.keys() | usual.keys():
            assert row[key] == (
                usual[key] if usual[key] is None else pytest.approx(usual[key], rel=1e-3, abs=1e-5)
            ), key


@pytest.mark.slow
def test_raised_steps_are_remembered(whole, half, tmp_path, monkeypatch, capfd):
    """Raised to 4, interrupted in step 3: the command that is printed must lead to step 4, not to
    an early end at 3."""
    out = shutil.copytree(half, tmp_path / "out")
    with monkeypatch.context() as patch:
        cut_at(3, patch)
        assert go_on(out, "--steps", 4) == 130
    [command] = re.findall(r"python rlver.py (--resume .*)\n", capfd.readouterr().err)
    assert rlver.main(command.split()) == 0
    assert metrics(out) == metrics(whole("grpo"))


def test_a_finished_run_can_be_resumed_without_harm(whole, tmp_path):
    """Resuming once too often is no mistake. A dialogue that stands in the log twice would count
    twice in whatever reads it."""
    out = shutil.copytree(whole("grpo"), tmp_path / "out")
    assert go_on(out) == 0
    alike(out, whole("grpo"))


# -------------------------------------------------------------------------------------- self-checks


def stopped(capfd, code):
    """The one line of a run that a self-check has stopped."""
    assert code == 1
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("rlver.py: ")]
    assert "self-check" in line
    return line


@pytest.mark.parametrize(
    "forgotten",
    [
        "embed_tokens|lm_head",
        pytest.param(r"layers\.0\.mlp\.down_proj", marks=pytest.mark.slow),
        pytest.param(r"model\.norm", marks=pytest.mark.slow),
    ],
)
def test_weights_that_did_not_reach_the_engine_stop_the_run(
    forgotten, tiny_dir, tmp_path, monkeypatch, capfd
):
    """Defect 27: "step 1 normal, from step 2 pure gibberish". A sync that misses one tensor (the
    tied output layer is the usual one) raises no error anywhere; only comparing log-probs
    shows it."""
    load = TorchEngine.load_weights
    monkeypatch.setattr(
        TorchEngine,
        "load_weights",
        lambda self, named: load(
            self, [(name, weights) for name, weights in named if not re.search(forgotten, name)]
        ),
    )
    line = stopped(capfd, go(tiny_dir, tmp_path / "out", "--warmup", 0))
    assert "engine" in line and "weights" in line
    assert [row["step"] for row in metrics(tmp_path / "out")] == [1]


def test_nan_weights_stop_the_run(tiny_dir, tmp_path, capfd):
    """A learning rate from another world: the second step has no numbers left, and says so instead
    of training on."""
    assert "nan" in stopped(capfd, go(tiny_dir, tmp_path / "out", "--lr", 1e30)).lower()


def test_a_nan_loss_stops_the_run_and_spares_the_weights(tiny_dir, tmp_path, monkeypatch, capfd):
    """One NaN in the loss is NaN in every weight after the step. Stopped before it, the last
    checkpoint is still good."""
    import policy

    scores = policy.token_scores

    def spoilt(*args):
        log_probs, entropy = scores(*args)
        return log_probs, entropy * float("nan")

    monkeypatch.setattr(policy, "token_scores", spoilt)
    assert "nan" in stopped(capfd, go(tiny_dir, tmp_path / "out")).lower()
    assert not (tmp_path / "out" / "metrics.jsonl").exists()


def test_a_broken_group_stops_the_run(tiny_dir, tmp_path, monkeypatch, capfd):
    """Defect 1 makes such groups: a neighbour's user behind one dialogue. Mean and std over
    different people mean nothing."""
    for broken in (
        Episode("ann", 0, "Hello."),
        Episode("ben", 0, "Hello."),
        Episode("ann", 0, "Hi."),
    ):
        episodes = [Episode("ann", 0, "Hello."), Episode("ben", 1, "Hello."), broken]
        if broken.profile_id == "ann" and broken.first_line == "Hello.":
            check_groups(episodes)
        else:
            with pytest.raises(SelfCheckFailed, match="group 0"):
                check_groups(episodes)
    copy, neighbours = User.copy, iter(toy_profiles("train"))

    def mixed_up(self, name):
        user = copy(self, name)
        user.profile = next(neighbours)
        return user

    monkeypatch.setattr(User, "copy", mixed_up)
    assert "group" in stopped(capfd, go(tiny_dir, tmp_path / "out"))


def garbage(patch, when):
    """The user's model answers garbage to f_emo wherever `when(the last reply)`."""
    answer = toy.ScriptedModel.__call__

    async def confused(self, prompt):
        last = json.loads(re.search(r"<dialogue>\s*(.*?)\s*</dialogue>", prompt, re.S).group(1))[
            -1:
        ]
        if "<emotion_level>" not in prompt and when(last[0]["text"], prompt):
            return "I would rather not say."
        return await answer(self, prompt)

    patch.setattr(toy.ScriptedModel, "__call__", confused)


@pytest.mark.slow
def test_a_dialogue_whose_simulator_fails_is_dropped_and_counted(tiny_dir, tmp_path, monkeypatch):
    """Defect 17 asks for ever. Here a failure costs its own dialogue: no guessed emotion, the rest
    of its group trains, the metrics say how many are missing."""
    garbage(monkeypatch, lambda reply, prompt: zlib.crc32(reply.encode()) % 37 == 0)
    assert (
        go(
            tiny_dir,
            tmp_path / "out",
            "--batch-size",
            32,
            "--group-size",
            4,
            "--eval-size",
            16,
            "--steps",
            1,
        )
        == 0
    )
    lines, torn = rows(tmp_path / "out" / "dialogues.jsonl"), 0
    for row in metrics(tmp_path / "out"):
        rest = [line for line in lines if (line["step"], line["split"]) == (row["step"], "train")]
        assert 0 < row["dropped"] == 32 - len(rest) <= 32 / 5
        assert row["reward"] == pytest.approx(mean(line["reward"] for line in rest))
        assert row["tokens_trained"] == row["tokens_sampled"] > 0
        sizes = [sum(line["group"] == group for line in rest) for group in range(8)]
        torn += sum(0 < size < 4 for size in sizes)
    assert torn  # some group went on with less than its four
    assert not any(
        zlib.crc32(turn["reply"].encode()) % 37 == 0 for line in lines for turn in line["turns"]
    )
    # and no score is made up for the held-out ones either
    assert summary(tmp_path / "out")["before"]["n"] < 16


@pytest.mark.slow
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_a_simulator_that_fails_everywhere_pauses_the_run(
    split, tiny_dir, tmp_path, monkeypatch, capfd, whole
):
    """A dead server: a batch of nothing must not become a mean of nothing. Exit code 75, what there
    is is saved, and when the user is well again the run goes on as if nothing had been."""
    persons = toy.PEOPLE[split]
    garbage(
        monkeypatch,
        lambda reply, prompt: (
            re.search(r"My (\w+)", prompt.partition("<background>")[2]).group(1) in persons
        ),
    )
    assert go(tiny_dir, tmp_path / "out") == 75
    said = capfd.readouterr().err
    assert "in 4 of 4 dialogues nothing that the user's model said could be read" in said
    assert "no line 'End" in said
    # before the first evaluation is over there is no checkpoint
    assert ("the run is saved" in said) == (split == "train") != ("nothing is saved yet" in said)
    assert said.endswith(f"--resume {tmp_path / 'out'}\n") == (split == "train")
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
    monkeypatch.undo()
    assert go_on(tmp_path / "out") == 0
    alike(tmp_path / "out", whole("grpo"))


# ------------------------------------------------------------------------- slow: kills and learning

MOODY = (
    "import sys, zlib, toy; toy.judge = lambda reply, *_: (zlib.crc32(reply.encode()) % 21 - "
    "10, 'I am in a mood'); import rlver; sys.exit(rlver.main(sys.argv[1:]))"
)


# (algorithm, the file that says that the moment has come, its lines by then, the signal). Each
# costs a process that imports torch; so two are usual, and the others, the same the other way round
# among them, are soak.
KILLS = [
    ("ppo", "metrics.jsonl", 3, signal.SIGKILL),
    ("grpo", "metrics.jsonl", 1, signal.SIGINT),
    ("grpo", "config.json", 1, signal.SIGKILL),
    ("ppo", "dialogues.jsonl", 10, signal.SIGKILL),
    ("ppo", "config.json", 1, signal.SIGKILL),
    ("grpo", "dialogues.jsonl", 10, signal.SIGKILL),
    ("grpo", "metrics.jsonl", 3, signal.SIGKILL),
    ("ppo", "metrics.jsonl", 1, signal.SIGINT),
]


@pytest.mark.parametrize(
    "algo, name, size, kind",
    [
        pytest.param(*kill, marks=pytest.mark.slow if n < 2 else pytest.mark.soak)
        for n, kill in enumerate(KILLS)
    ],
)
def test_a_killed_run_goes_on(algo, name, size, kind, whole, tiny_dir, tmp_path):
    """SIGKILL, which no handler sees, at three moments of a process of its own; then half a line by
    hand in both logs, as after a power cut. And one SIGINT, as the terminal sends it."""
    # as many threads, the same sums
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(ROOT)}
    out = tmp_path / "killed"
    command = [
        sys.executable,
        "-c",
        MOODY,
        *suited(["--model", tiny_dir, *SMALL, "--algo", algo, "--out", out]),
    ]
    process = subprocess.Popen(
        command, env=env, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while process.poll() is None and not (
        (out / name).exists() and (out / name).read_bytes().count(b"\n") >= size
    ):
        time.sleep(0.001)
    process.send_signal(kind)
    said = process.communicate()[1].decode()
    assert process.returncode == (130 if kind == signal.SIGINT else -kind), (
        f"the run was over too soon\n{said}"
    )
    if kind == signal.SIGINT:
        assert f"--resume {out}" in said
    for log in ("metrics.jsonl", "dialogues.jsonl"):
        if (out / log).exists():
            with open(out / log, "a") as file:
                file.write('{"step": 1, "rew')
    assert go_on(out) == 0
    alike(out, whole(algo))


@pytest.mark.slow
def test_it_learns(learnt, monkeypatch):
    """The point of it all: on users with other people, events, feelings and wordings the score
    rises by far more than its error."""
    monkeypatch.setattr(toy, "judge", JUDGE)
    told = summary(learnt)
    assert told["after"]["score"] - told["before"]["score"] >= 30
    # some runs garble a thought in six for a few steps; such a dialogue has 0 points in the score
    assert told["after"]["malformed"] < 20 and told["after"]["n"] == 64
    known = {p.id: p for p in toy_profiles("train") + toy_profiles("heldout")}
    again = consistency(learnt / "dialogues.jsonl", make_simulator("toy"), known)
    assert again["dialogues"] == 2 * 64 + 20 * 64 and not again["found"]


@pytest.mark.slow
def test_a_weak_scorer_is_hacked(hacked, monkeypatch):
    """The lesson of `--simulator toy-weak`: the reward climbs, and a strict user who hears the same
    replies does not agree."""
    monkeypatch.setattr(toy, "judge", JUDGE)
    known = {p.id: p for p in toy_profiles("train") + toy_profiles("heldout")}
    scores = consistency(hacked / "dialogues.jsonl", make_simulator("toy"), known)["scores"]
    (weak_before, strict_before), (weak_after, strict_after) = scores[0], scores[26]
    assert weak_after - weak_before >= 30 and strict_after - strict_before <= 10
    assert any(
        "times as long" in line
        for line in json.loads((hacked / "summary.json").read_text())["warnings"]
    )


# -------------------------------------------------------- models, tokenizers and disks as they come


def other_model(tiny_tokenizer, path, change=lambda tokenizer: None, **settings):
    """A small model on disk whose tokenizer `change` has been at."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    change(tokenizer)
    make_tiny_model(tokenizer, **settings).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def no_system(tokenizer):
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System "
        "role not supported') }}{% endif %}" + tokenizer.chat_template
    )


@pytest.mark.parametrize(
    "change, settings, told",
    [
        (no_system, {}, "System role not supported"),
        (lambda t: None, {"vocab_size": 300}, "its tokenizer knows ids up to"),
        (lambda t: None, {"max_position_embeddings": 64}, "context of 64 tokens is too short"),
    ],
    ids=["system", "vocabulary", "context"],
)
def test_a_model_that_cannot_do_is_refused_in_one_line(
    change, settings, told, tiny_tokenizer, tmp_path, capfd
):
    model = other_model(tiny_tokenizer, tmp_path / "model", change, **settings)
    assert go(model, tmp_path / "out") == 2
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("rlver.py:")]
    assert told in line and not (tmp_path / "out").exists()


def test_a_context_that_the_first_line_fills_is_named(tiny_tokenizer, tmp_path, capfd):
    """Not "the simulator failed": nothing is wrong with the user but the length of what it says."""
    system = len(ChatFormat(tiny_tokenizer, load_prompt("policy_direct")).first_prompt(""))
    assert (
        go(
            other_model(tiny_tokenizer, tmp_path / "model", max_position_embeddings=system + 5),
            tmp_path / "out",
        )
        == 75
    )
    assert "leaves no room in the context" in capfd.readouterr().err


@pytest.mark.parametrize(
    "change, settings",
    [
        pytest.param(
            lambda t: setattr(t, "pad_token", None),
            {"pad_token_id": None},
            id="no pad token",
            marks=pytest.mark.slow,
        ),
        pytest.param(lambda t: setattr(t, "pad_token", t.eos_token), {}, id="pad is the end token"),
        pytest.param(
            lambda t: None, {"vocab_size": 400}, id="more rows than words", marks=pytest.mark.slow
        ),
    ],
)
def test_tokenizers_as_they_come(change, settings, tiny_tokenizer, tmp_path):
    """Padding is masked by where it came from, never by its id: so any id will do, the stop token's
    too, and that one is still trained, or no reply would learn to end. And real models have rows in
    their embedding that no word has; a random one samples them."""
    model = other_model(tiny_tokenizer, tmp_path / "model", change, **settings)
    assert (
        go(
            model,
            tmp_path / "out",
            "--max-tokens",
            40,
            "--max-turns",
            2,
            "--steps",
            1,
            "--eval-size",
            1,
        )
        == 0
    )
    [row] = metrics(tmp_path / "out")
    assert row["tokens_trained"] == row["tokens_sampled"] > 0 and row["logp_gap"] < 1e-5


def switched(tokenizer):
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<|im_start|>assistant\n{% endif %}",
        "<|im_start|>assistant\n{% if not enable_thinking "
        "%}<think>\n\n</think>\n\n{% endif %}{% endif %}",
    )


@pytest.mark.slow
def test_the_templates_own_switch_is_part_of_the_run(tiny_tokenizer, tmp_path, capfd):
    """--template-args reaches the template, is kept when the run goes on, cannot change then, and
    is known to evaluate.py."""
    model, out = other_model(tiny_tokenizer, tmp_path / "model", switched), tmp_path / "out"
    assert go(model, out, "--template-args", '{"enable_thinking": true}', "--steps", 1) == 0
    [row] = metrics(out)
    assert row["stray_thoughts"] == 0 and row["logp_gap"] < 1e-5
    assert json.loads((out / "config.json").read_text())["template_args"] == {
        "enable_thinking": True
    }
    assert go_on(out, "--steps", 2) == 0 and len(metrics(out)) == 2
    assert "--template-args cannot change" in refuse(
        capfd, "--resume", out, "--template-args", '{"enable_thinking": false}'
    )
    assert evaluate.open_policy(str(out)).settings["template_args"] == {"enable_thinking": True}
    # off: an opening that later turns do not see
    assert go(model, tmp_path / "off", "--steps", 1) == 0
    assert metrics(tmp_path / "off")[0]["logp_gap"] < 1e-5


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint_whole(tiny_dir, tmp_path):
    """A file may not grow beyond a limit, as on a full disk: a line of the log fits, the weights do
    not. One line, exit code 1, and the run goes on when there is room."""
    out = tmp_path / "out"
    assert go(tiny_dir, out, "--steps", 0) == 0
    state = (out / "checkpoint-000000" / "state.json").read_bytes()
    size = max(p.stat().st_size for p in (out / "checkpoint-000000").iterdir())
    limited = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({size // 2},) * "
        "2); import rlver; sys.exit(rlver.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, "--resume", str(out), "--steps", "2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert (
        "checkpoint-000002 could not be written" in done.stderr
        and "checkpoint-000000 is whole" in done.stderr
    )
    assert [p.name for p in rundir.checkpoints(out)] == ["checkpoint-000000"] and not list(
        out.glob(".checkpoint*")
    )
    assert (out / "checkpoint-000000" / "state.json").read_bytes() == state
    assert go_on(out, "--steps", 2) == 0 and [row["step"] for row in metrics(out)] == [1, 2]


@pytest.mark.slow
def test_the_critic_can_learn_first(tiny_dir, tmp_path):
    """A critic that starts at zero makes advantages that are mostly noise; --critic-warmup lets it
    learn for some steps while the policy only talks. Its own steps are taken."""

    def weights(steps, name):
        return load_file(tmp_path / name / f"checkpoint-{steps:06d}" / "model.safetensors")

    assert (
        go(
            tiny_dir,
            tmp_path / "a",
            "--algo",
            "ppo",
            "--critic-warmup",
            2,
            "--steps",
            3,
            "--save-every",
            1,
            "--keep",
            4,
            "--eval-size",
            1,
            "--eval-every",
            0,
            "--max-turns",
            2,
        )
        == 0
    )
    for steps, same in ((1, True), (2, True), (3, False)):
        start, now = weights(0, "a"), weights(steps, "a")
        assert all(torch.equal(start[name], now[name]) for name in start) == same
    places = [tmp_path / "a" / f"checkpoint-{steps:06d}" for steps in (0, 1)]
    saved = [torch.load(place / "trainer.pt", weights_only=True) for place in places]
    before, after = (state["critic"]["head.weight"] for state in saved)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("keep", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_as_many_checkpoints_are_kept_as_asked_for(keep, tiny_dir, tmp_path):
    assert (
        go(
            tiny_dir,
            tmp_path / "out",
            "--save-every",
            1,
            "--keep",
            keep,
            "--batch-size",
            2,
            "--max-turns",
            1,
            "--eval-size",
            1,
            "--eval-every",
            0,
        )
        == 0
    )
    assert [p.name for p in rundir.checkpoints(tmp_path / "out")] == [
        f"checkpoint-{step:06d}" for step in range(5 - keep, 5)
    ]


@pytest.mark.slow
def test_two_processes_never_work_in_one_run(half, tmp_path, capfd):
    """Resuming a run that is still going, or whose ranks outlived a kill, would have two writers
    undo each other's files."""
    out = shutil.copytree(half, tmp_path / "out")
    running = rlver.Trainer(Settings(**json.loads((out / "config.json").read_text())), out)
    before = {
        name: (out / name).read_bytes()
        for name in files(out)
        if "/" not in name and (out / name).is_file()
    }
    assert go_on(out, "--steps", 3) == 2
    assert "another process is at work in this run" in capfd.readouterr().err
    assert before == {
        name: (out / name).read_bytes()
        for name in files(out)
        if "/" not in name and (out / name).is_file()
    }
    running.close()
    assert go_on(out, "--steps", 3) == 0
