"""evaluate.py - how good is this model, is it better than that one, and may the user that says so
be trusted? (SAGE; RLVER 3)

    python evaluate.py                          the newest run, with users that it never saw
    python evaluate.py --policy P               a run, a checkpoint, a model directory, toy,
                                                openai:MODEL@URL; --step 0: where a run started
    python evaluate.py --score FILE...          tables of result files, ours or SAGE's; no model
    python evaluate.py --compare BEFORE AFTER   paired on the users that both met
    python evaluate.py --consistency FILE       replay recorded dialogues: the same scores again?
    python evaluate.py --report RUN             write a run's report and picture once more
    python evaluate.py --chat P                 talk to the model yourself
    python evaluate.py --show P                 watch it talk with a user, turn by turn
    python evaluate.py --ability BEFORE AFTER   paired logs of lm-eval or lighteval

The Sentient Benchmark starts at emotion 40, has up to 10 replies, and stops at 100 or below 10.
Numbers compare only within one simulator: with another model behind the same users, SAGE saw the
same dialogues shift by 20 points (SAGE appendix B).
"""

from support.ability import compare_ability
from support.llm import PromptRefused, ServerModel, ask_with_retries, digest
from support.report import draw_run, report_of_results, write_report
from support.results import (
    comparison_key,
    describe,
    intention_of,
    parts_of,
    read_results,
    recorded_dialogues,
)
from support.rundir import (
    append_line,
    checkpoints,
    lock_file,
    newest_state,
    profile_files,
    read_json,
    read_jsonl,
    refuse_overwriting,
    write_json,
)
from support.settings import (
    BadInput,
    Parser,
    SimulatorFailed,
    TooManyLost,
    is_beside_us,
    split_name,
)
from support.signs import score_summary, signs
from support.stats import reliability, sign_flips
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

import toy
from simulator import (
    PROMPTS,
    User,
    load_profiles,
    load_prompt,
    make_simulator,
    move_emotion,
    parse_emotion,
    people_of,
    refuse_foreign,
    replay,
    users_of_run,
)

FLOOR = 9  # the benchmark's: the highest emotion that ends a dialogue
USUAL_USER = {"simulator": "toy", "lang": "en", "difficulty": "vanilla"}  # where nobody says
POLICY_FLAGS = (
    "step",
    "think",
    "lang",
    "max_tokens",
    "context",
    "template_args",
    "history_thoughts",
)

# ----------------------------------------------------------------------------- the benchmark itself


@dataclass
class Measured:
    """A policy as it is measured."""

    label: str  # what results call it
    settings: dict  # what it is measured with, as results remember it
    run: dict  # config.json of the run that made it, {} for a foreign one
    home: Path  # the directory of that run, or None
    make_agent: Callable  # seed -> Agent


def find_policy(name, step=None):
    """One rule for "what is this policy": (label, directory of its weights, settings of its run).

    A run is its newest checkpoint, or that of `step`; step 0 is where it started. A checkpoint has
    the settings of its run, in its rlver.json. All else has no settings: {}. Raises BadInput."""
    here = Path(name)
    config = read_json(here / "config.json")
    if "algo" in config:  # a model directory has a config.json too
        found = {int(p.name[11:]): p for p in checkpoints(here)}
        if step == 0 and 0 not in found:  # the oldest checkpoints are not kept
            return f"{here}/checkpoint-000000", config["model"], config
        step = max(found, default=0) if step is None else step
        if step not in found:
            raise BadInput(
                f"--policy {name}: no checkpoint of step {step} here; there are: "
                f"{', '.join(map(str, found)) or 'none'}"
            )
        return str(found[step]), found[step], config
    if step is not None:
        raise BadInput(f"--step {step}: a run has steps, {name} is none")
    if (here / "state.json").is_file():
        return (
            str(here),
            here,
            read_json(here / "rlver.json") or read_json(here.parent / "config.json"),
        )
    if not here.exists() and is_beside_us(name):
        runs = sorted(str(p.parent) for p in Path("runs").glob("*/config.json"))
        raise BadInput(
            f"--policy {name}: no such run or directory; there are: "
            f"{', '.join(runs[-8:]) or 'no runs yet'}"
        )
    return name, name, {}


