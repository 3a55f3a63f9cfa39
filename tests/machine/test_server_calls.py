"""Calls to a model server: what is tried again, what is refused, what the log keeps, and dialogues
side by side. A real server on loopback (server.py) has every fault that three days of dialogues
will meet."""

from support.errors import (
    BadInput,
    PromptRefused,
    SimulatorFailed,
    SimulatorRefused,
    UnreadableAnswers,
)
from support.servers import CallLog, ServerModel, json_schema

import asyncio
import json
import time

import pytest

from answering import Model
from over_server import ANN, user_at
from rlver import rollout
from runs import rows
from scripted import Agent
from server import SOON, Loopback, completion, failure, mild_answer
from simulator import REPLY_SCHEMA, Simulator, make_simulator, toy_profiles

pytestmark = pytest.mark.usefixtures("quick")

# ----------------------------------------------------------------------------------------- the form


def test_a_judges_schema_by_hand():
    """Scales and lists of allowed words are left to whoever reads the answer: not all servers know
    a bound or an enum."""
    schema = {"why": {"ED": str}, "code": str, "score": range(1, 6), "kinds": [("a", "b")]}
    text = {"type": "string"}
    properties = {
        "why": object_of(ED=text),
        "code": text,
        "score": {"type": "integer"},
        "kinds": {"type": "array", "items": text},
    }
    assert json_schema(schema) == object_of(**properties)


def object_of(**properties):
    """The JSON Schema of an object."""
    closed = {"required": list(properties), "additionalProperties": False}
    return {"type": "object", "properties": properties, **closed}


def test_the_loopback_server_finds_a_wrong_schema(monkeypatch):
    """It would be no check if it took anything."""
    for wrong in (object_of(thinking={"type": "string"}), {"type": "string"}):
        monkeypatch.setattr("support.servers.json_schema", lambda kind, wrong=wrong: wrong)
        with pytest.raises(AssertionError), Loopback() as server:
            asyncio.run(user_at(server).answer())


def test_only_the_check_decides_how_the_form_is_kept(capsys):
    """And says it, whichever program asks. If any refused prompt could lower it, one that a filter
    refuses would cost the rest of a run its schema."""

    async def ask(user):
        await user.answer()
        before = user.simulator.model.format
        await user.simulator.check()
        return before, user.simulator.model.format

    with Loopback(formats=("json_object", "text")) as server:
        assert asyncio.run(ask(user_at(server))) == (None, "json_object")
    assert "by response_format json_object" in " ".join(capsys.readouterr().out.split())


# ------------------------------------------------------------------------------ what is tried again


def test_what_may_heal_is_tried_again(capsys):
    """A line that is cut, a rate limit (no earlier than the server says), faults of the server, one
    that is silent, and responses that hold no answer: an HTML page, a JSON list, half of an object,
    brackets without end. The first failure is told, or the wait would look like a hang."""
    half = json.dumps(completion("x")).encode()[:-9]
    pages = [b"<html>Bad gateway</html>", [1], half, b"[" * 200_000, completion(5)]
    responses = [
        failure(429, "slow down", {"Retry-After": "0.4"}),
        failure(503, "busy", SOON),
        failure(408, "slow", SOON),
        "silence",
        *[(200, {}, page) for page in pages],
        (200, {}, completion("good")),
    ]
    times = []

    def reply(request):
        times.append(time.monotonic())
        response = responses[len(times) - 1]
        if response == "silence":
            time.sleep(5)
        return response

    sleep = asyncio.sleep
    with Loopback(outage=(1, 0.1), reply=reply) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "sleep", lambda seconds: sleep(0.01))
        model = ServerModel("scripted", server.url, timeout=0.6)
        assert asyncio.run(model("Hello.", REPLY_SCHEMA)) == "good"
    assert len(times) == len(responses) and times[1] - times[0] >= 0.4
    assert times[-1] - times[0] < 4  # nobody waited for the silent one
    assert capsys.readouterr().err.count("trying again") == 1


