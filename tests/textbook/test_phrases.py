"""toy/phrases.py: a user who hears plain English, by rule. A rule, a test; and that no fixed reply
wins.

By hand: "My landlord missed my graduation. I feel nervous.", a user who wants empathy, is told

    I am so sorry. It must hurt that your landlord was not there.

"i am so sorry" and "it must hurt" are phrasings of empathy; the second stands in a sentence about
this user: +7. The landlord is named: +2. That is 9, and nothing else is heard.
"""

import asyncio

import pytest

import simulator
from toy import phrases, world
from toy.words import NEEDS

STORY = "My landlord missed my graduation. I feel nervous."
SORRY = "I am so sorry. It must hurt that your landlord was not there."


def scene(need="empathise"):
    return world.Scene(
        STORY,
        "landlord",
        "nervous",
        ["I left without a word."],
        NEEDS[need].cues["heldout"],
        need,
    )


def points(reply, need="empathise", earlier=(), challenging=False):
    return phrases.listen(reply, scene(need), list(earlier), challenging).points


def notes(reply, need="empathise", earlier=()):
    heard = phrases.listen(reply, scene(need), list(earlier))
    return [note.split(":")[0] for note in heard.notes]


@pytest.mark.parametrize(
    "reply, change, heard",
    [
        (SORRY, 7 + 2, "need person"),  # the example by hand
        # one of these five
        ("I am so sorry about your graduation.", 7, "need"),
        ("I am so sorry.", 1, "empty"),
        ("Go on, tell me about your graduation.", 2, "second"),
        ("You could try to write about your graduation.", -3, "others"),
        ("It was a long day.", -4, "nothing"),
        # and any of these
        ("I am so sorry that you are nervous about your graduation.", 7 + 1, "need feeling"),
        ("I am so sorry about your graduation, uncle or not.", 7 - 6, "need stranger"),
        (
            "I am so sorry about your graduation. You could try to write. You did your best.",
            7 - 5,
            "need heap",
        ),
        ("I am so sorry about your graduation, get over it.", 7 - 6, "need dismissal"),
        ("I am so sorry about your graduation, cheer up.", 7 - 4, "need false cheer"),
        ("I am so sorry about your graduation. I am so sorry.", 7 - 6, "need repeated"),
        ("I am so sorry about your graduation and", 7 - 3, "need cut"),
        # and these alone
        ("Zxqv blorp wug flarn.", -8, "no English"),
        ("你好 朋友 我 很 抱歉", -8, "no English"),
        ("...", -10, "silence"),
        ("", -10, "silence"),
    ],
)
def test_the_points_of_each_rule(reply, change, heard):
    """Each rule by itself, in numbers that are written here and not read from POINTS: a rule that
    loses its weight must be noticed."""
    assert points(reply) == change
    assert " ".join(notes(reply)) == heard


def final(replies, row):
    """The final emotion of a user who is told `replies`, through prompts and reader."""
    model = simulator.Simulator(phrases.PhrasesModel())
    user = simulator.User(model, simulator.Profile(**row))

    async def talk():
        await user.open()
        for reply in replies:
            await user.feel(reply)
            if user.emotion in (0, 100):
                break
            await user.answer()

    asyncio.run(talk())
    return user.emotion


def test_the_right_reply_wins_and_no_fixed_reply():
    """Four different phrasings of the need, each about this user, lift everybody. One phrasing
    said to everybody in every turn leaves users sadder than they came."""
    people = world.profiles("heldout", 16)
    for row in people[:8]:
        read = world.read_scene(row["scene"], row["task"])
        phrasings = phrases.phrasings()[read.need][::6][:4]
        assert final([f"So {phrase}, {read.person} and all." for phrase in phrasings], row) >= 50
    assert sum(final([SORRY] * 4, row) for row in people) / len(people) < 30


def test_somebody_who_chats_wants_the_interest_and_not_comfort():
    chat = phrases.Chat("chess", "poetry", ["I want to tell you about chess."], True)

    def change(reply):
        return phrases.listen_chatting(reply, chat, []).points

    assert change("What is your favorite chess opening?") == 8
    assert change("I am so sorry to hear that. That must be hard.") == -3 - 5
    assert change("I love poetry, and chess.") == 4 - 6
