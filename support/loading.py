"""support/loading.py - a model and its tokenizer: from a directory or from the hub.

What cannot be trained here is refused while loading, in one line: a directory without weights, a
tokenizer that does not give back what it was given, layers that do not attend to all that came
before, logits that are no output of the last layer.
"""

from support.errors import BadModel

import ctypes
import os
import re
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open

SENTENCE = "My sister forgot my birthday."  # what every tokenizer must give back

# How dropout probabilities are called in the configurations and layers of transformers; `p` is
# nn.Dropout's.
DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "hidden_dropout",
    "dropout",
    "p",
)


def load_model(path, device="cpu", prefix="--model ", dtype=torch.float32):
    """Load a Hugging Face causal LM and its tokenizer. Returns (model, tokenizer).

    path: a directory, or a name on the hub. prefix: what stands before it in messages, such as
    "--model " or "--simulator local:".
    dtype: of the weights.

        float32   The default, whatever the file holds. Weights that are trained must be fp32: a
                  bf16 weight of 0.02 has neighbours 1.2e-4 away, so that an Adam step of 1e-6
                  would round to nothing. (transformers would load a bf16 file as bf16.)
        None      As stored. The file is mapped and not copied, which saves memory. Before training
                  the caller must call `make_masters`, which makes fp32 copies.
        another   For weights that are never trained: the base under adapters, or what only samples.

    Buffers (rotary frequencies, scales) are as exact as in float32, whatever the dtype.

    Dropout is set to 0. `eval()` would switch it off, but gradient checkpointing needs train mode.
    With dropout the same tokens would get other log-probs on every pass, and the first ratio would
    not be 1.

    Raises BadModel if something is missing or damaged, and for the architectures that this code
    would get wrong: those with sliding windows, and the few that scale or cap their logits behind
    the output layer (see `check_model`).
    """
    from transformers import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    typed = f"{prefix}{path}"
    try:
        directory = directory_of(path)
        tokenizer = load_tokenizer(directory)
        model = load_weights(directory, dtype)
        check_model(model, tokenizer)
        # in its configuration, and in its layers, which copied the numbers from there
        for part in (model.config, *model.modules()):
            for name in DROPOUTS:
                if isinstance(getattr(part, name, None), float):
                    setattr(part, name, 0.0)
    except BadModel as error:
        raise BadModel(f"{typed}: {error}") from None
    except Exception as error:
        # transformers, safetensors and jinja each have their own; to the user all mean the same
        raise BadModel(f"{typed}: {in_one_line(error)}") from None
    return model.to(device), tokenizer


def load_to_sample(path, prefix):
    """`load_model` for a model that nobody trains: on the device and in the type of computing."""
    device = best_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return load_model(path, device, prefix, dtype)


def in_one_line(error):
    """The beginning of what an error says."""
    return " ".join(str(error).split())[:200]


def refuse_missing(name):
    """Raise BadModel if --model `name` is no model, as far as can be seen without loading or
    downloading anything. A run asks this first, before it waits for the simulator's server."""
    try:
        check_place(name)
    except BadModel as error:
        raise BadModel(f"--model {name}: {error}") from None


def check_place(place):
    """Raise BadModel if `place` is neither a directory with a model nor possibly a name on the
    hub."""
    needed = "one is needed that holds config.json, weights and a tokenizer"
    if Path(place).is_dir():
        if not (Path(place) / "config.json").is_file():
            raise BadModel(f"this directory holds no config.json; {needed}")
    elif not may_be_on_the_hub(place):
        raise BadModel(f"no such directory; {needed}, or a model of the hub, OWNER/NAME")


def may_be_on_the_hub(name):
    """Could `name` be a model on the hub, OWNER/NAME? (`./NAME` and `../NAME` are paths, and NAME
    alone is more likely a directory that is not here. The oldest models of the hub once had such
    names, and have an owner now: openai-community/gpt2.)"""
    is_a_name = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", str(name))
    return bool(is_a_name) and not Path(name).exists() and not looks_like_a_path(name)


def looks_like_a_path(name):
    """Is `name`, which does not exist here, meant as a path and not as a model on the hub? It is if
    it begins with runs/, or if its parent is a directory. Then it is a typing error, and the hub
    need not be asked for it."""
    if Path(name).parts[0] == "runs":
        return True
    parent = Path(name).parent
    return parent != Path() and parent.is_dir()


