"""evaluate.py - how good is this model, and is it better than that one? (SAGE; RLVER 3)

    python evaluate.py                          the newest run, with users that it never saw
    python evaluate.py --policy P               a run, a checkpoint, a model directory, toy,
                                                openai:MODEL@URL; --step 0: where a run started
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
from support.llm import PromptRefused, ask_with_retries, digest
from support.report import report_of_results
from support.results import describe, read_results
from support.rundir import checkpoints, profile_files
from support.scores import compare, files_of_side, print_comparison, print_score, score
from support.server import ServerModel
from support.settings import SCRIPTED, looks_like_a_path, split_name
from support.users import INITIAL_EMOTION, emotion_level

import asyncio
import itertools
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from tqdm import tqdm

import phrases
import toy
from simulator import (
    PROMPTS,
    Profile,
    Simulator,
    User,
    load_profiles,
    load_prompt,
    make_simulator,
    parse_emotion,
    refuse_foreign,
    users_of_run,
)

FLOOR = 9  # a dialogue ends at this emotion or a lower one: SAGE stops below 10

# The usual values of settings, in two tables.
# What --simulator, --lang and --difficulty are where neither a flag nor the policy's run says it:
USUAL_USER = {"simulator": "toy", "lang": "en", "difficulty": "vanilla"}
# What it means that a result lacks a setting: files of earlier versions lack those that came later.
# What is usual is not written, so that new files and those of earlier versions compare. This goes
# for three settings: "template_args" and "history_thoughts" are left out (`without_usual`), and
# "world" is written as None. The others are always written.
MEANING_IF_MISSING = {
    "simulator_temperature": 0.0,
    "history_thoughts": "strip",
    "world": None,
    "template_args": None,
    "start": INITIAL_EMOTION["benchmark"],
    "max_turns": 10,
    "seed": 0,
}

# ----------------------------------------------------------------------------- the benchmark itself


def fill_results(args):
    """Hold the dialogues that the result file lacks, appending each as it ends. Returns (path of
    the file, ids of the users asked for, how many of their dialogues were lost)."""
    setup = who_talks(args, args.policy or newest_run())
    # a path that cannot be written must be refused before the first dialogue
    path, finished_ids, lock = place_for_results(args.out, setup)
    try:
        refuse_overwriting({"--json": args.json}, [path, path.with_suffix(".html")])
        lost = asyncio.run(hold_dialogues(setup, path, finished_ids))
    finally:
        os.close(lock)
    for profile_id, error in lost:
        print(
            f"evaluate.py: {profile_id} is missing: {error}; run the same command again "
            "to fill it in",
            file=sys.stderr,
        )
    return path, {profile.id for profile in setup.users}, len(lost)


async def hold_dialogues(setup, path, finished_ids):
    """All dialogues of a Setup at once, but for those of `finished_ids`; each is appended to the
    file `path` when it ends. Returns [(id of the user, error)] of those that were lost."""
    # The imports of torch stand in the functions that need it: --score and --compare do not.
    from rlver import converse

    made_by = setup.made_by
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
        user = User(setup.simulator, profile, made_by["start"], f"benchmark {profile.id}")
        # the second number is 0 or 1 in training (rlver.KINDS), so no random number is used twice
        agent = setup.policy.make_agent([made_by["seed"], 3, index])
        try:
            first_line = await user.open()
            # The thought behind the first line is dropped: `result_of` pairs the others with the
            # lines that follow a reply.
            user.thoughts.clear()
            episode = await converse(agent, user, first_line, made_by["max_turns"], floor=FLOOR)
            if not episode.turns:  # as in a rollout: nothing was said that could be scored
                raise SimulatorFailed("the first line leaves no room in the context for a reply")
            append_line(path, result_of(profile, episode, user, made_by))
        except SimulatorFailed as error:
            lost.append((profile.id, error))
        bar.update()

    with bar:
        if todo:
            await setup.simulator.check()
        await asyncio.gather(*[hold_dialogue(index, profile) for index, profile in todo])
    return lost


def result_of(profile, episode, user, made_by):
    """One dialogue in the format of SAGE's released result files; what is ours is under "rlver"."""
    history = [{"role": "user", "content": episode.first_line, "emotion-point": made_by["start"]}]
    thoughts = iter(user.thoughts)
    for turn in episode.turns:
        ours = {key: turn[key] for key in ("thought", "change", "emotion", "analysis", "mark")}
        history.append({"role": "assistant", "content": turn["reply"], "rlver": ours})
        if turn["user"] is not None:
            sections, _ = parse_emotion(turn["analysis"], turn["mark"])
            planning = {
                "activity": sections["Activity"],
                "TargetCompletion": sections["TargetCompletion"],
                "content": sections["Content"],
                "analyse": sections["Analyse"],
                "change": turn["change"],
            }
            history.append(
                {
                    "role": "user",
                    "content": turn["user"],
                    "thinking": next(thoughts, ""),
                    "emotion-point": turn["emotion"],
                    "planning": planning,
                }
            )
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
        "rlver": {**made_by, "ended": episode.ended, "traits": profile.cha_group},
    }


