"""support/rundir.py - the directory of a run: its lock, logs and checkpoints.

    config.json  heldout.json  metrics.jsonl  dialogues.jsonl  dropped.jsonl  calls.jsonl  start.pt
    checkpoint-000050/  summary.json  report.html  learning_curve.png

A run may be killed at any moment. So a file is written under another name and renamed, logs grow by
whole lines, and a checkpoint holds the length of each log: later lines are cut off, and their steps
are done again. What was not renamed is removed at the next start. Nothing here knows a policy's
weights: `RunDir.save` gets a function that writes them.
"""

from support import STARTED
from support.errors import BadInput, harmless
from support.files import (
    append_line,
    cut_unfinished_line,
    lock,
    read_json,
    read_jsonl,
    size_of,
    write_json,
    write_whole,
)
from support.metrics import MALFORMED, warnings_of
from support.stopping import StopSignal

import asyncio
import contextlib
import itertools
import os
import shutil
import time
from pathlib import Path

from tqdm import tqdm

from emotion import TRAINING, scale_in_words

# ------------------------------------------------------------------------------------ the directory

# What decides a dialogue and stands in no setting, in the state of a run as a digest: the warning if
# it is another one at a resume.
WARNINGS = {
    "chat_template": "what a chat template writes has changed, with the policy's prompt or today's "
    "date: from here on the prompts differ",
    "user_prompts": "the user's prompts have changed: from here on it is another user",
    "people": "the files of --profiles have changed: those to train on are as they are there now, "
    "those held out stay as they were",
}
LOGGED = ("profile_id", "group", "first_line", "turns", "ended", "reward")  # of an Episode


