"""models/lora.py - low-rank adapters (Hu 2021, arXiv 2106.09685), written by hand.

Every linear layer of the transformer blocks gets two thin matrices beside its own:

    y = W x + b + (alpha / r) B A x        W [out, in] frozen, A [r, in], B [out, r], r small

  * Init: A random, B zero, so that training starts at the model itself. Not both zero: the gradient
    of each is a product with the other, and nothing would ever move.
  * Scale: B A is a sum of r terms. With the factor alpha / r one learning rate is right for every
    rank r. That rate is some ten times the one for the whole model ("LoRA Without Regret", 2025).
  * On a GPU the base is bf16, 2 bytes a number. It is frozen, so no small step on it can be lost
    by rounding. Adapters, their gradients and Adam's moments are fp32.
  * PPO's critic is a second set of adapters and a scalar head on the *same* base; the reference of
    a KL is the base with adapters off. Only one model is in memory.

Policy, critic and reference thus run the same layers, and a `switch` says whose adapters these use.
Two lines of PPO's update would go wrong without it:

    values = critic(batch)     would be computed with the policy's adapters, which were in use last
    loss.backward()            computes the policy's blocks a second time (`recompute_activations`),
                               maybe after the switch was set to the critic's

`SharedBase.forward` sets it before each pass, `SharedBase.checkpoint_contexts` before such a second
one.

Engines and checkpoints get plain models, with W + (alpha / r) B A for W (`merge`). Left out:
dropout, and adapters on embeddings and output layer.
"""

from models.loading import blocks_of
from support.errors import BadInput
from support.files import write_json
from support.ranks import full_tensor, iter_full_weights

import contextlib
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import nn

from policy import Critic

ALPHA = 32  # B A is scaled by ALPHA / r ("LoRA Without Regret")


class LoraLinear(nn.Linear):
    """A frozen linear layer with a pair of adapters A, B for each of `names` ("policy", "critic").

    The `switch` is one object that all layers of a model share. switch.active is the name of the
    pair that is in use, or None: then the layer is the frozen one alone.

    Gradients for one x, with s = alpha / r and g = dL/dy (autograd computes them):
        dL/dB = s g (A x)^T,   dL/dA = s (B^T g) x^T,   dL/dx = (W + s B A)^T g
    B starts at zero, so dL/dA does too: in the first step A only decays. dL/dW is not needed:
    forward and backward pass take 4 floating-point operations a token and parameter of W, not 6."""

    def __init__(self, linear, rank, names, rng, switch):
        # nn.Linear makes a weight, which is replaced at once; on "meta" it takes no memory
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = ALPHA / rank
        self.switch = switch
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        device = linear.weight.device
        for name in names:
            # A ~ U(-1, 1) / sqrt(in): A x is about as large as x's entries, whatever the width
            uniform = 2 * torch.rand(rank, self.in_features, generator=rng) - 1
            self.lora_A[name] = nn.Parameter((uniform / self.in_features**0.5).to(device))
            self.lora_B[name] = nn.Parameter(torch.zeros(self.out_features, rank).to(device))

    def forward(self, x):
        """[..., in] -> [..., out]. Adapters compute in the type of x."""
        y = super().forward(x)
        name = self.switch.active
        if name is None:
            return y
        A = self.lora_A[name].to(x.dtype)
        B = self.lora_B[name].to(x.dtype)
        return y + self.scale * F.linear(F.linear(x, A), B)


def add_adapters(model, rank, names=("policy",), seed=0):
    """Freeze `model`, in place, and give every linear layer of its blocks the adapters `names`. By
    `seed` they are the same on every rank. Returns their switch, with none in use. Raises BadInput
    if there are no such layers, if one of them is smaller than `rank`, or if there are experts
    beside them."""
    layers = [
        (parent, name, layer)
        for parent in blocks_of(model).modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear)
    ]
    if not layers:
        raise BadInput(
            f"--lora-rank {rank}: {type(model).__name__} has no linear layers in its "
            "blocks; leave it out, and the whole model is trained"
        )
    smallest, name = min((min(layer.weight.shape), name) for _, name, layer in layers)
    if rank > smallest:
        raise BadInput(
            f"--lora-rank {rank}: larger than a layer of this model ({name}); take {smallest} at "
            "most"
        )
    matrices = {id(p) for p in blocks_of(model).parameters() if p.dim() > 1}
    if matrices - {id(layer.weight) for _, _, layer in layers}:
        raise BadInput(
            f"--lora-rank {rank}: {type(model).__name__} is a mixture of experts, and adapters "
            "would not reach the experts; leave it out"
        )
    model.requires_grad_(False)
    rng = torch.Generator().manual_seed(seed)
    switch = SimpleNamespace(active=None)
    for parent, name, layer in layers:
        setattr(parent, name, LoraLinear(layer, rank, names, rng, switch))
    return switch


