"""Can the model still do what it could before training? Logs of the same benchmarks from before and
after training, as lm-eval or lighteval wrote them, are compared problem by problem
(docs/measuring.md has the recipe).

A small p says that training changed the score on these problems by more than chance does. A large p
does not say that nothing was lost: the interval says how much may have been lost. The number says
nothing about what the benchmark does not ask.

    python -m tools.ability results/logs/before results/logs/after
"""

from support.errors import BadInput
from support.files import digest, read_jsonl

import math
import re
from collections import defaultdict
from pathlib import Path

import numpy as np

from evaluate import sign_flips
from tools.correlations import interval
from tools.tables import show_table, tool_parser, write_outputs


def mcnemar(b, c):
    """The two-sided p of McNemar's exact test. b problems changed from wrong to right, c from right
    to wrong. If training did nothing, each of them changed either way with probability 1/2: p is a
    binomial tail, doubled."""
    tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1))
    return min(1.0, 2 * tail / 2 ** (b + c))


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("ability", __doc__)
    text = "a directory with per-sample logs of lm-eval or lighteval"
    parser.add_argument("before", help=text, metavar="BEFORE")
    parser.add_argument("after", help="the same, after training", metavar="AFTER")
    return parser.run(run, argv)


def run(args):
    """Compare the logs, and print a line for each benchmark and metric. Returns the exit code."""
    result = compare_ability(args.before, args.after)
    rows = {}
    for name, r in result.items():
        shares = [r["before"], r["after"], r["difference"], *r["interval"]]
        percent = [None if share is None else 100 * share for share in shares]
        rows[name] = [*percent, f"{r['p']:.4f}", r["test"], r["n"]]
    columns = ["before", "after", "change", "from", "to", "p", "test", "n"]
    show_table("scores of the n problems of both, in percent", columns, rows, "")
    write_outputs(args, "ability", result)
    return 0


def compare_ability(before, after):
    """Compare the logs in two places, problem by problem: {"task, metric": a dict, from
    `compare_scores`}. Raises BadInput where they have nothing in common."""
    scores_before, scores_after = read_samples(before), read_samples(after)
    result = {}
    for name in sorted(scores_before.keys() & scores_after.keys()):
        x, y = scores_before[name], scores_after[name]  # {problem: score}
        problems = sorted(x.keys() & y.keys())
        if problems:
            result[name] = compare_scores([x[p] for p in problems], [y[p] for p in problems])
    if not result:
        raise BadInput(f"{before} and {after}: no problem in common")
    return result


def read_samples(place):
    """The scores in all per-sample logs below a directory: {"task, metric": {problem: score}}. A
    hash of its text identifies a problem. If a task has several logs, the newest counts. lm-eval
    writes samples_*.jsonl (--log_samples), lighteval details_*.parquet (--save-details). Raises
    BadInput."""
    scores_of = defaultdict(dict)
    logs = [*Path(place).rglob("samples_*.jsonl"), *Path(place).rglob("details_*.parquet")]
    for path in sorted(logs, key=lambda path: path.name):
        # samples_TASK_2026-01-01T00-00-00.1
        task = re.sub(r"^(samples|details)_|_\d{4}-\d\d-\d\dT[\d.-]+$", "", path.stem)
        try:
            samples = read_log(path)
        except (ImportError, KeyError, TypeError, ValueError) as error:
            raise BadInput(
                f"{path}: no log of lm-eval or lighteval (which needs pyarrow): {error!r:.90}"
            ) from None
        for filter_name, problem, scores in samples:
            for metric, score in scores.items():
                if isinstance(score, (int, float)):  # not IFEval's list of instructions
                    name = f"{task} ({filter_name}), {metric}".replace(" (none)", "")
                    scores_of[name][problem] = float(score)
    return scores_of


def read_log(path):
    """The problems of a log: [(filter or "none", problem, {metric: score})]. lighteval has no
    filters."""
    if path.suffix == ".parquet":
        from pyarrow import parquet  # lighteval's environment has it; ours need not

        rows = parquet.read_table(path).to_pylist()
        return [("none", digest(row["doc"]["query"]), row["metric"]) for row in rows]
    return [
        (row["filter"], row["doc_hash"], {metric: row[metric] for metric in row["metrics"]})
        for _, row, _ in read_jsonl(path)
    ]


def compare_scores(before, after, draws=10_000):
    """Compare two lists of scores of the same problems: {"n", "before", "after", "p", "test",
    "difference", "interval"}. Scores that are all right or wrong, 1 or 0, are tested by `mcnemar`; shares (pass@1
    over 16 samples) by sign flips of the differences. The interval is a bootstrap over problems."""
    before, after = np.array(before), np.array(after)
    differences = after - before
    if np.isin([before, after], [0, 1]).all():
        to_right, to_wrong = int((differences > 0).sum()), int((differences < 0).sum())
        p, test = mcnemar(to_right, to_wrong), f"McNemar, +{to_right} -{to_wrong}"
    else:
        p, test = sign_flips(differences, np.random.default_rng(0), draws), "sign flips"
    difference, low, high, n = interval(differences, draws=draws)
    return {
        "n": n,
        "before": float(before.mean()),
        "after": float(after.mean()),
        "p": p,
        "test": test,
        "difference": difference,
        "interval": [low, high],
    }


if __name__ == "__main__":
    raise SystemExit(main())
