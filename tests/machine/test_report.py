"""support/report.py and tools/report.py: what the page of a run holds, that nothing a model says
runs there, and that a damaged run is a line on the terminal."""

from support import report
from support.files import write_json
from support.settings import resolve_settings

import json
import re

import pytest

from people import toy_profiles
from tools.report import main

# What a policy, or a user's model, might say. Each must come out as the text that it is.
HOSTILE = (
    "</p></details><script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'> {{ 1 }}"
    " \u2028 \ud83d half a pair, \x1b, \u202eturned round"
)
BEFORE = dict(step=0, score=21.06, stderr=1.3, success=0.0, failure=36.72, malformed=1.0, n=128)
AFTER = dict(step=2, score=85.04, stderr=1.42, success=30.5, failure=0.78, malformed=0.8, n=128)


def write(path, *rows):
    """A JSONL file, in which half a surrogate pair is an escape."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def run(tmp_path):
    """The directory of a run of two steps, with one held-out user who is told hostile things."""
    out = tmp_path / "a <b>run"
    settings = {"algo": "grpo", "steps": 4, "max_turns": 3, "eval_size": 1, "simulator": "toy"}
    write_json(out / "config.json", vars(resolve_settings(settings)))
    write_json(
        out / "checkpoint-000002" / "state.json", {"step": 2, "evaluations": [BEFORE, AFTER]}
    )
    row = {"emotion": 40.0, "emotion_std": 15.0, "failure": 30.0, "kl": 2e-4, "clipfrac": 0.0}
    write(out / "metrics.jsonl", *[{**row, "step": step} for step in (1, 2)])
    (person,) = toy_profiles("heldout", 1)
    turn = dict.fromkeys(("reply", "thought", "user", "analysis"), HOSTILE)
    answer = json.dumps({"content": HOSTILE, "code": "bcdf", "change": -3})
    turns = [{**turn, "change": -3, "emotion": 27, "analysis": answer}]
    turns += [{**turn, "change": None, "emotion": None}]
    dialogue = {"profile_id": person.id, "split": "heldout", "turns": turns, "ended": "malformed"}
    dialogue |= {"first_line": HOSTILE, "group": 0}
    dialogues = [{**dialogue, "step": step, "reward": 0.1 + step / 4} for step in (0, 2)]
    write(out / "dialogues.jsonl", *dialogues)
    with open(out / "dialogues.jsonl", "a") as file:
        file.write('{"split": "heldout", "st')  # of a process that was killed as it wrote
    return out


def read(page):
    """The text of a page, in which nothing may run and nothing be fetched."""
    html = page.read_text("utf-8")
    assert "<script" not in html and "<img" not in html and "default-src 'none'" in html
    # the names of a picture's formats are no addresses that a browser fetches
    assert not re.search(r"(https?:)?//\w", re.sub("<svg.*?</metadata>", "", html, flags=re.S))
    return html


def test_the_page_of_a_run(run):
    """Numbers and words of the log, each word as a text. The picture beside it is one."""
    html = read(
        report.draw(run, toy_profiles("heldout", 1))
    )  # without a summary.json: the run is not over
    assert html.count("&lt;script&gt;window.pwned = 1") == 18  # two sides of nine texts
    assert "bcdf" not in html and "&#34;content" not in html  # an analysis is told in sentences
    assert "21.1 ± 1.3 → 85.0 ± 1.4" in html
    assert "from 30, 3 replies" in html and "2 of 4 training steps" in html
    assert "The user toy is a script" in html and "27 (-3)" in html
    assert "KL within the update" in html and "Clipped" not in html and "never trained on" in html
    assert html.count("<svg") == 1
    write_json(run / "summary.json", {"evaluations": [BEFORE, {**AFTER, "score": 90.0}]})
    page = report.draw(run, toy_profiles("heldout", 1))
    assert "90.0 ± 1.4" in read(page)
    page.unlink()
    assert main([str(run)]) == 0 and "90.0 ± 1.4" in read(page)
    assert (run / "learning_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    "name", ["config.json", "metrics.jsonl", "dialogues.jsonl", "checkpoint-000002"]
)
def test_a_damaged_run_is_one_line(run, name, capsys):
    """It is no reason to end a run of days."""
    path = run / name
    if path.is_dir():
        path = path / "state.json"
    path.write_text(json.dumps(["heldout"]) + "\n")
    assert report.draw(run, toy_profiles("heldout", 1)) is None and main([str(run)]) == 2
    error = capsys.readouterr().err
    told = error.count("the report could not be written: ") + error.count("there is no run here")
    assert told == error.count("\n") == 2
