"""support/ranks.py - one process or many: torchrun, what ranks tell each other, FSDP2.

    torchrun --nproc-per-node 8 rlver.py ...

Every rank has its own dialogues, its own engine and a shard of the models. The functions that
gather, reduce or broadcast are collective calls: every rank must make them, or all wait for ever.
Several nodes (torchrun --nnodes 2) need no shared file system for a new run; for --resume each node
needs the run's directory, shared or copied.
"""

from support.errors import BadInput, SelfCheckFailed
from support.settings import GROUP_TIMEOUT

import ctypes
import dataclasses
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

# One entry for each Ctrl-C since `interrupt_at_once`. Python prints and forgets an exception that
# is raised in a destructor; if a Ctrl-C comes there, this list still knows of it.
pending_interrupts = []


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def join_ranks(cuda):
    """Join the processes that torchrun started, or be a world of one. Must be called before any
    model or engine is built: an engine that is built first takes its process for the only one, and
    later reductions silently do nothing."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1 and sys.platform == "linux":
        die_with_torchrun()
    if cuda:
        take_a_gpu()
    if dist.is_initialized() or (ranks == 1 and not cuda):
        return
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    timeout = timedelta(seconds=GROUP_TIMEOUT)
    if ranks == 1:
        dist.init_process_group(
            backend, timeout=timeout, store=dist.HashStore(), rank=0, world_size=1
        )
    else:
        dist.init_process_group(backend, timeout=timeout)


def die_with_torchrun():
    """Ask Linux to kill this process when torchrun dies. Without that the processes outlive a
    torchrun that is killed, and wait for each other for hours."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:  # torchrun has died already
        raise SelfCheckFailed("torchrun is gone")


def take_a_gpu():
    """Compute on the GPU of this process' own number. Raises BadInput if there are too few."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    if local >= torch.cuda.device_count():
        raise BadInput(
            f"--nproc-per-node: this machine has {torch.cuda.device_count()} GPUs, "
            "and each process wants its own"
        )
    torch.cuda.set_device(local)


def leave_ranks(code):
    """Leave the process group at the end of a process. Not after a failure: other ranks may still
    be in a collective call, and torchrun ends them. Not with vLLM either, which destroys its own
    groups later than this."""
    if code == 0 and dist.is_initialized() and "vllm" not in sys.modules:
        dist.destroy_process_group()


def interrupt_at_once(handler=None):
    """Let Ctrl-C raise KeyboardInterrupt at once: asyncio would cancel its main task instead, and
    forget the Ctrl-C if that task is just done. Returns the handler that was there before; call it
    again with that as `handler` to put it back."""
    pending_interrupts.clear()

    def interrupt(*_):
        pending_interrupts.append("Ctrl-C")
        raise KeyboardInterrupt

    return signal.signal(signal.SIGINT, handler or interrupt)


def raise_pending_interrupt():
    """Raise KeyboardInterrupt again if Python has swallowed it (see `pending_interrupts`)."""
    if pending_interrupts:
        raise KeyboardInterrupt


def check_world():
    """Raise SelfCheckFailed unless the process group has as many ranks as torchrun started."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if world() != ranks:
        raise SelfCheckFailed(
            f"torchrun started {ranks} processes, but this one is in a group of "
            f"{world()}: the process group must be joined before an engine is "
            "built"
        )


# ----------------------------------------------------------------------- what ranks tell each other


def all_reduce_sum(tensor):
    """The sum of a tensor over all ranks."""
    if world() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def all_gather_list(things):
    """The lists of all ranks, concatenated, on every rank."""
    if world() == 1:
        return things
    lists = [None] * world()
    dist.all_gather_object(lists, things)
    return [thing for part in lists for thing in part]


def broadcast(make):
    """Call make() on the first rank alone. Returns its result on every rank, or raises on every
    rank the BadInput that it raised."""
    results = [None]  # of one element: torch broadcasts lists, in place
    if rank() == 0:
        try:
            results[0] = make()
        except BadInput as error:
            results[0] = error
    if world() > 1:
        dist.broadcast_object_list(results)
    if isinstance(results[0], BadInput):
        raise results[0]
    return results[0]


def first_rank_first(make):
    """Call make() on the first rank, and then on the others, which find done what it did. Returns
    each rank's own result."""
    if rank() == 0:
        result = make()
    wait_for_all()
    if rank() > 0:
        result = make()
    wait_for_all()
    return result


def wait_for_all():
    all_gather_list([])


def gather_episodes(episodes):
    """The episodes of all ranks, sorted by number and without their tokens: for counting and for
    the log."""
    without_tokens = [dataclasses.replace(e, segments=[]) for e in episodes]
    return sorted(all_gather_list(without_tokens), key=lambda e: e.number)


# -------------------------------------------------------------------------------------------- FSDP2


def make_masters(module):
    """Make the parameters that are not frozen fp32, each a copy of its own. Until then they may be
    pages of the checkpoint's file, mapped and not copied. (Shards have been converted already.)"""
    for p in module.parameters():
        if p.requires_grad and not hasattr(p, "full_tensor"):
            p.data = p.data.to(torch.float32, copy=True)


def shard(module, device="cpu", dtype=None):
    """Shard a Policy or a Critic over all ranks with FSDP2, in place: each transformer block, then
    the whole, through whose forward() everything goes. Master weights, gradients and Adam's moments
    are fp32 shards; a block computes in `dtype` (bf16 on a GPU), gathered just before. Gradients
    come out *averaged* over ranks, which is why `ppo.optimize` multiplies its loss by their number.

    An optimizer must be built after this. Raises RuntimeError without a process group."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(device, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    blocks = max((m for m in module.modules() if isinstance(m, nn.ModuleList)), key=len)
    for part in (*blocks, module):  # a rank never holds more than its shard and one block
        make_masters(part)
        fully_shard(part, mesh=mesh, mp_policy=precision)
    # FSDP2 keeps the root's gathered weights for the backward pass. Where there will be none, the
    # forward pass frees them.
    module.register_forward_hook(lambda m, *_: None if torch.is_grad_enabled() else m.reshard())


def full_tensor(tensor):
    """The whole of a tensor that may be a shard. A collective call, made by every rank or none."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def iter_full_weights(module):
    """Yield (name, whole tensor) of a module, one at a time: no rank ever holds more than one
    besides its own shard. By state_dict(), because named_parameters() leaves out the second name of
    a tied tensor."""
    for name, tensor in module.state_dict().items():
        yield name, full_tensor(tensor.detach())


def optimizer_state(module, optimizer, keep=True):
    """Adam's moments by parameter name, whole, on the CPU: the same file whatever the number of
    ranks. (A plain state_dict() counts parameters and holds shards.) A collective call; without
    `keep` this rank takes part and keeps nothing."""
    state = {}
    for name, p in module.named_parameters():
        moments = {key: full_tensor(value) for key, value in optimizer.state.get(p, {}).items()}
        if keep:
            state[name] = {key: value.cpu() for key, value in moments.items()}
    return state


def load_optimizer_state(module, optimizer, state):
    """Give an optimizer the `state` that `optimizer_state` returned; each rank takes its shard."""
    from torch.distributed.tensor import distribute_tensor

    for name, p in module.named_parameters():
        for key, value in state[name].items():
            if value.dim():  # a moment; the number of steps, without dimensions, stays on the CPU
                value = value.to(p.device)
                if hasattr(p, "full_tensor"):
                    value = distribute_tensor(value, p.device_mesh, p.placements)
            optimizer.state[p][key] = value
