"""evaluate.py - the score of a policy, and the comparison of two scores (SAGE; RLVER 3).

    python evaluate.py                          the newest run, with users that it never saw
    python evaluate.py --policy POLICY          a run, a checkpoint, a model directory, toy,
                                                openai:MODEL@URL; --step 0: where a run started
    python evaluate.py --before-after           a run and where it started, and their comparison
    python evaluate.py --score FILE...          tables of result files; no model is needed
    python evaluate.py --compare BEFORE AFTER   paired on the users that both met

The Sentient Benchmark starts at emotion 40, has up to 10 replies, and stops at 100 or below 10.
Scores can be compared only within one simulator: with another model behind the same users, SAGE saw
the same dialogues shift by 20 points (SAGE appendix B).

Four commands, a section each, in this order: the benchmark (`run_benchmark`), --score, --compare,
--before-after; then main. players/policies.py loads the policy and its users, support/metrics.py
has the scores, support/results.py the lines of result files.
"""

from players.check import check
from players.policies import add_flags_of_talk, load_both_sides, newest_run
from support import files
from support.command_line import Parser, print_folded, refuse_nesting
from support.errors import MAX_LOST, BadInput, TooManyLost
from support.metrics import score_summary, scores_by, signs, signs_in_words
from support.report import print_table
from support.results import (
    describe,
    finished_users,
    line_of_result,
    parts_of,
    read_results,
    refuse_mixed,
    same_users,
    what_scores_are,
)
from support.rundir import settings_of_run

import argparse
import asyncio
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from tqdm import tqdm

from emotion import BENCHMARK
from rollout import SEEDS, rollout
from simulator import EMOTION_SCHEMA

# ------------------------------------------------------------------------------------ the benchmark


def run_benchmark(args):
    """Hold the dialogues that the result file lacks, and print its tables. Returns the ids of the
    users. Raises TooManyLost, in the end, if more than a fifth of the dialogues are missing."""
    refuse_nesting()
    policy, simulator, profiles, settings = load_both_sides(args, args.policy or newest_run())
    path = Path(args.out or default_path(policy))
    files.refuse_overwriting({"--json": args.json}, [path])
    path.parent.mkdir(parents=True, exist_ok=True)
    # a path that cannot be written must be refused before the first dialogue
    path.touch()
    lock = files.lock(path)  # so that no other process writes to it
    try:
        finished = finished_users(path, settings)
        drops = asyncio.run(hold_benchmark(policy, simulator, profiles, settings, path, finished))
    finally:
        os.close(lock)
    for row in drops:
        print(
            f"evaluate.py: {row['profile_id']} is missing: {row['reason']}; run the same command "
            "again to fill it in",
            file=sys.stderr,
        )
    if len(drops) == len(profiles):
        raise TooManyLost(f"{path}: all {len(profiles)} dialogues are lost")
    ids = {profile.id for profile in profiles}
    result = score(path, args.anyway, ids, len(drops))
    print_score(result)
    print(f"results: {path}")
    write_tables(args, result)
    # If more than a fifth is missing, the score cannot be trusted, and the exit code is an error.
    if len(drops) > MAX_LOST * len(ids):
        raise TooManyLost(f"{len(drops)} of {len(ids)} dialogues are lost, and not in the score")
    return ids


async def hold_benchmark(policy, simulator, profiles, settings, path, finished):
    """Hold a dialogue with each of `profiles` whose id is not in `finished`, all at once; each is
    appended to the file `path` when it ends. settings: all that decides the results; each line
    holds them. Returns the rows of `rollout` for the dialogues that were dropped."""
    # The number of a profile counts the finished ones too, so a continued evaluation draws the
    # random numbers that an uninterrupted one would have drawn.
    todo = {n: one for n, one in enumerate(profiles) if one.id not in finished}
    if todo:
        await check(simulator)
    with tqdm(total=len(todo), desc="benchmark", unit="dialogue") as bar:
        _, drops = await rollout(
            simulator,
            todo,
            1,
            lambda n: policy.make_agent(seed=[settings["seed"], SEEDS["benchmark"], n]),
            replace(BENCHMARK, start=settings["start"], max_turns=settings["max_turns"]),
            name="benchmark",
            bar=bar,
            on_end=lambda episode, user: files.append_line(
                path, line_of_result(episode, user, settings, EMOTION_SCHEMA)
            ),
        )
    return drops


def default_path(policy):
    """The result file without --out: in the directory of the policy's run (beside a checkpoint that
    is somewhere else), else in results/, never in a model directory. policy: a LoadedPolicy."""
    if policy.home:
        return policy.home / "benchmark.jsonl"
    return Path("results") / (re.sub(r"\W+", "-", policy.label).strip("-") + ".jsonl")


# ------------------------------------------------------------- --score: the tables of a result file


