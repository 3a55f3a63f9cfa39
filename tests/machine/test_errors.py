"""What stops a run: the self-checks, and a simulator that fails in one dialogue or in all; and what
is said of it."""

from models.engine import TorchEngine
from models.loading import load_model
from support.answers import PROMPTS
from support.errors import (
    CannotWrite,
    SelfCheckFailed,
    SimulatorRefused,
    TooManyLost,
    explain,
)

import json
import re
import zlib
from collections import Counter
from statistics import mean

import pytest

from answering import tagged
from grpo import check_groups
from people import toy_profiles
from rollout import Episode
from runs import alike, go, go_on, metrics, rows, summary
from simulator import User
from toy import world
from toy.words import PEOPLE

pytestmark = pytest.mark.usefixtures("moods")

# -------------------------------------------------------------------------------------- self-checks


def stopped(capfd, code):
    """The one line of a run that a self-check has stopped."""
    assert code == 1
    [line] = [line for line in capfd.readouterr().err.splitlines() if line.startswith("rlver.py: ")]
    assert "self-check" in line
    return line


@pytest.mark.parametrize(
    "forgotten", ["embed_tokens|lm_head", pytest.param(r"model\.norm", marks=pytest.mark.slow)]
)
def test_weights_that_did_not_reach_the_engine_stop_the_run(
    forgotten, tiny_dir, tmp_path, monkeypatch, capfd
):
    """Defect 27: "step 1 normal, from step 2 pure gibberish". A sync that misses one tensor (the
    tied output layer is the usual one) raises no error anywhere; only comparing log-probs
    shows it."""
    load = TorchEngine.load_weights

    def load_most(self, named):
        load(self, [(name, value) for name, value in named if not re.search(forgotten, name)])

    monkeypatch.setattr(TorchEngine, "load_weights", load_most)
    line = stopped(capfd, go(tiny_dir, tmp_path / "out", "--warmup", 0))
    assert "engine" in line and "weights" in line
    assert [row["step"] for row in metrics(tmp_path / "out")] == [1]


class OtherEngine(TorchEngine):
    """In vLLM's place: it reads the directory of the weights."""

    def __init__(self, path, *args, context, dialogues, memory_share, seed, **more):
        super().__init__(load_model(path)[0], *args, **more)


FIRST_SYNC = {  # {what the first sync does to a tensor: the exit code}
    "nothing": (lambda value: value, 0),
    "too much": (lambda value: 2 * value, 1),
}


@pytest.mark.parametrize("harm", FIRST_SYNC)
def test_a_first_sync_that_fails_is_a_self_check(harm, tiny_dir, tmp_path, monkeypatch, capfd):
    """It was said that the model cannot be trained, with another exit code than the page about
    self-checks has. The model is as good as with the engine in PyTorch."""
    (change, code), load, out = FIRST_SYNC[harm], TorchEngine.load_weights, tmp_path / "out"
    monkeypatch.setattr("models.build.make_vllm_engine", OtherEngine)
    monkeypatch.setattr("support.settings.vllm_is_there", lambda: True)
    monkeypatch.setattr(
        TorchEngine,
        "load_weights",
        lambda self, named: load(self, [(n, change(w)) for n, w in named]),
    )
    ended = go(tiny_dir, out, "--engine", "vllm", "--steps", 0)
    if code:
        assert "engine and trainer disagree" in stopped(capfd, ended) and not out.exists()
    else:
        assert ended == 0 and "self-check" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("is_lost", [True, False])
def test_adapters_that_are_lost_at_a_resume_are_a_self_check(
    is_lost, tiny_dir, tmp_path, monkeypatch, capfd
):
    """The other first sync: the engine has the base only, and the model was trained already."""
    out = tmp_path / "out"
    assert go(tiny_dir, out, "--steps", 1, "--lora-rank", 2, "--lr", 0.5, "--warmup", 0) == 0
    capfd.readouterr()
    if is_lost:
        monkeypatch.setattr(TorchEngine, "load_weights", lambda self, named: list(named))
        assert "engine and trainer disagree" in stopped(capfd, go_on(out, "--steps", 2))
    else:
        assert go_on(out, "--steps", 2) == 0


def test_nan_weights_stop_the_run(tiny_dir, tmp_path, capfd):
    """A learning rate from another world: the second step has no numbers left, and says so instead
    of training on."""
    assert "nan" in stopped(capfd, go(tiny_dir, tmp_path / "out", "--lr", 1e30)).lower()


def test_a_broken_group_stops_the_run(tiny_dir, tmp_path, monkeypatch, capfd):
    """Defect 1 makes such groups: a neighbour's user behind one dialogue. Mean and std over
    different people mean nothing."""
    for broken in (Episode("ben", 0, "Hello."), Episode("ann", 0, "Hi.")):
        with pytest.raises(SelfCheckFailed, match="group 0"):
            check_groups([Episode("ann", 0, "Hello."), broken])
    copy, neighbours = User.copy, iter(toy_profiles("train"))

    def mixed_up(self, name):
        user = copy(self, name)
        user.profile = next(neighbours)
        return user

    monkeypatch.setattr(User, "copy", mixed_up)
    assert "group" in stopped(capfd, go(tiny_dir, tmp_path / "out"))


