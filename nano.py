"""nano.py - the whole of RLVER in one file (arXiv 2507.03112). A language model talks with a user
whose emotion, 0 to 100, moves after every reply. The last emotion is the reward. PPO or GRPO makes
the model better at comforting people, with or without thinking before it speaks.

    python nano.py --think          GRPO with thoughts, on the toy: a minute or two on a laptop
    python nano.py --algo ppo       PPO without thoughts
    python nano.py --model DIR --user MODEL@URL

It is to be read from top to bottom, beside the paper. What makes it short: a row is one reply
behind its own prompt, which the chat template writes anew for each turn. rlver.py is the one for
long runs: it packs a dialogue into one row, samples with vLLM, uses many GPUs, logs, resumes, waits
for servers, and refuses bad input in one line, where this file ends in Python's own traceback. They
differ in one thing: where the text of a direct reply is not encoded to the ids that were sampled,
later turns see the ids there, and the text here."""

import argparse
import asyncio
import json
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import trange
from transformers import AutoModelForCausalLM, AutoTokenizer

from emotion import clamp_change, emotion_level, move_emotion
from toy import world

# The constants. In brackets: the paper's, where it has others.
GROUPS, GROUP = 4, 8  # GRPO: groups in a step, dialogues in a group (32 of 4)
DIALOGUES = 32  # PPO: dialogues in a step
TURNS, START = 8, 30  # the most replies of a dialogue; the emotion e_0
MINIBATCHES = 4  # optimizer steps on the dialogues of one step (1)
LR, CRITIC_LR, WARMUP = 3e-4, 1e-3, 3  # (1e-6, 5e-6, 50 steps)
GAMMA, LAMBDA = 1.0, 1.0
CLIP, VALUE_CLIP, ENTROPY, MAX_NORM = 0.2, 0.5, 0.001, 1.0
MAX_TOKENS = 48  # of a reply with its thought (5000)
HELD_OUT = 128  # people who are never trained on (100)
TRIES = 3  # of a question whose answer cannot be read
ROWS = 64  # rows in one forward pass: this changes the memory, and no number

PROMPTS = Path(__file__).parent / "prompts" / "en"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BF16 = DEVICE.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
in_bf16 = torch.autocast(DEVICE.type, torch.bfloat16, enabled=BF16)  # weights stay fp32


# -------------------------------------------------------------- the user (SAGE 2.1; RLVER 2.1)


@dataclass
class Dialogue:
    """One user and the policy."""

    person: dict  # who the user is: persona, background, hidden need
    group: int  # dialogues of a group have the same user and the same first line
    emotion: int = START  # e_t
    planning: dict = field(default_factory=dict)  # h_emo: how the user took the last reply
    said: list = field(default_factory=list)  # as the user sees it: [{"speaker", "text"}]
    messages: list = field(default_factory=list)  # as the policy sees it: without its thoughts
    prompt: list = ()  # the ids in front of the next reply
    rows: list = field(default_factory=list)  # what is trained: [(ids of the prompt, ids sampled)]
    ended: bool = False


def read_prompt(name):
    """The text of a prompt file."""
    return (PROMPTS / f"{name}.txt").read_text("utf-8").strip()


def question_of(name, d):
    """(the question `name` to the user's model about dialogue d, its code). The policy never sees
    these four letters: who writes them into the answer also writes the number behind them."""
    code = "".join(random.choices("bcdfghjkmnpqrstvwxz", k=4))
    # "<" is escaped, so that no reply can close a tag of the prompt
    planning, dialogue = (json.dumps(x).replace("<", "\\u003c") for x in (d.planning, d.said))
    values = {
        **d.person,  # its scene, what happened, and its task, the hidden need
        "code": code,
        "purpose": read_prompt("vanilla/purpose_eq"),
        "persona": d.person["player"],
        "emotion": d.emotion,
        "level": emotion_level(d.emotion),
        "planning": planning,
        "dialogue": dialogue,
    }
    # All in one pass: a reply that spells {{emotion}} stays a reply.
    fill = re.compile(r"\{\{(\w+)\}\}").sub
    return fill(lambda match: str(values[match[1]]), read_prompt(f"vanilla/{name}")), code


