"""tools/blind.py: what raters see of two policies, and what comes back."""

from support.files import read_json

import csv
from pathlib import Path

import pytest

from judging import call, run
from tools.dialogues import load_dialogues

pytestmark = pytest.mark.usefixtures("fresh_tools")


def rows_of(sheet):
    return list(csv.reader(open(sheet, encoding="utf-8-sig", newline="")))


def save(sheet, rows):
    with open(sheet, "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(rows)


def test_blind_sheets_hide_and_tell(good, bad):
    """Sides are drawn, names are in the key alone; two raters who see through it."""
    assert run("blind", good, bad, "--out", "sheet.csv")[0] == 0
    text = open("sheet.csv", encoding="utf-8-sig").read()
    assert not any(word in text for word in ("good.jsonl", "bad.jsonl", "toy-heldout", "secret"))
    key = read_json("sheet.csv.key.json")
    assert {p["left"] for p in key["pairs"].values()} == {good, bad}
    rows = rows_of("sheet.csv")
    for row in rows[1:]:
        pair = key["pairs"][row[0]]
        (left,) = [d for d in load_dialogues(pair["left"]) if d.profile_id == pair["id"]]
        assert row[2].count(left.turns[0]["reply"]) and row[2].startswith("USER: My ")
    for rater in range(2):
        for row in rows[1:]:
            wins = "L" if key["pairs"][row[0]]["left"] == good else "R"
            row[4:] = [wins, "=", "" if rater else wins.lower()]
        save(f"rater{rater}.csv", rows)
    code, result = run("blind", "--read", "rater0.csv", "rater1.csv")
    first, draws, third = result["blind"].values()
    assert code == 0 and first[0] == 1 and first[3] == 8 and first[4] is None  # nothing differs
    assert draws[0] == 0.5 and third[0] == 1
    rows[3][4] = "good"
    save("odd.csv", rows)
    Path("excel.csv").write_bytes("pair;é".encode("cp1252"))
    assert call("blind", good, bad, "--out", "sheet.csv") == 2  # it may be filled in
    assert call("blind", bad, good, "--out", "other.csv") == 0
    for sheets in ("odd.csv", "rater1.csv other.csv", "excel.csv"):
        assert call("blind", "--read", *sheets.split()) == 2


def test_one_rater_is_one_however_often_the_sheet_is_named(good, bad):
    """Else two of them agree. And what a spreadsheet adds at the end is no row."""
    assert run("blind", good, bad, "--out", "sheet.csv")[0] == 0
    rows = rows_of("sheet.csv")
    for k, row in enumerate(rows[1:]):
        row[4:] = ["LR"[k % 2]] * 3
    save("sheet.csv", [*rows, [""] * 7])
    once = run("blind", "--read", "sheet.csv")[1]
    assert run("blind", "--read", "sheet.csv", "sheet.csv")[1] == once
    assert all(row[3] == 8 and row[4] is None for row in once["blind"].values())