def run_scores(args):
    """Print the tables of the result files that --score names."""
    results = [score(path, args.anyway) for path in args.score]
    for result in results:
        print_score(result)
    # --json writes the tables of one file as an object, those of several as a list
    write_tables(args, results[0] if len(results) == 1 else results)


def score(path, anyway=False, ids=None, lost=0):
    """The tables of one result file, a dict. anyway: average different simulators, too. ids: of the
    users that count (default: all in the file); lost: how many of them have no dialogue there.
    Raises BadInput for a file without a usable line, or with several simulators in it."""
    rows = [row for row in read_results(path) if ids is None or row["profile_id"] in ids]
    if not anyway:
        refuse_mixed(rows, path)
    return tables_of(rows, path, lost)


def tables_of(rows, path, lost=0):
    """The tables of these dialogues (`read_results`) of the file `path`, of which `lost` others are
    missing."""
    made_by = [row["made_by"] for row in rows]
    turns = [turn for row in rows for turn in row["turns"]]
    changes = [turn["change"] for turn in turns if turn["change"] is not None]
    return {
        "file": str(path),
        "by_whom": of_each(map(describe, made_by)),
        "policy": of_each(settings["policy"] for settings in made_by),
        "simulator": of_each(settings["simulator"] for settings in made_by),
        "scale": of_each(map(what_scores_are, made_by)),
        "rule": "every",  # every reply is scored; in SAGE's own loop not all (tools/sage.py)
        **score_summary([row["final"] for row in rows]),
        "malformed": 100 * sum(row["ended"] == "malformed" for row in rows) / len(rows),
        "cut": 100 * sum(row["made_by"].get("cut", 0) for row in rows) / max(1, len(turns)),
        "turns": len(turns) / len(rows),
        "positive": 100 * np.mean(np.array(changes) > 0) if changes else None,
        "by": {name: scores_by(name, rows) for name in parts_of(rows)},
        "signs": signs([[turn["reply"] for turn in row["turns"]] for row in rows]),
        "lost": lost,
    }


def of_each(texts):
    """These texts, each once: a file may have several policies and, with --anyway, simulators."""
    return "; ".join(dict.fromkeys(texts))


def print_score(result):
    """Print the tables of one file. result: from `score`."""
    print(f"\n{result['file']}:")
    table = {"all": result}
    for part, values in result["by"].items():
        for value, numbers in values.items():
            table[f"{part}: {value}"] = numbers
    print_table(table)
    print(
        f"{result['turns']:.1f} replies a dialogue; {result['malformed']:.1f} % malformed; "
        f"{result['cut']:.1f} % of the replies cut by --max-tokens or empty"
    )
    if result["positive"] is not None:
        print(f"{result['positive']:.1f} % of the replies lift the emotion")
    print_folded(signs_in_words(result["signs"]))
    print_folded(f"score: {result['scale']}")
    print_folded(f"by: {result['by_whom']}")


# ---------------------------------------------------------------------- --compare: two result files


def run_comparison(args, before, after, ids=None):
    """Print how two result files differ. ids: see `compare`."""
    result = compare(before, after, ids)
    print_comparison(result)
    write_tables(args, result)


def compare(path_before, path_after, ids=None, draws=10_000):
    """Compare the results after with those before, paired on the users that both files hold, and
    of these on `ids`, if any are given; every difference is after minus before. Returns a dict.

    The interval is the 2.5 to 97.5 percentile of a bootstrap over users. p: sign flips of the
    users' differences, two-sided. Raises BadInput."""
    sides = [read_results(path) for path in (path_before, path_after)]
    result = paired(sides, "--compare", ids=ids, draws=draws)
    made_before, made_after = (rows[0]["made_by"] for rows in sides)
    return {
        "a": path_before,
        "b": path_after,
        "a_by": describe(made_before),
        "b_by": describe(made_after),
        "scale": what_scores_are(made_after),
        **result,
    }


def paired(sides, where, names=("before", "after"), ids=None, draws=10_000):
    """The numbers and the verdict of `compare`. sides: two lists of dialogues, in which a user with
    several counts with their mean; where: what is compared, for messages; names: of the sides, for
    the verdict. Raises BadInput."""
    refuse_mixed([row for rows in sides for row in rows], where)
    common = same_users(sides, where)
    ids = sorted(common if ids is None else ids.intersection(common))
    scores = [scores_by("profile_id", rows) for rows in sides]
    n = len(ids)
    if n < 2:
        raise BadInput(f"{where}: the files have fewer than two users in common")
    before, after = (np.array([of[user]["score"] for user in ids]) for of in scores)
    gains = after - before
    mean = gains.mean()
    rng = np.random.default_rng(0)
    samples = gains[rng.integers(n, size=(draws, n))]
    low, high = np.percentile(samples.mean(1), [2.5, 97.5]).tolist()
    p = sign_flips(gains, rng, draws)
    return {
        "score_a": before.mean(),
        "score_b": after.mean(),
        "difference": mean,
        "interval": [low, high],
        "p": p,
        "n": n,
        "sentence": verdict(mean, low, high, p, n, names),
    }


