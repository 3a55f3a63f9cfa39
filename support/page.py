"""support/page.py - the report: one HTML file with curves, tables, and dialogues before and after
training side by side.

A score is a number; whether a model comforts anybody must be read. So the page is built around
reading: pick a user, see both dialogues turn by turn with the user's emotion beside each turn,
search all texts. The page (report_template.html) needs no network.

The texts of models and users are hostile until shown to be harmless: a policy that learns to write
"</script>" must not run code in the reader's browser. Three locks, each of them enough alone:
* the data is JSON in which no "<" is left (`embed`);
* the page's script makes text nodes only, never HTML;
* a Content-Security-Policy lets the browser run only the script whose hash it names, and fetch
  nothing (`fill_template`).
"""

from support.files import write_file
from support.metrics import stderr_of
from support.settings import made_by_rule

import base64
import hashlib
import json
import math
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TEMPLATE = Path(__file__).parent / "report_template.html"
LONGEST = 4000  # characters of one text; a longer one is shortened, and says so
MAX_BYTES = 4_500_000  # of data; beyond it texts are cut at half the length, and again

# The side of a dialogue: it was held before the training, after it, or, "", by a policy whose
# training the page does not show. In this order the dialogues of one user stand beside each other.
ORDER_OF_SIDES = {"before": 0, "": 1, "after": 2}
# What the page keeps of a user, of each of the user's dialogues, and of each turn.
PERSON_FIELDS = ("id", "intention", "kind", "group", "persona")
DIALOGUE_FIELDS = ("side", "step", "first_line", "start", "ended", "score")
TURN_FIELDS = ("reply", "thought", "user", "analysis", "change", "emotion")


@dataclass(frozen=True)
class Series:
    """One curve of a panel."""

    key: str  # its column in metrics.jsonl
    label: str
    colour: str
    spread: str | None = None  # the column of its standard deviation, drawn as a shade
    hide_if_zero: bool = False  # leave it out where all its values are 0
    reading: str = ""  # what the panel's reading says further where this curve is drawn


@dataclass(frozen=True)
class Panel:
    """A diagram of the page: one unit, one y-axis, one curve or several."""

    section: str  # the headline that it stands under
    title: str
    unit: str  # "{scale}" in it stands for the scale of the scores
    series: list  # of Series
    reading: str  # how to read it
    reading_if_think: str = ""  # what it says further about runs with thoughts
    span: list | None = None  # the usual range of the y-axis, [low, high]
    # The range that the quantity can have; shades are cut there, because nothing lies beyond.
    bounds: tuple = (-math.inf, math.inf)
    shows_evaluations: bool = False  # whether the scores of the evaluations are drawn as points
    # Where all its values are 0, do not draw it: the page says so in words.
    hide_if_zero: bool = False
    meaning: str = ""  # what those words say of it, where it is not drawn


def read_panel(entry):
    """A Panel from its table in report_texts.toml."""
    series = [Series(**curve) for curve in entry["series"]]
    fields = entry | {"series": series}
    return Panel(**fields)


TEXTS = tomllib.loads(TEMPLATE.with_name("report_texts.toml").read_text("utf-8"))
PANELS = [read_panel(entry) for entry in TEXTS["panel"]]


