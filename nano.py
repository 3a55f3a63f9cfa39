"""nano.py - the whole of RLVER in one file (arXiv 2507.03112). A language model talks with a user
whose emotion, 0 to 100, moves after every reply. The last emotion is the reward, for which PPO or
GRPO trains the model, with or without thinking before it speaks.

    python nano.py --think          GRPO with thoughts, on the toy: a minute or two on a laptop
    python nano.py --algo ppo --model DIR --user MODEL@URL

Read it beside the paper. It is short because a row is one reply after its own prompt, which the
chat template writes anew for each turn. rlver.py is for long runs: it packs a dialogue into one
row, samples with vLLM, uses many GPUs, logs, resumes, waits for servers, and refuses bad input in
one line (here it is a traceback). From the same dialogues both compute the same numbers, unless the
text of a direct reply is encoded to other ids than were sampled: rlver.py keeps the sampled ones."""

import argparse
import asyncio
import copy
import json
import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import trange
from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast

from emotion import clamp_change, emotion_level, move_emotion
from toy import world

# The constants. In parentheses: the paper's value, where it is another one.
GROUPS, GROUP = 4, 8  # groups in a step (32), dialogues in a group (4). PPO has groups of one
TURNS, START = 8, 30  # replies of a dialogue, at most; the emotion e_0
MINIBATCHES = 4  # optimizer steps on the dialogues of one step (1)
LR, CRITIC_LR, WARMUP = 3e-4, 1e-3, 3  # they rise for WARMUP steps (1e-6, 5e-6, 50)
GAMMA, LAMBDA = 1.0, 1.0
CLIP, VALUE_CLIP, ENTROPY, MAX_NORM = 0.2, 0.5, 0.001, 1.0  # a KL: none, as in the paper
MAX_TOKENS = 48  # the most tokens of a reply with its thought (5000)
TRIES = 3  # how often a question is asked until its answer can be read

PROMPTS = Path(__file__).parent / "prompts/en"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HAS_BF16 = DEVICE == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
in_bf16 = torch.autocast(DEVICE, torch.bfloat16, enabled=HAS_BF16)  # weights stay fp32


# -------------------------------------------------------------- the user (SAGE 2.1; RLVER 2.1)
class Dialogue:
    """One user and the policy. `look_back` adds what the losses need: `old`, `advantages`, ..."""

    def __init__(self, person, group):
        self.person = person  # who the user is: persona, background, hidden need
        self.group = group  # dialogues of a group have the same user and the same first line
        self.emotion = START  # e_t
        self.planning = {}  # h_emo: how the user took the last reply
        self.said = []  # [{"speaker", "text"}]; the user is "me", the policy "friend"
        self.messages = []  # the same for the chat template; no thoughts are in it
        self.rows = []  # what is trained: [(ids of the prompt, ids that were sampled)]
        self.ended = False


def read_prompt(name):
    """The text of a prompt file."""
    return (PROMPTS / f"{name}.txt").read_text("utf-8").strip()


def question_of(name, d):
    """(the question `name` to the user's model about dialogue d, its code). The answer must repeat
    these four letters. The policy never sees them, so no reply can bring an answer with it."""
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
    # All in one pass: if a reply spells {{emotion}}, it stays as it is.
    prompt = read_prompt(f"vanilla/{name}")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: str(values[match[1]]), prompt), code


def read_answer(text, code):
    """The JSON object of an answer. It may follow a thought, and stand in a Markdown fence."""
    text = text.rpartition("</think>")[2].strip().strip("`").removeprefix("json")
    answer = json.loads(text, strict=False)
    decides, kind = ("goodbye", bool) if "response" in answer else ("change", int)
    if answer["code"] != code or type(answer[decides]) is not kind:
        raise ValueError
    return answer


def ask(user, name, hear, dialogues):
    """Ask the user's model the question `name` about each dialogue that goes on, all at once, and
    let `hear` take the answers. What cannot be read is asked for again, with another code."""
    todo = [d for d in dialogues if not d.ended]
    for _ in range(TRIES):
        asked, unread = [question_of(name, d) for d in todo], []
        texts = user([question for question, _ in asked])
        for d, (_, code), text in zip(todo, asked, texts):
            try:
                hear(d, read_answer(text, code))
            except (ValueError, LookupError, TypeError, AttributeError):
                unread.append(d)
        todo = unread
    if todo:
        raise ValueError(f"asked {TRIES} times, the user's model gave no answer that can be read")


def feel(d, answer):
    """f_emo (SAGE eq. 1): the reply moves the emotion, by 10 at most. 100 or 0 is the end."""
    inside = answer["activity"] + "\n" + answer["analysis"]
    d.planning = {"objective": answer["target_completion"], "subjective": inside}
    d.emotion = move_emotion(d.emotion, clamp_change(answer["change"]))
    d.ended = not 0 < d.emotion < 100


