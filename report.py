"""report.py - one HTML file that shows a run: curves, tables, and dialogues before and after training side by side.

A score is a number; whether a model comforts anybody must be read. So the report is built around reading: pick a user, see both
dialogues turn by turn with the user's emotion beside each, search all that was said. The page (report_template.html) needs no network.

What models and users said is hostile until shown to be harmless: a policy that learns to write "</script>" must not run code in the
reader's browser. Three locks, each enough alone: the data is JSON in which no "<" is left (`embed`); the page's script makes text
nodes only, never HTML; and a Content-Security-Policy lets the browser run no script but the one whose hash it names, and fetch nothing.
"""
import base64
import hashlib
import json
import math
import os
import re
from pathlib import Path

TEMPLATE = Path(__file__).parent / "report_template.html"
LONGEST = 4000                  # characters of one text; a longer one is shortened, and says so
MAX_BYTES = 4_500_000           # of data in the page; beyond it all texts are cut at half the length, and again

# The panels of curves: section, title, unit, fixed range of the y-axis or None, and what is drawn: key in metrics.jsonl, label, colour.
# A panel has one unit and so one axis; what is missing from the metrics is left out.
PANELS = [
    ("Learning", "Final emotion", "0 to 100", (0, 100), [("emotion", "training users, mean", "blue")]),
    ("Learning", "How dialogues end", "% of dialogues", (0, 100),
     [("success", "success (100)", "green"), ("failure", "failure (below 10)", "red"), ("malformed", "malformed", "grey")]),
    ("Learning", "Length of a reply", "tokens", None, [("reply_tokens", "tokens per reply", "purple")]),
    ("Learning", "Length of a dialogue", "turns", None, [("turns", "turns per dialogue", "orange")]),
    ("Learning", "Entropy", "nats per token", None, [("entropy", "entropy of the policy", "orange")]),
    ("Learning", "KL within the update", "nats per token", None, [("kl", "KL(pi_old, pi)", "blue")]),
    ("Signs of failure", "Repetition", "share of replies", None,
     [("repeat_within", "said before to the same user", "red"), ("repeat_across", "said to another user too", "blue")]),
    ("Signs of failure", "Variety", "share of word pairs that differ", (0, 1), [("distinct_2", "distinct-2", "green")]),
    ("Signs of failure", "Talk of the reward", "share of replies", None, [("reward_talk", "names its own reward", "red")]),
    ("Signs of failure", "KL from the start", "nats per token", None, [("kl_start", "KL(pi, pi at step 0)", "purple")]),
    ("Signs of failure", "Gap", "points of emotion", None, [("gap", "training users above held-out ones", "blue")]),
    ("Signs of failure", "Dropped", "dialogues", None, [("dropped", "given up by the simulator", "grey")]),
    ("The update", "Clipped", "share of tokens", None, [("clipfrac", "tokens at the clip", "blue")]),
    ("The update", "Gradient", "norm before clipping", None, [("grad_norm", "norm of the gradient", "purple")]),
    ("The update", "Explained variance", "1 is all", None, [("explained_variance", "of the returns, by the critic", "green")]),
    ("The update", "Engine against trainer", "nats per token", None, [("logp_gap", "gap of log-probs", "orange")]),
    ("The update", "Time", "seconds per step", None, [("seconds", "a whole step", "grey")]),
]
TURN = ("reply", "thought", "user", "analysis", "change", "emotion")
SIDES = {"before": 0, "": 1, "after": 2}


def write_report(path, *, title, settings, curves, evaluations, dialogues, tables, notes=(), limit=200):
    """Write the report of a run, or of an evaluation, to `path`: beside, then renamed. Missing numbers may be None or absent.

    title: str. settings: dict. curves: the lines of metrics.jsonl, [] for an evaluation.
    evaluations: [{"step", "score", "stderr", "success", "failure", "malformed" (percent), "n"}], on held-out users.
    dialogues: [{"id", "side" ("before", "after" or ""), "step", "intention", "kind", "group", "persona", "first_line", "start" (emotion),
        "ended", "score" (0..100), "turns": [{"reply", "thought", "user", "analysis", "change", "emotion"}]}]; `limit` of them are shown.
    tables: [{"title", "columns": [..], "rows": [[..]]}]. notes: warnings, shown on top.
    """
    picked = choose(dialogues, limit)
    shown = sum(map(len, picked))
    left = len(dialogues) - shown
    page = {"title": title, "notes": list(notes), "panels": panels(curves, evaluations),
            "settings": {key: v if isinstance(v, str) else json.dumps(clean(v), ensure_ascii=False) for key, v in settings.items()},
            "tables": [table(t) for t in [evaluation_table(evaluations), *tables] if t["rows"]],
            "count": f"{shown} of {len(dialogues)} dialogues, {left or 'none'} left out."
                     + " Those shown are picked evenly over the final scores, users whole." * bool(left and shown),
            "users": [user(own) for own in picked]}
    longest = LONGEST
    while len(data := embed(page, longest)) > MAX_BYTES and longest > 100:
        longest //= 2
    html = TEMPLATE.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before, after = html.replace("{{SCRIPT_HASH}}", digest).split("{{DATA}}")
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}")
    scratch.write_bytes(before.encode() + data + after.encode())
    os.replace(scratch, path)


