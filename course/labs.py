"""labs.py - nine mistakes, made on purpose: healthy runs beside broken ones, one command and one picture each.

    python course/course.py lab                     what there is
    python course/course.py lab learning-rate       run it: two runs at a time, minutes on a laptop
    python course/course.py lab mixed-users --show  the mistake itself, as a diff

labs.toml says what a lab is: flags for both arms, flags for each, and patches, which are the mistake as it looks in code. A run is
`python rlver.py FLAGS` in a copy of the project's scripts in which the patches of its arm are applied; the project is never edited.
Everything is under runs/labs/. The name of a run ends in a digest of its scripts and flags: one that is there is not made again, so
a lab that was stopped goes on, and labs share their healthy runs.
"""
import asyncio
import difflib
import functools
import hashlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import toy
from evaluate import read_dialogues, replay
from simulator import BadInput, Parser, Profile, number

RUNS = ROOT / "runs" / "labs"
ALWAYS = "--eval-size 8 --save-every 1000 --keep 1"     # a lab looks at the training users, step by step, and needs no checkpoints
AT_ONCE = 2                                             # runs at a time, of one thread each
LAST = 5                                                # steps; "at the end" is their mean
SMOOTH = 3                                              # steps; the thick lines of a picture are moving averages


# -------------------------------------------------------------------------------------------------- what a lab is

def load_labs():
    """labs.toml as {name: lab}, in its order."""
    with open(Path(__file__).with_name("labs.toml"), "rb") as file:
        return {lab["name"]: lab for lab in tomllib.load(file)["lab"]}


def scripts_of(lab, arm):
    """The project's scripts with the patches of an arm, as {path: bytes}. Raises BadInput where a patch does not fit any more."""
    files = [*ROOT.glob("*.py"), ROOT / "report_template.html", *(p for p in ROOT.glob("prompts/**/*") if p.is_file())]
    scripts = {str(p.relative_to(ROOT)): p.read_bytes() for p in sorted(files)}
    for n, patch in enumerate(lab.get("patch", []), 1):
        if patch["arm"] in (arm.split("-")[0], "both"):         # "broken-512" is a broken arm
            text = scripts[patch["file"]].decode()
            if text.count(patch["old"]) != 1:
                raise BadInput(f"lab {lab['name']}: patch {n}: its old lines occur {text.count(patch['old'])} times in {patch['file']}, "
                               "not once; that file was edited: put it back, or mend the patch in course/labs.toml")
            scripts[patch["file"]] = text.replace(patch["old"], patch["new"]).encode()
    return scripts


def digest(*parts):
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def copy_of(scripts):
    """The directory that holds these scripts, made if it is not there: written beside and renamed, never half of it."""
    place = RUNS / f"scripts-{digest(scripts)}"
    if not place.is_dir():
        scratch = RUNS / f".{place.name}-{os.getpid()}"
        for name, text in scripts.items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_bytes(text)
        scratch.rename(place)
    return place


def show(lab):
    """The patches of a lab as one unified diff: for each file first what both arms get, then the mistake."""
    plain, healthy, broken = scripts_of({}, ""), scripts_of(lab, "healthy"), scripts_of(lab, "broken")
    print(f"# {lab['name']}: {lab['title']}\n# both arms: {lab['flags']}")
    print("".join(f"# {arm}: {flags or '(no further flags)'}\n" for arm, flags in lab["arms"].items()), end="")
    for before, after, a, b in ((plain, healthy, "project", "both arms"), (healthy, broken, "healthy", "broken")):
        for name in before:
            lines = (s[name].decode(errors="replace").splitlines(keepends=True) for s in (before, after))
            print("".join(difflib.unified_diff(*lines, f"{name} ({a})", f"{name} ({b})", n=2)), end="")


# ------------------------------------------------------------------------------------------------------------ the runs

class Run:
    """One run of one arm: where it is, and what makes it."""

    def __init__(self, lab, arm, seed, steps=None):
        self.lab, self.arm, self.seed, self.scripts = lab, arm, seed, scripts_of(lab, arm)
        self.flags = shlex.split(f"{ALWAYS} {lab['flags']} {lab['arms'][arm]} --seed {seed}" + f" --steps {steps}" * (steps is not None))
        name = digest(self.scripts, self.flags)
        found = [p for p in RUNS.glob(f"*-{name}") if p.is_dir()]           # by whichever lab it was made
        self.out = found[0] if found else RUNS / f"{lab['name']}-{arm}-{seed}-{name}"
        self.log = self.out.with_name(self.out.name + ".log")
        self.told = f"{arm}, seed {seed}"

    def done(self):
        return (self.out / "summary.json").exists()

    def start(self):
        """As a process group of its own, so that nothing of it outlives a Ctrl-C."""
        shutil.rmtree(self.out, ignore_errors=True)             # what a stopped run left
        command = [sys.executable, str(copy_of(self.scripts) / "rlver.py"), *self.flags, "--out", str(self.out)]
        environment = {"RLVER_CACHE": str(ROOT / ".cache"), **os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                            env=environment, cwd=ROOT, start_new_session=True)
        self.began = time.monotonic()


