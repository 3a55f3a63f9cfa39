"""support/report.py - what is told of a run: on the terminal, and in its picture and its page,
learning_curve.png and report.html. Every score is shown with its scale (emotion.scale_in_words), and
every scripted user is named as one. The numbers of the page come from the run's files: nothing is
measured again, and no model is needed.

The words of models and users may be hostile: a policy that learns to write "</script>" must not run
code in the reader's browser. So jinja2 escapes every text, and the page forbids the browser to run
scripts and to fetch anything (its Content-Security-Policy).
"""

from support.command_line import fold, print_folded, scripted_notice
from support.errors import BadInput
from support.files import parse_json, read_json, write_file
from support.metrics import column, scores_by, warnings_of
from support.needs import need_of
from support.rundir import checkpoints, held_out_dialogues, metrics_of, scale_of_run
from support.settings import old_gpu

import io
import shlex
import sys
from functools import partial
from pathlib import Path

import numpy as np
from tqdm import tqdm

from emotion import BENCHMARK, scale_in_words

# --------------------------------------------------------------------------------- on the terminal


def print_head(cfg, out, training, held_out, ranks=1, step=0):
    """What a run prints before its first dialogue: what is trained on whom, and where the files go.
    training, held_out: numbers of users; step: the last step that is done, above 0 in a resumed
    run."""
    gpu = "" if cfg.toy else old_gpu()
    in_fp32 = f", in fp32 (no bf16 on {gpu})" if gpu else ""
    start = f"Step {step} is done, going on: " if step > 0 else ""
    on_ranks = f", on {ranks} ranks" if ranks > 1 else ""
    print_folded(
        f"{start}{cfg.algo.upper()} trains {cfg.model} ({cfg.mode}): {cfg.steps} steps of "
        f"{cfg.batch_size} dialogues, {cfg.group_size} with each user{on_ranks}. "
        f"Engine: {cfg.engine}{in_fp32}."
    )
    print_folded(
        f"User: {cfg.simulator} (difficulty {cfg.difficulty}, language {cfg.lang}); {training} users "
        f"to train on, {held_out} held out. {scripted_notice(cfg.simulator, cfg.reader)}"
    )
    print_folded(f"The files of the run are in {out}; config.json there has every setting.")


def progress(metrics, rollout_seconds):
    """A step's metrics in the few words that fit beside a progress bar."""
    return (
        f"emotion {metrics['emotion']:.0f}, success {metrics['success']:.0f} %, "
        f"{metrics['tokens_sampled'] / rollout_seconds:.0f} tokens/s, {metrics['dropped']} dropped"
    )


def dialogue_text(title, episode, hidden_need):
    """One dialogue, word for word, and then the need of its user, as a text."""
    lines = [
        f"\n--- a dialogue {title}: {episode.profile_id}, ended by {episode.ended}, final emotion "
        f"{episode.emotion}",
        f"    user  [{episode.start:3}] {'':5}  {episode.first_line}",
    ]
    for turn in episode.turns:
        if turn.thought:
            lines.append(f"    policy thinks  {turn.thought}")
        lines.append(f"    policy       {turn.reply}")
        if turn.emotion is not None:
            change = f"({turn.change:+d})"
            lines.append(f"    user  [{turn.emotion:3}] {change:5}  {turn.user or '(the end)'}")
    lines.append(fold(hidden_need))
    return "\n".join(lines) + "\n"


def print_summary(out):
    """The end of a run: scores before and after, time, warnings, what to do next."""
    config, summary = read_json(out / "config.json"), read_json(out / "summary.json")
    print(f"\nheld-out users, mean final emotion ({scale_of_run(config)}):")
    print_table({name: summary[name] for name in ("before", "after")})
    print_folded(
        "success: dialogues that end at 100; failure: below 10, also at 0 after a malformed reply "
        f"(after: {summary['after']['malformed']:.1f} %)."
    )
    if notice := scripted_notice(config["simulator"], config.get("reader")):
        print_folded(notice)
    for part, seconds in summary["seconds"].items():
        print(f"{part:10} {seconds:7.0f} s")
    print_folded(
        "simulator: the part of rollout in which the run only waited for the user; total: also "
        "imports, logs and checkpoints."
    )
    for warning in summary["warnings"]:
        print(f"warning: {warning}")
    scale = scale_in_words(BENCHMARK.start, BENCHMARK.max_turns)
    print(f"report: {out}/report.html")
    print(f"next: the benchmark ({scale}), before and after this run:")
    print(f"    python evaluate.py --policy {shlex.quote(str(out))} --before-after")
    print("what one update did to every word:")
    print(f"    python -m tools.lens {shlex.quote(str(out))}")


