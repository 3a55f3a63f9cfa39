"""policy.py - the agent: token-exact episodes, packing, log-probs, critic.

RLVER 2.2 and 2.3: the policy pi_theta reads the dialogue so far and samples a reply, in think mode
after a thought that nobody else ever sees. Three rules are kept in this file, and most bugs of the
field are one of them broken:

  * Tokens in, tokens out. Trained ids are the very ids that were sampled. Nothing is decoded and
    encoded again.
  * The mask is born where the token is born. A token is trained because the policy sampled it, not
    because of its value.
  * All trained log-probs come from `Policy.forward`, at the temperature of sampling.

Run it alone to see how one dialogue is packed:  python policy.py
"""

from support.flags import Parser

import copy
import random
import re
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

# ----------------------------------------------------------------------------------------- episodes


@dataclass
class Segment:
    """A run of tokens with one origin. `branch` 0 is the trunk that all later tokens see; k > 0 is
    a reply with a thought, which only itself sees. `log_probs` are the engine's, and there are some
    if and only if the policy sampled the tokens."""

    ids: list
    branch: int = 0
    log_probs: list = None


@dataclass
class Reply:
    """One reply of the policy, as three readers see it."""

    text: str  # as sampled
    visible: str  # what the user is told
    thought: str  # what the user is never told
    malformed: bool


@dataclass
class Episode:
    """All there is to know of one dialogue."""

    profile_id: str
    group: int
    first_line: str
    number: int = 0  # in its batch, over all ranks
    # [{reply, thought, user, analysis, change, mark, emotion}]
    turns: list = field(default_factory=list)
    segments: list = field(default_factory=list)  # [Segment], in time order
    ended: str = ""  # goodbye, emotion_max, emotion_min, turn_limit, malformed, ...
    emotion: int = 0
    reward: float = 0.0  # e_T / 100, or 0 if malformed
    start: int = 30  # e_0

    @property
    def delivered_replies(self):
        """The replies that the user heard."""
        return [turn["reply"] for turn in self.turns if turn["emotion"] is not None]

    def turn_rewards(self, kind="terminal"):
        """The reward of each turn in which the policy sampled, a list.

            terminal    0 ... 0 e_T / 100                   RLVER 2.1: once, at the end
            delta       r_t = (e_t - e_{t-1}) / 100         what each reply did

        Deltas telescope: with gamma = 1 the return from turn t on is (e_T - e_{t-1}) / 100, e_0 the
        emotion before the first reply. That is potential-based shaping (Ng 1999): the best policy
        is the same, only the noise is less, because a turn is no longer credited with what came
        before it. A malformed reply ends at e_T = 0 and so takes back all that was earned; where
        the clamp to 0..100 cut a change short, what counts is how far the emotion moved.
        """
        turns = sum(s.log_probs is not None for s in self.segments)
        if kind == "terminal":
            return [0.0] * (turns - 1) + [self.reward]
        # a malformed turn has no emotion: it counts as 0
        emotions = [self.start] + [turn["emotion"] or 0 for turn in self.turns]
        return [(e - before) / 100 for before, e in zip(emotions, emotions[1:])]

    @property
    def tokens_sampled(self):
        """Tokens that the policy sampled, thoughts and stop tokens included."""
        return sum(len(s.ids) for s in self.segments if s.log_probs is not None)


