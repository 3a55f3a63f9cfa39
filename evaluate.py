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

What else can be asked of a policy or of its dialogues are tools: `python -m tools` lists them.
"""

from support.errors import BadInput, SimulatorFailed, TooManyLost
from support.files import append_line, lock_file, read_json, refuse_overwriting, write_json
from support.flags import Parser, emotion, json_object, natural, not_negative, positive
from support.metrics import BENCHMARK_TURNS, INITIAL_EMOTION, emotion_level
from support.results import (
    describe,
    differences_of_rows,
    read_results,
    starting_policy_in_words,
)
from support.rundir import checkpoints, profile_files, refuse_other_heldout
from support.scores import compare, files_of_side, print_comparison, print_score, score
from support.servers import ServerModel, digest
from support.settings import SCRIPTED, split_name

import argparse
import asyncio
import itertools
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, NamedTuple

from tqdm import tqdm

from simulator import (
    PROMPTS,
    Simulator,
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


@dataclass
class Setup:
    """A policy and the users that it meets: what `who_talks` makes of the flags."""

    policy: "ReadyPolicy"  # its `make_agent` makes the agent of each dialogue
    simulator: Simulator  # the model behind all users
    users: list  # of Profile
    evaluation_settings: dict  # all that decides the results; each line of the file holds them


async def hold_dialogues(setup, path, finished_ids):
    """All dialogues of a Setup at once, but for those of `finished_ids`; each is appended to the
    file `path` when it ends. Returns [(id of the user, error)] of those that were lost."""
    from rlver import converse

    settings = setup.evaluation_settings
    lost = []
    todo = [
        (index, profile)
        for index, profile in enumerate(setup.users)
        if profile.id not in finished_ids
    ]
    n_users = len(setup.users)
    n_finished = n_users - len(todo)
    bar = tqdm(total=n_users, initial=n_finished, desc="benchmark", unit="dialogue")

    async def hold_dialogue(index, profile):
        user = User(setup.simulator, profile, settings["start"], f"benchmark {profile.id}")
        # The index counts the finished users too, so a continued evaluation draws the random
        # numbers that an uninterrupted one would have drawn.
        agent = setup.policy.make_agent([settings["seed"], BENCHMARK, index])
        try:
            first_line = await user.open()
            episode = await converse(agent, user, first_line, settings["max_turns"], floor=FLOOR)
            if not episode.turns:  # as in a rollout: nothing was said that could be scored
                raise SimulatorFailed("the first line leaves no room in the context for a reply")
            append_line(path, row_of(profile, episode, user, settings))
        except SimulatorFailed as error:
            lost.append((profile.id, error))
        bar.update()

    with bar:
        if todo:
            await setup.simulator.check()
        await asyncio.gather(*[hold_dialogue(index, profile) for index, profile in todo])
    return lost


def row_of(profile, episode, user, evaluation_settings):
    """One dialogue as a line of the result file: in the format of SAGE's released files, with what
    is ours under "rlver"."""
    first_message = {
        "role": "user",
        "content": episode.first_line,
        "emotion-point": evaluation_settings["start"],
    }
    history = [first_message]
    # The user has a thought for each line that its model made. The first line is one of these,
    # unless the profile brings its own; SAGE's format has no place for the thought behind it.
    thoughts_of_answers = user.thoughts if profile.first_talk else user.thoughts[1:]
    for i, turn in enumerate(episode.turns):
        history.append(message_of_policy(turn))
        if turn["user"] is not None:  # only the last reply may have no answer
            history.append(message_of_user(turn, thoughts_of_answers[i]))
    return {
        "id": profile.id,
        "emo_point": episode.emotion,
        "emo_state": emotion_level(episode.emotion),
        "player": profile.player,
        "scene": profile.scene,
        "character": profile.main_cha,
        "topic": profile.topic,
        "task": profile.task,
        "need": profile.need,
        "target": profile.target,
        "history": history,
        "rlver": {**evaluation_settings, "ended": episode.ended, "traits": profile.cha_group},
    }


def message_of_policy(turn):
    """The policy's reply in a turn, as a message of the history."""
    ours = {key: turn[key] for key in ("thought", "change", "emotion", "analysis")}
    return {"role": "assistant", "content": turn["reply"], "rlver": ours}


