"""The seven checks of a nano.py (course/nano.md). Each is alone: what it needs beside the functions
that it is about is given here, slowly and row by row, so that one fault loses one check."""

import copy
import statistics
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import nano

# Three dialogues: the ids of each prompt, and those that were sampled behind it.
TALKS = [
    [([31, 45, 7], [81, 9, 2]), ([31, 45, 7, 81, 9, 60, 7], [110, 2])],
    [([31, 52], [13, 140, 15, 16])],
    [([31, 46, 7], [2]), ([31, 46, 8, 7], [77, 78, 79, 80, 2]), ([31, 8], [99, 2])],
]
EMOTIONS = [61, 9, 100]


def dialogues():
    """The TALKS; the second one met somebody else."""
    made = [nano.Dialogue({}, group) for group in (0, 1, 0)]
    for d, rows, emotion in zip(made, TALKS, EMOTIONS):
        d.rows, d.emotion = rows, emotion
    return made


def n_of(d):
    """How many tokens of a dialogue were sampled."""
    return sum(len(reply) for _, reply in d.rows)


# ------------------------------------------------------- what is given to a check that is not of it


def reward(d):
    return d.emotion / 100


def batch_of(d):
    ids = [torch.tensor(prompt + reply) for prompt, reply in d.rows]
    sampled = [torch.tensor([0] * len(prompt) + [1] * len(reply)) for prompt, reply in d.rows]
    ids, sampled = (nn.utils.rnn.pad_sequence(rows, True) for rows in (ids, sampled))
    return ids, sampled.bool()


def log_probs_of(policy, ids, sampled):
    """Each row alone and without its padding; each token from what stands before it."""
    log_pi, entropy = [], []
    for row, is_sampled in zip(ids, sampled):
        for t in is_sampled.nonzero()[:, 0].tolist():
            q = policy.model(row[None, :t]).logits[0, -1].double().log_softmax(-1)
            log_pi.append(q[row[t]].float())
            entropy.append(-(q.exp() * q).sum().float())
    return torch.stack(log_pi), torch.stack(entropy)


def group_advantages(rewards, groups):
    rewards, groups = rewards.tolist(), groups.tolist()
    found = []
    for r, group in zip(rewards, groups):
        own = [other for other, at in zip(rewards, groups) if at == group]
        equal = len(set(own)) == 1
        found.append(0.0 if equal else (r - statistics.mean(own)) / (statistics.stdev(own) + 1e-6))
    return torch.tensor(found)


def gae(reward, values, gamma, lam):
    v, n = [*values.tolist(), 0.0], len(values)
    delta = [gamma * v[t + 1] - v[t] + reward * (t == n - 1) for t in range(n)]
    found = [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, n)) for t in range(n)]
    return torch.tensor(found), torch.tensor(found) + values


def policy_loss(log_pi, old, advantages):
    total = 0
    for x, y, a in zip(log_pi, old, advantages):
        rho = (x - y).exp()
        is_clipped = rho > 1.2 if a > 0 else rho < 0.8
        total = total - ((1.2 if a > 0 else 0.8) if is_clipped else rho) * a
    return total


def value_loss(values, old, returns):
    total = 0
    for v, o, r in zip(values, old, returns):
        near = min(max(v.item(), o.item() - 0.5), o.item() + 0.5)
        far = v == near or abs(v - r) >= abs(near - r)
        total = total + 0.5 * ((v if far else near) - r) ** 2
    return total


class Table(nn.Module):
    """A critic: V of a token is looked up by the token before it."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.linspace(-2, 2, 400))

    def forward(self, ids, sampled):
        return self.table[ids[:, :-1][sampled[:, 1:]]]


def give(monkeypatch, *functions):
    """In place of nano's own."""
    for function in functions:
        monkeypatch.setattr(nano, function.__name__, function, raising=False)


@pytest.fixture
def policy(tiny_model):
    return SimpleNamespace(model=copy.deepcopy(tiny_model))


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------- reward and format


