"""support/page.py: what is in the report's file, which dialogues are shown, and that nothing a
model says can do more in the reader's browser than be read."""

from support.page import PANELS, TEMPLATE, TEXTS, choose, write_report
from support.picture import COLOURS
from support.signs import hacking_warnings

import base64
import hashlib
import itertools
import json
import math
import os
import re

import numpy as np
import pytest

from pages import HOSTILE, arguments, curve, dialogue, long_dialogues, pairs, turn, written

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
    """Old runs lack the newer metrics; explained variance is None before there is a critic."""

    def titles(**changes):
        _, data = written(tmp_path / "r.html", **changes)
        return [panel["title"] for panel in data["panels"]]

    basic = [
        "Final emotion",
        "How dialogues end",
        "Length of a reply",
        "Length of a dialogue",
        "Entropy",
        "KL within the update",
    ]
    assert titles() == titles(curves=[curve(1, explained_variance=None)]) == basic
    (panel,) = written(tmp_path / "r.html", curves=[{"step": 1, "emotion": 30.0}])[1]["panels"]
    assert panel["title"] == "Final emotion" and "shade" not in panel["lines"][0]
    every = {series.key: 0.5 for panel in PANELS for series in panel.series}
    assert titles(curves=[{**curve(1), **every}]) == [panel.title for panel in PANELS]
    _, data = written(tmp_path / "r.html", curves=[curve(1, repeat_within=0.1), curve(3)])
    assert data["panels"][-1]["lines"] == [
        {
            "key": "repeat_within",
            "label": "said before to the same user",
            "colour": "red",
            "values": [0.1, None],
            "mean": [0.1, None],
        }
    ]
    assert data["panels"][0]["steps"] == [1, 3] and data["panels"][0]["points"] == [
        [0, 20.0, 1.5],
        [3, 23.0, 1.5],
    ]


def test_what_is_always_0_is_said_in_words_and_not_drawn(tmp_path):
    """An empty frame says less than a sentence. With one update a rollout the KL within it is 0
    because nothing has changed yet: a caption that explains its jumps explains nothing."""
    zeros = {"kl": 0.0, "flat_groups": 0.0, "clipfrac": 0.0, "dropped": 0, "reward_talk": None}
    _, data = written(tmp_path / "r.html", curves=[curve(s, **zeros) for s in (1, 2)])
    assert data["zero"] == {
        "Learning": [
            "Zero-variance groups (groups in which all dialogues have the same reward)",
            "KL within the update (how far the later mini-batches of a step are from its first "
            "one)",
        ],
        "Signs of reward hacking": [
            "Dropped (dialogues that were lost because the user's model failed)"
        ],
        "The update": ["Clipped (tokens that the clip gives no gradient)"],
    }
    titles = {panel["title"] for panel in data["panels"]}
    hidden = {text.split(" (")[0] for texts in data["zero"].values() for text in texts}
    assert not titles & hidden
    assert all(panel.meaning for panel in PANELS if panel.hide_if_zero)
    # one step in which it is not 0, and it is drawn
    _, data = written(tmp_path / "r.html", curves=[curve(1, **zeros), curve(2, kl=1e-9)])
    assert "KL within the update" in [panel["title"] for panel in data["panels"]]
    assert [text.split(" (")[0] for text in data["zero"]["Learning"]] == ["Zero-variance groups"]


