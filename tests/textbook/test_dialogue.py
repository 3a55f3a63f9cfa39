"""The dialogue and the rollout: who hears what, who is scored by whom, and how it ends. Users here
are real ones over a small model of our own, so that every call can be counted; agents say by heart
what the test wants said."""

import asyncio
import json
import random
import re
from collections import Counter
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import pytest

from answering import coded, feeling, saying, simulator_of
from emotion import BENCHMARK, TRAINING
from people import Profile
from rollout import Reply, converse, rollout, split_thought
from scripted import Agent
from simulator import User


def thinking(text):
    """The Reply of a thinking policy that sampled `text`."""
    return Reply(text, *split_thought(text))


def told(prompt):
    """What was said so far, as the model sees it."""
    return json.loads(re.search(r"<dialogue>\n(.*)\n</dialogue>", prompt, re.S)[1])


class Model:
    """Behind all users. A reply moves the emotion by the number that it begins with; one that ends
    in "bye" is answered with a goodbye. Every call takes its own while, as calls to a server do, so
    dialogues get out of step."""

    def __init__(self):
        self.prompts, self.rng = [], random.Random(0)

    async def __call__(self, prompt, schema=None):
        self.prompts.append(prompt)
        for _ in range(self.rng.randrange(4)):
            await asyncio.sleep(0)
        last = told(prompt)[-1]["text"] if told(prompt) else ""
        if "<emotion_level>" not in prompt:
            return coded(prompt, feeling(int(last.split()[0]), analysis=f"it said <{last}>"))
        if last.endswith("bye"):
            return coded(prompt, saying("Goodbye.", goodbye=True))
        me = re.search(r"person-\d+", prompt).group()
        return coded(prompt, saying(f"{me} speaks, having heard <{last}>"))


def person(k):
    return Profile(f"p-{k}", f"person-{k}", "scene", "passive", [], "theme")


def hold(replies, max_turns=8, model=None):
    """One dialogue with person-0. Returns (episode, agent, model)."""
    model, agent = model or Model(), Agent(replies)
    user = User(simulator_of(model), person(0))
    episode = asyncio.run(
        converse(agent, user, "First line.", replace(TRAINING, max_turns=max_turns), group=3)
    )
    return episode, agent, model


# ------------------------------------------------------------------------------------- one dialogue


@pytest.mark.parametrize("max_turns", [1, 2, 8])
def test_the_turn_limit_is_exact_and_every_reply_is_scored(max_turns):
    """Defect 4: the released loop, told 8, lets the policy speak nine times. And a last reply that
    nobody scores would be trained on the emotion before it."""
    episode, agent, model = hold(cycle(["+1 hm"]), max_turns)
    assert len(episode.turns) == len(agent.heard) == max_turns
    assert [t.change for t in episode.turns] == [1] * max_turns
    assert [t.emotion for t in episode.turns] == [31 + i for i in range(max_turns)]
    final = 30 + max_turns
    assert (episode.ended, episode.emotion, episode.reward) == ("turn_limit", final, final / 100)
    # nobody pays for an answer unheard
    assert len(model.prompts) == 2 * max_turns - 1 and episode.turns[-1].user is None


# replies, how it ends, final emotion, replies that were scored, calls to the user's model
ENDINGS = {
    "goodbye": (["+5 a", "+5 b", "-2 bye", "+9 never said"], "goodbye", 38, 3, 6),
    "emotion at 100": (["+10 a"] * 9, "emotion_max", 100, 7, 13),
    "emotion clamped at 0": (["-7 a"] * 9, "emotion_min", 0, 5, 9),
    "turn limit before goodbye": (["+1 a"] * 7 + ["+1 bye"], "turn_limit", 38, 8, 15),
    "limits at once": (["+9 a"] * 7 + ["+10 a", "+9 never said"], "emotion_max", 100, 8, 15),
    # in brackets: of a policy that should think
    "malformed": (["+10 a", ("+10 no thought",)], "malformed", 0, 1, 2),
    "context": (["+5 a", "+5 b", None], "context", 40, 2, 4),
}