@pytest.mark.parametrize(
    "text, heard",  # None: malformed
    [
        ("<think>hurt, wants ears</think>I am here.", "I am here."),
        ("<think></think>\n\nWhy?", "Why?"),
        ("I am here.", None),
        ("<think>no end", None),
        ("no beginning</think>Why?", None),
        ("<think>nothing behind it</think> \n", None),
        ("Oh. <think>late</think>Why?", None),
        ("<think>a</think>Oh. <think>b</think>Why?", None),
        ("<think>a</think>Why?</think>", None),
    ],
)
def test_a_malformed_reply_ends_the_dialogue_with_nothing(text, heard, tiny_dir, tiny_tokenizer):
    """RLVER 2.3: a thought, then something visible, or the reward is 0. Else it is e_T / 100."""
    policy, d = nano.Policy(tiny_dir, True, []), nano.Dialogue({}, 0)
    d.emotion, d.prompt = 61, [1]
    reply = tiny_tokenizer(text)["input_ids"] + [tiny_tokenizer.eos_token_id]
    assert bool(policy.read(reply)[1]) == (heard is not None)
    nano.take(policy, d, reply)
    assert bool(d.ended) == (heard is None)
    assert nano.reward(d) == (0 if heard is None else 0.61)
    assert heard is None or policy.read(reply)[0] == d.said[-1]["text"] == heard


def test_a_direct_reply_has_no_form_to_keep(tiny_dir, tiny_tokenizer):
    """It is sent as it is, without its stop token."""
    reply = tiny_tokenizer("I am here.")["input_ids"] + [tiny_tokenizer.eos_token_id]
    assert nano.Policy(tiny_dir, False, []).read(reply) == ("I am here.", True)


# -------------------------------------------------------------------------------- mask, stop token


def test_a_row_is_a_reply_behind_the_prompt_that_it_answered(tiny_dir, tiny_tokenizer):
    """Thoughts of earlier turns are gone from a prompt. All that was sampled is in the row, with
    the stop token; a reply that was cut has none."""
    policy = nano.Policy(tiny_dir, True, [{"role": "system", "content": "Be warm."}])
    policy.read = lambda reply: ("I am here.", True)
    d, seen = nano.Dialogue({}, 0), "<|im_start|>system\nBe warm.<|im_end|>\n"
    thought = tiny_tokenizer("<think>lonely</think>I am here.")["input_ids"]
    replies, prompts = [thought + [tiny_tokenizer.eos_token_id], thought], []
    for line, reply in zip(["My sister forgot.", "Yes."], replies):
        d.messages.append({"role": "user", "content": line})
        seen += f"<|im_start|>user\n{line}<|im_end|>\n<|im_start|>assistant\n"
        prompts.append(seen)
        d.prompt = policy.prompt(d)
        nano.take(policy, d, reply)
        seen += "I am here.<|im_end|>\n"
    assert [tiny_tokenizer.decode(prompt) for prompt, _ in d.rows] == prompts
    assert [reply for _, reply in d.rows] == replies


def test_what_was_sampled_is_an_action_and_nothing_else_is():
    """No word of the user and no earlier reply, which has a row of its own, and no padding."""
    for d in dialogues():
        ids, sampled = nano.batch_of(d)
        assert ids.shape == sampled.shape and len(ids) == len(d.rows)
        for row, is_sampled, (prompt, reply) in zip(ids, sampled, d.rows):
            assert row[: len(prompt + reply)].tolist() == prompt + reply
            actions = range(len(prompt), len(prompt + reply))
            assert is_sampled.nonzero()[:, 0].tolist() == [*actions]


def test_a_log_prob_is_of_the_token_behind_what_was_seen(policy):
    """And so is the entropy; each row counts as if it were alone, without padding."""
    for d in dialogues():
        for ours, theirs in zip(
            log_probs_of(policy, *batch_of(d)), nano.log_probs_of(policy, *batch_of(d))
        ):
            close(theirs, ours)


# -------------------------------------------------------------------------------------------- GRPO


def test_advantages_are_within_the_group():
    """Shao 2024, 4.1: (r - mean) / (std + 1e-6), std unbiased; 0 where all rewards are equal, also
    in a group of one."""
    rewards = torch.tensor([0.1, 0.4, 0.2, 0.7, 0.3, 0.7, 0.5, 0.7])
    groups = torch.tensor([0, 0, 0, 2, 0, 2, 3, 2])
    close(nano.group_advantages(rewards, groups), group_advantages(rewards, groups))


