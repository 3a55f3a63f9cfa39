"""support/report.py - what a run shows: the terminal, the learning curve, the report.

The report is one HTML file: curves, tables, and dialogues before and after training side by side. A
score is a number; whether a model comforts anybody must be read. So it is built around reading:
pick a user, see both dialogues turn by turn with the user's emotion beside each, search all that
was said. The page (report_template.html) needs no network.

What models and users said is hostile until shown to be harmless: a policy that learns to write
"</script>" must not run code in the reader's browser. Three locks, each enough alone: the data is
JSON in which no "<" is left (`embed`); the page's script makes text nodes only, never HTML; and a
Content-Security-Policy lets the browser run no script but the one whose hash it names, and fetch
nothing.
"""
import base64
import hashlib
import json
import math
import re
import resource
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tqdm import tqdm

from support.results import GROUPS, intention_of, read_dialogues, read_results, recorded_dialogues
from support.rundir import read_json, read_jsonl, write_file, write_json
from support.signs import INITIAL_EMOTION, hacking_warnings, score_summary

TEMPLATE = Path(__file__).parent / "report_template.html"
LONGEST = 4000                  # characters of one text; a longer one is shortened, and says so
# of data in the page; beyond it all texts are cut at half the length, and again
MAX_BYTES = 4_500_000

# The panels of curves: section, title, unit, fixed range of the y-axis or None, and what is drawn:
# key in metrics.jsonl, label, colour. A panel has one unit and so one axis; what is missing from
# the metrics is left out.
PANELS = [
    ("Learning", "Final emotion", "0 to 100", (0, 100),
     [("emotion", "training users, mean", "blue")]),
    ("Learning", "How dialogues end", "% of dialogues", (0, 100),
     [("success", "success (100)", "green"), ("failure", "failure (below 10)", "red"),
      ("malformed", "malformed", "grey")]),
    ("Learning", "Length of a reply", "tokens", None,
     [("reply_tokens", "tokens per reply", "purple")]),
    ("Learning", "Length of a dialogue", "turns", None,
     [("turns", "turns per dialogue", "orange")]),
    ("Learning", "Entropy", "nats per token", None,
     [("entropy", "entropy of the policy", "orange")]),
    ("Learning", "KL within the update", "nats per token", None,
     [("kl", "KL(pi_old, pi)", "blue")]),
    ("Signs of failure", "Repetition", "share of replies", None,
     [("repeat_within", "said before to the same user", "red"),
      ("repeat_across", "said to another user too", "blue")]),
    ("Signs of failure", "Variety", "share of word pairs that differ", (0, 1),
     [("distinct_2", "distinct-2", "green")]),
    ("Signs of failure", "Talk of the reward", "share of replies", None,
     [("reward_talk", "names its own reward", "red")]),
    ("Signs of failure", "KL from the start", "nats per token", None,
     [("kl_start", "KL(pi, pi at step 0)", "purple")]),
    ("Signs of failure", "Gap", "points of emotion", None,
     [("gap", "training users above held-out ones", "blue")]),
    ("Signs of failure", "Dropped", "dialogues", None,
     [("dropped", "given up by the simulator", "grey")]),
    ("The update", "Clipped", "share of tokens", None,
     [("clipfrac", "tokens at the clip", "blue")]),
    ("The update", "Gradient", "norm before clipping", None,
     [("grad_norm", "norm of the gradient", "purple")]),
    ("The update", "Explained variance", "1 is all", None,
     [("explained_variance", "of the returns, by the critic", "green")]),
    ("The update", "Engine against trainer", "nats per token", None,
     [("logp_gap", "gap of log-probs", "orange")]),
    ("The update", "Time", "seconds per step", None, [("seconds", "a whole step", "grey")]),
]
TURN = ("reply", "thought", "user", "analysis", "change", "emotion")
SIDES = {"before": 0, "": 1, "after": 2}


