"""support/rundir.py - the directory of a run: its lock, logs and checkpoints; how a run goes on; and
what it prints.

    config.json  metrics.jsonl  dialogues.jsonl  calls.jsonl  start.pt  checkpoint-000050/

A run may be killed at any moment. So a file is written under another name and renamed, logs grow by
whole lines, and a checkpoint knows how long each log was: what was logged after it is cut off, and
done again. Nothing here knows what a policy is: `RunDir.save` is handed a function that writes it.

The head of a run says what differs from the defaults, config.json has the rest. Wherever a score is
printed its scale stands beside it (support.metrics.scale_in_words), and what is made by rule says
so.
"""

from support import STARTED
from support.errors import BadInput, CannotWrite, TooManyLost
from support.files import append_line, lock, read_json, size_of, write_json
from support.metrics import BENCHMARK_TURNS, INITIAL_EMOTION, Clock, scale_in_words, warnings_of
from support.results import metrics_of, print_table
from support.servers import CallLog
from support.settings import (
    SCRIPTED,
    changed_from_defaults,
    fold,
    made_by_rule,
    resolve_settings,
    resumed_settings,
)

import asyncio
import contextlib
import dataclasses
import os
import re
import resource
import shlex
import shutil
import sys
import time
from pathlib import Path

from tqdm import tqdm

# ------------------------------------------------------------------------- a new run, or an old one


def open_run(given):
    """Decide between a new run and a resumed one. given: the flags, None where not given. Writes
    nothing; raises BadInput. Returns

    settings   Settings
    directory  Path; of a new run it may not exist yet
    finished   whether all steps are done and evaluated, so that there is nothing to resume"""
    if given["resume"] is not None:
        out = Path(given["resume"])
        settings = resumed_settings(read_json(out / "config.json"), given)
        finished = read_json(out / "summary.json").get("steps") == settings.steps
        return settings, out, finished
    settings = resolve_settings(given)
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{settings.algo}-{settings.mode}"
    out = Path(given["out"] or f"runs/{name}")
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise BadInput(
            f"--out {out}: is there already; choose another, or continue that run with "
            f"--resume {out}"
        )
    return settings, out, False


def model_of(given):
    """The name of the policy's model, of a resumed run as its config.json has it. It is needed
    before the ranks are joined; `open_run`, which comes later, complains of a bad config.json."""
    if given["resume"] is None:
        return given["model"] or "toy"
    return read_json(Path(given["resume"]) / "config.json").get("model", "toy")


def new_state():
    """What state.json holds, for a run that has done nothing yet."""
    seconds = ["rollout", "simulator", "update", "evaluate", "total"]
    return {
        "step": -1,  # the last step that is done; 0 is the evaluation before training
        "evaluations": [],
        "seconds": dict.fromkeys(seconds, 0.0),
        "tokens": {"sampled": 0, "trained": 0},
        # how long each log was at the checkpoint: `RunDir.begin` cuts off what came later
        "log_bytes": {"metrics.jsonl": 0, "dialogues.jsonl": 0, "dropped.jsonl": 0},
        # the same of the log of calls of each rank: later calls were paid for, so they are not cut
        # off, but serve as answers when the steps after the checkpoint are done again
        "call_bytes": {},
    }


# ------------------------------------------------------------------------------------ the directory

LOGGED = ("profile_id", "group", "first_line", "turns", "ended", "reward")  # of an Episode


