"""The report's page as a reader uses it, in headless Chromium driven by selenium: curves, dialogues
side by side, order, steps from user to user, search.

Where Chromium, chromedriver or selenium is missing these tests skip and say which.
"""

import re

import pytest

from pages import curve, dialogue, pairs, turn


@pytest.mark.slow
def test_the_page_shows_the_run(page):
    page.open(
        title="grpo, think",
        notes=["the gradient is exactly 0"],
        curves=[
            curve(s, repeat_within=0.1, reward_talk=0, kl_start=0.01 * s) for s in range(1, 51)
        ],
        tables=[{"title": "by kind", "columns": ["kind", "score"], "rows": [["rational", 85.0]]}],
    )
    assert page.driver.title == page.one("h1").text == "grpo, think"
    assert page.one(".notes").text == "Warnings\nthe gradient is exactly 0"
    titles = [e.text.split(",")[0] for e in page.all("figcaption")]
    assert titles[0] == "Final emotion" and titles[-1] == "KL from the start"
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
    page.open(curves=[], dialogues=[], evaluations=[])
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
    for by, ids in (
        ("loss", "u-0 u-1 u-3 u-2 u-4 alone"),
        ("best", "alone u-4 u-2 u-3 u-1 u-0"),
        ("gain", "u-4 u-2 u-3 u-1 u-0 alone"),
    ):
        page.sort(by)
        assert page.texts(".list b") == ids.split(), by
        assert page.texts("#user h3") == page.texts(".list [aria-current] b") == ids.split()[:1]


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
        ("sincere", ["u-10"], ["u-10"]),
        ("AVOID", ["u-11"], ["u-11"]),
        ("lighthouses", ["u-12"], ["u-12"]),
        ("zebra", ["u-13"], ["u-13"]),
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
