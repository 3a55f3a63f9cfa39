"""learning.py - runs that learn, made beside the tests.

A learning run takes a minute or more of one core, and most tests leave the other core idle. So the
runs that the selected tests ask for start before the first test, each in a process of its own with
one thread, as everybody's do; the tests that look at them come last, and wait for what is not done
yet. (See `learning` in conftest.py.)
"""

import os
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# name: flags
RUNS = {
    "learnt": "--algo grpo --think --steps 20 --eval-size 64",
    "hacked": "--algo grpo --think --simulator toy-weak --steps 26 --eval-size 24",
}


class Learning:
    """The runs `names`, started at once. `wait(name)` returns a run's directory."""

    def __init__(self, names, place):
        self.place, self.processes, self.failures, self.closed = Path(place), [], {}, False
        self.runs = {name: threading.Thread(target=self.run, args=(name,)) for name in names}
        for thread in self.runs.values():
            thread.start()

    def run(self, name):
        if self.closed:
            return
        command = [sys.executable, "rlver.py", *RUNS[name].split(), "--out", self.place / name]
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=lambda: os.nice(5),
        )  # the tests go first
        self.processes.append(process)
        errors = process.communicate()[1]
        if process.returncode:
            self.failures[name] = f"exit code {process.returncode}\n{errors}"

    def wait(self, name):
        self.runs[name].join()
        assert not self.failures, "\n".join(self.failures.values())
        return self.place / name

    def close(self):
        self.closed = True
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for thread in self.runs.values():
            thread.join()
