"""support/rundir.py - the directory of a run: its lock, logs and checkpoints; how a run goes on.

    config.json  metrics.jsonl  dialogues.jsonl  calls.jsonl  start.json  checkpoint-000050/

A run may be killed at any moment. So a file is written under another name and renamed, logs grow by
whole lines, and a checkpoint knows how long each log was: what was logged after it is cut off, and
done again. Nothing here knows what a policy is: `save_checkpoint` is handed a function that writes
it.
"""

from support.errors import BadInput, CannotWrite
from support.files import append_line, read_json, size_of, try_lock, write_json
from support.results import metrics_of
from support.settings import resolve_settings, resumed_settings
from support.signs import training_warnings

import dataclasses
import os
import re
import resource
import shutil
import sys
import time
import weakref
from pathlib import Path

# ------------------------------------------------------------------------- a new run, or an old one


def open_run(given):
    """Decide between a new run and a resumed one. given: the flags, None where not given. Writes
    nothing; raises BadInput. Returns

    settings   Settings
    directory  Path; of a new run it may not exist yet
    finished   whether all steps are done and evaluated, so that there is nothing to resume"""
    if given["resume"] is not None:
        return open_old_run(given)
    settings = resolve_settings(given)
    default = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{settings.algo}-{settings.mode}"
    while Path(default).exists():  # two runs that were started in the same second
        default += "x"
    out = Path(given["out"] or default)
    if out.exists() and not out.is_dir():
        raise BadInput(f"--out {out}: is a file, and a run needs a directory; choose another")
    if out.exists() and any(out.iterdir()) and not has_no_step(out):
        raise BadInput(
            f"--out {out}: exists and is not empty; choose another, or "
            f"continue that run with --resume {out}"
        )
    return settings, out, False


def open_old_run(given):
    """`open_run` for --resume."""
    out = Path(given["resume"])
    settings = resumed_settings(read_json(out / "config.json"), given)
    finished = read_json(out / "summary.json").get("steps") == settings.steps
    return settings, out, finished


# What a run writes before its first step is done, beside its logs of calls. Files that are written
# under another name and renamed have, until then, a dot in front of their names.
RENAMED = ("config.json", "heldout.json", "start.json", "checkpoint-000000", "report.html")
BEFORE_THE_FIRST_STEP = {
    *RENAMED,
    *(f".{name}" for name in RENAMED),
    "dialogues.jsonl",
    "dropped.jsonl",
    "metrics.jsonl",
    "learning_curve.png",
    "tensorboard",
}


def has_no_step(out):
    """Is this a run that was stopped before its first step was done? Then nothing of worth is lost
    if another run is started in its place. (Its calls.jsonl, which was paid for, is kept.)"""
    metrics = out / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        return False
    names = {path.name for path in out.iterdir()}
    is_run = bool(names & {"config.json", ".config.json"})
    later_names = {name for name in names - BEFORE_THE_FIRST_STEP if not name.startswith("calls")}
    return is_run and not later_names


def model_of(given):
    """The name of the policy's model, of a resumed run as its config.json has it. It is needed
    before the ranks are joined; `open_run`, which comes later, complains of a bad config.json."""
    if given["resume"] is None:
        return given["model"] or "toy"
    return read_json(Path(given["resume"]) / "config.json").get("model", "toy")


def new_state():
    """What state.json holds, for a run that has done nothing yet."""
    seconds = ["rollout", "simulator", "update", "evaluate", "total"]
    return {
        "step": -1,  # the last step that is done; 0 is the evaluation before training
        "evaluations": [],
        "seconds": dict.fromkeys(seconds, 0.0),
        "tokens": {"sampled": 0, "trained": 0},
        # how long each log was at the checkpoint: `cut_logs` cuts off what came later
        "log_bytes": {"metrics.jsonl": 0, "dialogues.jsonl": 0, "dropped.jsonl": 0},
        # the same of the log of calls of each rank: later calls were paid for, so they are not cut
        # off, but serve as answers when the steps after the checkpoint are done again
        "call_bytes": {},
    }


