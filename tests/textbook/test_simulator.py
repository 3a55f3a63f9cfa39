"""The simulator that all users share: the check before the first dialogue, prompts that are
refused, the clock. (How it asks: test_reading.py.)"""

from players.calls import CUT, MAX_ANSWER_TOKENS, MAX_THINKING_TOKENS, Answer, Caller, CallLog
from players.check import CHECK_REPLIES, check, user_of_check
from players.local import LocalModel, load_local
from support import clock
from support.answers import PROMPTS
from support.errors import (
    BadInput,
    PromptRefused,
    SimulatorFailed,
    TooManyLost,
    UnreadableAnswers,
)
from support.files import read_jsonl

import asyncio
import shutil
from types import SimpleNamespace

import pytest

from answering import Model, feeling, simulator_of, user_of
from people import toy_profiles
from simulator import User


def test_a_model_that_cannot_keep_the_form_is_told_before_the_first_dialogue():
    """One that cannot copy four letters cannot play a user. A server that does not answer is
    another matter: it may come back. The question is in the language of the run."""

    def ask(model, lang="en"):
        asyncio.run(check(simulator_of(model, lang, retries=4)))

    forgets = Model([feeling(3).replace("kqvt", "zzzz")])
    for lang, name in (("en", "Maureen"), ("zh", "葛春生")):
        keeps = Model()
        ask(keeps, lang)
        kind, cruel = CHECK_REPLIES[lang]
        for prompt, reply in zip(keeps.prompts, (kind, cruel, kind), strict=True):
            assert f'"text": "{reply}"' in prompt and name in prompt
    with pytest.raises(BadInput, match="cannot keep the form"):
        ask(forgets)
    assert len(forgets.prompts) == 3  # and not five
    for error, becomes in ((SimulatorFailed, TooManyLost), (PromptRefused, BadInput)):

        async def fails(prompt, schema, error=error):
            raise error("what the server says")

        with pytest.raises(becomes, match="what the server says"):
            ask(fails)


@pytest.mark.parametrize("lang", ["en", "zh"])
def test_the_check_brings_its_own_person(lang, tmp_path, monkeypatch):
    """The kind reply is about this person's trouble. Who sorted the file of people, or wrote another
    one into its first line, had a check of something else."""
    simulator = simulator_of(None, lang)
    person = user_of_check(simulator).values()
    place = shutil.copytree(PROMPTS, tmp_path / "prompts")
    path = place / "profiles" / f"{lang}_train.jsonl"
    path.write_text("\n".join(path.read_text("utf-8").splitlines()[::-1]), "utf-8")
    monkeypatch.setattr("players.check.PROMPTS", place)
    assert user_of_check(simulator).values() == person


@pytest.mark.parametrize(
    "changes, temperature, doubt",
    [
        ((6, -8, 6), 0, None),
        ((4, 4, 4), 0, "kind reply moves its user by +4, a cruel one by +4."),
        ((-3, 2, -3), 0, "kind reply moves its user by -3, a cruel one by +2."),
        ((6, -8, 5), 0, "the same reply moves its user by +6 and by +5."),
        ((6, -8, 5), 1, None),  # a sample
        ((6, None, 6), 0, "3 answers could not be read: not one JSON object"),
    ],
)
def test_a_model_that_does_not_tell_kind_from_cruel_is_named_before_a_run(
    changes, temperature, doubt, tmp_path, capsys
):
    """The first real model that was asked answered every reply with +4, and nothing said so. A
    doubt is no end: the run is the user's decision. A log that knows the answers is not asked: they
    say nothing about the model of today."""
    answers = [[feeling(change)] if change is not None else ["Hm."] * 3 for change in changes]
    model = Model(2 * sum(answers, []))
    model.temperature = temperature
    checked = simulator_of(model, log=CallLog(tmp_path / "calls.jsonl"))
    for _ in range(1 if None in changes else 2):
        asyncio.run(check(checked))
    assert len(model.prompts) == (4 if None in changes else 6) and not checked.caller.log.answers
    said = " ".join(capsys.readouterr().out.split())
    assert ("warning" in said) == ("python -m tools.fitness" in said) == bool(doubt)
    assert doubt is None or doubt in said


def cut(text):
    """An answer that the limit of tokens has ended."""
    return Answer(text, is_cut=True, problem=CUT)


