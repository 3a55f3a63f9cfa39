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

from support.settings import BadInput, is_beside_us, may_be_on_the_hub, resolve_settings

import itertools
import math
from pathlib import Path

GB = 1e9
# Shapes of the models that people ask for, from their published config.json, so that planning needs
# no network.
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
# what a reply may be expected to grow to; the paper's curves end at 235 and 140
REPLY_TOKENS = {"think": 250, "direct": 120}


def config_of(name):
    """The transformers config of a model directory, of one of KNOWN, or of a name on the hub.
    Raises BadInput."""
    from transformers import AutoConfig, Qwen2Config

    if name in KNOWN and not Path(name).is_dir():
        return Qwen2Config(**dict(zip(SHAPE, KNOWN[name])), max_position_embeddings=32768)
    here = Path(name).is_dir()
    if not here and (not may_be_on_the_hub(name) or is_beside_us(name)):
        raise BadInput(
            f"--model {name}: no such directory; name one that holds a "
            f"config.json, or one of {', '.join(KNOWN)}"
        )
    try:
        return AutoConfig.from_pretrained(name, local_files_only=here)
    except Exception as error:
        what = (
            "no config in this directory"
            if here
            else "no such directory, and not to be had from the hub"
        )
        raise BadInput(f"--model {name}: {what}: {' '.join(str(error).split())[:120]}") from None


