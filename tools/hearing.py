"""tools/hearing.py - users who hear recorded replies: what would each of them have felt?

A user is put into a recorded dialogue, after its recorded past and in its recorded emotion, and
hears one reply; only the change of its emotion is kept. The next reply meets it after the recorded
past again. `python -m tools.acceptance` and `python -m tools.validity --paraphrase` use it.
"""

from support.errors import BadInput, SimulatorFailed
from support.files import make_record
from support.settings import SCRIPTED, positive

import contextlib
from typing import NamedTuple

import simulator
from tools.dialogues import Dialogue, load_dialogues, messages_of
from tools.judge import open_call_log, together


class Reply(NamedTuple):
    """A reply that a user hears."""

    dialogue: Dialogue
    turn_number: int  # from 0; the dialogue before this turn is what the user remembers
    text: str  # as it was recorded, or in other words

    @property
    def change(self):
        """The recorded change of the emotion; None if the reply got none."""
        return self.dialogue.turns[self.turn_number]["change"]


def scored_replies(path):
    """The Replies of a file that got an emotion, as recorded. Raises BadInput for none."""
    replies = []
    for dialogue in load_dialogues(path):
        for i, turn in enumerate(dialogue.turns):
            if turn["change"] is not None:
                replies.append(Reply(dialogue, i, turn["reply"]))
    if not replies:
        raise BadInput(f"{path}: no reply in it has a change of emotion")
    return replies


async def changes_felt(args, replies):
    """What users of each difficulty feel who hear the same Replies, all of `args.files[0]`:
    {difficulty: [change, None where there is none]}. Raises BadInput if a user never answers."""
    path, name = args.files[0], args.simulator or "toy"
    people = {dialogue.id: profile_of(dialogue, path) for dialogue, _, _ in replies}
    simulator.refuse_foreign(name, people.values())
    log = None if name in SCRIPTED else open_call_log("acceptance")
    changes = {}
    for level in args.difficulty:  # one after the other: a local model goes before the next comes
        model = simulator.make_simulator(name, args.lang, level, retries=args.retries, log=log)
        await model.check()
        changes[level] = await changes_of_level(model, level, replies, people)
        if changes[level].count(None) == len(replies):
            raise BadInput(f"{path}: no answer of the {level} user {name} could be read")
    return changes


async def changes_of_level(model, level, replies, people):
    """What users of one difficulty feel: [change, or None, of each of `replies`]. model: the
    Simulator of this difficulty; people: {id of a dialogue: profile}."""
    jobs = []
    for reply in replies:
        dialogue = reply.dialogue
        name = f"{dialogue.id} {reply.turn_number}"  # in the log of calls
        jobs.append((simulator.User(model, people[dialogue.id], name=name), reply))
    return await together(hear, jobs, level)


def profile_of(dialogue, path):
    """The profile of a dialogue's user: of a log it is known, of a result file it is read."""
    if dialogue.raw is None:
        return dialogue.profile
    # a result file does not have these two
    row = {"main_cha": "?", "cha_group": [], **dialogue.raw}
    return make_record(row, simulator.Profile, path, {}, simulator.ALLOWED_VALUES)


async def hear(user, reply):
    """The change of a User who hears a Reply after the recorded dialogue before its turn, in the
    recorded emotion; None if it fails."""
    dialogue = reply.dialogue
    user.emotion = dialogue.start
    for turn in dialogue.turns[: reply.turn_number]:
        if turn["emotion"] is not None:
            user.emotion = turn["emotion"]
    user.dialogue = []
    for message in messages_of(dialogue, reply.turn_number):
        speaker = "me" if message["speaker"] == "user" else "friend"
        user.dialogue.append({"speaker": speaker, "text": message["text"]})
    with contextlib.suppress(SimulatorFailed):
        _, change = await user.feel(reply.text)
        return change
    return None


def add_user_flags(parser, default_difficulty):
    """Who hears the replies, and how many of them."""
    parser.add_argument(
        "--difficulty",
        nargs="+",
        choices=["vanilla", "challenging"],
        default=[],
        help="put the replies to users of these difficulties again "
        f"(default: {default_difficulty})",
    )
    parser.add_argument(
        "--simulator",
        metavar="NAME",
        help="model that plays these users, as in rlver.py (default: toy, which only the toy's "
        "files allow)",
    )
    parser.add_argument(
        "--limit", type=positive, metavar="N", help="put only the first N replies to them"
    )
