"""labs.py - thirteen mistakes, made on purpose: healthy runs beside broken ones, one command and
one picture each.

    python course/course.py lab                     what there is
    python course/course.py lab learning-rate       run it: two runs at a time, some minutes on
                                                    a laptop
    python course/course.py lab mixed-users --show  the mistake itself, as a diff

labs.toml says what a lab is: flags for all arms, flags for each, and patches, which are the mistake
as it looks in code. A run is `python rlver.py FLAGS` in a copy of the project's scripts in which
the patches of its arm are applied; the project is never edited. Everything is under runs/labs/. The
name of a run ends in a digest of its scripts and flags, and one that is finished is not made again:
a lab that was stopped goes on, and labs share their healthy runs. What a lab measures is in
tell_tales.py, how it is drawn in pictures.py.
"""

from patches import ROOT, kill, read_toml, replaced, terminable  # first: it finds the project
from support.errors import BadInput
from support.flags import Parser, natural, positive

import difflib
import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pictures import draw
from tell_tales import series

RUNS = ROOT / "runs" / "labs"
# Flags of every run. A lab looks at the training dialogues, step by step, and needs neither large
# evaluations nor checkpoints.
ALWAYS = "--eval-size 8 --save-every 1000 --keep 1"
AT_ONCE = 2  # runs at a time, of one thread each
LAST = 5  # steps: a table shows the mean of the last ones or, with `at = "start"`, the first ones
SEEDS = [0, 1, 2]  # of the runs that the texts in labs.toml describe, where a lab names no others


# ------------------------------------------------------------------------------------ what a lab is


def load_labs():
    """labs.toml as {name: lab}, in its order."""
    return {lab["name"]: lab for lab in read_toml("labs.toml")["lab"]}


def seeds_of(lab):
    """The seeds of the runs that a lab's text describes. One is enough for an exact effect."""
    return lab.get("seeds", SEEDS)


def kind(arm):
    """The kind of an arm: "healthy" of healthy-300, "broken" of broken-300."""
    return arm.split("-")[0]


def project_scripts():
    """The project's scripts as they are, {path: bytes}."""
    paths = [*ROOT.glob("*.py"), *ROOT.glob("support/*.*")]
    for folder in ("prompts", "toy_policy"):
        paths += [path for path in ROOT.glob(f"{folder}/**/*") if path.is_file()]
    return {str(path.relative_to(ROOT)): path.read_bytes() for path in sorted(paths)}


def scripts_of(lab, arm):
    """The project's scripts with the patches of an arm, {path: bytes}. Raises BadInput where a
    patch does not fit any more."""
    scripts = project_scripts()
    for number, patch in enumerate(lab.get("patch", []), 1):
        file = patch["file"]
        if patch["arm"] in (kind(arm), "both"):
            text = replaced(
                scripts[file].decode(),
                old=patch["old"],
                new=patch["new"],
                change=f"{lab['name']}: patch {number}",
                place=file,
                advice="the project was edited: put that file back, or mend the patch in "
                "course/labs.toml or course/settings.toml",
            )
            scripts[file] = text.encode()
    return scripts