def sizes_of(config, rank=0):
    """Numbers of parameters: {"all", "head" (an output layer of its own), "embedding", "block" (the
    largest), "adapters"}. Counted on torch's meta device: tensors of a shape and no memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = lambda module: sum(p.numel() for p in module.parameters())
    blocks = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    sides = [sum(m.weight.shape) for m in blocks.modules() if isinstance(m, torch.nn.Linear)]
    return {
        "all": count(model),
        "head": 0 if tied else count(model.get_output_embeddings()),
        "embedding": count(model.get_input_embeddings()),
        "block": max(map(count, blocks)),
        "adapters": rank * sum(sides),
    }


def memory(cfg, config, gpus, compute_bytes=2):
    """Bytes on each of `gpus`, by part: {part: (bytes, "exact" | "estimate")}. compute_bytes: 2 for
    bf16, 4 for fp32."""
    p, lora, ppo = sizes_of(config, cfg.lora_rank), cfg.lora_rank > 0, cfg.algo == "ppo"
    critic = ppo * ((p["adapters"] if lora else p["all"] - p["head"]) + config.hidden_size + 1)
    trained = p["adapters" if lora else "all"] + critic
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = (
        2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * compute_bytes
    )  # keys and values
    # a dialogue as the engine holds it: prompt, and each turn a line of the user and a reply
    length = 300 + cfg.max_turns * (60 + min(cfg.max_tokens, REPLY_TOKENS[cfg.mode]))
    tokens = cfg.tokens_per_gpu
    # The peak of the update: the inputs of all blocks, kept; one block made again, with its
    # gathered weights and their gradient; embedding and output layer, gathered for the whole pass;
    # one chunk of logits, in fp32, about four times over.
    gathered = compute_bytes + 4 * (not lora)  # and the gradient, where there is one
    block = tokens * (8 * config.hidden_size + 3 * config.intermediate_size) * compute_bytes
    activations = (
        config.num_hidden_layers * tokens * config.hidden_size * compute_bytes
        + block
        + (2 * p["block"] + p["embedding"] + p["head"]) * gathered
        + 4 * 4 * 2**27
    )
    return {
        "frozen base": (compute_bytes * p["all"] * lora / gpus, "exact"),
        "masters": (4 * trained / gpus, "exact"),
        "gradients": (4 * trained / gpus, "exact"),
        "Adam": (8 * trained / gpus, "exact"),
        "reference": (4 * p["all"] / gpus if cfg.kl_coef and not lora else 0, "exact"),
        "engine weights": (compute_bytes * p["all"], "exact"),
        "engine cache": (math.ceil(cfg.batch_size / gpus) * length * per_token, "estimate"),
        "activations": (activations, "estimate"),
    }


def peak(parts, share=0):
    """(bytes, the largest part) of the larger of the two peaks, rollout and update. share: what
    vLLM takes of the card for weights and cache, whatever the model's size, and gives back for the
    update; 0: the torch engine, which gives back its cache alone."""
    value = {name: size for name, (size, _) in parts.items()} | {"engine share": share}
    names = ["frozen base", "masters", "Adam", "reference"] + ["engine weights"] * (not share)
    peaks = [
        {name: value[name] for name in names + more}
        for more in (["engine share" if share else "engine cache"], ["gradients", "activations"])
    ]
    largest = max(peaks, key=lambda peak: sum(peak.values()))
    return sum(largest.values()), max(largest, key=largest.get)


def host(cfg, alone):
    """Bytes outside of the GPUs, (memory, disk): the first rank gathers a checkpoint; on disk are
    --keep of them and the one in the making. Not counted: the torch engine's copy, which passes
    through on each rank. alone: `memory` on one GPU."""
    # frozen weights are merged in fp32
    saved = alone["masters"][0] + alone["Adam"][0] + 2 * alone["frozen base"][0]
    return saved, (cfg.keep + 1) * saved


def report(cfg, given):
    """The plan as text. given: the flags, for price, card, latency and engine (vllm if not told).
    Raises BadInput if there is no config, or no room for the engine."""
    price, card, wait = given["price"], given["card"] or 80.0, given["latency"] or 6.0
    if cfg.model == "toy":
        return "the toy runs on a laptop: about 1 GB of memory, minutes\n" + (
            calls_of(cfg, price) or "no calls to any server"
        )
    config = config_of(cfg.model)
    p, reply = sizes_of(config, cfg.lora_rank), min(cfg.max_tokens, REPLY_TOKENS[cfg.mode])
    columns = [memory(cfg, config, gpus) for gpus in (1, 2, 4, 8)]
    own, weights = given["engine"] != "torch", 2 * p["all"]
    share = own * cfg.engine_memory * card * GB
    if own and share <= weights:
        raise BadInput(
            f"--engine-memory {cfg.engine_memory}: {share / GB:.1f} GB of {card:g} "
            f"(--card), and the weights alone are {weights / GB:.1f} GB; take more"
        )
    frozen = f", frozen; in adapters {p['adapters'] / 1e6:.0f} million" * (cfg.lora_rank > 0)
    lines = [
        f"{cfg.model}: {p['all'] / 1e9:.2f} billion parameters{frozen}"
        + (", and a critic of about as many" if cfg.algo == "ppo" else ""),
        "",
        "GB on each GPU".ljust(28)
        + "".join(f"{f'{gpus} GPU' + 's' * (gpus > 1):>9}" for gpus in (1, 2, 4, 8)),
    ]
    for part, (_, kind) in columns[0].items():
        lines.append(
            f"{part + ('  (estimate)' if kind == 'estimate' else ''):<28}"
            + "".join(f"{c[part][0] / GB:>9.1f}" for c in columns)
        )
    peaks = [peak(c, share)[0] for c in columns]
    for name, row in zip(
        ("at the peak", "host memory", "disk"),
        (peaks, *([size] * 4 for size in host(cfg, columns[0]))),
    ):
        lines.append(f"{name}  (estimate)".ljust(28) + "".join(f"{x / GB:>9.1f}" for x in row))
    replies, calls = cfg.batch_size * cfg.max_turns, 2 * cfg.max_turns
    lines += [
        "",
        f"the user's answers: {cfg.steps * calls * wait / 3600:.1f} hours, at {wait:g} s "
        f"a call (--latency) and {calls} calls a step one after the other, if as many "
        "overlap as there are dialogues  (estimate)",
        f"a step: {cfg.batch_size} dialogues, {replies * cfg.max_tokens:,} tokens sampled "
        f"at most, about {replies * reply:,} with replies of {reply} tokens  (estimate)",
        f"in all: {cfg.steps} steps, about {cfg.steps * replies * reply / 1e6:,.0f} million "
        "tokens  (estimate)",
        calls_of(cfg, price),
        "The peak is the larger of rollout (engine weights and cache"
        + f"; vLLM has {share / GB:.0f} GB, --engine-memory of --card" * own
        + ") and update "
        "(gradients, activations). Left out: fragmentation, NCCL, CUDA itself.",
    ]
    return "\n".join(lines)


PROMPTS = Path(__file__).resolve().parent.parent / "prompts"
PROFILE_TOKENS, ANSWER_TOKENS = 700, 250  # of a released profile; of an answer in its sections


def calls_of(cfg, price=None):
    """What the simulator's server is asked, as text; "" for the toy's scripted user.

    At most: nobody takes leave. A dialogue of T turns is 2 T - 1 calls, and a group one more for
    its first line; each evaluation is one dialogue a user. price: (of a million prompt tokens, of a
    million answer tokens), or None."""
    embedded = cfg.simulator.startswith("toy") and cfg.model == "toy"
    watch = cfg.watch and not cfg.watch.startswith("toy")
    if embedded and not watch:
        return ""
    turns, groups = cfg.max_turns, cfg.batch_size // cfg.group_size
    # a refill may replace every group; who watches is asked once a reply
    step = (not embedded) * (groups + cfg.batch_size * (2 * turns - 1)) * (1 + cfg.refill)
    looks = cfg.steps // cfg.watch_every * cfg.batch_size * turns if watch else 0
    evaluations = 2 + ((cfg.steps - 1) // cfg.eval_every if cfg.eval_every else 0)
    held_out = (not embedded) * cfg.eval_size * 2 * turns
    every = cfg.steps * step + (evaluations if cfg.steps else 1) * held_out + looks
    # a prompt is the file, the person, and on average half a dialogue; a token is 4 letters or
    # 1.5 Chinese signs
    texts = [
        (PROMPTS / cfg.lang / cfg.difficulty / f"{name}.txt").read_text(encoding="utf-8")
        for name in ("emotion", "reply")
    ]
    letters = sum(map(len, texts)) / 2 / (4 if cfg.lang == "en" else 1.5)
    reply = min(cfg.max_tokens, REPLY_TOKENS["direct"])  # thoughts are never sent
    prompt = letters + PROFILE_TOKENS + turns / 2 * (reply + 60)
    watching = f" and {looks:,} of --watch" * bool(looks)
    text = (
        f"calls to the simulator, at most: {step:,} a step, {every:,} in all, with "
        f"evaluations{watching}; about {every * prompt / 1e6:,.1f} million tokens to it and "
        f"{every * ANSWER_TOKENS / 1e6:,.1f} from it  (estimate)"
    )
    if price:
        cost = every * (prompt * price[0] + ANSWER_TOKENS * price[1]) / 1e6
        text += f"; at the given price {cost:,.2f}"
    return text


def table():
    """The table of docs/gpus.md: what fits, by the estimate of the peak and a tenth to spare."""
    gpus = [("24 GB", 1, 24), ("48 GB", 1, 48), ("80 GB", 1, 80), ("8 x 80 GB", 8, 80)]

    def cell(parts, room, share):
        if share < parts["engine weights"][0]:
            return "no: engine weights"
        need, part = peak(parts, share)
        return (
            f"yes, {need / GB:.0f} GB"
            if need < 0.9 * room * GB
            else f"no, {need / GB:.0f} GB: {part}"
        )

    lines = [
        "| model | algorithm | " + " | ".join(name for name, *_ in gpus) + " |",
        "|---|---|" + "---|" * len(gpus),
    ]
    for model in KNOWN:
        config = config_of(model)
        for algo, rank in itertools.product(("grpo", "ppo"), (0, 32)):
            cfg = resolve_settings({"algo": algo, "think": True, "model": model, "lora_rank": rank})
            cells = [
                cell(memory(cfg, config, count), room, cfg.engine_memory * room * GB)
                for _, count, room in gpus
            ]
            name = f"{algo} --think" + " --lora-rank 32" * (rank > 0)
            lines.append("| " + " | ".join([model.split("/")[1], name, *cells]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