def make_runs(runs):
    """Make those that are not there, AT_ONCE at a time. Raises BadInput if one fails; whatever happens, none is left running."""
    waiting, running, begun = [r for r in runs if not r.done()], [], 0
    count = len(waiting)
    if count < len(runs):
        print(f"{len(runs) - count} of {len(runs)} runs are there already")
    try:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                running.append(waiting.pop(0))
                running[-1].start()
                begun += 1
                print(f"[{begun}/{count}] {running[-1].told} -> {running[-1].out.relative_to(ROOT)}", flush=True)
            time.sleep(0.2)
            for run in [r for r in running if r.process.poll() is not None]:
                running.remove(run)
                if run.process.returncode or not run.done():
                    lines = [line for line in re.split(r"[\r\n]+", run.log.read_text(errors="replace")) if line.strip()]
                    raise BadInput(f"lab {run.lab['name']}, {run.told}: the run failed: {lines[-1] if lines else 'no word'} ({run.log})")
                print(f"      {run.told}: done in {time.monotonic() - run.began:.0f} s", flush=True)
    finally:
        for run in running:
            os.killpg(run.process.pid, signal.SIGKILL)
            run.process.wait()


# -------------------------------------------------------------------------------------------------------- the tell-tales

def by_step(run):
    """The training dialogues of a run, a list for each step."""
    steps = {}
    for dialogue in read_dialogues(run.out / "dialogues.jsonl"):
        if dialogue["split"] == "train":
            steps.setdefault(dialogue["step"], []).append(dialogue)
    return [steps[step] for step in sorted(steps)]


@functools.cache
def people():
    return {row["id"]: Profile(**row) for row in toy.profiles("train")}


@functools.cache
def judged(run):
    """Final emotions of the same dialogues, [step][dialogue], if each reply is put to its own user again: to that of the healthy arm."""
    healthy = Run(run.lab, "healthy", 0)
    place = copy_of(healthy.scripts) / "simulator.py"
    spec = importlib.util.spec_from_file_location(f"simulator_of_{place.parent.name.replace('-', '_')}", place)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    flags = healthy.flags[::-1]
    simulator = module.make_simulator(flags[flags.index("--simulator") - 1] if "--simulator" in flags else "toy")

    async def final(dialogue):
        emotions = await replay(dialogue, module.User(simulator, people()[dialogue["profile_id"]]))
        return 0 if dialogue["ended"] == "malformed" or not emotions else emotions[-1]

    async def all_of_them():
        return [[await final(d) for d in dialogues] for dialogues in by_step(run)]
    return asyncio.run(all_of_them())


def own_user(run):
    """Mean final emotion of the training dialogues as the healthy arm's user judges them."""
    return [np.mean(finals) for finals in judged(run)]


def reported_minus_own(run):
    return [100 * np.mean([d["reward"] for d in dialogues]) - np.mean(finals) for dialogues, finals in zip(by_step(run), judged(run))]


def wrong_reward(run):
    """Share of dialogues, in percent, whose recorded reward is not the one that its own replies earn from its own user."""
    return [100 * np.mean([abs(100 * d["reward"] - e) > 1e-6 for d, e in zip(dialogues, finals)])
            for dialogues, finals in zip(by_step(run), judged(run))]


def thoughts_read(run):
    """Share of replies, in percent, in which the user is sent a thought. (No sentence of the toy's world holds "wants"; each thought does.)"""
    sent = lambda dialogues: [t["reply"] for d in dialogues for t in d["turns"] if t["emotion"] is not None]
    return [100 * np.mean([bool(re.search(r"</?think>|\bwants\b", reply)) for reply in sent(dialogues)]) for dialogues in by_step(run)]


def groups_of(dialogues):
    """(rewards, turns) of each group whose rewards differ."""
    groups = {}
    for d in dialogues:
        groups.setdefault(d["group"], []).append((d["reward"], len(d["turns"])))
    return [np.array(rows).T for rows in groups.values() if len({reward for reward, _ in rows}) > 1]


def baseline_shift(run):
    """How far the mean over turns is above that over dialogues, in stds of the group; the mean over the groups of a step."""
    return [np.mean([(np.average(r, weights=n) - r.mean()) / r.std(ddof=1) for r, n in groups_of(dialogues)] or [0])
            for dialogues in by_step(run)]


TELL_TALES = {f.__name__: f for f in (own_user, reported_minus_own, wrong_reward, thoughts_read, baseline_shift)}


def series(run, what):
    """A tell-tale of a run, one number a step: a function of this file, else a column of metrics.jsonl."""
    if what in TELL_TALES:
        return np.array(TELL_TALES[what](run), dtype=float)
    rows = [json.loads(line) for line in (run.out / "metrics.jsonl").read_bytes().splitlines()]
    return np.array([row[what] for row in rows], dtype=float)


# ------------------------------------------------------------------------------------------------------ what one sees

COLOURS = {"healthy": ["tab:blue", "deepskyblue"], "broken": ["tab:red", "tab:orange"]}


