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
the flags ask for.
"""

from support import files, results
from support.errors import BadInput, PromptRefused, SimulatorFailed, TooManyLost
from support.metrics import BENCHMARK_TURNS, INITIAL_EMOTION, emotion_level
from support.rundir import checkpoints, profile_files, refuse_other_heldout
from support.servers import ServerModel, digest
from support.settings import (
    Parser,
    emotion,
    json_object,
    natural,
    not_negative,
    positive,
    split_name,
    vllm_is_there,
)

import argparse
import asyncio
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from tqdm import tqdm

from simulator import (
    PROMPTS,
    User,
    load_profiles,
    load_prompt,
    make_simulator,
    read_analysis,
    refuse_foreign,
    users_of_run,
)
from toy import world

# The modules that load torch are imported in the functions that need them: --score and --compare
# need no model, and start at once.

FLOOR = 9  # a dialogue ends at this emotion or a lower one: SAGE stops below 10
BENCHMARK = 3  # the second number of an agent's seed; rlver.py uses 0 (training) and 1 (evaluation)


# ----------------------------------------------------------------------------- the benchmark itself


async def hold_dialogues(policy, simulator, users, settings, path, finished_ids):
    """Hold the dialogues of all `users` at once, but for those of `finished_ids`; each is appended
    to the file `path` when it ends. settings: all that decides the results; each line holds them.
    Returns [(id of the user, error)] of those that were lost."""
    from rlver import converse

    lost = []
    todo = [(index, user) for index, user in enumerate(users) if user.id not in finished_ids]
    if todo:
        await simulator.check()
    bar = tqdm(total=len(users), initial=len(users) - len(todo), desc="benchmark", unit="dialogue")

    async def hold_dialogue(index, profile):
        user = User(simulator, profile, settings["start"], f"benchmark {profile.id}")
        # The index counts the finished users too, so a continued evaluation draws the random
        # numbers that an uninterrupted one would have drawn.
        agent = policy.make_agent([settings["seed"], BENCHMARK, index])
        try:
            first_line = await user.open()
            episode = await converse(agent, user, first_line, settings["max_turns"], floor=FLOOR)
            if not episode.turns:  # as in a rollout: nothing was said that could be scored
                raise SimulatorFailed("the first line leaves no room in the context for a reply")
            files.append_line(path, row_of(profile, episode, user, settings))
        except SimulatorFailed as error:
            lost.append((profile.id, error))
        bar.update()

    with bar:
        await asyncio.gather(*[hold_dialogue(index, profile) for index, profile in todo])
    return lost


def row_of(profile, episode, user, settings):
    """One dialogue as a line of the result file: in the format of SAGE's released files, with what
    is ours under "rlver"."""
    opening = {"content": episode.first_line, "emotion-point": settings["start"]}
    history = [{"role": "user", **opening}]
    # The user has a thought for each line that its model made. The first line is one of these,
    # unless the profile brings its own; SAGE's format has no place for the thought behind it.
    thoughts = user.thoughts if profile.first_talk else user.thoughts[1:]
    for i, turn in enumerate(episode.turns):
        ours = {key: turn[key] for key in ("thought", "change", "emotion", "analysis")}
        history.append({"role": "assistant", "content": turn["reply"], "rlver": ours})
        if turn["user"] is not None:  # only the last reply may have no answer
            history.append(message_of_user(turn, thoughts[i]))
    return {
        "id": profile.id,
        "emo_point": episode.emotion,
        "emo_state": emotion_level(episode.emotion),
        **{key: getattr(profile, key) for key in ("player", "scene", "topic", "task")},
        "character": profile.main_cha,
        "need": profile.need,
        "target": profile.target,
        "history": history,
        "rlver": {**settings, "ended": episode.ended, "traits": profile.cha_group},
    }


def message_of_user(turn, thought):
    """The user's answer in a turn, as a message of the history. thought: the one behind it."""
    analysis = read_analysis(turn["analysis"])
    return {
        "role": "user",
        "content": turn["user"],
        "thinking": thought,
        "emotion-point": turn["emotion"],
        "planning": {
            "activity": analysis["activity"],
            "TargetCompletion": analysis["target_completion"],
            "content": analysis["content"],
            "analyse": analysis["analysis"],
            "change": turn["change"],
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


def load_policy(name, args=None):
    """The LoadedPolicy that `name` stands for: a run, a checkpoint, a model directory, a model of
    the hub, toy, or openai:MODEL@URL. args: the flags of `add_policy_flags`. What is about the
    policy is read from its run, where there is one; a flag only fills in what no run says, but for
    --max-tokens and --context, which decide. Raises BadInput or BadModel."""
    args = args or make_parser().parse_args([])
    kind, model_name, url = split_name(name)
    is_server = kind == "openai"
    if is_server:
        label, weights, run_settings, home = f"openai:{model_name}", None, {}, None
    else:
        label, weights, run_settings, home = find_weights(name, args.step)
    is_toy = run_settings.get("model", weights) == "toy"
    if args.think and not run_settings.get("think", True):
        raise BadInput(f"--think: {label} was trained to reply without thinking")
    settings = {
        "think": run_settings.get("think", args.think),
        "policy_lang": run_settings.get("lang", args.lang or "en"),
        "temperature": run_settings.get("temperature", 1.0),
        "max_tokens": args.max_tokens or run_settings.get("max_tokens", 48 if is_toy else 2048),
    }
    if is_server:
        server = ServerModel(model_name, url, settings["temperature"])
        # The seed does nothing: a server draws its own random numbers.
        return LoadedPolicy(
            label, settings, run_settings, home, lambda seed: ServerAgent(server, settings)
        )
    settings["context"] = args.context or run_settings.get("context")
    settings["template_args"] = run_settings.get("template_args", args.template_args) or None
    # what toy runs start from: one policy that thinks and one that does not
    if weights == "toy":
        weights = world.base_policy(settings["think"])
        label = label if run_settings else f"toy, {world.mode_of(settings['think'])}"
    make_agent = agents_in_process(weights, settings, is_toy)
    return LoadedPolicy(label, settings, run_settings, home, make_agent)


def find_weights(name, step):
    """(label, directory or name of the weights or "toy", settings of the run, its directory) of a
    policy that is no server. A run stands for its newest checkpoint, or for that of `step`; step 0
    is where it started. Raises BadInput."""
    directory = Path(name)
    run_settings = files.read_json(directory / "config.json")
    if "algo" in run_settings:  # else it is no run: a model's config.json does not have this key
        return checkpoint_of_run(directory, run_settings, step)
    if step is not None:
        raise BadInput(f"--step {step}: {name} is no run, and only runs have steps; leave it out")
    if (directory / "state.json").is_file():  # a checkpoint
        return (
            str(directory),
            directory,
            files.read_json(directory / "rlver.json"),
            directory.parent,
        )
    return name, name, {}, None


def checkpoint_of_run(directory, run_settings, step):
    """As `find_weights`, for the `directory` of a run with these settings. step: of the
    checkpoint, None for the newest."""
    existing = checkpoints(directory)
    path = directory / f"checkpoint-{step or 0:06d}"
    if step is None and existing:
        path = existing[-1]
    if step == 0 and path not in existing:
        # The checkpoint of step 0 is deleted as the run goes on; its weights are those of the model
        # that the run started from.
        return str(path), run_settings["model"], run_settings, directory
    if path not in existing:
        there = ", ".join(place.name for place in existing) or "none"
        raise BadInput(
            f"policy {directory}: no checkpoint of this step; there are: {there}; --step 0 measures "
            "where it started"
        )
    return str(path), path, run_settings, directory


def agents_in_process(weights, settings, is_toy):
    """A function seed -> Agent over weights that are loaded here, once and in the type of
    computing: by vLLM where that is installed and there is a GPU. Fills in settings["context"], the
    longest that the model allows, where nothing says it."""
    from support.loading import ChatFormat, directory_of, load_to_sample, load_tokenizer, stop_ids

    import torch

    from engine import TorchEngine, VllmEngine
    from policy import Agent

    # as in training: the toy knows its job without a system prompt
    system = "" if is_toy else system_prompt(settings)
    shape = (settings["think"], settings["template_args"], stop_ids(weights))
    if torch.cuda.is_available() and vllm_is_there() and not is_toy:
        from transformers import AutoConfig

        directory = directory_of(weights)
        longest = AutoConfig.from_pretrained(directory).max_position_embeddings
        settings["context"] = settings["context"] or longest
        chat = ChatFormat(load_tokenizer(directory), system, *shape)
        room = dict(context=settings["context"], dtype=torch.bfloat16, memory_share=0.9)
        engine = VllmEngine(directory, chat.stop_id, settings["temperature"], **room)
    else:
        model, tokenizer = load_to_sample(weights, prefix="policy ")
        settings["context"] = settings["context"] or model.config.max_position_embeddings
        chat = ChatFormat(tokenizer, system, *shape)
        engine = TorchEngine(model, chat.stop_id, settings["temperature"], share=True)
    of_replies = {key: settings[key] for key in ("think", "max_tokens", "context")}
    return lambda seed: Agent(engine, chat, seed=seed, **of_replies)


def system_prompt(settings):
    """The system prompt of a policy with these settings."""
    return load_prompt(f"policy_{world.mode_of(settings['think'])}", settings["policy_lang"])


class ServerAgent:
    """A policy behind an OpenAI-compatible server: it shows no tokens, and cannot be trained. What
    its server refuses costs its dialogue."""

    def __init__(self, server, settings):
        self.server, self.settings = server, settings
        self.messages = [{"role": "system", "content": system_prompt(settings)}]
        self.segments = []  # `converse` files an agent's tokens with the episode: here are none

    async def reply(self, line):
        """As policy.Agent.reply, but for the tokens. Raises SimulatorFailed."""
        from policy import read_reply

        self.messages.append({"role": "user", "content": line})
        try:
            text = await self.server.chat(self.messages, self.settings["max_tokens"])
        except PromptRefused as error:  # which would be counted as an answer of the user
            raise SimulatorFailed(f"the policy's server refuses a reply: {error}") from None
        reply = read_reply(text, self.settings["think"])
        self.messages.append({"role": "assistant", "content": reply.visible})
        return reply


# -------------------------------------------------------------------------------- who talks to whom

# What --simulator, --lang and --difficulty are where neither a flag nor the policy's run says it.
USUAL_USER = {"simulator": "toy", "lang": "en", "difficulty": "vanilla"}


def who_talks(args, name):
    """(LoadedPolicy, Simulator, users, settings of the evaluation) of the policy `name`: by the
    flags and, where they do not say it, by the policy's run. --lang is the language of the users;
    for a policy that is a run it changes their prompts, but not the policy's."""
    policy = load_policy(name, args)
    user = {
        key: getattr(args, key) or policy.run_settings.get(key, USUAL_USER[key])
        for key in USUAL_USER
    }
    users, held_out = users_to_measure_with(args, policy, user["simulator"], user["lang"])
    names = user["simulator"], user["lang"], user["difficulty"]
    simulator = make_simulator(*names, temperature=args.simulator_temperature)
    keys = ("start", "max_turns", "seed", "simulator_temperature")
    settings = {
        "policy": policy.label,
        **policy.settings,
        **{**user, "simulator": user_label(user["simulator"])},
        **{key: getattr(args, key) for key in keys},
        "world": "chit-chat" if args.world == "chit-chat" else None,  # None: heart-to-heart
        "users": digest([vars(profile) for profile in users]),
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
    if args.world == "chit-chat" and not file:
        file = PROMPTS / "profiles" / f"{lang}_chat.jsonl"
    if file:
        users = load_profiles(file)
        refuse_foreign(simulator_name, users)
        return users, False
    if policy.run_settings.get("profiles"):
        files = profile_files(policy.home, policy.run_settings["profiles"])
        _, users = users_of_run(files, policy.run_settings["eval_size"], simulator_name)
        refuse_other_heldout(policy.home, users)
        return users, True
    # a run that names no files trained with the toy's other users
    _, users = users_of_run(None, 128, simulator_name)
    return users, bool(policy.run_settings)


# --------------------------------------------------------------------------------- where results go


def open_results(path, settings):
    """(lock, ids of the users whose dialogues it holds) of the result file `path`, which is made if
    it is not there. No other process can lock it until the lock is closed. Raises BadInput if it
    holds results of other settings, or if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    held_lock = files.lock(path)
    rows = results.read_results(path)[0] if path.stat().st_size else []
    found = results.differences(rows, settings)
    if found:
        os.close(held_lock)
        raise BadInput(f"{path}: holds other results ({found}); name another file with --out")
    files.cut_unfinished_line(path)
    return held_lock, {row["id"] for row in rows}


def default_path(policy):
    """Where results of a LoadedPolicy go without --out: into the directory of its run, else to
    results/, never into a model directory."""
    if policy.home and policy.home.is_dir():
        return policy.home / "benchmark.jsonl"
    return Path("results") / (re.sub(r"\W+", "-", policy.label).strip("-") + ".jsonl")


def newest_run():
    """The directory of the newest finished run in runs/. Raises BadInput."""
    runs = [path.parent for path in Path("runs").glob("*/summary.json")]
    if not runs:
        raise BadInput("no finished run in runs/; name a policy with --policy")
    return str(max(runs, key=lambda path: path.stat().st_mtime))


# --------------------------------------------------------------------------------------------- main


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    return make_parser().run(run, argv)


def run(args):
    """The one thing that the flags ask for. Returns the exit code; raises RunError."""
    if args.before_after:
        return run_before_after(args)
    if args.compare:
        return run_comparison(args, *[results.files_of_side(names) for names in args.compare])
    return run_scores(args) if args.score else run_benchmark(args)[0]


def run_before_after(args):
    """Measure a run where it started and where it ended, and compare the two. Returns the exit
    code."""
    for name in ("step", "out"):
        if getattr(args, name) is not None:
            raise BadInput(f"--{name} has no effect with --before-after; leave it out")
    directory = Path(args.policy or newest_run())
    paths = {0: directory / "before.jsonl", None: directory / "after.jsonl"}
    for step, path in paths.items():
        of_side = dict(policy=str(directory), step=step, out=path, json=None)
        code, ids = run_benchmark(argparse.Namespace(**{**vars(args), **of_side}))
        if code:
            return code
    print()
    # the tables above say already whose scores these are, and on which scale
    return run_comparison(args, *[[str(path)] for path in paths.values()], named=False, ids=ids)


def run_benchmark(args):
    """Hold the dialogues that the result file lacks, and print the tables. Returns the exit code
    and the ids of the users."""
    policy, simulator, users, settings = who_talks(args, args.policy or newest_run())
    path = Path(args.out or default_path(policy))
    # a path that cannot be written must be refused before the first dialogue
    held_lock, finished_ids = open_results(path, settings)
    try:
        lost = asyncio.run(hold_dialogues(policy, simulator, users, settings, path, finished_ids))
    finally:
        os.close(held_lock)
    for profile_id, error in lost:
        complain(f"{profile_id} is missing: {error}; run the same command again to fill it in")
    if len(lost) == len(users):
        raise TooManyLost(f"{path}: all {len(users)} dialogues are lost: each of them failed")
    ids = {user.id for user in users}
    result = results.score(path, args.rule, args.anyway, ids, len(lost))
    results.print_score(result)
    print(f"results: {path}; to look at them: python -m tools.report {path}")
    code = finish(args, result, result["problems"], [path])
    # more than a fifth is missing: that score is not to be trusted, so the exit code says it
    if len(lost) * 5 > len(users):
        complain(f"{len(lost)} of {len(users)} dialogues are lost, and not in the score")
        code = TooManyLost.exit_code
    return code, ids


def run_scores(args):
    """Print the tables of the result files that --score names. Returns the exit code."""
    scored = [results.score(path, args.rule, args.anyway) for path in args.score]
    for result in scored:
        results.print_score(result)
    results.print_ranks(scored)
    problems = [problem for result in scored for problem in result["problems"]]
    # --json writes the tables of one file as an object, those of several as a list
    return finish(args, scored[0] if len(scored) == 1 else scored, problems, args.score)


def run_comparison(args, before, after, named=True, ids=None):
    """Print how the result files of two sides differ, lists of paths. named: see
    `print_comparison`; ids: see `compare`. Returns the exit code."""
    result = results.compare(before, after, args.rule, ids)
    results.print_comparison(result, named)
    return finish(args, result, result["problems"], before + after)


def finish(args, result, problems, inputs):
    """Write `result` where --json says, and name what could not be used. inputs: the files that
    were read. Returns the exit code."""
    files.refuse_overwriting({"--json": args.json}, inputs)
    if args.json:
        files.write_json(args.json, result)
    for problem in problems:
        complain(problem)
    return 2 if problems else 0


def complain(text):
    """A line on standard error."""
    print(f"evaluate.py: {text}", file=sys.stderr)


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
    add("--policy", metavar="POLICY", help=f"{text}the newest run)")
    add_policy_flags(parser)
    add_user_flags(parser)
    text = "result file; goes on if it is there (default: in the run's directory, or in results/)"
    add("--out", metavar="FILE", help=text)
    text = "measure a run where it started and where it ended, and compare the two"
    one_of = parser.add_mutually_exclusive_group().add_argument
    one_of("--before-after", action="store_true", help=text)
    one_of("--score", nargs="+", metavar="FILE", help="measure nothing: scores of result files")
    text = "every: each reply is scored; sage: not the last of a full number (as SAGE's code)"
    add("--rule", choices=["every", "sage"], help=text)
    add("--anyway", action="store_true", help="average results of different simulators, too")
    text = "measure nothing: compare on common users; several seeds: a pattern, or A,B"
    one_of("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help=text)
    add("--json", metavar="FILE", help="write the tables to FILE, too")
    return parser


def add_policy_flags(parser):
    """The flags that `load_policy` needs; tools have them too."""
    add = parser.add_argument
    text = "of a run: the checkpoint of step N; 0: before training (default: the newest)"
    add("--step", type=natural, metavar="N", help=text)
    text = "language of the user's prompts; of a policy that is no run also of its own"
    add("--lang", choices=["en", "zh"], help=f"{text} (default: the run's, or en)")
    add("--think", action="store_true", help="it thinks before it replies (a run says so itself)")
    text = "tokens of a reply, at most (default: the run's; 48 for the toy, else 2048)"
    add("--max-tokens", type=positive, metavar="N", help=text)
    text = "tokens of a dialogue, at most (default: the run's, or what the model can read)"
    add("--context", type=positive, metavar="N", help=text)
    text = "of a policy that is no run, such as '{\"enable_thinking\": false}'"
    add("--template-args", type=json_object, metavar="JSON", help=text)


def add_user_flags(parser):
    """The other flags that `who_talks` needs; tools have them too."""
    add = parser.add_argument
    text = "toy, toy-weak, feelings, openai:MODEL@URL or local:DIR (default: the run's, or toy)"
    add("--simulator", metavar="NAME", help=f"model that plays the users: {text}")
    text = "users to measure with (default: those that the run held out, else the toy's)"
    add("--profiles", metavar="FILE", help=text)
    text = "do users have a trouble, or chat? (those of prompts/profiles/ or of --profiles)"
    worlds = ["heart-to-heart", "chit-chat"]
    add("--world", choices=worlds, default=worlds[0], help=text)
    text = "how much users hide, and how easily they are pleased (default: the run's)"
    add("--difficulty", choices=["vanilla", "challenging"], help=text)
    start = INITIAL_EMOTION["benchmark"]
    text = "emotion of the users at the start (default: 40; training starts at 30)"
    add("--start", type=emotion, metavar="E", default=start, help=text)
    text = f"replies in a dialogue, at most (default: {BENCHMARK_TURNS})"
    add("--max-turns", type=positive, metavar="N", default=BENCHMARK_TURNS, help=text)
    text = "sampling temperature of the model that plays the users (default: 0)"
    add("--simulator-temperature", metavar="T", type=not_negative, default=0.0, help=text)
    add("--limit", type=positive, metavar="N", help="only the first N users")
    add("--seed", type=natural, default=0, metavar="N", help="of the policy's sampling")


if __name__ == "__main__":
    sys.exit(main())
