"""evaluate.py - how good is this model, and is it better than that one? (SAGE; RLVER 3)

    python evaluate.py                          the newest run, with users that it never saw
    python evaluate.py --policy POLICY          a run, a checkpoint, a model directory, toy,
                                                openai:MODEL@URL; --step 0: where a run started
    python evaluate.py --before-after           a run and where it started, and their comparison
    python evaluate.py --score FILE...          tables of result files, ours or SAGE's; no model
    python evaluate.py --compare BEFORE AFTER   paired on the users that both met

The Sentient Benchmark starts at emotion 40, has up to 10 replies, and stops at 100 or below 10.
Numbers compare only within one simulator: with another model behind the same users, SAGE saw the
same dialogues shift by 20 points (SAGE appendix B).

From top to bottom: the dialogues and their lines in the result file; the policy; the users; what
the flags ask for. Result files are read, scored and compared in support/results.py.
"""

from support import files, results
from support.answers import PROMPTS, load_prompt
from support.errors import BadInput, TooManyLost
from support.rundir import checkpoints, refuse_other_heldout, state_of
from support.servers import ServerModel
from support.settings import (
    Parser,
    emotion_value,
    from_anywhere,
    json_object,
    natural,
    not_negative,
    positive,
    split_name,
    usual_engine,
)

import asyncio
import os
import re
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Callable

from tqdm import tqdm

from emotion import BENCHMARK_TURNS, FAILURE_BELOW, INITIAL_EMOTION, emotion_level
from people import check_playable, load_profiles, users_of_run
from rollout import Agent, read_reply, rollout
from simulator import analysis_in, make_simulator
from toy import world

# The modules that load torch are imported in the functions that need them: --score and --compare
# need no model, and start at once.

# The second number of an agent's seed. rlver.py uses 0 (training) and 1 (evaluation), models.py 2.
BENCHMARK = 3


# ----------------------------------------------------------------------------- the benchmark itself


async def hold_benchmark(policy, simulator, users, settings, path, finished_ids):
    """Hold the dialogues of all `users` at once, but for those of `finished_ids`; each is appended
    to the file `path` when it ends. settings: all that decides the results; each line holds them.
    Returns the rows of `rollout` for those that were lost."""
    # The number of a user counts the finished ones too, so a continued evaluation draws the random
    # numbers that an uninterrupted one would have drawn.
    todo = {n: user for n, user in enumerate(users) if user.id not in finished_ids}
    if todo:
        await simulator.check()
    with tqdm(total=len(todo), desc="benchmark", unit="dialogue") as bar:
        _, lost = await rollout(
            simulator,
            todo,
            1,
            lambda number: policy.make_agent([settings["seed"], BENCHMARK, number]),
            settings["max_turns"],
            start=settings["start"],
            stop_below=FAILURE_BELOW,
            own_first_line=True,
            name="benchmark",
            bar=bar,
            on_end=lambda episode, user: files.append_line(path, row_of(episode, user, settings)),
        )
    return lost


def row_of(episode, user, settings):
    """One dialogue as a line of the result file: in the format of SAGE's released files, with what
    is ours under "rlver"."""
    profile = user.profile
    history = [{"role": "user", "content": episode.first_line, "emotion-point": settings["start"]}]
    # The user has a thought for each line that its model made. The first line is one of these,
    # unless the profile brings its own; SAGE's format has no place for the thought behind it.
    thoughts = user.thoughts if profile.first_talk else user.thoughts[1:]
    for i, turn in enumerate(episode.turns):
        keys = ("thought", "change", "emotion", "analysis")
        ours = {key: getattr(turn, key) for key in keys}
        history.append({"role": "assistant", "content": turn.reply, "rlver": ours})
        if turn.user is not None:  # only the last reply may have no answer
            history.append(message_of_user(turn, thoughts[i]))
    keys = ("player", "scene", "topic", "task", "need", "target")
    return {
        "id": profile.id,
        "emo_point": episode.emotion,
        "emo_state": emotion_level(episode.emotion),
        **{key: getattr(profile, key) for key in keys},
        "character": profile.main_cha,
        "history": history,
        "rlver": {
            **settings,
            "ended": episode.ended,
            "traits": profile.cha_group,
            "cut": episode.cut,
        },
    }


