"""handed_in.py - read the directory of a run that somebody has handed in, and see whether it is
whole: every step, every dialogue, every evaluation. (Whether its numbers follow from each other is
checked in recompute.py.)
"""

from patches import plural  # first: it finds the project
from support.errors import BadInput
from support.files import read_json, read_jsonl
from support.settings import SCRIPTED, Settings, problem_with

import dataclasses
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NEEDED = ("config.json", "metrics.jsonl", "dialogues.jsonl")
NUMBER = (int, float)
LARGEST = 10**9  # no number in the logs of a run is larger; one that is cannot be reckoned with
MOST_STEPS = 10**6
# What each line of metrics.jsonl must hold as a number. (Other metrics may be null.)
METRIC_TYPES = {
    "step": int,
    "episodes": int,
    **dict.fromkeys(
        ("kl", "clipfrac", "grad_norm", "logp_gap", "tokens_trained", "tokens_sampled"), NUMBER
    ),
}
# What each line of dialogues.jsonl must hold, and each turn in it; None is allowed where a turn did
# not come to that.
DIALOGUE_TYPES = {
    "step": int,
    "split": str,
    "profile_id": str,
    "group": int,
    "first_line": str,
    "turns": list,
    "ended": str,
    "reward": NUMBER,
}
TURN_TYPES = {
    "reply": str,
    "thought": (str, type(None)),
    "user": (str, type(None)),
    "analysis": (str, type(None)),
    "change": (int, type(None)),
    "mark": (str, type(None)),
    "emotion": (int, type(None)),
}


# ----------------------------------------------------------------------------------------- reading


@dataclass
class HandedIn:
    """A run that was handed in."""

    path: Path
    settings: Settings
    rows: list  # of metrics.jsonl
    training: dict  # {step: its dialogues}, lines of dialogues.jsonl
    heldout: dict  # the same of the evaluations
    summary: dict  # summary.json; {} while the run has not ended
    replayed: Counter = dataclasses.field(default_factory=Counter)  # recompute.replay_sample

    @property
    def variant(self):
        """ "grpo-think" and so on, whatever the other settings are."""
        return f"{self.settings.algo}-{self.settings.mode}"

    @property
    def last_step(self):
        return self.rows[-1]["step"] if self.rows else 0

    def column(self, metric):
        """The values of a metric, one for each step; NaN where the run does not have it."""
        values = [row.get(metric) for row in self.rows]
        return np.array([np.nan if value is None else value for value in values], dtype=float)


def read_run(path):
    """The run in the directory `path`. Raises BadInput, in one line, for what is no run or cannot
    be read."""
    path = Path(path)
    if not path.is_dir():
        raise BadInput(f"{path}: no such directory; name the directory of a run")
    missing = [name for name in NEEDED if not (path / name).is_file()]
    if missing:
        raise BadInput(f"{path}: not the directory of a run: it lacks {', '.join(missing)}")
    try:
        settings = read_settings(path / "config.json")
        rows = read_rows(path / "metrics.jsonl", is_row_of_metrics)
        dialogues = read_rows(path / "dialogues.jsonl", is_dialogue)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    summary = read_json(path / "summary.json")
    splits = {"train": {}, "heldout": {}}
    for dialogue in dialogues:
        splits[dialogue["split"]].setdefault(dialogue["step"], []).append(dialogue)
    return HandedIn(
        path=path,
        settings=settings,
        rows=rows,
        training=splits["train"],
        heldout=splits["heldout"],
        summary=summary if isinstance(summary, dict) else {},
    )


def read_settings(path):
    """The Settings in a config.json. A setting of another version that is null was not in use, and
    is left out. Raises BadInput."""
    config = read_json(path)
    if not isinstance(config, dict) or not {"algo", "think", "seed", "steps"} <= set(config):
        raise BadInput(f"{path}: not the settings of a run")
    known = {setting.name: setting for setting in dataclasses.fields(Settings)}
    for name, setting in known.items():  # only newer settings, which are off, may be missing
        if name not in config and setting.metadata["two_defaults"]:
            raise BadInput(f"{path}: {name} is missing")
    config = {name: value for name, value in config.items() if name in known or value is not None}
    for name, value in config.items():
        problem = "unknown to this version" if name not in known else None
        problem = problem or problem_with(known[name], value)
        if isinstance(value, list) and not all(isinstance(item, str) for item in value):
            problem = f"{value!r} is no list of files"
        if problem:
            raise BadInput(f"{path}: {name}: {problem}")
    return Settings(**config)


def read_rows(path, is_right):
    """The lines of a JSONL file. Raises BadInput for a line that is none, or that is not
    `is_right`."""
    rows = []
    for number, row, problem in read_jsonl(path):
        if problem or not is_right(row):
            problem = problem or "not a line of such a file"
            raise BadInput(f"{path}, line {number}: {problem}")
        rows.append(row)
    return rows


def is_row_of_metrics(row):
    """Whether a JSON value can be a line of metrics.jsonl: numbers, or null."""
    if not has_types(row, METRIC_TYPES) or not 0 < row["step"] <= MOST_STEPS:
        return False
    return all(value is None or is_of_type(value, NUMBER) for value in row.values())


