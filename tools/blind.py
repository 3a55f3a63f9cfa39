"""tools/blind.py - which of two policies do people prefer, if they do not know which is which?

    python -m tools.blind results/before.jsonl results/after.jsonl --out results/sheet.csv
    python -m tools.blind --read results/sheet-ann.csv results/sheet-ben.csv

The first command writes a sheet of pairs: a user, and the dialogues of both policies with that
user, without thoughts, scores or names. Which policy stands on the left is drawn for each pair. It
is written to a separate key file, which raters do not get; each rater fills in a copy of the sheet.
The second command reads the copies; the key must lie beside them. wins: the share of pairs that the
first file wins (a draw counts half), with its 95 % interval over pairs; alpha: how far raters agree
(Krippendorff's, nominal); p: by sign flips of the pairs, two-sided, with Holm's correction for
three questions.

The dialogues are with a simulated user. Wins do not say how a rater would have felt in its place.
"""

from support.errors import BadInput
from support.files import read_json, write_json
from support.settings import natural, positive
from support.stats import interval, sign_flips

import csv
import sys
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.dialogues import (
    add_files,
    check_files,
    load_dialogues,
    messages_of,
    show_table,
    tool_parser,
    write_outputs,
)

QUESTIONS = ("better overall", "understands more", "helps more")
KEY_PREFIX = "pair (key: "  # in the header's first cell, before the name of the key and a ")"
READING = "wins: share of the first file, = counts half; alpha: Krippendorff's, nominal"


def blind(args):
    """Write a sheet, or read those that came back. Returns the exit code."""
    check_files(args, least=0, inputs=args.read or (), out=args.out)
    if args.read:
        if args.files:
            raise BadInput(
                f"--read reads sheets, and {args.files[0]} is a FILE to make one of; leave it out"
            )
        result = {"blind": read_votes(args.read)}
    else:
        if len(args.files) != 2 or not args.out:
            raise BadInput(
                "name two FILEs and --out SHEET to write a sheet, or --read SHEET... to read sheets"
            )
        pairs = pairs_of(*args.files)
        result = {"pairs": write_sheet(args.out, args.files, pairs, args.seed, args.limit)}
    write_outputs(args, "blind", result)
    return 0


# ---------------------------------------------------------------------------------- writing a sheet


class Pair(NamedTuple):
    """Two dialogues with the same person, in words."""

    profile: str  # the profile's id, for the key
    person: str
    first: str  # the dialogue of the first file
    second: str


def pairs_of(first_file, second_file):
    """The Pairs of two files: of each person that is in both."""
    first = {dialogue.profile_id: dialogue for dialogue in load_dialogues(first_file)}
    second = {dialogue.profile_id: dialogue for dialogue in load_dialogues(second_file)}
    pairs = []
    for profile, dialogue in first.items():
        if profile in second:
            person = person_of(dialogue)
            pairs.append(Pair(profile, person, text_of(dialogue), text_of(second[profile])))
    return pairs


def person_of(dialogue):
    """Who the user of a dialogue is, and what happened."""
    # a result file has the person in each line; a log names it
    person = dialogue.raw or vars(dialogue.profile)
    return "\n".join(person.get(key, "") for key in ("player", "scene"))


def text_of(dialogue):
    """What was said, a line for each message."""
    messages = messages_of(dialogue)
    return "\n".join(f"{message['speaker'].upper()}: {message['text']}" for message in messages)


def write_sheet(path, files, pairs, seed, limit=None):
    """Write the sheet `path` (CSV) and `path`.key.json. pairs: Pairs of the two `files`. Their
    order and sides are drawn with `seed`. Returns the number of pairs. Raises BadInput."""
    rng = np.random.default_rng(seed)
    pairs_of_key = {}  # {number in the sheet: {"id", "left": whose dialogue stands on the left}}
    rows = []
    for number, k in enumerate(rng.permutation(len(pairs))[:limit], 1):
        pair = pairs[k]
        if rng.integers(2):
            left_file, left, right = files[1], pair.second, pair.first
        else:
            left_file, left, right = files[0], pair.first, pair.second
        pairs_of_key[number] = {"id": pair.profile, "left": left_file}
        empty_cells = [""] * len(QUESTIONS)
        rows.append([number, pair.person, left, right, *empty_cells])
    if not rows:
        raise BadInput(f"{' and '.join(files)} have no user in common")
    key = Path(f"{path}.key.json")
    if Path(path).exists() or key.exists():
        raise BadInput(f"--out {path}: it, or its key, is there already; choose another name")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    questions = [f"{question}: L, R or =" for question in QUESTIONS]
    header = [f"{KEY_PREFIX}{key.name})", "user", "left", "right", *questions]
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([header, *rows])
    write_json(key, {"files": files, "pairs": pairs_of_key})
    print(f"{path}: {len(rows)} pairs; {key} is the key: keep it from the raters")
    return len(rows)


# ----------------------------------------------------------------------------------- reading sheets


