"""One call to a model server: how the form of its answer is asked for, what is tried again, what
is refused, and what the log keeps. A real server on loopback (server.py) has every fault that three
days of dialogues will meet."""

from support.errors import BadInput, SimulatorFailed, SimulatorRefused
from support.servers import FORMATS, CallLog, ServerModel

import asyncio
import itertools
import json
import time

import pytest

from over_server import ANN, Script, user_at
from rlver import rollout
from runs import rows
from server import SOON, Loopback, completion, failure
from simulator import CHECK_DIALOGUE, make_simulator

pytestmark = pytest.mark.usefixtures("quick")


def model_at(server):
    return ServerModel("scripted", server.url)


# ----------------------------------------------------------------------------------------- the form


@pytest.mark.parametrize("difficulty", ["vanilla", "challenging"])
@pytest.mark.parametrize("form", FORMATS)
def test_the_strictest_form_that_the_server_takes(form, difficulty):
    """The first question finds it out, and no later one is refused. The server checks what it is
    sent: a strict schema whose keys are those of the answer in their order, and the word JSON."""
    with Loopback(formats=[form], difficulty=difficulty) as server:
        user = user_at(server, difficulty=difficulty)

        async def talk():
            _, found = await user.simulator.check()
            assert found == form
            await user.answer()
            await user.feel("I am all ears.")
            return await user.answer()

        line, goodbye = asyncio.run(talk())
        assert line and goodbye is False
        assert server.refused == FORMATS.index(form) and server.calls == 3


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


@pytest.mark.parametrize("status", [401, 402, 404])
def test_a_server_that_refuses_everything_stops_the_run_at_once(status):
    with Loopback(reply=lambda request: failure(status, "no such thing as this")) as server:
        with pytest.raises(SimulatorRefused, match=f"{status}.*no such thing as this"):
            asyncio.run(user_at(server).answer())
        assert server.calls == 1


@pytest.mark.parametrize("fault", ["400", "403", "422", "filter"])
def test_a_refused_prompt_stops_the_check_and_later_costs_its_dialogue(fault):
    """At the first call it is the server's matter. After that it hangs on what was said: if it
    ended the run, a policy could end it. It is counted apart."""

    def reply(request):
        prompt = request["messages"][0]["content"]
        text = asyncio.run(server.model(prompt))
        if words not in prompt:
            return page(completion(text))
        if fault == "filter":
            return page(completion(text, "content_filter"))
        return failure(int(fault), "no such words")

    with Loopback(reply=reply) as server:
        simulator = make_simulator(f"openai:scripted@{server.url}")

        async def check_and_talk():
            await simulator.check()
            return await rollout(simulator, {0: ANN}, 2, lambda n: Script(f"bomb-{n}."), 1)

        words = CHECK_DIALOGUE[1]["text"]
        with pytest.raises(SimulatorRefused):
            asyncio.run(check_and_talk())
        simulator, words = make_simulator(f"openai:scripted@{server.url}"), "bomb-1"
        episodes, (lost,) = asyncio.run(check_and_talk())
        assert len(episodes) == 1 and lost["unreadable"]
        # what the policy said last is kept: nothing else shows what silenced the user
        assert lost["dialogue"][-1] == {"speaker": "friend", "text": "bomb-1."}
        assert server.calls == 3  # the first line and two replies: none asked twice


def test_a_wait_of_ten_minutes_is_not_waited_for():
    """openai's client waits for two minutes at most when a server asks for it."""
    with Loopback(reply=lambda request: failure(429, "full", {"Retry-After": "600"})) as server:
        with pytest.raises(SimulatorFailed, match="429.*full"):
            asyncio.run(model_at(server)("Hello."))


# -------------------------------------------------------------------------------- the log of answers


def test_no_answer_is_paid_for_twice(tmp_path):
    """A resumed step finds its answers in the log: unreadable ones too, or it would be told
    something else than the first time."""
    path = tmp_path / "calls.jsonl"
    with Loopback(faults={"garbage": 0.6}, seed=3) as server:
        said = asyncio.run(user_at(server, log=CallLog(path)).answer())
        paid = server.calls
        lines = rows(path)
        assert len(lines) == paid > 1 and len({line["key"] for line in lines}) == paid
        assert all(
            set(line) == {"key", "prompt", "answer", "seconds", "tokens"} for line in lines
        )
        assert lines[-1]["tokens"]["prompt"] == 10 and said[0] in lines[-1]["answer"]
        again = CallLog(tmp_path / "other.jsonl")
        again.read(path)
        assert asyncio.run(user_at(server, log=again).answer()) == said
        assert server.calls == paid and not (tmp_path / "other.jsonl").exists()


def test_a_question_whose_log_ends_unreadably_is_asked_anew(tmp_path):
    """Otherwise a run that stopped because of such answers would stop whenever it is resumed."""
    path = tmp_path / "calls.jsonl"
    with Loopback(faults={"garbage": 1.0}) as server:
        user = user_at(server, log=CallLog(path))
        user.simulator.retries = 2
        with pytest.raises(SimulatorFailed, match="3 answers could not be read"):
            asyncio.run(user.answer())
        assert server.calls == len(rows(path)) == 3
        server.faults, server.calls = {}, 0
        again = CallLog(path)
        again.read(path)
        assert asyncio.run(user_at(server, log=again).answer())
        assert server.calls == 1 and len(rows(path)) == 4


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


def test_a_model_that_cannot_keep_the_form_is_refused_before_the_first_dialogue():
    with Loopback(reply=lambda request: page(completion("I would rather chat."))) as server:
        with pytest.raises(BadInput, match="scripted cannot keep the form"):
            asyncio.run(make_simulator(f"openai:scripted@{server.url}").check())
