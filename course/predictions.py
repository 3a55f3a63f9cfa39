"""predictions.py - eight settings, changed one at a time: what somebody expects of each, written
down before the runs, beside what came out.

    python course/course.py predict                  the settings
    python course/course.py predict --template       the form, to be saved as predictions.toml
    python course/course.py predict critic           record the prediction in predictions.toml, make
                                                     the runs that are missing, and compare
    python course/course.py predict all FILE         the same for all settings, from another file
    python course/course.py predict --grade FILE...  for teachers: the points of whole classes, from
                                                     the results in teacher/; makes no runs
    python course/course.py predict --teacher        for teachers: measure these results

A setting is a lab with two arms, base and changed, and a form in place of an explanation: its runs
are made, found again and shared as those of labs.py, in runs/labs/. settings.toml says what is
asked. A prediction counts as it was when it was recorded first, before its runs, in
runs/predictions/NAME/prediction.json.
"""

from patches import (  # first: it finds the project
    HERE,
    ROOT,
    markdown,
    opened_for_writing,
    point_columns,
    read_toml,
    with_tables,
    write_row,
)
from support.errors import BadInput
from support.files import read_json, read_jsonl, write_file, write_json
from support.flags import Parser
from support.settings import read_flags, resolve_settings
from support.stats import mean_interval

import dataclasses
import hashlib
import json
import math
import os
import textwrap
import tomllib
from datetime import UTC, datetime
from pathlib import Path

from labs import LAST, SEEDS, Run, load_labs, lock_of_runs, make_runs
from pictures import draw
from tell_tales import series

PREDICTIONS = ROOT / "runs" / "predictions"
RESULTS = HERE / "teacher" / "predictions.json"  # what --teacher measured, for --grade
PAGE = HERE / "teacher" / "predictions.md"  # the same in tables, with explanations
NOT_MEASURED = "*Not measured yet* (`python course/course.py predict --teacher`)."
ARMS = ("base", "changed")
DIRECTIONS = ("up", "down", "same")
POINTS = 0.5  # of a number that was predicted right; the reasons are graded by hand

# ------------------------------------------------------------------------------------ the settings


def load_settings():
    """settings.toml as {name: setting}, in its order."""
    labs = load_labs()
    settings = {}
    for setting in read_toml("settings.toml")["setting"]:
        if "lab" in setting:
            setting = {**runs_of_lab(labs[setting["lab"]]), **setting}
        settings[setting["name"]] = setting
    return settings


def runs_of_lab(lab):
    """What makes the runs of a lab, for a setting: its healthy arm is the base."""
    arms = {"base": lab["arms"]["healthy"], "changed": lab["arms"]["broken"]}
    patches = [
        {**patch, "arm": patch["arm"].replace("broken", "changed")} for patch in lab["patch"]
    ]
    return {"flags": lab["flags"], "arms": arms, "patch": patches}


def panels_of(setting):
    """The panels of a setting, {metric: panel}."""
    return {panel["show"]: panel for panel in setting["panels"]}


def runs_of(setting):
    """The runs of a setting, {arm: [a Run for each seed]}. They need not be there yet."""
    return {arm: [Run(setting, arm, seed) for seed in SEEDS] for arm in ARMS}


def template():
    """The form that a student fills in: a TOML file with a table for each setting."""
    return FORM_HEAD + "".join(form_of(setting) for setting in load_settings().values())


