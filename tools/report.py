"""The page and the picture of a run, or the page of a result file. All numbers are those that the
files hold: nothing is measured again, and no model is needed.

    python -m tools.report runs/NAME             report.html and learning_curve.png, in runs/NAME
    python -m tools.report results/NAME.jsonl    results/NAME.html

What models and users say is hostile until shown to be harmless: a policy that learns to write
"</script>" must not run code in the reader's browser. So jinja2 escapes every text, and the page
forbids the browser to run scripts and to fetch anything (its Content-Security-Policy).
"""

from support.errors import BadInput
from support.files import read_json, read_jsonl, refuse_overwriting, write_file
from support.metrics import INITIAL_EMOTION, scores_by, signs_in_words, warnings_of
from support.results import (
    PERSONA_GROUPS,
    PURPOSES,
    intention_of,
    metrics_of,
    parts_of,
    recorded_dialogues,
    scale_of_settings,
)
from support.rundir import newest_state, profile_files, scale_of_run
from support.settings import Parser, Settings, changed_from_defaults, made_by_rule

import io
import re
import sys
from pathlib import Path

import numpy as np
from tqdm import tqdm

from simulator import users_of_run

# jinja2 and matplotlib are imported where they are used: a run that lacks one of them goes on
# without its report.

TEMPLATE = Path(__file__).with_name("report.html.j2")
MOST_USERS = 24  # whose dialogues are shown

# ------------------------------------------------------------------------------------------- curves

ENDS = {"success": "success (100)", "failure": "failure (below 10)", "malformed": "malformed (0)"}
SIGNS = {
    "repeat_within": "said before to this user",
    "repeat_across": "in another dialogue too",
    "reward_talk": "speaks of its reward",
}
# (title, unit, {column of metrics.jsonl: its name beside others}, how to read it)
PANELS = (
    ("Final emotion", "0 to 100", {"emotion": ""}, "Where a dialogue ends."),
    ("How dialogues end", "%", ENDS, "Success should climb, failure should fall."),
    ("Zero-variance groups", "share", {"flat_groups": ""}, "All rewards equal: no signal in GRPO."),
    (
        "Length of a reply",
        "tokens",
        {"reply_tokens": ""},
        "A climb may be padding, a fall silence.",
    ),
    ("Length of a dialogue", "replies", {"turns": ""}, "Users leave in despair, and in peace."),
    ("Entropy", "nats per token", {"entropy": ""}, "Near 0 the policy always says the same."),
    ("KL within the update", "nats per token", {"kl": ""}, "Mostly above 0.003: lower --lr."),
    ("KL from the start", "nats per token", {"kl_start": ""}, "A slow climb is learning."),
    (
        "Signs of reward hacking",
        "share of replies",
        SIGNS,
        "A climb is a reason to read dialogues.",
    ),
    ("Distinct-2", "share of word pairs", {"distinct_2": ""}, "It falls as replies grow alike."),
    ("Explained variance", "share", {"explained_variance": ""}, "Of the returns, by the critic."),
    ("Gradient", "norm before clipping", {"grad_norm": ""}, "A spike is a sign of instability."),
)
# Curves of one panel differ in colour and in dashes, for readers who do not tell red from green,
# and on paper. In the page each colour becomes a CSS variable, with another value in the dark.
COLOURS = {"blue": "#005ab5", "red": "#8c1515", "green": "#00805a", "quiet": "#57626f"}
BLUE, *_, GREY = COLOURS.values()
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",  # the same files, the same page
    "font.size": 8,
    **dict.fromkeys(("xtick.color", "ytick.color", "text.color", "axes.edgecolor"), GREY),
    **dict.fromkeys(("axes.spines.right", "axes.spines.top", "legend.frameon"), False),
}
LEGEND = (
    "Over the training steps. Thick: the mean of the last five; thin: single steps. Points: "
    "held-out users, ± standard error. Shade: ± one standard deviation of the dialogues."
)