def digest(*parts):
    """Ten characters that differ if any of the parts differs."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def copy_of(scripts):
    """The directory that holds a copy of these scripts, made if it is not there. It is written
    under another name and renamed, so that there is a whole copy or none."""
    place = RUNS / f"scripts-{digest(scripts)}"
    if not place.is_dir():
        scratch = RUNS / f".{place.name}-{os.getpid()}"
        for name, text in scripts.items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_bytes(text)
        scratch.rename(place)
    return place


def show(lab):
    """Print the patches of a lab as unified diffs: first what both arms get, if anything, then the
    mistake."""
    project = project_scripts()
    healthy = scripts_of(lab, "healthy")
    broken = scripts_of(lab, "broken")
    print(f"# {lab['name']}: {lab['title']}\n# all arms: {lab['flags']}")
    for arm, flags in lab["arms"].items():
        print(f"# {arm}: {flags or 'no further flags'}")
    print_diff(project, "project", healthy, "both arms")
    print_diff(healthy, "both arms", broken, "broken")


def print_diff(old_scripts, old_name, new_scripts, new_name):
    """Print what differs between two versions of the scripts, each {path: bytes}."""
    for file, old_text in old_scripts.items():
        new_text = new_scripts[file]
        if new_text == old_text:
            continue
        diff = difflib.unified_diff(
            old_text.decode().splitlines(keepends=True),
            new_text.decode().splitlines(keepends=True),
            f"{file} ({old_name})",
            f"{file} ({new_name})",
            n=2,
        )
        print("".join(diff), end="")


# ----------------------------------------------------------------------------------------- the runs


class Run:
    """One run of one arm: where it is, and what makes it. It need not be there yet.

    out: its directory; log: the file of what it prints; process: while it runs."""

    def __init__(self, lab, arm, seed, steps=None):
        self.lab = lab
        self.arm = arm
        self.seed = seed
        self.steps = steps  # None: as many as the lab's flags say
        self.scripts = scripts_of(lab, arm)
        flags = f"{ALWAYS} {lab['flags']} {lab['arms'][arm]} --seed {seed}"
        if steps:
            flags += f" --steps {steps}"
        self.flags = shlex.split(flags)
        name = digest(self.scripts, self.flags)
        # another lab may have made the same run; then it bears that lab's name
        made = [path for path in RUNS.glob(f"*-{name}") if path.is_dir()]
        self.out = made[0] if made else RUNS / f"{lab['name']}-{arm}-{seed}-{name}"
        self.log = self.out.with_name(self.out.name + ".log")
        self.process = None
        self.began = None

    def __str__(self):
        return f"{self.arm}, seed {self.seed}"

    def healthy_twin(self):
        """The run of the healthy arm with the same seed."""
        return Run(self.lab, "healthy", self.seed, self.steps)

    def copy_of_scripts(self):
        """The directory that holds the scripts of this run."""
        return copy_of(self.scripts)

    def done(self):
        """Whether the run is there, whole."""
        return (self.out / "summary.json").exists()

    def start(self):
        """Start the run, in a process group of its own, so that it can be ended together with all
        that it started."""
        shutil.rmtree(self.out, ignore_errors=True)  # what a stopped run left
        command = [
            sys.executable,
            str(self.copy_of_scripts() / "rlver.py"),
            *self.flags,
            "--out",
            str(self.out),
        ]
        environment = {
            "RLVER_CACHE": str(ROOT / ".cache"),
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                cwd=ROOT,
                start_new_session=True,
            )
        self.began = time.monotonic()


@terminable()
def make_runs(runs):
    """Make the runs that are not there, AT_ONCE at a time. Raises BadInput if one fails. However
    this ends, none is left running."""
    missing = [run for run in runs if not run.done()]
    if len(missing) < len(runs):
        print(f"{len(runs) - len(missing)} of {len(runs)} runs are there already")
    running = []
    try:
        for number, run in enumerate(missing, 1):
            while len(running) == AT_ONCE:
                remove_finished(running)
            running.append(run)
            run.start()
            print(f"[{number}/{len(missing)}] {run} -> {os.path.relpath(run.out)}", flush=True)
        while running:
            remove_finished(running)
    finally:
        for run in running:
            if run.process and run.process.poll() is None:
                kill(run.process)
                run.process.wait()


def remove_finished(running):
    """Wait a moment, and take the runs that are over out of the list `running`. Raises BadInput if
    one has failed."""
    time.sleep(0.2)
    for run in [run for run in running if run.process.poll() is not None]:
        running.remove(run)
        if run.process.returncode or not run.done():
            raise BadInput(
                f"{run.lab['name']}, {run}: the run failed: {last_line(run.log)} ({run.log})"
            )
        print(f"      {run}: done in {time.monotonic() - run.began:.0f} s", flush=True)


def last_line(log):
    """The last line of a log that is not empty. (The lines of a progress bar end in a carriage
    return.)"""
    lines = re.split(r"[\r\n]+", log.read_text(errors="replace"))
    lines = [line for line in lines if line.strip()]
    return lines[-1] if lines else "without a word"


# ------------------------------------------------------------------------------------ what one sees


def perform(lab, seeds, steps, picture):
    """Do one lab: make its runs, draw its picture, print its tables and its text. picture: the PNG
    file."""
    began = time.monotonic()
    print(f"\n=== {lab['name']}: {lab['title']}\n")
    with lock_of_runs():
        runs = {arm: [Run(lab, arm, seed, steps) for seed in seeds] for arm in lab["arms"]}
        # all arms of the first seed come first
        by_seed = zip(*runs.values())
        make_runs([run for runs_of_seed in by_seed for run in runs_of_seed])
    curves = {}
    for panel in lab["panels"]:
        what = panel["show"]
        curves[what] = {arm: [series(run, what) for run in runs[arm]] for arm in runs}
    draw(lab, curves, picture)
    for panel in lab["panels"]:
        print_table(panel, curves[panel["show"]], seeds)
    print(f"\n{warning_of_other_runs(lab, seeds, steps)}", end="")
    print_text(lab)
    print(f"\nthe picture is {picture} ({time.monotonic() - began:.0f} s)", flush=True)


def print_text(lab):
    """Print what is to be seen in a lab, why, where it happened to others, and its questions."""
    print(f"What to see\n{lab['see'].strip()}")
    print(f"\nWhy\n{lab['why'].strip()}")
    if "thread" in lab:
        print(f"\nWhere it happened\n{lab['thread'].strip()}")
    print("\nTo think about")
    for question in lab["questions"]:
        print(f"- {question}")


def print_table(panel, arms, seeds):
    """Print the means of a panel's series over their last steps (or first ones), one column for
    each seed. arms: {arm: [a series for each seed]}."""
    early = panel.get("at") == "start"
    which = "first" if early else "last"
    print(f"\n{panel['title']} ({panel['unit']}), mean of the {which} {LAST} steps")
    columns = [*[f"seed {seed}" for seed in seeds], "mean"]
    print(f"{'':<14}" + "".join(f"{column:>10}" for column in columns))
    for arm, lines in arms.items():
        means = [np.mean(line[:LAST] if early else line[-LAST:]) for line in lines]
        cells = [*means, np.mean(means)]
        print(f"  {arm:<12}" + "".join(f"{cell:>10.3g}" for cell in cells))


def warning_of_other_runs(lab, seeds, steps):
    """The warning above a lab's text if the runs made now have other seeds or another length than
    those that the text was written about, or "". seeds, steps: of the runs made now; steps None:
    as many as the lab's flags say."""
    words = lab["flags"].split()
    measured = int(words[words.index("--steps") + 1])
    if seeds == seeds_of(lab) and steps in (None, measured):
        return ""
    about = steps_and_seeds(measured, seeds_of(lab))
    return (
        f"(The text below was written about {about}. These runs have "
        f"{steps_and_seeds(steps or measured, seeds)}:\nits numbers are not theirs, and what it "
        "describes may not show in them.)\n\n"
    )


