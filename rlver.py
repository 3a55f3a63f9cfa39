"""rlver.py - train a model to comfort people (RLVER, Figure 1, from top to bottom).

    python rlver.py --algo grpo --think             the embedded world: minutes on a laptop
    python rlver.py --algo ppo                      PPO, speaking without thinking

    1. converse   the policy replies, the user's emotion moves; at the end it is the reward
    2. rollout    many dialogues at once, in groups with one first line each
    3. update     advantages and a clipped policy-gradient step (ppo.py, grpo.py)
    4. sync       the new weights go to the engine that samples
    5. log        a line of metrics, every dialogue word for word, a checkpoint
    6. evaluate   held-out users, before and after

All in one place here: settings, the dialogue, the rollout, the loop, checkpoints. What is left out on purpose: a framework.
"""
import time
STARTED = time.perf_counter()       # before the imports: they take seconds, and the run's total time should own up to them

import argparse
import asyncio
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import weakref
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from tqdm import tqdm

import plan
import toy
from engine import TorchEngine, VllmEngine, vllm_is_there
from grpo import grpo_update
from policy import (Agent, BadModel, ChatFormat, Critic, Episode, Policy, Segment, best_device, load_model, load_optimizer_state,
                    micro_batches, nothing, optimizer_state, pack, shard, whole_weights)
from ppo import SelfCheckFailed, kl_penalty, logp_gap, ppo_update
from signs import numbers_of, signs, warnings
from simulator import (START, BadInput, CallLog, Clock, Parser, SimulatorFailed, SimulatorRefused, User, load_profiles, load_prompt,
                       make_simulator, number, refuse_foreign, says_goodbye, split_name, toy_profiles)

# The paper's settings for a real model (RLVER appendix B; its batch is 32 dialogues for PPO, 32 x 4 for GRPO).
PAPER = dict(steps=350, batch_size={"ppo": 32, "grpo": 128}, group_size=4, max_turns=8, max_tokens=5000, eval_size=100, eval_every=0,
             save_every=5, lr=1e-6, critic_lr=5e-6, minibatches=1, warmup=50, tokens_per_gpu=16384, context=None)


# --------------------------------------------------------------------------------------------------------------- settings

def make_parser():
    parser = Parser(
        prog="rlver.py", formatter_class=argparse.RawDescriptionHelpFormatter,
        description="RLVER from scratch: a model talks with a simulated user whose final emotion is the reward.",
        epilog="Without --model and --simulator everything is embedded and offline. Defaults are given as toy / real model.")

    def flag(group, name, text, default=None, **kind):
        key = name.lstrip("-").replace("-", "_")
        if key in PAPER:
            text += " (default: " + " / ".join(", ".join(f"{v} for {k}" for k, v in x.items()) if isinstance(x, dict) else str(x)
                                               for x in (toy.DEFAULTS[key], PAPER[key])) + ")"
        elif default is not None:
            text += f" (default: {default})"
        FIXED[key] = default
        group.add_argument(name, default=None, help=text, **kind)     # None means: not given; needed to know what --resume changes

    what = parser.add_argument_group("what to train, on whom")
    flag(what, "--algo", "algorithm", "grpo", choices=["ppo", "grpo"])
    flag(what, "--think", "think before speaking: <think>...</think>, then the reply", action="store_const", const=True)
    flag(what, "--model", "policy: toy, or a Hugging Face causal LM: its directory, or its name on the hub", "toy", metavar="DIR")
    flag(what, "--simulator", "model behind the user: toy; toy-weak, a scorer that can be hacked; openai:MODEL@URL, a server, its key in "
         "$RLVER_API_KEY or $OPENAI_API_KEY; local:DIR, a model in this process", "toy", metavar="NAME")
    flag(what, "--difficulty", "how guarded the user is and how exacting", "vanilla", choices=["vanilla", "challenging"])
    flag(what, "--profiles", "users as JSONL, for training and, if a second file is named, held out; without one the last fifth is held "
         "out, --eval-size at most (default: the toy's 500 and 128)", nargs="+", metavar="FILE")
    flag(what, "--lang", "language of the prompts", "en", choices=["en", "zh"])

    run = parser.add_argument_group("the run")
    flag(run, "--steps", "training steps; 0 only evaluates", type=natural)
    flag(run, "--seed", "seed of all randomness", 0, type=natural)
    flag(run, "--out", "directory for everything the run leaves (default: runs/<time>-<algo>-<mode>)", metavar="DIR")
    flag(run, "--resume", "continue the run in DIR with its own settings; only --steps and the simulator's address may be changed", metavar="DIR")
    flag(run, "--save-every", "steps between checkpoints", type=positive)
    flag(run, "--keep", "checkpoints that are kept, the newest", 2, type=positive)
    run.add_argument("--plan", action="store_true", help="say what the run would need, from the model's config alone, and load nothing")

    rollout = parser.add_argument_group("rollout")
    flag(rollout, "--batch-size", "dialogues a step, for both algorithms", type=positive)
    flag(rollout, "--group-size", "GRPO: dialogues that share a user and its first line", type=positive)
    flag(rollout, "--max-turns", "replies of the policy in a dialogue, at most", type=positive)
    flag(rollout, "--max-tokens", "tokens of a reply, thought included, at most", type=positive)
    flag(rollout, "--temperature", "sampling temperature, also of all log-probs", 1.0, type=above_zero)
    flag(rollout, "--engine", "what samples (default: vllm where it is installed and there is a GPU, else torch)", choices=["torch", "vllm"])
    flag(rollout, "--rollout-timeout", "seconds after which the dialogues that are still open are dropped", 1800.0, type=rollout_seconds)

    server = parser.add_argument_group("the user's model, where it is a server")
    flag(server, "--simulator-concurrency", "calls under way at a time, for each rank", 64, type=positive)
    flag(server, "--simulator-timeout", "seconds until a call is given up", 60.0, type=above_zero)
    flag(server, "--simulator-retries", "further attempts at a call that failed or cannot be read, after growing waits", 8, type=natural)
    flag(server, "--simulator-temperature", "its sampling temperature", 0.0, type=not_negative)
    flag(server, "--simulator-cache", "calls.jsonl of another run, whose answers need not be paid for again", metavar="FILE")

    update = parser.add_argument_group("update")
    flag(update, "--lr", "learning rate of the policy", type=above_zero)
    flag(update, "--critic-lr", "PPO: learning rate of the critic", type=above_zero)
    flag(update, "--warmup", "steps over which both rise from 0", type=natural)
    flag(update, "--minibatches", "optimiser steps from one rollout; with 1 the ratio is 1 and clipping never acts", type=positive)
    flag(update, "--gamma", "PPO: discount per policy token", 1.0, type=fraction)
    flag(update, "--lam", "PPO: GAE's lambda", 1.0, type=fraction)
    flag(update, "--clip-eps", "the ratio is clipped to 1 +- this", 0.2, type=above_zero)
    flag(update, "--value-clip", "PPO: values move at most this far from the old ones; 0: any distance", 0.5, type=not_negative)
    flag(update, "--kl-coef", "weight of the KL to the starting policy; 0: none, and no reference model is loaded", 0.0, type=not_negative)
    flag(update, "--kl-estimator", "k1 (PPO only, in the reward), or in the loss k2, k3, k3-ratio", "k3", choices=["k1", "k2", "k3", "k3-ratio"])
    flag(update, "--entropy-coef", "weight of the entropy bonus", 0.001, type=not_negative)
    flag(update, "--critic-warmup", "PPO: first steps, in which the critic alone learns", 0, type=natural)
    flag(update, "--tokens-per-gpu", "padded tokens of a micro-batch; changes memory, not the result", type=positive)

    evaluation = parser.add_argument_group("evaluation on held-out users")
    flag(evaluation, "--eval-size", "dialogues", type=positive)
    flag(evaluation, "--eval-every", "steps between evaluations; 0: only before and after", type=natural)
    return parser


