"""board.py - the open task: who needs the fewest training dialogues until the held-out score passes
75, with one change?

    python course/course.py board               the command of the runs
    python course/course.py board DIR...        measure entries, and print their lines of the table
    python course/course.py board --own         make and measure the project's own entries, and
                                                write the table into board.md

board.md has the rules. entries.py reads an entry and finds the step at which its logs pass the
mark. This file measures: it takes the weights of that step, puts them into the shipped policy, and
holds the dialogues with the project's own code. Each run is asked five times:

    before training   the shipped policy with the held-out users: the dialogues of the log?
    at the mark       the checkpoint with the held-out users: the dialogues of the log?
    one later         the next evaluation, likewise: it must pass the mark, too
    challenging       the mark's checkpoint with the challenging user
    other users       the mark's checkpoint with users of another profile seed

The project's own entries are lines of board.jsonl, with the final emotion of each user: an entry is
compared with those of its baseline, pair by pair.
"""

from patches import (
    HERE,
    ROOT,
    markdown,
    opened_for_writing,
    point_columns,
    with_tables,
    write_row,
)
from support.errors import BadInput
from support.files import append_line, read_jsonl, write_file
from support.flags import Parser
from support.settings import read_flags, resolve_settings
from support.stats import paired

import asyncio
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import toy
from entries import BASELINES, Rules, read_entry, spoken
from simulator import Profile, make_simulator

# What loads torch is imported in the functions that need it: `course.py list` needs none of it.

RULES = Rules()
LINES = HERE / "board.jsonl"  # the project's own entries, as they were measured
PAGE = HERE / "board.md"
RUNS = ROOT / "runs" / "board"
OTHER_USERS_SEED = 1  # of the toy's profiles; those of all runs have seed 0
# The second number of an agent's seed: rlver.py and evaluate.py use 0 (training), 1 (evaluation), 2
# and 3.
EVALUATION, BOARD = 1, 4


# ----------------------------------------------------------------------------- the project's own


@dataclass
class Recipe:
    """One of the project's own entries."""

    name: str  # as the table has it
    flags: str
    sentence: str

    @property
    def place(self):
        """Where its runs are made."""
        return RUNS / re.sub(r"\W+", "-", self.name)


RECIPES = [
    *[Recipe(name, f"--algo {name}", "Nothing: a baseline.") for name in BASELINES],
    Recipe(
        "grpo, delta",
        "--algo grpo --reward delta",
        "Each reply is paid at once, by the change of the emotion that it caused.",
    ),
    # Found in docs/rewarded.md: of all runs with the seeds 0 to 4 these had learned most after ten
    # steps.
    Recipe(
        "ppo --think, delta",
        "--algo ppo --think --reward delta",
        "Each reply is paid at once, by the change of the emotion that it caused.",
    ),
    # A guess that failed. A step of Adam is about as long with few dialogues as with many, so more
    # steps, each with half of the dialogues, should get further; but the gradient is noisier.
    Recipe(
        "grpo --think, small batches",
        "--algo grpo --think --batch-size 32",
        "A step has half of the dialogues, so there are twice as many steps of the same size.",
    ),
]


def command_of(flags, seed, out, rules):
    """The words of the board's command: a run of rlver.py with `flags`, for the directory `out`."""
    batch_size = resolve_settings(read_flags(flags.split())).batch_size
    every = rules.every // batch_size
    words = (
        f"rlver.py {flags} --steps {rules.length // batch_size} --eval-every {every} "
        f"--save-every {every} --keep 100 --eval-size {rules.users} --seed {seed} --out"
    )
    return [*words.split(), str(out)]


def print_command(rules):
    """Print the command of the board's runs."""
    print("The board's command, with each of its three seeds (course/board.md has the rules):\n")
    for seed in rules.seeds:
        print(
            "python " + shlex.join(command_of("--algo grpo --think", seed, f"anna/{seed}", rules))
        )
    print(
        f"\nThe other baselines leave out --think, or have --algo ppo. With --batch-size B, "
        f"--eval-every and\n--save-every are {rules.every} / B, and --steps is {rules.length} / B, "
        "or as many as you need."
    )


def make_table(rules):
    """Make and measure the project's own entries that board.jsonl lacks, one after the other, and
    write the table after each. A run that was stopped goes on. An entry that fails has a line on
    stderr, and the others are made all the same. Returns True if none has failed."""
    all_measured = True
    for recipe in RECIPES:
        if recipe.name in read_lines():
            continue
        try:
            append_line(LINES, line_of_recipe(recipe, rules))
            write_table(rules)
        except BadInput as error:
            print_problem(error)
            all_measured = False
    write_table(rules)
    return all_measured


