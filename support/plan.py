"""support/plan.py - what a run would need, from the model's config alone: memory by part, tokens,
calls to the simulator. Nothing is loaded.

    python rlver.py --plan --algo ppo --think --model Qwen/Qwen2.5-7B-Instruct
        one run, on 1, 2, 4 and 8 GPUs
    python -m support.plan
        the table of docs/several-gpus.md: what fits where

Counted and not estimated (a test allows 5 %): masters, gradients, Adam, critic, reference, frozen
base, engine's weights. Estimates, from the shapes of the tensors alive at the peak: activations,
engine's cache.
Fragmentation, NCCL and CUDA itself want a few GB more; BENCHMARKS.md says what was measured.
"""

from support.errors import BadInput
from support.settings import SCRIPTED, SMALL, may_be_on_the_hub, resolve_settings

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

GB = 1e9
GPUS = (1, 2, 4, 8)  # the columns of the report
PROMPTS = Path(__file__).resolve().parent.parent / "prompts"

# Shapes of well-known models, from their published config.json, so that planning needs no network.
SHAPE = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
KNOWN = {
    "Qwen/Qwen2.5-0.5B-Instruct": (896, 4864, 24, 14, 2, 151936, True),
    "Qwen/Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2, 151936, True),
    "Qwen/Qwen2.5-3B-Instruct": (2048, 11008, 36, 16, 2, 151936, True),
    "Qwen/Qwen2.5-7B-Instruct": (3584, 18944, 28, 28, 4, 152064, False),
}

# Tokens, on average, of what a dialogue consists of:
# a reply, to which it may be expected to grow; the paper's curves end at 235 with thoughts and at
# 140 without
REPLY_TOKENS = {"think": 250, "direct": 120}
PROMPT_TOKENS = 300  # the policy's instructions, with its chat template
USER_TOKENS = 60  # a line of the user
# and of what the simulator's model reads and writes in a call:
PROFILE_TOKENS = 700  # a released profile
ANSWER_TOKENS = 250  # an answer in its sections

# Policy.forward computes logits in chunks of at most this many numbers on a GPU.
LOGITS_PER_CHUNK = 2**27
# About how many tensors of a transformer block are alive at once in its backward pass: of the
# hidden size (norms, queries, keys, values, attention's result, projections), and of the
# intermediate size (the MLP's gate and up projection, and their product).
HIDDEN_TENSORS = 8
INTERMEDIATE_TENSORS = 3
# The same for a block whose activations are kept for the backward pass, and not made again
# (measured with SmolLM2-135M and adapters).
KEPT_HIDDEN_TENSORS = 12

# What is said of the models that need no plan.
ON_A_LAPTOP = {
    "toy": "the toy runs on a laptop: about 1 GB of memory, one to two minutes",
    SMALL: f"{SMALL} runs on a laptop: with GRPO it takes below 4 GB of memory and half an hour "
    "(docs/small.md has other runs)",
}

# The parts of `memory` that are estimates; the others are exact.
ESTIMATES = {"engine cache", "activations"}


# ------------------------------------------------------------------------------------- the report


def report(cfg, given):
    """The plan of a run as text. given: the flags, for price, card, latency and engine (vLLM if
    none is given). Raises BadInput if there is no config, or no room for the engine."""
    if cfg.model in ON_A_LAPTOP:
        calls = calls_of(cfg, given["price"]) or "no calls to any server"
        return f"{ON_A_LAPTOP[cfg.model]}\n{calls}"
    config = config_of(cfg.model)
    sizes = sizes_of(config, cfg.lora_rank)
    share = 0
    if given["engine"] != "torch":
        share = share_of_vllm(cfg, given["card"] or 80.0, sizes)
    lines = [
        headline(cfg, sizes),
        "",
        *memory_table(cfg, config, sizes, share, given["card"] or 80.0),
        "",
        *lines_of_work(cfg, latency=given["latency"] or 6.0),
        calls_of(cfg, given["price"]),
        line_about_the_peak(share),
    ]
    return "\n".join(lines)


