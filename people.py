"""people.py - who the users are: profiles, and which of them are trained on and which are held out
(SAGE 2.1; RLVER 2.1).

From top to bottom: a profile; files of profiles, and the toy's; the profiles of a run, and of a step.
(Whom a run has held out is kept with it: players/heldout.py.)
"""

from support.errors import BadInput
from support.files import read_jsonl
from support.needs import named_need

import itertools
import random
import re
from dataclasses import MISSING, dataclass, fields

from emotion import NEEDS
from toy import world

# The purposes of a talk. The prompts' purpose_*.txt tell them to the model.
PURPOSES = (
    "eq",  # a heart-to-heart: the user is troubled (all released users)
    "target",  # chit-chat: first a small aim of the user's own, then what the user loves
    "no-target",  # chit-chat: the user waits for the other one to bring something up
)


# ---------------------------------------------------------------------------------------- a profile


@dataclass(frozen=True)
class Profile:
    """Who a user is. The names of the fields are those of the released JSONL files."""

    id: str
    player: str  # the persona: name, age, habits, way of speaking
    scene: str  # the background: what happened, how replies are taken
    main_cha: str  # persona group: negative, passive or avoidant
    cha_group: list  # traits
    task: str  # the hidden need: what this user wants from the talk, but does not say
    topic: str = ""
    first_talk: str = ""  # a fixed first line (the benchmark's profiles have one)
    need: str = ""  # the name of the need in `task`, a key of NEEDS; released files have none
    target: str = "eq"  # the purpose of the talk, one of PURPOSES


def story_of(profile):
    """What happened to a user: the first part of the background, without its heading. (All of it,
    in scenes without headings.)"""
    first, *_ = re.split(r"\n+(?=#)", profile.scene.strip())
    return re.sub(r"^#.*\n", "", first)


# -------------------------------------------------------------------------------- files of profiles

# The fields of a Profile that allow only certain values.
ALLOWED_VALUES = {"need": NEEDS, "target": PURPOSES}
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


def load_profiles(path, flag="--profiles"):
    """The profiles of a JSONL file, with released or English field names. Only a field with a
    default may be missing or blank; it then keeps its default. A list may be empty. flag: the one
    that named the file. Raises BadInput, naming the flag, the line and the field, and OSError."""
    profiles = {}
    for number, row, problem in read_jsonl(path):
        where = f"{flag} {path}, line {number}"
        if problem:
            raise BadInput(f"{where}: {problem}")
        values = {}
        for member in fields(Profile):
            name, kind = member.name, member.type
            value = row.get(name, row.get(ENGLISH_NAMES.get(name)))
            allowed = ALLOWED_VALUES.get(name)
            if value is None or not str(value).strip():
                if member.default is MISSING:
                    raise BadInput(f"{where}: field {name!r} is missing or empty")
            elif not isinstance(value, kind) or (allowed and value not in allowed):
                wanted = ", ".join(allowed) if allowed else f"a {kind.__name__}"
                raise BadInput(f"{where}: field {name!r} is {value!r:.80}; it should be {wanted}")
            else:
                values[name] = value
        profile = Profile(**values)
        if profile.id in profiles:
            raise BadInput(f"{where}: id {profile.id!r} is used in an earlier line already")
        profiles[profile.id] = profile
    if not profiles:
        raise BadInput(f"{flag} {path}: the file holds no profile")
    return list(profiles.values())


def toy_profiles(split, count=None):
    """`count` profiles of the toy, of "train" or "heldout" (default: 500 and 128)."""
    return [Profile(**row) for row in world.profiles(split, count)]


# ---------------------------------------------------------------------------- the profiles of a run


def profiles_of_run(paths, eval_size):
    """(the profiles to train on, the held-out ones, at most `eval_size` of them). paths: the files
    of --profiles, if there are any.

        --profiles       to train on       held out
        none             the toy's 500     the toy's held-out users
        one file         the rest          a fifth of each need's personas, or one (draw_heldout)
        two files        the first file    the second file

    No profile whose persona is held out of one file is trained on: a score on training users says
    nothing about others. Raises BadInput, also for two files that share ids."""
    if not paths:
        return toy_profiles("train"), toy_profiles("heldout", eval_size)
    if len(paths) > 2:
        raise BadInput("--profiles takes one file, or two: for training and held out")
    train, *test = map(load_profiles, paths)
    test = sum(test, [])
    if not test:
        test = draw_heldout(train, eval_size)
        personas = {profile.player for profile in test}
        train = [profile for profile in train if profile.player not in personas]
        if not train:
            raise BadInput(
                f"--profiles {paths[0]}: two personas or more are needed, to hold one out"
            )
    shared = {profile.id for profile in train} & {profile.id for profile in test}
    if shared:
        raise BadInput(
            f"--profiles {' '.join(paths)}: the users held out must be others than those to train "
            f"on; these are in both files: {', '.join(sorted(shared)[:5])}"
        )
    return train, test[:eval_size]


def draw_heldout(profiles, most):
    """The profiles to hold out of one file, `most` or a few more, drawn with a fixed seed: of each
    need a fifth of its personas, in random order,

        personas of a need     1    2 to 6    7 to 11    ...
        held out               0    1         2

    each with all of its profiles, the needs in turn, until there are `most` profiles. If no need has
    two personas, the first profile. (A persona with profiles of several needs counts for one.)"""
    personas = [*{profile.player: profile for profile in profiles}.values()]  # one profile of each
    mixed = random.Random(0).sample(personas, len(personas))
    fifths = [group[1::5] for group in by_need(mixed)]
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*fifths))
    drawn = []
    for persona in filter(None, in_turn):
        if len(drawn) < most:
            drawn += [profile for profile in profiles if profile.player == persona.player]
    return drawn or profiles[:1]


def by_need(profiles):
    """The profiles of each need, as lists, in the order of the first of each."""
    of_need = {}
    for profile in profiles:
        of_need.setdefault(named_need(profile), []).append(profile)
    return of_need.values()


# --------------------------------------------------------------------------- the profiles of a step


def profiles_of_step(profiles, size, seed, step):
    """The `size` profiles of a training step (steps count from 1), a group of dialogues with each.
    The needs take turns: with two needs, one profile of the first, one of the second, the next one
    of the first, and so on, over all steps. The profiles of a need are shuffled anew whenever all of
    them have had their turn. Those that have none of the eight needs count as one need.

    (If they were drawn from all profiles alike, 8 groups would lack a given need in one step of
    three. Replies to such users could then change for several steps without a reward.)"""
    rounds = zip(*[endless(group, seed) for group in by_need(profiles)])  # one of each need
    visits = itertools.chain.from_iterable(rounds)  # of all steps
    return list(itertools.islice(visits, (step - 1) * size, step * size))


def endless(group, seed):
    """The profiles of one need, again and again, each time in another order."""
    for epoch in itertools.count():
        yield from random.Random(f"{seed} {epoch}{named_need(group[0])}").sample(group, len(group))