def split_thought(text):
    """Cut a thinking reply into (thought, visible, malformed).

    RLVER 2.3: well-formed is `<think>`, a thought (an empty one will do), `</think>`, something
    visible; each tag once, nothing before the first. Well-formed or not, the thought ends at the
    first `</think>` and what follows is visible, both stripped; without one all is thought, so a
    reply that was cut in the middle of its thought has nothing to show. A `<think>` is taken off
    where it opens the text. (The released code checks nothing: a reply without `</think>` goes to
    the user whole, thoughts and all.)
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
    """Cut the thoughts out of a reply of direct mode, where there should be none: (thought,
    visible). One without an end goes to the end; one without a beginning began with the reply."""
    head, end, _ = text.partition("</think>")
    if end and "<think>" not in head:
        text = "<think>" + text
    pattern = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
    thoughts = [thought.strip() for thought in pattern.findall(text)]
    return "\n".join(filter(None, thoughts)), pattern.sub("", text).strip()


class Agent:
    """The policy's side of one dialogue: `reply` answers a line of the user; tokens stay here."""

    def __init__(self, engine, chat, *, think, max_tokens, context, seed, history="strip"):
        self.engine, self.chat, self.think, self.history = engine, chat, think, history
        self.max_tokens, self.context = max_tokens, context
        # one generator a dialogue: its draws do not depend on who shares the batch with it
        self.rng = np.random.default_rng(seed)
        self.segments, self.trunk = [], []  # the trunk: the ids that all later turns see

    async def reply(self, line):
        """Sample one reply to `line`. Returns a Reply, or None if the prompt would leave no room in
        the context for one token and for a stop token behind it, which has to be added where the
        limit cuts a reply.

        Counted in tokens, before anything is changed. (The released code compares characters with a
        limit of tokens.)

        Every token is filed under its origin: a Segment has log-probs if and only if the policy
        sampled its ids, the stop token among them. `visible` is stripped of white space.
        """
        prompt = self.chat.next_prompt(line) if self.segments else self.chat.first_prompt(line)
        opening = self.chat.opening  # of the template, for this reply alone; mostly none
        # one place is kept for the stop token
        room = self.context - len(self.trunk) - len(prompt) - len(opening) - 1
        if room < 1:
            return None
        self.observe(prompt)
        ids, log_probs = await self.engine.generate(
            self.trunk + opening, min(room, self.max_tokens), self.rng, key=self
        )
        stopped = ids[-1] == self.chat.stop_id
        text = self.chat.opens + self.chat.decode(ids[:-1] if stopped else ids)
        if self.think:
            thought, visible, malformed = split_thought(text)
            seen_as_sampled = self.history == "keep"
        else:
            thought, visible = take_thoughts(text)
            malformed = False
            # Not so where a stray thought was taken out, or where the template opened the reply
            # with something that later turns do not see.
            seen_as_sampled = not opening and visible == text.strip()
            if thought:
                self.chat.tell_of_thoughts()
        reply = Reply(text, visible, thought, malformed)
        if seen_as_sampled:
            self.append_to_trunk(reply, opening, ids, log_probs)
        else:
            self.append_branch(reply, opening, ids, log_probs)
        return reply

    def append_to_trunk(self, reply, opening, ids, log_probs):
        """File a reply that later turns see as it was sampled: direct mode, or thoughts that are
        kept. History and reply are one causal sequence, the template's opening included.

        A reply that the limit cut gets its stop token from us, and a token from us is an
        observation."""
        if opening:
            self.observe(opening)
        self.segments.append(Segment(ids, log_probs=log_probs))
        self.trunk = self.trunk + ids
        stopped = ids[-1] == self.chat.stop_id
        if not stopped and not reply.malformed:
            self.observe([self.chat.stop_id])

    def append_branch(self, reply, opening, ids, log_probs):
        """File a reply of which later turns see the visible text alone: think mode. The opening and
        what was sampled are a branch, numbered 1, 2, 3, and the trunk goes on with the visible
        text, unless the reply is malformed.

        That text is encoded here, once. It is not a slice of the sampled ids: "</think>" and the
        word behind it may share a token."""
        branch = 1 + max(s.branch for s in self.segments)
        if opening:
            self.segments.append(Segment(opening, branch=branch))
        self.segments.append(Segment(ids, branch=branch, log_probs=log_probs))
        if not reply.malformed:
            self.observe(self.chat.past_reply(reply.visible))

    def observe(self, ids):
        """Add context to the trunk: tokens that somebody else wrote."""
        self.segments.append(Segment(ids))
        self.trunk = self.trunk + ids


# ------------------------------------------------------------------------------------------ packing


