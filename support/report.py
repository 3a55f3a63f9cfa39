"""support/report.py - what a run leaves at its end, and what goes into its page (support/page.py)
and its picture (support/picture.py). What is printed stands in support/terminal.py.
"""

from support.errors import BadInput
from support.files import read_json, read_jsonl, write_json
from support.metrics import score_summary, warnings_of
from support.page import TEXTS, write_report
from support.picture import learning_curve
from support.results import (
    PART_NAMES,
    PERSONA_GROUPS,
    intention_of,
    metrics_of,
    parts_of,
    recorded_dialogues,
    scale_of_settings,
    world_of,
)
from support.settings import Settings, changed_from_defaults
from support.terminal import print_summary, scale_of_run
from support.users import INITIAL_EMOTION

import resource
import sys
from pathlib import Path

from tqdm import tqdm

# --------------------------------------------------------------------------------- the end of a run


def finish(out, state, heldout):
    """What a run leaves when it is over: summary.json, the picture, the report, a table on the
    terminal. state: as in state.json; heldout: see `draw_run`. Returns the summary."""
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
        "warnings": draw_run(out, state, heldout),
        "evaluations": evaluations,
    }
    write_json(out / "summary.json", summary)
    print_summary(summary, out)
    return summary


def without_step(evaluation):
    """The scores of an evaluation alone: in the summary "before" and "after" tell the step."""
    return {key: value for key, value in evaluation.items() if key != "step"}


def draw_run(out, state, heldout):
    """Write the picture and the report of a run as far as it is. Returns its warnings.

    heldout: the profiles of its held-out users."""
    rows = metrics_of(out)
    evaluations = state["evaluations"]
    config = read_json(out / "config.json")
    warnings = list(warnings_of(rows).values())
    learning_curve(out, rows, evaluations, scale_of_run(config))
    report_of_run(out, heldout, rows, evaluations, warnings)
    return warnings


def draw_while_running(out, state, heldout):
    """`draw_run` at a checkpoint. A report that cannot be written is no reason to end a run of
    days: the error is printed, not raised."""
    try:
        draw_run(out, state, heldout)
    except Exception as error:
        tqdm.write(f"the report could not be written: {error!r}")


# ---------------------------------------------------------------------- reports of runs and results


def report_of_run(out, heldout, rows, evaluations, warnings):
    """Write report.html of a run from its log. rows: the lines of metrics.jsonl; warnings: of
    `draw_run`; heldout: see `draw_run`."""
    out = Path(out)
    last_step = evaluations[-1]["step"]
    dialogues = held_out_dialogues(out, heldout, steps=(0, last_step))
    dialogues_of_side = {"before": [d for d in dialogues if d["side"] == "before"]}
    if last_step > 0:  # else the only evaluation so far is the one before training
        dialogues_of_side["after"] = [d for d in dialogues if d["side"] == "after"]
    config = read_json(out / "config.json")
    write_report(
        out / "report.html",
        title=out.name,
        settings=config,
        curves=rows,
        evaluations=evaluations,
        dialogues=dialogues,
        tables=tables_by_part(dialogues_of_side),
        notes=warnings,
        scale=scale_of_run(config),
        changed=changed_settings(config),
    )


def changed_settings(config):
    """What differs from the defaults in the settings of a config.json, as one types it; None if
    this version cannot tell."""
    try:
        return changed_from_defaults(Settings(**config))
    except (TypeError, BadInput):  # of another version, or edited
        return None


def held_out_dialogues(out, heldout, steps):
    """The dialogues of these steps with the held-out profiles, as the page wants them."""
    profiles = {profile.id: profile for profile in heldout}
    dialogues = []
    # most lines are dialogues of training: `containing` skips them unread
    for _, dialogue, _ in read_jsonl(out / "dialogues.jsonl", containing=b'"heldout"'):
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
    made_by = dialogues[0]["made_by"]  # the settings are the same in all lines of a file
    numbers = ("score", "stderr", "success", "failure", "malformed", "n")
    names = TEXTS["signs"]["names"]
    signs_table = {
        "title": "Signs of reward hacking",
        "columns": ["sign", "value"],
        "rows": [[names[sign], f"{value:.3f}"] for sign, value in result["signs"].items()],
        "reading": TEXTS["signs"]["reading"],
    }
    write_report(
        page_path,
        title=f"{made_by['policy']} with the simulated user {made_by['simulator']}",
        settings={**made_by, "rule": result["rule"]},
        curves=[],
        evaluations=[{key: result[key] for key in numbers}],
        dialogues=dialogues,
        never_trained_on=all(d["made_by"].get("held_out") for d in dialogues),
        tables=[*tables_by_part({"score": dialogues}), signs_table],
        scale=scale_of_settings(made_by),
    )
    return page_path


def tables_by_part(dialogues_of_side):
    """Tables of scores for the page: by world, by hidden need ..., each of the `parts_of` the
    dialogues.

    dialogues_of_side: {"before" | "after" | "score": the page's dialogues}, a column for each."""
    everything = [dialogue for dialogues in dialogues_of_side.values() for dialogue in dialogues]
    parts = parts_of(everything)
    tables = []
    for text in TEXTS["part"]:
        part = text["name"]  # a field of the dialogues, such as "intention"
        if part not in parts:
            continue
        values = sorted({dialogue[part] for dialogue in everything})
        tables.append(
            {
                "title": text["title"],
                "columns": [PART_NAMES.get(part, part), *dialogues_of_side, "n"],
                "reading": text["reading"],
                "rows": [part_row(dialogues_of_side, part, value) for value in values],
            }
        )
    return tables


def part_row(dialogues_of_side, part, value):
    """The row of a table for the dialogues whose field `part` is `value`: the mean score of each
    side, and how many dialogues the last side has."""
    scores_of_sides = [
        [dialogue["score"] for dialogue in dialogues if dialogue[part] == value]
        for dialogues in dialogues_of_side.values()
    ]
    means = [score_summary(scores)["score"] if scores else None for scores in scores_of_sides]
    return [value, *means, len(scores_of_sides[-1])]
