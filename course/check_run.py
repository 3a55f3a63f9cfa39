"""check_run.py - say in plain words whether a run that was handed in is right.

    python course/course.py check-run runs/anna runs/ben
    python course/course.py check-run DIR... --settings="--algo ppo --think" --csv runs.csv

Five questions about each run, in this order:

    settings    is it the run that was asked for?
    whole       are all steps, dialogues and evaluations there? (handed_in.py)
    consistent  do its numbers follow from its dialogues? (recompute.py)
    band        do its curves lie among those of the reference runs? (support/reference.py)
    mistakes    does it have the signature of a known mistake? (signatures.py)

The answers are a paragraph that a teacher can paste into feedback, then a verdict in one line.
"""

from patches import opened_for_writing, plural, write_row  # first: it finds the project
from support import reference
from support.errors import BadInput
from support.files import refuse_overwriting
from support.flags import natural
from support.settings import (
    Settings,
    as_typed,
    flag_name,
    make_parser,
    resolve_settings,
)
from support.terminal import fold

import dataclasses
import shlex
import sys
from dataclasses import dataclass, field
from pathlib import Path

from handed_in import NEEDED, gaps, read_run
from recompute import LINES, REPLIES, contradictions, digest_of_dialogues, replay_sample
from signatures import signatures_in

WIDTH = 100  # columns of the text
MOST_NAMED = 4  # metrics outside of the band that the text names
# What may differ from the run that was asked for, unless --settings names it: it changes no step of
# training, or only its random draws. (An engine is chosen by the machine.)
FREE = reference.NOT_COMPARED | {"engine"}
COLUMNS = (
    "run",
    "verdict",
    "variant",
    "seed",
    "steps",
    "score before",
    "score after",
    "settings",
    "whole",
    "consistent",
    "band",
    "mistakes",
    "same dialogues as",
)


# ------------------------------------------------------------------------------------ the settings


def read_asked(text):
    """The flags in --settings "--algo ppo --think" as {name: value}, None where not given. Raises
    BadInput; a flag that is unknown ends the program as it does in rlver.py, in one line."""
    parser = make_parser()
    parser.prog = "course.py check-run --settings"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BadInput(f"--settings {text!r}: {error}") from None
    given = vars(parser.parse_args(words))
    resolve_settings(given)  # raises BadInput where the flags contradict each other
    return given


def differences(cfg, given):
    """How the Settings of a run differ from those asked for, in words as one types them. given: the
    flags asked for; None: the defaults of the run's own algorithm, mode and model."""
    if given is None:
        given = {"algo": cfg.algo, "think": cfg.think or None, "model": cfg.model}
    asked = resolve_settings(given)
    words = []
    for setting in dataclasses.fields(Settings):
        name = setting.name
        if setting.metadata["text"] is None:  # no flag sets it
            continue
        # steps are "resumable", but another number of them is another run
        is_free = name in FREE or (setting.metadata["resumable"] and name != "steps")
        if is_free and given.get(name) is None:
            continue
        if getattr(cfg, name) != getattr(asked, name):
            words.append(f"{typed(cfg, name)} (asked for: {typed(asked, name)})")
    return words


def typed(cfg, name):
    """A setting as one types it: "--lr 0.001", or "no --think"."""
    value = getattr(cfg, name)
    if value is None or value is False:
        return f"no {flag_name(name)}"
    return as_typed({name: value}, [name])


# ---------------------------------------------------------------------------------- what was found


@dataclass
class Findings:
    """What is to be said about a run. Each list holds sentences, and is empty if all is well."""

    name: str
    run: object  # handed_in.HandedIn
    settings: list = field(default_factory=list)
    whole: list = field(default_factory=list)
    consistent: list = field(default_factory=list)
    band: list = field(default_factory=list)
    no_band: str = ""  # why there is no band to compare with; "" if there is one
    mistakes: list = field(default_factory=list)  # (Signature, sentence)
    same_as: str = ""  # what is said about a run with the same dialogues
    same_name: str = ""  # the name of that run

    @property
    def verdict(self):
        """In a few words: "as asked", or what is wrong."""
        problems = []
        if self.settings:
            problems.append("other settings")
        if self.whole:
            problems.append("not whole")
        if self.consistent:
            problems.append("numbers do not fit together")
        if self.band:
            problems.append("outside of the band")
        problems += [f"looks like {signature.name}" for signature, _ in self.mistakes]
        return "; ".join(problems) or "as asked"


