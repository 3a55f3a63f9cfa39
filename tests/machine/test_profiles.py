"""The people written by hand, for users behind whom a real LLM stands. A file of profiles decides
what a held-out score means, so what these tests hold on to is mostly arithmetic: who is where, how
often, and never twice. And files as the world has them."""

from players.users import check_playable
from support.answers import PROMPTS, fill
from support.errors import BadInput
from support.files import digest

import json
import re
from collections import Counter
from itertools import combinations

import pytest

from answering import simulator_of
from emotion import NEEDS
from people import load_profiles
from simulator import User
from toy import world

COUNTS = {"en_train": 16, "en_test": 8, "zh_train": 10, "zh_test": 6}
GROUPS = {"en": {"negative", "passive", "avoidant"}, "zh": {"负面型", "被动型", "回避型"}}
FILES = {name: PROMPTS / "profiles" / f"{name}.jsonl" for name in COUNTS}
PEOPLE = {name: load_profiles(path) for name, path in FILES.items()}
ALL = [(name, profile) for name, people in PEOPLE.items() for profile in people]


@pytest.mark.parametrize("name", COUNTS)
def test_the_files_are_whole(name):
    """Every field is filled, the optional ones too: all dialogues with a person then start from the
    same line. The text stands there to be read, not as \\u escapes."""
    people = PEOPLE[name]
    assert "\\u" not in FILES[name].read_text("utf-8")
    numbers = range(1, COUNTS[name] + 1)
    assert [p.id for p in people] == [f"{name.replace('_', '-')}-{i:02d}" for i in numbers]
    assert all(p.topic and p.first_talk and len(p.cha_group) == 3 for p in people)
    assert {p.main_cha for p in people} == GROUPS[name[:2]]


def test_every_intention_is_played_and_none_dominates():
    """If one intention filled a file, the one kind of reply that serves it would win there, and the
    score would say nothing about the rest. The English sentences are those of the toy, letter for
    letter, so that runs can be compared intention by intention."""
    tasks = {name: Counter(p.task for p in people) for name, people in PEOPLE.items()}
    english = [need["en"] for need in NEEDS.values()]
    assert tasks["en_train"] == Counter(english * 2) and tasks["en_test"] == Counter(english)
    train, test = tasks["zh_train"], tasks["zh_test"]
    assert len(train) == len(train | test) == 8 and len(test) == 6
    assert max((train | test).values()) == 2
    assert all(task.startswith("你") and re.fullmatch("[^。]+。", task) for task in train)


def test_nobody_is_in_training_and_test():
    """In the released data 54 of 100 test users are a training persona with another story: part of
    that score is memory."""
    # on the persona's first line: "* Name: Huia Tamatea" or "* 姓名：史飞"
    names = [re.match(r"\* (?:Name: |姓名：)(\S.*)\n", p.player)[1] for _, p in ALL]
    assert len({p.id for _, p in ALL}) == len(set(names)) == len(ALL)


@pytest.mark.parametrize("lang, shared", [("en", 30), ("zh", 12)])
def test_no_two_stories_are_alike(lang, shared):
    """Filled-in templates show as long common stretches of text, and would be a leak of their own
    between training and test."""

    def stretches(text):
        starts = [(line, i) for line in text.splitlines() for i in range(len(line) - shared + 1)]
        return {line[i : i + shared] for line, i in starts}

    for field in ("scene", "player"):
        found = {p.id: stretches(getattr(p, field)) for name, p in ALL if name.startswith(lang)}
        for one, two in combinations(found, 2):
            assert not found[one] & found[two], (one, two, field)


def test_scenes_can_be_played_and_paid_for_and_first_lines_keep_the_secret():
    """The scene is sent with every call; what it lacks the model invents, differently each time.
    And the policy must find the hidden intention out."""
    for name, p in ALL:
        length, low, high = len("".join(p.scene.split())), 250, 450
        if name.startswith("en"):
            length, low, high = len(p.scene.split()), 150, 260
        assert low <= length <= high, (p.id, length)
        assert p.task.strip(".。") not in p.first_talk and len(p.first_talk) < 150, p.id


@pytest.mark.parametrize("difficulty", ["vanilla", "challenging"])
def test_everybody_fits_into_both_prompts(difficulty):
    """Rendered as a user renders it: all of the person arrives, no placeholder is left, and no text
    closes a tag of the prompt."""
    for name, p in ALL:
        simulator = simulator_of(None, name[:2], difficulty)
        for prompt, text in simulator.prompts.items():
            tags = Counter(re.findall(r"</?\w+>", text))
            rendered = fill(text, {**User(simulator, p).values(), "code": "kqvt"})
            assert all(part in rendered for part in (p.player, p.scene, p.task)), (p.id, prompt)
            assert "{{" not in rendered, (p.id, prompt)
            assert Counter(re.findall(r"</?\w+>", rendered)) == tags, (p.id, prompt)


def test_the_scripted_user_plays_none_of_them():
    """It understands one grammar only. These people need a model that understands people, and are
    refused, one by one, by id."""
    for _, p in ALL:
        with pytest.raises(BadInput, match=p.id):
            check_playable("toy-weak", [p])


def test_a_file_with_half_a_letter_and_one_with_brackets_without_end(tmp_path):
    """A cut emoji is good JSON and no UTF-8: the log could not be written. And Python's JSON reader
    counts brackets on its own stack, and gives up with a traceback."""
    path = tmp_path / "p.jsonl"
    row = {**world.profiles("train", 1)[0], "player": "* Name: Ann \ud83d, \U0001f600"}
    row |= {"cha_group": ["\ude00 calm", {"\ud83d": ["\ud83d"]}]}
    path.write_text(json.dumps(row) + "\n")
    profile = load_profiles(path)[0]
    assert profile.player == "* Name: Ann \ufffd, \U0001f600" and digest(vars(profile))
    assert profile.cha_group == ["\ufffd calm", {"\ufffd": ["\ufffd"]}]
    path.write_text("[" * 200_000 + "\n")
    with pytest.raises(BadInput, match="line 1: .*recursion"):
        load_profiles(path)
