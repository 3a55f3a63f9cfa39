"""The directory of a run: its files say what happened in it; whenever it is stopped or killed, it
goes on as if nothing had been; and what it prints."""

from models import loading
from players.calls import CallLog
from players.policies import find_weights
from players.users import digests_of_texts, make_simulator
from support import report, rundir
from support.errors import BadInput
from support.files import read_json, write_json
from support.settings import resolve_settings

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from statistics import mean, stdev
from types import SimpleNamespace

import pytest
import torch

import evaluate
import rlver
from conftest import ROOT
from people import toy_profiles
from policy import split_batch
from runs import (
    ALGO,
    SMALL,
    alike,
    cut_at,
    files,
    go,
    go_on,
    metrics,
    mood,
    numbers,
    output_of,
    refuse,
    rows,
    summary,
    words,
)
from tools import replay

pytestmark = pytest.mark.usefixtures("moods")


@pytest.fixture
def out(half, tmp_path):
    """The directory of a run of two steps, to go on with."""
    return shutil.copytree(half, tmp_path / "out")


def run_in(path, **flags):
    """The RunDir of a run of the toy, whose calls are not logged."""
    return rundir.RunDir(path, resolve_settings(flags), CallLog())


# ---------------------------------------------------------------------------------- what a run leaves


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
    # what was run, defaults included, so that it can be run again; and two checkpoints are kept
    out = whole("ppo")
    shown = {"algo": "ppo", "lr": 2e-3, "gamma": 1.0, "max_turns": 3, "think": False}
    assert shown.items() <= read_json(out / "config.json").items()
    assert [path.name[-1] for path in out.glob("*checkpoint*")] in (["2", "4"], ["4", "2"])


def test_dialogues_are_written_word_for_word(whole):
    """Whoever doubts a reward must be able to read what was said for it: every dialogue, with the
    analysis behind each change."""
    lines = rows(whole("grpo") / "dialogues.jsonl")
    parts = "0 heldout, 1 train, 2 train, 3 train, 3 heldout, 4 train, 4 heldout".split(", ")
    written = [f"{line['step']} {line['split']}" for line in lines]
    assert written == [part for part in parts for _ in range(4)]
    known = {split: {p.id for p in toy_profiles(split)} for split in ("train", "heldout")}
    for line in lines:
        assert line["profile_id"] in known[line["split"]] and 1 <= len(line["turns"]) <= 3
        emotion = 30
        for turn in line["turns"]:
            change = json.loads(turn["analysis"])["change"]
            assert change == turn["change"] == mood(turn["reply"])[0]
            emotion += change
            assert turn["emotion"] == emotion
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
    assert replay.main(words("same-user", out / "dialogues.jsonl")) == 0
    lines = rows(out / "dialogues.jsonl")
    rewards = {}  # of the training steps
    for line in lines:
        assert line["reward"] == line["turns"][-1]["emotion"] / 100
        if line["split"] == "train":
            rewards.setdefault(line["step"], []).append(line["reward"])
    assert len({line["reward"] for line in lines}) > 5  # or this test would show nothing
    told = {row["step"]: row["reward"] for row in metrics(out)}
    assert told == pytest.approx({step: mean(of_step) for step, of_step in rewards.items()})


def test_the_numbers_of_a_step_are_per_reply(whole):
    """They were divided by the mean of replies in a dialogue, not by their number: "cut" was
    above 1."""
    out = whole("grpo")
    for row in metrics(out):
        turns = [
            len(d["turns"])
            for d in rows(out / "dialogues.jsonl")
            if d["step"] == row["step"] and d["split"] == "train"
        ]
        assert row["reply_tokens"] == pytest.approx(row["tokens_trained"] / sum(turns))
        assert row["turns"] == mean(turns) and 0 <= row["cut"] <= 1


