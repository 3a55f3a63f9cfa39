"""labs.py - nine mistakes, made on purpose: healthy runs beside broken ones, one command and one
picture each.

    python course/course.py lab                     what there is
    python course/course.py lab learning-rate       run it: two runs at a time, some minutes on
                                                    a laptop
    python course/course.py lab mixed-users --show  the mistake itself, as a diff

labs.toml says what a lab is: flags for all arms, flags for each, and patches, which are the mistake
as it looks in code. A run is `python rlver.py FLAGS` in a copy of the project's scripts in which
the patches of its arm are applied; the project is never edited. Everything is under runs/labs/. The
name of a run ends in a digest of its scripts and flags, and one that is finished is not made again:
a lab that was stopped goes on, and labs share their healthy runs.
"""

from patches import ROOT, kill, read_toml, replaced, terminable  # first: it finds the project
from support.errors import BadInput
from support.files import read_jsonl
from support.flags import Parser, natural, positive
from support.results import read_dialogues

import asyncio
import difflib
import fcntl
import functools
import hashlib
import importlib.util
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

import toy
from simulator import Profile, replay

RUNS = ROOT / "runs" / "labs"
# a lab looks at the training users, step by step, and at no checkpoint
ALWAYS = "--eval-size 8 --save-every 1000 --keep 1"
AT_ONCE = 2  # runs at a time, of one thread each
LAST = 5  # steps: a table says their mean, at the end or, `at = "start"`, the first
SEEDS = [0, 1, 2]  # of the runs that the words of labs.toml tell of
SMOOTH = 3  # steps: the thick lines of a picture are moving averages


# ------------------------------------------------------------------------------------ what a lab is


def load_labs():
    """labs.toml as {name: lab}, in its order."""
    return {lab["name"]: lab for lab in read_toml("labs.toml")["lab"]}


def kind(arm):
    """healthy-300 is a healthy arm, broken-300 a broken one."""
    return arm.split("-")[0]


def scripts_of(lab, arm):
    """The project's scripts with the patches of an arm, as {path: bytes}. Raises BadInput where a
    patch does not fit any more."""
    paths = [*ROOT.glob("*.py"), *ROOT.glob("support/*.*")]
    for folder in ("prompts", "toy_policy"):
        paths += [path for path in ROOT.glob(f"{folder}/**/*") if path.is_file()]
    scripts = {str(path.relative_to(ROOT)): path.read_bytes() for path in sorted(paths)}
    for number, patch in enumerate(lab.get("patch", []), 1):
        file = patch["file"]
        if patch["arm"] in (kind(arm), "both"):
            text = replaced(
                scripts[file].decode(),
                old=patch["old"],
                new=patch["new"],
                change=f"lab {lab['name']}: patch {number}",
                place=file,
                advice="the project was edited: put that file back, or mend the patch in "
                "course/labs.toml",
            )
            scripts[file] = text.encode()
    return scripts


