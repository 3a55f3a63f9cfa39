"""support/rundir.py - the directory of a run: its lock, logs and checkpoints; how a run goes on.

    config.json  metrics.jsonl  dialogues.jsonl  calls.jsonl  start.json  checkpoint-000050/

A run may be killed at any moment. So whole files are written beside and renamed, logs grow by whole
lines, a checkpoint knows how long each log was, and what was logged after it is cut off and done
again. Nothing here knows what a policy is: who saves a checkpoint hands over what writes it.
"""

from support.settings import (
    BadInput,
    CannotWrite,
    Settings,
    resolve_settings,
    resumed_settings,
    split_name,
)

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
    """One more line of a JSONL file. Raises OSError that names the file: a full disk does not."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def lock_file(path, what):
    """Lock the file `path`, which is made if it is not there. Returns the lock, an open file: to
    close it gives the file free. Raises BadInput, which begins with the flag `what`, if another
    process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    held = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise BadInput(
            f"{what} {path}: another process is writing there; wait for it, or choose another file"
        ) from None
    return held


def refuse_overwriting(outputs, inputs):
    """Raise BadInput if a file that would be written is one that is read, or two are the same.
    outputs: {flag: path or None}; inputs: paths."""
    taken = {Path(path).resolve(): f"{path} is read" for path in inputs}
    for flag, path in outputs.items():
        if path is None:
            continue
        place = Path(path).resolve()
        if place in taken:
            raise BadInput(
                f"{flag} {path}: would overwrite a file of this command "
                f"({taken[place]}); choose another name"
            )
        taken[place] = f"{flag} writes {path}"


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
                yield (
                    number,
                    None,
                    (
                        f"not a whole JSON object ({error.msg}, column "
                        f"{error.colno}); is the file half-written?"
                    ),
                )
            except RecursionError:
                yield number, None, "brackets within brackets, too deep for a line of this kind"


def sha256_of(path):
    """The SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def digests_of(place):
    """{path below `place`: SHA-256} of the files of a checkpoint, and of the run's start.json."""
    found = {}
    for path in [*sorted(place.rglob("*")), place.parent / "start.json"]:
        if path.is_file() and path.name != "sha256.json":
            found[os.path.relpath(path, place)] = sha256_of(path)
    return found


def refuse_damaged(place):
    """Raise BadInput if a file of the checkpoint `place` is not as it was written: a flipped bit in
    the moments of Adam ends a run in gibberish, days later and with exit code 0."""
    told, found, out = read_json(place / "sha256.json"), digests_of(place), place.parent
    bad = [name for name in told if found.get(name) != told[name]] if told else ["sha256.json"]
    if not bad:
        return
    if bad == ["../start.json"]:
        raise BadInput(
            f"{out}: start.json is damaged (a few dialogues of the starting "
            "policy); put it back from a copy, or start a new run"
        )
    before = [p.name for p in checkpoints(out) if p.name < place.name]
    go_on = (
        f"remove it to go on from {before[-1]}" if before else "there is none before it: start anew"
    )
    raise BadInput(f"{out}: {place.name} is damaged ({bad[0]}); {go_on}")


def refuse_edited(place, settings):
    """Raise BadInput if a setting that changes results is not the one that the checkpoint `place`
    was made with: an edited config.json. (Checkpoints of early versions hold no settings.)"""
    made_with = read_json(place / "rlver.json")
    for setting in dataclasses.fields(Settings):
        name, value = setting.name, getattr(settings, setting.name)
        if setting.metadata["resumable"] or name not in made_with or made_with[name] == value:
            continue
        if name == "simulator" and split_name(value)[:2] == split_name(made_with[name])[:2]:
            continue  # its address may change
        if name == "model" and made_with.get("lora_rank"):
            continue  # the base of adapters may have moved: its weights are compared
        raise BadInput(
            f"{place.parent / 'config.json'}: {name} is {value!r}, but {place.name} was "
            f"made with {made_with[name]!r}; put the file back as it was, or start a "
            "new run"
        )


def checkpoints(out):
    """The checkpoints of a run, the oldest first."""
    return sorted(
        p for p in Path(out).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name)
    )


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
            raise BadInput(
                f"--resume {out}: there is no run here (config.json is missing or unreadable)"
            ) from None
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