def line_of_recipe(recipe, rules):
    """Make the runs of a Recipe that are not there, and measure them: `measure`."""
    for seed in rules.seeds:
        make_run(recipe, seed, rules)
    about = f'by = "the project"\nchange = "{recipe.sentence}"\n'
    write_file(recipe.place / "entry.toml", about)
    is_baseline = recipe.name in BASELINES
    entry = read_entry(recipe.place, rules, is_baseline)
    if not is_baseline:
        line_of_baseline(entry, read_lines())
    return measure(entry, recipe.name, rules)


def make_run(recipe, seed, rules):
    """Make a run of a Recipe, or go on with it, unless it is there. Raises BadInput."""
    out = recipe.place / str(seed)
    if (out / "summary.json").is_file():
        return
    if (out / "config.json").is_file():
        command = ["rlver.py", "--resume", str(out)]
    else:
        command = command_of(recipe.flags, seed, out, rules)
    print(shlex.join(["python", *command]), flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment)
    if done.returncode:
        raise BadInput(f"{out}: the run failed (exit code {done.returncode})")


# ---------------------------------------------------------------------------------- measuring


def measure(entry, name, rules):
    """The line of an Entry: a dict of its "name", "by", "sentence", "baseline", "flags"; the
    "dialogues" and "seconds" up to the mark, by seed; and "finals", {check: final emotions at the
    mark, [seeds][users]}. Raises BadInput if a log's evaluation is not what its checkpoint says."""
    held_out, others = users_of_board(rules)
    think = entry.runs[0].config["think"]
    finals = {"held-out": [], "challenging": [], "other": []}
    for run in entry.runs:
        seed = run.config["seed"]
        print(f"{run.place}: the mark is at step {run.mark_step}; holding dialogues", flush=True)
        hold_again(run, 0, shipped_policy(think), held_out, rules)
        later = policy_of_checkpoint(run, run.next_step)
        hold_again(run, run.next_step, later, held_out, rules)
        policy = policy_of_checkpoint(run, run.mark_step)
        finals["held-out"].append(hold_again(run, run.mark_step, policy, held_out, rules))
        for check, users, difficulty in (
            ("challenging", held_out, "challenging"),
            ("other", others, "vanilla"),
        ):
            dialogues = hold(policy, users, difficulty, [seed, BOARD], run.config)
            finals[check].append([episode.emotion for episode in dialogues])
    return {
        "name": name,
        "by": entry.by,
        "sentence": entry.sentence,
        "baseline": entry.baseline,
        "flags": entry.flags,
        "dialogues": [run.dialogues_to_mark() for run in entry.runs],
        "seconds": [round(run.seconds_to_mark(), 1) for run in entry.runs],
        "finals": finals,
    }


def users_of_board(rules):
    """(the held-out users, the users of another seed), as lists of Profile."""
    return tuple(
        [Profile(**row) for row in toy.profiles("heldout", rules.users, seed)]
        for seed in (0, OTHER_USERS_SEED)
    )


def hold_again(run, step, policy, users, rules):
    """Hold an evaluation of a Run again, with the same random numbers. Returns the final emotions
    by user. Raises BadInput if too many dialogues are others than those of the log."""
    seed = [run.config["seed"], EVALUATION, step]
    episodes = hold(policy, users, "vanilla", seed, run.config)
    logged = run.evaluations.get(step, {})
    different = 0
    for episode in episodes:
        dialogue = spoken(episode.turns), episode.emotion
        if dialogue != logged.get(episode.profile_id):
            different += 1
    if different > rules.most_different:
        whose = f"checkpoint-{step:06d}" if step else "the shipped policy"
        raise BadInput(
            f"{run.place}: {different} of {len(users)} dialogues of the evaluation at step {step} "
            f"are not what {whose} says (at most {rules.most_different} may differ)"
        )
    return [episode.emotion for episode in episodes]


def hold(policy, users, difficulty, seed, config):
    """A dialogue with each of the `users`, as in an evaluation of rlver.py. policy: (model, chat);
    seed: numbers, to which that of the dialogue is added. Returns the Episodes, in their order."""
    from engine import TorchEngine
    from policy import Agent
    from rlver import rollout

    model, chat = policy
    engine = TorchEngine(model, chat.stop_id, config["temperature"])

    def make_agent(number):
        return Agent(
            engine,
            chat,
            think=config["think"],
            max_tokens=config["max_tokens"],
            context=config["context"],
            seed=[*seed, number],
        )

    dialogues = rollout(
        make_simulator("toy", difficulty=difficulty),
        dict(enumerate(users)),
        1,
        make_agent,
        config["max_turns"],
        own_first_line=True,
    )
    episodes, _ = asyncio.run(dialogues)  # the toy's user never fails
    return episodes


