"""support/picture.py - the learning curve of a run as a picture, learning_curve.png: the panels of
the report's section "Learning", drawn by matplotlib.
"""

from support.page import panels
from support.reference import SHOWN_WIDTH

import numpy as np

MOST_COLUMNS = 3  # panels beside each other


def learning_curve(out, rows, evaluations, bands=None):
    """Draw learning_curve.png of the run in `out`.

    rows: the lines of metrics.jsonl. evaluations: those on held-out users. bands: of
    `reference.read_bands`, each drawn behind the curve of its metric.

    The Figure is made without pyplot, which would keep it in memory; its margins are set by hand,
    because an automatic layout draws everything twice."""
    from matplotlib.figure import Figure

    learning = [panel for panel in panels(rows, evaluations) if panel["section"] == "Learning"]
    columns = min(MOST_COLUMNS, len(learning))
    lines = -(-len(learning) // MOST_COLUMNS)  # rounded up
    width, height = 4 * columns + 0.4, 3 * lines + 0.7  # inches
    figure = Figure(figsize=(width, height))
    for number, panel in enumerate(learning, 1):
        draw_panel(figure.add_subplot(lines, columns, number), panel, bands or {})
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
    set_axes(axis, panel)
    if len(panel["lines"]) > 1 or panel["points"]:
        handles, labels = axis.get_legend_handles_labels()
        by_label = dict(zip(labels, handles))  # several bands have one label
        axis.legend(by_label.values(), by_label.keys(), fontsize=7)


def draw_line(axis, steps, line, bands):
    """One curve, on the band of the reference runs, or in its standard deviation without one."""
    values = np.array(line["values"], dtype=float)
    colour = f"tab:{line['colour']}"
    if line["key"] in bands:
        mean, s = bands[line["key"]]  # each [steps]
        axis.fill_between(
            range(1, len(mean) + 1),
            mean - SHOWN_WIDTH * s,
            mean + SHOWN_WIDTH * s,
            color=colour,
            alpha=0.15,
            linewidth=0,
            label=f"ten reference runs, ± {SHOWN_WIDTH} s",
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


def set_axes(axis, panel):
    """Title, range and ticks of a panel whose curves are drawn."""
    # The range that matplotlib fitted to the data is widened, never narrowed: it holds 0, and the
    # top of the panel's usual range (100 for an emotion), if it has one.
    low, high = axis.get_ylim()
    usual_top = panel["span"][1] if panel["span"] else 0
    axis.set_ylim(min(low, 0), max(high, usual_top))
    axis.set_title(f"{panel['title']}, {panel['unit']}", fontsize=10)
    axis.grid(alpha=0.3, axis="y")
    axis.tick_params(labelsize=8)
    # steps are whole numbers; ticks with their labels take most of the time of drawing
    axis.locator_params("x", nbins=4, integer=True)
    axis.locator_params("y", nbins=5)
    if axis.dataLim.width == 0:  # one step alone stands in the middle
        step = axis.dataLim.x0
        axis.set(xticks=[step], xlim=step + np.array([-1, 1]))