class RunDir:
    """The directory of one run: what is written there and printed, and what is open while the run
    lasts. Every rank has such an object, but only the first one writes and prints (each logs its
    own calls to the user's model).

    path, cfg     the directory; Settings
    is_new        whether the run begins anew, or goes on
    runner        the asyncio.Runner in which all dialogues are held
    clock, calls  the seconds in which only the user's model is at work; the log of its calls
    start_file    holds a few dialogues of the starting policy, to measure the KL from it
    """

    def __init__(self, path, cfg, rank=0, is_new=True):
        self.path, self.cfg, self.is_new = Path(path), cfg, is_new
        self.first = rank == 0
        self.start_file = self.path / "start.pt"
        self.runner = asyncio.Runner()
        self.clock = Clock()
        name = f"calls-{rank}.jsonl" if rank else "calls.jsonl"
        self.calls = CallLog(None if cfg.simulator in SCRIPTED else self.path / name)
        self.held_lock = None  # of `lock`; None: not locked yet
        self.writer = None  # of TensorBoard, with --tensorboard
        self.rows = []  # the lines of metrics since the start or the resume
        self.warned_of = set()  # the names of the warnings that were printed

    # ---- begin and end

    def enter(self, broadcast, all_gather_list):
        """Lock the directory, if it is there. Returns the newest checkpoint, or None. The two
        functions are of support/ranks.py, which imports torch; this file does without. Raises
        BadInput, on every rank, where one does not find the checkpoint (another node without a
        shared file system)."""
        self.lock()
        existing = broadcast(checkpoints, self.path)
        if not existing:
            return None
        checkpoint = existing[-1]
        if not all(all_gather_list([checkpoint.is_dir()])):
            raise BadInput(
                f"--resume {self.path}: {checkpoint.name} is not on every node; each needs this "
                "directory, shared or as a copy"
            )
        return checkpoint

    def begin(self, checkpoint, heldout):
        """Read the state of the `checkpoint`, or make that of a new run; cut off what was logged
        after it, because it will be done again, but read the calls that were paid for; write
        config.json and heldout.json, and lock the directory. Returns the state. Raises BadInput."""
        state = read_json(checkpoint / "state.json") if checkpoint else new_state()
        if self.cfg.steps < state["step"]:
            raise BadInput(
                f"--steps {self.cfg.steps}: this run has done {state['step']} steps already; "
                "--steps is the total"
            )
        self.seconds_before = state["seconds"]["total"]
        for name, size in state["log_bytes"].items():
            path = self.path / name
            if self.first and size_of(path) > size:  # to cut to more would fill it up with zeros
                os.truncate(path, size)
        if self.calls.path:  # what was paid for after the checkpoint is not paid for again
            for path in self.path.glob("calls*.jsonl"):
                self.calls.read(path, state["call_bytes"].get(path.name, 0))
        if not self.first:
            return state
        try:
            write_json(self.path / "config.json", dataclasses.asdict(self.cfg))
        except OSError as error:
            raise BadInput(f"--out {self.path}: cannot be written ({error.strerror})") from None
        self.lock()  # a new run's directory is there now
        (self.path / "summary.json").unlink(missing_ok=True)  # a run that was over goes on
        if self.cfg.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.path / "tensorboard")
        if not (self.path / "heldout.json").exists():
            # From it an evaluation knows whom the run was not trained on, and where its files are.
            places = {name: str(Path(name).resolve()) for name in self.cfg.profiles or ()}
            ids = [profile.id for profile in heldout]
            write_json(self.path / "heldout.json", {"ids": ids, "profiles": places})
        return state

    def finish(self, state):
        """Write summary.json, by which a run is known to be over."""
        if not self.first:
            return
        state["seconds"]["total"] = self.seconds_before + time.perf_counter() - STARTED
        unit = 1024**2 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, else KiB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit
        evaluations = state["evaluations"]
        before, after = [
            {key: value for key, value in scores.items() if key != "step"}
            for scores in (evaluations[0], evaluations[-1])
        ]
        summary = {
            "before": before,
            "after": after,
            "steps": state["step"],
            "seconds": state["seconds"],
            "tokens": state["tokens"],
            "peak_rss_mb": round(peak, 1),
            "warnings": list(warnings_of(metrics_of(self.path)).values()),
            "evaluations": evaluations,
        }
        write_json(self.path / "summary.json", summary)

    def close(self):
        """Release the lock, and cancel the dialogues that are still open: quietly, where asyncio
        would print ten lines about each of them."""
        if self.held_lock is not None:
            os.close(self.held_lock)
            self.held_lock = None
        self.runner.get_loop().set_exception_handler(lambda loop, context: None)
        with contextlib.suppress(KeyboardInterrupt):  # a cancelled dialogue raises it once more
            self.runner.close()

    def lock(self):
        """Lock the directory, if it is there: two runs would undo each other's files. The lock ends
        with the process, or with `close`. Raises BadInput if another process has it."""
        if self.first and self.held_lock is None and self.path.exists():
            self.held_lock = lock(self.path)

    # ---- the logs, and what is printed

    def append(self, name, row):
        """Append a line to a log."""
        if self.first:
            append_line(self.path / name, row)

    def log_dialogues(self, step, split, episodes):
        """Every dialogue word for word, with all that led to each change of emotion."""
        for episode in episodes:
            row = {"step": step, "split": split, **{key: getattr(episode, key) for key in LOGGED}}
            self.append("dialogues.jsonl", row)

    def log_step(self, state, episodes, row):
        """Log the dialogues and the metrics of a training step; print the warnings that are new."""
        self.log_dialogues(row["step"], "train", episodes)
        state["tokens"]["sampled"] += row["tokens_sampled"]
        state["tokens"]["trained"] += row["tokens_trained"]
        self.append("metrics.jsonl", row)
        if self.writer:
            self.log_numbers("train", row)
        self.rows.append(row)
        for name, sentence in warnings_of(self.rows).items():
            if name not in self.warned_of:
                self.warned_of.add(name)
                self.tell(f"warning, step {row['step']}: {sentence} (docs/troubleshooting.md)")

    def log_evaluation(self, episodes, scores):
        """Log the dialogues and the scores of an evaluation; print the score of one between the
        first and the last step."""
        step = scores["step"]
        self.log_dialogues(step, "heldout", episodes)
        if self.writer:
            self.log_numbers("heldout", scores)
        if step == 0 and scores["malformed"] > 50:  # they all earn 0: nothing to learn from
            self.tell(
                f"{scores['malformed']:.0f} % of the dialogues before training ended malformed, at "
                "a reward of 0: the model does not write <think>...</think> and a reply within "
                "--max-tokens, and it will hardly learn to. Give it more tokens, or train without "
                "--think"
            )
        if 0 < step < self.cfg.steps:
            scale = scale_of_run(vars(self.cfg))
            self.tell(f"step {step}: held-out score {scores['score']:.1f} ({scale})")

    def log_dropped(self, kind, step, rows, n_dialogues, save):
        """Write the `rows` of the dialogues that were dropped, of all ranks, to dropped.jsonl.
        Returns {"dropped": their number, "unreadable": of those whose user's answers could not be
        read, "tokens_dropped": that were sampled for them}. If they are more than a fifth of the
        `n_dialogues` that were begun, call save() and raise TooManyLost."""
        too_many = len(rows) > n_dialogues / 5
        if too_many:
            # Save first: a resume cuts dropped.jsonl to its length at the checkpoint. Rows logged
            # before the save would survive the cut, and the repeated step would log them again.
            save()
        for row in rows:
            self.append("dropped.jsonl", {"step": step, "kind": kind, **row})
        if too_many:
            raise TooManyLost(
                f"{len(rows)} of {n_dialogues} dialogues are lost, the first because of: "
                f"{rows[0]['reason']} (dropped.jsonl holds what was said in them)"
            )
        unreadable = sum(row["unreadable"] for row in rows)
        tokens = sum(row["tokens"] for row in rows)
        return {"dropped": len(rows), "unreadable": unreadable, "tokens_dropped": tokens}

    def log_numbers(self, prefix, numbers):
        """Write the numbers of a step for TensorBoard, too."""
        for key, value in numbers.items():
            if isinstance(value, (int, float)):
                self.writer.add_scalar(f"{prefix}/{key}", value, numbers["step"])
        self.writer.flush()

    def tell(self, text):
        """Print a line above the progress bar."""
        if self.first:
            tqdm.write(text)

    def dialogue_bar(self, kind, step, total):
        """A progress bar of `total` dialogues. (The toy's in training are over too soon.)"""
        hidden = not self.first or (kind == "training" and self.cfg.toy)
        title = f"step {step}" if kind == "training" else f"evaluating, step {step}"
        return tqdm(total=total, desc=title, unit="dialogue", leave=False, disable=hidden)

    # ---- checkpoints

    def needs_checkpoint(self, step):
        """Is this step done, and the newest checkpoint of an earlier one?"""
        existing = checkpoints(self.path)[-1:]
        return step >= 0 and existing != [self.path / f"checkpoint-{step:06d}"]

    def save(self, state, write, all_gather_list):
        """Write a checkpoint under another name and rename it, so that nobody ever finds half of
        one. Then remove all but the newest two. Every rank must call this; the first one writes.

        state: what state.json will hold; write(directory): a function that writes everything else;
        all_gather_list: of support/ranks.py. The settings are a part of it (rlver.json), so that a
        copy elsewhere says what it is. Raises CannotWrite."""
        state["seconds"]["total"] = self.seconds_before + time.perf_counter() - STARTED
        calls = self.calls.path
        size_here = [(calls.name, size_of(calls))] if calls else []
        state["call_bytes"].update(all_gather_list(size_here))
        if not self.first:
            return
        name = f"checkpoint-{state['step']:06d}"
        scratch = self.path / f".{name}"
        shutil.rmtree(scratch, ignore_errors=True)
        state["log_bytes"] = {log: size_of(self.path / log) for log in state["log_bytes"]}
        try:
            write(scratch)
            write_json(scratch / "rlver.json", dataclasses.asdict(self.cfg))
            write_json(scratch / "state.json", state)
        except Exception as error:  # a full disk: an OSError to Python, other things to torch
            shutil.rmtree(scratch, ignore_errors=True)
            raise CannotWrite(
                f"{self.path / name} could not be written ({error}); is the disk full?"
            ) from None
        os.rename(scratch, self.path / name)
        for old in checkpoints(self.path)[:-2]:
            shutil.rmtree(old)


