"""support/users.py - users as files have them, and the scale of their emotion.

What a profile is (simulator.Profile) and what it may say is handed in: nothing here knows a
chapter.
"""

from support.errors import BadInput
from support.rundir import read_jsonl, whole_letters

import dataclasses
from pathlib import Path

INITIAL_EMOTION = {"training": 30, "benchmark": 40}  # RLVER trains from 30; SAGE's benchmark: 40

# The released files name a profile's fields so; the English names on the right mean the same.
ENGLISH_NAMES = {
    "player": "persona",
    "scene": "background",
    "main_cha": "persona_group",
    "cha_group": "traits",
    "task": "intention",
    "first_talk": "first_line",
}


def emotion_level(emotion):
    """The five levels of SAGE: S at 100, A from 70, B from 40, C from 10, F below. The reply hop is
    told only this name."""
    return "Emotion-" + "FCBAS"[sum(emotion >= bound for bound in (10, 40, 70, 100))]


def read_profiles(path, profile_class, known, flag):
    """The profiles of a JSONL file, each as a `profile_class`, which is a dataclass.

    known: {field: the values that it may have}. flag: what named the file, for complaints. Raises
    BadInput naming line and field."""
    if not Path(path).is_file():
        raise BadInput(f"{flag} {path}: no such file")
    profiles, line_of_id = [], {}
    for number, row, problem in read_jsonl(path):
        where = f"{flag} {path}, line {number}"
        if problem:
            raise BadInput(f"{where}: {problem}")
        profile = check_profile(row, where, profile_class, known)
        if profile.id in line_of_id:
            first = line_of_id[profile.id]
            raise BadInput(f"{where}: id {profile.id!r} is used in line {first} already")
        line_of_id[profile.id] = number
        profiles.append(profile)
    if not profiles:
        raise BadInput(f"{flag} {path}: the file holds no profile")
    return profiles


def check_profile(row, where, profile_class, known):
    """A line's object as a `profile_class`. `where` names the line in a complaint. Raises
    BadInput."""
    if not isinstance(row, dict):
        raise BadInput(f"{where}: a JSON object is needed, this is a {type(row).__name__}")
    values = {}
    for field in dataclasses.fields(profile_class):
        value = row.get(field.name, row.get(ENGLISH_NAMES.get(field.name)))
        check_field(field, value, where)
        choices = known.get(field.name)
        if choices and value and value not in choices:
            raise BadInput(
                f"{where}: {field.name} {value!r} is unknown; there are {', '.join(choices)}"
            )
        if value and field.type is str:
            value = whole_letters(value)
        # an optional field that is empty keeps its default; a list may be empty
        if value or field.type is list:
            values[field.name] = value
    return profile_class(**values)


def check_field(field, value, where):
    """Raise BadInput if `value` is missing, empty or of another type than the dataclass's field."""
    name, kind = field.name, field.type
    is_optional = field.default is not dataclasses.MISSING
    if value is None:
        if is_optional:
            return
        english = f" (or {ENGLISH_NAMES[name]!r})" if name in ENGLISH_NAMES else ""
        raise BadInput(f"{where}: field {name!r} is missing{english}")
    if not isinstance(value, kind):
        raise BadInput(
            f"{where}: field {name!r} should be a {kind.__name__}, it is a {type(value).__name__}"
        )
    if kind is str and not value and not is_optional:
        raise BadInput(f"{where}: field {name!r} is empty")