def findings_of(run, given, per_step, seen):
    """The Findings of a run. given: as in `differences`; per_step: as in `replay_sample`; seen:
    {digest of the dialogues: (path, seed)} of the runs before, to which this one is added."""
    run.replayed = replay_sample(run, per_step)
    findings = Findings(
        name=str(run.path),
        run=run,
        settings=differences(run.settings, given),
        whole=gaps(run),
        consistent=contradictions(run),
        mistakes=signatures_in(run),
    )
    compare_with_band(run, findings)
    compare_with_others(run, findings, seen)
    return findings


def compare_with_band(run, findings):
    """Set what is said about the band of the reference runs."""
    variant = reference.variant_of(run.settings)
    bands = reference.read_bands(variant) if variant else {}
    if not bands:
        findings.no_band = "The reference runs have other settings, so there is no band"
        return
    steps = len(next(iter(bands.values()))[0])
    shortest = reference.shortest_stretch(steps)
    if len(run.rows) < shortest:
        findings.no_band = f"Fewer than {shortest} steps are too few to compare with the band"
        return
    stretches = reference.outside(reference.columns_of(run.rows), bands)
    stretches.sort(key=lambda stretch: stretch.first)
    findings.band = [
        f"{stretch.metric} from step {stretch.first} to {stretch.last} ({stretch.value:.3g} there, "
        f"usually {stretch.mean:.3g})"
        for stretch in stretches
    ]


def compare_with_others(run, findings, seen):
    """Set what is said about an earlier run with the same dialogues."""
    digest = digest_of_dialogues(run)
    if digest is None:
        return
    if digest not in seen:
        seen[digest] = (str(run.path), run.settings.seed)
        return
    findings.same_name, seed = seen[digest]
    if seed == run.settings.seed:
        findings.same_as = (
            f"Its training dialogues are those of {findings.same_name}, word for word, and so is "
            "its seed: it is a copy, or was made on a computer of the same kind."
        )
    else:
        findings.consistent.append(
            f"its training dialogues are those of {findings.same_name}, word for word, which "
            f"has seed {seed}"
        )


# ------------------------------------------------------------------------------------- in words


def paragraph(findings):
    """The findings as a text for people."""
    sentences = [
        opening(findings.run),
        about_settings(findings),
        about_files(findings),
        about_numbers(findings),
        about_band(findings),
        about_mistakes(findings),
        findings.same_as,
    ]
    return " ".join(sentence for sentence in sentences if sentence)


def opening(run):
    """What run it is, and its score."""
    cfg = run.settings
    think = " --think" if cfg.think else ""
    text = f"A run of {cfg.algo}{think}, seed {cfg.seed}, with {plural(run.last_step, 'step')}"
    before, after = score(run, "before"), score(run, "after")
    if before is not None and after is not None:
        text += f"; the held-out users score {before:.1f} before and {after:.1f} after training"
    return text + "."


def score(run, moment):
    """The score "before" or "after" training in summary.json, or None."""
    scores = run.summary.get(moment)
    value = scores.get("score") if isinstance(scores, dict) else None
    return value if isinstance(value, (int, float)) else None


def about_settings(findings):
    if not findings.settings:
        return "Its settings are those asked for."
    return f"Its settings are not those asked for: {', '.join(findings.settings)}."


def about_files(findings):
    if findings.whole:
        return f"It is not whole: {'; '.join(findings.whole)}."
    run = findings.run
    steps = plural(run.last_step, "step")
    dialogues = plural(run.settings.batch_size, "dialogue")
    evaluations = plural(len(run.heldout), "evaluation")
    # --eval-size may be any number (FREE), but a score of few users says little
    users = plural(max(map(len, run.heldout.values()), default=0), "user")
    return f"It is whole: {steps} of {dialogues} and {evaluations} of {users}."