def open_policy(
    name,
    *,
    step=None,
    think=False,
    lang=None,
    max_tokens=None,
    context=None,
    template_args=None,
    history_thoughts="strip",
):
    """Whoever is to be measured, ready to talk. The flags fill in what the policy's own run does
    not say. Returns a Measured. Raises BadInput or BadModel."""
    from support.chat_format import ChatFormat
    from support.loading import best_device, load_model, stop_ids

    from engine import TorchEngine
    from policy import Agent

    kind, model_name, url = split_name(name)
    if kind == "openai":
        if not model_name or not url.startswith("http"):
            raise BadInput(f"--policy {name}: openai:MODEL@URL is needed")
        settings = dict(
            think=think, policy_lang=lang or "en", temperature=1.0, max_tokens=max_tokens or 2048
        )
        settings |= {"history_thoughts": "keep"} if history_thoughts == "keep" else {}
        server = ServerModel(model_name, url, 1.0, max_tokens=settings["max_tokens"])
        system = load_prompt(f"policy_{'think' if think else 'direct'}", settings["policy_lang"])
        return Measured(
            f"openai:{model_name}",
            settings,
            {},
            None,
            lambda seed: ServerAgent(server, system, think, history_thoughts),
        )
    label, place, run = find_policy(name, step)
    if think and not run.get("think", True):
        raise BadInput(f"--think: {label} was trained to reply without thinking")
    think = run.get("think", think)
    mode = "think" if think else "direct"
    of_toy = run.get("model", name) == "toy"
    if place == "toy":
        place, label = toy.base_policy(think), label if run else f"toy, {mode}"
    model, tokenizer = load_model(place, best_device(), flag="--policy")
    settings = dict(
        think=think,
        policy_lang=run.get("lang", lang or "en"),
        temperature=run.get("temperature", 1.0),
        max_tokens=max_tokens or run.get("max_tokens", 48 if of_toy else 2048),
        context=context or run.get("context") or model.config.max_position_embeddings,
    )
    template_args = run.get("template_args", template_args)
    settings |= {"template_args": template_args} if template_args else {}
    if not run and not of_toy:
        print(
            f"{label} is no run of this project; assumed: {mode} (--think), prompts in "
            f"{settings['policy_lang']} (--lang), temperature 1, at most "
            f"{settings['max_tokens']} tokens a reply (--max-tokens), {settings['context']} a "
            "dialogue (--context)"
        )
    # as in training: the toy knows its job without a system prompt
    system = "" if of_toy else load_prompt(f"policy_{mode}", settings["policy_lang"])
    chat = ChatFormat(tokenizer, system, think, template_args, stop_ids(place))
    if (history := run.get("history_thoughts", history_thoughts)) == "keep":
        settings["history_thoughts"] = history
        chat.refuse_to_keep()
    engine = TorchEngine(model, chat.stop_id, settings["temperature"])
    home = Path(label).parent if run else None
    return Measured(
        label,
        settings,
        run,
        home,
        lambda seed: Agent(
            engine,
            chat,
            think=think,
            seed=seed,
            history=history,
            max_tokens=settings["max_tokens"],
            context=settings["context"],
        ),
    )


def results_of(policy):
    """Where results of a policy go if nobody says: into its run, else to results/, never into a
    model directory."""
    if policy.run and Path(policy.label).parent.is_dir():
        return Path(policy.label).parent / "benchmark.jsonl"
    return Path("results") / (re.sub(r"\W+", "-", policy.label).strip("-") + ".jsonl")


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
        malformed, (thought, visible) = False, take_thoughts(text)
        if self.think:
            thought, visible, malformed = split_thought(text)
        # thoughts are not in the history that later turns see
        self.messages.append(
            {"role": "assistant", "content": text if self.history == "keep" else visible}
        )
        return Reply(text, visible, thought, malformed)


def result_of(profile, episode, user, made_by):
    """One dialogue in the format of SAGE's released result files; what is ours is under "rlver"."""
    history = [{"role": "user", "content": episode.first_line, "emotion-point": made_by["start"]}]
    thinking = iter(user.thoughts)
    for turn in episode.turns:
        own = {key: turn[key] for key in ("thought", "change", "emotion", "analysis", "mark")}
        history.append({"role": "assistant", "content": turn["reply"], "rlver": own})
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
                    "thinking": next(thinking, ""),
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


