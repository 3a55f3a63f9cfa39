"""The simulator that all users share: bounded retries, the log of calls, the check before the first
dialogue, the clock; and that a recorded dialogue can be replayed.

"Defect N" is a line of docs/differences.md of what the released code does.
"""

from support import llm
from support.answers import (
    mark_in,
)
from support.errors import (
    BadInput,
    SimulatorFailed,
    SimulatorRefused,
    TooManyLost,
    UnreadableAnswers,
)
from support.llm import CallLog, Clock, PromptRefused, RetryableError

import asyncio
import json
import random
from types import SimpleNamespace

import pytest

import simulator
from marks import LIN, Model, analysis, spoken, user_of, write
from policy import Reply
from rlver import converse
from simulator import (
    Profile,
    Simulator,
    User,
    parse_reply,
    toy_profiles,
)
from tools.replay import consistency
from toy import world


def test_an_example_by_hand():
    """Two calls a turn: one asks how the user feels, one what it says. The first answer here cannot
    be read, so the question is put once more."""
    model = Model(["I would rather not say.", analysis("+5")], [spoken("Go on.")])
    user = user_of(model)
    _, change, _ = asyncio.run(user.feel("I am here."))
    assert change == 5 and user.emotion == 35 and len(model.prompts) == 2
    assert asyncio.run(user.answer()) == "Go on." and len(model.prompts) == 3
    assert user.dialogue == [
        {"speaker": "friend", "text": "I am here."},
        {"speaker": "me", "text": "Go on."},
    ]


def test_an_unreadable_answer_is_taken_from_the_log_only_on_the_way_to_a_readable_one(tmp_path):
    """A run that stopped for unreadable answers stopped again at every --resume, however well the
    server was: it found them in its log."""
    path, heard = tmp_path / "calls.jsonl", []

    def user_with(*answers):
        model = Model(list(answers))
        heard.append(model.prompts)
        log = CallLog(path)
        if path.exists():
            log.read(path)
        return User(Simulator(model, retries=1, log=log), Profile(**LIN))

    with pytest.raises(UnreadableAnswers):
        asyncio.run(user_with("no", "no").feel("Hello."))
    # asked anew, from the first attempt on; the log now ends in a readable one
    assert asyncio.run(user_with("no", analysis("-2")).feel("Hello."))[1] == -2
    assert asyncio.run(user_with("not asked").feel("Hello."))[1] == -2
    assert list(map(len, heard)) == [2, 2, 0]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 4 and all(len(row["mark"]) == 4 for row in rows)
    assert rows[3]["mark"] == mark_in(heard[1][1]) and f"End {rows[3]['mark']}" in rows[3]["answer"]


def test_a_model_that_cannot_keep_the_form_is_told_before_the_first_dialogue():
    """One that cannot copy four letters cannot play a user. A server that does not answer is
    another matter: it may come back."""

    def check(model):
        asyncio.run(Simulator(model, retries=4, wait=0.001).check())

    keeps, asked = Model(), []
    check(keeps)
    assert len(keeps.prompts) == 1 and simulator.CHECK_REPLY in keeps.prompts[0]

    async def forgets(prompt):
        asked.append(prompt)
        return analysis("+3")

    async def away(prompt):
        raise RetryableError("nobody there")

    async def refuses(prompt):
        raise PromptRefused("400: too long")

    with pytest.raises(BadInput, match="cannot keep the form"):
        check(forgets)
    assert len(asked) == 3  # and not five
    with pytest.raises(TooManyLost, match="nobody there"):
        check(away)
    with pytest.raises(SimulatorRefused, match="too long"):
        check(refuses)


def test_a_model_in_this_process_is_given_up_sooner():
    """One that cannot keep the form mostly does not stop either, and each of its answers takes a
    minute on a laptop. So in the check a cut answer is not asked for again with four times the
    room, and there is one more attempt, not two. (In a dialogue both are as for a server.)"""
    lengths = []

    class NeverStops:
        async def generate(self, ids, max_tokens, rng, key):
            lengths.append(max_tokens)
            return [7] * max_tokens, None

    chat = SimpleNamespace(first_prompt=list, opening=[], stop_id=0, decode=lambda ids: "and so on")
    model = llm.LocalModel("small", NeverStops(), chat, context=10**6, rng=None)
    with pytest.raises(BadInput, match="small cannot keep the form"):
        asyncio.run(Simulator(model, retries=8).check())
    assert lengths == [1024, 1024]
    lengths.clear()
    with pytest.raises(UnreadableAnswers):
        asyncio.run(User(Simulator(model, retries=1), Profile(**LIN)).feel("I am here."))
    assert lengths == [1024, 4096, 1024, 4096]


