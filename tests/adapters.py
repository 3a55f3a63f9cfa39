"""adapters.py - policy, critic and reference on one base, for the tests of adapters."""

from models.lora import AdapterView, SharedBase

import copy

import torch

from policy import Policy


def shared(model, critic=True, rank=4, learnt=True, seed=0):
    """(root, policy, critic, reference) on a copy of `model`. learnt: as after some training, no B
    is zero."""
    root = SharedBase(Policy(copy.deepcopy(model), 0.7), rank, critic, seed)
    if learnt:
        rng = torch.Generator().manual_seed(1)
        for name, p in root.named_parameters():
            if "lora_B" in name or name == "critic.head.weight":
                p.data.normal_(0, 0.1, generator=rng)
    return root, *(AdapterView(root, who) for who in ("policy", "critic", "reference"))
