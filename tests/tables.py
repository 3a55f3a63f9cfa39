"""tables.py - every number of the README and of docs/ that is of the toy, measured by one command.

    python tests/tables.py                    make what is missing, then write the tables
    python tests/tables.py --list             what there is, and what is missing
    python tests/tables.py --only variants    these parts alone
    python tests/tables.py --write            only write the tables, from what is there

A job is a run of rlver.py, or another command. When it ends, its numbers become one line of
docs/reference/runs.jsonl, which is under version control: a job that has its line there is not done
again, so the command goes on where it was stopped, on another machine too. Two runs are made at a
time, with one thread each; commands, and runs with two threads, are done one by one.

Throughout this file `measured` is what that file holds, {name of the job: its line}.

The tables stand in the documents between two comments, `<!-- tables: NAME -->` and
`<!-- tables: end -->`, and are written there by this script; a test compares them with the numbers.
The bands in docs/reference/*.csv are made here too (support/reference.py says what they are).
"""

import asyncio
import fcntl
import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "course")]
from patches import markdown, with_tables
from support import reference
from support.flags import Parser, positive
from support.signs import signs
from support.stats import mean_interval

import labs
import simulator
import toy
from phrases import POINTS, PhrasesModel

RUNS = ROOT / "runs" / "tables"
EVALUATED = "--eval-every 5"  # steps between evaluations: the tables need more than first and last
FLAGS = {
    "grpo-think": "--algo grpo --think",
    "grpo-direct": "--algo grpo",
    "ppo-think": "--algo ppo --think",
    "ppo-direct": "--algo ppo",
}
# The variants as tables name them: "grpo --think".
NAMES = {name: flags.removeprefix("--algo ") for name, flags in FLAGS.items()}


# ----------------------------------------------------------------------------------------- the jobs


@dataclass
class Job:
    """Something to be measured: a run of rlver.py with `flags`, or another script's `command`."""

    part: str  # what --only chooses
    name: str  # of its line, and of its directory
    flags: str = ""
    command: str = ""  # {NAME} is the directory of the run NAME, {json} a file for its result
    lab: str = ""  # the lab whose mistake is put in
    needs: tuple = ()  # names of the runs that must be there
    threads: int = 1
    environment: dict = field(default_factory=dict)

    @property
    def alone(self):
        """Whether nothing else may run beside it: a run with several threads needs both cores, and
        commands start processes of their own."""
        return self.threads > 1 or not self.flags


def jobs():
    """All jobs, in the order in which they are done."""
    yield from variants()
    yield from mistakes()
    yield from rewards()
    yield from ranks()
    yield from users()
    yield from machines()
    yield Job(
        "replay",
        "replay",
        needs=("grpo-think-0",),
        command="-m tools.replay {grpo-think-0}/dialogues.jsonl --json {json}",
    )
    yield Job("bench", "bench", command="tests/bench.py", threads=2)
    for lab in labs.load_labs():
        yield Job("labs", f"lab-{lab}", command=f"course/course.py lab {lab}")
    yield from small()


def variants():
    """The four variants, ten seeds each."""
    for seed, (name, flags) in itertools.product(range(10), FLAGS.items()):
        yield Job("variants", f"{name}-{seed}", f"{flags} --seed {seed} {EVALUATED}")


def rewards():
    """One reward for each turn (delta), and other advantages; five seeds each."""
    for seed in range(5):
        for name, flags in FLAGS.items():
            delta = f"{flags} --reward delta --seed {seed} {EVALUATED}"
            yield Job("rewards", f"{name}-delta-{seed}", delta)
        for kind in ("dr-grpo", "rloo"):
            advantage = f"--algo grpo --advantage {kind} --seed {seed} {EVALUATED}"
            yield Job("rewards", f"grpo-direct-{kind}-{seed}", advantage)


def ranks():
    """Adapters of several ranks, and of rank 8 with the other variants; three seeds each."""
    for seed, rank in itertools.product(range(3), (1, 4, 8, 16)):
        flags = f"--algo grpo --lora-rank {rank} --seed {seed} {EVALUATED}"
        yield Job("ranks", f"grpo-direct-rank{rank}-{seed}", flags)
    for seed, name in itertools.product(range(3), ("grpo-think", "ppo-think", "ppo-direct")):
        flags = f"{FLAGS[name]} --lora-rank 8 --seed {seed} {EVALUATED}"
        yield Job("ranks", f"{name}-rank8-{seed}", flags)


