"""support/files.py - files that are written whole or not at all; JSON and JSONL; locks."""

from support.errors import BadInput

import dataclasses
import fcntl
import json
import os
from pathlib import Path

# ------------------------------------------------------------------------------------------ writing


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


def cut_unfinished_line(path):
    """Cut off what stands behind the last newline: an evaluation that was stopped while it wrote
    leaves half a line, and that dialogue is held again."""
    whole_lines = path.read_bytes().rfind(b"\n") + 1  # their bytes; 0 if there is no newline
    os.truncate(path, whole_lines)


def without_surrogates(text):
    """`text` with every half of a surrogate pair replaced by U+FFFD. JSON may hold such a half
    ("\\ud83d" is half an emoji), but UTF-8 cannot, so a run would end when it writes the text to a
    log."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_json(path):
    """The value in a JSON file, or {} if there is no such file or it cannot be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}


def read_jsonl(path, start=0, containing=b""):
    """Yield the lines of a JSONL file from byte `start` on as (number, row, problem): `problem`
    says why a line cannot be read, or is None. Empty lines are skipped, and so, unread, are lines
    without the bytes `containing` (the empty bytes are in every line). Raises OSError.

    Lines end at \\n alone: str.splitlines() would also cut at a U+2028 inside of a JSON string."""
    with open(path, "rb") as file:
        file.seek(start)
        for number, line in enumerate(file, 1):
            if not line.strip() or containing not in line:
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


def read_records(path, record, flag, other_names, allowed_values):
    """The lines of a JSONL file as objects of the dataclass `record`, which has an `id` and fields
    of str and list. flag: the one that named the file, for messages; other_names: {field: another
    name for it in the file}; allowed_values: {field: values}. Raises BadInput, naming the line."""
    if not Path(path).is_file():
        raise BadInput(f"{flag} {path}: no such file")
    records = {}
    for number, row, problem in read_jsonl(path):
        where = f"{flag} {path}, line {number}"
        if problem or not isinstance(row, dict):
            raise BadInput(f"{where}: {problem or 'a JSON object is needed'}")
        made = make_record(row, record, where, other_names, allowed_values)
        if made.id in records:
            raise BadInput(f"{where}: id {made.id!r} is used in an earlier line already")
        records[made.id] = made
    if not records:
        raise BadInput(f"{flag} {path}: the file holds no {record.__name__.lower()}")
    return list(records.values())


def make_record(row, record, where, other_names, allowed_values):
    """One of `read_records`. Only a field with a default may be missing or empty, and keeps its
    default then; a list may be empty. Raises BadInput."""
    values = {}
    for member in dataclasses.fields(record):
        name, kind = member.name, member.type
        value = row.get(name, row.get(other_names.get(name)))
        if value is None or value == "":
            if member.default is dataclasses.MISSING:
                raise BadInput(
                    f"{where}: field {name!r} (or {other_names.get(name, name)!r}) is missing or "
                    "empty"
                )
            continue
        if not isinstance(value, kind):
            raise BadInput(
                f"{where}: field {name!r} should be a {kind.__name__}, it is a "
                f"{type(value).__name__}"
            )
        choices = allowed_values.get(name, [value])
        if value not in choices:
            raise BadInput(f"{where}: {name} {value!r} is unknown; there are {', '.join(choices)}")
        values[name] = without_surrogates(value) if kind is str else value
    return record(**values)


def size_of(path):
    """The bytes of a file, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


# -------------------------------------------------------------------------------- locks and clashes


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
