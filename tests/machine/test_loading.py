"""Loading a model and its tokenizer: what is loaded is what was stored, what cannot be trained here
is refused in one line, and models as they come are trained: without a pad token, with rows that no
word has, with a template that has a switch of its own."""

from models import build, loading
from models.engine import TorchEngine
from models.loading import load_model, write_model
from players.local import load_engine, load_local
from players.policies import find_weights, load_policy
from support.errors import BadModel, CannotWrite
from support.files import read_json, write_file, write_json
from support.settings import Settings

import copy
import shutil
from functools import partial

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import evaluate
from conftest import QWEN_WORDS, SIZES, THREE_DIGITS, make_tiny_model, make_tiny_tokenizer
from runs import go, go_on, metrics, refuse
from tools import chat

pytestmark = pytest.mark.usefixtures("moods")

# Phi-4-mini's, for a context of 2048 that was 64 at first
LONGROPE = dict(
    pad_token_id=0,
    max_position_embeddings=2048,
    original_max_position_embeddings=64,
    initializer_range=0.2,
    rope_parameters=dict(
        rope_type="longrope",
        rope_theta=10000.0,
        short_factor=[1.0] * 8,
        long_factor=[4.0] * 8,
        original_max_position_embeddings=64,
        factor=32.0,
    ),
)
FAMILIES = {
    "qwen2": dict(**SIZES, attention_dropout=0.1),  # a number that its attention layers keep
    # modules, 0.1 by default
    "gpt2": dict(n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=None),
}
IDS = torch.arange(3, 40)[None]


@pytest.fixture
def stored(tiny_tokenizer, tmp_path):
    """A function that stores a random model of a family beside the tokenizer, and returns it."""

    def store(family, dtype=torch.float32, **settings):
        config = AutoConfig.for_model(family, **{"vocab_size": len(tiny_tokenizer), **settings})
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        model.save_pretrained(tmp_path)
        tiny_tokenizer.save_pretrained(tmp_path)
        return model

    return store


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_fp32_and_dropout_is_off(family, stored, tmp_path):
    """Two settings that fail quietly: bf16 weights swallow steps of 1e-6, and with dropout the same
    tokens get other log-probs on every pass. Off means off in train mode too, which gradient
    checkpointing needs. A rank maps the file and turns block by block into fp32: the same weights,
    and the same log-probs, so no buffer was rounded either."""
    made = stored(family, torch.bfloat16, **FAMILIES[family])

    def two_passes(model):
        return [model.train()(IDS).logits for _ in range(2)]

    assert not torch.equal(*two_passes(made.float()))  # it would be seen
    (wide, _), (mapped, _) = load_model(tmp_path), load_model(tmp_path, dtype=None)
    assert torch.equal(*two_passes(wide))
    assert {p.dtype for p in mapped.parameters()} == {torch.bfloat16}
    build.make_masters(mapped)
    for (name, a), b in zip(wide.named_parameters(), mapped.parameters()):
        assert a.dtype == b.dtype == torch.float32 and torch.equal(a, b), name
    assert torch.equal(wide.eval()(IDS).logits, mapped.eval()(IDS).logits)
    cfg = Settings(algo="grpo", model=str(tmp_path), kl_coef=0.1)
    more = (None, tmp_path, tmp_path, torch.bfloat16)
    *_, reference = build.build_full(cfg, wide, *more)  # frozen, so it needs no masters
    build.make_masters(reference)
    assert {p.dtype for p in reference.parameters()} == {torch.bfloat16}


def test_a_model_that_only_samples_is_loaded_once(tiny_dir, monkeypatch):
    """A model of 7B that plays the user, or is evaluated, took 30 GB twice: loaded in fp32, and
    copied by its engine. It is loaded in the type of computing, and the engine has that very
    model."""
    loaded = []

    monkeypatch.setattr(loading, "check_model", lambda model, tokenizer: loaded.append(model))
    assert load_local(str(tiny_dir), 0.0).engine.model is loaded[0]
    policy = policy_of(tiny_dir)
    assert policy.make_agent(seed=0).engine.model is loaded[1] and len(loaded) == 2