@pytest.mark.parametrize("fault", ["500", "hang", "html", "nobody"])
def test_what_does_not_heal_in_time_is_given_up(fault, monkeypatch):
    """No answer is made up, and nobody waits for ever."""
    monkeypatch.setattr("support.servers.CALL_TIMEOUT", 0.3)
    last = {"500": "status 500", "hang": "silent", "html": "no answer", "nobody": "Connect"}[fault]
    html = {"reply": lambda request: (200, {}, b"<html>")}
    began = time.monotonic()
    with Loopback(**html if fault == "html" else {"faults": {fault: 1.0}}) as server:
        model = ServerModel("scripted", server.url)
        if fault == "nobody":
            server.server_close()
            server.shutdown()
        with pytest.raises(SimulatorFailed, match=f"no answer within 0.3 s; .*{last}"):
            asyncio.run(model("Hello.", REPLY_SCHEMA))
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
            return 200, {}, completion("no such words", "content_filter")
        return failure(int(fault), "no such words", {"Retry-After": "600"})

    asked = []
    with Loopback(reply=reply) as server:
        model = ServerModel("scripted", server.url)
        model.format = "text"
        with pytest.raises(error, match="content filter" if fault == "filter" else "no such words"):
            asyncio.run(model("Hello.", REPLY_SCHEMA))
        (request,) = asked
        assert request["model"] == "scripted" and request["temperature"] == 0
        assert request["max_tokens"] == 4096
        assert issubclass(PromptRefused, UnreadableAnswers)
        if error is PromptRefused:  # at the first question it is the server's matter
            with pytest.raises(BadInput, match="refuses the prompts"):
                asyncio.run(user_at(server).simulator.check())


# ------------------------------------------------------------------------------- the log of answers


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
    log.read(path)
    log.write("three", "p", "3", 0.1)
    log.read(path)
    assert log.answers == {"one": "1", "three": "3"}
    skipping = CallLog()
    skipping.read(path, path.read_bytes().index(b"\n") + 1)  # from where a checkpoint was made
    assert skipping.answers == {"three": "3"}


# ----------------------------------------------------------------------------------- many dialogues


@pytest.mark.slow
def test_calls_overlap_within_their_bound():
    """Defect 18: the released code makes one call after the other. Here all dialogues wait at the
    same time, as many as allowed."""

    def together(prompt):
        """Answer nobody before as many are waiting as may be (or for long it is clear that they
        never will)."""
        began = time.monotonic()
        while server.most < bound and time.monotonic() < began + 10:
            time.sleep(0.005)
        return asyncio.run(server.model(prompt))

    for bound in (3, 16):
        with Loopback(answer=together) as server:
            chain = make_simulator(f"openai:scripted@{server.url}", concurrency=bound)
            people = dict(enumerate(toy_profiles("train", 16)))
            dialogues = rollout(chain, people, 1, lambda n: Agent(["Go on.", "Hm."]), 2)
            episodes, dropped = asyncio.run(dialogues)
            assert len(episodes) == 16 and not dropped and server.most == bound


@pytest.mark.slow
def test_a_rollout_has_a_deadline():
    """Dialogues that are still open then are dropped: other ranks wait for this one, and they have
    a limit of their own."""

    def answer(prompt):
        time.sleep(10 * ("slow" in prompt))
        return mild_answer(prompt)

    def make_agent(number):
        return Agent(["slow" if number == 1 else "Hm.", "Hm."])

    people = dict(enumerate(toy_profiles("train", 3)))
    with Loopback(answer=answer) as server:
        chain = make_simulator(f"openai:scripted@{server.url}")
        episodes, errors = asyncio.run(rollout(chain, people, 1, make_agent, 2, timeout=1.0))
    assert [e.number for e in episodes] == [0, 2]
    assert [lost["reason"] for lost in errors] == ["the rollout ran out of time"]
    assert not errors[0]["unreadable"]


def test_samples_are_not_shared_between_the_dialogues_of_a_group():
    """At temperature 0 equal prompts have equal answers, and one will do. Above, each dialogue
    draws its own: a log without the dialogue in its keys would make a group of copies."""
    model = Model()
    key = Simulator(model).key
    assert key("p", "training 1 0", 0) == key("p", "training 1 1", 0)
    assert len({key("p", "", 0), key("q", "", 0), key("p", "", 1)}) == 3
    model.temperature = 0.7
    assert len({key("p", f"training 1 {n}", k) for n in range(3) for k in range(3)}) == 9
    names = set()

    class Listening(Simulator):
        async def ask(self, *question):
            names.add(question[-1])
            return await super().ask(*question)

    people = {4: ANN, 7: ANN}
    asyncio.run(rollout(Listening(model), people, 2, lambda n: Agent(["Hm."]), 1, name="step 3"))
    assert sorted(names) == [f"step 3 {who}" for who in (14, 15, 8, 9, "group 4", "group 7")]