@dataclass
class Batch:
    """Dialogues side by side, one packed row each, padded on the right. B dialogues, L tokens.

    Worked example, think mode: trunk tokens p q r s (prompt p q, visible reply r, next prompt s),
    thoughts a b and c.

        memory     p  q  a  b  r  s  c        each branch stands inline, at its fork
        position   0  1  2  3  2  3  4        as if the other branches were not there
        branch     0  0  1  1  0  0  2
        action     .  .  x  x  .  .  x        sampled, hence trained

    a sees p q; b sees p q a; r sees p q; s sees p q r; c sees p q r s. One forward pass gives every
    token the log-prob that it has in a row of its own, at a half to a third of the tokens. The
    token before a branch token in memory is the one that predicts it, so log-probs and V shift by
    one place, as in any causal model.
    """

    ids: torch.Tensor  # [B, L] long
    positions: torch.Tensor  # [B, L] long
    branch: torch.Tensor  # [B, L] long; -1 marks padding
    action_mask: torch.Tensor  # [B, L] bool, True where the policy sampled the token
    engine_log_probs: torch.Tensor  # [B, L] float, 0 where it did not
    turn: torch.Tensor  # [B, L] long, k where it was sampled in turn k, 0 elsewhere
    reward: torch.Tensor  # [B, T] float, of each turn
    group: torch.Tensor  # [B] long

    def to(self, device):
        """The same batch on `device`."""
        return Batch(**{name: value.to(device) for name, value in vars(self).items()})


