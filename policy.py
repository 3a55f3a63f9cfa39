"""policy.py - what is trained: dialogues packed as rows, log-probs, the critic (RLVER 2.2, 2.3).

The policy pi_theta reads the dialogue so far and samples a reply, in think mode after a thought
that the user never sees. All trained log-probs come from `Policy.forward`, at the temperature of
sampling.

Run it alone to see how one dialogue is packed:  python policy.py
"""

from support.command_line import Parser
from support.ranks import all_gather_list

import math
import random
from collections import defaultdict
from dataclasses import dataclass
from operator import itemgetter

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from rollout import Episode, Segment

# ------------------------------------------------------------------------------------------ packing


@dataclass
class Batch:
    """Dialogues side by side, one packed row each, padded on the right. B dialogues, L tokens.

    Worked example, think mode: prompt p q; turn 1 samples a b (thought and reply); r is its visible
    text, encoded again, for later turns; s is the next prompt; turn 2 samples c. The trunk is
    p q r s, the branches are a b and c.

        memory     p  q  a  b  r  s  c        each branch stands inline, at its fork
        position   0  1  2  3  2  3  4        as if the other branches were not there
        branch     0  0  1  1  0  0  2
        action     .  .  x  x  .  .  x        sampled, hence trained

    a sees p q; b sees p q a; r sees p q; s sees p q r; c sees p q r s. One forward pass gives every
    token the same log-prob as one row per turn would, with about a third of the tokens of such
    rows.

    A sampled token is predicted by the token before it in memory (q for a, s for c), so log-probs
    and V shift by one place, as in any causal model. r stands behind b but is not sampled, so its
    log-prob is not needed.
    """

    ids: torch.Tensor  # [B, L] long
    positions: torch.Tensor  # [B, L] long
    branch: torch.Tensor  # [B, L] long; -1 marks padding
    action_mask: torch.Tensor  # [B, L] bool, True where the policy sampled the token
    engine_log_probs: torch.Tensor  # [B, L] float, 0 where it did not
    turn: torch.Tensor  # [B, L] long, k where it was sampled in turn k, 0 elsewhere
    reward: torch.Tensor  # [B, T] float, of each turn
    group: torch.Tensor  # [B] long
    number: torch.Tensor  # [B] long, of the dialogue in the whole batch

    def to(self, device):
        """The same batch on `device`."""
        return Batch(**{name: value.to(device) for name, value in vars(self).items()})


# What a padding token has in each field of Batch. Its id may be any one, because no other token
# sees it and nothing is predicted from it.
PADDING = {
    "ids": 0,
    "positions": 0,
    "branch": -1,
    "action_mask": False,
    "engine_log_probs": 0.0,
    "turn": 0,
}


def pack(episodes, reward="terminal", multiple=1):
    """Lay `episodes` out as one Batch. Its length L is that of the longest one, rounded up to a
    multiple of `multiple`. reward: "terminal" or "delta", see Episode.turn_rewards."""
    rows = [lay_out(episode) for episode in episodes]
    longest = max(len(row["ids"]) for row in rows)
    length = math.ceil(longest / multiple) * multiple
    fields = {
        name: torch.tensor([row[name] + [filler] * (length - len(row[name])) for row in rows])
        for name, filler in PADDING.items()
    }
    rewards = [torch.tensor(e.turn_rewards(reward)) for e in episodes]
    return Batch(
        **fields,
        reward=nn.utils.rnn.pad_sequence(rewards, batch_first=True),
        group=torch.tensor([e.group for e in episodes]),
        number=torch.tensor([e.number for e in episodes]),
    )


def lay_out(episode):
    """The segments of a dialogue, one behind the other: {field of Batch: a list with one entry per
    token}, for all fields but reward, group and number.

    A turn is a sampled segment, in a branch or in the trunk. A branch begins at the position where
    the trunk stands; its later segments continue it, and the trunk does not move."""
    row, turn = defaultdict(list), 0
    next_position = {0: 0}  # {branch: position of its next token}; branch 0 is the trunk
    for s in episode.segments:
        n = len(s.ids)
        sampled = s.log_probs is not None
        turn += sampled
        if s.branch not in next_position:
            next_position[s.branch] = next_position[0]  # it forks here
        start = next_position[s.branch]
        next_position[s.branch] = start + n
        row["ids"] += s.ids
        row["positions"] += range(start, start + n)
        row["branch"] += [s.branch] * n
        row["action_mask"] += [sampled] * n
        row["engine_log_probs"] += s.log_probs if sampled else [0.0] * n
        row["turn"] += [turn if sampled else 0] * n
    return row