def shipped_policy(think):
    """(model, ChatFormat) of the policy that all runs start from."""
    from support.chat_format import ChatFormat
    from support.loading import load_model, stop_ids

    place = toy.base_policy(think)
    model, tokenizer = load_model(place)
    return model, ChatFormat(tokenizer, "", think, None, stop_ids(place))


def policy_of_checkpoint(run, step):
    """The shipped policy with the weights of a checkpoint. Nothing but these numbers is read of it:
    a tokenizer of its own could put words into the policy's mouth. Raises BadInput."""
    from support.loading import in_one_line

    import torch
    from safetensors.torch import load_file

    path = run.place / f"checkpoint-{step:06d}" / "model.safetensors"
    model, chat = shipped_policy(run.config["think"])
    shipped = load_file(Path(toy.base_policy(run.config["think"])) / "model.safetensors")
    try:
        weights = load_file(path)
    except Exception as error:  # no file, or what safetensors raises for a damaged one
        raise BadInput(f"{path}: cannot be loaded ({in_one_line(error)})") from None
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    if shapes != {name: tensor.shape for name, tensor in shipped.items()}:
        raise BadInput(f"{path}: its tensors have not the shapes of the shipped policy's")
    if not all(torch.isfinite(tensor).all() for tensor in weights.values()):
        raise BadInput(f"{path}: some of its weights are not finite")
    model.load_state_dict(weights, strict=False)  # the output layer is the embedding
    return model, chat


# ---------------------------------------------------------------------------------- the table


def read_lines():
    """The lines of board.jsonl as {name: line}. Raises BadInput."""
    lines = {}
    if LINES.is_file():
        for number, line, problem in read_jsonl(LINES):
            if problem:
                raise BadInput(f"{LINES}, line {number}: {problem}; remove it, and run --own again")
            lines[line["name"]] = line
    return lines


def line_of_baseline(entry, lines):
    """The line of an Entry's baseline. Raises BadInput if there is none."""
    if entry.baseline not in lines:
        raise BadInput(
            f"{entry.place}: its baseline {entry.baseline} is not measured yet; run first: "
            "python course/course.py board --own"
        )
    return lines[entry.baseline]


def difference(line, baseline, check):
    """(mean, lower, upper) of the differences of a line to its baseline's line, paired by user: of
    each user the mean over the seeds. lower, upper: of the 95 % bootstrap interval over users."""
    before, after = (np.mean(side["finals"][check], axis=0) for side in (baseline, line))
    result = paired(before, after)
    return result["difference"], *result["interval"]


def why_refused(line, baseline, rules):
    """Why an entry is refused: with which users it may be worse than its baseline, in a sentence;
    "" if it is not."""
    for check, users in (("challenging", "the challenging user"), ("other", "other users")):
        mean, lower, _ = difference(line, baseline, check)
        if lower < rules.lowest:
            return (
                f"with {users} it differs from {line['baseline']} by {mean:+.1f}, and the lower "
                f"95 % bound, {lower:+.1f}, is below {rules.lowest:g}"
            )
    return ""


COLUMNS = [
    "entry",
    "by",
    "change",
    "dialogues until 75",
    "by seed",
    "seconds",
    "held out",
    "challenging",
    "other users",
]


def row_of(line, baseline, by=None):
    """A line as the cells of the table's row. baseline: the line of its baseline, or the same line;
    by: what to write in place of its "by"."""
    cells = [
        f"`{line['name']}`",
        by or line["by"],
        line["sentence"] + (f" `{line['flags']}`" if line["flags"] else ""),
        f"{np.mean(line['dialogues']):.0f}",
        ", ".join(map(str, line["dialogues"])),
        f"{np.mean(line['seconds']):.0f}",
    ]
    for check in ("held-out", "challenging", "other"):
        cell = f"{np.mean(line['finals'][check]):.1f}"
        if line is not baseline:
            cell += " ({:+.1f}, {:+.1f} to {:+.1f})".format(*difference(line, baseline, check))
        cells.append(cell)
    return cells


def rank_of(line):
    """What the table is sorted by: dialogues, then seconds."""
    return np.mean(line["dialogues"]), np.mean(line["seconds"])


def table_of(lines, rules):
    """The table of the project's own entries, {name: line}, as Markdown."""
    accepted, others = [], []
    for line in sorted(lines.values(), key=rank_of):
        baseline = lines[line["baseline"]]
        if why_refused(line, baseline, rules):
            others.append(row_of(line, baseline, by="the project; refused"))
        else:
            accepted.append(row_of(line, baseline))
    for recipe in RECIPES:
        if recipe.name not in lines:
            cells = [f"`{recipe.name}`", "the project", recipe.sentence, "not measured yet"]
            unknown = ["-"] * (len(COLUMNS) - len(cells))
            others.append(cells + unknown)
    return markdown(COLUMNS, [*accepted, *others])


