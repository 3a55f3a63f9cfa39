"""What the tests of the report share: made-up dialogues and runs, the arguments of `write_report`,
and a browser that looks at the page."""

from support.page import write_report

import json
import re
import shutil

import pytest

BEFORE = dict(step=0, score=21.06, stderr=1.3, success=0.0, failure=36.72, malformed=1.0, n=128)
AFTER = dict(step=50, score=85.0, stderr=1.42, success=30.5, failure=0.78, malformed=0.8, n=128)

# What a policy, or a user's model, might say. Each must come out as the text that it is.
PAYLOAD = "</script><script>window.pwned = 1; alert(1)</script>"
HOSTILE = [
    PAYLOAD,
    "<img src=x onerror='window.pwned = 2'>",
    "<!--<script>",
    "]]>",
    "&lt;b&gt; & <b>bold</b>",
    "\u2028line\u2029paragraph",
    "a NUL \0 and an escape \x1b",
    "\u202eturned round\u202c",
    "\u05e9\u05dc\u05d5\u05dd and \u200fmarks",
    "half a pair: \ud83d",
    "{{DATA}} {{SCRIPT_HASH}} \\u003c ${alert(1)} `",
    "\u4f60\u597d \U0001f642",
]


def turn(reply="I am here.", change=5, emotion=35, **more):
    return {
        "reply": reply,
        "thought": "hurt, wants ears",
        "user": "Thank you for asking.",
        "analysis": "It listens.",
        "change": change,
        "emotion": emotion,
        **more,
    }


def dialogue(name="u-1", side="after", score=80, turns=None, **more):
    return {
        "id": name,
        "side": side,
        "step": 50 * (side == "after"),
        "intention": "You want somebody to listen.",
        "kind": "emotional",
        "group": "passive",
        "persona": "Lena, 31, shy.",
        "first_line": "My sister forgot my birthday.",
        "start": 30,
        "ended": "turn_limit",
        "score": score,
        "purpose": "eq",
        "world": "heart-to-heart",
        "turns": [turn(), turn("Take your time.", -3, 32)] if turns is None else turns,
        **more,
    }


def pairs(n, after=lambda i: i % 101):
    """Users with a dialogue before and one after training; all befores first, as two evaluations
    leave them."""
    return [
        dialogue(f"u-{i}", side, after(i) if side == "after" else 100 - after(i))
        for side in ("before", "after")
        for i in range(n)
    ]


def curve(step, **more):
    return {
        "step": step,
        "emotion": 20 + step,
        "emotion_std": 15.0,
        "success": 1.5,
        "failure": 30.0,
        "malformed": 2.0,
        "turns": 7.5,
        "reply_tokens": 20.25,
        "kl": 2e-4,
        "entropy": 0.3,
        **more,
    }


def arguments(**changes):
    return {
        **dict(
            title="a run",
            settings={"algo": "grpo", "lr": 3e-4},
            curves=[curve(s) for s in (1, 2, 3)],
            evaluations=[
                dict(
                    step=s,
                    score=20.0 + s,
                    stderr=1.5,
                    success=0.0,
                    failure=3.0,
                    malformed=1.0,
                    n=128,
                )
                for s in (0, 3)
            ],
            dialogues=pairs(3),
            tables=[],
        ),
        **changes,
    }


def written(path, **changes):
    """Write a report and return what is in it: (the whole text, the data), the data as a browser
    would parse it."""
    write_report(path, **arguments(**changes))
    html = path.read_bytes().decode("utf-8")
    (block,) = re.findall(
        r'<script id="data" type="application/json">(.*?)</script>', html, re.DOTALL
    )

    def refuse(name):
        raise ValueError(f"JSON knows no {name}")

    return html, json.loads(block, parse_constant=refuse)


def long_dialogues(n=100, length=1500, sign="I hear how much this hurts. "):
    """`n` users, before and after, eight turns, every text of about `length` characters."""
    text = sign * (length // len(sign) + 1)
    turns = [turn(text, 5, 30 + 5 * t, thought=text, user=text, analysis=text) for t in range(8)]
    return [
        dialogue(f"u-{i}", side, i % 101, turns) for i in range(n) for side in ("before", "after")
    ]


def start_chromium(profile):
    """Headless Chromium, driven by selenium, with its profile in the directory `profile`. Skips the
    test where one of the programs is not installed."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    paths = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    for name, path in paths.items():
        if not path:
            pytest.skip(f"{name} is not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = paths["chromium"]
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-dev-shm-usage",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        f"user-data-dir={profile}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=paths["chromedriver"])
    return webdriver.Chrome(options=options, service=service)


class Page:
    """A report in the browser, with short names for what a reader looks at."""

    def __init__(self, driver, path):
        self.driver, self.path = driver, path

    def open(self, width=1280, dark=False, **changes):
        write_report(self.path, **arguments(**changes))
        self.media(dark)
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.driver.get(self.path.as_uri())

    def media(self, dark, media=""):
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.devtools("Emulation.setEmulatedMedia", media=media, features=[scheme])

    def devtools(self, command, **options):
        return self.driver.execute_cdp_cmd(command, options)

    def js(self, code, *args):
        return self.driver.execute_script(f"return {code}", *args)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def one(self, selector):
        (element,) = self.all(selector)
        return element

    def texts(self, selector):
        return self.js(
            "[...document.querySelectorAll(arguments[0])].map(e => e.textContent)", selector
        )

    def search(self, words):
        box = self.one("#search")
        box.clear()
        box.send_keys(words or " ")

    def sort(self, by):
        self.one(f"#sort option[value={by}]").click()

    def complaints(self):
        return self.driver.get_log("browser")
