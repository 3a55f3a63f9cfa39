"""The report's page in headless Chromium: hostile texts do nothing; widths, colours, contrast,
print and keyboard.

Where Chromium, chromedriver or selenium is missing these tests skip and say which.
"""

import base64
import re

import numpy as np
import pytest

from pages import HOSTILE, PAYLOAD, dialogue, pairs, turn


@pytest.mark.slow
def test_hostile_text_shows_as_text_and_runs_nothing(page):
    """In every field at once. Signs that would hide or turn text round are spelled out; what is
    seen is what was said."""
    people = [
        dialogue(
            f"{i} {text}",
            score=i,
            turns=[turn(text, thought=text, user=text, analysis=text)],
            first_line=text,
            persona=text,
            intention=text,
            group=text,
            kind=text,
            ended=text,
        )
        for i, text in enumerate(HOSTILE)
    ]
    page.open(
        title=PAYLOAD,
        settings={PAYLOAD: PAYLOAD},
        notes=HOSTILE,
        dialogues=people,
        tables=[{"title": PAYLOAD, "columns": [PAYLOAD], "rows": [[PAYLOAD]]}],
    )
    assert (
        page.driver.title == page.one("h1").text == PAYLOAD
        and page.texts(".notes li")[0] == PAYLOAD
    )
    page.one("#folds").click()
    marks = {
        "\u2028": "‹U+2028›",
        "\u2029": "‹U+2029›",
        "\0": "‹U+0000›",
        "\x1b": "‹U+001B›",
        "\u202e": "‹U+202E›",
        "\u202c": "‹U+202C›",
        "\u200f": "‹U+200F›",
        "\ud83d": "‹U+D83D›",
    }
    for i, text in enumerate(HOSTILE):
        page.all(".list button")[i].click()  # one dialogue each: lowest score first
        visible = "".join(marks.get(c, c) for c in text)
        # first line; thought, reply, analysis and user
        assert page.texts(".said .text") == [visible] * 5, visible
        assert page.texts("#user > details .text") == [visible] and page.texts("#user h3") == [
            f"{i} {visible}"
        ]
    assert (
        page.all("img, b b, script:not(#data):nth-of-type(n+3)") == []
        and page.js("document.scripts.length") == 2
    )


@pytest.mark.slow
def test_the_second_lock_holds_when_the_first_is_open(page):
    """Even markup that got into the page would run nothing and fetch nothing: the policy names the
    one script that may."""
    page.open()
    page.js(
        "document.body.insertAdjacentHTML('beforeend', '<img src=\"http://127.0.0.1:9/x\" "
        'onerror="window.pwned = 3">\')'
    )
    page.js(
        "document.body.appendChild(Object.assign(document.createElement('script'), "
        "{textContent: 'window.pwned = 4'}))"
    )
    refused = " ".join(entry["message"] for entry in page.complaints())
    assert refused.count("Content Security Policy") >= 2 and page.js("window.pwned") is None


@pytest.mark.parametrize("width", [360, 1100])
@pytest.mark.slow
def test_nothing_runs_out_at_the_side(page, width):
    """At a phone's width too; a wide table scrolls in its own box, and before and after stand one
    above the other."""
    wide = [
        {
            "title": "w" * 80,
            "columns": [f"column {i}" for i in range(14)],
            "rows": [["x" * 60] + [1234.5] * 13],
        }
    ]
    turns = [turn("w" * 300, thought="t" * 300, user="u " * 300, analysis="a" * 300)] * 10
    people = [
        dialogue(
            "i" * 90,
            side,
            50,
            turns,
            intention="n" * 90,
            persona="p" * 300,
            first_line="f" * 300,
            ended="e" * 90,
        )
        for side in ("before", "after")
    ]
    page.open(
        width,
        title="t" * 90,
        settings={"k" * 60: "v" * 200},
        notes=["n" * 200],
        tables=wide,
        dialogues=people,
    )
    page.one("#folds").click()
    page.one("#settings summary").click()
    assert page.js("document.documentElement.scrollWidth") <= width == page.js("innerWidth")
    scrolling = page.all(".scroll")[-1]
    assert page.js("arguments[0].scrollWidth > arguments[0].clientWidth", scrolling)
    before, after = (e.rect for e in page.all(".side .head:first-child"))
    assert (after["x"] > before["x"]) == (width > 360) == (after["y"] == before["y"])


@pytest.mark.slow
def test_dark_is_dark_light_is_light_and_all_is_legible(page):
    """WCAG's contrast, 4.5 for text, between every colour of text and the background that it
    stands on."""

    def luminance(selector, what="color"):
        colour = page.js(
            "getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]", selector, what
        )
        channels = [int(v) / 255 for v in re.findall(r"\d+", colour)[:3]]
        return float(
            np.dot(
                [0.2126, 0.7152, 0.0722],
                [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels],
            )
        )

    behind = {
        ".notes li": ".notes",
        ".list [aria-current] .quiet": ".list [aria-current]",
        "#search": "#search",
        "#next": "#next",
    }
    for dark in (False, True):
        page.open(dark=dark, notes=["a sign"], dialogues=pairs(2))
        paper = luminance("body", "backgroundColor")
        assert paper < 0.05 if dark else paper > 0.9
        for selector in (
            "body",
            "h5",
            "summary",
            "th",
            ".up",
            ".down",
            ".text",
            "#count",
            ".legend",
            *behind,
        ):
            low, high = sorted(
                [luminance(selector), luminance(behind.get(selector, "body"), "backgroundColor")]
            )
            assert (high + 0.05) / (low + 0.05) >= 4.5, (selector, dark)


@pytest.mark.slow
def test_in_print_folds_are_open_and_the_paper_is_white(page):
    """Also from a reader's dark screen; afterwards the folds are as they were."""
    page.open(dark=True, dialogues=pairs(2))
    seen = "window.seen = [...document.querySelectorAll('details')].filter(d => d.open).length"
    page.js(f"(addEventListener('beforeprint', () => {{ {seen} }}), 0)")
    pdf = base64.b64decode(page.devtools("Page.printToPDF", printBackground=True)["data"])
    assert (
        pdf.startswith(b"%PDF")
        and page.js("window.seen") == page.js("document.querySelectorAll('details').length") == 10
    )
    assert page.js("document.querySelectorAll('details[open]').length") == 0
    page.media(dark=True, media="print")
    assert (
        page.js("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        and not page.one("#search").is_displayed()
    )


@pytest.mark.slow
def test_everything_can_be_reached_by_keyboard_and_has_a_name(page):
    page.open(dialogues=pairs(2), tables=[{"title": "t", "columns": ["a"], "rows": [[1]]}])
    unnamed = """[...document.querySelectorAll(
        "button, input, select, svg[role=img], nav, [role=region]")].filter(e => !(
            e.getAttribute("aria-label") || e.labels?.[0]?.textContent
            || e.textContent.trim())).length"""
    assert page.js(unnamed) == 0
    levels = page.js(
        "[...document.querySelectorAll('h1, h2, h3, h4, h5')].map(e => Number(e.tagName[1]))"
    )
    assert (
        levels[0] == 1
        and levels.count(1) == 1
        and all(b - a <= 1 for a, b in zip(levels, levels[1:]))
    )
    # tab: from the search box to the order, and to the list of users
    for field in ("#search", "#sort"):
        page.one(field).send_keys("\ue004")
    assert page.js("document.activeElement.closest('.list') !== null")
    assert page.js("getComputedStyle(document.activeElement).outlineStyle") == "solid"