@contextlib.contextmanager
def use_adapter(switch, name):
    """A context in which the adapters `name` are in use; None: the base alone."""
    name_before = switch.active
    switch.active = name
    try:
        yield
    finally:
        switch.active = name_before


def merge(named_tensors, model):
    """Yield the weights of a plain model: each W of `model` with adapters becomes
    W + (alpha / r) B A, in fp32; all others stay as they are.

    named_tensors: (name, whole tensor), from state_dict() or iter_full_weights(). One is merged at
    a time, so that there is never a second model in memory. On many ranks a collective call: every
    rank must walk to the end."""
    layers = {
        f"{path}.weight": module
        for path, module in model.named_modules()
        if isinstance(module, LoraLinear)
    }
    for key, tensor in named_tensors:
        if ".lora_" in key:
            continue
        layer = layers.get(key)
        if layer is not None:
            A = full_tensor(layer.lora_A["policy"].detach())
            B = full_tensor(layer.lora_B["policy"].detach())
            tensor = tensor.float() + layer.scale * (B @ A)
        yield key, tensor


class SharedBase(nn.Module):
    """Policy, critic and reference on one frozen base, with adapters of `rank`.

    They are one module because of FSDP2: a transformer block can be a part of one sharded module
    only, and weights are gathered only by that module's forward(). So everything goes through the
    forward() here; ppo.py and grpo.py are given an `AdapterView` of each part."""

    def __init__(self, policy, rank, critic=False, seed=0):
        super().__init__()
        names = ("policy", "critic") if critic else ("policy",)
        self.switch = add_adapters(policy.model, rank, names, seed)
        self.policy = policy
        # the critic's body is the base itself and no copy; only its head is new
        self.critic = Critic(policy.model) if critic else None

    def forward(self, batch, who, **how):
        """What "policy", "critic" or "reference" (`who`) computes for the batch. how: further
        arguments of its forward()."""
        adapter = None if who == "reference" else who  # the reference is the base alone
        part = self.critic if who == "critic" else self.policy
        with use_adapter(self.switch, adapter):
            return part(batch, **how)

    def checkpoint_contexts(self):
        """The contexts of a forward pass and of its recomputation in the backward pass, which sets
        the switch to the adapters in use now. (Activation checkpointing calls it in each forward
        pass, as torch's `context_fn`.)"""
        return contextlib.nullcontext(), use_adapter(self.switch, self.switch.active)


class AdapterView:
    """One of "policy", "critic" and "reference" of the SharedBase `root`. ppo.py uses it like a
    separate model: it calls it with a batch, and trains its parameters."""

    def __init__(self, root, who):
        self.root, self.who = root, who
        self.model = root.policy.model

    def __call__(self, batch, **how):
        """What this part computes for the batch (`SharedBase.forward`)."""
        return self.root(batch, self.who, **how)

    def named_parameters(self):
        """[(name, parameter)] of its adapters, as ...up_proj.lora_A.critic, and of the critic's
        head: all its trained parameters."""
        pairs = [
            (f"{path}.lora_{letter}.{self.who}", matrices[self.who])
            for path, layer in self.root.named_modules()
            if isinstance(layer, LoraLinear) and self.who in layer.lora_A
            for letter, matrices in (("A", layer.lora_A), ("B", layer.lora_B))
        ]
        if self.who == "critic":
            head = self.root.critic.head
            pairs += [(f"critic.head.{name}", p) for name, p in head.named_parameters()]
        return pairs

    def parameters(self):
        """The parameters without their names."""
        return [p for _, p in self.named_parameters()]

    def merged_weights(self):
        """Yield (name, whole tensor) of the model with the policy's adapters merged. A collective
        call: every rank must iterate to the end."""
        return merge(iter_full_weights(self.model), self.model)

    def write_peft(self, directory, adapters, cfg):
        """Write its adapters in the format of the package peft, in a folder of their own. If they
        stood beside config.json, transformers would silently add them to the merged weights.
        adapters: {name: tensor}, of all views."""
        # policy.model.model.layers.0.mlp.up_proj.lora_A.policy becomes
        # base_model.model.model.layers.0.mlp.up_proj.lora_A.weight
        tensors = {
            f"base_model.{name.removeprefix('policy.').removesuffix(self.who)}weight": tensor
            for name, tensor in adapters.items()
            if name.endswith(f".{self.who}")
        }
        directory.mkdir()
        save_file(tensors, directory / "adapter_model.safetensors", {"format": "pt"})
        write_json(
            directory / "adapter_config.json",
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "base_model_name_or_path": cfg.model,
                "r": cfg.lora_rank,
                "lora_alpha": ALPHA,
                "target_modules": sorted({name.split(".")[-3] for name in tensors}),
            },
        )