# ------------------------------------------------------------------------------------ the directory


class RunDir:
    """The directory of one run. Every rank has such an object, but only the first rank writes."""

    def __init__(self, path, first=True, tensorboard=False):
        """first: is this the first rank? tensorboard: whether `log_numbers` writes for it."""
        self.path, self.first, self.tensorboard = Path(path), first, tensorboard
        self.unlock = None  # the function that releases the lock; None: not locked yet
        self.writer = None  # of TensorBoard

    # ---- the lock

    def lock(self):
        """Lock the directory, if it is there: two runs would undo each other's files. The lock ends
        with the process, or with `close`. Raises BadInput if another process has it."""
        if not self.first or self.unlock or not self.path.exists():
            return
        lock = try_lock(self.path, os.O_RDONLY)
        if lock is None:
            raise BadInput(
                f"{self.path}: another process is at work in this run; wait for it, or stop it"
            )
        # finalize(...) is a function that closes the lock once, however often it is called. It is
        # also called when this object is no longer used, so that no lock is left behind.
        self.unlock = weakref.finalize(self, os.close, lock)

    def close(self):
        """Release the lock."""
        if self.unlock:
            self.unlock()

    def write_config(self, settings):
        """Write config.json, and lock the directory, which is there now. Raises BadInput."""
        if not self.first:
            return
        try:
            write_json(self.path / "config.json", dataclasses.asdict(settings))
        except OSError as error:
            raise BadInput(f"--out {self.path}: cannot be written ({error.strerror})") from None
        self.lock()

    def clear(self):
        """Remove what a run without a step has left here (`has_no_step`), but not its calls, which
        were paid for."""
        if not self.first or not self.path.exists():
            return
        for path in self.path.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif not path.name.startswith("calls"):
                path.unlink()

    # ---- the logs

    def append(self, name, row):
        """Append a line to a log."""
        if self.first:
            append_line(self.path / name, row)

    def log_numbers(self, prefix, numbers):
        """Write the numbers of a step for TensorBoard too, if --tensorboard is given."""
        if not self.first or not self.tensorboard:
            return
        from torch.utils.tensorboard import SummaryWriter

        if self.writer is None:
            self.writer = SummaryWriter(self.path / "tensorboard")
        for key, value in numbers.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(f"{prefix}/{key}", value, numbers["step"])
        self.writer.flush()

    def cut_logs(self, sizes):
        """Cut the logs to the `sizes` that a checkpoint knows: what was logged after it will be
        done again. Raises BadInput for a log that is shorter."""
        if not self.first:
            return
        for name, size in sizes.items():
            path = self.path / name
            present = size_of(path)
            if present < size:
                raise BadInput(
                    f"--resume {self.path}: {name} has lost its end ({present} bytes, the "
                    f"checkpoint knows {size}); put it back, or start a new run"
                )
            if present:
                os.truncate(path, size)

    # ---- checkpoints

    def agree_on_checkpoint(self, broadcast, all_gather_list):
        """The newest checkpoint here as the first rank sees it, or None. Raises BadInput, on every
        rank, where one does not find it (another node without a shared file system).

        The two functions of support/ranks.py are handed in, because that file imports torch, and
        this one does without."""
        name = broadcast(self.newest_checkpoint)  # called on the first rank only
        is_here = name is None or (self.path / name / "state.json").is_file()
        nodes_without_it = all_gather_list([] if is_here else [os.uname().nodename])
        if nodes_without_it:
            raise BadInput(
                f"--resume {self.path}: {name} is not on {nodes_without_it[0]}; every node needs "
                "this directory, by a shared file system or as a copy"
            )
        return self.path / name if name else None

    def newest_checkpoint(self):
        """The name of the newest checkpoint, or None."""
        existing = checkpoints(self.path)
        return existing[-1].name if existing else None

    def save_checkpoint(self, state, write, settings):
        """Write a checkpoint under another name and rename it, so that nobody ever finds half of
        one. Then remove all but the newest two.

        state: what state.json will hold; write(directory): a function that writes everything else.
        The settings are a part of it (rlver.json), so that a copy elsewhere says what it is. Raises
        CannotWrite."""
        name = f"checkpoint-{state['step']:06d}"
        scratch = self.path / f".{name}"
        shutil.rmtree(scratch, ignore_errors=True)
        state["log_bytes"] = {log: size_of(self.path / log) for log in state["log_bytes"]}
        try:
            write(scratch)
            write_json(scratch / "rlver.json", dataclasses.asdict(settings))
            write_json(scratch / "state.json", state)
        except Exception as error:  # a full disk: an OSError to Python, other things to torch
            shutil.rmtree(scratch, ignore_errors=True)
            earlier = checkpoints(self.path)
            remaining = f"{earlier[-1].name} is whole" if earlier else "there is none before it"
            raise CannotWrite(
                f"{self.path / name} could not be written ({error}), perhaps because "
                f"the disk is full; {remaining}"
            ) from None
        os.rename(scratch, self.path / name)
        for old in checkpoints(self.path)[:-2]:
            shutil.rmtree(old)


