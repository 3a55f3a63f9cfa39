"""models/loading.py - a model and its tokenizer, from a directory and into one.

From top to bottom: what loads (`load_model`, `load_tensors`) and what it is made of; what refuses a
model that cannot be trained here, each in one line; what writes (`write_model`); what is asked of a
loaded model or of the machine.
"""

from support.errors import BadModel, CannotWrite, naming
from support.files import read_json, size_of, write_json
from support.settings import old_gpu

import ctypes
import re
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load_file


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

    Raises BadModel (`refuse_...`, below).
    """
    from transformers import AutoModelForCausalLM, GenerationConfig, logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    with naming(f"{prefix}{path}"):
        directory = directory_of(path)
        refuse_quantized(directory)
        tokenizer = load_tokenizer(directory)
        model, problems = read_by(
            AutoModelForCausalLM,
            directory,
            attn_implementation="sdpa",
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `refuse_misfits` names them
            dtype=dtype or "auto",
        )
        refuse_misfits(problems)
        check_model(model, tokenizer)
        # A checkpoint needs only the stop ids. transformers refuses to write some of the other
        # values that it reads: a temperature beside do_sample false.
        model.generation_config = GenerationConfig(eos_token_id=stop_ids(directory) or None)
        make_trainable(model)
    return model.to(device), tokenizer


def load_tensors(path):
    """What `torch.save` has written, on the CPU, mapped from the file: a tensor is read when it is
    used."""
    with naming(f"{path}: cannot be read; was it copied only in part?"):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


def make_trainable(model):
    """Set dropout to 0, in the configuration and in the layers, which copied it from there.
    `eval()` would switch it off, but gradient checkpointing needs train mode. With dropout the same
    tokens would get other log-probs on every pass, and the first ratio would not be 1.

    The padding's row of an embedding gets a gradient, too: it may be the stop token's."""
    for part in (model.config, *model.modules()):
        if isinstance(part, torch.nn.Embedding):
            part.padding_idx = None
        for name, value in list(vars(part).items()):
            # attention_dropout, attn_pdrop ...; `p` is nn.Dropout's
            if isinstance(value, float) and ("drop" in name or name == "p"):
                setattr(part, name, 0.0)


def directory_of(place):
    """The directory with the files of a model, a Path; it is downloaded if `place` is a name on the
    hub, OWNER/NAME. The same weights in other formats are left out."""
    path = Path(place)
    if not path.is_dir():
        # A place in runs/ is a path with a typing error. Beside any other folder it may be a name.
        if not re.fullmatch(r"(?!runs/)\w[\w.-]*/\w[\w.-]*", str(place)):
            raise BadModel(
                "no such directory; a directory is needed, or a model of the hub, OWNER/NAME"
            )
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # else it prints each of its retries
        with naming("no such directory, and the hub did not provide it"):
            download = snapshot_download(
                place,
                allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"],
                ignore_patterns=["consolidated*", "*/*"],
            )
        path = Path(download)
    refuse_pointers(path)
    refuse_adapters(path)
    return path


def load_tokenizer(directory):
    """The tokenizer in a directory: that of tokenizer.json, if there is one. (AutoTokenizer takes
    the class that tokenizer_config.json names. Some classes read no more than the vocabulary, and
    split texts by rules of their own: other tokens than those that the model was trained on.)"""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    has_file = (directory / "tokenizer.json").exists()
    with naming("its tokenizer"):
        tokenizer = read_by(PreTrainedTokenizerFast if has_file else AutoTokenizer, directory)
    if not tokenizer.chat_template:
        raise BadModel(
            "its tokenizer has no chat template; take an instruct model, or add chat_template.jinja"
        )
    return tokenizer


def reads_alike(directory, tokenizer):
    """Does AutoTokenizer, which other programs take, find the same tokens in a directory? (For a Qwen2
    it builds Qwen's own split into words, whatever class and split the files name.)"""
    from transformers import AutoTokenizer

    # No decomposed letter: Qwen2's class composes them and the toy's file does not, which never has any.
    text = "In 2031 we didn't.\n\n\n  Na\u00efve! \u4f60\u597d"
    with suppress(Exception):  # that class may not take such a file at all
        return read_by(AutoTokenizer, directory).encode(text) == tokenizer.encode(text)
    return False


def read_by(kind, directory, **options):
    """What a class of transformers reads from a directory, whose own code is never run. (By default
    transformers asks on standard input whether it may run it.)"""
    try:
        return kind.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False, **options
        )
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise BadModel("it needs code of its own (auto_map), which is never run") from None
        raise


# ------------------------------------------------------- what refuses a model: each raises BadModel

# The files of a model that are read: in each line those of the first pattern that fits any.
WHAT_IS_READ = (
    "*config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.json vocab.json tokenizer.model",
    "tokenizer.json merges.txt",
    "model.safetensors model-*.safetensors *.bin",
    "model.safetensors model.safetensors.index.json *.index.json",
)


def refuse_pointers(path):
    """Refuse files that git-lfs has not fetched."""
    for patterns in WHAT_IS_READ:
        files = (sorted(path.glob(pattern)) for pattern in patterns.split())
        for file in next(filter(None, files), []):
            if size_of(file) < 1024 and b"https://git-lfs" in file.read_bytes():
                raise BadModel(f"{file.name} is only a pointer of git-lfs; fetch it: git lfs pull")


