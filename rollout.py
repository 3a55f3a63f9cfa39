"""rollout.py - a dialogue between the policy and a user, and many at once (RLVER 2.1, Figure 1,
left).

`converse` is the dialogue, line for line: the policy replies, the user feels, the user answers.
`rollout` holds many at the same time; each waits only for its own model and user.

Agent keeps two rules, both broken by the released code:

  * Tokens in, tokens out. The trained ids are the sampled ids. Nothing is decoded and encoded
    again.
  * The mask is set when a token is sampled. A token is trained because the policy sampled it, not
    because of its value. (`policy.pack` makes a tensor of the mask.)

From top to bottom: what is kept of a dialogue; the policy's side of it; the dialogue; many at once.
"""

from support.errors import SimulatorFailed, UnreadableAnswers

import asyncio
import re
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from tqdm import tqdm

from emotion import SUCCESS, TRAINING, Rules

# ------------------------------------------------------------------------ what is kept of a dialogue


@dataclass
class Segment:
    """A run of tokens with one origin. `branch` 0 is the trunk, which all later tokens see. Branch
    k > 0 holds one reply as it was sampled, with the template's opening, if later turns see another
    text (mostly because the reply has a thought). Only tokens of the same branch see it.
    `log_probs` are those of the engine, None for tokens that the policy did not sample."""

    ids: list
    branch: int = 0
    log_probs: list = None


@dataclass
class Reply:
    """One reply of the policy, whole and in its two parts."""

    text: str  # what was sampled, with the template's opening in front of it
    thought: str  # what the user is never told
    visible: str  # what the user is told
    malformed: bool = False


@dataclass
class Turn:
    """One turn of a dialogue, as it is logged. A field is None if the turn ended before it."""

    reply: str  # what the user was told; for a malformed reply the whole sampled text
    thought: str
    user: str = None  # the user's answer
    analysis: str = None  # the whole answer of f_emo
    change: int = None
    emotion: int = None  # e_t


@dataclass
class Episode:
    """The record of one dialogue."""

    # the dialogues of one group have the same profile and the same first line
    profile_id: str
    group: int
    first_line: str
    number: int = 0  # in its batch, over all ranks
    turns: list = field(default_factory=list)  # [Turn]
    segments: list = field(default_factory=list)  # [Segment], in time order
    cut: int = 0  # replies cut by the token limit
    ended: str = ""  # goodbye, emotion_max, emotion_min, turn_limit, malformed, ...
    emotion: int = 0
    reward: float = 0.0  # e_T / 100, or 0 if malformed
    start: int = TRAINING.start  # e_0

    def turn_rewards(self, kind="terminal"):
        """The reward of each turn in which the policy sampled, a list.

            terminal    0 ... 0 e_T / 100                   RLVER 2.1: once, at the end
            delta       r_t = (e_t - e_{t-1}) / 100         the effect of each reply

        Deltas telescope: with gamma = 1 the return from turn t on is (e_T - e_{t-1}) / 100, where
        e_0 is the emotion before the first reply. This is potential-based shaping (Ng 1999): the
        optimal policy is the same. The variance may be lower, because a turn is not credited with
        earlier turns. A malformed reply sets e_T = 0, so its delta takes back all that was earned.
        Where the clamp to 0..100 shortens a change, the actual move of the emotion counts.
        """
        if kind == "terminal":
            # the dialogue of a `dummy_batch` has no turn: it gets one reward of 0
            return [0.0] * (len(self.turns) - 1) + [self.reward]
        # a malformed turn has no emotion: it counts as 0
        emotions = [self.start] + [turn.emotion or 0 for turn in self.turns]
        return [(after - before) / 100 for before, after in pairwise(emotions)]


def tokens_sampled(segments):
    """How many tokens the policy sampled in these segments, thoughts and stop tokens included."""
    return sum(len(s.ids) for s in segments if s.log_probs is not None)


# ------------------------------------------------------------------------- the policy's side of it


