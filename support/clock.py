"""support/clock.py - how long a run waits for the user's model."""

import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Measures how long the run only waits for the user's model."""

    # the seconds in which at least one call to it was under way and the policy sampled nothing
    simulator: float = 0.0
    last_tick: float = field(default_factory=time.perf_counter)
    under_way: Counter = field(default_factory=Counter)  # of "calls" and of "samplers"

    def tick(self):
        """Count the time since the last tick."""
        now = time.perf_counter()
        if self.under_way["calls"] and not self.under_way["samplers"]:
            self.simulator += now - self.last_tick
        self.last_tick = now

    @contextmanager
    def during(self, kind):
        """A context in which one more of "calls" or of "samplers" is under way."""
        self.tick()
        self.under_way[kind] += 1
        try:
            yield
        finally:
            self.tick()
            self.under_way[kind] -= 1