def test_all_tokens_of_a_dialogue_have_its_advantage(policy, monkeypatch):
    """That of its reward in its group; a long dialogue is no more than one of the group."""
    give(monkeypatch, reward, batch_of, log_probs_of)
    ours = dialogues()
    nano.look_back(policy, None, ours)
    wanted = group_advantages(torch.tensor([0.61, 0.09, 1.0]), torch.tensor([0, 1, 0]))
    for d, advantage in zip(ours, wanted):
        close(d.advantages.expand(n_of(d)), advantage.expand(n_of(d)))


# --------------------------------------------------------------------------------------------- GAE


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (1.0, 0.9), (0.9, 0.8)])
def test_gae_is_a_sum_of_td_errors(gamma, lam):
    """Schulman 2016, eq. 16, in float64: A_t = sum of (gamma lam)^k delta_{t+k}; the reward is paid
    for the last token, and behind it V is 0."""
    values = torch.tensor([0.2, -0.4, 0.7, 0.1, 0.9])
    for theirs, ours in zip(nano.gae(0.61, values, gamma, lam), gae(0.61, values, gamma, lam)):
        close(theirs, ours)


def test_gae_goes_on_across_turns_and_is_whitened_over_the_step(policy, monkeypatch):
    """Behind the last token of a turn stands the first one of the next turn. (Here lambda is always
    0.9: with 1 nobody would see where it ends.) The advantages of all tokens together have mean 0
    and variance 1; the returns stay as they are."""
    give(monkeypatch, reward, batch_of, log_probs_of)
    monkeypatch.setattr(nano, "gae", lambda r, values, *_, **__: gae(r, values, 1.0, 0.9))
    ours, critic = dialogues(), Table()
    nano.look_back(policy, critic, ours)
    raw = []
    for d in ours:
        values = critic(*batch_of(d)).detach()
        advantages, returns = gae(reward(d), values, 1.0, 0.9)
        raw.append(advantages)
        close(d.values, values)
        close(d.returns, returns)
    raw = torch.cat(raw)
    close(torch.cat([d.advantages for d in ours]), (raw - raw.mean()) / raw.std())


def test_a_value_is_of_what_stands_before_the_token(tiny_dir):
    """A baseline must not depend on the action. Before it learns it is 0: its head is."""
    critic = nano.Critic(tiny_dir)
    ids, sampled = batch_of(dialogues()[1])
    assert critic(ids, sampled).tolist() == [0, 0, 0, 0]
    torch.manual_seed(0)
    for weights in critic.parameters():
        if not weights.any():
            nn.init.normal_(weights)
    before = critic(ids, sampled)
    ids[0, 3] += 1  # the second action
    assert (critic(ids, sampled) - before).abs().gt(1e-4).tolist() == [False, False, True, True]


# ----------------------------------------------------------------------------------- loss and clip


def test_the_ratio_is_clipped_where_it_went_too_far(policy):
    """Schulman 2017, eq. 7, summed: with A > 0 above 1.2, with A < 0 below 0.8, and nowhere else.
    There the gradient is 0; else it is -rho A."""
    rho = torch.tensor([0.5, 0.9, 1.5] * 2).double()
    advantages = torch.tensor([2.0, 2, 2, -3, -3, -3]).double()
    log_pi, old = (rho.log() - 1).requires_grad_(), torch.full([6], -1.0).double()
    loss = nano.policy_loss(log_pi, old, advantages)
    close(loss.item(), -(2 * (0.5 + 0.9 + 1.2) - 3 * (0.8 + 0.9 + 1.5)))
    loss.backward()
    close(log_pi.grad, torch.tensor([-1.0, -1.8, 0, 0, 2.7, 4.5]).double())


def test_the_value_moves_half_a_point_from_where_it_was():
    """The larger one of two squared errors, halved and summed: V's, and that of V within 0.5 of the
    old one. Where the second is larger, nothing is learned."""
    values = torch.tensor([0.9, 0.9, 0.3, -0.9]).requires_grad_()
    returns = torch.tensor([2.0, 0.0, 1.0, -2.0])
    loss = nano.value_loss(values, torch.zeros(4), returns)
    close(loss.item(), 0.5 * (1.5**2 + 0.9**2 + 0.7**2 + 1.5**2))
    loss.backward()
    close(values.grad, torch.tensor([0, 0.9, -0.7, 0]))