def test_the_seconds_of_a_run_are_those_of_its_steps(whole, tmp_path):
    """The sums in summary.json begin at 0, and the longest is not longer than all."""
    seconds = read_json(whole("grpo") / "summary.json")["seconds"]
    of_steps = sum(row["seconds"] for row in rows(whole("grpo") / "metrics.jsonl"))
    assert seconds["rollout"] + seconds["update"] == pytest.approx(of_steps)
    assert seconds["simulator"] <= seconds["rollout"] and seconds["evaluate"] <= seconds["total"]
    run = run_in(tmp_path / "out")
    run.restore(None, [], {})
    run.close()
    assert run.state["seconds"] == dict.fromkeys(seconds, 0)


def test_the_summary_is_what_the_dialogues_say(whole):
    """A score that cannot be computed again from the log is a claim. Before and after, from
    dialogues.jsonl alone."""
    out = whole("grpo")
    told = summary(out)
    assert told["steps"] == 4
    for name, step in (("before", 0), ("after", 4)):
        lines = rows(out / "dialogues.jsonl")
        lines = [line for line in lines if (line["split"], line["step"]) == ("heldout", step)]
        final = [100 * line["reward"] for line in lines]
        wanted = {
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
        }
        assert told[name] == pytest.approx(wanted)


def test_the_checkpoint_is_a_model_that_holds_the_trained_weights(whole, tiny_dir):
    """What is trained and what is saved are two things until somebody compares them; transformers
    must load it without this code. The engine, a third copy, is compared too."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = whole("grpo") / "checkpoint-000004"
    models = whole.models["grpo"]
    saved, start = (AutoModelForCausalLM.from_pretrained(d).state_dict() for d in (place, tiny_dir))
    for held in (models.policy.model.state_dict(), models.engine.model.state_dict()):
        assert set(saved) == set(held) == set(start)
        assert all(torch.equal(saved[name], held[name]) for name in saved)
    # every tensor has been trained
    assert not any(torch.equal(saved[name], start[name]) for name in saved)
    chat = [{"role": "user", "content": "Hm. <think> Grüße"}]
    tokenizers = (AutoTokenizer.from_pretrained(d) for d in (place, tiny_dir))
    ids = [tokenizer.apply_chat_template(chat)["input_ids"] for tokenizer in tokenizers]
    assert ids[0] == ids[1]


def test_no_steps_means_evaluation_only(tiny_dir, tmp_path):
    """`--steps 0` measures a model, and writes no weights that nobody has changed."""
    out = tmp_path / "out"
    assert go(tiny_dir, out, "--steps", 0) == 0
    told = summary(out)
    assert told["before"] == told["after"] and told["steps"] == 0
    names = {path.name for path in (out / "checkpoint-000000").iterdir()}
    assert names == {"rlver.json", "state.json"}


# -------------------------------------------------------------------------------- stopped or killed


@pytest.mark.slow
def test_another_seed_is_another_run(whole, tiny_dir, tmp_path):
    """In its evaluation before training already. (The same seed is the same run: see those that are
    interrupted.)"""
    assert go(tiny_dir, tmp_path / "out", "--steps", 2, "--seed", 1) == 0
    dialogues = [rows(out / "dialogues.jsonl")[:4] for out in (tmp_path / "out", whole("grpo"))]
    said = [{turn["reply"] for line in lines for turn in line["turns"]} for lines in dialogues]
    assert not said[0] & said[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, line",
    [
        pytest.param("grpo", 3, id="grpo, in the first evaluation: no checkpoint yet"),
        pytest.param("grpo", 19, id="grpo, in step 3: in dialogues.jsonl, not in metrics.jsonl"),
        pytest.param("grpo", 31, id="grpo, in the evaluation after"),
        pytest.param("ppo", 19, id="ppo, in step 3: critic and optimizers too"),
        pytest.param("adapters", 19, id="ppo with adapters, in step 3: the base is --model's"),
    ],
)
def test_an_interrupted_run_goes_on_as_if_nothing_had_been(
    name, line, whole, tiny_dir, tmp_path, monkeypatch, capfd
):
    """Runs are killed; what goes on must be the same run: weights, both optimizers with their
    moments, the critic, the luck, the users' order, and no line twice. Ctrl-C says how to go on;
    the run can be looked at at every checkpoint behind a step."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        cut_at(line, patch)
        assert go(tiny_dir, out, *ALGO[name]) == 130
    said = capfd.readouterr().err
    assert f"python rlver.py --resume {out}\n" in said and "Traceback" not in said
    assert not (out / "summary.json").exists()
    assert (out / "report.html").exists() == (line > 14)  # step 2 is done
    assert go_on(out) == 0
    alike(out, whole(name))


