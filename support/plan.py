"""support/plan.py - what a run would need, from the model's config alone: memory by part, tokens,
calls to the simulator. Nothing is loaded.

    python rlver.py --plan --algo ppo --think --model Qwen/Qwen2.5-7B-Instruct
        one run, on 1, 2, 4 and 8 GPUs
    python -m support.plan
        the table of docs/gpus.md: what fits where

Exact, and held to 5 % by a test: masters, gradients, Adam, critic, reference, the engine's weights.
Estimates, from the shapes of the tensors that are alive at the peak: activations and the engine's
cache. Fragmentation, NCCL's buffers and CUDA itself want a few GB more; nothing of it was measured
on a GPU (BENCHMARKS.md says what was).
"""
import math
from pathlib import Path

from support.settings import BadInput, resolve_settings

GB = 1e9
# Shapes of the models that people ask for, so that planning needs no network: (hidden,
# intermediate, layers, heads, KV heads, vocabulary, tied embeddings), from their published
# config.json.
KNOWN = {"Qwen/Qwen2.5-0.5B-Instruct": (896, 4864, 24, 14, 2, 151936, True),
         "Qwen/Qwen2.5-1.5B-Instruct": (1536, 8960, 28, 12, 2, 151936, True),
         "Qwen/Qwen2.5-3B-Instruct": (2048, 11008, 36, 16, 2, 151936, True),
         "Qwen/Qwen2.5-7B-Instruct": (3584, 18944, 28, 28, 4, 152064, False)}
# what a reply may be expected to grow to; the paper's curves end at 235 and 140
REPLY_TOKENS = {"think": 250, "direct": 120}


def config_of(name):
    """The transformers config of a model directory, of one of KNOWN, or of a name on the hub.
    Raises BadInput."""
    from transformers import AutoConfig, Qwen2Config
    if name in KNOWN and not Path(name).is_dir():
        hidden, intermediate, layers, heads, kv, vocabulary, tied = KNOWN[name]
        return Qwen2Config(hidden_size=hidden, intermediate_size=intermediate,
                           num_hidden_layers=layers, num_attention_heads=heads,
                           num_key_value_heads=kv, vocab_size=vocabulary, tie_word_embeddings=tied,
                           max_position_embeddings=32768)
    try:
        return AutoConfig.from_pretrained(name, local_files_only=Path(name).is_dir())
    except Exception as error:
        raise BadInput(f"--model {name}: no config to plan with: "
                       f"{' '.join(str(error).split())[:160]}") from None


def sizes_of(config):
    """Numbers of parameters: {"all", "head" (an output layer of its own), "embedding", "block" (the
    largest)}. Counted on torch's meta device, where a tensor has a shape and no memory."""
    import torch
    from transformers import AutoModelForCausalLM
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    count = lambda module: sum(p.numel() for p in module.parameters())
    blocks = max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len)
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    return {"all": count(model), "head": 0 if tied else count(model.get_output_embeddings()),
            "embedding": count(model.get_input_embeddings()), "block": max(map(count, blocks))}


