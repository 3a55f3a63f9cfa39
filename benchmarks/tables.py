"""tables.py - makes every table of the README and of docs/ that comes from training or from a
reader, by one command.

    python benchmarks/tables.py                    make what is missing, then write the tables
    python benchmarks/tables.py --list             what there is, and what is missing
    python benchmarks/tables.py --only variants    these parts alone
    python benchmarks/tables.py --write            only write the tables, from what is there

A job is a run of rlver.py. When it ends, its numbers become one line of benchmarks/runs.jsonl,
which is under version control: a job that has its line there is not done again, so the command goes
on where it was stopped, on another machine, too. Two runs are made at a time, with one thread each;
runs with two threads are made one by one.

Throughout this file `measured` is what that file holds, {name of the job: its line}.

The tables stand in the documents between two comments, `<!-- tables: NAME -->` and
`<!-- tables: end -->`, and are written there by this script; a test compares them with the numbers.
"""

import asyncio
import fcntl
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from players.users import make_simulator
from support.command_line import Parser, positive
from support.files import read_json, read_jsonl
from support.results import recorded_dialogues

import numpy as np

import people
from benchmarks import small
from tools import fitness
from tools.replay import final_score, replay_all

RUNS = ROOT / "runs" / "tables"
# What is kept of a run: what a table reads, and `zero_std_groups`, because a test compares the
# bounds of a warning with these runs.
EVALUATION = ("step", "score", "failure", "malformed")
METRICS = (
    "step",
    "emotion",
    "reply_words",
    "repeat_within",
    "repeat_across",
    "distinct_2",
    "zero_std_groups",
)
FLAGS = {
    "grpo-think": "--algo grpo --think",
    "grpo-direct": "--algo grpo",
    "ppo-think": "--algo ppo --think",
    "ppo-direct": "--algo ppo",
}
# The variants as tables name them: "grpo --think".
NAMES = {name: flags.removeprefix("--algo ") for name, flags in FLAGS.items()}
SEEDS = 16  # of each variant
PAIRED = range(2000, 2003)  # the seeds of all other toy runs
LOST = 20  # a need is lost if the mean final emotion of its held-out users is lower


# ----------------------------------------------------------------------------------------- the jobs


@dataclass
class Job:
    """A run of rlver.py, or of a recipe, with `flags`, to be measured. One with several threads is
    made alone."""

    part: str  # what --only chooses
    name: str  # of its line, and of its directory
    flags: str
    threads: int = 1
    program: tuple = (sys.executable, "rlver.py")


def jobs():
    """All jobs, in the order in which they are done."""
    yield from variants()
    yield from rewards()
    yield from users()
    yield from readers()
    yield from small_models()


def variants():
    """The four variants. Nothing was chosen with these seeds, and each was run once."""
    for number, (name, flags) in itertools.product(range(SEEDS), FLAGS.items()):
        seed = number + (3100 if "--think" in flags else 2000)
        yield Job("variants", f"{name}-{seed}", f"{flags} --seed {seed}")


def rewards():
    """One reward for each turn (delta), and other advantages, three seeds. They are compared with the
    usual runs of the same seeds; those without thoughts are in `variants`."""
    for seed in PAIRED:
        for name, flags in FLAGS.items():
            if "--think" in flags:
                yield Job("rewards", f"{name}-{seed}", f"{flags} --seed {seed}")
            yield Job("rewards", f"{name}-delta-{seed}", f"{flags} --reward delta --seed {seed}")
        for kind in ("dr-grpo", "rloo"):
            advantage = f"--algo grpo --advantage {kind} --seed {seed}"
            yield Job("rewards", f"grpo-direct-{kind}-{seed}", advantage)


def users():
    """Challenging users, and a scorer that can be hacked."""
    for seed in PAIRED:
        flags = f"--algo grpo --think --difficulty challenging --seed {seed}"
        yield Job("challenging", f"grpo-think-challenging-{seed}", flags)
    for seed in PAIRED:
        # twice as long as usual: the weak scorer pays for little of what the policy does at first
        flags = f"--algo grpo --simulator toy-weak --steps 72 --seed {seed}"
        yield Job("hackable", f"grpo-direct-weak-{seed}", flags)


def readers():
    """A language model as the user, read and asked in writing, and what fixed replies earn. These
    jobs use both cores, so they run alone. $READER is the model, see small.py."""
    yield Job("reader", "reader-constants", "", threads=2)
    for name, flags in (("reads", "--reader"), ("writes", "--simulator")):
        yield Job("reader", f"reader-{name}", f"{flags} local:$READER", threads=2)