def colours(arms):
    """Blue is healthy, red is broken, grey is neither."""
    left = {kind: list(shades) for kind, shades in COLOURS.items()}
    return {arm: left[arm.split("-")[0]].pop(0) if arm.split("-")[0] in left else "dimgray" for arm in arms}


def draw(lab, found, path):
    """One picture of a lab. found: {panel: {arm: [a series for each seed]}}."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, axes = plt.subplots(1, len(found), figsize=(4.6 * len(found), 4.1), constrained_layout=True, squeeze=False)
    for axis, panel in zip(axes[0], lab["panels"]):
        for arm, colour in colours(lab["arms"]).items():
            lines = found[panel["show"]][arm]
            for line in lines:
                axis.plot(range(1, len(line) + 1), line, color=colour, lw=0.7, alpha=0.45)
            mean = np.mean(lines, axis=0)
            size = min(SMOOTH, len(mean))
            mean = np.convolve(mean, np.ones(size) / size, "valid")
            axis.plot(np.arange(len(mean)) + (size + 1) / 2, mean, color=colour, lw=2.4, label=f"{arm}  {lab['arms'][arm]}".strip())
        axis.set(title=panel["title"], xlabel="training step", ylabel=panel["unit"], yscale=panel.get("scale", "linear"))
        axis.set_ylim(*panel.get("range", (None, None)))
        axis.title.set_fontsize(10)
        axis.grid(alpha=0.3)
    fig.suptitle(f"{lab['name']}: {lab['title']}", fontweight="bold")
    fig.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(lab["arms"]), fontsize=9, frameon=False,
               title=f"thin: one seed each; thick: their mean, over {SMOOTH} steps", title_fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=100)
    plt.close(fig)


def table(lab, found, seeds):
    width = max(map(len, lab["arms"])) + 2
    for panel in lab["panels"]:
        print(f"\n{panel['title']} ({panel['unit']}), mean of the last {LAST} steps")
        print(f"  {'':<{width}}" + "".join(f"{f'seed {s}':>10}" for s in seeds) + f"{'mean':>10}")
        for arm in lab["arms"]:
            ends = [np.mean(line[-LAST:]) for line in found[panel["show"]][arm]]
            print(f"  {arm:<{width}}" + "".join(f"{x:>10.3g}" for x in [*ends, np.mean(ends)]))


def perform(lab, seeds, steps, picture):
    """One lab from its runs to its picture."""
    began = time.monotonic()
    print(f"\n=== {lab['name']}: {lab['title']}\n")
    RUNS.mkdir(parents=True, exist_ok=True)
    runs = {arm: [Run(lab, arm, seed, steps) for seed in seeds] for arm in lab["arms"]}
    make_runs([run for trio in zip(*runs.values()) for run in trio])        # seed by seed, so that one can stop early
    found = {panel["show"]: {arm: [series(run, panel["show"]) for run in runs[arm]] for arm in runs} for panel in lab["panels"]}
    draw(lab, found, picture)
    table(lab, found, seeds)
    print(f"\nWhat to see\n{lab['see'].strip()}\n\nWhy\n{lab['why'].strip()}\n\nTo think about")
    print("".join(f"- {question}\n" for question in lab["questions"]), end="")
    print(f"\nthe picture is {picture} ({time.monotonic() - began:.0f} s)", flush=True)


def main(argv=None):
    labs = load_labs()
    parser = Parser(prog="course.py lab", description="Mistakes on purpose: healthy runs beside broken ones, and one picture.")
    whole = number(int, lambda x: x >= 1, "a whole number from 1")
    seeds = lambda text: [number(int, lambda x: x >= 0, "a list of seeds like 0,1,2")(s) for s in text.split(",")]
    parser.add_argument("names", nargs="*", metavar="NAME", help="labs, or all (default: list them)")
    parser.add_argument("--seeds", type=seeds, default=[0, 1, 2], metavar="S,S", help="(default: 0,1,2)")
    parser.add_argument("--steps", type=whole, help="training steps of each run (default: the lab's own)")
    parser.add_argument("--out", type=Path, metavar="PICTURE", help="of one lab (default: runs/labs/NAME.png)")
    parser.add_argument("--show", action="store_true", help="print the mistake as a diff, and run nothing")
    args = parser.parse_args(argv)
    try:
        names = list(labs) if args.names == ["all"] else args.names
        for name in names:
            if name not in labs:
                raise BadInput(f"lab {name}: unknown; choose from {', '.join(labs)}, or all")
        if args.out and len(names) != 1:
            raise BadInput("--out names the picture of one lab; name one")
        if not names:
            for name, lab in labs.items():
                print(f"{name:<18} {lab['title']}" + (f" (defect {', '.join(map(str, lab['defect']))})" if "defect" in lab else ""))
        for name in names:
            if args.show:
                show(labs[name])
            else:
                perform(labs[name], args.seeds, args.steps, args.out or RUNS / f"{name}.png")
    except BadInput as error:
        print(f"course.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on where it was", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