# -------------------------------------------------------------------------------------- checkpoints


def checkpoints(out):
    """The checkpoints of a run, the oldest first."""
    paths = Path(out).glob("checkpoint-*")
    return sorted(path for path in paths if re.fullmatch(r"checkpoint-\d+", path.name))


def newest_state(out):
    """The state of a run: its summary.json or, if that is not there yet, the state.json of its
    newest checkpoint. Raises BadInput if there is neither."""
    states = [read_json(place / "state.json") for place in checkpoints(out)[-1:]]
    for state in [read_json(out / "summary.json"), *states]:
        if "evaluations" in state:
            return state
    raise BadInput(f"{out}: this run has not come to its first checkpoint")


# ----------------------------------------------------------------------------------- held-out users


def refuse_other_heldout(out, users):
    """Raise BadInput if the run in `out` held out others than these `users`, because its profiles
    have changed."""
    ids = [profile.id for profile in users]
    if read_json(Path(out) / "heldout.json").get("ids", ids) != ids:
        raise BadInput(
            f"{out}: the profiles have changed since the run began, so other users would be held "
            "out"
        )


def profile_files(out, names):
    """The paths of the files of profiles `names` of the run in `out`: as the run named them, or,
    from another directory, where they were when it began."""
    places = read_json(Path(out) / "heldout.json").get("profiles", {})
    return [name if Path(name).is_file() else places.get(name, name) for name in names or ()]


