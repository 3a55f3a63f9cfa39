"""tools.capabilities, tools.needs and tools.validity: scores of whole files, side by side."""

from support.toy_words import NEEDS

import asyncio
import json
import random
from pathlib import Path

import pytest

import judging
from judging import at, call, run, sage, toy_result, write
from server import Loopback
from tools.dialogues import load_dialogues
from tools.judge import ScriptedJudge
from tools.scores import MACHINERY_ONLY


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    judging.fresh(tmp_path, monkeypatch)


@pytest.fixture
def good(tmp_path):
    return judging.good_file(tmp_path)


@pytest.fixture
def bad(tmp_path):
    return judging.bad_file(tmp_path)


def test_two_files_are_paired(good, bad, capsys):
    """And what a script judged says so, on the terminal and on the page."""
    code, result = run("capabilities", good, bad, "--html", "page.html")
    paired = result["capabilities"]["paired"]
    assert code == 0 and paired["SA"][0] == -4 and paired["SA"][3] == 8
    page = Path("page.html").read_text("utf-8")
    assert "ED, empathic depth" in (text := capsys.readouterr().out)
    assert MACHINERY_ONLY in text and MACHINERY_ONLY in page
    assert '"radar":[{"label"' in page and "after minus before" in page
    assert '"values":{"empathic depth":5' in page and '["SA, style adaptability","-4.00"' in page


def test_needs_are_asked_per_line_of_the_user(tmp_path):
    said = "Reasons: r\nAttitude: 8/10\nThoughts: 7.0\n**Needs**: 6\nOverall: 7"
    with Loopback(answer=lambda prompt: said) as server:
        code, result = run("needs", sage(tmp_path), *at(server))
    (table,) = result["needs"]["tables"].values()
    assert code == 0 and server.calls == 6 and table["needs"]["mean"] == 6
    assert table["thoughts"]["mean"] == 7 and table["overall"]["n"] == 2
    assert all("倾听" in p and "心里一暖" in p for p in server.prompts)


@pytest.mark.slow
def test_validity_and_what_the_record_shows(good, bad, tmp_path):
    """BLRI is asked with the user's record alone: no reply stands in it."""
    prompts = []
    scripted = ScriptedJudge()

    def answer(prompt):
        prompts.append(prompt)
        return asyncio.run(scripted(prompt))

    with Loopback(answer=answer) as server:
        code, result = run("validity", good, bad, *at(server))
    assert code == 0 and result["blri"]["tables"][good]["overall"]["mean"] > 90
    assert set(result["correlations"]) == {
        f"{q}, {p}" for q in ("blri", "utterance") for p in (good, bad)
    }
    reply = load_dialogues(good)[0].turns[0]["reply"]
    assert not any(reply in p for p in prompts if "<record>" in p)
    assert any(reply in p for p in prompts if "<record>" not in p)


def test_three_files_are_correlated_over_files_too(good, bad, tmp_path):
    """The mean score of each against its mean final emotion."""
    rng = random.Random(3)
    mixed = write(
        tmp_path / "mixed.jsonl",
        [toy_result(i, [list(NEEDS)[i % 8], "cheer"] * 3, rng) for i in range(8)],
    )
    rows = run("validity", good, bad, mixed)[1]["correlations"]
    assert rows["blri, over files"][0] > 0.9 and rows["blri, over files"][3] == 3
    assert len(rows) == 2 * 4


def test_other_words_are_put_to_the_same_user(good, tmp_path):
    """Each after the same past, in the same emotion: what differs is the reply alone."""

    def feel(prompt):
        change = 4 - 9 * prompt.count("other words")
        return f"Content: c\nTargetCompletion: t\nActivity: a\nAnalyse: b\nChange: {change}"

    with (
        Loopback(answer=feel) as user,
        Loopback(
            answer=lambda prompt: (
                "\n".join(f"Item {i}: {'ABCF'[i % 4]}" for i in range(1, 16))
                if "<reply>" not in prompt
                else "Reply: other words"
            )
        ) as server,
    ):
        flags = [
            "validity",
            sage(tmp_path),
            "--paraphrase",
            "--limit",
            5,
            "--simulator",
            f"openai:scripted@{user.url}",
            *at(server),
        ]
        code, result = run(*flags)
        assert code == 0 and user.calls == 10 and server.calls == 4 + 5
    assert result["paraphrase"] == {"moved": [9, 9, 9, 5], "same sign": [0, 0, 0, 5]}
    moved = run("validity", good, "--paraphrase", "--limit", 16)[1]["paraphrase"]
    assert moved["moved"][3] == 16 and moved["moved"][0] < 4  # the scripted judge keeps the kind


@pytest.mark.slow
def test_two_simulators_are_ranked_and_not_refused(tmp_path, capfd):
    """Three policies under two users, ranked alike, their dialogues the other way round."""
    for folder, scores, sign in (
        ("a_based_simulator", (10, 30, 80), 1),
        ("b_based_simulator", (60, 65, 70), -1),
    ):
        (tmp_path / folder).mkdir()
        for k, policy in enumerate(("p", "q", "r")):
            rows = [json.loads(line) for line in open(sage(tmp_path, 5), encoding="utf-8")]
            for i, row in enumerate(rows):
                row["emo_point"] = scores[k] + 0.5 * i**3 * sign / 10
            write(tmp_path / folder / f"{policy}.jsonl", rows)
    files = sorted(tmp_path.glob("*_simulator/*.jsonl"))
    code, result = run("validity", *files)
    assert code == 0 and result["ranks"]["over policies"][0] == pytest.approx(1)
    assert result["ranks"]["p.jsonl"][0] == pytest.approx(-1) and len(result["ranks"]) == 4
    assert call("validity", files[0], files[-1]) == 2
    assert "needed are two, with at least one policy" in capfd.readouterr().err