MOODY = (
    "import sys, zlib; from toy import world; world.score_reply = lambda reply, *_: (zlib.crc32(reply.encode()) % 21 - "
    "10, 'I am in a mood'); import rlver; sys.exit(rlver.main(sys.argv[1:]))"
)


# (algorithm, the file that says that the moment has come, its lines by then, the signal). Each
# costs a process that imports torch.
KILLS = [
    ("ppo", "metrics.jsonl", 3, signal.SIGKILL),
    ("grpo", "metrics.jsonl", 1, signal.SIGINT),
    pytest.param("grpo", "config.json", 1, signal.SIGKILL, marks=pytest.mark.soak),
    pytest.param("ppo", "dialogues.jsonl", 10, signal.SIGKILL, marks=pytest.mark.soak),
]


@pytest.mark.slow
@pytest.mark.parametrize("algo, name, size, kind", KILLS)
def test_a_killed_run_goes_on(algo, name, size, kind, whole, tiny_dir, tmp_path):
    """SIGKILL, which no handler sees, at three moments of a process of its own; then half a line by
    hand in both logs, as after a power cut, which ends within a letter. And one SIGINT, as the
    terminal sends it, mostly while dialogues are held, deep inside asyncio: it must not be taken
    for a failure of the simulator."""
    # as many threads, the same sums
    env = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": str(ROOT)}
    out = tmp_path / "killed"
    flags = words("--model", tiny_dir, *SMALL, *ALGO[algo], "--out", out)
    process = subprocess.Popen(
        [sys.executable, "-c", MOODY, *flags],
        env=env,
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )

    def lines():
        return (out / name).read_bytes().count(b"\n") if (out / name).exists() else 0

    while process.poll() is None and lines() < size:
        time.sleep(0.001)
    process.send_signal(kind)
    said = process.communicate()[1].decode()
    code = 130 if kind == signal.SIGINT else -kind
    assert process.returncode == code, f"the run was over too soon\n{said}"
    if kind == signal.SIGINT:
        assert said.endswith(f"--resume {out}\n")  # the advice is the last thing on the screen
    for log in ("metrics.jsonl", "dialogues.jsonl"):
        if (out / log).exists():
            with open(out / log, "ab") as file:
                file.write('{"step": 5, "user": "好'.encode()[:-1])
    assert go_on(out) == 0
    alike(out, whole(algo))


def killed(out, work, patch=()):
    """In a process of its own, work(RunDir) kills it. patch: arguments of setattr."""
    child = os.fork()
    if child:
        assert os.waitpid(child, 0)[1] == signal.SIGKILL
        return
    try:
        run = run_in(out)
        run.take_lock()
        run.start_time, newest = 0, run.open()
        run.state = newest and rundir.state_of(newest) | {"step": 3}
        setattr(*patch) if patch else None
        work(run)
    finally:
        os._exit(0)


def die(*args, **more):
    os.kill(os.getpid(), signal.SIGKILL)


def write_half(path):
    path.mkdir()
    (path / "model.safetensors").touch()
    die()


def write_all(path):
    shutil.copytree(path.with_name("checkpoint-000002"), path)