def message_of_user(turn, thought):
    """The user's answer in a turn, as a message of the history. thought: the one behind it."""
    analysis = analysis_in(turn.analysis)
    return {
        "role": "user",
        "content": turn.user,
        "thinking": thought,
        "emotion-point": turn.emotion,
        "planning": {
            "activity": analysis["activity"],
            "TargetCompletion": analysis["target_completion"],
            "content": analysis["content"],
            "analyse": analysis["analysis"],
            "change": turn.change,
        },
    }


# ---------------------------------------------------------------------------- who is to be measured


@dataclass
class LoadedPolicy:
    """A policy that is ready to talk."""

    label: str  # what results call it
    settings: dict  # how it replies: thinking or not, temperature, tokens ...
    run_settings: dict  # of the run that made it; {} if it is no run of this project
    home: Path | None  # the directory of that run
    make_agent: Callable  # seed -> Agent


def load_policy(name, args):
    """The LoadedPolicy that `name` stands for: a run, a checkpoint, a model directory, a model of
    the hub, toy, or openai:MODEL@URL. args: the flags of `add_flags_of_talk`. What is about the
    policy is read from its run, where there is one; a flag only fills in what no run says, but for
    --max-tokens, which decides. Raises BadInput or BadModel."""
    kind, model_name, url = split_name(name)
    label, weights, run_settings, home = find_weights(name, args.step)
    is_toy = run_settings.get("model", weights) == "toy"
    if args.think and not run_settings.get("think", True):
        raise BadInput(f"--think: {label} was trained to reply without thinking")
    settings = {
        "think": run_settings.get("think", args.think),
        "policy_lang": run_settings.get("lang", args.lang or "en"),
        "temperature": run_settings.get("temperature", 1.0),
        "max_tokens": args.max_tokens or run_settings.get("max_tokens", 48 if is_toy else 2048),
        "context": args.context,
        "template_args": run_settings.get("template_args", args.template_args) or None,
    }
    # what toy runs start from: one policy that thinks and one that does not
    if weights == "toy":
        weights = world.base_policy(settings["think"])
        label = label if run_settings else f"toy, {world.mode_of(settings['think'])}"
    if kind == "openai":
        label = f"openai:{model_name}"
        if args.context or args.template_args:
            raise BadInput(f"--context, --template-args: {label} has its own; leave them out")
        server = ServerModel(model_name, url, settings["temperature"])
        make_agent = partial(ServerAgent, server, settings)
    else:
        make_agent = agents_in_process(weights, settings, is_toy)
    return LoadedPolicy(label, settings, run_settings, home, make_agent)


def find_weights(name, step):
    """(label, directory or name of the weights or "toy", settings of the run, its directory) of a
    policy. A run stands for its newest checkpoint, or for that of `step`; step 0 is where it
    started. Raises BadInput."""
    directory = Path(name)
    run_settings = files.read_json(directory / "config.json")
    if "algo" in run_settings:  # else it is no run: a model's config.json does not have this key
        path = checkpoint_of_run(directory, step)
        # The checkpoint of step 0 is deleted as the run goes on; its weights are those of the model
        # that the run started from.
        weights = run_settings["model"]
        if path.is_dir():
            state_of(path)  # which refuses a part of a copy
            weights = path
        return str(path), weights, run_settings, directory
    if step is not None:
        raise BadInput(f"--step {step}: {name} is no run, and only runs have steps; leave it out")
    run_settings = files.read_json(directory / "rlver.json")
    if run_settings:  # a checkpoint, or a copy of one
        return name, directory, run_settings, directory.parent
    if (directory / "state.json").is_file():
        raise BadInput(f"{directory / 'rlver.json'}: missing or damaged; a part of a copy?")
    return name, name, {}, None


def checkpoint_of_run(directory, step):
    """The checkpoint of a run: that of `step`, None for the newest. Raises BadInput if it is not
    there, but for step 0, which need not be."""
    existing = checkpoints(directory)
    path = directory / f"checkpoint-{step or 0:06d}"
    if step is None and existing:
        path = existing[-1]
    if step != 0 and path not in existing:
        raise BadInput(f"policy {path}: no such checkpoint; --step 0 measures where it started")
    return path


