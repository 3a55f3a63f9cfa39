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
from support.flags import Parser, emotion, json_object, natural, not_negative, positive
from support.llm import PromptRefused, ask_with_retries, digest
from support.report import report_of_results
from support.results import conditions_of, describe, parts_of, read_results
from support.rundir import (
    append_line,
    checkpoints,
    lock_file,
    profile_files,
    read_json,
    refuse_overwriting,
    write_json,
)
from support.server import ServerModel
from support.settings import is_beside_us, split_name
from support.signs import score_summary, signs
from support.stats import sign_flips
from support.users import emotion_level

import asyncio
import glob
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

import numpy as np
from tqdm import tqdm

import toy
from simulator import (
    PROMPTS,
    Simulator,
    User,
    load_profiles,
    load_prompt,
    make_simulator,
    parse_emotion,
    refuse_foreign,
    users_of_run,
)

FLOOR = 9  # the benchmark's: the highest emotion that ends a dialogue
# what --simulator, --lang and --difficulty mean where neither a flag nor the run says it
USUAL_USER = {"simulator": "toy", "lang": "en", "difficulty": "vanilla"}

# ----------------------------------------------------------------------------- the benchmark itself


def benchmark(args):
    """Hold the dialogues that the results lack, appending each as it ends. Returns (path of the
    results, ids of the users asked for, how many of their dialogues were lost)."""
    setup = who_talks(args, args.policy or newest_run())
    # a path that cannot be written must be refused before the first dialogue
    default = results_of(setup.policy)
    path, finished_ids, lock = place_for_results(args.out, default, setup.made_by)
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

    made_by, lost = setup.made_by, []

    async def hold_dialogue(index, profile):
        user = User(setup.simulator, profile, made_by["start"], f"benchmark {profile.id}")
        agent = setup.policy.make_agent([made_by["seed"], 3, index])
        try:
            first_line = await user.open()
            user.thoughts.clear()
            episode = await converse(agent, user, first_line, made_by["max_turns"], floor=FLOOR)
            if not episode.turns:  # as in a rollout: nothing was said that could be scored
                raise SimulatorFailed("the first line leaves no room in the context for a reply")
            append_line(path, result_of(profile, episode, user, made_by))
        except SimulatorFailed as error:
            lost.append((profile.id, error))
        bar.update()

    todo = [
        (index, profile)
        for index, profile in enumerate(setup.users)
        if profile.id not in finished_ids
    ]
    everybody = len(setup.users)
    already = everybody - len(todo)
    with tqdm(total=everybody, initial=already, desc="benchmark", unit="dialogue") as bar:
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
    made_by: dict  # what results remember of all this


def who_talks(args, name):
    """A Setup of the policy `name`: with what the flags say and, where they do not, what the
    policy's run says."""
    policy = open_policy(name, PolicyFlags.of(args))
    run = policy.run
    model, lang, difficulty = (
        getattr(args, key) or run.get(key, usual) for key, usual in USUAL_USER.items()
    )
    everybody, held_out = users_to_measure_with(args, policy, model, lang)
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
        "world": args.world if args.world == "chit-chat" else None,
        "simulator_temperature": args.simulator_temperature,
        "users": digest([vars(profile) for profile in everybody]),
        "held_out": held_out,
    }
    return Setup(policy, simulator, everybody[: args.limit], made_by)


def user_label(name):
    """What a --simulator value is called in results: the model, wherever it is served."""
    kind, model, _ = split_name(name)
    return model or kind


def users_to_measure_with(args, policy, simulator, lang):
    """(users, were they held out by the policy's run?): those of --profiles; else, for --world
    chit-chat, people of everyday talk; else those that the run held out; else the toy's. Raises
    BadInput."""
    default_chat = args.world == "chit-chat" and not args.profiles
    if default_chat and simulator.startswith("toy"):
        raise BadInput(
            f"--world chit-chat: the scripted user ({simulator}) knows no chit-chat; "
            "choose a real --simulator, as openai:MODEL@URL"
        )
    if default_chat or args.profiles:
        people = load_profiles(args.profiles or PROMPTS / "profiles" / f"{lang}_chat.jsonl")
        refuse_foreign(simulator, people)
        if args.world == "chit-chat":
            refuse_heart_to_heart(people, args.profiles)
        return people, False
    if policy.run.get("profiles"):
        return heldout_of_run(policy.home, policy.run, simulator), True
    return users_of_run(None, 128, simulator)[1], bool(policy.run)


