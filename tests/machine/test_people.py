"""The users of a run: whom a step meets, who may play them, and the world of people who chat and
have no hidden need. (The heart-to-heart people written by hand: test_profiles.py.)"""

from support.answers import PROMPTS
from support.errors import BadInput
from support.needs import need_of
from support.results import read_results

import asyncio
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

import evaluate
import rlver
from answering import CHAINS, Model, simulator_of
from emotion import NEEDS
from people import load_profiles, profiles_of_run, profiles_of_step, toy_profiles
from result_files import SHORT, measure, write
from runs import go, output_of, refuse
from server import Loopback, mild_answer
from simulator import User
from tools import chat, replay
from toy import world

PROFILES = PROMPTS / "profiles"
CHAT = PROFILES / "en_chat.jsonl"

# ------------------------------------------------------------------------------------- who is met


def test_every_user_is_visited_once_per_pass():
    """Drawing with replacement would train on some users three times and on a third never. And a
    step's users follow from its number alone, or a resumed run would meet others."""
    folk = [SimpleNamespace(id=i, need="", task="") for i in range(7)]

    def ids(count, seed, step):
        return [who.id for who in profiles_of_step(folk, count, seed, step)]

    visits = [who for step in range(1, 22) for who in ids(3, 5, step)]
    passes = [visits[i : i + 7] for i in range(0, 63, 7)]
    assert all(sorted(one) == list(range(7)) for one in passes)
    assert len({tuple(one) for one in passes}) > 7  # each in an order of its own
    assert ids(3, 5, 20) == visits[57:60] != ids(3, 6, 20)
    assert sorted(ids(14, 5, 1)) == sorted([*range(7)] * 2)  # more dialogues than users


@pytest.mark.parametrize("is_named", [True, False])
def test_every_step_has_all_needs(is_named):
    """Without it a need was in no batch of a few steps running, what is said to its users changed
    unpaid, and one run of eleven lost a need for ever. Of each need everybody is met once a
    pass. Released people have no `need`: eight of a step had 5.3 different tasks on average."""
    folk = toy_profiles("train", 24)  # three of each of eight needs
    if not is_named:
        folk = [replace(person, need="") for person in folk]
    steps = [profiles_of_step(folk, 8, 0, step) for step in range(1, 4)]
    assert all(len({person.task for person in step}) == 8 for step in steps)
    assert len({person.id for step in steps for person in step}) == 24


def test_whom_a_step_meets_stays():
    """A run of another version with the same seed meets the same people in the same order: the
    toy's, and people without a need."""
    for people, wanted in (
        (toy_profiles("train"), "0448 0257 0002 0291 0420 0317 0430 0215"),
        (load_profiles(CHAT), "12 09 22 06 16 14 11 07"),
    ):
        met = [person.id for step in (1, 2) for person in profiles_of_step(people, 4, 0, step)]
        assert [one.split("-")[-1] for one in met] == wanted.split()


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.parametrize("held_out, needs", [(128, 8), (7, 7), (1, 1)])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("count", [16, 120])
def test_one_file_holds_out_all_needs_and_no_persona_twice(
    count, times, held_out, needs, is_named, tmp_path
):
    """The last fifth of a file sorted by need had two needs of eight, and of personas with two
    users one was trained on and one held out: part of the score was memory. Every fifth persona of
    sixteen people had four needs of eight."""
    people = sorted(world.profiles("train", count), key=lambda row: row["need"])
    need = {} if is_named else {"need": ""}
    rows = [{**row, **need, "id": f"{row['id']}-{i}"} for i in range(times) for row in people]
    path = str(write(tmp_path / "p.jsonl", *rows))
    train, test = profiles_of_run([path], held_out)
    assert not {p.player for p in train} & {p.player for p in test}
    assert len({p.task for p in test}) * times >= needs and len(test) <= held_out
    assert len({p.task for p in train}) == 8
    if held_out < 8 * times:  # what is not needed is trained on
        largest = max(Counter(row["player"] for row in rows).values())
        assert len(train) + len(test) > len(rows) - largest
    assert profiles_of_run([path], held_out) == (train, test)  # a resumed run has the same
    path = str(write(tmp_path / "one.jsonl", *[{**row, "player": "Ann"} for row in rows[:6]]))
    with pytest.raises(BadInput, match="two personas or more"):
        profiles_of_run([path], held_out)


def test_the_shipped_files_hold_out_every_need_that_has_two_people():
    """A need with one person is trained on; where no need has two people, one is held out."""
    for name, needs in (("en_train", 8), ("zh_train", 2), ("en_test", 1), ("en_chat", 1)):
        path = PROFILES / f"{name}.jsonl"
        train, test = profiles_of_run([path], 100)
        assert len({p.need for p in test}) == needs
        assert {p.id for p in train + test} == {p.id for p in load_profiles(path)}


