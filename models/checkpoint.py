"""models/checkpoint.py - what a checkpoint holds of the models: gathered from all ranks, written on
one, read back on each.

    config.json, model.safetensors ...    a plain model and its tokenizer, which any program loads:
                                          the policy, its adapters merged
    adapter/      the policy's adapters, as the package peft writes them
    trainer.pt    what only a run reads:
        optimizer, critic_optimizer   {name of the parameter: Adam's moments} (`optimizer_state`)
        critic                        {name: tensor}, whole and in fp32
        adapters                      with --lora-rank, and no critic: {name: tensor} of both, in fp32

A run goes on from it with any number of ranks: `Models.__init__` (models/build.py) loads the weights.
Names, settings, counters and which checkpoints stay are support/rundir.py's.
"""

from models.loading import load_tensors, load_tokenizer, reads_alike, stop_ids, write_model
from support.command_line import print_folded
from support.errors import CannotWrite
from support.ranks import full_tensor, iter_full_weights, rank

import copy
from functools import partial

import torch


def gather_checkpoint(models):
    """Gather what a checkpoint holds of `models`. Returns write(directory), which writes it.

    A collective call: every rank walks through all tensors, but only the first one keeps them.
    Eight copies of a 7B model with its moments would take a terabyte. (Adapters are small.)"""
    first, model = rank() == 0, models.policy.model
    # A tied tensor has two names in the state_dict (lm_head.weight of a small Qwen is the second).
    # It is saved once, under the first one, and transformers ties it again.
    all_names = dict(model.named_parameters(remove_duplicate=False)).keys()
    second_names = all_names - dict(model.named_parameters()).keys()
    weights = {
        name: w.cpu() for name, w in models.plain_weights() if first and name not in second_names
    }
    tensors = {
        name: optimizer_state(module, optimizer, first)
        for name, module, optimizer in models.trained_parts()
    }
    if models.cfg.lora_rank:
        tensors["adapters"] = {
            name: full_tensor(p.detach()).cpu()
            for _, module, _ in models.trained_parts()
            for name, p in module.named_parameters()
        }
    elif models.critic:
        tensors["critic"] = {name: w.cpu() for name, w in iter_full_weights(models.critic) if first}
    return partial(write, models, weights=weights, tensors=tensors)


def write(models, directory, weights, tensors):
    """Write a checkpoint's part of the models, on one rank (RunDir.save adds the rest). weights: of
    the policy, {name: tensor}; tensors: what trainer.pt holds."""
    write_model(directory, models.policy.model, weights, models.tokenizer)
    torch.save(tensors, directory / "trainer.pt")
    if models.cfg.lora_rank:
        models.policy.write_peft(directory / "adapter", tensors["adapters"], models.cfg)


def write_trial(models, directory):
    """Write a checkpoint with one small tensor, and read the rest back, to see whether a resume will
    find the same model. Raises CannotWrite if it will not; warns if other programs will not."""
    write(models, directory, {"small": torch.zeros(1)}, {"adapters": {}})
    load_tensors(directory / "trainer.pt")
    chat = copy.copy(models.chat)
    chat.tokenizer = load_tokenizer(directory)
    chat.check_pieces()
    if {chat.stop_id, *stop_ids(directory)} != chat.stop_ids:
        raise CannotWrite("read back, it has other stop tokens")
    if not reads_alike(directory, chat.tokenizer):
        print_folded(
            "warning: AutoTokenizer of transformers 5, which servers use, reads this run's checkpoints "
            "with other tokens than those of their tokenizer.json, or not at all; "
            "PreTrainedTokenizerFast reads them rightly"
        )


def checkpoint_bytes(models):
    """About how large a checkpoint is: for each weight 4 bytes and, where it is trained, 8 for
    Adam's two moments; as much again for a critic."""
    per_weight = 4 if models.cfg.lora_rank else 24 if models.critic else 12
    return per_weight * sum(p.numel() for p in models.policy.model.parameters())


# ----------------------------------------------------------------------------------- Adam's moments


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
    for name, p in module.named_parameters():
        for key, value in state[name].items():
            value = value.to(p.device)  # also the number of steps: fused Adam counts on the GPU
            if value.dim() and hasattr(p, "full_tensor"):  # a moment of a parameter with shards
                value = torch.distributed.tensor.distribute_tensor(
                    value, p.device_mesh, p.placements
                )
            optimizer.state[p][key] = value