FIXED = {}      # flag -> its default where the toy and a real model do not differ; filled by make_parser


natural = number(int, lambda x: x >= 0, "a whole number from 0")
positive = number(int, lambda x: x >= 1, "a whole number from 1")
above_zero = number(float, lambda x: 0 < x < float("inf"), "a number above 0")
not_negative = number(float, lambda x: 0 <= x < float("inf"), "a number from 0")
fraction = number(float, lambda x: 0 <= x <= 1, "a number from 0 to 1")
GROUP_TIMEOUT = 7200        # seconds a rank waits for another in a collective call; a rollout must be over long before
rollout_seconds = number(float, lambda x: 0 < x <= GROUP_TIMEOUT / 2, f"a number of seconds up to {GROUP_TIMEOUT // 2}")


def need_vllm(engine):
    if engine == "vllm" and not vllm_is_there():
        raise BadInput("--engine vllm: vLLM is not installed; requirements-vllm.txt says what to install")


def settle(given):
    """Fill in the defaults and check what flags say together. Returns the settings as a dict; raises BadInput."""
    cfg = {**FIXED, **{k: v for k, v in given.items() if v is not None}}
    cfg["think"] = bool(cfg["think"])
    kinds = {cfg["algo"], "think" if cfg["think"] else "direct"}
    for key, value in (toy.DEFAULTS if cfg["model"] == "toy" else PAPER).items():
        if cfg.get(key) is None:
            cfg[key] = next(v for k, v in value.items() if k in kinds) if isinstance(value, dict) else value
    if cfg["algo"] == "grpo" and cfg["batch_size"] % cfg["group_size"]:
        raise BadInput(f"--batch-size {cfg['batch_size']} is not a multiple of --group-size {cfg['group_size']}: groups must be whole")
    if cfg["algo"] == "grpo" and cfg["kl_coef"] and cfg["kl_estimator"] == "k1":
        raise BadInput("--kl-estimator k1 goes into a per-token reward, which GRPO does not have; use k2, k3 or k3-ratio")
    if cfg["algo"] == "ppo":
        cfg["group_size"] = 1
    need_vllm(cfg["engine"])
    cfg["engine"] = cfg["engine"] or ("vllm" if vllm_is_there() and torch.cuda.is_available() and cfg["model"] != "toy" else "torch")
    if cfg["batch_size"] < cfg["minibatches"]:
        raise BadInput(f"--minibatches {cfg['minibatches']} cannot be cut from --batch-size {cfg['batch_size']}")
    return cfg


# ----------------------------------------------------------------------------------------------------------- the dialogue

async def converse(agent, user, line, max_turns, group=0, floor=0):
    """One dialogue: at most `max_turns` replies, every one of them scored. Returns its Episode, `ended` by the first of these:

        context                     no room for another reply; what is felt so far counts
        malformed                   logged as it was sampled, never sent; emotion and reward 0
        emotion_max, emotion_min    100, or `floor` or less: 0 in training, 9 in the benchmark, which stops below 10
        turn_limit                  the last reply is scored; nobody answers it
        goodbye                     the user took leave

    A turn is logged as {reply (what was sent), thought, user, analysis, change, emotion}, None where it did not come to that.

    Raises SimulatorFailed if the user's model gives out.
    """
    episode = Episode(user.profile.id, group, line, emotion=user.emotion)
    for turn in range(1, max_turns + 1):
        reply = await agent.reply(line)                                 # tokens in, tokens out; thoughts stay here
        if reply is None:                                               # no room in the context: what is felt so far counts
            episode.ended = "context"
            break
        said = {"reply": reply.visible, "thought": reply.thought, "user": None, "analysis": None, "change": None, "emotion": None}
        episode.turns.append(said)
        if reply.malformed:                                             # never sent; RLVER 2.3: zero reward
            said["reply"], episode.ended, episode.emotion = reply.text, "malformed", 0
            break
        said["analysis"], said["change"] = await user.feel(reply.visible)       # f_emo: the emotion moves
        said["emotion"] = episode.emotion = user.emotion
        if user.emotion >= 100 or user.emotion <= floor:
            episode.ended = "emotion_max" if user.emotion >= 100 else "emotion_min"
            break
        if turn == max_turns:       # no bootstrap here: the reward is observed, whoever ends the dialogue
            episode.ended = "turn_limit"
            break
        said["user"] = line = await user.answer()                       # f_reply: only when the dialogue goes on
        if says_goodbye(line):
            episode.ended = "goodbye"
            break
    episode.segments, episode.reward = agent.segments, episode.emotion / 100        # r = e_T / 100 (RLVER 2.1)
    return episode


