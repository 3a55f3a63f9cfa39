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
from support.results import read_dialogues
from support.rundir import read_jsonl
from support.settings import BadInput, Parser, natural, positive

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
    files = [
        *ROOT.glob("*.py"),
        *ROOT.glob("support/*.*"),
        *(
            p
            for folder in ("prompts", "toy_policy")
            for p in ROOT.glob(f"{folder}/**/*")
            if p.is_file()
        ),
    ]
    scripts = {str(p.relative_to(ROOT)): p.read_bytes() for p in sorted(files)}
    for n, patch in enumerate(lab.get("patch", []), 1):
        if patch["arm"] in (kind(arm), "both"):
            text = replaced(
                scripts[patch["file"]].decode(),
                patch["old"],
                patch["new"],
                f"lab {lab['name']}: patch {n}",
                patch["file"],
                "the project was edited: put that file back, or mend the patch in course/labs.toml",
            )
            scripts[patch["file"]] = text.encode()
    return scripts


def digest(*parts):
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
    print(
        "".join(f"# {arm}: {flags or 'no further flags'}\n" for arm, flags in lab["arms"].items()),
        end="",
    )
    for a, b in (("project", "both arms"), ("both arms", "broken")):
        for name in (n for n in versions[a] if versions[a][n] != versions[b][n]):
            before, after = (versions[v][name].decode().splitlines(keepends=True) for v in (a, b))
            print(
                "".join(difflib.unified_diff(before, after, f"{name} ({a})", f"{name} ({b})", n=2)),
                end="",
            )


# ----------------------------------------------------------------------------------------- the runs


class Run:
    """One run of one arm: where it is, and what makes it."""

    def __init__(self, lab, arm, seed, steps=None):
        self.lab, self.arm, self.seed, self.steps = lab, arm, seed, steps
        self.scripts = scripts_of(lab, arm)
        self.flags = shlex.split(
            f"{ALWAYS} {lab['flags']} {lab['arms'][arm]} --seed {seed}"
            + (f" --steps {steps}" if steps else "")
        )
        name = digest(self.scripts, self.flags)
        found = [p for p in RUNS.glob(f"*-{name}") if p.is_dir()]  # by whichever lab it was made
        self.out = found[0] if found else RUNS / f"{lab['name']}-{arm}-{seed}-{name}"
        self.log, self.process = self.out.with_name(self.out.name + ".log"), None

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
    waiting, running = [r for r in runs if not r.done()], []
    count = len(waiting)
    if count < len(runs):
        print(f"{len(runs) - count} of {len(runs)} runs are there already")
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(waiting.pop(0))
                running[-1].start()
                print(
                    f"[{count - len(waiting)}/{count}] {running[-1]} -> "
                    f"{os.path.relpath(running[-1].out)}",
                    flush=True,
                )
            time.sleep(0.2)
            for run in [r for r in running if r.process.poll() is not None]:
                running.remove(run)
                if run.process.returncode or not run.done():
                    lines = [
                        line
                        for line in re.split(r"[\r\n]+", run.log.read_text(errors="replace"))
                        if line.strip()
                    ]
                    raise BadInput(
                        f"lab {run.lab['name']}, {run}: the run failed: "
                        f"{(lines or ['without a word'])[-1]} ({run.log})"
                    )
                print(f"      {run}: done in {time.monotonic() - run.began:.0f} s", flush=True)
    finally:
        for run in running:
            if run.process and run.process.poll() is None:
                kill(run.process)
                run.process.wait()


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
    place = copy_of(healthy.scripts) / "simulator.py"
    spec = importlib.util.spec_from_file_location(
        f"healthy_simulator_{digest(healthy.scripts)}", place
    )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    simulator, people = (
        module.make_simulator("toy"),
        {row["id"]: Profile(**row) for row in toy.profiles("train")},
    )

    async def final(dialogue):
        emotions = await replay(dialogue, module.User(simulator, people[dialogue["profile_id"]]))
        return 0 if dialogue["ended"] == "malformed" or not emotions else emotions[-1]

    async def all_of_them():
        return [[await final(d) for d in dialogues] for dialogues in dialogues_of(run)]

    return asyncio.run(all_of_them())


def own_user(run):
    """Mean final emotion as the healthy arm's user judges the same replies."""
    return [np.mean(finals) for finals in judged(run)]