def print_table(table):
    """Print a table of scores, {name of a line: numbers of `score_summary`}. The line of all users
    also has the number of lost dialogues."""
    print(f"{'':<26}{'score':>8}{'stderr':>8}{'success':>9}{'failure':>9}{'n':>6}")
    for name, numbers in table.items():
        lost = numbers.get("lost")
        total = f" of {numbers['n'] + lost}" if lost else ""
        stderr = "-" if numbers["stderr"] is None else f"{numbers['stderr']:.1f}"
        print(
            f"{name:<26}{numbers['score']:>8.1f}{stderr:>8}{numbers['success']:>8.1f}%"
            f"{numbers['failure']:>8.1f}%{numbers['n']:>6}{total}"
        )


# ------------------------------------------------------------------------------------------- curves

# jinja2 and matplotlib are imported where they are used: a run that lacks one of them goes on
# without its report.

# (title with its unit, {column of metrics.jsonl: its name beside others}, how to read it)
PANELS = (
    ("Final emotion, 0 to 100", {"emotion": ""}, "Where a dialogue ends."),
    (
        "How dialogues end, %",
        {"success": "success (100)", "failure": "failure (below 10)", "malformed": "malformed (0)"},
        "Success should climb, failure should fall. Malformed is part of failure.",
    ),
    ("Zero-std groups, share", {"zero_std_groups": ""}, "All rewards equal: no signal in GRPO."),
    (
        "Length of a reply, tokens",
        {"reply_tokens": ""},
        "A rise may be padding, a fall empty replies.",
    ),
    ("Entropy, nats per token", {"entropy": ""}, "Near 0 the policy always says the same."),
    ("KL within the update, nats per token", {"kl": ""}, "Mostly above 0.003: lower --lr."),
    ("KL from the start, nats per token", {"kl_start": ""}, "A slow rise shows learning."),
    (
        "Signs of reward hacking, share of replies",
        {
            "repeat_within": "said before to this user",
            "repeat_across": "in another dialogue too",
            "reward_talk": "speaks of its reward",
        },
        "A rise is a reason to read dialogues.",
    ),
    ("Distinct-2, share of word pairs", {"distinct_2": ""}, "It falls as replies grow alike."),
    ("Explained variance, share", {"explained_variance": ""}, "How well the critic predicts."),
)
# Curves of one panel differ in colour and in dashes, for readers who cannot tell red from green,
# and for printing on paper.
LOOKS = (("#005ab5", "-"), ("#8c1515", "--"), ("#00805a", ":"))
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "report",  # the same files, the same page
    "font.size": 8,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,  # and small: a legend is as wide as its panel
    "legend.fontsize": 7,
    "legend.handlelength": 1.5,
    "legend.handletextpad": 0.4,
    "legend.columnspacing": 0.8,
}
LEGEND = (
    "Over the training steps. Thick: the mean of the last five; thin: single steps. Points: "
    "held-out users, ± standard error."
)


def means_of_five(values):
    """At each step the mean of the last five values, of fewer at the first steps."""
    return np.array([np.mean(values[max(0, i - 4) : i + 1]) for i in range(len(values))])


def draw_panel(axis, curves, rows, evaluations):
    """Draw the curves of a panel, and the evaluations in the panel of the emotion."""
    steps = column(rows, "step")
    for (key, label), (colour, dashes) in zip(curves.items(), LOOKS):
        values = column(rows, key)
        axis.plot(steps, values, color=colour, linewidth=0.5)
        axis.plot(steps, means_of_five(values), dashes, color=colour, label=label)
    if "emotion" in curves:
        steps, scores, errors = (column(evaluations, key) for key in ("step", "score", "stderr"))
        axis.errorbar(steps, scores, np.nan_to_num(errors), fmt="ko", markersize=4)
    axis.axhline(0, linewidth=0)  # so that every panel begins at 0
    if len(curves) > 1:  # below the panel, where it covers no curve
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=3)


def draw_curves(out, rows, evaluations):
    """Write learning_curve.png. Returns what the page shows of it: {"panels": those that are drawn,
    "svg": the picture}."""
    from matplotlib import rc_context

    panels = [
        panel
        for panel in PANELS
        if panel is PANELS[0] or any(np.nan_to_num(column(rows, key)).any() for key in panel[1])
    ]
    with rc_context(STYLE):
        picture = figure_of(panels, partial(draw_panel, rows=rows, evaluations=evaluations))
        picture.suptitle(f"{out.name}\n{LEGEND}")
        picture.savefig(out / "learning_curve.png")
        picture.set_layout_engine("none")  # the layout is computed: the SVG keeps it
        return {"panels": panels, "svg": svg_of(picture)}