def column(rows, key):
    """A column of metrics.jsonl as an array, NaN where a step has no such number."""
    return np.array([row.get(key) for row in rows], dtype=float)


def draw_panel(axis, curves, rows, evaluations):
    """Draw the curves of a panel; with the emotion its spread and the evaluations."""
    steps = column(rows, "step")
    if "emotion" in curves:
        emotion, spread = column(rows, "emotion"), column(rows, "emotion_std")
        low, high = np.clip([emotion - spread, emotion + spread], 0, 100)
        axis.fill_between(steps, low, high, color=BLUE, alpha=0.12, linewidth=0)
        at, scores, errors = (column(evaluations, key) for key in ("step", "score", "stderr"))
        axis.errorbar(at, scores, np.nan_to_num(errors), fmt="o", color=GREY, markersize=4)
    for (key, label), colour, dashes in zip(curves.items(), COLOURS.values(), ("-", "--", ":")):
        values = column(rows, key)
        means = [np.mean(values[max(0, i - 4) : i + 1]) for i in range(len(values))]
        axis.plot(steps, values, ".-", color=colour, linewidth=0.8, markersize=2, alpha=0.45)
        axis.plot(steps, means, dashes, color=colour, label=label)
    low, high = min(0, axis.dataLim.y0), max(0, axis.dataLim.y1)
    axis.set_ylim(low - 0.03 * (high - low), high + 0.08 * (high - low))
    axis.grid(axis="y", alpha=0.3)
    axis.tick_params(length=0)
    if len(curves) > 1:
        axis.legend(fontsize=7)


