"""tools/blind.py - which of two policies do people prefer, if they do not know which is which?

    python -m tools.blind results/before.jsonl results/after.jsonl --out results/sheet.csv
    python -m tools.blind --read results/sheet-ann.csv results/sheet-ben.csv

The first command writes a sheet of pairs: a user, and the dialogues of both policies with that
user, without thoughts, scores or names. Which policy stands on the left is drawn for each pair. It
is written to a separate key file, which raters do not get; each rater fills in a copy of the sheet.
The second command reads the copies; the key must lie beside them. wins: the share of pairs that the
first file wins (a draw counts half), with its 95 % interval over pairs; alpha: how far raters agree
(Krippendorff's, nominal).

The dialogues are with a simulated user. Wins do not say how a rater would have felt in its place.
"""

from support.errors import BadInput
from support.files import read_json, write_json
from support.settings import natural, positive
from support.stats import interval

import csv
import sys
from itertools import combinations
from pathlib import Path

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
        result = {"blind": read_votes(args.read)}
    elif len(args.files) != 2 or not args.out:
        raise BadInput(
            "name two FILEs and --out SHEET to write a sheet, or --read SHEET... to read sheets"
        )
    else:
        result = {"pairs": write_sheet(args.out, args.files, args.seed, args.limit)}
    write_outputs(args, "blind", result)
    return 0


# ---------------------------------------------------------------------------------- writing a sheet


def text_of(dialogue):
    """What was said, a line for each message."""
    messages = messages_of(dialogue)
    return "\n".join(f"{message['speaker'].upper()}: {message['text']}" for message in messages)


def write_sheet(path, files, seed, limit=None):
    """Write the sheet `path` (CSV) and `path`.key.json. A pair is a user whom both files have.
    Order and sides are drawn with `seed`. Returns the number of pairs. Raises BadInput."""
    of_file = [{d.profile_id: d for d in load_dialogues(file)} for file in files]
    users = [user for user in of_file[0] if user in of_file[1]]
    rng = np.random.default_rng(seed)
    pairs_of_key = {}  # {number in the sheet: {"id", "left": whose dialogue stands on the left}}
    rows = []
    for number, k in enumerate(rng.permutation(len(users))[:limit], 1):
        left = int(rng.integers(2))  # of the two files, the one on the left
        sides = [of_file[side][users[k]] for side in (left, 1 - left)]
        pairs_of_key[number] = {"id": users[k], "left": files[left]}
        # a result file has the person in each line; a log names it
        person = sides[0].raw or vars(sides[0].profile)
        about = "\n".join(person.get(key, "") for key in ("player", "scene"))
        rows.append([number, about, *map(text_of, sides), *[""] * len(QUESTIONS)])
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
    half), low, high, n, alpha of the raters]}. Raises BadInput."""
    files, votes = read_sheets(paths)
    rows = {}
    for question, votes_of_pair in votes.items():
        wins = np.array([np.mean(ratings) for ratings in votes_of_pair.values()])
        if not len(wins):
            raise BadInput(f"{' '.join(map(str, paths))}: no rater has answered {question!r}")
        alpha = krippendorff(list(votes_of_pair.values()))
        rows[question] = [*interval(np.mean, wins), alpha]
    columns = ["wins", "from", "to", "pairs", "alpha"]
    show_table(f"{files[0]} against {files[1]}", columns, rows, READING)
    return rows


def read_sheets(paths):
    """([first file, second], {question: {profile: [vote, one a rater]}}) of filled-in sheets. A
    vote is 1 for the first file, 0 for the second, 0.5 for a draw. Raises BadInput."""
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
            vote_of = {"=": 0.5, "L": float(first_is_left), "R": float(not first_is_left)}
            for question, letter in zip(QUESTIONS, letters):
                if letter:
                    votes[question].setdefault(pair["id"], []).append(vote_of[letter])
    return first_key["files"], votes


def read_sheet(path):
    """(the key of a sheet, its rows below the header). Raises BadInput for what is no sheet."""
    csv.field_size_limit(2**30)  # a dialogue is one cell
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = list(csv.reader(file))
    except (csv.Error, UnicodeDecodeError):
        raise BadInput(f"{path}: no CSV in UTF-8 with commas; save it as such") from None
    title = rows[0][0] if rows and rows[0] else ""
    key_path = Path(path).parent / title.removeprefix(KEY_PREFIX).rstrip(")")
    key = read_json(key_path) if title.startswith(KEY_PREFIX) else {}
    if not key:
        raise BadInput(f"{path}: no sheet of tools.blind, or its key is not here: {key_path}")
    return key, rows[1:]


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


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("blind", __doc__)
    add_files(parser)
    add = parser.add_argument
    add("--out", metavar="SHEET", help="write a sheet for raters, a CSV file")
    add("--read", nargs="+", metavar="SHEET", help="read the sheets that raters have filled in")
    add("--limit", type=positive, metavar="N", help="write only N pairs, drawn at random")
    text = "seed of the order of pairs and of their sides (default: 0)"
    add("--seed", type=natural, default=0, metavar="N", help=text)
    return parser.run(blind, argv)


if __name__ == "__main__":
    sys.exit(main())