def message_of_user(turn, thought):
    """The user's answer in a turn, as a message of the history. thought: the one behind it."""
    analysis = read_analysis(turn["analysis"])
    planning = {
        "activity": analysis["activity"],
        "TargetCompletion": analysis["target_completion"],
        "content": analysis["content"],
        "analyse": analysis["analysis"],
        "change": turn["change"],
    }
    return {
        "role": "user",
        "content": turn["user"],
        "thinking": thought,
        "emotion-point": turn["emotion"],
        "planning": planning,
    }


# ---------------------------------------------------------------------------- who is to be measured

# The flags of `add_policy_flags` if none is given. Most fill in what the policy's own run does not
# say.
NO_FLAGS = argparse.Namespace(
    step=None, think=False, lang=None, max_tokens=None, context=None, template_args=None
)


class FoundPolicy(NamedTuple):
    """What the name of a policy stands for; nothing is loaded yet."""

    label: str  # what results call it
    weights: str | Path  # a directory, a model's name, or "toy"
    run_settings: dict  # of the run that made it; {} if it is no run of this project
    home: Path | None  # the directory of that run


def find_policy(name, step=None):
    """The FoundPolicy that `name` stands for.

    A run stands for its newest checkpoint, or for that of `step`; step 0 is where it started. A
    checkpoint has the settings of its run, in its rlver.json. All else has no settings: {}. Raises
    BadInput."""
    from support.loading import looks_like_a_path

    directory = Path(name)
    run_settings = read_json(directory / "config.json")
    if "algo" in run_settings:  # else it is no run: a model's config.json does not have this key
        return checkpoint_of_run(directory, run_settings, step)
    if step is not None:
        raise BadInput(f"--step {step}: {name} is no run, and only runs have steps; leave it out")
    if (directory / "state.json").is_file():  # a checkpoint
        run_settings = read_json(directory / "rlver.json")
        return FoundPolicy(str(directory), directory, run_settings, home=directory.parent)
    if not directory.exists() and looks_like_a_path(name):
        runs = sorted(str(path.parent) for path in Path("runs").glob("*/config.json"))
        raise BadInput(
            f"policy {name}: no such run or directory; there are: "
            f"{', '.join(runs[-8:]) or 'no runs yet'}"
        )
    return FoundPolicy(name, name, run_settings={}, home=None)


def checkpoint_of_run(run, run_settings, step):
    """As `find_policy`, for the directory `run` with these settings. step: of the checkpoint, None
    for the newest."""
    by_step = {int(path.name.removeprefix("checkpoint-")): path for path in checkpoints(run)}
    if step == 0 and 0 not in by_step:
        # The checkpoint of step 0 is deleted as the run goes on; its weights are those of the model
        # that the run started from.
        label = f"{run}/checkpoint-000000"
        return FoundPolicy(label, run_settings["model"], run_settings, home=run)
    if not by_step:
        raise BadInput(
            f"policy {run}: this run has no checkpoint; --step 0 measures where it started"
        )
    if step is None:
        step = max(by_step)
    if step not in by_step:
        raise BadInput(
            f"policy {run}: no checkpoint of step {step} here; there are: "
            f"{', '.join(map(str, by_step))}"
        )
    return FoundPolicy(str(by_step[step]), by_step[step], run_settings, home=run)


def newest_run():
    """The directory of the newest finished run in runs/."""
    runs = [path.parent for path in Path("runs").glob("*/summary.json")]
    if not runs:
        raise BadInput(
            "no finished run in runs/; name a policy with --policy, or make one with: "
            "python rlver.py --algo grpo --think"
        )
    return str(max(runs, key=lambda path: path.stat().st_mtime))


@dataclass
class ReadyPolicy:
    """A policy that is loaded, and ready to talk."""

    label: str  # what results call it
    policy_settings: dict  # how it replies: thinking or not, temperature, tokens ...
    run_settings: dict  # as in a FoundPolicy; {} for a server
    home: Path | None  # as in a FoundPolicy; None for a server
    make_agent: Callable  # seed -> Agent