def digest(*parts):
    """Ten signs that differ where any of the parts does."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def copy_of(scripts):
    """The directory that holds these scripts, made if it is not there: written beside and renamed,
    never half of it."""
    place = RUNS / f"scripts-{digest(scripts)}"
    if not place.is_dir():
        scratch = RUNS / f".{place.name}-{os.getpid()}"
        for name, text in scripts.items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_bytes(text)
        scratch.rename(place)
    return place


def show(lab):
    """The patches of a lab as unified diffs: first what both arms get, if anything, then the
    mistake."""
    versions = {
        "project": scripts_of({}, ""),
        "both arms": scripts_of(lab, "healthy"),
        "broken": scripts_of(lab, "broken"),
    }
    print(f"# {lab['name']}: {lab['title']}\n# all arms: {lab['flags']}")
    for arm, flags in lab["arms"].items():
        print(f"# {arm}: {flags or 'no further flags'}")
    for old, new in (("project", "both arms"), ("both arms", "broken")):
        for file, old_text in versions[old].items():
            new_text = versions[new][file]
            if new_text == old_text:
                continue
            diff = difflib.unified_diff(
                old_text.decode().splitlines(keepends=True),
                new_text.decode().splitlines(keepends=True),
                f"{file} ({old})",
                f"{file} ({new})",
                n=2,
            )
            print("".join(diff), end="")


# ----------------------------------------------------------------------------------------- the runs


class Run:
    """One run of one arm: where it is, and what makes it."""

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
        made = [path for path in RUNS.glob(f"*-{name}") if path.is_dir()]  # by whichever lab
        self.out = made[0] if made else RUNS / f"{lab['name']}-{arm}-{seed}-{name}"
        self.log = self.out.with_name(self.out.name + ".log")
        self.process = None
        self.began = None

    def __str__(self):
        return f"{self.arm}, seed {self.seed}"

    def beside(self):
        """The healthy run of the same seed."""
        return Run(self.lab, "healthy", self.seed, self.steps)

    def done(self):
        return (self.out / "summary.json").exists()

    def start(self):
        """As a process group of its own, so that it can be ended with all that it started."""
        shutil.rmtree(self.out, ignore_errors=True)  # what a stopped run left
        command = [
            sys.executable,
            str(copy_of(self.scripts) / "rlver.py"),
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
    """Make those that are not there, AT_ONCE at a time. Raises BadInput if one fails. Whatever
    happens, none is left running."""
    waiting = [run for run in runs if not run.done()]
    running = []
    count = len(waiting)
    if count < len(runs):
        print(f"{len(runs) - count} of {len(runs)} runs are there already")
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                run = waiting.pop(0)
                running.append(run)
                run.start()
                number = count - len(waiting)
                print(f"[{number}/{count}] {run} -> {os.path.relpath(run.out)}", flush=True)
            time.sleep(0.2)
            for run in [run for run in running if run.process.poll() is not None]:
                running.remove(run)
                if run.process.returncode or not run.done():
                    raise BadInput(
                        f"lab {run.lab['name']}, {run}: the run failed: {last_line(run.log)} "
                        f"({run.log})"
                    )
                print(f"      {run}: done in {time.monotonic() - run.began:.0f} s", flush=True)
    finally:
        for run in running:
            if run.process and run.process.poll() is None:
                kill(run.process)
                run.process.wait()


def last_line(log):
    """The last line of a log that is not empty; a progress bar's lines end in a carriage return."""
    lines = re.split(r"[\r\n]+", log.read_text(errors="replace"))
    lines = [line for line in lines if line.strip()]
    return lines[-1] if lines else "without a word"


# ------------------------------------------------------------- tell-tales: one number for each step


@functools.lru_cache(maxsize=12)  # the runs of one lab
def by_step(path):
    """The training dialogues of a log, a list for each step."""
    steps = {}
    for dialogue in read_dialogues(path):
        if dialogue["split"] == "train":
            steps.setdefault(dialogue["step"], []).append(dialogue)
    return [steps[step] for step in sorted(steps)]


def dialogues_of(run):
    return by_step(run.out / "dialogues.jsonl")


@functools.lru_cache(maxsize=12)
def judged(run):
    """Final emotions, [step][dialogue], if the run's replies are put again to their own users,
    those of the healthy arm's simulator."""
    healthy = run.beside()
    module = load_simulator(healthy.scripts)
    simulator = module.make_simulator("toy")
    people = {row["id"]: Profile(**row) for row in toy.profiles("train")}

    async def final_emotion(dialogue):
        user = module.User(simulator, people[dialogue["profile_id"]])
        emotions = await replay(dialogue, user)
        if dialogue["ended"] == "malformed" or not emotions:
            return 0
        return emotions[-1]

    async def all_finals():
        finals = []
        for dialogues in dialogues_of(run):
            finals.append([await final_emotion(dialogue) for dialogue in dialogues])
        return finals

    return asyncio.run(all_finals())


