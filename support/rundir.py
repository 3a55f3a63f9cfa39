"""support/rundir.py - the directory of a run: its lock, logs and checkpoints; how a run goes on.

    config.json  metrics.jsonl  dialogues.jsonl  calls.jsonl  start.json  checkpoint-000050/

A run may be killed at any moment. So a file is written under another name and renamed, logs grow by
whole lines, and a checkpoint knows how long each log was: what was logged after it is cut off, and
done again. Nothing here knows what a policy is: `save_checkpoint` is handed a function that writes
it.
"""

from support import STARTED
from support.errors import BadInput, CannotWrite, TooManyLost
from support.files import append_line, read_json, size_of, try_lock, write_json
from support.metrics import Clock, warnings_of
from support.results import metrics_of
from support.servers import CallLog
from support.settings import SCRIPTED, resolve_settings, resumed_settings
from support.terminal import score_text

import asyncio
import contextlib
import dataclasses
import os
import re
import resource
import shutil
import sys
import time
import weakref
from pathlib import Path

from tqdm import tqdm

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

LOGGED = ("profile_id", "group", "first_line", "turns", "ended", "reward")  # of an Episode


class RunDir:
    """The directory of one run: what is written there and printed, and what is open while the run
    lasts. Every rank has such an object, but only the first one writes and prints (each logs its
    own calls to the user's model).

    path, cfg     the directory; Settings
    is_new        whether the run begins anew, or goes on
    runner        the asyncio.Runner in which all dialogues are held
    clock, calls  the seconds in which only the user's model is at work; the log of its calls
    start_file    holds a few dialogues of the starting policy, to measure the KL from it
    """

    def __init__(self, path, cfg, rank=0, is_new=True):
        self.path, self.cfg, self.is_new = Path(path), cfg, is_new
        self.first = rank == 0
        self.start_file = self.path / "start.json"
        self.runner = asyncio.Runner()
        self.clock = Clock()
        name = f"calls-{rank}.jsonl" if rank else "calls.jsonl"
        self.calls = CallLog(None if cfg.simulator in SCRIPTED else self.path / name)
        self.unlock = None  # the function that releases the lock; None: not locked yet
        self.writer = None  # of TensorBoard, with --tensorboard
        self.rows = []  # the lines of metrics since the start or the resume
        self.warned_of = set()  # the names of the warnings that were printed

    # ---- begin and end

    def enter(self, broadcast, all_gather_list):
        """Lock the directory, and empty it if the run is new. Returns the newest checkpoint, or
        None. The two functions are of support/ranks.py, which imports torch; this file does
        without. Raises BadInput, on every rank, where one does not find the checkpoint (another
        node without a shared file system)."""
        self.lock()
        if self.first and self.is_new and self.path.exists():
            # a run without a step (`has_no_step`); its calls were paid for, so they stay
            for path in self.path.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif not path.name.startswith("calls"):
                    path.unlink()
        existing = broadcast(checkpoints, self.path)
        if not existing:
            return None
        checkpoint = self.path / existing[-1].name
        is_here = (checkpoint / "state.json").is_file()
        nodes_without_it = all_gather_list([] if is_here else [os.uname().nodename])
        if nodes_without_it:
            raise BadInput(
                f"--resume {self.path}: {checkpoint.name} is not on {nodes_without_it[0]}; every "
                "node needs this directory, by a shared file system or as a copy"
            )
        return checkpoint

    def begin(self, checkpoint, heldout):
        """Read the state of the `checkpoint`, or make that of a new run; cut off what was logged
        after it, because it will be done again, but read the calls that were paid for; write
        config.json and heldout.json, and lock the directory. Returns the state. Raises BadInput."""
        state = read_json(checkpoint / "state.json") if checkpoint else new_state()
        if self.cfg.steps < state["step"]:
            raise BadInput(
                f"--steps {self.cfg.steps}: this run has done {state['step']} steps already; "
                "--steps is the total"
            )
        self.seconds_before = state["seconds"]["total"]
        if not self.is_new:
            self.cut_logs(state["log_bytes"])
        if self.calls.path:  # what was paid for after the checkpoint is not paid for again
            for path in self.path.glob("calls*.jsonl"):
                self.calls.read(path, state["call_bytes"].get(path.name, 0))
        if self.first:
            try:
                write_json(self.path / "config.json", dataclasses.asdict(self.cfg))
            except OSError as error:
                raise BadInput(f"--out {self.path}: cannot be written ({error.strerror})") from None
            self.lock()  # a new run's directory is there now
            if self.cfg.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(self.path / "tensorboard")
        if self.first and not (self.path / "heldout.json").exists():
            # From it an evaluation knows whom the run was not trained on, and where its files are.
            places = {name: str(Path(name).resolve()) for name in self.cfg.profiles or ()}
            ids = [profile.id for profile in heldout]
            write_json(self.path / "heldout.json", {"ids": ids, "profiles": places})
        return state

    def finish(self, state):
        """Write summary.json, by which a run is known to be over. Returns what it holds."""
        state["seconds"]["total"] = self.seconds_before + time.perf_counter() - STARTED
        return write_summary(self.path, state) if self.first else {}

    def close(self):
        """Release the lock, and cancel the dialogues that are still open: quietly, where asyncio
        would print ten lines about each of them."""
        if self.unlock:
            self.unlock()
        self.runner.get_loop().set_exception_handler(lambda loop, context: None)
        with contextlib.suppress(KeyboardInterrupt):  # a cancelled dialogue raises it once more
            self.runner.close()

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

    # ---- the logs, and what is printed

    def append(self, name, row):
        """Append a line to a log."""
        if self.first:
            append_line(self.path / name, row)

    def log_dialogues(self, step, split, episodes):
        """Every dialogue word for word, with all that led to each change of emotion."""
        for episode in episodes:
            row = {"step": step, "split": split, **{key: getattr(episode, key) for key in LOGGED}}
            self.append("dialogues.jsonl", row)

    def log_step(self, state, episodes, row):
        """Log the dialogues and the metrics of a training step; print the warnings that are new."""
        self.log_dialogues(row["step"], "train", episodes)
        state["tokens"]["sampled"] += row["tokens_sampled"]
        state["tokens"]["trained"] += row["tokens_trained"]
        self.append("metrics.jsonl", row)
        if self.writer:
            self.log_numbers("train", row)
        self.rows.append(row)
        for name, sentence in warnings_of(self.rows).items():
            if name not in self.warned_of:
                self.warned_of.add(name)
                self.tell(f"warning, step {row['step']}: {sentence} (docs/troubleshooting.md)")

    def log_evaluation(self, episodes, scores):
        """Log the dialogues and the scores of an evaluation; print the score of one between the
        first and the last step."""
        step = scores["step"]
        self.log_dialogues(step, "heldout", episodes)
        if self.writer:
            self.log_numbers("heldout", scores)
        if scores["dropped"]:
            self.tell(
                f"evaluation at step {step}: {scores['dropped']} dialogues failed and do not count"
            )
        if step == 0 and scores["malformed"] > 50:  # they all earn 0: nothing to learn from
            self.tell(
                f"{scores['malformed']:.0f} % of the dialogues before training ended malformed, at "
                "a reward of 0: the model does not write <think>...</think> and a reply within "
                "--max-tokens, and it will hardly learn to. Give it more tokens, or train without "
                "--think"
            )
        if 0 < step < self.cfg.steps:
            self.tell(score_text(step, scores["score"], vars(self.cfg)))

    def log_dropped(self, kind, step, rows, n_dialogues, save):
        """Write the `rows` of the dialogues that were dropped, of all ranks, to dropped.jsonl.
        Returns {"dropped": their number, "unreadable": of those whose user's answers could not be
        read, "tokens_dropped": that were sampled for them}. If they are more than a fifth of the
        `n_dialogues` that were begun, call save() and raise TooManyLost."""
        too_many = len(rows) > n_dialogues / 5
        if too_many:
            # Save first: a resume cuts dropped.jsonl to its length at the checkpoint. Rows logged
            # before the save would survive the cut, and the repeated step would log them again.
            save()
        for row in rows:
            self.append("dropped.jsonl", {"step": step, "kind": kind, **row})
        unreadable = sum(row["unreadable"] for row in rows)
        if too_many and 2 * unreadable > len(rows):
            raise TooManyLost(
                f"in {unreadable} of {n_dialogues} dialogues nothing that the user's model "
                f"said could be read, or it refused the prompt: {rows[0]['reason']}; "
                "what was said before stands in dropped.jsonl"
            )
        if too_many:
            raise TooManyLost(
                f"the simulator failed in {len(rows)} of {n_dialogues} dialogues: "
                f"{rows[0]['reason']}"
            )
        tokens = sum(row["tokens"] for row in rows)
        return {"dropped": len(rows), "unreadable": unreadable, "tokens_dropped": tokens}

    def log_numbers(self, prefix, numbers):
        """Write the numbers of a step for TensorBoard, too."""
        for key, value in numbers.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(f"{prefix}/{key}", value, numbers["step"])
        self.writer.flush()

    def tell(self, text):
        """Print a line above the progress bar."""
        if self.first:
            tqdm.write(text)

    def dialogue_bar(self, kind, step, total):
        """A progress bar of `total` dialogues. (The toy's in training are over too soon.)"""
        hidden = not self.first or (kind == "training" and self.cfg.toy)
        title = f"step {step}" if kind == "training" else f"evaluating, step {step}"
        return tqdm(total=total, desc=title, unit="dialogue", leave=False, disable=hidden)

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

    def needs_checkpoint(self, step):
        """Is this step done, and the newest checkpoint of an earlier one?"""
        existing = checkpoints(self.path)[-1:]
        return step >= 0 and existing != [self.path / f"checkpoint-{step:06d}"]

    def save(self, state, write, all_gather_list):
        """Write a checkpoint under another name and rename it, so that nobody ever finds half of
        one. Then remove all but the newest two. Every rank must call this; the first one writes.

        state: what state.json will hold; write(directory): a function that writes everything else;
        all_gather_list: of support/ranks.py. The settings are a part of it (rlver.json), so that a
        copy elsewhere says what it is. Raises CannotWrite."""
        state["seconds"]["total"] = self.seconds_before + time.perf_counter() - STARTED
        calls = self.calls.path
        size_here = [(calls.name, size_of(calls))] if calls and calls.exists() else []
        state["call_bytes"].update(all_gather_list(size_here))
        if not self.first:
            return
        name = f"checkpoint-{state['step']:06d}"
        scratch = self.path / f".{name}"
        shutil.rmtree(scratch, ignore_errors=True)
        state["log_bytes"] = {log: size_of(self.path / log) for log in state["log_bytes"]}
        try:
            write(scratch)
            write_json(scratch / "rlver.json", dataclasses.asdict(self.cfg))
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
        "warnings": list(warnings_of(metrics_of(out)).values()),
        "evaluations": evaluations,
    }
    write_json(out / "summary.json", summary)
    return summary


# ----------------------------------------------------------------------------------- held-out users


def refuse_other_heldout(out, users):
    """Raise BadInput if the run in `out` held out others than these `users`, because its profiles
    have changed."""
    ids = [profile.id for profile in users]
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
