"""players/policies.py - the two sides of an evaluation, a policy and its users: found by name, set up
by flags and by the policy's run, and loaded. For evaluate.py and tools/chat.py.

From top to bottom: who decides about a setting, a flag or the run; the policy; what refuses a flag;
a policy on a server; the users; flags.
"""

from players.check import models_of
from players.heldout import heldout_of_run
from players.server import SAMPLING, ServerModel
from players.users import check_playable, digests_of_texts, local_models, make_simulator
from support import files
from support.answers import PROMPTS, load_prompt
from support.command_line import emotion_value, natural, positive, split_name
from support.errors import BadInput
from support.results import POLICY_SETTINGS
from support.rundir import FIRST_CHECKPOINT, checkpoints, settings_of_run, state_of
from support.settings import add_settings, usual_engine

import os
from collections import ChainMap
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable, NamedTuple

from emotion import BENCHMARK
from people import load_profiles, toy_profiles
from rollout import Agent, read_reply
from toy import world

# --------------------------------------------------------------------- who decides about a setting


@dataclass
class TalkSettings:
    """How a policy and its users talk."""

    think: bool
    policy_lang: str
    temperature: float
    max_tokens: int
    context: int | None  # None: what the model takes
    template_args: dict | None
    # its users
    simulator: str
    lang: str
    difficulty: str
    reader: str | None
    reader_template_args: dict | None


def settings_of_talk(flags, run, is_toy=False):
    """The TalkSettings by these flags and by the settings of the run that made the policy, {} if
    none did. In each line: its name there, who decides first, who next, and what holds else. All
    other settings are the flags', whatever the run had. (Which profiles: `choose_profiles`.)"""
    flags = {name: value for name, value in flags.items() if value}  # those that were given
    return TalkSettings(
        # A policy replies as it was trained: a flag sets only what no run sets, but for the length.
        think=decide("think", run, flags, False),
        policy_lang=decide("lang", run, flags, "en"),
        temperature=decide("temperature", run, 1.0),
        max_tokens=decide("max_tokens", flags, run, 48 if is_toy else 2048),
        context=decide("context", flags, None),
        template_args=decide("template_args", run, flags, None) or None,
        # The users may be others than the run's.
        simulator=decide("simulator", flags, run, "toy"),
        lang=decide("lang", flags, run, "en"),
        difficulty=decide("difficulty", flags, run, "vanilla"),
        # the run's reader belongs to the run's simulator
        reader=decide("reader", flags, {} if "simulator" in flags else run, None),
        # a result has the reader's apart
        reader_template_args=decide(
            "reader_template_args", run, decide("template_args", flags, run, None)
        ),
    )


def decide(name, *sources):
    """What the first of these dicts with this name has there; the last of `sources` is the value if
    none has it."""
    *sources, usual = sources
    return ChainMap(*sources).get(name, usual)


# --------------------------------------------------------------------------------------- the policy


class PolicySource(NamedTuple):
    """Where the policy with a name is, before it is loaded."""

    label: str  # its name in results, unless the weights are the toy's or a server's
    weights: str | Path  # a directory, a name on the hub, or "toy"
    run: dict  # the settings of the run that made it; {} if it is no run of this project
    home: Path | None  # the directory of that run


def newest_run():
    """The directory of the newest finished run in runs/."""
    summaries = list(Path("runs").glob("*/summary.json"))
    if not summaries:
        raise BadInput("no finished run in runs/; name a policy with --policy")
    return str(max(summaries, key=os.path.getmtime).parent)


def find_weights(name, step):
    """The PolicySource that `name` stands for: a run, a checkpoint, a model directory, a model of
    the hub, toy, or openai:MODEL@URL. A run stands for its newest checkpoint, or for that of
    `step`; step 0 is where it started."""
    directory = Path(name)
    run_settings = settings_of_run(directory)
    if run_settings:
        existing = checkpoints(directory)
        path = directory / f"checkpoint-{step or 0:06d}"
        if step is None and existing:
            path = existing[-1]
        # The checkpoint of step 0 has no weights, and is deleted as the run goes on: they are those
        # of the model that the run started from.
        weights = run_settings["model"]
        if path in existing:
            state_of(path)  # it refuses an incomplete copy
            weights = path if path.name != FIRST_CHECKPOINT else weights
        elif step != 0:
            raise BadInput(f"policy {path}: no such checkpoint; --step 0 measures where it started")
        return PolicySource(str(path), weights, run_settings, directory)
    if step is not None:
        raise BadInput(f"--step {step}: {name} is no run, and only runs have steps; leave it out")
    run_settings = files.read_json(directory / "rlver.json")
    if run_settings:  # a checkpoint, or a copy of one
        is_first = directory.name == FIRST_CHECKPOINT
        weights = run_settings["model"] if is_first else directory
        return PolicySource(name, weights, run_settings, directory.parent)
    if (directory / "state.json").is_file():
        raise BadInput(
            f"{directory / 'rlver.json'}: missing or damaged; was it copied only in part?"
        )
    return PolicySource(name, name, {}, None)


