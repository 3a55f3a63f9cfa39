"""The machine room. Every program imports from it before it imports anything but the standard
library, because what this file sets up must be there before torch is imported. The syntax is one
that old versions of Python can parse, so that they reach the message below."""

import importlib.util
import os
import signal
import sys
import time

# A run counts its seconds from here, and not from after the imports, which take seconds themselves.
STARTED = time.perf_counter()

# If something is missing, say so in one line, and not by a traceback out of our imports.
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
# cores then come to a standstill: each spins on the core that the other's last thread needs. With
# this setting they spin a little and then sleep. It is read when torch is imported. A user who sets
# OMP_WAIT_POLICY has decided the same question already.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# A standard stream that was closed (`<&-`) is None. Replace it by an empty one, because libraries
# do not expect None.
for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, name) is None:
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))

# A character that the terminal cannot show (Chinese in ASCII) is printed as its number.
for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):  # a notebook's streams have no such method
        stream.reconfigure(errors="backslashreplace")


def stop(*_):
    """Handle a Ctrl-C during the imports, which take seconds. An exception will not do: torch would
    swallow it, or abort."""
    os.write(2, b"\nstopped\n")
    os._exit(130)


# The handler is for our own programs only: not for a program that imports us, nor where Ctrl-C was
# ignored or handled from the start.
home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
script = getattr(sys.modules["__main__"], "__file__", None)
if (
    script
    and os.path.dirname(os.path.abspath(script)) in (home, os.path.join(home, "tools"))
    and signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, stop)  # until `Parser.run`, or rlver.py's own
