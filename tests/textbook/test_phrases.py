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
from answering import user_of
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


# ------------------------------------------------------------------------------ no fixed reply wins


def final(replies, row, lines=()):
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


def test_no_fixed_reply_wins():
    """Any one phrasing, or one of each need in a heap, said to everybody in every turn, leaves
    users sadder than they came."""
    users = world.profiles("heldout", 16)
    scenes = [world.read_scene(row["scene"], row["task"]) for row in users]
    lists = phrases.phrasings()
    heap = " ".join(f"{lists[need][0].capitalize()} this." for need in NEEDS)
    fixed = [heap, SORRY]
    for need in NEEDS:
        fixed += [f"So {phrase} you feel." for phrase in lists[need]]
    for reply in fixed:
        finals = [30 + sum_of_changes([reply] * 4, scene) for scene in scenes]
        assert sum(finals) / len(finals) < 30, reply
    # the whole way, through prompts and reader
    assert sum(final([SORRY] * 4, row) for row in users) / len(users) < 30


def sum_of_changes(replies, scene):
    """What `replies` change in sum (that they stay between 0 and 100 is left out)."""
    return sum(phrases.listen(reply, scene, replies[:n]).change for n, reply in enumerate(replies))


def test_the_right_reply_wins():
    """Four different phrasings of the need, each about this user, lift everybody."""
    for row in world.profiles("heldout", 8):
        read = world.read_scene(row["scene"], row["task"])
        replies = [
            f"So {phrase}, {read.person} and all."
            for phrase in phrases.phrasings()[read.need][::6][:4]
        ]
        assert final(replies, row) >= 50, (read.need, replies)


# --------------------------------------------------------------------------------- people who chat


def test_a_word_of_every_interest_is_about_nothing():
    """One word of each of twenty interests is on everybody's topic. Said again and again, it wins
    nobody."""
    salad = "My " + ", ".join(listed.split()[0] for listed in phrases.INTERESTS.values()) + "?"
    assert len(phrases.INTERESTS) == 20
    chat = phrases.Chat("chess", "poetry", ["I want to tell you about chess."], True)
    assert phrases.listen_chatting(salad, chat, []).points == 4 + 4 - 5
    four = "Is it the river, the recipe, the paint or the board?"
    assert phrases.listen_chatting(four, chat, []).points == 4 + 4
    finals = [final([salad] * 10, row) for row in phrases.chatters()]
    assert sum(finals) / len(finals) < 30


def test_somebody_who_chats_wants_the_interest_and_not_comfort():
    chat = phrases.Chat("chess", "poetry", ["I want to tell you about chess."], True)

    def change(reply, chat=chat):
        return phrases.listen_chatting(reply, chat, []).points

    assert change("What is your favorite chess opening?") == 8
    assert change("Chess is a good game.") == 4
    assert change("I am so sorry to hear that. That must be hard.") == -3 - 5
    assert change("It was a long day.") == -3
    assert change("I love poetry, and chess.") == 4 - 6
    assert change("Chess is a good game, cheer up.") == 4 - 4
    assert (change("..."), change("Zxqv blorp wug flarn.")) == (-10, -8)
    teller = phrases.Chat("chess", "poetry", ["Nothing new on my side."], False)
    assert change("I played chess with my uncle.", teller) == 8
    assert change("Do they play chess?", teller) == 4


def test_people_of_other_files_are_refused():
    with pytest.raises(world.NotOfThisWorld):
        asyncio.run(user_of(phrases.PhrasesModel()).answer())