def say(d, answer):
    """f_reply (SAGE eq. 2): the user's next line. It may be a goodbye, but not as the first."""
    line = answer["response"].strip()
    d.ended = bool(d.said) and answer["goodbye"]
    d.said.append({"speaker": "me", "text": line})
    d.messages.append({"role": "user", "content": line})


def user_and_people(name):
    """(the user's model: a function from prompts to answers; people to train on; held-out people).
    toy: a script that reads the prompts and answers in JSON. MODEL@URL: a language model on a
    server that speaks OpenAI's protocol, and the few people that are shipped."""
    if name == "toy":
        script, people = world.ScriptedModel(), map(world.profiles, ("train", "heldout"))
        return lambda prompts: [asyncio.run(script(prompt)) for prompt in prompts], *people
    from openai import OpenAI  # imported here: the toy does not need it

    model, _, url = name.partition("@")
    server = OpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "no-key"))
    create = server.chat.completions.create

    def answer(prompt):
        made = create(model=model, messages=[{"role": "user", "content": prompt}], temperature=0)
        return made.choices[0].message.content or ""

    files = [PROMPTS.parent / f"profiles/en_{split}.jsonl" for split in ("train", "test")]
    people = [[*map(json.loads, file.read_text("utf-8").splitlines())] for file in files]
    return lambda prompts: [*ThreadPoolExecutor(64).map(answer, prompts)], *people


# ------------------------------------------------------------- the policy's replies (RLVER 2.3)
def padded(rows, side="right"):
    """One tensor [B, L] of lists of numbers; the shorter ones get zeros on one `side`."""
    return pad_sequence([torch.tensor(row) for row in rows], True, padding_side=side).to(DEVICE)


class Policy:
    """pi_theta: a causal language model, loaded without dropout, and what tokenizer.json holds."""

    def __init__(self, name, think, system):
        self.model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32).to(DEVICE)
        self.tokenizer, self.think = PreTrainedTokenizerFast.from_pretrained(name), think
        self.system = system  # the messages in front of every dialogue, one or none
        stops = self.model.generation_config.eos_token_id  # one id, or a list
        self.stops = np.ravel(stops)
        # drawn from pi itself: temperature 1, no top-p, no top-k, no penalties
        draw = {"do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": stops}
        self.model.generation_config = GenerationConfig(max_new_tokens=MAX_TOKENS, **draw)
        self.longest = self.model.config.max_position_embeddings

    def prompt(self, d):
        """The ids in front of the next reply of dialogue d. Thoughts of earlier turns are gone."""
        chat = self.system + d.messages
        return self.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]

    @torch.no_grad()
    @in_bf16
    def sample(self, prompts):
        """A reply after each prompt, as ids. It ends with a stop token, or after MAX_TOKENS."""
        ids = padded(prompts, "left")  # [B, P]
        seen = padded([[1] * len(prompt) for prompt in prompts], "left")  # [B, P]
        out = self.model.generate(ids, attention_mask=seen)  # [B, P + T]
        replies = []
        for reply in out[:, ids.shape[1] :].tolist():  # [B, T]
            end = next((k for k, token in enumerate(reply, 1) if token in self.stops), None)
            replies.append(reply[:end])
        return replies

    def read(self, reply):
        """(what the user hears, is it well-formed?) of sampled ids. A thinking reply is
        <think>...</think> with something visible after it, and has each tag once (RLVER 2.3)."""
        text = self.tokenizer.decode(reply[:-1] if reply[-1] in self.stops else reply).strip()
        if not self.think:
            return re.sub("(?s)<think>.*?(</think>|$)", "", text).strip(), True
        visible = text.rpartition("</think>")[2].strip()
        once = text.count("<think>") == text.count("</think>") == 1
        return visible, once and text.startswith("<think>") and visible != ""


# ------------------------------------------------------------------- dialogues (RLVER, Figure 1)
def play(policy, user, people, size=1):
    """Hold `size` dialogues with each of `people`, all at once, turn by turn, until each has ended.
    Those `size` dialogues are a group: they have the same first line."""
    dialogues = [Dialogue(person, group) for group, person in enumerate(people)]
    for d in dialogues:
        if "first_talk" in d.person:
            say(d, {"response": d.person["first_talk"]})
    ask(user, "reply", say, [d for d in dialogues if not d.said])
    dialogues = [copy.deepcopy(d) for d in dialogues for _ in range(size)]
    for turn in range(1, TURNS + 1):
        now = [d for d in dialogues if not d.ended]
        for d in now:
            d.prompt = policy.prompt(d)  # the ids in front of its next reply
            # no room for a reply: the emotion stays as it is
            d.ended = len(d.prompt) + MAX_TOKENS > policy.longest
        now = [d for d in now if not d.ended]
        if not now:
            break
        for d, reply in zip(now, policy.sample([d.prompt for d in now])):
            take(policy, d, reply)
        ask(user, "emotion", feel, dialogues)
        if turn < TURNS:  # the user feels the last reply, and does not answer it
            ask(user, "reply", say, dialogues)
    return dialogues


