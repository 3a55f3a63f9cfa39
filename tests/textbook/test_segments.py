"""Segments and episodes: a thinking reply cut in two, whose token is whose, what later turns see of
a reply, and how much of it fits into the context.
"""

from models.engine import TorchEngine

import asyncio

import numpy as np
import pytest

from agents import LINES, THOUGHTS, Recorder, episode_of, gossip, sampled, speak
from policy import pack
from rollout import Agent, split_thought, tokens_sampled


@pytest.mark.parametrize(
    "text, thought, visible, malformed",
    [
        ("<think>a</think>b", "a", "b", False),
        ("\n <think>\na\n\nb </think>\n\n c < d > \n", "a\n\nb", "c < d >", False),
        ("<think></think>b", "", "b", False),
        ("a</think>b", "a", "b", True),  # no opening
        ("<think>a", "a", "", True),  # cut in the thought: it must not be sent as a reply
        ("b", "b", "", True),  # no tags
        ("<think>a</think> \n ", "a", "", True),  # nothing visible
        ("Well, <think>a</think>b", "Well, <think>a", "b", True),  # something before the thought
        ("<think><think>a</think>b", "<think>a", "b", True),  # twice
        ("<think>a</think>b</think>c", "a", "b</think>c", True),
        ("</think>a<think>b", "", "a<think>b", True),  # the wrong way round
        ("", "", "", True),
    ],
)
def test_split_thought(text, thought, visible, malformed):
    """Defect 26: the released code checks nothing, so a reply without </think> goes to the user
    whole, thoughts and all. A reply that the token limit cut is judged like any other: by whether
    its thought is closed and something visible follows."""
    assert split_thought(text) == (thought, visible, malformed)


def test_direct_history_is_what_was_said_and_a_cut_reply_is_closed_by_us(chat, tiny_model):
    """One causal sequence, and who wrote what in it. The stop token that the policy sampled is its
    action; one that we put behind a reply which the limit cut is an observation, or the policy
    would be trained on what it never did."""
    stop = [chat.stop_id]
    texts = [
        chat.text("I am here.") + stop,
        chat.text("Take your time, I am all ears."),
        chat.text(" Why? ") + stop,
    ]
    limit = max(len(texts[0]), len(texts[2]))
    engine = TorchEngine(tiny_model, chat.stop_ids)
    agent, replies = speak(engine, chat, texts, think=False, max_tokens=limit)
    cut = texts[1][:limit]
    assert [s.ids for s in agent.segments] == [
        chat.first_prompt(LINES[0]),
        texts[0],
        chat.next_prompt(LINES[1]),
        cut,
        stop,
        chat.next_prompt(LINES[2]),
        texts[2],
    ]
    own = [s.log_probs is not None for s in agent.segments]
    assert own == [False, True, False, True, False, False, True]
    assert agent.trunk == sum((s.ids for s in agent.segments), [])
    assert {s.branch for s in agent.segments} == {0} and cut != texts[1]
    said = [("I am here.", "I am here."), (chat.decode(cut), chat.decode(cut)), (" Why? ", "Why?")]
    assert [(r.text, r.visible) for r in replies] == said


def test_a_thought_is_trained_but_never_remembered(chat, tiny_model):
    """What a thought leaves behind: later turns see the visible text, encoded once, and no thought.
    It is not a slice of the sampled ids: here "</think>I" ends in the token ">I". And a malformed
    reply leaves nothing behind but its own branch."""
    stop = [chat.stop_id]
    texts = [chat.text(t) + stop for t in THOUGHTS] + [chat.text("no thought at all") + stop]
    agent, replies = speak(TorchEngine(tiny_model, chat.stop_ids), chat, texts, think=True)
    trunk = []
    for line, reply in zip(LINES, replies):
        prompt = chat.next_prompt(line) if trunk else chat.first_prompt(line)
        trunk += prompt + (chat.text(reply.visible) + stop) * (not reply.malformed)
    assert [r.visible for r in replies[:3]] == [
        "I am here.",
        "Take your time.",
        "Why?",
    ] and replies[3].malformed
    assert agent.trunk == trunk == sum((s.ids for s in agent.segments if s.branch == 0), [])
    assert "think" not in chat.decode(trunk) and "lonely" not in chat.decode(trunk)
    assert [(s.ids, s.branch) for s in agent.segments if s.log_probs is not None] == [
        (t, k + 1) for k, t in enumerate(texts)
    ]
    assert all(s.branch == 0 for s in agent.segments if s.log_probs is None)
    seen = chat.text("I am here.")
    assert seen not in [texts[0][i : i + len(seen)] for i in range(len(texts[0]))]


