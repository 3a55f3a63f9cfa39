"""labs.py - mistakes, made on purpose: healthy runs beside broken ones, one command and one picture
each.

    python course/course.py lab                     what there is
    python course/course.py lab learning-rate       run it: two runs at a time, some minutes on
                                                    a laptop
    python course/course.py lab mixed-users --show  the mistake itself, as a diff

labs.toml says what a lab is: flags for all arms, flags for each, and patches, which are the mistake
as it looks in code. A run is `python rlver.py FLAGS` in a copy of the project's scripts in which
the patches of its arm are applied; the project is never edited. Everything is under runs/labs/. The
name of a run ends in a digest of its scripts and flags, and one that is finished is not made again:
a lab that was stopped goes on, and labs share their healthy runs. How a lab is drawn is in
pictures.py.

Some numbers of a lab say what a dialogue was really worth. A mistake may be in the simulated user
itself, so the run's own emotions cannot answer that. The dialogue's replies are put again to the
*healthy user*: the user of the same profile from the scripts of the healthy arm, simulator.py
without the mistake. It hears the same replies in the same order and follows the rules. In the lab
weak-scorer this is the strict user, whose score was not trained on. (In labs.toml "own user" is
this one, too: the user that the dialogue was meant for.) Where a reader heard the dialogue, nothing
is heard twice: the log has its answer to every question, also to one that does not count, and the
answers are weighed again.
"""

from patches import ROOT, read_toml, replaced  # first: it finds the project
from players.reader import weigh
from support.errors import BadInput
from support.files import lock, read_jsonl
from support.results import recorded_dialogues

import asyncio
import difflib
import functools
import hashlib
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from string import Template
from unittest import mock

import numpy as np

from emotion import move_emotion
from people import Profile
from pictures import draw
from tools.replay import final_score, replay
from toy import world

RUNS = ROOT / "runs" / "labs"
# Flags of every run. A lab looks at the training dialogues, step by step, and needs neither large
# evaluations nor checkpoints.
ALWAYS = "--eval-size 8 --save-every 1000"
AT_ONCE = 2  # runs at a time, of one thread each
LAST = 5  # steps: a table shows the mean of the last ones or, with `at = "start"`, the first ones
SEEDS = [0, 1, 2]  # of the runs that the texts in labs.toml describe, where a lab names no others
CACHED_RUNS = 12  # more than the runs of one lab
# $NAMES in flags: the real models, where recipes/smollm2.sh looks for them, too
MODELS = {"READER": "Qwen/Qwen2.5-Coder-1.5B-Instruct", "RLVER_CACHE": ".cache"}


# ------------------------------------------------------------------------------------ what a lab is


def load_labs():
    """labs.toml as {name: lab}, in its order."""
    return {lab["name"]: lab for lab in read_toml("labs.toml")["lab"]}


def project_scripts():
    """The project's scripts as they are, {path: bytes}."""
    paths = [*ROOT.glob("*.py")]
    for folder in ("models", "players", "support", "tools"):
        paths += ROOT.glob(f"{folder}/*.*")
    for folder in ("prompts", "toy"):
        paths += [path for path in ROOT.glob(f"{folder}/**/*") if path.is_file()]
    return {str(path.relative_to(ROOT)): path.read_bytes() for path in sorted(paths)}


def scripts_of(lab, arm):
    """The project's scripts with the patches of an arm, {path: bytes}. Raises BadInput where a
    patch does not fit any more."""
    scripts = project_scripts()
    kind = arm.split("-")[0]  # "broken" of broken-300
    for number, patch in enumerate(lab.get("patch", []), 1):
        file = patch["file"]
        if patch["arm"] in (arm, kind, "both"):
            text = replaced(
                scripts[file].decode(),
                old=patch["old"],
                new=patch["new"],
                change=f"{lab['name']}: patch {number}",
                place=file,
                advice="the project was edited: put that file back, or mend the patch in "
                "course/labs.toml",
            )
            scripts[file] = text.encode()
    return scripts