def draw_curves(out, rows, evaluations):
    """Write learning_curve.png. Returns [(panel, its SVG)] for the page. Figures are made without
    pyplot, which would keep them in memory."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = [
        panel
        for panel in PANELS
        if panel is PANELS[0] or any(np.nan_to_num(column(rows, key)).any() for key in panel[2])
    ]
    lines = -(-len(panels) // 3)  # rounded up
    height = 2.4 * lines + 0.9  # inches
    drawn = []
    with rc_context(STYLE):
        picture = Figure((13, height))
        picture.subplots_adjust(0.04, 0.3 / height, 0.98, 1 - 1 / height, 0.15, 0.4)
        picture.suptitle(f"{out.name}\n{LEGEND}", fontsize=9)
        for place, panel in enumerate(panels, 1):
            title, unit, curves, _ = panel
            axis = picture.add_subplot(lines, 3, place)
            axis.set_title(f"{title}, {unit}", loc="left")
            draw_panel(axis, curves, rows, evaluations)
            small = Figure((4, 2))
            small.subplots_adjust(0.12, 0.1, 0.99, 0.92)
            draw_panel(small.add_subplot(), curves, rows, evaluations)
            drawn.append((panel, svg_of(small)))
        picture.savefig(out / "learning_curve.png")
    return drawn


def svg_of(figure):
    """A figure as SVG that can stand in a page: without the head of a file, and with variables for
    colours."""
    file = io.StringIO()
    nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    svg = file.getvalue()
    svg = re.sub(r' (xmlns(:\w+)?|width|height)="[^"]*"', "", svg[svg.index("<svg") :], count=4)
    for name, colour in COLOURS.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


# ------------------------------------------------------------------------------------ what is shown


def page_of_run(out):
    """What the page shows of the run in `out`, whose picture is written, too. Raises BadInput."""
    config = read_json(out / "config.json")
    if "algo" not in config:
        raise BadInput(f"{out}: there is no run here (config.json is missing or unreadable)")
    evaluations = newest_state(out)["evaluations"]
    rows = metrics_of(out)
    return {
        "title": out.name,
        "settings": config,
        "changed": changed_from_defaults(Settings(**config)) or "none",
        "scale": scale_of_run(config),
        "steps": len(rows),
        "warnings": list(warnings_of(rows).values()),
        "curves": draw_curves(out, rows, evaluations),
        "evaluations": evaluations,
        "sides": dialogues_of_run(out, config, evaluations[-1]["step"]),
        "never_trained_on": True,
    }


def dialogues_of_run(out, config, last_step):
    """{"before": dialogues with held-out users before training, "after": those of the last
    evaluation}, each with what a result file tells of its user."""
    files = profile_files(out, config["profiles"])
    _, people = users_of_run(files, config["eval_size"], config["simulator"])
    profiles = {profile.id: profile for profile in people}
    sides = {step: [] for step in (0, last_step)}
    # most lines are dialogues of training: `containing` skips them unread
    for _, row, _ in read_jsonl(out / "dialogues.jsonl", containing=b'"heldout"'):
        profile = row and profiles.get(row["profile_id"])
        if not profile or row["split"] != "heldout" or row["step"] not in sides:
            continue
        intention, kind = intention_of(profile.task, profile.need)
        user = {"intention": intention, "kind": kind, "player": profile.player}
        user["group"] = PERSONA_GROUPS.get(profile.main_cha, profile.main_cha)
        user["purpose"] = PURPOSES[profile.target]
        sides[row["step"]].append({**row, **user, "start": INITIAL_EMOTION["training"]})
    return dict(zip(("before", "after"), sides.values()))


def page_of_results(path):
    """What the page shows of a result file. Raises BadInput."""
    from support.results import score  # a run's page needs none

    result = score(path)
    dialogues = [{**d, "player": d["raw"].get("player")} for d in recorded_dialogues(path)]
    settings = dialogues[0]["made_by"]  # the same in all lines of a file
    return {
        "title": result["by_whom"],
        "settings": settings,
        "scale": scale_of_settings(settings),
        "signs": signs_in_words(result["signs"]),
        "evaluations": [result],
        "sides": {"score": dialogues},
        "never_trained_on": all(dialogue["made_by"].get("held_out") for dialogue in dialogues),
    }


def some_users(sides):
    """At most MOST_USERS users, evenly over their last scores: [{side: dialogue}]."""
    by_id = {}
    for side, dialogues in sides.items():
        for dialogue in dialogues:
            by_id.setdefault(dialogue["profile_id"], {})[side] = dialogue
    users = sorted(by_id.values(), key=lambda user: list(user.values())[-1]["reward"])
    places = np.linspace(0, len(users) - 1, min(MOST_USERS, len(users)))
    return [users[int(place)] for place in places]


# ----------------------------------------------------------------------------------------- the page


def write_page(path):
    """Write the page of a run's directory or of a result file. Returns its path."""
    from jinja2 import Environment

    if path.is_dir():
        page, place = page_of_run(path), path / "report.html"
    else:
        page, place = page_of_results(path), path.with_suffix(".html")
        refuse_overwriting({"the page": place}, [path])
    page["by_rule"] = made_by_rule(page["settings"].get("simulator"))
    sides = page["sides"].values()
    page["users"] = some_users(page["sides"])
    page["tables"] = {
        part: [scores_by(part, side, [100 * row["reward"] for row in side]) for side in sides]
        for part in parts_of(sum(sides, []))
    }
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    html = environment.from_string(TEMPLATE.read_text("utf-8")).render(page, legend=LEGEND)
    write_file(place, html.encode("utf-8", "replace"))  # half a surrogate pair becomes a "?"
    return place


def draw(path):
    """Write the report of a run, as far as it is, or of a result file. Returns the path of the
    page, or None: what cannot be drawn is a line on the terminal, and never the end of a run."""
    try:
        return write_page(Path(path))
    except Exception as error:
        reason = error if isinstance(error, BadInput) else repr(error)
        tqdm.write(f"the report could not be written: {reason}", file=sys.stderr)


def main(argv=None):
    """Draw what the command line names. Returns the exit code."""
    parser = Parser(
        prog="python -m tools.report",
        description="Draw the page and the picture of a run, or the page of a result file.",
    )
    parser.add_argument("path", help="directory of a run, or a result file", metavar="PATH")
    place = draw(parser.parse_args(argv).path)
    if not place:
        return 2
    print(f"written: {place}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