def share_of_vllm(cfg, card, sizes):
    """The bytes that vLLM takes of a card of `card` GB. Raises BadInput if they are too few."""
    share = cfg.engine_memory * card * GB
    weights = 2 * sizes["all"]  # in bf16
    if share <= weights:
        raise BadInput(
            f"--engine-memory {cfg.engine_memory}: {share / GB:.1f} GB of {card:g} "
            f"(--card), and the weights alone are {weights / GB:.1f} GB; take more"
        )
    return share


def headline(cfg, sizes):
    """How many parameters there are, and of which models."""
    text = f"{cfg.model}: {sizes['all'] / 1e9:.2f} billion parameters"
    if cfg.lora_rank > 0:
        text += f", frozen; in adapters {sizes['adapters'] / 1e6:.0f} million"
    if cfg.algo == "ppo":
        text += ", and a critic of about as many"
    return text


def memory_table(cfg, config, sizes, share, card):
    """The lines of a table of GB: memory by part, the peak, the host; a column for each of GPUS.
    sizes: of `sizes_of`; share: as in `peak`; card: GB that a GPU has."""
    columns = [memory(cfg, config, sizes, gpus, card=card) for gpus in GPUS]
    heads = ["1 GPU", *[f"{gpus} GPUs" for gpus in GPUS[1:]]]
    lines = ["GB on each GPU".ljust(28) + "".join(f"{head:>9}" for head in heads)]
    for part in columns[0]:
        name = f"{part}  (estimate)" if part in ESTIMATES else part
        lines.append(table_row(name, [column[part] for column in columns]))
    host_memory, disk = host_and_disk(cfg, alone=columns[0])
    peaks = [peak(column, share)[0] for column in columns]
    if share:  # vLLM takes all of its share at once, whatever it needs
        lines.append(table_row("vLLM takes", [share] * len(GPUS)))
    lines.append(table_row("at the peak  (estimate)", peaks))
    lines.append(table_row("host memory  (estimate)", [host_memory] * len(GPUS)))
    lines.append(table_row("disk  (estimate)", [disk] * len(GPUS)))
    return lines


def table_row(name, sizes):
    """A line of the table: a name, and sizes in bytes as GB."""
    return name.ljust(28) + "".join(f"{size / GB:>9.1f}" for size in sizes)


def lines_of_work(cfg, latency):
    """What is done in a run: hours of waiting for the user, dialogues, tokens."""
    reply = min(cfg.max_tokens, REPLY_TOKENS[cfg.mode])
    replies, calls = cfg.batch_size * cfg.max_turns, 2 * cfg.max_turns
    hours = cfg.steps * calls * latency / 3600
    return [
        f"the user's answers: {hours:.1f} hours, at {latency:g} s "
        f"a call (--latency) and {calls} calls a step one after the other, if as many "
        "overlap as there are dialogues  (estimate)",
        f"a step: {cfg.batch_size} dialogues, {replies * cfg.max_tokens:,} tokens sampled "
        f"at most, about {replies * reply:,} with replies of {reply} tokens  (estimate)",
        f"in all: {cfg.steps} steps, about {cfg.steps * replies * reply / 1e6:,.0f} million "
        "tokens  (estimate)",
    ]


def line_about_the_peak(share):
    """What "at the peak" means."""
    text = "The peak is the larger of rollout (engine weights and cache"
    if share:
        text += "; of vLLM, what it takes: --engine-memory of --card"
    return text + (
        ") and update (gradients, activations). Left out: fragmentation, NCCL, CUDA itself."
    )


# ------------------------------------------------------------------------------------- the memory


