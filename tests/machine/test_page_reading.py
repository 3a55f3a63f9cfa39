"""The report's page as a reader uses it, in headless Chromium driven by selenium: curves, dialogues
side by side, order, steps from user to user, search.

Where Chromium, chromedriver or selenium is missing these tests skip and say which.
"""

from support import strategies

import re

import numpy as np
import pytest

from pages import BEFORE, curve, dialogue, pairs, turn


@pytest.mark.slow
def test_the_page_shows_the_run(page):
    page.open(
        title="grpo, think",
        notes=["repeat_across rose to 0.4"],
        curves=[
            curve(s, repeat_within=0.1, reward_talk=0, kl_start=0.01 * s) for s in range(1, 51)
        ],
        tables=[{"title": "by kind", "columns": ["kind", "score"], "rows": [["rational", 85.0]]}],
    )
    assert page.driver.title == page.one("h1").text == "grpo, think"
    assert page.one(".notes").text == "Signs of reward hacking\nrepeat_across rose to 0.4"
    assert [e.text.split(",")[0] for e in page.all("figcaption")] == [
        "Final emotion",
        "How dialogues end",
        "Length of a reply",
        "Length of a dialogue",
        "Entropy",
        "KL within the update",
        "Repetition",
        "KL from the start",
    ]
    first = page.all("figure")[0]
    for part, count in ((".band", 1), (".curve", 1), (".single", 1), (".point", 2), (".error", 6)):
        assert len(first.find_elements("css selector", f"svg[role] {part}")) == count, part
    assert "training users 70" in first.text and "training step" in first.text
    assert (
        page.texts("td.right")[-1] == "85.0"
        and page.js("getComputedStyle(document.querySelector('td.right')).textAlign") == "right"
    )
    not_drawn = "Talk of the reward (replies that speak of scores or points)"
    assert f"0 in every step, and so not drawn: {not_drawn}." in page.texts("#curves .reading")
    assert not page.one("#settings dl").is_displayed()
    page.one("#settings summary").click()
    assert page.one("#settings dl").text.split("\n") == ["algo", "grpo", "lr", "0.0003"]
    page.open(curves=[curve(s) for s in range(20)])
    assert page.one("#notes").text == "Signs of reward hacking: none passed its limit."
    page.open(curves=[curve(s) for s in range(19)])  # too few: a tenth of them is one step
    assert page.one("#notes").text == ""
    page.open(curves=[], dialogues=[], evaluations=[])  # where nobody looked, none was found
    assert page.one("#notes").text == page.one("#curves").text == ""
    assert not page.all("#dialogues, table")


@pytest.mark.slow
def test_curves_stay_inside_their_frame(page):
    """Also where there is one step, all are equal, the spread leaves 0..100, or a number is tiny,
    negative or missing."""
    odd = [
        curve(
            s,
            emotion=98.0,
            emotion_std=30.0,
            entropy=0.0,
            kl=None if s % 2 else 3e-7,
            explained_variance=-0.3,
            grad_norm=123456.7,
        )
        for s in range(1, 8)
    ]
    for curves in (odd, odd[:1], [{"step": 5, "emotion": 0.0}]):
        page.open(
            curves=curves,
            evaluations=[
                dict(step=0, score=1.0, stderr=9.0),
                dict(step=9, score=None, stderr=None),
            ],
        )
        boxes = page.js("""[...document.querySelectorAll("figure > svg > *")].map(e => {
            const b = e.getBBox();
            return [e.tagName, b.x, b.y, b.x + b.width, b.y + b.height]; })""")
        assert boxes
        for name, left, top, right, bottom in boxes:
            assert left >= -0.5 and top >= -3 and right <= 360.5 and bottom <= 210.5, name
        assert "NaN" not in page.js("document.getElementById('curves').innerHTML")
        if curves is odd:  # what is missing is a gap and no zero; a value between gaps is a dot
            assert (
                re.findall(
                    "[MLh]",
                    page.js("document.querySelectorAll('svg[role] .curve')[7].getAttribute('d')"),
                )
                == ["M", "h"] * 3
            )


@pytest.mark.slow
def test_curves_of_a_panel_differ_without_colour(page):
    """Five strategies are five ways to draw a line, in the picture and in its legend."""
    curves = [
        curve(s, **{f"uses {name}": s for name in strategies.RLVER_GROUPS}) for s in range(1, 9)
    ]
    page.open(curves=curves)
    dashes = """[...arguments[0].querySelectorAll(arguments[1])].map(
        e => e.getAttribute('stroke-dasharray'))"""
    for part in ("svg[role] > .curve", ".legend .curve"):
        five = page.js(dashes, page.all("figure")[-1], part)
        assert len(five) == len(set(five)) == 5, part


