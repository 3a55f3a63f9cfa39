"""lora.py - low-rank adapters (Hu 2021, arXiv 2106.09685), written by hand.

Every linear layer of the transformer blocks gets two thin matrices beside its own:

    y = W x + b + (alpha / r) B A x        W [out, in] frozen, A [r, in], B [out, r], r small

  * Init: A random, B zero, so that training starts at the model itself. Not both zero: the gradient
    of each is a product with the other, and nothing would ever move.
  * Scale: B A is a sum of r terms; alpha / r keeps one learning rate right for every rank. It is
    some ten times that of the whole model ("LoRA Without Regret", 2025).
  * On a GPU the base is bf16, 2 bytes a number: nothing is ever added to it, so nothing is rounded
    away. Adapters, their gradients and Adam's moments are fp32.
  * PPO's critic is a second set of adapters and a scalar head on the *same* base; the reference of
    a KL is the base with adapters off. No second and no third model in memory.

Engines and readers of checkpoints get W + (alpha / r) B A, a plain model. Left out: dropout, and
adapters on embeddings and output layer. Run it alone for the smallest example:  python lora.py
"""

from support.errors import BadInput
from support.flags import Parser
from support.ranks import full_tensor

import contextlib
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from policy import Critic


class LoraLinear(nn.Linear):
    """A frozen linear layer with adapters, {name: matrix}; `switch.active` names those in use,
    or None.

    With s = alpha / r and g = dL/dy, as autograd finds them, for one x:
        dL/dB = s g (A x)^T,   dL/dA = s (B^T g) x^T,   dL/dx = (W + s B A)^T g
    So in the first step only B moves. And without dL/dW a token costs 4 floating-point operations a
    parameter, forward and back, instead of 6."""

    def __init__(self, linear, rank, alpha, names, rng, switch):
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.scale, self.switch = alpha / rank, switch
        self.lora_A, self.lora_B = nn.ParameterDict(), nn.ParameterDict()
        device = linear.weight.device
        for name in names:
            # U(-1, 1) / sqrt(in): A keeps the size of what it reads, whatever the layer's width
            uniform = 2 * torch.rand(rank, self.in_features, generator=rng) - 1
            self.lora_A[name] = nn.Parameter((uniform / self.in_features**0.5).to(device))
            self.lora_B[name] = nn.Parameter(torch.zeros(self.out_features, rank).to(device))

    def forward(self, x):
        """[..., in] -> [..., out]. Adapters compute in the type of x."""
        y, name = super().forward(x), self.switch.active
        if name is None:
            return y
        A, B = self.lora_A[name].to(x.dtype), self.lora_B[name].to(x.dtype)
        return y + self.scale * F.linear(F.linear(x, A), B)


def add_adapters(model, rank, alpha, names=("policy",), seed=0):
    """Freeze `model`, in place, and give every linear layer of its blocks the adapters `names`, the
    same on every rank. Returns their switch, which is off. Raises BadInput."""
    # the blocks are the longest list of modules that a transformer has
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = max(lists, key=len, default=nn.ModuleList())
    layers = [
        (parent, name, layer)
        for parent in blocks.modules()
        for name, layer in parent.named_children()
        if isinstance(layer, nn.Linear)
    ]
    if not layers:
        raise BadInput(
            f"--lora-rank {rank}: {type(model).__name__} has no linear layers in its "
            "blocks; leave it out, and the whole model is trained"
        )
    least, name = min((min(layer.weight.shape), name) for _, name, layer in layers)
    if rank > least:
        raise BadInput(
            f"--lora-rank {rank}: larger than a layer of this model ({name}); take {least} at most"
        )
    model.requires_grad_(False)
    rng, switch = torch.Generator().manual_seed(seed), SimpleNamespace(active=None)
    for parent, name, layer in layers:
        setattr(parent, name, LoraLinear(layer, rank, alpha, names, rng, switch))
    return switch


@contextlib.contextmanager
def use_adapter(switch, name):
    """Within this the adapters `name` are in use; None: the base alone."""
    before, switch.active = switch.active, name
    try:
        yield
    finally:
        switch.active = before


def merge(named_tensors, model, name="policy"):
    """The (name, tensor) of `model` as those of a plain one, one at a time: each W with its
    (alpha / r) B A, in fp32. Without adapters they come as they are. On many ranks collective."""
    layers = {
        f"{path}.weight": module
        for path, module in model.named_modules()
        if isinstance(module, LoraLinear)
    }
    for key, tensor in named_tensors:
        if ".lora_" in key:
            continue
        if layer := layers.get(key):
            A = full_tensor(layer.lora_A[name].detach())
            B = full_tensor(layer.lora_B[name].detach())
            tensor = tensor.float() + layer.scale * (B @ A)
        yield key, tensor


class SharedBase(nn.Module):
    """Policy, critic and reference on one frozen base: one module, as FSDP2 gives a block to one
    root only, through whose forward() everything goes."""

    def __init__(self, policy, rank, alpha, critic=False, seed=0):
        super().__init__()
        names = ("policy", "critic") if critic else ("policy",)
        self.switch = add_adapters(policy.model, rank, alpha, names, seed)
        self.policy = policy
        self.critic = Critic(policy.model, share=True) if critic else None

    def forward(self, batch, who):
        """What "policy", "critic" or "reference" (`who`) computes for the batch."""
        adapter = None if who == "reference" else who
        model = self.critic if who == "critic" else self.policy
        with use_adapter(self.switch, adapter):
            return model(batch)

    def checkpoint_contexts(self):
        """For activation checkpointing (torch's `context_fn`): the contexts of a forward pass and
        of its recomputation in the backward pass. The latter uses the adapters of the former,
        whoever was called in between."""
        return contextlib.nullcontext(), use_adapter(self.switch, self.switch.active)


class AdapterView:
    """Policy, critic or reference of a SharedBase, as ppo.py wants a model: called with a batch,
    and with the parameters that it trains."""

    def __init__(self, root, who):
        self.root, self.who, self.model = root, who, root.policy.model

    def __call__(self, batch):
        return self.root(batch, self.who)

    def named_parameters(self):
        """[(name, parameter)] of its adapters, and of the critic's head."""
        adapter, head = f".{self.who}", f"{self.who}.head"
        return [
            (name, p)
            for name, p in self.root.named_parameters()
            if p.requires_grad and (name.endswith(adapter) or name.startswith(head))
        ]

    def parameters(self):
        """The parameters without their names."""
        return [p for _, p in self.named_parameters()]


if __name__ == "__main__":
    Parser(description="Takes a few steps on the adapters of one small layer.").parse_args()
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.ModuleList([nn.Linear(3, 2, bias=False)])), torch.ones(3)
    add_adapters(block, rank=1, alpha=1).active = "policy"
    for step in range(3):
        y = block[0][0](x)
        ((y - torch.tensor([1.0, 0.0])) ** 2).sum().backward()
        print(f"step {step}:  y", [round(v, 3) for v in y.tolist()], " wanted [1, 0]")
        for name, p in block.named_parameters():
            if p.requires_grad:
                gradient = [round(v, 3) for v in p.grad.ravel().tolist()]
                print(f"    gradient of {name[4:10]}", gradient)
                p.data, p.grad = p.data - 0.2 * p.grad, None