@pytest.mark.parametrize("name", ENDINGS)
def test_how_a_dialogue_ends(name):
    """The design's table of endings. The reward is the last emotion over 100, once; 0 if malformed;
    the current one if the context is full; and there is one reward for a turn limit too, observed,
    so nothing is bootstrapped."""
    replies, ended, emotion, scored, calls = ENDINGS[name]
    episode, agent, model = hold(
        [thinking(*reply) if isinstance(reply, tuple) else reply for reply in replies]
    )
    assert (episode.ended, episode.emotion, episode.reward) == (ended, emotion, emotion / 100)
    assert sum(t.emotion is not None for t in episode.turns) == scored
    assert len(model.prompts) == calls and episode.segments == agent.segments
    begun = (episode.profile_id, episode.first_line, episode.group)
    assert begun == ("p-0", "First line.", 3)


def test_the_benchmark_starts_and_ends_where_its_user_does():
    """The benchmark begins at 40, not at training's 30; and it gives a dialogue up below 10,
    training at 0: a floor of 9 ends it at 9, and not at 10. With training's rule the worst
    dialogues would go on, and some would be saved that the benchmark counts as lost."""
    for replies, ended, emotion, turns in (
        ([None], "context", 40, 0),
        (["-10 a"] * 3 + ["-1 b", "+9 never said"], "emotion_min", 9, 4),
        (["-10 a"] * 3 + ["+10 b", "+1 c bye"], "goodbye", 21, 5),
    ):
        user = User(simulator_of(Model()), person(0), emotion=40)
        episode = asyncio.run(converse(Agent(replies), user, "Hi.", BENCHMARK))
        assert (episode.ended, episode.emotion, len(episode.turns)) == (ended, emotion, turns)
        assert episode.reward == emotion / 100


def test_a_malformed_reply_is_logged_and_never_sent():
    """RLVER 2.3: zero reward, and the dialogue is over. The released code checks nothing (defect
    26): a reply without </think> goes to the user, thoughts and all."""
    for text in (
        "+9 plain secret",
        "<think>+9 secret",
        "<think>a</think><think>secret</think>+9 b",
    ):
        episode, _, model = hold(["+10 fine", thinking(text), "+9 never said"])
        assert episode.reward == 0 and "secret" not in "".join(model.prompts)
        assert episode.turns[-1].reply == text  # as sampled: one should see why it got 0
        logged = [
            getattr(episode.turns[-1], key) for key in ("user", "analysis", "change", "emotion")
        ]
        assert logged == [None] * 4


def test_thoughts_never_reach_the_user():
    """A user that could read thoughts would reward them. They are in the log, and in no prompt of
    any call."""
    episode, _, model = hold(
        [thinking(f"<think>\nsecret {i}\n</think>\n+3 word {i}") for i in range(8)]
    )
    prompts = "".join(model.prompts)
    assert "secret" not in prompts and "<think" not in prompts and "+3 word 7" in prompts
    assert [(t.thought, t.reply) for t in episode.turns] == [
        (f"secret {i}", f"+3 word {i}") for i in range(8)
    ]


def test_the_policy_hears_what_the_user_said_and_nothing_else():
    """The policy gets the user's Response alone, not its Thinking; and each turn's own."""
    episode, agent, model = hold(["+1 a", "+1 b", "+1 c bye"])
    assert agent.heard == [
        "First line.",
        "person-0 speaks, having heard <+1 a>",
        "person-0 speaks, having heard <+1 b>",
    ]
    assert [t.user for t in episode.turns] == [*agent.heard[1:], "Goodbye."]
    # the log can be checked against
    assert all(f"it said <{t.reply}>" in t.analysis for t in episode.turns)


# -------------------------------------------------------------------------------------- the rollout