def write_table(rules):
    """Write the table of the project's own entries into board.md."""
    text = PAGE.read_text(encoding="utf-8")
    table = table_of(read_lines(), rules)
    write_file(PAGE, with_tables(text, "board", lambda name: table))


# ---------------------------------------------------------------------------------- the command


def judge_entries(places, rules, csv_name=None):
    """Measure the entries in the directories `places`, and print the table of those that are
    accepted; the others have a line on stderr. The points of all are written to the CSV file
    `csv_name`. Returns True if all are accepted."""
    for place in places:
        if not place.is_dir():
            raise BadInput(f"board {place}: no such directory")
    own_lines = read_lines()
    lines = []
    with opened_for_writing("--csv", csv_name) as csv_file:
        write_row(csv_file, point_columns("rule"))
        for place in places:
            try:
                line = measure_or_refuse(place, own_lines, rules)
            except BadInput as error:
                print_problem(error)
                points, result = dict.fromkeys(POINTS, 0), str(error)
            else:
                lines.append(line)
                points, result = points_of(line, own_lines), line["sentence"]
            for rule, earned in points.items():
                write_row(csv_file, [place, rule, earned, POINTS[rule], ""])
            totals = sum(points.values()), sum(POINTS.values())
            write_row(csv_file, [place, "total", *totals, result])
    if lines:
        rows = [row_of(line, own_lines[line["baseline"]]) for line in sorted(lines, key=rank_of)]
        print("\n" + markdown(COLUMNS, rows))
    return len(lines) == len(places)


def measure_or_refuse(place, own_lines, rules):
    """The line of the entry in the directory `place`. own_lines: those of the project's entries.
    Raises BadInput if it breaks a rule, or is worse with other users."""
    entry = read_entry(place, rules)
    baseline = line_of_baseline(entry, own_lines)
    for line in own_lines.values():
        if entry.flags and (entry.baseline, entry.flags) == (line["baseline"], line["flags"]):
            raise BadInput(f"{place}: refused: its change is that of the project's {line['name']}")
    line = measure(entry, place.resolve().name, rules)
    reason = why_refused(line, baseline, rules)
    if reason:
        raise BadInput(f"{place}: refused: {reason}")
    return line


# The points of an accepted entry; board.md tells them.
POINTS = {"accepted": 4, "fewer than its baseline": 3, "fewer than the project's entries": 3}


def points_of(line, own_lines):
    """{rule: points} of an accepted entry."""
    dialogues = np.mean(line["dialogues"])
    own = {name: np.mean(other["dialogues"]) for name, other in own_lines.items()}
    fulfilled = {
        "accepted": True,
        "fewer than its baseline": dialogues < own[line["baseline"]],
        "fewer than the project's entries": dialogues < min(own.values()),
    }
    return {rule: POINTS[rule] if is_so else 0 for rule, is_so in fulfilled.items()}


def print_problem(error):
    """Print why an entry has no line in the table."""
    print(f"course.py board: {error}", file=sys.stderr, flush=True)


def main(argv, rules=RULES):
    """`course.py board`. Returns the exit code: 1 if an entry is not accepted. Raises BadInput,
    which course.py prints."""
    args = make_parser().parse_args(argv)
    if args.own and args.entries:
        raise BadInput("--own makes the project's own entries; leave out the directories")
    if args.csv and not args.entries:
        raise BadInput("--csv has the points of entries: name their directories")
    accepted = True
    try:
        if args.own:
            accepted = make_table(rules)
        elif args.entries:
            accepted = judge_entries(args.entries, rules, args.csv)
        else:
            print_command(rules)
    except OSError as error:
        raise BadInput(str(error)) from None
    return 0 if accepted else 1


def make_parser():
    """The command line of `course.py board`."""
    parser = Parser(
        prog="course.py board",
        description="The open task: fewest training dialogues until the held-out score passes 75, "
        "with one change. Without arguments it prints the command of the runs.",
    )
    parser.add_argument(
        "entries",
        nargs="*",
        metavar="DIR",
        type=Path,
        help="an entry: its three runs, entry.toml, and change.diff if a flag is not enough",
    )
    parser.add_argument(
        "--own",
        action="store_true",
        help="make the runs of the project's own entries (21 runs, one after the other), measure "
        "them, and write the table into course/board.md; stopped, it goes on",
    )
    parser.add_argument("--csv", metavar="FILE", help="write the points of the entries there too")
    return parser
