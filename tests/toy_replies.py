"""toy_replies.py - what the tests of the toy share: all sentences of an act, and what a reply is
worth to one user."""

from toy.words import ACTS, join_parts
from toy.world import score_reply


def sentences(act, person="sister", feeling="hurt"):
    """All sentences of an act, to a user who is hurt by a sister unless told otherwise."""
    return [join_parts(parts, person, feeling) for parts in ACTS[act].all_parts()]


def change(reply, need="analyse", earlier=(), challenging=False):
    """How far `reply` moves a user who is hurt by a sister."""
    return score_reply(reply, need, "sister", "hurt", list(earlier), challenging)[0]