# -------------------------------------------------------------------------------- who talks to whom


@dataclass
class Setup:
    """A policy and the users that it meets."""

    policy: "Measured"
    simulator: Simulator  # the model behind all users
    users: list  # of Profile
    made_by: dict  # the settings of this evaluation; each line of the results holds them


def who_talks(args, name):
    """A Setup of the policy `name`: with what the flags say and, where they do not, what the
    policy's run says."""
    policy = open_policy(name, PolicyFlags.of(args))

    def setting(key):
        """What the flag says, else the policy's run, else the usual value."""
        return getattr(args, key) or policy.run_settings.get(key, USUAL_USER[key])

    model, lang, difficulty = setting("simulator"), setting("lang"), setting("difficulty")
    people, held_out = users_to_measure_with(args, policy, model, lang)
    simulator = make_simulator(model, lang, difficulty, temperature=args.simulator_temperature)
    made_by = {
        "policy": policy.label,
        **policy.settings,
        "simulator": user_label(model),
        "difficulty": difficulty,
        "lang": lang,
        "start": args.start,
        "max_turns": args.max_turns,
        "seed": args.seed,
        "world": args.world if args.world == "chit-chat" else None,  # see MEANING_IF_MISSING
        "simulator_temperature": args.simulator_temperature,
        "users": digest([vars(profile) for profile in people]),
        "held_out": held_out,
    }
    return Setup(policy, simulator, people[: args.limit], made_by)


def user_label(name):
    """What a --simulator value is called in results: the model, wherever it is served."""
    kind, model, _ = split_name(name)
    return model or kind


def users_to_measure_with(args, policy, simulator, lang):
    """(users, were they held out by the policy's run?): those of --profiles; else, for --world
    chit-chat, people of everyday talk; else those that the run held out; else the toy's. Raises
    BadInput."""
    wants_chat = args.world == "chit-chat"
    if wants_chat and not args.profiles and simulator == "phrases":
        return [Profile(**row) for row in phrases.chatters()], False
    if wants_chat and not args.profiles and simulator in SCRIPTED:
        raise BadInput(
            f"--world chit-chat: the scripted user ({simulator}) knows no chit-chat; "
            "choose a real --simulator, as openai:MODEL@URL"
        )
    if wants_chat or args.profiles:
        file = args.profiles or PROMPTS / "profiles" / f"{lang}_chat.jsonl"
        people = load_profiles(file)
        refuse_foreign(simulator, people)
        if wants_chat:
            refuse_heart_to_heart(people, file)
        return people, False
    if policy.run_settings.get("profiles"):
        return heldout_of_run(policy.home, policy.run_settings, simulator), True
    # The toy's users. A run without files of profiles was trained on the toy's and held these out;
    # a policy that is no run (its settings are {}) held out nobody.
    _, people = users_of_run(None, 128, simulator)
    return people, bool(policy.run_settings)


def refuse_heart_to_heart(people, file):
    """Raise BadInput if one of `people`, who are from `file`, comes for a heart-to-heart talk."""
    for profile in people:
        if profile.target == "eq":
            raise BadInput(
                f"--world chit-chat: user {profile.id!r} of {file} comes for a "
                "heart-to-heart talk (its target is eq), not to chat"
            )


def heldout_of_run(home, config, simulator):
    """The users that the run in the directory `home`, with the settings `config`, held out: by its
    heldout.json; of a run that has none by the run's own rule. Raises BadInput."""
    names = profile_files(home, config["profiles"])
    people = users_of_run(names, config["eval_size"], simulator)[1]
    ids = read_json(Path(home) / "heldout.json").get("ids")
    return [profile for profile in people if ids is None or profile.id in ids]


# --------------------------------------------------------------------------- who is to be measured


