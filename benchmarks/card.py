"""card.py - run rlver.py, or another program with a `main`, on this machine's GPU as on a smaller
card.

    python benchmarks/card.py 24 rlver.py --algo grpo ...
    python benchmarks/card.py 24 -m tools.fitness ...

torch gets so many GiB less 1.5 for CUDA's context, and whatever wants more fails as on that card. At
the end: minutes, the most that torch had allocated, and the most that was in use on the card, with
what other processes have. (vLLM takes its share of the whole card: use --engine torch.)
"""

import importlib
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from support.ranks import leave_ranks

import torch

CONTEXT = 1.5  # GiB


def watch(in_use):
    """Append the bytes in use on the card to a list, twice a second."""
    while True:
        free, total = torch.cuda.mem_get_info()
        in_use.append(total - free)
        time.sleep(0.5)


def main(gib="", *words):
    """Run a program on so many GiB. Returns its exit code."""
    if not (gib.isdigit() and int(gib) > CONTEXT and words and torch.cuda.is_available()):
        print(
            "card.py: it needs a GPU, GiB (a whole number above 1) and a program", file=sys.stderr
        )
        return 2
    share = (int(gib) - CONTEXT) * 2**30 / torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, share))
    began, in_use = time.perf_counter(), []
    threading.Thread(target=watch, args=[in_use], daemon=True).start()
    name, *flags = words[1:] if words[0] == "-m" else words
    code = importlib.import_module(name.removesuffix(".py")).main(flags)
    minutes = (time.perf_counter() - began) / 60
    peaks = f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of torch"
    print(f"{name}: {minutes:.1f} minutes, peak {peaks}, {max(in_use) / 2**30:.1f} GiB in use")
    return code


if __name__ == "__main__":
    leave_ranks(main(*sys.argv[1:]))
