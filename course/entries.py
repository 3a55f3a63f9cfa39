"""entries.py - an entry of the board as it is handed in: its three runs, their one change, and the
step at which their logs pass the mark.

Nothing is measured here. What the logs claim, board.py measures again.
"""

from patches import plural
from support.errors import BadInput
from support.files import read_json, read_jsonl
from support.rundir import newest_state
from support.settings import (
    RESUMABLE,
    Settings,
    as_typed,
    flag_name,
    problem_with,
    resolve_settings,
)

import dataclasses
import re
import tomllib
from collections import Counter, defaultdict
from dataclasses import dataclass
from operator import index
from pathlib import Path

import numpy as np

import toy


@dataclass(frozen=True)
class Rules:
    """The numbers of the board. (The tests have smaller ones.)"""

    seeds: tuple = (100, 101, 102)  # of the three runs; no measured run of docs/ has one of them
    mark: float = 75  # the held-out score that is to be passed
    every: int = 256  # training dialogues from one evaluation to the next
    users: int = 128  # in an evaluation
    length: int = 2304  # training dialogues of a run of the board's command
    # Of the dialogues of an evaluation that the board holds again, so many may differ from the log:
    # on another machine another word may be drawn.
    most_different: int = 6
    lowest: float = -5  # what the lower 95 % bound of a difference to the baseline must reach


# The flags of the baselines, by the names that the table gives them.
BASELINES = {
    "grpo --think": {"algo": "grpo", "think": True},
    "grpo": {"algo": "grpo", "think": False},
    "ppo --think": {"algo": "ppo", "think": True},
    "ppo": {"algo": "ppo", "think": False},
}
# Settings that are no change: those that change no result, and those that the rules check.
NO_CHANGE = {*RESUMABLE, "seed", "eval_every", "eval_size"}
# Settings that no entry may change: the policy and its users, the scorer, how dialogues are held.
FIXED = {
    "model",
    "model_sha256",
    "template_args",
    "simulator",
    "difficulty",
    "profiles",
    "lang",
    "history_thoughts",
    "max_turns",
    "max_tokens",
    "temperature",
    "context",
    "engine",
}
# Files that a diff may not touch, for the same reason.
FIXED_FILES = ("toy.py", "simulator.py", "support/toy_words.py", "prompts/", "toy_policy/")
LONGEST_SENTENCE = 200  # characters of an entry's sentence
LARGEST = 10**6  # no step of a run drops or replaces more dialogues, or takes more seconds


@dataclass
class Run:
    """One run of an entry, as its directory has it."""

    place: Path
    config: dict
    evaluations: dict  # {step: {id of a held-out user: (what was said, final emotion)}}
    dialogues: Counter  # {step: its training dialogues, with those that were replaced or dropped}
    seconds: Counter  # {step: its seconds of training}
    mark_step: int = 0  # set by `read_run`

    @property
    def next_step(self):
        """The step of the evaluation after the mark's."""
        return self.mark_step + self.config["eval_every"]

    def dialogues_to_mark(self):
        """The training dialogues up to the mark: what the board compares."""
        return sum(count for step, count in self.dialogues.items() if step <= self.mark_step)

    def seconds_to_mark(self):
        """The seconds of training up to the mark, as the run has logged them."""
        return sum(seconds for step, seconds in self.seconds.items() if step <= self.mark_step)

    def score(self, step):
        """The held-out score after a step, by the log of dialogues."""
        return float(np.mean([emotion for _, emotion in self.evaluations[step].values()]))


@dataclass
class Entry:
    """An entry: who, what, and its runs in the order of the board's seeds."""

    place: Path
    by: str
    sentence: str
    baseline: str  # a key of BASELINES
    flags: str  # the changed flag as one types it; "" where the change is a diff
    runs: list


# --------------------------------------------------------------------------------------- an entry


def read_entry(place, rules, is_baseline=False):
    """The Entry in the directory `place`. is_baseline: it must have no change, and else one. Raises
    BadInput for an entry that breaks a rule which its files show."""
    by, sentence = read_about(place)
    diff = read_diff(place)
    homes = sorted(path.parent for path in place.glob("*/config.json"))
    configs = {home: read_config(home, diff) for home in homes}
    check_seeds(place, configs, rules)
    baseline, flags = read_change(place, list(configs.values()), diff, is_baseline)
    runs = [read_run(home, config, rules) for home, config in configs.items()]
    runs.sort(key=lambda run: rules.seeds.index(run.config["seed"]))
    return Entry(place, by, sentence, baseline, flags, runs)