def test_a_persona_in_both_files_is_said(tiny_dir, tmp_path, capfd):
    """Of 100 released test users 54 have a training persona: not refused, but no news either."""
    rows = world.profiles("train", 4)
    files = write(tmp_path / "a.jsonl", *rows), write(tmp_path / "b.jsonl", {**rows[0], "id": "b"})
    assert go(tiny_dir, tmp_path / "out", "--steps", 0, "--profiles", *files) == 0
    text = capfd.readouterr().out
    assert "warning: personas both trained on and held out: 1" in text


# ----------------------------------------------------------------------------------- who plays whom


def test_a_real_simulator_is_never_given_the_toys_people(tiny_dir, tmp_path, capfd):
    """It would play people of forty words from a grammar, with Chinese prompts even, and the run
    would look like any other."""
    for main, flags in (
        (rlver.main, ["--model", tiny_dir, "--out", tmp_path / "out"]),
        (chat.main, ["--as-policy"]),
        (evaluate.main, ["--policy", tiny_dir]),
    ):
        text = output_of(capfd, 2, main, *flags, "--simulator", "openai:m@http://127.0.0.1:9/v1")
        assert text.count("\n") == 1 or main is evaluate.main
        assert "prompts/profiles/" in text and "train_profile.jsonl" in text
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------- chit-chat


@pytest.mark.parametrize("lang, difficulty", CHAINS)
def test_each_purpose_stands_in_both_prompts(lang, difficulty):
    """The one who waits is not told to confide; the one with an aim is. Whose file names no target
    talks heart to heart."""
    texts = simulator_of(None, lang, difficulty).purposes
    assert list(texts) == ["eq", "target", "no-target"] and len(set(texts.values())) == 3
    chatters = load_profiles(PROFILES / f"{lang}_chat.jsonl")[11:13]
    for profile in chatters + load_profiles(PROFILES / f"{lang}_test.jsonl")[:1]:
        model = Model()
        user = User(simulator_of(model, lang, difficulty), profile)
        asyncio.run(user.feel("Hello."))
        asyncio.run(user.answer())
        for prompt in model.prompts:
            assert "{{" not in prompt
            assert [name for name in texts if texts[name] in prompt] == [profile.target]


HEADS = {"en": ("## What interests\n", "## What bores\n"), "zh": ("【感兴趣的】", "【觉得无聊的】")}


@pytest.mark.parametrize("lang", HEADS)
def test_people_who_chat_are_whole(lang):
    """Both purposes alike, nobody twice, and nobody who is in the other files, whether they are
    for training or for a test. (In the released data 54 of 100 test users are a training persona
    with another story: part of that score is memory.) What interests and what bores them stands in the background, or no reply could be right. Who does not chat has a
    need, which the words of the task name, too, if they name any."""
    everybody = [p for path in PROFILES.glob(f"{lang}_*.jsonl") for p in load_profiles(path)]
    names = [p.player.splitlines()[0] for p in everybody]
    assert len(set(names)) == len(names) == len({p.id for p in everybody})
    counts = Counter(p.target for p in everybody)
    assert counts["target"] == counts["no-target"] == 12
    for p in everybody:
        if p.target == "eq":
            assert p.need in NEEDS, p.id
            assert need_of(p.task)[0] in (p.need, "other"), p.id
        else:
            assert need_of(p.task, p.need) == ("other", "other"), p.id
            assert all(p.scene.count(head) == 1 for head in HEADS[lang]), p.id
            assert p.first_talk and len(p.cha_group) == 3, p.id


@pytest.mark.slow
def test_the_benchmark_of_chit_chat(tmp_path, tiny_dir, capsys):
    """`--world chit-chat`: tables by purpose, a file that no heart-to-heart result goes
    into, and a log that replays. The user is a server that keeps to the form."""
    out = tmp_path / "chat.jsonl"
    with Loopback(answer=mild_answer) as server:
        user = ["--simulator", f"openai:scripted@{server.url}"]
        flags = ["--policy", tiny_dir, *SHORT, *user, "--out", out]
        assert measure(*flags, "--world", "chit-chat") == 0
        text = capsys.readouterr().out
        assert "purpose: chat without aim" in text and "purpose: chat with an aim" in text
        rows = read_results(out)
        purposes = Counter(row["purpose"] for row in rows)
        assert purposes == {"chat with an aim": 12, "chat without aim": 12}
        assert {row["profile_id"] for row in rows} == {p.id for p in load_profiles(CHAT)}
        assert replay.main(["same-user", *map(str, (out, *user))]) == 0
        flags += ["--profiles", PROFILES / "en_test.jsonl"]
        told = refuse(capsys, *flags, main=evaluate.main)
        assert "world chit-chat there, None here" in told