def test_a_start_that_was_killed_in_its_trial_is_given_again(tiny_dir, tmp_path):
    """Its hidden directory stayed for ever. And because of it the same command was refused, as if a
    run were there."""
    out = tmp_path / "out"
    killed(out, lambda run: run.try_to_save(write_half, 1))
    assert [path.name[:8] for path in out.iterdir()] == ["..trial-"]
    assert go(tiny_dir, out, "--steps", 0) == 0
    assert not list(out.glob(".*"))


NO_REMOVAL = shutil, "rmtree", die  # killed when what was written has its name


@pytest.mark.slow
@pytest.mark.parametrize(
    "work, patch",
    [
        (lambda run: run.try_to_save(write_half, 1), ()),
        (lambda run: run.try_to_save(write_all, 1), NO_REMOVAL),
        (lambda run: run.save(write_half), ()),
        (lambda run: run.save(write_all), NO_REMOVAL),
    ],
    ids=["in the trial", "behind the trial", "in a save", "behind a save"],
)
def test_what_a_killed_run_leaves_is_removed(work, patch, out):
    """By the next start, or with the next checkpoint: each is as large as a model. Nothing else is:
    what has another name is the user's."""
    mine = ".notes .checkpoint-best .checkpoint-000002-best checkpoint-best .trial-run".split()
    for name in mine:
        shutil.copytree(out / "checkpoint-000002", out / name)
    before = {*files(out)}
    killed(out, work, patch)
    assert {*files(out)} > before
    for name in ("start.pt", "config.json", "heldout.json", "summary.json", "report.html"):
        shutil.copy(out / name, out / f".{name}")
    assert go_on(out, "--steps", 4, "--save-every", 1) == 0
    left = {path.name for path in out.glob("[.c]*") if path.is_dir() or path.name[0] == "."}
    assert left == {*mine, "checkpoint-000003", "checkpoint-000004"}


def test_a_log_that_lost_its_end_is_not_filled_up(tmp_path):
    """A checkpoint may reach the disk before the log does. To cut a file to more than its length
    writes a hole into it that no JSON reader passes; a line behind half a line is lost."""
    run = run_in(tmp_path / "out")
    run.restore(None, [], {})
    log, line = tmp_path / "out" / "metrics.jsonl", b'{"step": 1}\n'
    checkpoint = tmp_path / "out" / "checkpoint-000001"
    for there, known, left in ((12, 99, 12), (9, 99, 0), (12, 6, 6)):  # bytes
        log.write_bytes(line[:there])
        old = {**run.state, "step": 1, "log_bytes": {"metrics.jsonl": known}}
        write_json(checkpoint / "state.json", old)
        run.restore(checkpoint, [], {})
        run.begin_logs()
        assert log.read_bytes() == line[:left]
    run.close()


def test_a_resumed_run_counts_the_steps_before_it_and_warns_once(tmp_path, capsys):
    """Two flat steps before a resume and one after it were no warning, but summary.json had it;
    and what was said before was said again."""
    run = run_in(tmp_path / "out")
    run.restore(None, [], {})
    run.begin_logs()
    for step in (1, 2):
        sampled = {"tokens_trained": 9, "tokens_sampled": 8, "tokens_dropped": 0}
        run.log_step([], {"step": step, "zero_std_groups": 1, **sampled})
    assert "step 1: more tokens are trained" in capsys.readouterr().out
    run.state["step"] = 2
    run.save(None)
    run.close()
    again = run_in(tmp_path / "out")
    again.restore(again.open(), [], {})
    again.begin_logs()
    again.log_step([], {"step": 3, "zero_std_groups": 1})
    again.close()
    said = capsys.readouterr().out
    assert "step 3: for 3 steps no group" in said and said.count("warning") == 1


