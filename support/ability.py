"""support/ability.py - can the model still count? Logs of the same benchmarks before and after
training, paired problem by problem (docs/ability.md has the recipe).
"""

from support.llm import digest
from support.rundir import read_jsonl
from support.settings import BadInput
from support.stats import sign_flips

import math
import re
from pathlib import Path

import numpy as np


def read_samples(place):
    """The scores in a per-sample log, or in all below a directory: {"task, metric": {problem:
    score}}. A problem goes by a hash of its own text; of several logs of a task the newest counts.
    lm-eval writes samples_*.jsonl (--log_samples), lighteval details_*.parquet (--save-details).
    Raises BadInput."""
    place, found = Path(place), {}
    files = [
        path
        for kind in ("samples_*.jsonl", "details_*.parquet")
        for path in (place.rglob(kind) if place.is_dir() else [place] * place.match(kind))
    ]
    for path in sorted(files, key=lambda path: path.name):
        task = re.sub(r"^(samples|details)_|_\d{4}-\d\d-\d\dT[\d.-]+$", "", path.stem)
        try:
            if path.suffix == ".parquet":
                from pyarrow import parquet  # lighteval's environment has it; ours need not

                samples = [
                    ("", digest(row["doc"]["query"]), row["metric"])
                    for row in parquet.read_table(path).to_pylist()
                ]
            else:
                samples = [
                    (
                        f" ({row['filter']})" * (row["filter"] != "none"),
                        row["doc_hash"],
                        {metric: row[metric] for metric in row["metrics"]},
                    )
                    for _, row, _ in read_jsonl(path)
                ]
        except (ImportError, KeyError, TypeError, ValueError) as error:
            raise BadInput(
                f"--ability {path}: no log of lm-eval or lighteval (for which pyarrow "
                f"is needed): {error!r:.90}"
            ) from None
        for kind, problem, scores in samples:
            for metric, score in scores.items():
                if isinstance(score, (bool, int, float)):  # not IFEval's list of instructions
                    found.setdefault(f"{task}{kind}, {metric}", {})[problem] = float(score)
    if not found:
        raise BadInput(
            f"--ability {place}: no per-sample log of lm-eval (samples_*.jsonl) or "
            "lighteval (details_*.parquet) is there"
        )
    return found


def paired(before, after, draws=10_000):
    """Two lists of scores of the same problems: {"n", "before", "after", "difference", "interval",
    "p", "test"}.

    Right or wrong: McNemar's exact test. Of the problems that changed sides, b to right and c to
    wrong, each went either way with probability 1/2 if training did nothing: p is a binomial tail,
    doubled. Shares (pass@1 over 16 samples): sign flips of the differences. The interval is the 2.5
    to 97.5 percentile of a bootstrap over problems."""
    x, y, rng = np.array(before), np.array(after), np.random.default_rng(0)
    d, n = y - x, len(x)
    if np.isin([x, y], [0, 1]).all():
        b, c = int((d > 0).sum()), int((d < 0).sum())
        tail = sum(math.comb(b + c, k) for k in range(min(b, c) + 1))
        p, test = min(1.0, 2 * tail / 2 ** (b + c)), f"McNemar, +{b} -{c}"
    else:
        p, test = sign_flips(d, rng, draws), "sign flips"
    boot = [d[rng.integers(n, size=n)].mean() for _ in range(draws)]
    return {
        "n": n,
        "before": float(x.mean()),
        "after": float(y.mean()),
        "p": p,
        "test": test,
        "difference": float(d.mean()),
        "interval": np.percentile(boot, [2.5, 97.5]).tolist(),
    }


def compare_ability(before, after):
    """The logs in two places, paired: {"task, metric": as `paired`, and "unpaired", the problems
    that only one side has}. Raises BadInput where they have nothing in common."""
    one, two = read_samples(before), read_samples(after)
    common = {name: sorted(set(one[name]) & set(two[name])) for name in sorted(one) if name in two}
    if not any(common.values()):
        raise BadInput(
            f"--ability: {before} ({', '.join(sorted(one))}) and {after} "
            f"({', '.join(sorted(two))}) have no problem in common"
        )
    return {
        name: {
            **paired([one[name][i] for i in ids], [two[name][i] for i in ids]),
            "unpaired": len(set(one[name]) ^ set(two[name])),
        }
        for name, ids in common.items()
        if ids
    }