def pack(episodes, pad_id=0, reward="terminal", multiple=1):
    """Lay `episodes` out as one Batch, its length L the least multiple of `multiple` that holds
    them. reward: as in Episode.turn_rewards.

    Padding is pad_id at position 0 on branch -1, and False or 0 in all else."""
    rows = [lay_out(episode) for episode in episodes]
    longest = max(len(row.ids) for row in rows)
    length = -(-longest // multiple) * multiple  # rounded up

    def pad(lists, filler, dtype):
        return torch.tensor([x + [filler] * (length - len(x)) for x in lists], dtype=dtype)

    rewards = [torch.tensor(e.turn_rewards(reward)) for e in episodes]
    return Batch(
        ids=pad([row.ids for row in rows], pad_id, torch.long),
        positions=pad([row.positions for row in rows], 0, torch.long),
        branch=pad([row.branch for row in rows], -1, torch.long),
        action_mask=pad([row.action_mask for row in rows], False, torch.bool),
        engine_log_probs=pad([row.log_probs for row in rows], 0.0, torch.float32),
        turn=pad([row.turn for row in rows], 0, torch.long),
        reward=nn.utils.rnn.pad_sequence(rewards, batch_first=True),
        group=torch.tensor([e.group for e in episodes]),
    )


@dataclass
class Row:
    """One dialogue of a Batch before it is padded: of each field one entry a token."""

    ids: list = field(default_factory=list)
    positions: list = field(default_factory=list)
    branch: list = field(default_factory=list)
    action_mask: list = field(default_factory=list)
    log_probs: list = field(default_factory=list)
    turn: list = field(default_factory=list)


def lay_out(episode):
    """The segments of a dialogue, one behind the other, as a Row.

    Turns are counted, whether the reply is a branch or trunk. Segments of one branch go on behind
    each other."""
    row, turn = Row(), 0
    ends = {}  # the next position of the trunk, 0, and of each branch so far
    for s in episode.segments:
        n = len(s.ids)
        sampled = s.log_probs is not None
        turn += sampled
        start = ends.get(s.branch, ends.get(0, 0))  # a new branch goes on from the trunk
        ends[s.branch] = start + n
        row.ids += s.ids
        row.positions += range(start, start + n)
        row.branch += [s.branch] * n
        row.action_mask += [sampled] * n
        row.log_probs += s.log_probs if sampled else [0.0] * n
        row.turn += [turn if sampled else 0] * n
    return row


def micro_batches(episodes, max_tokens, pad_id=0, reward="terminal", multiple=1):
    """Pack `episodes`, like lengths together, into batches of at most `max_tokens` padded tokens.

    The split is for memory only: losses are divided by the tokens of the whole optimizer batch, so
    it changes no gradient.
    """

    def padded_length(episode):
        tokens = sum(len(s.ids) for s in episode.segments)
        return -(-tokens // multiple) * multiple

    batches = []
    for episode in sorted(episodes, key=padded_length, reverse=True):
        # the first of a batch is its longest, and as long as it all are padded
        if not batches or padded_length(batches[-1][0]) * (len(batches[-1]) + 1) > max_tokens:
            batches.append([])
        batches[-1].append(episode)
    return [pack(batch, pad_id, reward, multiple) for batch in batches]


def empty_batch(pad_id=0):
    """A batch without an action: what a rank runs that has fewer micro-batches than another. A
    forward pass of a sharded model is a collective, so all ranks must make equally many; this one
    has a loss and gradients of zero."""
    return pack([Episode("nobody", -1, "", segments=[Segment([pad_id, pad_id])])], pad_id)


def split_batch(
    episodes,
    batch_size,
    count,
    max_tokens,
    seed,
    pad_id,
    device,
    all_gather_list,
    reward="terminal",
):
    """Cut this rank's `episodes` of a batch into `count` mini-batches (optimizer steps), those into
    micro-batches of at most `max_tokens` padded tokens (memory). Returns a list of lists of Batch.

    Split by global index, Episode.number of `batch_size`, so that the steps do not depend on the
    number of ranks. Every rank gets equally many micro-batches, `empty_batch` among them if need
    be; all_gather_list tells it what the others have.
    """
    order = random.Random(seed).sample(range(batch_size), batch_size)
    place = {number: i for i, number in enumerate(order)}
    parts = [[] for _ in range(count)]  # the dialogues of each mini-batch
    for episode in sorted(episodes, key=lambda e: place[e.number]):
        parts[place[episode.number] % count].append(episode)
    multiple = 128 if torch.device(device).type == "cuda" else 1  # fewer shapes to plan for
    minibatches = [micro_batches(part, max_tokens, pad_id, reward, multiple) for part in parts]
    # of each rank the numbers of micro-batches; of each mini-batch the largest
    counts_per_rank = all_gather_list([[len(micros) for micros in minibatches]])
    most = [max(counts) for counts in zip(*counts_per_rank)]
    for micros, wanted in zip(minibatches, most):
        micros += [empty_batch(pad_id)] * (wanted - len(micros))
    return [[batch.to(device) for batch in micros] for micros in minibatches if micros]


def tree_mask(branch):
    """Who sees whom, [B, 1, L, L] bool: key k is visible to query q if it is not later and is
    trunk, or of q's own branch.

    A padding token sees only itself: a row without any True would be a softmax over nothing,
    that is NaN.
    """
    length = branch.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=branch.device).tril()
    query, key = branch[:, :, None], branch[:, None, :]
    visible = causal & ((key == 0) | (key == query)) & (query >= 0)
    return (visible | torch.eye(length, dtype=torch.bool, device=branch.device))[:, None]


# ----------------------------------------------------------------------------- log-probs and values


def hidden_at_actions(body, batch):
    """Hidden states that *predict* the policy's tokens, [N, H]: one place before them in memory."""
    hidden = body(
        input_ids=batch.ids,
        position_ids=batch.positions,
        attention_mask=tree_mask(batch.branch),
        use_cache=False,
    ).last_hidden_state
    return hidden[:, :-1][batch.action_mask[:, 1:]]  # of [B, L, H]


def scatter_to_actions(flat, batch):
    """Put N numbers back in the places of the policy's tokens: [N] -> [B, L], 0 elsewhere."""
    return torch.zeros(batch.ids.shape, dtype=flat.dtype, device=flat.device).masked_scatter(
        batch.action_mask, flat
    )


def token_scores(head, hidden, targets, temperature):
    """log pi(target) and the entropy of pi for a chunk of positions, [n], [n]. Softmax in fp32, of
    logits / temperature."""
    log_probs = F.log_softmax(head(hidden).float() / temperature, dim=-1)  # [n, V]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], entropy


def recompute_activations(model, **how):
    """Let a transformers model make the activations of its blocks again in the backward pass
    instead of keeping them. (In training mode only; dropout is 0.) how: for torch's checkpoint."""
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False, **how})