def test_an_answer_that_was_cut_is_asked_for_twice_more(tmp_path):
    """A small model may go on for ever inside of a string. Each such answer costs the limit, so it
    is not asked for as often as one that is unreadable otherwise; the log has what was said."""
    prompts = []

    async def rambles(prompt, schema):
        prompts.append(prompt)
        return cut('{"content": "and so on and so on')

    log = CallLog(tmp_path / "calls.jsonl")
    user = User(simulator_of(rambles, log=log), toy_profiles("train", 1)[0])
    with pytest.raises(UnreadableAnswers, match="3 answers could not be read: cut by the limit"):
        asyncio.run(user.feel("Hello."))
    assert [user.simulator.complaint in prompt for prompt in prompts] == [False, True, True]
    logged = [row["answer"] for _, row, _ in read_jsonl(log.path)]
    assert logged == ['{"content": "and so on and so on'] * 3


@pytest.mark.parametrize(
    "answer, thinks",
    [
        (Answer("{}"), False),
        (Answer("```json {}```"), False),
        (Answer("<think>hm</think>{}"), True),
        (cut("<think>first I"), True),
        (cut("First I"), True),  # a chat template may have opened the thought
        (cut('{"content": "and so'), False),
        (cut(""), True),
    ],
)
def test_a_model_that_thinks_is_known_by_its_answer(answer, thinks):
    """It has a limit of its own, because its thought counts, too."""
    assert answer.thinks == thinks


def test_a_model_in_this_process_has_what_is_left_of_its_context():
    """For its answer, and at most as many tokens as an answer may have; more once it was seen to
    think. A prompt that leaves nothing is refused."""
    lengths = []

    class Engine:
        async def generate(self, ids, max_tokens, rng, key):
            lengths.append(max_tokens)
            return [7, 0] if max_tokens < 100 else [7], None

    chat = SimpleNamespace(first_prompt=list, opening=[], stop_ids={0}, decode=str)
    for context in (10**6, 100, 3):
        model = LocalModel("small", Engine(), chat, context)
        if context > 3:
            for _ in range(2):
                answer = asyncio.run(model("abc"))
                assert answer.text == "[7]" and answer.is_cut == (context > 100)
        else:
            with pytest.raises(PromptRefused, match="3 tokens does not fit its context of 3"):
                asyncio.run(model("abc"))
    assert lengths == [MAX_ANSWER_TOKENS, MAX_THINKING_TOKENS, 97, 97]


def test_an_answer_of_a_model_in_this_process_depends_on_its_call_alone(tiny_dir):
    """All calls drew from one generator: a resumed run, which asks less, got other answers."""
    model = load_local(str(tiny_dir), 1.0)
    model.context = len(model.chat.first_prompt("Hello.")) + 9

    def answers(*keys):
        async def ask():
            caller = Caller(model)
            return await asyncio.gather(*[caller.call("Hello.", None, key) for key in keys])

        return dict(zip(keys, asyncio.run(ask())))

    both = answers("a1", "b2")
    assert both == answers("b2", "a1") == answers("a1") | answers("b2")
    assert both["a1"].text != both["b2"].text


def test_a_prompt_that_is_refused_costs_its_dialogue_once_the_model_was_checked():
    """A 400, a content filter, a context that is full: all three hang on what was said. If one of
    them ended the run, a policy could end it."""

    class Picky(Model):
        async def __call__(self, prompt, schema=None):
            if "bomb" in prompt:
                raise PromptRefused("400: such words")
            return await super().__call__(prompt)

    user = user_of(Picky())
    asyncio.run(check(user.simulator))
    assert asyncio.run(user.feel("Hello."))[1] == 7
    with pytest.raises(UnreadableAnswers, match="such words"):
        asyncio.run(user.feel("bomb"))


def test_the_clock_counts_what_the_gpu_waits_for_the_user(monkeypatch):
    """Seconds with a call in flight and no sampling. Calls overlap, so their durations must not add
    up; an idle second and a second of sampling are not the user's."""
    now = [0]
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    ours = clock.Clock()
    now[0] += 1  # nothing at all
    with ours.during("calls"):
        now[0] += 2  # counts
        with ours.during("calls"):
            now[0] += 4  # two calls at once: counts once
            with ours.during("samplers"), ours.during("samplers"):
                now[0] += 8  # the GPU is at work
        now[0] += 16  # counts
    now[0] += 32  # nothing
    with ours.during("samplers"):
        now[0] += 64  # no call

    async def fails(prompt, schema):
        now[0] += 128  # counts, and a failed call is over
        raise SimulatorFailed

    user = User(simulator_of(fails, clock=ours), toy_profiles("train", 1)[0])
    with pytest.raises(SimulatorFailed):
        asyncio.run(user.answer())
    now[0] += 256
    ours.tick()
    assert ours.simulator == 2 + 4 + 16 + 128