@pytest.mark.slow
def test_the_legend_reads_the_step_under_the_pointer(page):
    page.open(curves=[curve(s, reply_tokens=100.0 + s) for s in range(1, 101)])
    from selenium.webdriver import ActionChains

    figure = page.all("figure")[2]
    assert "tokens per reply 200" in figure.text
    picture = figure.find_element("css selector", "svg")
    ActionChains(page.driver).move_to_element_with_offset(picture, 0, 0).perform()
    step = int(re.search(r"step (\d+)\n", figure.text).group(1))
    assert 35 < step < 65 and f"tokens per reply {100 + step}" in figure.text


@pytest.mark.slow
def test_before_and_after_stand_side_by_side(page):
    before = dialogue(
        "u-1", "before", 12, [turn("Cheer up. " * 99, -9, 21), turn("Cheer up.", -9, 12)]
    )
    page.open(dialogues=[dialogue("u-1", "after", 80), before, dialogue("alone", "", 5)])
    assert page.texts(".list .ends") == ["12 → 80 (+68)", "5"] and len(page.all(".side")) == 2
    page.all(".list button")[1].click()
    assert len(page.all(".side")) == 1
    page.all(".list button")[0].click()
    before, after = page.all(".side")
    assert before.text.startswith("Before training, step 0\nscore 12") and after.text.startswith(
        "After training, step 50\nscore 80"
    )
    assert (
        abs(before.rect["y"] - after.rect["y"]) < 1
        and after.rect["x"] >= before.rect["x"] + before.rect["width"]
    )
    rows = [
        [t.rect["y"] for t in side.find_elements("css selector", ".turn")]
        for side in (before, after)
    ]
    # the same turn stands level, however long the one before
    assert rows[0] == pytest.approx(rows[1], abs=1) and len(rows[0]) == 3
    assert [e.text.split("\n") for e in after.find_elements("css selector", ".felt")] == [
        ["emotion", "30"],
        ["emotion", "35", "+5"],
        ["emotion", "32", "−3"],
    ]
    assert page.js("[...arguments[0].querySelectorAll('svg text')].map(t => t.textContent)", after)[
        :5
    ] == ["0", "10", "40", "70", "100"]
    assert (
        after.find_element("css selector", "svg").get_attribute("aria-label")
        == "emotion after each reply: 30, 35, 32; score 80"
    )
    assert len(page.js("[...arguments[0].querySelectorAll('circle')]", after)) == 3


@pytest.mark.slow
def test_one_dialogue_needs_no_search_no_order_and_no_list(page):
    """As tools.chat --html writes it. The page of a tool that held none has no such section."""
    page.open(
        dialogues=[dialogue("u-1", "")],
        curves=[],
        evaluations=[],
        settings={},
        scale="from 40, 10 replies",
    )
    for part in ("#search", "#sort", ".list", "#previous", "#next", "#place"):
        assert not page.one(part).is_displayed(), part
    assert page.one("#heading").text == "Dialogue" and page.one("#count").text == ""
    assert "The scale here is “from 40, 10 replies”" in page.one("#scale").text
    assert page.one("#folds").is_displayed() and len(page.all(".turn")) == 3
    # the dialogue has the room of the list
    assert page.one("#person").rect["width"] == page.one("#dialogues").rect["width"]
    assert page.all("#settings, #curves *, #tables *") == []
    page.open(dialogues=[], tables=[{"title": "t", "columns": ["a"], "rows": [[1]]}])
    assert page.all("#dialogues") == []


@pytest.mark.slow
def test_the_caption_of_the_dialogues_mentions_only_what_is_there(page):
    """A red line, where a reply never reached the user; marks, where an analysis has some."""
    unfelt = [turn(), turn(change=None, emotion=None, user=None, analysis=None)]
    marked = [turn(mark="kqvt")]
    for turns, red, marks in (
        ([turn()], False, False),
        (unfelt, True, False),
        (marked, False, True),
    ):
        page.open(dialogues=[dialogue("u-1", turns=turns, score=0), dialogue("u-2", score=50)])
        caption = page.one("#curve").text
        assert ("dashed red line" in caption) == red == bool(page.all(".sides .curve.red"))
        assert ("with the mark" in caption) == marks