def refuse_heart_to_heart(people, file):
    """Raise BadInput if one of `people`, who are from `file`, does not come to chat."""
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
    """What flags may say of a policy. They fill in what the policy's own run does not say."""

    step: int = None
    think: bool = False
    lang: str = None
    max_tokens: int = None
    context: int = None
    template_args: dict = None
    history_thoughts: str = "strip"

    @classmethod
    def of(cls, args):
        """From the flags of `add_policy_flags`."""
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
    """A policy as it is measured."""

    label: str  # what results call it
    settings: dict  # what it is measured with, as results remember it
    run: dict  # config.json of the run that made it, {} for a foreign one
    home: Path  # the directory of that run, or None
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


def policy_of_server(model_name, url, flags):
    """A policy behind an OpenAI-compatible server."""
    settings = {
        "think": flags.think,
        "policy_lang": flags.lang or "en",
        "temperature": 1.0,
        "max_tokens": flags.max_tokens or 2048,
    }
    if flags.history_thoughts == "keep":
        settings["history_thoughts"] = "keep"
    server = ServerModel(model_name, url, 1.0, max_tokens=settings["max_tokens"])
    mode = "think" if flags.think else "direct"
    system = load_prompt(f"policy_{mode}", settings["policy_lang"])

    def make_agent(seed):
        return ServerAgent(server, system, flags.think, flags.history_thoughts)

    return Measured(f"openai:{model_name}", settings, {}, None, make_agent)


def policy_in_process(name, flags):
    """A policy whose weights are loaded here: of a run, of a checkpoint, of a model directory, of
    the hub, or the toy's."""
    from support.chat_format import ChatFormat
    from support.loading import best_device, load_model, stop_ids

    from engine import TorchEngine
    from policy import Agent

    label, weights, run = find_policy(name, flags.step)
    if flags.think and not run.get("think", True):
        raise BadInput(f"--think: {label} was trained to reply without thinking")
    think = run.get("think", flags.think)
    mode = "think" if think else "direct"
    is_toy = run.get("model", name) == "toy"
    if weights == "toy":
        weights = toy.base_policy(think)
        label = label if run else f"toy, {mode}"
    model, tokenizer = load_model(weights, best_device(), flag="--policy")
    settings = settings_of_policy(run, flags, is_toy, model.config.max_position_embeddings)
    if not run and not is_toy:
        print_assumptions(label, mode, settings)
    # as in training: the toy knows its job without a system prompt
    system = "" if is_toy else load_prompt(f"policy_{mode}", settings["policy_lang"])
    template_args = run.get("template_args", flags.template_args)
    chat = ChatFormat(tokenizer, system, think, template_args, stop_ids(weights))
    history_thoughts = run.get("history_thoughts", flags.history_thoughts)
    if history_thoughts == "keep":
        chat.refuse_to_keep()
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

    home = Path(label).parent if run else None
    return Measured(label, settings, run, home, make_agent)


def settings_of_policy(run, flags, is_toy, longest_context):
    """What a policy is measured with: as its run, {} for a foreign policy, was made; else as the
    flags say. longest_context: of the model, in tokens."""
    settings = {
        "think": run.get("think", flags.think),
        "policy_lang": run.get("lang", flags.lang or "en"),
        "temperature": run.get("temperature", 1.0),
        "max_tokens": flags.max_tokens or run.get("max_tokens", 48 if is_toy else 2048),
        "context": flags.context or run.get("context") or longest_context,
    }
    template_args = run.get("template_args", flags.template_args)
    if template_args:
        settings["template_args"] = template_args
    if run.get("history_thoughts", flags.history_thoughts) == "keep":
        settings["history_thoughts"] = "keep"
    return settings