def take(policy, d, reply):
    """Add a reply to dialogue d. A malformed one is never sent: the dialogue ends with 0."""
    d.rows.append((d.prompt, reply))  # with its stop token: to stop is an action
    visible, is_well_formed = policy.read(reply)
    if not is_well_formed:
        d.emotion, d.ended = 0, True
    d.said.append({"speaker": "friend", "text": visible})
    d.messages.append({"role": "assistant", "content": visible})


def reward(d):
    """r = e_T / 100, paid once, for the last token that the policy sampled (RLVER 2.1)."""
    return d.emotion / 100


# ------------------------------------------------------------------- rows, log-probs, values
def batch_of(d):
    """The B rows of dialogue d: (ids, which of them were sampled), both [B, L]. Only what the
    policy sampled here is an action. The user's words are not. Earlier replies are in this prompt
    too; each is trained in its own row."""
    ids = padded([prompt + reply for prompt, reply in d.rows])
    sampled = padded([[0] * len(prompt) + [1] * len(reply) for prompt, reply in d.rows])
    return ids, sampled.bool()


@in_bf16
def log_probs_of(policy, ids, sampled):
    """(log pi, entropy) of the N sampled tokens, row by row: [N], [N]. Each is predicted by the
    token before it. The padding comes last, so no token sees it."""
    logits = policy.model(ids).logits[:, :-1][sampled[:, 1:]]  # [B, L, V] -> [N, V]
    log_pi = logits.float().log_softmax(-1)  # [N, V]
    entropy = -(log_pi.exp() * log_pi).sum(-1)  # [N]
    return log_pi.gather(-1, ids[sampled][:, None])[:, 0], entropy


class Critic(nn.Module):
    """V_phi: a second model, which says what reward to expect. Its head begins at zero."""

    def __init__(self, name):
        super().__init__()
        self.body = AutoModel.from_pretrained(name, dtype=torch.float32)
        self.head = nn.Linear(self.body.config.hidden_size, 1)
        for weights in self.head.parameters():
            nn.init.zeros_(weights)
        self.to(DEVICE)

    @in_bf16
    def forward(self, ids, sampled):
        """V before each sampled token, [N]: what has seen the token would take its credit."""
        hidden = self.body(ids).last_hidden_state[:, :-1][sampled[:, 1:]]  # [B, L, H] -> [N, H]
        return self.head(hidden).float()[:, 0]  # [N]


# --------------------------------------------- advantages: GRPO (Shao 2024, 4.1), PPO's GAE
# How much better did it go than expected? A token with a positive advantage is made more likely, one
# with a negative advantage less. GRPO expects the mean of the group, PPO what the critic says.
def group_advantages(rewards, groups):
    """A = (r - mean) / (std + 1e-6) in each group; 0 if its rewards are all equal, because no
    dialogue is better. rewards, groups: [D]; returns [D]."""
    advantages = torch.zeros_like(rewards)
    for group in groups.unique():
        r = rewards[groups == group]
        if (r != r[0]).any():
            advantages[groups == group] = (r - r.mean()) / (r.std() + 1e-6)
    return advantages


def gae(reward, values, gamma=GAMMA, lam=LAMBDA):
    """Generalised advantage estimation in one dialogue (Schulman 2016, eq. 16):

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}

    t + 1 is the next token that the *policy* sampled, across turns. After the last one V is 0: the
    reward is known. values: [N]. Returns A and the critic's target, the return A + V, both [N]."""
    advantages, r, next_value, next_advantage = torch.zeros_like(values), reward, 0.0, 0.0
    for t in reversed(range(len(values))):  # r is the reward at the last t, and 0 before
        next_advantage = r + gamma * next_value - values[t] + gamma * lam * next_advantage
        advantages[t], next_value, r = next_advantage, values[t], 0.0
    return advantages, advantages + values


