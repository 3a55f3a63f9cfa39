"""support/reference.py - what healthy runs of the toy look like, to hold one's own run against.

docs/reference/ holds a table for each of the four variants (PPO and GRPO, thinking and direct): of
every metric, step by step, the mean and the standard deviation s over ten runs with the usual
settings that differ by their seed alone. All start from the same policy, so a run of the same
settings on another machine should lie among them. One that does not has met a mistake, or an edit.

Curves are smoothed first, by the mean over the last five steps: a single step says little. A metric
is out where its smoothed curve stays beyond mean +- 4 s for a stretch of steps. tests/tables.py
makes the runs and the tables; docs/reference/README.md tells how often a healthy run is flagged.
"""

from support.errors import BadInput
from support.settings import Settings, resolve_settings

import csv
import dataclasses
import functools
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

PLACE = Path(__file__).parent.parent / "docs" / "reference"
VARIANTS = ("grpo-think", "grpo-direct", "ppo-think", "ppo-direct")
SMOOTH = 5  # steps of the moving average
WIDTH = 4  # standard deviations on either side of the mean
# The same, of the band that the learning curve shows. It is narrower: most healthy runs stay in it
# most of the time, so that one sees where a run is unusual before it is out.
SHOWN_WIDTH = 2
STRETCH = 1 / 3  # share of the variant's steps, in a row, for which a metric must lie outside
# The metrics that have no band.
NO_BAND = {
    "step",
    "seconds",
    # how much was sampled and trained
    "tokens_trained",
    "tokens_sampled",
    # measures of rounding
    "logp_gap",
    "logp_gap_max",
    # only runs with further flags have these
    "gap",
    "watched",
}
# Settings in which a run may differ from the reference runs: they change no step of training, or
# only its random draws. The same holds for settings that may change when a run is resumed.
NOT_COMPARED = {"seed", "eval_size", "eval_every"}


def variant_of(cfg):
    """The variant of a run with these Settings, as "grpo-think"; None where a setting that changes
    what is learned is not the usual one."""
    usual = resolve_settings({"algo": cfg.algo, "think": cfg.think})
    for setting in dataclasses.fields(Settings):
        name = setting.name
        if name in NOT_COMPARED or setting.metadata["resumable"]:
            continue
        if getattr(cfg, name) != getattr(usual, name):
            return None
    return f"{cfg.algo}-{cfg.mode}"


def bands_of_config(config):
    """The bands that a run with the settings of its config.json is compared with; {} if none."""
    try:
        variant = variant_of(Settings(**config))
    except (TypeError, BadInput):  # of another version, or edited
        return {}
    return read_bands(variant) if variant else {}


def final_scores(config):
    """The held-out scores at the end of the reference runs whose settings are those of this
    config.json, seeds apart; [] if there are none."""
    try:
        cfg = Settings(**config)
        variant = variant_of(cfg)
    except (TypeError, BadInput):  # of another version, or edited
        return []
    usual = resolve_settings({"algo": cfg.algo, "think": cfg.think})
    as_usual = (cfg.steps, cfg.eval_size) == (usual.steps, usual.eval_size)
    if variant is None or not as_usual or not (PLACE / "runs.jsonl").is_file():
        return []
    return [run["evaluations"][-1]["score"] for run in runs_of(variant)]


def runs_of(variant):
    """The lines of runs.jsonl of the ten reference runs of a variant."""
    with open(PLACE / "runs.jsonl", encoding="utf-8") as file:
        # only these lines are parsed: the others are most of the file
        runs = [json.loads(line) for line in file if '"part": "variants"' in line]
    return [run for run in runs if run["name"].rsplit("-", 1)[0] == variant]


def columns_of(rows):
    """The lines of metrics.jsonl as {metric: [its value in each step]}, of the metrics that can
    have a band: numbers, in every step."""
    columns = {}
    for key in rows[0] if rows else ():
        values = [row.get(key) for row in rows]
        if key not in NO_BAND and all(isinstance(v, (int, float)) for v in values):
            columns[key] = values
    return columns