async def rollout(simulator, people, group_size, make_agent, max_turns, bar=None, groups=None, name="", timeout=None):
    """Hold `group_size` dialogues with each of `people`, all at the same time. Returns (episodes, number of dropped ones).

    All users of a group open with the same first line, made once, and are separate from there on. groups: the number of each of
    `people` in the whole batch, where this rank has a part of it. name: of the rollout, in the log of calls. timeout: seconds
    after which a dialogue that is still open is given up, as if its simulator had failed.
    """
    deadline = asyncio.get_running_loop().time() + timeout if timeout else None

    async def one(number, user, line, group):
        try:
            async with asyncio.timeout_at(deadline):
                episode = await converse(make_agent(number), user, line, max_turns, group)
        except (SimulatorFailed, TimeoutError):
            return None
        finally:
            if bar is not None:
                bar.update()
        episode.number = number
        if episode.tokens_sampled:
            return episode
        simulator.last_failure = "the user's first line leaves no room in the context for a reply"

    async def together(group, profile):
        user = User(simulator, profile, START["training"], f"{name} group {group}")
        try:
            async with asyncio.timeout_at(deadline):
                line = await user.answer()
        except (SimulatorFailed, TimeoutError):
            if bar is not None:
                bar.update(group_size)
            return [None] * group_size
        numbers = range(group * group_size, (group + 1) * group_size)
        return await asyncio.gather(*[one(n, user.copy(f"{name} {n}"), line, group) for n in numbers])

    found = await asyncio.gather(*[together(*pair) for pair in zip(groups or range(len(people)), people)])
    episodes = [episode for group in found for episode in group]
    return [e for e in episodes if e], episodes.count(None)