def print_assumptions(label, mode, settings):
    """Say what is assumed of a policy that is no run of this project, and by which flags it may be
    said otherwise."""
    print(
        f"{label} is no run of this project; assumed: {mode} (--think), prompts in "
        f"{settings['policy_lang']} (--lang), temperature 1, at most "
        f"{settings['max_tokens']} tokens a reply (--max-tokens), {settings['context']} a "
        "dialogue (--context)"
    )


def find_policy(name, step=None):
    """One rule for "what is this policy": (label, its weights, settings of its run). The weights
    are a directory, a model's name, or "toy".

    A run is its newest checkpoint, or that of `step`; step 0 is where it started. A checkpoint has
    the settings of its run, in its rlver.json. All else has no settings: {}. Raises BadInput."""
    place = Path(name)
    config = read_json(place / "config.json")
    if "algo" in config:  # a model directory has a config.json too
        return checkpoint_of_run(place, config, step)
    if step is not None:
        raise BadInput(f"--step {step}: a run has steps, {name} is none")
    if (place / "state.json").is_file():
        config = read_json(place / "rlver.json") or read_json(place.parent / "config.json")
        return str(place), place, config
    if not place.exists() and is_beside_us(name):
        runs = sorted(str(path.parent) for path in Path("runs").glob("*/config.json"))
        raise BadInput(
            f"--policy {name}: no such run or directory; there are: "
            f"{', '.join(runs[-8:]) or 'no runs yet'}"
        )
    return name, name, {}


def checkpoint_of_run(run, config, step):
    """As `find_policy`, for the directory of a run with the settings `config`. step: of the
    checkpoint, None for the newest."""
    by_step = {int(path.name.removeprefix("checkpoint-")): path for path in checkpoints(run)}
    if step == 0 and 0 not in by_step:  # the oldest checkpoints are not kept
        return f"{run}/checkpoint-000000", config["model"], config
    if step is None:
        step = max(by_step, default=0)
    if step not in by_step:
        raise BadInput(
            f"--policy {run}: no checkpoint of step {step} here; there are: "
            f"{', '.join(map(str, by_step)) or 'none'}"
        )
    return str(by_step[step]), by_step[step], config


def newest_run():
    """The directory of the newest finished run in runs/."""
    runs = [path.parent for path in Path("runs").glob("*/summary.json")]
    if not runs:
        raise BadInput(
            "no finished run in runs/; name a policy with --policy, or make one with: "
            "python rlver.py --algo grpo --think"
        )
    return str(max(runs, key=lambda path: path.stat().st_mtime))


class ServerAgent:
    """A policy behind an OpenAI-compatible server: it shows no tokens, and cannot be trained. A
    prompt that it refuses costs its dialogue alone."""

    def __init__(self, server, system, think, history="strip"):
        self.server, self.think, self.history, self.segments = server, think, history, []
        self.messages = [{"role": "system", "content": system}]

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
        # thoughts are not in the history that later turns see
        remembered = text if self.history == "keep" else visible
        self.messages.append({"role": "assistant", "content": remembered})
        return Reply(text, visible, thought, malformed)


# --------------------------------------------------------------------------------- where results go

# What a result file of an earlier version means where it lacks a key.
USUAL_SETTINGS = {
    "simulator_temperature": 0.0,
    "history_thoughts": "strip",
    "world": None,
    "template_args": None,
    "start": 40,
    "max_turns": 10,
    "seed": 0,
}
NO_SETTINGS = {"ended", "traits", "held_out"}  # of a dialogue, or told by another key


def results_of(policy):
    """Where results of a policy go if nobody says: into its run, else to results/, never into a
    model directory."""
    if policy.run and Path(policy.label).parent.is_dir():
        return Path(policy.label).parent / "benchmark.jsonl"
    return Path("results") / (re.sub(r"\W+", "-", policy.label).strip("-") + ".jsonl")


