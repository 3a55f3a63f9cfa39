"""support/errors.py - the errors that a user may see: each ends the program with one clear message,
an exit code, and what to do next.
"""

import re


class RunError(Exception):
    """An error that ends a program with a message instead of a traceback.

    exit_code: of the process. everywhere: all ranks raise it alike, so only the first rank prints
    it. advice: what to do next, where {out} is the run's directory; advice_at_start: the same for a
    run that cannot be resumed yet, because no file there matches the pattern `resumed_from`."""

    exit_code = 1
    everywhere = False
    advice = ""
    advice_at_start = ""
    resumed_from = ""


class BadInput(RunError, ValueError):
    """A user's mistake; the message is one line that says what, where, and what to do."""

    exit_code = 2
    everywhere = True


class BadModel(BadInput):
    """A model directory that cannot be used."""


class SimulatorFailed(RunError):
    """No usable answer in as many attempts as allowed: the dialogue is dropped, and no answer is
    made up for it."""

    exit_code = 2


class UnreadableAnswers(SimulatorFailed):
    """The simulator's model answers, but none of its answers can be parsed, or it refuses this
    prompt. A policy can cause that by what it says, so such dialogues are counted separately."""


class SimulatorRefused(RunError):
    """The server refuses in a way that a retry cannot cure (a wrong key, an unknown model): the run
    stops with the server's message."""

    exit_code = 2
    advice = "; when that is mended: python rlver.py --resume {out}"
    advice_at_start = "; when that is mended, start it again"
    resumed_from = "metrics.jsonl"


class TooManyLost(RunError):
    """The simulator failed in more than a fifth of a batch: the run stops, to be resumed when the
    simulator works again."""

    exit_code = 75  # EX_TEMPFAIL
    everywhere = True
    advice_at_start = "; nothing is saved yet: start the run again when the simulator is well"
    resumed_from = "checkpoint-*"
    advice = "\nthe run is saved; when the simulator is well again: python rlver.py --resume {out}"


class CannotWrite(RunError):
    """A checkpoint that could not be written, mostly because the disk is full."""

    everywhere = True
    resumed_from = "checkpoint-*"
    advice_at_start = "; make room, and start the run again"
    advice = "; make room, then: python rlver.py --resume {out}"


class SelfCheckFailed(RunError, RuntimeError):
    """Something that must hold does not, and training on would waste the run. The message says
    where to look."""


def explain(error, out=None, rank=0, world=1):
    """(exit code, message of this rank, perhaps empty) for an `error` that ended a run in the
    directory `out`. Raises the error again if it is a bug of ours."""
    name = f"rlver.py (rank {rank})" if world > 1 else "rlver.py"
    if isinstance(error, SelfCheckFailed):
        return error.exit_code, f"{name}: stopped by a self-check: {error}"
    if isinstance(error, RunError):
        if error.everywhere and rank > 0:
            return error.exit_code, ""
        can_resume = out and error.resumed_from and any(out.glob(error.resumed_from))
        advice = error.advice if can_resume else error.advice_at_start
        return error.exit_code, f"rlver.py: {error}{advice.format(out=out)}"
    if isinstance(error, KeyboardInterrupt):
        message = "\nstopped"
        if out and (out / "config.json").exists():
            message += f"; go on with: python rlver.py --resume {out}"
        return 130, message
    if isinstance(error, OSError):
        return 1, (
            f"rlver.py: {error}; the run can be continued from its last checkpoint: "
            f"python rlver.py --resume {out}"
        )
    if is_lost_connection(error) and world > 1:
        return 1, f"{name}: another rank is gone"
    raise error


def is_lost_connection(error):
    """Is this what torch raises when another rank has ended?"""
    if not isinstance(error, RuntimeError):
        return False
    return re.search("gloo|nccl|connection", str(error), re.I) is not None