def agents_in_process(weights, settings, is_toy):
    """A function seed -> Agent over weights that are loaded here: by vLLM where that is installed and
    there is a GPU. Fills in settings["context"], the longest that the model allows, where nothing
    says it."""
    from engine import load_engine

    engine, chat, settings["context"] = load_engine(
        weights,
        settings["temperature"],
        "policy ",
        usual_engine(is_toy),
        settings["context"],
        # as in training: the toy knows its job without a system prompt
        system_prompt="" if is_toy else system_prompt(settings),
        think=settings["think"],
        template_args=settings["template_args"],
    )
    of_replies = {key: settings[key] for key in ("think", "max_tokens", "context")}
    return lambda seed: Agent(engine, chat, seed=seed, **of_replies)


def system_prompt(settings):
    """The system prompt of a policy with these settings."""
    return load_prompt(f"policy_{world.mode_of(settings['think'])}", settings["policy_lang"])


class ServerAgent:
    """A policy behind an OpenAI-compatible server: it shows no tokens, and cannot be trained. What
    its server refuses costs its dialogue."""

    def __init__(self, server, settings, seed):
        """seed: does nothing; a server draws its own random numbers."""
        self.server, self.settings = server, settings
        self.messages = [{"role": "system", "content": system_prompt(settings)}]
        self.segments = []  # `converse` files an agent's tokens with the episode: here are none
        self.cut = 0  # replies that the limit of tokens ended, or that are empty

    async def reply(self, line):
        """As rollout.Agent.reply, but for the tokens. A thought that the server has taken out of the
        reply is put back in front of it. Raises SimulatorFailed."""
        self.messages.append({"role": "user", "content": line})
        text = await self.server.chat(self.messages, self.settings["max_tokens"])
        self.cut += bool(text.problem)
        if text.thought:
            text = f"<think>{text.thought}</think>{text}"
        reply = read_reply(text, self.settings["think"])
        self.messages.append({"role": "assistant", "content": reply.visible})
        return reply


# -------------------------------------------------------------------------------- who talks to whom

# What --simulator, --lang, --difficulty and --reader are where neither a flag nor the policy's run
# says it.
USUAL_USER = {"simulator": "toy", "lang": "en", "difficulty": "vanilla", "reader": None}


def who_talks(args, name):
    """(LoadedPolicy, Simulator, users, settings of the evaluation) of the policy `name`: by the
    flags and, where they do not say it, by the policy's run. --lang is the language of the users;
    for a policy that is a run it changes their prompts, but not the policy's."""
    policy = load_policy(name, args)
    played_by = {
        key: getattr(args, key) or policy.run_settings.get(key, USUAL_USER[key])
        for key in USUAL_USER
    }
    player, lang, reader = (played_by[key] for key in ("simulator", "lang", "reader"))
    users, held_out = users_to_measure_with(args, policy, player, lang)
    if args.simulator and not args.reader:  # another user hears by itself
        reader = None
    simulator = make_simulator(
        player,
        lang,
        played_by["difficulty"],
        temperature=args.simulator_temperature,
        reader=reader,
        template_args=args.template_args or policy.run_settings.get("template_args"),
    )
    keys = ("start", "max_turns", "seed", "simulator_temperature", "world")
    settings = {
        "policy": policy.label,
        **policy.settings,
        **played_by,
        "simulator": user_label(player),
        "reader": reader and user_label(reader),
        **{key: getattr(args, key) for key in keys},
        "users": files.digest([vars(profile) for profile in users]),
        "held_out": held_out,
    }
    return policy, simulator, users[: args.limit], settings


def user_label(name):
    """What a --simulator value is called in results: the model, wherever it is served."""
    kind, model, _ = split_name(name)
    return model or kind


def users_to_measure_with(args, policy, simulator_name, lang):
    """(users, were they held out by the policy's run?): those of --profiles; with --world chit-chat
    those of prompts/profiles/; those that the run held out of its files; the toy's held-out users.
    Raises BadInput for users whom the simulator cannot play."""
    file = args.profiles
    if args.world and not file:
        file = PROMPTS / "profiles" / f"{lang}_chat.jsonl"
    if file:
        users = load_profiles(file)
        check_playable(simulator_name, users)
        return users, False
    # a run that names no files trained with the toy's other users
    paths = policy.run_settings.get("profiles")
    count = policy.run_settings["eval_size"] if paths else 128
    _, users = users_of_run(paths, count, simulator_name)
    if paths:
        refuse_other_heldout(policy.home, users)
    return users, bool(policy.run_settings)