def place_for_results(asked, default, made_by):
    """The file that results go to, locked: (path, the ids that it holds already, the lock). A file
    of other settings is refused if it was asked for; else the next free name is taken. Raises
    BadInput."""
    path, number = Path(asked or default), 1
    if path.suffix == ".html":
        raise BadInput(
            f"--out {path}: the results' page goes to a file of that name; let the "
            "results end in .jsonl"
        )
    while True:
        lock = lock_file(path, "--out")
        if not path.stat().st_size:
            return path, set(), lock
        rows, _ = read_results(path)
        differences = dict.fromkeys(
            difference for row in rows for difference in differing(row["made_by"], made_by)
        )
        if not differences:
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # half a line is done again
            return path, {row["id"] for row in rows}, lock
        os.close(lock)
        differences = ", ".join(differences)
        if asked:
            raise BadInput(
                f"--out {path}: holds results of {describe(rows[0]['made_by'])} "
                f"({differences}); choose another file, or remove it"
            )
        number += 1
        print(f"{path} holds results of other settings ({differences})")
        path = Path(default).with_name(f"{Path(default).stem}-{number}.jsonl")


def differing(there, here):
    """What tells the settings of two results apart, in words. there, here: `made_by`. All keys
    of either count, not only those that the new results have."""
    usual = {**USUAL_SETTINGS, "users": there.get("users", here.get("users"))}
    for key in dict.fromkeys([*here, *there]):
        old = there.get(key, usual.get(key))
        new = here.get(key, usual.get(key))
        if old != new and key not in NO_SETTINGS:
            yield ("other users" if key == "users" else f"{key} {old} there, {new} here")


# --------------------------------------------------------------------------- scores of result files


@dataclass
class Scored:
    """A result file, and the score of each of its dialogues."""

    rows: list  # of read_results
    finals: list  # the final emotion of each row
    rule: str  # that they are scored by
    problems: list  # what could not be used, in words


def score(path, rule=None, anyway=False, ids=None, lost=0):
    """Every table of one result file, as a dict. ids: of the users that count (default: all in the
    file); lost: how many of them have no dialogue there. Raises BadInput for a file without a
    usable line, or with several simulators in it."""
    scored = read_scored(path, rule)
    rows, finals = scored.rows, scored.finals
    if ids is not None:
        finals = [final for row, final in zip(rows, finals) if row["id"] in ids]
        rows = [row for row in rows if row["id"] in ids]
    users = sorted({conditions_of(row) for row in rows})
    if len(users) > 1 and not anyway:
        raise BadInput(
            f"{path}: results of {len(users)} simulators or settings "
            f"({'; '.join(users)}) cannot be averaged; their scores do not compare. "
            "--anyway does it all the same"
        )
    replies = [reply for row in rows for reply in row["replies"]]
    malformed = sum(row["ended"] == "malformed" for row in rows)
    return {
        "file": str(path),
        "by_whom": describe(rows[0]["made_by"]),
        "rule": scored.rule,
        **score_summary(finals),
        "malformed": 100 * malformed / len(rows),
        "turns": len(replies) / len(rows),
        "length": sum(map(len, replies)) / max(1, len(replies)),
        "by": {name: scores_by(name, rows, finals) for name in parts_of(rows)},
        "signs": signs([row["replies"] for row in rows]),
        "asked": len(rows) + lost,
        "lost": lost,
        "unusable": len(scored.problems),
        "problems": scored.problems,
    }


def scores_by(name, rows, finals):
    """The scores of each part of `rows`: {value of the column `name`: score_summary}."""
    return {
        value: score_summary([final for final, row in zip(finals, rows) if row[name] == value])
        for value in sorted({row[name] for row in rows})
    }


def read_scored(path, rule=None):
    """A result file as Scored. SAGE's own files know only the rule "sage". Raises BadInput for
    another one, or for a file without a usable line."""
    rows, problems = read_results(path)
    if not rows:
        raise BadInput(f"{problems[0]} (and not one of {len(problems)} lines can be used)")
    if not rows[0]["made_by"] and not rows[0]["simulator"]:  # foreign; its directory is silent
        print(
            f"{path} names no simulator: compare its scores only with files of which "
            "you know that they have the same one"
        )
    by_sage = any(not row["made_by"] for row in rows)
    if by_sage and rule == "every":
        raise BadInput(
            "--rule every: SAGE's files do not score a tenth reply; only --rule sage "
            "can be had from them"
        )
    rule = "sage" if by_sage else rule or "every"
    return Scored(rows, [final_of(row, rule) for row in rows], rule, problems)