def test_the_mask_is_born_where_the_token_is_born(chat, tiny_model):
    """A mask by where tokens came from: not `ids != pad` and not `ids != stop`. A pad token that
    the policy sampled is trained; one that fills the row is not. The stop tokens of the scaffold
    are not, the sampled ones are: three of the projects read for this one mask them, and their
    policies never learn when to be silent."""
    pad, stop = 0, chat.stop_id  # 0: as `pack` fills the rows
    engine = TorchEngine(tiny_model, chat.stop_ids)
    texts = [[pad, 40, pad, stop], [pad, pad, stop]]
    episodes = [episode_of(speak(engine, chat, texts[:n], think=False)[0].segments) for n in (2, 1)]
    batch = pack(episodes)
    policys = [ids[mask].tolist() for ids, mask in zip(batch.ids, batch.action_mask)]
    assert policys == [texts[0] + texts[1], texts[0]]
    assert batch.ids[0][~batch.action_mask[0]].tolist().count(stop) == 3
    assert batch.ids[1, -1] == pad


@pytest.mark.parametrize("think", [False, True])
def test_what_was_sampled_is_what_is_kept(think, chat, tiny_model):
    """Defect 23: ids and log-probs as the engine returned them, to the last one; and nothing else
    has log-probs."""
    engine = Recorder(tiny_model, chat.stop_ids)
    (episode,) = gossip(engine, chat, 1, think=think, max_tokens=12)
    assert [(s.ids, s.log_probs) for s in sampled(episode)] == engine.returned
    assert len(engine.returned) == 3
    assert tokens_sampled(episode.segments) == sum(len(ids) for ids, _ in engine.returned)
    # text would not have done
    assert any(chat.text(chat.decode(ids)) != ids for ids, _ in engine.returned)


@pytest.mark.parametrize("think", [False, True])
def test_the_engine_knows_a_dialogue_by_its_own_key(think, chat, tiny_model):
    """Three dialogues at once, three turns each. Under keys of their own each reads its trunk once,
    as it grows; without one, or all under the same, every turn reads everything again."""
    engine = Recorder(tiny_model, chat.stop_ids)
    episodes = gossip(engine, chat, 3, think=think)
    assert (
        0
        < sum(engine.read)
        <= sum(len(s.ids) for e in episodes for s in e.segments if s.branch == 0)
    )


def test_the_room_in_the_context_is_counted_in_tokens(chat, tiny_model):
    """Defect 24: the released code compares characters with a limit of tokens. Here a prompt that
    does not fit is seen before anything is changed, the dice included, and a reply gets the room
    there is."""
    engine = TorchEngine(tiny_model, chat.stop_ids)

    def talk(context, *lines):
        agent = Agent(engine, chat, think=False, max_tokens=5, context=context, seed=0)
        replies = [asyncio.run(agent.reply(line)) for line in lines]
        return replies, [s.ids for s in agent.segments], agent.rng.bit_generator.state

    line = "\N{FACE WITH TEARS OF JOY}" * 40  # few characters, many tokens
    size = len(chat.first_prompt(line))
    assert size > len(chat.decode(chat.first_prompt(line)))
    assert talk(size + 1, line) == ([None], [], np.random.default_rng(0).bit_generator.state)
    _, segments, _ = talk(size + 2, line)
    # one token, and the stop token that it did not get to
    assert [len(ids) for ids in segments] == [size, 1, 1]
    (reply,), *after_one = talk(size + 6, line)
    assert reply and talk(size + 6, line, "Yes.") == ([reply, None], *after_one)