def who_talks(args, name):
    """What the flags say, and where they do not the policy's run: (the policy `name`, the
    simulator, the users, what results remember of it)."""
    policy = open_policy(name, **{key: getattr(args, key) for key in POLICY_FLAGS})
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
        "users": digest([vars(p) for p in everybody]),
        "held_out": held_out,
    }
    return policy, simulator, everybody[: args.limit], made_by


def benchmark(args):
    """Hold the dialogues that the results lack, appending each as it ends. Returns (path of the
    results, ids of the users asked for, how many of their dialogues were lost)."""
    from tqdm import tqdm

    from rlver import converse

    policy, simulator, people, made_by = who_talks(args, args.policy or newest_run())
    # what cannot be written is told before the first dialogue
    path, done, lock = place_for_results(args.out, results_of(policy), made_by)
    todo = [(i, p) for i, p in enumerate(people) if p.id not in done]
    bar = tqdm(
        total=len(people), initial=len(people) - len(todo), desc="benchmark", unit="dialogue"
    )
    lost = []

    async def run_dialogue(i, profile):
        user = User(simulator, profile, args.start, f"benchmark {profile.id}")
        try:
            line = await user.open()
            user.thoughts.clear()
            episode = await converse(
                policy.make_agent([args.seed, 3, i]), user, line, args.max_turns, floor=FLOOR
            )
            if not episode.turns:  # as in a rollout: nothing was said that could be scored
                raise SimulatorFailed("the first line leaves no room in the context for a reply")
            append_line(path, result_of(profile, episode, user, made_by))
        except SimulatorFailed as error:
            lost.append((profile.id, error))
        bar.update()

    async def all_of_them():
        if todo:
            await simulator.check()
        await asyncio.gather(*[run_dialogue(i, profile) for i, profile in todo])

    try:
        refuse_overwriting({"--json": args.json}, [path, path.with_suffix(".html")])
        asyncio.run(all_of_them())
    finally:
        bar.close()
        os.close(lock)
    for profile_id, error in lost:
        print(
            f"evaluate.py: {profile_id} is missing: {error}; run the same command again "
            "to fill it in",
            file=sys.stderr,
        )
    return path, {p.id for p in people}, len(lost)


def users_to_measure_with(args, policy, simulator, lang):
    """(users, were they held out by the policy's run?): those of --profiles; else, for --world
    chit-chat, people of everyday talk; else those that the run held out; else the toy's. Raises
    BadInput."""
    chat = args.world == "chit-chat" and not args.profiles
    if chat and simulator.startswith("toy"):
        raise BadInput(
            f"--world chit-chat: the scripted user ({simulator}) knows no chit-chat; "
            "choose a real --simulator, as openai:MODEL@URL"
        )
    if chat or args.profiles:
        people = load_profiles(args.profiles or PROMPTS / "profiles" / f"{lang}_chat.jsonl")
        refuse_foreign(simulator, people)
        for p in people if args.world == "chit-chat" else ():
            if p.target == "eq":
                raise BadInput(
                    f"--world chit-chat: user {p.id!r} of {args.profiles} comes for a "
                    "heart-to-heart talk (its target is eq), not to chat"
                )
        return people, False
    if policy.run.get("profiles"):
        return heldout_of_run(policy.home, policy.run, simulator), True
    return users_of_run(None, 128, simulator)[1], bool(policy.run)


def heldout_of_run(home, config, simulator):
    """The users that the run in the directory `home`, with the settings `config`, held out: by its
    heldout.json; of a run that has none by the run's own rule. Raises BadInput."""
    names = profile_files(home, config["profiles"])
    people = users_of_run(names, config["eval_size"], simulator)[1]
    ids = read_json(Path(home) / "heldout.json").get("ids")
    return [p for p in people if ids is None or p.id in ids]


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
        differs = [difference for row in rows for difference in differing(row["made_by"], made_by)]
        if not differs:
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)  # half a line is done again
            return path, {row["id"] for row in rows}, lock
        os.close(lock)
        differs = ", ".join(dict.fromkeys(differs))
        if asked:
            raise BadInput(
                f"--out {path}: holds results of {describe(rows[0]['made_by'])} "
                f"({differs}); choose another file, or remove it"
            )
        number += 1
        print(f"{path} holds results of other settings ({differs})")
        path = Path(default).with_name(f"{Path(default).stem}-{number}.jsonl")


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