@dataclass
class PolicyFlags:
    """The flags of `add_policy_flags`: what the user says of a policy. Most fill in what the
    policy's own run does not say."""

    step: int = None
    think: bool = False
    lang: str = None
    max_tokens: int = None
    context: int = None
    template_args: dict = None
    history_thoughts: str = "strip"

    @classmethod
    def of(cls, args):
        """The PolicyFlags among parsed flags."""
        return cls(
            step=args.step,
            think=args.think,
            lang=args.lang,
            max_tokens=args.max_tokens,
            context=args.context,
            template_args=args.template_args,
            history_thoughts=args.history_thoughts,
        )


@dataclass
class Measured:
    """A policy that is ready to be measured."""

    label: str  # what results call it
    settings: dict  # what it is measured with, as results remember it
    run_settings: dict  # config.json of the run that made it; {} if it is no run of this project
    home: Path | None  # the directory of that run; None if it is no run of this project
    make_agent: Callable  # seed -> Agent


def open_policy(name, flags=None):
    """The policy that is to be measured, ready to talk: a Measured. flags: PolicyFlags. Raises
    BadInput or BadModel."""
    flags = flags or PolicyFlags()
    kind, model_name, url = split_name(name)
    if kind != "openai":
        return policy_in_process(name, flags)
    if not model_name or not url.startswith("http"):
        raise BadInput(f"--policy {name}: openai:MODEL@URL is needed")
    return policy_of_server(model_name, url, flags)


def policy_in_process(name, flags):
    """A policy whose weights are loaded here: of a run, of a checkpoint, of a model directory, of
    the hub, or the toy's."""
    from support.chat_format import ChatFormat
    from support.loading import best_device, load_model, stop_ids

    from engine import TorchEngine
    from policy import Agent

    policy = find_policy(name, flags.step)
    label, weights, run_settings = policy.label, policy.weights, policy.run_settings
    if flags.think and "think" in run_settings and not run_settings["think"]:
        raise BadInput(f"--think: {label} was trained to reply without thinking")
    # The toy's policy has two forms: a run has trained it, and the run's settings say so; or it is
    # still the starting policy, which no run has touched, and `name` is "toy".
    is_toy = run_settings.get("model", name) == "toy"
    settings = settings_of_policy(run_settings, flags, is_toy)
    think = settings["think"]
    mode = "think" if think else "direct"
    if weights == "toy":  # the starting policy: --policy toy, or step 0 of a run of the toy
        weights = toy.base_policy(think)
        if not run_settings:
            label = f"toy, {mode}"
    model, tokenizer = load_model(weights, best_device(), flag="--policy")
    settings["context"] = settings["context"] or model.config.max_position_embeddings
    if not run_settings and not is_toy:
        print_assumptions(label, mode, settings)
    # as in training: the toy knows its job without a system prompt
    system = "" if is_toy else load_prompt(f"policy_{mode}", settings["policy_lang"])
    # both are among the settings only if they are unusual
    template_args = settings.get("template_args")
    history_thoughts = settings.get("history_thoughts", MEANING_IF_MISSING["history_thoughts"])
    chat = ChatFormat(tokenizer, system, think, template_args, stop_ids(weights))
    if history_thoughts == "keep":
        chat.check_that_thoughts_are_kept()
    engine = TorchEngine(model, chat.stop_id, settings["temperature"])

    def make_agent(seed):
        return Agent(
            engine,
            chat,
            think=think,
            seed=seed,
            history=history_thoughts,
            max_tokens=settings["max_tokens"],
            context=settings["context"],
        )

    return Measured(label, settings, run_settings, policy.home, make_agent)


def settings_of_policy(run_settings, flags, is_toy):
    """What a policy is measured with, as results remember it: as its run was made; where that does
    not say it, as the flags say (--max-tokens and --context come before the run's own).

    A "context" of None stands for the longest that the model allows."""
    settings = {
        "think": run_settings.get("think", flags.think),
        "policy_lang": run_settings.get("lang", flags.lang or "en"),
        "temperature": run_settings.get("temperature", 1.0),
        "max_tokens": flags.max_tokens or run_settings.get("max_tokens", 48 if is_toy else 2048),
        "context": flags.context or run_settings.get("context"),
    }
    template_args = run_settings.get("template_args", flags.template_args)
    history_thoughts = run_settings.get("history_thoughts", flags.history_thoughts)
    settings |= without_usual(template_args=template_args or None)
    settings |= without_usual(history_thoughts=history_thoughts)
    return settings


def without_usual(**settings):
    """`settings` as a dict, less those that have their usual value: see MEANING_IF_MISSING."""
    return {key: value for key, value in settings.items() if value != MEANING_IF_MISSING[key]}


