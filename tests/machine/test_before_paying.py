"""What shows before anything is paid for: a wrong key, a server that is not there, and how many
calls and tokens a run takes at most."""

from support import terminal
from support.settings import resolve_settings

import rlver
from runs import output_of
from server import Loopback, people


def test_a_wrong_key_shows_before_anything_is_paid_for(tiny_dir, tmp_path, monkeypatch, capfd):
    """One small call, before the model is loaded. The run leaves nothing, so it can be started
    again with another model name or key."""
    monkeypatch.setenv("RLVER_API_KEY", "wrong")
    flags = ["--profiles", people(tmp_path / "p.jsonl"), "--out", tmp_path / "out"]
    with Loopback(key="right") as server:
        text = output_of(
            capfd,
            2,
            rlver.main,
            "--model",
            tiny_dir,
            *flags,
            "--simulator",
            f"openai:scripted@{server.url}",
        )
    assert "401" in text and "start it again" in text and "--resume" not in text
    assert not (tmp_path / "out").exists()


def test_nobody_listening_is_said_at_once(tiny_dir, tmp_path, monkeypatch, capfd):
    """The first refusal says that it waits, and for whom; a newcomer took the silence for a
    hang."""
    monkeypatch.setattr("support.server.WAIT_IF_UNREACHABLE", 0.01)
    monkeypatch.setattr("support.llm.backoff", lambda *_: 0.01)
    text = output_of(
        capfd,
        75,
        rlver.main,
        "--model",
        tiny_dir,
        "--profiles",
        people(tmp_path / "p.jsonl"),
        "--out",
        tmp_path / "out",
        "--simulator",
        "openai:m@http://127.0.0.1:9/v1",
    )
    assert text.count("cannot be reached") == 2 and "waiting, and trying again" in text
    assert "nothing is saved yet: start the run again when the simulator works" in text


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
    tokens = {"prompt": 10_000, "completion": 5_000}  # of the question before the run
    text = terminal.calls_text(cfg, -1, tokens)
    assert f"14 a step, {10 * 14 + 2 * 16} in all; about 1.7 million tokens to it and 0.9" in text
    assert f", {3 * 14 + 16} in all." in terminal.calls_text(cfg, 7, None)
    cfg.eval_every = 3  # after steps 3, 6 and 9, too
    assert f", {10 * 14 + 5 * 16} in all." in terminal.calls_text(cfg, -1, None)