def differing(there, here):
    """What tells the settings of two results apart, in words. there, here: `made_by`. All keys
    of either count, not only those that the new results have."""
    usual = {**USUAL_SETTINGS, "users": there.get("users", here.get("users"))}
    for key in dict.fromkeys([*here, *there]):
        old, new = (made_by.get(key, usual.get(key)) for made_by in (there, here))
        if old != new and key not in NO_SETTINGS:
            yield ("other users" if key == "users" else f"{key} {old} there, {new} here")


def user_label(name):
    """What a --simulator value is called in results: the model, wherever it is served."""
    kind, model, _ = split_name(name)
    return model or kind


def newest_run():
    """The directory of the newest finished run in runs/."""
    runs = [path.parent for path in Path("runs").glob("*/summary.json")]
    if not runs:
        raise BadInput(
            "no finished run in runs/; name a policy with --policy, or make one with: "
            "python rlver.py --algo grpo --think"
        )
    return str(max(runs, key=lambda path: path.stat().st_mtime))


# --------------------------------------------------------------------------- scores of result files


def final_of(row, rule):
    """The final emotion by a rule: "every" scores every reply; "sage", as SAGE's own loop, leaves
    the last of a full number of replies unscored (ten replies, nine of them scored). SAGE's files
    hold only that; ours hold both."""
    if (
        rule == "sage"
        and len(row["replies"]) == row["made_by"].get("max_turns")
        and row["ended"] in ("turn_limit", "emotion_max", "emotion_min")
    ):
        return (
            row["emotions"][-2]
            if len(row["emotions"]) > 1
            else row["made_by"].get("start", row["final"])
        )
    return row["final"]


def read_scored(path, rule=None):
    """A result file as (rows, final emotions, the rule that they are by, problems). SAGE's own
    files know only theirs. Raises BadInput for another one, or for a file without a usable line."""
    rows, problems = read_results(path)
    if not rows:
        raise BadInput(f"{problems[0]} (and not one of {len(problems)} lines can be used)")
    if not rows[0]["made_by"] and not rows[0]["simulator"]:  # foreign; its directory is silent
        print(
            f"{path} names no simulator: compare its scores only with files of which "
            "you know that they have the same one"
        )
    theirs = any(not row["made_by"] for row in rows)
    if theirs and rule == "every":
        raise BadInput(
            "--rule every: SAGE's files do not score a tenth reply; only --rule sage "
            "can be had from them"
        )
    rule = "sage" if theirs else rule or "every"
    return rows, [final_of(row, rule) for row in rows], rule, problems


def score(path, rule=None, anyway=False, ids=None, lost=0):
    """Every table of one result file, as a dict. ids: of the users that count (default: all in the
    file); lost: how many of them have no dialogue there. Raises BadInput for a file without a
    usable line, or with several simulators in it."""
    rows, finals, rule, problems = read_scored(path, rule)
    if ids is not None:
        finals = [final for row, final in zip(rows, finals) if row["id"] in ids]
        rows = [row for row in rows if row["id"] in ids]
    users = sorted({comparison_key(row) for row in rows})
    if len(users) > 1 and not anyway:
        raise BadInput(
            f"{path}: results of {len(users)} simulators or settings "
            f"({'; '.join(users)}) cannot be averaged; their scores do not compare. "
            "--anyway does it all the same"
        )
    replies = [reply for row in rows for reply in row["replies"]]
    by = {
        name: {
            value: score_summary([f for f, row in zip(finals, rows) if row[name] == value])
            for value in sorted({row[name] for row in rows})
        }
        for name in parts_of(rows)
    }
    return {
        "file": str(path),
        "by_whom": describe(rows[0]["made_by"]),
        "rule": rule,
        **score_summary(finals),
        "malformed": 100 * sum(row["ended"] == "malformed" for row in rows) / len(rows),
        "turns": len(replies) / len(rows),
        "length": sum(map(len, replies)) / max(1, len(replies)),
        "by": by,
        "signs": signs([row["replies"] for row in rows]),
        "asked": len(rows) + lost,
        "lost": lost,
        "unusable": len(problems),
        "problems": problems,
    }


