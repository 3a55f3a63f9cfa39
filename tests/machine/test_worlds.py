"""Worlds: people who chat, and have no hidden need."""

from support.errors import BadInput
from support.results import intention_of, read_results

import asyncio
import json
from collections import Counter

import pytest

from answering import CHAINS, Model
from result_files import SHORT, measure
from server import Loopback, mild_answer
from simulator import PROMPTS, Simulator, User, check_playable, load_profiles
from tools import replay
from toy import world


@pytest.mark.parametrize("lang, difficulty", CHAINS)
def test_each_purpose_stands_in_both_prompts(lang, difficulty):
    """The one who waits is not told to confide; the one with an aim is. Whose file names no target
    talks heart to heart."""
    texts = Simulator(None, lang, difficulty).purposes
    assert list(texts) == ["eq", "target", "no-target"] and len(set(texts.values())) == 3
    chatters = load_profiles(PROMPTS / "profiles" / f"{lang}_chat.jsonl")[11:13]
    for profile in chatters + load_profiles(PROMPTS / "profiles" / f"{lang}_test.jsonl")[:1]:
        model = Model()
        user = User(Simulator(model, lang, difficulty), profile)
        asyncio.run(user.feel("Hello."))
        asyncio.run(user.answer())
        for prompt in model.prompts:
            assert "{{" not in prompt
            assert [name for name in texts if texts[name] in prompt] == [profile.target]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_people_who_chat_are_whole(lang):
    """At least 24 in each language, both purposes alike, nobody twice, and nobody who is in the
    other files. What interests and what bores them stands in the background, or no reply could be
    right."""
    people = load_profiles(PROMPTS / "profiles" / f"{lang}_chat.jsonl")
    assert Counter(p.target for p in people) == {"target": 12, "no-target": 12}
    others = [
        p for path in (PROMPTS / "profiles").glob(f"{lang}_t*.jsonl") for p in load_profiles(path)
    ]
    names = [p.player.splitlines()[0] for p in people + others]
    assert len(set(names)) == len(names) and len({p.id for p in people}) == len(people)
    heads = (
        ("## What interests\n", "## What bores\n")
        if lang == "en"
        else ("【感兴趣的】", "【觉得无聊的】")
    )
    for p in people:
        assert all(p.scene.count(head) == 1 for head in heads) and p.first_talk
        assert intention_of(p.task, p.need) == ("other", "other") and len(p.cha_group) == 3
        assert len({q.main_cha for q in people}) == 3


def test_an_unknown_target_is_refused(tmp_path):
    path = tmp_path / "people.jsonl"
    path.write_text(json.dumps({**world.profiles("train", 1)[0], "target": "small-talk"}) + "\n")
    with pytest.raises(BadInput, match="'small-talk'; it should be eq, target, no-target"):
        load_profiles(path)
    path.write_text(json.dumps({**world.profiles("train", 1)[0], "target": None}) + "\n")
    assert load_profiles(path)[0].target == "eq"


@pytest.mark.slow
def test_the_benchmark_of_chit_chat(tmp_path, tiny_dir, capsys):
    """`--world chit-chat`: tables by purpose, a file that no heart-to-heart result goes
    into, and a log that replays. The user is a server that keeps to the form."""
    out = tmp_path / "chat.jsonl"
    profiles = PROMPTS / "profiles"
    with Loopback(answer=mild_answer) as server:
        user = ["--simulator", f"openai:scripted@{server.url}"]
        flags = ["--policy", tiny_dir, *SHORT, *user, "--out", out]
        assert measure(*flags, "--world", "chit-chat") == 0
        text = capsys.readouterr().out
        assert "purpose: chat without aim" in text and "purpose: chat with an aim" in text
        rows = read_results(out)
        purposes = Counter(row["purpose"] for row in rows)
        assert purposes == {"chat with an aim": 12, "chat without aim": 12}
        people = load_profiles(profiles / "en_chat.jsonl")
        assert {row["id"] for row in rows} == {p.id for p in people}
        assert replay.main([str(flag) for flag in (out, *user)]) == 0
        assert measure(*flags, "--profiles", profiles / "en_test.jsonl") == 2
        assert "world chit-chat there, None here" in capsys.readouterr().err


def test_the_scripted_user_knows_no_chit_chat(tiny_dir, tmp_path, capsys):
    """In one line, whoever asks for it: by the world, by a file, by a run."""
    chat = PROMPTS / "profiles" / "en_chat.jsonl"
    for flags in (["--world", "chit-chat"], ["--profiles", chat]):
        assert measure("--policy", tiny_dir, *flags, "--out", tmp_path / "r.jsonl") == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "scripted user" in line and "--simulator" in line
    with pytest.raises(BadInput, match="can only play the people"):
        check_playable("toy-weak", load_profiles(chat))
