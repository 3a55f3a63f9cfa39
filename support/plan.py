"""support/plan.py - what a run would need, from the model's config alone: memory by part, tokens,
calls to the simulator. Nothing is loaded.

    python rlver.py --plan --algo ppo --think --model Qwen/Qwen2.5-7B-Instruct
        one run, on 1, 2, 4 and 8 GPUs
    python -m support.plan
        the table of docs/gpus.md: what fits where

Exact, and held to 5 % by a test: masters, gradients, Adam, critic, reference, frozen base, engine's
weights. Estimates, from the shapes of the tensors alive at the peak: activations, engine's cache.
Fragmentation, NCCL and CUDA itself want a few GB more; BENCHMARKS.md says what was measured.
"""

from support.errors import BadInput
from support.settings import is_beside_us, may_be_on_the_hub, resolve_settings

import itertools
import math
from pathlib import Path

GB = 1e9
GPUS = (1, 2, 4, 8)  # the columns of the report

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

# The number of tokens to which a reply may be expected to grow; the paper's curves end at 235 with
# thoughts and 140 without.
REPLY_TOKENS = {"think": 250, "direct": 120}


# ------------------------------------------------------------------------------------- the report


def report(cfg, given):
    """The plan of a run as text. given: the flags, for price, card, latency and engine (vLLM if
    none is given). Raises BadInput if there is no config, or no room for the engine."""
    if cfg.model == "toy":
        calls = calls_of(cfg, given["price"]) or "no calls to any server"
        return f"the toy runs on a laptop: about 1 GB of memory, minutes\n{calls}"
    config = config_of(cfg.model)
    sizes = sizes_of(config, cfg.lora_rank)
    share = 0
    if given["engine"] != "torch":
        share = share_of_vllm(cfg, given["card"] or 80.0, sizes)
    lines = [
        headline(cfg, sizes),
        "",
        *memory_table(cfg, config, share),
        "",
        *lines_of_work(cfg, latency=given["latency"] or 6.0),
        calls_of(cfg, given["price"]),
        line_about_the_peak(share),
    ]
    return "\n".join(lines)


def share_of_vllm(cfg, card, sizes):
    """The bytes that vLLM takes of a card of `card` GB. Raises BadInput if they are too few."""
    share, weights = cfg.engine_memory * card * GB, 2 * sizes["all"]
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


def memory_table(cfg, config, share):
    """The lines of a table of GB: memory by part, the peak, the host; a column for each of GPUS.
    share: as in `peak`."""
    columns = [memory(cfg, config, gpus) for gpus in GPUS]
    heads = ["1 GPU", *[f"{gpus} GPUs" for gpus in GPUS[1:]]]
    lines = ["GB on each GPU".ljust(28) + "".join(f"{head:>9}" for head in heads)]
    for part, (_, kind) in columns[0].items():
        name = f"{part}  (estimate)" if kind == "estimate" else part
        lines.append(table_row(name, [column[part][0] for column in columns]))
    host_memory, disk = host(cfg, columns[0])
    peaks = [peak(column, share)[0] for column in columns]
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
        text += f"; vLLM has {share / GB:.0f} GB, --engine-memory of --card"
    return text + (
        ") and update (gradients, activations). Left out: fragmentation, NCCL, CUDA itself."
    )


# ------------------------------------------------------------------------------------- the memory


