"""ablation.py - what is rewarded, and when: the table of docs/rewarded.md. And how much rank an
adapter needs.

    python tests/ablation.py [--out runs/ablation] [--jobs 2] [--only grpo,delta]
    python tests/ablation.py --of rank --steps 60 --out runs/ranks [--only ppo,direct]

PPO and GRPO, thinking and direct, paid at the end or by the turn, and direct GRPO with each of its
three advantages: the same number of dialogues each, seeds 0, 1, 2, held-out score every five steps.
Or paid at the end, the whole model against adapters of rank 1, 4, 8 and 16. Runs that are there
already are not made again, one that was stopped goes on. Prints a Markdown table and draws a
picture from whatever is done.
"""
import itertools
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from support.settings import Parser, positive

KINDS = ("grpo", "dr-grpo", "rloo")
EVERY, BATCH, SEEDS, GOAL = 5, 64, (0, 1, 2), 75
T_95 = {2: 12.71, 3: 4.30}      # Student's t, two-sided 95 %, for a mean of so many seeds


def variants(of="reward"):
    """(name, flags) of every line of the table of "reward" or "rank"."""
    if of == "rank":
        for algo, mode, rank in itertools.product(("ppo", "grpo"), ("think", "direct"),
                                                  (0, 1, 4, 8, 16)):
            yield f"{algo} {mode} " + (f"rank-{rank}" if rank else "whole"), [
                "--algo", algo, "--lora-rank", rank] + ["--think"] * (mode == "think")
        return
    for mode, reward in itertools.product(("think", "direct"), ("terminal", "delta")):
        more = ["--reward", reward] + ["--think"] * (mode == "think")
        yield f"ppo {mode} {reward}", ["--algo", "ppo", *more]
        # the advantages differ by little: compared in one mode, with one reward
        for kind in KINDS if (mode, reward) == ("direct", "terminal") else KINDS[:1]:
            name = f"grpo {mode} {reward}" + f" {kind}" * (kind != "grpo")
            yield name, ["--algo", "grpo", "--advantage", kind, *more]


def make(out, name, flags, seed, steps):
    """One run, in a process of its own with one thread."""
    place = out / f"{name.replace(' ', '-')}-{seed}"
    if (place / "summary.json").is_file():
        return
    command = ["--resume", place] if (place / "config.json").is_file() else [
        *flags, "--seed", seed, "--steps", steps, "--eval-every", EVERY, "--eval-size", 64,
        "--batch-size", BATCH, "--out", place]
    done = subprocess.run([sys.executable, "rlver.py", *map(str, command)], cwd=ROOT, text=True,
                          capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    print(f"{place.name}: " + ("done" if done.returncode == 0 else done.stderr.strip()[-300:]),
          file=sys.stderr, flush=True)


def curve(place):
    """[(step, held-out score)] of a finished run, or None."""
    path = place / "summary.json"
    if not path.is_file():
        return None
    return [(e["step"], e["score"]) for e in json.loads(path.read_text())["evaluations"]]


def dialogues_until(points, goal):
    """Training dialogues until the held-out score first passes `goal`, on straight lines between
    evaluations; None if it never does."""
    for (a, low), (b, high) in zip(points, points[1:]):
        if low < goal <= high:
            return BATCH * (a + (b - a) * (goal - low) / (high - low))
    return None


def interval(values):
    """ "mean +- half of the 95 % interval" over seeds."""
    if len(values) < 2:
        return f"{values[0]:.1f}" if values else "-"
    half = T_95[len(values)] * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.1f} ± {half:.1f}"


def table(out, chosen, steps=30, goal=GOAL):
    """The Markdown table of what is done."""
    early = steps // 3 // EVERY * EVERY
    lines = [f"| run | score after {early} steps | after {steps} | dialogues until {goal} | "
             "by seed |", "|---|---|---|---|---|"]
    for name, _ in chosen:
        curves = [c for s in SEEDS if (c := curve(out / f"{name.replace(' ', '-')}-{s}"))]
        if not curves:
            continue
        at = lambda step: [dict(c)[step] for c in curves]
        until = [dialogues_until(c, goal) for c in curves]
        reached = [u for u in until if u is not None]
        told = f"{np.mean(reached):.0f}" if len(reached) == len(until) else (
            f"{len(reached)} of {len(until)} seeds")
        lines.append(f"| {name} | {interval(at(early))} | {interval(at(steps))} | {told} | "
                     + ", ".join("never" if u is None else f"{u:.0f}" for u in until) + " |")
    return "\n".join(lines)


def draw(out, chosen, path, goal=GOAL):
    """Held-out score over dialogues: a panel for each algorithm and mode, a line for each variant,
    the mean of the seeds and all of them faintly."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=(10, 7))
    panels = {key: figure.add_subplot(2, 2, k + 1, title=" ".join(key), ylim=(0, 100))
              for k, key in enumerate(itertools.product(("ppo", "grpo"), ("think", "direct")))}
    for name, _ in chosen:
        curves = [c for s in SEEDS if (c := curve(out / f"{name.replace(' ', '-')}-{s}"))]
        if not curves:
            continue
        algo, mode, *variant = name.split()
        steps = [BATCH * step for step, _ in curves[0]]
        scores = np.array([[score for _, score in c] for c in curves])
        line, = panels[algo, mode].plot(steps, scores.mean(0), label=" ".join(variant))
        for one in scores:
            panels[algo, mode].plot(steps, one, color=line.get_color(), alpha=0.25, linewidth=0.8)
    for axis in panels.values():
        axis.axhline(goal, color="grey", linewidth=0.5)
        axis.set(xlabel="training dialogues", ylabel="held-out score")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def main(argv=None):
    parser = Parser(prog="ablation.py", description=__doc__.split("\n\n")[2])
    parser.add_argument("--out", default="runs/ablation", help="where the runs are kept")
    parser.add_argument("--jobs", type=positive, default=2, help="runs at a time")
    parser.add_argument("--only", default="", help="words that a variant's name must have all of, "
                        "with commas between: grpo,delta")
    parser.add_argument("--of", choices=("reward", "rank"), default="reward", help="which table")
    parser.add_argument("--steps", type=positive, default=30, help="of every run, at least 15")
    parser.add_argument("--goal", type=positive, default=GOAL, help="held-out score to be passed")
    args = parser.parse_args(argv)
    out, everything = Path(args.out).resolve(), list(variants(args.of))
    chosen = [v for v in everything if set(filter(None, args.only.split(","))) <= set(v[0].split())]
    if not chosen:
        parser.error(f"--only {args.only}: no such variant; there are: "
                     + ", ".join(name for name, _ in everything))
    out.mkdir(parents=True, exist_ok=True)
    import toy
    for think in {"think" in name for name, _ in chosen}:
        toy.base_policy(think)                          # once, before two runs would make it twice
    with ThreadPoolExecutor(args.jobs) as pool:
        for seed, (name, flags) in itertools.product(SEEDS, chosen):
            pool.submit(make, out, name, flags, seed, args.steps)
    print(table(out, chosen, args.steps, args.goal))
    draw(out, chosen, out / "ablation.png", args.goal)


if __name__ == "__main__":
    main()