def write_report(path, *, title, settings, curves, evaluations, dialogues, tables,
                 notes=(), limit=200):
    """Write the report of a run, or of an evaluation, to `path`: beside, then renamed. Missing
    numbers may be None or absent.

    title: str. settings: dict. curves: the lines of metrics.jsonl, [] for an evaluation.
    evaluations: [{"step", "score", "stderr", "success", "failure", "malformed" (percent), "n"}], on
    held-out users.
    dialogues: [{"id", "side" ("before", "after" or ""), "step", "intention", "kind", "group",
        "persona", "first_line", "start" (emotion), "ended", "score" (0..100), "turns": [{"reply",
        "thought", "user", "analysis", "change", "emotion"}]}]; `limit` of them are shown.
    tables: [{"title", "columns": [..], "rows": [[..]]}]. notes: warnings, shown on top.
    """
    picked = choose(dialogues, limit)
    shown = sum(map(len, picked))
    left = len(dialogues) - shown
    page = {"title": title, "notes": list(notes), "panels": panels(curves, evaluations),
            "settings": {key: v if isinstance(v, str) else json.dumps(clean(v), ensure_ascii=False)
                         for key, v in settings.items()},
            "tables": [table(t) for t in [evaluation_table(evaluations), *tables] if t["rows"]],
            "count": f"{shown} of {len(dialogues)} dialogues, {left or 'none'} left out."
                     + " Those shown are picked evenly over the final scores, users whole."
            * bool(left and shown), "users": [user(own) for own in picked]}
    longest = LONGEST
    while len(data := embed(page, longest)) > MAX_BYTES and longest > 100:
        longest //= 2
    html = TEMPLATE.read_text(encoding="utf-8")
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL).group(1)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    before, after = html.replace("{{SCRIPT_HASH}}", digest).split("{{DATA}}")
    write_file(path, before.encode() + data + after.encode())


# ------------------------------------------------------------------------------------ what is shown

