"""Whole runs with a simulated user over a model server, or with a local model: the address, the
form of the answers, a server that goes away, and the key."""

from support import rundir
from support.errors import BadInput
from support.rundir import open_run
from support.settings import make_parser, resolve_settings, split_name

import pytest

import rlver
from over_server import SMALL, flags_of, run
from runs import go_on, output_of, rows
from server import Loopback, toy_people
from several_ranks import torchrun

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
    (
        "openai:m openai:m@ openai:@http://h/v1 openai:m@host/v1 openai:m@ftp://h local: "
        "local:nowhere openia:m@http://h"
    ).split(),
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


def test_a_step_of_ppo_where_the_server_takes_no_form(tiny_dir, tmp_path, capfd):
    """Dialogues and an update over a server that refuses every response_format. The run says how
    the form of the answers is kept. (A server that checks the schema: `served`.)"""
    with Loopback(formats=["text"], difficulty="challenging") as server:
        flags = "--algo ppo --steps 1 --eval-size 1 --difficulty challenging".split()
        assert run(tiny_dir, server.url, tmp_path / "out", *flags) == 0
        assert server.refused == 2
    assert "response_format text" in " ".join(capfd.readouterr().out.split())
    (step,) = rows(tmp_path / "out" / "metrics.jsonl")
    assert step["episodes"] == 4 and step["grad_norm"] > 0 and step["dropped"] == 0


@pytest.mark.slow
def test_the_form_that_the_first_rank_found_is_known_on_all(tiny_dir, tmp_path):
    """Two ranks ask, and one request is refused."""
    with Loopback(formats=("json_object", "text")) as server:
        flags = flags_of(tiny_dir, server.url, tmp_path / "out")
        code, out, err = torchrun(2, "rlver.py", *flags, "--steps", 1)
        assert code == 0, err
        assert server.refused == 1
    assert out.count("json_object") == 1
    calls = [rows(tmp_path / "out" / f"calls{rank}.jsonl") for rank in ("", "-1")]
    assert all(calls)  # both have asked


@pytest.mark.slow
def test_a_run_over_a_server_is_the_run_of_the_scripted_user(served, tiny_dir, tmp_path):
    """The same dialogues, word for word; and 16 % of failing calls change nothing but the number of
    calls, and the codes of what was asked again."""
    assert rlver.main(["--model", str(tiny_dir), *SMALL, "--out", str(tmp_path / "scripted")]) == 0
    with Loopback(faults={"429": 0.08, "garbage": 0.04, "500": 0.04}) as server:
        assert run(tiny_dir, server.url, tmp_path / "troubled") == 0
        assert len(rows(tmp_path / "troubled" / "calls.jsonl")) <= server.calls
    scripted = without_analyses(tmp_path / "scripted")
    assert without_analyses(served[0]) == scripted == without_analyses(tmp_path / "troubled")


def without_analyses(out):
    """A run's dialogues, without the text of f_emo's answers: they hold the code."""
    dialogues = rows(out / "dialogues.jsonl")
    for turn in (turn for dialogue in dialogues for turn in dialogue["turns"]):
        del turn["analysis"]
    return dialogues


@pytest.mark.slow
def test_a_server_that_goes_away_pauses_the_run(served, tiny_dir, tmp_path, capfd, monkeypatch):
    """Exit code 75, saved; the server comes back elsewhere, the run goes on there, and what was
    answered is not asked again."""
    whole, prompts = served
    with Loopback(outage=(len(prompts) * 2 // 3, 1e9)) as server:
        with monkeypatch.context() as patch:
            patch.setattr("support.servers.CALL_TIMEOUT", 0.5)
            assert run(tiny_dir, server.url, tmp_path / "out") == 75
        answered = len(rows(tmp_path / "out" / "calls.jsonl"))
    assert answered == len(prompts) * 2 // 3 - 1
    assert not any(row["unreadable"] for row in rows(tmp_path / "out" / "dropped.jsonl"))
    err = capfd.readouterr().err
    assert "no answer within 0.5 s" in err
    assert f"python rlver.py --resume {tmp_path / 'out'}" in err
    with Loopback() as server:
        assert go_on(tmp_path / "out", "--simulator", f"openai:scripted@{server.url}") == 0
        assert answered + server.calls == len(prompts)
    assert rows(tmp_path / "out" / "dialogues.jsonl") == rows(whole / "dialogues.jsonl")
    other = ["--resume", str(whole), "--simulator", f"openai:other@{server.url}"]
    with pytest.raises(BadInput, match="--simulator cannot change"):
        open_run(vars(make_parser().parse_args(other)))


@pytest.mark.slow
def test_the_key_is_sent_and_never_shown(tiny_dir, tmp_path, monkeypatch, capfd):
    """Some servers quote a refused key. What it must not do is to end up on a screen, or in a run
    that is shared. A wrong one shows before anything is paid for, and the run leaves nothing."""
    monkeypatch.setenv("RLVER_API_KEY", "sk-very-secret\n")  # as a key from a file may end
    with Loopback(key="sk-very-secret") as server:
        assert run(tiny_dir, server.url, tmp_path / "out", "--steps", 1) == 0
    with Loopback(key="another") as server:
        assert run(tiny_dir, server.url, tmp_path / "refused") == 2
        assert server.calls == 0
    out, err = capfd.readouterr()
    (line,) = [line for line in err.splitlines() if line.startswith("rlver.py: ")]
    assert "401" in line and "Incorrect API key: Bearer ***" in line
    assert "--resume" not in line and "Traceback" not in err
    assert not (tmp_path / "refused").exists()
    assert "sk-very-secret" not in out + err
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"sk-very-secret" not in path.read_bytes(), path


def test_nobody_listening_is_said_at_once(tiny_dir, tmp_path, monkeypatch, capfd):
    """The first try says that there will be more, or a newcomer takes the silence for a hang."""
    monkeypatch.setattr("support.servers.CALL_TIMEOUT", 0.3)
    flags = flags_of(tiny_dir, "http://127.0.0.1:9/v1", tmp_path / "out")
    text = output_of(capfd, 75, rlver.main, *flags)
    told, stopped = text.splitlines()
    assert "Connect" in told and told.endswith("trying again")
    assert "no answer within 0.3 s" in stopped
    assert "--resume" not in stopped


def test_a_run_says_how_many_calls_it_makes_at_most():
    """By hand: 4 dialogues of 2 turns are 2 first lines and 4 x 3 calls a step; two evaluations of
    4 dialogues of 4 calls each. A resumed run says what is left."""
    cfg = resolve_settings(
        dict(
            algo="grpo",
            batch_size=4,
            group_size=2,
            max_turns=2,
            steps=10,
            eval_size=4,
            simulator="openai:m@http://h/v1",
        )
    )
    assert f"14 a step, {10 * 14 + 2 * 16} in all." in rundir.calls_text(cfg, -1)
    assert f", {3 * 14 + 16} in all." in rundir.calls_text(cfg, 7)
    cfg.eval_every = 3  # after steps 3, 6 and 9, too
    assert f", {10 * 14 + 5 * 16} in all." in rundir.calls_text(cfg, -1)


# ------------------------------------------------------------------------------------- local models


def test_a_local_model_whose_context_is_too_short_is_refused(tiny_dir, tmp_path, capfd):
    flags = ["--model", tiny_dir, "--simulator", f"local:{tiny_dir}", *SMALL]
    flags += [*toy_people(tmp_path), "--out", tmp_path / "out"]
    assert rlver.main([str(flag) for flag in flags]) == 2
    assert "does not fit its context of 512" in capfd.readouterr().err
