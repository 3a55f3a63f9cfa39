"""support/ranks.py - one process or many: torchrun, what ranks tell each other, FSDP2.

    torchrun --nproc-per-node 8 rlver.py ...

Every rank has its own dialogues, its own engine and a shard of the models. The functions that
gather, reduce or broadcast are collective calls: every rank must make them, or all ranks hang. All
ranks are processes of one node.
"""

from support.errors import BadInput, RunError, one_line

import ctypes
import dataclasses
import os
import signal
import sys
from datetime import timedelta
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import nn

# Seconds that a rank waits for another one. A rollout ends long before that (ROLLOUT_TIMEOUT).
GROUP_TIMEOUT = 7200


def world_size():
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    """The number of this rank, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def join_ranks(cuda):
    """Join the processes that torchrun started, or be a world of one. Must be called before any
    model or engine is built: an engine that is built first takes its process for the only one, and
    later reductions silently do nothing. Raises BadInput if variables of torchrun are missing or
    wrong."""
    try:
        # All three or none. (A shell may export MASTER_ADDR and MASTER_PORT for other programs.)
        values = [*map(os.environ.get, "RANK LOCAL_RANK WORLD_SIZE".split())]
        rank, local_rank, ranks = map(int, values if any(values) else (0, 0, 1))
        if not 0 <= rank < ranks:
            raise ValueError("there is no such rank")
        if rank != local_rank:
            raise ValueError("all ranks must be on one node")
        if ranks > 1 and sys.platform == "linux":
            # Die when torchrun dies. Without that the processes outlive a torchrun that is killed,
            # and wait for each other for hours.
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG
        if cuda:
            torch.cuda.set_device(local_rank)
        if dist.is_initialized() or (ranks == 1 and not cuda):
            return
        # One GPU without torchrun: on a GPU, FSDP2 computes in bf16 from fp32 masters, and it needs
        # a process group even for one rank. (A HashStore needs no address.)
        alone = {} if ranks > 1 else dict(store=dist.HashStore(), rank=0, world_size=1)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if cuda else "gloo",
            timeout=timedelta(seconds=GROUP_TIMEOUT),
            **alone,
        )
    except (TypeError, ValueError, RuntimeError) as error:  # missing; no number; refused by torch
        raise BadInput(
            f"a rank cannot start where RANK, LOCAL_RANK, WORLD_SIZE are {values}, MASTER_PORT is "
            f"{os.environ.get('MASTER_PORT')} ({one_line(error)}); let torchrun set them, or unset all"
        ) from None


def leave_ranks(code):
    """End this process with an exit code. A rank leaves the process group first, but not after a
    failure: other ranks may still be in a collective call, and torchrun ends them. With vLLM it
    does not leave: vLLM destroys its own groups later than this.

    A rank skips Python's own shutdown. Otherwise a thread of gloo may free its last tensor after
    the interpreter is gone, and the process is aborted although all work is done
    (pytorch#179291)."""
    if code == 0 and dist.is_initialized() and "vllm" not in sys.modules:
        dist.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    sys.exit(code)


# ----------------------------------------------------------------------- what ranks tell each other


def all_reduce_sum(tensor):
    """The sum of a tensor over all ranks."""
    if world_size() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def all_gather_list(things):
    """The lists of all ranks, concatenated, on every rank."""
    if world_size() == 1:
        return things
    lists = [None] * world_size()
    dist.all_gather_object(lists, things)
    return [thing for part in lists for thing in part]


def barrier():
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def broadcast(function, *args):
    """Call function(*args) on the first rank alone. Returns its result on every rank. If it raises
    a RunError, every rank raises it, because the other ranks would wait for the result."""
    box = [None]  # torch broadcasts a list of objects, in place: here a list of one
    if rank() == 0:
        try:
            box = [function(*args)]
        except RunError as error:
            error.on_all_ranks = True
            box = [error]
    if world_size() > 1:
        dist.broadcast_object_list(box)
    [result] = box
    if isinstance(result, RunError):
        raise result
    return result


def gather_episodes(episodes):
    """The episodes of all ranks, sorted by number and without their tokens: for counting and for
    the log."""
    episodes = all_gather_list([dataclasses.replace(e, segments=[]) for e in episodes])
    return sorted(episodes, key=attrgetter("number"))


# -------------------------------------------------------------------------------------------- FSDP2


def blocks_of(model):
    """The transformer blocks of a model: its longest ModuleList."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=len, default=nn.ModuleList())


def make_masters(module, device="cpu", dtype=torch.float32):
    """Give a Policy, a Critic or a SharedBase its master weights, in place: each parameter that is
    not frozen becomes an fp32 copy. If there is a process group, masters and frozen weights are
    sharded over all ranks with FSDP2.

    Before this call a parameter may have the type in which it is stored, and may be mapped from the
    checkpoint's file, so that unread weights take no memory.

    Each transformer block becomes a unit of FSDP2, and the rest is one more unit, the root. In a
    forward pass FSDP2 gathers a unit's weights just before it computes, in `dtype` (bf16 on a GPU),
    and frees them afterwards. Master weights, gradients and Adam's moments are fp32 shards. Every
    pass must go through the root's forward(), where FSDP2 begins.

    Gradients come out *averaged* over ranks, which is why `ppo.optimize` multiplies its loss by
    their number. Build an optimizer after this: the parameters of shards are new ones."""
    parts, is_sharded = [module], dist.is_initialized()
    if is_sharded:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(device, (dist.get_world_size(),))
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        # One part after the other: a rank never holds more in fp32 than its shard and a block.
        parts = [*blocks_of(module), module]
    for part in parts:
        for p in part.parameters():
            is_master = hasattr(p, "full_tensor")  # a shard of a block is one already
            if p.requires_grad and not is_master:
                p.data = p.data.to(torch.float32, copy=True)
        if is_sharded:
            fully_shard(part, mesh=mesh, mp_policy=precision)

    def free_gathered_weights(root, *_):
        # FSDP2 keeps the root's gathered weights for a backward pass, even without gradients.
        if not torch.is_grad_enabled():
            root.reshard()

    if is_sharded:
        module.register_forward_hook(free_gathered_weights)


def full_tensor(tensor):
    """The whole of a tensor that may be a shard. A collective call: every rank must make it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def iter_full_weights(module):
    """Yield (name, whole tensor) of a module, one at a time: no rank ever holds more than one
    besides its own shard. A collective call: every rank must iterate to the end.

    It uses state_dict(), because named_parameters() omits the second name of a tied tensor."""
    for name, tensor in module.state_dict().items():
        yield name, full_tensor(tensor.detach())


def optimizer_state(module, optimizer, keep=True):
    """Adam's state as {name of the parameter: {"exp_avg": tensor, ...}}, whole and on the CPU, so
    that it is the same for any number of ranks. (The optimizer's own state_dict() numbers the
    parameters instead of naming them, and holds shards.)

    A collective call. keep: whether this rank wants the result; if not, it takes part and gets {},
    because one copy in memory is enough."""
    state = {}
    for name, p in module.named_parameters():
        moments = {key: full_tensor(value).cpu() for key, value in optimizer.state[p].items()}
        if keep:
            state[name] = moments
    return state


def load_optimizer_state(module, optimizer, state):
    """Give an optimizer the `state` that `optimizer_state` returned; each rank takes its shard."""
    from torch.distributed.tensor import distribute_tensor

    for name, p in module.named_parameters():
        for key, value in state[name].items():
            value = value.to(p.device)  # also the number of steps: fused Adam counts on the GPU
            if value.dim() and hasattr(p, "full_tensor"):  # a moment of a parameter with shards
                value = distribute_tensor(value, p.device_mesh, p.placements)
            optimizer.state[p][key] = value
