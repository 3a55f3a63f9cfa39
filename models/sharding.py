"""models/sharding.py - weights in shards: FSDP2, which each rank of a run with a GPU, or with several
ranks, needs. One process on a CPU never loads this file.
"""

from models.loading import blocks_of

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard(module, device, dtype, before):
    """Shard the weights of a module over all ranks, in place. device: "cpu" or "cuda"; before: is
    called with each part before it is sharded.

    Each transformer block becomes a unit of FSDP2, and the rest is one more unit, the root. In a
    forward pass FSDP2 gathers a unit's weights just before it computes, in `dtype` (bf16 on a GPU),
    and frees them afterwards. Master weights, gradients and Adam's moments are fp32 shards. Every
    pass must go through the root's forward(), where FSDP2 begins.

    Gradients come out *averaged* over ranks, which is why `ppo.optimize` multiplies its loss by
    their number."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # One part after the other: a rank never holds more in fp32 than its shard and a block.
    for part in (*blocks_of(module), module):
        before(part)
        fully_shard(part, mesh=mesh, mp_policy=precision)
    module.register_forward_hook(free_gathered_weights)


def free_gathered_weights(root, *_):
    """After a forward pass without gradients: FSDP2 keeps the root's gathered weights for a backward
    pass, even if there will be none."""
    if not torch.is_grad_enabled():
        root.reshard()