@pytest.mark.slow
def test_what_changes_no_result_may_change_when_a_run_goes_on(whole, out, monkeypatch, capfd):
    """A run that ran out of memory must be able to go on. The new values are in force and are
    remembered, also when step 3 is interrupted: the command that is printed must lead to step 4.
    What is learned is the same to rounding."""
    seen = []

    def split(*args, max_tokens, **more):
        seen.append(max_tokens)
        return split_batch(*args, max_tokens=max_tokens, **more)

    monkeypatch.setattr(rlver, "split_batch", split)
    with monkeypatch.context() as patch:
        cut_at(3, patch)
        assert go_on(out, *"--steps 4 --tokens-per-gpu 40 --save-every 1".split()) == 130
    [command] = re.findall(r"python rlver.py (--resume .*)\n", capfd.readouterr().err)
    assert rlver.main(command.split()) == 0
    assert seen == [40] * 3  # step 3, and again, and step 4
    assert [p.name[-1] for p in rundir.checkpoints(out)] == ["3", "4"]
    assert rows(out / "dialogues.jsonl") == rows(whole("grpo") / "dialogues.jsonl")
    for row, usual in zip(metrics(out), metrics(whole("grpo")), strict=True):
        assert numbers(row) == pytest.approx(numbers(usual), rel=1e-3, abs=1e-5)


@pytest.mark.slow
def test_a_run_that_is_over_or_still_going_is_left_alone(out, capfd):
    """A run that was over was evaluated a second time, and its last evaluation cut from the log
    before. One that is still going, or whose ranks outlived a kill, would have two writers undo
    each other's files."""
    before = files(out)
    told = output_of(capfd, 0, rlver.main, "--resume", out)
    assert "is finished" in told and "--steps N, N the total" in told
    running = run_in(out)
    running.take_lock()
    told = output_of(capfd, 2, rlver.main, "--resume", out, "--steps", 3)
    assert "another process is at work there" in told
    running.close()
    assert files(out) == before