def small_models():
    """A small language model that is trained on a reader. Nothing was chosen with these seeds. Two
    tries, with another seed, after the perplexity had risen too far."""
    program = ("bash", "recipes/smollm2.sh")
    for seed in range(3):
        yield Job("small", f"small-grpo-{seed}", f"--seed {seed}", 2, program)
    for name, flags in (("kl", "--kl-coef 0.02"), ("short", "--max-tokens 24")):
        yield Job("small", f"small-{name}-10", f"--seed 10 {flags}", 2, program)


# -------------------------------------------------------------------------------------- the results


class Results:
    """benchmarks/runs.jsonl: a line for each job that was done."""

    def __init__(self, path):
        self.path = Path(path)

    def read(self):
        """The lines as {name of the job: line}."""
        if not self.path.is_file():
            return {}
        return {line["name"]: line for _, line, _ in read_jsonl(self.path)}

    def add(self, line):
        """Append a line. The lock keeps lines whole if several processes add one at the same
        time."""
        with open(self.path, "a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def kept(row, keys):
    """The entries of a row {key: value} under these keys, without those that are None."""
    return {key: row[key] for key in keys if row.get(key) is not None}


def line_of_run(job, place):
    """The line of a run that is over, from its directory `place`."""
    rows = [row for _, row, _ in read_jsonl(place / "metrics.jsonl")]
    summary = read_json(place / "summary.json")
    line = {
        "name": job.name,
        "part": job.part,
        "commit": current_commit(),
        "flags": job.flags,
        "threads": job.threads,
        "evaluations": [kept(row, EVALUATION) for row in summary["evaluations"]],
        "seconds": summary["seconds"]["total"],
        "metrics": {key: [row.get(key) for row in rows] for key in kept(rows[-1], METRICS)},
    }
    if job.part == "variants":
        line["needs"] = scores_of_needs(place)
    if job.part == "hackable":
        line["metrics"]["strict"] = strict_emotions(place)
    if job.part == "small":
        line |= small.before_and_after(place)
    return rounded(line)


def current_commit():
    """The commit that is checked out."""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def scores_of_needs(place):
    """{need: mean final emotion of its held-out users} in the last evaluation of a run."""
    rows = recorded_dialogues(place / "dialogues.jsonl")
    rows = [row for row in rows if row["split"] == "heldout"]
    need_of = {profile.id: profile.need for profile in people.toy_profiles("heldout")}
    finals = {}  # {need: [final emotion of each of its users]}
    for row in rows:
        if row["step"] == rows[-1]["step"]:
            finals.setdefault(need_of[row["profile_id"]], []).append(100 * row["reward"])
    return {need: float(np.mean(emotions)) for need, emotions in finals.items()}


def strict_emotions(place):
    """The mean final emotion of the strict user who hears the replies of each training step of a
    run. A malformed dialogue counts 0, as its reward does."""
    rows = recorded_dialogues(place / "dialogues.jsonl")
    dialogues = [row for row in rows if row["split"] == "train"]
    profiles = {profile.id: profile for profile in people.toy_profiles("train")}
    strict = make_simulator("toy")
    finals = {}  # {step: [final emotion of each dialogue]}
    for dialogue, felt in zip(dialogues, asyncio.run(replay_all(dialogues, strict, profiles))):
        finals.setdefault(dialogue["step"], []).append(final_score(dialogue, felt))
    return [float(np.mean(finals[step])) for step in sorted(finals)]


def rounded(value):
    """A value of JSON with its numbers rounded to five digits: enough for every table, and
    short."""
    return json.loads(json.dumps(value), parse_float=lambda text: float(f"{float(text):.5g}"))


# ----------------------------------------------------------------------------------- doing the jobs


def do_job(job, results):
    """Do a job and add its line to the Results, if the line is not there yet. A job that fails adds
    no line."""
    if job.name in results.read():
        return
    if job.part == "reader":
        results.add(rounded({"name": job.name, "part": job.part, **examine(job)}))
    else:
        place = train(job)
        if place:
            results.add(line_of_run(job, place))


def examine(job):
    """What is kept of a job of `readers`."""
    if not job.flags:
        return small.constants()
    with tempfile.TemporaryDirectory() as place:
        flags = os.path.expandvars(job.flags).split()
        fitness.main([*flags, "--json", f"{place}/found.json"])
        found = read_json(f"{place}/found.json")
    return kept(found, ("table", "verdict"))


def train(job):
    """Make the run of a job. A stopped run goes on, and a finished run is taken as it is. Returns
    its directory, or None if it fails."""
    place = RUNS / job.name
    if (place / "summary.json").is_file():
        return place
    command = [*job.program, *job.flags.split(), "--out", str(place)]
    if (place / "config.json").is_file():
        command = [sys.executable, "rlver.py", "--resume", str(place)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        text=True,
        capture_output=True,
        env={**os.environ, "OMP_NUM_THREADS": str(job.threads)},
    )
    outcome = "done" if done.returncode == 0 else f"exit {done.returncode}: {done.stderr[-300:]}"
    print(f"{job.name}: {outcome}", file=sys.stderr, flush=True)
    return place if done.returncode == 0 else None


# -------------------------------------------------------------------------------------- the numbers


def seeds_of(measured, name):
    """The measured lines NAME-0, NAME-1, ... in the order of their seeds."""
    pattern = re.escape(name) + r"-\d+"
    lines = [line for key, line in measured.items() if re.fullmatch(pattern, key)]
    return sorted(lines, key=lambda line: int(line["name"].rsplit("-", 1)[1]))


def first(line):
    """The score of a run's evaluation before the training."""
    return line["evaluations"][0]["score"]


def last(line, key="score"):
    """A number of a run's evaluation after the training."""
    return line["evaluations"][-1][key]


# Student's t for the two-sided 95 % interval of a mean over 2, 3, ... 16 seeds
T_95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


def interval(values):
    """The mean over 1 to 16 seeds and half of its 95 % interval, t s / sqrt(n), as
    "80.0 ± 24.8"; s is the standard deviation over the n seeds. One seed has no interval."""
    n = len(values)
    if n == 1:
        return f"{values[0]:.1f}"
    half = T_95[n - 2] * np.std(values, ddof=1) / n**0.5
    return f"{np.mean(values):.1f} ± {half:.1f}"


# --------------------------------------------------------------------------------------- the tables
# Each takes what is `measured` and returns Markdown, "" if too little is measured.


def table_variants(measured):
    """The four variants: before and after the training."""
    rows = []
    for name, words in NAMES.items():
        lines = seeds_of(measured, name)[-SEEDS:]  # without those of `rewards`
        if not lines:
            return ""
        scores = [last(line) for line in lines]
        rows.append(
            [
                f"`{words}`",
                interval([first(line) for line in lines]),
                interval(scores),
                f"{min(scores):.0f} to {max(scores):.0f}",
                sum(min(line["needs"].values()) < LOST for line in lines),
                f"{np.mean([last(line, 'failure') for line in lines]):.1f} %",
                f"{np.mean([last(line, 'malformed') for line in lines]):.1f} %",
                len(lines),
            ]
        )
    return markdown(
        [
            "run",
            "before",
            "after",
            "lowest and highest",
            "lost a need",
            "failure",
            "malformed",
            "seeds",
        ],
        rows,
    )


def table_rewards(measured, early=10):
    """Terminal against delta, and the three advantages: the emotion in training around the step
    `early`, and the score at the end. Runs of the same seed are compared in pairs."""
    rows = []
    for name, words in NAMES.items():
        advantages = ["-dr-grpo", "-rloo"] if name == "grpo-direct" else []
        usual = []  # the row of "terminal", as numbers
        for kind in ("", "-delta", *advantages):
            lines = seeds_of(measured, name + kind)[:3]
            if len(lines) < 3:
                return ""
            emotions = [line["metrics"]["emotion"][early - 3 : early + 2] for line in lines]
            columns = [np.mean(emotions, axis=1), np.array([last(line) for line in lines])]
            usual = usual or columns
            cells = []
            for column, base in zip(columns, usual):
                cells += [interval(column), interval(column - base) if kind else ""]
            rows.append([f"{words}, {kind.removeprefix('-') or 'terminal'}", *cells])
    around, less = f"emotion in steps {early - 2} to {early + 2}", "less terminal"
    return markdown(["run", around, less, "score at the end", less], rows)


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


def table_hackable(measured, stretch=12):
    """What the weak scorer says of the replies in training, and what the strict user says of the
    same ones: means over stretches of steps, over all seeds."""
    lines = seeds_of(measured, "grpo-direct-weak")
    if not lines:
        return ""
    n = len(lines[0]["metrics"]["step"])
    begins = range(0, n, stretch)
    rows = []
    for words, key in (
        ("the weak scorer, which is the reward", "emotion"),
        ("the strict user, of the same replies", "strict"),
    ):
        curves = np.array([line["metrics"][key] for line in lines], float)
        means = [curves[:, begin : begin + stretch].mean() for begin in begins]
        rows.append([words, *[f"{mean:.1f}" for mean in means]])
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
    held_out = ["held-out score"]
    for lines in lines_of.values():
        before = np.mean([first(line) for line in lines])
        after = np.mean([last(line) for line in lines])
        held_out.append(f"{before:.0f} to {after:.0f}")
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
    return markdown(["", *[f"`{name}`" for name in lines_of]], rows)


def table_replies(measured):
    """The changes of emotion of a language model at the kinds of replies, read and asked in
    writing, and how often some kinds lift more than others."""
    lines = [measured.get(f"reader-{name}") for name in ("reads", "writes")]
    if not all(lines):
        return ""
    rows = []
    for name in lines[0]["table"]:
        # a cell of two kinds each would be ten rows more
        if name.startswith(("change, ", "AUC, all")) or name.endswith(("warm", "unneeded")):
            cells = [cell_of(name, *line["table"][name]) for line in lines]
            rows.append([name, *cells])
    return markdown(["", "read", "written"], rows)


def cell_of(name, value, low, high, _):
    """A cell of `table_replies`: a mean change, or an AUC with its interval over people."""
    if value is None:
        return ""
    if name.startswith("change"):
        return f"{value:+.1f}"
    return f"{value:.2f}" + (f" ({low:.2f} to {high:.2f})" if low is not None else "")


def table_small(measured):
    """The small model's runs, before and after the training, and the mean gains of GRPO's seeds."""
    lines = [line for line in measured.values() if line["part"] == "small"]
    if not lines:
        return ""
    rows = []
    # a column that a line lacks, because it was measured before there was such a column, is empty
    columns = list(dict.fromkeys(name for line in lines for name in line["before_and_after"]))
    for line in lines:
        pairs = [line["before_and_after"].get(name, ()) for name in columns]
        cells = [" to ".join(f"{value:.3g}" for value in pair) for pair in pairs]
        rows.append([line["name"].removeprefix("small-"), *cells, f"{line['seconds'] / 60:.0f}"])
    grpo = [line["before_and_after"] for line in seeds_of(measured, "small-grpo")]
    gains = [interval([pairs[name][1] - pairs[name][0] for pairs in grpo]) for name in columns[:2]]
    mean = ["grpo, gain", *gains, *[""] * (len(columns) - 1)]
    return markdown(["", *columns, "minutes"], [*rows, mean])


# By the names in the documents' comments.
TABLES = {
    "challenging": table_challenging,
    "hackable": table_hackable,
    "signs": table_signs,
    "replies": table_replies,
    "small": table_small,
    "variants": table_variants,
    "rewards": table_rewards,
}


# ----------------------------------------------------------------------------------- the documents


def documents():
    """The files in which tables may stand."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def markdown(columns, rows):
    """A table in Markdown."""
    head, *lines = ("| " + " | ".join(map(str, row)) + " |" for row in [columns, *rows])
    return "\n".join([head, "|" + "---|" * len(columns), *lines])


def with_measured(text, measured):
    """A document's text with its tables as they follow from the numbers. A table for which too
    little is measured stays as it is."""

    def block(match):
        opening, name, _, closing = match.groups()
        table = TABLES[name](measured)
        return f"{opening}{table}\n{closing}" if table else match[0]

    pattern = r"(<!-- tables: (\w+) -->\n)(.*?)(<!-- tables: end -->)"
    return re.sub(pattern, block, text, flags=re.DOTALL)


def write_documents(measured):
    """Write all tables."""
    for path in documents():
        text = with_measured(path.read_text(encoding="utf-8"), measured)
        path.write_text(text, encoding="utf-8")


# ------------------------------------------------------------------------------------- command line


def main(argv=None):
    """Do what the flags say."""
    parts = list(dict.fromkeys(job.part for job in jobs()))
    parser = Parser(prog="tables.py", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    text = f"of {', '.join(parts)}"
    add("--only", nargs="+", choices=parts, default=parts, metavar="PART", help=text)
    add("--jobs", type=positive, default=2, help="runs at a time")
    add("--list", action="store_true", help="make nothing: tell what is missing")
    add("--write", action="store_true", help="make nothing: write the tables")
    args = parser.parse_args(argv)
    results = Results(ROOT / "benchmarks" / "runs.jsonl")
    chosen = [job for job in jobs() if job.part in args.only]
    if args.list:
        measured = results.read()
        for job in chosen:
            print(f"{'there' if job.name in measured else '-----'}  {job.part:<12}{job.name}")
        return
    if not args.write:
        do_jobs(chosen, results, args.jobs)
    write_documents(results.read())


def do_jobs(chosen, results, at_once):
    """Do the jobs: first those that may run beside others, `at_once` of them at a time, then those
    that must run alone. What a job raises is raised here, when the others beside it are done."""
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(do_job, job, results) for job in chosen if job.threads == 1]
    for future in futures:
        future.result()
    for job in chosen:
        if job.threads > 1:
            do_job(job, results)


if __name__ == "__main__":
    main()
