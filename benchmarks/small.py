"""small.py - a language model that hears replies (players/reader.py): what ten fixed policies earn
from it, and what a small language model learned from training on it. tables.py calls it, and docs/small.md
shows its tables.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from models.chat_format import ChatFormat
from models.loading import load_model
from players.check import check
from players.users import make_simulator
from support.answers import load_prompt
from support.files import read_json
from support.metrics import signs, words_of
from support.results import recorded_dialogues

import asyncio
import os
from dataclasses import replace

import numpy as np
import torch
from tqdm import tqdm

import people
from emotion import TRAINING
from policy import Policy, pack
from rollout import Episode, Reply, Segment, rollout
from tools.first_replies import felt_by_all, one_of_each_need
from tools.replay import final_score, replay_all

# The model that hears: a directory, or a name of the hub. (tables.py reads $READER, too.)
READER = os.environ.setdefault("READER", "Qwen/Qwen2.5-Coder-1.5B-Instruct")

# Policies that need no training: the replies of three turns, whatever is heard. None: the user's
# own line. They were written before the weights of players/reader.py. The best of them must not earn
# much, or a policy would learn nothing else.
CONSTANTS = {
    "is sorry, three times": ["I'm so sorry."] * 3,
    "nothing": ["Okay."] * 3,
    "agrees": ["You're right."] * 3,
    "offers to listen, three times": ["I'm here to listen and support you."] * 3,
    "warm, names nothing": [
        "I'm so sorry to hear that.",
        "I'm so proud of you.",
        "You're not alone, I'm here for you.",
    ],
    "invites to talk": [
        "I'm here to listen and support you.",
        "It's completely normal to feel this way.",
        "Can you tell me more about what happened?",
    ],
    "asks": [
        "What happened then?",
        "How did that make you feel?",
        "What do you need most right now?",
    ],
    "praises": ["You are so strong.", "I believe in you.", "You deserve so much better than this."],
    "advises anybody": [
        "Take a deep breath and be kind to yourself.",
        "Talk about it with somebody whom you trust.",
        "Take it one step at a time, and it will get better.",
    ],
    "the user's own line": [None] * 3,
}


def constants(users=8):
    """The mean final emotion, from 30, of held-out people of the toy who hear the CONSTANTS:
    {"finals": {policy: emotion}}."""
    profiles = people.toy_profiles("heldout", users)
    model = make_simulator("toy", reader=f"local:{READER}", concurrency=users)

    async def finals_of(replies):
        """The final emotions of all people who hear these replies."""
        episodes, dropped = await rollout(
            model,
            dict(enumerate(profiles)),
            1,
            lambda number: FixedAgent(replies),
            replace(TRAINING, max_turns=len(replies), own_first_line=True),
        )
        assert not dropped, dropped
        return [episode.emotion for episode in episodes]

    async def all_means():
        await model.reader.set_scale()
        return {
            name: float(np.mean(await finals_of(replies)))
            for name, replies in tqdm(CONSTANTS.items(), leave=False)
        }

    return {"finals": asyncio.run(all_means())}


class FixedAgent:
    """An agent that says these replies in turn, whatever it hears. None: the user's own line."""

    def __init__(self, replies):
        self.replies = iter(replies)
        self.segments, self.cut = [], 0

    async def reply(self, line):
        """As rollout.Agent.reply."""
        text = next(self.replies) or line
        return Reply(text, "", text)


# ----------------------------------------------------------------- what a small model has learned

SHOWN = 7  # held-out people whose dialogues are kept: about twenty replies
LISTENERS = 16  # dialogues that are compared by `listens`
# The reader's questions in other words, written before any run was seen.
OTHER_WORDS = {
    "new": "Does this reply add something that has not been said before?",
    "need": "The person wants, without saying so: {{task}}\nIs that what this reply offers them?",
    "helps": "Will the person feel better after this reply?",
    "copied": "Does the reply merely repeat what stands above?",
}
ONE_WORD = " Answer with one word, yes or no."


def before_and_after(place):
    """What the run in the directory `place` learned: {column of the table: [before, after]}, and the
    dialogues of the first SHOWN held-out people, before and after."""
    config, summary = read_json(place / "config.json"), read_json(place / "summary.json")
    rows = recorded_dialogues(place / "dialogues.jsonl")
    start, columns, shown = load_scorer(config["model"], config["lang"]), {}, []
    for evaluation in (summary["before"], summary["after"]):
        end = [
            row for row in rows if row["split"] == "heldout" and row["step"] == evaluation["step"]
        ]
        own, echoed = listens(*start, end[:LISTENERS])
        model = make_simulator("toy", reader=f"local:{READER}")
        to_person, to_others = asyncio.run(moved_by_first_replies(end, model))
        for column, value in {
            "final emotion": evaluation["score"],
            "asked in other words": asyncio.run(score_in_other_words(end)),
            "likeliest behind its own dialogue": own,
            "words that were heard": echoed,
            "distinct word pairs": signs([replies_of(row) for row in end])["distinct_2"],
            "perplexity under the start": perplexity(*start, end),
            "first reply, to the person": to_person,
            "first reply, to others": to_others,
        }.items():
            columns.setdefault(column, []).append(float(value))
        shown.append([lines_of(row) for row in end[:SHOWN]])
    return {"before_and_after": columns, "dialogues": shown}


