"""nano.py checks all the rest: the same dialogues through its rows, one for each reply, and through
Agent, pack, Policy, ppo.py and grpo.py, one for each dialogue. Prompts, log-probs, advantages,
losses and gradients are the same numbers, by two ways of which one is short enough to be
believed."""

from models.build import load_model
from models.chat_format import ChatFormat

import asyncio
import copy
import json

import pytest
import torch

import grpo
import nano
import policy as packed
import ppo
from agents import LINES
from answering import LIN, Model, coded, feeling, saying, simulator_of
from conftest import THREE_DIGITS, make_tiny_model, make_tiny_tokenizer
from people import load_profiles
from rollout import Agent, Episode, Turn
from simulator import User
from tabular import cfg_of, models_of
from toy.world import code_in

SYSTEM = [{"role": "system", "content": "Be warm."}]
# What the policy says in four dialogues, and the last emotion. "|": cut by the token limit.
TALKS = {
    True: [
        (["<think>hurt</think>I am here.", "<think>x</think>Why?", "<think>s</think>Yes."], 61),
        (["<think>lonely</think>I am all ears.", "<think>no end"], 0),  # malformed
        (["<think>a</think>Take your time."], 9),
        (["<think>hurt</think>I am here, take|", "<think></think>Why?"], 44),
    ],
    False: [
        (["I am here.", "Why?", "Yes, take your time."], 61),
        (["I am all ears.", "No."], 0),
        (["Take your time."], 9),
        (["I am here, take|", "Why?"], 44),
    ],
}


class Says:
    """An engine that says what it is told."""

    def __init__(self, replies):
        self.replies = iter(replies)

    async def generate(self, ids, max_tokens, rng, key):
        reply = next(self.replies)
        return reply, [0.0] * len(reply)


class Keeps:
    """In place of an optimizer: what the gradients were."""

    def __init__(self, model):
        self.model = model

    def step(self):
        self.grads = [p.grad.clone() for p in self.model.parameters()]

    def zero_grad(self, set_to_none=True):
        self.model.zero_grad(set_to_none=set_to_none)


def ids_of(chat, text):
    """The ids of a reply; its stop token behind it, unless it was cut."""
    return chat.text(text.rstrip("|")) + [chat.stop_id] * (not text.endswith("|"))


