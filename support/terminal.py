"""support/terminal.py - what a run prints: its head, dialogues, and the table at its end.

The head says what differs from the defaults, config.json has the rest. Wherever a score is printed
its scale stands beside it (support.metrics.scale_in_words), and what is made by rule says so.
"""

from support.files import read_json
from support.metrics import BENCHMARK_TURNS, INITIAL_EMOTION, scale_in_words, stderr_text
from support.settings import SCRIPTED, changed_from_defaults, made_by_rule

import shlex
import textwrap

# ----------------------------------------------------------------------------------- in any program

WIDTH = 80  # columns of a usual terminal


def fold(text, width=WIDTH):
    """A paragraph in lines of `width` columns. Paths and flags stay whole, so that they can be
    copied."""
    return textwrap.fill(text, width, break_on_hyphens=False, break_long_words=False)


# ------------------------------------------------------------------------------- the start of a run

ALGORITHMS = {"ppo": "PPO", "grpo": "GRPO"}
LANGUAGES = {"en": "English", "zh": "Chinese"}
# How a simulated user's model is held to the form of its answers, in words.
FORMS = {
    "json_schema": "enforced by its server (response_format json_schema)",
    "json_object": "asked for in the prompt; its server enforces JSON (response_format json_object)",
    "text": "asked for in the prompt alone; its server takes no response_format",
    None: "asked for in the prompt alone",
}
SCALE_OF_BENCHMARK = scale_in_words(INITIAL_EMOTION["benchmark"], BENCHMARK_TURNS)


def print_head(cfg, out, training, held_out, ranks=1, step=0, tokens=None, form=None):
    """What a run prints before its first dialogue: what is trained on whom, what differs from the
    defaults, where all goes, and what the user's server is asked. training, held_out: numbers of
    users; step: the last step that is done, above 0 in a resumed run; tokens, form: what
    `Simulator.check` found out."""
    begin = f"Step {step} is done, going on: " if step > 0 else ""
    policy = "the toy's policy" if cfg.toy else cfg.model
    how = "thinking before each reply" if cfg.think else "replying directly"
    dialogues = f"{cfg.batch_size} dialogues"
    if cfg.group_size > 1:
        dialogues += f", {cfg.group_size} with each user"
    on_ranks = f", on {ranks} ranks" if ranks > 1 else ""
    print(
        fold(
            f"{begin}{ALGORITHMS[cfg.algo]} trains {policy}, {how}: {cfg.steps} steps of "
            f"{dialogues}{on_ranks}."
        )
    )
    changed = changed_from_defaults(cfg)
    if changed:
        print(fold(f"Settings that differ from the defaults: {changed}"))
    users = (
        f"User: {cfg.simulator} ({cfg.difficulty}, {LANGUAGES[cfg.lang]}); {training} users to "
        f"train on, {held_out} held out. {made_by_rule(cfg.simulator)}"
    )
    print(fold(users))
    scales = f"{scale_of_run(vars(cfg))} (the benchmark of evaluate.py: {SCALE_OF_BENCHMARK})"
    print(fold(f"Scores are mean final emotions, {scales}."))
    if cfg.simulator not in SCRIPTED:
        print(fold(calls_text(cfg, step, tokens)))
        print(fold(f"The form of its answers is {FORMS[form]}."))
    print(fold(f"All goes to {out}; config.json there has every setting."), flush=True)


def scale_of_run(settings):
    """The scale of a run's scores. settings: as in its config.json."""
    return scale_in_words(INITIAL_EMOTION["training"], settings["max_turns"])


def calls_text(cfg, step, tokens):
    """How many calls the user's server gets at most in the steps after `step`, and how many tokens.
    tokens: of the question that was asked before the run, {"prompt", "completion"}, or None.

    At most: as if no user said goodbye. A dialogue of T turns is T calls of f_emo and T - 1 of
    f_reply, because the last reply gets no answer; a group is one call more, for its first line. An
    evaluation is one dialogue with each held-out user."""
    steps = range(max(step, 0) + 1, cfg.steps + 1)
    of_step = cfg.batch_size // cfg.group_size + cfg.batch_size * (2 * cfg.max_turns - 1)
    # before (unless that is done), after, and every --eval-every steps between
    evaluations = (step < 0) + (cfg.steps > 0)
    if cfg.eval_every:
        evaluations += sum(n % cfg.eval_every == 0 for n in steps[:-1])
    calls = len(steps) * of_step + evaluations * cfg.eval_size * 2 * cfg.max_turns
    text = f"Calls to the user's model, at most: {of_step:,} a step, {calls:,} in all"
    if tokens and None not in tokens.values():
        sent, received = (calls * tokens[kind] / 1e6 for kind in ("prompt", "completion"))
        text += (
            f"; about {sent:,.1f} million tokens to it and {received:,.1f} from it, if all calls "
            "were as long as the first (later ones are longer)"
        )
    return text + "."


# --------------------------------------------------------------------------------- while it goes on