def reported_minus_own(run):
    return [
        np.mean([round(100 * d["reward"]) - e for d, e in zip(*pair)])
        for pair in zip(dialogues_of(run), judged(run))
    ]


def wrong_reward(run):
    """Dialogues, in percent, whose recorded reward is not the one that their own replies earn from
    their own user."""
    return [
        100 * np.mean([round(100 * d["reward"]) != e for d, e in zip(*pair)])
        for pair in zip(dialogues_of(run), judged(run))
    ]


def not_followed(run):
    """Replies, in percent, that are no sentences of the toy's world: its user cannot follow
    them."""
    said = lambda dialogues: [t["analysis"] for d in dialogues for t in d["turns"] if t["analysis"]]
    return [
        100 * np.mean(["I cannot follow that" in analysis for analysis in said(dialogues)])
        for dialogues in dialogues_of(run)
    ]


def thoughts_read(run):
    """Dialogues, in percent, in which the user is sent a thought: a reply that was sent with
    its tag."""
    told = lambda d: any(t["emotion"] is not None and "<think>" in t["reply"] for t in d["turns"])
    return [100 * np.mean([told(d) for d in dialogues]) for dialogues in dialogues_of(run)]


def baseline_shift(run):
    """How far the baseline that the arm uses, the mean over turns in the broken one, is above the
    mean over dialogues, in stds of the group; the mean over the groups of a step."""
    shifts, over_turns = [], run.arm.startswith("broken")
    for dialogues in dialogues_of(run):
        groups = {}
        for d in dialogues:
            groups.setdefault(d["group"], []).append((d["reward"], len(d["turns"])))
        pairs = [np.array(rows).T for rows in groups.values()]
        shifts.append(
            np.mean(
                [
                    (np.average(r, weights=n if over_turns else None) - r.mean()) / r.std(ddof=1)
                    for r, n in pairs
                    if r.std() > 0
                ]
                or [0]
            )
        )
    return shifts


def grad_norm_apart(run):
    """How far the gradient's norm is from that of the same seed's healthy run, as a share of it."""
    return abs(series(run, "grad_norm") / series(run.beside(), "grad_norm") - 1)


def same_dialogues(run):
    """Dialogues, in percent, that are word for word those of the same seed's healthy run."""
    pairs = zip(dialogues_of(run), dialogues_of(run.beside()))
    return [100 * np.mean([a["turns"] == b["turns"] for a, b in zip(*pair)]) for pair in pairs]


TELL_TALES = {
    f.__name__: f
    for f in (
        own_user,
        reported_minus_own,
        wrong_reward,
        not_followed,
        thoughts_read,
        baseline_shift,
        grad_norm_apart,
        same_dialogues,
    )
}


def series(run, what):
    """One of these of a run, else a column of its metrics.jsonl."""
    if what in TELL_TALES:
        return np.array(TELL_TALES[what](run), dtype=float)
    return np.array([row[what] for _, row, _ in read_jsonl(run.out / "metrics.jsonl")], dtype=float)


# ------------------------------------------------------------------------------------ what one sees


