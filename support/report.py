"""support/report.py - what a run shows: the terminal, the learning curve, the report.

The report is one HTML file: curves, tables, and dialogues before and after training side by side. A
score is a number; whether a model comforts anybody must be read. So it is built around reading:
pick a user, see both dialogues turn by turn with the user's emotion beside each, search all that
was said. The page (report_template.html) needs no network.

What models and users said is hostile until shown to be harmless: a policy that learns to write
"</script>" must not run code in the reader's browser. Three locks, each enough alone: the data is
JSON in which no "<" is left (`embed`); the page's script makes text nodes only, never HTML; and a
Content-Security-Policy lets the browser run only the script whose hash it names, and fetch nothing.
"""

from support import reference, strategies
from support.results import GROUPS, intention_of, parts_of, recorded_dialogues, world_of
from support.rundir import read_json, read_jsonl, write_file, write_json
from support.signs import hacking_warnings, score_summary
from support.users import INITIAL_EMOTION

import base64
import hashlib
import json
import math
import re
import resource
import sys
import textwrap
import tomllib
from pathlib import Path

import numpy as np
from tqdm import tqdm

TEMPLATE = Path(__file__).parent / "report_template.html"
LONGEST = 4000  # characters of one text; a longer one is shortened, and says so
MAX_BYTES = 4_500_000  # of data; beyond it texts are cut at half the length, and again

TEXTS = tomllib.loads(TEMPLATE.with_name("report_texts.toml").read_text("utf-8"))
# [(section, title, unit, range, [(key in metrics.jsonl, label, colour)], how to read it)]
PANELS = [
    tuple(panel.get(key) for key in ("section", "title", "unit", "span", "series", "reading"))
    for panel in TEXTS["panel"]
]
TURN = ("reply", "thought", "user", "analysis", "change", "emotion")
SIDES = {"before": 0, "": 1, "after": 2}