# --------------------------------------------------------------------------------- where results go


def finished_users(path, settings):
    """The ids of the users whose dialogues the result file `path` holds. Half a line at its end is
    cut off. Raises BadInput if they were made with other settings, and for a file of others, of
    which nothing is cut."""
    if not b'{"id": '.startswith(path.read_bytes()[:7]):  # as `row_of` begins
        raise BadInput(f"{path}: holds no results; choose another --out")
    files.cut_unfinished_line(path)
    if not path.stat().st_size:
        return set()
    rows = results.read_results(path)
    found = results.differences(rows[0]["made_by"], settings)
    if found:
        raise BadInput(f"{path}: holds other results ({found}); move it, or use another --out")
    return {row["id"] for row in rows}


def default_path(policy):
    """Where results of a LoadedPolicy go without --out: into the directory of its run, else to
    results/, never into a model directory."""
    if policy.home:
        return policy.home / "benchmark.jsonl"
    return Path("results") / (re.sub(r"\W+", "-", policy.label).strip("-") + ".jsonl")


def newest_run():
    """The directory of the newest finished run in runs/. Raises BadInput."""
    summaries = list(Path("runs").glob("*/summary.json"))
    if not summaries:
        raise BadInput("no finished run in runs/; name a policy with --policy")
    return str(max(summaries, key=os.path.getmtime).parent)


# --------------------------------------------------------------------------------------------- main


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    return make_parser().run(run, argv)


def run(args):
    """The one thing that the flags ask for. Returns the exit code; raises RunError."""
    if args.before_after:
        run_before_after(args)
    elif args.compare:
        run_comparison(args, *args.compare)
    elif args.score:
        run_scores(args)
    else:
        run_benchmark(args)
    return 0


def run_before_after(args):
    """Measure a run where it started and where it ended, and compare the two."""
    for name in ("step", "out"):
        if getattr(args, name) is not None:
            raise BadInput(f"--{name} has no effect with --before-after; leave it out")
    args.policy = args.policy or newest_run()
    paths = [Path(args.policy) / name for name in ("before.jsonl", "after.jsonl")]
    files.refuse_overwriting({"--json": args.json}, paths)
    for step, path in zip((0, None), paths):  # where it started, and its newest checkpoint
        args.step, args.out = step, path
        ids = run_benchmark(args)
    print()
    run_comparison(args, *map(str, paths), ids=ids)


def run_benchmark(args):
    """Hold the dialogues that the result file lacks, and print the tables. Returns the ids of the
    users. Raises TooManyLost, in the end, if more than a fifth of the dialogues are missing."""
    policy, simulator, users, settings = who_talks(args, args.policy or newest_run())
    path = Path(args.out or default_path(policy))
    path.parent.mkdir(parents=True, exist_ok=True)
    # a path that cannot be written must be refused before the first dialogue
    path.touch()
    held_lock = files.lock(path)  # so that no other process writes to it
    try:
        finished = finished_users(path, settings)
        lost = asyncio.run(hold_benchmark(policy, simulator, users, settings, path, finished))
    finally:
        os.close(held_lock)
    for row in lost:
        why = f"{row['profile_id']} is missing: {row['reason']}"
        told = f"evaluate.py: {why}; run the same command again to fill it in"
        print(told, file=sys.stderr)
    if len(lost) == len(users):
        raise TooManyLost(f"{path}: all {len(users)} dialogues are lost: each of them failed")
    ids = {user.id for user in users}
    result = results.score(path, args.rule, args.anyway, ids, len(lost))
    results.print_score(result)
    print(f"results: {path}")
    write_tables(args, result, [path])
    # more than a fifth is missing: that score is not to be trusted, so the exit code says it
    if len(lost) * 5 > len(users):
        raise TooManyLost(f"{len(lost)} of {len(users)} dialogues are lost, and not in the score")
    return ids