def print_score(result):
    """One file's tables on the terminal."""
    print(
        f"\n{result['file']}: {result['by_whom']}\nrule {result['rule']!r}: "
        + (
            "every reply is scored"
            if result["rule"] == "every"
            else "as SAGE, the last of a full number of replies is not scored"
        )
    )
    print(f"{'':<24}{'score':>8}{'stderr':>8}{'success':>9}{'failure':>9}{'n':>6}")
    parts = [
        (f"{name}: {value}", numbers)
        for name, values in result["by"].items()
        for value, numbers in values.items()
    ]
    for name, s in [("all", result), *parts]:
        of = f" of {s['asked']}" if s.get("lost") else ""
        print(
            f"{name:<24}{s['score']:>8.1f}{s['stderr']:>8.1f}{s['success']:>8.1f}%"
            f"{s['failure']:>8.1f}%{s['n']:>6}{of}"
        )
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


# -------------------------------------------------------------------------------------- comparisons


def seeds_of(name):
    """The result files that a side of --compare names: a file, several with commas between, or a
    pattern."""
    return [path for part in name.split(",") for path in (sorted(glob.glob(part)) or [part])]


def compare(a, b, rule=None, draws=10_000):
    """How do the results `b` (after) differ from `a` (before)? Paired on the users that all files
    of both sides hold; every difference is after minus before.

    a, b: lists of result files, one per seed. The difference of a user is that of its means over
    seeds. The interval is the 2.5 to 97.5 percentile of a bootstrap over users, and over the seeds
    of each side where there are several (a difference between two single runs says nothing about
    two methods). p: sign flips of the users' differences, two-sided; it takes the seeds as
    given."""
    sides, keys, unusable, by = ([], []), set(), [], []
    for side, files in zip(sides, (a, b)):
        for path in files:
            rows, finals, _, problems = read_scored(path, rule)
            keys |= {comparison_key(row) for row in rows}
            unusable += problems
            side.append({row["id"]: final for row, final in zip(rows, finals)})
        by.append(describe(rows[0]["made_by"]))
    if len(keys) > 1:
        raise BadInput(
            "--compare: results of different simulators or settings "
            f"({'; '.join(sorted(keys))}) do not compare"
        )
    common = sorted(set.intersection(*[set(t) for tables in sides for t in tables]))
    if len(common) < 2:
        raise BadInput("--compare: the files have fewer than two users in common")
    # [seeds, users]
    x, y = (np.array([[t[i] for i in common] for t in tables], dtype=float) for tables in sides)
    difference, n = y.mean(0) - x.mean(0), len(common)
    rng, boot = np.random.default_rng(0), np.empty(draws)
    for k in range(draws):
        users = rng.integers(n, size=n)
        one, two = (z[rng.integers(len(z), size=len(z))] if len(z) > 1 else z for z in (x, y))
        boot[k] = two[:, users].mean() - one[:, users].mean()
    low, high = np.percentile(boot, [2.5, 97.5])
    mean = float(difference.mean())
    if low <= 0 <= high:
        sentence = f"no difference can be told at n = {n}"
    else:
        better, size = (
            ("after", (mean, low, high)) if mean > 0 else ("before", (-mean, -high, -low))
        )
        sentence = f"{better} is better by {size[0]:.1f}, {size[1]:.1f} to {size[2]:.1f}"
    return {
        "a": a,
        "b": b,
        "a_by": by[0],
        "b_by": by[1],
        "score_a": float(x.mean()),
        "score_b": float(y.mean()),
        "difference": mean,
        "interval": [float(low), float(high)],
        "p": sign_flips(difference, rng, draws),
        "n": n,
        "seeds": [len(x), len(y)],
        "sentence": sentence,
        "problems": unusable,
    }


# ------------------------------------------------------------------------- may the user be trusted?