def sign_flips(differences, rng, draws):
    """The two-sided p of a mean of paired differences, by flipping their signs at random: how often
    the mean would be at least as far from 0 if neither side were better."""
    n = len(differences)
    signs = rng.integers(0, 2, size=(draws, n), dtype=np.int8) * 2 - 1  # -1 or 1
    means = signs @ differences / n
    # A mean that differs only by rounding counts as equal: hence the 1e-9.
    far = np.abs(means) >= abs(differences.mean()) - 1e-9
    # The observed differences count as one of the draws, so p is never 0.
    return (1 + far.sum()) / (1 + draws)


def verdict(difference, low, high, p, n, names):
    """What a difference says in words: its interval and its p must agree. (The interval is too
    narrow for few users; p cannot be below 0.05 with fewer than six.) names: of the two sides."""
    clear = [not low <= 0 <= high, p < 0.05]
    if not all(clear):
        return f"no {'clear difference' if any(clear) else 'difference can be told'} at n = {n}"
    if difference > 0:
        return f"{names[1]} is better by {difference:.1f}, {low:.1f} to {high:.1f}"
    return f"{names[0]} is better by {-difference:.1f}, {-high:.1f} to {-low:.1f}"


def print_comparison(result):
    """Print a comparison. result: from `compare`."""
    low, high = result["interval"]
    print_folded(
        f"before {result['score_a']:.1f}, after {result['score_b']:.1f}, after minus before "
        f"{result['difference']:+.1f} (95 % interval {low:+.1f} to {high:+.1f}, p = "
        f"{result['p']:.4f}, n = {result['n']}): {result['sentence']}."
    )
    print("The interval does not include the variation between training runs (seeds).")
    print_folded(f"score: {result['scale']}")
    print_folded(f"before: {result['a_by']}")
    print_folded(f"after: {result['b_by']}")


# -------------------------------------------------------------------- --before-after: both of a run


def run_before_after(args):
    """Measure a run where it started and where it ended, and compare the two."""
    name = args.policy or newest_run()
    if not settings_of_run(Path(name)):
        raise BadInput(f"--before-after: {name} is no run, and has no start to compare with")
    paths = [Path(name) / file for file in ("before.jsonl", "after.jsonl")]
    files.refuse_overwriting({"--json": args.json}, paths)
    for step, path in zip((0, None), paths):  # where it started, and its newest checkpoint
        ids = run_benchmark(
            argparse.Namespace(
                **vars(args) | {"policy": name, "step": step, "out": path, "json": None}
            )
        )
    print()
    run_comparison(args, *map(str, paths), ids=ids)


# --------------------------------------------------------------------------------------------- main


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    return make_parser().run(run, argv)


def run(args):
    """Do the one thing that the flags ask for. Returns the exit code; raises RunError."""
    refuse_useless_flags(args)
    files.refuse_overwriting({"--json": args.json}, args.score or args.compare or [])
    if args.before_after:
        run_before_after(args)
    elif args.compare:
        run_comparison(args, *args.compare)
    elif args.score:
        run_scores(args)
    else:
        run_benchmark(args)
    return 0


def refuse_useless_flags(args):
    """Refuse a flag that does nothing beside --before-after, --score or --compare: raise BadInput."""
    usual = vars(make_parser().parse_args([]))
    useful = {
        "before_after": {*usual} - {"step", "out"},
        "score": {"score", "anyway", "json"},
        "compare": {"compare", "json"},
    }
    given = {name for name, value in usual.items() if getattr(args, name) != value}
    for what in useful.keys() & given:
        for name in sorted(given - useful[what]):
            raise BadInput(f"--{name} has no effect with --{what}; leave it out".replace("_", "-"))


def write_tables(args, result):
    """Write `result` where --json says."""
    if args.json:
        files.write_json(args.json, result)


def make_parser():
    """The flags of evaluate.py."""
    parser = Parser(
        prog="evaluate.py",
        description="Measure a policy with the Sentient Benchmark (dialogues from emotion 40, 10 "
        "replies at most; the score is the mean final emotion), and compare results. Without flags "
        "it measures the newest run in runs/.",
    )
    add = parser.add_argument
    text = "a run, a checkpoint, a model directory or name, toy, or openai:MODEL@URL"
    add("--policy", help=f"{text} (default: the newest run)")
    add_flags_of_talk(parser)
    add("--out", metavar="FILE", help="result file (default: in the run's directory or results/)")
    one_of = parser.add_mutually_exclusive_group().add_argument
    one_of("--before-after", action="store_true", help="measure where a run started and ended")
    one_of("--score", nargs="+", metavar="FILE", help="only print the scores of result files")
    add("--anyway", action="store_true", help="average results of different simulators, too")
    one_of("--compare", nargs=2, metavar=("BEFORE", "AFTER"), help="compare on common users")
    add("--json", metavar="FILE", help="write the tables to FILE, too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
