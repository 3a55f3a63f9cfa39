"""The embedded world: its people, the scripted user, and what helps whom. Tests go by the rules of
toy/world.py, not by its present wording."""

from players.users import make_simulator

import asyncio
import re
from collections import Counter

import pytest

from emotion import NEEDS
from people import Profile, toy_profiles
from simulator import User
from toy import world
from toy.words import ACTS, CUES, FEELING_WORDS, PERSON_WORDS, join_parts
from toy.world import SECONDARY, NotOfThisWorld, act_of, read_scene, score_reply
from toy_replies import change, sentences


def splits():
    return {split: world.profiles(split) for split in ("train", "heldout")}


HAND = Profile(
    "by-hand",
    "* Name: Zoe",
    "## What happened\nMy boss ate my cake. I feel angry.\n\n"
    "## Details I may add\n- It was blue.\n- It was mine.\n\n"
    "## What I say when I open up\n- Cue one.\n- Cue two.\n- Cue three.\n",
    "passive",
    [],
    NEEDS["advise"]["en"],
)


def test_an_example_by_hand():
    """Someone hurt by a sister wants advice. Advice that names her lifts by 10, without her by 8;
    the neighbouring kind of reply by 3, and not if the user is challenging. All else does harm."""
    advice = "Maybe you could tell your sister one thing."
    assert act_of(advice) == "advise" and change(advice, "advise") == 10
    assert change("Maybe you could pick a calm evening.", "advise") == 8
    analysis = "Looking at it calmly, there are two problems."
    assert change(analysis, "advise") == 3
    assert change(analysis, "advise", challenging=True) == -4
    assert change("Cheer up, it will be fine.", "advise") == -6
    assert change("Talk to her!", "advise") == -7  # no sentence of this world
    assert change(advice.replace("sister", "boss"), "advise") == -8
    assert change(advice, "advise", earlier=[advice]) == -5


# ----------------------------------------------------------------------------------------- profiles


def test_profiles_are_made_by_code_and_always_the_same():
    """500 and 128 as in the paper's split, the eight needs in balance: a lopsided set would let one
    kind of reply win."""
    for split, rows in splits().items():
        size = {"train": 500, "heldout": 128}[split]
        assert len(rows) == size == len({row["id"] for row in rows})
        assert rows[:40] == world.profiles(split, 40) != world.profiles(split, 40, seed=1)
        counts = Counter(read_scene(row["scene"], row["task"]).need for row in rows)
        assert set(counts) == set(NEEDS) and max(counts.values()) - min(counts.values()) <= 1


def words_of(row):
    """Person, feeling, event, name, details, and the wording of the need."""
    scene = read_scene(row["scene"], row["task"])
    event = re.sub(r"^My \w+ | I feel .*", "", scene.story)
    name = re.search("Name: (.*)", row["player"])[1]
    return {scene.person, scene.feeling, event, name, *scene.details, *scene.cues}


def test_held_out_users_share_nothing_with_training_users():
    """Otherwise "held out" would measure memory. All that is told of a user is new."""
    train, heldout = (set().union(*map(words_of, rows)) for rows in splits().values())
    assert not train & heldout and len(heldout) > 50
    cues = [cue for splits in CUES.values() for lines in splits.values() for cue in lines]
    assert len(set(cues)) == len(cues)  # and a cue tells one need from all others


# -------------------------------------------------------------------------------- the scripted user


def test_the_scripted_model_reads_its_prompt_and_nothing_else(monkeypatch):
    """It stands where an LLM would. If it knew the generator, the chain of prompts and parsers
    would be decoration. Here a profile written by hand, with a story and cues that no list holds,
    is played all the same, and always alike."""
    monkeypatch.setattr(world, "profiles", None)
    monkeypatch.setattr(world, "NAMES", None)

    def talk():
        user = User(make_simulator("toy"), HAND)
        heard = [asyncio.run(user.open())]
        for reply in (sentences("advise", "boss", "angry")[0], "My, what a cake!"):
            heard += [*asyncio.run(user.feel(reply)), asyncio.run(user.answer())[0]]
        return heard

    opening, _, good, second, _, bad, third = talk()
    assert opening == "My boss ate my cake. I feel angry. Cue one."
    assert good >= 8 and "Cue two." in second and bad == -7 and "Cue three." in third
    assert talk() == talk()


def test_the_scripted_model_plays_no_profile_of_another_world():
    """A real profile has no such scene; a scripted user that improvised would hand out meaningless
    rewards for days."""
    for scene, task in (
        ("今天老师批评了我。", HAND.task),
        (HAND.scene, "你希望对方用心倾听你的情绪宣泄"),
        (HAND.scene.replace(" I feel angry.", ""), HAND.task),
    ):
        user = User(make_simulator("toy"), Profile(**{**vars(HAND), "scene": scene, "task": task}))
        with pytest.raises(NotOfThisWorld):
            asyncio.run(user.answer())


def test_a_guarded_user_opens_up_at_the_third_line():
    """SAGE's challenging user does not hint at the need at first: cues come from its third line on.
    A vanilla user's first line has one."""
    for difficulty, first in (("vanilla", 0), ("challenging", 2)):
        for profile in toy_profiles("heldout", 16):
            user = User(make_simulator("toy", difficulty=difficulty), profile, emotion=50)
            scene = read_scene(profile.scene, profile.task)
            lines = [asyncio.run(user.answer())[0] for _ in range(4)]
            for n, line in enumerate(lines):
                assert any(cue in line for cue in scene.cues) == (n >= first)
                assert any(detail in line for detail in scene.details) == (n < first)
            assert len(set(lines)) == 4


def test_a_user_below_ten_says_goodbye():
    """SAGE: at Emotion-F the user leaves, and says so."""
    for difficulty in ("vanilla", "challenging"):
        for emotion in (9, 10):
            user = User(make_simulator("toy", difficulty=difficulty), HAND, emotion=emotion)
            line, goodbye = asyncio.run(user.answer())
            assert line.endswith("Goodbye.") == goodbye == (emotion < 10)


# --------------------------------------------------------------------------------------- what helps


@pytest.mark.parametrize("act", ACTS)
def test_every_sentence_is_known_and_helps_its_own_need(act):
    """All sentences of the act, with persons and feelings of both splits in turn: each is
    recognised as its act and no other, lifts the need that it serves by 10 if it names the person
    or the feeling and by 8 if not, the neighbouring need by 3 if the user is not exacting, and
    lowers all others. A sentence that failed would punish the right reply."""
    people, feelings = sorted(PERSON_WORDS), sorted(FEELING_WORDS)
    for i, parts in enumerate(ACTS[act].all_parts()):
        person, feeling = people[i % len(people)], feelings[i % len(feelings)]
        text = join_parts(parts, person, feeling)
        assert act_of(text) == act, text
        for need in NEEDS:
            vanilla = score_reply(text, need, person, feeling, [], challenging=False)[0]
            exacting = score_reply(text, need, person, feeling, [], challenging=True)[0]
            if act == need:
                assert vanilla == exacting == (10 if "<" in "".join(parts) else 8), text
            else:
                assert vanilla == 3 if act == SECONDARY[need] else vanilla < 0, text
                assert exacting < 0