def open_policy(name, flags=NO_FLAGS):
    """The ReadyPolicy that `name` stands for. Raises BadInput or BadModel."""
    kind, model_name, url = split_name(name)
    if kind != "openai":
        return policy_in_process(name, flags)
    if not model_name or not url.startswith("http"):
        raise BadInput(f"policy {name}: openai:MODEL@URL is needed")
    return policy_of_server(model_name, url, flags)


def policy_in_process(name, flags):
    """The ReadyPolicy whose weights are loaded here: of a run, of a checkpoint, of a model
    directory, of the hub, or the toy's."""
    from support.chat_format import ChatFormat
    from support.loading import load_to_sample, stop_ids

    from engine import TorchEngine
    from policy import Agent

    label, weights, run_settings, home = find_policy(name, flags.step)
    is_toy = run_settings.get("model", weights) == "toy"
    if flags.think and not run_settings.get("think", True):
        raise BadInput(f"--think: {label} was trained to reply without thinking")
    usual_tokens = 48 if is_toy else 2048
    settings = {
        # The run decides; a flag only fills in what no run says. (No flag sets the temperature.)
        "think": run_settings.get("think", flags.think),
        "policy_lang": run_settings.get("lang", flags.lang or "en"),
        "temperature": run_settings.get("temperature", 1.0),
        # The flag decides; without it the run does.
        "max_tokens": flags.max_tokens or run_settings.get("max_tokens", usual_tokens),
        "context": flags.context or run_settings.get("context"),
        "template_args": run_settings.get("template_args", flags.template_args) or None,
    }
    if weights == "toy":  # no checkpoint of it, but the policy that toy runs start from
        weights = world.base_policy(settings["think"])
        if not run_settings:  # there are two, one that thinks and one that does not
            label = f"toy, {world.mode_of(settings['think'])}"
    model, tokenizer = load_to_sample(weights, prefix="policy ")
    if settings["context"] is None:  # the longest that the model allows
        settings["context"] = model.config.max_position_embeddings
    if not run_settings and not is_toy:
        mode = world.mode_of(settings["think"])
        print(
            f"{label} is no run of this project; assumed: {mode} (--think), prompts in "
            f"{settings['policy_lang']} (--lang), temperature {settings['temperature']:g}, at most "
            f"{settings['max_tokens']} tokens a reply (--max-tokens), {settings['context']} a "
            "dialogue (--context)"
        )
    # as in training: the toy knows its job without a system prompt
    system = "" if is_toy else system_prompt(settings)
    chat = ChatFormat(
        tokenizer, system, settings["think"], settings["template_args"], stop_ids(weights)
    )
    engine = TorchEngine(model, chat.stop_id, settings["temperature"], share=True)

    def make_agent(seed):
        return Agent(
            engine,
            chat,
            think=settings["think"],
            seed=seed,
            max_tokens=settings["max_tokens"],
            context=settings["context"],
        )

    return ReadyPolicy(label, settings, run_settings, home, make_agent)


def system_prompt(settings):
    """The system prompt of a policy with these settings."""
    return load_prompt(f"policy_{world.mode_of(settings['think'])}", settings["policy_lang"])


def policy_of_server(model_name, url, flags):
    """The ReadyPolicy behind an OpenAI-compatible server. --context and --template-args do nothing
    for it: the server knows its own."""
    settings = {
        "think": flags.think,
        "policy_lang": flags.lang or "en",
        "temperature": 1.0,
        "max_tokens": flags.max_tokens or 2048,
    }
    server = ServerModel(model_name, url, settings["temperature"])

    def make_agent(seed):
        # The seed does nothing: a server draws its own random numbers.
        return ServerAgent(server, settings)

    label = f"openai:{model_name}"
    return ReadyPolicy(label, settings, run_settings={}, home=None, make_agent=make_agent)


