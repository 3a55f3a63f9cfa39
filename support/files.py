"""support/files.py - files that are written whole or not at all; JSON and JSONL; locks."""

from support.errors import BadInput

import fcntl
import hashlib
import json
import os
import sys
from pathlib import Path

# ------------------------------------------------------------------------------------------ writing


def write_file(path, text):
    """Write a text to a file beside `path` and rename it, so that nobody finds half a file, even if
    this process is killed. Half a surrogate pair becomes a "?"."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(text, "utf-8", "replace")
    os.replace(scratch, path)


def write_json(path, value):
    write_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def append_line(path, value):
    """Append a line to a JSONL file."""
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(value, ensure_ascii=False) + "\n")


def cut_unfinished_line(path):
    """Cut off the text after the last newline: a program that was stopped while writing leaves half
    a line."""
    text = path.read_bytes()
    whole_lines = text.rfind(b"\n") + 1  # their bytes; 0 if there is no newline
    if whole_lines < len(text):  # else another process may have added a line by now
        os.truncate(path, whole_lines)


def digest(*parts):
    """A short hash of values that JSON can hold."""
    text = json.dumps(parts, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def without_surrogates(text):
    """`text` with every half of a surrogate pair replaced by U+FFFD. JSON may hold such a half
    ("\\ud83d" is half an emoji), but UTF-8 cannot, so a run would end when it writes the text to a
    log."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def read_json(path):
    """The value in a JSON file, or {} if there is no such file or it cannot be read."""
    try:
        return json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError):
        return {}


def read_jsonl(path, containing=b""):
    """Yield the lines of a JSONL file as (number, row, problem): `problem` says why a line cannot
    be read, or is None. Empty lines are skipped. Lines without the bytes `containing` are skipped
    unread (the empty bytes are in every line). Raises OSError.

    Lines end at \\n alone: str.splitlines() would also cut at a U+2028 inside of a JSON string."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip() or containing not in line:
                continue
            try:
                yield number, json.loads(line), None
            except (ValueError, RecursionError) as error:
                yield number, None, f"not a whole JSON object ({error}); is the file half-written?"


def size_of(path):
    """The bytes of a file, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


# -------------------------------------------------------------------------------- locks and clashes


def lock(path):
    """Lock a file or a directory. Returns the lock, an open file descriptor; closing it releases
    the lock. Raises BadInput if another process has it, and OSError for a file that cannot be
    written. Where the file system has no locks, a warning is printed, and nothing is locked."""
    # A file is opened for reading and writing, because NFS locks no other; a directory cannot be, so
    # it is opened with 0, which is O_RDONLY.
    descriptor = os.open(path, 0 if os.path.isdir(path) else os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise BadInput(
            f"{path}: another process is at work there; wait for it, or name another place"
        ) from None
    except OSError as error:  # file systems say it in several ways: ENOLCK, ENOTSUP, EBADF ...
        print(
            f"warning: {path}: cannot be locked ({error.strerror}); let no other process write there",
            file=sys.stderr,
        )
    return descriptor


def refuse_overwriting(outputs, inputs):
    """Raise BadInput if an output file is also an input or another output. outputs: {flag: path or
    None}; inputs: paths."""
    used = {Path(path).resolve() for path in inputs}
    for flag, path in outputs.items():
        if path is not None:
            place = Path(path).resolve()
            if place in used:
                raise BadInput(f"{flag} {path}: would overwrite a file of this command")
            used.add(place)