# ----------------------------------------------------------------------------------- normalisation


@pytest.mark.parametrize("algo", ["grpo", "ppo"])
def test_a_mini_batch_is_divided_by_all_its_tokens(algo, policy, monkeypatch):
    """Whatever dialogue and reply they stand in: the gradient is that of the sum of all losses,
    less 0.001 times the entropies, over the number of all sampled tokens."""
    give(monkeypatch, batch_of, log_probs_of, policy_loss, value_loss)
    ours, critic, total = dialogues(), Table() if algo == "ppo" else None, 0
    for k, d in enumerate(ours):
        log_pi, entropy = log_probs_of(policy, *batch_of(d))
        swing = torch.arange(n_of(d)).sin()
        d.old, d.advantages = log_pi.detach() + 0.1 * swing, (swing + k).cos()
        total = total + policy_loss(log_pi, d.old, d.advantages) - 0.001 * entropy.sum()
        if critic:
            values = critic(*batch_of(d))
            d.values, d.returns = values.detach() + 0.1 * swing, torch.full([n_of(d)], reward(d))
            total = total + value_loss(values, d.values, d.returns)
    weights = [*policy.model.parameters(), *(critic.parameters() if critic else ())]
    wanted = torch.autograd.grad(total / sum(map(n_of, ours)), weights)
    nano.backward(policy, critic, ours)
    for w, gradient in zip(weights, wanted):
        assert (w.grad - gradient).abs().max() <= 1e-5 * gradient.abs().max()


# ---------------------------------------------------------------------------------------- one step


class Notes(torch.optim.SGD):
    """Notes the norm of each model's gradient, and moves nothing."""

    def step(self, closure=None):
        parts = [[w.grad.norm() for w in group["params"]] for group in self.param_groups]
        self.norms.append([torch.stack(part).norm().item() for part in parts])


def test_a_step_is_four_optimizer_steps_on_whole_dialogues(monkeypatch):
    """Each dialogue is in one of them. The gradients of each model are clipped by themselves to the
    norm 1, and gone before the next; what is old is looked up once, before all."""
    policy, critic, events = SimpleNamespace(model=nn.Linear(4, 1)), nn.Linear(1, 1), []
    optimizer = Notes(policy.model.parameters(), lr=0.1)
    optimizer.add_param_group({"params": critic.parameters()})
    optimizer.norms = []

    def look_back(policy, critic, dialogues):
        events.append(("look_back", len(dialogues)))
        for d in dialogues:
            d.old = d.advantages = d.values = d.returns = torch.zeros(n_of(d))

    def backward(policy, critic, dialogues):
        events.append(("backward", len(dialogues)))
        met.extend(map(id, dialogues))
        scale = [3, 0.1][len(events) % 2]  # those below the norm stay as they are
        (scale * policy.model(torch.ones(4)) + 0.2 * scale * critic(torch.ones(1))).backward()

    ours, met = [*dialogues(), *dialogues(), *dialogues()], []
    give(monkeypatch, look_back, backward)
    nano.update(policy, critic, optimizer, ours)
    assert events[0] == ("look_back", 9) and [name for name, _ in events[1:]] == ["backward"] * 4
    assert sorted(met) == sorted(map(id, ours)) and min(n for _, n in events) > 0
    big, small = [1.0, 0.6 * 2**0.5], [0.1 * 5**0.5, 0.02 * 2**0.5]
    close(torch.tensor(optimizer.norms), torch.tensor([big, small] * 2))


def test_old_log_probs_are_those_before_the_step(policy, monkeypatch):
    """Numbers, not functions of the weights: else the ratio has no gradient that means anything."""
    give(monkeypatch, reward, batch_of, log_probs_of, group_advantages)
    ours = dialogues()
    nano.look_back(policy, None, ours)
    for d in ours:
        assert not d.old.requires_grad
        close(d.old, log_probs_of(policy, *batch_of(d))[0].detach())
