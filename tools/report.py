"""tools/report.py - draw the page and the picture of a run again, or of an unfinished run; and
several runs beside each other.

    python -m tools.report runs/NAME
    python -m tools.report RUN RUN... [--out FILE]

The first writes report.html and learning_curve.png into runs/NAME. The second writes the page FILE
(default: runs/compare.html) and beside it its curves, as a picture (runs/compare.png). Each run is
a line of the page, with a colour and a dash; runs that differ only in their seed are one line. Each
two lines are compared as `evaluate.py --compare` does, but with the dialogues of the runs' own
evaluations. What cannot be compared is said there, and refused nowhere.
"""

from players.heldout import heldout_of_run
from support.command_line import Parser, scripted_notice
from support.errors import BadInput, naming
from support.files import write_file
from support.metrics import column
from support.report import PANELS, STYLE, draw, figure_of, means_of_five, state_and_metrics, svg_of
from support.results import CONDITIONS
from support.rundir import held_out_dialogues, scale_of_run, settings_of_run

import itertools
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from evaluate import paired

# The lines of the page: a colour, and a dash (points drawn, points left out, ...), of each.
COLOURS = "#005ab5 #a31515 #00805a #b36b00 #7b3294 #1b222b #c2408a #5d7a8c".split()
DASHES = "1,0 6,2 2,2 8,2,2,2 3,1 12,3 6,2,2,2,2,2 2,4".split()
TEMPLATE = Path(__file__).with_name("compare.html.j2")

# ------------------------------------------------------------------------------ the runs, the lines


def read_settings(path):
    """The settings of the run in `path`. Raises BadInput."""
    if settings := settings_of_run(Path(path)):
        return settings
    raise BadInput(f"{path}: there is no run here (config.json is missing or unreadable)")


def read_run(path):
    """What the page needs of a run. Raises BadInput, also for a damaged one."""
    settings, out = read_settings(path), Path(path)
    with naming(path, others=BadInput):
        state, rows = state_and_metrics(out)
        # other prompts make another user, and so another line
        settings["user_prompts"] = state.get("user_prompts")
        evaluations = state["evaluations"]
        heldout = {profile.id: vars(profile) for profile in heldout_of_run(out, settings)}
        dialogues = [
            {**row, "final": 100 * row["reward"], "person": heldout[row["profile_id"]]}
            for row in held_out_dialogues(out)
            if row["step"] == evaluations[-1]["step"] > 0
        ]
        return SimpleNamespace(
            path=path,
            settings=settings,
            steps=column(rows, "step"),
            curves={key: means_of_five(column(rows, key)) for _, keys, _ in PANELS for key in keys},
            evaluations=evaluations,
            before=evaluations[0],
            after=evaluations[-1] if len(evaluations) > 1 else {},
            dialogues=[row | {"made_by": settings} for row in dialogues],
            seconds=state["seconds"]["total"],
            tokens=np.nansum(column(rows, "tokens_sampled")),
        )


def lines_of(runs):
    """The lines of the page, lists of runs: those that differ only in their seed are one line. (Not
    two with the same seed: there the code may differ.) Raises BadInput for too many."""
    lines = {}  # settings, and which run with these and this seed it is: runs
    settings = [run.settings for run in runs]
    for n, run in enumerate(runs):
        key = str(run.settings | {"seed": None}), settings[:n].count(run.settings)
        lines.setdefault(key, []).append(run)
    if len(lines) > len(COLOURS):
        raise BadInput(f"{len(lines)} runs differ in more than their seed; {len(COLOURS)} may")
    return [*lines.values()]


def name_of(line):
    """The name of a line: its first run, and how many seeds it has."""
    return line[0].path + (f" ({len(line)} seeds)" if line[1:] else "")


def differing(lines):
    """The settings in which the lines differ: {name: its values in each line}."""
    table = {
        key: [sorted({str(run.settings.get(key)) for run in line}) for line in lines]
        for one in lines
        for key in one[0].settings
    }
    return {key: values for key, values in table.items() if values.count(values[0]) < len(lines)}


