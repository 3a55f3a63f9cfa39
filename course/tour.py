# %% [markdown]
# # A tour of RLVER in twenty minutes
#
# A language model talks with a simulated user whose emotion, 0 to 100, moves after every reply. The
# last emotion is the reward, and GRPO or PPO trains the model to raise it. No GPU is needed; all of
# it computes for a minute or two.
#
# Everything here is the *toy* of the project: a network of half a million parameters that speaks a
# small grammar, and scripted users. What is learned says nothing about comfort.
#
# **Before you run** marks a question: write your answer down first.

# %%
# The cells import the project's own files: they must be found from here, or one directory up.
import sys
from pathlib import Path

for place in (Path.cwd(), Path.cwd().parent):
    if (place / "rlver.py").is_file():
        sys.path.insert(0, str(place))

# the rooms come first: they import support, which sets what torch reads when it is imported
from models.build import adamw
from models.chat_format import ChatFormat
from models.engine import TorchEngine
from models.loading import load_model
from players.users import make_simulator

import asyncio
import itertools
import random
import re
import subprocess
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import matplotlib.pyplot as plt
import torch

from emotion import TRAINING
from grpo import group_advantages, grpo_update
from people import toy_profiles
from policy import Policy, micro_batches, pack
from ppo import gae, identity, place_rewards, policy_loss
from rollout import Agent, converse, rollout
from simulator import User
from toy import world


def wait_for(coroutine):
    """The result of a coroutine. A notebook has an event loop that runs already, so this one gets
    a thread and a loop of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


# %% [markdown]
# ## 1. A user
#
# A user has a persona, a story, and a hidden need, at which it only hints. (`Profile` in
# `people.py`.)

# %%
simulator = make_simulator("toy")
person = toy_profiles("heldout")[3]
print(person.player, person.scene, f"## Hidden need\n{person.task}", sep="\n\n")

# %% [markdown]
# The user opens the talk. Then you reply, and the user's model is asked two questions, one after
# the other (SAGE eq. 1 and 2): how far does the emotion move, and what does the user say next?
#
# **Before you run:** which of the two replies below will this user like better?

# %%
replies = [
    "You are right and your landlord knows it.",
    "What does your landlord show about who you become?",
]


async def hear(reply):
    """What a new copy of the user makes of `reply`, as its first one."""
    user = User(simulator, person)
    print(f"user:   {await user.open()}\nreply:  {reply}")
    before = user.emotion
    analysis, change = await user.feel(reply)
    print(f"emotion {before} {change:+d} = {user.emotion}, because:\n\n{analysis}\n")
    line, _ = await user.answer()
    print(f"user:   {line}\n{'-' * 80}")


for reply in replies:
    wait_for(hear(reply))

# %% [markdown]
# The answer is one JSON object with the parts that RLVER's prompt asks for: what the reply says
# (content), whether it meets the hidden need (target_completion), what the user thinks (activity)
# and feels (analysis), and by how much the emotion changes. A script wrote this one; with a real
# simulator a language model does.
#
# The four letters of `code` stand in the prompt, which the policy never sees. A reply that forges a
# change of its own would have to guess them (`read_answer` in `support/answers.py`).
#
# ## 2. A dialogue as tokens
#
# Now a network replies. `ChatFormat` writes the chat template, `TorchEngine` samples tokens, and
# `Agent` files each token under who wrote it.

# %%
directory = world.base_policy(think=False)
model, tokenizer = load_model(directory)
chat = ChatFormat(tokenizer)
engine = TorchEngine(model, chat.stop_ids)
context = model.config.max_position_embeddings


def make_agent(seed):
    """The policy's side of one dialogue."""
    return Agent(engine, chat, think=False, max_tokens=48, context=context, seed=seed)


three_replies = replace(TRAINING, max_turns=3)


async def talk_with(profile, seed):
    """One dialogue of the network with this user, an Episode."""
    user = User(simulator, profile)
    return await converse(make_agent(seed), user, await user.open(), three_replies)


