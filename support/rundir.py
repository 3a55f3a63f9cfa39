"""support/rundir.py - the directory of a run: its lock, logs and checkpoints; how a run goes on.

    config.json  metrics.jsonl  dialogues.jsonl  calls.jsonl  start.json  checkpoint-000050/

A run may be killed at any moment. So whole files are written beside and renamed, logs grow by whole
lines, a checkpoint knows how long each log was, and what was logged after it is cut off and done
again. Nothing here knows what a policy is: who saves a checkpoint hands over what writes it.
"""
import dataclasses
import fcntl
import json
import os
import re
import shutil
import time
import weakref
from hashlib import file_digest
from pathlib import Path

from support.settings import BadInput, SelfCheckFailed, resolve_settings, resumed_settings


# -------------------------------------------------------------------------------------------- files

def write_file(path, data):
    """Write `data`, text or bytes, beside `path` and rename: no reader and no killed process finds
    half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}")
    scratch.write_bytes(data.encode() if isinstance(data, str) else data)
    os.replace(scratch, path)


def write_json(path, value):
    write_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def whole_letters(text):
    """`text` with every half of a surrogate pair replaced by U+FFFD: JSON may hold one ("\\ud83d",
    half an emoji), UTF-8 cannot, so the run would end where it is written to a log."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def append_line(path, value):
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(value, ensure_ascii=False) + "\n")


def read_json(path):
    """A JSON file, or {} if there is none."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


def read_jsonl(path, start=0, only=b""):
    """The lines of a JSONL file from byte `start` on that hold the bytes `only`, as (number, row,
    problem): `problem` says why a line is none, or is None. Empty ones are skipped. Raises OSError.

    Lines end at \\n alone: str.splitlines() would also cut at a U+2028 inside of a JSON string."""
    with open(path, "rb") as file:
        file.seek(start)
        for number, line in enumerate(file, 1):
            if not line.strip() or only not in line:
                continue
            try:
                yield number, json.loads(line), None
            except UnicodeDecodeError as error:
                yield number, None, f"not UTF-8 text ({error.reason} at byte {error.start})"
            except json.JSONDecodeError as error:
                yield number, None, (f"not a whole JSON object ({error.msg}, column "
                                     f"{error.colno}); is the file half-written?")
            except RecursionError:
                yield number, None, "brackets within brackets, too deep for a line of this kind"


def digests_of(place):
    """{path below `place`: SHA-256} of the files of a checkpoint, and of the run's start.json."""
    found = {}
    for path in [*sorted(place.rglob("*")), place.parent / "start.json"]:
        if path.is_file() and path.name != "sha256.json":
            with open(path, "rb") as file:
                found[os.path.relpath(path, place)] = file_digest(file, "sha256").hexdigest()
    return found


def refuse_damaged(place):
    """Raise BadInput if a file of the checkpoint `place` is not as it was written: a flipped bit in
    the moments of Adam ends a run in gibberish, days later and with exit code 0."""
    told, found, out = read_json(place / "sha256.json"), digests_of(place), place.parent
    bad = [name for name in told if found.get(name) != told[name]] if told else ["sha256.json"]
    if not bad:
        return
    if bad == ["../start.json"]:
        raise BadInput(f"{out}: start.json is damaged (a few dialogues of the starting "
                       "policy); put it back from a copy, or start a new run")
    before = [p.name for p in checkpoints(out) if p.name < place.name]
    go_on = (f"remove it to go on from {before[-1]}" if before
             else "there is none before it: start anew")
    raise BadInput(f"{out}: {place.name} is damaged ({bad[0]}); {go_on}")


def checkpoints(out):
    """The checkpoints of a run, the oldest first."""
    return sorted(p for p in Path(out).glob("checkpoint-*")
                  if re.fullmatch(r"checkpoint-\d+", p.name))


# ------------------------------------------------------------------------------------------ the run

def open_run(given):
    """Decide between a new run and a resumed one. given: the flags, None where not given. Returns
    (Settings, directory, are all steps done and evaluated?); raises BadInput, writes nothing."""
    if given["resume"] is not None:
        out = Path(given["resume"])
        try:
            settings = resumed_settings(read_json(out / "config.json"), given)
            return settings, out, read_json(out / "summary.json").get("steps") == settings.steps
        except BadInput:
            raise
        except (ValueError, TypeError):
            raise BadInput(f"--resume {out}: there is no run here (config.json is missing or "
                           "unreadable)") from None
    settings = resolve_settings(given)
    default = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{settings.algo}-{settings.mode}"
    while Path(default).exists():           # two runs that were started in the same second
        default += "x"
    out = Path(given["out"] or default)
    if out.exists() and (not out.is_dir() or any(out.iterdir()) and not has_no_step(out)):
        raise BadInput(f"--out {out}: exists and is not empty; choose another, or "
                       f"continue that run with --resume {out}")
    return settings, out, False


def newest_state(out):
    """What a run knows of itself: at its end summary.json, before that its newest checkpoint's
    state.json. Raises BadInput if there is neither."""
    state = read_json(out / "summary.json") or next(
        (read_json(place / "state.json") for place in reversed(checkpoints(out))), {})
    if "evaluations" not in state:
        raise BadInput(f"{out}: this run has not come to its first checkpoint")
    return state