def final_of(row, rule):
    """The final emotion by a rule: "every" scores every reply; "sage", as SAGE's own loop, leaves
    the last of a full number of replies unscored (ten replies, nine of them scored). SAGE's files
    hold only that; ours hold both."""
    full_number = len(row["replies"]) == row["made_by"].get("max_turns")
    ended_by_a_reply = row["ended"] in ("turn_limit", "emotion_max", "emotion_min")
    if rule == "every" or not full_number or not ended_by_a_reply:
        return row["final"]
    if len(row["emotions"]) > 1:
        return row["emotions"][-2]
    return row["made_by"].get("start", row["final"])


def print_score(result):
    """One file's tables on the terminal."""
    if result["rule"] == "every":
        meaning = "every reply is scored"
    else:
        meaning = "as SAGE, the last of a full number of replies is not scored"
    print(f"\n{result['file']}: {result['by_whom']}\nrule {result['rule']!r}: {meaning}")
    print(f"{'':<24}{'score':>8}{'stderr':>8}{'success':>9}{'failure':>9}{'n':>6}")
    print_score_line("all", result)
    for name, values in result["by"].items():
        for value, numbers in values.items():
            print_score_line(f"{name}: {value}", numbers)
    shown = ", ".join(f"{key} {value:.2f}" for key, value in result["signs"].items())
    print(
        f"{result['turns']:.1f} replies a dialogue, {result['length']:.0f} characters a reply, "
        f"{result['malformed']:.1f} % malformed\n{shown}"
    )
    if result["unusable"]:
        print(
            f"{result['unusable']} lines could not be used; they are named below and not in any "
            "number above"
        )


def print_score_line(name, numbers):
    """One line of the table. numbers: score_summary, and of all users perhaps how many are lost."""
    asked = f" of {numbers['asked']}" if numbers.get("lost") else ""
    print(
        f"{name:<24}{numbers['score']:>8.1f}{numbers['stderr']:>8.1f}{numbers['success']:>8.1f}%"
        f"{numbers['failure']:>8.1f}%{numbers['n']:>6}{asked}"
    )


# -------------------------------------------------------------------------------------- comparisons


def compare(before, after, rule=None, draws=10_000):
    """How do the results `after` differ from `before`? Paired on the users that all files of both
    sides hold; every difference is after minus before.

    before, after: lists of result files, one per seed. The difference of a user is that of its
    means over seeds. The interval is the 2.5 to 97.5 percentile of a bootstrap over users, and over
    the seeds of each side where there are several (a difference between two single runs says
    nothing about two methods). p: sign flips of the users' differences, two-sided; it takes the
    seeds as given."""
    files_before, files_after = ([read_scored(p, rule) for p in side] for side in (before, after))
    files = [*files_before, *files_after]
    keys = {conditions_of(row) for file in files for row in file.rows}
    if len(keys) > 1:
        raise BadInput(
            "--compare: results of different simulators or settings "
            f"({'; '.join(sorted(keys))}) do not compare"
        )
    common = sorted(set.intersection(*[{row["id"] for row in file.rows} for file in files]))
    if len(common) < 2:
        raise BadInput("--compare: the files have fewer than two users in common")
    x, y = scores_of(files_before, common), scores_of(files_after, common)
    difference = y.mean(0) - x.mean(0)  # [users]
    mean, rng = float(difference.mean()), np.random.default_rng(0)
    low, high = bootstrap_of_seeds(x, y, rng, draws)
    return {
        "a": before,
        "b": after,
        "a_by": describe(files_before[-1].rows[0]["made_by"]),
        "b_by": describe(files_after[-1].rows[0]["made_by"]),
        "score_a": float(x.mean()),
        "score_b": float(y.mean()),
        "difference": mean,
        "interval": [low, high],
        "p": sign_flips(difference, rng, draws),
        "n": len(common),
        "seeds": [len(x), len(y)],
        "sentence": verdict(mean, low, high, len(common)),
        "problems": [problem for file in files for problem in file.problems],
    }