# -------------------------------------------------------------------------------------- checkpoints


def checkpoints(out):
    """The checkpoints of a run, the oldest first."""
    paths = Path(out).glob("checkpoint-*")
    return sorted(path for path in paths if re.fullmatch(r"checkpoint-\d+", path.name))


def newest_state(out):
    """The state of a run: its summary.json or, if that is not there yet or is of fewer steps (the
    run was resumed), the state.json of its newest checkpoint. Raises BadInput if there is neither.
    """
    state = read_json(out / "summary.json")
    for place in checkpoints(out)[-1:]:
        at_checkpoint = read_json(place / "state.json")
        if at_checkpoint.get("step", -1) > state.get("steps", -1):
            state = at_checkpoint
    if "evaluations" not in state:
        raise BadInput(f"{out}: this run has not come to its first checkpoint")
    return state


def write_summary(out, state):
    """Write summary.json, by which a run is known to be over. state: as in state.json. Returns what
    it holds."""
    evaluations = state["evaluations"]
    unit = 1024**2 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, else KiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    before, after = (
        {key: value for key, value in evaluation.items() if key != "step"}
        for evaluation in (evaluations[0], evaluations[-1])
    )
    summary = {
        "before": before,
        "after": after,
        "steps": state["step"],
        "seconds": state["seconds"],
        "tokens": state["tokens"],
        "peak_rss_mb": round(peak, 1),
        "warnings": training_warnings(metrics_of(out)),
        "evaluations": evaluations,
    }
    write_json(out / "summary.json", summary)
    return summary


# ----------------------------------------------------------------------------------- held-out users


def record_heldout(out, names, ids):
    """Write heldout.json: the `ids` of a run's held-out users, and the place of each file of
    profiles. From it an evaluation knows whom the run was not trained on."""
    places = {name: str(Path(name).resolve()) for name in names or ()}
    write_json(Path(out) / "heldout.json", {"ids": ids, "profiles": places})


def refuse_other_heldout(out, ids):
    """Raise BadInput if the run in `out` held out others than the users `ids`, because its profiles
    have changed."""
    if read_json(Path(out) / "heldout.json").get("ids", ids) != ids:
        raise BadInput(
            f"{out}: the profiles have changed since the run began, so other users would be held "
            "out"
        )


def profile_files(out, names):
    """The paths of the files of profiles `names` of the run in `out`: as the run named them, or,
    from another directory, where they were when it began."""
    places = read_json(Path(out) / "heldout.json").get("profiles", {})
    return [name if Path(name).is_file() else places.get(name, name) for name in names or ()]
