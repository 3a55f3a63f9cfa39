"""Is the model still able? Logs of lm-eval and lighteval, paired by problem: McNemar by hand, sign
flips by brute force, and what the paper's own twelve differences are worth."""

import sys
from itertools import product

import numpy as np
import pytest

from conftest import ROOT
from result_files import write
from tools import ability
from tools.ability import compare_ability, compare_scores, read_samples

PROBES = ROOT / "tests" / "probes"


@pytest.mark.slow
def test_mcnemar_by_hand():
    """Eight problems change sides, seven to right, one to wrong: p = 2 (C(8,0) + C(8,1)) / 2^8 =
    18 / 256. Those that stay where they were count for nothing but n and the interval."""
    before, after = [0] * 7 + [1] + [1] * 20 + [0] * 12, [1] * 7 + [0] + [1] * 20 + [0] * 12
    r = compare_scores(before, after)
    assert r["p"] == pytest.approx(18 / 256) and r["test"] == "McNemar, +7 -1"
    assert (r["n"], r["before"], r["after"]) == (40, 21 / 40, 27 / 40)
    assert r["difference"] == pytest.approx(6 / 40) and r["interval"][0] < 6 / 40 < r["interval"][1]
    assert compare_scores(after, before)["p"] == r["p"]
    assert compare_scores([0, 1, 1], [1, 0, 1])["p"] == 1  # a tie is not 1.5


def test_shares_are_flipped_by_sign():
    """pass@1 over 16 samples is a share: of all 2^n signs of the differences, how many give a mean
    as far from 0? Counted out here, drawn there."""
    rng = np.random.default_rng(1)
    before, after = rng.integers(0, 17, 10) / 16, rng.integers(4, 17, 10) / 16
    d = after - before
    signs = np.array(list(product([-1, 1], repeat=10)))
    exact = np.mean(np.abs(signs @ d) >= abs(d.sum()) - 1e-9)
    r = compare_scores(before, after)
    assert r["test"] == "sign flips" and r["p"] == pytest.approx(exact, abs=0.02)


def log(place, scores, when="2026-01-01T00-00-00.1"):
    """A per-sample log as lm-eval 0.4.13 writes it: {problem: score}."""
    path = place / "model" / f"samples_ifeval_{when}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    metrics = {"filter": "none", "metrics": ["strict", "by_instruction"], "by_instruction": [True]}
    rows = [{**metrics, "doc_hash": problem, "strict": scores[problem]} for problem in scores]
    return write(path, *rows)


def test_logs_are_paired_by_problem_and_not_by_line(tmp_path, capsys):
    """Another order, and problems that only one side has: they are counted, and not compared. A
    list of verdicts, IFEval's by instruction, is no score. Of two logs of a task the newest
    counts."""
    log(tmp_path / "a", {"p1": True, "p2": False, "p3": False, "p4": True})
    log(tmp_path / "b", {"p3": False}, when="2025-01-01T00-00-00.1")
    log(tmp_path / "b", {"p3": True, "p1": True, "p2": True, "p9": False})
    result = compare_ability(tmp_path / "a", tmp_path / "b")
    (r,) = result.values()
    assert list(result) == ["ifeval, strict"]
    assert (r["n"], r["test"]) == (3, "McNemar, +2 -0")
    assert ability.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    *_, line, _ = capsys.readouterr().out.splitlines()
    shown = ["33.33", "100.00", "66.67", "-", "-", "0.5000", "McNemar,", "+2", "-0", "3"]
    assert line.split()[2:] == shown  # three problems are too few for an interval


def test_two_filters_are_two_scores(tmp_path):
    """With thoughts and without, in one log: never mixed."""
    path = log(tmp_path, {"p": 1.0})
    path.write_text(path.read_text() + path.read_text().replace('"none"', '"thoughts-stripped"'))
    names = ["ifeval, strict", "ifeval (thoughts-stripped), strict"]
    assert list(read_samples(tmp_path)) == names


def test_lightevals_details(tmp_path):
    """A parquet file with doc and metric in each row, as lighteval 0.13.0 writes it."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for side, first in (("a", 0.5), ("b", 0.75)):
        (tmp_path / side).mkdir()
        rows = []
        for i, share in enumerate((first, 0.25, 1.0)):
            rows.append({"doc": {"query": f"q{i}"}, "metric": {"codegen_pass@1:16": share}})
        name = "details_lcb:codegeneration_release_v6|0_2026-01-01T00-00-00.1.parquet"
        parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / side / name)
    result = compare_ability(tmp_path / "a", tmp_path / "b")
    r = result["lcb:codegeneration_release_v6|0, codegen_pass@1:16"]
    assert r["n"] == 3 and r["test"] == "sign flips"
    assert r["difference"] == pytest.approx(0.25 / 3)


def test_bad_logs_are_one_line(tmp_path, capfd):
    """Exit code 2, whatever is wrong."""

    def refuse(a, b):
        assert ability.main([str(a), str(b)]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        return line

    a = log(tmp_path / "a", {"p1": True})
    other = log(tmp_path / "b", {"q1": True})
    assert "no problem in common" in refuse(a.parent, other.parent)
    assert "no problem in common" in refuse(a.parent, tmp_path / "none")
    (a.parent / "samples_x.jsonl").write_text('{"doc_hash": 1}\n')
    assert "samples_x.jsonl: no log" in refuse(a.parent, other.parent)


# ------------------------------------------------------------- the paper's twelve differences


@pytest.mark.slow
def test_thoughts_are_stripped_before_scoring():
    """The filter of tests/probes, by hand: as rollout.split_thought has it; what was cut inside of
    its thought leaves nothing; what has none stays. IFEval counts words and letters over all of an
    answer, so a thought that stays in fails instructions."""
    sys.path.insert(0, str(PROBES))
    try:
        import thoughts
    finally:
        sys.path.remove(str(PROBES))

    def strip(*texts):
        return thoughts.strip([list(texts)], [{}])

    assert strip("<think>\nlong, long\n</think>\n\nno commas here") == [["no commas here"]]
    assert strip("<think>cut, in the mid", "plain, as it is") == [["", "plain, as it is"]]
    assert strip("long thought</think>said") == [["said"]]  # the template opened it
    for text, obeyed in (("three small words", 1), ("three lazy words", 0)):
        assert thoughts.obeys({"words": 3, "letter": "z"}, [text]) == {"obeyed": obeyed}
    code = "```python\ndef f(x): return x * x\n```"
    for text, passed in ((code, 1), ("def f(x): return x", 0), ("while True: pass", 0)):
        assert thoughts.runs({"test": "assert f(2) == 4"}, [text]) == {"passed": passed}