class ServerAgent:
    """A policy behind an OpenAI-compatible server: it shows no tokens, and cannot be trained. What
    its server refuses costs its dialogue."""

    def __init__(self, server, settings):
        self.server, self.settings = server, settings
        self.messages = [{"role": "system", "content": system_prompt(settings)}]
        self.segments = []  # `converse` files an agent's tokens with the episode: here are none

    async def reply(self, line):
        """As policy.Agent.reply, but for the tokens. Raises SimulatorFailed."""
        from policy import Reply, split_thought, take_thoughts

        self.messages.append({"role": "user", "content": line})
        text = await self.server.chat(self.messages, self.settings["max_tokens"])
        if self.settings["think"]:
            thought, visible, malformed = split_thought(text)
        else:
            thought, visible = take_thoughts(text)
            malformed = False
        self.messages.append({"role": "assistant", "content": visible})  # without the thought
        return Reply(text, visible, thought, malformed)


# -------------------------------------------------------------------------------- who talks to whom

# What --simulator, --lang and --difficulty are where neither a flag nor the policy's run says it.
USUAL_USER = {"simulator": "toy", "lang": "en", "difficulty": "vanilla"}


def who_talks(args, name):
    """A Setup of the policy `name`: with what the flags say and, where they do not, what the
    policy's run says. --lang is the language of the users; for a policy that is a run it changes
    their prompts, but not the policy's (see `policy_in_process`)."""
    policy = open_policy(name, args)

    def setting(key):
        """What the flag says, else the policy's run, else the usual value."""
        return getattr(args, key) or policy.run_settings.get(key, USUAL_USER[key])

    simulator_name = setting("simulator")
    lang = setting("lang")
    difficulty = setting("difficulty")
    people, held_out = users_to_measure_with(args, policy, simulator_name, lang)
    simulator = make_simulator(
        simulator_name, lang, difficulty, temperature=args.simulator_temperature
    )
    evaluation_settings = {
        "policy": policy.label,
        **policy.policy_settings,
        "simulator": user_label(simulator_name),
        "difficulty": difficulty,
        "lang": lang,
        "start": args.start,
        "max_turns": args.max_turns,
        "seed": args.seed,
        # None stands for heart-to-heart
        "world": "chit-chat" if args.world == "chit-chat" else None,
        "simulator_temperature": args.simulator_temperature,
        "users": digest([vars(profile) for profile in people]),
        "held_out": held_out,
    }
    return Setup(policy, simulator, people[: args.limit], evaluation_settings)


def user_label(name):
    """What a --simulator value is called in results: the model, wherever it is served."""
    kind, model, _ = split_name(name)
    return model or kind


def users_to_measure_with(args, policy, simulator_name, lang):
    """(users, were they held out by the policy's run?). Raises BadInput. The first row that fits:

    --profiles FILE               those of the file                          False
    --world chit-chat             those of prompts/profiles/LANG_chat.jsonl  False
    a run with files of profiles  those that it held out                     True
    any other run                 the toy's held-out users                   True
    no run of this project        the toy's held-out users                   False
    """
    wants_chat = args.world == "chit-chat"
    if args.profiles:
        return users_of_file(args.profiles, simulator_name, wants_chat), False
    if wants_chat:
        return chat_users(simulator_name, lang), False
    if policy.run_settings.get("profiles"):
        return heldout_of_run(policy.home, policy.run_settings, simulator_name), True
    is_run = bool(policy.run_settings)  # if so, it trained with the toy's other users
    _, people = users_of_run(None, 128, simulator_name)
    return people, is_run


def chat_users(simulator_name, lang):
    """The people of everyday talk whom this --simulator can play. Raises BadInput."""
    if simulator_name in SCRIPTED:
        raise BadInput(
            f"--world chit-chat: the scripted user ({simulator_name}) knows no chit-chat; "
            "choose a real --simulator, as openai:MODEL@URL"
        )
    file = PROMPTS / "profiles" / f"{lang}_chat.jsonl"
    return users_of_file(file, simulator_name, wants_chat=True)


def users_of_file(file, simulator_name, wants_chat):
    """The users of a file. Raises BadInput for users whom the simulator cannot play and, with
    --world chit-chat, for one who comes for a heart-to-heart talk."""
    people = load_profiles(file)
    refuse_foreign(simulator_name, people)
    for profile in people:
        if wants_chat and profile.target == "eq":
            raise BadInput(
                f"--world chit-chat: user {profile.id!r} of {file} comes for a "
                "heart-to-heart talk (its target is eq), not to chat"
            )
    return people


