"""What shows before anything is paid for: a wrong key, a server that is not there, and the plan,
which counts calls, tokens and money."""

from support import plan
from support.settings import resolve_settings

import re

import pytest

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


def test_the_plan_counts_calls_tokens_and_money():
    """By hand: 4 dialogues of 2 turns are 2 first lines and 4 x 3 calls a step; two evaluations of
    4 dialogues of 4 calls each."""
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
    text = plan.calls_of(cfg, (1.0, 2.0))
    calls = 10 * (2 + 4 * 3) + 2 * 4 * 4
    assert f"14 a step, {calls} in all" in text
    tokens_in, tokens_out = map(
        float, re.search(r"about ([\d.]+) million tokens to it and ([\d.]+)", text).groups()
    )
    cost = float(re.search(r"price ([\d.]+)", text).group(1))
    assert cost == pytest.approx(tokens_in + 2 * tokens_out, abs=0.2)
    assert plan.calls_of(resolve_settings({})) == ""
    # smollm2's users are played by rule, whichever is named; for another model a server may come
    for simulator in (None, "toy", "toy-weak"):
        small = resolve_settings({"model": "smollm2", "engine": "torch", "simulator": simulator})
        assert plan.calls_of(small) == ""
    assert plan.calls_of(resolve_settings({"model": "some/dir", "engine": "torch"}))


@pytest.mark.parametrize("price", ["1", "a,b", "-1,2", "1,2,3", "nan,1", "inf,1"])
def test_a_price_is_two_numbers(price, capfd):
    with pytest.raises(SystemExit) as stop:
        rlver.main(["--price", price])
    assert stop.value.code == 2 and capfd.readouterr().err.count("\n") == 1