@torch.no_grad()
def look_back(policy, critic, dialogues):
    """Give each dialogue the numbers of its N sampled tokens, as they are before the first
    optimizer step: log pi_old [N] and the advantage, with a critic V_old [N] and the return [N]."""
    for d in dialogues:
        d.old = log_probs_of(policy, *batch_of(d))[0]
        if critic:
            d.values = critic(*batch_of(d))
            d.advantages, d.returns = gae(reward(d), d.values)
    if critic:  # whitening: mean 0 and variance 1, over all tokens of the step
        together = torch.cat([d.advantages for d in dialogues])
        for d in dialogues:
            d.advantages = (d.advantages - together.mean()) / (together.var() + 1e-8).sqrt()
    else:
        rewards, groups = torch.tensor([(reward(d), d.group) for d in dialogues]).T  # [D], [D]
        for d, advantage in zip(dialogues, group_advantages(rewards, groups)):
            d.advantages = advantage  # one number: all tokens of a dialogue have the same


# ------------------------------------------------------------------------ losses and update
def policy_loss(log_pi, old, advantages):
    """-sum min(rho A, clip(rho, 1 - eps, 1 + eps) A), rho = pi / pi_old (Schulman 2017, eq. 7)."""
    rho = (log_pi - old).exp()  # [N]
    return -torch.minimum(rho * advantages, rho.clamp(1 - CLIP, 1 + CLIP) * advantages).sum()


def value_loss(values, old, returns):
    """0.5 sum max((V - R)^2, (V' - R)^2); V' is V, moved by VALUE_CLIP from V_old at most."""
    near = old + (values - old).clamp(-VALUE_CLIP, VALUE_CLIP)  # [N]
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum()


def backward(policy, critic, dialogues):
    """Add up the gradients of one mini-batch. The losses are sums over tokens, divided by the
    tokens of the *whole* mini-batch: every token weighs the same, in a short reply too."""
    n_tokens = sum(len(d.old) for d in dialogues)
    for d in dialogues:
        log_pi, entropy = log_probs_of(policy, *batch_of(d))
        loss = policy_loss(log_pi, d.old, d.advantages) - ENTROPY * entropy.sum()
        if critic:
            loss = loss + value_loss(critic(*batch_of(d)), d.values, d.returns)
        (loss / n_tokens).backward()


def update(policy, critic, optimizer, dialogues):
    """One step of RLVER: MINIBATCHES optimizer steps, each on whole dialogues."""
    dialogues = [d for d in dialogues if d.rows]
    look_back(policy, critic, dialogues)
    random.shuffle(dialogues)
    for k in range(MINIBATCHES):
        backward(policy, critic, dialogues[k::MINIBATCHES])
        for part in optimizer.param_groups:  # policy and critic, separately
            nn.utils.clip_grad_norm_(part["params"], MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()


# ---------------------------------------------------------------------------- the whole loop
def evaluate(policy, user, people, when):
    """Print the mean final emotion of a dialogue with each of `people`, and the first dialogue."""
    dialogues = play(policy, user, people)
    score = np.mean([d.emotion for d in dialogues])
    print(f"\n{when} training, {len(people)} held-out users: mean final emotion {score:.1f}")
    for line in dialogues[0].said:
        print(f"  {'user' if line['speaker'] == 'me' else 'policy':8}{line['text']}")


def train(args):
    """Evaluate, train for `args.steps` steps, evaluate."""
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    name, system = world.base_policy(args.think), []
    if args.model != "toy":  # the toy needs no system prompt
        task = read_prompt("policy_think" if args.think else "policy_direct")
        name, system = args.model, [{"role": "system", "content": task}]
    policy = Policy(name, args.think, system)
    critic = Critic(name) if args.algo == "ppo" else None
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=LR)
    if critic:
        optimizer.add_param_group({"params": critic.parameters(), "lr": CRITIC_LR})
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / WARMUP))
    user, people, held_out = user_and_people(args.user)
    n_groups, size = (GROUPS * GROUP, 1) if critic else (GROUPS, GROUP)
    evaluate(policy, user, held_out, "before")
    for step in (bar := trange(args.steps)):
        # one after the other: two steps of GRPO have all eight needs of the toy's people
        chosen = [people[(step * n_groups + k) % len(people)] for k in range(n_groups)]
        dialogues = play(policy, user, chosen, size)
        update(policy, critic, optimizer, dialogues)
        warmup.step()
        bar.set_postfix_str(f"emotion {np.mean([d.emotion for d in dialogues]):.0f}")
    evaluate(policy, user, held_out, "after")


def main():
    """Read the flags, and train."""
    add = (parser := argparse.ArgumentParser()).add_argument
    add("--algo", choices=["grpo", "ppo"], default="grpo")
    add("--think", action="store_true")
    add("--steps", type=int, default=20)
    add("--seed", type=int, default=0)
    add("--model", default="toy", help="what is trained: toy, a directory, or a name on the hub")
    add("--user", default="toy", help="who plays the user: toy, or MODEL@URL")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