def load_simulator(scripts):
    """The module simulator.py of a copy of the project's scripts, beside our own."""
    name = f"healthy_simulator_{digest(scripts)}"
    spec = importlib.util.spec_from_file_location(name, copy_of(scripts) / "simulator.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def own_user(run):
    """Mean final emotion as the healthy arm's user judges the same replies."""
    return [np.mean(finals) for finals in judged(run)]


def recorded_finals(run):
    """Final emotions as the run recorded them in its rewards, [step][dialogue]."""
    return [[round(100 * d["reward"]) for d in dialogues] for dialogues in dialogues_of(run)]


def reported_minus_own(run):
    """How far the recorded final emotion is above the one that the healthy arm's user gives."""
    steps = zip(recorded_finals(run), judged(run))
    return [np.mean(np.subtract(recorded, finals)) for recorded, finals in steps]


def wrong_reward(run):
    """Dialogues, in percent, whose recorded reward is not the one that their own replies earn from
    their own user."""
    steps = zip(recorded_finals(run), judged(run))
    return [100 * np.mean(np.not_equal(recorded, finals)) for recorded, finals in steps]


def not_followed(run):
    """Replies, in percent, that are no sentences of the toy's world: its user cannot follow
    them."""
    shares = []
    for dialogues in dialogues_of(run):
        turns = [turn for dialogue in dialogues for turn in dialogue["turns"]]
        analyses = [turn["analysis"] for turn in turns if turn["analysis"]]
        shares.append(100 * np.mean(["I cannot follow that" in text for text in analyses]))
    return shares


def thoughts_read(run):
    """Dialogues, in percent, in which the user is sent a thought: a reply that was sent with
    its tag."""
    return [
        100 * np.mean([has_sent_thought(dialogue) for dialogue in dialogues])
        for dialogues in dialogues_of(run)
    ]


def has_sent_thought(dialogue):
    sent = [turn["reply"] for turn in dialogue["turns"] if turn["emotion"] is not None]
    return any("<think>" in reply for reply in sent)


def baseline_shift(run):
    """How far the baseline that the arm uses, the mean over turns in the broken one, is above the
    mean over dialogues, in stds of the group; the mean over the groups of a step."""
    over_turns = run.arm.startswith("broken")
    means = []
    for dialogues in dialogues_of(run):
        groups = {}
        for dialogue in dialogues:
            groups.setdefault(dialogue["group"], []).append(dialogue)
        shifts = []
        for group in groups.values():
            rewards = np.array([dialogue["reward"] for dialogue in group], dtype=float)
            turns = [len(dialogue["turns"]) for dialogue in group]
            if rewards.std() > 0:
                baseline = np.average(rewards, weights=turns if over_turns else None)
                shifts.append((baseline - rewards.mean()) / rewards.std(ddof=1))
        means.append(np.mean(shifts or [0]))
    return means


def grad_norm_apart(run):
    """How far the gradient's norm is from that of the same seed's healthy run, as a share of it."""
    healthy_norm = series(run.beside(), "grad_norm")
    return abs(series(run, "grad_norm") / healthy_norm - 1)


def same_dialogues(run):
    """Dialogues, in percent, that are word for word those of the same seed's healthy run."""
    shares = []
    for dialogues, healthy in zip(dialogues_of(run), dialogues_of(run.beside())):
        same = [ours["turns"] == theirs["turns"] for ours, theirs in zip(dialogues, healthy)]
        shares.append(100 * np.mean(same))
    return shares


# By the name that labs.toml shows them under.
TELL_TALES = {
    "own_user": own_user,
    "reported_minus_own": reported_minus_own,
    "wrong_reward": wrong_reward,
    "not_followed": not_followed,
    "thoughts_read": thoughts_read,
    "baseline_shift": baseline_shift,
    "grad_norm_apart": grad_norm_apart,
    "same_dialogues": same_dialogues,
}


def series(run, name):
    """A number for each step of a run: a tell-tale, or else a column of its metrics.jsonl."""
    if name in TELL_TALES:
        return np.array(TELL_TALES[name](run), dtype=float)
    rows = read_jsonl(run.out / "metrics.jsonl")
    return np.array([row[name] for _, row, _ in rows], dtype=float)


# ------------------------------------------------------------------------------------ what one sees


def draw(lab, curves, path):
    """The picture of a lab. curves: {what a panel shows: {arm: [a series for each seed]}}."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1,
        len(curves),
        figsize=(max(9, 3.6 * len(curves)), 3.9),
        constrained_layout=True,
        squeeze=False,
    )
    for axis, panel in zip(axes[0], lab["panels"]):
        draw_panel(axis, panel, curves[panel["show"]], lab["arms"])
    figure.suptitle(f"{lab['name']}: {lab['title']}", fontsize=12, fontweight="bold")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(lab["arms"]),
        fontsize=9,
        frameon=False,
        title=f"thin: each seed; thick: their mean, over {SMOOTH} steps",
        title_fontsize=8,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, pil_kwargs={"optimize": True})
    plt.close(figure)


def draw_panel(axis, panel, arms, flags):
    """One panel. arms: {arm: [a series for each seed]}; flags: {arm: its flags}."""
    shades = {"healthy": ["tab:blue", "tab:cyan"], "broken": ["tab:red"], "no": ["dimgray"]}
    for arm, lines in arms.items():
        colour = shades[kind(arm)].pop(0)
        for line in lines:
            axis.plot(range(1, len(line) + 1), line, color=colour, lw=0.8, alpha=0.45)
        size = min(SMOOTH, len(lines[0]))
        mean = np.convolve(np.mean(lines, axis=0), np.ones(size) / size, "valid")
        middles = np.arange(len(mean)) + (size + 1) / 2
        label = f"{arm}  {flags[arm]}".strip()
        axis.plot(middles, mean, color=colour, lw=2.4, label=label)
    axis.set(xlabel="training step", ylabel=panel["unit"])
    if panel.get("scale") == "log":
        axis.set_yscale("log", nonpositive="mask")
    axis.set_ylim(*panel.get("range", (None, None)))
    axis.locator_params(axis="x", integer=True)
    axis.set_title(panel["title"], fontsize=9.5)
    axis.grid(alpha=0.3)


def elsewhere(lab, seeds, steps):
    """A warning in front of a lab's words where its runs are not those that were measured, or "".
    seeds, steps: of the runs made now; steps None: the lab's own."""
    words = lab["flags"].split()
    measured = int(words[words.index("--steps") + 1])
    if seeds == SEEDS and steps in (None, measured):
        return ""
    return (
        f"(The text below was written about {steps_and_seeds(measured, SEEDS)}. These runs have "
        f"{steps_and_seeds(steps or measured, seeds)}:\nits numbers are not theirs, and what it "
        "describes may not show in them.)\n\n"
    )


def steps_and_seeds(steps, seeds):
    """How long runs are, and their seeds, in words."""
    step_word = "step" if steps == 1 else "steps"
    seed_word = "seeds" if len(seeds) > 1 else "seed"
    return f"{steps} {step_word} and {seed_word} {', '.join(map(str, seeds))}"


def perform(lab, seeds, steps, picture):
    """One lab: its runs, its picture, its table, its words."""
    began = time.monotonic()
    print(f"\n=== {lab['name']}: {lab['title']}\n")
    with only_lab():
        runs = {arm: [Run(lab, arm, seed, steps) for seed in seeds] for arm in lab["arms"]}
        by_seed = zip(*runs.values())
        make_runs([run for runs_of_seed in by_seed for run in runs_of_seed])
    curves = {}
    for panel in lab["panels"]:
        what = panel["show"]
        curves[what] = {arm: [series(run, what) for run in runs[arm]] for arm in runs}
    draw(lab, curves, picture)
    for panel in lab["panels"]:
        print_table(panel, curves[panel["show"]], seeds)
    print(f"\n{elsewhere(lab, seeds, steps)}What to see\n{lab['see'].strip()}")
    print(f"\nWhy\n{lab['why'].strip()}\n\nTo think about")
    for question in lab["questions"]:
        print(f"- {question}")
    print(f"\nthe picture is {picture} ({time.monotonic() - began:.0f} s)", flush=True)


@contextmanager
def only_lab():
    """Hold the lock of the directory of runs: two labs would make, and remove, the same healthy
    runs. Raises BadInput where another lab has it."""
    RUNS.mkdir(parents=True, exist_ok=True)
    directory = os.open(RUNS, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(directory)
        raise BadInput(f"{RUNS}: another lab is at work here; wait for it, or stop it") from None
    try:
        yield
    finally:
        os.close(directory)


def print_table(panel, arms, seeds):
    """The means of a panel's series over their last steps (or first ones), a column a seed. arms:
    {arm: [a series for each seed]}."""
    early = panel.get("at") == "start"
    which = "first" if early else "last"
    print(f"\n{panel['title']} ({panel['unit']}), mean of the {which} {LAST} steps")
    columns = [*[f"seed {seed}" for seed in seeds], "mean"]
    print(f"{'':<14}" + "".join(f"{column:>10}" for column in columns))
    for arm, lines in arms.items():
        means = [np.mean(line[:LAST] if early else line[-LAST:]) for line in lines]
        cells = [*means, np.mean(means)]
        print(f"  {arm:<12}" + "".join(f"{cell:>10.3g}" for cell in cells))


def main(argv):
    """`course.py lab`. Raises BadInput; course.py says it."""
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
                perform(labs[name], args.seeds, args.steps, args.out or RUNS / f"{name}.png")
    except OSError as error:
        raise BadInput(str(error)) from None
    return 0


def print_list(labs):
    """A line for each lab."""
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
        default=SEEDS,
        metavar="S,S",
        help="seeds of the runs (default: 0,1,2)",
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
    """The seeds of "0,1,2", each once."""
    return list(dict.fromkeys(natural(seed) for seed in text.split(",")))