def config_of(name):
    """The transformers config of a model directory, of one of KNOWN, or of a name on the hub.
    Raises BadInput."""
    from huggingface_hub.utils import logging
    from transformers import AutoConfig, Qwen2Config

    logging.set_verbosity_error()  # else it prints each of its retries
    is_directory = Path(name).is_dir()
    if name in KNOWN and not is_directory:
        return Qwen2Config(**dict(zip(SHAPE, KNOWN[name])), max_position_embeddings=32768)
    if not is_directory and not may_be_on_the_hub(name):
        raise BadInput(
            f"--model {name}: no such directory; name one that holds a "
            f"config.json, a model of the hub (OWNER/NAME), or one of {', '.join(KNOWN)}"
        )
    try:
        return AutoConfig.from_pretrained(name, local_files_only=is_directory)
    except Exception as error:
        problem = "no such directory, and not to be had from the hub"
        if is_directory:
            problem = "no config in this directory"
        reason = " ".join(str(error).split())[:120]
        raise BadInput(f"--model {name}: {problem}: {reason}") from None


def sizes_of(config, rank=0):
    """Numbers of parameters: {"all", "head" (an output layer of its own), "embedding", "block" (the
    largest), "adapters" (of this LoRA rank)}. Counted on torch's meta device, where a tensor has a
    shape and no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    def count(module):
        return sum(p.numel() for p in module.parameters())

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = head.weight is embedding.weight
    blocks = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    linear = [m for m in blocks.modules() if isinstance(m, torch.nn.Linear)]
    return {
        "all": count(model),
        "head": 0 if tied else count(head),
        "embedding": count(embedding),
        "block": max(map(count, blocks)),
        "adapters": rank * sum(sum(layer.weight.shape) for layer in linear),  # A and B of each
    }


def memory(cfg, config, sizes, gpus, compute_bytes=2, card=80.0):
    """Bytes on each of `gpus`: {part: bytes}; those of ESTIMATES are estimates. sizes: of
    `sizes_of`; compute_bytes: 2 for bf16, 4 for fp32; card: GB that a GPU has."""
    lora = cfg.lora_rank > 0
    trained = sizes["adapters"] if lora else sizes["all"]
    if cfg.algo == "ppo":
        body = sizes["adapters"] if lora else sizes["all"] - sizes["head"]
        trained += body + config.hidden_size + 1  # the critic, with its scalar head
    weights = compute_bytes * sizes["all"]
    has_reference = cfg.kl_coef and not lora
    return {
        "frozen base": weights / gpus if lora else 0,
        "masters": 4 * trained / gpus,  # in fp32, like the gradients
        "gradients": 4 * trained / gpus,
        "Adam": 8 * trained / gpus,  # two moments, in fp32
        "reference": 4 * sizes["all"] / gpus if has_reference else 0,
        "engine weights": weights,
        "engine cache": cache_bytes(cfg, config, gpus, compute_bytes),
        "activations": activation_bytes(cfg, config, sizes, compute_bytes, card),
    }


def cache_bytes(cfg, config, gpus, compute_bytes):
    """The engine's keys and values of the dialogues of one GPU."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_key_value_heads * head_dim
    per_token = 2 * config.num_hidden_layers * width * compute_bytes  # 2: keys and values
    # a dialogue as the engine holds it: a prompt, and for each turn a line of the user and a reply
    reply = min(cfg.max_tokens, REPLY_TOKENS[cfg.mode])
    length = PROMPT_TOKENS + cfg.max_turns * (USER_TOKENS + reply)
    return math.ceil(cfg.batch_size / gpus) * length * per_token


def activation_bytes(cfg, config, sizes, compute_bytes, card):
    """What the update needs at its peak beside the masters, their gradients and Adam's moments."""
    if must_recompute(cfg, config, compute_bytes, card * GB):
        # the inputs of all blocks, and one block, which is computed again
        inputs = config.num_hidden_layers * cfg.tokens_per_gpu * config.hidden_size * compute_bytes
        activations = inputs + block_bytes(cfg, config, compute_bytes, HIDDEN_TENSORS)
    else:
        activations = kept_bytes(cfg, config, compute_bytes)
    # the gathered weights of this block and the next, and those of embedding and output layer,
    # which stay for the whole pass; and the gradients of all that, unless they are frozen
    gathered = 2 * sizes["block"] + sizes["embedding"] + sizes["head"]
    gradient_bytes = 0 if cfg.lora_rank else 4
    # one chunk of logits, in fp32 (4 bytes), and about four tensors of its size
    logits = 4 * 4 * LOGITS_PER_CHUNK
    return activations + gathered * (compute_bytes + gradient_bytes) + logits


