"""support/printing.py - what a run prints, and tables of scores. Every score is shown with its
scale (emotion.scale_in_words), and every scripted user is named as one.
"""

from support.command_line import fold, print_folded
from support.files import read_json
from support.model_names import scripted_notice
from support.rundir import scale_of_run

import shlex

from emotion import BENCHMARK_TURNS, INITIAL_EMOTION, scale_in_words


def print_head(cfg, out, training, held_out, ranks=1, step=0):
    """What a run prints before its first dialogue: what is trained on whom, and where the files go.
    training, held_out: numbers of users; step: the last step that is done, above 0 in a resumed
    run."""
    begin = f"Step {step} is done, going on: " if step > 0 else ""
    on_ranks = f", on {ranks} ranks" if ranks > 1 else ""
    print_folded(
        f"{begin}{cfg.algo.upper()} trains {cfg.model} ({cfg.mode}): {cfg.steps} steps of "
        f"{cfg.batch_size} dialogues, {cfg.group_size} with each user{on_ranks}."
    )
    print_folded(
        f"User: {cfg.simulator} ({cfg.difficulty}, {cfg.lang}); {training} users to train on, "
        f"{held_out} held out. {scripted_notice(cfg.simulator, cfg.reader)}"
    )
    print_folded(f"The files of the run are in {out}; config.json there has every setting.")


def progress(metrics, rollout_seconds):
    """A step's metrics in the few words that fit beside a progress bar."""
    tokens_per_second = metrics["tokens_sampled"] / rollout_seconds
    return (
        f"emotion {metrics['emotion']:.0f}, success {metrics['success']:.0f} %, "
        f"{tokens_per_second:.0f} tokens/s, {metrics['dropped']} dropped"
    )


def dialogue_text(title, episode, hidden_need):
    """One dialogue, word for word, and then the need of its user."""
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
        f"({summary['after']['malformed']:.1f} %)."
    )
    notice = scripted_notice(config["simulator"], config.get("reader"))
    if notice:
        print_folded(notice)
    for part, seconds in summary["seconds"].items():
        print(f"{part:10} {seconds:7.0f} s")
    for warning in summary["warnings"]:
        print(f"warning: {warning}")
    scale = scale_in_words(INITIAL_EMOTION["benchmark"], BENCHMARK_TURNS)
    print(f"open {shlex.quote(f'{out}/report.html')}")
    print(f"next: the benchmark ({scale}), before and after this run:")
    print(f"    python evaluate.py --policy {shlex.quote(str(out))} --before-after")


def print_table(table):
    """Print a table of scores, {name of a line: numbers of `score_summary`}. The line of all users
    also has the number of lost dialogues."""
    print(f"{'':<26}{'score':>8}{'stderr':>8}{'success':>9}{'failure':>9}{'n':>6}")
    for name, numbers in table.items():
        lost = numbers.get("lost")
        asked = f" of {numbers['n'] + lost}" if lost else ""
        shown = "-" if numbers["stderr"] is None else f"{numbers['stderr']:.1f}"
        print(
            f"{name:<26}{numbers['score']:>8.1f}{shown:>8}{numbers['success']:>8.1f}%"
            f"{numbers['failure']:>8.1f}%{numbers['n']:>6}{asked}"
        )