# --------------------------------------------------------------------------- a simulator that fails


def garbage(patch, when):
    """The user's model answers garbage to f_emo wherever `when(the last reply, prompt)`."""
    answer = world.ScriptedModel.__call__

    async def confused(self, prompt, schema=None):
        if "<emotion_level>" not in prompt:
            *_, last = json.loads(tagged(prompt, "dialogue"))
            if when(last["text"], prompt):
                return "I would rather not say."
        return await answer(self, prompt, schema)

    patch.setattr(world.ScriptedModel, "__call__", confused)


def confuses(reply, *_):
    return zlib.crc32(reply.encode()) % 37 == 0


@pytest.mark.slow
def test_a_dialogue_whose_simulator_fails_is_dropped_and_counted(tiny_dir, tmp_path, monkeypatch):
    """Defect 17 asks for ever. Here a failure costs its own dialogue: no guessed emotion, the rest
    of its group trains, the metrics say how many are missing."""
    garbage(monkeypatch, confuses)
    out = tmp_path / "out"
    flags = "--batch-size 32 --group-size 4 --eval-size 16 --steps 1".split()
    assert go(tiny_dir, out, *flags) == 0
    lines = rows(out / "dialogues.jsonl")
    rest = [line for line in lines if line["split"] == "train"]
    lost = [line for line in rows(out / "dropped.jsonl") if line["kind"] == "training"]
    (row,) = metrics(out)
    assert 0 < row["dropped"] == row["unreadable"] == len(lost) == 32 - len(rest) <= 32 / 5
    assert row["reward"] == pytest.approx(mean(line["reward"] for line in rest))
    assert all(line["unreadable"] for line in lost)
    assert all(line["dialogue"][-1]["speaker"] == "friend" for line in lost)
    # sampled all the same
    assert row["tokens_dropped"] == sum(line["tokens"] for line in lost) > 0
    assert row["tokens_trained"] + row["tokens_dropped"] == row["tokens_sampled"]
    sizes = Counter(line["group"] for line in rest)
    assert min(sizes.values()) < 4  # some group went on with less than its four
    assert not any(confuses(turn["reply"]) for line in lines for turn in line["turns"])
    # and no score is made up for the held-out ones either
    assert summary(out)["before"]["n"] < 16


@pytest.mark.slow
def test_a_simulator_that_fails_everywhere_pauses_the_run(
    tiny_dir, tmp_path, monkeypatch, capfd, whole
):
    """A dead server: a batch of nothing must not become a mean of nothing. Exit code 75, what there
    is is saved, and when the user is well again the run goes on as if nothing had been."""

    def is_trained_on(reply, prompt):
        return re.search(r"My (\w+)", tagged(prompt, "background"))[1] in PEOPLE["train"]

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        garbage(patch, is_trained_on)
        assert go(tiny_dir, out) == 75
    said = capfd.readouterr().err
    assert "4 of 4 dialogues are lost, the first because of: 9 answers could not be read" in said
    assert "not one JSON object" in said and said.endswith(f"--resume {out}\n")
    assert not (out / "metrics.jsonl").exists()
    assert go_on(out) == 0
    alike(out, whole("grpo"))


@pytest.mark.slow
def test_a_run_that_pauses_is_saved_first(tiny_dir, tmp_path, monkeypatch, whole):
    """No checkpoint is due before step 2, in which all dialogues are lost. Without one, a resume
    would do step 1 again."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        garbage(patch, lambda *_: (out / "metrics.jsonl").exists())
        assert go(tiny_dir, out, "--save-every", 4) == 75
    assert (out / "checkpoint-000001").exists() and len(rows(out / "dropped.jsonl")) == 4
    assert go_on(out) == 0
    alike(out, whole("grpo"))
    assert not rows(out / "dropped.jsonl")  # of step 2, which was done again


# ------------------------------------------------------------------------------------ what is said


@pytest.mark.parametrize("error", [SimulatorRefused, TooManyLost, CannotWrite])
def test_a_run_that_has_begun_can_be_resumed_whatever_stopped_it(error, tmp_path):
    assert "--resume" not in explain(error("wrong key"), tmp_path)[1]
    (tmp_path / "config.json").write_text("{}")
    assert explain(error("wrong key"), tmp_path)[1].endswith(f"--resume {tmp_path}")


def test_a_model_in_this_process_plays_the_user(tiny_dir, tmp_path, monkeypatch):
    """--simulator local:DIR: its answers are plain texts, and it has no format to be held to."""

    async def model(prompt, schema):
        decision = {"change": 1} if "change" in schema else {"goodbye": False}
        answer = {**dict.fromkeys(schema, "Hm."), **decision, "code": world.code_in(prompt)}
        return json.dumps({key: answer[key] for key in schema})

    monkeypatch.setattr("players.local.load_local", lambda *_: model)
    people = PROMPTS / "profiles" / "en_train.jsonl"
    assert go(tiny_dir, tmp_path / "out", "--simulator", "local:x", "--profiles", people) == 0
