"""tools/blind.py - which of two policies do people prefer, if they do not know which is which?

    python -m tools.blind results/before.jsonl results/after.jsonl --out results/sheet.csv
    python -m tools.blind --read results/sheet-ann.csv results/sheet-ben.csv

The first command writes a sheet of pairs: a user, and the dialogues of both policies with that
user, without thoughts, scores or names. Which policy stands on the left is drawn for each pair. It
is written to a separate key file, which raters do not get; each rater fills in a copy of the sheet.
The second command reads the copies; the key must lie beside them. wins: the share of pairs that the
first file wins (a draw counts half), with its 95 % interval over pairs; alpha: how far raters agree
(Krippendorff's, nominal).

The dialogues are with a simulated user. Wins do not say how a rater would have felt as the user.
"""

from support.errors import BadInput
from support.files import read_json, write_json

import csv
from collections import defaultdict
from pathlib import Path

import numpy as np

from tools.correlations import interval
from tools.dialogues import common_users, load_dialogues, messages_of
from tools.tables import add_files, check_files, show_table, tool_parser, write_outputs

QUESTIONS = ("better overall", "understands more", "helps more")
COLUMNS = ["wins", "from", "to", "pairs", "alpha"]
READING = "wins: share of the first file, = counts half; alpha: Krippendorff's, nominal"


def blind(args):
    """Write a sheet, or read those that came back. Returns the exit code."""
    check_files(args, least=0, inputs=args.read or (), out=args.out)
    if args.read:
        result = {"blind": read_votes(args.read)}
    elif len(args.files) == 2 and args.out:
        result = {"pairs": write_sheet(Path(args.out), args.files)}
    else:
        raise BadInput("name two FILEs and --out SHEET, or --read SHEET...")
    write_outputs(args, "blind", result)
    return 0


# ---------------------------------------------------------------------------------- writing a sheet


def text_of(dialogue):
    """What was said, a line for each message."""
    return "\n".join(
        f"{message['speaker'].upper()}: {message['text']}" for message in messages_of(dialogue)
    )


def dialogues_by_user(path):
    """The dialogues of a file, {id of the user: the dialogue}. Raises BadInput if a user has two, as
    in the log of a longer run: nothing says which of them is a pair's."""
    dialogues = load_dialogues(path)
    by_user = {dialogue.profile_id: dialogue for dialogue in dialogues}
    if len(by_user) < len(dialogues):
        raise BadInput(f"{path}: two dialogues with one user; name files with one for each user")
    return by_user


def write_sheet(path, files):
    """Write the sheet `path` (CSV) and its key. A pair is a user whom both files have. Order and
    sides are drawn. Returns the number of pairs. Raises BadInput."""
    key = path.with_name(f"{path.name}.key.json")
    if key.exists():
        raise BadInput(f"--out {path}: its key is there already; choose another name")
    of_file = [dialogues_by_user(file) for file in files]
    users = common_users("blind", files)
    rng = np.random.default_rng(0)
    pairs = {}  # {number in the sheet: {"id", "left": whose dialogue stands on the left}}
    rows = [[key.name, "user", "left", "right", *(f"{name}: L, R or =" for name in QUESTIONS)]]
    for number, k in enumerate(rng.permutation(len(users)), 1):
        left = int(rng.integers(2))  # of the two files, the one on the left
        sides = [of_file[side][users[k]] for side in (left, 1 - left)]
        pairs[number] = {"id": users[k], "left": files[left]}
        profile = sides[0].profile
        about = f"{profile.player}\n{profile.scene}"
        rows.append([number, about, *map(text_of, sides), *[""] * len(QUESTIONS)])
    with open(path, "x", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(rows)
    write_json(key, {"files": files, "pairs": pairs})
    print(f"{path}: {len(pairs)} pairs; {key} is the key: keep it from the raters")
    return len(pairs)


# ----------------------------------------------------------------------------------- reading sheets


def read_votes(paths):
    """Print the table of the sheets. Returns {question: [share of pairs that the first file wins (=
    counts half), low, high, n, alpha of the raters]}. Raises BadInput."""
    votes = {question: defaultdict(list) for question in QUESTIONS}  # {question: {pair: votes}}
    keys = []
    for path in dict.fromkeys(paths):  # a sheet counts once, even if it is named twice
        try:
            keys.append(read_sheet(path, votes))
        except (csv.Error, LookupError, ValueError) as error:
            raise BadInput(
                f"{path}: no CSV sheet of tools.blind (UTF-8, commas, L, R or =) with its key "
                f"beside it: {error!r:.90}"
            ) from None
        if keys[-1] != keys[0]:
            raise BadInput(f"{path}: a sheet of other pairs than {paths[0]}")
    rows = {}
    for question, votes_of_pair in votes.items():
        units = list(votes_of_pair.values())
        wins = interval([np.mean(unit) for unit in units])
        rows[question] = [*wins, krippendorff(units)]
    first, second = keys[0]["files"]
    show_table(f"{first} against {second}", COLUMNS, rows, READING)
    return rows


def read_sheet(path, votes):
    """Add the votes of a sheet to {question: {pair: [vote, one a rater]}}, and return its key. A
    vote is 1 for the first file, 0 for the second, 0.5 for a draw. Raises csv.Error, LookupError or
    ValueError for what is no sheet."""
    csv.field_size_limit(2**30)  # a dialogue is one cell
    with open(path, newline="", encoding="utf-8-sig") as file:
        (key_name, *_), *rows = csv.reader(file)
    key = read_json(Path(path).parent / key_name)
    first, _ = key["files"]
    for number, _, _, _, *letters in filter(any, rows):  # a spreadsheet may add empty rows
        first_is_left = key["pairs"][number]["left"] == first
        vote_of = {"=": 0.5, "L": float(first_is_left), "R": float(not first_is_left)}
        for question, letter in zip(QUESTIONS, letters, strict=True):
            if letter.strip():
                votes[question][number].append(vote_of[letter.strip().upper()])
    return key


def krippendorff(units):
    """Krippendorff's alpha for nominal ratings, 1 - observed / expected disagreement. units: of
    each unit the list of its ratings; a unit with one rating is left out. None if nothing differs.

    Both disagreements are means over all n ratings; their common factor 1 / n is left out."""
    units = [np.array(unit) for unit in units if len(unit) > 1]
    observed = sum(disagreement(unit) for unit in units)
    expected = disagreement(np.concatenate(units)) if units else 0
    return float(1 - observed / expected) if expected else None


def disagreement(ratings):
    """The number of ordered pairs of n ratings that differ, divided by n - 1."""
    return (ratings[:, None] != ratings).sum() / (len(ratings) - 1)


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    parser = tool_parser("blind", __doc__)
    add_files(parser)
    parser.add_argument("--out", metavar="SHEET", help="write a sheet for raters, a CSV file")
    parser.add_argument(
        "--read", nargs="+", metavar="SHEET", help="read the sheets that raters have filled in"
    )
    return parser.run(blind, argv)


if __name__ == "__main__":
    raise SystemExit(main())