def print_assumptions(label, mode, settings):
    """Say what is assumed of a policy that is no run of this project, and which flag changes it."""
    print(
        f"{label} is no run of this project; assumed: {mode} (--think), prompts in "
        f"{settings['policy_lang']} (--lang), temperature 1, at most "
        f"{settings['max_tokens']} tokens a reply (--max-tokens), {settings['context']} a "
        "dialogue (--context)"
    )


@dataclass
class FoundPolicy:
    """What the name of a policy stands for."""

    label: str  # what results call it
    weights: str | Path  # a directory, a model's name, or "toy"
    run_settings: dict  # of the run that made it; {} if it is no run of this project
    home: Path | None  # the directory of that run


def find_policy(name, step=None):
    """The FoundPolicy that `name` stands for.

    A run stands for its newest checkpoint, or for that of `step`; step 0 is where it started. A
    checkpoint has the settings of its run, in its rlver.json. All else has no settings: {}. Raises
    BadInput."""
    directory = Path(name)
    config = read_json(directory / "config.json")
    if "algo" in config:  # a run; a model directory has a config.json too, without this key
        return checkpoint_of_run(directory, config, step)
    if step is not None:
        raise BadInput(f"--step {step}: a run has steps, {name} is none")
    if (directory / "state.json").is_file():  # a checkpoint
        config = read_json(directory / "rlver.json") or read_json(directory.parent / "config.json")
        home = directory.parent if config else None
        return FoundPolicy(str(directory), directory, config, home)
    if not directory.exists() and looks_like_a_path(name):
        runs = sorted(str(path.parent) for path in Path("runs").glob("*/config.json"))
        raise BadInput(
            f"--policy {name}: no such run or directory; there are: "
            f"{', '.join(runs[-8:]) or 'no runs yet'}"
        )
    return FoundPolicy(name, name, run_settings={}, home=None)


def checkpoint_of_run(run, config, step):
    """As `find_policy`, for the directory `run` with the settings `config`. step: of the
    checkpoint, None for the newest."""
    by_step = {int(path.name.removeprefix("checkpoint-")): path for path in checkpoints(run)}
    if step == 0 and 0 not in by_step:  # the oldest checkpoints are not kept
        return FoundPolicy(f"{run}/checkpoint-000000", config["model"], config, home=run)
    if step is None:
        step = max(by_step, default=0)
    if step not in by_step:
        raise BadInput(
            f"--policy {run}: no checkpoint of step {step} here; there are: "
            f"{', '.join(map(str, by_step)) or 'none'}"
        )
    return FoundPolicy(str(by_step[step]), by_step[step], config, home=run)


def newest_run():
    """The directory of the newest finished run in runs/."""
    runs = [path.parent for path in Path("runs").glob("*/summary.json")]
    if not runs:
        raise BadInput(
            "no finished run in runs/; name a policy with --policy, or make one with: "
            "python rlver.py --algo grpo --think"
        )
    return str(max(runs, key=lambda path: path.stat().st_mtime))


def policy_of_server(model_name, url, flags):
    """A policy behind an OpenAI-compatible server."""
    settings = {
        "think": flags.think,
        "policy_lang": flags.lang or "en",
        "temperature": 1.0,
        "max_tokens": flags.max_tokens or 2048,
    }
    settings |= without_usual(history_thoughts=flags.history_thoughts)
    server = ServerModel(model_name, url, 1.0, max_tokens=settings["max_tokens"])
    mode = "think" if flags.think else "direct"
    system = load_prompt(f"policy_{mode}", settings["policy_lang"])

    def make_agent(seed):
        return ServerAgent(server, system, flags.think, flags.history_thoughts)

    return Measured(
        f"openai:{model_name}", settings, run_settings={}, home=None, make_agent=make_agent
    )


class ServerAgent:
    """A policy behind an OpenAI-compatible server: it shows no tokens, and cannot be trained. A
    prompt that it refuses costs its dialogue alone."""

    def __init__(self, server, system, think, history="strip"):
        self.server, self.think, self.history = server, think, history
        self.messages = [{"role": "system", "content": system}]
        self.segments = []  # `converse` files an agent's tokens with the episode: here are none

    async def reply(self, line):
        """As policy.Agent.reply, but for the tokens."""
        from policy import Reply, split_thought, take_thoughts

        self.messages.append({"role": "user", "content": line})
        try:
            text = await ask_with_retries(
                "a reply of the policy's server",
                lambda _: self.server.chat(self.messages),
                str,
                retries=8,
            )
        except PromptRefused as error:  # its context is full, or a filter took its reply
            raise SimulatorFailed(f"the policy's server refuses a reply: {error}") from None
        if self.think:
            thought, visible, malformed = split_thought(text)
        else:
            thought, visible = take_thoughts(text)
            malformed = False
        # later turns see earlier thoughts only with --history-thoughts keep
        remembered = text if self.history == "keep" else visible
        self.messages.append({"role": "assistant", "content": remembered})
        return Reply(text, visible, thought, malformed)