FORM_HEAD = f"""\
# predictions.toml - what you expect of eight changes, written down before their runs.
#
# Each setting has two arms, base and changed, and three numbers. A number is the mean over the last
# {LAST} training steps. Predict the difference, changed - base:
#   direction   "up", "down", or "same": the 95 % interval of the mean difference contains 0
#   change      [low, high]: the difference is in this range. Both are 0 or above for "up", 0 or
#               below for "down", and on both sides of 0 for "same". The range may be at most as
#               wide as its line says.
#   why         one or two sentences: what in the equations or in the code makes you expect this?
# For example:  emotion = {{ direction = "down", change = [-8.0, -2.5] }}
#
# A number earns {POINTS:g} points if its direction is right and its range overlaps the 95 %
# interval of the mean difference (Student's t, three pairs of runs with the same seed). If this
# interval contains 0 and is wider than a range may be, the result is undecided: any direction is
# right then, but the range must overlap all the same. A setting with a missing or invalid key
# earns 0. The eight reasons earn up to 3 points, graded by hand: a reason counts if it names what
# happens in the equations or in the code, also where the number was wrong.
#
# docs/metrics.md explains the metrics. Then, in the project: python course/course.py predict NAME
"""


def form_of(setting):
    """The part of the form for one setting."""
    lines = ["", f"# {setting['name']}: {setting['title']}"]
    if setting["arms"]["base"]:
        lines.append(f"# both arms: {setting['flags']}; base: {setting['arms']['base']}")
    else:
        lines.append(f"# both arms: {setting['flags']}")
    lines.append(f"# changed: {setting['arms']['changed'] or 'a line of the code, see below'}")
    about = " ".join(setting["about"].split())
    wrapped = textwrap.wrap(about, 98, break_on_hyphens=False)
    lines += [f"# {line}" for line in wrapped]
    if setting["base"]:
        lines.append(f"# the base was measured before: {setting['base']}")
    lines += [f"[{setting['name']}]", 'why = ""']
    for name, panel in panels_of(setting).items():
        lines.append(
            f"# {panel['title']} ({panel['unit']}); a range at most {panel['widest']} wide"
        )
        lines.append(f'{name} = {{ direction = "", change = [] }}')
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------- what a student has written


