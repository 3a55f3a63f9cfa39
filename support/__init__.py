"""support/__init__.py - what every program sets up before it imports torch.

Importing `support` starts the clock of a run, checks the versions and the packages, tells torch's
threads not to spin for long, repairs the standard streams, and makes Ctrl-C work during the
imports. All of that must happen before torch is imported: so every program imports from `support`
before it imports anything but the standard library. This file is written in a syntax that old
versions of Python can parse (no f-strings), so that they get as far as the message about their
version.
"""

import importlib.util
import os
import signal
import sys
import time

# ---- the clock: a run counts its seconds from here, and not from after the imports, which take
# seconds themselves
STARTED = time.perf_counter()

# ---- versions and packages: if something is missing, say so in one line, without a traceback
INSTALL = "%s -m venv .venv && . .venv/bin/activate && pip install -r requirements.txt"
ACTIVATE = "it may be in .venv, which is not active: type `. .venv/bin/activate`; else: " + INSTALL


def remedy(usual_words, python):
    """What to do if something is missing. An environment that is made, but not active in this
    terminal, only has to be activated."""
    is_active = os.path.realpath(sys.prefix) == os.path.realpath(".venv")
    if os.path.exists(os.path.join(".venv", "bin", "activate")) and not is_active:
        return ACTIVATE % python
    return usual_words + ": " + INSTALL % python


if sys.version_info[:2] < (3, 11):
    print(
        "Python 3.11 or newer is needed, this is %d.%d; %s"
        % (
            sys.version_info[0],
            sys.version_info[1],
            remedy("with a newer one", "python3.11"),
        ),
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
        "not installed: %s; %s"
        % (", ".join(lacking), remedy("what is needed is installed by", "python3")),
        file=sys.stderr,
    )
    sys.exit(2)

# ---- threads: torch's threads spin while they wait for one another. Two processes of two threads
# each on two cores then come to a standstill: each spins on the core that the other's last thread
# needs. With this setting they spin a little and then sleep. It is read when torch is imported. A
# user who sets OMP_WAIT_POLICY has already decided how threads wait.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# ---- standard streams: one that was closed (`<&-`) is None. Replace it by an empty one, because
# libraries do not expect None.
for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    if getattr(sys, name) is None:
        setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))

# A character that the terminal cannot show (Chinese in ASCII) is printed as its number.
for stream in (sys.stdout, sys.stderr):
    if hasattr(stream, "reconfigure"):  # a notebook's streams have no such method
        stream.reconfigure(errors="backslashreplace")


# ---- Ctrl-C
def exit_at_once(*_):
    """The signal handler for a Ctrl-C during the imports, which take seconds. It ends the process
    itself, because torch, while it is being imported, would swallow a KeyboardInterrupt or abort.
    It is called with the signal's number and the stack frame, and needs neither."""
    os.write(2, b"\nstopped\n")
    os._exit(130)


# The handler is for our own programs only, which are scripts in the project's directory or in its
# tools/: not for a notebook or a foreign program that imports us.
home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
script = getattr(sys.modules["__main__"], "__file__", None)
script_folder = os.path.dirname(os.path.abspath(script)) if script else None
is_our_program = script_folder in (home, os.path.join(home, "tools"))
# If Ctrl-C is ignored (`nohup`) or handled already, whoever started us wants it so.
is_usual_handler = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if is_our_program and is_usual_handler:
    # It stays until the imports are over. Then `Parser.run` (support/flags.py) puts Python's usual
    # handler back; rlver.py, which trains without it, installs its own by `interrupt_at_once`.
    signal.signal(signal.SIGINT, exit_at_once)