def refuse_adapters(path):
    """Refuse adapters: transformers would load their base and put them on it, even if another model
    stands beside them, and a checkpoint would hold the adapters alone."""
    adapters = path / "adapter_config.json"
    if adapters.exists():
        raise BadModel(
            f"adapters for {read_json(adapters).get('base_model_name_or_path')}, no whole model; "
            "merge them (peft's merge_and_unload); a checkpoint's adapter/ is merged in its parent"
        )


def refuse_quantized(directory):
    """Refuse quantized weights: they have no gradient, or are written as other weights than were
    read. Some kinds are loaded only if a package is there, others as if they were not quantized."""
    if read_json(directory / "config.json").get("quantization_config"):
        raise BadModel("its weights are quantized; take the model that they were made from")


def refuse_misfits(problems):
    """Refuse weights that do not fit the configuration: transformers makes up at random what is
    missing, and leaves out what it does not know: the head of a reward model, layers or biases that
    config.json does not have. problems: its loading_info."""
    for problem, names in problems.items():
        if names:
            raise BadModel(f"its weights do not fit its config.json: {problem}: {min(names)}")


def check_model(model, tokenizer):
    """Refuse a loaded model that does not belong to its tokenizer, is damaged, or would be computed
    wrongly. (One without max_position_embeddings is refused, too: reading it raises.)"""
    config = model.config.get_text_config()  # a part of the config of a model that reads pictures
    refuse_unknown_ids(model, tokenizer)
    refuse_windows(config)
    refuse_damage(model)
    refuse_other_logits(model, config.max_position_embeddings)


def refuse_unknown_ids(model, tokenizer):
    """Refuse a tokenizer with ids that the embedding does not have (more rows are usual)."""
    last = max(tokenizer.get_vocab().values())
    rows = len(model.get_input_embeddings().weight)
    if last >= rows:
        raise BadModel(f"its tokenizer knows ids up to {last}, its embedding has {rows} rows")


def refuse_windows(config):
    """Refuse layers that do not attend to all earlier tokens: neither the trainer's mask
    (`policy.tree_mask`) nor the engine's has a window."""
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


def refuse_damage(model):
    """Refuse weights that a stopped copy has not written: they may be zeros, and a half-written
    number may be NaN, for which each comparison is false. (The weights of a norm may be equal.)"""
    for name, weight in model.named_parameters():
        if weight.dim() > 1 and not weight.max() > weight.min():
            raise BadModel(f"{name} is damaged: NaN, or everywhere the same number")


def refuse_other_logits(model, context):
    """Refuse logits that are not those of the output layer, which `Policy.forward` takes as they
    are, or that depend on the row's neighbours, such as one that ends at the last of `context`.
    (Both passes have the same shape, so even in bf16 only the positions can make a difference.)"""
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


# ------------------------------------------------------------------------ what writes, and the rest


def write_model(directory, model, weights, tokenizer):
    """Write a model and its tokenizer. weights: {name: tensor}, a tied one once. Raises CannotWrite
    if the files do not hold them all: which of them are written is for transformers to decide, and
    of a model with adapters of peft it writes the adapters alone."""
    missing = sum(map(torch.numel, weights.values()))
    model.save_pretrained(directory, state_dict=weights)
    tokenizer.save_pretrained(directory)
    # Numbers are counted, because some tensors are written under other names, or in parts. A file
    # is mapped: only its header is read.
    for path in directory.glob("*.safetensors"):
        missing -= sum(map(torch.numel, load_file(path).values()))
    if missing:
        raise CannotWrite(f"{missing} numbers of the weights are not in its safetensors")
    # transformers 4 knows some keys by other names. It would take RoPE's base to be 10,000, without
    # a word, and find no tokenizer. Version 5 reads the old names, too.
    path = directory / "config.json"
    config = read_json(path)
    rope = config.get("rope_parameters") or {}
    if "rope_theta" in rope:  # else the model has no RoPE, or several for several kinds of layers
        scaling = rope if rope["rope_type"] != "default" else None
        write_json(path, config | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling})
    path = directory / "tokenizer_config.json"
    text = path.read_text("utf-8").replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
    path.write_text(
        text.replace('"extra_special_tokens": [', '"additional_special_tokens": ['), "utf-8"
    )


def blocks_of(model):
    """The transformer blocks of a model: its longest ModuleList."""
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList)]
    return max(lists, key=len, default=torch.nn.ModuleList())


def stop_ids(path):
    """The ids of a model's stop tokens, from its generation_config.json; [] if it has no such file,
    or if the file names no stop token."""
    eos = read_json(directory_of(path) / "generation_config.json").get("eos_token_id")
    return [eos] if isinstance(eos, int) else eos or []  # None, an id, or a list of ids


def best_device():
    """This rank's GPU, if there is one."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def best_dtype(device):
    """The type in which models compute: bf16 on a GPU that has it, else fp32."""
    return torch.float32 if device.type != "cuda" or old_gpu() else torch.bfloat16


def return_freed_memory():
    """Return freed memory to the system. glibc keeps a freed block that lies below one in use, so
    the parts of a step, one after the other, would take the sum of their memory. Without glibc
    nothing is done."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