def has_no_step(out):
    """Is this a run that was stopped before its first step was done? Then nothing of worth is lost
    if another one is started in its place; its calls.jsonl, which was paid for, is kept."""
    names = {p.name for p in out.iterdir()}
    known = {"config.json", ".config.json", "dialogues.jsonl", "start.json", ".start.json",
             "checkpoint-000000", ".checkpoint-000000", "metrics.jsonl", "report.html",
             "learning_curve.png"}
    logged = (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size
    return (not logged and bool(names & {"config.json", ".config.json"})
            and all(n in known or n.startswith("calls") for n in names))


def model_of(given):
    """The policy's model, which a resumed run's own settings name; needed before the ranks meet."""
    if given["resume"] is None:
        return given["model"] or "toy"
    return read_json(Path(given["resume"]) / "config.json").get("model", "toy")  # or open_run says


def new_state():
    """What state.json holds, for a run that has done nothing yet."""
    seconds = ["toy_policy", "rollout", "simulator", "update", "evaluate", "total"]
    return {"step": -1, "evaluations": [], "seconds": dict.fromkeys(seconds, 0.0),
            "tokens": {"sampled": 0, "trained": 0},
            "log_bytes": {"metrics.jsonl": 0, "dialogues.jsonl": 0}, "call_bytes": {}}


class RunDir:
    """The directory of one run. Every rank has one; what is written, the first rank writes."""

    def __init__(self, path, first=True, tensorboard=False):
        self.path, self.first, self.tensorboard = Path(path), first, tensorboard
        self.unlock, self.writer = None, None

    def lock(self):
        """Nobody else may be at work in this directory: two runs would undo each other's files. The
        lock goes with the process."""
        if not self.first or self.unlock or not self.path.exists():
            return
        held = os.open(self.path, os.O_RDONLY)
        self.unlock = weakref.finalize(self, os.close, held)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self.unlock()
            raise BadInput(f"{self.path}: another process is at work in this run; wait for it, or "
                           "stop it") from None

    def close(self):
        if self.unlock:
            self.unlock()

    def write_config(self, settings):
        if self.first:
            try:
                write_json(self.path / "config.json", dataclasses.asdict(settings))
            except OSError as error:
                raise BadInput(f"--out {self.path}: cannot be written ({error.strerror})") from None
            self.lock()

    def agree_on_checkpoint(self, broadcast, all_gather_list):
        """The newest checkpoint here as the first rank sees it, or None. Raises BadInput, on every
        rank, where one does not find it (another node without a shared file system)."""
        def newest():
            found = checkpoints(self.path)
            if found:
                refuse_damaged(found[-1])
            return found[-1].name if found else None

        name = broadcast(newest)
        found = name is None or (self.path / name / "state.json").is_file()
        if lacking := all_gather_list([] if found else [os.uname().nodename]):
            raise BadInput(f"--resume {self.path}: {name} is not on {lacking[0]}; every node needs "
                           "this directory, by a shared file system or as a copy")
        return self.path / name if name else None

    def clear(self):
        """Remove what a start that came to no step has left, but no calls that were paid for."""
        for path in self.path.iterdir() if self.first and self.path.exists() else ():
            if path.is_dir():
                shutil.rmtree(path)
            elif not path.name.startswith("calls"):
                path.unlink()

    def append(self, name, row):
        """One more line of a log."""
        if self.first:
            append_line(self.path / name, row)

    def log_numbers(self, prefix, numbers):
        """The numbers of a step for TensorBoard too, if that was asked for."""
        if self.first and self.tensorboard:
            from torch.utils.tensorboard import SummaryWriter
            self.writer = self.writer or SummaryWriter(self.path / "tensorboard")
            for key, value in numbers.items():
                if isinstance(value, (int, float)):
                    self.writer.add_scalar(f"{prefix}/{key}", value, numbers["step"])
            self.writer.flush()

    def cut_logs(self, sizes):
        """Cut off what was logged after the checkpoint of these sizes: it will be done again."""
        for name, size in sizes.items() if self.first else ():
            path = self.path / name
            there = path.stat().st_size if path.exists() else 0
            if there < size:
                raise BadInput(f"--resume {self.path}: {name} has lost its end ({there} bytes, the "
                               f"checkpoint knows {size}); put it back, or start a new run")
            if there:
                os.truncate(path, size)

    def save_checkpoint(self, state, write, settings):
        """Write a checkpoint beside and rename it: whoever looks finds the old ones or the new one,
        never half of one. Then remove all but the newest `settings.keep`.

        state: what state.json will hold; write(directory): puts everything else there. The settings
        stand in it too (rlver.json): a checkpoint that is copied elsewhere says what it is."""
        name = f"checkpoint-{state['step']:06d}"
        scratch = self.path / f".{name}"
        shutil.rmtree(scratch, ignore_errors=True)
        size = lambda path: os.path.getsize(path) if path.exists() else 0
        state["log_bytes"] = {log: size(self.path / log) for log in state["log_bytes"]}
        try:
            write(scratch)
            write_json(scratch / "rlver.json", dataclasses.asdict(settings))
            write_json(scratch / "state.json", state)
            write_json(scratch / "sha256.json", digests_of(scratch))
        except Exception as error:  # a full disk: an OSError to Python, other things to torch
            shutil.rmtree(scratch, ignore_errors=True)
            before = [p.name for p in checkpoints(self.path)[-1:]]
            rest = f"{before[0]} is whole" if before else "there is none before it"
            raise SelfCheckFailed(f"{name} could not be written ({error}); {rest}. Is the disk "
                                  "full?") from None
        os.rename(scratch, self.path / name)
        for old in checkpoints(self.path)[:-settings.keep]:
            shutil.rmtree(old)
