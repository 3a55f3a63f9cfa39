"""tools.strategies and tools.coordinate: tags of replies, by the toy's grammar or by a judge. What
is counted over them is checked by hand in tests/textbook/test_strategies.py."""

from support.files import write_json
from support.results import recorded_dialogues
from support.toy_words import NEEDS

import asyncio
import json
import random
from pathlib import Path

import pytest

import judging
from judging import at, call, run, sage, toy_result, write
from server import Loopback
from tools import coordinate
from tools.judge import ScriptedJudge


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    judging.fresh(tmp_path, monkeypatch)


@pytest.fixture
def good(tmp_path):
    return judging.good_file(tmp_path)


@pytest.fixture
def bad(tmp_path):
    return judging.bad_file(tmp_path)


def test_strategies_by_the_grammar(bad):
    """Exact, and asked of nobody. On the page the codes have names."""
    told = run("strategies", bad, "--html", "page.html")[1]["files"][bad]
    assert '["D-1 comfort","3.00","-6.00","24"' in Path("page.html").read_text("utf-8")
    assert told["strategies"]["D-1"] == {
        "uses": 3,
        "gain": -6,
        "n": 24,
        "asked": None,
        "asked_n": 0,
    }


def test_strategies_by_a_server(tmp_path):
    """SAGE's own files, in which the emotion stands at the next line; the last reply has none. One
    of eight answers can not be read: its reply has no tags, and is counted."""
    with Loopback(
        answer=lambda p: (
            "no" if p.count("在听10") else "第一段\n<Strategy>(F-3) 一般建议</Strategy>"
        )
    ) as server:
        code, result = run(
            "strategies",
            sage(tmp_path),
            *at(server, "--lang", "zh", "--retries", 0, "--repeats", 3),
        )
    told = next(iter(result["files"].values()))
    assert code == 0 and told["missing"] == 4 and told["ssrr"] == 1
    assert told["misnamed"] == 4  # F-3 is professional help
    # two of four replies a dialogue could be read, and all of those use it
    assert told["strategies"]["F-3"] == {"uses": 4, "gain": 5, "n": 3, "asked": None, "asked_n": 0}
    assert server.calls == 8 and all("此前的对话" in p for p in server.prompts)


def test_sages_emotions_are_found_in_the_log_form(tmp_path):
    """At the next line of the user; what the model called its change may be anything."""
    turns = [t for d in recorded_dialogues(sage(tmp_path, 1)) for t in d["turns"]]
    assert [(t["change"], t["emotion"]) for t in turns] == [
        (5, 45),
        (-5, 40),
        (15, 55),
        (None, None),
    ]
    assert "Activity: 心里一暖" in turns[0]["analysis"]


def test_a_log_has_many_dialogues_of_one_profile(good, tmp_path):
    """Dialogues of a group and of every step are units of their own; curves go by step."""
    rows = []
    for number, row in enumerate(json.loads(line) for line in open(good, encoding="utf-8")):
        d = next(recorded_dialogues(write(tmp_path / "one.jsonl", [row])))
        keep = {k: d[k] for k in ("profile_id", "first_line", "turns", "ended", "reward")}
        rows += [{**keep, "step": step, "split": "train", "group": number} for step in (1, 2)]
    log = write(tmp_path / "dialogues.jsonl", rows)
    write_json("config.json", {"algo": "grpo", "simulator": "toy", "profiles": None})
    assert run("capabilities", log)[1]["capabilities"]["tables"][log]["ED"]["n"] == 16
    steps = run("strategies", log)[1]["files"][log]["steps"]
    assert list(steps) == ["1", "2"] and steps["1"] == steps["2"]


def test_reasons_are_of_five_dialogues_of_a_kind(tmp_path):
    """Sixteen users end content, eight with either kind of need: five of each are looked at."""
    rng = random.Random(4)
    path = write(
        tmp_path / "many.jsonl",
        [toy_result(i, [list(NEEDS)[i % 8]] * 8, rng) for i in range(16)],
    )
    slots = [case.slots for case in coordinate.reasons_cases(path)]
    assert [s["outcome"] for s in slots] == ["success"] * 10
    assert [s["kind"] for s in slots].count("rational") == 5


@pytest.mark.slow
def test_coordinates_are_of_one_call(good, bad, capsys):
    """Both files in one prompt; an answer outside of the square, or without a number, is no point
    at (0, 0)."""
    said, scripted = [], ScriptedJudge()

    def answer(prompt):
        if "M1 X" not in prompt:
            return asyncio.run(scripted(prompt))
        said.append(prompt)
        return "Comparison: c\n" + (
            "M1 X: 7\nM1 Y: ?\nM2 X: 0\nM2 Y: 1"
            if len(said) == 1
            else "**M1 X**: 0.5\nM1 Y: −0.25\nM2 X: 0\nM2 Y: 1.0"
        )

    with Loopback(answer=answer) as server:
        assert call("coordinate", good, bad, "--plan") == 0
        # eight dialogues that end at 100 and eight at 10 or less, four for each kind of need
        assert "21 calls to the judge" in capsys.readouterr().out
        code, result = run("coordinate", good, bad, "--judge", "openai:mute@" + server.url)
    assert code == 2  # a judge's tags are wanted too, and this one has none
    said.clear()
    with Loopback(
        answer=lambda p: (
            "<Strategy>(D-1) comfort, (F-4)</Strategy>" if "<reply>" in p else answer(p)
        )
    ) as server:
        code, result = run("coordinate", good, bad, *at(server))
    assert code == 0 and len(said) == 4 and all("M1\n" in p and "M2\n" in p for p in said)
    assert result["placed"][good][:4] == [0.5, 0, -0.25, 0] and result["placed"][bad][2] == 1
    assert result["placed"][bad][4:] == [0, 0]  # every reply the same: D-1 and F-4
    told = run("coordinate", good, bad)[1]["placed"]  # by the toy's grammar
    assert told[good][5] > 0 == told[bad][5] and told[good][4] == 0 < told[bad][4]