def config_of(name):
    """The transformers config of a model directory, of one of KNOWN, or of a name on the hub.
    Raises BadInput."""
    from transformers import AutoConfig, Qwen2Config

    is_directory = Path(name).is_dir()
    if name in KNOWN and not is_directory:
        return Qwen2Config(**dict(zip(SHAPE, KNOWN[name])), max_position_embeddings=32768)
    if not is_directory and (not may_be_on_the_hub(name) or is_beside_us(name)):
        raise BadInput(
            f"--model {name}: no such directory; name one that holds a "
            f"config.json, or one of {', '.join(KNOWN)}"
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


def memory(cfg, config, gpus, compute_bytes=2):
    """Bytes on each of `gpus`, by part: {part: (bytes, "exact" | "estimate")}. compute_bytes: 2 for
    bf16, 4 for fp32."""
    sizes, lora = sizes_of(config, cfg.lora_rank), cfg.lora_rank > 0
    trained = sizes["adapters"] if lora else sizes["all"]
    if cfg.algo == "ppo":
        body = sizes["adapters"] if lora else sizes["all"] - sizes["head"]
        trained += body + config.hidden_size + 1  # the critic, with its scalar head
    weights = compute_bytes * sizes["all"]
    has_reference = cfg.kl_coef and not lora
    return {
        "frozen base": (weights / gpus if lora else 0, "exact"),
        "masters": (4 * trained / gpus, "exact"),
        "gradients": (4 * trained / gpus, "exact"),
        "Adam": (8 * trained / gpus, "exact"),
        "reference": (4 * sizes["all"] / gpus if has_reference else 0, "exact"),
        "engine weights": (weights, "exact"),
        "engine cache": (cache_bytes(cfg, config, gpus, compute_bytes), "estimate"),
        "activations": (activation_bytes(cfg, config, sizes, compute_bytes), "estimate"),
    }


def cache_bytes(cfg, config, gpus, compute_bytes):
    """The engine's keys and values of the dialogues of one GPU."""
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_key_value_heads * head_dim
    per_token = 2 * config.num_hidden_layers * width * compute_bytes
    # a dialogue as the engine holds it: a prompt, and for each turn a line of the user and a reply
    reply = min(cfg.max_tokens, REPLY_TOKENS[cfg.mode])
    length = 300 + cfg.max_turns * (60 + reply)
    return math.ceil(cfg.batch_size / gpus) * length * per_token


def activation_bytes(cfg, config, sizes, compute_bytes):
    """What the update needs at its peak beside the masters, their gradients and Adam's moments."""
    tokens = cfg.tokens_per_gpu
    # the inputs of all blocks, which are kept for the backward pass
    kept = config.num_hidden_layers * tokens * config.hidden_size * compute_bytes
    # one block, which is computed again
    block = tokens * (8 * config.hidden_size + 3 * config.intermediate_size) * compute_bytes
    # the gathered weights of this block and the next, and those of embedding and output layer,
    # which stay for the whole pass; and the gradients of all that, unless they are frozen
    gathered = 2 * sizes["block"] + sizes["embedding"] + sizes["head"]
    gradient_bytes = 0 if cfg.lora_rank else 4
    # one chunk of logits, in fp32, about four times over
    logits = 4 * 4 * 2**27
    return kept + block + gathered * (compute_bytes + gradient_bytes) + logits


def peak(parts, share=0):
    """(bytes, the largest part) of the larger of the two peaks, rollout and update. share: the
    bytes that vLLM takes of the card for weights and cache, whatever the model's size, and gives
    back for the update; 0: the torch engine, which gives back only its cache."""
    size_of = {name: size for name, (size, _) in parts.items()}
    size_of["engine share"] = share
    always = ["frozen base", "masters", "Adam", "reference"]
    if share:
        rollout = [*always, "engine share"]
    else:
        always.append("engine weights")
        rollout = [*always, "engine cache"]
    update = [*always, "gradients", "activations"]

    def total(names):
        return sum(size_of[name] for name in names)

    larger = max(rollout, update, key=total)
    return total(larger), max(larger, key=size_of.get)


def host(cfg, alone):
    """Bytes outside of the GPUs, (memory, disk). The first rank gathers a checkpoint in memory; the
    disk holds --keep of them and the one that is being written. Not counted: the torch engine's
    copy, which passes through the memory of each rank. alone: `memory` on one GPU."""
    # frozen weights are merged in fp32
    saved = alone["masters"][0] + alone["Adam"][0] + 2 * alone["frozen base"][0]
    return saved, (cfg.keep + 1) * saved


# ------------------------------------------------------------------------ calls to the user's model

PROMPTS = Path(__file__).resolve().parent.parent / "prompts"
PROFILE_TOKENS = 700  # of a released profile
ANSWER_TOKENS = 250  # of an answer in its sections


def calls_of(cfg, price=None):
    """How many calls the simulator's server gets and how many tokens, as text; "" for the toy's
    scripted user.

    At most: as if no user said goodbye. A dialogue of T turns is 2 T - 1 calls, and a group one
    more for its first line; each evaluation is one dialogue a user. price: (of a million prompt
    tokens, of a million answer tokens), or None."""
    is_scripted = cfg.simulator.startswith("toy") and cfg.model == "toy"
    is_watched = cfg.watch and not cfg.watch.startswith("toy")
    if is_scripted and not is_watched:
        return ""
    turns, step, held_out, watcher = cfg.max_turns, 0, 0, 0
    if not is_scripted:
        groups = cfg.batch_size // cfg.group_size
        # each round of --refill may replace every group
        step = (groups + cfg.batch_size * (2 * turns - 1)) * (1 + cfg.refill)
        held_out = evaluations_of(cfg) * cfg.eval_size * 2 * turns
    if is_watched:  # the watcher is asked once a reply
        watcher = cfg.steps // cfg.watch_every * cfg.batch_size * turns
    calls = cfg.steps * step + held_out + watcher
    prompt = prompt_tokens(cfg)
    watching = f" and {watcher:,} of --watch" if watcher else ""
    text = (
        f"calls to the simulator, at most: {step:,} a step, {calls:,} in all, with "
        f"evaluations{watching}; about {calls * prompt / 1e6:,.1f} million tokens to it and "
        f"{calls * ANSWER_TOKENS / 1e6:,.1f} from it  (estimate)"
    )
    if price:
        cost = calls * (prompt * price[0] + ANSWER_TOKENS * price[1]) / 1e6
        text += f"; at the given price {cost:,.2f}"
    return text


def evaluations_of(cfg):
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
    fixed = sum(map(len, texts)) / 2 / letters_a_token
    reply = min(cfg.max_tokens, REPLY_TOKENS["direct"])  # thoughts are never sent
    return fixed + PROFILE_TOKENS + cfg.max_turns / 2 * (reply + 60)


# -------------------------------------------------------------------------- what fits on which GPUs


def table():
    """The table of docs/gpus.md: what fits, by the estimate of the peak and a tenth to spare."""
    gpus = [("24 GB", 1, 24), ("48 GB", 1, 48), ("80 GB", 1, 80), ("8 x 80 GB", 8, 80)]
    lines = [
        "| model | algorithm | " + " | ".join(name for name, *_ in gpus) + " |",
        "|---|---|" + "---|" * len(gpus),
    ]
    for model in KNOWN:
        config = config_of(model)
        for algo, rank in itertools.product(("grpo", "ppo"), (0, 32)):
            cfg = resolve_settings({"algo": algo, "think": True, "model": model, "lora_rank": rank})
            name = f"{algo} --think" if rank == 0 else f"{algo} --think --lora-rank {rank}"
            cells = [does_it_fit(cfg, config, count, card) for _, count, card in gpus]
            lines.append("| " + " | ".join([model.split("/")[1], name, *cells]) + " |")
    return "\n".join(lines)


def does_it_fit(cfg, config, gpus, card):
    """A cell of the table: whether a run fits on `gpus` of `card` GB, and what it needs."""
    parts = memory(cfg, config, gpus)
    share = cfg.engine_memory * card * GB
    if share < parts["engine weights"][0]:
        return "no: engine weights"
    need, largest_part = peak(parts, share)
    if need < 0.9 * card * GB:
        return f"yes, {need / GB:.0f} GB"
    return f"no, {need / GB:.0f} GB: {largest_part}"


if __name__ == "__main__":
    print(table())
