"""The machine room. `import support` is the first import of every program: what stands here must be
so before torch is imported, and is written in words that an old Python can read, too."""
import importlib.util
import os
import sys

# Is everything there? One line, not a traceback out of the middle of our imports.
INSTALL = " -m venv .venv && . .venv/bin/activate && pip install -r requirements.txt"
if sys.version_info[:2] < (3, 11):
    print("Python 3.11 or newer is needed, this is %d.%d; with a newer one: python3.11%s"
          % (sys.version_info[0], sys.version_info[1], INSTALL), file=sys.stderr)
    sys.exit(2)
lacking = [name for name in ("numpy", "torch", "tqdm", "transformers")
           if not importlib.util.find_spec(name)]
if lacking:
    print("not installed: %s; what is needed is installed by: python3%s"
          % (", ".join(lacking), INSTALL), file=sys.stderr)
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
    if hasattr(stream, "reconfigure"):              # a notebook's has no such thing
        stream.reconfigure(errors="backslashreplace")


def say_stopped(kind, error, trace, usual=sys.excepthook):
    """Ctrl-C where nobody awaits it, in the seconds of the imports."""
    if not issubclass(kind, KeyboardInterrupt):
        return usual(kind, error, trace)
    print("\nstopped", file=sys.stderr)
    sys.exit(130)


sys.excepthook = say_stopped
