"""support/page.py: what is in the report's file, which dialogues are shown, and that nothing a
model says can do more in the reader's browser than be read."""

from support.page import PANELS, TEMPLATE, choose

import base64
import hashlib
import json
import math
import re

import numpy as np
import pytest

from pages import HOSTILE, curve, dialogue, long_dialogues, pairs, turn, written

# ---------------------------------------------------------------------------------- the file itself


def test_the_file_stands_alone(tmp_path):
    """Nothing is fetched, now or in ten years: no address but the name of SVG, and a policy that
    forbids the rest."""
    html, _ = written(tmp_path / "r.html")
    assert set(re.findall(r"\w+://[^\"' ]+", html)) == {"http://www.w3.org/2000/svg"}
    assert (
        re.findall(r"""\b(?:src|href)=["']?([^"'> ]+)""", html) == ["data:,", "#dialogues"]
        and "@import" not in html
        and "url(" not in html
    )
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; script-src 'sha256-{digest}'" in html


def test_the_script_makes_text_and_never_html():
    """The pitfall of every viewer: one innerHTML, and whoever writes the data writes the page."""
    html = TEMPLATE.read_text(encoding="utf-8")
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
        "DOMParser",
        "srcdoc",
        "setHTML",
    ):
        assert word not in html, word
    assert not re.search(r"<[^>]+\son\w+=", html.split("<script")[0])


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_in_its_block_and_comes_out_whole(tmp_path, text):
    """In <script> HTML knows no escapes and ends at the first "</script"; so no "<" may be left,
    wherever the text stands."""
    everywhere = dialogue(
        text,
        turns=[turn(text, thought=text, user=text, analysis=text)],
        first_line=text,
        persona=text,
        intention=text,
        group=text,
        ended=text,
    )
    html, data = written(
        tmp_path / "r.html",
        title=text,
        settings={text: text},
        notes=[text],
        dialogues=[everywhere],
        tables=[{"title": text, "columns": [text], "rows": [[text]]}],
    )
    block = html.split('type="application/json">')[1].split("</script>")[0]
    assert (
        not set("<>&\u2028\u2029") & set(block)
        and html.count("<script") == 2
        and html.count("</script") == 2
    )
    (user,) = data["users"]
    (one,) = user["dialogues"]
    assert [data["title"], data["notes"], data["settings"], user["id"], one["first_line"]] == [
        text,
        [text],
        {text: text},
        text,
        text,
    ]
    assert one["turns"] == [turn(text, thought=text, user=text, analysis=text)]
    assert data["tables"][-1]["title"] == text and data["tables"][-1]["rows"] == [[text]]


def test_numbers_that_json_does_not_know(tmp_path):
    """One NaN, and JSON.parse shows an empty page. numpy's numbers are numbers, whatever has no
    JSON is text."""
    bad = [math.nan, math.inf, -math.inf, np.float32("nan"), None]
    curves = [curve(i + 1, kl=v, emotion=v, emotion_std=v) for i, v in enumerate(bad)] + [
        curve(6, emotion=np.float64(30.123456))
    ]
    settings = {"lr": math.nan, "batch": np.int64(64), "out": tmp_path, "betas": (0.9, 0.999)}
    _, data = written(
        tmp_path / "r.html",
        settings=settings,
        curves=curves,
        evaluations=[dict(step=0, score=v, stderr=v, n=np.int64(8)) for v in bad],
        dialogues=[
            dialogue(f"u-{i}", score=v, turns=[turn(change=v, emotion=v)])
            for i, v in enumerate(bad)
        ],
        tables=[
            {"title": "t", "columns": ["a", "b"], "rows": [[v, np.float32(1.25)] for v in bad]}
        ],
    )
    first = data["panels"][0]
    (line,) = first["lines"]
    assert line["values"] == [None] * 5 + [30.123]
    assert [line["shade"][key] for key in ("steps", "low", "high")] == [[6], [15.123], [45.123]]
    assert data["settings"] == {
        "lr": "null",
        "batch": "64",
        "out": json.dumps(str(tmp_path)),
        "betas": "[0.9, 0.999]",
    }
    assert data["tables"][1]["rows"] == [["–", "1.2"]] * 5 and data["tables"][0]["rows"][0] == [
        "0",
        "–",
        "–",
        "–",
        "–",
        "–",
        "8",
    ]
    assert [u["dialogues"][0]["score"] for u in data["users"]] == [None] * 5