def test_captions_mention_only_what_is_there(tmp_path):
    """The first sentence under the first curve spoke of a user who watches; most runs have none."""

    def captions(**changes):
        _, data = written(tmp_path / "r.html", **changes)
        return " ".join(panel["reading"] for panel in data["panels"])

    plain = captions(curves=[curve(s, malformed=0.0, kl=0.0) for s in (1, 2)])
    for word in ("watch", "alformed", "thought", "update"):
        assert word not in plain, word
    assert "watches" in captions(curves=[curve(1, watched=20.0)])
    assert "A malformed reply ends" in captions(curves=[curve(1, malformed=0.5)])
    assert "thought" in captions(settings={"think": True})
    # one of GRPO spoke of PPO
    repeating = [curve(1, repeat_across=0.5, repeat_within=0.1)]
    for algo, other in (("grpo", "0.24 and 0.36"), ("ppo", "0.61 and 0.73")):
        said = captions(curves=repeating, settings={"algo": algo})
        assert "For another dialogue" in said and other not in said and "PPO" not in said
    # the other dialogue is often with the same user, so "another user" was wrong
    texts = [TEXTS["signs"]["names"]["repeat_across"]]
    texts += [
        line.label for panel in PANELS for line in panel.series if line.key == "repeat_across"
    ]
    assert len(texts) == 2 and all("in another dialogue too" in text for text in texts)
    assert "For another dialogue" not in captions(curves=repeating, settings={})
    _, data = written(tmp_path / "r.html", curves=[curve(1, malformed=0.0), curve(2, malformed=0)])
    ends = data["panels"][1]
    assert [line["key"] for line in ends["lines"]] == ["success", "failure"]


def test_shades_end_where_what_is_measured_ends(tmp_path):
    """The spread of emotions of 98 reached to 128, and the band of a KL below 0."""
    rows = [curve(s, emotion=98.0, emotion_std=30.0) for s in (1, 2)]
    bands = {
        "kl": (np.array([1e-4, 2e-4]), np.array([1e-4, 0.5e-4])),
        "success": (np.array([99.0, 50.0]), np.array([5.0, 5.0])),
    }
    _, data = written(tmp_path / "r.html", curves=rows, bands=bands)
    shades = {
        line["key"]: (line["shade"]["low"], line["shade"]["high"])
        for panel in data["panels"]
        for line in panel["lines"]
        if "shade" in line
    }
    assert shades == {
        "emotion": ([68.0, 68.0], [100.0, 100.0]),
        "success": ([89.0, 40.0], [100.0, 60.0]),
        "kl": ([0.0, 1e-4], [3e-4, 3e-4]),
    }
    assert "differ, and no uncertainty" in data["panels"][0]["reading"]
    with_band = {"emotion": (np.array([98.0, 98.0]), np.array([1.0, 1.0]))}
    _, data = written(tmp_path / "r.html", curves=rows, bands=with_band)
    assert data["panels"][0]["lines"][0]["shade"]["label"].startswith("ten reference runs")
    assert "uncertainty" not in data["panels"][0]["reading"]


def test_the_page_says_if_its_user_is_a_script(tmp_path):
    """Else nobody who opens the page learns whom the score of 85 is from."""
    for simulator, words in (
        ("toy", "Made by rule: the user toy is a script. It knows a small grammar"),
        ("openai:m@http://x", ""),
    ):
        _, data = written(tmp_path / "r.html", settings={"simulator": simulator})
        assert data["user"].startswith(words) and bool(data["user"]) == bool(words)


@pytest.mark.parametrize(
    "title, words, key, first, below, above",
    [
        ("How dialogues end", "limit is 10 %", "malformed", 0, 9.9, 10.1),
        ("Zero-variance groups", "limit is 0.5", "flat_groups", 0, 0.49, 0.51),
        ("Length of a reply", "limit is 1.75 times", "reply_words", 10, 17.4, 17.6),
        ("Length of a reply", "or 1.75 times fewer", "reply_words", 17.5, 10.1, 9.9),
        ("Repetition", "0.25, and twice the first", "repeat_within", 0.1, 0.24, 0.26),
        ("Repetition", "0.25, and twice the first", "repeat_within", 0.2, 0.39, 0.41),
        ("Repetition", "0.9 for another dialogue", "repeat_across", 0.1, 0.89, 0.91),
        ("Variety", "a third of the first", "distinct_2", 0.3, 0.101, 0.099),
        ("Talk of the reward", "limit is 0.02", "reward_talk", 0, 0.019, 0.021),
        ("KL from the start", "limit is 5", "kl_start", 0, 4.9, 5.1),
        ("Dropped", "a tenth of all", "dropped", 0, 7, 8),
    ],
)
def test_captions_name_the_limits_of_the_warnings(title, words, key, first, below, above):
    """A curve that climbs to 0.7 under "no sign was found" must say where its limit is."""
    (panel,) = (panel for panel in PANELS if panel.title == title)
    assert words in " ".join([panel.reading, *(series.reading for series in panel.series)])
    for last, warnings in ((below, 0), (above, 1)):
        values = [first] * 5 + [last] * 5
        rows = [{key: value, "episodes": 64} for value in values]
        assert len(hacking_warnings(rows)) == warnings, last