def write_report(
    path,
    *,
    title,
    settings=None,
    curves=(),
    evaluations=(),
    dialogues=(),
    tables=(),
    notes=(),
    limit=200,
    radar=(),
    never_trained_on=True,
    scale=None,
    changed=None,
):
    """Write the report of a run, or of an evaluation, to `path`: beside, then renamed. Numbers that
    are missing may be None or absent.

    title        str
    settings     {name: value}
    curves       the lines of metrics.jsonl; none for an evaluation
    evaluations  on held-out users: [{"step", "score", "stderr", "n": how many dialogues, and in
                 percent "success", "failure", "malformed"}]
    dialogues    [{"id", "side": "before", "after" or "", "step", "intention", "kind", "group",
                   "persona", "first_line", "start": emotion, "ended", "score": 0 to 100,
                   "turns": [{"reply", "thought", "user", "analysis", "change", "emotion"}]}]
    limit        how many of the dialogues are shown
    tables       [{"title", "columns": [...], "rows": [[...]], "reading": how to read it}]
    notes        warnings, shown on top
    radar        [{"label", "values": {capability: 1 to 5}, "judge": who judged, in words}]
    never_trained_on  whether training is known to have left the evaluations' users out (of a
                 foreign model nobody knows)
    scale        of the scores, as users.scale_in_words has it; None: not known, or no scores
    changed      the settings that differ from the defaults, as one types them: "--steps 10"; "" if
                 none does, None if it is not known"""
    settings = settings or {}
    users = choose(dialogues, limit)
    all_tables = [evaluation_table(evaluations, never_trained_on), *tables]
    views = panels(curves, evaluations, scale, settings)
    page = {
        "title": title,
        "headline": headline(curves, evaluations, settings.get("steps")),
        "scale": scale,
        "user": made_by_rule(settings.get("simulator")),
        "changed": changed,
        "notes": list(notes),
        "mean": MEAN_LABEL,
        "radar": list(radar),
        "panels": [view for view in views if is_worth_drawing(view)],
        "zero": zero_panels(curves),
        "settings": {key: setting_text(value) for key, value in settings.items()},
        "tables": [table_view(table) for table in all_tables if table["rows"]],
        "count": count_line(shown=sum(map(len, users)), total=len(dialogues)),
        "marked": any(map(has_mark, sum(users, []))),
        "users": [user_view(user_dialogues) for user_dialogues in users],
    }
    write_file(path, fill_template(page))


# ---------------------------------------------------------------------------------------- dialogues


def choose(dialogues, limit):
    """At most `limit` dialogues, evenly over the scores: a list for each id, lowest score first.

    A user is shown whole or not at all: "after" means nothing without its "before". The score of a
    user is that of the last dialogue."""
    by_user = {}
    for dialogue in dialogues:
        by_user.setdefault(str(dialogue["id"]), []).append(dialogue)
    for user_dialogues in by_user.values():
        user_dialogues.sort(key=place_in_time)
    users = sorted(by_user.values(), key=last_score)
    for count in range(min(len(users), limit), 0, -1):  # the most users that fit
        picked = evenly(users, count)
        if sum(map(len, picked)) <= limit:
            return picked
    return []


