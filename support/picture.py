"""support/picture.py - the learning curve of a run as a picture, learning_curve.png: the panels of
the report's section "Learning", drawn by matplotlib.
"""

from support.page import MEAN_LABEL, panels

import itertools

import numpy as np

MOST_COLUMNS = 3  # panels beside each other
# In inches: the height of a panel, and the room below it for its steps and a legend of five lines.
PANEL_HEIGHT, LEGEND_ROOM = 2.2, 1.3
# The colours and the dashes of the page (report_template.html). Curves of one panel differ in both,
# for readers who see no difference between red and green, and on paper.
COLOURS = {
    "blue": "#005ab5",
    "green": "#00805a",
    "red": "#8c1515",
    "grey": "#6a7480",
    "purple": "#a8479b",
    "orange": "#d07a00",
}
DASHES = ("-", "--", ":")


def learning_curve(out, rows, evaluations, scale=None):
    """Draw learning_curve.png of the run in `out`.

    rows: the lines of metrics.jsonl. evaluations: those on held-out users. scale: of the scores, as
    users.scale_in_words has it, if it is known.

    The Figure is made without pyplot, which would keep it in memory; its margins are set by hand,
    because an automatic layout draws everything twice."""
    from matplotlib.figure import Figure

    views = panels(rows, evaluations, scale)
    views = [view for view in views if view["section"] == "Learning"]
    columns = min(MOST_COLUMNS, len(views))
    lines = -(-len(views) // MOST_COLUMNS)  # rounded up
    figure = Figure()
    for number, view in enumerate(views, 1):
        draw_panel(figure.add_subplot(lines, columns, number), view)
    for axis in figure.axes:  # all panels show the same steps
        axis.sharex(figure.axes[0])
    set_steps(figure.axes)
    figure.suptitle(out.name, fontsize=11)
    set_margins(figure, columns, lines)
    figure.savefig(out / "learning_curve.png", dpi=90, pil_kwargs={"compress_level": 1})


def set_margins(figure, columns, lines):
    """The size of a figure of `lines` by `columns` panels, and where the panels stand in it."""
    top, gap, bottom = 0.7, LEGEND_ROOM + 0.3, 0.5  # inches
    if any(axis.get_legend() for axis in figure.axes[-columns:]):
        bottom = LEGEND_ROOM
    width = 4 * columns + 0.4
    height = top + lines * PANEL_HEIGHT + (lines - 1) * gap + bottom
    figure.set_size_inches(width, height)
    figure.subplots_adjust(
        left=0.6 / width,
        right=1 - 0.2 / width,
        bottom=bottom / height,
        top=1 - top / height,
        wspace=0.2,
        hspace=gap / PANEL_HEIGHT,
    )


def draw_panel(axis, view):
    """One panel: its curves, its evaluations, its axes and, below them, its legend."""
    for line, dashes in zip(view["lines"], itertools.cycle(DASHES)):
        draw_line(axis, view["steps"], line, dashes)
    if view["points"]:
        draw_evaluations(axis, view["points"])
    set_axes(axis, view)
    handles, labels = axis.get_legend_handles_labels()
    by_label = dict(zip(labels, handles))  # the thin lines have one label
    axis.legend(
        by_label.values(),
        by_label.keys(),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.16),
        frameon=False,
        handlelength=3,
        fontsize=7.5,
    )


def draw_line(axis, steps, line, dashes):
    """One curve on its shade: the moving average and behind it, thin, the values of the single
    steps."""
    colour = COLOURS[line["colour"]]
    if "shade" in line:
        draw_shade(axis, line["shade"], colour)
    values = np.array(line["values"], dtype=float)
    if "mean" not in line:
        marker = "." if len(values) == 1 else None  # one step makes no line
        axis.plot(steps, values, color=colour, linestyle=dashes, label=line["label"], marker=marker)
        return
    axis.plot(steps, values, color=colour, linewidth=0.8, alpha=0.45, label="thin: single steps")
    means = np.array(line["mean"], dtype=float)
    label = f"{line['label']}, {MEAN_LABEL}"
    axis.plot(steps, means, color=colour, linestyle=dashes, linewidth=2, label=label)


def draw_shade(axis, shade, colour):
    """The area behind a curve."""
    axis.fill_between(
        shade["steps"],
        shade["low"],
        shade["high"],
        color=colour,
        alpha=0.15,
        linewidth=0,
        label=shade["label"],
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


def set_axes(axis, view):
    """Title, range and labels of a panel whose curves are drawn."""
    # The axis holds what is drawn, 0, and the top of the panel's usual range (100 for an emotion),
    # if it has one; and some room above and below, so that no curve lies on the frame.
    usual_top = view["span"][1] if view["span"] else 0
    low, high = min(axis.dataLim.y0, 0), max(axis.dataLim.y1, usual_top)
    room = 0.05 * (high - low or 1)
    axis.set_ylim(low - room, high + room)
    axis.set_title(f"{view['title']}, {view['unit']}", fontsize=10)
    axis.set_xlabel("training step", fontsize=8, labelpad=2)
    axis.grid(alpha=0.3, axis="y")
    axis.tick_params(labelsize=8)
    # a small number is written out, because its exponent would stand over the title
    axis.yaxis.set_major_formatter("{x:.4g}")
    axis.locator_params("y", nbins=5)


def set_steps(axes):
    """The range and the ticks of the steps, which all panels share."""
    # steps are whole numbers; ticks with their labels take most of the time of drawing
    for axis in axes:
        axis.locator_params("x", nbins=4, integer=True)
    first = min(axis.dataLim.x0 for axis in axes)
    last = max(axis.dataLim.x1 for axis in axes)
    if first == last:  # one step alone stands in the middle
        axes[0].set(xticks=[first], xlim=(first - 1, first + 1))
