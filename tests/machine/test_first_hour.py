"""What a newcomer, a researcher with a key and a teacher stumbled over: wrong numbers without a
word, runs that could not go on, complaints in another program's language. Each test is one of
them."""

from support.results import intention_of

import shutil

import pytest

import evaluate
import rlver
import simulator
from conftest import ROOT
from result_files import measure
from runs import files, output_of, rows
from tools import chat
from tools import report as report_tool
from toy.words import NEEDS

SMALL = (
    "--steps 2 --batch-size 4 --group-size 2 --max-turns 2 --max-tokens 6 --eval-size 4 "
    "--save-every 1 --temperature 0.9 --difficulty challenging --lr 0.05 --warmup 0 "
    "--entropy-coef 0.1"
).split()


def go(model, out, *flags):
    return rlver.main(["--model", str(model), *SMALL, "--out", str(out), *map(str, flags)])


@pytest.fixture(scope="module")
def run(tiny_dir, tmp_path_factory, no_pictures):
    """A finished run of two steps, with settings that are nobody's default."""
    out = tmp_path_factory.mktemp("first") / "run"
    assert go(tiny_dir, out, "--save-every", 1) == 0
    return out


# ----------------------------------------------------------------------------- what is this policy?


def measured(path, *flags):
    assert measure(*flags, "--limit", 4, "--max-turns", 2, "--out", path) == 0
    return rows(path)


@pytest.mark.slow
def test_the_same_weights_are_the_same_policy_however_they_are_named(run, tmp_path):
    """A checkpoint was once measured without the settings of its run: 5 in place of 97, under the
    same name. A run, its newest checkpoint and a copy of that elsewhere are one policy; only the
    copy has another name."""
    newest = run / "checkpoint-000002"
    copied = shutil.copytree(newest, tmp_path / "copied")
    histories = []
    for name, label in ((run, newest), (newest, newest), (copied, copied)):
        dialogues = measured(tmp_path / f"{len(histories)}.jsonl", "--policy", name)
        wanted = {"temperature": 0.9, "max_tokens": 6, "difficulty": "challenging"}
        assert dialogues[0]["rlver"].items() >= {**wanted, "policy": str(label)}.items()
        histories.append([row["history"] for row in dialogues])
    assert histories[0] == histories[1] == histories[2]


@pytest.mark.slow
def test_results_of_other_settings_are_never_mixed(run, tiny_dir, tmp_path, monkeypatch, capfd):
    """The differing settings are named; nothing is written into a model directory."""
    monkeypatch.chdir(tmp_path)
    copied = shutil.copytree(run, tmp_path / "run")
    short = ["--limit", 2, "--max-turns", 2]
    measured(tmp_path / "r.jsonl", "--policy", copied)
    of_run = ["--policy", copied, *short, "--max-tokens"]
    text = output_of(capfd, 2, evaluate.main, *of_run, 5, "--out", tmp_path / "r.jsonl")
    assert "max_tokens 6 there, 5 here" in text
    for tokens, code in ((6, 0), (5, 2), (6, 0)):
        output_of(capfd, code, evaluate.main, *of_run, tokens)
        assert rows(copied / "benchmark.jsonl")[0]["rlver"]["max_tokens"] == 6
    before = files(tiny_dir)
    output_of(capfd, 0, evaluate.main, "--policy", tiny_dir, *short, "--max-tokens", 5)
    assert files(tiny_dir) == before
    assert len(list((tmp_path / "results").glob("*.jsonl"))) == 1


def test_what_is_not_there_is_said_in_plain_words(run, tmp_path, monkeypatch, capfd):
    """Not in twelve lines of a download library's retries."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, tmp_path / "runs" / "mine")
    text = output_of(capfd, 2, evaluate.main, "--policy", "runs/TYPO")
    assert text.count("\n") == 1 and "no such directory" in text
    (tmp_path / "empty").mkdir()
    for policy in ("empty", "runs/mine --think", "runs/mine --step 7"):
        flags = ["--policy", *policy.split()]
        assert output_of(capfd, 2, evaluate.main, *flags).count("\n") == 1


# ------------------------------------------------------------------------------- who are the users?


def test_a_real_simulator_is_never_given_the_toys_people(tiny_dir, tmp_path, capfd):
    """It would play people of forty words from a grammar, with Chinese prompts even, and the run
    would look like any other."""
    for main, flags in (
        (rlver.main, ["--model", tiny_dir, "--out", tmp_path / "out"]),
        (chat.main, ["--as-policy"]),
        (evaluate.main, ["--policy", tiny_dir]),
    ):
        text = output_of(capfd, 2, main, *flags, "--simulator", "openai:m@http://127.0.0.1:9/v1")
        assert text.count("\n") == 1 or main is evaluate.main
        assert "prompts/profiles/" in text and "train_profile.jsonl" in text
    assert not (tmp_path / "out").exists()


def test_every_shipped_person_has_a_named_need():
    """Chinese tasks in words of our own were "other" in 12 of 16 cases, so that the tables by
    intention were empty. The field decides; the words of the task are for released files."""
    for path in sorted((ROOT / "prompts" / "profiles").glob("*.jsonl")):
        for profile in simulator.load_profiles(path):
            if profile.target != "eq":  # who chats has none
                continue
            assert profile.need in NEEDS, profile.id
            assert intention_of(profile.task, profile.need)[0] == profile.need
            assert intention_of(profile.task)[0] in (profile.need, "other"), profile.id


# -------------------------------------------------------------------------- interrupted and resumed


@pytest.mark.slow
def test_a_finished_run_says_so(run, tmp_path, capfd):
    """It was evaluated a second time, and its last evaluation cut from the log before."""
    out = shutil.copytree(run, tmp_path / "run")
    before = files(out)
    text = output_of(capfd, 0, rlver.main, "--resume", out)
    assert "is finished" in text and "--steps N, N the total" in text
    assert files(out) == before
    assert rlver.main(["--resume", str(out), "--steps", "3"]) == 0
    assert len(rows(out / "metrics.jsonl")) == 3


# ------------------------------------------------------------------------------- report and picture


@pytest.mark.slow
def test_a_run_can_be_looked_at_at_every_checkpoint(tiny_dir, tmp_path, monkeypatch, no_pictures):
    """A run of 350 steps is looked at on its first evening, also one that was interrupted."""
    seen, choose = [], rlver.profiles_of_step

    def watched(users, n, seed, step):
        seen.append((tmp_path / "out" / "report.html").exists())
        if step == 2:
            raise KeyboardInterrupt
        return choose(users, n, seed, step)

    monkeypatch.setattr(rlver, "profiles_of_step", watched)
    assert go(tiny_dir, tmp_path / "out") == 130
    assert seen == [False, True]  # not yet at the checkpoint before the first step
    (tmp_path / "out" / "report.html").unlink()
    assert report_tool.main([str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "report.html").exists()
    assert report_tool.main([str(tiny_dir)]) == 2