def read_answer(text, code):
    """The JSON object of an answer, behind a thought and within a fence, if there are any. Raises
    ValueError or KeyError."""
    text = text.rpartition("</think>")[2].strip().strip("`").removeprefix("json")
    answer = json.loads(text, strict=False)
    decides, kind = ("goodbye", bool) if "response" in answer else ("change", int)
    if answer["code"] != code or type(answer[decides]) is not kind:
        raise ValueError
    return answer


def ask(user, name, dialogues):
    """The answers of the user's model to the same question about each dialogue, all asked at once.
    What cannot be read is asked for again; after TRIES times that is a KeyError."""
    questions, answers = [question_of(name, d) for d in dialogues], {}
    for attempt in range(TRIES):
        complaint = "\n\n" + read_prompt("complaint") if attempt else ""
        todo = [k for k in range(len(questions)) if k not in answers]
        for k, text in zip(todo, user([questions[k][0] + complaint for k in todo])):
            with suppress(ValueError, KeyError):
                answers[k] = read_answer(text, questions[k][1])
    return [answers[k] for k in range(len(questions))]


def feel(d, answer):
    """f_emo (SAGE eq. 1): the reply moves the emotion, by 10 at most. At 100 and at 0 it is
    over."""
    d.emotion = move_emotion(d.emotion, clamp_change(answer["change"]))
    inside = answer["activity"] + "\n" + answer["analysis"]
    d.planning = {"objective": answer["target_completion"], "subjective": inside}
    d.ended = not 0 < d.emotion < 100


def say(d, answer):
    """f_reply (SAGE eq. 2): the user's next line, which may be a goodbye, but not as the first
    one."""
    line = answer["response"].strip()
    d.ended = bool(d.said) and answer["goodbye"]
    d.said.append({"speaker": "me", "text": line})
    d.messages.append({"role": "user", "content": line})


def toy_user(prompts):
    """The toy's script in place of a language model: it reads the prompts and answers in JSON."""
    return [asyncio.run(world.ScriptedModel()(prompt)) for prompt in prompts]


def model_user(name):
    """A language model MODEL@URL, on a server that speaks OpenAI's protocol."""
    from openai import OpenAI  # here: the toy needs none

    model, _, url = name.partition("@")
    client = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "no-key"))

    def answer(prompt):
        messages = [{"role": "user", "content": prompt}]
        made = client.chat.completions.create(model=model, messages=messages, temperature=0)
        return made.choices[0].message.content or ""

    return lambda prompts: [*ThreadPoolExecutor(64).map(answer, prompts)]


# ------------------------------------------------------------- the policy's replies (RLVER 2.3)


class Policy(nn.Module):
    """pi_theta: a causal language model and its tokenizer."""

    def __init__(self, name, think, system=""):
        super().__init__()
        # no dropout (eval): the same tokens get the same log-probs each time
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        self.tokenizer, self.think = AutoTokenizer.from_pretrained(name), think
        self.system = [{"role": "system", "content": system}] if system else []
        stop = self.model.generation_config.eos_token_id
        self.stops = {*stop} if isinstance(stop, list) else {stop}
        self.longest = self.model.config.get_text_config().max_position_embeddings
        self.to(DEVICE)

    def prompt(self, d):
        """The ids from the beginning of dialogue d to its next reply. Thoughts of earlier turns are
        gone."""
        how = {"tokenize": False, "add_generation_prompt": True}
        text = self.tokenizer.apply_chat_template(self.system + d.messages, **how)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    @torch.no_grad()
    @in_bf16
    def sample(self, prompts):
        """A reply behind each prompt, drawn from pi itself: temperature 1, no top-p, no top-k. A
        list of lists of ids; each ends with a stop token, unless MAX_TOKENS came first."""
        if not prompts:
            return []
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])  # [B, P], padded in front
        seen = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])  # [B, P]
        how = {"do_sample": True, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "pad_token_id": 0}
        out = self.model.generate(
            ids.to(DEVICE), attention_mask=seen.to(DEVICE), max_new_tokens=MAX_TOKENS, **how
        )  # [B, P + T]
        replies = []
        for reply in out[:, width:].tolist():
            ends = [k + 1 for k, token in enumerate(reply) if token in self.stops]
            replies.append(reply[: ends[0] if ends else None])
        return replies

    def read(self, reply):
        """(what the user hears, is the form kept?) of sampled ids. A thinking reply is
        <think>...</think> with something visible behind it, and has each tag once (RLVER 2.3)."""
        text = self.tokenizer.decode(reply[:-1] if reply[-1] in self.stops else reply).strip()
        if not self.think:
            return re.sub("<think>.*?(</think>|$)", "", text, flags=re.DOTALL).strip(), True
        visible = text.rpartition("</think>")[2].strip()
        once = text.count("<think>") == text.count("</think>") == 1
        return visible, once and text.startswith("<think>") and visible != ""


