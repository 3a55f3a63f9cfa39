"""tools.acceptance: replies that lift the emotion, as recorded, and of users who
all hear the same."""

import asyncio
import json

import pytest

import judging
import simulator
from judging import at, call, run, sage
from server import Loopback
from tools.dialogues import load_dialogues
from tools.hearing import Reply, hear


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    judging.fresh(tmp_path, monkeypatch)


@pytest.fixture
def good(tmp_path):
    return judging.good_file(tmp_path)


@pytest.fixture
def bad(tmp_path):
    return judging.bad_file(tmp_path)


def test_acceptance_counted(good, bad, tmp_path, capsys):
    """The share of scored replies that lift the emotion: of SAGE's two of three, the fourth has no
    emotion."""
    assert run("acceptance", sage(tmp_path), "--counted")[1]["positive"] == pytest.approx(200 / 3)
    assert run("acceptance", good, "--counted")[1] == {
        "command": "acceptance",
        "positive": 100.0,
        "replies": 64,
    }
    # that the user is a script is said beside the number, as everywhere
    assert "Made by rule: the user toy is a script." in capsys.readouterr().out
    assert run("acceptance", bad, "--counted")[1]["positive"] == 0


def test_the_same_replies_to_two_users(good, bad, capsys):
    """What is said is in the file, what they feel is their own: these accept no sentence a second
    time, though it was recorded as a lift. And nobody accepts cheer."""
    code, result = run("acceptance", good, "--difficulty", "vanilla", "challenging")
    accepted = result["accepted"]
    assert code == 0 and result["positive"] == 100 and accepted["all"][2] == 64
    assert 90 < accepted["all"][1] <= accepted["all"][0] < 100
    assert accepted["Deep Empathy"] == [100, 100, 8] and "Praise" in capsys.readouterr().out
    twice = run("acceptance", bad, "--difficulty", "challenging", "vanilla", "--limit", 12)[1]
    assert twice["accepted"] == {"all": [0, 0, 12]} and twice["positive"] == 0


def test_a_user_hears_one_reply_in_the_recorded_emotion(good):
    """After the recorded past and nothing else: a user who went on with what it felt itself would
    judge another dialogue from the second reply on."""
    asked = []

    class Deaf:
        purposes = {"eq": ""}

        async def ask(self, name, values, parse, dialogue):
            asked.append((values["emotion"], json.loads(values["dialogue"])))
            sections = dict.fromkeys(("Activity", "Analyse", "TargetCompletion"), "")
            return simulator.ReadAnswer("", "", (sections, -10))

    d = load_dialogues(good)[0]
    changes = [
        asyncio.run(hear(simulator.User(Deaf(), d.profile), Reply(d, i, d.turns[i]["reply"])))
        for i in range(3)
    ]
    assert changes == [-10] * 3 and [emotion for emotion, _ in asked] == [40, 48, 56]
    for i, (_, said) in enumerate(asked):
        assert len(said) == 2 * i + 2 and said[-1] == {
            "speaker": "friend",
            "text": d.turns[i]["reply"],
        }
        assert [m["text"] for m in said[:-1:2]] == [d.first_line] + [t["user"] for t in d.turns[:i]]


def test_what_nobody_felt_is_counted_and_where_all_failed_it_is_said(tmp_path, capfd):
    """A reply that a user could not be asked about is in no share. And a recorded turn without an
    emotion is no emotion to go on from."""
    path = sage(tmp_path, count=1, emotions=(45, None, 55))
    said = iter(["Change: +4"] + ["nonsense"] * 9)
    with Loopback(
        answer=lambda prompt: (
            "Content: c\nTargetCompletion: t\nActivity: a\nAnalyse: b\n" + next(said)
        )
    ) as server:
        flags = ["--simulator", f"openai:scripted@{server.url}", "--retries", 1, "--difficulty"]
        code, result = run("acceptance", path, *flags, "vanilla")
        assert code == 0 and result["accepted"]["all"] == [100, 1] and result["missing"] == 1
        assert call("acceptance", path, *flags, "challenging") == 2
    assert "could be read" in capfd.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["acceptance", "FILE", "--difficulty", "vanilla"],  # whose model?
        ["acceptance", "FILE", "FILE2", "--difficulty", "vanilla", "--simulator", "toy"],
        ["acceptance", "FILE", "--counted", "--difficulty", "vanilla", "--simulator", "toy"],
        ["acceptance", "FILE", "--limit", "3"],
        ["capabilities", "FILE", "--judge", "local:x", "--paraphrase"],  # a flag of another tool
        ["validity", "FILE", "--judge", "local:x", "--simulator", "toy"],
        ["validity", "FILE", "FILE2", "--judge", "local:x"],
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(flags, tmp_path, capfd):
    files = {"FILE": sage(tmp_path), "FILE2": sage(tmp_path, folder="two_based_simulator")}
    assert call(*[files.get(flag, flag) for flag in flags]) == 2
    assert capfd.readouterr().err.count("\n") == 1


def test_users_behind_a_server_hear_the_replies(tmp_path, capfd):
    path = sage(tmp_path)
    with Loopback(
        answer=lambda prompt: "Content: c\nTargetCompletion: t\nActivity: a\nAnalyse: b\nChange: +4"
    ) as server:
        model = ["--simulator", f"openai:scripted@{server.url}"]
        flags = ["--difficulty", "vanilla", "challenging", *model]
        assert run("acceptance", path, *flags, "--plan")[0] == 0 and server.calls == 0
        assert "12 calls to users" in capfd.readouterr().out
        code, result = run("acceptance", path, *flags)
        assert code == 0 and result["accepted"] == {"all": [100, 100, 6]} and server.calls == 12
        assert run("acceptance", path, *flags)[1] == result and server.calls == 12  # paid once


def test_groups_of_strategies_by_a_judge(tmp_path):
    """Where no grammar tells them, a judge does: a group counts where it is more than half of what
    a reply does; a reply that could not be tagged is in no group."""
    felt = "Content: c\nTargetCompletion: t\nActivity: a\nAnalyse: b\nChange: +4"

    def tag(prompt):
        if "在听12" in prompt:
            return "no"
        more = ", (E-2)" if '<reply>\n"我在听00' in prompt else ""
        return f"<Strategy>(E-1), (F-1){more}</Strategy>"

    with Loopback(answer=lambda _: felt) as user, Loopback(answer=tag) as server:
        code, result = run(
            "acceptance",
            sage(tmp_path),
            "--difficulty",
            "vanilla",
            "--retries",
            0,
            "--simulator",
            f"openai:scripted@{user.url}",
            *at(server),
        )
    assert code == 0 and server.calls == 6 == user.calls  # of eight replies two got no emotion
    assert result["accepted"] == {"all": [100, 6], "Praise": [100, 1]}
