"""support/loading.py - a model and its tokenizer, from a directory or from the hub.

What cannot be trained here is refused while loading, in one line: a directory without weights, a
tokenizer that does not give back what it was given, logits that are no output of the last layer.
"""

from support.settings import BadModel, may_be_on_the_hub

from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open

SENTENCE = "My sister forgot my birthday."  # what every tokenizer must give back


def best_device():
    """This rank's GPU, if there is one."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )


def stop_ids(path):
    """The tokens at which a model stops, by its generation_config.json; none if there is none."""
    from transformers import GenerationConfig

    try:
        found = GenerationConfig.from_pretrained(path, local_files_only=Path(path).is_dir())
    except OSError:
        return []
    return np.atleast_1d(found.eos_token_id or []).tolist()


def stored_dtype(path):
    """The type of the weights in a directory; fp32 for a mixture, which a narrower would round."""
    found = set()
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, "pt") as weights:
            found |= {weights.get_slice(name).get_dtype() for name in weights.keys()}
    return {("BF16",): torch.bfloat16, ("F16",): torch.float16}.get(tuple(found), torch.float32)


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
    directly.
    """
    from huggingface_hub import snapshot_download
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    here = Path(path).is_dir()
    needed = "one is needed that holds config.json, weights and a tokenizer"
    if here and not (Path(path) / "config.json").is_file():
        raise BadModel(f"{flag} {path}: this directory holds no config.json; {needed}")
    if not here and not may_be_on_the_hub(path):
        raise BadModel(f"{flag} {path}: no such directory; {needed}")
    try:
        place = (
            path
            if here
            else snapshot_download(
                path,
                allow_patterns=["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"],
                ignore_patterns=["consolidated*", "*/*"],
            )
        )  # the same weights once more, in other layouts
        tokenizer = AutoTokenizer.from_pretrained(place, local_files_only=True)
        if not tokenizer.chat_template:
            raise BadModel(
                "its tokenizer has no chat template; take an instruct model, or add "
                "chat_template.jinja"
            )
        back = tokenizer.decode(tokenizer(SENTENCE, add_special_tokens=False)["input_ids"])
        if back.strip() != SENTENCE:  # without tokenizer.json transformers makes up a vocabulary
            raise BadModel(
                f"its tokenizer turns {SENTENCE!r} into {back!r}; is tokenizer.json there?"
            )
        load = lambda dtype: AutoModelForCausalLM.from_pretrained(
            place,
            dtype=dtype,
            attn_implementation="sdpa",
            local_files_only=True,
            output_loading_info=True,
        )
        model, found = load(dtype or stored_dtype(place))
        if not dtype and any(b.dtype in (torch.bfloat16, torch.float16) for b in model.buffers()):
            model, found = load(torch.float32)  # what it computed when it was built is rounded
        if found["missing_keys"]:
            raise BadModel(f"its weights lack {sorted(found['missing_keys'])[0]}")
        last, rows = max(tokenizer.get_vocab().values()), len(model.get_input_embeddings().weight)
        if last >= rows:  # more rows than ids is usual, fewer is a mix-up
            raise BadModel(f"its tokenizer knows ids up to {last}, its embedding has {rows} rows")
    except Exception as error:
        # transformers, safetensors and jinja each have their own; to the user all mean the same
        what = "" if here else "no such directory, and not to be had from the hub: "
        raise BadModel(f"{flag} {path}: {what}{' '.join(str(error).split())[:200]}") from None
    for part in (model.config, *model.modules()):  # layers copy the numbers when they are built
        for name in (
            "attention_dropout",
            "attn_pdrop",
            "embd_pdrop",
            "resid_pdrop",
            "hidden_dropout",
            "dropout",
            "p",
        ):  # p: of nn.Dropout
            if isinstance(getattr(part, name, None), float):
                setattr(part, name, 0.0)
    with torch.no_grad():
        ids = torch.arange(4)[None]
        if not torch.allclose(
            model(ids).logits,
            model.get_output_embeddings()(model.base_model(ids).last_hidden_state),
            atol=1e-3,
        ):
            raise BadModel(
                f"{flag} {path}: its logits are not those of its output layer (scaled "
                "or capped); not supported"
            )
    return model.to(device), tokenizer