def people_of_step(people, count, seed, step):
    """The users of a step: all of them in a shuffled order, again and again, each pass in an order of its own."""
    order = lambda epoch: random.Random(f"{seed} {epoch}").sample(range(len(people)), len(people))
    start = (step - 1) * count
    return [people[order(i // len(people))[i % len(people)]] for i in range(start, start + count)]


# -------------------------------------------------------------------------------------------------------------- ranks

class TooManyLost(Exception):
    """More than a fifth of a batch was lost to the simulator: a pause for repairs, not an end. Exit code 75, EX_TEMPFAIL."""


def world():
    return dist.get_world_size() if dist.is_initialized() else 1


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def join_ranks(cuda):
    """Join the processes that torchrun started, or be a world of one. Before any model or engine is built: one that comes first
    takes itself for alone, and later reductions silently do nothing."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if ranks > 1 and sys.platform == "linux":       # torchrun's processes outlive it when it is killed, and wait for each other for hours
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)                  # PR_SET_PDEATHSIG: die with it
        if os.getppid() == 1:                                       # it is dead already
            raise SelfCheckFailed("torchrun is gone")
    if cuda:
        local = int(os.environ.get("LOCAL_RANK", 0))
        if local >= torch.cuda.device_count():
            raise BadInput(f"--nproc-per-node: this machine has {torch.cuda.device_count()} GPUs, and each process wants its own")
        torch.cuda.set_device(local)
    if dist.is_initialized() or ranks == 1 and not cuda:
        return
    alone = dict(store=dist.HashStore(), rank=0, world_size=1) if ranks == 1 else {}
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo", timeout=timedelta(seconds=GROUP_TIMEOUT), **alone)


def check_world():
    """The ranks that torchrun says there are must be the ranks that answer."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    if world() != ranks:
        raise SelfCheckFailed(f"torchrun started {ranks} processes, but this one is in a group of {world()}: "
                              "the process group must be joined before an engine is built")


def total(tensor):
    """The sum of a tensor over all ranks."""
    if world() > 1:
        tensor = tensor.clone()
        dist.all_reduce(tensor)
    return tensor


def everyone(things):
    """The lists of all ranks, one behind the other, on every rank."""
    if world() == 1:
        return things
    found = [None] * world()
    dist.all_gather_object(found, things)
    return [thing for part in found for thing in part]


# ------------------------------------------------------------------------------------------------------------ the trainer

# How far the engine's log-probs may be from the trainer's: on average, and for a single token. On the toy, in fp32, they are 1e-7
# apart; once in some hundred thousand tokens a very unlikely one is 1e-4 off, by rounding. Stale weights show as 1e-2 and more.
# In bf16 two kernels differ by 1e-2 and more on a single token as a matter of course: the mean has to tell.
GAP_LIMITS = {torch.float32: (1e-4, 1e-2), torch.bfloat16: (0.05, float("inf"))}
START_DIALOGUES = 8         # of the starting policy, whose log-probs are kept
PROBE = ("I do not know where to begin. Last week my sister forgot my birthday, and when I asked her about it she laughed and told me "
         "that I make too much of such things. Since then we have not spoken. I keep going over it, at night above all. ") * 3


class Trainer:
    """The state of a run: the settings, the models and what it has written. Its methods are the numbered steps above.

    With many ranks each has its own dialogues, its own engine and a shard of the models; what is written, rank 0 writes."""

    def __init__(self, cfg, out):
        check_world()
        self.cfg, self.out, self.clock, self.runner = cfg, Path(out), Clock(), asyncio.Runner()
        self.main, self.unlock = rank() == 0, None
        self.state = {"step": -1, "evaluations": [], "seconds": dict.fromkeys(
            ["toy_policy", "rollout", "simulator", "update", "evaluate", "total"], 0.0), "tokens": {"sampled": 0, "trained": 0},
            "log_bytes": {"metrics.jsonl": 0, "dialogues.jsonl": 0}, "call_bytes": {}}
        server = not cfg["simulator"].startswith("toy")
        self.calls = CallLog(self.out / (f"calls-{rank()}.jsonl" if rank() else "calls.jsonl") if server else None)
        self.simulator = make_simulator(cfg["simulator"], cfg["lang"], cfg["difficulty"], log=self.calls, clock=self.clock, **{
            key: cfg[f"simulator_{key}"] for key in ("concurrency", "timeout", "retries", "temperature")})
        if cfg["simulator_cache"]:
            try:
                self.calls.read(cfg["simulator_cache"])
            except OSError as error:
                raise BadInput(f"--simulator-cache {cfg['simulator_cache']}: {error.strerror}") from None
        self.people, self.heldout = self.load_people()
        if self.out.exists():
            self.lock()
        found = checkpoints(self.out)
        # A bad --model must leave nothing behind; a Ctrl-C while the toy's policy is made must leave a run to be resumed.
        if cfg["model"] == "toy" and not found:
            self.write_config()
        self.load(found[-1] if found else None)
        if cfg["steps"] < self.state["step"]:
            raise BadInput(f"--steps {cfg['steps']}: this run has done {self.state['step']} already")
        for name, size in self.state["log_bytes"].items() if self.main else ():     # logged after the checkpoint: will be done again
            path = self.out / name
            there = path.stat().st_size if path.exists() else 0
            if there < size:
                raise BadInput(f"--resume {out}: {name} has lost its end ({there} bytes, the checkpoint knows {size}); "
                               "put it back, or start a new run")
            if there:
                os.truncate(path, size)
        for path in self.out.glob("calls*.jsonl") if server else ():       # ... but not paid for again
            self.calls.read(path, self.state["call_bytes"].get(path.name, 0))
        self.write_config()
        everyone([])            # from here on the directory is there, for all ranks

    def write_config(self):
        if self.main:
            try:
                write_json(self.out / "config.json", self.cfg)
            except OSError as error:
                raise BadInput(f"--out {self.out}: cannot be written ({error.strerror})") from None
            self.lock()

    def lock(self):
        """Nobody else may be at work in this directory: two runs would undo each other's files. The lock goes with the process."""
        if self.main and not self.unlock:
            held = os.open(self.out, os.O_RDONLY)
            self.unlock = weakref.finalize(self, os.close, held)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                self.unlock()
                raise BadInput(f"{self.out}: another process is at work in this run; wait for it, or stop it") from None

    def load_people(self):
        size, names = self.cfg["eval_size"], self.cfg["profiles"]
        if not names:
            return toy_profiles("train"), toy_profiles("heldout", max(size, 128))[:size]
        if len(names) > 2:
            raise BadInput("--profiles takes one file, or two: for training and held out")
        files = [load_profiles(name) for name in names]
        for people in files:
            refuse_foreign(self.cfg["simulator"], people)
        if len(files) == 2:
            return files[0], files[1][:size]
        if len(files[0]) < 2:
            raise BadInput(f"--profiles {names[0]}: one profile is too few to train and to hold one out; name a second file")
        count = min(size, max(1, len(files[0]) // 5))
        return files[0][:-count], files[0][-count:]

    def load(self, checkpoint):
        """Build the models: from a checkpoint, or from where the policy starts. Engine first, while the weights are whole."""
        cfg, start = self.cfg, self.cfg["model"]
        self.device = best_device() if start != "toy" else torch.device("cpu")
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32         # of computing; masters are fp32
        self.gap_limits = GAP_LIMITS[dtype]
        if start == "toy":
            began = time.perf_counter()
            for turn in (True, False):      # the first rank makes it, the others find it made
                if turn == self.main:
                    start = toy.base_policy(cfg["think"], quiet=not self.main) if not checkpoint or cfg["kl_coef"] else None
                everyone([])
            self.state["seconds"]["toy_policy"] = time.perf_counter() - began
            system = ""             # the toy knows its job; the prompt would cost it a third of its tokens
        else:
            system = load_prompt("policy_think" if cfg["think"] else "policy_direct", cfg["lang"])
        model, self.tokenizer = load_model(checkpoint or start)
        self.context = cfg["context"] or model.config.max_position_embeddings
        self.chat = ChatFormat(self.tokenizer, system)
        if len(self.chat.first_prompt("")) + 2 > self.context:
            raise BadInput(f"--model {cfg['model']}: its context of {self.context} tokens is too short for the system prompt alone")
        self.pad = self.tokenizer.pad_token_id or 0
        if cfg["engine"] == "vllm":
            self.engine = VllmEngine(checkpoint or start, self.chat.stop_id, cfg["temperature"], context=self.context, seed=cfg["seed"],
                                     dtype=dtype, clock=self.clock)
            check_world()
        else:
            self.engine = TorchEngine(model, self.chat.stop_id, cfg["temperature"], clock=self.clock)
            self.engine.move(self.device, dtype)
        parts = torch.load(checkpoint / "trainer.pt", map_location="cpu", mmap=True, weights_only=True) if checkpoint else None
        self.policy, self.critic, self.reference = Policy(model, cfg["temperature"]), None, None
        if cfg["algo"] == "ppo":
            self.critic = Critic(model)
            if parts:
                self.critic.load_state_dict(parts["critic"])
        if cfg["kl_coef"]:
            self.reference = Policy(load_model(start)[0], cfg["temperature"])
        if cfg["model"] != "toy":
            for body in (model, self.critic and self.critic.body):      # activations are made again in the backward pass
                if body is not None:
                    body.train()                                        # dropout is 0; out of training nothing is checkpointed
                    body.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        for module in (self.policy, self.critic, self.reference):
            if module is not None and dist.is_initialized():
                shard(module, self.device.type, None if dtype == torch.float32 else dtype)      # moves it, block by block
        self.optimizer = adamw(self.policy, cfg["lr"])
        self.critic_optimizer = adamw(self.critic, cfg["critic_lr"]) if self.critic else None
        if checkpoint:
            load_optimizer_state(self.policy, self.optimizer, parts["optimizer"])
            if self.critic:
                load_optimizer_state(self.critic, self.critic_optimizer, parts["critic_optimizer"])
            toy_policy = self.state["seconds"]["toy_policy"]
            self.state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
            self.state["seconds"]["toy_policy"] += toy_policy
        if cfg["engine"] == "vllm":
            self.probe()

    def make_agent(self, seed):
        cfg = self.cfg
        return Agent(self.engine, self.chat, think=cfg["think"], max_tokens=cfg["max_tokens"], context=self.context, seed=seed)

    def sync(self):
        """Step 4. The new weights go to the engine, tensor by tensor, on every rank."""
        self.engine.load_weights(whole_weights(self.policy.model))
        if self.cfg["engine"] == "vllm":        # the torch engine copies tensor by name; what vLLM does is its own affair
            self.probe()

    def probe(self):
        """Let the engine say something, and compare its log-probs with the trainer's: nothing else shows that a sync did not take, or
        that a cache is stale. The prompt is the same each time and long enough for the prefix cache. Raises SelfCheckFailed."""
        prompt = self.chat.first_prompt(PROBE)[:self.context // 2]
        ids, log_probs = self.runner.run(self.engine.generate(prompt, 16, np.random.default_rng([self.cfg["seed"], 2]), key=None))
        episode = Episode("probe", 0, "")
        episode.segments = [Segment(prompt), Segment(ids, log_probs=log_probs)]
        batch = pack([episode], self.pad).to(self.device)
        with torch.no_grad():
            logp_gap([batch], [self.policy(batch)[0]], self.gap_limits, total)

    def dialogues(self, people, group_size, stream, desc=None):
        """Steps 1 and 2. Every dialogue has dice of its own, seeded by (seed, *`stream`, its number), where `stream` is (0, step) for
        training and (1, step) for evaluation: resumed or not, on however many ranks, the dice fall alike. (So there is no other
        state of randomness to be saved.) Returns this rank's episodes and the number of dropped dialogues over all ranks."""
        cfg = self.cfg
        self.engine.forget()
        mine = range(rank(), len(people), world())          # whole groups: their statistics need no other rank
        bar = tqdm(total=len(mine) * group_size, desc=desc, unit="dialogue", leave=False) if desc and self.main else None
        try:
            episodes, dropped = self.runner.run(rollout(
                self.simulator, [people[i] for i in mine], group_size, lambda n: self.make_agent([cfg["seed"], *stream, n]), cfg["max_turns"],
                bar, list(mine), f"{['training', 'evaluation'][stream[0]]} {stream[1]}", cfg["rollout_timeout"]))
        finally:
            if bar is not None:
                bar.close()
        dropped = int(total(torch.tensor(dropped)))
        if dropped * 5 > len(people) * group_size:
            reasons = [r for r in everyone([self.simulator.last_failure]) if r] or ["the rollout's time was over"]
            raise TooManyLost(f"the simulator failed in {dropped} of {len(people) * group_size} dialogues: {reasons[0]}")
        return episodes, dropped

    def evaluate(self, step):
        """Step 6. One dialogue with every held-out user. Returns the episodes; the scores are kept in the state."""
        began = time.perf_counter()
        mine, dropped = self.dialogues(self.heldout, 1, [1, step], f"evaluating, step {step}")
        if step == 0:
            self.remember_start(mine)
        episodes = in_order(mine)
        self.write_dialogues(step, "heldout", episodes)
        self.state["seconds"]["evaluate"] += time.perf_counter() - began
        if dropped and self.main:
            tqdm.write(f"evaluation at step {step}: the simulator failed in {dropped} dialogues, which do not count")
        self.state["evaluations"].append({"step": step, **scores(episodes)})
        return episodes

    def train_step(self, step):
        """Steps 2 to 5. Returns the line of metrics."""
        cfg, began, waited = self.cfg, time.perf_counter(), self.clock.simulator
        count = cfg["batch_size"] // cfg["group_size"]                                  # 1. and 2. converse, roll out
        mine, dropped = self.dialogues(people_of_step(self.people, count, cfg["seed"], step), cfg["group_size"], [0, step],
                                       f"step {step}" if cfg["model"] != "toy" else None)
        episodes = in_order(mine)
        check_groups(episodes)
        rolled = time.perf_counter()                                                    # 3. update
        if self.device.type == "cuda":
            self.engine.sleep()
        warm = min(1.0, step / max(1, cfg["warmup"]))
        for optimizer, lr in ((self.optimizer, cfg["lr"]), (self.critic_optimizer, cfg["critic_lr"])):
            if optimizer:
                optimizer.param_groups[0]["lr"] = lr * warm
        shared = dict(clip_eps=cfg["clip_eps"], entropy_coef=cfg["entropy_coef"], kl_coef=cfg["kl_coef"], reduce=total, ranks=world(),
                      kl_estimator=cfg["kl_estimator"], reference=self.reference, gap_limits=self.gap_limits)
        if cfg["algo"] == "grpo":
            update = grpo_update(self.policy, self.optimizer, self.minibatches(mine, step), **shared)
        else:
            update = ppo_update(self.policy, self.optimizer, self.critic, self.critic_optimizer, self.minibatches(mine, step),
                                gamma=cfg["gamma"], lam=cfg["lam"], value_clip=cfg["value_clip"], frozen=step <= cfg["critic_warmup"], **shared)
        update["logp_gap_max"] = max(everyone([update["logp_gap_max"]]))
        self.sync()                                                                     # 4. sync
        done = time.perf_counter()
        sampled = int(total(torch.tensor(sum(e.tokens_sampled for e in mine))))
        for key, value in (("rollout", rolled - began), ("simulator", self.clock.simulator - waited), ("update", done - rolled)):
            self.state["seconds"][key] += value
        self.state["tokens"]["sampled"] += sampled
        self.state["tokens"]["trained"] += update["tokens_trained"]
        self.state["step"] = step
        self.write_dialogues(step, "train", episodes)                                   # 5. log
        summary = scores(episodes)
        replies = sum(len(e.turns) for e in episodes)
        line = {"step": step, "reward": float(np.mean([e.reward for e in episodes])), "emotion": summary["score"],
                "emotion_std": float(np.std([e.emotion for e in episodes])), "success": summary["success"], "failure": summary["failure"],
                "malformed": summary["malformed"], "dropped": dropped, "episodes": len(episodes), "turns": replies / len(episodes),
                "reply_tokens": sampled / replies, **update, "kl_start": self.kl_start(), **signs(said_in(episodes)),
                # training users above held-out ones, by the last evaluation; with no evaluations on the way there is nothing to tell
                "gap": summary["score"] - self.state["evaluations"][-1]["score"] if cfg["eval_every"] else None,
                "tokens_sampled": sampled, "seconds": done - began}
        if self.main:
            append_line(self.out / "metrics.jsonl", line)
        return line

    def remember_start(self, episodes):
        """Keep a few dialogues of the starting policy with its log-probs, so that the distance from it can be told at every step without
        a second model in memory."""
        few = sorted(everyone(episodes[:START_DIALOGUES]), key=lambda e: e.number)[:START_DIALOGUES]
        for episode in few:
            batch = pack([episode], self.pad).to(self.device)
            with torch.no_grad():
                scored = iter(self.policy(batch)[0][batch.policy].tolist())
            for s in [s for s in episode.segments if s.log_probs is not None]:
                s.log_probs = [next(scored) for _ in s.ids]
        if self.main:
            write_json(self.out / "start.json", [[vars(s) for s in e.segments] for e in few])

    @functools.cached_property
    def start_batches(self):
        """This rank's part of them, one dialogue a batch, and as many batches on each rank."""
        rows = json.loads((self.out / "start.json").read_text(encoding="utf-8"))
        batches = [pack([Episode("start", 0, "", segments=[Segment(**s) for s in row])], self.pad) for row in rows]
        mine = batches[rank()::world()]
        return mine + [nothing(self.pad)] * (-(-len(batches) // world()) - len(mine))

    def kl_start(self):
        """KL(pi_0, pi) per token, from samples of pi_0, by the k3 estimator."""
        sums = torch.zeros(2, dtype=torch.float64)
        for batch in self.start_batches:
            batch = batch.to(self.device)
            with torch.no_grad():
                k3 = kl_penalty(batch.log_probs, self.policy(batch)[0], "k3")[batch.policy]
            sums += torch.tensor([k3.double().sum().item(), k3.numel()])
        kl, tokens = total(sums).tolist()
        return kl / max(1, tokens)

    def minibatches(self, episodes, step):
        """Cut the batch into mini-batches, those into micro-batches. By the numbers of the dialogues in the whole batch, so that any
        number of ranks takes the same steps; and equally many micro-batches on each, because a forward pass is a collective."""
        cfg = self.cfg
        order = random.Random(f"{cfg['seed']} {step}").sample(range(cfg["batch_size"]), cfg["batch_size"])
        place = {number: i for i, number in enumerate(order)}
        episodes = sorted(episodes, key=lambda e: place[e.number])
        cuts = [[e for e in episodes if place[e.number] % cfg["minibatches"] == i] for i in range(cfg["minibatches"])]
        cuts = [micro_batches(cut, cfg["tokens_per_gpu"], self.pad) for cut in cuts]
        most = [max(column) for column in zip(*everyone([[len(cut) for cut in cuts]]))]
        return [[b.to(self.device) for b in cut + [nothing(self.pad)] * (m - len(cut))] for cut, m in zip(cuts, most) if m]

    def write_dialogues(self, step, split, episodes):
        for e in episodes if self.main else ():
            append_line(self.out / "dialogues.jsonl", {
                "step": step, "split": split, "profile_id": e.profile_id, "group": e.group, "first_line": e.first_line, "turns": e.turns,
                "ended": e.ended, "reward": e.reward})

    def save(self):
        """Write a checkpoint beside and rename it: whoever looks finds the old ones or the new one, never half of one.

        Gathering the shards is a collective; the files hold whole tensors, so that any number of ranks can go on from them."""
        # every rank gathers, tensor by tensor, but only the first keeps them: eight copies of a 7B model with its moments are a terabyte
        weights = {name: w.cpu() for name, w in whole_weights(self.policy.model) if self.main}
        parts = {"optimizer": optimizer_state(self.policy, self.optimizer, self.main)}
        if self.critic:
            parts["critic"] = {name: w.cpu() for name, w in whole_weights(self.critic) if self.main}
            parts["critic_optimizer"] = optimizer_state(self.critic, self.critic_optimizer, self.main)
        sizes = everyone([(p.name, p.stat().st_size) for p in [self.calls.path] if p and p.exists()])
        if not self.main:
            return
        name = f"checkpoint-{self.state['step']:06d}"
        scratch = self.out / f".{name}"
        shutil.rmtree(scratch, ignore_errors=True)
        self.state["call_bytes"].update(sizes)
        self.state["log_bytes"] = {log: os.path.getsize(self.out / log) if (self.out / log).exists() else 0
                                   for log in self.state["log_bytes"]}
        try:
            self.policy.model.save_pretrained(scratch, state_dict=weights)
            self.tokenizer.save_pretrained(scratch)
            torch.save(parts, scratch / "trainer.pt")
            write_json(scratch / "state.json", self.state)
        except Exception as error:          # a full disk is an OSError to Python, other things to safetensors and to torch
            shutil.rmtree(scratch, ignore_errors=True)
            raise SelfCheckFailed(f"{name} could not be written ({error}); the checkpoint before it is whole. Is the disk full?") from None
        os.rename(scratch, self.out / name)
        for old in checkpoints(self.out)[:-self.cfg["keep"]]:
            shutil.rmtree(old)

    def save_what_is_done(self):
        done = self.state["step"]
        if done >= 0 and checkpoints(self.out)[-1:] != [self.out / f"checkpoint-{done:06d}"]:
            self.save()

    def run(self):
        cfg, state, before_this = self.cfg, self.state, self.state["seconds"]["total"]

        def count_seconds():
            state["seconds"]["total"] = before_this + time.perf_counter() - STARTED

        if state["step"] < 0:
            episodes = self.evaluate(0)
            state["step"] = 0
            count_seconds()
            self.save()
            if self.main:
                show("before training", episodes[0])
        done = state["step"]
        if cfg["eval_every"] and 0 < done < cfg["steps"] and done % cfg["eval_every"] == 0 and state["evaluations"][-1]["step"] != done:
            self.evaluate(done)         # which the run did not get to before it was stopped
        bar = tqdm(range(state["step"] + 1, cfg["steps"] + 1), initial=state["step"], total=cfg["steps"], desc="training", unit="step",
                   disable=not self.main)
        for step in bar:
            line = self.train_step(step)
            bar.set_postfix_str(f"emotion {line['emotion']:.0f}, success {line['success']:.0f} %, "
                                f"{line['tokens_sampled'] / line['seconds']:.0f} tokens/s" + f", {line['dropped']} dropped" * bool(line["dropped"]))
            if cfg["eval_every"] and step % cfg["eval_every"] == 0 and step < cfg["steps"]:
                self.evaluate(step)
                if self.main:
                    tqdm.write(f"step {step}: held-out score {state['evaluations'][-1]['score']:.1f}")
            if step % cfg["save_every"] == 0 or step == cfg["steps"]:
                count_seconds()
                self.save()
        episodes = self.evaluate(state["step"]) if state["step"] else None
        if not self.main:
            return None
        if episodes:
            show("after training", episodes[0])
        before, after = ({k: v for k, v in state["evaluations"][i].items() if k != "step"} for i in (0, -1))
        count_seconds()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1024 if sys.platform != "darwin" else 1024 ** 2)
        summary = {"before": before, "after": after, "steps": state["step"], "seconds": state["seconds"],
                   "tokens": state["tokens"], "peak_rss_mb": round(peak, 1), "warnings": []}
        if state["step"]:
            rows = [json.loads(line) for line in (self.out / "metrics.jsonl").read_bytes().split(b"\n") if line]
            summary["warnings"] = warnings(rows, state["evaluations"])
            learning_curve(self.out, rows, state["evaluations"])
            from evaluate import report_of_run      # late: evaluate.py stands above this file
            report_of_run(self.out, self.heldout, rows, state["evaluations"], summary["warnings"])
        write_json(self.out / "summary.json", summary)
        print_table(summary)
        for warning in summary["warnings"]:
            print(f"look at the dialogues: {warning}")
        print(f"everything is in {self.out}: " + ", ".join(sorted(p.name for p in self.out.iterdir() if not p.name.startswith("."))))
        return summary


def in_order(episodes):
    """The episodes of all ranks, in the order of their numbers, for counting and for the log: without their tokens."""
    return sorted(everyone([dataclasses.replace(e, segments=[]) for e in episodes]), key=lambda e: e.number)


def said_in(episodes):
    """The replies that users heard, a list for each dialogue."""
    return [[turn["reply"] for turn in e.turns if turn["emotion"] is not None] for e in episodes]


def adamw(module, lr):
    return torch.optim.AdamW(module.parameters(), lr=lr, betas=(0.9, 0.999), weight_decay=0.01)


def check_groups(episodes):
    """A group is one user and one first line, or its statistics mean nothing."""
    first = {}
    for e in episodes:
        if first.setdefault(e.group, (e.profile_id, e.first_line)) != (e.profile_id, e.first_line):
            raise SelfCheckFailed(f"group {e.group} is broken: it holds dialogues with {first[e.group][0]} and with {e.profile_id}, "
                                  "or with two first lines")


def scores(episodes):
    """Mean final emotion with its standard error; success (100), failure (below 10) and malformed in percent.

    A malformed dialogue scores 0, so it is one of the failures too."""
    return {**numbers_of([e.emotion for e in episodes]), "malformed": 100 * sum(e.ended == "malformed" for e in episodes) / len(episodes)}


# ----------------------------------------------------------------------------------------------------------------- files

def write_json(path, value):
    """Write beside and rename, so that no reader and no killed run leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}")
    scratch.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(scratch, path)


def append_line(path, value):
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(value, ensure_ascii=False) + "\n")


def checkpoints(out):
    return sorted(p for p in Path(out).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", p.name))


# ------------------------------------------------------------------------------------------------------- what one sees

def show(title, episode):
    tqdm.write(f"\n--- a dialogue {title}: {episode.profile_id}, ended by {episode.ended}, reward {episode.reward:.2f}\n"
               f"    user  [{START['training']:3}]  {episode.first_line}")
    for turn in episode.turns:
        if turn["thought"]:
            tqdm.write(f"    (thinks      {turn['thought']})")
        tqdm.write(f"    policy       {turn['reply']}")
        if turn["emotion"] is not None:
            tqdm.write(f"    user  [{turn['emotion']:3}]  {turn['user'] or ''}  ({turn['change']:+d})")
    tqdm.write("")


def print_table(summary):
    print(f"\n{'held-out users':<16}{'score':>8}{'stderr':>8}{'success':>9}{'failure':>9}{'malformed':>11}{'n':>6}")
    for name in ("before", "after"):
        s = summary[name]
        print(f"{name:<16}{s['score']:>8.1f}{s['stderr']:>8.1f}{s['success']:>8.1f}%{s['failure']:>8.1f}%{s['malformed']:>10.1f}%{s['n']:>6}")
    seconds = summary["seconds"]
    print(f"{seconds['total']:.0f} s in all: " + ", ".join(f"{k.replace('_', ' ')} {v:.0f}" for k, v in seconds.items() if k != "total")
          + f"; peak memory {summary['peak_rss_mb']:.0f} MB\n")


def learning_curve(out, rows, evaluations):
    """Draw `rows`, the lines of metrics.jsonl, and the evaluations on held-out users, as four panels over the training steps."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    x = [r["step"] for r in rows]
    get = lambda key: np.array([r[key] for r in rows], dtype=float)
    fig, axes = plt.subplots(2, 2, figsize=(10, 6.5), constrained_layout=True)
    a, b, c, d = axes.flat
    mean, spread = get("emotion"), get("emotion_std")
    a.plot(x, mean, color="tab:blue", label="training users, mean")
    a.fill_between(x, np.clip(mean - spread, 0, 100), np.clip(mean + spread, 0, 100), color="tab:blue", alpha=0.2, label="their spread, ± 1 std")
    a.errorbar([e["step"] for e in evaluations], [e["score"] for e in evaluations], [e["stderr"] for e in evaluations], fmt="o",
               color="black", capsize=3, label="held-out users, ± standard error")
    a.set(title="final emotion", ylim=(0, 102))
    b.plot(x, get("success"), color="tab:green", label="success (100)")
    b.plot(x, get("failure"), color="tab:red", label="failure (< 10)")
    b.plot(x, get("malformed"), color="tab:gray", label="malformed")
    b.set(title="dialogues, %", ylim=(-2, 102))
    c.plot(x, get("reply_tokens"), color="tab:purple", label="tokens per reply")
    c.plot(x, get("turns"), color="tab:brown", label="turns per dialogue")
    c.set(title="length", ylim=(0, None))
    d.plot(x, get("entropy"), color="tab:orange", label="entropy per token, nats (left)")
    d.set(title="entropy and KL", ylim=(0, 1.5 * max(get("entropy").max(), 1e-9)))        # room for the legend
    right = d.twinx()
    right.plot(x, get("kl"), color="tab:cyan", label="KL(pi_old, pi) in the update (right)")
    right.set_ylim(0, 1.5 * max(get("kl").max(), 1e-9))
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        lines = axis.get_legend_handles_labels()
        if axis is d:
            lines = [p + q for p, q in zip(lines, right.get_legend_handles_labels())]
        axis.legend(*lines, fontsize=8, loc="best")
    fig.suptitle(out.name)
    fig.savefig(out / "learning_curve.png", dpi=110)
    plt.close(fig)


# ------------------------------------------------------------------------------------------------------------------ main

def open_run(given):
    """Decide between a new run and a resumed one. Returns (settings, directory); raises BadInput, writes nothing."""
    if given["resume"] is not None:
        out = Path(given["resume"])
        try:
            cfg = json.loads((out / "config.json").read_text(encoding="utf-8"))
            if set(cfg) != (set(FIXED) | set(toy.DEFAULTS)) - {"out", "resume"}:        # another version's run, or none
                raise ValueError
        except (OSError, ValueError, TypeError):
            raise BadInput(f"--resume {out}: there is no run here (config.json is missing or unreadable)") from None
        moved = given["simulator"] is not None and split_name(given["simulator"])[:2] == split_name(cfg["simulator"])[:2]
        for key, value in given.items():
            if value is not None and key not in ("resume", "steps") and value != cfg.get(key) and not (key == "simulator" and moved):
                raise BadInput(f"--{key.replace('_', '-')} cannot change in a resumed run (it has {cfg.get(key)!r}); "
                               "only --steps and the simulator's address can")
        need_vllm(cfg["engine"])
        return {**cfg, **{key: given[key] for key in ("steps", "simulator") if given[key] is not None}}, out
    cfg = settle(given)
    mode = "think" if cfg["think"] else "direct"
    default = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{cfg['algo']}-{mode}"
    while Path(default).exists():       # two runs that were started in the same second
        default += "x"
    out = Path(cfg.pop("out") or default)
    del cfg["resume"]
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise BadInput(f"--out {out}: exists and is not empty; choose another, or continue that run with --resume {out}")
    return cfg, out


def interrupt(*_):
    """Ctrl-C at once. asyncio would rather cancel its main task, and forgets about it where that task is just done."""
    raise KeyboardInterrupt


def main(argv=None):
    first = os.environ.get("RANK", "0") == "0"
    with contextlib.nullcontext() if first else contextlib.redirect_stderr(open(os.devnull, "w")):      # one complaint, not eight
        given = vars(make_parser().parse_args(argv))
    plan_only, out, trainer = given.pop("plan"), None, None
    usual = signal.signal(signal.SIGINT, interrupt)

    def say(text):
        print(text, file=sys.stderr, flush=True)

    try:
        if plan_only:
            cfg = open_run(given)[0]
            print(plan.report(cfg))
            return 0
        join_ranks(cuda=torch.cuda.is_available() and model_of(given) != "toy")
        cfg, out = agree(given)
        trainer = Trainer(cfg, out)
        if rank() == 0:
            print_settings(cfg, trainer)
        try:
            trainer.run()
        except TooManyLost:
            trainer.save_what_is_done()
            raise
    except (BadInput, BadModel) as error:          # found alike by all ranks
        if first:
            say(f"rlver.py: {error}")
        return 2
    except SimulatorRefused as error:
        say(f"rlver.py: {error}; when that is mended: python rlver.py --resume {out}")
        return 2
    except TooManyLost as error:
        if first:
            say(f"rlver.py: {error}\nthe run is saved; when the simulator is well again: python rlver.py --resume {out}")
        return 75
    except SelfCheckFailed as error:
        say(f"rlver.py{f' (rank {rank()})' * (world() > 1)}: stopped by a self-check: {error}")
        return 1
    except OSError as error:
        say(f"rlver.py: {error}; the run can be continued from its last checkpoint: python rlver.py --resume {out}")
        return 1
    except RuntimeError as error:
        if world() == 1 or not re.search("gloo|nccl|connection", str(error), re.I):
            raise
        say(f"rlver.py (rank {rank()}): another rank is gone")
        return 1
    except KeyboardInterrupt:
        started = out and (out / "config.json").exists()
        say("\nstopped" + f"; go on with: python rlver.py --resume {out}" * bool(started))
        return 130
    finally:
        signal.signal(signal.SIGINT, usual)
        if trainer and trainer.unlock:
            trainer.unlock()
        if trainer:
            with contextlib.suppress(KeyboardInterrupt):    # a dialogue that was interrupted tells it again when it is put away
                trainer.runner.close()
    return 0


def model_of(given):
    """The policy's model, which a resumed run's own settings name; needed before the ranks meet."""
    if given["resume"]:
        try:
            return json.loads((Path(given["resume"]) / "config.json").read_text(encoding="utf-8"))["model"]
        except (OSError, ValueError, KeyError, TypeError):
            return "toy"                # open_run will say what is wrong
    return given["model"] or "toy"


def agree(given):
    """The settings and the directory of the run, as rank 0 finds them, on every rank. Raises BadInput, on every rank."""
    answer = [None]
    if rank() == 0:
        try:
            answer = [open_run(given)]
        except BadInput as error:
            answer = [error]
    if world() > 1:
        dist.broadcast_object_list(answer)
    if isinstance(answer[0], BadInput):
        raise answer[0]
    return answer[0]


def print_settings(cfg, trainer):
    print(f"{cfg['algo']} {'think' if cfg['think'] else 'direct'}, policy {cfg['model']}, user {cfg['simulator']} ({cfg['difficulty']}, "
          f"{cfg['lang']}), {len(trainer.people)} users to train on, {len(trainer.heldout)} held out -> {trainer.out}"
          + f", on {world()} ranks" * (world() > 1))
    rest = {k: v for k, v in cfg.items() if k not in ("algo", "think", "model", "simulator", "difficulty", "lang", "profiles")}
    line = ""
    for key, value in [*rest.items(), ("", None)]:
        word = f"{key} {value}"
        if not key or len(line) + len(word) > 116:
            print("   ", line.rstrip(", "))
            line = ""
        line += word + ", "


if __name__ == "__main__":
    code = main()
    # After a failure others may still be in a collective call; torchrun ends them. And vLLM puts its own groups away, later than this.
    if code == 0 and dist.is_initialized() and "vllm" not in sys.modules:
        dist.destroy_process_group()
    sys.exit(code)
