"""tools/sage.py: SAGE's result files, and scores by SAGE's rule."""

from support.errors import BadInput
from support.files import read_json

import json

import pytest

from conftest import ROOT
from evaluate import score
from result_files import our_line, sage_line, write
from runs import refuse
from tools import sage

SAMPLE = ROOT.parent / "shared/data/sage_results_sample.jsonl"


@pytest.mark.skipif(not SAMPLE.exists(), reason="the released sample is not here")
def test_the_released_sample(tmp_path):
    """Three dialogues of Qwen2.5-72B with a DeepSeek-V3 user, as they were published."""
    assert sage.main([str(SAMPLE), "--json", str(tmp_path / "out.json")]) == 0
    result = read_json(tmp_path / "out.json")
    found = [round(result[key], 2) for key in ("score", "stderr", "failure", "turns", "positive")]
    assert (result["n"], found) == (3, [6.67, 4.41, 66.67, 7.33, 14.29])


def test_two_simulators_that_rank_three_policies(tmp_path, capsys):
    """By hand: 1, 2, 3 and 1, 3, 2 have rho = 1 - 6 (0 + 1 + 1) / (3 (9 - 1)) = 0.5. The directory
    of a SAGE file names its simulator: SAGE saw the same dialogues shift by 20 points between two
    of them, and they do not compare."""
    for user, finals in (("a", (10, 30, 80)), ("b", (60, 70, 65))):
        folder = tmp_path / f"{user}_based_simulator"
        folder.mkdir()
        for policy, final in zip("pqr", finals):
            write(folder / f"{policy}.jsonl", *[sage_line(i, [final]) for i in range(3)])
    files = [str(path) for path in sorted(tmp_path.glob("*_simulator/*.jsonl"))]
    table = tmp_path / "t.json"
    assert sage.main([*files, "--json", str(table)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "ranks of 3 policies, a_based_simulator and b_based_simulator: rho = 0.50" in said
    assert "by: a SAGE result file, simulator a_based_simulator" in said
    kept = [
        (row["policy"], row["simulator"][0], row["score"]) for row in json.loads(table.read_text())
    ]
    assert kept[0] == ("p.jsonl", "a", 10) and kept[5] == ("r.jsonl", "b", 65)


TEN = [45, 50, 55, 60, 65, 70, 75, 80, 85, 95]


@pytest.mark.parametrize(
    "line, every, by_sage",
    [
        (our_line(1, TEN), 95, 85),
        (our_line(1, [50, 100], ended="emotion_max"), 100, 100),
        (our_line(1, [*TEN[:9], 100], ended="emotion_max"), 100, 85),
        # of SAGE's own the tenth emotion is not there
        (sage_line(1, TEN[:9]), None, 85),
    ],
)
def test_both_rules(line, every, by_sage, tmp_path):
    """SAGE holds ten replies and scores nine. Ours can be scored so too; SAGE's own only so."""
    path = write(tmp_path / "r.jsonl", line)
    assert sage.score(path)["score"] == by_sage
    if every:
        assert score(path)["score"] == every
    else:
        with pytest.raises(BadInput, match="evaluate.py did not write it"):
            score(path)


def test_a_line_that_is_no_result_is_named(tmp_path, capfd):
    """Also by what makes a line of ours of it."""
    path = write(tmp_path / "r.jsonl", sage_line(0, [50]), sage_line(7, ["5"]))
    line = refuse(capfd, path, main=sage.main)
    assert line.startswith(f"python -m tools.sage: {path}, line 2: ")
    assert "unsupported operand" in line