@dataclass
class LoadedPolicy:
    """A policy that is ready to talk."""

    label: str  # its name in results
    settings: dict  # how it replies: the first of the TalkSettings
    home: Path | None  # the directory of the run that made it
    make_agent: Callable  # make_agent(seed=...) -> Agent


def load_policy(source, args, reader=None):
    """The LoadedPolicy of a PolicySource. args: the flags of `add_flags_of_talk`; reader: the name of
    the users' reader. Raises BadInput or BadModel."""
    label, weights, run, home = source
    is_toy = run.get("model", weights) == "toy"
    chosen = vars(settings_of_talk(vars(args), run, is_toy))
    settings = {key: chosen[key] for key in (*POLICY_SETTINGS, "template_args")}
    refuse_flags(args, source, settings, reader)
    mode = world.mode_of(settings["think"])
    system_prompt = load_prompt(f"policy_{mode}", settings["policy_lang"])
    kind, model_name, url = split_name(str(weights))
    if kind == "openai":
        server = ServerModel(model_name, url, settings["temperature"])
        # The server's own dict: when a result is written, it holds what was refused until then.
        settings |= {**SAMPLING, "replaced": server.replaced}
        settings["policy_prompt"] = files.digest(system_prompt)  # of others: with the chat template
        make_agent = partial(ServerAgent, server, settings, system_prompt)
        return LoadedPolicy(f"openai:{model_name}", settings, home, make_agent)
    if weights == "toy":  # what toy runs start from: one policy that thinks and one that does not
        weights = world.base_policy(settings["think"])
        label = label if run else f"toy, {mode}"
    # by vLLM where that is installed and there is a GPU
    engine, chat, settings["context"] = local_models().load_engine(
        weights,
        settings["temperature"],
        "policy ",
        usual_engine(is_toy),
        args.context,
        # the toy knows its job without a system prompt, in training, too
        system_prompt="" if is_toy else system_prompt,
        think=settings["think"],
        template_args=settings["template_args"],
    )
    of_replies = {key: settings[key] for key in ("think", "max_tokens", "context")}
    return LoadedPolicy(label, settings, home, partial(Agent, engine, chat, **of_replies))


def refuse_flags(args, source, settings, reader):
    """Refuse a flag about a policy that has a value of its own. settings: the policy's; with a
    reader --template-args are the reader's."""
    label, weights, run, _ = source
    kind, model_name, _ = split_name(str(weights))
    is_served = kind == "openai"
    if args.think and not settings["think"]:
        raise BadInput(f"--think: {label} was trained to reply without thinking")
    if args.template_args and not reader and (is_served or "template_args" in run):
        raise BadInput(f"--template-args: {label} has its own; leave them out")
    if args.context and is_served:
        raise BadInput(f"--context: openai:{model_name} has its own; leave it out")


class ServerAgent:
    """A policy on a server in one dialogue: it shows no tokens, and cannot be trained. If the
    server refuses a request, the dialogue is lost."""

    def __init__(self, server, settings, system_prompt, seed):
        """seed: has no effect; a server draws its own random numbers."""
        self.server, self.served, self.settings = server, server.served, settings
        self.messages = [{"role": "system", "content": system_prompt}]
        self.segments = []  # `converse` files an agent's tokens with the episode: here it has none
        self.cut = 0  # replies that the token limit cut, or that are empty

    async def reply(self, line):
        """Reply to the user's line. Returns a Reply (rollout.py). A thought that the server has
        taken out of the reply is put back in front of it. Raises SimulatorFailed."""
        self.messages.append({"role": "user", "content": line})
        answer = await self.server.chat(self.messages, self.settings["max_tokens"])
        self.cut += bool(answer.problem)
        text = answer.text
        if answer.thought:
            text = f"<think>{answer.thought}</think>{text}"
        reply = read_reply(text, self.settings["think"])
        self.server.warn_of_marks(reply.visible or text)
        self.messages.append({"role": "assistant", "content": reply.visible})
        return reply


# ----------------------------------------------------------------------------------------- its users


