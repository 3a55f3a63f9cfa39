"""gpu.py - speed, memory and tests on the GPU of this machine, in at most nine minutes, as the
Markdown of BENCHMARKS.md.

    python benchmarks/gpu.py

First the toy's policy trains for two steps, with all self-checks. Then come random models in the
shapes of Qwen2.5, because speed and memory need no trained weights. Each line of the table is
measured in its own process, with a run's own Models, engine and update, and printed at once:

  * sampling: 64 prompts of 300 tokens, 64 replies of 100 tokens, the torch engine
  * update: one optimizer step on 16 rows of 1,024 tokens, 4 of 4,096, 2 of 8,192, each thought with
    its reply on a branch. MFU counts 6 N operations a token for a whole model and 4 N for adapters
    (lora.py), of the policy and, with PPO, of the critic. It leaves out attention, what is computed
    a second time in the backward pass, and passes without gradients. So the hardware does more
    operations than MFU counts, up to twice as many.
  * memory: the largest that torch had allocated
  * end to end: three steps of PPO with adapters on 7B, against the toy's scripted user: do they run
    and fit, and how long do they take? No checkpoints: two of them are 57 GB
  * `pytest -m gpu`

What is not done after nine minutes is reported as not done. The models need 20 GB of disk space.

    python benchmarks/gpu.py make 1.5B DIR

makes one of these models.
"""

import argparse
import asyncio
import functools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from models.build import Models
from support.ranks import join_ranks
from support.rundir import RunDir
from support.settings import resolve_settings

import numpy as np
import torch

import rlver
from grpo import grpo_update
from policy import micro_batches
from ppo import ppo_update
from rollout import Episode, Segment, Turn
from toy import world