def block_bytes(cfg, config, compute_bytes, hidden_tensors):
    """The activations of one transformer block for a micro-batch."""
    # some configs, as GPT-2's, have no intermediate size: there it is four times the hidden size
    intermediate_size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    width = hidden_tensors * config.hidden_size + INTERMEDIATE_TENSORS * intermediate_size
    return cfg.tokens_per_gpu * width * compute_bytes


def kept_bytes(cfg, config, compute_bytes):
    """The activations of all blocks for a micro-batch."""
    block = block_bytes(cfg, config, compute_bytes, KEPT_HIDDEN_TENSORS)
    return config.num_hidden_layers * block


def must_recompute(cfg, config, compute_bytes, device_bytes):
    """Must activations be computed again in the backward pass? An update then takes a quarter
    longer, so they are kept where those of a micro-batch take at most a quarter of `device_bytes`:
    the memory of a GPU, or a rank's share of the host's. A run asks this too (models.py), so that
    it does what its plan says."""
    return kept_bytes(cfg, config, compute_bytes) > device_bytes / 4


def peak(parts, share=0):
    """(bytes, the largest part) of the larger of the two peaks, rollout and update. parts: of
    `memory`.

    share: the bytes that vLLM takes of the card for weights and cache, whatever the model's size,
    and gives back for the update; 0: the torch engine, which gives back only its cache."""
    always = {name: parts[name] for name in ("frozen base", "masters", "Adam", "reference")}
    if share:
        rollout = {**always, "engine share": share}
    else:
        always["engine weights"] = parts["engine weights"]
        rollout = {**always, "engine cache": parts["engine cache"]}
    update = {
        **always,
        "gradients": parts["gradients"],
        "activations": parts["activations"],
    }
    larger = rollout
    if sum(update.values()) > sum(rollout.values()):
        larger = update
    return sum(larger.values()), max(larger, key=larger.get)


def host_and_disk(cfg, alone):
    """Bytes outside of the GPUs, (memory, disk). The first rank gathers a checkpoint in memory; the
    disk holds --keep of them and the one that is being written. Not counted: the torch engine's
    copy, which passes through the memory of each rank. alone: `memory` on one GPU."""
    # frozen weights, in bf16 on the GPU, are merged in fp32: twice the bytes
    saved = alone["masters"] + alone["Adam"] + 2 * alone["frozen base"]
    return saved, (cfg.keep + 1) * saved


# ------------------------------------------------------------------------ calls to the user's model


def calls_of(cfg, price=None):
    """How many calls the simulator's server gets and how many tokens, as text; "" if it gets none.
    price: (of a million prompt tokens, of a million answer tokens), or None."""
    calls = count_calls(cfg)
    if calls is None:
        return ""
    prompt = prompt_tokens(cfg)
    watching = f" and {calls.of_watcher:,} of --watch" if calls.of_watcher else ""
    text = (
        f"calls to the simulator, at most: {calls.of_step:,} a step, {calls.total:,} in all, with "
        f"evaluations{watching}; about {calls.total * prompt / 1e6:,.1f} million tokens to it and "
        f"{calls.total * ANSWER_TOKENS / 1e6:,.1f} from it  (estimate)"
    )
    if price:
        prompt_price, answer_price = price
        cost = calls.total * (prompt * prompt_price + ANSWER_TOKENS * answer_price) / 1e6
        text += f"; at the given price {cost:,.2f}"
    return text


@dataclass
class Calls:
    """How many calls the models behind the users get."""

    of_step: int  # in one training step
    of_watcher: int  # in the whole run, to the second user (--watch)
    total: int  # in the whole run, with the evaluations and the watcher


