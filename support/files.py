"""support/files.py - files that are written whole or not at all; incoming text and JSON; locks."""

from support.errors import BadInput, CannotWrite, one_line

import fcntl
import hashlib
import json
import os
import re
import shutil
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


def write_whole(path, write):
    """Write a file or a directory under another name, by write(other path), and rename it. Its
    parent must be there. A directory that cannot be written is removed, also at Ctrl-C. Raises
    CannotWrite."""
    scratch = path.with_name(f".{path.name}")
    try:
        write(scratch)
        os.replace(scratch, path)
    except Exception as error:
        hint = "; is the disk full?" if isinstance(error, OSError) else ""
        raise CannotWrite(f"{path} could not be written ({one_line(error)}){hint}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_json(path, value):
    """Write a value to a JSON file, whole or not at all."""
    write_file(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def append_line(path, value):
    """Append a line to a JSONL file. Half a surrogate pair becomes a "?"."""
    with open(path, "a", encoding="utf-8", errors="replace") as file:
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


# ------------------------------------------------------------------------------------------ reading


def read_text(path):
    """The text of a file in UTF-8, without a byte order mark."""
    try:
        return Path(path).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"{path}: not in UTF-8 ({error}); save it in UTF-8") from None


def parse_json(text, **options):
    """The value of a JSON text. options: of json.loads. All JSON that comes in, from a file, a
    server or a flag, is read here.

    JSON writes a character beyond U+FFFF, such as an emoji, as two escapes, a surrogate pair, and
    may hold one half alone, also within a list or as a key. UTF-8 and a tokenizer cannot: a run
    would end where the text is logged, hashed or encoded. So each lonely half becomes U+FFFD. All
    other text stays as it is."""
    # Group 1 is what stays; a half matches without it. Three texts, and what becomes of them:
    #   \ud83d\ude00   both halves of a pair: group 1, stays
    #   \\ud83d        an escaped backslash is group 1, so the "ud83d" behind it is only text: stays
    #   \ud83d!        half a pair, as an escape here (or as it is): no group 1, becomes U+FFFD and "!"
    halves = (
        r"(\\\\|\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2})"
        r"|\\u[dD][89a-fA-F][\da-fA-F]{2}|[\ud800-\udfff]"
    )
    return json.loads(re.sub(halves, lambda match: match[1] or "\ufffd", text), **options)


def read_json(path):
    """The object in a JSON file, or {} if there is no such file, or no whole object in it."""
    try:
        value = parse_json(read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def read_jsonl(path, containing=b""):
    """Yield the lines of a JSONL file as (number, row, problem): `row` is a JSON object, or None
    where `problem` says why the line has none. Empty lines are skipped. Lines without the bytes
    `containing` are skipped unread (the empty bytes are in every line).

    Lines end at \\n alone: str.splitlines() would also cut at a U+2028 inside of a JSON string."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip() or containing not in line:
                continue
            try:
                row = parse_json(line.decode("utf-8-sig"))
                problem = None if isinstance(row, dict) else "no JSON object"
            except (ValueError, RecursionError) as error:
                problem = f"not a whole JSON object in UTF-8 ({error}); half-written?"
            yield number, None if problem else row, problem


def size_of(path):
    """The bytes of a file, 0 if there is none."""
    return path.stat().st_size if path.exists() else 0


# -------------------------------------------------------------------------------- locks and clashes


def lock(path):
    """Lock a file or a directory. Returns the lock, an open file descriptor; closing it releases
    the lock. Where the file system has no locks, a warning is printed, and nothing is locked.
    Raises BadInput if another process has the lock, and OSError."""
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
    """Refuse an output file that is also an input or another output. outputs: {flag: path or None};
    inputs: paths."""
    used = {Path(path).resolve() for path in inputs}
    for flag, path in outputs.items():
        if path is not None:
            place = Path(path).resolve()
            if place in used:
                raise BadInput(f"{flag} {path}: would overwrite a file of this command")
            used.add(place)