def test_tables_say_what_is_a_number(tmp_path):
    """JSON does not know 85.0 from 85, so the cells are text, floats with one decimal; a column
    with a number stands to the right."""
    _, data = written(
        tmp_path / "r.html",
        tables=[
            {
                "title": "by kind",
                "columns": ["kind", "users", "score", "odd", "as text"],
                "rows": [
                    ["rational", 64, 85.0, "n/a", "-0.11"],
                    ["emotional", 64, -0.04, -3.26, "-"],
                ],
            }
        ],
    )
    assert data["tables"][1] == {
        "title": "by kind",
        "columns": ["kind", "users", "score", "odd", "as text"],
        "reading": None,
        "right": [False, True, True, True, True],
        "rows": [
            ["rational", "64", "85.0", "n/a", "-0.11"],
            ["emotional", "64", "0.0", "−3.3", "-"],
        ],
    }
    assert [t["title"] for t in data["tables"]] == ["Evaluations on held-out users", "by kind"]


def test_a_panel_for_all_that_was_measured_and_no_other(tmp_path):
    """Explained variance is None before there is a critic."""

    def titles(**changes):
        _, data = written(tmp_path / "r.html", **changes)
        return [panel["title"] for panel in data["panels"]]

    basic = titles()
    assert "Final emotion" in basic and "Explained variance" not in basic
    assert titles(curves=[curve(1, explained_variance=None)]) == basic
    assert titles(curves=[{"step": 1, "emotion": 30.0}]) == ["Final emotion"]
    every = {series.key: 0.5 for panel in PANELS for series in panel.series}
    assert titles(curves=[{**curve(1), **every}]) == [panel.title for panel in PANELS]


def test_what_is_always_0_is_said_in_words_and_not_drawn(tmp_path):
    """An empty frame says less than a sentence."""
    zeros = {"kl": 0.0, "clipfrac": 0.0, "reward_talk": None}

    def hidden(data):
        return {text.split(" (")[0] for texts in data["zero"].values() for text in texts}

    _, data = written(tmp_path / "r.html", curves=[curve(s, **zeros) for s in (1, 2)])
    assert hidden(data) == {"KL within the update", "Clipped"}
    assert not {panel["title"] for panel in data["panels"]} & hidden(data)
    assert all(panel.meaning for panel in PANELS if panel.hide_if_zero)
    # one step in which it is not 0, and it is drawn
    _, data = written(tmp_path / "r.html", curves=[curve(1, **zeros), curve(2, kl=1e-9)])
    assert "KL within the update" in [panel["title"] for panel in data["panels"]]


def test_captions_mention_only_what_is_there(tmp_path):
    """Nothing is said of a curve that is not drawn, nor of thoughts in a run without them."""

    def captions(**changes):
        _, data = written(tmp_path / "r.html", **changes)
        return " ".join(panel["reading"] for panel in data["panels"])

    plain = captions(curves=[curve(s, malformed=0.0, kl=0.0) for s in (1, 2)])
    for word in ("alformed", "thought", "update"):
        assert word not in plain, word
    assert "A malformed reply ends" in captions(curves=[curve(1, malformed=0.5)])
    assert "thought" in captions(settings={"think": True})


def test_shades_end_where_what_is_measured_ends(tmp_path):
    """The spread of emotions of 98 reached to 128."""
    rows = [curve(s, emotion=98.0, emotion_std=30.0) for s in (1, 2)]
    panel = written(tmp_path / "r.html", curves=rows)[1]["panels"][0]
    (line,) = panel["lines"]
    assert (line["shade"]["low"], line["shade"]["high"]) == ([68.0, 68.0], [100.0, 100.0])
    assert "differ, and no uncertainty" in panel["reading"]


