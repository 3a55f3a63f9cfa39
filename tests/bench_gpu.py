"""bench_gpu.py - python tests/bench.py --gpu: what is true on the GPU that is here, in at most nine
minutes, as the Markdown of BENCHMARKS.md.

Random models in the shapes of Qwen2.5: speed and memory need no trained weights. Each line is a
process of its own, with a run's own Models, engine and update:

  * sampling: 64 prompts of 300 tokens, 64 replies of 100 tokens, the torch engine
  * update: one optimizer step on 16 rows of 1,024 tokens, 4 of 4,096, 2 of 8,192, one thought and
    reply each on a branch. MFU counts 6 N operations a token for a whole model and 4 N for
    adapters (lora.py), of the policy and, with PPO, of the critic; it leaves out attention, what is
    computed a second time in the backward pass, and passes that only look. So the hardware does
    more than that, up to twice.
  * memory: the largest that torch had allocated, beside `--plan`'s number
  * end to end: three steps of PPO with adapters on 7B, against the toy's scripted user: that it
    runs, fits, and how long. No checkpoints: two of them are 57 GB

What is not done nine minutes after the start is said to be so. It needs 20 GB for the models.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
from support import plan
from support.ranks import join_ranks
from support.settings import resolve_settings

import numpy as np
import torch

import toy
from grpo import grpo_update
from models import Models
from policy import Episode, Segment, micro_batches
from ppo import ppo_update

# dense bf16, in 10^12 a second, from the makers' data sheets
PEAK = {"H100": 989, "H200": 989, "A100": 312, "L40S": 362, "4090": 165, "3090": 71}
LINES = [("0.5B", 0), ("1.5B", 0), ("1.5B", 16), ("7B", 16)]  # (size, rank of adapters)
LENGTHS = (1024, 4096, 8192)
TOKENS = 16384
END_TO_END = [
    "--algo",
    "ppo",
    "--lora-rank",
    "16",
    "--steps",
    "3",
    "--batch-size",
    "16",
    "--max-turns",
    "3",
    "--max-tokens",
    "64",
    "--eval-size",
    "4",
    "--warmup",
    "1",
]


def make_model(size, place, config=None):
    """A random model of a known shape in bf16, with the toy's tokenizer, in the directory
    `place`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = config or plan.config_of(f"Qwen/Qwen2.5-{size}-Instruct")
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None  # the template's last token is the stop
    model.save_pretrained(place)
    AutoTokenizer.from_pretrained(toy.base_policy(False)).save_pretrained(place)