# ------------------------------------------------------------------------------------------------------------ what is shown

def choose(dialogues, limit):
    """Pick at most `limit` dialogues, evenly over the scores. Returns a list of lists, each all dialogues of one id, lowest score first.

    A user is shown whole or not at all: "after" means nothing without its "before". The score of a user is that of the last dialogue.
    """
    people = {}
    for d in dialogues:
        people.setdefault(str(d["id"]), []).append(d)
    for own in people.values():
        own.sort(key=lambda d: (SIDES.get(d.get("side") or "", 1), d.get("step") or 0))
    people = sorted(people.values(), key=lambda own: -1 if clean(own[-1].get("score")) is None else own[-1]["score"])
    for k in range(min(len(people), limit), 0, -1):         # the most users that fit; both ends of the scores are among them
        picked = [people[i * (len(people) - 1) // max(1, k - 1)] for i in range(k)]
        if sum(map(len, picked)) <= limit:
            return picked
    return []


def user(own):
    """All dialogues of one id; what belongs to the person is kept once."""
    return {**{key: own[0].get(key) for key in ("id", "intention", "kind", "group", "persona")},
            "dialogues": [{**{key: d.get(key) for key in ("side", "step", "first_line", "start", "ended", "score")},
                           "turns": [{key: t.get(key) for key in TURN} for t in d.get("turns") or []]} for d in own]}


def panels(curves, evaluations):
    """The panels that have something to show. Numbers with five digits: no screen shows more, and long runs stay small."""
    def column(key):
        values = [clean(row.get(key)) for row in curves]
        return [None if v is None else float(f"{v:.5g}") for v in values]

    steps, result = [row.get("step", i + 1) for i, row in enumerate(curves)], []
    for section, title, unit, span, series in PANELS:
        lines = [{"label": label, "colour": colour, "values": column(key)} for key, label, colour in series]
        lines = [line for line in lines if any(v is not None for v in line["values"])]
        points = []
        if title == "Final emotion":
            points = [clean([e.get("step"), e.get("score"), e.get("stderr")]) for e in evaluations]
            points = [point for point in points if None not in point[:2]]
            if lines and any(v is not None for v in column("emotion_std")):
                lines[0]["spread"] = column("emotion_std")
        if title == "Dropped" and not any(any(line["values"]) for line in lines):
            continue
        if lines or len(points) > 1:                        # one evaluation alone is a number, no curve
            result.append({"section": section, "title": title, "unit": unit, "span": span, "steps": steps, "lines": lines,
                           "points": points})
    return result


def evaluation_table(evaluations):
    columns = {"step": "step", "score": "final emotion", "stderr": "± stderr", "success": "success %", "failure": "failure %",
               "malformed": "malformed %", "n": "dialogues"}
    return {"title": "Evaluations on held-out users", "columns": list(columns.values()),
            "rows": [[e.get(key) for key in columns] for e in evaluations]}


def table(t):
    """Cells as text, because JSON does not know 85.0 from 85; and which columns hold numbers and so stand to the right."""
    def text(value):
        value = clean(value)
        return "–" if value is None else f"{value:z.1f}".replace("-", "−") if isinstance(value, float) else str(value)

    number = lambda v: hasattr(v, "tolist") or isinstance(v, (int, float)) and not isinstance(v, bool)
    return {"title": t["title"], "columns": t["columns"], "rows": [[text(v) for v in row] for row in t["rows"]],
            "right": [any(number(row[i]) for row in t["rows"] if i < len(row)) for i in range(len(t["columns"]))]}


# ---------------------------------------------------------------------------------------------------------- into the page

def clean(value, longest=None):
    """What JSON can say: numpy's numbers as Python's, NaN and infinities as null, texts at most `longest` characters."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): clean(v, longest) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v, longest) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, (bool, int)):
        return value
    text = str(value)
    return text if longest is None or len(text) <= longest else f"{text[:longest]} [… shortened, {len(text):,} characters in all]"


def embed(value, longest):
    """JSON as UTF-8 bytes that can stand inside <script>: there, HTML ends at the first "</script" and knows no escapes, but JSON does.

    A lone surrogate, which a model's broken bytes may leave behind, is no UTF-8; as an escape it is good JSON.
    """
    text = json.dumps(clean(value, longest), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}).encode("utf-8", "backslashreplace")