def choose(dialogues, limit):
    """Pick at most `limit` dialogues, evenly over the scores. Returns a list of lists, each all
    dialogues of one id, lowest score first.

    A user is shown whole or not at all: "after" means nothing without its "before". The score of a
    user is that of the last dialogue.
    """
    people = {}
    for d in dialogues:
        people.setdefault(str(d["id"]), []).append(d)
    for own in people.values():
        own.sort(key=lambda d: (SIDES.get(d.get("side") or "", 1), d.get("step") or 0))
    people = sorted(people.values(),
                    key=lambda own: -1 if clean(own[-1].get("score")) is None else own[-1]["score"])
    # the most users that fit; both ends of the scores are among them
    for k in range(min(len(people), limit), 0, -1):
        picked = [people[i * (len(people) - 1) // max(1, k - 1)] for i in range(k)]
        if sum(map(len, picked)) <= limit:
            return picked
    return []


def user(own):
    """All dialogues of one id; what belongs to the person is kept once."""
    return {**{key: own[0].get(key) for key in ("id", "intention", "kind", "group", "persona")},
            "dialogues": [{**{key: d.get(key)
                              for key in ("side", "step", "first_line", "start", "ended", "score")},
                           "turns": [{key: t.get(key) for key in TURN}
                                     for t in d.get("turns") or []]} for d in own]}


def panels(curves, evaluations):
    """The panels that have something to show. Numbers with five digits: no screen shows more, and
    long runs stay small."""
    def column(key):
        values = [clean(row.get(key)) for row in curves]
        return [None if v is None else float(f"{v:.5g}") for v in values]

    steps, result = [row.get("step", i + 1) for i, row in enumerate(curves)], []
    for section, title, unit, span, series in PANELS:
        lines = [{"label": label, "colour": colour, "values": column(key)}
                 for key, label, colour in series]
        lines = [line for line in lines if any(v is not None for v in line["values"])]
        points = []
        if title == "Final emotion":
            points = [clean([e.get("step"), e.get("score"), e.get("stderr")]) for e in evaluations]
            points = [point for point in points if None not in point[:2]]
            if lines and any(v is not None for v in column("emotion_std")):
                lines[0]["spread"] = column("emotion_std")
        if title == "Dropped" and not any(any(line["values"]) for line in lines):
            continue
        if lines or len(points) > 1:                    # one evaluation alone is a number, no curve
            result.append({"section": section, "title": title, "unit": unit, "span": span,
                           "steps": steps, "lines": lines, "points": points})
    return result


def evaluation_table(evaluations):
    columns = {"step": "step", "score": "final emotion", "stderr": "± stderr",
               "success": "success %", "failure": "failure %", "malformed": "malformed %",
               "n": "dialogues"}
    return {"title": "Evaluations on held-out users", "columns": list(columns.values()),
            "rows": [[e.get(key) for key in columns] for e in evaluations]}


def table(t):
    """Cells as text, because JSON does not know 85.0 from 85; and which columns hold numbers and so
    stand to the right."""
    def text(value):
        value = clean(value)
        return ("–" if value is None else f"{value:z.1f}".replace("-", "−")
                if isinstance(value, float) else str(value))

    number = (lambda v: hasattr(v, "tolist") or isinstance(v, (int, float))
              and not isinstance(v, bool))
    return {"title": t["title"], "columns": t["columns"],
            "rows": [[text(v) for v in row] for row in t["rows"]],
            "right": [any(number(row[i]) for row in t["rows"] if i < len(row))
                      for i in range(len(t["columns"]))]}


# ------------------------------------------------------------------------------------ into the page

def clean(value, longest=None):
    """What JSON can say: numpy's numbers as Python's, NaN and infinities as null, texts at most
    `longest` characters."""
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
    return (text if longest is None or len(text) <= longest
            else f"{text[:longest]} [… shortened, {len(text):,} characters in all]")


def embed(value, longest):
    """JSON as UTF-8 bytes that can stand inside <script>: there, HTML ends at the first "</script"
    and knows no escapes, but JSON does.

    A lone surrogate, which a model's broken bytes may leave behind, is no UTF-8; as an escape it is
    good JSON.
    """
    text = json.dumps(clean(value, longest), ensure_ascii=False, allow_nan=False,
                      separators=(",", ":"))
    return text.translate({ord(c): f"\\u{ord(c):04x}"
                           for c in "<>&\u2028\u2029"}).encode("utf-8", "backslashreplace")


# ---------------------------------------------------------------------- reports of runs and results

def tables_by_part(sides):
    """Tables of scores by intention, kind and persona group. sides: {"before" | "after" | "score":
    [dialogues of the report]}."""
    tables = []
    for name, title in (("intention", "By hidden intention"), ("kind", "Rational or emotional"),
                        ("group", "By persona group")):
        rows = []
        for value in sorted({d[name] for dialogues in sides.values() for d in dialogues}):
            parts = [[d["score"] for d in dialogues if d[name] == value]
                     for dialogues in sides.values()]
            rows.append([value, *[score_summary(part)["score"] if part else None for part in parts],
                         *[len(part) for part in parts[-1:]]])
        tables.append({"title": title, "columns": [name, *sides, "n"], "rows": rows})
    return tables


def report_of_run(out, people, rows, evaluations, warnings):
    """Write report.html of a run from its log. people: its held-out profiles; rows: the lines of
    metrics.jsonl; warnings: of signs.py."""
    out, people = Path(out), {p.id: p for p in people}
    last, dialogues = evaluations[-1]["step"], []
    for d in read_dialogues(out / "dialogues.jsonl"):
        if d["split"] == "heldout" and d["step"] in (0, last):
            profile = people[d["profile_id"]]
            intention, kind = intention_of(profile.task)
            dialogues.append({"id": profile.id, "side": "after" if d["step"] else "before",
                              "step": d["step"], "intention": intention,
                              "kind": kind, "group": GROUPS.get(profile.main_cha, profile.main_cha),
                              "persona": profile.player, "first_line": d["first_line"],
                              "start": INITIAL_EMOTION["training"], "ended": d["ended"],
                              "score": round(100 * d["reward"]), "turns": d["turns"]})
    sides = {side: [d for d in dialogues if d["side"] == side] for side in ("before", "after")}
    write_report(out / "report.html", title=out.name, settings=read_json(out / "config.json"),
                 curves=rows, evaluations=evaluations, dialogues=dialogues,
                 tables=tables_by_part(sides), notes=warnings)


def report_of_results(path, result):
    """Write the report of a result file beside it. Returns its path."""
    rows, dialogues = read_results(path)[0], []
    for row, recorded in zip(rows, recorded_dialogues(path)):
        dialogues.append({"id": row["id"], "side": "", "step": None,
                          "intention": row["intention"], "kind": row["kind"],
                          "group": row["group"], "persona": row["raw"].get("player", ""),
                          "first_line": recorded["first_line"], "start": recorded["start"],
                          "ended": row["ended"], "score": row["final"], "turns": recorded["turns"]})
    numbers = {key: result[key] for key in ("score", "stderr", "success", "failure",
                                            "malformed", "n")}
    path = Path(path).with_suffix(".html")
    counted = {"title": "Signs of failure", "columns": ["sign", "value"],
               "rows": [[key, f"{value:.3f}"] for key, value in result["signs"].items()]}
    write_report(path, title=result["by_whom"],
                 settings={**rows[0]["made_by"], "rule": result["rule"]}, curves=[],
                 evaluations=[{"step": None, **numbers}], dialogues=dialogues,
                 tables=[*tables_by_part({"score": dialogues}), counted])
    return path


# ------------------------------------------------------------------------------------ what one sees

@contextmanager
def bar(shown, total, title):
    """A progress bar over dialogues, or None where it is not `shown`."""
    progress_bar = tqdm(total=total, desc=title, unit="dialogue", leave=False) if shown else None
    try:
        yield progress_bar
    finally:
        if progress_bar is not None:
            progress_bar.close()


def progress(metrics):
    """A step's metrics in the few words that fit behind a progress bar."""
    return (f"emotion {metrics['emotion']:.0f}, success {metrics['success']:.0f} %, "
            f"{metrics['tokens_sampled'] / metrics['seconds']:.0f} tokens/s"
            + f", {metrics['dropped']} dropped" * bool(metrics["dropped"]))


def print_settings(cfg, out, training, held_out, ranks):
    """The head of a run: who, with whom, where to, and every setting."""
    print(f"{cfg.algo} {cfg.mode}, policy {cfg.model}, user {cfg.simulator} ({cfg.difficulty}, "
          f"{cfg.lang}), {training} users to train on, {held_out} held out -> {out}"
          + f", on {ranks} ranks" * (ranks > 1))
    told = ("algo", "think", "model", "simulator", "difficulty", "lang", "profiles")
    words = [f"{key} {value}" for key, value in vars(cfg).items() if key not in told]
    print(textwrap.fill(", ".join(words), 116, initial_indent="    ", subsequent_indent="    ",
                        break_on_hyphens=False, break_long_words=False))


def dialogue_text(title, episode):
    """One dialogue, word for word."""
    lines = [f"\n--- a dialogue {title}: {episode.profile_id}, ended by {episode.ended}, reward "
             f"{episode.reward:.2f}",
             f"    user  [{INITIAL_EMOTION['training']:3}]  {episode.first_line}"]
    for turn in episode.turns:
        if turn["thought"]:
            lines.append(f"    (thinks      {turn['thought']})")
        lines.append(f"    policy       {turn['reply']}")
        if turn["emotion"] is not None:
            said = turn["user"] or ""
            lines.append(f"    user  [{turn['emotion']:3}]  {said}  ({turn['change']:+d})")
    return "\n".join(lines) + "\n"


def print_summary(summary, out):
    print(f"\n{'held-out users':<16}{'score':>8}{'stderr':>8}{'success':>9}{'failure':>9}"
          f"{'malformed':>11}{'n':>6}")
    for name in ("before", "after"):
        s = summary[name]
        print(f"{name:<16}{s['score']:>8.1f}{s['stderr']:>8.1f}{s['success']:>8.1f}%"
              f"{s['failure']:>8.1f}%{s['malformed']:>10.1f}%{s['n']:>6}")
    parts = [f"{key.replace('_', ' ')} {value:.0f}" for key, value in summary["seconds"].items()
             if key != "total"]
    print(f"{summary['seconds']['total']:.0f} s in all: {', '.join(parts)}; peak memory "
          f"{summary['peak_rss_mb']:.0f} MB\n")
    for warning in summary["warnings"]:
        print(f"look at the dialogues: {warning}")
    print(f"everything is in {out}: "
          + ", ".join(sorted(p.name for p in out.iterdir() if not p.name.startswith("."))))


def finish(out, state, people):
    """What a run leaves when it is over: summary.json, the picture, the report, a table on the
    terminal. state: as in state.json; people: the held-out profiles. Returns the summary."""
    evaluations = state["evaluations"]
    before, after = ({k: v for k, v in evaluations[i].items() if k != "step"} for i in (0, -1))
    unit = 1024 ** 2 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    summary = {"before": before, "after": after, "steps": state["step"],
               "seconds": state["seconds"], "tokens": state["tokens"],
               "peak_rss_mb": round(peak, 1), "warnings": []}
    if state["step"]:
        rows = [row for _, row, _ in read_jsonl(out / "metrics.jsonl")]
        summary["warnings"] = hacking_warnings(rows, evaluations)
        learning_curve(out, rows, evaluations)
        report_of_run(out, people, rows, evaluations, summary["warnings"])
    write_json(out / "summary.json", summary)
    print_summary(summary, out)
    return summary


def learning_curve(out, rows, evaluations):
    """Draw `rows`, the lines of metrics.jsonl, and the evaluations on held-out users, as four
    panels over the training steps."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    x = [r["step"] for r in rows]
    get = lambda key: np.array([r[key] for r in rows], dtype=float)
    fig, axes = plt.subplots(2, 2, figsize=(10, 6.5), constrained_layout=True)
    a, b, c, d = axes.flat
    mean, spread = get("emotion"), get("emotion_std")
    a.plot(x, mean, color="tab:blue", label="training users, mean")
    a.fill_between(x, np.clip(mean - spread, 0, 100), np.clip(mean + spread, 0, 100),
                   color="tab:blue", alpha=0.2, label="their spread, ± 1 std")
    a.errorbar([e["step"] for e in evaluations], [e["score"] for e in evaluations],
               [e["stderr"] for e in evaluations], fmt="o", color="black", capsize=3,
               label="held-out users, ± standard error")
    a.set(title="final emotion", ylim=(0, 102))
    b.plot(x, get("success"), color="tab:green", label="success (100)")
    b.plot(x, get("failure"), color="tab:red", label="failure (< 10)")
    b.plot(x, get("malformed"), color="tab:gray", label="malformed")
    b.set(title="dialogues, %", ylim=(-2, 102))
    c.plot(x, get("reply_tokens"), color="tab:purple", label="tokens per reply")
    c.plot(x, get("turns"), color="tab:brown", label="turns per dialogue")
    c.set(title="length", ylim=(0, None))
    d.plot(x, get("entropy"), color="tab:orange", label="entropy per token, nats (left)")
    # room for the legend
    d.set(title="entropy and KL", ylim=(0, 1.5 * max(get("entropy").max(), 1e-9)))
    right = d.twinx()
    right.plot(x, get("kl"), color="tab:cyan", label="KL(pi_old, pi) in the update (right)")
    right.set_ylim(0, 1.5 * max(get("kl").max(), 1e-9))
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        lines = axis.get_legend_handles_labels()
        if axis is d:
            lines = [p + q for p, q in zip(lines, right.get_legend_handles_labels())]
        axis.legend(*lines, fontsize=8, loc="best")
    fig.suptitle(out.name)
    fig.savefig(out / "learning_curve.png", dpi=110)
    plt.close(fig)