class RunDir:
    """The directory of one run: its files, its messages, and what is open while the run lasts.
    Every rank has such an object, but only the first one writes and prints (each logs its own calls
    to the user's model). What it does alone is called by ranks.on_first_rank, so that all ranks end
    if it fails: take_lock, try_to_save, begin_logs, log_dropped, log_step, log_evaluation, save,
    finish.

    path, cfg      the directory; Settings
    runner         the asyncio.Runner in which all dialogues are held
    calls          the log of this rank's calls to the user's model
    saved_step     the step of the newest checkpoint, -1 before there is one
    state          what a checkpoint keeps of the run; it and the next one exist from `restore` on
    heldout        the profiles of the held-out users
    drawn          when the report was drawn last
    rows           the lines of metrics, from `begin_logs` on, on the first rank
    start_time     when the run would have begun without interruptions, from `restore` on
    stop           the StopSignal
    start_file     holds a few dialogues of the starting policy, to measure the KL from it
    """

    def __init__(self, path, cfg, calls, rank=0):
        self.path, self.cfg, self.calls = Path(path), cfg, calls
        self.first = rank == 0
        self.start_file = self.path / "start.pt"
        self.runner = asyncio.Runner()
        self.stop = StopSignal(prints=self.first)
        self.held_lock = None  # of files.lock; None: not locked yet
        self.keeps_old = False  # was it told that an old checkpoint cannot be removed?
        self.saved_step, self.drawn = -1, float("-inf")

    # ---- begin and end

    def take_lock(self):
        """Lock the directory, if it is there, because two runs would undo each other's files, and
        remove what a killed run has left there. The lock ends with the process, or with `close`.
        Raises BadInput if another process has it."""
        if self.held_lock is None and self.path.exists():
            self.held_lock = lock(self.path)
            for left in itertools.chain(*map(self.path.glob, SCRATCH)):
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink()

    def open(self):
        """Read the logged calls. Returns the newest checkpoint, which must be whole, or None."""
        [newest] = checkpoints(self.path)[-1:] or [None]
        if newest:
            state_of(newest)
        for path in self.path.glob("calls*.jsonl"):
            self.calls.read(path)  # nothing is paid for twice, whichever rank asked it
        return newest

    def restore(self, checkpoint, heldout, digests):
        """Read the state of the `checkpoint` (its weights are read by `Models`), or begin with a new
        one; make the directory. digests: of what decides a dialogue and stands in no setting
        (WARNINGS)."""
        state = {  # of a run that has done nothing yet
            "step": -1,  # the last step that is done; 0 is the evaluation before training
            "evaluations": [],
            "seconds": {"rollout": 0, "simulator": 0, "update": 0, "evaluate": 0, "total": 0},
            # how long each log was at the checkpoint: what came later is cut off
            "log_bytes": {"metrics.jsonl": 0, "dialogues.jsonl": 0, "dropped.jsonl": 0},
            "checkpoints": [],  # those that the run wrote and has not removed
            "failed": {},  # what batch_metrics counts over several steps
            **digests,  # at the first step; a run of an earlier version may lack some
        }
        if checkpoint:
            state |= state_of(checkpoint)
        for name, text in WARNINGS.items():
            # Only a warning, because a run of three days must not be lost.
            if name in digests and state[name] != digests[name]:
                self.tell(f"warning: since this run began, {text} (docs/troubleshooting.md)")
        if self.cfg.steps < state["step"]:
            raise BadInput(
                f"--steps {self.cfg.steps}: this run has done {state['step']} steps already; "
                "--steps is the total"
            )
        self.state, self.saved_step, self.heldout = state, state["step"], heldout
        self.start_time = STARTED - state["seconds"]["total"]
        self.path.mkdir(parents=True, exist_ok=True)  # each rank logs its own calls there

    def begin_logs(self):
        """Cut off what was logged after the checkpoint, because it will be done again; write
        config.json and heldout.json."""
        for name, size in self.state["log_bytes"].items():
            path = self.path / name
            if size_of(path) > size:
                os.truncate(path, size)
            elif size_of(path) < size:  # it was copied only in part, or the power failed
                self.tell(f"warning: {path}: lines of the steps up to {self.saved_step} are lost")
                path.touch()
                cut_unfinished_line(path)  # else the next line would be a part of it
        write_json(self.path / "config.json", vars(self.cfg))
        (self.path / "summary.json").unlink(missing_ok=True)  # a run that was over goes on
        # an evaluation reads from it which users the run was not trained on
        write_json(self.path / "heldout.json", heldout_in_files(self.heldout))
        self.rows = metrics_of(self.path)

    def finish(self):
        """Write summary.json, which marks the run as finished."""
        state = self.state
        state["seconds"]["total"] = time.perf_counter() - self.start_time
        evaluations = state["evaluations"]
        summary = {
            "before": evaluations[0],
            "after": evaluations[-1],
            "steps": state["step"],
            "seconds": state["seconds"],
            "warnings": list(warnings_of(self.rows).values()),
            "evaluations": evaluations,
        }
        write_json(self.path / "summary.json", summary)

    def close(self):
        """Release the lock, and cancel the dialogues that are still open, without the ten lines
        that asyncio would print about each of them."""
        if self.held_lock is not None:
            os.close(self.held_lock)
        self.runner.get_loop().set_exception_handler(lambda loop, context: None)
        with contextlib.suppress(KeyboardInterrupt):  # a cancelled dialogue raises it once more
            self.runner.close()

    # ---- the logs, and what is printed

    def append(self, name, row):
        """Append a line to a log."""
        append_line(self.path / name, row)

    def log_dialogues(self, step, split, episodes):
        """Log every dialogue word for word, with all that led to each change of emotion."""
        for episode in episodes:
            row = {"step": step, "split": split, **{key: getattr(episode, key) for key in LOGGED}}
            row["turns"] = [vars(turn) for turn in episode.turns]
            self.append("dialogues.jsonl", row)

    def log_step(self, episodes, row):
        """Log the dialogues and the metrics of a training step; print the warnings that the earlier
        steps, also those before a resume, did not give."""
        self.log_dialogues(row["step"], "train", episodes)
        self.append("metrics.jsonl", row)
        printed = warnings_of(self.rows)
        self.rows.append(row)
        for name, sentence in warnings_of(self.rows).items():
            if name not in printed:
                self.tell(f"warning, step {row['step']}: {sentence} (docs/troubleshooting.md)")

    def log_evaluation(self, episodes, scores):
        """Log the dialogues and the scores of an evaluation; print the score of one between the
        first and the last step."""
        step = scores["step"]
        self.log_dialogues(step, "heldout", episodes)
        if step == 0 and scores["malformed"] > 50:
            self.tell(MALFORMED.format(scores["malformed"]))
        if 0 < step < self.cfg.steps:
            score = f"held-out score {scores['score']:.1f} ({scale_of_run(vars(self.cfg))})"
            self.tell(f"step {step}: {score}")

    def log_dropped(self, kind, step, rows):
        """Write the `rows` of the dialogues that were dropped, of all ranks, to dropped.jsonl.
        Returns {"dropped": their number, "unreadable": how many of them had unreadable answers of
        the user, "tokens_dropped": the tokens that were sampled for them}."""
        for row in rows:
            self.append("dropped.jsonl", {"step": step, "kind": kind, **row})
        return {
            "dropped": len(rows),
            "unreadable": sum(row["unreadable"] for row in rows),
            "tokens_dropped": sum(row["tokens"] for row in rows),
        }

    def tell(self, text):
        """Print a line above the progress bar."""
        if self.first:
            tqdm.write(harmless(text))

    # ---- checkpoints

    def save(self, write_models):
        """Write a checkpoint of the last whole step. Then remove all but the newest two of those
        that this run wrote. Beside what write_models(directory) writes (models/checkpoint.py), it
        holds

            rlver.json    the settings, and who is held out of --profiles: a copy says what it is
            state.json    the state of the run (`restore`)

        FIRST_CHECKPOINT holds only these (write_models: None): nobody has changed the weights, and
        those of a 7B would take minutes and 30 GB. What does not change is beside it: config.json,
        heldout.json, start.pt. Raises CannotWrite."""
        state = self.state
        state["seconds"]["total"] = time.perf_counter() - self.start_time
        name = f"checkpoint-{state['step']:06d}"
        state["log_bytes"] = {log: size_of(self.path / log) for log in state["log_bytes"]}
        state["checkpoints"].append(name)

        def write(directory):
            if write_models:
                write_models(directory)
            of_files = {"heldout": heldout_in_files(self.heldout)} if self.cfg.profiles else {}
            write_json(directory / "rlver.json", vars(self.cfg) | of_files)
            write_json(directory / "state.json", state)

        write_whole(self.path / name, write)
        # It is forgotten behind the write: after a kill the next save removes it.
        while len(state["checkpoints"]) > 2:
            old = state["checkpoints"].pop(0)
            # NFS keeps the files that are being read
            shutil.rmtree(self.path / old, ignore_errors=True)
            if (self.path / old).exists() and not self.keeps_old:
                self.keeps_old = True
                self.tell(f"warning: an old checkpoint was not removed: {self.path / old}")

    def try_to_save(self, write_trial, size):
        """Write and remove a trial checkpoint, and warn if the disk has no room for three of `size`
        bytes: two are kept while the next one is written. So a failure to save shows before
        anything is paid for. The directory is made and locked, if it is new: another run may have
        begun there. write_trial: a function of a directory."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.take_lock()
        trial = self.path / f".trial-{time.time_ns()}"  # what an earlier one left may be there
        write_whole(trial, write_trial)
        shutil.rmtree(trial, ignore_errors=True)
        free = shutil.disk_usage(self.path).free
        needed = size * (3 - len(checkpoints(self.path)[-2:]))
        if free < needed:
            self.tell(
                f"warning: {self.path} has {free / 1e9:.1f} GB left, and checkpoints need about "
                f"{needed / 1e9:.1f} more"
            )


# -------------------------------------------------------------------------------------- checkpoints


def heldout_in_files(profiles):
    """What heldout.json, and the rlver.json of a checkpoint, keep of the held-out users."""
    return {"ids": [one.id for one in profiles], "profiles": [vars(one) for one in profiles]}


# The checkpoint of a step is a directory with its number in six digits, whose state.json names that
# step. A directory with another name, such as a copy, is neither read nor removed.
FIRST_CHECKPOINT = "checkpoint-000000"  # of step 0: without weights
CHECKPOINT = "checkpoint-[0-9][0-9][0-9][0-9][0-9][0-9]/"  # "/": a file is no checkpoint


def checkpoints(out):
    """The checkpoints of a run, the oldest first."""
    return sorted(out.glob(CHECKPOINT))


def state_of(checkpoint):
    """What the state.json of a checkpoint holds. Raises BadInput if it is not whole."""
    path = checkpoint / "state.json"
    state = read_json(path)
    if state.get("step") != int(checkpoint.name[-6:]):
        raise BadInput(
            f"{path}: missing, damaged or of another step; was the directory copied only in part? "
            "Copy it again, or move it away to go on from the checkpoint before it"
        )
    return state


# The names under which a run writes before it renames what is whole. A kill may leave them.
SCRATCH = (
    ".start.pt .config.json .heldout.json .summary.json .report.html .lens.html .trial-[0-9]*/ "
    f"..trial-[0-9]*/ .{CHECKPOINT}"
).split()


# ----------------------------------------------------------------------- what else is read of a run


def metrics_of(out):
    """The readable lines of a run's metrics.jsonl; [] for a run that has done no step yet."""
    path = out / "metrics.jsonl"
    lines = read_jsonl(path) if path.exists() else []
    return [row for _, row, _ in lines if row]


def held_out_dialogues(out):
    """The lines of a run's dialogues.jsonl with held-out users. There must be some."""
    path = out / "dialogues.jsonl"
    # most lines are dialogues of training: `containing` skips them unread
    lines = read_jsonl(path, containing=b'"heldout"')
    rows = [row for _, row, _ in lines if row and row["split"] == "heldout"]
    if not rows:
        raise BadInput(f"{path}: no dialogue with a held-out user is in it")
    return rows


def settings_of_run(out):
    """The settings of the run in a directory, as its config.json has them; {} if it is no run: a
    model's config.json has no "algo"."""
    settings = read_json(out / "config.json")
    return settings if "algo" in settings else {}


def scale_of_run(settings):
    """The scale of a run's scores. settings: as in its config.json."""
    return scale_in_words(TRAINING.start, settings["max_turns"])
