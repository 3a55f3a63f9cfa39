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
from support.settings import SCRIPTED, SMALL, looks_like_a_path, resolve_settings, split_name
from support.users import INITIAL_EMOTION, emotion_level

import asyncio
import itertools
import os
import re
import sys
from dataclasses import dataclass, fields
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

# The modules that load torch are imported in the functions that need them: --score and --compare
# need no model, and start at once.

FLOOR = 9  # a dialogue ends at this emotion or a lower one: SAGE stops below 10

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
    from rlver import converse

    settings = setup.evaluation_settings
    lost = []
    # The index of a user is a part of the seed. It counts the finished ones too, so a continued
    # evaluation draws what an uninterrupted one would have drawn.
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
        # An agent's seed is a list of numbers. The second one is 0 or 1 in training (rlver.KINDS):
        # with a 3 there, no dialogue of the benchmark has the random numbers of one of training.
        agent = setup.policy.make_agent([settings["seed"], 3, index])
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
    ours = {key: turn[key] for key in ("thought", "change", "emotion", "analysis", "mark")}
    return {"role": "assistant", "content": turn["reply"], "rlver": ours}


def message_of_user(turn, thought):
    """The user's answer in a turn, as a message of the history. thought: the one behind it."""
    sections, _ = parse_emotion(turn["analysis"], turn["mark"])
    planning = {
        "activity": sections["Activity"],
        "TargetCompletion": sections["TargetCompletion"],
        "content": sections["Content"],
        "analyse": sections["Analyse"],
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


@dataclass
class PolicyFlags:
    """The flags of `add_policy_flags`: what the command line says of a policy. Most fill in what
    the policy's own run does not say."""

    step: int | None = None
    think: bool = False
    lang: str | None = None
    max_tokens: int | None = None
    context: int | None = None
    template_args: dict | None = None
    history_thoughts: str = "strip"

    @classmethod
    def of(cls, args):
        """The PolicyFlags among parsed flags."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})


@dataclass
class ReadyPolicy:
    """A policy that is loaded, and ready to talk."""

    label: str  # what results call it
    policy_settings: dict  # how it replies: thinking or not, temperature, tokens ...
    run_settings: dict  # config.json of the run that made it; {} if it is no run of this project
    home: Path | None  # the directory of that run; None if it is no run of this project
    make_agent: Callable  # seed -> Agent


def open_policy(name, flags=None):
    """The ReadyPolicy that `name` stands for. flags: PolicyFlags. Raises BadInput or BadModel."""
    flags = flags or PolicyFlags()
    kind, model_name, url = split_name(name)
    if kind != "openai":
        return policy_in_process(name, flags)
    if not model_name or not url.startswith("http"):
        raise BadInput(f"--policy {name}: openai:MODEL@URL is needed")
    return policy_of_server(model_name, url, flags)


def policy_in_process(name, flags):
    """The ReadyPolicy whose weights are loaded here: of a run, of a checkpoint, of a model
    directory, of the hub, or the toy's."""
    from support.loading import best_device, load_model, stop_ids

    from engine import TorchEngine
    from policy import Agent

    policy = find_policy(name, flags.step)
    if flags.think and not policy.run_settings.get("think", True):
        raise BadInput(f"--think: {policy.label} was trained to reply without thinking")
    settings = settings_of_policy(policy, flags)
    label, weights = resolve_toy(policy, settings["think"])
    model, tokenizer = load_model(weights, best_device(), flag="--policy")
    if settings["context"] is None:
        settings["context"] = model.config.max_position_embeddings
    if not policy.run_settings and not policy.is_toy:
        print_assumptions(label, settings)
    # as in training: the toy knows its job without a system prompt
    system = "" if policy.is_toy else system_prompt(settings)
    chat = make_chat_format(tokenizer, system, settings, stop_ids(weights))
    engine = TorchEngine(model, chat.stop_id, settings["temperature"])

    def make_agent(seed):
        return Agent(
            engine,
            chat,
            think=settings["think"],
            seed=seed,
            history=settings["history_thoughts"],
            max_tokens=settings["max_tokens"],
            context=settings["context"],
        )

    return ReadyPolicy(label, settings, policy.run_settings, policy.home, make_agent)


def settings_of_policy(policy, flags):
    """How a FoundPolicy replies: as in its run; where the run does not say it, as the flags say.
    (--max-tokens and --context come before the run's.) A "context" of None stands for the longest
    that the model allows."""
    run_settings = policy.run_settings
    usual = usual_settings(policy)
    return {
        "think": run_settings.get("think", flags.think),
        "policy_lang": run_settings.get("lang", flags.lang or "en"),
        "temperature": run_settings.get("temperature", usual["temperature"]),
        "max_tokens": flags.max_tokens or run_settings.get("max_tokens", usual["max_tokens"]),
        "context": flags.context or run_settings.get("context", usual["context"]),
        "template_args": run_settings.get("template_args", flags.template_args) or None,
        "history_thoughts": run_settings.get("history_thoughts", flags.history_thoughts),
    }


def usual_settings(policy):
    """How a FoundPolicy replies that is no run: smollm2 as the runs that begin with it."""
    if policy.weights == SMALL:
        defaults = resolve_settings({"model": SMALL})
        return {key: getattr(defaults, key) for key in ("temperature", "max_tokens", "context")}
    return {"temperature": 1.0, "max_tokens": 48 if policy.is_toy else 2048, "context": None}


def resolve_toy(policy, think):
    """(label, weights) of a FoundPolicy. Where its weights are "toy", the toy's starting policy is
    meant; there are two of them, one that thinks and one that does not."""
    if policy.weights != "toy":
        return policy.label, policy.weights
    # a run of the toy started from it; without a run it is --policy toy
    label = policy.label if policy.run_settings else f"toy, {mode_of(think)}"
    return label, toy.base_policy(think)


def mode_of(think):
    """The name of a policy's mode."""
    return "think" if think else "direct"


def print_assumptions(label, settings):
    """Say what is assumed of a policy that is no run of this project, and which flag changes it."""
    print(
        f"{label} is no run of this project; assumed: {mode_of(settings['think'])} (--think), "
        f"prompts in {settings['policy_lang']} (--lang), temperature {settings['temperature']:g}, "
        f"at most {settings['max_tokens']} tokens a reply (--max-tokens), {settings['context']} a "
        "dialogue (--context)"
    )


def system_prompt(settings):
    """The system prompt of a policy with these settings."""
    return load_prompt(f"policy_{mode_of(settings['think'])}", settings["policy_lang"])


def make_chat_format(tokenizer, system, settings, stops):
    """The ChatFormat of a policy. stops: ids of its stop tokens. Raises BadModel."""
    from support.chat_format import ChatFormat

    chat = ChatFormat(tokenizer, system, settings["think"], settings["template_args"], stops)
    if settings["history_thoughts"] == "keep":
        chat.check_that_thoughts_are_kept()
    return chat


@dataclass
class FoundPolicy:
    """What the name of a policy stands for; nothing is loaded yet."""

    label: str  # what results call it
    weights: str | Path  # a directory, a model's name, or "toy"
    run_settings: dict  # of the run that made it; {} if it is no run of this project
    home: Path | None  # the directory of that run

    @property
    def is_toy(self):
        """Is it the toy's policy, as it starts or as a run has trained it?"""
        return self.run_settings.get("model", self.weights) == "toy"


def find_policy(name, step=None):
    """The FoundPolicy that `name` stands for.

    A run stands for its newest checkpoint, or for that of `step`; step 0 is where it started. A
    checkpoint has the settings of its run, in its rlver.json. All else has no settings: {}. Raises
    BadInput."""
    directory = Path(name)
    run_settings = read_json(directory / "config.json")
    if "algo" in run_settings:  # else it is no run: a model's config.json does not have this key
        return checkpoint_of_run(directory, run_settings, step)
    if step is not None:
        raise BadInput(f"--step {step}: a run has steps, {name} is none")
    if (directory / "state.json").is_file():  # a checkpoint
        run_settings = read_json(directory / "rlver.json")
        if not run_settings:
            run_settings = read_json(directory.parent / "config.json")
        home = directory.parent if run_settings else None
        return FoundPolicy(str(directory), directory, run_settings, home)
    if not directory.exists() and looks_like_a_path(name):
        runs = sorted(str(path.parent) for path in Path("runs").glob("*/config.json"))
        raise BadInput(
            f"--policy {name}: no such run or directory; there are: "
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
    if step is None:
        step = max(by_step, default=0)
    if step not in by_step:
        raise BadInput(
            f"--policy {run}: no checkpoint of step {step} here; there are: "
            f"{', '.join(map(str, by_step)) or 'none'}"
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


def policy_of_server(model_name, url, flags):
    """The ReadyPolicy behind an OpenAI-compatible server."""
    settings = {
        "think": flags.think,
        "policy_lang": flags.lang or "en",
        "temperature": 1.0,
        "max_tokens": flags.max_tokens or 2048,
        "history_thoughts": flags.history_thoughts,
    }
    server = ServerModel(
        model_name, url, settings["temperature"], max_tokens=settings["max_tokens"]
    )
    system = system_prompt(settings)

    def make_agent(seed):
        # The seed does nothing: a server draws its own random numbers.
        return ServerAgent(server, system, settings["think"], settings["history_thoughts"])

    label = f"openai:{model_name}"
    return ReadyPolicy(label, settings, run_settings={}, home=None, make_agent=make_agent)


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
        text = await self.ask_server()
        if self.think:
            thought, visible, malformed = split_thought(text)
        else:
            thought, visible = take_thoughts(text)
            malformed = False
        # later turns see earlier thoughts only with --history-thoughts keep
        remembered = text if self.history == "keep" else visible
        self.messages.append({"role": "assistant", "content": remembered})
        return Reply(text, visible, thought, malformed)

    async def ask_server(self):
        """The text of the server's reply to the messages so far. Raises SimulatorFailed."""

        async def call(errors):  # errors: of answers that could not be read; here are none
            return await self.server.chat(self.messages)

        try:
            return await ask_with_retries(
                "a reply of the policy's server",
                call,
                parse=str,  # any text is an answer
                retries=8,
            )
        except PromptRefused as error:  # its context is full, or a filter took its reply
            raise SimulatorFailed(f"the policy's server refuses a reply: {error}") from None


# -------------------------------------------------------------------------------- who talks to whom

# What --simulator, --lang and --difficulty are where neither a flag nor the policy's run says it.
USUAL_USER = {"simulator": "toy", "lang": "en", "difficulty": "vanilla"}


@dataclass
class Setup:
    """A policy and the users that it meets."""

    policy: ReadyPolicy
    simulator: Simulator  # the model behind all users
    users: list  # of Profile
    evaluation_settings: dict  # all that decides the results; each line of the file holds them


def who_talks(args, name):
    """A Setup of the policy `name`: with what the flags say and, where they do not, what the
    policy's run says."""
    policy = open_policy(name, PolicyFlags.of(args))

    usual_user = {**USUAL_USER, "simulator": "phrases"} if name == SMALL else USUAL_USER

    def setting(key):
        """What the flag says, else the policy's run, else the usual value."""
        return getattr(args, key) or policy.run_settings.get(key, usual_user[key])

    model, lang, difficulty = setting("simulator"), setting("lang"), setting("difficulty")
    people, held_out = users_to_measure_with(args, policy, model, lang)
    simulator = make_simulator(model, lang, difficulty, temperature=args.simulator_temperature)
    evaluation_settings = {
        "policy": policy.label,
        **written_settings(policy.policy_settings),
        "simulator": user_label(model),
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


def users_to_measure_with(args, policy, simulator, lang):
    """(users, were they held out by the policy's run?). Raises BadInput. The first row that fits:

    --profiles FILE               those of the file                          False
    --world chit-chat             those of prompts/profiles/LANG_chat.jsonl,
                                  of `phrases` its own people who chat       False
    a run with files of profiles  those that it held out                     True
    any other run                 the toy's held-out users                   True
    no run of this project        the toy's held-out users                   False
    """
    wants_chat = args.world == "chit-chat"
    if wants_chat and not args.profiles and simulator == "phrases":
        return [Profile(**row) for row in phrases.chatters()], False
    if wants_chat and not args.profiles and simulator in SCRIPTED:
        raise BadInput(
            f"--world chit-chat: the scripted user ({simulator}) knows no chit-chat; "
            "choose a real --simulator, as openai:MODEL@URL"
        )
    if args.profiles:
        return users_of_file(args.profiles, simulator, wants_chat), False
    if wants_chat:
        file = PROMPTS / "profiles" / f"{lang}_chat.jsonl"
        return users_of_file(file, simulator, wants_chat), False
    if policy.run_settings.get("profiles"):
        return heldout_of_run(policy.home, policy.run_settings, simulator), True
    is_run = bool(policy.run_settings)  # if so, it trained with the toy's other users
    _, people = users_of_run(None, 128, simulator)
    return people, is_run


def users_of_file(file, simulator, wants_chat):
    """The users of a file. Raises BadInput for users whom the simulator cannot play and, with
    --world chit-chat, for one who comes for a heart-to-heart talk."""
    people = load_profiles(file)
    refuse_foreign(simulator, people)
    for profile in people:
        if wants_chat and profile.target == "eq":
            raise BadInput(
                f"--world chit-chat: user {profile.id!r} of {file} comes for a "
                "heart-to-heart talk (its target is eq), not to chat"
            )
    return people


def heldout_of_run(home, run_settings, simulator):
    """The users that the run in the directory `home` held out: by its heldout.json; of a run that
    has none, by the run's own rule. Raises BadInput."""
    files = profile_files(home, run_settings["profiles"])
    _, people = users_of_run(files, run_settings["eval_size"], simulator)
    ids = read_json(Path(home) / "heldout.json").get("ids")
    return [profile for profile in people if ids is None or profile.id in ids]


# --------------------------------------------------------------------- the settings in result files

# Every line of a result file holds the settings that it was made with. Files of earlier versions
# lack the settings that came later; this is what it means that one is missing:
MEANING_IF_MISSING = {
    "simulator_temperature": 0.0,
    "history_thoughts": "strip",
    "world": None,
    "template_args": None,
    "start": INITIAL_EMOTION["benchmark"],
    "max_turns": 10,
    "seed": 0,
}
# New files lack these two as well, unless they have another value; all others are always written.
LEFT_OUT_IF_USUAL = {"template_args", "history_thoughts"}
# Keys that are no settings of an evaluation: "ended" and "traits" are of one dialogue, "held_out"
# follows from the policy and its users.
NO_SETTINGS = {"ended", "traits", "held_out"}


def written_settings(policy_settings):
    """The settings of a policy that its results hold."""
    written = {}
    for key, value in policy_settings.items():
        is_left_out = key in LEFT_OUT_IF_USUAL and value == MEANING_IF_MISSING[key]
        if not is_left_out:
            written[key] = value
    return written


def differences_of(rows, evaluation_settings):
    """How the settings of rows of results differ from those of this evaluation, in words, each
    difference once; "" if they are the same. A row of `read_results` has its settings under
    "made_by"."""
    differences = []
    for row in rows:
        for difference in differing(row["made_by"], evaluation_settings):
            if difference not in differences:
                differences.append(difference)
    return ", ".join(differences)


def differing(there, here):
    """Yield how the settings of two results differ, in words. there, here: as the old results hold
    them, and as the new ones do. A setting that only one of them holds counts, too."""
    ignored = set(NO_SETTINGS)
    if "users" not in there or "users" not in here:
        ignored.add("users")  # an early file does not say who they were: taken to be the same
    old_settings = {**MEANING_IF_MISSING, **there}
    new_settings = {**MEANING_IF_MISSING, **here}
    for key in dict.fromkeys([*here, *there]):
        old, new = old_settings.get(key), new_settings.get(key)
        if key in ignored or old == new:
            continue
        yield "other users" if key == "users" else f"{key} {old} there, {new} here"


# --------------------------------------------------------------------------------- where results go


def place_for_results(asked, setup):
    """The file that results go to, locked: (path, ids of the users whose results it holds already,
    the lock). asked: --out, or None.

    With --out it is that file, which is refused if it holds results of other settings. Else it is
    `default_path`, or the next name (NAME-2, NAME-3 ...) whose file is empty or holds results of
    the same settings. Raises BadInput."""
    first_path = Path(asked or default_path(setup.policy))
    if first_path.suffix == ".html":
        raise BadInput(
            f"--out {first_path}: the results' page goes to a file of that name; let the "
            "results end in .jsonl"
        )
    for path in numbered(first_path):
        lock = lock_file(path, "--out")  # makes the file if it is not there
        rows = rows_so_far(path)
        differences = differences_of(rows, setup.evaluation_settings)
        if not differences:
            cut_unfinished_line(path)
            return path, {row["id"] for row in rows}, lock
        os.close(lock)
        if asked:
            raise BadInput(
                f"--out {path}: holds results of {describe(rows[0]['made_by'])} "
                f"({differences}); choose another file, or remove it"
            )
        print(f"{path} holds results of other settings ({differences})")


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


def rows_so_far(path):
    """The rows of the result file `path`; [] if it is still empty."""
    if path.stat().st_size == 0:
        return []
    rows, _ = read_results(path)
    return rows


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
        help="every: all replies are scored; sage: where a dialogue used all its replies the last "
        "is not, as in SAGE's own code (default: every; SAGE's files allow only sage)",
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
        "--think",
        help="the policy thinks before it replies (not needed for a run: its settings say so)",
        action="store_true",
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
