"""support/report.py: the answer of a run in words, its page as far as it is, its picture."""

from support import picture, report
from support.page import PANELS, headline
from support.scores import score

import json
import math
import re

import pytest

from pages import AFTER, BEFORE, curve, dialogue, turn, written
from result_files import our_line, write
from simulator import toy_profiles

# ------------------------------------------------------------------------- the answer, and how far


WHOLE = (
    "Final emotion 21.1 ± 1.3 to 85.0 ± 1.4 (128 held-out users, ± standard errors), 36.7 % "
    "failures to 0.8 %"
)
FIRST = "(128 held-out users, ± standard error), 36.7 % failures, 0.0 % successes"


@pytest.mark.parametrize(
    "evaluations, steps, done, lines",
    [
        ([BEFORE, AFTER], 50, 50, [WHOLE, "Before and after 50 training steps."]),
        ([BEFORE], 0, 0, [f"Final emotion 21.1 ± 1.3 {FIRST}", "An evaluation alone: no training"]),
        (
            [BEFORE],
            50,
            15,
            [
                f"Final emotion 21.1 ± 1.3 before training {FIRST}",
                "Only the evaluation before training is there so far; 15 of 50 training steps are "
                "done. Latest training numbers (step 15): final emotion 35.0, success 1.5 %",
            ],
        ),
        ([BEFORE, AFTER], 80, 55, [WHOLE, "The last evaluation so far is that at step 50; 55 of"]),
        (
            [{**AFTER, "step": None, "stderr": math.nan, "n": 16}],
            None,
            0,
            ["Final emotion 85.0 ± – (16 users, ± standard error), 0.8 % failures, 30.5 %"],
        ),
        ([], 50, 3, []),
    ],
    ids="finished alone midway resumed file nothing".split(),
)
def test_the_answer_comes_first_in_plain_words(evaluations, steps, done, lines):
    """A run that is not over says so, and what its training shows so far."""
    curves = [curve(s, emotion=20.0 + s) for s in range(1, done + 1)]
    told = headline(curves, evaluations, steps)
    assert len(told) == len(lines)
    assert all(line.startswith(begin) for line, begin in zip(told, lines))


def test_every_panel_and_every_table_says_how_to_read_it(tmp_path):
    """Plain sentences."""
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
    assert all(30 < len(r) < 420 and r.endswith(".") and r[0].isupper() for r in readings)


def read_data(page):
    """The data in the file of a page."""
    html = page.read_text(encoding="utf-8")
    block = re.search(r'type="application/json">(.*?)</script>', html, re.DOTALL)
    return json.loads(block.group(1))


def a_run(out, steps, evaluations):
    """The directory of a run as draw_run finds it, and its one held-out user."""
    out.mkdir()
    (out / "config.json").write_text(json.dumps({"algo": "grpo", "steps": 4, "max_turns": 3}))
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
    data = read_data(out / "report.html")
    assert len(data["panels"]) == (titles or 0) and len(data["headline"]) == 2
    assert [d["side"] for d in data["users"][0]["dialogues"]] == sides
    assert data["tables"][1]["columns"] == ["hidden need", *sides, "n"]
    assert data["scale"] == "from 30, 3 replies"
    assert data["changed"] == "--steps 4 --max-turns 3"


@pytest.fixture
def figures(monkeypatch):
    """The figures that are drawn while the test runs; none is written to a file."""
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: drawn.append(self))
    return drawn


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [curve(1)],
        [curve(s, entropy=0.3 + 0.001 * s, reply_tokens=39.9) for s in (1, 2, 3)],
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
    ids=["no step", "one step", "level", "odd"],
)
def test_the_pictures_axes_hold_all_that_is_drawn(tmp_path, figures, rows):
    """A spread above 100, an error bar at 100, a KL below 0; and no panel without anything. A
    reply's length that hardly varies lay on the frame of its panel, and an entropy left it."""
    picture.learning_curve(tmp_path, rows, [dict(step=0, score=99.0, stderr=4.0)])
    (axes,) = (figure.axes for figure in figures)
    all_curves_there = rows and rows[0]["turns"] is not None
    assert len(axes) == (1 if not rows else 6 if all_curves_there else 5)
    for axis in axes:
        (left, right), (low, high) = axis.get_xlim(), axis.get_ylim()
        assert (left, right) == axes[0].get_xlim()  # all panels show the same steps
        box = axis.dataLim
        assert left < box.x0 <= box.x1 < right and axis.has_data()
        room = 0.04 * (high - low)  # and no curve runs along the frame
        assert low + room < min(box.y0, 0) and max(box.y1, 0) < high - room
    assert axes[0].get_ylim()[1] >= 103


def a_full_picture(out):
    """Draw a run with everything that the picture can show: tiny and huge numbers, malformed
    replies, evaluations."""
    rows = [
        curve(
            s,
            emotion=2.0 * s,
            kl=2e-5 / s,
            reply_tokens=12345.0 + s,
            malformed=5.0,
            flat_groups=0.1,
        )
        for s in range(1, 40)
    ]
    evaluations = [dict(step=s, score=2.0 * s, stderr=2.0) for s in (0, 39)]
    picture.learning_curve(out, rows, evaluations, "from 30, 8 replies")


def test_the_picture_names_its_axes_and_the_scale(tmp_path, figures):
    """The run of a picture is seldom known to the person who looks at it."""
    a_full_picture(tmp_path)
    report.draw_run(tmp_path / "run", *a_run(tmp_path / "run", 1, [BEFORE]))
    figure, of_a_run = figures
    assert figure.axes[0].get_title() == "Final emotion, from 30, 8 replies"
    assert of_a_run.axes[0].get_title() == "Final emotion, from 30, 3 replies"
    assert {axis.get_xlabel() for axis in figure.axes} == {"training step"}
    for axis in figure.axes:  # curves of a panel differ by more than their colour
        curves = [line for line in axis.lines if len(line.get_xdata()) == 39]
        # the thin values of single steps, which lie behind their curve, are told by that curve
        dashes = [line.get_linestyle() for line in curves if line.get_alpha() is None]
        assert len(dashes) == len(set(dashes)) > 0


def test_settings_that_differ_from_the_defaults_are_told_apart():
    """Of another version's config.json nobody knows the defaults."""
    assert report.changed_settings({"algo": "grpo"}) == ""
    assert report.changed_settings({"algo": "ppo", "think": True}) == "--algo ppo --think"
    assert report.changed_settings({"algo": "grpo", "of_another_version": 1}) is None


def test_the_page_of_a_result_file_names_the_benchmarks_scale(tmp_path):
    """From 40 in ten replies, as its lines say, and not from 30 in eight as in training. Its signs
    have names, and no keys."""
    path = tmp_path / "results.jsonl"
    write(path, our_line(1, [50, 60], max_turns=7), our_line(2, [30], max_turns=7))
    page = report.report_of_results(path, score(path, "every", anyway=False))
    data = read_data(page)
    assert data["scale"] == "from 40, 7 replies"
    assert data["user"].startswith("Made by rule: the user toy is a script")
    assert data["title"] == "a with the simulated user toy"
    (signs,) = (table for table in data["tables"] if table["title"] == "Signs of reward hacking")
    assert signs["rows"][2] == ["words per reply", "2.000"] and signs["right"] == [False, True]
    assert not any("_" in row[0] for row in signs["rows"])