def micro_batches(episodes, max_tokens, reward="terminal", multiple=1):
    """Pack `episodes` into batches of at most `max_tokens` tokens, padding included. (A dialogue
    that is longer than that has a batch to itself.) Dialogues of similar length share a batch, so
    that there is little padding. reward and multiple go to `pack`.

    The split is for memory only: losses are divided by the tokens of the whole optimizer batch, so
    it changes no gradient.
    """
    lengths = [sum(len(s.ids) for s in episode.segments) for episode in episodes]
    lengths = [math.ceil(length / multiple) * multiple for length in lengths]
    batches, capacity = [], 0  # capacity: how many dialogues the last batch may have
    for length, episode in sorted(zip(lengths, episodes), key=itemgetter(0), reverse=True):
        if not batches or len(batches[-1]) >= capacity:
            batches.append([])
            capacity = max_tokens // length  # the first dialogue of a batch is its longest one
        batches[-1].append(episode)
    return [pack(batch, reward, multiple) for batch in batches]


def dummy_batch():
    """A batch in which the policy samples nothing, so that its loss and its gradient are zero.

    A rank with fewer micro-batches than another runs it instead: a forward pass of a sharded model
    is a collective, so all ranks must make equally many."""
    return pack([Episode("dummy", -1, "", number=-1, segments=[Segment([0, 0])])])


def split_batch(episodes, batch_size, n_minibatches, max_tokens, seed, device, reward="terminal"):
    """Cut this rank's dialogues of a batch into mini-batches (one optimizer step each), and those
    into micro-batches (one forward pass each, to save memory). Returns a list of lists of Batch.

    episodes         this rank's dialogues
    batch_size       dialogues in the whole batch, over all ranks; Episode.number counts them from 0
    n_minibatches    how many mini-batches are made
    max_tokens       the most tokens in a micro-batch, padding included
    seed             of the shuffle, the same on all ranks
    device           where the batches go
    reward           "terminal" or "delta", see Episode.turn_rewards

    A collective call.
    """
    # 1. Shuffle the numbers of the whole batch.
    order = random.Random(seed).sample(range(batch_size), batch_size)

    # 2. Cut. They are dealt to the mini-batches like cards, so that the mini-batch of a dialogue
    # does not depend on the number of ranks. Each mini-batch is then cut to fit the memory.
    here = {episode.number: episode for episode in episodes}
    # on a GPU lengths are rounded up, so that there are fewer shapes to plan kernels for
    multiple = 128 if torch.device(device).type == "cuda" else 1
    minibatches = []
    for first in range(n_minibatches):
        hand = [here[number] for number in order[first::n_minibatches] if number in here]
        minibatches.append(micro_batches(hand, max_tokens, reward, multiple))

    # 3. Equalise the ranks: each must run as many micro-batches as the one that has most.
    counts_per_rank = all_gather_list([[len(micros) for micros in minibatches]])
    for micros, counts in zip(minibatches, zip(*counts_per_rank)):  # counts: one of each rank
        while len(micros) < max(counts):
            micros.append(dummy_batch())

    # 4. Move to the device.
    # A mini-batch is still empty only if no rank has a dialogue in it (where many were dropped).
    # It is left out: an optimizer step without a gradient would still move the weights, by momentum
    # and weight decay.
    return [[batch.to(device) for batch in micros] for micros in minibatches if micros]


