"""Many calls to a model server: the waits between them, dialogues side by side, the log and what is
taken from it.

Nothing here measures time but for one Retry-After, which is a promise about time."""

from support import llm
from support.errors import SimulatorFailed
from support.llm import CallLog, RetryableError
from support.server import seconds_to_wait

import asyncio
import time
from datetime import datetime, timedelta, timezone
from email.utils import format_datetime

import pytest

from over_server import ANN, FIRST_WAIT, Script, user_at
from rlver import rollout
from runs import rows
from server import Loopback, completion
from simulator import Simulator, User, make_simulator, parse_reply, toy_profiles

pytestmark = pytest.mark.usefixtures("quick")

# ---------------------------------------------------------------------------------------- the waits


@pytest.mark.slow
def test_retry_after_is_honoured():
    """In seconds or as a date; not for ever, and nonsense is no time at all."""
    assert (
        seconds_to_wait("1.5") == 1.5
        and seconds_to_wait("-3") == 0
        and seconds_to_wait("86400") == 60
    )
    assert [seconds_to_wait(x) for x in (None, "", "soon", "nan")] == [0] * 4
    later = datetime.now(timezone.utc) + timedelta(seconds=30)
    assert 25 < seconds_to_wait(format_datetime(later, usegmt=True)) <= 30
    said = iter([(429, {"Retry-After": "0.4"}, {"error": {"message": "slow down"}})])
    with Loopback(
        reply=lambda request: (
            next(said, None)
            or (200, {}, completion(asyncio.run(server.model(request["messages"][0]["content"]))))
        )
    ) as server:
        asyncio.run(user_at(server).answer())
        first, second = server.times
        assert second - first >= 0.4


def test_waits_grow_and_differ(monkeypatch):
    """0.4 s, doubled each time up to 12 s, between three quarters and the whole of it by chance:
    eight retries last half a minute at least, and a hundred dialogues do not come back at the same
    moment."""
    waits, make_wait = [], FIRST_WAIT

    async def sleep(seconds):
        waits.append(seconds)

    async def down(prompt):
        raise RetryableError("down")

    chain = Simulator(down, retries=8)
    chain.wait = make_wait
    monkeypatch.setattr(llm.asyncio, "sleep", sleep)
    for _ in range(20):
        with pytest.raises(SimulatorFailed):
            asyncio.run(chain.ask("reply", User(chain, ANN).values(), parse_reply))
    for column in zip(*[iter(waits)] * 8):
        assert all(0.75 <= wait / min(12, 0.4 * 2**k) <= 1 for k, wait in enumerate(column))
    assert (
        len(set(waits)) == len(waits) == 160
        and min(sum(waits[i : i + 8]) for i in range(0, 160, 8)) >= 30
    )


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
            episodes, dropped = asyncio.run(
                rollout(
                    chain,
                    dict(enumerate(toy_profiles("train", 16))),
                    1,
                    lambda n: Script("Go on, let it all out.", "Hm."),
                    2,
                )
            )
            assert len(episodes) == 16 and not dropped
            assert server.most == bound


@pytest.mark.slow
def test_a_rollout_has_a_deadline():
    """Dialogues that are still open then are dropped: other ranks wait for this one, and they have
    a limit of their own."""
    with Loopback(
        answer=lambda prompt: (
            time.sleep(10 * ("slow" in prompt)) or asyncio.run(server.model(prompt))
        )
    ) as server:
        chain = make_simulator(f"openai:scripted@{server.url}")

        def make_agent(number):
            return Script("slow" if number == 1 else "Hm.", "Hm.")

        people = dict(enumerate(toy_profiles("train", 3)))
        episodes, errors = asyncio.run(rollout(chain, people, 1, make_agent, 2, timeout=1.0))
    assert [e.number for e in episodes] == [0, 2]
    assert [lost["reason"] for lost in errors] == ["the rollout ran out of time"]
    assert not errors[0]["unreadable"]


# ------------------------------------------------------------------------------------ log and cache


def test_every_call_is_logged_and_none_is_paid_for_twice(tmp_path):
    """A resumed step finds its answers in the log: unreadable ones too, or it would be told
    something else than the first time."""
    path = tmp_path / "calls.jsonl"
    with Loopback(faults={"garbage": 0.4}, seed=3) as server:
        said = asyncio.run(user_at(server, log=CallLog(path)).answer())
        paid = server.calls
        lines = rows(path)
        assert len(lines) == paid > 1 and len({line["key"] for line in lines}) == paid
        assert all(
            set(line) == {"key", "prompt", "mark", "answer", "seconds", "tokens"} for line in lines
        )
        assert lines[-1]["tokens"]["prompt"] == 10 and said in lines[-1]["answer"]
        again = CallLog(tmp_path / "other.jsonl")
        again.read(path)
        assert asyncio.run(user_at(server, log=again).answer()) == said
        assert server.calls == paid and not (tmp_path / "other.jsonl").exists()


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


def test_samples_are_not_shared_between_the_dialogues_of_a_group():
    """At temperature 0 equal prompts have equal answers, and one will do. Above, each dialogue
    draws its own: a cache without the dialogue in its key would make a group of copies."""

    async def model(prompt):
        return "x"

    chain = Simulator(model)
    assert (
        chain.key("p", "training 1 0", 0)
        == chain.key("p", "training 1 1", 0)
        != chain.key("q", "training 1 0", 0)
    )
    assert chain.key("p", "training 1 0", 0) != chain.key("p", "training 1 0", 1)
    model.temperature = 0.7
    assert len({chain.key("p", f"training 1 {n}", k) for n in range(3) for k in range(3)}) == 9
    # nor between steps
    assert chain.key("p", "training 1 0", 0) != chain.key("p", "training 2 0", 0)
    names = []

    class Listening(Simulator):
        async def ask(self, name, values, parse, dialogue=""):
            names.append(dialogue)
            return await super().ask(name, values, parse, dialogue)

    listening = Listening(make_simulator("toy").model)
    asyncio.run(
        rollout(listening, {4: ANN, 7: ANN}, 2, lambda n: Script("Hm."), 1, name="training 3")
    )
    assert sorted(names) == [
        "training 3 14",
        "training 3 15",
        "training 3 8",
        "training 3 9",
        "training 3 group 4",
        "training 3 group 7",
    ]