def write_report(
    path,
    *,
    title,
    settings,
    curves,
    evaluations,
    dialogues,
    tables,
    notes=(),
    limit=200,
    radar=(),
    never_trained_on=True,
):
    """Write the report of a run, or of an evaluation, to `path`: beside, then renamed. Missing
    numbers may be None or absent.

    title: str. settings: dict. curves: the lines of metrics.jsonl, [] for an evaluation.
    evaluations: [{"step", "score", "stderr", "success", "failure", "malformed" (percent), "n"}], on
    held-out users.
    dialogues: [{"id", "side" ("before", "after" or ""), "step", "intention", "kind", "group",
        "persona", "first_line", "start" (emotion), "ended", "score" (0..100), "turns": [{"reply",
        "thought", "user", "analysis", "change", "emotion"}]}]; `limit` of them are shown.
    tables: [{"title", "columns": [..], "rows": [[..]], "reading": how to read it}]. notes:
    warnings, shown on top. radar: [{"label", "values": {capability: 1 to 5}}]. never_trained_on: of
    the evaluations' users (of a foreign model nobody knows)."""
    picked = choose(dialogues, limit)
    shown = sum(map(len, picked))
    left = len(dialogues) - shown
    page = {
        "title": title,
        "headline": headline(curves, evaluations, settings.get("steps")),
        "notes": list(notes),
        "steps": len(curves),
        "radar": list(radar),
        "panels": [
            panel
            for panel in panels(curves, evaluations)  # one point is no curve
            if panel["lines"] or len(panel["points"]) > 1
        ],
        "settings": {
            key: v if isinstance(v, str) else json.dumps(clean(v), ensure_ascii=False)
            for key, v in settings.items()
        },
        "tables": [
            table(t)
            for t in [evaluation_table(evaluations, never_trained_on), *tables]
            if t["rows"]
        ],
        "count": f"{shown} of {len(dialogues)} dialogues, {left or 'none'} left out."
        + " Those shown are picked evenly over the final scores, users whole."
        * bool(left and shown),
        "users": [user(own) for own in picked],
    }
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
    """At most `limit` dialogues, evenly over the scores: a list for each id, lowest score first.

    A user is shown whole or not at all: "after" means nothing without its "before". The score of a
    user is that of the last dialogue."""
    people = {}
    for d in dialogues:
        people.setdefault(str(d["id"]), []).append(d)
    for own in people.values():
        own.sort(key=lambda d: (SIDES.get(d.get("side") or "", 1), d.get("step") or 0))
    people = sorted(
        people.values(),
        key=lambda own: -1 if clean(own[-1].get("score")) is None else own[-1]["score"],
    )
    # the most users that fit; both ends of the scores are among them
    for k in range(min(len(people), limit), 0, -1):
        picked = [people[i * (len(people) - 1) // max(1, k - 1)] for i in range(k)]
        if sum(map(len, picked)) <= limit:
            return picked
    return []


def user(own):
    """All dialogues of one id; what belongs to the person is kept once."""
    return {
        **{key: own[0].get(key) for key in ("id", "intention", "kind", "group", "persona")},
        "dialogues": [
            {
                **{
                    key: d.get(key)
                    for key in ("side", "step", "first_line", "start", "ended", "score")
                },
                "turns": [{key: t.get(key) for key in TURN} for t in d.get("turns") or []],
            }
            for d in own
        ],
    }


def headline(curves, evaluations, steps=None):
    """The answer in a line of plain words, in a second one how far the run is of its `steps`."""
    if not evaluations:
        return []
    first, last = (
        {key: told(e.get(key)) for key in ("score", "stderr", "success", "failure", "n")}
        for e in (evaluations[0], evaluations[-1])
    )
    at, done = evaluations[-1].get("step"), curves[-1].get("step", len(curves)) if curves else 0
    who = f"({last['n']} {'held-out ' * (at is not None)}users, standard error {last['stderr']})"
    over, alone = done == at == (at if steps is None else steps), len(evaluations) == 1
    answer = (
        f"Final emotion {last['score']}{' before training' * (at == 0 and not over)} {who}, "
        f"{last['failure']} % failures, {last['success']} % successes"
        if alone
        else f"Final emotion {first['score']} to {last['score']} {who}, {first['failure']} % "
        f"failures to {last['failure']} %"
    )
    if at is None:
        return [answer]
    if over:
        return [
            answer,
            f"Before and after {done} training steps."
            if done
            else "An evaluation alone: no training step was made.",
        ]
    status = (
        "Only the evaluation before training is there so far"
        if alone
        else f"The last evaluation so far is that at step {at}"
    )
    status += f"; {done}{f' of {steps}' if steps else ''} training steps are done."
    if curves:
        emotion, success, failure, malformed = (
            told(curves[-1].get(key)) for key in ("emotion", "success", "failure", "malformed")
        )
        status += (
            f" Latest training numbers (step {done}): final emotion {emotion}, success "
            f"{success} %, failure {failure} %, malformed {malformed} %."
        )
    return [answer, status]


def panels(curves, evaluations):
    """The panels that have something to show. Numbers with five digits: no screen shows more, and
    long runs stay small."""

    def column(key):
        values = [clean(row.get(key)) for row in curves]
        return [None if v is None else float(f"{v:.5g}") for v in values]

    steps, result = [row.get("step", i + 1) for i, row in enumerate(curves)], []
    for section, title, unit, span, series, reading in PANELS:
        lines = [
            {
                "key": key,
                "label": label,
                "colour": colour,
                "values": joined(column(key))
                if section == "Strategies" or key == "watched"
                else column(key),
            }
            for key, label, colour in series
        ]
        lines = [line for line in lines if any(v is not None for v in line["values"])]
        points = []
        if title == "Final emotion":
            points = [clean([e.get("step"), e.get("score"), e.get("stderr")]) for e in evaluations]
            points = [point for point in points if None not in point[:2]]
            if lines and any(v is not None for v in column("emotion_std")):
                lines[0]["spread"] = column("emotion_std")
        nobody = title == "Dropped" and not any(any(line["values"]) for line in lines)
        if (lines or points) and not nobody:
            result.append(
                {
                    "section": section,
                    "title": title,
                    "unit": unit,
                    "span": span,
                    "steps": steps,
                    "lines": lines,
                    "points": points,
                    "reading": reading,
                }
            )
    return result


def joined(values):
    """Numbers of every K-th step, with those between them on straight lines."""
    there = [i for i, v in enumerate(values) if v is not None]
    return (
        clean(
            np.interp(
                range(len(values)), there, [values[i] for i in there], left=math.nan, right=math.nan
            ).round(3)
        )
        if there
        else values
    )


def evaluation_table(evaluations, never_trained_on=True):
    """The scores on held-out users as a table."""
    columns = {
        "step": "step",
        "score": "final emotion",
        "stderr": "± stderr",
        "success": "success %",
        "failure": "failure %",
        "malformed": "malformed %",
        "n": "dialogues",
    }
    who = (
        "Users never trained on"
        if never_trained_on
        else "Whether this policy met these users in its training is not known"
    )
    return {
        "title": "Evaluations" + " on held-out users" * never_trained_on,
        "columns": list(columns.values()),
        "rows": [[e.get(key) for key in columns] for e in evaluations],
        "reading": f"{who}; gaps below three standard errors may be luck.",
    }


def told(value):
    """A number as a reader wants it: one decimal, "–" for none."""
    value = clean(value)
    return (
        "–"
        if value is None
        else f"{value:z.1f}".replace("-", "−")
        if isinstance(value, float)
        else str(value)
    )


def table(t):
    """Cells as text, as JSON does not know 85.0 from 85; columns of numbers stand to the right."""
    number = lambda v: isinstance(v, (int, float, np.number)) and not isinstance(v, bool)
    return {
        "title": t["title"],
        "columns": t["columns"],
        "reading": t.get("reading"),
        "rows": [[told(v) for v in row] for row in t["rows"]],
        "right": [
            any(number(row[i]) for row in t["rows"] if i < len(row))
            for i in range(len(t["columns"]))
        ],
    }


# ------------------------------------------------------------------------------------ into the page


def clean(value, longest=math.inf):
    """What JSON can say: numpy's numbers as Python's, NaN and infinities as null, texts at most
    `longest` characters."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): clean(v, longest) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(v, longest) for v in value]
    if value is None or isinstance(value, (int, float)):  # a bool is an int
        return None if isinstance(value, float) and not math.isfinite(value) else value
    text = str(value)
    return (
        text
        if len(text) <= longest
        else f"{text[:longest]} [… shortened, {len(text):,} characters in all]"
    )


def embed(value, longest):
    """JSON as UTF-8 bytes that can stand inside <script>: there, HTML ends at the first "</script"
    and knows no escapes, but JSON does.

    A lone surrogate, of a model's broken bytes, is no UTF-8; as an escape it is good JSON."""
    text = json.dumps(
        clean(value, longest), ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    return text.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"}).encode(
        "utf-8", "backslashreplace"
    )


# ---------------------------------------------------------------------- reports of runs and results


def tables_by_part(sides):
    """Scores by each of `parts_of`. sides: {"before" | "after" | "score": [report's dialogues]}."""
    everything = [d for dialogues in sides.values() for d in dialogues]

    def row(name, value):
        parts = [
            [d["score"] for d in dialogues if d[name] == value] for dialogues in sides.values()
        ]
        return [
            value,
            *[score_summary(part)["score"] if part else None for part in parts],
            len(parts[-1]),
        ]

    return [
        {
            "title": title,
            "columns": [name, *sides, "n"],
            "reading": reading,
            "rows": [row(name, value) for value in sorted({d[name] for d in everything})],
        }
        for name, title, reading in (part.values() for part in TEXTS["part"])
        if name in parts_of(everything)
    ]


def radar_of(found):
    """What is drawn of tools.capabilities: [{"label", "values": {capability: 1 to 5}}]."""
    return [
        {"label": file, "values": {item: t["mean"] for item, t in table.items()}}
        for file, table in found.get("capabilities", {}).get("tables", {}).items()
    ]


def judged_tables(out, rows, grammar):
    """What the tools' --json left in a run's directory (strategies.json, capabilities.json), or
    else strategies by the toy's `grammar`: (`rows` with their uses and gains, tables, radar)."""
    found = next(iter(read_json(out / "strategies.json").get("files", {}).values()), {})
    tagged = [d for d in found.get("tagged", ()) if d["split"] == "train"] or [
        {
            **d,
            "intention": "",
            "replies": [
                [strategies.toy_codes(t["reply"], grammar), t["change"]]
                for t in d["turns"]
                if t["emotion"] is not None
            ],
        }
        for _, d, _ in (read_jsonl(out / "dialogues.jsonl", only=b'"train"') if grammar else ())
        if d
    ]
    any_used = any(used for d in tagged for used, _ in d["replies"])
    steps = strategies.steps_of(tagged) if any_used else {}
    value = lambda step, name, what: steps[step]["strategies"][name][what]
    rows = [
        {
            **row,
            **{
                f"{what} {name}": value(row["step"], name, what)
                for name in strategies.GROUPS
                for what in ("uses", "gain")
                if row["step"] in steps
            },
        }
        for row in rows
    ]
    tables = [
        {
            "title": f"Strategies: {what}",
            "columns": ["steps up to", *strategies.GROUPS, *more],
            "rows": [
                [
                    step,
                    *[value(step, name, what) for name in strategies.GROUPS],
                    *[told[key] for key in more],
                ]
                for step, told in steps.items()
            ],
            "reading": TEXTS["strategies"][what],
        }
        for what, more in (("uses", ["variety", "support"]), ("gain", []))
    ]
    radar = radar_of(read_json(out / "capabilities.json"))
    axes = list(radar[0]["values"]) if radar else []
    tables.append(
        {
            "title": "Five capabilities, judged",
            "columns": ["results", *axes],
            "rows": [[r["label"], *r["values"].values()] for r in radar],
            "reading": TEXTS["strategies"]["radar"],
        }
    )
    return rows, tables, radar


def report_of_run(out, people, rows, evaluations, warnings, grammar=None):
    """Write report.html of a run from its log. people: its held-out profiles; rows: metrics.jsonl;
    warnings: of `hacking_warnings`; grammar: the toy, if the policy speaks its language."""
    out, people = Path(out), {p.id: p for p in people}
    last, dialogues = evaluations[-1]["step"], []
    for _, d, _ in read_jsonl(out / "dialogues.jsonl", only=b'"heldout"'):  # most are of training
        if d and d["split"] == "heldout" and d["step"] in (0, last) and d["profile_id"] in people:
            profile = people[d["profile_id"]]
            intention, kind = intention_of(profile.task, profile.need)
            dialogues.append(
                {
                    **d,
                    "id": profile.id,
                    "side": "after" if d["step"] else "before",
                    "intention": intention,
                    "kind": kind,
                    **world_of(profile.target),
                    "group": GROUPS.get(profile.main_cha, profile.main_cha),
                    "start": INITIAL_EMOTION["training"],
                    "persona": profile.player,
                    "score": round(100 * d["reward"]),
                }
            )
    sides = {
        side: [d for d in dialogues if d["side"] == side]
        for side in ("before", "after")[: 1 + bool(last)]
    }
    rows, tables, radar = judged_tables(out, rows, grammar)
    write_report(
        out / "report.html",
        title=out.name,
        settings=read_json(out / "config.json"),
        curves=rows,
        evaluations=evaluations,
        dialogues=dialogues,
        tables=tables_by_part(sides) + tables,
        notes=warnings,
        radar=radar,
    )


def report_of_results(path, result, ids=None):
    """Write the report of a result file beside it, of the users `ids` alone (default: of all).
    Returns its path."""
    dialogues = [
        {**d, "persona": d["raw"].get("player", ""), "score": d["final"]}
        for d in recorded_dialogues(path)
        if ids is None or d["id"] in ids
    ]
    numbers = ("score", "stderr", "success", "failure", "malformed", "n")
    path = Path(path).with_suffix(".html")
    counted = {
        "title": "Signs of failure",
        "columns": ["sign", "value"],
        "rows": [[key, f"{value:.3f}"] for key, value in result["signs"].items()],
        "reading": TEXTS["signs"],
    }
    write_report(
        path,
        title=result["by_whom"],
        settings={**dialogues[0]["made_by"], "rule": result["rule"]},
        curves=[],
        evaluations=[{key: result[key] for key in numbers}],
        dialogues=dialogues,
        never_trained_on=all(d["made_by"].get("held_out") for d in dialogues),
        tables=[*tables_by_part({"score": dialogues}), counted],
    )
    return path


# ------------------------------------------------------------------------------------ what one sees


def progress(metrics):
    """A step's metrics in the few words that fit behind a progress bar."""
    return (
        f"emotion {metrics['emotion']:.0f}, success {metrics['success']:.0f} %, "
        f"{metrics['tokens_sampled'] / metrics['seconds']:.0f} tokens/s"
        + f", {metrics['dropped']} dropped"
        * bool(metrics["dropped"])
    )


def print_settings(cfg, out, training, held_out, ranks):
    """The head of a run: who, with whom, where to, and every setting."""
    print(
        f"{cfg.algo} {cfg.mode}, policy {cfg.model}, user {cfg.simulator} ({cfg.difficulty}, "
        f"{cfg.lang}), {training} users to train on, {held_out} held out -> {out}"
        + f", on {ranks} ranks"
        * (ranks > 1)
    )
    told = ("algo", "think", "model", "simulator", "difficulty", "lang", "profiles")
    words = [f"{key} {value}" for key, value in vars(cfg).items() if key not in told]
    print(
        textwrap.fill(
            ", ".join(words),
            116,
            initial_indent="    ",
            subsequent_indent="    ",
            break_on_hyphens=False,
            break_long_words=False,
        )
    )


def dialogue_text(title, episode):
    """One dialogue, word for word."""
    lines = [
        f"\n--- a dialogue {title}: {episode.profile_id}, ended by {episode.ended}, reward "
        f"{episode.reward:.2f}",
        f"    user  [{INITIAL_EMOTION['training']:3}]  {episode.first_line}",
    ]
    for turn in episode.turns:
        if turn["thought"]:
            lines.append(f"    (thinks      {turn['thought']})")
        lines.append(f"    policy       {turn['reply']}")
        if turn["emotion"] is not None:
            said = f"{turn['user'] or ''}  ({turn['change']:+d})"
            lines.append(f"    user  [{turn['emotion']:3}]  {said}")
    return "\n".join(lines) + "\n"


def print_finished(out):
    """What is said of a run that is resumed after its end."""
    summary = read_json(out / "summary.json")
    print(
        f"{out} is finished: {summary['steps']} steps, held-out score "
        f"{summary['before']['score']:.1f} before, {summary['after']['score']:.1f} after; to "
        f"go on: python rlver.py --resume {out} --steps N, N the total"
    )


def print_summary(summary, out):
    print(
        f"\n{'held-out users':<16}{'score':>8}{'stderr':>8}{'success':>9}{'failure':>9}"
        f"{'malformed':>11}{'n':>6}"
    )
    for name in ("before", "after"):
        s = summary[name]
        print(
            f"{name:<16}{s['score']:>8.1f}{s['stderr']:>8.1f}{s['success']:>8.1f}%"
            f"{s['failure']:>8.1f}%{s['malformed']:>10.1f}%{s['n']:>6}"
        )
    parts = [
        f"{key.replace('_', ' ')} {value:.0f}"
        for key, value in summary["seconds"].items()
        if key != "total"
    ]
    print(
        f"{summary['seconds']['total']:.0f} s in all: {', '.join(parts)}; peak memory "
        f"{summary['peak_rss_mb']:.0f} MB\n"
    )
    for warning in summary["warnings"]:
        print(f"look at the dialogues: {warning}")
    bands = reference.bands_of_config(read_json(out / "config.json"))
    rows = [row for _, row, _ in read_jsonl(out / "metrics.jsonl") if row] if bands else []
    if found := reference.outside(reference.columns_of(rows), bands):
        print(reference.sentence(found))
    print(
        f"everything is in {out}: "
        + ", ".join(sorted(p.name for p in out.iterdir() if not p.name.startswith(".")))
    )


def draw_run(out, state, people, grammar=None):
    """Write the picture and the report of a run as far as it is. Returns what there is to be warned
    of. grammar: the toy, whose kinds of sentences are strategies; they are told at a run's end."""
    path = out / "metrics.jsonl"
    rows = [row for _, row, _ in read_jsonl(path) if row] if path.exists() else []
    warnings = hacking_warnings(rows, state["evaluations"])
    bands = reference.bands_of_config(read_json(out / "config.json"))
    learning_curve(out, rows, state["evaluations"], bands)
    report_of_run(out, people, rows, state["evaluations"], warnings, grammar)
    return warnings


def draw_while_running(out, state, people):
    """The same at a checkpoint, where a picture that fails is no reason to end a run of days."""
    try:
        draw_run(out, state, people)
    except Exception as error:
        tqdm.write(f"the report could not be written: {error!r}")


def finish(out, state, people, grammar=None):
    """What a run leaves when it is over: summary.json, the picture, the report, a table on the
    terminal. state: as in state.json; the others: of `report_of_run`. Returns the summary."""
    evaluations = state["evaluations"]
    before, after = ({k: v for k, v in evaluations[i].items() if k != "step"} for i in (0, -1))
    unit = 1024**2 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    summary = {
        "before": before,
        "after": after,
        "steps": state["step"],
        "seconds": state["seconds"],
        "tokens": state["tokens"],
        "peak_rss_mb": round(peak, 1),
        "warnings": draw_run(out, state, people, grammar),
        "evaluations": evaluations,
    }
    write_json(out / "summary.json", summary)
    print_summary(summary, out)
    return summary


def learning_curve(out, rows, evaluations, bands=()):
    """Draw `rows`, the lines of metrics.jsonl, and the evaluations on held-out users: the panels of
    the page's section "Learning", behind each curve its band of `bands` (support/reference.py).
    Each axis holds all that is drawn on it, whatever it is.

    A Figure of its own: pyplot would keep it, and a laid-out one is drawn twice."""
    from matplotlib.figure import Figure

    drawn = [p for p in panels(rows, evaluations) if p["section"] == "Learning"]
    wide, high = min(3, len(drawn)), -(-len(drawn) // 3)
    width, height = 4 * wide + 0.4, 3 * high + 0.7
    fig = Figure(figsize=(width, height))
    for k, panel in enumerate(drawn, 1):
        axis = fig.add_subplot(high, wide, k)
        for line in panel["lines"]:
            values = np.array(line["values"], dtype=float)
            colour = f"tab:{line['colour']}"
            if line["key"] in bands:
                mean, s = bands[line["key"]]
                axis.fill_between(
                    range(1, len(mean) + 1),
                    mean - 2 * s,
                    mean + 2 * s,
                    color=colour,
                    alpha=0.15,
                    linewidth=0,
                    label="ten reference runs, ± 2 s",
                )
            axis.plot(
                panel["steps"],
                values,
                color=colour,
                label=line["label"],
                marker="." if len(values) == 1 else None,
            )
            if "spread" in line and line["key"] not in bands:
                spread = np.array(line["spread"], dtype=float)
                axis.fill_between(
                    panel["steps"],
                    values - spread,
                    values + spread,
                    color=colour,
                    alpha=0.2,
                    linewidth=0,
                    label="± 1 standard deviation",
                )
        if panel["points"]:
            steps, scores, errors = np.nan_to_num(np.array(panel["points"], dtype=float)).T
            axis.errorbar(
                steps,
                scores,
                errors,
                fmt="o",
                color="black",
                capsize=3,
                label="held-out users, ± standard error",
            )
        low, top = axis.get_ylim()  # fitted to the data, with a margin
        axis.set_ylim(min(low, 0), max(top, *(panel["span"] or [0])))
        axis.set_title(f"{panel['title']}, {panel['unit']}", fontsize=10)
        axis.grid(alpha=0.3, axis="y")
        axis.tick_params(labelsize=8)
        # steps are whole; a tick with its label is the dearest thing to draw
        axis.locator_params("x", nbins=4, integer=True)
        axis.locator_params("y", nbins=5)
        if axis.dataLim.width == 0:  # one step alone stands in the middle
            axis.set(xticks=[axis.dataLim.x0], xlim=axis.dataLim.x0 + np.array([-1, 1]))
        if len(panel["lines"]) > 1 or panel["points"]:
            handles, labels = axis.get_legend_handles_labels()
            once = dict(zip(labels, handles))  # several bands have one label
            axis.legend(once.values(), once.keys(), fontsize=7)
    fig.suptitle(f"{out.name}, over the training steps", fontsize=11)
    fig.subplots_adjust(
        left=0.6 / width,
        right=1 - 0.2 / width,
        bottom=0.35 / height,
        top=1 - 0.75 / height,
        wspace=0.2,
        hspace=0.28,
    )
    fig.savefig(out / "learning_curve.png", dpi=90, pil_kwargs={"compress_level": 1})