def is_dialogue(row):
    """Whether a JSON value can be a line of dialogues.jsonl."""
    return (
        has_types(row, DIALOGUE_TYPES)
        and row["split"] in ("train", "heldout")
        and all(has_types(turn, TURN_TYPES) for turn in row["turns"])
    )


def has_types(row, types):
    """Whether a JSON value is an object that has these fields. types: {name: its type or types}"""
    return isinstance(row, dict) and all(
        name in row and is_of_type(row[name], kind) for name, kind in types.items()
    )


def is_of_type(value, kind):
    """Whether a JSON value is of a type, or of one of several, and no absurd number."""
    if isinstance(value, int) and abs(value) > LARGEST:
        return False
    return isinstance(value, kind)


# ------------------------------------------------------------------------------------ is it whole?


def gaps(run):
    """What is missing of a run: sentences, none for a whole one."""
    return [*gaps_in_steps(run), *gaps_in_batches(run), *gaps_in_evaluations(run)]


def gaps_in_steps(run):
    """Whether the run has ended, and has each step once, in order."""
    cfg = run.settings
    steps = [row["step"] for row in run.rows]
    if not run.summary:
        yield (
            f"it has not ended: there is no summary.json that can be read, and it has done "
            f"{run.last_step} of {plural(cfg.steps, 'step')}"
        )
    elif run.last_step != cfg.steps or run.summary.get("steps") != cfg.steps:
        yield f"it has {run.last_step} of {plural(cfg.steps, 'step')}"
    for expected, step in enumerate(steps, 1):
        if step != expected:
            yield f"metrics.jsonl has step {step} where step {expected} should be"
            break
    without = sorted(set(steps) - set(run.training))
    if without:
        yield f"there are no dialogues of {with_others('step', without)}"
    unknown = sorted(set(run.training) - set(steps))
    if unknown:
        yield f"metrics.jsonl has no line of {with_others('step', unknown)}"


def gaps_in_batches(run):
    """Whether each step has as many dialogues as --batch-size says, those that were dropped
    counted, and groups of equal size."""
    cfg = run.settings
    wrong = []
    for row in run.rows:
        dialogues = run.training.get(row["step"], [])
        if not dialogues or row.get("refilled"):
            continue  # a group that was replaced may have lost dialogues before
        dropped = row.get("dropped") or 0
        sizes = Counter(dialogue["group"] for dialogue in dialogues)
        uneven = not dropped and set(sizes.values()) != {cfg.group_size}
        if uneven or len(dialogues) + dropped != cfg.batch_size:
            wrong.append((row["step"], len(dialogues)))
    if wrong:
        step, count = wrong[0]
        yield (
            f"step {step} has {plural(count, 'dialogue')}, but a batch has {cfg.batch_size} in "
            f"groups of {cfg.group_size}{and_more(wrong)}"
        )


def gaps_in_evaluations(run):
    """Whether all evaluations are there: one dialogue with each held-out user."""
    cfg = run.settings
    expected = {0}
    if cfg.eval_every:
        expected |= set(range(cfg.eval_every, run.last_step, cfg.eval_every))
    if run.summary:
        expected.add(run.last_step)
    missing = sorted(expected - set(run.heldout))
    if missing:
        yield f"the evaluation after {with_others('step', missing)} is missing"
    ids = read_json(run.path / "heldout.json")
    ids = ids.get("ids") if isinstance(ids, dict) else None
    if not isinstance(ids, list) or not all(isinstance(name, str) for name in ids):
        yield "heldout.json, the list of the held-out users, is missing"
        return
    # a file of profiles may hold fewer users than --eval-size; the toy always has as many
    if not cfg.profiles and cfg.simulator in SCRIPTED and len(ids) != cfg.eval_size:
        yield f"heldout.json has {plural(len(ids), 'user')}, but --eval-size is {cfg.eval_size}"
    for step, dialogues in sorted(run.heldout.items()):
        people = [dialogue["profile_id"] for dialogue in dialogues]
        if len(set(people)) != len(people) or not set(people) <= set(ids):
            yield f"the evaluation after step {step} is not one dialogue with each held-out user"
            return
        if len(people) + dropped_of_evaluation(run, step) != len(ids):
            yield (
                f"the evaluation after step {step} has {len(people)} of {len(ids)} held-out users"
            )


def dropped_of_evaluation(run, step):
    """How many dialogues of an evaluation failed, by summary.json. A scripted user never fails, so
    none of its dialogues may be missing, whatever summary.json says."""
    evaluations = run.summary.get("evaluations")
    if run.settings.simulator in SCRIPTED or not isinstance(evaluations, list):
        return 0
    for scores in evaluations:
        if isinstance(scores, dict) and scores.get("step") == step:
            dropped = scores.get("dropped")
            return dropped if is_of_type(dropped, int) else 0
    return 0


def with_others(what, numbers):
    """ "step 3", or "step 3 (and 2 more)" """
    return f"{what} {numbers[0]}{and_more(numbers)}"


def and_more(problems):
    return f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