def heldout_of_run(home, run_settings, simulator_name):
    """The users that the run in the directory `home` held out. Raises BadInput."""
    files = profile_files(home, run_settings["profiles"])
    _, people = users_of_run(files, run_settings["eval_size"], simulator_name)
    refuse_other_heldout(home, people)
    return people


# --------------------------------------------------------------------------------- where results go


class ResultFile(NamedTuple):
    """The file that results go to."""

    path: Path
    lock: int  # no other process can lock the file until this is closed
    finished_ids: set  # of the users whose dialogues it holds already


def place_for_results(out, setup, usual_path=None):
    """The ResultFile of an evaluation, which is made if it is not there. out: --out, or None.

    With --out it is that file, which is refused if it holds results of other settings. Else it is
    `usual_path` (default: `default_path`), or the next name (NAME-2, NAME-3 ...) whose file is
    empty or holds results of the same settings. Raises BadInput, also if another process has it."""
    # This ends, at the latest at a name that no file has yet.
    for path in [Path(out)] if out else numbered(usual_path or default_path(setup.policy)):
        lock = lock_file(path, "--out")
        rows = read_results(path)[0] if path.stat().st_size else []
        differences = ", ".join(differences_of_rows(rows, setup.evaluation_settings))
        if not differences:
            cut_unfinished_line(path)
            return ResultFile(path, lock, finished_ids={row["id"] for row in rows})
        os.close(lock)
        results_of = starting_policy_in_words(describe(rows[0]["made_by"]))
        found = f"{path}: holds results of {results_of} ({differences})"
        if out:
            raise BadInput(f"--out {found}; choose another file, or remove it")
        print(found)


def default_path(policy):
    """Where results of a ReadyPolicy go without --out: into the directory of its run, else to
    results/, never into a model directory."""
    if policy.home and policy.home.is_dir():
        return policy.home / "benchmark.jsonl"
    return Path("results") / (re.sub(r"\W+", "-", policy.label).strip("-") + ".jsonl")


def numbered(path):
    """Yield NAME.jsonl itself, then NAME-2.jsonl, NAME-3.jsonl, and so on."""
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.stem}-{number}.jsonl")


def cut_unfinished_line(path):
    """Cut off what stands behind the last newline: an evaluation that was stopped while it wrote
    leaves half a line, and that dialogue is held again."""
    whole_lines = path.read_bytes().rfind(b"\n") + 1  # their bytes; 0 if there is no newline
    os.truncate(path, whole_lines)


# --------------------------------------------------------------------------------------------- main


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    return make_parser().run(run, argv)


def run(args):
    """The one thing that the flags ask for. Returns the exit code; raises RunError."""
    kinds = [name for name in ("before_after", "score", "compare") if getattr(args, name)]
    if len(kinds) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in kinds)
        raise BadInput(f"{flags} cannot be combined; give one of them")
    if args.before_after:
        return run_before_after(args)
    if args.compare:
        before, after = [files_of_side(names) for names in args.compare]
        return run_comparison(args, before, after)
    if args.score:
        return run_scores(args)
    code, _ = run_benchmark(args)
    return code


def run_before_after(args):
    """Measure a run where it started and where it ended, and compare the two. Returns the exit
    code."""
    for name in ("step", "out"):
        if getattr(args, name) is not None:
            raise BadInput(
                f"--{name} cannot be combined with --before-after, which measures step 0 and the "
                "newest step, into before.jsonl and after.jsonl of the run; leave it out"
            )
    directory = Path(args.policy or newest_run())
    if "algo" not in read_json(directory / "config.json"):  # as in `find_policy`
        raise BadInput(f"--before-after: {directory} is no run, so it has no step 0; name a run")
    usual_paths = {0: directory / "before.jsonl", None: directory / "after.jsonl"}
    refuse_overwriting({"--json": args.json}, usual_paths.values())
    files_of_sides = []
    for step, usual_path in usual_paths.items():
        of_side = {**vars(args), "policy": str(directory), "step": step, "json": None}
        code, path = run_benchmark(argparse.Namespace(**of_side), usual_path)
        if code:
            return code
        files_of_sides.append([str(path)])
    before, after = files_of_sides
    print()
    # the tables above say already whose scores these are, and on which scale
    return run_comparison(args, before, after, named=False)


