"""several_ranks.py - what the tests of several ranks share: a small run, torchrun, and made-up
dialogues to train on."""

import os
import shutil
import subprocess
import sys
import warnings

import numpy as np

from conftest import ROOT

SMALL = (
    "--steps 3 --batch-size 8 --group-size 4 --minibatches 2 --max-turns 3 --max-tokens 6 "
    "--lr 2e-3 --warmup 2 --eval-size 4 --save-every 1 --tokens-per-gpu 300"
).split()


def run(*words, env=None, **how):
    """Run Python with these words on its command line. how: other arguments of subprocess.run.
    Returns (exit code, stdout, stderr)."""
    command = [sys.executable, *map(str, words)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **(env or {})}
    usual = dict(capture_output=True, text=True, timeout=240, cwd=ROOT, env=env)
    done = subprocess.run(command, **usual | how)
    return done.returncode, done.stdout, done.stderr


def torchrun(ranks, script, *flags, **how):
    """`run` a script on so many ranks. A rank that dies of SIGSEGV died inside torch (once on CI;
    never in 130 steps of the same run here): then the trace is shown as a warning, and the run is
    begun once more."""
    command = "-m torch.distributed.run --standalone --nproc-per-node".split()
    for _ in range(2):
        code, out, err = run(*command, ranks, script, *flags, **how)
        if "Signal 11 (SIGSEGV)" not in err or "--out" not in flags:
            break
        warnings.warn(f"a rank died inside torch:\n{err[-6000:]}", stacklevel=2)
        shutil.rmtree(flags[flags.index("--out") + 1], ignore_errors=True)
    return code, out, err


def alone(*flags):
    """`run` rlver.py in a process of its own."""
    return run("rlver.py", *flags)


def make_episodes(count=6):
    """Dialogues of unequal length with made-up log-probs: the update does not care who said
    what."""
    from agents import random_episode

    rng = np.random.default_rng(0)
    episodes = [random_episode(rng, 300, think=True, turns=1 + n % 3) for n in range(count)]
    for n, episode in enumerate(episodes):
        episode.number, episode.group, episode.reward = n, n // 2, float(rng.random())
    return episodes