def read_predictions(path):
    """A predictions.toml as {setting: entry}, as it is. Raises BadInput if it is no TOML file."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(
            f"predict: {path}: cannot be read ({error.strerror}); python course/course.py predict "
            "--template prints the form"
        ) from None
    except ValueError as error:  # no TOML, or no UTF-8
        reason = str(error).splitlines()[0]
        raise BadInput(f"predict: {path}: is no TOML file ({reason})") from None


def entry_of(predictions, setting, path):
    """The entry of one setting, whole. Raises BadInput, which names what is missing or wrong."""
    name = setting["name"]
    where = f"predict {name}: {path}"
    if not isinstance(predictions.get(name), dict):
        raise BadInput(
            f"{where}: the table [{name}] is missing; python course/course.py predict --template "
            "prints the form"
        )
    entry = predictions[name]
    panels = panels_of(setting)
    expected = ["why", *panels]
    for key in expected:
        if key not in entry:
            raise BadInput(f"{where}: [{name}] has no {key!r}; asked are {', '.join(expected)}")
    for key in entry:
        if key not in expected:
            raise BadInput(f"{where}: [{name}] {key!r}: asked are only {', '.join(expected)}")
    if not isinstance(entry["why"], str) or not entry["why"].strip():
        raise BadInput(f"{where}: [{name}] 'why' is empty; write one sentence")
    for key, panel in panels.items():
        problem = problem_with(entry[key], panel["widest"])
        if problem:
            raise BadInput(f"{where}: [{name}] {key!r}: {problem}")
    return entry


def problem_with(guess, widest):
    """What is wrong with the prediction of one number, in words, or None."""
    if not isinstance(guess, dict) or set(guess) != {"direction", "change"}:
        return f'write {{ direction = "up", change = [low, high] }}, not {guess!r}'
    direction, change = guess["direction"], guess["change"]
    if direction not in DIRECTIONS:
        return f"its direction is {direction!r} and must be up, down or same"
    if not isinstance(change, list) or len(change) != 2 or not all(map(is_number, change)):
        return f"its change is {change!r} and must be two numbers, [low, high]"
    low, high = change
    if low > high:
        return f"its change is {change}: the lower number comes first"
    allowed = {"up": low >= 0, "down": high <= 0, "same": low <= 0 <= high}
    if not allowed[direction]:
        return f"the direction {direction!r} and the change {change} contradict each other"
    if high - low > widest * (1 + 1e-9):  # rounding: 0.4 - 0.3 is more than 0.1
        return f"its range is {high - low:g} wide, and at most {widest:g} is allowed"
    return None


def is_number(value):
    """Whether a value of a TOML or JSON file is a finite number. (True is an int in Python.)"""
    return isinstance(value, (int, float)) and value is not True and math.isfinite(value)


# ---------------------------------------------------------------------- the prediction that counts


def digest_of(entry):
    """The SHA-256 of an entry: of its JSON text with sorted keys."""
    text = json.dumps(entry, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def keep_prediction(setting, entry, runs):
    """The record of the prediction that counts: the first one that was made. It is written now if
    there is none; if there is another one, that is printed, and the old one stays."""
    path = PREDICTIONS / setting["name"] / "prediction.json"
    if path.exists():
        record = read_record(path, setting)
        if record["prediction"] != entry:
            print_other_prediction(record, entry)
        return record
    # The base may be there from another setting. The changed runs should not.
    done = [run.out.name for run in runs["changed"] if run.done()]
    record = {
        "setting": setting["name"],
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "sha256": digest_of(entry),
        "prediction": entry,
        "changed_runs_there_before": done,
    }
    write_json(path, record)
    print(f"recorded: {path} (SHA-256 {record['sha256'][:12]})")
    return record


def read_record(path, setting):
    """A recorded prediction. Raises BadInput if it is not as it was written."""
    record = read_json(path)
    intact = isinstance(record, dict) and {"time", "sha256", "prediction"} <= set(record)
    if not intact or record["sha256"] != digest_of(record["prediction"]):
        raise BadInput(
            f"predict {setting['name']}: {path}: was edited, its SHA-256 is that of another "
            "prediction; put it back, or move it away and predict again"
        )
    entry_of({setting["name"]: record["prediction"]}, setting, path)
    return record


def print_other_prediction(record, entry):
    """Say that the file has another prediction now than the one that counts."""
    print(f"the prediction was changed after it was recorded ({record['time']}); that one counts:")
    for key, old in record["prediction"].items():
        if old != entry[key]:
            print(f"  {key}: recorded {in_words(old)}; not counted {in_words(entry[key])}")


def in_words(guess):
    """A prediction of one number as a table shows it, "down, -8 to -2.5"; a reason as it is."""
    if isinstance(guess, str):
        return repr(guess)
    low, high = guess["change"]
    return f"{guess['direction']}, {low:g} to {high:g}"


# ------------------------------------------------------------------------------- the runs' numbers


def refuse_other_runs(setting, runs):
    """Raise BadInput if a run that is there is not the one asked for: if it has other settings or
    is not whole, because somebody put it there, went on with it, or edited it."""
    for run in [run for arm in ARMS for run in runs[arm] if run.done()]:
        problem = problem_with_run(run)
        if problem:
            raise BadInput(
                f"predict {setting['name']}: {run.out} {problem}; move it away, and the same "
                "command makes the right one"
            )


def problem_with_run(run):
    """What is wrong with a run that is there, in words, or None."""
    expected = dataclasses.asdict(resolve_settings(read_flags(run.flags)))
    config = read_json(run.out / "config.json")
    for name, value in expected.items():
        if name not in config or config[name] != value:
            return f"is a run of other settings: its {name} is {config.get(name)!r}, not {value!r}"
    rows = [row for _, row, _ in read_jsonl(run.out / "metrics.jsonl") if row]
    if len(rows) != expected["steps"]:
        return f"is not whole: metrics.jsonl has {len(rows)} of {expected['steps']} steps"
    return None


def make_missing(runs):
    """Make the runs that are not there, both arms of the first seed first."""
    by_seed = zip(*runs.values())
    make_runs([run for runs_of_seed in by_seed for run in runs_of_seed])


def curves_of(setting, runs):
    """{metric: {arm: [a series for each seed]}}."""
    return {
        name: {arm: [series(run, name) for run in runs[arm]] for arm in ARMS}
        for name in panels_of(setting)
    }


def numbers_of(curves):
    """{metric: {arm: [a number for each seed]}}: the means over the last steps of the curves."""
    return {
        name: {arm: [float(line[-LAST:].mean()) for line in arms[arm]] for arm in ARMS}
        for name, arms in curves.items()
    }


# --------------------------------------------------------------------------------- right and wrong


def differences(numbers):
    """changed - base for each seed, of one metric's numbers {arm: [a number for each seed]}."""
    return [changed - base for base, changed in zip(numbers["base"], numbers["changed"])]


