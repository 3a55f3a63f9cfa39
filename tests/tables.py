"""tables.py - every number of the README and of docs/ that is of the toy, measured by one command.

    python tests/tables.py                    make what is missing, then write the tables
    python tests/tables.py --list             what there is, and what is missing
    python tests/tables.py --only variants    these parts alone
    python tests/tables.py --write            only write the tables, from what is there

A job is a run of rlver.py, or another command. When it ends, its numbers become one line of
docs/reference/runs.jsonl, which is under version control: a job that has its line there is not made
again, so the command goes on where it was stopped, on another machine too. Runs have one thread
each, two at a time; those of the part "machine" alone, with as many as they say.

The tables stand in the documents between two comments, `<!-- tables: NAME -->` and
`<!-- tables: end -->`, and are written there by this script; a test compares them with the numbers.
The bands in docs/reference/*.csv are made here too (support/reference.py says what they are).
"""

import fcntl
import itertools
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "course")]
from support import reference
from support.flags import Parser, positive

import labs

RUNS = ROOT / "runs" / "tables"
EVERY = 5  # steps between evaluations of the runs of a table
# Student's t, two-sided 95 %, for the mean of so many seeds
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}
FLAGS = {
    "grpo-think": "--algo grpo --think",
    "grpo-direct": "--algo grpo",
    "ppo-think": "--algo ppo --think",
    "ppo-direct": "--algo ppo",
}
NAMES = {name: flags.removeprefix("--algo ") for name, flags in FLAGS.items()}  # as tables say it


# ----------------------------------------------------------------------------------------- the jobs


@dataclass
class Job:
    """Something to be measured. name: of its line. flags: of rlver.py; or `command`, of another
    script. lab: of which lab the mistake is put in. needs: names of runs that must be there."""

    part: str
    name: str
    flags: str = ""
    command: str = ""
    lab: str = ""
    needs: tuple = ()
    threads: int = 1
    environment: dict = field(default_factory=dict)


EVALUATED = f"--eval-every {EVERY}"


def jobs():
    """All jobs, in the order in which they are made."""
    yield from variants()
    yield from mistakes()
    yield from rewards()
    yield from ranks()
    yield from users()
    yield from machines()
    yield Job("table3", "table3", command="-m tools.table3 --out runs/table3 --json {json}")
    yield Job(
        "replay",
        "replay",
        needs=("grpo-think-0",),
        command="-m tools.replay {grpo-think-0}/dialogues.jsonl --json {json}",
    )
    yield Job("bench", "bench", command="tests/bench.py", threads=2)
    for lab in labs.load_labs():
        yield Job("labs", f"lab-{lab}", command=f"course/course.py lab {lab}")


def variants():
    """The four variants."""
    for seed, (name, flags) in itertools.product(range(10), FLAGS.items()):
        yield Job("variants", f"{name}-{seed}", f"{flags} --seed {seed} {EVALUATED}")


def rewards():
    """A reward a turn, and other advantages."""
    for seed in range(5):
        for name, flags in FLAGS.items():
            delta = f"{flags} --reward delta --seed {seed} {EVALUATED}"
            yield Job("rewards", f"{name}-delta-{seed}", delta)
        for kind in ("dr-grpo", "rloo"):
            advantage = f"--algo grpo --advantage {kind} --seed {seed} {EVALUATED}"
            yield Job("rewards", f"grpo-direct-{kind}-{seed}", advantage)


def ranks():
    """Adapters: of several ranks, and of rank 8 with the other variants."""
    for seed, rank in itertools.product(range(3), (1, 4, 8, 16)):
        flags = f"--algo grpo --lora-rank {rank} --seed {seed} {EVALUATED}"
        yield Job("ranks", f"grpo-direct-rank{rank}-{seed}", flags)
    for seed, name in itertools.product(range(3), ("grpo-think", "ppo-think", "ppo-direct")):
        flags = f"{FLAGS[name]} --lora-rank 8 --seed {seed} {EVALUATED}"
        yield Job("ranks", f"{name}-rank8-{seed}", flags)


def users():
    """Challenging users, and a scorer that can be hacked."""
    for seed in range(3):
        flags = f"--algo grpo --think --difficulty challenging --seed {seed} {EVALUATED}"
        yield Job("challenging", f"grpo-think-challenging-{seed}", flags)
    for seed in range(3):
        flags = f"--algo grpo --simulator toy-weak --watch toy --seed {seed}"
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


