"""support/ranks.py - one process or many: torchrun, what ranks tell each other, FSDP2.

    torchrun --nproc-per-node 8 rlver.py ...

Every rank has its own dialogues, its own engine and a shard of the models. All that looks like an
ordinary call here is a collective one: every rank makes it, or all wait for ever. More nodes
(torchrun --nnodes 2) need no shared file system for a new run; for --resume each node needs the
run's directory, shared or copied.
"""

from support.settings import GROUP_TIMEOUT, BadInput, SelfCheckFailed

import ctypes
import dataclasses
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

LOST = []  # Ctrl-C's of this run; one that nobody catches stays here


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def join_ranks(cuda):
    """Join the processes that torchrun started, or be a world of one. Before any model or engine is
    built: one that comes first takes itself for alone, and later reductions silently do nothing."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1 and sys.platform == "linux":
        # torchrun's processes outlive it when it is killed, and wait for each other for hours
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: die with it
        if os.getppid() == 1:  # it is dead already
            raise SelfCheckFailed("torchrun is gone")
    if cuda:
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            raise BadInput(
                f"--nproc-per-node: this machine has {torch.cuda.device_count()} GPUs, "
                "and each process wants its own"
            )
        torch.cuda.set_device(local)
    if dist.is_initialized() or ranks == 1 and not cuda:
        return
    alone = dict(store=dist.HashStore(), rank=0, world_size=1) if ranks == 1 else {}
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=GROUP_TIMEOUT), **alone
    )


def leave_ranks(code):
    """The end of a process. After a failure others may still be in a collective call; torchrun ends
    them. And vLLM puts its own groups away, later than this."""
    if code == 0 and dist.is_initialized() and "vllm" not in sys.modules:
        dist.destroy_process_group()


def interrupt_at_once(handler=None):
    """Let Ctrl-C interrupt at once: asyncio would cancel its main task, and forget it where that is
    just done. Returns the handler of before; given that, it is put back."""
    LOST.clear()

    def interrupt(*_):
        LOST.append("Ctrl-C")
        raise KeyboardInterrupt

    return signal.signal(signal.SIGINT, handler or interrupt)


def raise_lost_interrupt():
    """Raise again a Ctrl-C that fell into a destructor, where Python prints and forgets it."""
    if LOST:
        raise KeyboardInterrupt


def check_world():
    """The ranks that torchrun says there are must be the ranks that answer."""
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
    """The lists of all ranks, one behind the other, on every rank."""
    if world() == 1:
        return things
    found = [None] * world()
    dist.all_gather_object(found, things)
    return [thing for part in found for thing in part]


def broadcast(make):
    """What make() gives on the first rank, on every rank; so too a BadInput that it raises."""
    answer = [None]
    if rank() == 0:
        try:
            answer = [make()]
        except BadInput as error:
            answer = [error]
    if world() > 1:
        dist.broadcast_object_list(answer)
    if isinstance(answer[0], BadInput):
        raise answer[0]
    return answer[0]


def wait_for_all():
    all_gather_list([])


def gather_episodes(episodes):
    """The episodes of all ranks by their numbers, without tokens: for counting and the log."""
    bare = [dataclasses.replace(e, segments=[]) for e in episodes]
    return sorted(all_gather_list(bare), key=lambda e: e.number)


# -------------------------------------------------------------------------------------------- FSDP2


def make_masters(module):
    """What is not frozen becomes fp32, each tensor a copy of its own. Until then it may be a page
    of the checkpoint's file, mapped and not copied. (A shard has been made already.)"""
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

    how = dict(
        mesh=init_device_mesh(device, (dist.get_world_size(),)),
        mp_policy=MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32),
    )
    blocks = max((m for m in module.modules() if isinstance(m, nn.ModuleList)), key=len)
    for part in (*blocks, module):  # a rank never holds more than its shard and one block
        make_masters(part)
        fully_shard(part, **how)
    # who only looks gives the root's weights back too; FSDP2 keeps them for a backward pass
    module.register_forward_hook(lambda m, *_: None if torch.is_grad_enabled() else m.reshard())


def full_tensor(tensor):
    """The whole of a tensor that may be a shard. A collective call: on every rank, or on none."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def iter_full_weights(module):
    """(name, whole tensor) of a module, one at a time: no rank ever holds more than one beside its
    own shard. By state_dict(): named_parameters() leaves out the second name of a tied tensor."""
    for name, tensor in module.state_dict().items():
        yield name, full_tensor(tensor.detach())


def optimizer_state(module, optimizer, keep=True):
    """Adam's moments by parameter name, whole, on the CPU: the same file whatever the number of
    ranks. (A plain state_dict() counts parameters and holds shards.) A collective call; without
    `keep` this rank takes part and keeps nothing."""
    state = {}
    for name, p in module.named_parameters():
        found = {key: full_tensor(value) for key, value in optimizer.state.get(p, {}).items()}
        if keep:
            state[name] = {key: value.cpu() for key, value in found.items()}
    return state


def load_optimizer_state(module, optimizer, state):
    """The other way round, each rank taking its shard."""
    from torch.distributed.tensor import distribute_tensor

    for name, p in module.named_parameters():
        for key, value in state[name].items():
            if value.dim() and hasattr(p, "full_tensor"):
                value = distribute_tensor(value.to(p.device), p.device_mesh, p.placements)
            optimizer.state[p][key] = value.to(p.device) if value.dim() else value