def consistency(path, simulator, profiles, times=1):
    """Replay recorded dialogues through `simulator`, `times` times: how often are emotion, its sign
    and the final score the same, and is every reward in the log the one that its dialogue earned?
    path: a run's dialogues.jsonl, or a result file of ours.

    Returns {"turns", "emotion", "sign", "final" (shares), "dialogues", "found": [what is not as
    recorded, by line and turn], "scores": for each evaluation in a log, by its step, the mean final
    emotion [as recorded, again]}: with another simulator than the recorded one that tells how the
    same replies do with another user. And with several `times` the `reliability` of the reward."""
    dialogues = list(recorded_dialogues(path))
    for number, dialogue in enumerate(dialogues, 1):
        if dialogue["profile_id"] not in profiles:
            raise BadInput(
                f"{path}, line {number}: profile {dialogue['profile_id']!r} is "
                "unknown; name its file with --profiles"
            )

    async def all_of_them():  # at once: a server takes its time
        await simulator.check()
        return await asyncio.gather(
            *[
                asyncio.gather(
                    *[
                        replay(
                            d, User(simulator, profiles[d["profile_id"]], d["start"], f"replay {k}")
                        )
                        for k in range(times)
                    ]
                )
                for d in dialogues
            ]
        )

    counts, found, scores, finals = np.zeros(5), [], {}, []
    for number, (dialogue, goes) in enumerate(zip(dialogues, asyncio.run(all_of_them())), 1):
        turns = [turn for turn in dialogue["turns"] if turn["emotion"] is not None]
        recorded = [turn["emotion"] for turn in turns]
        signs_of = lambda emotions: np.sign(np.diff([dialogue["start"], *emotions]))
        problem = arithmetic(dialogue, turns)
        if all(goes) and dialogue.get("ended") != "malformed":  # whose reward is 0 anyway
            finals.append([again[-1] for again in goes])
        for again in goes:
            counts += [
                len(recorded),
                sum(x == y for x, y in zip(recorded, again)),
                sum(x == y for x, y in zip(signs_of(recorded), signs_of(again))),
                1,
                recorded[-1:] == again[-1:],
            ]
            for k, (before, now) in enumerate(zip(recorded, again), 1):
                if before != now and not problem:
                    problem = f"turn {k}: emotion {before} as recorded, {now} again"
        if problem:
            found.append(f"line {number}, {dialogue['profile_id']}, {problem}")
        if dialogue.get("split") == "heldout":
            first, *ends = [
                0 if dialogue["ended"] == "malformed" or not e else e[-1] for e in (recorded, *goes)
            ]
            scores.setdefault(dialogue["step"], []).append([first, sum(ends) / times])
    turns, same, sign, replayed, final = counts
    return {
        "turns": int(turns),
        "emotion": same / max(1, turns),
        "sign": sign / max(1, turns),
        "dialogues": int(replayed),
        "final": final / max(1, replayed),
        "found": found,
        "scores": {
            step: [sum(column) / len(pairs) for column in zip(*pairs)]
            for step, pairs in scores.items()
        },
        **reliability(finals),
    }


def arithmetic(dialogue, turns):
    """What in a dialogue's own numbers does not add up, or None: each emotion is the one before
    plus the change, clamped; the reward is the last emotion / 100, or 0 if malformed."""
    emotion = dialogue["start"]
    for k, turn in enumerate(turns, 1):
        if (
            turn.get("change") is not None
            and move_emotion(emotion, turn["change"]) != turn["emotion"]
        ):
            return (
                f"turn {k}: {emotion} and a change of {turn['change']:+d} do not give "
                f"{turn['emotion']}"
            )
        emotion = turn["emotion"]
    reward = 0 if dialogue.get("ended") == "malformed" else emotion / 100
    if abs(dialogue.get("reward", reward) - reward) > 1e-9:
        return f"reward {dialogue['reward']} as recorded, {reward} by its last emotion"
    return None


# --------------------------------------------------------------------------------------- talk to it


def chat(args):
    """A terminal chat with the policy: you are the one who has troubles. Thoughts are dimmed."""
    import secrets

    policy = open_policy(args.chat, **{key: getattr(args, key) for key in POLICY_FLAGS})
    agent = policy.make_agent(secrets.randbits(32))
    print(f"You talk to {policy.label}. An empty line, or Ctrl-D, ends.")
    if policy.run.get("model", args.chat) == "toy":
        print(
            "It knows a few hundred words; try: My sister forgot my birthday. I feel hurt. "
            "Nobody knows how it feels."
        )
    with asyncio.Runner() as runner:
        while line := ask_line("you> "):
            reply = runner.run(agent.reply(line))
            if reply is None:
                print("(its context is full)")
                break
            if reply.thought:
                print(dimmed(f"({reply.thought})"))
            print(f"it>  {'(malformed) ' + reply.text if reply.malformed else reply.visible}")
            if reply.malformed:
                break
    return 0


