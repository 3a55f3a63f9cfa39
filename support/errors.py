"""support/errors.py - the errors that a user may see: each ends the program with one clear message,
an exit code, and what to do next.
"""

import re
from contextlib import contextmanager


class RunError(Exception):
    """An error that ends a program with a message instead of a traceback. Its subclasses set these
    attributes."""

    # The exit code of the process.
    exit_code = 1
    # Do all ranks raise this error together? Then only the first rank prints it.
    on_all_ranks = False
    # Can such a run be resumed after the problem is repaired?
    is_resumable = True


class BadInput(RunError, ValueError):
    """A user's mistake; the message is one line that says what, where, and what to do."""

    exit_code = 2
    on_all_ranks = True
    is_resumable = False


class BadModel(BadInput):
    """A model that cannot be used, maybe on one rank alone: its GPU may have no room."""

    on_all_ranks = False


class SimulatorFailed(RunError):
    """A dialogue cannot go on, mostly because no attempt brought a usable answer. It is dropped,
    and no answer is made up for it."""

    exit_code = 2


class UnreadableAnswers(SimulatorFailed):
    """The user's model answers, but none of its answers can be read, or it refuses this prompt. A
    policy can cause that by what it says, so such dialogues are counted separately."""


class PromptRefused(UnreadableAnswers):
    """The model refuses this prompt, because of its length or its words. It may accept others."""


class SimulatorRefused(RunError):
    """The server refuses in a way that a retry cannot cure (a wrong key, an unknown model): the run
    stops with the server's message."""

    exit_code = 2


# The largest share of a batch, or of an evaluation, that may be lost. Beyond it the rest is no fair
# sample: a user's model may fail at some replies more than at others.
MAX_LOST = 1 / 5


class TooManyLost(RunError):
    """The user's model failed in more than MAX_LOST of a batch, or at the check before the first
    one: the run stops, to be resumed when the model works again."""

    exit_code = 75  # EX_TEMPFAIL
    on_all_ranks = True


class CannotWrite(RunError):
    """A checkpoint that could not be written, mostly because the disk is full."""

    on_all_ranks = True


class SelfCheckFailed(RunError, RuntimeError):
    """A condition that must hold does not hold, and further training would waste the run. The
    message says where to look."""

    is_resumable = False


class Stopped(KeyboardInterrupt):
    """A signal stops the run, on all ranks. No `except Exception` catches it."""

    on_all_ranks = True

    def __init__(self, number):
        """number: of the signal."""
        super().__init__(number)
        self.exit_code = 128 + number  # as a shell says it of a process that the signal has killed


@contextmanager
def naming(model, others=()):
    """A context that turns each exception into a BadModel with the name of a model in front, but
    for the classes `others`. transformers, safetensors, tokenizers and jinja have exceptions of
    their own, and an unusual model may raise any kind; here all mean that it cannot be used."""
    try:
        yield
    except others:
        raise
    except Exception as error:
        kind = "" if isinstance(error, BadInput) else f"{type(error).__name__} "
        raise BadModel(f"{model}: {kind}{one_line(error)}") from None


def one_line(error):
    """The message of another library's exception, in one line."""
    return harmless(" ".join(str(error).split())[:300])


def harmless(text):
    """A text of a model or a server with its control characters as signs, such as \\x1b: a terminal
    obeys them (it renames its window, clears the screen, hides text). Tabs and ends of lines stay."""
    return re.sub(
        r"\r(?!\n)|[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]",
        lambda sign: ascii(sign[0])[1:-1],
        text,
    )


def without_passwords(text):
    """A text with *** in place of the names and passwords of its addresses."""
    return re.sub(r"://\S*@", "://***@", text)


# What ends a program with a message. Any other exception is a bug of ours, and keeps its traceback.
WITH_A_MESSAGE = (RunError, OSError, KeyboardInterrupt)


def explain(error, out=None, rank=0, world=1, program="rlver.py"):
    """The exit code and this rank's message for the `error` that ended a program, one of
    WITH_A_MESSAGE; the message is "" if another rank prints it. out: the directory of rlver.py's
    run, or None before there is one; rank, world: this rank, and the number of ranks."""
    name = f"{program} (rank {rank})" if world > 1 else program
    code, message = getattr(error, "exit_code", 2), without_passwords(f"{name}: {error}")
    if isinstance(error, KeyboardInterrupt):
        code, message = getattr(error, "exit_code", 130), "\nstopped"
    elif isinstance(error, SelfCheckFailed):
        message = f"{name}: stopped by a self-check: {error}"
    if getattr(error, "on_all_ranks", False) and rank > 0:
        return code, ""
    if getattr(error, "is_resumable", True) and out and (out / "config.json").exists():
        message += f"; go on with: python rlver.py --resume {out}"
    return code, message
