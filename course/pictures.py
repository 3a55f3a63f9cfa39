"""pictures.py - the picture of a lab: one panel for each number that it looks at, and in it one
colour for each arm."""

import numpy as np

SMOOTH = 3  # steps: the thick lines are moving averages
COLOURS = {
    "healthy": "tab:blue",
    "healthy-300": "tab:cyan",
    "broken": "tab:red",
    "broken-300": "tab:red",
    "broken-kl": "tab:green",
    "broken-batch": "tab:orange",
    "broken-fixed": "tab:purple",
    "no-kl": "dimgray",
}


def draw(lab, curves, path):
    """Draw the picture of a lab into the PNG file `path`. curves: {what a panel shows: {arm: [a
    series for each seed]}}."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        1,
        len(curves),
        figsize=(max(9, 3.6 * len(curves)), 3.9),
        constrained_layout=True,
        squeeze=False,
    )
    for axis, panel in zip(axes[0], lab["panels"]):
        draw_panel(axis, panel, curves[panel["show"]], lab["arms"])
    figure.suptitle(f"{lab['name']}: {lab['title']}", fontsize=12, fontweight="bold")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(lab["arms"]),
        fontsize=9,
        frameon=False,
        title=f"thin: each seed; thick: their mean, over {SMOOTH} steps",
        title_fontsize=8,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90, pil_kwargs={"optimize": True})
    plt.close(figure)


def draw_panel(axis, panel, arms, flags):
    """Draw one panel. panel: its entry in labs.toml; arms: {arm: [a series for each seed]}; flags:
    {arm: its flags}, for the legend."""
    for arm, lines in arms.items():
        colour = COLOURS[arm]
        for line in lines:
            axis.plot(range(1, len(line) + 1), line, color=colour, lw=0.8, alpha=0.45)
        # the mean over seeds, smoothed; each average is drawn at the middle of its steps
        size = min(SMOOTH, len(lines[0]))
        mean = np.convolve(np.mean(lines, axis=0), np.ones(size) / size, "valid")
        middles = np.arange(len(mean)) + (size + 1) / 2
        label = f"{arm}  {flags[arm]}".strip()
        axis.plot(middles, mean, color=colour, lw=2.4, label=label)
    axis.set(xlabel="training step", ylabel=panel["unit"])
    if panel.get("scale") == "log":
        axis.set_yscale("log", nonpositive="mask")
    axis.set_ylim(*panel.get("range", (None, None)))
    axis.locator_params(axis="x", integer=True)
    axis.set_title(panel["title"], fontsize=9.5)
    axis.grid(alpha=0.3)