def rounded_interval(values):
    """`mean_interval`, rounded: differences that are equal would have a spread of 1e-17."""
    return tuple(round(float(number), 12) for number in mean_interval(values))


def possible_directions(mean, half, widest):
    """The directions that a result leaves possible; its 95 % interval is mean - half to mean +
    half. One that contains 0 says "same", if it is not wider than a prediction may be; else three
    seeds do not decide, and no direction is wrong."""
    if mean - half > 0:
        return ("up",)
    if mean + half < 0:
        return ("down",)
    return DIRECTIONS if 2 * half > widest else ("same",)


def verdict(guess, mean, half, widest):
    """The word "right" if the predicted direction is possible and the predicted range overlaps the
    result's 95 % interval; else what is wrong."""
    possible = possible_directions(mean, half, widest)
    if guess["direction"] not in possible:
        return f"wrong: {possible[0]}"
    low, high = guess["change"]
    if low > mean + half or high < mean - half:
        return "wrong: the range"
    return "right"


def verdicts_of(setting, entry, numbers):
    """{metric: verdict} of a setting's three numbers."""
    verdicts = {}
    for name, panel in panels_of(setting).items():
        mean, half = rounded_interval(differences(numbers[name]))
        verdicts[name] = verdict(entry[name], mean, half, panel["widest"])
    return verdicts


def count_right(verdicts):
    """How many of the verdicts are "right"."""
    return list(verdicts.values()).count("right")


def points_in_words(right, of):
    """The points of predicted numbers: "2 of 3 right, 1 of 1.5 points"."""
    return f"{right} of {of} right, {right * POINTS:g} of {of * POINTS:g} points"


# ---------------------------------------------------------------------------------------- commands


def perform(setting, predictions, path):
    """Do one setting: record the prediction, make the missing runs, print and draw the result."""
    name = setting["name"]
    entry = entry_of(predictions, setting, path)
    print(f"\n=== {name}: {setting['title']}\n")
    with lock_of_runs():
        runs = runs_of(setting)
        refuse_other_runs(setting, runs)
        record = keep_prediction(setting, entry, runs)
        make_missing(runs)
    curves = curves_of(setting, runs)
    picture = PREDICTIONS / name / "picture.png"
    draw(setting, curves, picture)
    print_result(setting, record, numbers_of(curves))
    print(f"the picture is {picture}", flush=True)


def print_result(setting, record, numbers):
    """Print prediction and result beside each other, and the points."""
    before = len(record.get("changed_runs_there_before", []))
    print(f"\nchanged - base, means of the last {LAST} steps, seeds {', '.join(map(str, SEEDS))}")
    print(f"the prediction is of {record['time']}, SHA-256 {record['sha256'][:12]}", end="")
    print(f"; {before} of the changed runs were there before it" if before else "")
    print(f"{'':<20}{'base':>9}{'changed':>9}   {'difference, 95 %':<28}{'predicted':<25}")
    entry = record["prediction"]
    verdicts = verdicts_of(setting, entry, numbers)
    for name, words in verdicts.items():
        base, changed = (sum(numbers[name][arm]) / len(SEEDS) for arm in ARMS)
        mean, half = rounded_interval(differences(numbers[name]))
        result = f"{mean:.3g} ({mean - half:.3g} to {mean + half:.3g})"
        print(f"{name:<20}{base:>9.3g}{changed:>9.3g}   {result:<28}", end="")
        print(f"{in_words(entry[name]):<25}{words}")
    print(points_in_words(count_right(verdicts), len(verdicts)))
    print(f"your reason, which is graded by hand: {entry['why'].strip()}")