def test_every_score_names_its_scale(tmp_path):
    """85 from 30 in eight replies is another result than 85 from 40 in ten."""
    _, data = written(tmp_path / "r.html", scale="from 40, 6 replies")
    assert data["scale"] == "from 40, 6 replies"
    first = data["panels"][0]
    assert f"{first['title']}, {first['unit']}" == "Final emotion, from 40, 6 replies"
    _, data = written(tmp_path / "r.html")  # where nobody knows it, nothing is claimed
    assert data["scale"] is None and data["panels"][0]["unit"] == "0 to 100"


# What a reader sees who lacks one of the three kinds of cones: matrices over linear RGB of Machado
# et al. 2009, "A physiologically-based model for simulation of color vision deficiency",
# severity 1.
VISION = {
    "usual": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
XYZ_OF_RGB = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
)
WHITE = np.array([0.95047, 1.0, 1.08883])


def lab(colour, vision):
    """A colour, "#005ab5", in CIE Lab as it is seen; there distances are as they are felt, and 10
    are seen at a glance."""
    rgb = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    seen = np.clip(np.array(vision) @ linear, 0, 1)
    x, y, z = np.cbrt(np.maximum(XYZ_OF_RGB @ seen / WHITE, 1e-6))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("kind", VISION)
def test_the_curves_of_a_panel_differ_for_colour_blind_readers(kind):
    """In the page by day and by night, and in the picture, which has the colours of the day."""
    css = TEMPLATE.read_text(encoding="utf-8").split("* { box-sizing")[0]
    themes = [dict(re.findall(r"--(\w+): (#\w{6})", part)) for part in css.split("@media")]
    assert COLOURS.items() <= themes[0].items() and len(themes) == 2
    together = set()
    for panel in PANELS:
        together |= set(itertools.combinations([series.colour for series in panel.series], 2))
    assert len(together) > 10
    for theme in themes:
        for one, other in together:
            distance = np.linalg.norm(
                lab(theme[one], VISION[kind]) - lab(theme[other], VISION[kind])
            )
            assert distance > 15, (one, other, theme[one], theme[other])


def test_an_evaluation_has_no_curves_and_a_fresh_run_no_dialogues(tmp_path):
    _, data = written(
        tmp_path / "r.html",
        curves=[],
        evaluations=[dict(step=None, score=66.6, stderr=1.0, n=100)],
        dialogues=[],
    )
    assert data["panels"] == [] and data["users"] == [] and data["count"] == ""
    # no step, so no column of steps
    assert data["tables"][0]["columns"][0] == "score"
    assert data["tables"][0]["rows"] == [["66.6", "1.0", "–", "–", "–", "100"]]
    _, data = written(tmp_path / "r.html", curves=[], evaluations=[], dialogues=[], settings={})
    assert data["tables"] == []
    assert data["headline"] == []
    # measured at no step
    _, data = written(
        tmp_path / "r.html", curves=[], evaluations=[dict(score=66.6), dict(score=70.0)]
    )
    assert data["panels"] == []
    _, data = written(tmp_path / "r.html", curves=[])
    (panel,) = data["panels"]  # two evaluations have a course
    assert panel["title"] == "Final emotion" and panel["lines"] == [] and len(panel["points"]) == 2