def read_about(place):
    """(who, the sentence) of an entry's entry.toml."""
    path = place / "entry.toml"
    needed = 'it needs two lines: by = "who you are" and change = "one sentence"'
    try:
        about = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise BadInput(f"{path}: no such file; {needed}") from None
    except ValueError as error:  # no TOML, or no UTF-8
        raise BadInput(f"{path}: cannot be read ({error}); {needed}") from None
    for key in ("by", "change"):
        text = about.get(key)
        if not isinstance(text, str) or not text.strip() or re.search(r"[\n\r|]", text):
            raise BadInput(f"{path}: {key} is {text!r}; {needed}, without | and line ends")
    if len(about["change"]) > LONGEST_SENTENCE:
        raise BadInput(
            f"{path}: change has {len(about['change'])} characters; tell it in one sentence, of "
            f"{LONGEST_SENTENCE} at most"
        )
    return about["by"].strip(), about["change"].strip()


def read_diff(place):
    """Whether an entry's change.diff changes anything. Raises BadInput for one that touches what is
    fixed, or that is no diff. (No file is the same as an empty one.)"""
    path = place / "change.diff"
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    if not text.strip():
        return False
    files = re.findall(r"(?m)^(?:---|\+\+\+) (?:[ab]/)?(\S+)", text)
    if not files or not re.search(r"(?m)^@@ ", text):
        raise BadInput(f"{path}: is no unified diff; make it with git diff")
    for file in files:
        if file.startswith(FIXED_FILES):
            raise BadInput(f"{path}: changes {file}; users, scorer and starting policy are fixed")
    return True


def read_config(home, diff):
    """The settings of the run in the directory `home`. Raises BadInput for values that no flag
    gives. diff: whether there is one; if so, it may have added a setting."""
    path = home / "config.json"
    config = read_json(path)
    settings = {setting.name: setting for setting in dataclasses.fields(Settings)}
    if not isinstance(config, dict) or not set(settings) <= set(config):
        raise BadInput(f"{path}: is no config.json of a run of this project")
    for name, setting in settings.items():
        problem = problem_with(setting, config[name])
        if problem:
            raise BadInput(f"{path}: {name}: {problem}")
    unknown = sorted(set(config) - set(settings))
    if unknown and not diff:
        raise BadInput(f"{path}: the project has no setting {unknown[0]}; hand in change.diff")
    return {name: config[name] for name in settings}


def check_seeds(place, configs, rules):
    """Raise BadInput unless there is one run of each of the board's seeds."""
    seeds = sorted(config["seed"] for config in configs.values())
    if seeds != sorted(rules.seeds):
        raise BadInput(
            f"{place}: needs one run of each of the seeds {words(rules.seeds)}, each in a "
            f"directory of its own; the seeds here are {words(seeds) or 'none'}"
        )


def words(numbers):
    """Numbers with commas between them."""
    return ", ".join(map(str, numbers))


# --------------------------------------------------------------------------------- the one change


def read_change(place, configs, diff, is_baseline):
    """(name of the baseline, the changed flag as one types it or ""). Raises BadInput unless the
    runs have the same settings, and one change: a flag or a diff."""
    names = [changed_settings(config) for config in configs]
    flag_texts = {as_typed(config, names_here) for config, names_here in zip(configs, names)}
    modes = {(config["algo"], config["think"]) for config in configs}
    if len(flag_texts) > 1 or len(modes) > 1:
        raise BadInput(f"{place}: the runs differ in more than the seed: {differing(configs)}")
    for name in names[0]:
        if name in FIXED:
            raise BadInput(
                f"{place}: {flag_name(name)} is {configs[0][name]!r}; no entry may change the "
                "users, the scorer, or how dialogues are held"
            )
    algo, think = modes.pop()
    settings = {"algo": algo, "think": think}
    baseline = next(name for name in BASELINES if BASELINES[name] == settings)
    changes = [flag_name(name) for name in names[0]]
    if diff:
        changes.append("change.diff")
    if is_baseline and changes:
        raise BadInput(f"{place}: a baseline has no change, this has {', '.join(changes)}")
    if not is_baseline and not changes:
        raise BadInput(
            f"{place}: nothing is changed: its flags are those of {baseline}, and there is no "
            "change.diff"
        )
    if len(changes) > 1:
        raise BadInput(
            f"{place}: {plural(len(changes), 'change')} ({', '.join(changes)}); exactly one is "
            "allowed"
        )
    return baseline, flag_texts.pop()


def changed_settings(config):
    """The names of the settings that differ from the baseline with the same --algo and --think.
    What follows from a flag is no further change: with --lora-rank the learning rate is another."""
    given = {name: config[name] for name in ("algo", "think", "lora_rank")}
    usual = dataclasses.asdict(resolve_settings(given))
    usual["lora_rank"] = 0
    return [
        name for name, value in usual.items() if name not in NO_CHANGE and config[name] != value
    ]


def differing(configs):
    """The names of the settings in which runs differ, but for the seed, as flags."""
    names = [
        name
        for name in configs[0]
        if name not in NO_CHANGE and any(c[name] != configs[0][name] for c in configs)
    ]
    return ", ".join(map(flag_name, names))


# ------------------------------------------------------------------------------------------- a run