def record_heldout(out, names, ids):
    """Write heldout.json: the ids of a run's held-out users, and of each file of profiles its name,
    its place and its SHA-256. By it an evaluation knows whom the run was never trained on."""
    files = [
        {"name": name, "path": str(Path(name).resolve()), "sha256": sha256_of(name)}
        for name in names or ()
    ]
    write_json(Path(out) / "heldout.json", {"ids": ids, "profiles": files})


def profile_files(out, names):
    """Where the files of profiles `names` of the run in `out` are: as the run named them, or, from
    another directory, where they were when it began. Raises BadInput for one that has changed:
    users whose order is another are other users held out. (Runs of earlier versions recorded
    nothing: there the names are all.)"""
    recorded = {
        file["name"]: file for file in read_json(Path(out) / "heldout.json").get("profiles", ())
    }
    return [find_profile_file(name, recorded.get(name)) for name in names or ()]


def find_profile_file(name, recorded):
    """The place of one file of `profile_files`. recorded: its entry in heldout.json, or None."""
    if recorded is None:
        return name
    places = [place for place in (name, recorded["path"]) if Path(place).is_file()]
    if not places:
        raise BadInput(
            f"--profiles {name}: no such file here, nor at {recorded['path']}, where it "
            "was when the run began; put it back"
        )
    same = [place for place in places if sha256_of(place) == recorded["sha256"]]
    if not same:
        raise BadInput(
            f"--profiles {places[0]}: has changed since the run began, so other users "
            "would be held out; put the file back as it was, or start a new run"
        )
    return same[0]


def newest_state(out):
    """What a run knows of itself: at its end summary.json, before that its newest checkpoint's
    state.json. Raises BadInput if there is neither."""
    state = read_json(out / "summary.json") or next(
        (read_json(place / "state.json") for place in reversed(checkpoints(out))), {}
    )
    if "evaluations" not in state:
        raise BadInput(f"{out}: this run has not come to its first checkpoint")
    return state


def has_no_step(out):
    """Is this a run that was stopped before its first step was done? Then nothing of worth is lost
    if another one is started in its place; its calls.jsonl, which was paid for, is kept."""
    names = {p.name for p in out.iterdir()}
    known = {
        "config.json",
        ".config.json",
        "heldout.json",
        ".heldout.json",
        "start.json",
        ".start.json",
        "dialogues.jsonl",
        "dropped.jsonl",
        "metrics.jsonl",
        "checkpoint-000000",
        ".checkpoint-000000",
        "report.html",
        "learning_curve.png",
    }
    logged = (out / "metrics.jsonl").exists() and (out / "metrics.jsonl").stat().st_size
    return (
        not logged
        and bool(names & {"config.json", ".config.json"})
        and all(n in known or n.startswith("calls") for n in names)
    )


def model_of(given):
    """The policy's model, which a resumed run's own settings name; needed before the ranks meet."""
    if given["resume"] is None:
        return given["model"] or "toy"
    return read_json(Path(given["resume"]) / "config.json").get("model", "toy")  # or open_run says


def new_state():
    """What state.json holds, for a run that has done nothing yet."""
    seconds = ["toy_policy", "rollout", "simulator", "update", "evaluate", "total"]
    return {
        "step": -1,
        "evaluations": [],
        "seconds": dict.fromkeys(seconds, 0.0),
        "tokens": {"sampled": 0, "trained": 0},
        "log_bytes": {"metrics.jsonl": 0, "dialogues.jsonl": 0, "dropped.jsonl": 0},
        "call_bytes": {},
    }


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
            raise BadInput(
                f"{self.path}: another process is at work in this run; wait for it, or stop it"
            ) from None

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
            raise BadInput(
                f"--resume {self.path}: {name} is not on {lacking[0]}; every node needs "
                "this directory, by a shared file system or as a copy"
            )
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
                raise BadInput(
                    f"--resume {self.path}: {name} has lost its end ({there} bytes, the "
                    f"checkpoint knows {size}); put it back, or start a new run"
                )
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
            raise CannotWrite(
                f"{self.path / name} could not be written ({error}), perhaps because "
                f"the disk is full; {rest}"
            ) from None
        os.rename(scratch, self.path / name)
        for old in checkpoints(self.path)[: -settings.keep]:
            shutil.rmtree(old)