def show(args):
    """One dialogue before your eyes: the emotion as a bar, thought and analysis dimmed. With --html
    as a page too, to be sent to somebody."""
    from rlver import converse

    policy, simulator, people, made_by = who_talks(args, args.show)
    profile, agent = people[args.seed % len(people)], policy.make_agent([args.seed, 3, 0])
    sample = agent.reply

    def tell(text, hidden=""):
        print(
            "".join(dimmed(f"{'':25}| {line}\n") for line in hidden.splitlines())
            + f"{'#' * round(user.emotion / 5):-<20} {user.emotion:3}  {text}"
        )
        if args.pause:
            ask_line("")

    class Shown(User):
        async def answer(self):
            line = await super().answer()
            tell(f"user    {line}")
            return line

        async def feel(self, reply):
            analysis, change, mark = await super().feel(reply)
            tell(f"({change:+d})", analysis)
            return analysis, change, mark

    async def reply(line):
        said = await sample(line)
        if said:
            tell("policy  " + (said.text if said.malformed else said.visible), said.thought)
        return said

    async def talk():
        await simulator.check()
        agent.reply, line = reply, await user.open()
        if profile.first_talk:
            tell(f"user    {line}")
        return await converse(agent, user, line, args.max_turns, floor=FLOOR)

    user = Shown(simulator, profile, args.start, f"show {profile.id}")
    print(f"{policy.label}\n\n{profile.player}\n")
    episode = asyncio.run(talk())
    print(f"ended by {episode.ended}, final emotion {episode.emotion}")
    if args.html:
        intention, kind = intention_of(profile.task, profile.need)
        write_report(
            args.html,
            title=f"{policy.label} and {profile.id}",
            settings=made_by,
            curves=[],
            evaluations=[],
            tables=[],
            dialogues=[
                {
                    **vars(episode),
                    "id": profile.id,
                    "side": "",
                    "score": episode.emotion,
                    "intention": intention,
                    "kind": kind,
                    "group": profile.main_cha,
                    "persona": profile.player,
                }
            ],
        )
        print(f"written: {args.html}")
    return 0


def dimmed(text):
    """`text` in grey, on a terminal."""
    return f"\033[2m{text}\033[0m" if sys.stdout.isatty() else text


def ask_line(prompt):
    """A line from the terminal; "" at its end (Ctrl-D)."""
    try:
        return input(prompt).strip()
    except EOFError:
        print()
        return ""


# --------------------------------------------------------------------------------------------- main


def make_parser():
    """The flags of evaluate.py."""
    return Parser(
        prog="evaluate.py", description="Measure, compare, verify, and talk to a policy."
    ).flags("evaluate")


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    return make_parser().run(run, argv)


def run(args):
    """The one thing that the flags ask for. Returns the exit code; raises RunError."""
    other = {
        "chat": chat,
        "report": report_again,
        "compare": print_comparison,
        "show": show,
        "consistency": print_consistency,
        "ability": print_ability,
    }
    asked = [f"--{name}" for name in ("score", *other) if getattr(args, name)]
    if asked[1:]:
        raise BadInput(f"{' and '.join(asked)}: one of them at a time")
    idle = [f"--{name}" for name in ("html", "pause") if getattr(args, name) and not args.show]
    if idle:
        raise BadInput(f"{' and '.join(idle)} is for --show P alone; leave it out, or say --show P")
    for name, work in other.items():
        if getattr(args, name):
            return work(args)
    if args.score:
        refuse_overwriting({"--json": args.json}, args.score)
        results = [score(path, args.rule, args.anyway) for path in args.score]
    else:
        path, ids, lost = benchmark(args)
        if lost == len(ids):
            raise TooManyLost(f"{path}: not one of {len(ids)} dialogues came to an end")
        results = [score(path, args.rule, args.anyway, ids, lost)]
    for result in results:
        print_score(result)
    if not args.score:
        page = report_of_results(path, results[0], ids)
        print(f"results: {path}; to look at: {page}")
    code = finish(
        args,
        results[0] if len(results) == 1 else results,
        [problem for result in results for problem in result["problems"]],
    )
    if not args.score and lost * 5 > len(ids):
        print(
            f"evaluate.py: {lost} of {len(ids)} dialogues are lost, so the score is of those "
            "that are left; run the same command again when the simulator is well",
            file=sys.stderr,
        )
        return TooManyLost.exit_code
    return code