def memory(cfg, config, gpus, compute_bytes=2):
    """Bytes on each of `gpus`, by part: {part: (bytes, "exact" | "estimate")}. compute_bytes: 2 for
    bf16, 4 for fp32."""
    p = sizes_of(config)
    critic = p["all"] - p["head"] + config.hidden_size + 1 if cfg.algo == "ppo" else 0
    trained = p["all"] + critic
    head_size = (getattr(config, "head_dim", None)
                 or config.hidden_size // config.num_attention_heads)
    # keys and values
    per_token = (2 * config.num_hidden_layers * config.num_key_value_heads * head_size
                 * compute_bytes)
    length = dialogue_tokens(cfg)
    tokens = cfg.tokens_per_gpu
    # The peak of the update: the inputs of all blocks, kept; one block made again, with its
    # gathered weights and their gradient; embedding and output layer, gathered for the whole pass;
    # one chunk of logits, in fp32, about four times over.
    block = tokens * (8 * config.hidden_size + 3 * config.intermediate_size) * compute_bytes
    activations = (config.num_hidden_layers * tokens * config.hidden_size * compute_bytes + block
                   + 2 * p["block"] * (compute_bytes + 4)
                   + (p["embedding"] + p["head"]) * (compute_bytes + 4) + 4 * 4 * 2 ** 24)
    return {"masters": (4 * trained / gpus, "exact"), "gradients": (4 * trained / gpus, "exact"),
            "Adam": (8 * trained / gpus, "exact"),
            "reference": (4 * p["all"] / gpus if cfg.kl_coef else 0, "exact"),
            "engine weights": (compute_bytes * p["all"], "exact"),
            "engine cache": (math.ceil(cfg.batch_size / gpus) * length * per_token, "estimate"),
            "activations": (activations, "estimate")}


def peak(parts):
    """The larger of the two peaks: the engine's cache is given back before the update, activations
    are made only in it."""
    value = {name: size for name, (size, _) in parts.items()}
    resting = sum(value[name] for name in ("masters", "Adam", "reference", "engine weights"))
    return max(resting + value["engine cache"], resting + value["gradients"] + value["activations"])


def dialogue_tokens(cfg):
    """Tokens of a dialogue as the engine holds it: prompt, and each turn a line of the user and a
    reply of the expected size."""
    reply = min(cfg.max_tokens, REPLY_TOKENS[cfg.mode])
    return 300 + cfg.max_turns * (reply + 60)


def report(cfg):
    """The plan as text. Raises BadInput if there is no config."""
    if cfg.model == "toy":
        return "the toy runs on a laptop: about 1 GB of memory, minutes, no calls to any server"
    config = config_of(cfg.model)
    p, reply = sizes_of(config), min(cfg.max_tokens, REPLY_TOKENS[cfg.mode])
    groups, turns, steps = cfg.batch_size // cfg.group_size, cfg.max_turns, cfg.steps
    calls = groups + cfg.batch_size * (2 * turns - 1)
    columns = [memory(cfg, config, gpus) for gpus in (1, 2, 4, 8)]
    lines = [f"{cfg.model}: {p['all'] / 1e9:.2f} billion parameters"
             + (", and a critic of about as many" if cfg.algo == "ppo" else ""), "",
             "GB on each GPU".ljust(28) + "".join(f"{f'{gpus} GPU' + 's' * (gpus > 1):>9}"
                                                  for gpus in (1, 2, 4, 8))]
    for part, (_, kind) in columns[0].items():
        lines.append(f"{part + ('  (estimate)' if kind == 'estimate' else ''):<28}"
                     + "".join(f"{c[part][0] / GB:>9.1f}" for c in columns))
    lines.append("at the peak  (estimate)".ljust(28)
                 + "".join(f"{peak(c) / GB:>9.1f}" for c in columns))
    lines += ["", f"a step: {cfg.batch_size} dialogues, at most {calls:,} calls to the simulator, "
              f"and {cfg.batch_size * turns * cfg.max_tokens:,} tokens sampled; about "
              f"{cfg.batch_size * turns * reply:,} with replies of {reply} tokens  (estimate)",
              f"in all: {steps} steps, at most {steps * calls:,} calls, about "
              f"{steps * cfg.batch_size * turns * reply / 1e6:,.0f} million tokens  (estimate); "
              "evaluations come on top", "The peak is the larger of rollout (engine cache) and "
              "update (gradients, activations). Left out: fragmentation, NCCL, CUDA itself."]
    return "\n".join(lines)


def table():
    """The table of docs/gpus.md: what fits, by the estimate of the peak and a tenth to spare."""
    gpus = [("24 GB", 1, 24), ("48 GB", 1, 48), ("80 GB", 1, 80), ("8 x 80 GB", 8, 80)]
    lines = ["| model | algorithm | " + " | ".join(name for name, *_ in gpus) + " |",
             "|---|---|" + "---|" * len(gpus)]
    for model in KNOWN:
        config = config_of(model)
        for algo in ("grpo", "ppo"):
            cfg = resolve_settings({"algo": algo, "think": True, "model": model})
            needs = [(peak(memory(cfg, config, count)) / GB, room) for _, count, room in gpus]
            lines.append(f"| {model.split('/')[1]} | {algo} --think | " + " | ".join(
                f"{'yes' if need < 0.9 * room else 'no'}, {need:.0f} GB" for need, room in needs)
                         + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
