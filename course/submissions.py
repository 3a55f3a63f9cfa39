"""submissions.py - find the files to grade in what a student has handed in: a directory or a zip
file, with or without folders around the files."""

from support.errors import BadInput

import shutil
import stat
import zipfile
from pathlib import PurePosixPath

MAX_UNPACKED = 50 * 10**6  # bytes that a zip file may hold; all of a handout has a million
# The most folders around the files. There is a limit because a link may lead back to a folder
# above it.
MAX_FOLDERS = 10


def opened(place, files, scratch):
    """The directory that holds the `files`, or some of them.

    place: the submission, a directory or a zip file, which is unpacked into `scratch`. The files
    may be in a folder in it, as programs that pack and unpack leave one. Raises BadInput if none is
    there, or if several folders hold some.
    """
    if place.is_file():
        unpack(place, files, scratch)
        top = scratch
    elif place.is_dir():
        top = place
    else:
        raise BadInput(f"grade {place}: no such directory or zip file")
    try:
        homes = homes_in(top, files)
    except OSError as error:
        raise BadInput(f"grade {place}: cannot be read ({error.strerror})") from None
    if not homes:
        raise BadInput(f"grade {place}: none of the files to grade is there; is it a handout?")
    if len(homes) > 1:
        names = " and in ".join(repr(str(home.relative_to(top))) for home in homes[:3])
        raise BadInput(f"grade {place}: there are files to grade in {names}; leave one of them")
    return homes[0]


def homes_in(place, files):
    """The folders that hold any of the `files`: `place` itself, or else those of its folders that
    do, or else of their folders, and so on. Below a folder that holds files nothing is looked
    for."""
    level = [place]
    for _ in range(MAX_FOLDERS + 1):
        homes = [folder for folder in level if any((folder / file).is_file() for file in files)]
        if homes:
            return homes
        level = [inner for folder in level for inner in folders_in(folder)]
    return []


def folders_in(place):
    """The directories in `place`, except .venv, __MACOSX and the like."""
    folders = [path for path in sorted(place.iterdir()) if path.is_dir()]
    return [path for path in folders if not path.name.startswith((".", "__"))]


def unpack(archive, files, scratch):
    """Unpack those of the `files` that the zip file `archive` holds, at any depth, into the
    directory `scratch`. Nothing else of it is written. Raises BadInput for a broken zip file, and
    for one that is too large or holds a dangerous member, even if that would not be unpacked."""
    try:
        with zipfile.ZipFile(archive) as zipped:
            members = zipped.infolist()
            # some programs of Windows write a backslash
            paths = [PurePosixPath(member.filename.replace("\\", "/")) for member in members]
            check_members(archive, members, paths)
            for member, path in zip(members, paths):
                if not member.is_dir() and any(path.match(file) for file in files):
                    (scratch / path).parent.mkdir(parents=True, exist_ok=True)
                    with zipped.open(member) as packed, open(scratch / path, "wb") as file:
                        shutil.copyfileobj(packed, file)
    except BadInput:
        raise
    except Exception as error:  # a broken zip file may raise nearly anything
        reason = " ".join(str(error).split())[:90] or type(error).__name__
        raise BadInput(f"grade {archive}: no whole zip file ({reason})") from None


def check_members(archive, members, paths):
    """Raise BadInput for a zip file that must not be unpacked. paths: the members' names."""
    for member, path in zip(members, paths):
        danger = danger_of(member, path)
        if danger:
            raise BadInput(f"grade {archive}: {member.filename[:60]!r} in it {danger}")
    # A member cannot be larger than it says: zipfile stops reading there.
    if sum(member.file_size for member in members) > MAX_UNPACKED:
        raise BadInput(
            f"grade {archive}: larger than {MAX_UNPACKED // 10**6} MB when "
            "unpacked; leave .venv and runs out"
        )


def danger_of(member, path):
    """Why a member of a zip file must not be unpacked, in words, or ""."""
    has_drive = bool(path.parts) and ":" in path.parts[0]  # "C:", on Windows
    if path.is_absolute() or ".." in path.parts or has_drive:
        return "leads out of it"
    is_encrypted = member.flag_bits & 1
    if is_encrypted:
        return "is encrypted"
    file_type = stat.S_IFMT(member.external_attr >> 16)  # 0: it was not made by a Unix
    if file_type not in (0, stat.S_IFREG, stat.S_IFDIR):
        return "is a link or a device"
    return ""