def print_comparison(args):
    """--compare."""
    sides = [seeds_of(side) for side in args.compare]
    refuse_overwriting({"--json": args.json}, sum(sides, []))
    result = compare(*sides, rule=args.rule)
    one, two = result["seeds"]
    seeds = f"{one} seed{'s' * (one > 1)} each" if one == two else f"{one} and {two} seeds"
    print(
        "before: {a_by}\nafter:  {b_by}\nbefore {score_a:.1f}, after {score_b:.1f}, after minus "
        "before {difference:+.1f} (95 % {interval[0]:+.1f} to {interval[1]:+.1f}, p = {p:.4f}, "
        "n = {n}, {seeds}): {sentence}".format(**result | {"seeds": seeds})
    )
    return finish(args, result, result["problems"])


def print_ability(args):
    """--ability: a line for each benchmark and metric, in percent."""
    result = compare_ability(*args.ability)
    for name, r in result.items():
        before, after, difference, low, high = (
            100 * x for x in (r["before"], r["after"], r["difference"], *r["interval"])
        )
        print(
            f"{name}: {before:.1f} to {after:.1f}, difference {difference:+.1f} (95 % "
            f"{low:.1f} to {high:.1f}, p = {r['p']:.4f}, {r['test']}, n = {r['n']}"
            + f"; {r['unpaired']} problems are on one side only" * bool(r["unpaired"])
            + ")"
        )
    return finish(args, result)


def print_consistency(args):
    """--consistency: the recorded replies put to their own user, or to another one."""
    log = Path(args.consistency)
    refuse_overwriting({"--json": args.json}, [log])
    if not log.is_file():
        raise BadInput(f"--consistency {log}: no such file")
    made_by = read_json(log.parent / "config.json")  # of a run; a result file says it by line
    first = next((row for _, row, _ in read_jsonl(log)), None)
    if isinstance(first, dict) and "history" in first:
        made_by = {"profiles": made_by.get("profiles"), **first.get("rlver", {})}
    recorded = [made_by.get(key, usual) for key, usual in USUAL_USER.items()]
    asked = [getattr(args, key) or value for key, value in zip(USUAL_USER, recorded)]
    simulator = make_simulator(*asked, temperature=args.simulator_temperature)
    names = [args.profiles] if args.profiles else profile_files(log.parent, made_by.get("profiles"))
    result = consistency(log, simulator, {p.id: p for p in people_of(names)}, args.times)
    finish(args, result)
    print(
        f"{result['turns']} turns replayed: the same emotion in {100 * result['emotion']:.1f} %, "
        f"the same sign in {100 * result['sign']:.1f} %; {result['dialogues']} dialogues: the "
        f"same final score in {100 * result['final']:.1f} %"
    )
    if "spread" in result:
        reliability = result["reliability"]
        print(
            f"final emotion of one dialogue over {args.times} replays: standard deviation "
            f"{result['spread']:.1f}; reliability of the reward, the share of its variance that "
            f"dialogues explain: {'-' if reliability is None else f'{reliability:.2f}'}"
        )
    for step, (before, again) in result["scores"].items():
        print(f"held-out users, step {step}: score {before:.1f} as recorded, {again:.1f} again")
    if [user_label(asked[0]), *asked[1:]] != [user_label(recorded[0]), *recorded[1:]]:
        print(
            "(another user than the one that was recorded: that numbers differ is no fault of "
            "the log)"
        )
        return 0
    for line in result["found"][:20]:
        print(f"not as recorded: {line}")
    if len(result["found"]) > 20:
        print(f"... and {len(result['found']) - 20} more")
    return 1 if result["found"] else 0


def report_again(args):
    """--report: report.html and learning_curve.png of a run, from its logs."""
    run = Path(args.report)
    config = read_json(run / "config.json")
    if "algo" not in config:
        raise BadInput(f"--report {run}: there is no run here")
    people = heldout_of_run(run, config, config["simulator"])
    draw_run(run, newest_state(run), people, toy if config["model"] == "toy" else None)
    print(f"written: {run / 'report.html'}, {run / 'learning_curve.png'}")
    return 0


def finish(args, result, problems=()):
    """Write `result` where --json says, and name what could not be used. Returns the exit code."""
    if args.json:
        write_json(args.json, result)
    for problem in problems:
        print(f"evaluate.py: {problem}", file=sys.stderr)
    return 2 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