# ------------------------------------------------------------------- dialogues (RLVER, Figure 1)


def talking(dialogues):
    """Those that have not ended."""
    return [d for d in dialogues if not d.ended]


def play(policy, user, dialogues):
    """Hold all dialogues in step, to their ends."""
    heads = {d.group: d for d in dialogues}  # one of each group: its first line is said by all
    first = dict(zip(heads, ask(user, "reply", [*heads.values()])))
    for d in dialogues:
        say(d, first[d.group])
    for turn in range(1, TURNS + 1):
        for d in talking(dialogues):
            d.prompt = policy.prompt(d)
            # no room for a reply: the emotion so far is the last one
            d.ended = len(d.prompt) + MAX_TOKENS > policy.longest
        now = talking(dialogues)
        for d, reply in zip(now, policy.sample([d.prompt for d in now])):
            take(d, reply, *policy.read(reply))
        # the last reply is felt, and not answered
        for question, hear in [("emotion", feel), ("reply", say)][: 1 + (turn < TURNS)]:
            now = talking(dialogues)
            for d, answer in zip(now, ask(user, question, now)):
                hear(d, answer)


def take(d, reply, visible, is_well_formed):
    """Add a reply to dialogue d. A malformed one is never sent: it ends the dialogue, and costs
    all."""
    d.rows.append((d.prompt, reply))  # the stop token too: to stop is an action
    if not is_well_formed:
        d.emotion, d.ended = 0, True
    d.said.append({"speaker": "friend", "text": visible})
    d.messages.append({"role": "assistant", "content": visible})


def reward(d):
    """r = e_T / 100, paid once, for the last token that the policy sampled (RLVER 2.1)."""
    return d.emotion / 100


# ------------------------------------------------------------------- rows, log-probs, values


def batches_of(rows):
    """Rows side by side: [(ids [B, L], sampled [B, L])], ROWS in each, padded behind."""
    batches = []
    for some in (rows[k : k + ROWS] for k in range(0, len(rows), ROWS)):
        length = max(len(prompt) + len(reply) for prompt, reply in some)
        ids = torch.zeros(len(some), length, dtype=torch.long)  # [B, L]
        sampled = torch.zeros(len(some), length, dtype=torch.bool)  # [B, L]
        for b, (prompt, reply) in enumerate(some):
            end = len(prompt) + len(reply)
            ids[b, :end] = torch.tensor(prompt + reply)
            # Only what the policy sampled here is an action. The user's words are none; earlier
            # replies stand in this prompt too, and are trained in rows of their own.
            sampled[b, len(prompt) : end] = True
        batches.append((ids.to(DEVICE), sampled.to(DEVICE)))
    return batches


@in_bf16
def log_probs_of(policy, batch):
    """(log pi, entropy) at the N sampled tokens of a batch, row by row: [N], [N]. Each is predicted
    by the token before it. No token sees the padding, which stands behind all."""
    ids, sampled = batch
    logits = policy.model(ids).logits[:, :-1][sampled[:, 1:]]  # [B, L, V] -> [N, V]
    log_pi = logits.float().log_softmax(-1)  # [N, V]
    entropy = -(log_pi.exp() * log_pi).sum(-1)  # [N]
    return log_pi.gather(-1, ids[sampled][:, None])[:, 0], entropy


