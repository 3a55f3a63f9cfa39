"""The torch engine: draws, slots, its cache of keys and values, new weights, and requests that are
given up. The yardstick for its log-probs is a row a turn (agents.by_rows).
"""

from models.engine import TorchEngine

import asyncio
import copy

import numpy as np
import pytest
import torch

from agents import (
    LINES,
    Recorder,
    assert_close,
    by_rows,
    engine_log_probs,
    episode_of,
    gossip,
    sampled,
)
from rollout import Agent


@pytest.mark.slow
def test_draws_do_not_depend_on_the_company_nor_on_the_slots(chat, tiny_model):
    """A dialogue has its own luck, so a step can be replayed, resumed and dealt to other ranks. In
    float64, where no draw falls between two roundings of the cdf (in fp32 one in ten thousand may,
    on one machine or another)."""
    precise = copy.deepcopy(tiny_model).double()

    def ids(count, seeds, **kwargs):
        episodes = gossip(
            TorchEngine(precise, chat.stop_ids, **kwargs), chat, count, seeds=seeds, think=False
        )
        return {seed: [s.ids for s in sampled(e)] for seed, e in zip(seeds, episodes)}

    everybody = ids(9, range(9))
    for others in (
        ids(9, [8, 2, 5, 0, 1, 7, 4, 3, 6]),
        ids(9, range(9), max_slots=2),
        ids(2, [3, 6]),
        ids(1, [5]),
    ):
        assert others == {seed: everybody[seed] for seed in others}
    assert len({str(x) for x in everybody.values()}) == 9  # and seeds do matter


@pytest.mark.slow
@pytest.mark.parametrize("think", [False, True])
@pytest.mark.parametrize("max_slots, count", [(1, 2), (2, 5), (64, 12)])
def test_slots_that_change_hands_or_rest(think, max_slots, count, chat, tiny_gqa_model):
    """A slot that changes hands holds somebody else's past. One that rests, because its dialogue
    waits to be let in, is computed along with its neighbours and must keep its own. A cache that
    grows in the middle of a turn, here past 128 tokens, must keep everybody's. In all of this every
    log-prob is still the trainer's."""
    engine = Recorder(tiny_gqa_model, chat.stop_ids, max_slots=max_slots)
    episodes = gossip(engine, chat, count, think=think, turns=4)
    assert len(engine.returned) == 4 * count
    assert max(sum(len(s.ids) for s in e.segments if not s.branch) for e in episodes) > 128
    assert_close([engine_log_probs(episodes)], by_rows(tiny_gqa_model, episodes)[:1], 1e-4)


def test_single_requests_share_slots(tiny_model, chat):
    """A local simulated user asks one thing after another and never comes back to any: their rows
    must not pile up."""
    engine = TorchEngine(tiny_model, chat.stop_ids)
    for i in range(5):
        asyncio.run(
            engine.generate(chat.first_prompt(f"{i}?"), 3, np.random.default_rng(i), key=None)
        )
    assert engine.cache.keys[0].shape[0] == 1 and not engine.ids_in_slot


def test_the_slot_of_the_longest_silence_changes_hands(tiny_model, chat):
    """Its dialogue is the least likely to go on. The row of one that has just spoken is kept."""
    engine = TorchEngine(tiny_model, chat.stop_ids, max_slots=2)
    for key in "abac":
        asyncio.run(engine.generate(chat.first_prompt("Well?"), 3, np.random.default_rng(0), key))
    assert [*engine.key_of_slot.values()] == ["a", "c"]


# -------------------------------------------------------------------------------------- new weights


@pytest.mark.parametrize("max_slots", [1, 64])
def test_a_synced_engine_is_a_new_one(max_slots, chat, model):
    """Defect 27: after a sync the engine says what the new weights say to the whole dialogue, keys
    and values of the old ones are gone; before it and after it, whatever happens to the trainer's,
    what it said before. Tensors are known by their names, in whatever order they come."""
    trained = copy.deepcopy(model)
    engine = TorchEngine(trained, chat.stop_ids, max_slots=max_slots)
    agent = Agent(engine, chat, think=False, max_tokens=9, context=512, seed=3)

    def train():
        with torch.no_grad():
            for p in trained.parameters():
                p += 0.1 * torch.linspace(-1, 1, p.numel()).view_as(p).sin()

    def assert_says(line, yardstick):
        asyncio.run(agent.reply(line))
        episode = episode_of(agent.segments)
        said = sampled(episode)[-1].log_probs
        wanted = by_rows(yardstick, [episode])[0][-len(said) :]
        assert_close([torch.tensor(said)], [wanted], 1e-5)

    assert_says(LINES[0], model)
    train()
    assert_says(LINES[1], model)
    engine.load_weights(reversed(list(trained.state_dict().items())))
    new = copy.deepcopy(trained)
    train()  # the next update has begun; the engine must not see it
    for line in LINES[2:]:
        assert_says(line, new)