def print_list(settings):
    """Print a line for each setting: what it is, and what is there of it."""
    for name, setting in settings.items():
        runs = [run for runs in runs_of(setting).values() for run in runs]
        done = sum(run.done() for run in runs)
        recorded = (PREDICTIONS / name / "prediction.json").exists()
        state = "predicted" if recorded else "not predicted"
        print(f"{name:<12} {setting['title']:<51} {state}, {done} of {len(runs)} runs")


# ------------------------------------------------------------------------------------ for teachers


def need_teachers_part():
    """Raise BadInput in a student's copy of the project, before it makes half an hour of runs."""
    if not PAGE.is_file():
        raise BadInput(f"predict: {PAGE.parent} is missing; what it holds is for teachers only")


def flags_of(setting):
    """The flags of both arms, as they stand in the results: results of others do not count."""
    return {arm: f"{setting['flags']} {setting['arms'][arm]}".strip() for arm in ARMS}


def measured_numbers(setting, results):
    """The numbers of a setting in the teacher's results, or None if it was not measured, or with
    other flags."""
    result = results.get(setting["name"], {})
    return result["numbers"] if result.get("flags") == flags_of(setting) else None


def measure_all(settings):
    """`predict --teacher`: make the runs of all settings, and write their numbers to RESULTS and
    PAGE after each. What was measured is not lost if this is stopped."""
    need_teachers_part()
    for setting in settings.values():
        print(f"\n=== {setting['name']}: {setting['title']}\n")
        with lock_of_runs():
            runs = runs_of(setting)
            refuse_other_runs(setting, runs)
            make_missing(runs)
        numbers = numbers_of(curves_of(setting, runs))
        results = read_json(RESULTS)
        results[setting["name"]] = {"flags": flags_of(setting), "numbers": numbers}
        write_json(RESULTS, results)
        write_file(PAGE, page_with_results(PAGE.read_text(encoding="utf-8"), settings, results))
    print(f"\nthe tables are in {os.path.relpath(PAGE)}")


def page_with_results(page, settings, results):
    """The teacher's page with the table of each setting, between <!-- predict: NAME --> and
    <!-- predict: end -->. Raises BadInput if a setting has no place for its table."""

    def table_named(name):
        numbers = measured_numbers(settings[name], results)
        return NOT_MEASURED if numbers is None else table_of(settings[name], numbers)

    for name in settings:
        if page.count(f"<!-- predict: {name} -->\n") != 1:
            raise BadInput(f"{PAGE}: <!-- predict: {name} --> must be there once, for the table")
    return with_tables(page, "predict", table_named)


def table_of(setting, numbers):
    """The results of a setting as a table in Markdown."""
    rows = []
    for name, panel in panels_of(setting).items():
        base, changed = (sum(numbers[name][arm]) / len(SEEDS) for arm in ARMS)
        by_seed = differences(numbers[name])
        mean, half = rounded_interval(by_seed)
        cells = [
            f"`{name}`",
            f"{base:.3g}",
            f"{changed:.3g}",
            ", ".join(f"{difference:.3g}" for difference in by_seed),
            f"{mean:.3g} ± {half:.2g}",
            ", ".join(possible_directions(mean, half, panel["widest"])),
        ]
        rows.append(cells)
    columns = ["number", "base", "changed", "difference by seed", "mean", "right is"]
    return markdown(columns, rows)