def load_both_sides(args, name):
    """Load the policy `name` and the users whom the flags and its run ask for. Returns
    (LoadedPolicy, Simulator, profiles, settings): the Profiles of the users, and what a result file
    keeps with each dialogue. --lang is the language of the users; for a policy that is a run it
    changes their prompts, but not the policy's. Raises BadInput or BadModel."""
    source = find_weights(name, args.step)
    chosen = settings_of_talk(vars(args), source.run)
    profiles, held_out = choose_profiles(args, source, chosen)
    simulator = make_simulator(
        chosen.simulator,
        chosen.lang,
        chosen.difficulty,
        temperature=args.simulator_temperature,
        reader=chosen.reader,
        template_args=chosen.reader_template_args,
    )
    policy = load_policy(source, args, chosen.reader)  # last, because it may take minutes
    agent = policy.make_agent(seed=0)
    keys = ("start", "max_turns", "seed", "simulator_temperature", "world")
    settings = {
        "policy": policy.label,
        **policy.settings,
        # without addresses: a model is the same wherever it is served
        "simulator": user_label(chosen.simulator),
        "lang": chosen.lang,
        "difficulty": chosen.difficulty,
        "reader": chosen.reader and user_label(chosen.reader),
        "reader_template_args": chosen.reader and chosen.reader_template_args,
        **{key: getattr(args, key) for key in keys},
        "users": files.digest([vars(profile) for profile in profiles]),
        "held_out": held_out,
        **digests_of_texts(agent, simulator),
    }
    # Which models have answered for those on servers: lists that grow. A line has the names that
    # are known when it is written.
    for side, one in {"policy": agent, **models_of(simulator)}.items():
        if getattr(one, "served", None) is not None:
            settings.setdefault("served", {})[side] = one.served
    return policy, simulator, profiles[: args.limit], settings


def user_label(name):
    """The name of a --simulator value in results: the model, without its address."""
    kind, model, _ = split_name(name)
    return model or kind


def choose_profiles(args, source, chosen):
    """(profiles, were they held out by the policy's run?). In this order: the file of --profiles;
    with --world chit-chat one of prompts/profiles/; what the run held out of its files; the toy's
    held-out ones. The user's model must be able to play them."""
    file = args.profiles
    if args.world and file:
        raise BadInput("--world names users, and so does --profiles; give one of them")
    if args.world:
        file = PROMPTS / "profiles" / f"{chosen.lang}_chat.jsonl"
    if file:
        profiles = load_profiles(file)
        check_playable(chosen.simulator, profiles)
        return profiles, False
    # a run without --profiles was trained with the toy's other users
    paths = source.run.get("profiles")
    profiles = heldout_of_run(source.home, source.run) if paths else toy_profiles("heldout", 128)
    check_playable(chosen.simulator, profiles, unnamed=not paths)
    return profiles, bool(source.run)


# -------------------------------------------------------------------------------------------- flags


# The flags that rlver.py has, too: {setting: its help here}.
SETTINGS_OF_TALK = {
    "lang": "of the prompts (default: the run's, or en)",
    "think": "think before each reply (a run has its own setting)",
    "max_tokens": "of a reply (default: the run's, or 2048)",
    "template_args": "such as '{\"enable_thinking\": false}'",
    "simulator": "model that plays the users: toy, toy-weak, openai:MODEL@URL or local:DIR (default: "
    "the run's, or toy)",
    "reader": "model that reads replies for the user: openai:MODEL@URL or local:DIR (default: the "
    "run's, if there is no --simulator)",
    "difficulty": "of users (default: the run's)",
    "max_turns": "replies in a dialogue, at most (default: %(default)s)",
    "simulator_temperature": "of the model that plays the users (default: 0)",
    "seed": "of the policy's sampling",
}


def add_flags_of_talk(parser):
    """Add the flags that `load_policy` and `load_both_sides` need."""
    add = parser.add_argument
    add("--step", type=natural, metavar="N", help="of a run; 0: its start (default: the newest)")
    text = "tokens of a dialogue (default: the model's)"
    add("--context", type=positive, metavar="N", help=text)
    add("--profiles", metavar="FILE", help="users (default: those that the run held out, or toy's)")
    add("--world", choices=["chit-chat"], help="users who chat, in place of users in trouble")
    text = "emotion (default: %(default)s)"
    add("--start", type=emotion_value, metavar="E", default=BENCHMARK.start, help=text)
    add("--limit", type=positive, metavar="N", help="only the first N users")
    add_settings(parser, SETTINGS_OF_TALK)
    parser.set_defaults(seed=0, max_turns=BENCHMARK.max_turns, simulator_temperature=0.0)