class Critic(nn.Module):
    """V_phi: a second model, with a head that begins at zero: at first the advantages are the
    rewards."""

    def __init__(self, name):
        super().__init__()
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).eval()
        self.body = model.base_model
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        self.to(DEVICE)

    @in_bf16
    def forward(self, batch):
        """V before each sampled token, [N]: a baseline must not depend on the action."""
        ids, sampled = batch
        hidden = self.body(ids).last_hidden_state[:, :-1][sampled[:, 1:]]  # [B, L, H] -> [N, H]
        return self.head(hidden).float()[:, 0]  # [N]


# --------------------------------------------- advantages: GRPO (Shao 2024, 4.1), PPO's GAE


def group_advantages(rewards, groups):
    """A = (r - mean) / (std + 1e-6), within the group; 0 where all its rewards are equal: no
    dialogue is better than another. rewards, groups: [D]; returns [D]."""
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        r = rewards[groups == group]
        if (r != r[0]).any():
            advantages[groups == group] = (r - r.mean()) / (r.std() + 1e-6)
    return advantages


def gae(reward, values, gamma=GAMMA, lam=LAMBDA):
    """Generalised advantage estimation in one dialogue (Schulman 2016, eq. 16):

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}

    t + 1 is the next token that the *policy* sampled, across turns. Behind the last one V is 0,
    because the reward is known there. values: [N]; returns A and A + V, both [N]."""
    advantages, next_value, next_advantage = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(len(values))):
        r = reward if t == len(values) - 1 else 0.0
        next_advantage = r + gamma * next_value - values[t] + gamma * lam * next_advantage
        advantages[t], next_value = next_advantage, values[t]
    return advantages, advantages + values


def numbers_of(policy, critic, dialogues):
    """What the update knows of each sampled token of each dialogue, a list of [4, N_d]: log pi_old,
    the advantage, V_old and the return (GRPO: zeros), as they are before the first optimizer
    step."""
    rewards = torch.tensor([reward(d) for d in dialogues], device=DEVICE)  # [D]
    sizes = [sum(len(reply) for _, reply in d.rows) for d in dialogues]
    batches = batches_of([row for d in dialogues for row in d.rows])
    with torch.no_grad():
        old = torch.cat([log_probs_of(policy, batch)[0] for batch in batches])  # [N]
        values = (
            torch.cat([critic(batch) for batch in batches]) if critic else torch.zeros_like(old)
        )
    if critic:
        pairs = [gae(r.item(), v) for r, v in zip(rewards, values.split(sizes))]
        advantages, returns = (torch.cat(column) for column in zip(*pairs))  # [N], [N]
        # whitening, over all tokens of the step
        advantages = (advantages - advantages.mean()) / (advantages.var() + 1e-8).sqrt()
    else:
        groups = torch.tensor([d.group for d in dialogues], device=DEVICE)
        of_dialogue = group_advantages(
            rewards, groups
        )  # [D]: all tokens of a dialogue have the same
        advantages = of_dialogue.repeat_interleave(torch.tensor(sizes, device=DEVICE))  # [N]
        returns = values
    return torch.stack([old, advantages, values, returns]).split(sizes, dim=1)


# ------------------------------------------------------------------------ losses and update


def policy_loss(log_pi, old, advantages):
    """-sum min(rho A, clip(rho, 1 - eps, 1 + eps) A), rho = pi / pi_old (Schulman 2017, eq. 7)."""
    rho = (log_pi - old).exp()  # [N]
    return -torch.minimum(rho * advantages, rho.clamp(1 - CLIP, 1 + CLIP) * advantages).sum()


def value_loss(values, old, returns):
    """0.5 sum max((V - R)^2, (V' - R)^2), where V' is V, VALUE_CLIP from V_old at most."""
    near = old + (values - old).clamp(-VALUE_CLIP, VALUE_CLIP)  # [N]
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum()


def backward(policy, critic, rows, numbers):
    """Add up the gradients of one mini-batch. numbers: [4, N], of `numbers_of`. The losses are sums
    over tokens, divided by the tokens of the *whole* mini-batch: no row, and no part, weighs
    more."""
    done, n_tokens = 0, numbers.shape[1]
    for batch in batches_of(rows):
        log_pi, entropy = log_probs_of(policy, batch)
        old, advantages, old_values, returns = numbers[:, done : done + len(log_pi)]
        loss = policy_loss(log_pi, old, advantages) - ENTROPY * entropy.sum()
        if critic:
            loss = loss + value_loss(critic(batch), old_values, returns)
        (loss / n_tokens).backward()
        done += len(log_pi)


