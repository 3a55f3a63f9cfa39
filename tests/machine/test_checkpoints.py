"""The checkpoints of a run: the trained weights are in them, as many are kept as asked for, and a
full disk leaves the last one whole."""

from support import rundir
from support.errors import BadInput, CannotWrite, SimulatorRefused, TooManyLost, explain

import subprocess
import sys

import pytest
import torch

import evaluate
from conftest import ROOT
from runs import go, go_on, metrics

pytestmark = pytest.mark.usefixtures("moods")


def test_the_checkpoint_is_a_model_that_holds_the_trained_weights(whole, tiny_dir):
    """What is trained and what is saved are two things until somebody compares them; transformers
    must load it without this code. The engine, a third copy, is compared too. Two checkpoints are
    kept."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = whole("grpo") / "checkpoint-000004"
    models = whole.models["grpo"]
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
    assert "checkpoint-000002 could not be written" in done.stderr
    assert [p.name for p in rundir.checkpoints(out)] == ["checkpoint-000000"] and not list(
        out.glob(".checkpoint*")
    )
    assert (out / "checkpoint-000000" / "state.json").read_bytes() == state
    assert go_on(out, "--steps", 2) == 0 and [row["step"] for row in metrics(out)] == [1, 2]


@pytest.mark.parametrize("error", [SimulatorRefused, TooManyLost, CannotWrite])
def test_a_run_that_has_begun_can_be_resumed_whatever_stopped_it(error, tmp_path):
    assert "--resume" not in explain(error("wrong key"), tmp_path)[1]
    (tmp_path / "config.json").write_text("{}")
    assert explain(error("wrong key"), tmp_path)[1].endswith(f"--resume {tmp_path}")


def test_a_run_without_a_checkpoint_is_measured_only_where_it_started(tmp_path):
    """Whoever asks for its newest step must not be given the start in its place."""
    (tmp_path / "config.json").write_text('{"model": "toy", "algo": "grpo"}')
    assert evaluate.find_weights(tmp_path, 0)[1] == "toy"
    with pytest.raises(BadInput, match="no such checkpoint; --step 0 measures where it started"):
        evaluate.find_weights(tmp_path, None)