def draw(lab, found, path):
    """The picture of a lab. found: {panel: {arm: [a series for each seed]}}."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, axes = plt.subplots(
        1,
        len(found),
        figsize=(max(9, 3.6 * len(found)), 3.9),
        constrained_layout=True,
        squeeze=False,
    )
    for axis, panel in zip(axes[0], lab["panels"]):
        shades = {"healthy": ["tab:blue", "tab:cyan"], "broken": ["tab:red"], "no": ["dimgray"]}
        for arm, lines in found[panel["show"]].items():
            colour = shades[kind(arm)].pop(0)
            for line in lines:
                axis.plot(range(1, len(line) + 1), line, color=colour, lw=0.8, alpha=0.45)
            size = min(SMOOTH, len(lines[0]))
            mean = np.convolve(np.mean(lines, axis=0), np.ones(size) / size, "valid")
            axis.plot(
                np.arange(len(mean)) + (size + 1) / 2,
                mean,
                color=colour,
                lw=2.4,
                label=f"{arm}  {lab['arms'][arm]}".strip(),
            )
        axis.set(xlabel="training step", ylabel=panel["unit"])
        if panel.get("scale") == "log":
            axis.set_yscale("log", nonpositive="mask")
        axis.set_ylim(*panel.get("range", (None, None)))
        axis.locator_params(axis="x", integer=True)
        axis.set_title(panel["title"], fontsize=9.5)
        axis.grid(alpha=0.3)
    fig.suptitle(f"{lab['name']}: {lab['title']}", fontsize=12, fontweight="bold")
    fig.legend(
        *axes[0][0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(lab["arms"]),
        fontsize=9,
        frameon=False,
        title=f"thin: each seed; thick: their mean, over {SMOOTH} steps",
        title_fontsize=8,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=90, pil_kwargs={"optimize": True})
    plt.close(fig)


def elsewhere(lab, seeds, steps):
    """A warning in front of a lab's words where its runs are not those that were measured, or "".
    seeds, steps: of the runs made now; steps None: the lab's own."""
    words = lab["flags"].split()
    measured = int(words[words.index("--steps") + 1])
    if seeds == SEEDS and steps in (None, measured):
        return ""
    said = lambda steps, seeds: (
        f"{steps} step{'s' * (steps != 1)} and seed"
        f"{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    )
    return (
        f"(The text below was written about {said(measured, SEEDS)}. These runs have "
        f"{said(steps or measured, seeds)}:\nits numbers are not theirs, and what it describes "
        "may not show in them.)\n\n"
    )


def perform(lab, seeds, steps, picture):
    """One lab: its runs, its picture, its table, its words."""
    began = time.monotonic()
    print(f"\n=== {lab['name']}: {lab['title']}\n")
    RUNS.mkdir(parents=True, exist_ok=True)
    held = os.open(RUNS, os.O_RDONLY)
    try:
        # two labs would make, and remove, the same healthy runs
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise BadInput(f"{RUNS}: another lab is at work here; wait for it, or stop it") from None
    try:
        runs = {arm: [Run(lab, arm, seed, steps) for seed in seeds] for arm in lab["arms"]}
        make_runs([run for of_a_seed in zip(*runs.values()) for run in of_a_seed])
    finally:
        os.close(held)
    found = {
        panel["show"]: {arm: [series(run, panel["show"]) for run in runs[arm]] for arm in runs}
        for panel in lab["panels"]
    }
    draw(lab, found, picture)
    for panel in lab["panels"]:
        early = panel.get("at") == "start"
        print(
            f"\n{panel['title']} ({panel['unit']}), mean of the {'first' if early else 'last'} "
            f"{LAST} steps"
        )
        print(f"{'':<14}" + "".join(f"{f'seed {seed}':>10}" for seed in seeds) + f"{'mean':>10}")
        for arm, lines in found[panel["show"]].items():
            means = [np.mean(line[:LAST] if early else line[-LAST:]) for line in lines]
            print(f"  {arm:<12}" + "".join(f"{x:>10.3g}" for x in [*means, np.mean(means)]))
    print(
        f"\n{elsewhere(lab, seeds, steps)}What to see\n{lab['see'].strip()}\n\nWhy\n"
        f"{lab['why'].strip()}\n\nTo think about"
    )
    print("".join(f"- {question}\n" for question in lab["questions"]), end="")
    print(f"\nthe picture is {picture} ({time.monotonic() - began:.0f} s)", flush=True)


def main(argv):
    """`course.py lab`. Raises BadInput; course.py says it."""
    labs = load_labs()
    parser = Parser(
        prog="course.py lab",
        description="Mistakes on purpose: healthy runs beside broken ones, and one picture.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="labs, or all (default: list them)"
    )
    parser.add_argument(
        "--seeds",
        type=lambda text: list(dict.fromkeys(natural(s) for s in text.split(","))),
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
    args = parser.parse_args(argv)
    names = list(labs) if args.names == ["all"] else args.names
    try:
        for name in names:
            if name not in labs:
                raise BadInput(f"lab {name}: unknown; choose from {', '.join(labs)}, or all")
        if args.out and (len(names) != 1 or args.out.suffix != ".png"):
            raise BadInput(
                "--out is the picture of one lab: name one lab, and a file that ends in .png"
            )
        if not names:
            for name, lab in labs.items():
                print(
                    f"{name:<18} {lab['title']}"
                    + (f" (defect {', '.join(map(str, lab['defect']))})" if "defect" in lab else "")
                )
        for name in names:
            if args.show:
                show(labs[name])
            else:
                perform(labs[name], args.seeds, args.steps, args.out or RUNS / f"{name}.png")
    except OSError as error:
        raise BadInput(str(error)) from None
    return 0
