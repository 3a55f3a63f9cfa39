"""elsewhere.py - a device that is not the CPU, on a machine that has no other.

On a GPU a tensor made in the wrong place, or two types that do not meet, ends a run; on a CPU
nobody notices. Within `elsewhere()` a tensor that is sent to DEVICE, or made there, becomes a
`Tensor` that says so and keeps its numbers on the CPU. Whatever mixes it with a tensor that stayed
behind is an error, as it is on CUDA. So code runs to its end, with real numbers in bf16 too.

(torch's own FakeTensorMode would do it without numbers, but a build of torch for CPUs alone aborts
the process at the first gradient of a fake cuda tensor. "meta" is the one other device that such a
build can differentiate on.)
"""

from models.loading import load_model

import contextlib
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = "meta"
MOVES = {"_to_copy", "copy_"}  # what may see both sides


class Tensor(torch.Tensor):
    """A tensor on DEVICE; `numbers` has the numbers."""

    @staticmethod
    def __new__(cls, numbers):
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.size(),
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=DEVICE,
            requires_grad=numbers.requires_grad,
        )
        made.numbers = numbers
        return made

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):  # p.data = ...: the numbers go with it
        torch.Tensor.data.__set__(self, other)
        self.numbers = other.numbers

    def tolist(self):
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return compute(func, args, kwargs or {})


class Mode(TorchDispatchMode):
    """Sees every operation."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if torch.is_inference_mode_enabled():  # there torch leaves it to us to take apart
            with self:
                result = func.decompose(*args, **kwargs or {})
            if result is not NotImplemented:
                return result
        return compute(func, args, kwargs or {})


make = torch.tensor


def tensor(*args, device=None, **more):
    """torch.tensor makes its tensor without asking a mode."""
    return make(*args, **more) if device is None else make(*args, **more).to(device)


@contextlib.contextmanager
def elsewhere():
    """Within this DEVICE is a place to compute."""
    torch.tensor = tensor
    try:
        with Mode():
            yield torch.device(DEVICE)
    finally:
        torch.tensor = make


def load(*args, **kwargs):
    """load_model, at home: transformers builds a model on "meta", and means it."""
    torch.tensor, before = make, torch.tensor
    try:
        with ThreadPoolExecutor(1) as pool:  # in another thread no mode is on
            return pool.submit(load_model, *args, **kwargs).result()
    finally:
        torch.tensor = before


def compute(func, args, kwargs):
    """One operation of torch, on the numbers; its result is where its operands are, or where it is
    asked for. Raises AssertionError where CUDA would refuse: a tensor of the CPU, if it is more
    than one number, among those of the device."""
    name = func.__name__.partition(".")[0]
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    away = [t for t in tensors if isinstance(t, Tensor)]
    asked = kwargs.get("device") and torch.device(kwargs["device"]).type == DEVICE
    left = [t for t in tensors if t.dim() and not isinstance(t, Tensor)]
    if left and (away or asked) and name not in MOVES:
        raise AssertionError(f"{name}: a tensor {tuple(left[0].shape)} is on the CPU")

    def numbers_of(x):
        return x.numbers if isinstance(x, Tensor) else x

    cpu_kwargs = {key: tree_map(numbers_of, x) for key, x in kwargs.items()}
    if "device" in cpu_kwargs:
        cpu_kwargs["device"] = "cpu"
    result = func(*tree_map(numbers_of, args), **cpu_kwargs)
    if name.endswith("_") and args and isinstance(args[0], torch.Tensor):
        return args[0]  # changed in place
    if not (asked if kwargs.get("device") else away):
        return result
    return tree_map(lambda x: Tensor(x) if isinstance(x, torch.Tensor) else x, result)