def count_calls(cfg):
    """The Calls of a run; None if all its users are scripted.

    At most: as if no user said goodbye. A dialogue of T turns is T calls of f_emo and T - 1 of
    f_reply, because the last reply gets no answer; a group is one call more, for its first line.
    Each evaluation is one dialogue a user."""
    # The default user of a real model is the toy's, from whom it learns little. So if no simulator
    # was named, this is a plan for a server that comes later, and its calls are counted.
    server_comes_later = cfg.simulator == "toy" and cfg.model not in ("toy", SMALL)
    is_scripted = cfg.simulator in SCRIPTED and not server_comes_later
    is_watched = cfg.watch and cfg.watch not in SCRIPTED
    if is_scripted and not is_watched:
        return None
    turns, of_step, of_evaluations, of_watcher = cfg.max_turns, 0, 0, 0
    if not is_scripted:
        groups = cfg.batch_size // cfg.group_size
        # each round of --refill may replace every group
        of_step = (groups + cfg.batch_size * (2 * turns - 1)) * (1 + cfg.refill)
        of_evaluations = count_evaluations(cfg) * cfg.eval_size * 2 * turns
    if is_watched:  # the watcher is asked once a reply
        of_watcher = cfg.steps // cfg.watch_every * cfg.batch_size * turns
    return Calls(of_step, of_watcher, total=cfg.steps * of_step + of_evaluations + of_watcher)


def count_evaluations(cfg):
    """The number of evaluations in a run: before, after, and every --eval-every steps between."""
    if not cfg.steps:
        return 1
    between = (cfg.steps - 1) // cfg.eval_every if cfg.eval_every else 0
    return 2 + between


def prompt_tokens(cfg):
    """The tokens of a prompt of the simulator, on average: the text of prompts/, the profile, and
    half a dialogue. A token is 4 letters or 1.5 Chinese characters."""
    folder = PROMPTS / cfg.lang / cfg.difficulty
    texts = [(folder / f"{name}.txt").read_text(encoding="utf-8") for name in ("emotion", "reply")]
    letters_a_token = 4 if cfg.lang == "en" else 1.5
    fixed = sum(map(len, texts)) / 2 / letters_a_token  # the mean of the two prompts
    reply = min(cfg.max_tokens, REPLY_TOKENS["direct"])  # thoughts are never sent
    return fixed + PROFILE_TOKENS + cfg.max_turns / 2 * (reply + USER_TOKENS)


# -------------------------------------------------------------------------- what fits on which GPUs


def gpu_table():
    """The table of docs/several-gpus.md: what fits, by the estimate of the peak, with a tenth to
    spare."""
    machines = {"24 GB": (1, 24), "48 GB": (1, 48), "80 GB": (1, 80), "8 x 80 GB": (8, 80)}
    lines = [
        "| model | algorithm | " + " | ".join(machines) + " |",
        "|---|---|" + "---|" * len(machines),
    ]
    for model in KNOWN:
        config = config_of(model)
        for algo, rank in itertools.product(("grpo", "ppo"), (0, 32)):
            cfg = resolve_settings({"algo": algo, "think": True, "model": model, "lora_rank": rank})
            name = f"{algo} --think" if rank == 0 else f"{algo} --think --lora-rank {rank}"
            cells = [does_it_fit(cfg, config, gpus, card) for gpus, card in machines.values()]
            lines.append("| " + " | ".join([model.split("/")[1], name, *cells]) + " |")
    return "\n".join(lines)


def does_it_fit(cfg, config, gpus, card):
    """A cell of the table: whether a run fits on `gpus` of `card` GB, and what it needs."""
    parts = memory(cfg, config, sizes_of(config, cfg.lora_rank), gpus, card=card)
    share = cfg.engine_memory * card * GB
    if share < parts["engine weights"]:
        return "no: engine weights"
    need, largest_part = peak(parts, share)
    if need < 0.9 * card * GB:
        return f"yes, {need / GB:.0f} GB"
    return f"no, {need / GB:.0f} GB: {largest_part}"


if __name__ == "__main__":
    print(gpu_table())