def smoothed(values):
    """The moving average of a curve [steps]: at each step the mean over the last five, or over as
    many as there have been. Values that are missing (None) are left out; NaN where all five are."""
    means = []
    for end in range(1, len(values) + 1):
        measured = [v for v in values[max(0, end - SMOOTH) : end] if v is not None]
        means.append(np.mean(measured) if measured else np.nan)
    return np.array(means)


def bands_of(runs):
    """The bands that `runs`, each as `columns_of` has it, make together: {metric: (mean [steps],
    s [steps])} of their smoothed curves.

    s is at least 1 % of the metric's range over all runs and steps: ten runs may agree by chance. A
    metric that never varies has no band."""
    bands = {}
    steps = min(map(steps_of_run, runs))
    for metric in runs[0]:
        if not all(metric in run for run in runs):
            continue
        curves = np.array([smoothed(run[metric][:steps]) for run in runs])  # [runs, steps]
        span = curves.max() - curves.min()
        if span > 0:
            s = np.maximum(curves.std(0, ddof=1), 0.01 * span)
            bands[metric] = curves.mean(0), s
    return bands


def steps_of_run(columns):
    """The number of steps of a run, as `columns_of` has it: all its columns are equally long."""
    first_column = next(iter(columns.values()))
    return len(first_column)


def write_bands(variant, bands):
    """Write docs/reference/VARIANT.csv: a row for each step, two columns for each metric."""
    steps = len(next(iter(bands.values()))[0])
    header = ["step"]
    for metric in bands:
        header += [f"{metric} mean", f"{metric} s"]
    with open(PLACE / f"{variant}.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        for i in range(steps):
            row = [i + 1]
            for mean, s in bands.values():
                row += [f"{mean[i]:.4g}", f"{s[i]:.4g}"]
            writer.writerow(row)


@functools.cache
def read_bands(variant):
    """The bands of a variant, as `bands_of` has them; {} if there is no table of it."""
    path = PLACE / f"{variant}.csv"
    if not path.is_file():
        return {}
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    bands = {}
    for name in rows[0]:
        if name.endswith(" mean"):
            metric = name.removesuffix(" mean")
            mean = np.array([float(row[name]) for row in rows])
            s = np.array([float(row[f"{metric} s"]) for row in rows])
            bands[metric] = mean, s
    return bands


class Stretch(NamedTuple):
    """Steps in a row in which a metric of a run lies outside of its band."""

    metric: str
    first: int  # its first step, counted from 1
    last: int
    value: float  # of the run's smoothed curve in the last step
    mean: float  # of the band in the last step


def outside(columns, bands):
    """Where a run leaves its bands: for each metric its longest Stretch outside, if that is long
    enough."""
    stretches = []
    for metric, (mean, s) in bands.items():
        if metric not in columns:
            continue
        steps = min(len(mean), len(columns[metric]))
        curve = smoothed(columns[metric])[:steps]
        is_out = np.abs(curve - mean[:steps]) > WIDTH * s[:steps]
        begin, end = longest_stretch(is_out)  # a slice: index i is step i + 1
        if end - begin >= shortest_stretch(len(mean)):
            stretches.append(
                Stretch(metric, first=begin + 1, last=end, value=curve[end - 1], mean=mean[end - 1])
            )
    return stretches


def shortest_stretch(steps):
    """For how many steps in a row a metric must lie outside, where the variant has `steps`."""
    return max(1, round(STRETCH * steps))


def longest_stretch(flags):
    """(begin, end) of the longest run of True in `flags`, as a slice; (0, 0) if there is none."""
    longest_begin, longest_end = 0, 0
    begin = 0
    for i, flag in enumerate(flags):
        end = i + 1
        if not flag:
            begin = end
        elif end - begin > longest_end - longest_begin:
            longest_begin, longest_end = begin, end
    return longest_begin, longest_end


def sentence(stretches):
    """What a person is told of `outside`'s stretches, in one line."""
    places = [
        f"{stretch.metric} in steps {stretch.first} to {stretch.last} "
        f"({stretch.value:.3g} at the end of it, usually {stretch.mean:.3g})"
        for stretch in stretches
    ]
    return f"unlike the reference runs (docs/reference): {'; '.join(places)}"
