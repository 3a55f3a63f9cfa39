"""support/errors.py - the errors that a user may see: each ends the program with one clear message,
an exit code, and what to do next.
"""

import re


class RunError(Exception):
    """An error that ends a program with a message instead of a traceback. Its subclasses set these
    attributes."""

    # The exit code of the process.
    exit_code = 1
    # Do all ranks raise this error together? Then only the first rank prints it.
    on_all_ranks = False
    # Can a run that ended so be resumed, once it has a checkpoint?
    is_resumable = False
    # What to do next, appended to the message, if the run can be resumed. {out} is its directory.
    advice_to_resume = ""
    # The same if it cannot be resumed.
    advice_to_restart = ""


class BadInput(RunError, ValueError):
    """A user's mistake; the message is one line that says what, where, and what to do."""

    exit_code = 2
    on_all_ranks = True


class BadModel(BadInput):
    """A model directory that cannot be used."""


class SimulatorFailed(RunError):
    """No usable answer in as many attempts as allowed: the dialogue is dropped, and no answer is
    made up for it."""

    exit_code = 2


class UnreadableAnswers(SimulatorFailed):
    """The simulator's model answers, but none of its answers can be read, or it refuses this
    prompt. A policy can cause that by what it says, so such dialogues are counted separately."""


class PromptRefused(UnreadableAnswers):
    """The model refuses this prompt, because of its length or its words. It may accept others."""


class SimulatorRefused(RunError):
    """The server refuses in a way that a retry cannot cure (a wrong key, an unknown model): the run
    stops with the server's message."""

    exit_code = 2
    is_resumable = True
    advice_to_resume = "; when this is fixed: python rlver.py --resume {out}"
    advice_to_restart = "; when this is fixed, start it again"


class TooManyLost(RunError):
    """The simulator failed in more than a fifth of a batch: the run stops, to be resumed when the
    simulator works again."""

    exit_code = 75  # EX_TEMPFAIL
    on_all_ranks = True
    is_resumable = True
    advice_to_resume = (
        "\nthe run is saved; when the simulator works again: python rlver.py --resume {out}"
    )
    advice_to_restart = "; nothing is saved yet: start the run again when the simulator works"


class CannotWrite(RunError):
    """A checkpoint that could not be written, mostly because the disk is full."""

    on_all_ranks = True
    is_resumable = True
    advice_to_resume = "; make room, then: python rlver.py --resume {out}"
    advice_to_restart = "; make room, and start the run again"


class SelfCheckFailed(RunError, RuntimeError):
    """Something that must hold does not, and training on would waste the run. The message says
    where to look."""


def explain(error, out=None, rank=0, world=1):
    """What rlver.py does about an `error` that ended a run in the directory `out` (None: it ended
    before there was one).

    Returns (exit code, message of this rank, "" if another rank prints it). Raises the error again
    if it is a bug of ours."""
    name = f"rlver.py (rank {rank})" if world > 1 else "rlver.py"
    if isinstance(error, SelfCheckFailed):
        return error.exit_code, f"{name}: stopped by a self-check: {error}"
    if isinstance(error, RunError):
        if error.on_all_ranks and rank > 0:
            return error.exit_code, ""
        return error.exit_code, f"rlver.py: {error}{advice_for(error, out)}"
    if isinstance(error, KeyboardInterrupt):
        message = "\nstopped"
        if out and (out / "config.json").exists():
            message += f"; go on with: python rlver.py --resume {out}"
        return 130, message
    if isinstance(error, OSError):
        message = f"rlver.py: {error}"
        if out and any(out.glob("checkpoint-*")):
            message += (
                "; the run can be continued from its last checkpoint: "
                f"python rlver.py --resume {out}"
            )
        return 1, message
    if is_lost_connection(error) and world > 1:
        return 1, f"{name}: another rank is gone"
    raise error


def advice_for(error, out):
    """What to do next after a RunError: how to resume the run in `out`, or how to start it again if
    it cannot be resumed."""
    can_resume = out and error.is_resumable and any(out.glob("checkpoint-*"))
    advice = error.advice_to_resume if can_resume else error.advice_to_restart
    return advice.format(out=out)


def is_lost_connection(error):
    """Is this what torch raises when another rank has ended?"""
    if not isinstance(error, RuntimeError):
        return False
    return re.search("gloo|nccl|connection", str(error), re.I) is not None
