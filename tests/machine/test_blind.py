"""tools/blind.py: what raters see of two policies, and what comes back."""

from support.files import read_json

import csv
import re
from pathlib import Path

import pytest

from judging import call, run
from tools.dialogues import load_dialogues

pytestmark = pytest.mark.usefixtures("fresh_tools")


def rows_of(sheet):
    return list(csv.reader(open(sheet, encoding="utf-8-sig", newline="")))


def fill_in(sheet, letters_of):
    """A rater's copy of sheet.csv. letters_of(row) -> three letters."""
    rows = rows_of("sheet.csv")
    for row in rows[1:]:
        row[4:] = letters_of(row)
    with open(sheet, "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([*rows, [""] * 7])  # a spreadsheet may add such a row


def test_blind_sheets_hide_and_tell(good, bad):
    """Sides are drawn, names are in the key alone; two raters who see through it."""
    assert run("blind", good, bad, "--out", "sheet.csv")[0] == 0
    pairs, shown = read_json("sheet.csv.key.json")["pairs"], rows_of("sheet.csv")
    assert not re.search("good.jsonl|bad.jsonl|toy-heldout|secret", str(shown))
    assert {pair["left"] for pair in pairs.values()} == {good, bad}
    for row in shown[1:]:
        pair = pairs[row[0]]
        (left,) = [d for d in load_dialogues(pair["left"]) if d.profile_id == pair["id"]]
        assert left.turns[0]["reply"] in row[2] and row[2].startswith("USER: My ")

    def winner(row):
        return "L" if pairs[row[0]]["left"] == good else "r"

    fill_in("ann.csv", lambda row: [winner(row), "=", ""])
    fill_in("ben.csv", lambda row: [winner(row), "=", winner(row)])
    code, result = run("blind", "--read", "ann.csv", "ben.csv")
    first, draws, third = result["blind"].values()
    assert code == 0 and first[0] == 1 and first[3] == 8 and first[4] is None  # nothing differs
    assert draws[0] == 0.5 and third[0] == 1
    # one rater is one, however often the sheet is named: else two of them agree
    fill_in("carl.csv", lambda row: ["LR"[int(row[0]) % 2]] * 3)
    twice = run("blind", "--read", "carl.csv", "carl.csv")[1]["blind"]
    assert all(row[3] == 8 and row[4] is None for row in twice.values())


def test_what_is_no_sheet_is_refused(good, bad):
    """And what may be filled in is not written again."""
    assert call("blind", good, bad, "--out", "sheet.csv") == 0
    assert call("blind", good, bad, "--out", "sheet.csv") == 2
    assert call("blind", bad, good, "--out", "other.csv") == 0
    fill_in("odd.csv", lambda row: ["good", "", ""])
    Path("excel.csv").write_bytes("pair;é".encode("cp1252"))
    for sheets in ("odd.csv", "sheet.csv other.csv", "excel.csv"):
        assert call("blind", "--read", *sheets.split()) == 2
