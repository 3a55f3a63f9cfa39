"""The people written by hand, for users behind whom a real LLM stands. A file of profiles decides
what a held-out score means, so what these tests hold on to is mostly arithmetic: who is where, how
often, and never twice."""

from support.errors import BadInput

import re
from collections import Counter
from itertools import combinations

import pytest

from simulator import (
    PROMPTS,
    Simulator,
    User,
    fill,
    load_profiles,
    refuse_foreign,
)
from toy.words import NEEDS

COUNTS = {"en_train": 16, "en_test": 8, "zh_train": 10, "zh_test": 6}
GROUPS = {"en": {"negative", "passive", "avoidant"}, "zh": {"负面型", "被动型", "回避型"}}
FILES = {name: PROMPTS / "profiles" / f"{name}.jsonl" for name in COUNTS}
ALL = [(name, profile) for name, path in FILES.items() for profile in load_profiles(path)]


def people(prefix):
    """The profiles of one file, or of one language."""
    return [profile for name, profile in ALL if name.startswith(prefix)]


def person(profile):
    """The name on the persona's first line: "* Name: Huia Tamatea" or "* 姓名：史飞"."""
    return re.fullmatch(r"\* (?:Name: |姓名：)(\S.*)", profile.player.splitlines()[0]).group(1)


@pytest.mark.parametrize("name", COUNTS)
def test_the_files_are_whole(name):
    """Every field is filled, the optional ones too: all dialogues with a person then start from the
    same line. The text stands there to be read, not as \\u escapes."""
    rows = people(name)
    assert len(rows) == COUNTS[name] and "\\u" not in FILES[name].read_text(encoding="utf-8")
    assert [p.id for p in rows] == [
        f"{name.replace('_', '-')}-{i:02d}" for i in range(1, len(rows) + 1)
    ]
    assert all(p.topic and p.first_talk and len(p.cha_group) == 3 for p in rows)
    assert {p.main_cha for p in rows} == GROUPS[name[:2]]


def test_every_intention_is_played_and_none_dominates():
    """If one intention filled a file, the one kind of reply that serves it would win there, and the
    score would say nothing about the rest. The English sentences are those of the toy, letter for
    letter, so that runs can be compared intention by intention."""
    tasks = {name: Counter(p.task for p in people(name)) for name in COUNTS}
    english = [need.theme for need in NEEDS.values()]
    assert tasks["en_train"] == Counter(english * 2) and tasks["en_test"] == Counter(english)
    assert (
        len(tasks["zh_train"]) == len(tasks["zh_train"] | tasks["zh_test"]) == 8
        and len(tasks["zh_test"]) == 6
    )
    assert max((tasks["zh_train"] | tasks["zh_test"]).values()) == 2
    assert all(
        task.startswith("你") and re.fullmatch("[^。]+。", task) for task in tasks["zh_train"]
    )


def test_nobody_is_in_training_and_test():
    """In the released data 54 of 100 test users are a training persona with another story: part of
    that score is memory."""
    assert len({p.id for _, p in ALL}) == len({person(p) for _, p in ALL}) == len(ALL)


@pytest.mark.parametrize("lang, shared", [("en", 30), ("zh", 12)])
def test_no_two_stories_are_alike(lang, shared):
    """Filled-in templates show as long common stretches of text, and would be a leak of their own
    between training and test."""

    def stretches(text):
        return {
            line[i : i + shared]
            for line in text.splitlines()
            for i in range(len(line) - shared + 1)
        }

    for field in ("scene", "player"):
        for one, two in combinations(people(lang), 2):
            common = stretches(getattr(one, field)) & stretches(getattr(two, field))
            assert not common, (one.id, two.id, field, common)


def test_scenes_are_long_enough_to_play_and_short_enough_to_pay_for():
    """The scene is sent with every call. What it lacks the model invents, differently each time."""
    for name, p in ALL:
        length, low, high = (
            (len(p.scene.split()), 150, 260)
            if name[:2] == "en"
            else (len("".join(p.scene.split())), 250, 450)
        )
        assert low <= length <= high, (p.id, length)


def test_the_first_line_keeps_the_secret():
    """The policy must find the hidden intention out."""
    for _, p in ALL:
        assert p.task.strip(".。") not in p.first_talk and len(p.first_talk) < 150, p.id


@pytest.mark.parametrize("difficulty", ["vanilla", "challenging"])
def test_everybody_fits_into_both_prompts(difficulty):
    """Rendered as a user renders it: all of the person arrives, no placeholder is left, and no text
    closes a tag of the prompt."""
    for name, p in ALL:
        simulator = Simulator(None, name[:2], difficulty)
        for prompt, text in simulator.prompts.items():
            tags = Counter(re.findall(r"</?\w+>", text))
            rendered = fill(text, {**User(simulator, p).values(), "code": "kqvt"})
            assert (
                all(part in rendered for part in (p.player, p.scene, p.task))
                and "{{" not in rendered
            ), (p.id, prompt)
            assert Counter(re.findall(r"</?\w+>", rendered)) == tags, (p.id, prompt)


@pytest.mark.parametrize("name", ["toy", "toy-weak"])
def test_the_scripted_user_plays_none_of_them(name):
    """It understands one grammar only. These people need a model that understands people, and are
    refused, one by one, by id."""
    for _, p in ALL:
        with pytest.raises(BadInput, match=p.id):
            refuse_foreign(name, [p])