def split_thought(text):
    """Cut a thinking reply into (thought, visible, malformed).

    RLVER 2.3: a reply is well-formed if it begins with `<think>`, has each tag once, and has
    something visible behind `</think>`. Well-formed or not, it is cut at its first `</think>`:

        reply                            thought        visible         malformed
        <think> a </think> b             a              b               no
        <think></think> b                               b               no: the thought may be empty
        <think> a </think>               a                              yes: nothing is visible
        <think> a                        a                              yes: cut inside its thought
        a                                a                              yes: no tags
        a </think> b                     a              b               yes: no <think>
        a <think> b </think> c           a <think> b    c               yes: text before the thought
        <think> a </think> b </think>    a              b </think>      yes: a tag twice

    (The released code checks nothing: a reply without `</think>` goes to the user whole, with its
    thought.)
    """
    body = text.strip()
    thought, _, visible = body.removeprefix("<think>").partition("</think>")
    malformed = (
        not body.startswith("<think>")
        or body.count("<think>") != 1
        or body.count("</think>") != 1
        or not visible.strip()
    )
    return thought.strip(), visible.strip(), malformed


def take_thoughts(text):
    """Cut the thoughts out of a reply of direct mode, where there should be none. Returns (thought,
    visible): several thoughts are joined by newlines into one.

        reply                      thought    visible
        a <think> b </think> c     b          a  c
        a <think> b                b          a          no </think>: a thought up to the end
        a </think> b               a          b          no <think>: a thought from the beginning
        <think></think> a </think> b
                                   a          b          from models whose template opens a reply
                                                         with an empty thought

    First each `<think>...</think>` is taken out, then everything before a remaining
    `</think>`."""
    between = re.compile("<think>(.*?)(?:</think>|$)", re.DOTALL)
    *thoughts, visible = between.sub("", text).split("</think>")
    thoughts += between.findall(text)
    return "\n".join(filter(None, map(str.strip, thoughts))), visible.strip()


def read_reply(text, think):
    """Read a sampled text as a Reply, in think or in direct mode."""
    parse = split_thought if think else take_thoughts
    return Reply(text, *parse(text))


# The second number of every sampling seed, after the run's own: the kind of text that is sampled.
# No two kinds draw the same random numbers.
SEEDS = {"training": 0, "evaluation": 1, "probe": 2, "benchmark": 3}