class Policy(nn.Module):
    """pi_theta. `forward(batch)` returns (log_probs, entropy), each [B, L], 0 where the policy did
    not sample.

    Log-probs are those of the distribution that was sampled: same temperature, no top-p, no top-k.
    Logits are made for as many positions at a time as `logits` numbers hold (2^24, 64 MB; 2^27 on a
    GPU, where each chunk would round the head's gradient once more), and made again
    for the backward pass: at a vocabulary of 152,000 they would else be most of the memory, and
    chunks without recomputation save nothing, since all would be kept for the backward pass. Where
    one chunk is enough, as for the toy, there is nothing to save and nothing is made twice.
    """

    def __init__(self, model, temperature=1.0, logits=None):
        super().__init__()
        self.model, self.temperature, self.logits = model, temperature, logits

    def forward(self, batch):
        """(log pi of the sampled tokens, entropy), each [B, L]."""
        hidden = hidden_at_actions(self.model.base_model, batch)  # [N, H]
        targets = batch.ids[batch.action_mask]  # [N]
        head = self.model.get_output_embeddings()
        logits = self.logits or (2**27 if hidden.is_cuda else 2**24)
        chunk = max(1, logits // head.weight.shape[0])
        if len(targets) <= chunk:
            log_probs, entropy = token_scores(head, hidden, targets, self.temperature)
        else:
            pieces = [
                checkpoint(token_scores, head, h, t, self.temperature, use_reentrant=False)
                for h, t in zip(hidden.split(chunk), targets.split(chunk))
            ]
            log_probs, entropy = (torch.cat(column) for column in zip(*pieces))
        return scatter_to_actions(log_probs, batch), scatter_to_actions(entropy, batch)


class Critic(nn.Module):
    """V_phi: a copy of the policy's transformer, or (share) the given one, under a scalar head.

    V of a token is read from the state before it is emitted, which is what an action's baseline may
    know. The head starts at zero: a random one would open with advantages that are noise.
    """

    def __init__(self, model, share=False):
        super().__init__()
        self.body = model.base_model if share else copy.deepcopy(model.base_model)
        self.head = nn.Linear(model.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.to(next(model.parameters()).device)

    def forward(self, batch):
        """V before each sampled token, [B, L], 0 off the policy."""
        values = self.head(hidden_at_actions(self.body, batch))  # [N, 1]
        return scatter_to_actions(values.float()[:, 0], batch)


if __name__ == "__main__":
    Parser(
        description="Packs a small dialogue with two thoughts into one row, and prints the row "
        "and who sees whom in it."
    ).parse_args()
    print("""A dialogue of two turns in one row. 10 to 13 are the trunk (0): the user's lines, and
what later turns remember of the replies. 20 21 and 30 are what the policy sampled, hence trained:
each turn's thought and reply on a branch (1, 2) of its own, on which nothing grows. A branch goes
on where the trunk was left, and so does the trunk behind it.
""")
    batch = pack(
        [
            Episode(
                "example",
                0,
                "",
                segments=[
                    Segment([10, 11]),
                    Segment([20, 21], branch=1, log_probs=[0.0, 0.0]),
                    Segment([12]),
                    Segment([13]),
                    Segment([30], branch=2, log_probs=[0.0]),
                ],
            )
        ]
    )
    for name in ("ids", "positions", "branch", "action_mask"):
        print(f"{name:<12}", *(f"{int(x):3}" for x in getattr(batch, name)[0]))
    print("""
Who sees whom: x sees, . does not. A row is the token that looks (the query), a column the one that
is looked at (the key): nothing later, and of what is earlier the trunk and its own branch.
""")
    ids = batch.ids[0].tolist()
    print(" " * 12, *(f"{token:3}" for token in ids))
    for token, row in zip(ids, tree_mask(batch.branch)[0, 0]):
        print(f"{token:<12}", *("  x" if seen else "  ." for seen in row))
