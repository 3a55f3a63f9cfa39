"""The machine room. Every program imports from it before it imports anything that is not Python's
own: what stands in this file must be so before torch is imported. It is written in words that an
old Python can read, too."""

import importlib.util
import os
import signal
import sys

# Is everything there? One line, not a traceback out of the middle of our imports.
INSTALL = " -m venv .venv && . .venv/bin/activate && pip install -r requirements.txt"
if sys.version_info[:2] < (3, 11):
    print(
        "Python 3.11 or newer is needed, this is %d.%d; with a newer one: python3.11%s"
        % (sys.version_info[0], sys.version_info[1], INSTALL),
        file=sys.stderr,
    )
    sys.exit(2)
lacking = [
    name
    for name in ("numpy", "torch", "tqdm", "transformers")
    if not importlib.util.find_spec(name)
]
if lacking:
    print(
        "not installed: %s; what is needed is installed by: python3%s"
        % (", ".join(lacking), INSTALL),
        file=sys.stderr,
    )
    sys.exit(2)

# Torch's threads spin while they wait for one another. Two processes of two threads each on two
# cores then stand still: each spins on the core that the other's last thread needs. So they spin a
# little and sleep. Read when torch is imported; OMP_WAIT_POLICY is another way to say the same.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# What was closed (`<&-`) is empty: an end of input, and not a `None` that nobody reckons with.
for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, name) is None:
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))

# A letter that a terminal cannot show (Chinese in ASCII) is shown as its number.
for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):  # a notebook's has no such thing
        stream.reconfigure(errors="backslashreplace")


def stop(*_):
    """Ctrl-C in the seconds of the imports. No exception: torch would forget it, or abort."""
    os.write(2, b"\nstopped\n")
    os._exit(130)


# Only of our own programs; who imports us, or started us with Ctrl-C ignored, has it as it was.
home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
script = getattr(sys.modules["__main__"], "__file__", None)
if (
    script
    and os.path.dirname(os.path.abspath(script)) in (home, os.path.join(home, "tools"))
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, stop)  # until `Parser.run`, or rlver.py's own