# --------------------------------------------------------------------------------- where results go


def place_for_results(asked, setup):
    """The file that results go to, locked: (path, ids of the users whose results it holds already,
    the lock). asked: --out, or None. A file with results of other settings is refused if it was
    asked for; else the next free name is taken. Raises BadInput."""
    first_path = Path(asked or results_of(setup.policy))
    if first_path.suffix == ".html":
        raise BadInput(
            f"--out {first_path}: the results' page goes to a file of that name; let the "
            "results end in .jsonl"
        )
    for path in numbered(first_path):
        lock = lock_file(path, "--out")
        rows = rows_so_far(path)
        differences = differences_of(rows, setup.made_by)
        if not differences:
            cut_half_a_line(path)
            return path, {row["id"] for row in rows}, lock
        os.close(lock)
        if asked:
            raise BadInput(
                f"--out {path}: holds results of {describe(rows[0]['made_by'])} "
                f"({differences}); choose another file, or remove it"
            )
        # not asked for: try the next free name
        print(f"{path} holds results of other settings ({differences})")


def results_of(policy):
    """Where results of a policy go without --out: into the directory of its run, else to
    results/, never into a model directory."""
    if policy.home and policy.home.is_dir():
        return policy.home / "benchmark.jsonl"
    return Path("results") / (re.sub(r"\W+", "-", policy.label).strip("-") + ".jsonl")


def numbered(path):
    """Yield NAME.jsonl itself, then NAME-2.jsonl, NAME-3.jsonl, and so on."""
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.stem}-{number}.jsonl")


def rows_so_far(path):
    """The rows of the result file `path`; [] if it is still empty."""
    if path.stat().st_size == 0:
        return []
    rows, _ = read_results(path)
    return rows


def differences_of(rows, made_by):
    """How the settings of results differ from `made_by`, in words, each difference once; "" if they
    are the same."""
    differences = []
    for row in rows:
        for difference in differing(row["made_by"], made_by):
            if difference not in differences:
                differences.append(difference)
    return ", ".join(differences)


# Keys of `made_by` that are no settings of an evaluation: "ended" and "traits" are of one dialogue,
# "held_out" follows from the policy and its users.
NO_SETTINGS = {"ended", "traits", "held_out"}


def differing(there, here):
    """Yield what tells the settings of two results apart, in words. there, here: the `made_by` of
    the old results and of the new ones. All keys of either count, not only those of the new."""
    # where a result does not say which users it had, they are taken to be the same
    same_users = there.get("users", here.get("users"))
    if_missing = {**MEANING_IF_MISSING, "users": same_users}
    for key in dict.fromkeys([*here, *there]):
        if key in NO_SETTINGS:
            continue
        old = there.get(key, if_missing.get(key))
        new = here.get(key, if_missing.get(key))
        if old != new:
            yield "other users" if key == "users" else f"{key} {old} there, {new} here"


def cut_half_a_line(path):
    """Cut off what stands behind the last newline: an evaluation that was stopped while it wrote
    leaves half a line, and that dialogue is held again."""
    os.truncate(path, path.read_bytes().rfind(b"\n") + 1)


# --------------------------------------------------------------------------------------------- main


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    return make_parser().run(run, argv)


def run(args):
    """The one thing that the flags ask for. Returns the exit code; raises RunError."""
    if args.score and args.compare:
        raise BadInput("--score and --compare: one of them at a time")
    if args.compare:
        return run_comparison(args)
    if args.score:
        return run_scores(args)
    return run_benchmark(args)