def compare(lines):
    """How two lines differ after training: of `evaluate.paired`, or why they are not compared."""
    names = [*map(name_of, lines)]
    one, other = (line[0].settings for line in lines)
    if different := [key for key in CONDITIONS if one.get(key) != other.get(key)]:
        return {"sentence": f"cannot be compared: they differ in {', '.join(different)}"}
    sides = [sum((run.dialogues for run in line), []) for line in lines]
    if not all(sides):
        return {"sentence": "no verdict before both have an evaluation after training"}
    where = " and ".join(names)
    try:
        result = paired(sides, where, names)
    except BadInput as error:
        return {"sentence": str(error).removeprefix(f"{where}: ")}
    if result["n"] < 6:  # no p of so few is below 0.05
        return {"sentence": f"no verdict: {result['n']} people in common, 6 are needed"}
    return result


# -------------------------------------------------------------------------------------- the drawing


def draw_panel(lines, axis, key):
    """Draw a column of metrics.jsonl: of each line the mean of its runs and their range."""
    for line, colour, dashes in zip(lines, COLOURS, DASHES):
        n = min(len(run.steps) for run in line)
        steps, curves = line[0].steps[:n], [run.curves[key][:n] for run in line]
        axis.fill_between(steps, np.min(curves, 0), np.max(curves, 0), color=colour, alpha=0.15)
        style = 0, [*map(float, dashes.split(","))]
        label = " " + name_of(line).replace("$", r"\$")  # no formula, nor hidden for its first "_"
        axis.plot(steps, np.mean(curves, 0), color=colour, linestyle=style, label=label)
        for run in line if key == "emotion" else ():
            scores = (column(run.evaluations, name) for name in ("step", "score"))
            axis.plot(*scores, "o", color=colour, markersize=4)
    axis.axhline(0, linewidth=0)  # so that every panel begins at 0


def draw_panels(lines, path):
    """Write the picture of all panels. Returns [(title, how to read it, SVG)] for the page."""
    from matplotlib import rc_context

    panels = [
        (f"{title}:\n{label}" if label else title, key, reading)
        for title, curves, reading in PANELS
        for key, label in curves.items()
        if key == "emotion"
        or any(np.nan_to_num(run.curves[key]).any() for run in itertools.chain(*lines))
    ]
    with rc_context(STYLE):
        draw_one = partial(draw_panel, lines)
        picture = figure_of(panels, draw_one, columns=4)
        labels = picture.axes[0].get_legend_handles_labels()
        picture.legend(*labels, loc="outside upper center", ncols=4, fontsize=9)
        picture.savefig(path)
        return [(*one, svg_of(figure_of([one], draw_one, 1, 4))) for one in panels]


def draw_beside(paths, page):
    """Write the page of several runs. Raises BadInput."""
    from jinja2 import Template

    if page.suffix != ".html" or len({Path(path).resolve() for path in paths}) < len(paths):
        raise BadInput("several runs, each named once, need an --out that ends in .html")
    runs = [*map(read_run, paths)]
    lines = lines_of(runs)
    page.parent.mkdir(parents=True, exist_ok=True)
    notices = (scripted_notice(*map(run.settings.get, ("simulator", "reader"))) for run in runs)
    html = Template(TEMPLATE.read_text("utf-8"), autoescape=True, trim_blocks=True).render(
        runs=runs,
        lines=lines,
        looks=[*zip(map(name_of, lines), COLOURS, DASHES)],
        pairs=[
            ([*map(name_of, pair)], compare(pair), [*differing(pair)])
            for pair in itertools.combinations(lines, 2)
        ],
        settings=differing(lines),
        panels=draw_panels(lines, page.with_suffix(".png")),
        scale_of_run=scale_of_run,
        notices=filter(None, dict.fromkeys(notices)),
    )
    write_file(page, html)
    print(f"page: {page}")
    return 0


# ------------------------------------------------------------------------------------ what is asked


def run(args):
    """Draw what the flags name. Returns the exit code; raises BadInput."""
    if len(args.paths) > 1:
        return draw_beside(args.paths, Path(args.out or "runs/compare.html"))
    if args.out:
        raise BadInput("--out has no effect with one RUN; leave it out")
    (path,) = args.paths
    return 0 if draw(path, heldout_of_run(Path(path), read_settings(path))) else 2


def main(argv=None):
    """Draw what the command line names. Returns the exit code."""
    parser = Parser(
        prog="python -m tools.report",
        description="Draw the page and the picture of a run, from its own files; of several runs "
        "one page, on which they stand beside each other.",
    )
    parser.add_argument("paths", nargs="+", help="directory of a run", metavar="RUN")
    text = "page of several runs (default: runs/compare.html); its picture is beside it"
    parser.add_argument("--out", help=text, metavar="FILE")
    return parser.run(run, argv)


if __name__ == "__main__":
    raise SystemExit(main())