def test_the_thick_curve_is_the_mean_of_the_last_five_steps(tmp_path):
    """A value that is missing is a gap, and counts in no mean."""
    values = [1.0, 3.0, None, 5.0, 7.0, 9.0, 11.0]
    rows = [curve(s, entropy=value) for s, value in enumerate(values, 1)]
    _, data = written(tmp_path / "r.html", curves=rows)
    (line,) = next(panel["lines"] for panel in data["panels"] if panel["title"] == "Entropy")
    assert line["values"] == values and line["mean"] == [1, 2, None, 3, 4, 6, 8]


def test_an_evaluation_has_no_curves_and_a_fresh_run_no_dialogues(tmp_path):
    alone = [dict(step=None, score=66.6, stderr=1.0, n=100)]
    _, data = written(tmp_path / "r.html", curves=[], evaluations=alone, dialogues=[])
    assert data["panels"] == [] and data["users"] == [] and data["count"] == ""
    # no step, so no column of steps
    assert data["tables"][0]["columns"][0] == "score"
    assert data["tables"][0]["rows"] == [["66.6", "1.0", "–", "–", "–", "100"]]
    _, data = written(tmp_path / "r.html", curves=[], evaluations=[], dialogues=[], settings={})
    assert data["tables"] == [] and data["headline"] == []
    _, data = written(tmp_path / "r.html", curves=[])
    (panel,) = data["panels"]  # two evaluations have a course
    assert panel["lines"] == [] and len(panel["points"]) == 2


# ---------------------------------------------------------------------------------- which are shown


def test_those_shown_are_whole_users_evenly_over_the_scores(tmp_path):
    """128 of 500: the reader sees the worst, the best and the same share of all between."""
    many = pairs(250, lambda i: i * 89 % 250 / 2.5)
    _, data = written(tmp_path / "r.html", dialogues=many, limit=128)
    assert data["count"].startswith("128 of 500 dialogues, 372 left out.")
    assert len(data["users"]) == 64
    assert all([d["side"] for d in u["dialogues"]] == ["before", "after"] for u in data["users"])
    ranks = [round(u["dialogues"][1]["score"] * 2.5) for u in data["users"]]
    assert (ranks[0], ranks[-1]) == (0, 249)
    assert {b - a for a, b in zip(ranks, ranks[1:])} <= {3, 4}
    assert choose(pairs(100), 1) == [] and len(choose(pairs(100), 7)) == 3  # no half user


def test_users_with_one_dialogue_and_users_with_many():
    """An evaluation has one dialogue a user, a benchmark may have several: all of one id stay
    together, in the order of time."""
    mixed = (
        [dialogue("many", "", 50, step=s) for s in (3, 1, 2)]
        + [dialogue(f"one-{i}", "", i) for i in range(40)]
        + pairs(20)[::-1]
    )
    picked = choose(mixed, 30)
    assert 27 <= sum(map(len, picked)) <= 30
    for user in picked:
        assert len(user) == {"m": 3, "o": 1, "u": 2}[user[0]["id"][0]]
    everybody = choose(mixed, 1000)
    (many,) = [user for user in everybody if user[0]["id"] == "many"]
    assert [dialogue["step"] for dialogue in many] == [1, 2, 3]
    scores = [user[-1]["score"] for user in everybody]
    assert scores == sorted(scores)


@pytest.mark.slow
def test_200_long_dialogues_stay_below_5_megabytes(tmp_path):
    """A thinking model fills thousands of tokens a turn; what is shortened says by how much."""
    path = tmp_path / "r.html"
    _, data = written(path, dialogues=long_dialogues(length=6_000, sign="我听到你有多难过。"))
    assert 1_000_000 < path.stat().st_size <= 5_000_000 and data["count"].startswith("200 of 200")
    text = data["users"][0]["dialogues"][1]["turns"][-1]["reply"]
    assert len(text) < 4100 and text.endswith(" [… shortened, 6,003 characters in all]")
