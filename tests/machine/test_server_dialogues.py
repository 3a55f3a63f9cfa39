"""Many dialogues with a model server side by side, and what they may share."""

import asyncio
import time

import pytest

from over_server import ANN, Script
from rlver import rollout
from server import Loopback
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


def test_samples_are_not_shared_between_the_dialogues_of_a_group():
    """At temperature 0 equal prompts have equal answers, and one will do. Above, each dialogue
    draws its own: a cache without the dialogue in its key would make a group of copies."""

    async def model(prompt, schema=None):
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
        async def ask(self, *question):
            names.append(question[-1])
            return await super().ask(*question)

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