def about_numbers(findings):
    if findings.consistent:
        return f"Its files contradict each other: {'; '.join(findings.consistent)}."
    counts = findings.run.replayed
    text = "Its metrics follow from its dialogues"
    if counts[REPLIES]:
        text += (
            f", and the user, asked again about {counts[REPLIES]} replies and for "
            f"{plural(counts[LINES], 'line')}, gives the answers of the log"
        )
    return text + "."


def about_band(findings):
    if findings.no_band:
        return findings.no_band + "."
    if not findings.band:
        return "Its curves lie in the band of the reference runs."
    named = "; ".join(findings.band[:MOST_NAMED])
    more = len(findings.band) - MOST_NAMED
    others = f"; and {plural(more, 'other metric')}" if more > 0 else ""
    return f"It left the band of the reference runs: {named}{others}."


def about_mistakes(findings):
    if not findings.mistakes:
        return "It has the signature of no known mistake."
    return " ".join(
        f"It looks as if {signature.likely}: {sentence}."
        for signature, sentence in findings.mistakes
    )


# ------------------------------------------------------------------------------------ the command


def check_runs(paths, text=None, per_step=2, csv_name=None):
    """`course.py check-run`: print a paragraph and a verdict for each run. text: of --settings.

    Returns the exit code: 0 if all runs are as asked, 1 if one is not, 2 if one cannot be read; the
    others are checked all the same. Raises BadInput for flags that cannot be used."""
    refuse_overwriting({"--csv": csv_name}, [Path(run) / name for run in paths for name in NEEDED])
    given = read_asked(text) if text is not None else None
    seen = {}
    exit_code = 0
    with opened_for_writing("--csv", csv_name) as csv_file:
        write_row(csv_file, COLUMNS)
        for path in paths:
            try:
                findings = findings_of(read_run(path), given, per_step, seen)
            except BadInput as error:
                print(
                    f"{path}: cannot be read: {without(path, error)}", file=sys.stderr, flush=True
                )
                write_row(csv_file, [path, f"cannot be read: {without(path, error)}"])
                exit_code = 2
                continue
            print(f"\n{fold(paragraph(findings), WIDTH)}")
            print(f"{findings.name}: {findings.verdict}", flush=True)
            write_row(csv_file, cells(findings))
            if findings.verdict != "as asked":
                exit_code = max(exit_code, 1)
    return exit_code


def without(path, error):
    """A message without the path of the run at its beginning, which stands there already."""
    return str(error).removeprefix(str(path)).lstrip(":/ ")


def cells(findings):
    """The row of the CSV file, one cell for each of COLUMNS."""
    run = findings.run
    mistakes = [f"{signature.name}: {sentence}" for signature, sentence in findings.mistakes]
    return [
        findings.name,
        findings.verdict,
        run.variant,
        run.settings.seed,
        run.last_step,
        score(run, "before"),
        score(run, "after"),
        "; ".join(findings.settings),
        "; ".join(findings.whole),
        "; ".join(findings.consistent),
        findings.no_band or "; ".join(findings.band),
        "; ".join(mistakes),
        findings.same_name,
    ]


def add_arguments(parser):
    """What `check-run` takes."""
    parser.add_argument("runs", metavar="DIR", nargs="+", help="the directory of a run")
    parser.add_argument(
        "--settings",
        metavar="FLAGS",
        help="the flags of rlver.py that were asked for, --settings='--algo ppo --think' "
        "(default: the defaults, with the run's own algorithm, mode and model)",
    )
    parser.add_argument(
        "--replay",
        metavar="N",
        type=natural,
        default=2,
        help="dialogues of each step and each evaluation that are put to the scripted user again; "
        "0: all (default: 2)",
    )
    parser.add_argument("--csv", metavar="FILE", help="write the findings there too, a row a run")