def test_synced_weights_take_the_engines_precision(chat, tiny_model):
    """The engine computes in bf16 where the trainer keeps fp32: weights are copied into its
    tensors, which stay what they are. Its buffers stay in fp32, like the trainer's: `model.to` would
    cast them too, and rotary frequencies in bf16 are off by a radian at position 1,000."""
    engine = TorchEngine(tiny_model, chat.stop_ids, dtype=torch.bfloat16)
    trained = {name: p + 0.5 for name, p in tiny_model.state_dict().items()}
    engine.load_weights(trained.items())
    for name, p in engine.model.named_parameters():
        assert p.dtype == torch.bfloat16 and torch.equal(p, trained[name].bfloat16())
    buffers = list(engine.model.buffers())
    assert buffers and all(b.dtype == torch.float32 for b in buffers if b.is_floating_point())


# --------------------------------------------------------------------- errors, and what is given up


def five(engine, chat):
    return [Agent(engine, chat, think=False, max_tokens=9, context=512, seed=s) for s in range(5)]


async def replies_of(talks):
    """What became of them: replies and exceptions. Nobody waits for ever."""
    return await asyncio.wait_for(asyncio.gather(*talks, return_exceptions=True), 20)


def test_an_exception_in_the_model_reaches_every_waiter(chat, tiny_model):
    """A rollout that hangs is worse than one that fails: nobody would ever know why. Those who
    speak and those who still wait for a slot are told alike, and the engine is as good as new
    afterwards."""
    engine, passes = TorchEngine(tiny_model, chat.stop_ids, max_slots=2), []

    def fail(*_):
        passes.append(1)
        if len(passes) == 3:
            raise RuntimeError("out of memory")

    hook = engine.model.base_model.register_forward_pre_hook(fail)
    replies = asyncio.run(replies_of([agent.reply(LINES[0]) for agent in five(engine, chat)]))
    assert [str(x) for x in replies] == ["out of memory"] * 5
    hook.remove()
    episodes = gossip(engine, chat, 5, think=False)
    assert_close([engine_log_probs(episodes)], by_rows(tiny_model, episodes)[:1], 1e-4)


def test_ctrl_c_in_the_middle_of_a_step(chat, tiny_model, monkeypatch):
    """asyncio's handler of the signal cancels what is awaited at once, and the step goes on. That a
    cancelled reply was given a result ended an evaluation with a traceback."""
    engine = TorchEngine(tiny_model, chat.stop_ids)
    step = engine.step

    def interrupted():
        for request in engine.running.values():
            request.result.cancel()
        step()

    async def sample():
        rng = np.random.default_rng(0)
        replies = await replies_of([engine.generate([5, 6], n, rng, None) for n in (2, 3)])
        assert [type(reply) for reply in replies] == [asyncio.CancelledError] * 2
        await engine.loop_task

    monkeypatch.setattr(engine, "step", interrupted)
    monkeypatch.setattr(engine, "stop_ids", {-1})  # no reply stops early
    asyncio.run(sample())
    assert not engine.running


def test_a_dialogue_that_is_given_up_harms_nobody(chat, tiny_model):
    """A rollout has a deadline; a dialogue that is cancelled while it waits or speaks must not take
    the others with it."""
    engine = TorchEngine(tiny_model, chat.stop_ids, max_slots=2)
    agents = five(engine, chat)

    async def together():
        tasks = [asyncio.create_task(a.reply(LINES[0])) for a in agents]
        while not engine.running:
            await asyncio.sleep(0)
        assert len(engine.running) == 2 and len(engine.waiting) == 3
        tasks[0].cancel()  # speaking
        tasks[2].cancel()  # waiting for a slot
        return await replies_of(tasks)

    replies = asyncio.run(together())
    cancelled = [isinstance(r, asyncio.CancelledError) for r in replies]
    assert cancelled == [True, False, True, False, False]
    assert not engine.running and not engine.waiting  # nobody samples for them
    episodes = [episode_of(agents[i].segments) for i in (1, 3, 4)]
    assert_close([engine_log_probs(episodes)], by_rows(tiny_model, episodes)[:1], 1e-4)
