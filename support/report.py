"""support/report.py - what a run shows of itself: tables and dialogues on the terminal, the
learning curve as a picture, and what goes into its page (support/page.py).
"""

from support import reference, strategies
from support.page import TEXTS, panels, write_report
from support.results import (
    PERSONA_GROUPS,
    intention_of,
    parts_of,
    recorded_dialogues,
    world_of,
)
from support.rundir import read_json, read_jsonl, write_json
from support.signs import hacking_warnings, score_summary
from support.users import INITIAL_EMOTION

import resource
import sys
import textwrap
from pathlib import Path

import numpy as np
from tqdm import tqdm

# ------------------------------------------------------------------------------ the end of a run


def finish(out, state, people, grammar=None):
    """What a run leaves when it is over: summary.json, the picture, the report, a table on the
    terminal. state: as in state.json; the others: see `report_of_run`. Returns the summary."""
    evaluations = state["evaluations"]
    unit = 1024**2 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, else KiB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
    summary = {
        "before": without_step(evaluations[0]),
        "after": without_step(evaluations[-1]),
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


def without_step(evaluation):
    return {key: value for key, value in evaluation.items() if key != "step"}


def draw_run(out, state, people, grammar=None):
    """Write the picture and the report of a run as far as it is. Returns its warnings. grammar: the
    toy, whose kinds of sentences are strategies; these are counted only at a run's end."""
    path = out / "metrics.jsonl"
    rows = metrics_of(out) if path.exists() else []
    evaluations = state["evaluations"]
    warnings = hacking_warnings(rows, evaluations)
    bands = reference.bands_of_config(read_json(out / "config.json"))
    learning_curve(out, rows, evaluations, bands)
    report_of_run(out, people, rows, evaluations, warnings, grammar)
    return warnings


def draw_while_running(out, state, people):
    """The same at a checkpoint, where a picture that fails is no reason to end a run of days."""
    try:
        draw_run(out, state, people)
    except Exception as error:
        tqdm.write(f"the report could not be written: {error!r}")


def metrics_of(out):
    """The readable lines of a run's metrics.jsonl."""
    return [row for _, row, _ in read_jsonl(out / "metrics.jsonl") if row]


# ---------------------------------------------------------------------- reports of runs and results


def report_of_run(out, people, rows, evaluations, warnings, grammar=None):
    """Write report.html of a run from its log. people: its held-out profiles; rows: metrics.jsonl;
    warnings: of `hacking_warnings`; grammar: the toy, if the policy speaks its language."""
    out = Path(out)
    last_step = evaluations[-1]["step"]
    dialogues = held_out_dialogues(out, people, steps=(0, last_step))
    sides = {"before": [d for d in dialogues if d["side"] == "before"]}
    if last_step:
        sides["after"] = [d for d in dialogues if d["side"] == "after"]
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


def held_out_dialogues(out, people, steps):
    """The dialogues of these steps with these held-out profiles, as the page wants them."""
    profiles = {profile.id: profile for profile in people}
    dialogues = []
    # most lines are dialogues of training; `only` skips them unread
    for _, dialogue, _ in read_jsonl(out / "dialogues.jsonl", only=b'"heldout"'):
        if not dialogue or dialogue["split"] != "heldout":
            continue
        if dialogue["step"] in steps and dialogue["profile_id"] in profiles:
            dialogues.append(page_dialogue(dialogue, profiles[dialogue["profile_id"]]))
    return dialogues


def page_dialogue(dialogue, profile):
    """A dialogue of dialogues.jsonl with what the page shows of its user."""
    intention, kind = intention_of(profile.task, profile.need)
    return {
        **dialogue,
        "id": profile.id,
        "side": "after" if dialogue["step"] else "before",
        "intention": intention,
        "kind": kind,
        **world_of(profile.target),
        "group": PERSONA_GROUPS.get(profile.main_cha, profile.main_cha),
        "start": INITIAL_EMOTION["training"],
        "persona": profile.player,
        "score": round(100 * dialogue["reward"]),
    }


def report_of_results(path, result, ids=None):
    """Write the report of a result file beside it, of the users `ids` alone (default: of all).
    Returns its path."""
    dialogues = [
        {**d, "persona": d["raw"].get("player", ""), "score": d["final"]}
        for d in recorded_dialogues(path)
        if ids is None or d["id"] in ids
    ]
    page_path = Path(path).with_suffix(".html")
    numbers = ("score", "stderr", "success", "failure", "malformed", "n")
    signs_table = {
        "title": "Signs of failure",
        "columns": ["sign", "value"],
        "rows": [[sign, f"{value:.3f}"] for sign, value in result["signs"].items()],
        "reading": TEXTS["signs"],
    }
    write_report(
        page_path,
        title=result["by_whom"],
        settings={**dialogues[0]["made_by"], "rule": result["rule"]},
        curves=[],
        evaluations=[{key: result[key] for key in numbers}],
        dialogues=dialogues,
        never_trained_on=all(d["made_by"].get("held_out") for d in dialogues),
        tables=[*tables_by_part({"score": dialogues}), signs_table],
    )
    return page_path


def tables_by_part(sides):
    """Scores by each of `parts_of`. sides: {"before" | "after" | "score": [page's dialogues]}."""
    everything = [dialogue for dialogues in sides.values() for dialogue in dialogues]
    parts = parts_of(everything)
    tables = []
    for text in TEXTS["part"]:
        name = text["name"]
        if name not in parts:
            continue
        values = sorted({dialogue[name] for dialogue in everything})
        tables.append(
            {
                "title": text["title"],
                "columns": [name, *sides, "n"],
                "reading": text["reading"],
                "rows": [part_row(sides, name, value) for value in values],
            }
        )
    return tables


def part_row(sides, name, value):
    """The row of the dialogues whose field `name` is `value`: the mean score of each side, and how
    many dialogues the last side has."""
    row = [value]
    scores = []
    for dialogues in sides.values():
        scores = [dialogue["score"] for dialogue in dialogues if dialogue[name] == value]
        row.append(score_summary(scores)["score"] if scores else None)
    return [*row, len(scores)]


# ------------------------------------------------------------------------------- judged strategies


def judged_tables(out, rows, grammar):
    """What a judge left in a run's directory (strategies.json, capabilities.json), or else
    strategies by the toy's `grammar`: (`rows` with their uses and gains, tables, radar)."""
    dialogues = judged_dialogues(out) or toy_dialogues(out, grammar)
    used_any = any(codes for dialogue in dialogues for codes, _ in dialogue["replies"])
    by_step = strategies.steps_of(dialogues) if used_any else {}
    radar = radar_of(read_json(out / "capabilities.json"))
    tables = [
        strategy_table("uses", by_step, ["variety", "support"]),
        strategy_table("gain", by_step, []),
        capabilities_table(radar),
    ]
    return [with_strategies(row, by_step) for row in rows], tables, radar


def judged_dialogues(out):
    """The training dialogues whose replies a judge has tagged, in strategies.json; [] if none."""
    results = list(read_json(out / "strategies.json").get("files", {}).values())
    if not results:
        return []
    return [d for d in results[0].get("tagged", ()) if d["split"] == "train"]


def toy_dialogues(out, grammar):
    """The training dialogues of a run of the toy, with the strategies that its `grammar` reads from
    the replies; [] without a grammar."""
    if not grammar:
        return []
    dialogues = []
    for _, dialogue, _ in read_jsonl(out / "dialogues.jsonl", only=b'"train"'):
        if not dialogue:
            continue
        replies = [
            [strategies.toy_codes(turn["reply"], grammar), turn["change"]]
            for turn in dialogue["turns"]
            if turn["emotion"] is not None
        ]
        dialogues.append({**dialogue, "intention": "", "replies": replies})
    return dialogues


def with_strategies(row, by_step):
    """A row of metrics.jsonl with the uses and gains of each group of strategies, where its step
    has them."""
    row = dict(row)
    if row["step"] in by_step:
        groups = by_step[row["step"]]["strategies"]
        for name in strategies.GROUPS:
            row[f"uses {name}"] = groups[name]["uses"]
            row[f"gain {name}"] = groups[name]["gain"]
    return row


def strategy_table(number, by_step, further):
    """A table of one number ("uses" or "gain") of each group of strategies, over the steps.
    further: numbers that are no group's, each a column."""
    rows = []
    for step, numbers in by_step.items():
        of_groups = [numbers["strategies"][name][number] for name in strategies.GROUPS]
        rows.append([step, *of_groups, *[numbers[name] for name in further]])
    return {
        "title": f"Strategies: {number}",
        "columns": ["steps up to", *strategies.GROUPS, *further],
        "rows": rows,
        "reading": TEXTS["strategies"][number],
    }


def radar_of(judgements):
    """What the page draws of judged capabilities: [{"label", "values": {capability: 1 to 5}}]."""
    tables = judgements.get("capabilities", {}).get("tables", {})
    radar = []
    for file, table in tables.items():
        means = {capability: numbers["mean"] for capability, numbers in table.items()}
        radar.append({"label": file, "values": means})
    return radar


def capabilities_table(radar):
    """The radar's numbers as a table."""
    capabilities = list(radar[0]["values"]) if radar else []
    return {
        "title": "Five capabilities, judged",
        "columns": ["results", *capabilities],
        "rows": [[entry["label"], *entry["values"].values()] for entry in radar],
        "reading": TEXTS["strategies"]["radar"],
    }


# ------------------------------------------------------------------------------------ the terminal


def progress(metrics):
    """A step's metrics in the few words that fit behind a progress bar."""
    tokens_per_second = metrics["tokens_sampled"] / metrics["seconds"]
    text = (
        f"emotion {metrics['emotion']:.0f}, success {metrics['success']:.0f} %, "
        f"{tokens_per_second:.0f} tokens/s"
    )
    if metrics["dropped"]:
        text += f", {metrics['dropped']} dropped"
    return text


def print_settings(cfg, out, training, held_out, ranks):
    """The head of a run: who, with whom, where to, and every setting."""
    on_ranks = f", on {ranks} ranks" if ranks > 1 else ""
    print(
        f"{cfg.algo} {cfg.mode}, policy {cfg.model}, user {cfg.simulator} ({cfg.difficulty}, "
        f"{cfg.lang}), {training} users to train on, {held_out} held out -> {out}{on_ranks}"
    )
    # the first line has these already
    shown = ("algo", "think", "model", "simulator", "difficulty", "lang", "profiles")
    rest = [f"{key} {value}" for key, value in vars(cfg).items() if key not in shown]
    print(
        textwrap.fill(
            ", ".join(rest),
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
            answer = turn["user"] or ""
            lines.append(f"    user  [{turn['emotion']:3}]  {answer}  ({turn['change']:+d})")
    return "\n".join(lines) + "\n"


def print_finished(out):
    """What is printed for a run that is resumed after its end."""
    summary = read_json(out / "summary.json")
    print(
        f"{out} is finished: {summary['steps']} steps, held-out score "
        f"{summary['before']['score']:.1f} before, {summary['after']['score']:.1f} after; to "
        f"go on: python rlver.py --resume {out} --steps N, N the total"
    )


def print_summary(summary, out):
    """The end of a run: scores before and after, time and memory, warnings, files."""
    print(
        f"\n{'held-out users':<16}{'score':>8}{'stderr':>8}{'success':>9}{'failure':>9}"
        f"{'malformed':>11}{'n':>6}"
    )
    for name in ("before", "after"):
        scores = summary[name]
        print(
            f"{name:<16}{scores['score']:>8.1f}{scores['stderr']:>8.1f}{scores['success']:>8.1f}%"
            f"{scores['failure']:>8.1f}%{scores['malformed']:>10.1f}%{scores['n']:>6}"
        )
    seconds = dict(summary["seconds"])
    total = seconds.pop("total")
    parts = [f"{name.replace('_', ' ')} {value:.0f}" for name, value in seconds.items()]
    print(
        f"{total:.0f} s in all: {', '.join(parts)}; peak memory {summary['peak_rss_mb']:.0f} MB\n"
    )
    for warning in summary["warnings"]:
        print(f"look at the dialogues: {warning}")
    print_deviations(out)
    files = sorted(path.name for path in out.iterdir() if not path.name.startswith("."))
    print(f"everything is in {out}: {', '.join(files)}")


def print_deviations(out):
    """Where a run's curves leave the bands of the reference runs, if there are bands for it."""
    bands = reference.bands_of_config(read_json(out / "config.json"))
    rows = metrics_of(out) if bands else []
    deviations = reference.outside(reference.columns_of(rows), bands)
    if deviations:
        print(reference.sentence(deviations))


# ------------------------------------------------------------------------------------- the picture


def learning_curve(out, rows, evaluations, bands=()):
    """Draw `rows`, the lines of metrics.jsonl, and the evaluations on held-out users: the panels of
    the page's section "Learning", behind each curve its band of `bands` (support/reference.py).
    Each axis holds all that is drawn on it, whatever it is.

    The Figure is made without pyplot, which would keep it in memory; its margins are set by hand,
    because an automatic layout draws everything twice."""
    from matplotlib.figure import Figure

    learning = [panel for panel in panels(rows, evaluations) if panel["section"] == "Learning"]
    columns = min(3, len(learning))
    lines = -(-len(learning) // 3)  # rounded up
    width, height = 4 * columns + 0.4, 3 * lines + 0.7  # inches
    figure = Figure(figsize=(width, height))
    for number, panel in enumerate(learning, 1):
        draw_panel(figure.add_subplot(lines, columns, number), panel, bands)
    figure.suptitle(f"{out.name}, over the training steps", fontsize=11)
    figure.subplots_adjust(
        left=0.6 / width,
        right=1 - 0.2 / width,
        bottom=0.35 / height,
        top=1 - 0.75 / height,
        wspace=0.2,
        hspace=0.28,
    )
    figure.savefig(out / "learning_curve.png", dpi=90, pil_kwargs={"compress_level": 1})


def draw_panel(axis, panel, bands):
    """One panel: its curves, its evaluations, its axes and its legend."""
    for line in panel["lines"]:
        draw_line(axis, panel["steps"], line, bands)
    if panel["points"]:
        draw_evaluations(axis, panel["points"])
    low, top = axis.get_ylim()  # fitted to the data, with a margin
    usual_top = panel["span"][1] if panel["span"] else 0
    axis.set_ylim(min(low, 0), max(top, usual_top))
    axis.set_title(f"{panel['title']}, {panel['unit']}", fontsize=10)
    axis.grid(alpha=0.3, axis="y")
    axis.tick_params(labelsize=8)
    # steps are whole numbers; ticks with their labels take most of the time of drawing
    axis.locator_params("x", nbins=4, integer=True)
    axis.locator_params("y", nbins=5)
    if axis.dataLim.width == 0:  # one step alone stands in the middle
        step = axis.dataLim.x0
        axis.set(xticks=[step], xlim=step + np.array([-1, 1]))
    if len(panel["lines"]) > 1 or panel["points"]:
        handles, labels = axis.get_legend_handles_labels()
        by_label = dict(zip(labels, handles))  # several bands have one label
        axis.legend(by_label.values(), by_label.keys(), fontsize=7)


def draw_line(axis, steps, line, bands):
    """One curve, on the band of the reference runs, or in its standard deviation without one."""
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
    marker = "." if len(values) == 1 else None  # one step makes no line
    axis.plot(steps, values, color=colour, label=line["label"], marker=marker)
    if "spread" in line and line["key"] not in bands:
        spread = np.array(line["spread"], dtype=float)
        axis.fill_between(
            steps,
            values - spread,
            values + spread,
            color=colour,
            alpha=0.2,
            linewidth=0,
            label="± 1 standard deviation",
        )


def draw_evaluations(axis, points):
    """The scores on held-out users. points: [[step, score, standard error or None]]."""
    steps, scores, errors = np.nan_to_num(np.array(points, dtype=float)).T
    axis.errorbar(
        steps,
        scores,
        errors,
        fmt="o",
        color="black",
        capsize=3,
        label="held-out users, ± standard error",
    )