def digest(*parts):
    """Ten characters that differ if any of the parts differs."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:10]


def copy_of(scripts):
    """The directory that holds a copy of these scripts, made if it is not there. It is written
    under another name and renamed, so that nobody finds half a copy."""
    place = RUNS / f"scripts-{digest(scripts)}"
    if not place.is_dir():
        scratch = RUNS / f".{place.name}-{os.getpid()}"
        for name, text in scripts.items():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            (scratch / name).write_bytes(text)
        scratch.rename(place)
    return place


def show(lab):
    """Print the patches of a lab as unified diffs: first what all arms get, if anything, then the
    mistake of each."""
    project = project_scripts()
    healthy = scripts_of(lab, "healthy")
    print(f"# {lab['name']}: {lab['title']}\n# all arms: {lab['flags']}")
    for arm, flags in lab["arms"].items():
        print(f"# {arm}: {flags or 'no further flags'}")
    print_diff(project, "project", healthy, "all arms")
    for arm in lab["arms"]:
        print_diff(healthy, "all arms", scripts_of(lab, arm), arm)


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
    """One run of one arm: its directory, its scripts and its flags. It need not be made yet."""

    def __init__(self, lab, arm, seed, steps=None):
        self.lab = lab
        self.arm = arm
        self.seed = seed
        self.steps = steps  # None: as many as the lab's flags say
        self.scripts = scripts_of(lab, arm)
        flags = f"{ALWAYS} {lab['flags']} {lab['arms'][arm]} --seed {seed}"
        if steps:
            flags += f" --steps {steps}"
        self.flags = shlex.split(Template(flags).substitute(MODELS | os.environ))
        name = digest(self.scripts, self.flags)
        # another lab may have made the same run; then it has that lab's name
        made = [path for path in RUNS.glob(f"*-{name}") if path.is_dir()]
        self.out = made[0] if made else RUNS / f"{lab['name']}-{arm}-{seed}-{name}"

    def healthy_twin(self):
        """The run of the healthy arm with the same seed."""
        return Run(self.lab, "healthy", self.seed, self.steps)

    def done(self):
        """Whether the run is finished."""
        return (self.out / "summary.json").exists()

    def make(self):
        """Make the run. Raises BadInput if it fails."""
        if self.out.is_dir():
            os.close(lock(self.out))  # raises BadInput if that run is still going
            shutil.rmtree(self.out)  # what a stopped run left
        began = time.monotonic()
        script = copy_of(self.scripts) / "rlver.py"
        log = self.out.with_name(self.out.name + ".log")
        settings = {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        with open(log, "wb") as output:
            done = subprocess.run(
                [sys.executable, script, *self.flags, "--out", self.out],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **settings},
                cwd=ROOT,
            )
        if done.returncode or not self.done():
            last_line = re.split(r"[\r\n]+", log.read_text(errors="replace").strip())[-1]
            raise BadInput(f"{self.out.name}: the run failed: {last_line} ({log})")
        print(f"{self.out.name}: {time.monotonic() - began:.0f} s", flush=True)


def make_runs(runs):
    """Make the runs that are not there, AT_ONCE at a time. Raises BadInput if one fails. After
    Ctrl-C, which also stops the runs, no further one is started."""
    missing = [run for run in runs if not run.done()]
    print(f"\n{len(runs)} runs, {len(missing)} of them to be made")
    for run in missing:
        copy_of(run.scripts)  # here, because two runs would write one copy at once
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        list(pool.map(Run.make, missing))
    finally:
        pool.shutdown(cancel_futures=True)


# ------------------------------------------------------------------------------------ what one sees


def main(name, seeds, steps, only_show):
    """`course.py lab`. seeds, steps: None for those of the lab; only_show: print the mistake and
    run nothing. Raises BadInput."""
    labs = load_labs()
    if name is None:
        for name, lab in labs.items():
            defect = f" (defect {', '.join(map(str, lab['defect']))})" if "defect" in lab else ""
            print(f"{name:<21} {lab['title']}{defect}")
    elif name not in labs:
        raise BadInput(f"lab {name}: unknown; choose from {', '.join(labs)}")
    elif only_show:
        show(labs[name])
    else:
        perform(labs[name], seeds, steps)


def perform(lab, seeds, steps):
    """Do one lab: ask for a prediction, make the runs, draw the picture, print tables and text."""
    ask(lab)
    RUNS.mkdir(parents=True, exist_ok=True)
    own_seeds = lab.get("seeds", SEEDS)
    runs = {arm: [Run(lab, arm, seed, steps) for seed in seeds or own_seeds] for arm in lab["arms"]}
    by_seed = zip(*runs.values())  # all arms of the first seed come first
    make_runs([run for runs_of_seed in by_seed for run in runs_of_seed])
    curves = {}
    for panel in lab["panels"]:
        what = panel["show"]
        curves[what] = {arm: [series(run, what) for run in runs[arm]] for arm in runs}
    picture = RUNS / f"{lab['name']}.png"
    draw(lab, curves, picture)
    for panel in lab["panels"]:
        print_table(panel, curves[panel["show"]], seeds or own_seeds)
    if steps or seeds not in (None, own_seeds):
        print("\n(The text below is about other seeds or steps: its numbers are not these.)")
    print_text(lab)
    print(f"\nthe picture is {picture}")


def ask(lab):
    """Ask what the lab will show, before it shows anything, because a student learns more from a
    result after a prediction. Waits for a line in a terminal."""
    print(f"\n=== {lab['name']}: {lab['title']}\n\nThe panels of the picture:")
    for panel in lab["panels"]:
        print(f"- {panel['title']} ({panel['unit']})")
    print("In which of them will the broken arm differ, which way, and by how much?")
    if "ask" in lab:
        print(lab["ask"])
    if sys.stdin.isatty():
        input("> ")


def print_text(lab):
    """Print what is to be seen in a lab, why, where it happened to others, and its questions."""
    print(f"\nWhat to see\n{lab['see'].strip()}")
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


def series(run, name):
    """One number for each step of a run: a tell-tale, or else a column of its metrics.jsonl."""
    if name in TELL_TALES:
        return np.array(TELL_TALES[name](run), dtype=float)
    rows = read_jsonl(run.out / "metrics.jsonl")
    return np.array([row[name] for _, row, _ in rows], dtype=float)


# -------------------------------------------------------------- the dialogues, and the healthy user


def dialogues_of(run):
    """The training dialogues of a run, a list for each step."""
    return dialogues_by_step(run.out / "dialogues.jsonl")


@functools.lru_cache(maxsize=CACHED_RUNS)
def dialogues_by_step(path):
    """The training dialogues in a log, a list for each step."""
    steps = {}
    for dialogue in recorded_dialogues(path):
        if dialogue["split"] == "train":
            steps.setdefault(dialogue["step"], []).append(dialogue)
    return [steps[step] for step in sorted(steps)]


def recorded_finals(run):
    """The final emotions that the run was rewarded for, [step][dialogue]."""
    return [[round(100 * d["reward"]) for d in dialogues] for dialogues in dialogues_of(run)]


@functools.lru_cache(maxsize=CACHED_RUNS)
def healthy_finals(run):
    """The final emotions of the healthy users when they hear the run's replies, [step][dialogue].
    A malformed dialogue counts as 0."""
    if "--reader" in run.flags:
        return [[weighed_again(d) for d in dialogues] for dialogues in dialogues_of(run)]
    simulator = load_players(copy_of(run.healthy_twin().scripts)).make_simulator("toy")
    profiles = {row["id"]: Profile(**row) for row in world.profiles("train")}

    async def final_emotion(dialogue):
        user = simulator.user(profiles[dialogue["profile_id"]], dialogue["start"], "")
        felt = await replay(dialogue["first_line"], dialogue["turns"], user)
        return final_score(dialogue, felt)

    async def all_finals():
        finals = []
        for dialogues in dialogues_of(run):
            finals.append([await final_emotion(dialogue) for dialogue in dialogues])
        return finals

    return asyncio.run(all_finals())


def weighed_again(dialogue):
    """The final emotion of a dialogue that a reader heard, as `Reader.hear` finds it with the
    project's own weights. It starts from the logged z: nothing is heard again."""
    emotion = dialogue["start"]
    for turn in dialogue["turns"]:
        if turn["analysis"] and 0 < emotion < 100:  # at 0 or 100 the user would have left
            _, change = weigh(json.loads(turn["analysis"])["z"])
            emotion = move_emotion(emotion, change)
    return 0 if dialogue["ended"] == "malformed" else emotion