def replies_of(dialogue):
    """The policy's replies of a recorded dialogue."""
    return [turn["reply"] for turn in dialogue["turns"]]


def lines_of(dialogue):
    """A recorded dialogue as people read it: the user's first line, then reply, emotion, line."""
    lines = [dialogue["first_line"]]
    for turn in dialogue["turns"]:
        lines += [turn["reply"], turn["emotion"], turn["user"]]
    return lines


async def score_in_other_words(dialogues):
    """The mean final emotion of recorded dialogues if the same model is asked OTHER_WORDS. (Their
    scale is measured anew, by the 60 known replies.)"""
    model = make_simulator("toy", reader=f"local:{READER}")
    for name, question in OTHER_WORDS.items():
        model.reader.texts[name][0] = question + ONE_WORD
    users = {profile.id: profile for profile in people.toy_profiles("heldout")}
    heard = await replay_all(dialogues, model, users)
    return np.mean([final_score(row, felt) for row, felt in zip(dialogues, heard)])


async def moved_by_first_replies(dialogues, model):
    """How far the first replies of recorded dialogues move the emotion on average, as in
    tools.lens: (of the person to whom each was said, of others with another need). A comfort that
    fits anybody moves both alike."""
    await check(model)
    pairs = one_of_each_need(dialogues, people.toy_profiles("heldout"))
    replies = [replies_of(row)[0] for _, row in pairs]
    _, own, others = await felt_by_all(model, pairs, replies)
    return own, others


def perplexity(policy, chat, dialogues):
    """exp of the mean negative log-likelihood of the tokens of all replies, each given the dialogue
    before it: how unusual the replies of recorded dialogues are for the starting `policy`. The stop
    token does not count, because a reply that was cut has none. (The runs measured before this
    function counted those that were sampled.)"""
    log_probs = []
    for row in dialogues:
        lines = [row["first_line"], *[turn["user"] or "" for turn in row["turns"]]]
        log_probs += log_probs_of_replies(policy, chat, lines, replies_of(row))
    return torch.cat(log_probs).mean().neg().exp()


def load_scorer(path, lang="en"):
    """(Policy, ChatFormat) of a model that says how likely replies are, behind the system prompt of
    a policy in direct mode. Raises BadModel."""
    model, tokenizer = load_model(path)
    return Policy(model), ChatFormat(tokenizer, load_prompt("policy_direct", lang))


@torch.no_grad()
def log_probs_of_replies(policy, chat, lines, replies):
    """The log-probs of the tokens of each of `replies`, a list of tensors, given the dialogue before
    it: lines[0], replies[0], lines[1] ... There are at least as many lines as replies. Without stop
    tokens."""
    segments, prompt = [], chat.first_prompt(lines[0])
    for reply, line in zip(replies, [*lines[1:], ""]):
        ids = chat.text(reply)
        segments += [Segment(prompt), Segment(ids, log_probs=[0.0] * len(ids))]
        prompt = [*chat.close, chat.stop_id, *chat.next_prompt(line)]
    batch = pack([Episode("", 0, "", segments=segments)])
    log_probs, _ = policy(batch)
    return [log_probs[batch.turn == k] for k in range(1, len(replies) + 1)]


def listens(policy, chat, dialogues):
    """Two numbers of the second replies of recorded dialogues, without thoughts. One is the share
    that the starting model finds likelier behind its own dialogue than behind every other; a policy
    that says one thing to all n has 1 / n. The other is the share of their words that the user had
    said, because an echo raises the first."""
    replies = [chat.text(row["turns"][1]["reply"]) for row in dialogues]
    scores, echoed = [], []  # [context][reply]; of each word
    for row in dialogues:
        first, second = row["turns"][:2]
        context = chat.first_prompt(row["first_line"]) + chat.past_reply(first["reply"])
        scores.append(log_likelihoods(policy, context + chat.next_prompt(first["user"]), replies))
        heard = words_of(row["first_line"] + " " + first["user"])
        echoed += [word in heard for word in words_of(second["reply"])]
    likeliest = np.argmax(scores, axis=0)  # for each reply a context
    return np.mean(likeliest == np.arange(len(replies))), np.mean(echoed)


@torch.no_grad()
def log_likelihoods(policy, context, replies):
    """log pi(reply | context) of each of the replies, a list; all are ids. One row: the context is
    the trunk and each reply a branch. The context's last token stands in each branch again, because
    a token is predicted from the one before it in the row."""
    segments = [Segment(context[:-1])]
    for k, ids in enumerate(replies, 1):
        segments += [Segment(context[-1:], k), Segment(ids, k, [0.0] * len(ids))]
    batch = pack([Episode("", 0, "", segments=segments)])
    log_probs, _ = policy(batch)
    return [log_probs[batch.turn == k].sum().item() for k in range(1, len(replies) + 1)]