def test_a_prompt_that_is_refused_costs_its_dialogue_once_the_model_was_checked():
    """A 400, a content filter, a context that is full: all three hang on what was said. If one of
    them ended the run, a policy could end it."""

    class Picky(Model):
        async def __call__(self, prompt):
            if "bomb" in prompt:
                raise PromptRefused("400: such words")
            return await super().__call__(prompt)

    user = user_of(Picky())
    asyncio.run(user.simulator.check())
    assert asyncio.run(user.feel("Hello."))[1] == 7
    with pytest.raises(UnreadableAnswers, match="such words"):
        asyncio.run(user.feel("bomb"))


def test_unreadable_answers_are_asked_for_again_and_then_given_up():
    """Defect 17: the released code asks for ever, and a run hangs on one stubborn answer. Here the
    tries are counted."""

    def ask(user, hop):
        asyncio.run(user.feel("hello") if hop == "emotion" else user.answer())

    for hop, good in {"emotion": analysis("+4"), "reply": spoken("Hm.")}.items():
        model = Model(**{hop: ["I would rather not say.", good]})
        user = user_of(model)
        ask(user, hop)
        assert len(model.prompts) == 2 and model.prompts[0] != model.prompts[1]
        assert user.emotion == (34 if hop == "emotion" else 30) and len(user.dialogue) == 1
        for attempts in (1, 3):
            model = Model(**{hop: ["Change: +10 is what I was told to say."]})
            user = user_of(model)
            user.simulator.retries = attempts - 1
            with pytest.raises(SimulatorFailed, match=hop):
                ask(user, hop)
            assert len(model.prompts) == attempts and user.emotion == 30  # nothing was guessed


def test_the_clock_counts_what_the_gpu_waits_for_the_user(monkeypatch):
    """Seconds with a call in flight and no sampling. Calls overlap, so their durations must not add
    up; an idle second and a second of sampling are not the user's."""
    now = [0]
    monkeypatch.setattr(llm, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    clock = Clock()
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
    with pytest.raises(OSError), clock.during("calls"):
        now[0] += 128  # counts, and a failed call is over
        raise OSError
    now[0] += 256
    clock.tick("calls", 0)
    assert clock.simulator == 2 + 4 + 16 + 128

    async def model(prompt):
        now[0] += 1000
        return "?"

    with pytest.raises(SimulatorFailed):
        asyncio.run(
            Simulator(model, retries=1, clock=clock).ask(
                "reply", user_of(None).values(), parse_reply
            )
        )
    assert clock.simulator == 150 + 2 * 1000


def test_a_recorded_dialogue_replays_to_the_same_emotions(tmp_path):
    """What makes the reward verifiable: put the recorded replies to the user again, in the dialogue
    as it was, and the same emotions come out. A record with another emotion in it is found."""
    profile, heard = toy_profiles("heldout", 1)[0], []
    scene, scripted = world.read_scene(profile.scene, profile.task), world.ScriptedModel()
    acts = [scene.need, "topic", scene.need, "cheer", scene.need]

    async def model(prompt):
        if "<emotion_level>" not in prompt and simulator.CHECK_REPLY not in prompt:
            heard.append(prompt)
        return await scripted(prompt)

    async def reply(line):
        turn = len(heard)
        text = world.random_sentence(acts[turn], scene.person, scene.feeling, random.Random(turn))
        text = text.replace(" ", "\u2028", 1)  # still one line
        # the last one is malformed: never sent, never replayed
        return Reply(text, text, "", turn == 4)

    async def dialogue():
        user = User(Simulator(model), profile)
        return await converse(
            SimpleNamespace(reply=reply, segments=[]), user, await user.answer(), 8
        )

    episode = asyncio.run(dialogue())
    recorded = list(heard)
    row = {"profile_id": profile.id, "first_line": episode.first_line, "turns": episode.turns}
    rows = [row, row]
    heard.clear()
    path = write(tmp_path / "dialogues.jsonl", *rows)

    def shares():
        result = consistency(path, Simulator(model), {profile.id: profile})
        return [result[key] for key in ("turns", "emotion", "dialogues", "final")]

    assert shares() == [8, 1, 2, 1]
    assert heard == recorded * 2 and len(recorded) == 4
    rows[1] = json.loads(json.dumps(rows[1]))
    rows[1]["turns"][3]["emotion"] += 1
    write(path, *rows)
    assert shares() == [8, 7 / 8, 2, 1 / 2]
    with pytest.raises(BadInput, match="line 1: profile"):
        consistency(path, Simulator(model), {})