def test_of_two_runs_that_begin_at_once_the_first_is_left_alone(tmp_path):
    """Neither finds a directory when it looks. The second one's config.json would replace the
    first one's, and its empty logs the lines that the first has written."""
    out = tmp_path / "out"
    first, second = (run_in(out, seed=seed) for seed in (0, 1))
    second.take_lock()
    first.try_to_save(lambda path: path.mkdir(), 1)
    first.restore(None, [], {})
    first.append("metrics.jsonl", {"step": 1})
    before = files(out)
    with pytest.raises(BadInput, match="another process"):
        second.try_to_save(lambda path: path.mkdir(), 1)
    assert files(out) == before


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint_whole(out, capfd):
    """A file may not grow beyond a limit, as on a full disk: a line of the log fits, the weights do
    not. One line, exit code 1; the last checkpoint is as it was."""
    before = files(out / "checkpoint-000002")
    size = max(path.stat().st_size for path in (out / "checkpoint-000002").iterdir())
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, usual[1]))
    try:
        told = output_of(capfd, 1, rlver.main, "--resume", out, "--steps", 4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert "checkpoint-000004 could not be written" in told
    assert len(list(out.glob("*checkpoint*"))) == 2 and not list(out.glob(".checkpoint*"))
    assert files(out / "checkpoint-000002") == before


# ------------------------------------------------------------------------- checkpoints, and copies


@pytest.fixture
def dated(tiny_dir, tmp_path, monkeypatch):
    """A model whose chat template writes today's date, and a function that sets the day."""

    def set_day(day):
        now = SimpleNamespace(now=lambda: datetime(2026, 1, day))
        monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", now)

    path = shutil.copytree(tiny_dir, tmp_path / "dated")
    template = path / "chat_template.jinja"
    template.write_text("{{ strftime_now('%d') }}" + template.read_text())
    set_day(1)
    return path, set_day


@pytest.mark.slow
def test_a_template_that_writes_the_date(dated, tmp_path, capfd):
    """A run that went on, and an evaluation that was continued, on the next day had other prompts
    from there on, without a word. What does not know its templates yet goes on as it did."""
    (model, set_day), out, result = dated, tmp_path / "out", tmp_path / "r.jsonl"
    users = ["--policy", model, "--max-tokens", 4, "--max-turns", 1, "--out", result, "--limit"]
    assert go(model, out, "--steps", 1) == 0 == evaluate.main(words(*users, 1))

    def forget(path):  # as an earlier version wrote it
        path.write_text(re.sub(r',\s*"chat_template": "\w+"', "", path.read_text()))

    for step, day, warnings in ((2, 1, 0), (3, 2, 1), (4, 3, 0)):
        set_day(day)
        if step == 4:
            forget(out / "checkpoint-000003" / "state.json")
        told = output_of(capfd, 0, rlver.main, "--resume", out, "--steps", step)
        assert told.count("what a chat template writes has changed") == warnings
    told = output_of(capfd, 2, evaluate.main, *users, 2)
    assert "the chat template's text (with the policy's prompt, perhaps today's date)" in told
    forget(result)
    assert evaluate.main(words(*users, 2)) == 0 and len(rows(result)) == 2


@pytest.mark.slow
def test_the_users_template_may_write_the_date_too(dated, taught):
    """Of a local: user or reader, half of whose answers were to other prompts."""
    model, set_day = dated
    for part in taught.iterdir():  # a reader needs yes and no as a token each
        if part.name != "chat_template.jinja":
            shutil.copy(part, model)
    for name, reader in ((f"local:{model}", None), ("toy", f"local:{model}")):
        found = []
        for day in (1, 1, 2):
            set_day(day)
            found.append(digests_of_texts(None, make_simulator(name, reader=reader)))
        assert found[0] == found[1] != found[2]


def test_copies_of_checkpoints_are_nobodys_business(out, capfd):
    """A copy under another name was removed without a word, as an old checkpoint; or was taken for
    the newest, and later steps were cut off. Now the run goes on from its own, and of what it finds
    in its directory it removes only those that it wrote."""
    for name in ("checkpoint-000002-best", "checkpoint-best", "checkpoint-2", "checkpoint-000001"):
        shutil.copytree(out / "checkpoint-000002", out / name)
    (out / "checkpoint-000001" / "state.json").write_text('{"step": 1}')  # of another run
    (out / "notes.txt").write_text("mine")
    before = files(out)
    told = output_of(capfd, 0, rlver.main, "--resume", out, "--steps", 4, "--save-every", 1)
    assert "Step 2 is done" in told
    after = files(out)
    mine = [path for path in before if re.match("checkpoint-(?!00000[02])|notes", path)]
    assert len(mine) > 4 and all(after[path] == before[path] for path in mine)
    numbers = ["000001", "000002-best", "000003", "000004", "2", "best"]
    assert sorted(path.name[11:] for path in out.glob("checkpoint-*")) == numbers


@pytest.mark.slow
def test_an_old_checkpoint_that_cannot_be_removed_is_one_warning(out, capfd, monkeypatch):
    """On NFS, while somebody reads a file of it. It ended the run, and each resume after one
    interval again."""
    remove = os.rmdir

    def refuse_to(path, **more):
        if re.search(r"checkpoint-0|\.trial", os.fspath(path)):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", os.fspath(path))
        remove(path, **more)

    monkeypatch.setattr(os, "rmdir", refuse_to)
    (out / ".trial").mkdir()  # what an earlier start could not remove
    (out / ".trial" / ".nfs0001").touch()
    for steps in (4, 6):
        told = output_of(capfd, 0, rlver.main, "--resume", out, "--steps", steps, "--save-every", 1)
        assert told.count("an old checkpoint was not removed") == 1
        assert summary(out)["steps"] == steps


@pytest.mark.parametrize(
    "harm, told",
    [
        (lambda path: (path / "state.json").unlink(), "checkpoint-000002/state.json: missing"),
        (lambda path: cut_in_two(path / "state.json"), "checkpoint-000002/state.json: missing"),
        (lambda path: path.rename(path.with_name("checkpoint-000009")), "000009/state.json: mis"),
        (lambda path: cut_in_two(path / "trainer.pt"), "checkpoint-000002/trainer.pt: cannot be"),
        (lambda path: (path / "trainer.pt").unlink(), "checkpoint-000002/trainer.pt: cannot be"),
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors"),
        (lambda path: (path.parent / "start.pt").unlink(), "start.pt: cannot be read"),
        (lambda path: cut_in_two(path.parent / "start.pt"), "start.pt: cannot be read"),
    ],
)
def test_a_checkpoint_that_was_copied_in_part_is_one_line(harm, told, out, capfd):
    """Which names the file, before a dialogue is held; nothing is changed."""
    harm(out / "checkpoint-000002")
    before = files(out)
    assert told in refuse(capfd, "--resume", out, "--steps", 4)
    assert files(out) == before


def test_a_state_that_is_missing_shows_before_a_server_is_asked(out):
    (out / "checkpoint-000002" / "state.json").unlink()
    run = run_in(out)
    with pytest.raises(BadInput, match="state.json: missing"):
        run.open()
    run.close()


def cut_in_two(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def test_a_part_of_a_checkpoint_is_not_measured(out, tmp_path, capfd):
    """Without its settings a policy that thinks would be measured as one that does not; and only of
    step 0, which is removed as the run goes on, the weights are those of the run's own model."""
    place = shutil.copytree(out / "checkpoint-000002", tmp_path / "copy")
    (place / "trainer.pt").unlink()  # which nobody needs who wants to measure it
    assert find_weights(str(place), None).run["max_tokens"] == 6
    (place / "rlver.json").unlink()
    told = refuse(capfd, "--policy", place, "--limit", 1, main=evaluate.main)
    assert f"{place}/rlver.json: missing" in told
    (out / "checkpoint-000002" / "state.json").unlink()
    assert "checkpoint-000002/state" in refuse(capfd, "--policy", out, main=evaluate.main)
    first, model = out / "checkpoint-000000", read_json(out / "config.json")["model"]
    assert find_weights(str(first), None).weights == find_weights(str(out), 0).weights == model
    shutil.rmtree(first)
    assert find_weights(str(out), 0).weights == model


def test_what_cannot_be_saved_shows_before_the_first_dialogue(
    tiny_dir, tmp_path, capfd, monkeypatch
):
    """It showed at the first checkpoint, after an evaluation that was paid for, and again after each
    resume. The disk is blamed for what the disk does."""
    out = tmp_path / "out"

    def broken(*args, **more):
        raise TypeError("Object of type AddedToken\nis not JSON serializable")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", broken)
    told = output_of(capfd, 1, rlver.main, "--model", tiny_dir, *SMALL, "--out", out)
    assert "could not be written (Object of type AddedToken is not JSON" in told
    assert told.count("\n") == 1 and "disk" not in told and files(out) == {}


def test_what_torch_says_of_a_full_disk_is_one_line(tiny_dir, tmp_path, capfd, monkeypatch):
    """It is no OSError. Of a checkpoint it was one line, of start.pt a traceback."""
    save = torch.save

    def save_to_full_disk(value, path):
        if path.name == ".start.pt":
            raise RuntimeError("unexpected pos 7808\nvs 7752")
        save(value, path)

    monkeypatch.setattr(torch, "save", save_to_full_disk)
    told = output_of(
        capfd, 1, rlver.main, *words("--model", tiny_dir, *SMALL, "--out", tmp_path / "out")
    )
    *_, last = told.splitlines()
    assert "start.pt could not be written (unexpected pos 7808 vs 7752); go on with: " in last


@pytest.mark.parametrize(
    "name, told",
    [("chat_template.jinja", "no chat template"), ("generation_config.json", "other stop tokens")],
)
def test_the_trial_is_read_back(name, told, tiny_dir, tmp_path, capfd, monkeypatch):
    """Whatever a resume will need: a checkpoint that cannot be loaded shows when the run has been
    killed, and all that was paid for is lost."""
    out, write = tmp_path / "out", loading.write_model

    def write_less(directory, *args):
        write(directory, *args)
        (directory / name).unlink()

    monkeypatch.setattr("models.checkpoint.write_model", write_less)
    two = shutil.copytree(tiny_dir, tmp_path / "model") / "generation_config.json"
    two.write_text('{"eos_token_id": [0, 1, 2]}')
    line = output_of(capfd, 1, rlver.main, "--model", two.parent, *SMALL, "--out", out)
    assert told in line and line.count("\n") == 1 and files(out) == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_disk_with_little_room_is_one_warning(
    name, whole, tiny_dir, tmp_path, capfd, monkeypatch
):
    """Three checkpoints at a time, as large as they are (these also have a tokenizer): two are kept
    while the next one is written, so one more is needed where there are two."""
    place = whole(name) / "checkpoint-000004"
    tensors = [place / file for file in ("trainer.pt", "model.safetensors")]
    size = sum(path.stat().st_size for path in tensors)
    for n, (room, warnings) in enumerate([(2.0, 1), (3.5, 0)]):
        usage = SimpleNamespace(free=room * size)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        flags = "--model", tiny_dir, *SMALL, *ALGO[name], "--steps", 0
        told = output_of(capfd, 0, rlver.main, *flags, "--out", tmp_path / str(n))
        assert told.count("GB left, and checkpoints need") == warnings
    run = run_in(whole(name))
    monkeypatch.setattr(run, "tell", lambda text: pytest.fail(text))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    run.try_to_save(lambda path: path.mkdir(), 1)
    run.close()


def test_adapters_name_their_base_from_everywhere(tiny_dir, tmp_path, monkeypatch):
    """A run that was begun with a relative path, and resumed elsewhere."""
    shutil.copytree(tiny_dir, tmp_path / "models" / "tiny")
    monkeypatch.chdir(tmp_path)
    assert go("models/tiny", "out", "--steps", 1, "--lora-rank", 2) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert go_on("../out", "--steps", 2) == 0
    config = tmp_path / "out" / "checkpoint-000002" / "adapter" / "adapter_config.json"
    base = read_json(config)["base_model_name_or_path"]
    assert base == str(tmp_path / "models" / "tiny")


# ------------------------------------------------------------------------------- what a run prints


def test_the_head_of_a_run(capsys):
    """What is trained on whom, where all goes, and nothing of defaults that nobody has chosen."""

    def head(given, **more):
        report.print_head(resolve_settings(given), Path("runs/x"), 500, 128, **more)
        return " ".join(capsys.readouterr().out.split())

    assert head({}).startswith("GRPO trains toy (direct): 36 steps of 64 dialogues")
    text = head({"algo": "ppo", "think": True}, ranks=2, step=5)
    assert text.startswith("Step 5 is done, going on: PPO trains toy (think)")
    assert "on 2 ranks. Engine: torch." in text and "The user toy is a script" in text


def test_a_run_ends_with_its_table_its_report_and_the_next_command(half, tmp_path, capsys):
    out = shutil.copytree(half, tmp_path / "a run")
    report.print_summary(out)
    text = capsys.readouterr().out
    assert "held-out users, mean final emotion (from 30, 3 replies):" in text
    lines = [line.split() for line in text.splitlines()]
    after = [f"{summary(out)['after'][key]:.1f}" for key in ("score", "stderr")]
    assert ["after", *after, "0.0%", "0.0%", "4"] in lines
    assert "rollout" in [line[0] for line in lines if line[2:] == ["s"]]
    assert "The user toy is a script" in " ".join(text.split())
    # the path has a space in it: what is printed can be typed
    *_, opened, title, command, _, lens = text.splitlines()
    assert opened == f"report: {out}/report.html" and "(from 40, 10 replies)" in title
    assert command == f"    python evaluate.py --policy '{out}' --before-after"
    assert lens == f"    python -m tools.lens '{out}'"