def policy_of(path, *flags, reader=None):
    """The policy in a directory, as evaluate.py loads it with these flags."""
    args = evaluate.make_parser().parse_args(flags)
    return load_policy(find_weights(str(path), None), args, reader)


def test_the_hub_is_asked_for_a_name_with_an_owner_only(tmp_path, monkeypatch):
    """A typing error in a path cost 23 s, and six traces of retries. But a folder with the owner's
    name, for another model of theirs, makes no path of a name. (The tests are offline.)"""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "openai-community" / "other").mkdir(parents=True)
    told = "no such directory, and the hub did not provide it"
    with pytest.raises(BadModel, match=f"--model openai-community/gpt2: {told}"):
        load_model("openai-community/gpt2")
    paths = "nowhere a/b/c runs/nowhere runs/x/checkpoint-1 ./nowhere ./x/y ../x /nowhere/a x/"
    for path in paths.split():
        with pytest.raises(BadModel, match="no such directory; "):
            load_model(path)


def test_adapters_are_refused_wherever_they_lie(tiny_dir, tmp_path, monkeypatch, capfd):
    """An adapter that peft has written, alone: it was evaluated, which may cost money, and each
    checkpoint was without weights. In the hub's cache it is one, too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--x--sft" / "snapshots" / "1"
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_dir), LoraConfig(r=2))
    model.save_pretrained(place)
    write_file(place.parents[1] / "refs" / "main", "1")
    out = tmp_path / "out"
    for name in (place, "x/sft"):
        told = refuse(capfd, "--model", name, "--steps", 1, "--out", out)
        assert f"adapters for {tiny_dir}, no whole model; merge them" in told and not out.exists()
        assert "adapters for" in refuse(capfd, "--policy", name, main=evaluate.main)


# ------------------------------------------------------------------------------- what is written


def test_what_is_written_holds_every_weight(tiny_dir, tiny_tokenizer, tmp_path):
    """transformers writes the adapters alone of a model that has some: a checkpoint without the
    weights, that nobody could go on from. In parts, all of them are there."""
    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    model.save_pretrained = partial(model.save_pretrained, max_shard_size="20KB")
    write_model(tmp_path / "parts", model, model.state_dict(), tiny_tokenizer)
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    weights = model.state_dict()
    model.add_adapter(LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(CannotWrite, match="numbers of the weights are not in"):
        write_model(tmp_path / "adapters", model, weights, tiny_tokenizer)


@pytest.mark.parametrize("kind, more", [("default", {}), ("linear", {"factor": 2.0})])
def test_transformers_4_finds_its_keys(kind, more, tiny_tokenizer, tmp_path):
    """It does not know the names that version 5 writes: it computed with a base of 10,000, and found
    no tokenizer. For version 5 nothing changes."""
    rope = {"rope_type": kind, "rope_theta": 5e5, **more}
    model = make_tiny_model(tiny_tokenizer, rope_parameters=rope)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    write_model(tmp_path, model, model.state_dict(), tokenizer)
    config = read_json(tmp_path / "config.json")
    assert config["rope_theta"] == 5e5 and config["rope_scaling"] == (rope if more else None)
    words = (tmp_path / "tokenizer_config.json").read_text()
    assert "PreTrainedTokenizerFast" in words and "additional_special_tokens" in words
    assert "extra_special_tokens" not in words  # a list there ends version 4
    again, read = (C.from_pretrained(tmp_path) for C in (AutoModelForCausalLM, AutoTokenizer))
    assert again.config.rope_parameters == rope
    assert torch.equal(again.eval()(IDS).logits, model.eval()(IDS).logits)
    text = "<|im_start|>user\nna\u00efve <|im_end|>"
    assert read.encode(text) == tokenizer.encode(text)
    assert read.extra_special_tokens == ["<|im_start|>"]


CLASSES = [
    "PreTrainedTokenizerFast",
    "LlamaTokenizerFast",
    "LlamaTokenizer",
    "Qwen2TokenizerFast",
    "GPT2Tokenizer",
    "NoSuchTokenizer",
    None,  # no tokenizer_config.json
]


@pytest.mark.parametrize("name", CLASSES)
def test_the_tokens_are_those_of_tokenizer_json(name, tmp_path):
    """Whatever class tokenizer_config.json names: transformers builds that class from the
    vocabulary, with the class's own split into words. Of R1-Distill-Llama the policy read
    "Mysisterforgot", and was scored. From a checkpoint anybody reads the file's tokens, too."""
    tokenizer = make_tiny_tokenizer(["203", ".\n"], THREE_DIGITS)
    config = AutoConfig.for_model("llama", vocab_size=len(tokenizer), **SIZES)
    for part in (AutoModelForCausalLM.from_config(config), tokenizer):
        part.save_pretrained(tmp_path)
    entries("tokenizer_config.json", tokenizer_class=name)(tmp_path)
    if name is None:
        (tmp_path / "tokenizer_config.json").unlink()
    model, read = load_model(tmp_path)
    write_model(tmp_path / "checkpoint", model, model.state_dict(), read)
    text = "<|im_start|>user\nMy sister's was on 20312.\n\n  Na\u00efve!<|im_end|>"
    for found in (read, AutoTokenizer.from_pretrained(tmp_path / "checkpoint")):
        ids = found.encode(text)
        assert ids == tokenizer.encode(text) and found.decode(ids) == text
        assert found.chat_template == tokenizer.chat_template
        named = found.eos_token_id, found.pad_token_id
        assert named == (name and (tokenizer.eos_token_id, tokenizer.pad_token_id) or (None, None))