def by_nano(chat, place, think):
    """(nano's Policy, its Dialogues)."""
    policy, dialogues = nano.Policy(place, think, SYSTEM), []
    for group, (texts, emotion) in enumerate(TALKS[think]):
        d = nano.Dialogue({}, group // 2)
        for line, text in zip(LINES, texts):
            nano.say(d, {"response": line, "goodbye": False})
            d.prompt = policy.prompt(d)
            nano.take(policy, d, ids_of(chat, text))
        d.emotion = d.emotion if d.ended else emotion
        dialogues.append(d)
    return policy, dialogues


def by_packing(chat, think):
    """The same dialogues as Episodes."""
    episodes = []
    for number, (texts, emotion) in enumerate(TALKS[think]):
        engine = Says(ids_of(chat, text) for text in texts)
        agent = Agent(engine, chat, think=think, max_tokens=64, context=512, seed=0)

        async def talk(agent=agent, texts=texts):
            return [await agent.reply(line) for line, _ in zip(LINES, texts)]

        replies = asyncio.run(talk())
        emotion = 0 if replies[-1].malformed else emotion
        turns = [Turn(reply.visible, reply.thought) for reply in replies]
        episode = Episode("p", number // 2, "", number, turns, agent.segments)
        episode.reward = emotion / 100
        episodes.append(episode)
    return packed.pack(episodes)


def seen_by(batch, b, turn):
    """The ids that the packed row b lets the first token of a turn see."""
    first = (batch.turn[b] == turn).nonzero()[0].item()
    seen = packed.tree_mask(batch.branch)[b, 0, first]
    seen[first] = False
    return batch.ids[b][seen].tolist()


def critics(place, model):
    """nano's and the project's; the heads of both are the same random numbers."""
    pair = nano.Critic(place), packed.Critic(copy.deepcopy(model))
    for critic in pair:
        torch.manual_seed(1)
        torch.nn.init.normal_(critic.head.weight)
    return pair


def both_ways(chat, place, think, algo, lam=1.0):
    """{quantity: (nano's, the project's)}."""
    policy, dialogues = by_nano(chat, place, think)
    batch = by_packing(chat, think)
    mask = batch.action_mask
    turns = [(b, k) for b, d in enumerate(dialogues) for k in range(1, 1 + len(d.rows))]
    prompts = [prompt for d in dialogues for prompt, _ in d.rows]
    found = {"prompts": (prompts, [seen_by(batch, *at) for at in turns])}
    rows = [nano.batch_of(d) for d in dialogues]
    found["tokens"] = torch.cat([ids[sampled] for ids, sampled in rows]), batch.ids[mask]
    if differences(found):  # nothing else can be set side by side
        return found
    model = load_model(place)[0]
    ours = packed.Policy(model)
    critic, our_critic = critics(place, model) if algo == "ppo" else (None, None)
    with torch.no_grad():
        theirs = [nano.log_probs_of(policy, *row) for row in rows]
        for name, x, y in zip(("log-probs", "entropy"), zip(*theirs), ours(batch)):
            found[name] = torch.cat(x), y[mask]
    rewards = ppo.place_rewards(batch.reward, batch.turn)
    last = [rewards[b][mask[b]][-1] for b in range(len(dialogues))]
    found["rewards"] = (torch.tensor([nano.reward(d) for d in dialogues]), torch.stack(last))
    nano.look_back(policy, critic, dialogues)
    returns = None
    if critic:
        with torch.no_grad():
            values = our_critic(batch)
        advantages, returns = ppo.gae(rewards, values, mask, 1.0, lam)
        mean, std = ppo.masked_mean_std([advantages], [mask])
        advantages = ppo.whiten(advantages, mask, mean, std)
        found["values"] = torch.cat([d.values for d in dialogues]), values[mask]
        found["returns"] = torch.cat([d.returns for d in dialogues]), returns[mask]
    else:
        [advantages] = grpo.token_advantages([batch], "grpo", False)
    theirs = torch.cat([d.advantages.expand(len(d.old)) for d in dialogues])
    found["advantages"] = theirs, advantages[mask]
    ours = models_of(ours, Keeps(ours), our_critic, critic and Keeps(our_critic), ratio_limit=9e9)
    return found | of_mini_batch((policy, critic, dialogues), (ours, batch, advantages, returns))


def of_mini_batch(of_nano, of_project):
    """The losses and gradients of one mini-batch, by both. Old log-probs and values are as they
    would be after other updates: some tokens and some values are beyond the clip, on either side."""
    policy, critic, dialogues = of_nano
    models, batch, advantages, returns = of_project
    noise = torch.Generator().manual_seed(2)
    for d in dialogues:
        d.old = d.old + 0.4 * torch.randn(d.old.shape, generator=noise)
        if critic:
            d.values = d.values + 2 * torch.randn(d.old.shape, generator=noise)

    def packed_rows(parts):
        return torch.zeros(batch.ids.shape).masked_scatter(batch.action_mask, torch.cat(parts))

    old, mask = packed_rows([d.old for d in dialogues]), batch.action_mask
    batch.engine_log_probs = old
    more, found = {}, {}
    with torch.no_grad():
        now = [nano.log_probs_of(policy, *nano.batch_of(d))[0] for d in dialogues]
        losses = [nano.policy_loss(x, d.old, d.advantages) for x, d in zip(now, dialogues)]
        loss, _ = ppo.policy_loss(models.policy(batch)[0], old, advantages, mask, nano.CLIP)
        found["policy loss"] = sum(losses), loss
        if critic:
            values = packed_rows([d.values for d in dialogues])
            more = {"old_values": [values], "returns": [returns]}
            now = [critic(*nano.batch_of(d)) for d in dialogues]
            losses = [nano.value_loss(x, d.values, d.returns) for x, d in zip(now, dialogues)]
            loss = ppo.value_loss(models.critic(batch), values, returns, mask, ppo.VALUE_CLIP)
            found["value loss"] = sum(losses), loss
    nano.backward(policy, critic, dialogues)
    cfg = cfg_of(entropy_coef=nano.ENTROPY)
    metrics = ppo.optimize(models, [[batch]], [old], [advantages], cfg, **more)
    assert 0 < metrics["clipfrac"] < 1
    pairs = [(policy.model, models.optimizer)] + [(critic, models.critic_optimizer)] * bool(critic)
    for one, other in pairs:
        grads = [p.grad for p in one.parameters()]
        found[f"gradients of {type(one).__name__}"] = grads, other.grads
    return found


def differences(found):
    """The quantities that are not the same, in order."""
    wrong = []
    for name, (a, b) in found.items():
        if name == "prompts":
            same = a == b
        else:
            a, b = (x if isinstance(x, (list, tuple)) else [x] for x in (a, b))
            same = len(a) == len(b) and all(
                x.shape == y.shape and (x - y).abs().max() <= 1e-5 * max(1.0, y.abs().max())
                for x, y in zip(a, b)
            )
        if not same:
            wrong.append(name)
    return wrong


@pytest.fixture
def unclipped(monkeypatch):
    """Gradients as they are before they are clipped to a norm."""
    monkeypatch.setattr(ppo, "MAX_GRAD_NORM", float("inf"))


@pytest.fixture(scope="module")
def warm(tiny_tokenizer):
    return ChatFormat(tiny_tokenizer, "Be warm.")


@pytest.mark.parametrize("algo, lam", [("grpo", 1.0), ("ppo", 1.0), ("ppo", 0.9)])
@pytest.mark.parametrize("think", [True, False])
def test_two_ways_to_the_same_numbers(think, algo, lam, warm, tiny_dir, unclipped, monkeypatch):
    monkeypatch.setattr(nano.gae, "__defaults__", (1.0, lam))
    found = both_ways(warm, tiny_dir, think, algo, lam)
    assert differences(found) == []
    for _, parts in [pair for name, pair in found.items() if name.startswith("gradients")]:
        assert all(part.abs().max() > 0 for part in parts)


def test_the_one_difference(warm, tiny_dir):
    """The ids of a direct reply that its text is not encoded to: later turns see these ids in
    rlver.py, and the text's in nano.py. Both train the ids that were sampled."""
    sampled = [i for letter in "I am here." for i in warm.text(letter)] + [warm.stop_id]
    encoded = [*warm.text("I am here."), warm.stop_id]
    assert sampled != encoded
    d, policy = nano.Dialogue({}, 0), nano.Policy(tiny_dir, False, SYSTEM)
    agent = Agent(Says([sampled, encoded]), warm, think=False, max_tokens=64, context=512, seed=0)
    for line in LINES[:2]:
        nano.say(d, {"response": line, "goodbye": False})
        d.prompt = policy.prompt(d)
        nano.take(policy, d, sampled)
        asyncio.run(agent.reply(line))
    batch = packed.pack([Episode("p", 0, "", 0, [], agent.segments)])
    for found, reply in ((seen_by(batch, 0, 2), sampled), (d.rows[1][0], encoded)):
        first = d.rows[0][0]
        assert found[: len(first)] == first == seen_by(batch, 0, 1)
        assert found[len(first) : len(first) + len(reply)] == reply
    assert d.rows[0][1] == sampled == batch.ids[0][batch.turn[0] == 1].tolist()


def test_its_tokens_are_those_of_tokenizer_json(tmp_path):
    """AutoTokenizer takes another class, with a split into words of its own, for many models."""
    tokenizer = make_tiny_tokenizer(["203"], THREE_DIGITS)
    for part in (make_tiny_model(tokenizer), tokenizer):
        part.save_pretrained(tmp_path)
    d = nano.Dialogue({}, 0)
    nano.say(d, {"response": "It was in 2031."})
    prompt = nano.Policy(tmp_path, False, []).prompt(d)
    assert prompt == ChatFormat(tokenizer).first_prompt("It was in 2031.")


def test_the_user_is_asked_the_same_questions():
    """The same prompts as simulator.py's, but for their codes, about a profile that is shipped, and
    the same emotion at the end: the first line is the profile's own, what the policy says closes no
    tag and fills no placeholder, an answer moves the emotion by 10 at most."""
    path = nano.PROMPTS.parent / "profiles/en_train.jsonl"
    person, profile = json.loads(path.read_text("utf-8").split("\n")[0]), load_profiles(path)[0]
    replies, changes = ["</dialogue>{{emotion}}", "I see."], [25, -4]
    answers = {"emotion": [feeling(c) for c in changes], "reply": [saying("Hm.")]}
    model = Model(**copy.deepcopy(answers))
    user, asked, d = User(simulator_of(model), profile), [], nano.Dialogue(person, 0)

    def by_heart(prompts):
        asked.extend(prompts)
        return [asyncio.run(twin(prompt)) for prompt in prompts]

    async def talk():
        await user.open()
        for reply in replies:
            await user.feel(reply)
            await user.answer()

    asyncio.run(talk())
    twin = Model(**answers)
    nano.say(d, {"response": person["first_talk"]})
    for reply in replies:
        d.said.append({"speaker": "friend", "text": reply})
        nano.ask(by_heart, "emotion", nano.feel, [d])
        nano.ask(by_heart, "reply", nano.say, [d])
    pairs = zip(asked, model.prompts, strict=True)
    assert all(one.replace(code_in(one), code_in(other)) == other for one, other in pairs)
    assert (d.emotion, d.said) == (user.emotion, user.dialogue)


@pytest.mark.parametrize("bad", ["Sorry.", "[]", '{"change": 5}', feeling("5"), saying("No.")])
def test_an_answer_that_cannot_be_read_is_asked_for_three_times_in_all(bad):
    """Two dialogues: the one whose answer was read is not asked about again."""
    for tries, ends in ((2, 37), (3, None)):
        texts, asked = [feeling(3), *[bad] * tries, feeling(7)], []

        def by_heart(prompts, texts=texts, asked=asked):
            asked.append(len(prompts))
            return [coded(prompt, texts.pop(0)) for prompt in prompts]

        pair = [nano.Dialogue(LIN, k) for k in range(2)]
        if ends:
            nano.ask(by_heart, "emotion", nano.feel, pair)
            assert [d.emotion for d in pair] == [33, ends]
        else:
            with pytest.raises(ValueError, match="asked 3 times"):
                nano.ask(by_heart, "emotion", nano.feel, pair)
        assert asked == [2, 1, 1]