def read_votes(paths):
    """What the sheets say, shown: {question: [share of pairs that the first file wins (= counts
    half), low, high, n, alpha of the raters, p]}. Raises BadInput."""
    files, votes = read_sheets(paths)
    rows = {}
    p_values = []
    for question, votes_of_pair in votes.items():
        wins = np.array([np.mean(ratings) for ratings in votes_of_pair.values()])
        if not len(wins):
            raise BadInput(f"{' '.join(map(str, paths))}: no rater has answered {question!r}")
        alpha = krippendorff(list(votes_of_pair.values()))
        p_values.append(sign_flips(wins - 0.5, np.random.default_rng(0), 10_000))
        rows[question] = [*interval(np.mean, wins), alpha]
    for row, p in zip(rows.values(), holm(p_values)):
        row.append(p)
    columns = ["wins", "from", "to", "pairs", "alpha", "p (Holm)"]
    show_table(f"{files[0]} against {files[1]}", columns, rows, READING)
    return rows


def read_sheets(paths):
    """([first file, second], {question: {profile: [vote, one a rater]}}) of filled-in sheets.
    Raises BadInput."""
    votes = {question: {} for question in QUESTIONS}
    first_key = None
    for path in dict.fromkeys(paths):  # one rater is one, however often the sheet is named
        key, rows = read_sheet(path)
        if first_key is None:
            first_key = key
        if key != first_key:
            raise BadInput(f"{path}: a sheet of other pairs than {paths[0]}")
        for number, row in enumerate(rows, 2):  # the header is row 1
            if not any(row):  # a spreadsheet may add empty rows at the end
                continue
            pair, letters = read_row(row, key, f"{path}, row {number}")
            first_is_left = pair["left"] == key["files"][0]
            for question, letter in zip(QUESTIONS, letters):
                if letter:
                    vote = vote_of(letter, first_is_left)
                    votes[question].setdefault(pair["id"], []).append(vote)
    return first_key["files"], votes


def vote_of(letter, first_is_left):
    """A vote: 1 for the first file, 0 for the second, 0.5 for a draw. letter: L, R or =, as a rater
    wrote it; first_is_left: does the first file's dialogue stand on the left?"""
    if letter == "=":
        return 0.5
    left_wins = letter == "L"
    return 1.0 if left_wins == first_is_left else 0.0


def read_sheet(path):
    """(the key of a sheet, its rows below the header). Raises BadInput for what is no sheet."""
    rows = read_csv(path)
    title = rows[0][0] if rows else ""
    key_path = Path(path).parent / title.removeprefix(KEY_PREFIX).rstrip(")")
    key = read_json(key_path) if title.startswith(KEY_PREFIX) else {}
    if not key:
        raise BadInput(f"{path}: no sheet of tools.blind, or its key is not here: {key_path}")
    return key, rows[1:]


def read_csv(path):
    """The rows of a CSV file, the first of which has a cell. Raises BadInput."""
    csv.field_size_limit(2**30)  # a dialogue is one cell
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
        if rows and not rows[0]:
            raise ValueError("the first line is empty")
    except (csv.Error, ValueError):  # also a UnicodeDecodeError, which is a ValueError
        raise BadInput(f"{path}: no CSV in UTF-8 with commas; save it as such") from None
    return rows


def read_row(row, key, where):
    """(the pair's entry in the key, [a letter or "" for each question]) of a row of a sheet.
    Raises BadInput."""
    number, *_ = row
    letters = [cell.strip().upper() for cell in row[4:]]  # behind number, user, left and right
    pair = key["pairs"].get(number.strip())
    if not pair or len(letters) != len(QUESTIONS) or set(letters) - {"L", "R", "=", ""}:
        raise BadInput(
            f"{where}: a pair's number is needed, and L, R, = or "
            f"nothing for each of {len(QUESTIONS)} questions"
        )
    return pair, letters


def krippendorff(units):
    """Krippendorff's alpha for nominal ratings, 1 - observed / expected disagreement. units: of
    each unit the list of its ratings; a unit with one rating is left out. None if nothing differs.

    Both disagreements are means over all n ratings; their common factor 1 / n is left out."""
    units = [unit for unit in units if len(unit) > 1]
    ratings = [rating for unit in units for rating in unit]
    expected = disagreements(ratings) / (len(ratings) - 1) if ratings else 0
    observed = sum(disagreements(unit) / (len(unit) - 1) for unit in units)
    return 1 - observed / expected if expected else None


def disagreements(ratings):
    """The number of ordered pairs of ratings that differ."""
    return 2 * sum(a != b for a, b in combinations(ratings, 2))


def holm(p_values):
    """Holm's correction: the k'th smallest of m p-values is multiplied by m - k + 1; at most 1, and
    never below the one before it."""
    corrected = [0.0] * len(p_values)
    largest = 0.0
    from_smallest = sorted(range(len(p_values)), key=p_values.__getitem__)
    for smaller, i in enumerate(from_smallest):
        multiplied = (len(p_values) - smaller) * p_values[i]
        largest = max(largest, min(1.0, multiplied))
        corrected[i] = largest
    return corrected


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("blind", __doc__)
    add_files(parser)
    parser.add_argument("--out", metavar="SHEET", help="write a sheet for raters, a CSV file")
    parser.add_argument(
        "--read", nargs="+", metavar="SHEET", help="read the sheets that raters have filled in"
    )
    parser.add_argument(
        "--limit", type=positive, metavar="N", help="write only N pairs, drawn at random"
    )
    parser.add_argument(
        "--seed",
        type=natural,
        default=0,
        metavar="N",
        help="seed of the order of pairs and of their sides (default: 0)",
    )
    return parser.run(blind, argv)


if __name__ == "__main__":
    sys.exit(main())