# dense bf16, in 10^12 operations a second, from the makers' data sheets
PEAK = {"H100": 989, "H200": 989, "A100": 312, "L40S": 362, "4090": 165}
# The sizes of a model, in transformers' names.
SIZES = (
    "hidden_size",
    "intermediate_size",  # of the MLP
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
SHAPES = {
    "0.5B": (896, 4864, 24, 14, 2, 151936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151936, True),
    "7B": (3584, 18944, 28, 28, 4, 152064, False),
}
LINES = [("1.5B", 0), ("7B", 16), ("0.5B", 0), ("1.5B", 16)]  # (size, rank of adapters)
LENGTHS = (1024, 4096, 8192)
TOKENS = 16384
TOY = "--algo grpo --think --steps 2 --batch-size 16 --eval-size 4 --warmup 1"
END_TO_END = (
    "--algo ppo --lora-rank 16 --steps 3 --batch-size 16 --max-turns 3 --max-tokens 64 "
    "--eval-size 4 --warmup 1"
)


def make_model(size, place, config=None):
    """A random model of a known shape in bf16, with the toy's tokenizer, in the directory
    `place`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

    if config is None:
        shape = dict(zip(SIZES, SHAPES[size]))
        config = Qwen2Config(**shape, max_position_embeddings=32768)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = None  # the template's last token is the stop
    model.save_pretrained(place)
    AutoTokenizer.from_pretrained(world.base_policy(False)).save_pretrained(place)


def rows(length, vocabulary, tokens=TOKENS):
    """Dialogues that fill a row of `length` each: two turns, a third of it trunk."""
    rng = np.random.default_rng(0)
    sixth = length // 6
    episodes = []
    for number in range(tokens // length):
        episode = Episode(str(number), number // 2, "", number=number, reward=rng.random())
        for turn in (1, 2):
            heard = rng.integers(5, vocabulary, sixth).tolist()
            sampled = rng.integers(5, vocabulary, 2 * sixth).tolist()
            log_probs = [-5.0] * len(sampled)
            episode.segments.append(Segment(heard))
            episode.segments.append(Segment(sampled, branch=turn, log_probs=log_probs))
            episode.turns.append(Turn("", ""))
        episodes.append(episode)
    return episodes


def seconds_of(work, repeats=2):
    """The shortest duration of a few calls, after one call that does not count."""
    durations = []
    for _ in range(repeats + 1):
        wait_for_gpu()
        began = time.perf_counter()
        work()
        wait_for_gpu()
        durations.append(time.perf_counter() - began)
    return min(durations[1:])


def wait_for_gpu():
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(place, rank, keep=False, lengths=LENGTHS, tokens=TOKENS, replies=(64, 300, 100)):
    """One line: {"sampled" (tokens/s), "updates": [{"algo", "length", "tokens" (a second),
    "mfu"}], "memory" (bytes)}. keep: are activations kept for the backward pass?"""
    models, runner = make_models(place, rank, keep, tokens)
    result = {"sampled": sampling_speed(models, runner, *replies), "updates": []}
    models.engine.sleep()
    for length in lengths:
        result["updates"] += update_speeds(models, rank, length, tokens)
    cuda = torch.cuda.is_available()
    result["memory"] = torch.cuda.max_memory_allocated() if cuda else None
    return result


def make_models(place, rank, keep=False, tokens=TOKENS):
    """(Models of PPO with the torch engine, and the asyncio.Runner that they sample in)."""
    cfg = resolve_settings(
        {
            "model": str(place),
            "algo": "ppo",
            "think": True,
            "lora_rank": rank,
            "tokens_per_gpu": tokens,
            "keep_activations": keep,
            "batch_size": 64,
            "engine": "torch",
        }
    )
    runner = asyncio.Runner()
    models = Models(cfg, rlver.start_of(cfg), None, None, None, runner)
    models.gap_limits, models.ratio_limit = None, 1e9  # the dialogues are made up
    return models, runner


def sampling_speed(models, runner, count, prompt_length, reply_length):
    """Sampled tokens a second of the engine, on `count` prompts."""
    models.engine.stop_ids = {-1}  # no reply stops early
    vocabulary = models.engine.model.config.vocab_size
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, vocabulary, prompt_length).tolist() for _ in range(count)]

    async def sample():
        models.engine.forget()
        calls = []
        for number, prompt in enumerate(prompts):
            dice = np.random.default_rng(number)
            calls.append(models.engine.generate(prompt, reply_length, dice, key=number))
        await asyncio.gather(*calls)

    return count * reply_length / seconds_of(lambda: runner.run(sample()), 1)


def update_speeds(models, rank, length, tokens):
    """[{"algo", "length", "tokens" (a second), "mfu"}] of one update by GRPO and one by PPO, on
    rows of `length`."""
    model = models.engine.model
    batches = batches_of(models, length, tokens)
    policy_size = sum(parameter.numel() for parameter in model.parameters())
    critic_size = policy_size - model.get_output_embeddings().weight.numel()
    cfg = resolve_settings({"algo": "ppo"})
    operations = 4 if rank else 6  # per parameter and token
    peak = peak_flops()
    speeds = []
    for algo, update, size in (
        ("GRPO", grpo_update, policy_size),
        ("PPO", ppo_update, policy_size + critic_size),
    ):
        speed = tokens / seconds_of(functools.partial(update, models, batches, cfg))
        mfu = peak and speed * operations * size / peak
        speeds.append({"algo": algo, "length": length, "tokens": speed, "mfu": mfu})
    return speeds


def batches_of(models, length, tokens):
    """One mini-batch of `rows`, in micro-batches."""
    episodes = rows(length, models.engine.model.config.vocab_size, tokens)
    # 128: the lengths that a run has on a GPU (policy.split_batch)
    return [[batch.to(models.device) for batch in micro_batches(episodes, tokens, multiple=128)]]


def peak_flops():
    """Operations a second that this card could do, or None if it is not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((flops * 1e12 for card, flops in PEAK.items() if card in name), None)


def percent(share):
    return "-" if share is None else f"{100 * share:.0f} %"


HEAD = """\
| model | trained | sampled tokens/s | update | tokens/s at L = 1k, 4k, 8k | MFU | GB at the peak |
|---|---|---|---|---|---|---|"""


def lines_of(size, rank, result):
    """The lines of the table for one model. result: what `measure` returns, or why it failed."""
    trained = f"adapters of rank {rank}" if rank else "whole"
    head = f"| {size} | {trained} |"
    if isinstance(result, str):
        return f"{head} {result} | | | | |"
    memory = "-" if result["memory"] is None else f"{result['memory'] / 1e9:.1f}"
    lines = []
    for algo in ("GRPO", "PPO"):
        updates = [update for update in result["updates"] if update["algo"] == algo]
        speeds = ", ".join(f"{update['tokens']:,.0f}" for update in updates)
        shares = ", ".join(percent(update["mfu"]) for update in updates)
        peak = memory if algo == "PPO" else "-"
        lines.append(f"{head} {result['sampled']:,.0f} | {algo} | {speeds} | {shares} | {peak} |")
    return "\n".join(lines)


def child(*args, limit):
    """Another process. Returns (exit code, its last line or the end of its error, seconds)."""
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
    seconds = time.perf_counter() - began
    if done.returncode == 0:
        return 0, last_line(done.stdout), seconds
    complaint = last_line(done.stderr) or last_line(done.stdout)
    return done.returncode, complaint[:300], seconds


def last_line(text):
    return text.strip().split("\n")[-1]


def steps(place, out):
    """The three steps, without their checkpoints."""
    RunDir.save = lambda self, *_: None
    return rlver.main(["--model", str(place), *END_TO_END.split(), "--out", str(out)])


def main(keep):
    """Measure and print all of it. Returns the exit code."""
    if not torch.cuda.is_available():
        print("gpu.py: no GPU here", file=sys.stderr)
        return 2
    end = time.perf_counter() + 540

    def left(most):
        return min(most, end - time.perf_counter())

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        toy = [
            "rlver.py",
            "--model",
            world.base_policy(True),
            *TOY.split(),
            "--out",
            folder / "toy",
        ]
        code, outcome, seconds = child(*toy, limit=left(120))
        failed = code != 0
        took = outcome if failed else f"{seconds:.0f} s"
        print(f"The toy's policy, GRPO, two steps: {took}\n\n{HEAD}", flush=True)
        for size, rank in LINES:
            place, code = folder / size, 0
            if not place.exists():
                code, outcome, _ = child(__file__, "make", size, place, limit=left(90))
            if code == 0:
                code, outcome, _ = child(__file__, "measure", place, rank, keep, limit=left(150))
            failed |= code != 0
            result = outcome if code else json.loads(outcome)
            print(lines_of(size, rank, result), flush=True)
        code, outcome, seconds = child(
            __file__, "steps", folder / "7B", folder / "run", limit=left(150)
        )
        failed |= code != 0
        took = outcome if code else f"{seconds:.0f} s"
        print(f"\n7B, PPO, adapters, three steps end to end: {took}", flush=True)
    tests = ["-m", "pytest", "-q", "-m", "gpu", "tests/machine/test_cuda.py"]
    code, outcome, _ = child(*tests, limit=left(150))
    print(f"`pytest -m gpu`: {outcome}")
    return int(failed or code != 0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    # a part of it, in a process of its own: see `child`
    works = ("make", "measure", "steps")
    parser.add_argument("work", nargs="?", choices=works, help=argparse.SUPPRESS)
    parser.add_argument("args", nargs="*", help=argparse.SUPPRESS)
    text = "measure updates that keep their activations, as rlver.py's flag"
    parser.add_argument("--keep-activations", action="store_true", help=text)
    given = parser.parse_args()
    if given.work == "make":
        make_model(*given.args)
    elif given.work == "steps":
        sys.exit(steps(*given.args))
    elif given.work == "measure":
        join_ranks(cuda=torch.cuda.is_available())
        place, rank, *more = given.args
        print(json.dumps(measure(place, int(rank), *map(json.loads, more))))
    else:  # without a GPU it says so, and ends with 2
        sys.exit(main("true" if given.keep_activations else "false"))