def machines():
    """The same runs with two threads, and without the processor's vector instructions."""
    for name, variant in FLAGS.items():
        flags = f"{variant} --seed 0 {EVALUATED}"
        yield Job("machine", f"{name}-two-threads", flags, threads=2)
        plain = {"ATEN_CPU_CAPABILITY": "default"}
        yield Job("machine", f"{name}-plain-kernels", flags, environment=plain)


# -------------------------------------------------------------------------------------- the results


class Results:
    """docs/reference/runs.jsonl: a line for each job that was made."""

    def __init__(self, path, commit=False):
        self.path, self.commit = Path(path), commit

    def read(self):
        """{name: line}."""
        if not self.path.is_file():
            return {}
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return {line["name"]: line for line in map(json.loads, lines)}

    def add(self, line):
        """Append a line, whole, whoever else does so at the time; commit it, if that is wanted."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            file.flush()
            if self.commit:
                self.commit_line(line["name"])

    def commit_line(self, name):
        """Commit the line together with the tables that follow from it: a test compares them. A
        document in which somebody is writing is left out; its table comes with their commit."""
        root = self.path.resolve().parents[2]  # the checkout of these results, not always this one
        status = ["git", "status", "--porcelain", "--", "README.md", "docs"]
        lines = subprocess.run(status, cwd=root, capture_output=True, text=True).stdout.splitlines()
        being_written = {line[3:] for line in lines}
        subprocess.run(
            [sys.executable, "tests/tables.py", "--write"], cwd=root, capture_output=True
        )
        paths = [path.relative_to(root) for path in documents(root)]
        paths = [str(path) for path in paths if str(path) not in being_written]
        paths.append(str(self.path.resolve().parent.relative_to(root)))
        subprocess.run(["git", "add", *paths], cwd=root)
        subprocess.run(["git", "commit", "-q", "-m", f"Measured: {name}", "--", *paths], cwd=root)


def machine():
    """What the numbers were measured on."""
    import torch

    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", info.read_text()) if info.is_file() else None
    return {
        "cpu": model.group(1) if model else platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def short(value):
    """Numbers with five digits: enough for every table, and small."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: short(v) for key, v in value.items()}
    return [short(v) for v in value] if isinstance(value, list) else value


def line_of_run(job, place):
    """The line of a run that is over, from its directory."""
    rows = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((place / "summary.json").read_text())
    return short(
        {
            "name": job.name,
            "part": job.part,
            "flags": job.flags,
            "lab": job.lab,
            "threads": job.threads,
            "environment": job.environment,
            "machine": machine(),
            **{key: summary[key] for key in ("evaluations", "seconds", "peak_rss_mb", "warnings")},
            "metrics": {
                key: [row[key] for row in rows]
                for key in rows[0]
                if rows[0][key] is not None or rows[-1][key] is not None
            },
        }
    )


# -------------------------------------------------------------------------------------- making them


def make(job, results):
    """Make a job, if its line is not there."""
    there = results.read()
    for name in job.needs:  # on another machine the line is there, and the run is not
        if not (RUNS / name / "summary.json").is_file():
            run(next(j for j in jobs() if j.name == name))
    if job.name in there:
        return
    if job.flags:
        place = run(job)
        if place:
            results.add(line_of_run(job, place))
    else:
        file = RUNS / f"{job.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        places = {"json": file, **{name: RUNS / name for name in job.needs}}
        command = re.sub(r"\{([\w-]+)\}", lambda match: str(places[match[1]]), job.command)
        output = call(job, shlex.split(command), ROOT)
        if output is not None:
            result = json.loads(file.read_text()) if "{json}" in job.command else None
            results.add(
                short(
                    {
                        "name": job.name,
                        "part": job.part,
                        "command": job.command,
                        "machine": machine(),
                        "result": result,
                        "output": output,
                    }
                )
            )


def run(job):
    """The run of a job; one that was stopped goes on. Returns its directory, None if it fails."""
    place, home = RUNS / job.name, ROOT
    if job.lab:
        lab = labs.load_labs()[job.lab]
        home = labs.copy_of(labs.scripts_of(lab, "broken"))
        if not lab.get("patch"):  # the mistake is a flag
            job.flags += f" {lab['arms']['broken']}"
    if (place / "summary.json").is_file():
        return place
    flags = (
        ["--resume", place]
        if (place / "config.json").is_file()
        else [*job.flags.split(), "--out", place]
    )
    output = call(job, ["rlver.py", *map(str, flags)], home)
    return None if output is None else place


