"""support/judged.py - what the report shows of strategies and capabilities: curves and tables of
what the policy's replies do, and the radar of five capabilities.

The strategies of a reply come from a judge (`python -m tools.strategies --json` wrote them into the
run's directory, strategies.json), or else, on the toy, from its grammar. The capabilities come from
a judge alone (tools.capabilities, capabilities.json).
"""

from support import strategies
from support.files import read_json, read_jsonl
from support.page import TEXTS

# The five capabilities (RLVER E.3), by the names that they have in files.
CAPABILITIES = {
    "ED": "empathic depth",
    "CI": "core insight",
    "SC": "solution crafting",
    "DG": "dialogue guidance",
    "SA": "style adaptability",
}

# The name of the judge that is a script (tools/scripted.py), and what must stand beside its scores.
SCRIPTED_JUDGE = "scripted"
MACHINERY_ONLY = "Machinery only: this judge is a script and knows nothing of comfort."

# --------------------------------------------------------------------------------------- strategies


def strategies_by_step(out, toy):
    """What is counted of strategies in the run in the directory `out`: {last step of each tenth of
    the run: `strategies.strategies_of` the training dialogues of that tenth}; {} if no reply uses a
    strategy. toy: the module toy.py if the policy speaks its language, else None."""
    dialogues = judged_dialogues(out)
    if not dialogues and toy is not None:
        dialogues = toy_dialogues(out, toy)
    used_any = any(codes for dialogue in dialogues for codes, _ in dialogue["replies"])
    return strategies.steps_of(dialogues) if used_any else {}


def judged_dialogues(out):
    """The training dialogues whose replies a judge has tagged, as *tagged dialogues*
    (support/strategies.py); [] if there are none.

    strategies.json is {"files": {path: {"tagged": [dialogue]}}}; a run's own holds one file."""
    files = read_json(out / "strategies.json").get("files", {})
    only_file = next(iter(files.values()), {})
    tagged = only_file.get("tagged", [])
    return [dialogue for dialogue in tagged if dialogue["split"] == "train"]


def toy_dialogues(out, toy):
    """The training dialogues of a run of the toy, as *tagged dialogues* (support/strategies.py):
    the toy's grammar tells the strategies of each reply. toy: the module."""
    dialogues = []
    # `containing`: most other lines are skipped unread
    for _, dialogue, _ in read_jsonl(out / "dialogues.jsonl", containing=b'"train"'):
        if not dialogue or dialogue["split"] != "train":
            continue
        replies = [
            [strategies.toy_codes(turn["reply"], toy), turn["change"]]
            for turn in dialogue["turns"]
            if turn["emotion"] is not None
        ]
        # The log does not say what the user hopes for. Only "asked" is counted by it, which the
        # report does not show.
        dialogues.append({**dialogue, "intention": "", "replies": replies})
    return dialogues


def with_strategies(rows, by_step):
    """`rows` of metrics.jsonl with the uses and gains of each group of strategies, in the steps of
    `by_step`: the curves of the report."""
    extended = []
    for row in rows:
        row = dict(row)
        if row["step"] in by_step:
            groups = by_step[row["step"]]["strategies"]
            for name in strategies.RLVER_GROUPS:
                row[f"uses {name}"] = groups[name]["uses"]
                row[f"gain {name}"] = groups[name]["gain"]
        extended.append(row)
    return extended


def strategy_tables(by_step):
    """Two tables for the report, of the uses and of the gain of each group of strategies."""
    return [
        strategy_table("uses", by_step, ["variety", "support"]),
        strategy_table("gain", by_step, []),
    ]


def strategy_table(number, by_step, further):
    """A table of one number ("uses" or "gain") of each group of strategies, over the steps.
    further: numbers that are no group's, each a column."""
    rows = []
    for step, numbers in by_step.items():
        of_groups = [numbers["strategies"][name][number] for name in strategies.RLVER_GROUPS]
        rows.append([step, *of_groups, *[numbers[name] for name in further]])
    return {
        "title": f"Strategies: {number}",
        "columns": ["steps up to", *strategies.RLVER_GROUPS, *further],
        "rows": rows,
        "reading": TEXTS["strategies"][number],
    }


# ------------------------------------------------------------------------------------- capabilities


def radar_of_run(out):
    """`radar_of` what a judge left in a run's directory; [] if nothing."""
    return radar_of(read_json(out / "capabilities.json"))


def radar_of(judgements):
    """What the page draws of judged capabilities: [{"label", "values": {capability: 1 to 5},
    "judge": who judged, in words}], each capability with its full name."""
    scores = judgements.get("capabilities", {})
    answers = scores.get("answers") or [{}]
    judge = judged_by(answers[0].get("judge"))
    radar = []
    for file, table in scores.get("tables", {}).items():
        means = {CAPABILITIES[code]: numbers["mean"] for code, numbers in table.items()}
        radar.append({"label": file, "values": means, "judge": judge})
    return radar


def judged_by(judge):
    """Who gave the scores, in words: the name of a model, or that they were made by rule."""
    if judge == SCRIPTED_JUDGE:
        return MACHINERY_ONLY
    return f"Judged by {judge or 'a model'}."


def capabilities_table(radar):
    """The radar's numbers as a table."""
    capabilities, judge = [], ""
    if radar:
        capabilities, judge = list(radar[0]["values"]), radar[0]["judge"]
    return {
        "title": "Five capabilities, judged",
        "columns": ["results", *capabilities],
        "rows": [[entry["label"], *entry["values"].values()] for entry in radar],
        "reading": f"{TEXTS['capabilities']} {judge}",
    }
