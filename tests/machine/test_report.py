"""support/report.py: the answer of a run in words, its page as far as it is, its picture."""

from support import picture, report
from support.page import PANELS, headline

import json
import math
import re

import pytest

from pages import AFTER, BEFORE, curve, dialogue, turn, written
from simulator import toy_profiles

# ------------------------------------------------------------------------- the answer, and how far


@pytest.mark.parametrize(
    "evaluations, steps, done, lines",
    [
        (
            [BEFORE, AFTER],
            50,
            50,
            [
                "Final emotion 21.1 to 85.0 (128 held-out users, standard "
                "error 1.4), 36.7 % failures to "
                "0.8 %",
                "Before and after 50 training steps.",
            ],
        ),
        (
            [BEFORE, AFTER],
            None,
            50,
            [
                "Final emotion 21.1 to 85.0 (128 held-out users, standard "
                "error 1.4), 36.7 % failures to "
                "0.8 %",
                "Before and after 50 training steps.",
            ],
        ),
        (
            [BEFORE],
            0,
            0,
            [
                "Final emotion 21.1 (128 held-out users, standard error "
                "1.3), 36.7 % failures, 0.0 % "
                "successes",
                "An evaluation alone: no training step was made.",
            ],
        ),
        (
            [BEFORE],
            50,
            0,
            [
                "Final emotion 21.1 before training (128 held-out users, "
                "standard error 1.3), 36.7 % "
                "failures, 0.0 % successes",
                "Only the evaluation before training is there so far; 0 of "
                "50 training steps are done.",
            ],
        ),
        (
            [BEFORE],
            50,
            15,
            [
                "Final emotion 21.1 before training (128 held-out users, "
                "standard error 1.3), 36.7 % "
                "failures, 0.0 % successes",
                "Only the evaluation before training is there so far; 15 of "
                "50 training steps are done. "
                "Latest training numbers (step 15): final emotion 35.0, "
                "success 1.5 %, failure 30.0 %, "
                "malformed 2.0 %.",
            ],
        ),
        (
            [BEFORE, AFTER],
            80,
            55,
            [
                "Final emotion 21.1 to 85.0 (128 held-out users, standard "
                "error 1.4), 36.7 % failures to "
                "0.8 %",
                "The last evaluation so far is that at step 50; 55 of 80 "
                "training steps are done. Latest "
                "training numbers (step 55): final emotion 75.0, success 1.5 %, failure 30.0 %, "
                "malformed 2.0 %.",
            ],
        ),
        (
            [{**AFTER, "step": None, "stderr": math.nan, "n": 16}],
            None,
            0,
            ["Final emotion 85.0 (16 users, standard error –), 0.8 % failures, 30.5 % successes"],
        ),
        ([], 50, 3, []),
    ],
    ids="finished unplanned alone fresh midway resumed file nothing".split(),
)
def test_the_answer_comes_first_in_plain_words(evaluations, steps, done, lines):
    """A run that is not over says so, and what its training shows so far."""
    curves = [curve(s, emotion=20.0 + s) for s in range(1, done + 1)]
    assert headline(curves, evaluations, steps) == lines


def test_every_panel_and_every_table_says_how_to_read_it(tmp_path):
    """A plain sentence each. What of KL is measured is named as the code measures it: on samples of
    the starting policy."""
    every = {series.key: 0.5 for panel in PANELS for series in panel.series}
    _, data = written(
        tmp_path / "r.html",
        curves=[{**curve(1), **every}],
        tables=report.tables_by_part(
            {"before": [dialogue()], "after": [dialogue(purpose="target", world="chit-chat")]}
        ),
    )
    readings = [one["reading"] for one in data["panels"] + data["tables"]]
    assert len(readings) == len(set(readings)) == len(PANELS) + 6
    assert all(30 < len(r) < 180 and r.endswith(".") and r[0].isupper() for r in readings)
    assert "KL(pi_0, pi), sampled from pi_0" in [p["lines"][0]["label"] for p in data["panels"]]


def a_run(out, steps, evaluations):
    """The directory of a run as draw_run finds it, and its one held-out user."""
    out.mkdir()
    (out / "config.json").write_text(json.dumps({"algo": "grpo", "steps": 4}))
    (out / "metrics.jsonl").write_text(
        "".join(json.dumps(curve(s)) + "\n" for s in range(1, steps + 1))
    )
    (person,) = toy_profiles("heldout", 1)
    row = {
        "profile_id": person.id,
        "first_line": "Hm.",
        "turns": [turn()],
        "ended": "turn_limit",
        "reward": 0.35,
        "group": 0,
    }
    (out / "dialogues.jsonl").write_text(
        "".join(
            json.dumps({**row, "step": step, "split": split}) + "\n"
            for step, split in [(e["step"], "heldout") for e in evaluations] + [(1, "train")]
        )
        + '{"split": "heldout", "st'
    )  # a process that was killed as it wrote
    return {"step": steps, "evaluations": evaluations}, [person]


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps, evaluations, titles, sides",
    [
        (0, [BEFORE], [], ["before"]),
        (2, [BEFORE], 6, ["before"]),
        (4, [BEFORE, {**AFTER, "step": 4}], 6, ["before", "after"]),
    ],
    ids=["none", "midway", "over"],
)
def test_a_run_is_drawn_as_far_as_it_is(tmp_path, steps, evaluations, titles, sides):
    """With no step there is one point for the picture and no empty panel in the page."""
    out = tmp_path / "run"
    assert report.draw_run(out, *a_run(out, steps, evaluations)) == []
    assert (out / "learning_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    data = json.loads(
        re.search(
            r'type="application/json">(.*?)</script>', (out / "report.html").read_text(), re.DOTALL
        ).group(1)
    )
    assert len(data["panels"]) == (titles or 0) and len(data["headline"]) == 2
    assert [d["side"] for d in data["users"][0]["dialogues"]] == sides
    assert data["tables"][1]["columns"] == ["intention", *sides, "n"]


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [curve(1)],
        [
            curve(
                s,
                emotion=98.0,
                emotion_std=30.0,
                entropy=-0.1 * s,
                kl=-2e-4,
                turns=None,
                success=100.0,
            )
            for s in (1, 2, 3)
        ],
    ],
    ids=["no step", "one step", "odd"],
)
def test_the_pictures_axes_hold_all_that_is_drawn(tmp_path, monkeypatch, rows):
    """A spread above 100, an error bar at 100, a KL below 0; and no panel without anything."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))
    picture.learning_curve(tmp_path, rows, [dict(step=0, score=99.0, stderr=4.0)])
    (axes,) = (figure.axes for figure in figures)
    assert len(axes) == (1 if not rows else 6 if len(rows) == 1 else 5)
    for axis in axes:
        (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
        box = axis.dataLim
        assert left < box.x0 <= box.x1 < right and low <= box.y0 <= box.y1 <= high
        assert low <= 0 <= high and axis.has_data()
    assert axes[0].get_ylim()[1] >= (128 if len(rows) == 3 else 103)