def crowd(people, group_size, script, model=None, bar=None):
    """A rollout with `people` users. Agent i says script(i). Returns (episodes, dropped, agents,
    model)."""
    model, agents = model or Model(), {}

    def make_agent(i):
        assert i not in agents  # every dialogue has an agent, and an rng, of its own
        agents[i] = Agent(script(i))
        return agents[i]

    everybody = {k: person(k) for k in range(people)}
    episodes, errors = asyncio.run(
        rollout(simulator_of(model), everybody, group_size, make_agent, bar=bar)
    )
    return episodes, len(errors), agents, model


class Cat:
    """A stranger's user: who it is, an emotion, and what `converse` and `rollout` call."""

    def __init__(self, profile, emotion):
        self.profile, self.emotion = profile, emotion

    async def feel(self, reply):
        change = 9 if "fish" in reply else -9
        self.emotion += change
        return f"I heard {reply}", change

    async def answer(self):
        return "Meow.", self.emotion > 40

    def copy(self, name):
        return Cat(self.profile, self.emotion)


def test_anybody_can_be_the_user():
    """Two methods, an emotion, and an id; nothing here knows prompts or models."""
    makes_cats = SimpleNamespace(user=lambda profile, start, name: Cat(profile, start))
    cats = {k: SimpleNamespace(id=f"cat-{k}") for k in range(2)}
    said = {0: ["Some fish?"] * 5, 1: ["No."] * 5, 2: ["fish", "No."] * 3, 3: ["fish"]}
    rolled = rollout(
        makes_cats, cats, 2, lambda number: Agent(said[number]), replace(TRAINING, max_turns=5)
    )
    episodes, dropped = asyncio.run(rolled)
    assert not dropped and [e.profile_id for e in episodes] == ["cat-0"] * 2 + ["cat-1"] * 2
    assert [e.ended for e in episodes[:3]] == ["goodbye", "emotion_min", "turn_limit"]
    assert [e.emotion for e in episodes[:3]] == [48, -6, 39]
    assert episodes[0].turns[1].analysis == "I heard Some fish?"


def uneven(i):
    """Agent i moves its user by i - 3 a reply and makes it leave after one to eight of them, or
    never."""
    return [f"{i - 3:+d} agent-{i}, turn {t}" + " bye" * (t == i * 7 % 9) for t in range(8)]