def steps_and_seeds(steps, seeds):
    """The length of runs, and their seeds, in words: "20 steps and seeds 0, 1, 2"."""
    step_word = "step" if steps == 1 else "steps"
    seed_word = "seeds" if len(seeds) > 1 else "seed"
    return f"{steps} {step_word} and {seed_word} {', '.join(map(str, seeds))}"


@contextmanager
def lock_of_runs():
    """Hold the lock of the directory of runs within this block: two labs at a time would make, and
    remove, the same healthy runs. Raises BadInput where another lab holds it."""
    RUNS.mkdir(parents=True, exist_ok=True)
    directory = os.open(RUNS, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(directory)
        raise BadInput(
            f"{RUNS}: another lab or prediction is at work here; wait for it, or stop it"
        ) from None
    try:
        yield
    finally:
        os.close(directory)


def main(argv):
    """`course.py lab`. Returns the exit code. Raises BadInput, which course.py prints."""
    labs = load_labs()
    args = make_parser().parse_args(argv)
    names = list(labs) if args.names == ["all"] else args.names
    for name in names:
        if name not in labs:
            raise BadInput(f"lab {name}: unknown; choose from {', '.join(labs)}, or all")
    if args.out and (len(names) != 1 or args.out.suffix != ".png"):
        raise BadInput(
            "--out is the picture of one lab: name one lab, and a file that ends in .png"
        )
    if not names:
        print_list(labs)
    try:
        for name in names:
            if args.show:
                show(labs[name])
            else:
                lab, picture = labs[name], args.out or RUNS / f"{name}.png"
                perform(lab, args.seeds or seeds_of(lab), args.steps, picture)
    except OSError as error:
        raise BadInput(str(error)) from None
    return 0


def print_list(labs):
    """Print a line for each lab."""
    for name, lab in labs.items():
        defect = f" (defect {', '.join(map(str, lab['defect']))})" if "defect" in lab else ""
        print(f"{name:<18} {lab['title']}{defect}")


def make_parser():
    """The command line of `course.py lab`."""
    parser = Parser(
        prog="course.py lab",
        description="Mistakes on purpose: healthy runs beside broken ones, and one picture.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="labs, or all (default: list them)"
    )
    parser.add_argument(
        "--seeds",
        type=seed_list,
        metavar="S,S",
        help="seeds of the runs (default: the lab's own, mostly 0,1,2)",
    )
    parser.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help="training steps of each run (default: the lab's own)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PICTURE",
        help="the picture of one lab (default: runs/labs/NAME.png)",
    )
    parser.add_argument(
        "--show", action="store_true", help="print the mistake as a diff, and run nothing"
    )
    return parser


def seed_list(text):
    """The seeds in a text like "0,1,2", each once."""
    return list(dict.fromkeys(natural(seed) for seed in text.split(",")))