# ------------------------------------------------------------------------------- what a run prints

SCALE_OF_BENCHMARK = scale_in_words(INITIAL_EMOTION["benchmark"], BENCHMARK_TURNS)


def scale_of_run(settings):
    """The scale of a run's scores. settings: as in its config.json."""
    return scale_in_words(INITIAL_EMOTION["training"], settings["max_turns"])


def print_head(cfg, out, training, held_out, ranks=1, step=0):
    """What a run prints before its first dialogue: what is trained on whom, what differs from the
    defaults, how often the user's model is asked, and where all goes. training, held_out: numbers of
    users; step: the last step that is done, above 0 in a resumed run."""
    begin = f"Step {step} is done, going on: " if step > 0 else ""
    policy = "the toy's policy" if cfg.toy else cfg.model
    how = "thinking before each reply" if cfg.think else "replying directly"
    on_ranks = f", on {ranks} ranks" if ranks > 1 else ""
    print(
        fold(
            f"{begin}{cfg.algo.upper()} trains {policy}, {how}: {cfg.steps} steps of "
            f"{cfg.batch_size} dialogues, {cfg.group_size} with each user{on_ranks}."
        )
    )
    changed = changed_from_defaults(cfg)
    if changed:
        print(fold(f"Settings that differ from the defaults: {changed}"))
    print(
        fold(
            f"User: {cfg.simulator} ({cfg.difficulty}, {cfg.lang}); {training} users to train on, "
            f"{held_out} held out. {made_by_rule(cfg.simulator)}"
        )
    )
    scales = f"{scale_of_run(vars(cfg))} (the benchmark of evaluate.py: {SCALE_OF_BENCHMARK})"
    print(fold(f"Scores are mean final emotions, {scales}."))
    if cfg.simulator not in SCRIPTED:
        print(fold(calls_text(cfg, step)))
    print(fold(f"All goes to {out}; config.json there has every setting."), flush=True)


def calls_text(cfg, step):
    """How many calls the user's model gets at most in the steps after `step`.

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
    return f"Calls to the user's model, at most: {of_step:,} a step, {calls:,} in all."


def progress(metrics, rollout_seconds):
    """A step's metrics in the few words that fit behind a progress bar."""
    tokens_per_second = metrics["tokens_sampled"] / rollout_seconds
    return (
        f"emotion {metrics['emotion']:.0f}, success {metrics['success']:.0f} %, "
        f"{tokens_per_second:.0f} tokens/s, {metrics['dropped']} dropped"
    )


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


def print_summary(out):
    """The end of a run: scores before and after, time and memory, warnings, what to do next."""
    config, summary = read_json(out / "config.json"), read_json(out / "summary.json")
    print(f"\nheld-out users, mean final emotion ({scale_of_run(config)}):")
    print_table({name: summary[name] for name in ("before", "after")})
    malformed = summary["after"]["malformed"]
    print(
        fold(
            f"success: dialogues that end at 100; failure: below 10; {malformed:.1f} % end with a "
            f"malformed reply. {made_by_rule(config['simulator'])}"
        )
    )
    seconds = summary["seconds"]
    parts = (
        f"rollout {seconds['rollout']:.0f} (waiting for the user {seconds['simulator']:.0f}), "
        f"update {seconds['update']:.0f}, evaluate {seconds['evaluate']:.0f}"
    )
    print(fold(f"{seconds['total']:.0f} s in all: {parts}; {summary['peak_rss_mb']:.0f} MiB"))
    for warning in summary["warnings"]:
        print(f"warning: {warning}")
    run, report = [shlex.quote(str(path)) for path in (out, out / "report.html")]
    print(f"\nopen {report}")
    print(f"next: the benchmark ({SCALE_OF_BENCHMARK}), before and after this run:")
    print(f"    python evaluate.py --policy {run} --before-after")
