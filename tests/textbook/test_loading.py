"""Loading a model and its tokenizer: what is loaded is what was stored, and what cannot be trained
here is refused in one line.
"""

from support import loading
from support.errors import BadModel
from support.loading import load_model, load_weights
from support.ranks import make_masters

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import evaluate
from engine import load_local

SMALL = dict(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
)
FAMILIES = {
    "qwen2": dict(**SMALL, attention_dropout=0.1),  # a number that its attention layers keep
    # modules, 0.1 by default
    "gpt2": dict(n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=None),
}


@pytest.fixture
def stored(tiny_tokenizer, tmp_path):
    """A function that stores a random model of a family beside the tokenizer, and returns it."""

    def store(family, dtype=torch.float32, **settings):
        config = AutoConfig.for_model(family, vocab_size=len(tiny_tokenizer), **settings)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        model.save_pretrained(tmp_path)
        tiny_tokenizer.save_pretrained(tmp_path)
        return model

    return store


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_fp32_and_dropout_is_off(family, stored, tmp_path):
    """Two settings that fail quietly: bf16 weights swallow steps of 1e-6, and with dropout the same
    tokens get other log-probs on every pass. Off means off in train mode too, which gradient
    checkpointing needs."""
    made = stored(family, torch.bfloat16, **FAMILIES[family])

    def two_passes(model):
        return [model.train()(torch.arange(3, 40)[None]).logits for _ in range(2)]

    assert not torch.equal(*two_passes(made.float()))  # it would be seen
    model, _ = load_model(tmp_path)
    assert torch.equal(*two_passes(model))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_are_loaded_as_they_are_stored_become_the_same_masters(
    family, stored, tmp_path
):
    """A rank maps the file and turns block by block into fp32: the same weights as if all were
    loaded in fp32, and the same log-probs, so no buffer was rounded either."""
    stored(family, torch.bfloat16, **FAMILIES[family])
    (wide, _), (model, _) = load_model(tmp_path), load_model(tmp_path, dtype=None)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    make_masters(model)
    for (name, a), b in zip(wide.named_parameters(), model.parameters()):
        assert a.dtype == b.dtype == torch.float32 and torch.equal(a, b), name
    ids = torch.arange(3, 40)[None]
    assert torch.equal(wide.eval()(ids).logits, model.eval()(ids).logits)


def test_a_model_that_only_samples_is_loaded_once(tiny_dir, monkeypatch):
    """A model of 7B that plays the user, or is evaluated, took 30 GB twice: loaded in fp32, and
    copied by its engine. It is loaded in the type of computing, and the engine has that very
    model."""
    loaded = []

    def load(directory, dtype):
        loaded.append(load_weights(directory, dtype))
        return loaded[-1]

    monkeypatch.setattr(loading, "load_weights", load)
    assert load_local(str(tiny_dir), 0.0).engine.model is loaded[0]
    policy = evaluate.load_policy(str(tiny_dir))
    assert policy.make_agent(0).engine.model is loaded[1] and len(loaded) == 2


def test_a_name_on_the_hub_is_a_directory_once_it_is_there(tiny_dir, tmp_path, monkeypatch):
    """So that it is mapped like any other. (The cache's layout is the hub's: a name, a commit.)"""
    place = tmp_path / "models--some--model"
    shutil.copytree(tiny_dir, place / "snapshots" / "c0ffee")
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("c0ffee")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model, _ = load_model("some/model", dtype=None)
    assert torch.equal(
        model.get_input_embeddings().weight, load_model(tiny_dir)[0].get_input_embeddings().weight
    )


def cut_the_weights(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def drop_a_weight(path):
    weights = load_file(path / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, path / "model.safetensors", {"format": "pt"})


DAMAGES = {
    "gone": (shutil.rmtree, "no such directory"),
    "no configs": (lambda path: [file.unlink() for file in path.glob("*.json")], ""),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "model.safetensors"),
    "half-copied weights": (cut_the_weights, ""),
    # transformers would make one up, at random
    "a weight missing": (drop_a_weight, "lm_head.weight"),
    "no chat template": (lambda path: (path / "chat_template.jinja").unlink(), "no chat template"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_model_directory_is_one_line_for_the_user(damage, tiny_dir, tmp_path):
    """Not a traceback, and never a model that is partly noise: one line, what is wrong with which
    directory."""
    harm, told = DAMAGES[damage]
    path = shutil.copytree(tiny_dir, tmp_path / "model")
    load_model(path)  # good so far
    harm(path)
    with pytest.raises(BadModel) as error:
        load_model(path)
    line = str(error.value)
    assert line.startswith(f"--model {path}: ") and told in line and "\n" not in line


@pytest.mark.parametrize(
    "family, settings, told",
    [
        ("qwen2", dict(use_sliding_window=True, max_window_layers=1), "sliding_attention"),
        ("gemma3_text", dict(head_dim=16), "sliding_attention"),
        ("mistral", dict(sliding_window=8), "sliding window of 8 tokens"),
        ("mistral", dict(sliding_window=None), None),
        # as in Qwen2.5's config.json
        ("qwen2", dict(sliding_window=131072, use_sliding_window=False), None),
    ],
)
def test_a_model_with_sliding_windows_is_refused(family, settings, told, stored, tmp_path):
    """The trainer gives a model its mask, and so takes its windows from it: layers that were
    trained to see 4,096 tokens would see all. vLLM keeps them, and the two would disagree, but in
    dialogues that are longer than a window only."""
    stored(family, **SMALL, **settings)
    if told is None:
        assert load_model(tmp_path)
        return
    with pytest.raises(BadModel) as error:
        load_model(tmp_path)
    assert told in str(error.value) and "\n" not in str(error.value)


def test_a_model_whose_logits_this_code_would_get_wrong_is_refused(stored, tmp_path):
    """Granite divides its logits behind the output layer, which `Policy.forward` reads directly:
    log-probs would all be wrong, and the engine's alike, so that no self-check would show it."""
    stored("granite", **SMALL, logits_scaling=4.0, initializer_range=0.2)
    with pytest.raises(BadModel, match="not supported"):
        load_model(tmp_path)