def users():
    """Challenging users, and a scorer that can be hacked; three seeds each."""
    for seed in range(3):
        flags = f"--algo grpo --think --difficulty challenging --seed {seed} {EVALUATED}"
        yield Job("challenging", f"grpo-think-challenging-{seed}", flags)
    for seed in range(3):
        # twice as long as usual: the weak scorer pays for little of what the policy does at first
        flags = f"--algo grpo --simulator toy-weak --watch toy --steps 72 --seed {seed}"
        yield Job("hackable", f"grpo-direct-weak-{seed}", flags)


def mistakes():
    """Runs with the mistakes of the labs put in."""
    for lab, name in (
        ("learning-rate", "grpo-direct"),
        ("stale-emotion", "grpo-think"),
        ("mixed-users", "grpo-direct"),
        ("no-format-check", "grpo-think"),
    ):
        yield Job("mistakes", f"{name}-{lab}", f"{FLAGS[name]} --seed 0", lab=lab)


def small():
    """The small real model: GRPO and PPO, three seeds each, then what one change does, one seed
    each; and the same policies with people who chat."""
    for algo, seed in itertools.product(("grpo", "ppo"), range(3)):
        flags = f"--algo {algo} --model smollm2 --seed {seed}"
        # one run has both cores for itself: docs/small.md promises its time and its memory
        threads = 2 if (algo, seed) == ("grpo", 2) else 1
        yield Job("small", f"small-{algo}-{seed}", flags, threads=threads)
    for algo, name, change in (
        ("grpo", "no-kl", "--kl-coef 0"),
        ("grpo", "delta", "--reward delta"),
        ("grpo", "whole", "--lora-rank 0"),
        ("ppo", "slow-critic", "--critic-lr 2e-4"),
    ):
        flags = f"--algo {algo} --model smollm2 --seed 0 {change}"
        yield Job("small", f"small-{algo}-{name}-0", flags)
    for seed, moment in itertools.product(range(3), ("before", "after")):
        run = f"small-grpo-{seed}"
        directory = "{" + run + "}"  # `command_of` puts the path in its place
        step = "--step 0" if moment == "before" else ""
        # as the benchmark is measured: from an emotion of 40, over 10 turns
        command = f"evaluate.py --policy {directory} {step} --world chit-chat --json {{json}}"
        command += f" --out runs/tables/{run}-chat-{moment}.jsonl"
        yield Job("small", f"{run}-chat-{moment}", command=command, needs=(run,), threads=2)


def machines():
    """The same runs with two threads, and without the processor's vector instructions."""
    for name, variant in FLAGS.items():
        flags = f"{variant} --seed 0 {EVALUATED}"
        yield Job("machine", f"{name}-two-threads", flags, threads=2)
        no_vectors = {"ATEN_CPU_CAPABILITY": "default"}
        yield Job("machine", f"{name}-plain-kernels", flags, environment=no_vectors)


# -------------------------------------------------------------------------------------- the results