def load_players(place):
    """players/users.py of the copy of the scripts in `place`, with all that it imports there. Our own
    modules stay what they are for everybody else."""
    own = {path.stem for path in place.glob("*.py")} | {"players"}
    with mock.patch.dict(sys.modules), mock.patch.object(sys, "path", [str(place), *sys.path]):
        for name in [name for name in sys.modules if name.partition(".")[0] in own]:
            del sys.modules[name]
        return importlib.import_module("players.users")


# ------------------------------------------------------- rewards, against those of the healthy user


def healthy_user(run):
    """The mean final emotion of the healthy users: what the run's replies were worth."""
    return [np.mean(finals) for finals in healthy_finals(run)]


def reported_minus_healthy(run):
    """The recorded final emotion minus that of the healthy user, the mean over the dialogues: how
    far the run's reward is from what its replies were worth; 0 for a healthy arm."""
    steps = zip(recorded_finals(run), healthy_finals(run))
    return [np.mean(np.subtract(recorded, healthy)) for recorded, healthy in steps]


def wrong_reward(run):
    """Dialogues, in percent, whose recorded reward is not the one that the healthy user gives."""
    steps = zip(recorded_finals(run), healthy_finals(run))
    return [100 * np.mean(np.not_equal(recorded, healthy)) for recorded, healthy in steps]


