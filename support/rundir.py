"""support/rundir.py - the directory of a run: its lock, logs and checkpoints; how a run goes on.

    config.json  metrics.jsonl  dialogues.jsonl  calls.jsonl  start.json  checkpoint-000050/

A run may be killed at any moment. So a file is written under another name and renamed, logs grow by
whole lines, and a checkpoint knows how long each log was: what was logged after it is cut off, and
done again. Nothing here knows what a policy is: `save_checkpoint` is handed a function that writes
it.
"""

from support.errors import BadInput, CannotWrite
from support.settings import Settings, resolve_settings, resumed_settings, split_name

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
    """Write `data`, text or bytes, to a file beside `path`, and rename that: nobody ever finds half
    a file, whenever this process is killed."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}")
    scratch.write_bytes(data.encode() if isinstance(data, str) else data)
    os.replace(scratch, path)


def write_json(path, value):
    write_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def append_line(path, value):
    """Append a line to a JSONL file. Raises an OSError that names the file, as that of a full disk
    does not."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write(json.dumps(value, ensure_ascii=False) + "\n")
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None


def try_lock(path, mode):
    """Lock a file or a directory, opened in a `mode` of os.open. Returns the lock, an open file
    descriptor (to close it releases the lock), or None if another process has it."""
    descriptor = os.open(path, mode, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def lock_file(path, flag):
    """Lock the file `path`, which is made if it is not there. Returns the lock, as `try_lock`.
    Raises BadInput, whose message begins with the `flag`, if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = try_lock(path, os.O_RDWR | os.O_CREAT)
    if lock is None:
        raise BadInput(
            f"{flag} {path}: another process is writing there; wait for it, or choose another file"
        )
    return lock


def refuse_overwriting(outputs, inputs):
    """Raise BadInput if an output file is also an input, or two outputs are the same file. outputs:
    {flag: path or None}; inputs: paths."""
    used = {Path(path).resolve(): f"{path} is read" for path in inputs}
    for flag, path in outputs.items():
        if path is None:
            continue
        place = Path(path).resolve()
        if place in used:
            raise BadInput(
                f"{flag} {path}: would overwrite a file of this command "
                f"({used[place]}); choose another name"
            )
        used[place] = f"{flag} writes {path}"


def read_json(path):
    """The value in a JSON file, or {} if there is no such file or it cannot be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


def read_jsonl(path, start=0, only=b""):
    """Yield the lines of a JSONL file from byte `start` on as (number, row, problem): `problem`
    says why a line cannot be read, or is None. Empty lines, and those without the bytes `only`,
    are skipped. Raises OSError.

    Lines end at \\n alone: str.splitlines() would also cut at a U+2028 inside of a JSON string."""
    with open(path, "rb") as file:
        file.seek(start)
        for number, line in enumerate(file, 1):
            if not line.strip() or only not in line:
                continue
            row, problem = read_line(line)
            yield number, row, problem


def read_line(line):
    """(value, None) of a line of JSON, as bytes, or (None, why it cannot be read)."""
    try:
        return json.loads(line), None
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 text ({error.reason} at byte {error.start})"
    except json.JSONDecodeError as error:
        where = f"{error.msg}, column {error.colno}"
        return None, f"not a whole JSON object ({where}); is the file half-written?"
    except RecursionError:
        return None, "brackets within brackets, too deep for a line of this kind"


def sha256_of(path):
    """The SHA-256 of a file, as hexadecimal digits."""
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def digests_of(place):
    """{path below `place`: SHA-256} of the files of a checkpoint, and of the run's start.json."""
    digests = {}
    for path in [*sorted(place.rglob("*")), place.parent / "start.json"]:
        if path.is_file() and path.name != "sha256.json":
            digests[os.path.relpath(path, place)] = sha256_of(path)
    return digests


def refuse_damaged(place):
    """Raise BadInput if a file of the checkpoint `place` is not as it was written: a flipped bit in
    the moments of Adam ends a run in gibberish, days later and with exit code 0."""
    out = place.parent
    recorded, digests = read_json(place / "sha256.json"), digests_of(place)
    damaged = [name for name in recorded if digests.get(name) != recorded[name]]
    if not recorded:
        damaged = ["sha256.json"]
    if not damaged:
        return
    if damaged == ["../start.json"]:
        raise BadInput(
            f"{out}: start.json is damaged (a few dialogues of the starting "
            "policy); put it back from a copy, or start a new run"
        )
    earlier = [p.name for p in checkpoints(out) if p.name < place.name]
    advice = "there is none before it: start anew"
    if earlier:
        advice = f"remove it to go on from {earlier[-1]}"
    raise BadInput(f"{out}: {place.name} is damaged ({damaged[0]}); {advice}")


def refuse_edited(place, settings):
    """Raise BadInput if config.json was edited: if a setting that changes results is not the one
    that the checkpoint `place` was made with. (Checkpoints of early versions hold no settings.)"""
    made_with = read_json(place / "rlver.json")
    for setting in dataclasses.fields(Settings):
        name, value = setting.name, getattr(settings, setting.name)
        if setting.metadata["resumable"] or name not in made_with or made_with[name] == value:
            continue
        if name == "simulator" and split_name(value)[:2] == split_name(made_with[name])[:2]:
            continue  # the server's address may change
        if name == "model" and made_with.get("lora_rank"):
            continue  # the base of adapters may have moved: `load_adapters` compares its weights
        raise BadInput(
            f"{place.parent / 'config.json'}: {name} is {value!r}, but {place.name} was "
            f"made with {made_with[name]!r}; put the file back as it was, or start a "
            "new run"
        )


def checkpoints(out):
    """The checkpoints of a run, the oldest first."""
    places = Path(out).glob("checkpoint-*")
    return sorted(place for place in places if re.fullmatch(r"checkpoint-\d+", place.name))


# ------------------------------------------------------------------------------------------ the run


def open_run(given):
    """Decide between a new run and a resumed one. given: the flags, None where not given. Returns
    (Settings, directory, are all steps done and evaluated?); raises BadInput, writes nothing."""
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
    try:
        settings = resumed_settings(read_json(out / "config.json"), given)
        finished = read_json(out / "summary.json").get("steps") == settings.steps
    except BadInput:  # a ValueError too, with a message of its own
        raise
    except (ValueError, TypeError):
        raise BadInput(
            f"--resume {out}: there is no run here (config.json is missing or unreadable)"
        ) from None
    return settings, out, finished


def record_heldout(out, names, ids):
    """Write heldout.json: the `ids` of a run's held-out users, and of each file of profiles its
    name, its place and its SHA-256. From it an evaluation knows whom the run was not trained on."""
    files = [
        {"name": name, "path": str(Path(name).resolve()), "sha256": sha256_of(name)}
        for name in names or ()
    ]
    write_json(Path(out) / "heldout.json", {"ids": ids, "profiles": files})


def profile_files(out, names):
    """The paths of the files of profiles `names` of the run in `out`: as the run named them, or,
    from another directory, where they were when it began. Raises BadInput for a file that has
    changed: other users would be held out, if only because their order is another. (Runs of earlier
    versions recorded nothing: there only the names are known.)"""
    files = read_json(Path(out) / "heldout.json").get("profiles", ())
    recorded = {file["name"]: file for file in files}
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
    """The state of a run: when it has ended its summary.json, before that the state.json of its
    newest checkpoint. Raises BadInput if there is neither."""
    state = read_json(out / "summary.json")
    places = checkpoints(out)
    if not state and places:
        state = read_json(places[-1] / "state.json")
    if "evaluations" not in state:
        raise BadInput(f"{out}: this run has not come to its first checkpoint")
    return state


# What a run writes before its first step is done, beside its logs of calls.
BEFORE_THE_FIRST_STEP = {
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


def has_no_step(out):
    """Is this a run that was stopped before its first step was done? Then nothing of worth is lost
    if another run is started in its place. (Its calls.jsonl, which was paid for, is kept.)"""
    metrics = out / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        return False
    names = {path.name for path in out.iterdir()}
    is_run = bool(names & {"config.json", ".config.json"})
    return is_run and all(n in BEFORE_THE_FIRST_STEP or n.startswith("calls") for n in names)


def model_of(given):
    """The name of the policy's model, of a resumed run as its config.json has it. It is needed
    before the ranks are joined; `open_run`, which comes later, complains of a bad config.json."""
    if given["resume"] is None:
        return given["model"] or "toy"
    return read_json(Path(given["resume"]) / "config.json").get("model", "toy")


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
    """The directory of one run. Every rank has such an object, but only the first rank writes."""

    def __init__(self, path, first=True, tensorboard=False):
        """first: is this the first rank? tensorboard: whether `log_numbers` writes for it."""
        self.path, self.first, self.tensorboard = Path(path), first, tensorboard
        self.unlock = None  # closes the lock; None: not locked yet
        self.writer = None  # of TensorBoard

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

    def agree_on_checkpoint(self, broadcast, all_gather_list):
        """The newest checkpoint here as the first rank sees it, or None. Raises BadInput, on every
        rank, where one does not find it (another node without a shared file system)."""

        def newest():
            places = checkpoints(self.path)
            if not places:
                return None
            refuse_damaged(places[-1])
            return places[-1].name

        name = broadcast(newest)
        is_here = name is None or (self.path / name / "state.json").is_file()
        nodes_without_it = all_gather_list([] if is_here else [os.uname().nodename])
        if nodes_without_it:
            raise BadInput(
                f"--resume {self.path}: {name} is not on {nodes_without_it[0]}; every node needs "
                "this directory, by a shared file system or as a copy"
            )
        return self.path / name if name else None

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

    def save_checkpoint(self, state, write, settings):
        """Write a checkpoint under another name and rename it, so that nobody ever finds half of
        one. Then remove all but the newest `settings.keep`.

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
            write_json(scratch / "sha256.json", digests_of(scratch))
        except Exception as error:  # a full disk: an OSError to Python, other things to torch
            shutil.rmtree(scratch, ignore_errors=True)
            earlier = checkpoints(self.path)
            remaining = f"{earlier[-1].name} is whole" if earlier else "there is none before it"
            raise CannotWrite(
                f"{self.path / name} could not be written ({error}), perhaps because "
                f"the disk is full; {remaining}"
            ) from None
        os.rename(scratch, self.path / name)
        for old in checkpoints(self.path)[: -settings.keep]:
            shutil.rmtree(old)


def size_of(path):
    """The bytes of a file, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0