def call(job, command, home):
    """Run a script of the project, or a module of it with `-m`, with the job's threads. Returns
    what it printed, or None where it did not end well."""
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


def seeds_of(there, name):
    """The lines NAME-0, NAME-1, ... that are there, in their order."""
    lines = [line for key, line in there.items() if re.fullmatch(re.escape(name) + r"-\d+", key)]
    return sorted(lines, key=lambda line: int(line["name"].rsplit("-", 1)[1]))


def after(line, key="score", index=-1):
    return line["evaluations"][index][key]


def interval(values, digits=1):
    """ "mean ± half of the 95 % interval of the mean over seeds"."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}" if values else "-"
    half = T_95[len(values)] * np.std(values, ddof=1) / len(values) ** 0.5
    return f"{np.mean(values):.{digits}f} ± {half:.{digits}f}"


def points_of(line):
    """[(step, held-out score)] of a run's evaluations."""
    return [(e["step"], e["score"]) for e in line["evaluations"]]


def dialogues_until(points, goal, batch=64):
    """Training dialogues until the held-out score first passes `goal`, on straight lines between
    the evaluations `points`; None if it never does."""
    for (a, low), (b, high) in itertools.pairwise(points):
        if low < goal <= high:
            return batch * (a + (b - a) * (goal - low) / (high - low))
    return None


def markdown(columns, rows):
    return "\n".join(
        ["| " + " | ".join(map(str, row)) + " |" for row in [columns]]
        + ["|" + "---|" * len(columns)]
        + ["| " + " | ".join(map(str, row)) + " |" for row in rows]
    )


def table_variants(there):
    """The four variants: before and after."""
    rows = []
    for name, words in NAMES.items():
        lines = seeds_of(there, name)
        if not lines:
            return ""
        finals = [after(line) for line in lines]
        rows.append(
            [
                f"`{words}`",
                interval([after(line, index=0) for line in lines]),
                interval(finals),
                f"{min(finals):.0f} to {max(finals):.0f}",
                f"{np.mean([after(line, 'failure') for line in lines]):.1f} %",
                f"{np.mean([after(line, 'malformed') for line in lines]):.1f} %",
                len(lines),
            ]
        )
    return markdown(
        ["run", "before", "after", "lowest and highest", "failure", "malformed", "seeds"], rows
    )


def table_rewards(there, goal=60, early=10):
    """Terminal against delta, and the three advantages: five seeds each."""
    rows = []
    for name, words in NAMES.items():
        for kind in ("", "-delta", "-dr-grpo", "-rloo"):
            lines = seeds_of(there, name + kind)[:5]
            if not lines:
                continue
            until = [dialogues_until(points_of(line), goal) for line in lines]
            reached = [u for u in until if u is not None]
            at = [dict(points_of(line))[early] for line in lines]
            rows.append(
                [
                    f"{words}, {kind[1:] or 'terminal'}",
                    interval(at),
                    interval([after(line) for line in lines]),
                    interval(reached, 0)
                    if len(reached) == len(until)
                    else f"{len(reached)} of {len(until)} seeds",
                    ", ".join("never" if u is None else f"{u:.0f}" for u in until),
                ]
            )
    return markdown(
        ["run", f"score after {early} steps", "at the end", f"dialogues until {goal}", "by seed"],
        rows,
    )


def table_ranks(there, early=10):
    """Adapters of several ranks beside the whole model: three seeds each."""
    rows = []
    for name, words in NAMES.items():
        for rank in (0, 1, 4, 8, 16):
            lines = seeds_of(there, f"{name}-rank{rank}" if rank else name)[:3]
            if not seeds_of(there, f"{name}-rank8") or not lines:
                continue
            at = [dict(points_of(line))[early] for line in lines]
            rows.append(
                [
                    f"`{words}`",
                    f"rank {rank}" if rank else "the whole model",
                    interval(at),
                    interval([after(line) for line in lines]),
                ]
            )
    return markdown(["run", "trained", f"score after {early} steps", "at the end"], rows)