def grade_all(settings, paths, csv_name=None):
    """`predict --grade`: print the points of each file, and write them to the CSV file `csv_name`.
    Returns True if all entries are whole. An entry that is not has no points, and is named."""
    need_teachers_part()
    results = read_json(RESULTS)
    measured = {name: measured_numbers(setting, results) for name, setting in settings.items()}
    missing = [name for name, numbers in measured.items() if numbers is None]
    if missing:
        raise BadInput(
            f"predict --grade: not measured yet: {', '.join(missing)}; python course/course.py "
            "predict --teacher measures what is missing"
        )
    with opened_for_writing("--csv", csv_name) as csv_file:
        write_row(csv_file, point_columns("setting"))
        whole = [grade_file(settings, measured, path, csv_file) for path in paths]
    return all(whole)


def grade_file(settings, measured, path, csv_file):
    """Print and write the points of one file, and print below them what is wrong with it. measured:
    {setting: its numbers}. Returns True if nothing is."""
    problems, right = [], dict.fromkeys(settings, 0)
    try:
        predictions = read_predictions(path)
    except BadInput as error:
        print(f"{path}: 0 points: {error}")
        write_points(csv_file, path, settings, right, str(error))
        return False
    for name, setting in settings.items():
        try:
            entry = entry_of(predictions, setting, path)
            right[name] = count_right(verdicts_of(setting, entry, measured[name]))
        except BadInput as error:
            problems.append(str(error))
    of = sum(len(setting["panels"]) for setting in settings.values())
    each = ", ".join(f"{name} {count}" for name, count in right.items())
    print(f"{path}: {points_in_words(sum(right.values()), of)} ({each})")
    for problem in problems:
        print(f"  {problem}")
    write_points(csv_file, path, settings, right, "; ".join(problems) or "without the reasons")
    return not problems


def write_points(csv_file, path, settings, right, result):
    """Write a row for each setting, and the total. right: {setting: how many numbers are}."""
    n_panels = {name: len(setting["panels"]) for name, setting in settings.items()}
    for name, count in right.items():
        words = f"{count} of {n_panels[name]} right"
        write_row(csv_file, [path, name, POINTS * count, POINTS * n_panels[name], words])
    totals = POINTS * sum(right.values()), POINTS * sum(n_panels.values())
    write_row(csv_file, [path, "total", *totals, result])


# ------------------------------------------------------------------------------------ command line


def main(argv):
    """`course.py predict`. Returns the exit code. Raises BadInput, which course.py prints."""
    settings = load_settings()
    args = make_parser().parse_args(argv)
    if args.csv is not None and not args.grade:
        raise BadInput("predict --csv has the points of --grade; name files with --grade")
    try:
        if args.template:
            print(template(), end="")
        elif args.grade:
            return 0 if grade_all(settings, args.grade, args.csv) else 1
        elif args.teacher:
            measure_all(settings)
        elif args.name is None:
            print_list(settings)
        else:
            predict(settings, args.name, args.file)
    except OSError as error:
        raise BadInput(f"predict: {error}") from None
    return 0


def predict(settings, name, path):
    """`predict NAME FILE`. NAME all: every setting, if all entries are whole."""
    if name not in (*settings, "all"):
        raise BadInput(f"predict {name}: unknown; choose from {', '.join(settings)}, or all")
    chosen = settings.values() if name == "all" else [settings[name]]
    predictions = read_predictions(path)
    for setting in chosen:
        entry_of(predictions, setting, path)
    for setting in chosen:
        perform(setting, predictions, path)


def make_parser():
    """The command line of `course.py predict`."""
    parser = Parser(
        prog="course.py predict",
        description="Eight settings, changed one at a time: your predictions beside the results.",
    )
    parser.add_argument(
        "name", nargs="?", metavar="NAME", help="a setting, or all (default: list them)"
    )
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        default=Path("predictions.toml"),
        metavar="FILE",
        help="your predictions (default: predictions.toml)",
    )
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--template", action="store_true", help="print the form of predictions.toml")
    modes.add_argument(
        "--grade",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="for teachers: print the points of these files; makes no runs",
    )
    modes.add_argument(
        "--teacher",
        action="store_true",
        help="for teachers: make all runs, and write the tables of teacher/predictions.md",
    )
    parser.add_argument("--csv", metavar="FILE", help="write the points of --grade there, too")
    return parser
