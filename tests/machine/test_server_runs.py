"""Whole runs with a simulated user over a model server, or with a local model: the address, a
server that goes away, the key, and what is said of a run that stopped."""

from support.errors import BadInput
from support.rundir import open_run
from support.settings import make_parser, split_name

import asyncio
import itertools

import pytest

import rlver
from over_server import SMALL, retry, run, without_marks
from runs import rows
from server import Loopback, toy_people
from simulator import load_local, make_simulator

pytestmark = pytest.mark.usefixtures("quick")

# -------------------------------------------------------------------------------------- the address


def test_the_name_is_split_at_the_first_colon_and_the_last_at():
    """Model names hold colons and slashes, URLs hold colons, and somebody's model name will hold
    an @."""
    for name, parts in (
        ("openai:deepseek-chat@https://host/v1", ("openai", "deepseek-chat", "https://host/v1")),
        (
            "openai:org/m:70b@2@http://127.0.0.1:8000/v1",
            ("openai", "org/m:70b@2", "http://127.0.0.1:8000/v1"),
        ),
        ("local:models/a@b", ("local", "models/a@b", "")),
    ):
        assert split_name(name) == parts
    assert split_name("toy") == ("toy", "", "")


@pytest.mark.parametrize(
    "name",
    [
        "openai:m",
        "openai:m@",
        "openai:@http://h/v1",
        "openai:m@host/v1",
        "openai:m@ftp://h",
        "local:",
        "openia:m@http://h",
    ],
)
def test_a_bad_address_is_one_line(name, tmp_path, capfd):
    assert rlver.main(["--simulator", name, "--out", str(tmp_path / "out")]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert name in line and not (tmp_path / "out").exists()


# -------------------------------------------------------------------------------------- a whole run


@pytest.fixture(scope="module")
def served(no_pictures, tiny_dir, tmp_path_factory):
    """A whole run over a server: (its directory, the prompts that the server was asked)."""
    out = tmp_path_factory.mktemp("served") / "whole"
    with Loopback() as server:
        assert run(tiny_dir, server.url, out) == 0
        return out, list(server.prompts)


@pytest.mark.slow
def test_a_run_over_a_server_is_the_run_of_the_scripted_user(tiny_dir, tmp_path):
    """The same dialogues, word for word; and 16 % of failing calls change nothing but the number of
    calls, and the marks of what was asked again."""
    assert rlver.main(["--model", str(tiny_dir), *SMALL, "--out", str(tmp_path / "scripted")]) == 0
    for name, faults in (("served", {}), ("troubled", {"429": 0.08, "garbage": 0.04, "500": 0.04})):
        with Loopback(faults=faults) as server:
            assert run(tiny_dir, server.url, tmp_path / name) == 0
            assert len(rows(tmp_path / name / "calls.jsonl")) <= server.calls
        assert without_marks(tmp_path / name) == without_marks(tmp_path / "scripted")


@pytest.mark.slow
def test_a_server_that_goes_away_pauses_the_run(served, tiny_dir, tmp_path, capfd, monkeypatch):
    """Exit code 75, saved; the server comes back elsewhere, the run goes on there, and what was
    answered is not asked again."""
    whole, prompts = served
    retry(monkeypatch, 1)
    with Loopback(outage=(len(prompts) * 2 // 3, 1e9)) as server:
        assert run(tiny_dir, server.url, tmp_path / "out") == 75
        answered = len(rows(tmp_path / "out" / "calls.jsonl"))
    assert answered == len(prompts) * 2 // 3 - 1
    err = capfd.readouterr().err
    assert "cannot be reached" in err and f"python rlver.py --resume {tmp_path / 'out'}" in err
    with Loopback() as server:
        assert (
            rlver.main(
                ["--resume", str(tmp_path / "out"), "--simulator", f"openai:scripted@{server.url}"]
            )
            == 0
        )
        assert answered + server.calls == len(prompts)
    assert (tmp_path / "out" / "dialogues.jsonl").read_text() == (
        whole / "dialogues.jsonl"
    ).read_text()
    with pytest.raises(BadInput, match="--simulator cannot change"):
        open_run(
            {
                **vars(
                    make_parser().parse_args(
                        ["--resume", str(whole), "--simulator", f"openai:other@{server.url}"]
                    )
                )
            }
        )


@pytest.mark.slow
def test_the_key_is_sent_and_never_shown(tiny_dir, tmp_path, monkeypatch, capfd):
    """Some servers quote a refused key. What it must not do is to end up on a screen, or in a run
    that is shared."""
    monkeypatch.setenv("RLVER_API_KEY", "sk-very-secret")
    with Loopback(key="sk-very-secret") as server:
        assert run(tiny_dir, server.url, tmp_path / "out", "--steps", 1) == 0
    with Loopback(key="another") as server:
        assert run(tiny_dir, server.url, tmp_path / "refused") == 2
    out, err = capfd.readouterr()
    assert "401" in err and "Incorrect API key" in err and "***" in err and "Traceback" not in err
    assert "sk-very-secret" not in out + err
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"sk-very-secret" not in path.read_bytes(), path


# ------------------------------------------------------------------------------------- local models


def test_a_model_from_a_directory_can_be_the_user(tiny_dir, tmp_path, capfd):
    """The same engine code serves it. A random model knows no sections, so every dialogue is lost,
    which is told; what it is asked, and that it answers greedily, is seen in the log."""
    code = rlver.main(
        [
            "--model",
            str(tiny_dir),
            "--simulator",
            f"local:{tiny_dir}",
            *SMALL,
            *toy_people(tmp_path),
            "--out",
            str(tmp_path / "out"),
        ]
    )
    assert code == 2 and "does not fit its context of 512" in capfd.readouterr().err


def test_a_local_model_answers_greedily_and_counts_its_tokens(tiny_dir):
    from support.loading import load_model

    import torch

    local = load_local(str(tiny_dir), 0.0)
    local.max_tokens = 8

    async def twice():
        return await asyncio.gather(
            local("How are you?", length_factor=4),
            local("How are you?", length_factor=4),
            local("Why?"),
        )

    one, two, other = asyncio.run(twice())
    assert one == two and one.tokens == two.tokens and one.tokens["completion"] <= 32
    model, _ = load_model(tiny_dir)
    ids = local.chat.first_prompt("How are you?")
    assert one.tokens["prompt"] == len(ids)
    for _ in range(32):  # four times the limit
        with torch.no_grad():
            ids = ids + [int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        if ids[-1] == local.chat.stop_id:
            break
    said = ids[one.tokens["prompt"] :]
    assert one == local.chat.decode(said[:-1] if said[-1] == local.chat.stop_id else said)
    with pytest.raises(BadInput, match="--simulator local"):
        make_simulator(f"local:{tiny_dir / 'nowhere'}")


# --------------------------------------------------------------- what is said of a run that stopped


@pytest.mark.slow
def test_unreadable_dialogues_are_counted_apart_and_warned_of(
    tiny_dir, tmp_path, capfd, monkeypatch
):
    """A model that goes astray at one reply of one user: that dialogue is dropped, stands under
    `unreadable`, and the run says what that may mean. Dialogues lost to a server do not."""
    calls = itertools.count(1)

    def answer(prompt):
        if "<emotion>" in prompt and next(calls) == 3:  # two are of the evaluation before training
            return "I would rather talk about something else."
        return asyncio.run(server.model(prompt))

    retry(monkeypatch, 0)
    with Loopback(answer=answer) as server:
        flags = ["--eval-size", 1, "--steps", 1, "--batch-size", 16]
        assert run(tiny_dir, server.url, tmp_path / "out", *flags) == 0
    (row,) = rows(tmp_path / "out" / "dropped.jsonl")
    assert (row["step"], row["kind"], row["unreadable"]) == (1, "training", True)
    assert [m["speaker"] for m in row["dialogue"]] == ["me", "friend"]
    assert row["dialogue"][1]["text"]
    (line,) = rows(tmp_path / "out" / "metrics.jsonl")
    assert line["unreadable"] == line["dropped"] == 1 and line["episodes"] == 15
    # what the policy said in it was sampled too
    assert row["tokens"] > 0 and line["tokens_sampled"] == line["tokens_trained"] + row["tokens"]
    said = capfd.readouterr().out
    assert "more than one dialogue in a hundred was dropped because the user's answers" in said
