"""What stops a run: the self-checks, and a simulator that fails in one dialogue or in all."""

from support.errors import SelfCheckFailed

import json
import re
import zlib
from statistics import mean

import pytest

from engine import TorchEngine
from grpo import check_groups
from policy import Episode
from runs import alike, go, go_on, metrics, rows, summary
from simulator import PROMPTS, User, toy_profiles
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
    whole = [Episode("ann", 0, "Hello."), Episode("ben", 1, "Hello.")]
    check_groups([*whole, Episode("ann", 0, "Hello.")])
    for broken in (Episode("ben", 0, "Hello."), Episode("ann", 0, "Hi.")):
        with pytest.raises(SelfCheckFailed, match="group 0"):
            check_groups([*whole, broken])
    copy, neighbours = User.copy, iter(toy_profiles("train"))

    def mixed_up(self, name):
        user = copy(self, name)
        user.profile = next(neighbours)
        return user

    monkeypatch.setattr(User, "copy", mixed_up)
    assert "group" in stopped(capfd, go(tiny_dir, tmp_path / "out"))


# --------------------------------------------------------------------------- a simulator that fails


def garbage(patch, when):
    """The user's model answers garbage to f_emo wherever `when(the last reply)`."""
    answer = world.ScriptedModel.__call__

    async def confused(self, prompt, schema=None):
        last = json.loads(re.search(r"<dialogue>\s*(.*?)\s*</dialogue>", prompt, re.S).group(1))[
            -1:
        ]
        if "<emotion_level>" not in prompt and when(last[0]["text"], prompt):
            return "I would rather not say."
        return await answer(self, prompt, schema)

    patch.setattr(world.ScriptedModel, "__call__", confused)


@pytest.mark.slow
def test_a_dialogue_whose_simulator_fails_is_dropped_and_counted(tiny_dir, tmp_path, monkeypatch):
    """Defect 17 asks for ever. Here a failure costs its own dialogue: no guessed emotion, the rest
    of its group trains, the metrics say how many are missing."""
    garbage(monkeypatch, lambda reply, prompt: zlib.crc32(reply.encode()) % 37 == 0)
    flags = "--batch-size 32 --group-size 4 --eval-size 16 --steps 1".split()
    assert go(tiny_dir, tmp_path / "out", *flags) == 0
    lines, torn = rows(tmp_path / "out" / "dialogues.jsonl"), 0
    dropped = rows(tmp_path / "out" / "dropped.jsonl")
    for row in metrics(tmp_path / "out"):
        rest = [line for line in lines if (line["step"], line["split"]) == (row["step"], "train")]
        assert 0 < row["dropped"] == 32 - len(rest) <= 32 / 5
        assert row["reward"] == pytest.approx(mean(line["reward"] for line in rest))
        lost = [
            line for line in dropped if (line["step"], line["kind"]) == (row["step"], "training")
        ]
        not_trained = sum(line["tokens"] for line in lost)
        assert not_trained == row["tokens_dropped"] > 0  # sampled all the same
        assert row["unreadable"] == row["dropped"] and all(line["unreadable"] for line in lost)
        assert all(line["dialogue"][-1]["speaker"] == "friend" for line in lost)
        assert row["tokens_trained"] + not_trained == row["tokens_sampled"]
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
    persons = PEOPLE[split]
    garbage(
        monkeypatch,
        lambda reply, prompt: (
            re.search(r"My (\w+)", prompt.partition("<background>")[2]).group(1) in persons
        ),
    )
    assert go(tiny_dir, tmp_path / "out") == 75
    said = capfd.readouterr().err
    assert "4 of 4 dialogues are lost, the first because of: 9 answers could not be read" in said
    assert "not one JSON object" in said
    assert said.endswith(f"--resume {tmp_path / 'out'}\n")
    assert not (tmp_path / "out" / "metrics.jsonl").exists()
    monkeypatch.undo()
    assert go_on(tmp_path / "out") == 0
    alike(tmp_path / "out", whole("grpo"))


def test_a_model_in_this_process_plays_the_user(tiny_dir, tmp_path, monkeypatch):
    """--simulator local:DIR: its answers are plain texts, and it has no format to be held to."""

    async def model(prompt, schema):
        decision = {"change": 1} if "change" in schema else {"goodbye": False}
        answer = {**dict.fromkeys(schema, "Hm."), **decision, "code": world.code_in(prompt)}
        return json.dumps({key: answer[key] for key in schema})

    monkeypatch.setattr("engine.load_local", lambda *_: model)
    people = PROMPTS / "profiles" / "en_train.jsonl"
    assert go(tiny_dir, tmp_path / "out", "--simulator", "local:x", "--profiles", people) == 0
