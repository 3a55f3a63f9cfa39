"""support/loading.py - a model and its tokenizer.

A model that cannot be trained here is refused while loading, in one line: a directory without
weights, a tokenizer without a chat template, layers that do not attend to all earlier tokens,
logits that are not the output of the last layer.
"""

from support.errors import BadModel, one_line

import ctypes
import re
from contextlib import suppress
from pathlib import Path

import torch


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
        another   For weights that are never trained: the base under adapters, or only sampling.

    Dropout is set to 0. `eval()` would switch it off, but gradient checkpointing needs train mode.
    With dropout the same tokens would get other log-probs on every pass, and the first ratio would
    not be 1.

    Raises BadModel if something is missing or damaged, and for the architectures that this code
    would compute wrongly: those with sliding windows, those whose rows depend on each other, and
    the few that scale or cap their logits after the output layer (see `check_model`).
    """
    from transformers import AutoModelForCausalLM, GenerationConfig, logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        directory = directory_of(path)
        tokenizer = load_tokenizer(directory)
        model, loading_info = AutoModelForCausalLM.from_pretrained(
            directory,
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
            dtype=dtype or "auto",
        )
        if loading_info["missing_keys"]:  # transformers would make them up at random
            raise BadModel(f"its weights lack {sorted(loading_info['missing_keys'])[0]}")
        check_model(model, tokenizer)
        # A checkpoint needs only the stop ids. transformers refuses to write some of the other
        # values that it reads: a temperature beside do_sample false.
        model.generation_config = GenerationConfig(eos_token_id=stop_ids(directory) or None)
        # dropout: in its configuration, and in its layers, which copied the numbers from there
        for part in (model.config, *model.modules()):
            if isinstance(part, torch.nn.Embedding):
                # else that row would get no gradient, and it may be the stop token's
                part.padding_idx = None
            for name, value in list(vars(part).items()):
                # attention_dropout, attn_pdrop ...; `p` is nn.Dropout's
                if isinstance(value, float) and ("drop" in name or name == "p"):
                    setattr(part, name, 0.0)
    except Exception as error:
        # transformers, safetensors and jinja have exceptions of their own; here all mean the same
        raise BadModel(f"{prefix}{path}: {one_line(error)}") from None
    return model.to(device), tokenizer


def load_tensors(path):
    """What `torch.save` has written, on the CPU, mapped from the file: a tensor is read when it is
    used. Raises BadModel, which names the file."""
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # half a file: of zip, pickle or torch
        why = f"was it copied only in part? ({one_line(error)})"
        raise BadModel(f"{path}: cannot be read; {why}") from None


def directory_of(place):
    """The directory with the files of a model, which is downloaded if `place` is a name on the hub,
    OWNER/NAME. The same weights in other formats are left out. Raises BadModel if `place` is no
    directory and the hub does not have it."""
    path = Path(place)
    if path.is_dir():
        return place
    # A place in an existing directory, or in runs/, is a path with a typing error.
    is_a_name = re.fullmatch(r"(?!runs/)\w[\w.-]*/\w[\w.-]*", str(place))
    if not is_a_name or path.parent.exists():
        raise BadModel(
            "no such directory; a directory is needed, or a model of the hub, OWNER/NAME"
        )
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
        raise BadModel(f"no such directory, and the hub did not provide it: {error}") from None


def load_tokenizer(directory):
    """The tokenizer in a directory. Raises BadModel without a chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    if not tokenizer.chat_template:
        raise BadModel(
            "its tokenizer has no chat template; take an instruct model, or add chat_template.jinja"
        )
    return tokenizer


def check_model(model, tokenizer):
    """Raise BadModel for a model that does not belong to its tokenizer, or that this code would
    compute wrongly."""
    # More rows than ids are usual.
    last = max(tokenizer.get_vocab().values())
    rows = len(model.get_input_embeddings().weight)
    if last >= rows:
        raise BadModel(f"its tokenizer knows ids up to {last}, its embedding has {rows} rows")
    # Every layer must attend to all earlier tokens: neither the trainer's mask (`policy.tree_mask`)
    # nor the engine's has a window.
    config = model.config.get_text_config()  # a part of the config of a model that reads pictures
    context = config.max_position_embeddings  # a model without one is refused: this line raises
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # one kind for all layers; some configs name a window and do not use it
        window = getattr(config, "sliding_window", None)
        in_use = window and getattr(config, "use_sliding_window", True)
        kinds = [f"a sliding window of {window} tokens"] if in_use else []
    others = sorted(set(kinds) - {"full_attention"})
    if others:
        raise BadModel(
            f"its layers do not attend to the whole dialogue ({others[0]}); not supported"
        )
    # `Policy.forward` takes the logits of the output layer as they are, and a row must not depend
    # on its neighbours, such as one that ends at the last position. (Both passes have the same
    # shape, so even in bf16 only the positions can make a difference.)
    ids = torch.arange(16).repeat(2, 1)
    positions = torch.stack([ids[0], ids[0] + context - 16])
    with torch.no_grad():
        logits = model(ids, position_ids=positions).logits[0]
        hidden = model.base_model(ids).last_hidden_state[0]
        gap = (logits - model.get_output_embeddings()(hidden)).abs().mean()
    limit = 1e-4 if gap.dtype == torch.float32 else 0.1
    if not gap <= limit:  # not `gap > limit`, which is false for NaN
        raise BadModel(
            "its logits are not those of its output layer (scaled or capped), or depend on who "
            f"shares the batch (longrope), by {gap:.1e}; not supported"
        )


def stop_ids(path):
    """The ids of a model's stop tokens, from its generation_config.json; [] if it has no such file,
    or if the file names no stop token."""
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(path, local_files_only=Path(path).is_dir())
    except OSError:
        return []
    eos = config.eos_token_id  # None, an id, or a list of ids
    return [eos] if isinstance(eos, int) else eos or []


def best_device():
    """This rank's GPU, if there is one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def return_freed_memory():
    """Return freed memory to the system. glibc keeps a freed block that lies below one in use, so
    the parts of a step, one after the other, would take the sum of their memory. Without glibc
    nothing is done."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