@pytest.mark.parametrize("split, warnings", [(QWEN_WORDS, 0), (THREE_DIGITS, 1), (None, 0)])
def test_what_others_read_otherwise_is_one_warning(split, warnings, tmp_path, capfd):
    """For a Qwen2 AutoTokenizer takes Qwen's own split, whatever class and split a checkpoint names:
    behind a server the policy would read other tokens than it was trained on, without a word. None:
    of the toy, which is a Qwen2."""
    model = tmp_path / "model" if split else "toy"
    if split:
        tokenizer = make_tiny_tokenizer(["203", ".\n"], split)
        for part in (make_tiny_model(tokenizer), tokenizer):
            part.save_pretrained(model)
    assert go(model, tmp_path / "out", "--steps", 0) == 0
    assert capfd.readouterr().out.count("warning: AutoTokenizer") == warnings


# -------------------------------------------------------------------------------- what is refused


def by_torch(path):
    load_engine(path, 1.0, "policy ")


def by_vllm(path):
    load_engine(path, 1.0, "policy ", "vllm")


def its_tokenizer(path):
    (path / "tokenizer.json").unlink()
    entries("tokenizer_config.json", tokenizer_class="OwnTokenizer")(path)
    loading.load_tokenizer(path)


@pytest.mark.parametrize(
    "load, kind, auto_map",
    [
        (by_torch, "unknown", {"AutoConfig": "own.X"}),
        (by_vllm, "unknown", {"AutoConfig": "own.X"}),
        # one that transformers has, but not as a causal LM
        (by_torch, "clip_text_model", {"AutoModelForCausalLM": "own.X"}),
        (its_tokenizer, "unknown", {"AutoTokenizer": ["own.X", "own.X"]}),
    ],
)
def test_code_of_a_directory_is_never_run(load, kind, auto_map, tiny_dir, tmp_path, monkeypatch):
    """transformers asked on standard input whether it may, and the "y" of a script ran it. Where
    transformers has a class of its own nobody needs the code, nor where the tokens have a file."""
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    path = shutil.copytree(tiny_dir, tmp_path / "model")
    (path / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')")
    for name in ("config.json", "tokenizer_config.json"):
        entries(name, auto_map=auto_map)(path)
    assert load_model(path)
    entries(model_type=kind)(path)
    with pytest.raises(BadModel, match="it needs code of its own") as error:
        load(path)
    assert "\n" not in str(error.value) and not (tmp_path / "was_run").exists()


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'4d' * 32}\nsize 4976698672\n"


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "pytorch_model.bin",
        "tokenizer.json",
        "tokenizer.model",
        "config.json",
        "generation_config.json",  # its stop tokens would be missing, without a word
        "special_tokens_map.json",
        "added_tokens.json",
        "merges.txt",
        "model.safetensors.index.json",
        "chat_template.jinja",
    ],
)
def test_a_pointer_of_git_lfs_is_named(name, tiny_dir, tmp_path):
    """A repository that was cloned without git-lfs: "header too large", and half a sentence."""
    path = shutil.copytree(tiny_dir, tmp_path / "model")
    for unread in ("consolidated.safetensors", "a.gguf", "tokenizer.model", "pytorch_model.bin"):
        (path / unread).write_text(POINTER)
    assert load_model(path)  # these are not read
    if name in ("tokenizer.model", "merges.txt"):
        (path / "tokenizer.json").unlink()
        (path / "tokenizer.model").unlink()
    elif name.endswith("index.json"):
        (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    elif name.endswith((".bin", "2.safetensors")):
        (path / "model.safetensors").unlink()
    (path / name).write_text(POINTER)
    with pytest.raises(BadModel, match=f": {name} is only a pointer of git-lfs"):
        load_model(path)


def cut_the_weights(path):
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def weights(harm):
    """A function that changes the stored weights, a dict, by `harm`."""

    def change(path):
        stored = load_file(path / "model.safetensors")
        harm(stored)
        save_file(stored, path / "model.safetensors", {"format": "pt"})

    return change


def entries(name="config.json", **settings):
    """A function that changes entries of a JSON file, or makes the file."""

    def change(path):
        write_json(path / name, read_json(path / name) | settings)

    return change


def cut_the_vocabulary(path):
    data = read_json(path / "tokenizer.json")
    data["model"].update(vocab=dict(list(data["model"]["vocab"].items())[:5]), merges=[])
    write_json(path / "tokenizer.json", data)


@pytest.mark.parametrize(
    "harm, told",
    [
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors"),
        (cut_the_weights, ""),
        # transformers would make one up, at random
        (weights(lambda stored: stored.pop("lm_head.weight")), "lm_head.weight"),
        (lambda path: (path / "chat_template.jinja").unlink(), "no chat template"),
        (lambda path: (path / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda path: (path / "tokenizer.json").write_text('{"model'), "its tokenizer: JSON"),
        # every text would be nothing, and a run would end with a score and exit code 0
        (cut_the_vocabulary, "tokenizer.json is missing"),
        # every blank would be lost, as quietly
        (entries("tokenizer.json", pre_tokenizer=None), "into 'Myselfishere'"),
        # transformers would put them on their base, whatever else stands here
        (entries("adapter_config.json", base_model_name_or_path="x/y"), "adapters for x/y"),
        (entries(quantization_config={"quant_method": "fp8"}), "quantized"),
        # a reward model, half a model: what is loaded is another one
        (weights(lambda stored: stored.update(score=torch.ones(9))), "unexpected_keys: score"),
        (
            entries(num_hidden_layers=1, layer_types=["full_attention"]),
            "unexpected_keys: model.layers.1",
        ),
        (entries(intermediate_size=65), "mismatched_keys: "),
        (weights(lambda stored: stored["lm_head.weight"].zero_()), "lm_head.weight is damaged"),
        (weights(lambda stored: stored["lm_head.weight"][99].log_()), "lm_head.weight is damaged"),
    ],
)
def test_a_bad_model_directory_is_one_line_for_the_user(harm, told, tiny_dir, tmp_path):
    """Not a traceback, and never a model that is partly noise: one line, what is wrong with it."""
    path = shutil.copytree(tiny_dir, tmp_path / "model")
    harm(path)
    with pytest.raises(BadModel) as error:
        load_local(path, 0.0)
    line = str(error.value)
    assert told in line and "\n" not in line
    assert line.startswith(f"--simulator local:{path}: ")  # of the three that a run may have


@pytest.mark.parametrize(
    "family, settings, told",
    [
        ("qwen2", dict(use_sliding_window=True, max_window_layers=1), "sliding_attention"),
        ("gemma3_text", dict(head_dim=16), "sliding_attention"),
        ("mistral", dict(sliding_window=8), "sliding window of 8 tokens"),
        ("mistral", dict(sliding_window=None), None),
        # as in Qwen2.5's config.json
        ("qwen2", dict(sliding_window=131072, use_sliding_window=False), None),
        ("qwen2", dict(vocab_size=300), "its tokenizer knows ids up to"),
        ("granite", dict(logits_scaling=4.0, initializer_range=0.2), "not those of its output"),
        (
            "gemma3",
            dict(text_config=dict(**SIZES, head_dim=16, vocab_size=400), vision_config=SIZES),
            "sliding_attention",
        ),
        ("phi3", LONGROPE, "who shares the batch"),
        ("phi3", dict(rope_parameters=None, pad_token_id=0), None),
    ],
)
def test_a_model_that_this_code_would_get_wrong_is_refused(
    family, settings, told, stored, tmp_path
):
    """The trainer gives a model its mask, and so takes its windows from it: layers that were
    trained to see 4,096 tokens would see all. vLLM keeps them, and the two would disagree, but in
    dialogues that are longer than a window only. Granite divides its logits behind the output
    layer, which `Policy.forward` reads directly: log-probs would all be wrong, and the engine's
    alike, so that no self-check would show it. Phi-4-mini takes other frequencies for the whole
    batch if one of its rows is long: a reply's log-probs are those of its neighbours. Gemma 3 reads
    pictures, too, and has its layers in a configuration of its own."""
    stored(family, **SIZES, **settings)
    if told is None:
        assert load_model(tmp_path)
        return
    with pytest.raises(BadModel, match=told) as error:
        load_model(tmp_path)
    assert "\n" not in str(error.value)


ALIBI = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=2, alibi=True, eos_token_id=None
)


@pytest.mark.parametrize("family, settings", [("falcon", ALIBI), ("hrm_text", SIZES)])
def test_a_model_that_the_passes_do_not_suit_is_refused(family, settings, stored, tmp_path, capfd):
    """Falcon with ALiBi makes its biases from a mask that has another shape here; HRM asks the cache
    what no other model asks. Each was a traceback in the first dialogue. No list of such models
    would be whole: the passes are made once at load, by whoever trains, is measured or plays the
    user."""
    stored(family, **settings)
    told = refuse(capfd, "--model", tmp_path, "--steps", 1, "--out", tmp_path / "out")
    assert f"--model {tmp_path}: cannot be trained" in told and not (tmp_path / "out").exists()
    for load in (lambda: load_local(str(tmp_path), 0.0), lambda: policy_of(tmp_path)):
        with pytest.raises(BadModel, match=f"{tmp_path}: cannot be sampled from: "):
            load()


def test_engine_and_trainer_are_compared_at_load(tiny_dir, tmp_path, monkeypatch, capfd):
    """An engine that says something else is found out before the first evaluation, not by the first
    update."""

    def other_engine(model, stop_ids, temperature, **more):
        return TorchEngine(model, stop_ids, 2 * temperature, **more)

    monkeypatch.setattr(build, "TorchEngine", other_engine)
    told = refuse(capfd, "--model", tiny_dir, "--steps", 1, "--out", tmp_path / "out")
    assert "engine and trainer disagree" in told and not (tmp_path / "out").exists()


@pytest.mark.parametrize("pad", [None, 5])
def test_the_row_of_the_pad_token_is_trained_like_any_other(pad, stored, tmp_path):
    """Where the pad token is the stop token, torch's `padding_idx` made its gradient exactly 0. And
    a checkpoint needs the stop ids only: transformers reads a temperature beside do_sample false,
    and will not write it."""
    stored("qwen2", **SIZES, pad_token_id=pad)
    odd = {"eos_token_id": 5, "temperature": 0.9, "do_sample": False}
    write_json(tmp_path / "generation_config.json", odd)
    model, _ = load_model(tmp_path)
    model(torch.tensor([[4, 5, 6]])).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad[5].norm() > 0
    model.save_pretrained(tmp_path / "again")
    assert loading.stop_ids(tmp_path / "again") == [5]


# ------------------------------------------------------------------------------- models as they come


@pytest.mark.parametrize("lora_rank", [0, 2])
@pytest.mark.parametrize("model", ["toy", "x/y"])
def test_activations_are_kept_where_somebody_asks(model, lora_rank, tiny_dir):
    """Of a real model they may take more memory than all else; the toy's are few, and to compute
    them again takes a quarter of its time. Nothing else of a run shows which it is."""
    for keep in (False, True):
        cfg = Settings(algo="ppo", model=model, lora_rank=lora_rank, keep_activations=keep)
        body, _ = load_model(tiny_dir)
        bodies = [body]
        if lora_rank:
            build.build_lora(cfg, body, None)
        else:
            _, critic, _ = build.build_full(cfg, body, None, tiny_dir, tiny_dir, torch.float32)
            bodies.append(critic.body)
        again = [body.is_gradient_checkpointing for body in bodies]
        assert again == [model != "toy" and not keep] * len(bodies)


@pytest.mark.slow
@pytest.mark.parametrize("pad", [None, "<|im_end|>"])
def test_models_as_they_come(pad, tiny_tokenizer, tmp_path, monkeypatch, capfd):
    """Padding is masked by where it came from, never by its id: so any id will do, the stop token's
    too, and that one is still trained, or no reply would learn to end. Real models have rows in
    their embedding that no word has; a random one samples them. Of a tied head two copies are
    gathered from shards; one is stored. And --template-args reaches the template, is kept when the
    run goes on, cannot change then, and is known to evaluate.py."""
    gather = build.iter_full_weights

    def gather_copies(module):
        return ((name, weight.clone()) for name, weight in gather(module))

    monkeypatch.setattr(build, "iter_full_weights", gather_copies)
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.pad_token = pad
    ask = "<|im_start|>assistant\n"
    switch = "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    tokenizer.chat_template = tokenizer.chat_template.replace(ask, ask + switch)
    model, out = tmp_path / "model", tmp_path / "out"
    make_tiny_model(tokenizer, vocab_size=400, tie_word_embeddings=True).save_pretrained(model)
    tokenizer.save_pretrained(model)

    flags = "--max-tokens 40 --max-turns 2 --steps 1 --eval-size 1 --template-args".split()
    assert go(model, out, *flags, '{"enable_thinking": true}') == 0
    [row] = metrics(out)
    assert row["tokens_trained"] == row["tokens_sampled"] > 0
    assert row["logp_gap"] < 1e-5 and row["stray_thoughts"] == 0
    place = out / "checkpoint-000001"
    names = load_file(place / "model.safetensors").keys()
    assert "lm_head.weight" not in names and "model.embed_tokens.weight" in names
    loaded, _ = load_model(place)
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert go_on(out, "--steps", 2) == 0 and len(metrics(out)) == 2
    line = refuse(capfd, "--resume", out, "--template-args", '{"enable_thinking": false}')
    assert "--template-args cannot change" in line
    assert policy_of(out).settings["template_args"] == {"enable_thinking": True}
    # the policy has its own, so without a reader the flag would do nothing, unseen
    flag = "--template-args", '{"enable_thinking": false}'
    for main, policy in ((evaluate.main, ["--policy", out]), (chat.main, [out])):
        assert f"--template-args: {out}/" in refuse(capfd, *policy, *flag, main=main)
    hearing = policy_of(out, *flag, reader="local:reader")
    assert hearing.settings["template_args"] == {"enable_thinking": True}