class Results:
    """docs/reference/runs.jsonl: a line for each job that was done. commit: whether each new line
    is committed."""

    def __init__(self, path, commit=False):
        self.path = Path(path)
        self.commit = commit

    def read(self):
        """The lines as {name of the job: line}."""
        if not self.path.is_file():
            return {}
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return {line["name"]: line for line in map(json.loads, lines)}

    def add(self, line):
        """Append a line, and commit it if that is wanted. The lock keeps lines whole if several
        processes add one at the same time."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            if self.commit:
                self.commit_line(line["name"])

    def commit_line(self, name):
        """Commit the line together with the tables that follow from it, because a test compares
        them. A document with uncommitted changes is left out: somebody is writing in it, and its
        table comes with their commit."""
        # the checkout of these results, which need not be the one of this script
        root = self.path.resolve().parents[2]
        status = ["git", "status", "--porcelain", "--", "README.md", "docs"]
        lines = subprocess.run(status, cwd=root, capture_output=True, text=True).stdout.splitlines()
        with_changes = {line[3:] for line in lines}
        subprocess.run(
            [sys.executable, "tests/tables.py", "--write"], cwd=root, capture_output=True
        )
        paths = [path.relative_to(root) for path in documents(root)]
        paths = [str(path) for path in paths if str(path) not in with_changes]
        paths.append(str(self.path.resolve().parent.relative_to(root)))
        subprocess.run(["git", "add", *paths], cwd=root)
        subprocess.run(["git", "commit", "-q", "-m", f"Measured: {name}", "--", *paths], cwd=root)


def line_of_run(job, place):
    """The line of a run that is over, from its directory `place`."""
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((place / "summary.json").read_text())
    # a metric that this kind of run does not have is null from the first step to the last
    metrics = {
        key: [row[key] for row in rows]
        for key in rows[0]
        if rows[0][key] is not None or rows[-1][key] is not None
    }
    return rounded(
        {
            "name": job.name,
            "part": job.part,
            "flags": flags_of(job),
            "lab": job.lab,
            "threads": job.threads,
            "environment": job.environment,
            "machine": this_machine(),
            "evaluations": summary["evaluations"],
            "seconds": summary["seconds"],
            "peak_rss_mb": summary["peak_rss_mb"],
            "warnings": summary["warnings"],
            "metrics": metrics,
            **({"heldout": heldout_of_run(place)} if job.part == "small" else {}),
        }
    )


def heldout_of_run(place, kept=3):
    """What the held-out users of a run were told, before and after: the signs of all replies, what
    --simulator phrases heard in them, and the dialogues with the first `kept` users."""
    rows = [json.loads(line) for line in (place / "dialogues.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["split"] == "heldout"]
    steps = [row["step"] for row in rows]
    heldout = {}
    for moment, step in (("before", min(steps)), ("after", max(steps))):
        dialogues = [row for row in rows if row["step"] == step]
        replies = [[turn["reply"] for turn in row["turns"]] for row in dialogues]
        analyses = [turn["analysis"] for row in dialogues for turn in row["turns"]]
        heldout[moment] = {
            "signs": signs(replies),
            "heard": shares_heard(analyses),
            "dialogues": dialogues[:kept],
        }
    return heldout


def shares_heard(analyses):
    """{what the user of --simulator phrases heard, a key of phrases.POINTS: in how many % of the
    replies}, read off its analyses."""
    counts = Counter()
    for analysis in analyses:
        notes = re.search(r"^Activity \w+: I heard (.*)\.$", analysis, flags=re.MULTILINE)[1]
        counts.update({note.partition(":")[0] for note in notes.split("; ")})
    return {name: 100 * count / len(analyses) for name, count in counts.items()}


def line_of_command(job, result, output):
    """The line of a command that is over. result: what it wrote to {json}, or None; output: what it
    printed."""
    return rounded(
        {
            "name": job.name,
            "part": job.part,
            "command": job.command,
            "machine": this_machine(),
            "result": result,
            "output": output,
        }
    )


def rounded(value):
    """A value of JSON with its numbers rounded to five digits: enough for every table, and
    short."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return value