@pytest.mark.slow
def test_before_and_after_alternate_on_a_narrow_screen(page):
    """Side by side does not fit; one below the other, nobody compares turns. Each says whose it
    is, and the later side stands on a ground of its own."""
    short, long = [turn()], [turn(), turn("Take your time.", -3, 32)]
    page.open(400, dialogues=[dialogue("u-1", "before", 12, short), dialogue("u-1", turns=long)])
    seen = sorted((t.rect["y"], t.text.split("\n")[0]) for t in page.all(".turn"))
    assert [text for _, text in seen] == [
        "Before: User",
        "After: User",
        "Before: Model, reply 1",
        "After: Model, reply 1",
        "After: Model, reply 2",
    ]
    assert [
        h.text.split(",")[0] for h in sorted(page.all(".side h4"), key=lambda e: e.rect["y"])
    ] == ["Before training", "After training"]
    assert max(h.rect["y"] for h in page.all(".head")) < seen[0][0]
    assert page.js("document.documentElement.scrollWidth") <= 400
    page.open(1280, dialogues=pairs(1))
    assert "Before: " not in page.one("#user").text
    page.open(400, dialogues=[dialogue(side="")])
    assert page.all(".turn")[0].text.startswith("User")


@pytest.mark.slow
def test_the_median_gain_is_shown_first_and_users_can_be_sorted(page):
    """Not the worst loss: what training does to most. Who was met only once has no gain and comes
    last."""
    gains = {"u-0": -20, "u-1": 0, "u-2": 50, "u-3": 10, "u-4": 60}
    people = [
        dialogue(name, side, 30 + i + gain * (side == "after"))
        for i, (name, gain) in enumerate(gains.items())
        for side in ("before", "after")
    ]
    page.open(dialogues=people + [dialogue("alone", "after", 99)])
    assert page.one("#user h3").text == "u-3" and "median gain" in page.one("#count").text
    assert page.one("#place").text == "3 of 6"
    ends = dict(zip(page.texts(".list b"), page.texts(".list .ends")))
    assert ends["u-0"] == "30 → 10 (−20)" and ends["u-4"] == "34 → 94 (+60)"
    assert page.texts("#sort option") == [
        "gain, largest first",
        "loss, largest first",
        "score, lowest first",
        "score, highest first",
    ]
    for by, ids in (
        ("gain", "u-4 u-2 u-3 u-1 u-0 alone"),
        ("loss", "u-0 u-1 u-3 u-2 u-4 alone"),
        ("score", "u-0 u-1 u-3 u-2 u-4 alone"),
        ("best", "alone u-4 u-2 u-3 u-1 u-0"),
    ):
        page.sort(by)
        if by == "gain":  # it was chosen already: nothing happens
            page.sort("score")
            page.sort("gain")
        assert page.texts(".list b") == ids.split(), by
        assert page.texts("#user h3") == page.texts(".list [aria-current] b") == ids.split()[:1]
    page.search("u-")
    assert page.one("#hits").text == "5 of 6 users" and page.texts("#user h3") == ["u-4"]
    page.open(dialogues=[dialogue(f"u-{i}", "", i) for i in range(5)])  # of an evaluation
    assert page.texts("#user h3") == ["u-2"] and len(page.all("#sort option")) == 2


@pytest.mark.slow
def test_the_page_opens_with_the_answer_and_explains_itself(page):
    page.open(tables=[{"title": "t", "columns": ["a"], "rows": [[1]], "reading": "One is one."}])
    assert page.one("body").text.split("\n")[:3] == [
        "a run",
        "Final emotion 20.0 ± 1.5 to 23.0 ± 1.5 (128 held-out users, ± standard errors), 3.0 % "
        "failures to 3.0 %",
        "Before and after 3 training steps.",
    ]
    assert len(page.all("figure .reading")) == len(page.all("figure")) and all(
        e.is_displayed() for e in page.all("figure .reading")
    )
    assert page.texts("#tables .reading")[1] == "One is one." and page.all("#reading > .reading")
    page.open(
        curves=[], evaluations=[BEFORE], dialogues=[dialogue(side="before")], settings={"steps": 0}
    )
    assert not page.all("figure, #curves h2") and "nothing to draw" not in page.one("body").text


@pytest.mark.slow
def test_the_top_of_the_page_leads_to_what_is_looked_for(page):
    """Whose score it is, what is not usual about the run, and, on a phone, a long way down, the
    dialogues."""
    page.open(400, settings={"simulator": "toy", "steps": 3}, changed="--steps 3")
    assert page.one("#rule").text.startswith("Made by rule: the user toy is a script")
    assert page.one("#changed").text == "Changed from the defaults: --steps 3"
    assert not page.one("#settings dl").is_displayed()
    page.one("#jump a").click()
    assert abs(page.js("document.getElementById('dialogues').getBoundingClientRect().top")) < 60
    page.open(400, settings={"simulator": "openai:m@http://x"}, dialogues=[], changed="")
    assert page.one("#changed").text == "Changed from the defaults: nothing"
    assert page.all("#rule, #jump") == []
    page.open(400, curves=[], evaluations=[])  # nothing stands above the dialogues
    assert page.all("#jump") == [] and page.all("#dialogues")
    page.open()
    assert page.all("#changed") == []


