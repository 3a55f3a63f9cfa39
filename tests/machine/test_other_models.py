"""Models and tokenizers as they come: without a pad token, with a context that is too short, with a
template that has a switch of its own."""

from support.loading import ChatFormat

import copy

import pytest

import evaluate
from conftest import make_tiny_model
from runs import go, go_on, metrics, refuse
from simulator import load_prompt

pytestmark = pytest.mark.usefixtures("moods")


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
    ],
    ids=["system", "vocabulary"],
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
    model = other_model(tiny_tokenizer, tmp_path / "model", max_position_embeddings=system + 5)
    assert go(model, tmp_path / "out") == 75
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
    flags = "--max-tokens 40 --max-turns 2 --steps 1 --eval-size 1".split()
    assert go(model, tmp_path / "out", *flags) == 0
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
    assert go_on(out, "--steps", 2) == 0 and len(metrics(out)) == 2
    assert "--template-args cannot change" in refuse(
        capfd, "--resume", out, "--template-args", '{"enable_thinking": false}'
    )
    assert evaluate.load_policy(str(out)).settings["template_args"] == {"enable_thinking": True}