class Agent:
    """The policy's side of one dialogue: `reply` answers a line of the user and keeps the tokens.

    engine      samples: generate(ids, max_tokens, rng, key) returns (sampled ids, log-probs)
    chat        a ChatFormat (models/chat_format.py): the model's chat template, cut into token ids
    think       whether every reply has to begin with a thought
    max_tokens  the longest reply in tokens, thought and stop token included
    context     the most tokens that the model can read at once, prompt and reply together
    seed        of this dialogue's random draws

    Agent uses these members of `chat`:

    first_prompt(line)   ids from the beginning to where the first reply is sampled: system prompt,
                         the user's line, the template's own tokens
    next_prompt(line)    ids from behind the last stop token to where the next reply is sampled
    opening              ids that the template puts in front of a new reply, but not of past ones
                         ("<think>\\n" of models that always think); mostly none
    opening_text         their text, which counts as the beginning of the reply's text
    past_reply(visible)  ids of a reply as later turns see it, its stop token included
    stop_id, stop_ids    the id behind each reply; all ids that end a reply
    decode               ids -> their text
    """

    def __init__(self, engine, chat, *, think, max_tokens, context, seed):
        self.engine, self.chat, self.think = engine, chat, think
        self.max_tokens, self.context = max_tokens, context
        # one generator per dialogue: its draws do not depend on the rest of the batch
        self.rng = np.random.default_rng(seed)
        self.segments, self.trunk = [], []  # the trunk: the ids that all later turns see
        self.cut = 0  # replies cut by max_tokens (not those cut by the end of the context)

    async def reply(self, line):
        """Sample one reply to `line`. Returns a Reply, or None if the prompt leaves no room in the
        context for one sampled token and a stop token. (Agent adds the stop token itself where
        max_tokens cuts the reply, or another of the model's stop ids ends it.)

        The room is counted in tokens, before anything is changed. (The released code compares
        characters with a token limit.)

        Every token is filed under its origin: a Segment has log-probs if and only if the policy
        sampled its ids, including the stop token. `visible` is stripped of white space.

        The trunk is what later turns see. Do they see the tokens that were sampled?

            yes, in direct mode    first prompt, REPLY 1, next prompt, REPLY 2, ...
            no, in think mode      first prompt, visible 1, next prompt, visible 2, ...
                                               |                       |
                                               REPLY 1, a branch       REPLY 2, a branch

        REPLY is what was sampled, and is trained; visible is its text without the thought, encoded
        again. (In direct mode, too, it is a branch if the template opened it or a thought was cut
        out of it. Of a malformed reply later turns see nothing.)
        """
        prompt = self.chat.next_prompt(line) if self.segments else self.chat.first_prompt(line)
        opening = self.chat.opening  # of the template, for this reply alone; mostly none
        # one place is kept for the stop token
        room = self.context - len(self.trunk) - len(prompt) - len(opening) - 1
        if room < 1:
            return None
        self.observe(prompt)
        # key: the engine finds this dialogue's cache by it
        ids, log_probs = await self.engine.generate(
            self.trunk + opening, min(room, self.max_tokens), self.rng, key=self
        )
        has_stop = ids[-1] in self.chat.stop_ids
        self.cut += not has_stop and len(ids) == self.max_tokens
        text = self.chat.opening_text + self.chat.decode(ids[:-1] if has_stop else ids)
        reply = read_reply(text, self.think)
        # do later turns see the sampled tokens themselves?
        if reply.visible == text.strip() and not opening and not reply.malformed:
            self.append_to_trunk(ids, log_probs)
        else:
            self.append_branch(reply, opening, ids, log_probs)
        return reply

    def append_to_trunk(self, ids, log_probs):
        """File a reply in the trunk: history and reply are one causal sequence.

        If max_tokens cut the reply, or another of the model's stop ids ended it, the template's
        stop token is added. An added token is an observation."""
        self.segments.append(Segment(ids, log_probs=log_probs))
        self.trunk = self.trunk + ids
        if ids[-1] != self.chat.stop_id:
            self.observe([self.chat.stop_id])

    def append_branch(self, reply, opening, ids, log_probs):
        """File the opening and the sampled tokens of a reply as a branch, numbered 1, 2, 3. The
        trunk goes on with the visible text, unless the reply is malformed.

        That text is encoded here, once. It is not a slice of the sampled ids: "</think>" and the
        word behind it may share a token."""
        branch = 1 + max(s.branch for s in self.segments)
        if opening:
            self.segments.append(Segment(opening, branch=branch))
        self.segments.append(Segment(ids, branch=branch, log_probs=log_probs))
        if not reply.malformed:
            self.observe(self.chat.past_reply(reply.visible))

    def observe(self, ids):
        """Add context to the trunk: tokens that the policy did not sample."""
        self.segments.append(Segment(ids))
        self.trunk = self.trunk + ids


# ------------------------------------------------------------------------------------- the dialogue


async def converse(agent, user, user_line: str, rules: Rules, group: int = 0) -> Episode:
    """One dialogue: at most `rules.max_turns` replies of `agent`, an Agent, to `user`, who opened
    with `user_line`; every reply is scored. Returns its Episode, `ended` by the first of these:

        context         no room for another reply; the emotion so far counts
        malformed       the reply is logged, but never sent; emotion and reward are 0
        emotion_max     the emotion reached 100
        emotion_min     the emotion fell below `rules.floor`: 1 in training, 10 in the benchmark
        turn_limit      the last reply is scored, but not answered
        goodbye         the user said goodbye

    The user can be any object with

        profile               who it is: a Profile, of which only the id is needed here
        emotion               what it feels now, 0 to 100
        await feel(reply)     f_emo: feel a reply, the emotion moves; returns (the analysis, the
                              change)
        await answer()        f_reply: say the next line; returns (line, is it a goodbye?)

    Raises what these two raise, SimulatorFailed if the dialogue is to be dropped.
    """
    episode = Episode(user.profile.id, group, user_line, emotion=user.emotion, start=user.emotion)
    for number in range(1, rules.max_turns + 1):
        reply = await agent.reply(user_line)  # tokens in, tokens out; thoughts stay here
        if reply is None:
            episode.ended = "context"
            break
        turn = Turn(reply.visible, reply.thought)
        episode.turns.append(turn)
        if reply.malformed:  # RLVER 2.3: zero reward
            turn.reply = reply.text
            episode.ended = "malformed"
            episode.emotion = 0
            break
        # f_emo: the emotion moves
        turn.analysis, turn.change = await user.feel(reply.visible)
        episode.emotion = turn.emotion = user.emotion
        if user.emotion >= SUCCESS or user.emotion < rules.floor:
            episode.ended = "emotion_max" if user.emotion >= SUCCESS else "emotion_min"
            break
        if number == rules.max_turns:  # the reward is known: nothing is bootstrapped
            episode.ended = "turn_limit"
            break
        # f_reply: only when the dialogue goes on
        user_line, goodbye = await user.answer()
        turn.user = user_line
        if goodbye:
            episode.ended = "goodbye"
            break
    episode.segments = agent.segments
    episode.cut = agent.cut
    episode.reward = episode.emotion / 100  # r = e_T / 100 (RLVER 2.1)
    return episode