def run_scores(args):
    """Print the tables of the result files that --score names."""
    scored = [results.score(path, args.rule, args.anyway) for path in args.score]
    for result in scored:
        results.print_score(result)
    results.print_ranks(scored)
    # --json writes the tables of one file as an object, those of several as a list
    write_tables(args, scored[0] if len(scored) == 1 else scored, args.score)


def run_comparison(args, before, after, ids=None):
    """Print how two result files differ. ids: see `compare`."""
    result = results.compare(before, after, args.rule, ids)
    results.print_comparison(result)
    write_tables(args, result, [before, after])


def write_tables(args, result, inputs):
    """Write `result` where --json says. inputs: the files that were read."""
    files.refuse_overwriting({"--json": args.json}, inputs)
    if args.json:
        files.write_json(args.json, result)


# -------------------------------------------------------------------------------------------- flags


def make_parser():
    """The flags of evaluate.py."""
    parser = Parser(
        prog="evaluate.py",
        description="Measure a policy with the Sentient Benchmark (dialogues from emotion 40, 10 "
        "replies at most; the score is the mean final emotion), and compare results. Without flags "
        "it measures the newest run in runs/.",
    )
    add = parser.add_argument
    text = "a run, a checkpoint, a model directory or name, toy, or openai:MODEL@URL (default: "
    add("--policy", help=f"{text}the newest run)")
    add_flags_of_talk(parser)
    add("--out", metavar="FILE", help="result file (default: in the run's directory or results/)")
    one_of = parser.add_mutually_exclusive_group().add_argument
    one_of("--before-after", action="store_true", help="measure where a run started and ended")
    one_of("--score", nargs="+", metavar="FILE", help="measure nothing: scores of result files")
    add(
        "--rule", choices=["every", "sage"], help="sage: a tenth reply is not scored (as SAGE does)"
    )
    add("--anyway", action="store_true", help="average results of different simulators, too")
    one_of("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="compare on common users")
    add("--json", metavar="FILE", help="write the tables to FILE, too")
    return parser


def add_flags_of_talk(parser):
    """The flags that `load_policy` needs, and then those that `who_talks` needs beside them; tools
    have them too."""
    add = parser.add_argument
    add("--step", type=natural, metavar="N", help="of a run; 0: its start (default: the newest)")
    add("--lang", choices=["en", "zh"], help="of the prompts (default: the run's, or en)")
    add("--think", action="store_true", help="it thinks before it replies (a run says so itself)")
    add("--max-tokens", type=positive, metavar="N", help="of a reply (default: the run's, or 2048)")
    add(
        "--context",
        type=positive,
        metavar="N",
        help="tokens of a dialogue (default: the model's)",
    )
    add(
        "--template-args",
        type=json_object,
        metavar="JSON",
        help="such as '{\"enable_thinking\": false}'",
    )
    text = "toy, toy-weak, openai:MODEL@URL or local:DIR (default: the run's, or toy)"
    add("--simulator", type=from_anywhere, help=f"model that plays the users: {text}")
    text = "openai:MODEL@URL or local:DIR (default: the run's, without --simulator)"
    add("--reader", type=from_anywhere, help=f"model whose feelings are read: {text}")
    add("--profiles", metavar="FILE", help="users (default: those that the run held out, or toy's)")
    add("--world", choices=["chit-chat"], help="users who chat, in place of users with a trouble")
    add("--difficulty", choices=["vanilla", "challenging"], help="of users (default: the run's)")
    start = INITIAL_EMOTION["benchmark"]
    add("--start", type=emotion_value, metavar="E", default=start, help="emotion (default: 40)")
    text = f"replies in a dialogue, at most (default: {BENCHMARK_TURNS})"
    add("--max-turns", type=positive, metavar="N", default=BENCHMARK_TURNS, help=text)
    text = "of the model that plays the users (default: 0)"
    add("--simulator-temperature", metavar="T", type=not_negative, default=0.0, help=text)
    add("--limit", type=positive, metavar="N", help="only the first N users")
    add("--seed", type=natural, default=0, metavar="N", help="of the policy's sampling")


if __name__ == "__main__":
    sys.exit(main())