episode = wait_for(talk_with(person, seed=1))
print(f"user:   {episode.first_line}")
for turn in episode.turns:
    print(f"policy: {turn.reply}    (emotion {turn.emotion})")
    if turn.user:  # nobody answers the last reply
        print(f"user:   {turn.user}")
print(f"\nended by {episode.ended}; the reward is {episode.reward}")

# %% [markdown]
# The same dialogue as the trainer sees it: *segments*, each a run of tokens with one origin. A
# segment has log-probs if, and only if, the policy sampled it.

# %%
for segment in episode.segments:
    who = "observed" if segment.log_probs is None else "SAMPLED "
    print(who, repr(tokenizer.decode(segment.ids)))

# %% [markdown]
# ## 3. The mask
#
# `pack` lays the segments out as one row of tokens. The mask is True where the policy sampled the
# token, a reply's stop token too; loss, advantages, entropy and KL are computed nowhere else.
#
# **Before you run:** how many of the tokens will be trained, roughly? And on which one does the
# reward of the dialogue stand?

# %%
batch = pack([episode])
rewards = place_rewards(batch.reward, batch.turn)
print("token              mask   turn   reward")
for i, token in enumerate(batch.ids[0].tolist()):
    name = repr(tokenizer.decode([token]))
    mask, turn = int(batch.action_mask[0, i]), int(batch.turn[0, i])
    print(f"{name:<20}{mask:>3}{turn:>7}{rewards[0, i]:>9.2f}")
print(f"{int(batch.action_mask.sum())} of {batch.ids.numel()} tokens are trained")

# %% [markdown]
# ## 4. Two advantages by hand
#
# **GRPO** compares dialogues that began alike. Four dialogues with one user are a *group*; the
# advantage of each is its reward, less the group's mean, divided by the group's standard deviation
# (of a sample: the squares are divided by n - 1). All tokens of a dialogue have the same one.
#
# **Before you run:** take the four rewards that are printed first, and compute the advantages on
# paper. What would they be if all four dialogues had ended alike?

# %%
group, lost = wait_for(rollout(simulator, {0: person}, 4, make_agent, three_replies))
r = torch.tensor([episode.reward for episode in group])
print("rewards", [round(reward, 2) for reward in r.tolist()])

# %%
by_hand = (r - r.mean()) / (r.std() + 1e-6)
from_grpo = group_advantages(r, torch.zeros(4, dtype=torch.long))
print("by hand", by_hand)
print("grpo.py", from_grpo)

# %% [markdown]
# If all four had ended alike, every difference to the mean would be 0, and so would the advantages:
# such a group teaches nothing. (The small number 1e-6 avoids the division 0 / 0.)
#
# **PPO** has a critic: V, the reward that is expected before each token. Walk backwards over the
# policy's tokens. The surprise at a token is `delta = reward + V of the next one - V`, and its
# advantage is `delta + lambda * advantage of the next one` (gamma is 1; Schulman 2016, eq. 16). The
# *next one* is the next token that the policy sampled: what the user says in between does not
# count.

# %%
V, lam = 0.2, 0.9
next_value, next_advantage, by_hand = 0.0, 0.0, []
for i in reversed(range(batch.ids.shape[1])):
    if batch.action_mask[0, i]:
        delta = rewards[0, i] + next_value - V
        next_advantage = delta + lam * next_advantage
        next_value = V
        by_hand.insert(0, float(next_advantage))

values = V * batch.action_mask
from_ppo, _ = gae(rewards, values, batch.action_mask, gamma=1.0, lam=lam)
for name, numbers in (("by hand", by_hand), ("ppo.py ", from_ppo[batch.action_mask].tolist())):
    print(name, "last tokens:", [round(number, 4) for number in numbers[-6:]])