def evenly(items, count):
    """`count` of a list of items at even distances; from 2 on, the first and the last among
    them."""
    gaps = max(1, count - 1)
    return [items[i * (len(items) - 1) // gaps] for i in range(count)]


def place_in_time(dialogue):
    """Sort key of one user's dialogues: before training, then after it, by the training step."""
    side = dialogue.get("side") or ""
    return ORDER_OF_SIDES.get(side, ORDER_OF_SIDES[""]), dialogue.get("step") or 0


def last_score(user_dialogues):
    """Sort key of users: the score of the last dialogue; -1, below all, where it has none."""
    score = number_or_none(user_dialogues[-1].get("score"))
    return -1 if score is None else score


def count_line(shown, total):
    """How many of the dialogues are shown, in words; "" where there is no more than one."""
    if total <= 1:
        return ""
    left_out = total - shown
    text = f"{shown} of {total} dialogues, {left_out or 'none'} left out."
    if left_out and shown:
        text += (
            " Those shown are evenly spread over the final scores, with all dialogues of a user."
        )
    return text


def has_mark(dialogue):
    """Do the analyses of this dialogue bear the marks of their prompts (support/answers.py)?"""
    return any(turn.get("mark") for turn in dialogue.get("turns") or [])


def user_view(user_dialogues):
    """All dialogues of one id, as the page wants them; what belongs to the person is kept once."""
    view = {key: user_dialogues[0].get(key) for key in PERSON_FIELDS}
    view["dialogues"] = [dialogue_view(dialogue) for dialogue in user_dialogues]
    return view


def dialogue_view(dialogue):
    """One dialogue as the page wants it."""
    view = {key: dialogue.get(key) for key in DIALOGUE_FIELDS}
    turns = dialogue.get("turns") or []
    view["turns"] = [{key: turn.get(key) for key in TURN_FIELDS} for turn in turns]
    return view


# -------------------------------------------------------------------------------- the page's answer


def headline(curves, evaluations, steps=None):
    """The answer in one line of plain words and, for a run of ours, a second line that says how far
    the run has come; no line if nothing was evaluated. steps: how many the run is to make; None:
    not known."""
    if not evaluations:
        return []
    evaluated_step = evaluations[-1].get("step")
    if evaluated_step is None:  # the policy is not from a run of ours
        return [score_line(evaluations)]
    steps_done = curves[-1].get("step", len(curves)) if curves else 0
    steps_wanted = evaluated_step if steps is None else steps
    if not steps_done == evaluated_step == steps_wanted:
        answer = score_line(evaluations, before_training=evaluated_step == 0)
        return [answer, progress_line(curves, evaluations, steps_done, steps)]
    if steps_done:
        return [score_line(evaluations), f"Before and after {steps_done} training steps."]
    return [score_line(evaluations), "An evaluation alone: no training step was made."]


def progress_line(curves, evaluations, steps_done, steps):
    """How far a run has come that is under way, and its newest numbers, in words. steps: how many
    it is to make, or None."""
    text = "Only the evaluation before training is there so far"
    if len(evaluations) > 1:
        text = f"The last evaluation so far is that at step {evaluations[-1]['step']}"
    of_steps = f" of {steps}" if steps else ""
    text += f"; {steps_done}{of_steps} training steps are done."
    if curves:
        text += latest_numbers(curves[-1], steps_done)
    return text


def score_line(evaluations, before_training=False):
    """The final emotion of the last evaluation, or from the first to the last one, in words."""
    first, last = evaluations[0], evaluations[-1]
    count, failure, success = (format_number(last.get(key)) for key in ("n", "failure", "success"))
    users = "users" if last.get("step") is None else "held-out users"
    if len(evaluations) == 1:
        when = " before training" if before_training else ""
        return (
            f"Final emotion {score_text(last)}{when} ({count} {users}, ± standard error), "
            f"{failure} % failures, {success} % successes"
        )
    return (
        f"Final emotion {score_text(first)} to {score_text(last)} ({count} {users}, ± standard "
        f"errors), {format_number(first.get('failure'))} % failures to {failure} %"
    )


def score_text(evaluation):
    """The score of an evaluation with its standard error: "85.0 ± 1.4"."""
    return f"{format_number(evaluation.get('score'))} ± {format_number(stderr_of(evaluation))}"


def latest_numbers(row, step):
    """The newest line of metrics.jsonl in words, for a run that is under way."""
    emotion, success, failure, malformed = (
        format_number(row.get(key)) for key in ("emotion", "success", "failure", "malformed")
    )
    return (
        f" Latest training numbers (step {step}): final emotion {emotion}, success {success} %, "
        f"failure {failure} %, malformed {malformed} %."
    )


# ------------------------------------------------------------------------------------------- curves


def panels(curves, evaluations, scale=None, settings=None):
    """The panels that have something to show, as dicts for the page and for the picture. Numbers
    have five digits: no screen shows more, and long runs stay small.

    scale: of the scores, as users.scale_in_words has it, None where it is not known. settings: of
    the run."""
    settings = settings or {}
    steps = [row.get("step", number) for number, row in enumerate(curves, 1)]
    views = []
    for panel in PANELS:
        lines = curves_of(panel, curves, steps)
        points = evaluation_points(evaluations) if panel.shows_evaluations else []
        if not lines and not points:
            continue
        views.append(
            {
                "section": panel.section,
                "title": panel.title,
                "unit": panel.unit.format(scale=scale or "0 to 100"),
                "span": panel.span,
                "steps": steps,
                "lines": lines,
                "points": points,
                "reading": reading_of(panel, lines, settings),
            }
        )
    return views


def reading_of(panel, lines, settings):
    """How to read a panel, in words: of it as a whole, then of those of its curves that are there.
    lines: as `curves_of` has them; settings: of the run."""
    drawn = {line["key"] for line in lines}
    sentences = [panel.reading, *(s.reading for s in panel.series if s.key in drawn)]
    if settings.get("think"):
        sentences.append(panel.reading_if_think)
    if any("shade" in line for line in lines):
        sentences.append("The shade shows how much the dialogues differ, and no uncertainty.")
    return " ".join(sentence for sentence in sentences if sentence)


def zero_panels(curves):
    """{section: [its panels that are not drawn because they are 0 in every step, each by its title
    and what it means]}."""
    hidden = {}
    for panel in PANELS:
        if panel.hide_if_zero and is_zero(panel, curves):
            hidden.setdefault(panel.section, []).append(f"{panel.title} ({panel.meaning})")
    return hidden


def is_zero(panel, curves):
    """Was something measured for this panel, and never anything but 0?"""
    values = [value for series in panel.series for value in column(curves, series.key)]
    return has_numbers(values) and not any(values)


def is_worth_drawing(panel_view):
    """Is there a course over the steps to draw: a curve, or more than one evaluation?"""
    return bool(panel_view["lines"]) or len(panel_view["points"]) > 1


def curves_of(panel, curves, steps):
    """The curves of a panel that are drawn: those that have a number and, if they are hidden where
    they are 0, another one than 0.

    Each is {"key", "label", "colour", "values"}, with "mean", its moving average, if it was
    measured in more than one step, and with "shade" if there is one behind it."""
    lines = []
    if panel.hide_if_zero and is_zero(panel, curves):
        return lines
    for series in panel.series:
        values = column(curves, series.key)
        if not has_numbers(values) or (series.hide_if_zero and not any(values)):
            continue
        line = {
            "key": series.key,
            "label": series.label,
            "colour": series.colour,
            "values": values,
        }
        if len(values) > 1:
            line["mean"] = moving_average(values)
        spread = column(curves, series.spread) if series.spread else []
        if has_numbers(spread):
            line["shade"] = spread_shade(steps, values, spread, panel.bounds)
        lines.append(line)
    return lines


SMOOTH = 5  # steps of the moving average: a single step says little
MEAN_LABEL = f"mean of the last {SMOOTH} steps"
SPREAD_LABEL = "± 1 standard deviation of the dialogues"


def moving_average(values):
    """At each step that has a value the mean over the last five, or over as many as there have
    been; else None. Values that are missing are left out."""
    means = []
    for end, value in enumerate(values, 1):
        measured = [v for v in values[max(0, end - SMOOTH) : end] if v is not None]
        means.append(None if value is None else np.mean(measured))
    return five_digits(means)


def spread_shade(steps, values, spread, bounds):
    """The standard deviation of the dialogues as an area behind a curve, at the steps that have
    one, cut at the bounds of what is measured."""
    rows = [row for row in zip(steps, values, spread) if None not in row]
    there, means, stds = np.array(rows, dtype=float).reshape(-1, 3).T
    return {
        "steps": there.tolist(),
        "low": five_digits(np.clip(means - stds, *bounds)),
        "high": five_digits(np.clip(means + stds, *bounds)),
        "label": SPREAD_LABEL,
    }


def column(curves, key):
    """A column of metrics.jsonl, one value a step: a number with five digits, or None."""
    return five_digits(row.get(key) for row in curves)


def five_digits(values):
    """Numbers with five digits; None for one that is missing."""
    numbers = [number_or_none(value) for value in values]
    return [None if number is None else float(f"{number:.5g}") for number in numbers]


def has_numbers(values):
    return any(value is not None for value in values)


def evaluation_points(evaluations):
    """[[step, score, standard error]] of the evaluations that have a step and a score."""
    points = []
    for evaluation in evaluations:
        step, score, stderr = (
            number_or_none(evaluation.get(key)) for key in ("step", "score", "stderr")
        )
        if step is not None and score is not None:
            points.append([step, score, stderr])
    return points


# ------------------------------------------------------------------------------------------- tables


def evaluation_table(evaluations, never_trained_on=True):
    """The scores on held-out users as a table."""
    all_columns = {
        "step": "step",
        "score": "score",
        "stderr": "±",
        "success": "success %",
        "failure": "failure %",
        "malformed": "malformed %",
        "n": "n",
        "ref_perplexity": "perplexity under the starting model",
    }
    columns = {}
    for key, name in all_columns.items():
        # An evaluation of evaluate.py has no step, and only runs that have the starting model in
        # memory measure the perplexity.
        is_optional = key in ("step", "ref_perplexity")
        if not is_optional or any(one.get(key) is not None for one in evaluations):
            columns[key] = name
    shown = [{**evaluation, "stderr": stderr_of(evaluation)} for evaluation in evaluations]
    title = "Evaluations"
    users = "It is not known whether this policy met these users in its training"
    if never_trained_on:
        title = "Evaluations on held-out users"
        users = "The policy was never trained on these users"
    return {
        "title": title,
        "columns": list(columns.values()),
        "rows": [[evaluation.get(key) for key in columns] for evaluation in shown],
        "reading": f"{users}. Score: the mean final emotion of n dialogues, ± its standard error; "
        "a difference of less than three standard errors may be chance. Success ends at 100, "
        "failure below 10.",
    }


def table_view(table):
    """A table as the page wants it. Cells are text, because JSON does not know 85.0 from 85; a
    column with a number in it, also one that is text already, is aligned to the right."""
    rows = table["rows"]
    return {
        "title": table["title"],
        "columns": table["columns"],
        "reading": table.get("reading"),
        "rows": [[format_number(cell) for cell in row] for row in rows],
        "right": [
            any(is_number(row[i]) for row in rows if i < len(row))
            for i in range(len(table["columns"]))
        ],
    }


def is_number(value):
    if isinstance(value, str):
        return re.fullmatch(r"[+\-−]?\d+(\.\d+)?", value) is not None
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


def format_number(value):
    """A cell as text: a float with one decimal, "–" for a missing value, all else as it is."""
    value = as_json(value)
    if value is None:
        return "–"
    if isinstance(value, float):
        # z: a number that rounds to zero has no minus sign
        return f"{value:z.1f}".replace("-", "−")
    return str(value)


def setting_text(value):
    """A setting as text: strings as they are, all else as JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(as_json(value), ensure_ascii=False)


# ------------------------------------------------------------------------------------ into the page


def fill_template(page):
    """The HTML file with `page` as its data, as bytes. Long texts are cut until all of it fits."""
    longest = LONGEST
    data = embed(page, longest)
    while len(data) > MAX_BYTES and longest > 100:
        longest //= 2
        data = embed(page, longest)
    html = TEMPLATE.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before, after = html.replace("{{SCRIPT_HASH}}", digest).split("{{DATA}}")
    return before.encode() + data + after.encode()


def embed(value, longest):
    """JSON as UTF-8 bytes that can stand inside <script>. There HTML ends at the first "</script"
    and knows no escapes, but JSON does: so every "<" is written as an escape.

    A lone surrogate, from a model's broken bytes, cannot be written as UTF-8; its escape can, and
    is good JSON."""
    value = as_json(value, longest)
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    escapes = {ord(sign): f"\\u{ord(sign):04x}" for sign in "<>&\u2028\u2029"}
    return text.translate(escapes).encode("utf-8", "backslashreplace")


def as_json(value, longest=math.inf):
    """`value` as something that JSON can express: numpy's numbers as Python's, NaN and infinities
    as null, texts of at most `longest` characters, anything else as text."""
    if hasattr(value, "tolist"):  # an array, or one of numpy's numbers
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): as_json(item, longest) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item, longest) for item in value]
    value = number_or_none(value)
    if value is None or isinstance(value, (int, float)):  # a bool is an int
        return value
    text = str(value)
    if len(text) <= longest:
        return text
    return f"{text[:longest]} [… shortened, {len(text):,} characters in all]"


def number_or_none(value):
    """A number as one of Python's, where it may be one of numpy's; None for NaN, infinities and a
    number that is missing (None)."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
