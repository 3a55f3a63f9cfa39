"""The settings of a run and bad input: what `--help` tells, the defaults, and what is refused in
one line, before anything is written."""

from support.settings import REAL, TOY, Settings, make_parser, resolve_settings

import dataclasses
import itertools
import json
import shutil
from pathlib import Path

import pytest

import rlver
from runs import SMALL, files, refuse, suited
from server import people

pytestmark = pytest.mark.usefixtures("moods")

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
        assert texts or setting.name == "context"  # which follows from the model
    texts = {action.dest: action.help for action in parser._actions}
    assert set(TOY) == set(REAL)
    for model, algo, think in itertools.product(("toy", "some/dir"), ("ppo", "grpo"), (True, None)):
        values = vars(resolve_settings(dict(model=model, algo=algo, think=think)))
        for name in TOY:
            assert str(values[name]) in texts[name].partition("default: ")[2], texts[name]


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
        ("--lr nan", "--lr"),
        ("--temperature 0", "--temperature"),
        ("--gamma 1.5", "--gamma"),
        ("--learning-rate 1", "--learning-rate"),
        ("--batch-size 6 --group-size 4", "--group-size 4"),
        ("--algo ppo --batch-size 6 --group-size 4", "--group-size 4"),
        ("--group-size 1", "--group-size 1"),  # its advantage would always be 0
        ("--algo grpo --kl-coef 0.1 --kl-estimator k1", "k1"),
        ("--algo ppo --reward delta --gamma 0.9", "--gamma 0.9"),
        ("--lang zh", "--lang zh"),
        ("--simulator feelings --lang zh", "--lang zh: the scripted user of --simulator feelings"),
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
        ("--out file/out", "file/out"),
        ("--model absent", "--model absent"),
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
        "--lora-rank 8",
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