def test_the_file_is_there_whole_or_not_at_all(tmp_path, monkeypatch):
    """Written beside and renamed: a reader, or a run that is killed, never meets half a page."""
    path = tmp_path / "deep" / "r.html"
    written(path, title="old")
    old, seen = path.read_bytes(), []

    def replace(source, target):
        assert path.read_bytes() == old
        seen.append(
            (source.parent == target.parent, source.read_bytes().rstrip().endswith(b"</html>"))
        )
        raise OSError("killed")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="killed"):
        write_report(path, **arguments(title="new"))
    assert path.read_bytes() == old and seen == [(True, True)]
    monkeypatch.undo()
    assert written(path, title="new")[1]["title"] == "new" and [
        p.name for p in path.parent.iterdir()
    ] == ["r.html"]


# ---------------------------------------------------------------------------------- which are shown


def test_those_shown_are_whole_users_evenly_over_the_scores(tmp_path):
    """128 of 500: the reader sees the worst, the best and the same share of all between, not the
    first that came."""
    _, data = written(
        tmp_path / "r.html", dialogues=pairs(250, lambda i: i * 89 % 250 / 2.5), limit=128
    )
    assert (
        data["count"].startswith("128 of 500 dialogues, 372 left out.") and len(data["users"]) == 64
    )
    assert all([d["side"] for d in u["dialogues"]] == ["before", "after"] for u in data["users"])
    ranks = [round(u["dialogues"][1]["score"] * 2.5) for u in data["users"]]
    assert (
        ranks[0] == 0 and ranks[-1] == 249 and {b - a for a, b in zip(ranks, ranks[1:])} <= {3, 4}
    )
    _, data = written(tmp_path / "r.html", dialogues=pairs(5))
    assert data["count"] == "10 of 10 dialogues, none left out."
    _, data = written(tmp_path / "r.html", dialogues=[dialogue()])
    assert data["count"] == ""  # of one dialogue there is nothing to count


@pytest.mark.parametrize(
    "limit, users", [(0, 0), (1, 0), (2, 1), (7, 3), (199, 99), (200, 100), (10**6, 100)]
)
def test_no_more_than_the_limit_and_no_half_user(limit, users):
    picked = choose(pairs(100), limit)
    assert [len(user) for user in picked] == [2] * users
    assert len({user[0]["id"] for user in picked}) == users


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


@pytest.mark.parametrize(
    "sign",
    [
        pytest.param("I hear how much this hurts. ", id="english", marks=pytest.mark.soak),
        pytest.param("我听到你有多难过。", id="chinese", marks=pytest.mark.slow),
        pytest.param("\ud83d", id="broken", marks=pytest.mark.soak),
    ],
)
def test_200_long_dialogues_stay_below_5_megabytes(tmp_path, sign):
    """A thinking model fills thousands of tokens a turn; what is shortened says by how much."""
    path = tmp_path / "r.html"
    html, data = written(path, dialogues=long_dialogues(length=6_000, sign=sign))
    length = len(sign) * (6_000 // len(sign) + 1)
    assert 1_000_000 < path.stat().st_size <= 5_000_000 and data["count"].startswith("200 of 200")
    for text in (
        data["users"][0]["dialogues"][1]["turns"][-1]["reply"],
        data["users"][-1]["dialogues"][0]["turns"][0]["analysis"],
    ):
        assert (
            len(text) < 4100
            and text.startswith(sign)
            and text.endswith(f" [… shortened, {length:,} characters in all]")
        )
    _, data = written(path, dialogues=[dialogue(turns=[turn("x" * 4000), turn("y" * 4001)])])
    first, second = data["users"][0]["dialogues"][0]["turns"]
    assert (
        first["reply"] == "x" * 4000
        and second["reply"] == "y" * 4000 + " [… shortened, 4,001 characters in all]"
    )
