"""tools.table3: policies of either user, measured with either."""

from support.files import write_json

from pathlib import Path

import pytest

import judging
from judging import run
from tools import table3


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    judging.fresh(tmp_path, monkeypatch)


@pytest.fixture
def good(tmp_path):
    return judging.good_file(tmp_path)


@pytest.fixture
def bad(tmp_path):
    return judging.bad_file(tmp_path)


@pytest.mark.slow
def test_table3_trains_on_either_and_measures_on_either(monkeypatch, good, bad, tmp_path):
    """2 x 2: four result files; a run that is there goes on, and is not begun again."""
    done = []

    async def chapter(script, *flags):
        flags = list(map(str, flags))
        done.append([script, *flags])
        if script == "rlver.py" and "--out" in flags:
            write_json(Path(flags[flags.index("--out") + 1]) / "config.json", {})
        if script == "evaluate.py":
            source = good if flags[1].endswith(flags[3]) else bad
            Path(flags[5]).write_text(open(source, encoding="utf-8").read(), "utf-8")

    monkeypatch.setattr(table3, "run_chapter", chapter)
    for start in ("--out", "--resume"):
        code, result = run("table3", "--out", "t3", "--steps", 2)
        trained = [call for call in done if call[0] == "rlver.py"]
        assert code == 0 and all(start in call and "--steps" in call for call in trained[-2:])
    (a, *_, b, _, _), (c, *_, d, _, _) = result["table3"].values()
    assert a == d > b == c and len(done) == 12


@pytest.mark.soak
def test_table3_really_trains_and_measures(tmp_path):
    """Two steps of each run, through the command line, as `python -m tools.table3` does."""
    code, result = run("table3", "--out", "t3", "--steps", 2, "--limit", 4)
    assert code == 0 and len(result["table3"]) == 2
    assert len(list(tmp_path.glob("t3/*.jsonl"))) == 4
    assert {p.name for p in tmp_path.glob("t3/*/summary.json")} == {"summary.json"}