def progress(metrics, rollout_seconds):
    """A step's metrics in the few words that fit behind a progress bar."""
    tokens_per_second = metrics["tokens_sampled"] / rollout_seconds
    text = (
        f"emotion {metrics['emotion']:.0f}, success {metrics['success']:.0f} %, "
        f"{tokens_per_second:.0f} tokens/s"
    )
    if metrics["dropped"]:
        text += f", {metrics['dropped']} dropped"
    return text


def score_text(step, score, settings):
    """The score of an evaluation during training. settings: as in config.json."""
    return f"step {step}: held-out score {score:.1f} ({scale_of_run(settings)})"


def dialogue_text(title, episode, hidden_need):
    """One dialogue, word for word, and then what its user needed, in words."""
    counts = ", which counts 0" if episode.ended == "malformed" else ""
    lines = [
        f"\n--- a dialogue {title}: {episode.profile_id}, ended by {episode.ended}, final emotion "
        f"{episode.emotion}{counts}",
        f"    user  [{INITIAL_EMOTION['training']:3}]  {episode.first_line}",
    ]
    for turn in episode.turns:
        if turn["thought"]:
            lines.append(f"    (thinks      {turn['thought']})")
        lines.append(f"    policy       {turn['reply']}")
        if turn["emotion"] is not None:
            emotion, change = f"[{turn['emotion']:3}]", f"({turn['change']:+d})"
            if turn["user"] is None:  # the dialogue is over: there is no answer
                lines.append(f"    (end) {emotion}  {change}")
            else:
                lines.append(f"    user  {emotion}  {turn['user']}  {change}")
    lines.append(fold(hidden_need))
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------------ its end


def print_finished(out):
    """What is printed for a run that is resumed after its end."""
    summary = read_json(out / "summary.json")
    scale = scale_of_run(read_json(out / "config.json"))
    print(
        f"{out} is finished: {summary['steps']} steps, held-out score ({scale}) "
        f"{summary['before']['score']:.1f} before, {summary['after']['score']:.1f} after; to "
        f"go on: python rlver.py --resume {out} --steps N, N the total"
    )


def print_summary(summary, out):
    """The end of a run: scores before and after, time and memory, warnings, what to do next."""
    config = read_json(out / "config.json")
    print_scores(summary, scale_of_run(config), made_by_rule(config["simulator"]))
    before, after = (summary[name].get("ref_perplexity") for name in ("before", "after"))
    if before is not None and after is not None:
        print(f"perplexity under the starting model: {before:.1f} before, {after:.1f} after")
    peak = summary["peak_rss_mb"]
    print(fold(f"{seconds_in_words(summary['seconds'])}; peak memory {peak:.0f} MiB"))
    for warning in summary["warnings"]:
        print(f"warning: {warning}")
    print_next(out)


def seconds_in_words(seconds):
    """Where the time went; the parts add up to the whole. seconds: of summary.json. Its "simulator"
    is a part of the rollout: that in which only the user was at work. Nobody took the time of what
    is left over: loading the models, writing checkpoints and logs, drawing pictures."""
    parts = {key: value for key, value in seconds.items() if key not in ("total", "simulator")}
    parts["loading and saving"] = seconds["total"] - sum(parts.values())
    texts = {key: f"{key.replace('_', ' ')} {value:.0f}" for key, value in parts.items()}
    if seconds.get("simulator"):
        texts["rollout"] += f" (waiting for the user {seconds['simulator']:.0f})"
    return f"{seconds['total']:.0f} s in all: {', '.join(texts.values())}"


def print_scores(summary, scale, by_rule):
    """The table of a run: its scores before and after. scale: of `scale_of_run`; by_rule: of
    `made_by_rule`."""
    print(f"\nheld-out users, mean final emotion ({scale}):")
    print(
        f"{'':<12}{'score':>8}{'stderr':>8}{'success':>10}{'failure':>10}{'malformed':>11}{'n':>6}"
    )
    before, after = summary["before"], summary["after"]
    for name, scores in (("before", before), ("after", after)):
        print(
            f"{name:<12}{scores['score']:>8.1f}{stderr_text(scores):>8}{scores['success']:>9.1f}%"
            f"{scores['failure']:>9.1f}%{scores['malformed']:>10.1f}%{scores['n']:>6}"
        )
    difference = {key: after[key] - before[key] for key in ("score", *SHARES)}
    print(
        f"{'difference':<12}{difference['score']:>+8.1f}{'':>8}{difference['success']:>+9.1f}%"
        f"{difference['failure']:>+9.1f}%{difference['malformed']:>+10.1f}%"
    )
    print(fold(f"{MEANING_OF_SHARES} {by_rule}"))


SHARES = ("success", "failure", "malformed")
MEANING_OF_SHARES = (
    "success: dialogues that end at 100; failure: below 10; malformed: with a reply that breaks "
    "the form and earns 0."
)


def print_next(out):
    """What to look at and what to type next: is the policy better on the benchmark, too?"""
    run, report = [shlex.quote(str(path)) for path in (out, out / "report.html")]
    print(f"\nopen {report}")
    print(f"next: the benchmark ({SCALE_OF_BENCHMARK}), before and after this run:")
    print(f"    python evaluate.py --policy {run} --before-after")