def run_benchmark(args):
    """Hold the dialogues of the benchmark, print their tables and write their page. Returns the
    exit code."""
    path, ids, lost = fill_results(args)
    if lost == len(ids):
        raise TooManyLost(f"{path}: not one of {len(ids)} dialogues came to an end")
    result = score(path, args.rule, args.anyway, ids, lost)
    print_score(result)
    page = report_of_results(path, result, ids)
    print(f"results: {path}; to look at: {page}")
    code = finish(args, result, result["problems"])
    # more than a fifth
    if lost * 5 > len(ids):
        print(
            f"evaluate.py: {lost} of {len(ids)} dialogues are lost, so the score is of those "
            "that are left; run the same command again when the simulator is well",
            file=sys.stderr,
        )
        return TooManyLost.exit_code
    return code


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


def run_comparison(args):
    """Print how the result files of the two sides of --compare differ. Returns the exit code."""
    before, after = [files_of_side(names) for names in args.compare]
    refuse_overwriting({"--json": args.json}, before + after)
    result = compare(before, after, rule=args.rule)
    print_comparison(result)
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
        description="Measure a policy with the Sentient Benchmark, and compare results.",
    )
    parser.add_argument(
        "--policy",
        help="a run, a checkpoint, a model directory or name, toy, or openai:MODEL@URL (default: "
        "the newest run)",
        metavar="P",
    )
    add_policy_flags(parser)
    add_user_flags(parser)
    parser.add_argument(
        "--out",
        help="result file; one that a stopped evaluation left is continued",
        metavar="FILE",
    )
    parser.add_argument(
        "--score", help="tables of result files; no model is needed", nargs="+", metavar="FILE"
    )
    parser.add_argument(
        "--rule",
        help="score every reply, or as SAGE not the last of a full number (default: every for our "
        "files; SAGE's own hold only theirs)",
        choices=["every", "sage"],
    )
    parser.add_argument(
        "--anyway", help="average results of different simulators", action="store_true"
    )
    parser.add_argument(
        "--compare",
        help="two result files, the difference is after minus before; for several seeds, names "
        "with commas between, or patterns",
        nargs=2,
        metavar=("BEFORE", "AFTER"),
    )
    parser.add_argument("--json", help="write the tables here too", metavar="FILE")
    return parser


def add_policy_flags(parser):
    """The flags that PolicyFlags is made of; tools have them too."""
    parser.add_argument(
        "--step",
        help="of a run, the checkpoint of this step; 0: where it started (default: the newest)",
        type=natural,
    )
    parser.add_argument(
        "--lang",
        help="language of the prompts (default: the run's own, else en)",
        choices=["en", "zh"],
    )
    parser.add_argument(
        "--think", help="the policy thinks first (a run knows itself)", action="store_true"
    )
    parser.add_argument(
        "--history-thoughts",
        help="of a policy that is no run: whether later turns see its thoughts (default: strip)",
        choices=["strip", "keep"],
        default="strip",
    )
    parser.add_argument(
        "--max-tokens",
        help="tokens of a reply (default: the run's own; toy 48, else 2048)",
        type=positive,
    )
    parser.add_argument(
        "--context", help="tokens of a dialogue (default: the model's)", type=positive
    )
    parser.add_argument(
        "--template-args",
        help="for a policy that is no run: arguments of its chat template, as "
        "'{\"enable_thinking\": false}'",
        type=json_object,
        metavar="JSON",
    )


def add_user_flags(parser):
    """The other flags that `who_talks` needs; tools have them too."""
    parser.add_argument(
        "--simulator", help="as in rlver.py (default: the run's own, else toy)", metavar="S"
    )
    parser.add_argument(
        "--profiles",
        help="users as JSONL (default: those that the run held out, else the toy's)",
        metavar="FILE",
    )
    parser.add_argument(
        "--world",
        help="chit-chat: people of everyday talk, those in prompts/profiles/ or in --profiles "
        "(needs a real --simulator) (default: heart-to-heart)",
        choices=["heart-to-heart", "chit-chat"],
        default="heart-to-heart",
    )
    parser.add_argument(
        "--difficulty",
        help="(default: the run's own, else vanilla)",
        choices=["vanilla", "challenging"],
    )
    parser.add_argument(
        "--start",
        help="emotion at the start (default: 40; RLVER trains from 30)",
        type=emotion,
        default=INITIAL_EMOTION["benchmark"],
    )
    parser.add_argument(
        "--max-turns", help="replies, at most (default: 10)", type=positive, default=10
    )
    parser.add_argument(
        "--simulator-temperature", help="(default: 0)", type=not_negative, default=0.0
    )
    parser.add_argument("--limit", help="only so many users", type=positive)
    parser.add_argument(
        "--seed", help="of the policy's sampling (default: 0)", type=natural, default=0
    )


if __name__ == "__main__":
    sys.exit(main())