def directory_of(place):
    """The directory with the files of a model, which is downloaded if `place` is a name on the hub.
    Files that hold the same weights once more, in other formats, are left out. Raises BadModel if
    it is neither a directory with a model nor to be had from the hub."""
    check_place(place)
    if Path(place).is_dir():
        return place
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # else it prints each of its retries
    try:
        return snapshot_download(
            place,
            allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"],
            ignore_patterns=["consolidated*", "*/*"],
        )
    except Exception as error:
        reason = in_one_line(error)
        raise BadModel(f"no such directory, and not to be had from the hub: {reason}") from None


def load_tokenizer(directory):
    """The tokenizer in a directory. Raises BadModel without a chat template, and if it does not
    give back what it was given."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    if not tokenizer.chat_template:
        raise BadModel(
            "its tokenizer has no chat template; take an instruct model, or add chat_template.jinja"
        )
    back = tokenizer.decode(tokenizer(SENTENCE, add_special_tokens=False)["input_ids"])
    if back.strip() != SENTENCE:  # without tokenizer.json transformers makes up a vocabulary
        raise BadModel(f"its tokenizer turns {SENTENCE!r} into {back!r}; is tokenizer.json there?")
    return tokenizer


def load_weights(directory, dtype):
    """The model in a directory, its weights in `dtype`; None: as they are stored. Raises BadModel
    if a weight is missing, which transformers would make up at random."""
    from transformers import AutoModelForCausalLM

    load = partial(
        AutoModelForCausalLM.from_pretrained,
        directory,
        attn_implementation="sdpa",
        local_files_only=True,
        output_loading_info=True,
    )
    model, loading_info = load(dtype=dtype or stored_dtype(directory))
    narrow = (torch.bfloat16, torch.float16)
    if any(buffer.dtype in narrow for buffer in model.buffers()):
        # Buffers are not in the file. They are computed when the model is built, and here they were
        # rounded to the narrow type. In a model that is built in fp32 they are not.
        model, loading_info = load(dtype=torch.float32)
        for p in model.parameters():
            p.data = p.data.to(dtype or p.dtype)
    if loading_info["missing_keys"]:
        raise BadModel(f"its weights lack {sorted(loading_info['missing_keys'])[0]}")
    return model


def stored_dtype(directory):
    """The type in which all weights in a directory are stored. fp32 if there are several types: a
    narrower one would round some of them."""
    types = set()
    for file in Path(directory).glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            types |= {weights.get_slice(name).get_dtype() for name in weights.keys()}
    if types == {"BF16"}:
        return torch.bfloat16
    if types == {"F16"}:
        return torch.float16
    return torch.float32


def check_model(model, tokenizer):
    """Raise BadModel for a model that does not belong to its tokenizer, or that this code would get
    wrong."""
    # More rows than ids are usual.
    last = max(tokenizer.get_vocab().values())
    rows = len(model.get_input_embeddings().weight)
    if last >= rows:
        raise BadModel(f"its tokenizer knows ids up to {last}, its embedding has {rows} rows")
    # Every layer has to attend to all that came before: the trainer's mask (`policy.tree_mask`)
    # knows no window, and the engine's neither.
    kinds = getattr(model.config, "layer_types", None)
    if kinds is None:  # then one kind for all layers; some configs name a window and leave it off
        window = getattr(model.config, "sliding_window", None)
        in_use = window and getattr(model.config, "use_sliding_window", True)
        kinds = [f"a sliding window of {window} tokens"] if in_use else []
    others = sorted(set(kinds) - {"full_attention"})
    if others:
        raise BadModel(
            f"its layers do not attend to the whole dialogue ({others[0]}); not supported"
        )
    # `Policy.forward` takes the logits of the output layer as they are.
    with torch.no_grad():
        ids = torch.arange(4)[None]
        logits = model(ids).logits
        hidden = model.base_model(ids).last_hidden_state
        of_the_output_layer = model.get_output_embeddings()(hidden)
    if not torch.allclose(logits, of_the_output_layer, atol=1e-3):
        raise BadModel(
            "its logits are not those of its output layer (scaled or capped); not supported"
        )


def stop_ids(path):
    """The ids of the tokens at which a model stops, by its generation_config.json; [] if it has no
    such file, or if the file names none."""
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(path, local_files_only=Path(path).is_dir())
    except OSError:
        return []
    eos = config.eos_token_id  # None, an id, or a list of ids
    if eos is None:
        return []
    return eos if isinstance(eos, list) else [eos]


def best_device():
    """This rank's GPU, if there is one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def memory_of(device):
    """The bytes of memory of a device: of the GPU, or of this machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def return_freed_memory():
    """Return memory that was freed to the system. glibc keeps a freed block that lies below one in
    use, so the parts of a step, one after the other, would take the sum of their memory. Without
    glibc nothing is done."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