def table_machine(there):
    """The same run, with other threads and other kernels."""
    rows = []
    for name, words in NAMES.items():
        usual = there.get(f"{name}-0")
        others = [there.get(f"{name}-{kind}") for kind in ("two-threads", "plain-kernels")]
        if not usual or not all(others):
            return ""
        row = [f"`{words}`", f"{after(usual):.1f}"]
        for other in others:
            a, b = (np.array(line["metrics"]["emotion"]) for line in (usual, other))
            alike = int(np.argmax(a != b)) if (a != b).any() else len(a)
            row += [f"{after(other):.1f}", alike, f"{np.abs(a - b).mean():.1f}"]
        rows.append(row)
    head = ["run, seed 0", "one thread"]
    for kind in ("two threads", "plain kernels"):
        head += [kind, "steps alike", "then apart"]
    return markdown(head, rows)


def table_mistakes(there, shown=4):
    """Which runs leave the reference band: healthy ones, and those with a lab's mistake."""
    flagged = leave_one_out(there)
    rows = [
        [
            "the forty runs, each against the nine others of its variant",
            "-",
            f"none, in {40 - sum(map(len, flagged.values()))} of 40 runs",
        ]
    ]
    for line in there.values():
        if line["part"] != "mistakes":
            continue
        variant = "-".join(line["name"].split("-")[:2])
        places = reference.outside(columns(line), reference.read_bands(variant))
        metrics = [f"`{place.metric}` in steps {place.first} to {place.last}" for place in places]
        words = ", ".join(metrics[:shown]) or "none"
        if len(metrics) > shown:
            words += f", and {len(metrics) - shown} more"
        rows.append([f"`{NAMES[variant]}`, lab {line['lab']}", f"{after(line):.1f}", words])
    return markdown(["run", "held-out score at the end", "metrics outside of the band"], rows)


TABLES = {
    "mistakes": table_mistakes,
    "variants": table_variants,
    "rewards": table_rewards,
    "ranks": table_ranks,
    "machine": table_machine,
}


# ---------------------------------------------------------------------------- bands, and the tables


def leave_one_out(there):
    """{variant: [names of the runs that are flagged, held against the nine others]}."""
    flagged = {}
    for variant in reference.VARIANTS:
        lines = seeds_of(there, variant)
        flagged[variant] = []
        for line in lines:
            others = [columns(x) for x in lines if x is not line]
            if places := reference.outside(columns(line), reference.bands_of(others)):
                flagged[variant].append((line["name"], places))
    return flagged


def columns(line):
    """A line's metrics as support/reference.py wants them."""
    metrics = line["metrics"]
    steps = range(len(metrics["step"]))
    return reference.columns_of(
        [{key: values[i] for key, values in metrics.items()} for i in steps]
    )


def write_reference(there):
    """docs/reference/*.csv, where all ten runs of a variant are there."""
    for variant in reference.VARIANTS:
        lines = seeds_of(there, variant)
        if len(lines) == 10:
            reference.write_bands(variant, reference.bands_of([columns(x) for x in lines]))


BLOCK = re.compile(r"(<!-- tables: (\w+) -->\n)(.*?)(<!-- tables: end -->)", re.S)


def documents(root=ROOT):
    return [root / "README.md", *sorted((root / "docs").rglob("*.md"))]


def written(text, there):
    """A document's text with its tables as they follow from the numbers."""

    def table(match):
        rows = TABLES[match[2]](there)
        return f"{match[1]}{rows}\n{match[4]}" if rows else match[0]

    return BLOCK.sub(table, text)


def write(there):
    write_reference(there)
    for path in documents():
        text = path.read_text(encoding="utf-8")
        if written(text, there) != text:
            path.write_text(written(text, there), encoding="utf-8")


def main(argv=None):
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
    args = parser.parse_args(argv)
    results = Results(args.results, args.commit)
    there = results.read()
    chosen = [job for job in jobs() if job.part in args.only]
    if args.list:
        for job in chosen:
            print(f"{'there' if job.name in there else '-----'}  {job.part:<12}{job.name}")
        return
    if not args.write:
        alone = [job for job in chosen if job.part == "machine" or not job.flags]
        with ThreadPoolExecutor(args.jobs) as pool:
            for job in chosen:
                if job not in alone:
                    pool.submit(make, job, results)
        for job in alone:
            make(job, results)
    write(results.read())
    for variant, flagged in leave_one_out(results.read()).items():
        print(
            f"{variant}: {len(flagged)} of {len(seeds_of(results.read(), variant))} runs are "
            "flagged by the others"
        )
        for name, places in flagged:
            print(f"    {name}: {reference.sentence(places)}")


if __name__ == "__main__":
    main()