# ------------------------------------------------------------------------------------- many at once


async def rollout(
    simulator,  # its user(profile, start, name) makes a user
    profiles_by_group,  # {group number in the whole batch: Profile}
    group_size,
    make_agent,  # make_agent(number) is the policy's side of dialogue `number` of the whole batch
    rules=TRAINING,  # what the dialogues start from and how they end
    *,
    name="",  # of the rollout, in the log of calls
    timeout=None,  # seconds until an open dialogue is dropped, as if its simulator had failed
    bar=None,  # a progress bar, moved on by one for each dialogue
    on_end=None,  # on_end(episode, user) is called for each dialogue that ends
):
    """Hold `group_size` dialogues with each of `profiles_by_group`, all at the same time. Returns
    (episodes, dropped), in the order of the groups. `dropped` has a row for each dialogue that
    is lost because its user failed, time ran out, or the first line left no room for a reply.

    The first line of a group is made once, by one user. Each dialogue goes on with its own copy of
    this user, user.copy(name). (A user of another class needs this third method, and for
    evaluations `open`, which is `answer` without the goodbye.)
    """
    deadline = asyncio.get_running_loop().time() + timeout if timeout else None
    if bar is None:
        bar = tqdm(disable=True)

    async def run_dialogue(number, user, user_line, group):
        agent = make_agent(number)
        try:
            async with asyncio.timeout_at(deadline) as limit:
                episode = await converse(agent, user, user_line, rules, group)
            if not episode.turns:
                raise SimulatorFailed("the first line leaves no room in the context for a reply")
        except (SimulatorFailed, TimeoutError) as error:
            return None, row_of_dropped(error, limit, user, agent.segments)
        finally:
            bar.update()
        episode.number = number
        if on_end:
            on_end(episode, user)
        return episode, None

    async def run_group(group, profile):
        user = simulator.user(profile, rules.start, f"{name} group {group}")
        try:
            async with asyncio.timeout_at(deadline) as limit:
                if rules.own_first_line:
                    user_line = await user.open()
                else:
                    user_line, _ = await user.answer()
        except (SimulatorFailed, TimeoutError) as error:
            bar.update(group_size)
            return [(None, row_of_dropped(error, limit, user))] * group_size
        numbers = range(group * group_size, (group + 1) * group_size)  # in the whole batch
        return await asyncio.gather(
            *[run_dialogue(n, user.copy(f"{name} {n}"), user_line, group) for n in numbers]
        )

    groups = await asyncio.gather(
        *[run_group(n, profile) for n, profile in profiles_by_group.items()]
    )
    results = [result for group in groups for result in group]
    episodes = [episode for episode, _ in results if episode]
    return episodes, [row for _, row in results if row]


def row_of_dropped(error, limit, user, segments=()):
    """What dropped.jsonl keeps of a dialogue that `error` ended: what was said until then. The last
    reply of the policy is part of it: it may have made the user's model answer unreadably. limit:
    the asyncio.timeout of the dialogue; segments: its tokens. (A user may raise a TimeoutError of
    its own, which often has no message.)"""
    reason = (
        "the rollout ran out of time" if limit.expired() else str(error) or "the user timed out"
    )
    return {
        "profile_id": user.profile.id,
        "reason": reason,
        "unreadable": isinstance(error, UnreadableAnswers),
        "tokens": tokens_sampled(segments),
        "dialogue": getattr(user, "dialogue", []),
    }
