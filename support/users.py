"""support/users.py - reading files of user profiles, and the scale of a user's emotion.

The class of a profile (simulator.Profile) is passed in as an argument, because files in support/
import no chapter.
"""

from support.answers import without_surrogates
from support.errors import BadInput
from support.files import read_jsonl

import dataclasses
from pathlib import Path

# Every dialogue starts at this emotion: RLVER trains from 30, SAGE's benchmark starts at 40.
INITIAL_EMOTION = {"training": 30, "benchmark": 40}
# The benchmark's dialogues have so many replies at most. (In training --max-turns decides.)
BENCHMARK_TURNS = 10

# The lowest emotion of each level of SAGE but the last, F, which is everything below 10. There the
# user has had enough, and may say goodbye.
LEVELS = [("S", 100), ("A", 70), ("B", 40), ("C", 10)]

# A file may use either name for a field. Left: the field of the dataclass, as in the released
# files (mixed Chinese pinyin and English). Right: a plain English name for the same field.
ENGLISH_NAMES = {
    "player": "persona",
    "scene": "background",
    "main_cha": "persona_group",
    "cha_group": "traits",
    "task": "intention",
    "first_talk": "first_line",
}


def emotion_level(emotion):
    """The level of SAGE that an emotion from 0 to 100 belongs to, "Emotion-S" (best) to
    "Emotion-F". The reply hop is told this name only, not the number."""
    for letter, lowest in LEVELS:
        if emotion >= lowest:
            return f"Emotion-{letter}"
    return "Emotion-F"


def scale_in_words(start, max_turns):
    """The scale of a score: "from 30, 8 replies". It stands wherever a score is printed, because a
    dialogue that starts higher, or that has more replies, ends higher."""
    return f"from {start}, {max_turns} {'reply' if max_turns == 1 else 'replies'}"


def read_profiles(path, profile_class, allowed_values, flag):
    """The profiles of a JSONL file, a list of `profile_class`, which is a dataclass.

    allowed_values: {field: its allowed values}, for fields that do not allow every text. flag: the
    flag that named the file, for messages. Raises BadInput, naming the line and the field."""
    if not Path(path).is_file():
        raise BadInput(f"{flag} {path}: no such file")
    profiles = []
    line_of_id = {}
    for number, row, problem in read_jsonl(path):
        where = f"{flag} {path}, line {number}"
        if problem:
            raise BadInput(f"{where}: {problem}")
        profile = profile_of_row(row, where, profile_class, allowed_values)
        if profile.id in line_of_id:
            first = line_of_id[profile.id]
            raise BadInput(f"{where}: id {profile.id!r} is used in line {first} already")
        line_of_id[profile.id] = number
        profiles.append(profile)
    if not profiles:
        raise BadInput(f"{flag} {path}: the file holds no profile")
    return profiles


def profile_of_row(row, where, profile_class, allowed_values):
    """One line of the file, a parsed JSON value, as a `profile_class`. where: the file and the
    line, for messages. Raises BadInput."""
    if not isinstance(row, dict):
        raise BadInput(f"{where}: a JSON object is needed, this is a {type(row).__name__}")
    values = {}
    for field in dataclasses.fields(profile_class):
        english_name = ENGLISH_NAMES.get(field.name)
        value = row.get(field.name, row.get(english_name))
        check_field(field, value, where)
        choices = allowed_values.get(field.name)
        if choices and value and value not in choices:
            raise BadInput(
                f"{where}: {field.name} {value!r} is unknown; there are {', '.join(choices)}"
            )
        if value and field.type is str:
            value = without_surrogates(value)
        # An optional text that is empty keeps the field's default. A list may be empty.
        if value or field.type is list:
            values[field.name] = value
    return profile_class(**values)


def check_field(field, value, where):
    """Raise BadInput if the `value` of a dataclass's `field` is missing, empty or of another type.
    Only a field with a default may be missing or empty."""
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