@pytest.mark.parametrize("people, group_size", [(8, 1), (3, 4)])
def test_every_dialogue_keeps_its_own_user_while_others_end(people, group_size):
    """Defect 1: the released rollout finds a user by its place in the list of unfinished dialogues;
    when one ends, each later reply goes to a neighbour's user, and rewards are mixed up. Defect 2:
    it reads one user's emotion to stop another. Here the dialogues end after one to eight turns,
    and each prompt must hold one person, one agent, and what these two said."""
    episodes, dropped, agents, model = crowd(people, group_size, uneven)
    assert dropped == 0 and len({len(e.turns) for e in episodes}) >= 4
    for prompt in model.prompts:
        spoken = told(prompt)
        k = int(re.search(r"person-(\d+)", prompt)[1])
        assert set(re.findall(r"person-(\d+)", prompt)) == {str(k)}
        agent = {int(i) for i in re.findall(r"agent-(\d+)", prompt)}
        assert len(agent) == (len(spoken) > 1) and all(i // group_size == k for i in agent)
        # me, friend, me, ...; nothing missing, nothing twice
        for turn, message in enumerate(spoken):
            assert message["speaker"] == ("friend" if turn % 2 else "me")
            assert turn % 2 == 0 or message["text"] == uneven(*agent)[turn // 2]
    for i, e in enumerate(episodes):
        n, k = len(e.turns), i // group_size
        assert (e.profile_id, e.group) == (f"p-{k}", k) and e.segments is agents[i].segments
        assert [t.reply for t in e.turns] == uneven(i)[:n]
        assert e.emotion == 30 + n * (i - 3) and e.reward == e.emotion / 100
        assert all(f"person-{e.group} " in line for line in agents[i].heard)


def test_a_group_shares_one_first_line_and_no_call_is_wasted():
    """Defect 19: the released constructor and every clone ask the model for a line and throw it
    away. A group has one first line, asked for once; a dialogue of T turns asks T times how it
    feels and, but for a last turn, T times what to say."""
    episodes, _, agents, model = crowd(3, 4, uneven)
    assert Counter(re.search(r"person-(\d+)", p)[1] for p in model.prompts if not told(p)) == {
        "0": 1,
        "1": 1,
        "2": 1,
    }
    for i, e in enumerate(episodes):
        assert e.first_line == agents[i].heard[0] == f"person-{e.group} speaks, having heard <>"
    assert {e.ended for e in episodes} == {"goodbye", "turn_limit"}
    assert len(model.prompts) == 3 + sum(
        2 * len(e.turns) - (e.ended != "goodbye") for e in episodes
    )


def test_a_slow_user_holds_up_its_own_dialogue_only():
    """Defect 18: calls one after the other, or turn by turn for all, make every dialogue as slow as
    the slowest user. Here the model does not give person-1's first line before the dialogues with
    the others are over, but for one of them, in which it waits until it is the last; if they waited
    for it, nobody would ever be done."""
    finished = []

    class Slow(Model):
        async def __call__(self, prompt, schema=None):
            others = 0
            if "person-1" in prompt and not told(prompt):
                others = 3
            elif "agent-0" in prompt:
                others = 5
            for _ in range(10_000):  # passes of the event loop, not seconds
                if len(finished) >= others:
                    return await super().__call__(prompt)
                await asyncio.sleep(0)
            pytest.fail("the other dialogues wait for the slow one")

    class Bar:
        def update(self):
            finished.append(None)

    episodes, dropped, *_ = crowd(3, 2, lambda i: [f"+2 agent-{i}"] * 8, Slow(), bar=Bar())
    assert not dropped and [(len(e.turns), e.emotion) for e in episodes] == [(8, 46)] * 6
    assert [e.group for e in episodes] == [0, 0, 1, 1, 2, 2]  # in order, whoever ends first


class Deaf(Model):
    """Gives no readable answer once `trigger` is in the prompt."""

    def __init__(self, trigger):
        super().__init__()
        self.trigger = trigger

    async def __call__(self, prompt, schema=None):
        return "I can not say." if self.trigger in prompt else await super().__call__(prompt)


def test_a_user_that_fails_costs_its_own_dialogue():
    """Defect 17: the released code asks for ever. Here the dialogue leaves the batch and is
    counted, no score is guessed, and its neighbours, of the same group too, do not notice."""
    whole = crowd(3, 2, uneven)[0]
    del whole[2]
    for trigger in ("agent-2, turn 0", "agent-2, turn 2"):
        episodes, dropped, *_ = crowd(3, 2, uneven, Deaf(trigger))
        assert dropped == 1
        assert [(e.group, e.turns) for e in episodes] == [(e.group, e.turns) for e in whole]


def test_a_first_line_that_fails_costs_its_group():
    """Without a first line there is nothing to reply to: all dialogues of the group are dropped and
    counted, the others are held."""
    episodes, dropped, agents, _ = crowd(3, 4, uneven, Deaf("person-1"))
    assert dropped == 4 and [e.group for e in episodes] == [0] * 4 + [2] * 4
    assert sorted(agents) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert crowd(2, 3, uneven, Deaf("person"))[:2] == ([], 6)


def test_a_dialogue_without_a_policy_token_is_dropped():
    """A first prompt that does not fit the context leaves nothing to train: as an episode it would
    be a row without a reward's place, and would still weigh in the statistics of its group."""
    episodes, dropped, *_ = crowd(2, 2, lambda i: [None] if i == 1 else ["+5 a", None])
    assert dropped == 1
    assert [(e.ended, e.reward) for e in episodes] == [("context", 0.35)] * 3