# -------------------------------------------------------------------------------------- the replies


def not_followed(run):
    """Replies, in percent, that are no sentences of the toy's world, so that its user cannot follow
    them."""
    shares = []
    for dialogues in dialogues_of(run):
        turns = [turn for dialogue in dialogues for turn in dialogue["turns"]]
        analyses = [turn["analysis"] for turn in turns if turn["analysis"]]
        shares.append(100 * np.mean(["I cannot follow that" in text for text in analyses]))
    return shares


def copies(run):
    """Dialogues, in percent, whose replies are word for word those of another one of their
    group."""
    shares = []
    for dialogues in dialogues_of(run):
        replies = [(d["group"], *[turn["reply"] for turn in d["turns"]]) for d in dialogues]
        shares.append(100 * np.mean([replies.count(these) > 1 for these in replies]))
    return shares


def same_beginning(run):
    """Replies, in percent, that begin with the two words with which most of their step begin."""
    shares = []
    for dialogues in dialogues_of(run):
        replies = [turn["reply"].lower() for dialogue in dialogues for turn in dialogue["turns"]]
        beginnings = Counter(tuple(reply.split()[:2]) for reply in replies)
        shares.append(100 * max(beginnings.values()) / len(replies))
    return shares


def praise_emotion(run):
    """The mean recorded final emotion of the people who want praise."""
    wanted = {row["id"] for row in world.profiles("train") if row["need"] == "praise"}
    return [
        100 * np.mean([d["reward"] for d in dialogues if d["profile_id"] in wanted])
        for dialogues in dialogues_of(run)
    ]


def foreign_tokens(run):
    """Tokens in the loss, in percent, that the policy did not sample."""
    return 100 * (1 - series(run, "tokens_sampled") / series(run, "tokens_trained"))


# ------------------------------------------------------- against the healthy run with the same seed


def grad_norm_apart(run):
    """How far the gradient's norm is from that of the healthy twin, as a share of it."""
    healthy_norm = series(run.healthy_twin(), "grad_norm")
    return abs(series(run, "grad_norm") / healthy_norm - 1)


def same_dialogues(run):
    """Dialogues, in percent, that are word for word those of the healthy twin."""
    shares = []
    for dialogues, healthy in zip(dialogues_of(run), dialogues_of(run.healthy_twin())):
        same = [ours["turns"] == theirs["turns"] for ours, theirs in zip(dialogues, healthy)]
        shares.append(100 * np.mean(same))
    return shares


# By their names in the panels of labs.toml.
TELL_TALES = {
    "healthy_user": healthy_user,
    "reported_minus_healthy": reported_minus_healthy,
    "wrong_reward": wrong_reward,
    "not_followed": not_followed,
    "copies": copies,
    "same_beginning": same_beginning,
    "praise_emotion": praise_emotion,
    "foreign_tokens": foreign_tokens,
    "grad_norm_apart": grad_norm_apart,
    "same_dialogues": same_dialogues,
}