@pytest.mark.slow
def test_curves_lie_on_the_band_of_the_reference_runs(page):
    """Each band has its shade, and the legend names it once."""
    bands = {key: (np.full(3, 20.0), np.full(3, 5.0)) for key in ("success", "failure")}
    page.open(bands=bands)
    ends = page.all("figure")[1]
    assert len(ends.find_elements("css selector", "svg[role] .band")) == 2
    assert ends.text.count("ten reference runs, mean ± 2 standard deviations") == 1
    # in both colours of the bands: the one swatch had the first one's
    swatches = ends.find_elements("css selector", ".legend .band")
    assert [swatch.get_attribute("class") for swatch in swatches] == ["band green", "band red"]
    assert "thick: mean of the last 5 steps; thin, and the numbers: single steps" in ends.text


@pytest.mark.slow
def test_stepping_from_user_to_user(page):
    """By the buttons and by the keys, and not past the ends; keys that belong to the search box
    stay there."""
    page.open(dialogues=pairs(4))
    page.sort("score")

    def name():
        return page.one("#user h3").text

    assert (name(), page.one("#place").text) == ("u-0", "1 of 4") and not page.one(
        "#previous"
    ).is_enabled()
    page.one("#next").click()
    assert name() == "u-1" and page.texts(".list [aria-current] b") == ["u-1"]
    body = page.one("body")
    # right, right, right, left
    for key, seen in (("\ue014", "u-2"), ("\ue014", "u-3"), ("\ue014", "u-3"), ("\ue012", "u-2")):
        body.send_keys(key)
        assert name() == seen
    page.one("#search").send_keys("\ue012")
    assert (
        name() == "u-2" and page.js("document.querySelectorAll('.list [aria-current]').length") == 1
    )
    page.one("#next").click()
    assert name() == "u-3" and not page.one("#next").is_enabled()
    page.one("#previous").click()
    assert (name(), page.one("#place").text) == ("u-2", "3 of 4")


@pytest.mark.slow
def test_folds_open_one_by_one_and_all_at_once(page):
    page.open(dialogues=pairs(2))

    def displayed():
        return [fold.is_displayed() for fold in page.all("#user details > p")]

    # the persona; in 2 dialogues, 2 turns each: a thought, an analysis
    assert displayed() == [False] * 9
    page.all("#user .said summary")[0].click()
    assert sum(displayed()) == 1
    page.one("#folds").click()
    assert all(displayed()) and page.one("#folds").text == "Close all"
    page.one("#next").click()
    assert all(displayed())  # stays so for the next user
    page.one("#folds").click()
    assert not any(displayed()) and page.one("#folds").text == "Open all"


@pytest.mark.slow
def test_search_counts_its_hits(page):
    """In the id, the intention, the group and all that was said, thought and analysed; capitals do
    not matter."""
    people = [
        dialogue("u-10", intention="You want sincere praise."),
        dialogue("u-11", group="avoidant", score=1),
        dialogue("u-12", turns=[turn(thought="a rare THOUGHT about Lighthouses")]),
        dialogue("u-13", turns=[turn(analysis="zebra")]),
    ]
    page.open(dialogues=people)
    page.all(".list button")[0].click()
    everybody = page.texts(".list b")
    # lowest score first
    assert page.one("#hits").text == "4 users" and everybody == ["u-11", "u-10", "u-12", "u-13"]
    for words, ids, open_one in (
        ("u-1", everybody, ["u-11"]),
        ("sincere", ["u-10"], ["u-10"]),
        ("AVOID", ["u-11"], ["u-11"]),
        ("lighthouses", ["u-12"], ["u-12"]),
        ("zebra", ["u-13"], ["u-13"]),
        ("birthday", everybody, ["u-13"]),
        ("no such words", [], []),
        (".*", [], []),
    ):
        page.search(words)
        assert page.one("#hits").text == f"{len(ids)} of 4 users", words
        assert [e.text for e in page.all(".list b") if e.is_displayed()] == ids and page.texts(
            "#user h3"
        ) == open_one
        if words in ("lighthouses", "zebra"):  # the fold that holds the word has opened
            assert [words in d.text.lower() for d in page.all("#user details[open]")] == [True]
    assert page.one("#user").text == "No user matches." and not page.one("#next").is_enabled()
    page.search("")
    assert page.one("#hits").text == "4 users" and page.texts("#user h3") == ["u-11"]
