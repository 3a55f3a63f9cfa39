"""learning.py - runs that learn, made beside the tests.

A learning run takes a minute or more of one core, and most tests leave the other core idle. So the
runs that the selected tests ask for start before the first test, each in a process of its own with
one thread, as everybody's do; the tests that look at them come last, and wait for what is not done
yet. (See `learning` in conftest.py.)
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# name: flags
RUNS = {
    "learnt": "--algo grpo --think --steps 12 --eval-size 64",
    "hacked": "--algo grpo --think --simulator toy-weak --steps 16 --eval-size 24",
}


class Learning:
    """The runs `names`, started at once. `wait(name)` returns a run's directory."""

    def __init__(self, names, place):
        self.place = Path(place)
        self.processes = {name: self.start(name) for name in names}

    def start(self, name):
        command = [sys.executable, "rlver.py", *RUNS[name].split(), "--out", self.place / name]
        with open(self.place / f"{name}.txt", "w") as said:
            # the tests go first
            return subprocess.Popen(
                command, cwd=ROOT, stdout=said, stderr=said, preexec_fn=lambda: os.nice(5)
            )

    def wait(self, name):
        code = self.processes[name].wait()
        assert code == 0, (self.place / f"{name}.txt").read_text()
        return self.place / name

    def close(self):
        for process in self.processes.values():
            process.kill()
            process.wait()