def read_run(home, config, rules):
    """The Run in the directory `home`, with its mark. Raises BadInput."""
    check_schedule(home, config, rules)
    run = Run(home, config, *read_dialogues(home), seconds=Counter())
    read_metrics(run)
    run.mark_step = find_mark(run, rules)
    check_record(run)
    return run


def check_schedule(home, config, rules):
    """Raise BadInput unless a run evaluates as the board wants it."""
    between = config["eval_every"] * config["batch_size"]
    if between != rules.every:
        raise BadInput(
            f"{home}: evaluates every {config['eval_every']} steps of {config['batch_size']} "
            f"dialogues, and not every {rules.every} dialogues; choose --batch-size and "
            "--eval-every accordingly"
        )
    if config["eval_size"] != rules.users:
        raise BadInput(f"{home}: --eval-size is {config['eval_size']}; it must be {rules.users}")


def read_dialogues(home):
    """(evaluations, dialogues) of a Run, from its dialogues.jsonl. Raises BadInput, also for a
    training dialogue with a user who is not a training user."""
    path = home / "dialogues.jsonl"
    training_users = {profile["id"] for profile in toy.profiles("train")}
    evaluations = defaultdict(dict)
    dialogues = Counter()
    try:
        for number, row, _ in read_jsonl(path):
            try:
                step, user = index(row["step"]), str(row["profile_id"])
                if row["split"] == "heldout":
                    reward = within(row["reward"], 0, 1)
                    evaluations[step][user] = spoken(row["turns"]), round(100 * reward)
                    continue
                dialogues[step] += 1
            except (KeyError, TypeError, ValueError):
                raise BadInput(f"{path}, line {number}: is no dialogue of a run") from None
            if user not in training_users:
                raise BadInput(f"{path}, line {number}: trains on {user}, who is no training user")
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    return evaluations, dialogues


def within(number, low, high):
    """The number, if it is in this range. Raises ValueError for another one, also for NaN, and
    TypeError for what is no number. (JSON's 1e999 is infinite.)"""
    if not low <= number <= high:
        raise ValueError(number)
    return number


def spoken(turns):
    """What a dialogue's turns are compared by: replies, thoughts, and the emotion after each."""
    return [(turn["reply"], turn["thought"], turn["emotion"]) for turn in turns]


def read_metrics(run):
    """Read the seconds of each step of a Run from its metrics.jsonl, and add the dialogues that
    were dropped, and those that --refill has replaced, to those of the log. Raises BadInput."""
    path = run.place / "metrics.jsonl"
    try:
        for number, row, _ in read_jsonl(path):
            try:
                step = index(row["step"])
                dropped = within(index(row["dropped"]), 0, LARGEST)
                refilled = within(index(row["refilled"]), 0, LARGEST)
                run.seconds[step] += within(row["seconds"], 0, LARGEST)
            except (KeyError, TypeError, ValueError):
                raise BadInput(f"{path}, line {number}: is no line of a run's metrics") from None
            # at least a whole batch: lines that were taken out of the log count all the same
            sampled = max(run.config["batch_size"], run.dialogues[step] + dropped)
            run.dialogues[step] = sampled + refilled * run.config["group_size"]
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None


def find_mark(run, rules):
    """The step of the first of two consecutive evaluations with a score of the mark or more. Raises
    BadInput if there is none, or if an evaluation on the way is not whole."""
    every = run.config["eval_every"]
    last = max(run.evaluations, default=0)
    passed_before = False
    for step in range(every, last + 1, every):
        n_users = len(run.evaluations.get(step, ()))
        if n_users != rules.users:
            raise BadInput(
                f"{run.place}: dialogues.jsonl has {n_users} held-out users at step {step}, not "
                f"{rules.users}"
            )
        passed = run.score(step) >= rules.mark
        if passed and passed_before:
            return step - every
        passed_before = passed
    raise BadInput(
        f"{run.place}: never passes {rules.mark:g} in two evaluations in a row, up to step {last}"
    )


def check_record(run):
    """Raise BadInput if a run lacks a step up to the mark, or if its summary has another score than
    its dialogues."""
    for step in range(1, run.mark_step + 1):
        if step not in run.seconds:
            raise BadInput(f"{run.place}: metrics.jsonl has no training step {step}")
    try:
        scores = {row["step"]: row["score"] for row in newest_state(run.place)["evaluations"]}
    except (KeyError, TypeError):
        raise BadInput(f"{run.place}: its summary.json has no held-out scores") from None
    for step in (run.mark_step, run.next_step):
        score = run.score(step)
        in_summary = scores.get(step)
        if not isinstance(in_summary, float) or abs(in_summary - score) > 0.01:
            raise BadInput(
                f"{run.place}: the held-out score of step {step} is {in_summary} in summary.json "
                f"and {score:.2f} in dialogues.jsonl; one of them was edited"
            )
