"""support/raters.py - people as judges: a blind sheet of pairs, and what comes back.

Which side is whose is drawn for each pair and stands in a key of its own, which raters do not get.
What they saw is the person and both dialogues, neither policy nor score.
"""

from support.rundir import read_json, write_json
from support.settings import BadInput
from support.stats import holm, interval, krippendorff, sign_flips

import csv
from pathlib import Path

import numpy as np

QUESTIONS = ("better overall", "understands more", "helps more")


def write_sheet(path, files, pairs, seed, limit=None):
    """Write the sheet `path` (CSV) and `path`.key.json. pairs: [(id, who the person is, the
    dialogue of the first of `files`, of the second)], in words. Returns the number of pairs."""
    rng, sides, rows = np.random.default_rng(seed), {}, []
    for number, k in enumerate(rng.permutation(len(pairs))[:limit], 1):
        swapped, (name, who, *said) = int(rng.integers(2)), pairs[k]
        sides[number] = {"id": name, "left": files[swapped]}
        rows.append([number, who, *said[:: -1 if swapped else 1], *[""] * len(QUESTIONS)])
    if not rows:
        raise BadInput(f"{' and '.join(files)} have no user in common")
    key = Path(f"{path}.key.json")
    if Path(path).exists() or key.exists():
        raise BadInput(f"--out {path}: it, or its key, is there already; choose another name")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(
            [
                [
                    f"pair (key: {key.name})",
                    "user",
                    "left",
                    "right",
                    *[f"{question}: L, R or =" for question in QUESTIONS],
                ],
                *rows,
            ]
        )
    write_json(key, {"files": files, "pairs": sides})
    print(f"{path}: {len(rows)} pairs; {key} is the key: keep it from the raters")
    return len(rows)


def read_sheets(paths):
    """([first file, second], {question: [share of pairs that the first wins (= counts half), low,
    high, n, alpha of the raters, p]}) of filled-in sheets. p: sign flips of the pairs, two-sided,
    corrected for the number of questions. Raises BadInput."""
    votes, keys = {question: {} for question in QUESTIONS}, []
    csv.field_size_limit(2**30)  # a dialogue is one cell
    for path in dict.fromkeys(paths):
        try:
            with open(path, newline="", encoding="utf-8-sig") as file:
                (head, *_), *rows = [*csv.reader(file)] or [[""]]
        except (UnicodeDecodeError, csv.Error, ValueError):
            raise BadInput(f"{path}: no CSV in UTF-8 with commas; save it as such") from None
        place = Path(path).parent / head.removeprefix("pair (key: ").rstrip(")")
        if not (key := read_json(place) if head.startswith("pair (key: ") else {}):
            raise BadInput(f"{path}: no sheet of judge.py blind, or its key is not here: {place}")
        if key not in (keys := keys or [key]):
            raise BadInput(f"{path}: a sheet of other pairs than {paths[0]}")
        for number, row in enumerate(rows, 2):
            said = [cell.strip().upper() for cell in row[4:]]
            pair = key["pairs"].get(row[0].strip()) if len(said) == len(QUESTIONS) else None
            if any(row) and (not pair or set(said) - {"L", "R", "=", ""}):
                raise BadInput(
                    f"{path}, row {number}: a pair's number is needed, and L, R, = or "
                    f"nothing for each of {len(QUESTIONS)} questions"
                )
            for own, vote in zip(votes.values(), said):
                if vote:
                    first = (vote == "L") == (pair["left"] == key["files"][0])
                    own.setdefault(pair["id"], []).append(0.5 if vote == "=" else float(first))
    rows = {}
    for question, units in votes.items():
        wins = np.array([np.mean(unit) for unit in units.values()])
        if not len(wins):
            raise BadInput(f"{' '.join(map(str, paths))}: nobody said what is {question}")
        rows[question] = [
            *interval(np.mean, wins),
            krippendorff(list(units.values())),
            sign_flips(wins - 0.5, np.random.default_rng(0), 10_000),
        ]
    for row, p in zip(rows.values(), holm([row[-1] for row in rows.values()])):
        row[-1] = p
    return key["files"], rows
