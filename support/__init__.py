"""support/__init__.py - what every program sets up before it imports torch.

Importing `support` has four effects: it starts the clock of a run, ends the program if a package
is missing or Python is too old, tells torch's threads not to spin for long, and lets garbage wait.
All of them must come before torch is imported. So every program imports from `support`, or from a
room that imports it first, before anything but the standard library. This file uses only syntax
that old versions of Python can parse (no f-strings), so that they get as far as the message about
their version.

The files of this folder, in an order for reading: errors, files, command_line, answers; clock,
metrics, needs, results; settings, rundir, stopping, report; ranks. They import nothing of the
project but emotion.py and each other.
"""

import gc
import importlib.util
import os
import sys
import time

# ---- the clock: a run counts its seconds from here, and not from the end of the imports, which
# take seconds themselves
STARTED = time.perf_counter()

# ---- versions and packages: if something is missing, say so in one line, without a traceback
INSTALL = "python3 -m venv .venv && . .venv/bin/activate && pip install -r requirements.txt"
lacking = [
    name
    for name in ("numpy", "torch", "tqdm", "transformers")
    if not importlib.util.find_spec(name)
]
problem = ""
if lacking:
    problem = "not installed, or .venv is not active: " + ", ".join(lacking)
if sys.version_info[:2] < (3, 11):
    problem = "Python 3.11 or newer is needed (here as python3)"
if problem:
    print(problem + "; to install all: " + INSTALL, file=sys.stderr)
    sys.exit(2)

# ---- threads: torch's threads spin while they wait for one another. Two processes of two threads
# each on two cores then come to a standstill: each spins on the core that the other's last thread
# needs. With this setting they spin a little and then sleep. (Five steps of `grpo --think`, alone and
# beside another: 54 and 81 s; with libgomp's own 300000 49 and 212 s; older cores, 14d4a3d.) It is
# read when torch is imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# ---- garbage: Python looks for it after each 700 new objects. Importing torch and transformers makes
# hundreds of thousands, and none is garbage: a quarter of the time of these imports went into it.
gc.set_threshold(10000)