def tree_mask(branch):
    """Which token sees which, [B, 1, L, L] bool: key k is visible to query q if it is not later
    and is in the trunk or in q's own branch.

    A padding token sees only itself: without any True in its row, the softmax would be over
    nothing, that is NaN.
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
    # hidden[:, i] predicts token i + 1: [B, L-1, H] -> [N, H]
    return hidden[:, :-1][batch.action_mask[:, 1:]]


def scatter_to_actions(flat, batch):
    """Put N numbers back in the places of the policy's tokens, and 0 at all other tokens: [N] ->
    [B, L]."""
    return flat.new_zeros(batch.ids.shape).masked_scatter(batch.action_mask, flat)


def token_scores(head, hidden, targets, temperature):
    """log pi(target) and the entropy of pi for a chunk of positions, [n], [n]. Softmax in fp32, of
    logits / temperature."""
    log_probs = F.log_softmax(head(hidden).float() / temperature, dim=-1)  # [n, V]
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, targets[:, None])[:, 0], entropy


def recompute_activations(model, **how):
    """Let a transformers model compute the activations of its blocks again in the backward pass
    instead of keeping them: those of all blocks may take more memory than all else. An update then
    takes a quarter longer. how: further arguments of torch's checkpoint.

    transformers does so in training mode only, so the model is put into it. That changes nothing
    else, because dropout is 0."""
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False, **how})


class Policy(nn.Module):
    """pi_theta. `forward(batch)` returns (log_probs, entropy), each [B, L], 0 at all tokens that
    the policy did not sample.

    Log-probs are those of the distribution that was sampled: same temperature, no top-p, no top-k.

    With a vocabulary of 152,000 the logits of all positions would take most of the memory. So they
    are computed in chunks of positions, of at most `max_logits` numbers each. Each chunk is
    computed again in the backward pass; otherwise all chunks would be kept for it. If one chunk is
    enough, as for the toy, nothing is computed twice.

    max_logits is 2^24 (64 MB in fp32) by default. On a GPU it is 2^27, so that chunks are few: each
    of them rounds the head's gradient once more.
    """

    def __init__(self, model, temperature=1.0, max_logits=None):
        super().__init__()
        self.model, self.temperature, self.max_logits = model, temperature, max_logits

    def forward(self, batch):
        """(log pi of the sampled tokens, entropy), each [B, L]."""
        hidden = hidden_at_actions(self.model.base_model, batch)  # [N, H]
        targets = batch.ids[batch.action_mask]  # [N]
        head = self.model.get_output_embeddings()
        max_logits = self.max_logits or (2**27 if hidden.is_cuda else 2**24)
        chunk = max(1, max_logits // head.weight.shape[0])  # positions
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
    """V_phi: a transformer under a scalar head. The transformer is the given model's: a second
    model, loaded for the critic, or, with LoRA, the policy's model, on which both have adapters.

    V of a token is read from the hidden state before the token is emitted: a baseline must not
    depend on the action. The head starts at zero: with a random one the first advantages would be
    noise.
    """

    def __init__(self, model):
        super().__init__()
        self.body = model.base_model
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.to(model.device)

    def forward(self, batch):
        """V before each sampled token, [B, L], 0 at all other tokens."""
        values = self.head(hidden_at_actions(self.body, batch))  # [N, 1]
        return scatter_to_actions(values.float()[:, 0], batch)


def main():
    """Pack the dialogue of Batch's docstring and print the row and its mask."""
    Parser(
        description="Packs a small dialogue with two thoughts into one row, and prints the row "
        "and which token attends to which in it."
    ).parse_args()
    print("""A dialogue of two turns in one row. 10 to 13 are the trunk (0): the user's lines, and
the visible text of the replies. The policy sampled 20 21 and 30, so these are trained. The thought
and reply of each turn are a branch (1, 2), which later turns do not see. A branch continues the
positions of the trunk, and the trunk then continues as if the branch were not there.
""")
    segments = [
        Segment([10, 11]),  # p q: the first prompt
        Segment([20, 21], branch=1, log_probs=[0.0, 0.0]),  # a b: the first reply, as sampled
        Segment([12]),  # r: its visible text
        Segment([13]),  # s: the next prompt
        Segment([30], branch=2, log_probs=[0.0]),  # c: the second reply
    ]
    batch = pack([Episode("example", 0, "", segments=segments)])
    for name in ("ids", "positions", "branch", "action_mask"):
        print(f"{name:<12}", *(f"{int(x):3}" for x in getattr(batch, name)[0]))
    print("""
Which token attends to which (x: yes, .: no). A row is a query, a column is a key. No token attends
to a later one. Of the earlier tokens, it attends to those of the trunk and to those of its own
branch.
""")
    ids = batch.ids[0].tolist()
    print(" " * 12, *(f"{token:3}" for token in ids))
    for token, row in zip(ids, tree_mask(batch.branch)[0, 0]):
        print(f"{token:<12}", *("  x" if seen else "  ." for seen in row))


if __name__ == "__main__":
    main()