def scores_of(files, ids):
    """The final emotions of the users `ids` in several Scored files, [seeds, users]."""
    finals_by_id = [
        {row["id"]: final for row, final in zip(file.rows, file.finals)} for file in files
    ]
    return np.array([[finals[i] for i in ids] for finals in finals_by_id], dtype=float)


def bootstrap_of_seeds(x, y, rng, draws):
    """The 95 % interval (low, high) of mean(y) - mean(x), both [seeds, users]: each draw takes the
    same users of both sides and, of a side with several seeds, seeds of its own."""

    def draw_seeds(scores):
        if len(scores) == 1:
            return scores
        return scores[rng.integers(len(scores), size=len(scores))]

    differences, n = np.empty(draws), x.shape[1]
    for k in range(draws):
        users = rng.integers(n, size=n)
        before, after = draw_seeds(x), draw_seeds(y)
        differences[k] = after[:, users].mean() - before[:, users].mean()
    low, high = np.percentile(differences, [2.5, 97.5])
    return float(low), float(high)


def verdict(difference, low, high, n):
    """What a difference with its interval says, in words."""
    if low <= 0 <= high:
        return f"no difference can be told at n = {n}"
    if difference > 0:
        return f"after is better by {difference:.1f}, {low:.1f} to {high:.1f}"
    return f"before is better by {-difference:.1f}, {-high:.1f} to {-low:.1f}"


def seeds_of(name):
    """The result files that a side of --compare names: a file, several with commas between, or a
    pattern."""
    paths = []
    for part in name.split(","):
        paths += sorted(glob.glob(part)) or [part]
    return paths


# --------------------------------------------------------------------------------------------- main


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    return make_parser().run(run, argv)


def run(args):
    """The one thing that the flags ask for. Returns the exit code; raises RunError."""
    if args.score and args.compare:
        raise BadInput("--score and --compare: one of them at a time")
    if args.compare:
        return print_comparison(args)
    if args.score:
        return print_scores(args)
    return print_benchmark(args)


def print_scores(args):
    """--score."""
    refuse_overwriting({"--json": args.json}, args.score)
    results = [score(path, args.rule, args.anyway) for path in args.score]
    for result in results:
        print_score(result)
    problems = [problem for result in results for problem in result["problems"]]
    return finish(args, results[0] if len(results) == 1 else results, problems)


def print_benchmark(args):
    """Without --score and --compare: the benchmark, its tables and its page."""
    path, ids, lost = benchmark(args)
    if lost == len(ids):
        raise TooManyLost(f"{path}: not one of {len(ids)} dialogues came to an end")
    result = score(path, args.rule, args.anyway, ids, lost)
    print_score(result)
    page = report_of_results(path, result, ids)
    print(f"results: {path}; to look at: {page}")
    code = finish(args, result, result["problems"])
    if lost * 5 > len(ids):
        print(
            f"evaluate.py: {lost} of {len(ids)} dialogues are lost, so the score is of those "
            "that are left; run the same command again when the simulator is well",
            file=sys.stderr,
        )
        return TooManyLost.exit_code
    return code


def print_comparison(args):
    """--compare."""
    before, after = map(seeds_of, args.compare)
    refuse_overwriting({"--json": args.json}, before + after)
    result = compare(before, after, rule=args.rule)
    one, two = result["seeds"]
    if one != two:
        seeds = f"{one} and {two} seeds"
    else:
        seeds = "1 seed each" if one == 1 else f"{one} seeds each"
    low, high = result["interval"]
    print(f"before: {result['a_by']}\nafter:  {result['b_by']}")
    print(
        f"before {result['score_a']:.1f}, after {result['score_b']:.1f}, after minus before "
        f"{result['difference']:+.1f} (95 % {low:+.1f} to {high:+.1f}, p = {result['p']:.4f}, "
        f"n = {result['n']}, {seeds}): {result['sentence']}"
    )
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
        default=40,
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
