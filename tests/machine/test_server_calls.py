"""One call to a model server: what is tried again, what is refused, and what the log keeps. A real server on loopback (server.py) has every fault that three
days of dialogues will meet."""

from support.errors import (
    BadInput,
    PromptRefused,
    SimulatorFailed,
    SimulatorRefused,
    UnreadableAnswers,
)
from support.servers import CallLog, ServerModel

import asyncio
import itertools
import json
import time

import pytest

from over_server import user_at
from runs import rows
from server import SOON, Loopback, completion, failure
from simulator import REPLY_SCHEMA

pytestmark = pytest.mark.usefixtures("quick")


def model_at(server):
    return ServerModel("scripted", server.url)


def test_the_loopback_server_finds_a_wrong_schema(monkeypatch):
    """It would be no check if it took anything."""
    for wrong in ({"type": "object"}, {"type": "string"}):
        monkeypatch.setattr("support.servers.json_schema", lambda kind, wrong=wrong: wrong)
        with pytest.raises(AssertionError), Loopback() as server:
            asyncio.run(user_at(server).answer())


# ------------------------------------------------------------------------------ what is tried again


def page(body):
    return 200, {}, body


def test_what_may_heal_is_tried_again(capsys):
    """A rate limit (no earlier than the server says), faults of the server, and responses that hold
    no answer: an HTML page, a JSON list, half of an object, brackets without end. The first of them
    is told, or the wait would look like a hang."""
    faults = [
        failure(429, "slow down", {"Retry-After": "0.4"}),
        failure(503, "busy", SOON),
        failure(408, "slow", SOON),
        page(b"<html>Bad gateway</html>"),
        page([1]),
        page(json.dumps(completion("x")).encode()[:-9]),
        page(b"[" * 200_000),
        page({"choices": [{"message": {"content": 5}}]}),
        page(completion("good")),
    ]
    times = []

    def reply(request):
        times.append(time.monotonic())
        return faults[len(times) - 1]

    sleep = asyncio.sleep
    with Loopback(reply=reply) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "sleep", lambda seconds: sleep(0.01))
        assert asyncio.run(model_at(server)("Hello.")) == "good"
    assert len(times) == len(faults) and times[1] - times[0] >= 0.4
    told = capsys.readouterr().err
    assert told.count("trying again") == 1 and "status 429; trying again" in told


@pytest.mark.parametrize("fault", ["outage", "hang"])
def test_a_server_that_goes_silent_and_comes_back(fault, monkeypatch, capsys):
    """A connection without an answer, and one that gives none within the time of a try."""
    if fault == "outage":
        with Loopback(outage=(1, 0.2)) as server:
            assert asyncio.run(user_at(server).answer()) and server.calls > 1
    else:
        calls = itertools.count()

        def reply(request):
            if next(calls) == 0:
                time.sleep(1)
            return page(completion("good"))

        with Loopback(reply=reply) as server:
            assert asyncio.run(ServerModel("m", server.url, timeout=0.3)("Hello.")) == "good"
    assert capsys.readouterr().err.count("trying again") == 1


@pytest.mark.parametrize("fault", ["500", "hang", "html", "nobody"])
def test_what_does_not_heal_in_time_is_given_up(fault, monkeypatch):
    """No answer is made up, and nobody waits for ever."""
    monkeypatch.setattr("support.servers.CALL_TIMEOUT", 0.3)
    last = {"500": "status 500", "hang": "silent", "html": "no answer", "nobody": "Connect"}[fault]
    html = {"reply": lambda request: page(b"<html>")}
    began = time.monotonic()
    with Loopback(**html if fault == "html" else {"faults": {fault: 1.0}}) as server:
        model = model_at(server)
        if fault == "nobody":
            server.server_close()
            server.shutdown()
        with pytest.raises(SimulatorFailed, match=f"no answer within 0.3 s; .*{last}"):
            asyncio.run(model("Hello."))
    assert time.monotonic() - began < 5


# ------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("fault", "401 402 404 400 403 422 filter 429".split())
def test_what_is_refused_is_not_asked_twice(fault):
    """Each with the server's own words. What hangs on the prompt costs its dialogue: if it ended
    the run, a policy could end it. (429: ten minutes is more than openai's client waits.)"""
    others = {"401": SimulatorRefused, "402": SimulatorRefused, "404": SimulatorRefused}
    error = {**others, "429": SimulatorFailed}.get(fault, PromptRefused)

    def reply(request):
        asked.append(request)
        if fault == "filter":
            return page(completion("no such words", "content_filter"))
        return failure(int(fault), "no such words", {"Retry-After": "600"})

    asked = []
    with Loopback(reply=reply) as server:
        model = model_at(server)
        model.format = "text"
        with pytest.raises(error, match="content filter" if fault == "filter" else "no such words"):
            asyncio.run(model("Hello.", REPLY_SCHEMA))
        assert len(asked) == 1 and issubclass(PromptRefused, UnreadableAnswers)
        if error is PromptRefused:  # at the first question it is the server's matter
            with pytest.raises(BadInput, match="refuses the prompts"):
                asyncio.run(user_at(server).simulator.check())


# -------------------------------------------------------------------------------- the log of answers


def test_the_line_of_an_answer(tmp_path):
    """A resumed step finds it there: nothing is paid for twice."""
    path = tmp_path / "calls.jsonl"
    with Loopback() as server:
        said = asyncio.run(user_at(server, log=CallLog(path)).answer())
        (line,) = rows(path)
        assert set(line) == {"key", "prompt", "answer", "seconds", "tokens"}
        assert line["tokens"]["prompt"] == 10 and said[0] in line["answer"]
        log = CallLog(path)
        log.read(path)
        assert asyncio.run(user_at(server, log=log).answer()) == said
        assert server.calls == len(rows(path)) == 1


def test_a_line_that_was_cut_off_is_no_answer_and_spoils_no_other(tmp_path):
    path = tmp_path / "calls.jsonl"
    log = CallLog(path)
    log.write("one", "p", "1", 0.1)
    with open(path, "ab") as file:
        file.write('{"key": "two", "answer": "好'.encode()[:-1])
    log = CallLog(path)
    log.write("three", "p", "3", 0.1)
    log.read(path)
    assert log.answers == {"one": "1", "three": "3"}
    skipping = CallLog()
    skipping.read(path, path.read_bytes().index(b"\n") + 1)  # from where a checkpoint was made
    assert skipping.answers == {"three": "3"}
