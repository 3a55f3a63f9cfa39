"""Worlds: people who chat, and have no hidden need."""

from support.errors import BadInput
from support.results import intention_of, read_results

import asyncio
import json
from collections import Counter

import pytest

import evaluate
import simulator
from answering import coded
from server import Loopback, mild_answer
from simulator import PROMPTS, Simulator, User, load_profiles
from tools import replay
from toy import world


def test_who_has_no_target_talks_heart_to_heart():
    for path in sorted((PROMPTS / "profiles").glob("*_t*.jsonl")):
        plain = Simulator(None, path.name[:2])
        for profile in load_profiles(path):
            assert profile.target == "eq"
            assert User(plain, profile).values()["purpose"] == plain.purposes["eq"]


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_each_purpose_stands_in_both_prompts(lang):
    """The one who waits is not told to confide; the one with an aim is."""
    heard = []

    async def model(prompt, schema=None):
        heard.append(prompt)
        return coded(prompt, mild_answer(prompt))

    for difficulty in ("vanilla", "challenging"):
        simulator_ = Simulator(model, lang, difficulty)
        texts = simulator_.purposes
        assert list(texts) == ["eq", "target", "no-target"] and len(set(texts.values())) == 3
        for profile in load_profiles(PROMPTS / "profiles" / f"{lang}_chat.jsonl")[11:13]:
            user = User(simulator_, profile)
            asyncio.run(user.open())
            asyncio.run(user.feel("Hello."))
            asyncio.run(user.answer())
            for prompt in heard:
                assert texts[profile.target] in prompt and "{{" not in prompt
                assert not any(texts[name] in prompt for name in texts if name != profile.target)
            assert len(heard) == 2  # it opens with its own line
            heard.clear()


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
    with pytest.raises(BadInput, match="'small-talk' is unknown; there are eq, target, no-target"):
        load_profiles(path)
    path.write_text(json.dumps({**world.profiles("train", 1)[0], "target": None}) + "\n")
    assert load_profiles(path)[0].target == "eq"


@pytest.mark.slow
def test_the_benchmark_of_chit_chat(tmp_path, tiny_dir, capsys):
    """`--world chit-chat`: tables by world and purpose, a file that no heart-to-heart result goes
    into, and a log that replays. The user is a server that keeps to the form."""
    out = tmp_path / "chat.jsonl"
    flags = ["--policy", str(tiny_dir), "--max-turns", "2", "--max-tokens", "4"]
    with Loopback(answer=mild_answer) as server:
        flags += ["--simulator", f"openai:scripted@{server.url}"]
        assert evaluate.main([*flags, "--world", "chit-chat", "--out", str(out)]) == 0
        text = capsys.readouterr().out
        assert "world: chit-chat" in text
        assert "purpose: chat without aim" in text and "purpose: chat with an aim" in text
        rows, _ = read_results(out)
        assert Counter(row["purpose"] for row in rows) == {"target": 12, "no-target": 12}
        people = load_profiles(PROMPTS / "profiles" / "en_chat.jsonl")
        assert {row["id"] for row in rows} == {p.id for p in people}
        assert (
            replay.main(
                [
                    str(out),
                    "--simulator",
                    f"openai:scripted@{server.url}",
                    "--profiles",
                    str(PROMPTS / "profiles" / "en_chat.jsonl"),
                ]
            )
            == 0
        )
        assert (
            evaluate.main(
                [
                    *flags,
                    "--profiles",
                    str(PROMPTS / "profiles" / "en_test.jsonl"),
                    "--out",
                    str(out),
                ]
            )
            == 2
        )
        assert "world chit-chat there, None here" in capsys.readouterr().err


def test_the_scripted_user_knows_no_chit_chat(tiny_dir, tmp_path, capsys):
    """In one line, whoever asks for it: by the world, by a file, by a run."""
    chat = str(PROMPTS / "profiles" / "en_chat.jsonl")
    for flags in (["--world", "chit-chat"], ["--profiles", chat]):
        assert (
            evaluate.main(["--policy", str(tiny_dir), *flags, "--out", str(tmp_path / "r.jsonl")])
            == 2
        )
        (line,) = capsys.readouterr().err.splitlines()
        assert "scripted user" in line and "--simulator" in line
    with pytest.raises(BadInput, match="knows no chit-chat"):
        simulator.refuse_foreign("toy-weak", load_profiles(chat))