def figure_of(panels, draw_one, columns=3, width=13):
    """A Figure of `panels`, (title, what is drawn, how to read it), each by draw_one(axis, what is
    drawn). It is made without pyplot, which would keep it in memory."""
    from matplotlib.figure import Figure

    lines = -(-len(panels) // columns)  # rounded up
    picture = Figure((width, 2.5 * lines + 0.5), layout="constrained")
    for place, (title, curves, _) in enumerate(panels, 1):
        draw_one(picture.add_subplot(lines, columns, place, title=title), curves)
    return picture


def svg_of(picture):
    """A matplotlib Figure as the SVG of a page, without the XML header."""
    file = io.StringIO()
    picture.savefig(file, format="svg", metadata={"Date": None})
    svg = file.getvalue()
    return svg[svg.index("<svg") :]


# -------------------------------------------------------------------------------------- its dialogues

TEMPLATE = Path(__file__).with_name("report.html.j2")
MAX_USERS = 24  # whose dialogues are shown: three of each need, if the needs take turns


def sentences_of(analysis):
    """The texts of a logged answer to f_emo, a JSON object, joined: without keys, code and numbers.
    What is no such object is returned as it is."""
    try:
        answer = dict(parse_json(analysis))
    except (TypeError, ValueError, RecursionError):
        return analysis
    texts = [text for key, text in answer.items() if isinstance(text, str) and key != "code"]
    return "\n".join(texts)


def dialogues_of_run(out, heldout, last_step):
    """What the page shows of the dialogues with held-out users. heldout: their profiles. A dialogue
    is a line of dialogues.jsonl, to which are added "final" (the score), "player" (the persona),
    "intention" and "kind" (the need, see need_of). Returns a dict:

    sides    {"before": the dialogues before training, "after": those of the last evaluation}; a run
             with one evaluation has no "after"
    users    a list of the same for each user that is shown, with one dialogue in place of a list
    tables   {"kind" or "intention": a list with the `scores_by` of each side}"""
    profiles = {profile.id: profile for profile in heldout}
    sides, users = {}, {}
    name_of = {last_step: "after", 0: "before"}  # one evaluation is "before"
    for row in held_out_dialogues(out):
        if row["step"] in name_of:
            profile = profiles[row["profile_id"]]
            intention, kind = need_of(profile.task, profile.need)
            row |= {"intention": intention, "kind": kind, "player": profile.player}
            row["final"] = 100 * row["reward"]
            side = name_of[row["step"]]
            sides.setdefault(side, []).append(row)
            users.setdefault(profile.id, {})[side] = row
    tables = {
        part: [scores_by(part, dialogues) for dialogues in sides.values()]
        for part in ("kind", "intention")
    }
    return {"sides": sides, "users": list(users.values())[:MAX_USERS], "tables": tables}


# ----------------------------------------------------------------------------------------- the page


def state_and_metrics(out):
    """Of the run in `out`: the newest state (of its newest checkpoint, and of summary.json if it is
    over), and the lines of metrics.jsonl. Raises BadInput."""
    state = {}
    for checkpoint in checkpoints(out)[-1:]:
        state = read_json(checkpoint / "state.json")
    state |= read_json(out / "summary.json")
    if not state:
        raise BadInput(f"{out}: this run has not come to its first checkpoint")
    rows = metrics_of(out)
    if not rows and state["evaluations"][-1]["step"]:
        raise BadInput(f"{out / 'metrics.jsonl'}: no step is in it")
    return state, rows


def write_page(out, heldout):
    """Write the picture and the page of the run in `out`. heldout: the profiles of its held-out
    users. Returns the page's path. Raises BadInput."""
    from jinja2 import Template

    config = read_json(out / "config.json")
    state, rows = state_and_metrics(out)
    evaluations = state["evaluations"]
    html = Template(TEMPLATE.read_text("utf-8"), autoescape=True, trim_blocks=True).render(
        title=out.name,
        settings=config,
        scale=scale_of_run(config),
        notice=scripted_notice(config["simulator"], config.get("reader")),
        steps=len(rows),
        warnings=warnings_of(rows).values(),
        evaluations=evaluations,
        sentences_of=sentences_of,
        **draw_curves(out, rows, evaluations),
        **dialogues_of_run(out, heldout, evaluations[-1]["step"]),
    )
    page = out / "report.html"
    write_file(page, html)
    return page


def draw(path, heldout):
    """Write the report of the run in `path`, finished or not. heldout: the profiles of its held-out
    users. Returns the path of the page, or None: a report that fails prints a line on the terminal,
    and never ends a run."""
    try:
        return write_page(Path(path), heldout)
    except Exception as error:
        reason = error if isinstance(error, BadInput) else repr(error)
        tqdm.write(f"the report could not be written: {reason}", file=sys.stderr)