# %% [markdown]
# The dialogue earned more than the critic expected, so the last token has an advantage of `reward -
# V`. From there the credit fades backwards. With lambda 1, which RLVER uses, every token gets all
# of it.
#
# ## 5. One update and its ratio
#
# The update makes tokens of good dialogues likelier, and tokens of bad ones less likely. The
# *ratio* is the probability of a token now, divided by its probability when it was sampled. Once a
# ratio has left 0.8 to 1.2 in the direction that pays, the token stops pushing: it is *clipped*
# (Schulman 2017, eq. 7; `policy_loss` in `ppo.py`).

# %%
learner, _ = load_model(directory)  # `model` stays as it is, for comparison
policy = Policy(learner)
training_people = toy_profiles("train")
rng = random.Random(0)


def hold_batch(step):
    """The dialogues of one training step, sampled from the learner."""
    engine.load_weights(learner.state_dict().items())
    engine.forget()  # drop what was computed with the old weights
    people = dict(enumerate(rng.sample(training_people, 16)))
    episodes, lost = wait_for(
        rollout(simulator, people, 4, lambda number: make_agent([step, number]))
    )
    return episodes


batch = pack(hold_batch(step=0))
mask = batch.action_mask
advantages = group_advantages(batch.reward.sum(1), batch.group)
advantages = advantages[:, None].expand(batch.ids.shape)  # one per token
with torch.no_grad():
    old_log_probs, _ = policy(batch)
gap = (old_log_probs - batch.engine_log_probs)[mask].abs().max()
print(f"{len(batch.ids)} dialogues, {int(mask.sum())} trained tokens")
print(f"engine and trainer differ by {gap:.1e} at most in log-probability")

# %% [markdown]
# Now six optimizer steps on this one batch, written out. (`optimize` in `ppo.py` is this loop.)
#
# **Before you run:** what is the ratio in the first step? When does the clip begin to act?

# %%
optimizer = adamw(policy, lr=4e-4)
print("step   mean ratio where A > 0, where A < 0   1 % below   1 % above   clipped")
for step in range(1, 7):
    log_probs, entropy = policy(batch)
    loss, clipped = policy_loss(log_probs, old_log_probs, advantages, mask, clip_eps=0.2)
    (loss / mask.sum()).backward()
    optimizer.step()
    optimizer.zero_grad()

    ratio = (log_probs - old_log_probs).exp().detach()
    good, bad = ratio[mask & (advantages > 0)].mean(), ratio[mask & (advantages < 0)].mean()
    low, high = ratio[mask].quantile(0.01), ratio[mask].quantile(0.99)
    share = 100 * clipped.sum() / mask.sum()
    print(f"{step:>4}{good:>23.3f}{bad:>15.3f}{low:>12.2f}{high:>12.2f}{share:>8.1f} %")

# %% [markdown]
# In the first step every ratio is 1, whatever the advantages are: nothing has changed since the
# tokens were sampled. So with one step per batch, as RLVER trains a policy that does not think, the
# clip never acts. In later steps good and bad tokens move apart. The means hardly show it, because
# most tokens stay near 1; but some leave 0.8 to 1.2, and more and more of them are clipped.
#
# ## 6. Six steps
#
# This is RLVER's loop: hold dialogues, compute advantages, update, give the engine the new weights.
# Each batch is cut into four mini-batches, and each makes one optimizer step, as the toy does by
# default. `train` in `rlver.py` has the same loop, and evaluates, logs and saves as well.
#
# **Before you run:** the mean emotion is 30 when a dialogue begins. Where will the dialogues of the
# first step end, and those of the last one? Draw the curve.