def rows(length, vocabulary, tokens=TOKENS):
    """Dialogues that fill a row of `length` each: two turns, a third of it trunk."""
    rng, third = np.random.default_rng(0), length // 6
    said = lambda n: rng.integers(5, vocabulary, n).tolist()
    episodes = []
    for number in range(tokens // length):
        e = Episode(str(number), number // 2, "", number=number, reward=rng.random())
        for turn in (1, 2):
            e.segments += [
                Segment(said(third)),
                Segment(said(2 * third), branch=turn, log_probs=[-5.0] * (2 * third)),
            ]
        episodes.append(e)
    return episodes


def seconds_of(work, repeats=2):
    """The shortest of a few, after one that does not count."""
    sync, took = (torch.cuda.synchronize if torch.cuda.is_available() else lambda: None), []
    for _ in range(repeats + 1):
        sync()
        began = time.perf_counter()
        work()
        sync()
        took.append(time.perf_counter() - began)
    return min(took[1:])


def measure(place, rank, lengths=LENGTHS, tokens=TOKENS, replies=(64, 300, 100)):
    """One line: {"sampled" (tokens/s), "updates": [{"algo", "length", "tokens" (a second),
    "mfu"}], "memory", "planned" (bytes)}."""
    cfg = resolve_settings(
        {
            "model": str(place),
            "algo": "ppo",
            "think": True,
            "lora_rank": rank,
            "tokens_per_gpu": tokens,
            "batch_size": 64,
            "engine": "torch",
        }
    )
    runner, cuda = asyncio.Runner(), torch.cuda.is_available()
    models = Models(cfg, None, None, runner)
    n = sum(p.numel() for p in models.engine.model.parameters())
    critic = n - models.engine.model.get_output_embeddings().weight.numel()
    vocabulary = models.engine.model.config.vocab_size
    rng, (count, asked, made) = np.random.default_rng(0), replies
    models.engine.stop_id = -1  # nobody stops early
    prompts = [rng.integers(5, vocabulary, asked).tolist() for _ in range(count)]

    async def sample():
        models.engine.forget()
        await asyncio.gather(
            *[
                models.engine.generate(p, made, np.random.default_rng(i), key=i)
                for i, p in enumerate(prompts)
            ]
        )

    result = {"sampled": count * made / seconds_of(lambda: runner.run(sample()), 1), "updates": []}
    models.engine.sleep()
    name = torch.cuda.get_device_name() if cuda else ""
    peak = next((flops for card, flops in PEAK.items() if card in name), None)
    for length in lengths:
        batches = [
            [
                b.to(models.device)
                for b in micro_batches(rows(length, vocabulary, tokens), tokens, models.pad)
            ]
        ]
        shared = dict(clip_eps=0.2, entropy_coef=0.001, check_ratio=False, ratio_limit=1e9)
        for algo, work, size in (
            ("GRPO", lambda: grpo_update(models.policy, models.optimizer, batches, **shared), n),
            (
                "PPO",
                lambda: ppo_update(
                    models.policy,
                    models.optimizer,
                    models.critic,
                    models.critic_optimizer,
                    batches,
                    **shared,
                ),
                n + critic,
            ),
        ):
            speed = tokens / seconds_of(work)
            result["updates"].append(
                {
                    "algo": algo,
                    "length": length,
                    "tokens": speed,
                    "mfu": peak and speed * (4 if rank else 6) * size / (peak * 1e12),
                }
            )
    parts = plan.memory(cfg, models.engine.model.config, 1)
    return result | {
        "memory": torch.cuda.max_memory_allocated() if cuda else None,
        "planned": plan.peak(parts)[0],
    }


def table(found):
    """The Markdown. found: {(size, rank): what `measure` returns, or why it failed}."""
    share = lambda x: "-" if x is None else f"{100 * x:.0f} %"
    lines = [
        "| model | trained | sampled tokens/s | update | tokens/s at L = 1k, 4k, 8k | MFU | "
        "GB at the peak, planned |",
        "|---|---|---|---|---|---|---|",
    ]
    for (size, rank), r in found.items():
        what = f"| {size} | {f'adapters of rank {rank}' if rank else 'whole'} |"
        if isinstance(r, str):
            lines.append(f"{what} {r} | | | | |")
            continue
        for algo in ("GRPO", "PPO"):
            own = [u for u in r["updates"] if u["algo"] == algo]
            memory = "-" if r["memory"] is None else f"{r['memory'] / 1e9:.1f}"
            both = f"{memory}, {r['planned'] / 1e9:.1f}" if algo == "PPO" else "-"
            lines.append(
                f"{what} {r['sampled']:,.0f} | {algo} | "
                + ", ".join(f"{u['tokens']:,.0f}" for u in own)
                + " | "
                + ", ".join(share(u["mfu"]) for u in own)
                + f" | {both} |"
            )
    return "\n".join(lines)


def child(*args, limit):
    """Another process. Returns (exit code, its last line or its last words of woe, seconds)."""
    began = time.perf_counter()
    if limit <= 0:
        return 1, "not begun in nine minutes", 0.0
    try:
        done = subprocess.run(
            [sys.executable, *map(str, args)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=limit,
        )
    except subprocess.TimeoutExpired:
        return 1, f"not done in {limit:.0f} s", limit
    last = lambda text: (text.strip().split("\n") or [""])[-1]
    said = (
        last(done.stdout)
        if done.returncode == 0
        else (last(done.stderr) or last(done.stdout))[:300]
    )
    return done.returncode, said, time.perf_counter() - began


def steps(place, out):
    """The three steps, without their checkpoints."""
    from support.rundir import RunDir

    import rlver

    RunDir.save_checkpoint = lambda self, *_: None
    return rlver.main(["--model", str(place), *END_TO_END, "--out", str(out)])


def main():
    """All of it. Returns the exit code."""
    if not torch.cuda.is_available():
        print("bench.py --gpu: no GPU here", file=sys.stderr)
        return 2
    end = time.perf_counter() + 540
    left = lambda most: min(most, end - time.perf_counter())
    code, said, _ = child(
        "-m", "pytest", "-q", "-m", "gpu", "tests/machine/test_cuda.py", limit=left(150)
    )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; `pytest -m gpu`: {said}\n")
    found, failed = {}, code != 0
    with tempfile.TemporaryDirectory() as folder:
        for size, rank in LINES:
            place, code = Path(folder) / size, 0
            if not place.exists():
                code, said, _ = child(__file__, "make", size, place, limit=left(90))
            if code == 0:
                code, said, _ = child(__file__, "measure", place, rank, limit=left(100))
            found[size, rank] = json.loads(said) if code == 0 else said
            failed |= code != 0
        print(table(found), flush=True)
        code, said, seconds = child(
            __file__, "steps", Path(folder) / "7B", Path(folder) / "run", limit=left(150)
        )
    print(
        "\n7B, PPO, adapters, three steps end to end: "
        + (f"{seconds:.0f} s" if code == 0 else f"failed: {said}")
    )
    return int(failed or code != 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("work", choices=("make", "measure", "steps"))
    parser.add_argument("args", nargs="+")
    given = parser.parse_args()
    if given.work == "make":
        make_model(*given.args)
    elif given.work == "steps":
        sys.exit(steps(*given.args))
    else:
        join_ranks(cuda=torch.cuda.is_available())
        place, rank, *more = given.args
        print(json.dumps(measure(place, int(rank), *map(json.loads, more))))