def run_benchmark(args, usual_path=None):
    """Hold the dialogues of the benchmark and print their tables. Returns the exit code and the
    path of the results. usual_path: see `place_for_results`."""
    path, ids, n_lost = run_or_continue(args, usual_path)
    if n_lost == len(ids):
        raise TooManyLost(f"{path}: all {len(ids)} dialogues are lost: each of them failed")
    result = score(path, args.rule, args.anyway, ids, n_lost)
    print_score(result)
    print(f"results: {path}; to look at them: python -m tools.report {path}")
    code = finish(args, result, result["problems"])
    # more than a fifth is missing: that score is not to be trusted, so the exit code says it
    if n_lost * 5 > len(ids):
        print(
            f"evaluate.py: {n_lost} of {len(ids)} dialogues are lost, so the score is of those "
            "that are left; run the same command again when the simulator is well",
            file=sys.stderr,
        )
        code = TooManyLost.exit_code
    return code, path


def run_or_continue(args, usual_path=None):
    """Hold the dialogues that the result file lacks, appending each as it ends. Returns (path of
    the file, ids of the users asked for, how many of their dialogues were lost)."""
    setup = who_talks(args, args.policy or newest_run())
    # a path that cannot be written must be refused before the first dialogue
    file = place_for_results(args.out, setup, usual_path)
    try:
        refuse_overwriting({"--json": args.json}, [file.path])
        lost = asyncio.run(hold_dialogues(setup, file.path, file.finished_ids))
    finally:
        os.close(file.lock)
    for profile_id, error in lost:
        print(
            f"evaluate.py: {profile_id} is missing: {error}; run the same command again "
            "to fill it in",
            file=sys.stderr,
        )
    return file.path, {profile.id for profile in setup.users}, len(lost)


def run_scores(args):
    """Print the tables of the result files that --score names. Returns the exit code."""
    refuse_overwriting({"--json": args.json}, args.score)
    results = [score(path, args.rule, args.anyway) for path in args.score]
    for result in results:
        print_score(result)
    problems = [problem for result in results for problem in result["problems"]]
    # --json writes the tables of one file as an object, those of several as a list
    for_json = results[0] if len(results) == 1 else results
    return finish(args, for_json, problems)


def run_comparison(args, before, after, named=True):
    """Print how the result files of two sides differ, lists of paths. named: see
    `print_comparison`. Returns the exit code."""
    refuse_overwriting({"--json": args.json}, before + after)
    result = compare(before, after, rule=args.rule)
    print_comparison(result, named)
    return finish(args, result, result["problems"])


def finish(args, result, problems):
    """Write `result` where --json says, and name what could not be used. Returns the exit code."""
    if args.json:
        write_json(args.json, result)
    for problem in problems:
        print(f"evaluate.py: {problem}", file=sys.stderr)
    return 2 if problems else 0


