"""bench_small.py - where the time of a step of smollm2 goes, and what three changes save.

    python tests/bench.py --small

Four short runs of `rlver.py --model smollm2` in turn, `ROUNDS` times, each in a process of its
own:

    as it is
    nothing shared     the engine computes every prompt in full. As it is, it computes the beginning
                       that new dialogues have in common once, and copies it
    heads copied       in the engine, transformers copies keys and values for every head of queries
                       that shares them. As it is, nothing is copied (engine.grouped_attention)
    recomputed         the update makes the activations again in the backward pass. As it is, it
                       keeps them, because there is memory enough

Seconds are those of summary.json: of rollout and update per step, of both evaluations together.
The peak is of the process's whole memory. The table has medians (of two rounds: means).
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

STEPS, ROUNDS = 2, 2
FLAGS = ["--algo", "grpo", "--model", "smollm2", "--steps", str(STEPS), "--eval-size", "8"]
VARIANTS = ("as it is", "nothing shared", "heads copied", "recomputed")


def run_variant(variant, out):
    """One run, in this process."""
    import engine
    import models
    import rlver

    if variant == "nothing shared":
        engine.MIN_SHARED = 10**9
    if variant == "heads copied":
        engine.share_heads = lambda model: None
    if variant == "recomputed":
        models.must_recompute = lambda *_: True
    sys.exit(rlver.main([*FLAGS, "--out", out]))


def measure(variant):
    """What a run of `variant` took: {"rollout", "update", "evaluate", "total": seconds;
    "tokens_per_s"; "peak_mib"}."""
    with tempfile.TemporaryDirectory() as place:
        out = Path(place) / "run"
        command = [sys.executable, __file__, variant, str(out)]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=os.environ)
        if ended.returncode:
            sys.exit(f"the run '{variant}' failed: {ended.stderr.strip().splitlines()[-1:]}")
        summary = json.loads((out / "summary.json").read_text())
    seconds = summary["seconds"]
    return {
        "rollout": seconds["rollout"] / STEPS,
        "update": seconds["update"] / STEPS,
        "evaluate": seconds["evaluate"],
        "total": seconds["total"],
        "tokens_per_s": summary["tokens"]["sampled"] / seconds["rollout"],
        "peak_mib": summary["peak_rss_mb"],
    }


def compare():
    """{variant: {name: median over the rounds}}."""
    rounds = [{variant: measure(variant) for variant in VARIANTS} for _ in range(ROUNDS)]
    return {
        variant: {
            name: statistics.median(measured[variant][name] for measured in rounds)
            for name in rounds[0][variant]
        }
        for variant in VARIANTS
    }


def table(result):
    """The result as a table in Markdown."""
    lines = [
        "| | rollout, s a step | tokens/s | update, s a step | both evaluations, s | peak, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for variant, r in result.items():
        cells = [f"{r['rollout']:.1f}", f"{r['tokens_per_s']:.0f}", f"{r['update']:.1f}"]
        cells += [f"{r['evaluate']:.1f}", f"{r['peak_mib'] / 1024:.1f}"]
        lines.append(f"| {variant} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("this file is run by `python tests/bench.py --small`")
    run_variant(*sys.argv[1:])
