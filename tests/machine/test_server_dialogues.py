"""Many dialogues with a model server side by side, and what they may share."""

import asyncio
import time

import pytest

from answering import Model
from over_server import ANN
from rlver import rollout
from scripted import Agent
from server import Loopback, mild_answer
from simulator import Simulator, make_simulator, toy_profiles

pytestmark = pytest.mark.usefixtures("quick")


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
