"""What shows before anything is paid for: a server that is not there, and how many calls and tokens
a run takes at most. (A wrong key: test_server_runs.py.)"""

from support import terminal
from support.settings import resolve_settings

import pytest

import rlver
from over_server import flags_of
from runs import output_of

pytestmark = pytest.mark.usefixtures("quick")


def test_nobody_listening_is_said_at_once(tiny_dir, tmp_path, monkeypatch, capfd):
    """The first try says that there will be more, or a newcomer takes the silence for a hang."""
    monkeypatch.setattr("support.servers.CALL_TIMEOUT", 0.3)
    flags = flags_of(tiny_dir, "http://127.0.0.1:9/v1", tmp_path / "out")
    text = output_of(capfd, 75, rlver.main, *flags)
    told, stopped = text.splitlines()
    assert "Connect" in told and told.endswith("trying again")
    assert "no answer within 0.3 s" in stopped
    assert "nothing is saved yet: start the run again when the simulator works" in stopped


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
