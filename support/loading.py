"""support/loading.py - a model and its tokenizer, from a directory or from the hub.

What cannot be trained here is refused while loading, in one line: a directory without weights, a
tokenizer that does not give back what it was given, logits that are no output of the last layer.
"""

from support.errors import BadModel
from support.settings import may_be_on_the_hub

from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

SENTENCE = "My sister forgot my birthday."  # what every tokenizer must give back


# How configurations and layers of transformers name a dropout; `p` is nn.Dropout's.
DROPOUTS = (
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "hidden_dropout",
    "dropout",
    "p",
)


def load_model(path, device="cpu", flag="--model", dtype=torch.float32):
    """Load a Hugging Face causal LM and its tokenizer. `path`: a directory, or a name on the hub.

    Weights are fp32 whatever the checkpoint holds: transformers would load a bf16 checkpoint as
    bf16, and a bf16 weight of 0.02 has neighbours 1.2e-4 away, so an Adam step of 1e-6 would round
    to nothing. (`dtype`: of weights that nobody trains; None: as they are stored, if that loses
    nothing; they are then mapped, not copied, until `make_masters`.) Dropout is set to 0, not
    switched off by `eval()`: with it the same tokens get other log-probs on every pass, and no
    first ratio is 1.

    Returns (model, tokenizer). Raises BadModel if something is missing or damaged, and for the few
    architectures that scale or cap their logits behind the output layer, which this code reads
    directly. `flag`: where the path came from, for the message.
    """
    from transformers import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    is_directory = Path(path).is_dir()
    needed = "one is needed that holds config.json, weights and a tokenizer"
    if is_directory and not (Path(path) / "config.json").is_file():
        raise BadModel(f"{flag} {path}: this directory holds no config.json; {needed}")
    if not is_directory and not may_be_on_the_hub(path):
        raise BadModel(f"{flag} {path}: no such directory; {needed}")
    try:
        directory = path if is_directory else download(path)
        tokenizer = load_tokenizer(directory)
        model = load_weights(directory, dtype)
        check_vocabulary(tokenizer, model)
    except Exception as error:
        # transformers, safetensors and jinja each have their own; to the user all mean the same
        source = "" if is_directory else "no such directory, and not to be had from the hub: "
        raise BadModel(f"{flag} {path}: {source}{' '.join(str(error).split())[:200]}") from None
    remove_dropout(model)
    if not logits_are_of_the_output_layer(model):
        raise BadModel(
            f"{flag} {path}: its logits are not those of its output layer (scaled "
            "or capped); not supported"
        )
    return model.to(device), tokenizer


def download(name):
    """The directory of a model from the hub. Left out is what holds the same weights once more, in
    other layouts."""
    from huggingface_hub import snapshot_download

    return snapshot_download(
        name,
        allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"],
        ignore_patterns=["consolidated*", "*/*"],
    )


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
    """The model in a directory, its weights in `dtype`; None: in the type in which they are stored.
    Raises BadModel if a weight is missing, which transformers would make up at random."""
    from transformers import AutoModelForCausalLM

    def load(dtype):
        return AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
        )

    model, loading_info = load(dtype or stored_dtype(directory))
    narrow = (torch.bfloat16, torch.float16)
    if not dtype and any(buffer.dtype in narrow for buffer in model.buffers()):
        # a buffer is computed when the model is built, and has just been rounded
        model, loading_info = load(torch.float32)
    if loading_info["missing_keys"]:
        raise BadModel(f"its weights lack {sorted(loading_info['missing_keys'])[0]}")
    return model


def stored_dtype(directory):
    """The type of the weights in a directory; fp32 for a mixture, which a narrower would round."""
    types = set()
    for file in Path(directory).glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            types |= {weights.get_slice(name).get_dtype() for name in weights.keys()}
    if types == {"BF16"}:
        return torch.bfloat16
    if types == {"F16"}:
        return torch.float16
    return torch.float32


def check_vocabulary(tokenizer, model):
    """Raise BadModel if the tokenizer has ids without a row of the embedding. (More rows than ids
    are usual, fewer are a mix-up.)"""
    last, rows = max(tokenizer.get_vocab().values()), len(model.get_input_embeddings().weight)
    if last >= rows:
        raise BadModel(f"its tokenizer knows ids up to {last}, its embedding has {rows} rows")


def remove_dropout(model):
    """Set every dropout of the model to 0. Its layers too, because they copied the numbers from the
    configuration when they were built."""
    for part in (model.config, *model.modules()):
        for name in DROPOUTS:
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)


def logits_are_of_the_output_layer(model):
    """Whether nothing happens to the logits behind the output layer."""
    with torch.no_grad():
        ids = torch.arange(4)[None]
        logits = model(ids).logits
        hidden = model.base_model(ids).last_hidden_state
        return torch.allclose(logits, model.get_output_embeddings()(hidden), atol=1e-3)


def stop_ids(path):
    """The tokens at which a model stops, by its generation_config.json; none if there is none."""
    from transformers import GenerationConfig

    try:
        config = GenerationConfig.from_pretrained(path, local_files_only=Path(path).is_dir())
    except OSError:
        return []
    return np.atleast_1d(config.eos_token_id or []).tolist()


def best_device():
    """This rank's GPU, if there is one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