def update(policy, critic, optimizer, dialogues, rng):
    """One step of RLVER: MINIBATCHES optimizer steps, each on whole dialogues."""
    dialogues = [d for d in dialogues if d.rows]
    numbers = numbers_of(policy, critic, dialogues)
    order = rng.permutation(len(dialogues))
    for hand in (order[k::MINIBATCHES] for k in range(MINIBATCHES)):
        rows = [row for k in hand for row in dialogues[k].rows]
        backward(policy, critic, rows, torch.cat([numbers[k] for k in hand], dim=1))
        for part in optimizer.param_groups:  # policy and critic, each for itself
            nn.utils.clip_grad_norm_(part["params"], MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------------------- the whole loop


def evaluate(policy, user, people, when):
    """Print the mean final emotion of a dialogue with each of `people`, and the first dialogue."""
    dialogues = [Dialogue(person, k) for k, person in enumerate(people)]
    play(policy, user, dialogues)
    score = np.mean([d.emotion for d in dialogues])
    print(f"\n{when} training, {len(people)} held-out users: mean final emotion {score:.1f}")
    for line in dialogues[0].said:
        print(f"  {'user' if line['speaker'] == 'me' else 'policy':8}{line['text']}")


def people_of(user):
    """(people to train on, held-out people): the toy's, or the few that are shipped."""
    if user == "toy":
        return world.profiles("train"), world.profiles("heldout", HELD_OUT)
    files = [PROMPTS.parent / f"profiles/en_{split}.jsonl" for split in ("train", "test")]
    return [[*map(json.loads, file.read_text("utf-8").strip().split("\n"))] for file in files]


def train(args, policy, critic, user):
    """Evaluate, train for `args.steps` steps, evaluate."""
    people, held_out = people_of(args.user)
    parts = [{"params": policy.parameters(), "lr": LR}]
    if critic:
        parts.append({"params": critic.parameters(), "lr": CRITIC_LR})
    optimizer = torch.optim.AdamW(parts)
    # the learning rates rise in the first steps
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARMUP))
    n_groups, size = (DIALOGUES, 1) if critic else (GROUPS, GROUP)
    rng = np.random.default_rng(args.seed)
    evaluate(policy, user, held_out, "before")
    for step in (bar := trange(args.steps)):
        # in turn: eight of the toy's people in a row have all eight needs
        chosen = [people[(step * n_groups + k) % len(people)] for k in range(n_groups)]
        dialogues = [Dialogue(person, k) for k, person in enumerate(chosen) for _ in range(size)]
        play(policy, user, dialogues)
        update(policy, critic, optimizer, dialogues, rng)
        warmup.step()
        bar.set_postfix_str(f"emotion {np.mean([d.emotion for d in dialogues]):.0f}")
    evaluate(policy, user, held_out, "after")


def main(argv=None):
    """Do what the flags say."""
    parser = argparse.ArgumentParser(
        description="RLVER in one file: train a model to comfort people."
    )
    add = parser.add_argument
    add("--algo", choices=["grpo", "ppo"], default="grpo")
    add("--think", action="store_true", help="think before each reply")
    add("--steps", type=int, default=16, metavar="N")
    add("--seed", type=int, default=0, metavar="N")
    add("--model", default="toy", help="what is trained: toy, a directory, or a name on the hub")
    add("--user", default="toy", help="who plays the user: toy, or MODEL@URL")
    args = parser.parse_args(argv)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    name, system = world.base_policy(args.think), ""
    if args.model != "toy":  # the toy knows its task without being told
        name = args.model
        system = read_prompt("policy_think" if args.think else "policy_direct")
    policy = Policy(name, args.think, system)
    critic = Critic(name) if args.algo == "ppo" else None
    train(args, policy, critic, toy_user if args.user == "toy" else model_user(args.user))


if __name__ == "__main__":
    main()