# %%
learner, _ = load_model(directory)
policy = Policy(learner)
# What a run has as its models and its settings; here a SimpleNamespace each holds what GRPO needs.
models = SimpleNamespace(
    policy=policy,
    optimizer=adamw(policy, lr=4e-4),
    critic=None,
    reduce=identity,  # there are no other ranks to sum over
    world_size=1,
    gap_limits=(1e-4, 1e-2),
    ratio_limit=1e-3,
)
cfg = SimpleNamespace(
    clip_eps=0.2, entropy_coef=0.001, kl_coef=0, advantage="grpo", reward="terminal"
)
curve = []
for step in range(1, 7):
    episodes = hold_batch(step)
    emotions = [episode.emotion for episode in episodes]
    curve.append(sum(emotions) / len(emotions))
    print(f"step {step:>2}: mean emotion at the end {curve[-1]:.1f}")

    rng.shuffle(episodes)
    quarters = [micro_batches(episodes[i::4], max_tokens=8192) for i in range(4)]
    grpo_update(models, quarters, cfg)

# %%
plt.plot(range(1, 7), curve, marker="o")
plt.xlabel("step")
plt.ylabel("mean emotion at the end")
plt.title("64 training dialogues in each step, with new users every time")
plt.ylim(0, 100)
plt.show()

# %% [markdown]
# The first dialogues end below 30, where they began. The first policy knows all kinds of sentences
# and does not know whom they help, so most of its replies make things worse.
#
# The curve is rough, because each point is the mean of 64 dialogues with other users. So the project
# evaluates with 128 users who are never trained on, and gives intervals over seeds.
#
# ## 7. Two dialogues side by side
#
# The same held-out user, the same seed: the policy before these six steps, and after them.


# %%
def shown(episode):
    """The lines of a dialogue, for one column."""
    lines = [f"user: {episode.first_line}"]
    for turn in episode.turns:
        lines.append(f"policy: {turn.reply}  [{turn.emotion}]")
        if turn.user:
            lines.append(f"user: {turn.user}")
    return [piece for line in lines for piece in textwrap.wrap(line, 46) + [""]]


columns = {}
for name, weights in (("before", model), ("after", learner)):
    engine.load_weights(weights.state_dict().items())
    engine.forget()
    columns[name] = shown(wait_for(talk_with(person, seed=1)))
print(f"{'BEFORE':<50}AFTER\n")
for left, right in itertools.zip_longest(columns["before"], columns["after"], fillvalue=""):
    print(f"{left:<50}{right}")

# %% [markdown]
# The numbers in brackets are the user's emotion after the reply, from 30 at the start. A sentence
# that this user has heard before lowers it, even if it helped the first time.
#
# The policy found out by trial and error which kind of sentence helps whom, from nothing but an
# emotion at the end of each dialogue. This is not comfort: the words were in the network before, and
# the user is scripted.
#
# ## 8. One step under the lens
#
# A run of one step, in a process of its own, and then the page that shows what this step did.
#
# **Before you run:** eight dialogues with one user end at different emotions. Which of them does the
# step make likelier? Does every word of a good dialogue become likelier?

# %%
root, run = sys.path[0], Path(tempfile.mkdtemp()) / "one-step"
flags = "--algo grpo --think --steps 1 --warmup 0 --batch-size 32 --eval-size 8"
for program in (["rlver.py", *flags.split(), "--out", run], ["-m", "tools.lens", run]):
    subprocess.run([sys.executable, *program], cwd=root, check=True, capture_output=True)
html = (run / "lens.html").read_text("utf-8")
for dialogue in re.findall(r"<h3>(Dialogue .*?)</h3>", html):
    print(dialogue)
print(f"open {run}/lens.html")

# %% [markdown]
# The advantage says in which direction the words of a dialogue are pushed. But the words of all 32
# dialogues are pushed at once, and most of them stand in several dialogues: a word of a bad
# dialogue that helps elsewhere goes up. On the page each word has its numbers.
#
# ## Where to go on
#
# * `python rlver.py --steps 10 --eval-size 32`: ten such steps, with more dialogues to a user and
#   smaller first steps; with an evaluation before and after, all dialogues in a file, a report.
# * `README.md`: where each equation stands in the code, and what to read next.
# * `course/README.md`: exercises, derivations and labs.
