"""tools.blind: sheets for people who do not know which policy is which."""

from support.files import read_json

import csv
from pathlib import Path

import pytest

import judging
from judging import call, run
from tools.dialogues import load_dialogues


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    judging.fresh(tmp_path, monkeypatch)


@pytest.fixture
def good(tmp_path):
    return judging.good_file(tmp_path)


@pytest.fixture
def bad(tmp_path):
    return judging.bad_file(tmp_path)


def test_blind_sheets_hide_and_tell(good, bad, tmp_path, capfd):
    """Sides are drawn, names are in the key alone; two raters who see through it."""
    assert run("blind", good, bad, "--out", "sheet.csv")[0] == 0
    text = open("sheet.csv", encoding="utf-8-sig").read()
    assert "good.jsonl" not in text and "bad.jsonl" not in text and "toy-heldout" not in text
    assert "secret" not in text and "* Name:" in text
    key = read_json("sheet.csv.key.json")
    assert {p["left"] for p in key["pairs"].values()} == {good, bad}
    rows = list(csv.reader(open("sheet.csv", encoding="utf-8-sig", newline="")))
    for row in rows[1:]:
        pair = key["pairs"][row[0]]
        (left,) = [d for d in load_dialogues(pair["left"]) if d.profile_id == pair["id"]]
        assert row[2].count(left.turns[0]["reply"]) and row[2].startswith("USER: My ")
    for rater in range(2):
        for row in rows[1:]:
            wins = "L" if key["pairs"][row[0]]["left"] == good else "R"
            row[4:] = [wins, "=", "" if rater else wins.lower()]
        with open(f"rater{rater}.csv", "w", newline="", encoding="utf-8-sig") as file:
            csv.writer(file).writerows(rows)
    code, result = run("blind", "--read", "rater0.csv", "rater1.csv")
    (wins, _, _, pairs, alpha, p), (ties, *_, p2), (third, *_, alpha3, p3) = result[
        "blind"
    ].values()
    assert code == 0 and wins == 1 and pairs == 8 and alpha is None  # nothing differs
    assert ties == 0.5 and p2 == 1 and third == 1 and alpha3 is None
    assert p == pytest.approx(3 * 2 / 256, abs=0.01)  # all eight pairs, and Holm's 3
    rows[3][4] = "good"
    with open("rater0.csv", "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows(rows)
    assert call("blind", "--read", "rater0.csv") == 2
    assert "row 4: a pair's number is needed" in capfd.readouterr().err
    assert call("blind", good, bad, "--out", "sheet.csv") == 2  # it may be filled in
    assert call("blind", bad, good, "--out", "other.csv") == 0
    for argv, told in (
        (["rater1.csv", "other.csv"], "a sheet of other pairs"),
        (["excel.csv"], "no CSV in UTF-8"),
        (["list.csv"], "no sheet of tools.blind"),
    ):
        Path("excel.csv").write_bytes("pair;é".encode("cp1252"))
        Path("list.csv").write_text("pair,user\n")
        capfd.readouterr()
        assert call("blind", "--read", *argv) == 2
        assert told in capfd.readouterr().err


def test_one_rater_is_one_however_often_the_sheet_is_named(good, bad, tmp_path):
    """Else two of them agree. And what a spreadsheet adds at the end is no row."""
    assert run("blind", good, bad, "--out", "sheet.csv", "--limit", 6)[0] == 0
    rows = list(csv.reader(open("sheet.csv", encoding="utf-8-sig", newline="")))
    for k, row in enumerate(rows[1:]):
        row[4:] = ["LR"[k % 2]] * 3
    with open("sheet.csv", "w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file).writerows([*rows, [""] * 7])
    once = run("blind", "--read", "sheet.csv")[1]
    assert run("blind", "--read", "sheet.csv", "sheet.csv")[1] == once
    assert all(row[3] == 6 and row[4] is None for row in once["blind"].values())
