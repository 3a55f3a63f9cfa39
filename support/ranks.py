"""support/ranks.py - one process or many: torchrun, and what ranks tell each other.

    torchrun --nproc-per-node 8 rlver.py ...

Every rank has its own dialogues, its own engine and a shard of the models. The functions that
gather, reduce or call `on_first_rank` are collective: every rank must call them, or all hang. All
ranks are processes of one node.
"""

from support.errors import BadInput, RunError, one_line

import ctypes
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

# Seconds that a rank waits for another one. A rollout ends long before that (ROLLOUT_TIMEOUT).
GROUP_TIMEOUT = 7200


def world_size():
    """How many ranks there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    """The number of this rank, from 0."""
    return dist.get_rank() if dist.is_initialized() else 0


def join_ranks(cuda):
    """Join the processes that torchrun started, or be a world of one. This must come before any
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
    (pytorch#179291). After a failure NCCL and vLLM may wait in their destructors for other
    ranks."""
    if not dist.is_initialized() or (code == 0 and "vllm" in sys.modules):
        sys.exit(code)
    if code == 0:
        dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


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


def on_first_rank(function, *args):
    """A collective call: function(*args) is called on the first rank alone, and every rank returns
    its result. Every rank also raises its RunError or OSError, because the others would wait for the
    result."""
    box = [None]  # torch broadcasts a list of objects, in place: here a list of one
    if rank() == 0:
        try:
            box = [function(*args)]
        except (RunError, OSError) as error:
            error.on_all_ranks = True
            box = [error]
    if world_size() > 1:
        dist.broadcast_object_list(box)
    [result] = box
    if isinstance(result, (RunError, OSError)):
        raise result
    return result


def full_tensor(tensor):
    """The whole of a tensor that may be a shard (models/sharding.py)."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def iter_full_weights(module):
    """Yield (name, whole tensor) of a module, one at a time: no rank ever holds more than one
    besides its own shard. Every rank must iterate to the end.

    It uses state_dict(), because named_parameters() omits the second name of a tied tensor."""
    for name, tensor in module.state_dict().items():
        yield name, full_tensor(tensor.detach())
