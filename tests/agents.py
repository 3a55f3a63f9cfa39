"""Dialogues of the agent for tests: lines and thoughts, an engine that notes what it does, dice
that make it say certain words, and the yardstick to compare with: one row for each turn.

Random policies do not think well-formed thoughts. Where a test needs certain words said, the engine
is real and the dice are loaded.
"""

from models.engine import TorchEngine

import asyncio

import torch

from rollout import Agent, Episode, Segment, Turn

LINES = [
    "My sister forgot my birthday.",
    "I feel hurt, and I do not know why I should be the one to say sorry.",
    "Yes.",
    "Take your time, it is long: she read my diary, she sold my "
    "bike, she laughed at my plan, and I said nothing at all.",
]


THOUGHTS = [
    "<think>hurt, wants ears</think>I am here.",
    "<think>\nlonely?\n</think>\n\n Take your time. ",
    "<think>x</think>Why?",
]


class Recorder(TorchEngine):
    """The real engine, with a list of what it returned and of how many tokens it read for each
    reply's first token."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.returned, self.read = [], []

    async def generate(self, *args, **kwargs):
        self.returned.append(await super().generate(*args, **kwargs))
        return self.returned[-1]

    def prefill(self, chunks):
        self.read += map(len, chunks.values())
        super().prefill(chunks)


class LoadedDice:
    """Dice that make the engine say `texts` (lists of ids): for each token, the middle of its
    interval of the cdf."""

    def __init__(self, agent, texts):
        self.agent, self.texts = agent, iter(texts)

    def random(self, n):
        engine, ids = self.agent.engine, next(self.texts)[:n]
        prompt = self.agent.trunk + self.agent.chat.opening
        whole = torch.tensor([prompt + ids])
        # the engine's model is always told who sees whom (engine.grouped_attention)
        causal = torch.ones(whole.shape[1], whole.shape[1], dtype=torch.bool).tril()[None, None]
        with torch.no_grad():
            logits = engine.model(whole, attention_mask=causal, use_cache=False).logits
        logits = logits[0, len(prompt) - 1 : -1]
        p = (logits.double() / engine.temperature).softmax(-1)
        at = torch.arange(len(ids)), torch.tensor(ids)
        return [*(p.cumsum(-1)[at] - p[at] / 2).tolist(), *[0.5] * (n - len(ids))]


def speak(engine, chat, texts, *, think, lines=LINES, max_tokens=64, context=512):
    """A dialogue in which the policy says `texts`, one a turn. Returns (agent, replies)."""
    agent = Agent(engine, chat, think=think, max_tokens=max_tokens, context=context, seed=0)
    agent.rng = LoadedDice(agent, texts)

    async def talk():
        return [await agent.reply(line) for line, _ in zip(lines, texts)]

    return agent, asyncio.run(talk())


def gossip(engine, chat, count=3, *, think, turns=3, max_tokens=5, seeds=None, lines=LINES):
    """`count` dialogues at once, random draws, out of step: lines and replies of many lengths.
    Returns their Episodes."""
    seeds = seeds or range(count)
    agents = [
        Agent(engine, chat, think=think, max_tokens=max_tokens + s, context=512, seed=[7, s])
        for s in seeds
    ]

    async def talk(number, agent):
        for turn in range(turns):
            await agent.reply(lines[(number + turn) % len(lines)])

    async def together():
        await asyncio.gather(*[talk(s, agent) for s, agent in zip(seeds, agents)])

    asyncio.run(together())
    return [episode_of(agent.segments) for agent in agents]


def episode_of(segments, group=0, **kwargs):
    turns = [Turn("", "") for s in segments if s.log_probs]
    return Episode("p", group, "", segments=segments, **{"turns": turns, **kwargs})


def sampled(episode):
    return [s for s in episode.segments if s.log_probs is not None]


def random_episode(rng, vocab, think, turns=3, longest=9):
    """Ids at random, in segments of many lengths, some of a single token."""

    def some():
        return rng.integers(1, vocab, rng.integers(1, longest)).tolist()

    segments = [Segment(some())]
    for turn in range(turns):
        ids = some()
        segments += [
            Segment(ids, branch=(turn + 1) * think, log_probs=[-5.0] * len(ids)),
            Segment(some()),
        ]
    return episode_of(segments)


def rows_of(episodes):
    """(history, sampled ids) of every turn, in time order."""
    for episode in episodes:
        trunk = []
        for s in episode.segments:
            if s.log_probs is not None:
                yield trunk, s.ids
            if s.branch == 0:
                trunk = trunk + s.ids


def by_rows(model, episodes, temperature=1.0):
    """The yardstick: log-probs and entropies of all sampled tokens, in time order, each turn
    in a row of its own."""
    log_probs, entropy = [], []
    for trunk, ids in rows_of(episodes):
        logits = model(torch.tensor([trunk + ids]), use_cache=False).logits[0, len(trunk) - 1 : -1]
        scores = (logits / temperature).log_softmax(-1)
        log_probs.append(scores[torch.arange(len(ids)), ids])
        entropy.append(-(scores.exp() * scores).sum(-1))
    return torch.cat(log_probs), torch.cat(entropy)


def engine_log_probs(episodes):
    """The log-probs with which the engine drew all sampled tokens, in time order."""
    return torch.tensor([x for e in episodes for s in sampled(e) for x in s.log_probs])


def gradients(model, log_probs, entropy):
    """The gradients of a loss in which every token has another weight, as it has another
    advantage."""
    weights = torch.linspace(-1, 1, len(log_probs))
    return torch.autograd.grad(
        (weights * log_probs + 0.3 * entropy).sum() / len(log_probs), list(model.parameters())
    )


def assert_close(a, b, tolerance):
    for x, y in zip(a, b, strict=True):
        assert (x - y).abs().max() < tolerance
