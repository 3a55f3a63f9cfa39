"""mistakes.py - a run with the mistake of each signature of course/signatures.py, and what it
logged.

    python tests/mistakes.py                    make the runs of course/mistakes.toml that are
                                                missing, about a minute each, and write
                                                docs/reference/mistakes.jsonl
    python tests/mistakes.py critic=DIR ...     take these from finished runs

A line of that file has the run's settings, the metrics that signatures look at, and, where a
signature looks at dialogues, two dialogues of one step.
"""

import dataclasses
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "course"), str(ROOT / "tests")]
from patches import read_toml
from support import reference
from support.settings import Settings, resolve_settings

import labs
from handed_in import HandedIn, read_run
from recompute import replay_sample
from tables import rounded

FILE = reference.PLACE / "mistakes.jsonl"
METRICS = (
    "step",
    "emotion",
    "kl",
    "clipfrac",
    "grad_norm",
    "logp_gap",
    "explained_variance",
    "kl_start",
    "reply_words",
    "refilled",
    "tokens_trained",
    "tokens_sampled",
)
LONGEST = 40  # steps of a line; of a longer run the last ones are kept


def mistakes():
    """mistakes.toml as {name of the signature: mistake}."""
    return {mistake["name"]: mistake for mistake in read_toml("mistakes.toml")["mistake"]}


def lab_run(mistake):
    """The run with a mistake, a labs.Run with seed 0. It need not be there yet. Raises BadInput if
    a patch does not fit the project any more."""
    if "lab" in mistake:
        return labs.Run(labs.load_labs()[mistake["lab"]], mistake["arm"], 0)
    return labs.Run(mistake, "broken", 0)


def line_of(name, run):
    """What is kept of a HandedIn."""
    config = dataclasses.asdict(run.settings)
    usual = {**dataclasses.asdict(resolve_settings({"algo": config["algo"]})), "algo": None}
    rows = run.rows[-LONGEST:]
    return rounded(
        {
            "name": name,
            "settings": {key: value for key, value in config.items() if usual[key] != value},
            "metrics": {metric: [row[metric] for row in rows] for metric in METRICS},
            "dialogues": kept_dialogues(name, run),
        }
    )


def kept_dialogues(name, run):
    """Two dialogues that show a mistake, or none where the metrics do."""
    step = max(run.training)
    dialogues = run.training[step]
    if name == "equal-groups":
        return [dialogue for dialogue in dialogues if dialogue["group"] == 0][:2]
    if name in ("stale-emotion", "other-user"):
        return dialogues[:2]
    if name == "mixed-users":
        # the more other dialogues have ended, the more users are wrong
        return sorted(dialogues, key=lambda dialogue: len(dialogue["turns"]))[-2:]
    if name == "no-format-check":
        return [d for d in dialogues if any("<think>" in t["reply"] for t in d["turns"])][:2]
    return []


def lines():
    """The lines of docs/reference/mistakes.jsonl."""
    with open(FILE, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def run_of(line):
    """A line of the file as the HandedIn that it was taken from, as far as it is there."""
    usual = resolve_settings({"algo": line["settings"]["algo"]})
    config = {**dataclasses.asdict(usual), **line["settings"]}
    columns = line["metrics"]
    rows = [dict(zip(columns, values)) for values in zip(*columns.values())]
    training = {dialogue["step"]: line["dialogues"] for dialogue in line["dialogues"]}
    run = HandedIn(ROOT, Settings(**config), rows, training, {}, {})
    run.replayed = replay_sample(run, 0)
    return run


def main(argv):
    """Make the runs that are not named in `argv`, as NAME=DIR, and write the file."""
    places = dict(word.split("=", 1) for word in argv)
    runs = {name: lab_run(mistake) for name, mistake in mistakes().items() if name not in places}
    with labs.lock_of_runs():
        labs.make_runs(list(runs.values()))
    places |= {name: run.out for name, run in runs.items()}
    new_lines = [line_of(name, read_run(places[name])) for name in mistakes()]
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in new_lines)
    FILE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