def this_machine():
    """What the numbers are measured on."""
    import torch

    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.is_file() else None
    return {
        "cpu": model.group(1) if model else platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


# ----------------------------------------------------------------------------------- doing the jobs


def do_job(job, results):
    """Do a job and add its line to the Results, if the line is not there yet. A job that fails adds
    none."""
    if job.name in results.read():
        return
    for name in job.needs:  # the line of such a run may be from another machine, without the run
        if not (RUNS / name / "summary.json").is_file():
            train(next(other for other in jobs() if other.name == name))
    if job.flags:
        place = train(job)
        if place:
            results.add(line_of_run(job, place))
    else:
        result_file = RUNS / f"{job.name}.json"
        result_file.parent.mkdir(parents=True, exist_ok=True)
        output = run_script(job, command_of(job, result_file), ROOT)
        if output is not None:
            has_result = "{json}" in job.command
            result = json.loads(without_root(result_file.read_text())) if has_result else None
            results.add(line_of_command(job, result, without_root(output)))


def without_root(text):
    """A text with paths relative to the project: where the project lies on this machine is nobody's
    business."""
    return text.replace(f"{ROOT}/", "")


def command_of(job, result_file):
    """The command of a job as a list of words, its {placeholders} replaced by paths."""
    paths = {"json": result_file, **{name: RUNS / name for name in job.needs}}
    command = re.sub(r"\{([\w-]+)\}", lambda match: str(paths[match[1]]), job.command)
    return shlex.split(command)


def train(job):
    """Make the run of a job; one that was stopped goes on, and one that is there is taken as it is.
    Returns its directory, or None if it fails."""
    place = RUNS / job.name
    if (place / "summary.json").is_file():
        return place
    if (place / "config.json").is_file():
        flags = ["--resume", str(place)]
    else:
        flags = [*flags_of(job).split(), "--out", str(place)]
    output = run_script(job, ["rlver.py", *flags], scripts_for(job))
    return None if output is None else place


def flags_of(job):
    """The flags of a job's run. Where a lab's mistake is a flag and not a patch, that is added."""
    if job.lab:
        lab = labs.load_labs()[job.lab]
        if not lab.get("patch"):
            return f"{job.flags} {lab['arms']['broken']}"
    return job.flags


def scripts_for(job):
    """The directory of the scripts that a job runs: the project, or a copy with a lab's mistake."""
    if job.lab:
        return labs.copy_of(labs.scripts_of(labs.load_labs()[job.lab], "broken"))
    return ROOT


def run_script(job, command, home):
    """Run a script of the project in the directory `home`, or a module of it with `-m`, with the
    job's threads. Returns what it printed, or None if its exit code is not 0."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=home,
        text=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": str(job.threads), **job.environment},
    )
    outcome = "done" if done.returncode == 0 else f"exit {done.returncode}: {done.stderr[-300:]}"
    print(f"{job.name}: {outcome}", file=sys.stderr, flush=True)
    return done.stdout if done.returncode == 0 else None


# -------------------------------------------------------------------------------------- the numbers


def seeds_of(measured, name):
    """The measured lines NAME-0, NAME-1, ... in the order of their seeds."""
    pattern = re.escape(name) + r"-\d+"
    lines = [line for key, line in measured.items() if re.fullmatch(pattern, key)]
    return sorted(lines, key=lambda line: int(line["name"].rsplit("-", 1)[1]))


def first(line, key="score"):
    """A number of a run's evaluation before the training."""
    return line["evaluations"][0][key]


def last(line, key="score"):
    """A number of a run's evaluation after the training."""
    return line["evaluations"][-1][key]


def scores_by_step(line):
    """{step: held-out score} of a run's evaluations."""
    return {evaluation["step"]: evaluation["score"] for evaluation in line["evaluations"]}


def interval(values, digits=1):
    """The mean over seeds and half of its 95 % interval, as "80.0 ± 24.8"."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    mean, half = mean_interval(values)
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def dialogues_until(points, goal, batch=64):
    """Training dialogues until the held-out score first passes `goal`, on straight lines between
    the evaluations `points` [(step, score)]; None if it never does. batch: dialogues of a step."""
    for (step, score), (next_step, next_score) in itertools.pairwise(points):
        if score < goal <= next_score:
            share = (goal - score) / (next_score - score)
            return batch * (step + (next_step - step) * share)
    return None


# --------------------------------------------------------------------------------------- the tables
# Each takes what is `measured` and returns Markdown, "" if too little is measured.


def table_variants(measured):
    """The four variants: before and after the training."""
    rows = []
    for name, words in NAMES.items():
        lines = seeds_of(measured, name)
        if not lines:
            return ""
        scores = [last(line) for line in lines]
        rows.append(
            [
                f"`{words}`",
                interval([first(line) for line in lines]),
                interval(scores),
                f"{min(scores):.0f} to {max(scores):.0f}",
                f"{np.mean([last(line, 'failure') for line in lines]):.1f} %",
                f"{np.mean([last(line, 'malformed') for line in lines]):.1f} %",
                len(lines),
            ]
        )
    return markdown(
        ["run", "before", "after", "lowest and highest", "failure", "malformed", "seeds"], rows
    )


def table_rewards(measured, goal=60, early=10):
    """Terminal against delta, and the three advantages: five seeds each. goal: the score that shall
    be reached; early: the step of the first column."""
    rows = []
    for name, words in NAMES.items():
        for kind in ("", "-delta", "-dr-grpo", "-rloo"):
            lines = seeds_of(measured, name + kind)[:5]
            if not lines:
                continue
            scores = [scores_by_step(line) for line in lines]
            dialogues = [dialogues_until(list(curve.items()), goal) for curve in scores]
            reached = [count for count in dialogues if count is not None]
            if len(reached) == len(lines):
                until_goal = interval(reached, 0)
            else:
                until_goal = f"{len(reached)} of {len(lines)} seeds"
            by_seed = ["never" if count is None else f"{count:.0f}" for count in dialogues]
            rows.append(
                [
                    f"{words}, {kind.removeprefix('-') or 'terminal'}",
                    interval([curve[early] for curve in scores]),
                    interval([last(line) for line in lines]),
                    until_goal,
                    ", ".join(by_seed),
                ]
            )
    return markdown(
        ["run", f"score after {early} steps", "at the end", f"dialogues until {goal}", "by seed"],
        rows,
    )


def table_ranks(measured, early=10):
    """Adapters of several ranks beside the whole model (here rank 0): three seeds each. early: the
    step of the first column."""
    rows = []
    for name, words in NAMES.items():
        if not seeds_of(measured, f"{name}-rank8"):
            continue
        for rank in (0, 1, 4, 8, 16):
            lines = seeds_of(measured, f"{name}-rank{rank}" if rank else name)[:3]
            if not lines:
                continue
            rows.append(
                [
                    f"`{words}`",
                    f"rank {rank}" if rank else "the whole model",
                    interval([scores_by_step(line)[early] for line in lines]),
                    interval([last(line) for line in lines]),
                ]
            )
    return markdown(["run", "trained", f"score after {early} steps", "at the end"], rows)


def table_machine(measured):
    """The same run with other threads and other kernels: its score, for how many steps its mean
    emotion in training is the same, and how far that is apart on average over all steps."""
    rows = []
    for name, words in NAMES.items():
        usual = measured.get(f"{name}-0")
        others = [measured.get(f"{name}-{kind}") for kind in ("two-threads", "plain-kernels")]
        if not usual or not all(others):
            return ""
        row = [f"`{words}`", f"{last(usual):.1f}"]
        emotions = np.array(usual["metrics"]["emotion"])
        for other in others:
            other_emotions = np.array(other["metrics"]["emotion"])
            differs = emotions != other_emotions
            steps_alike = int(np.argmax(differs)) if differs.any() else len(emotions)
            apart = np.abs(emotions - other_emotions).mean()
            row += [f"{last(other):.1f}", steps_alike, f"{apart:.1f}"]
        rows.append(row)
    head = ["run, seed 0", "one thread"]
    for kind in ("two threads", "plain kernels"):
        head += [kind, "steps alike", "apart"]
    return markdown(head, rows)


def table_challenging(measured):
    """Training with the vanilla user and with the challenging one; the same seeds."""
    rows = []
    for words, name in (("vanilla", "grpo-think"), ("challenging", "grpo-think-challenging")):
        lines = seeds_of(measured, name)[:3]
        if len(lines) < 3:
            return ""
        before, after = [first(line) for line in lines], [last(line) for line in lines]
        finals = ", ".join(f"{score:.1f}" for score in after)
        rows.append([words, interval(before), interval(after), finals])
    return markdown(["user", "before", "after", "after, by seed"], rows)


def table_replay(measured):
    """How much of a run is the same when its replies are put to the user again."""
    line = measured.get("replay")
    if not line:
        return ""
    result = line["result"]
    rows = [
        ["turns with the same emotion", f"{result['turns']:,}", f"{100 * result['emotion']:.0f} %"],
        [
            "dialogues with the same score",
            f"{result['dialogues']:,}",
            f"{100 * result['final']:.0f} %",
        ],
    ]
    return markdown(["", "number", "share"], rows)


def table_hackable(measured, stretch=12):
    """What the weak scorer says of the replies in training, what the strict user says of the same
    ones, and how the replies change: means over stretches of steps, over all seeds."""
    lines = seeds_of(measured, "grpo-direct-weak")
    if not lines:
        return ""
    n = len(lines[0]["metrics"]["step"])
    begins = range(0, n, stretch)
    rows = []
    for words, key, digits in (
        ("the weak scorer, which is the reward", "emotion", 1),
        ("the strict user, who watches", "watched", 1),
        ("words a reply", "reply_words", 1),
        ("replies that repeat a sentence to the same user", "repeat_within", 2),
        ("distinct word pairs", "distinct_2", 2),
    ):
        curves = np.array([line["metrics"][key] for line in lines], float)
        means = [curves[:, begin : begin + stretch].mean() for begin in begins]
        rows.append([words, *[f"{mean:.{digits}f}" for mean in means]])
    return markdown(["steps", *[f"{b + 1} to {min(n, b + stretch)}" for b in begins]], rows)


def table_signs(measured, tenth=0.1):
    """The signs that are counted in the replies, with the strict user and with the weak scorer as
    the reward: means over the first and over the last tenth of the steps, and over all seeds."""
    lines_of = {
        "toy": seeds_of(measured, "grpo-direct")[:3],
        "toy-weak": seeds_of(measured, "grpo-direct-weak"),
    }
    if not all(lines_of.values()):
        return ""
    held_out, warned = ["held-out score"], ["runs that end with a warning"]
    for lines in lines_of.values():
        before = np.mean([first(line) for line in lines])
        after = np.mean([last(line) for line in lines])
        held_out.append(f"{before:.0f} to {after:.0f}")
        warned.append(f"{sum(bool(line['warnings']) for line in lines)} of {len(lines)}")
    rows = [held_out]
    for words, key, scale, unit in (
        ("words a reply", "reply_words", 1, ""),
        ("replies that repeat a sentence to the same user", "repeat_within", 100, " %"),
        ("replies that occur in another dialogue, too", "repeat_across", 100, " %"),
        ("distinct word pairs, of 100", "distinct_2", 100, ""),
    ):
        row = [words]
        for lines in lines_of.values():
            curves = scale * np.array([line["metrics"][key] for line in lines], float)
            n = max(1, round(tenth * curves.shape[1]))
            row.append(f"{curves[:, :n].mean():.0f} to {curves[:, -n:].mean():.0f}{unit}")
        rows.append(row)
    return markdown(["", *[f"`{name}`" for name in lines_of]], [*rows, warned])


SMALL_RUNS = {
    "small-grpo": "`grpo`",
    "small-ppo": "`ppo`",
    "small-grpo-no-kl": "`grpo --kl-coef 0`",
    "small-grpo-delta": "`grpo --reward delta`",
    "small-grpo-whole": "`grpo --lora-rank 0`",
    "small-ppo-slow-critic": "`ppo --critic-lr 2e-4`",
}


def table_small(measured):
    """The small real model: each way of training, over its seeds. "gain" is after minus before."""
    rows = []
    for name, words in SMALL_RUNS.items():
        lines = seeds_of(measured, name)
        if lines:
            before, after = [first(line) for line in lines], [last(line) for line in lines]
            gains = [last(line) - first(line) for line in lines]
            scores = [interval(before), interval(after), interval(gains)]
            rows.append([words, *scores, *english_of(lines), minutes_of(lines), len(lines)])
    if not rows:
        return ""
    head = ["run", "before", "after", "gain", "perplexity under the start", "distinct word pairs"]
    return markdown([*head, "minutes, one core", "seeds"], rows)


def english_of(lines):
    """What tells whether the replies are still English, before and after, means over runs: [their
    perplexity under the starting policy, distinct word pairs]."""
    perplexities = [(first(line, "ref_perplexity"), last(line, "ref_perplexity")) for line in lines]
    pairs = [
        [line["heldout"][moment]["signs"]["distinct_2"] for moment in ("before", "after")]
        for line in lines
    ]
    return [
        "{:.1f} to {:.1f}".format(*np.mean(perplexities, axis=0)),
        "{:.2f} to {:.2f}".format(*np.mean(pairs, axis=0)),
    ]


def minutes_of(lines):
    """The mean duration of the runs on one core, with another run on the other core."""
    seconds = [line["seconds"]["total"] for line in lines if line["threads"] == 1]
    return f"{np.mean(seconds) / 60:.0f}" if seconds else "-"


def table_small_alone(measured):
    """The run of the small model that had both cores for itself: where its minutes went, and the
    most memory that it took."""
    rows = []
    for name, words in SMALL_RUNS.items():
        for line in seeds_of(measured, name):
            if line["threads"] == 2:
                seconds = line["seconds"]
                parts = [seconds[part] for part in ("total", "rollout", "update", "evaluate")]
                minutes = [f"{part / 60:.1f}" for part in parts]
                rows.append([words, *minutes, f"{line['peak_rss_mb'] / 1024:.2f}"])
    head = ["run", "minutes", "rollouts", "updates", "evaluations", "GiB"]
    return markdown(head, rows) if rows else ""


def table_small_heard(measured):
    """What the users heard in the replies of the small model, before and after: in % of the
    replies, means over seeds. What was hardly ever heard is left out."""
    columns = {}  # {head of a column: {what was heard: %}}
    for algo in ("grpo", "ppo"):
        lines = seeds_of(measured, f"small-{algo}")
        for moment in ("before", "after"):
            shares = [line["heldout"][moment]["heard"] for line in lines]
            if shares:
                columns[f"`{algo}`, {moment}"] = {
                    name: np.mean([share.get(name, 0) for share in shares]) for name in POINTS
                }
    if not columns:
        return ""
    names = [name for name in POINTS if any(share[name] > 0.5 for share in columns.values())]
    rows = [
        [name, f"{POINTS[name]:+d}", *[f"{share[name]:.0f}" for share in columns.values()]]
        for name in names
    ]
    return markdown(["heard", "points", *columns], rows)


def table_small_fixed(measured):
    """What policies earn that need no training, with the users of --simulator phrases. They are
    played here, by rule, so this table needs no runs."""
    replies = {
        '"Okay." to everything': lambda line: "Okay.",
        '"You\'re right." to everything': lambda line: "You're right.",
        '"The first step." to everything': lambda line: "The first step.",
        "the user's own line": lambda line: line,
    }
    rows = []
    users = [simulator.Profile(**row) for row in toy.profiles("heldout", 64)]
    for name, reply_to in replies.items():
        finals = asyncio.run(final_emotions(users, reply_to, turns=3))
        rows.append([name, f"{np.mean(finals):.1f}"])
    return markdown(["reply", "final emotion"], rows)


async def final_emotions(profiles, reply_to, turns):
    """The final emotions of the users of --simulator phrases, from a start of 30, who hear `turns`
    replies each. reply_to: the reply to a line of a user."""
    model = simulator.Simulator(PhrasesModel())
    finals = []
    for profile in profiles:
        user = simulator.User(model, profile, simulator.INITIAL_EMOTION["training"])
        line = await user.open()
        for turn in range(1, turns + 1):
            await user.feel(reply_to(line))
            if turn < turns:
                line = await user.answer()
        finals.append(user.emotion)
    return finals


def table_small_chat(measured):
    """The same policies with people who chat: after minus before, by seed."""
    rows = []
    for seed in range(3):
        sides = [measured.get(f"small-grpo-{seed}-chat-{moment}") for moment in ("before", "after")]
        if not all(sides):
            continue
        before, after = (side["result"] for side in sides)
        numbers = [f"{side['score']:.1f} ± {side['stderr']:.1f}" for side in (before, after)]
        rows.append([f"`grpo`, seed {seed}", *numbers, f"{after['score'] - before['score']:+.1f}"])
    return markdown(["run", "before", "after", "difference"], rows) if rows else ""


def table_small_dialogues(measured):
    """The dialogues of the first three held-out users of GRPO, seed 0, before and after."""
    line = measured.get("small-grpo-0")
    if not line:
        return ""
    texts = []
    pairs = zip(line["heldout"]["before"]["dialogues"], line["heldout"]["after"]["dialogues"])
    for number, dialogues in enumerate(pairs, 1):
        for moment, dialogue in zip(("before", "after"), dialogues):
            texts.append(f"**User {number}, {moment}**\n")
            texts.append(quoted("user", dialogue["first_line"], 30))
            for turn in dialogue["turns"]:
                texts.append(quoted("model", turn["reply"]))
                if turn["user"]:
                    texts.append(quoted("user", turn["user"], turn["emotion"]))
            texts.append(f"> ends at {turn['emotion']}\n")
    return "\n".join(texts)


def quoted(speaker, text, emotion=None):
    """A line of a dialogue as a quotation in Markdown; what the model wrote stays in one line."""
    name = speaker if emotion is None else f"{speaker} ({emotion:g})"
    return f"> **{name}**: {' '.join(text.split())}\n>"


def metric_columns(line):
    """The metrics of a run's line as support/reference.py takes them."""
    metrics = line["metrics"]
    steps = range(len(metrics["step"]))
    return reference.columns_of(
        [{key: values[i] for key, values in metrics.items()} for i in steps]
    )


def leave_one_out(measured):
    """{variant: [(name, places)]} of the healthy runs that leave a band, if the band is made of
    the other runs of their variant. places: where they leave it."""
    flagged = {}
    for variant in reference.VARIANTS:
        lines = seeds_of(measured, variant)
        flagged[variant] = []
        for line in lines:
            others = [metric_columns(other) for other in lines if other is not line]
            places = reference.outside(metric_columns(line), reference.bands_of(others))
            if places:
                flagged[variant].append((line["name"], places))
    return flagged


def table_mistakes(measured, shown=4):
    """Which runs leave the reference band: healthy ones, and those with a lab's mistake. shown: the
    most metrics that are named."""
    healthy = sum(len(seeds_of(measured, variant)) for variant in reference.VARIANTS)
    flagged = sum(map(len, leave_one_out(measured).values()))
    rows = [
        [
            f"the {healthy} runs, each against the others of its variant",
            "-",
            f"none, in {healthy - flagged} of {healthy} runs",
        ]
    ]
    for line in measured.values():
        if line["part"] != "mistakes":
            continue
        variant = next(v for v in reference.VARIANTS if line["name"].startswith(v))
        places = reference.outside(metric_columns(line), reference.read_bands(variant))
        metrics = [f"`{place.metric}` in steps {place.first} to {place.last}" for place in places]
        words = ", ".join(metrics[:shown]) or "none"
        if len(metrics) > shown:
            words += f", and {len(metrics) - shown} more"
        rows.append([f"`{NAMES[variant]}`, lab {line['lab']}", f"{last(line):.1f}", words])
    return markdown(["run", "held-out score at the end", "metrics outside of the band"], rows)


# By the names in the documents' comments.
TABLES = {
    "challenging": table_challenging,
    "hackable": table_hackable,
    "mistakes": table_mistakes,
    "signs": table_signs,
    "small": table_small,
    "small_alone": table_small_alone,
    "small_heard": table_small_heard,
    "small_fixed": table_small_fixed,
    "small_chat": table_small_chat,
    "small_dialogues": table_small_dialogues,
    "replay": table_replay,
    "variants": table_variants,
    "rewards": table_rewards,
    "ranks": table_ranks,
    "machine": table_machine,
}


# ----------------------------------------------------------------- the documents, and the reference


def documents(root=ROOT):
    """The files in which tables may stand."""
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def with_measured(text, measured):
    """A document's text with its tables as they follow from the numbers. A table for which too
    little is measured stays as it is."""
    return with_tables(text, "tables", lambda name: TABLES[name](measured))


def write_documents(measured):
    """Write the bands and all tables."""
    write_bands(measured)
    for path in documents():
        text = path.read_text(encoding="utf-8")
        new_text = with_measured(text, measured)
        if new_text != text:
            path.write_text(new_text, encoding="utf-8")


def write_bands(measured):
    """Write docs/reference/VARIANT.csv for each variant of which all ten runs are measured."""
    for variant in reference.VARIANTS:
        lines = seeds_of(measured, variant)
        if len(lines) == 10:
            bands = reference.bands_of([metric_columns(line) for line in lines])
            reference.write_bands(variant, bands)


# ------------------------------------------------------------------------------------- command line


def main(argv=None):
    """Do what the flags say."""
    args = make_parser().parse_args(argv)
    results = Results(args.results, args.commit)
    chosen = [job for job in jobs() if job.part in args.only]
    if args.list:
        measured = results.read()
        for job in chosen:
            print(f"{'there' if job.name in measured else '-----'}  {job.part:<12}{job.name}")
        return
    if not args.write:
        do_jobs(chosen, results, args.jobs)
    measured = results.read()
    write_documents(measured)
    print_flagged(measured)


def do_jobs(chosen, results, at_once):
    """Do the jobs: first those that may run beside others, `at_once` of them at a time, then those
    that must run alone. What a job raises is raised here, when the others beside it are done."""
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(do_job, job, results) for job in chosen if not job.alone]
    for future in futures:
        future.result()
    for job in chosen:
        if job.alone:
            do_job(job, results)


def print_flagged(measured):
    """Print which healthy runs leave the band of the others."""
    for variant, flagged in leave_one_out(measured).items():
        count = len(seeds_of(measured, variant))
        print(f"{variant}: {len(flagged)} of {count} runs are flagged by the others")
        for name, places in flagged:
            print(f"    {name}: {reference.sentence(places)}")


def make_parser():
    """The command line."""
    parts = list(dict.fromkeys(job.part for job in jobs()))
    parser = Parser(prog="tables.py", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--only",
        nargs="+",
        choices=parts,
        default=parts,
        metavar="PART",
        help=f"of {', '.join(parts)}",
    )
    parser.add_argument("--jobs", type=positive, default=2, help="runs at a time")
    parser.add_argument("--list", action="store_true", help="make nothing: tell what is missing")
    parser.add_argument("--write", action="store_true", help="make nothing: write the tables")
    parser.add_argument("--commit", action="store_true", help="commit the numbers of each job")
    parser.add_argument(
        "--results",
        default=reference.PLACE / "runs.jsonl",
        metavar="FILE",
        help="where the numbers are kept (default: docs/reference/runs.jsonl)",
    )
    return parser


if __name__ == "__main__":
    main()
