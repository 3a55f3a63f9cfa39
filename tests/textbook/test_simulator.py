"""The simulator that all users share: the check before the first dialogue, prompts that are
refused, the clock. (How it asks: test_reading.py.)"""

from support import metrics
from support.errors import (
    BadInput,
    PromptRefused,
    SimulatorFailed,
    TooManyLost,
    UnreadableAnswers,
)
from support.servers import MAX_ANSWER_TOKENS, LocalModel

import asyncio
from types import SimpleNamespace

import pytest

from answering import Model, feeling, user_of
from simulator import CHECK_REPLIES, Simulator, User, toy_profiles


def test_a_model_that_cannot_keep_the_form_is_told_before_the_first_dialogue():
    """One that cannot copy four letters cannot play a user. A server that does not answer is
    another matter: it may come back. The question is in the language of the run."""

    def check(model, lang="en"):
        asyncio.run(Simulator(model, lang, retries=4).check())

    keeps, forgets = Model(), Model([feeling(3).replace("kqvt", "zzzz")])
    for lang, name in (("en", "Maureen"), ("zh", "葛春生")):
        check(keeps, lang)
        assert CHECK_REPLIES[lang] in keeps.prompts[-1] and name in keeps.prompts[-1]
    assert len(keeps.prompts) == 2
    with pytest.raises(BadInput, match="cannot keep the form"):
        check(forgets)
    assert len(forgets.prompts) == 3  # and not five
    for error, becomes in ((SimulatorFailed, TooManyLost), (PromptRefused, BadInput)):

        async def fails(prompt, schema, error=error):
            raise error("what the server says")

        with pytest.raises(becomes, match="what the server says"):
            check(fails)


def test_a_model_in_this_process_has_what_is_left_of_its_context():
    """For its answer, and 4,096 tokens at most. A prompt that leaves nothing is refused."""
    lengths = []

    class Engine:
        async def generate(self, ids, max_tokens, rng, key):
            lengths.append(max_tokens)
            return [7, 0], None

    chat = SimpleNamespace(first_prompt=list, opening=[], stop_ids={0}, decode=str)
    for context in (10**6, 100, 3):
        model = LocalModel("small", Engine(), chat, context, rng=None)
        if context > 3:
            assert asyncio.run(model("abc")) == "[7]"
        else:
            with pytest.raises(PromptRefused, match="3 tokens does not fit its context of 3"):
                asyncio.run(model("abc"))
    assert lengths == [MAX_ANSWER_TOKENS, 97]


def test_a_prompt_that_is_refused_costs_its_dialogue_once_the_model_was_checked():
    """A 400, a content filter, a context that is full: all three hang on what was said. If one of
    them ended the run, a policy could end it."""

    class Picky(Model):
        async def __call__(self, prompt, schema=None):
            if "bomb" in prompt:
                raise PromptRefused("400: such words")
            return await super().__call__(prompt)

    user = user_of(Picky())
    asyncio.run(user.simulator.check())
    assert asyncio.run(user.feel("Hello."))[1] == 7
    with pytest.raises(UnreadableAnswers, match="such words"):
        asyncio.run(user.feel("bomb"))


def test_the_clock_counts_what_the_gpu_waits_for_the_user(monkeypatch):
    """Seconds with a call in flight and no sampling. Calls overlap, so their durations must not add
    up; an idle second and a second of sampling are not the user's."""
    now = [0]
    monkeypatch.setattr(metrics, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = metrics.Clock()
    now[0] += 1  # nothing at all
    with clock.during("calls"):
        now[0] += 2  # counts
        with clock.during("calls"):
            now[0] += 4  # two calls at once: counts once
            with clock.during("samplers"), clock.during("samplers"):
                now[0] += 8  # the GPU is at work
        now[0] += 16  # counts
    now[0] += 32  # nothing
    with clock.during("samplers"):
        now[0] += 64  # no call

    async def fails(prompt, schema):
        now[0] += 128  # counts, and a failed call is over
        raise SimulatorFailed

    user = User(Simulator(fails, clock=clock), toy_profiles("train", 1)[0])
    with pytest.raises(SimulatorFailed):
        asyncio.run(user.answer())
    now[0] += 256
    clock.tick()
    assert clock.simulator == 2 + 4 + 16 + 128