def make_parser():
    """The flags of evaluate.py."""
    parser = Parser(
        prog="evaluate.py",
        description="Measure a policy with the Sentient Benchmark (dialogues from emotion 40, 10 "
        "replies at most; the score is the mean final emotion), and compare results. Without flags "
        "it measures the newest run in runs/.",
    )
    parser.add_argument(
        "--policy",
        help="a run, a checkpoint, a model directory or name, toy, or openai:MODEL@URL (default: "
        "the newest run)",
        metavar="POLICY",
    )
    add_policy_flags(parser)
    add_user_flags(parser)
    parser.add_argument(
        "--out",
        help="result file; an evaluation that was stopped goes on in its file (default: "
        "benchmark.jsonl in the run's directory, or a file in results/)",
        metavar="FILE",
    )
    parser.add_argument(
        "--before-after",
        help="measure a run where it started and where it ended, into before.jsonl and after.jsonl "
        "in its directory, and compare the two",
        action="store_true",
    )
    parser.add_argument(
        "--score",
        help="measure nothing: print the scores of these result files",
        nargs="+",
        metavar="FILE",
    )
    parser.add_argument(
        "--rule",
        help="every: each reply is scored; sage: as in SAGE's code, the last one of a dialogue "
        "that used all its replies is not (default: every; sage for SAGE's files)",
        choices=["every", "sage"],
    )
    parser.add_argument(
        "--anyway",
        help="average results of different simulators or settings, which is refused otherwise",
        action="store_true",
    )
    parser.add_argument(
        "--compare",
        help="measure nothing: compare two result files on the users that are in both; several "
        "seeds of a side are a pattern, or names with commas between them",
        nargs=2,
        metavar=("BEFORE", "AFTER"),
    )
    parser.add_argument("--json", help="write the tables to FILE, too", metavar="FILE")
    return parser


def add_policy_flags(parser):
    """The flags that PolicyFlags is made of; tools have them too."""
    parser.add_argument(
        "--step",
        help="of a run: the checkpoint of step N; 0: the policy before training (default: the "
        "newest)",
        type=natural,
        metavar="N",
    )
    parser.add_argument(
        "--lang",
        help="language of the user's prompts; of a policy that is no run also of its own (default: "
        "that of the run, else en)",
        choices=["en", "zh"],
    )
    parser.add_argument(
        "--think",
        help="the policy thinks before it replies; not needed for a run, whose settings say so",
        action="store_true",
    )
    parser.add_argument(
        "--max-tokens",
        help="tokens of a reply, at most (default: as in the run; 48 for the toy, else 2048)",
        type=positive,
        metavar="N",
    )
    parser.add_argument(
        "--context",
        help="tokens of a dialogue, at most (default: as in the run, else what the model can read)",
        type=positive,
        metavar="N",
    )
    parser.add_argument(
        "--template-args",
        help="for a policy that is no run: arguments of its chat template, such as "
        "'{\"enable_thinking\": false}'",
        type=json_object,
        metavar="JSON",
    )


def add_user_flags(parser):
    """The other flags that `who_talks` needs; tools have them too."""
    parser.add_argument(
        "--simulator",
        help="model that plays the users: toy, toy-weak or feelings (by rule), openai:MODEL@URL, "
        "local:DIR (default: that of the run, else toy)",
        metavar="NAME",
    )
    parser.add_argument(
        "--profiles",
        help="users to measure with, a JSONL file (default: those that the run held out, else the "
        "toy's held-out users)",
        metavar="FILE",
    )
    parser.add_argument(
        "--world",
        help="heart-to-heart: users with a trouble; chit-chat: users of everyday talk, those in "
        "prompts/profiles/ or in --profiles, whom the toy cannot play (default: heart-to-heart)",
        choices=["heart-to-heart", "chit-chat"],
        default="heart-to-heart",
    )
    parser.add_argument(
        "--difficulty",
        help="how much users hide, and how easily replies please them (default: that of the run, "
        "else vanilla)",
        choices=["vanilla", "challenging"],
    )
    parser.add_argument(
        "--start",
        help="emotion of the users at the start (default: 40; training starts at 30)",
        type=emotion,
        metavar="E",
        default=INITIAL_EMOTION["benchmark"],
    )
    parser.add_argument(
        "--max-turns",
        help=f"replies in a dialogue, at most (default: {BENCHMARK_TURNS})",
        type=positive,
        metavar="N",
        default=BENCHMARK_TURNS,
    )
    parser.add_argument(
        "--simulator-temperature",
        help="sampling temperature of the model that plays the users (default: 0)",
        metavar="T",
        type=not_negative,
        default=0.0,
    )
    parser.add_argument("--limit", help="only the first N users", type=positive, metavar="N")
    parser.add_argument(
        "--seed",
        help="seed of the policy's sampling (default: 0)",
        type=natural,
        default=0,
        metavar="N",
    )


if __name__ == "__main__":
    sys.exit(main())
