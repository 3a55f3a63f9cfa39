"""rlver.py - train a model to comfort people: the whole loop, from top to bottom.

    python rlver.py --steps 10 --eval-size 32       a demonstration
    python rlver.py --algo grpo --think             a whole run of the toy in think mode
    python rlver.py --algo ppo                      PPO in direct mode, without thoughts

    1. converse     the policy replies, the user's emotion moves; its last value is the reward
                    (rollout.py; the user is simulator.py, and what plays it is in players/)
    2. roll out     many dialogues at once; a group is one user and one first line (rollout.py)
    3. update       advantages and clipped policy-gradient steps (ppo.py, grpo.py)
    4. sync         the new weights go to the engine that samples
    5. log          a line of metrics, every dialogue word for word
    6. evaluate     held-out users, before and after; and save checkpoints

`train` is the loop; what it calls follows, in the order of its use. Flags, torchrun, files,
printing and pictures are in support/; a first reading can skip them.
"""

# models/, players/ and support/ come first: they set up what torch reads when it is imported.
from models.build import Models
from models.checkpoint import checkpoint_bytes, gather_checkpoint, write_trial
from players.calls import CallLog
from players.check import check, learn, print_bill
from players.heldout import heldout_as_begun
from players.users import check_playable, digests_of_texts, simulator_of_run
from support import errors, ranks, report, rundir, settings, stopping
from support.clock import Clock
from support.command_line import refuse_nesting, split_name
from support.files import digest
from support.metrics import batch_metrics, summarise
from support.needs import hidden_need, named_need
from support.report import dialogue_text, print_head, print_summary, progress

import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import attrgetter

import torch
from tqdm import tqdm

from emotion import TRAINING
from grpo import check_groups, grpo_update
from people import profiles_of_run, profiles_of_step
from policy import split_batch
from ppo import ppo_update
from rollout import SEEDS, Agent, rollout, tokens_sampled
from toy import world

ROLLOUT_TIMEOUT = 3600  # seconds until a dialogue that has not ended is dropped
DRAW_EVERY = 60  # seconds from one drawing of a run to the next, but for the last
# An algorithm has its update here, which returns the metrics of `ppo.optimize`. Three files ask for
# `cfg.algo`: support/settings.py has its name, defaults and checks, support/metrics.py its other
# metrics (`batch_metrics`), models/build.py its critic, if it has one.
UPDATES = {"ppo": ppo_update, "grpo": grpo_update}


def train(run):
    """The whole loop of the RunDir `run`. A new run begins with an evaluation, a resumed one at its
    newest checkpoint. With many ranks each has its own dialogues, its own engine and a shard of the
    models. Raises SimulatorRefused, TooManyLost, CannotWrite or SelfCheckFailed at any time, BadInput
    or BadModel before config.json is written."""
    simulator, profiles, models = set_up(run)
    cfg, state, clock = run.cfg, run.state, models.clock
    run.stop.catch()  # from here on a signal loses no step

    # ---- 6. Evaluate and save, before.
    evaluate_and_save(run, simulator, models)

    steps = range(state["step"] + 1, cfg.steps + 1)
    bar = tqdm(
        steps, "training", cfg.steps, initial=state["step"], unit="step", disable=not run.first
    )
    for step in bar:
        start, simulator_before = time.perf_counter(), clock.simulator

        # ---- 1. Converse, and 2. roll out: whole groups, all dialogues at the same time.
        chosen = profiles_of_step(profiles, cfg.batch_size // cfg.group_size, cfg.seed, step)
        episodes, all_episodes, counts = hold_dialogues(
            run, simulator, models, chosen, cfg.group_size, "training", step
        )
        rolled_out, waited = time.perf_counter(), clock.simulator - simulator_before

        # ---- 3. Update: advantages, then clipped steps on the tokens that the policy sampled.
        metrics = update(models, cfg, step, episodes)

        # ---- 4. Sync: the engine gets the new weights.
        models.sync()
        done = time.perf_counter()

        # ---- 5. Log: every dialogue, a line of metrics.
        state["step"] = step
        state["seconds"]["rollout"] += rolled_out - start
        state["seconds"]["simulator"] += waited
        state["seconds"]["update"] += done - rolled_out
        row = row_of_step(run, models, chosen, episodes, all_episodes, counts, metrics)
        row["seconds"] = done - start
        ranks.on_first_rank(run.log_step, all_episodes, row)
        bar.set_postfix_str(progress(row, rolled_out - start))

        # ---- 6. Evaluate and save, where it is due.
        evaluate_and_save(run, simulator, models)


def update(models, cfg, step, episodes, observe=None):
    """Step 3 on this rank: update the models on the Episodes of training step `step`. Returns the
    metrics. observe: for `ppo.optimize`, by tools/lens.py, which makes an update again."""
    check_groups(episodes)
    models.end_sampling()
    minibatches = split_batch(  # each a list of micro-batches of packed rows
        episodes,
        cfg.batch_size,
        cfg.minibatches,
        max_tokens=cfg.tokens_per_gpu,
        seed=f"{cfg.seed} {step}",
        device=models.device,
        reward=cfg.reward,
    )
    # Both learning rates rise from 0 to their full value in the first `warmup` steps.
    models.set_learning_rates(min(1.0, step / max(1, cfg.warmup)))
    return UPDATES[cfg.algo](models, minibatches, cfg, observe)


# ------------------------------------------------------------- what they call, in order of its use


def set_up(run):
    """Make what a run needs, and try what could fail later, before the first dialogue. Returns
    (Simulator, the profiles to train on, Models); run.heldout are the others from there on."""
    cfg, clock = run.cfg, Clock()

    # The users, and what plays them.
    simulator = simulator_of_run(cfg, run.calls, clock)
    profiles, heldout = profiles_of_run(cfg.profiles, cfg.eval_size)
    check_playable(cfg.simulator, profiles + heldout, unnamed=not cfg.profiles)
    digests = {"people": digest([vars(profile) for profile in profiles + heldout])}
    if cfg.profiles:  # files may have been edited since the run began
        heldout = heldout_as_begun(run.path, heldout)
    # Of such users only the story is new. The released files have some, too.
    if both := {profile.player for profile in profiles} & {profile.player for profile in heldout}:
        run.tell(f"warning: personas both trained on and held out: {len(both)}")

    # The directory, and the newest checkpoint in it.
    ranks.on_first_rank(run.take_lock)
    checkpoint = run.open()

    # The first rank finds out which form of answers the user's model takes, and tells the others.
    if not cfg.scripted:
        learn(simulator, ranks.on_first_rank(ask_first, run, simulator))

    # The policy, and all that trains it.
    models = Models(cfg, start_of(cfg), checkpoint, run.start_file, clock, run.runner)
    ranks.on_first_rank(run.try_to_save, partial(write_trial, models), checkpoint_bytes(models))

    # The state of the run.
    run.restore(checkpoint, heldout, digests_of_texts(models, simulator) | digests)
    ranks.on_first_rank(run.begin_logs)
    if run.first:
        step, n_ranks = run.state["step"], ranks.world_size()
        print_head(cfg, run.path, len(profiles), len(heldout), n_ranks, step)
        print_bill(simulator, cfg, heldout, run.state)
    return simulator, profiles, models


def ask_first(run, simulator):
    """Ask the user's model, or the reader, before the first dialogue: a wrong key or name shows at
    once. Returns what `check` found out, for `learn`."""
    name = run.cfg.reader or split_name(run.cfg.simulator)[1]
    what = "reader" if run.cfg.reader else "model"
    run.tell(f"first some questions to {name}, the user's {what}")
    return run.runner.run(check(simulator))


def start_of(cfg):
    """Where the starting policy pi_0 lies: a directory, or its name on the hub."""
    return world.base_policy(cfg.think) if cfg.toy else cfg.model


def evaluate_and_save(run, simulator, models):
    """Step 6, where it is due. `train` calls it

    before step 1       evaluate, save: a new run is at step -1 until then
    after each step     evaluate if --eval-every is over, save if --save-every is
    after the last one  save, evaluate: a run that is resumed with more --steps goes on from a
                        state without this evaluation, as if it had never stopped here
    at a resume         make the evaluation that the run was stopped before
    """
    cfg, state = run.cfg, run.state
    step = max(0, state["step"])
    if step == cfg.steps:
        save(run, models)
    evaluated = [scores["step"] for scores in state["evaluations"]]
    if cfg.evaluates(step) and step not in evaluated:
        evaluate(run, simulator, models, step)
    state["step"] = step
    if step % cfg.save_every == 0:
        save(run, models)


def evaluate(run, simulator, models, step):
    """One dialogue with every held-out user. The scores are kept in the state. Before and after
    training the first dialogue is printed."""
    start = time.perf_counter()
    episodes, all_episodes, counts = hold_dialogues(
        run, simulator, models, run.heldout, 1, "evaluation", step
    )
    run.state["seconds"]["evaluate"] += time.perf_counter() - start
    if step == 0:
        models.distance.keep(episodes)
    scores = {"step": step, **summarise(all_episodes), **counts}
    run.state["evaluations"].append(scores)
    ranks.on_first_rank(run.log_evaluation, all_episodes, scores)
    if step in (0, run.cfg.steps):
        first = all_episodes[0]
        title = "after training" if step else "before training"
        run.tell(dialogue_text(title, first, hidden_need(run.heldout[first.group])))


def save(run, models):
    """Write a checkpoint of the last whole step, unless it has one. All ranks gather, the first one
    writes."""
    if run.saved_step < run.state["step"]:
        ranks.on_first_rank(run.save, gather_checkpoint(models) if run.state["step"] else None)
        run.saved_step = run.state["step"]
        # it takes a second, as long as a step of the toy
        if run.saved_step > 0 and time.monotonic() - run.drawn > DRAW_EVERY:
            draw_report(run)


def hold_dialogues(run, simulator, models, profiles, group_size, kind, step):
    """Steps 1 and 2: `group_size` dialogues with each of `profiles`; kind: training or evaluation.
    Returns the Episodes of this rank, those of all ranks without tokens, and, as RunDir.log_dropped,
    how many were dropped. Raises TooManyLost, after a checkpoint, if more than a fifth were."""
    cfg, n_dialogues = run.cfg, len(profiles) * group_size

    # Split: a group never crosses ranks.
    groups = {n: p for n, p in enumerate(profiles) if n % ranks.world_size() == ranks.rank()}

    # Roll out. A signal cuts the dialogues short: then there is nothing to return.
    models.begin_sampling()
    with bar_of(run, kind, step, len(groups) * group_size) as bar:
        dialogues = rollout(
            simulator,
            groups,
            group_size,
            partial(make_agent, models, cfg, kind, step),
            rules_of(cfg, kind),
            timeout=ROLLOUT_TIMEOUT,
            name=f"{kind} {step}",
            bar=bar,
        )
        episodes, dropped = run.stop.hold(run.runner, dialogues) or ([], [])
    stop_if_asked(run, models)

    # Gather, and log what was dropped on any rank.
    all_dropped = ranks.all_gather_list(dropped)
    too_many = len(all_dropped) > errors.MAX_LOST * n_dialogues
    if too_many:
        # Save first: a resume cuts dropped.jsonl to its length at the checkpoint, and rows logged
        # before the save would be logged again by the repeated step.
        save(run, models)
    counts = ranks.on_first_rank(run.log_dropped, kind, step, all_dropped)
    if too_many:
        raise errors.TooManyLost(
            f"{len(all_dropped)} of {n_dialogues} dialogues are lost, the first because of: "
            f"{all_dropped[0]['reason']} (dropped.jsonl holds what was said in them)"
        )
    all_episodes = ranks.all_gather_list([replace(e, segments=[]) for e in episodes])
    all_episodes.sort(key=attrgetter("number"))
    return episodes, all_episodes, counts


def bar_of(run, kind, step, total):
    """The progress bar of `total` dialogues. (Those of the toy in training are over too soon.)"""
    hidden = not run.first or (kind == "training" and run.cfg.toy)
    text = f"{kind}, step {step}"
    return tqdm(desc=text, total=total, unit="dialogue", leave=False, disable=hidden)


def rules_of(cfg, kind):
    """How the dialogues of a training step or an evaluation begin and end."""
    return replace(TRAINING, max_turns=cfg.max_turns, own_first_line=kind == "evaluation")


def make_agent(models, cfg, kind, step, number):
    """The policy's side of dialogue `number` of the whole batch, over all ranks. Its random draws are
    seeded by (seed, kind, step, number): they depend neither on a resume nor on how many ranks there
    are."""
    return Agent(
        models.engine,
        models.chat,
        think=cfg.think,
        max_tokens=cfg.max_tokens,
        context=models.context,
        seed=[cfg.seed, SEEDS[kind], step, number],
    )


def stop_if_asked(run, models):
    """Save the last whole step if one of the ranks has got a signal; then all raise Stopped. The
    ranks agree on it behind dialogues alone, which a signal has cut short: at any other place some
    of them might wait in a collective call for one that has left."""
    number = max(ranks.all_gather_list([run.stop.number]))
    if number:
        save(run, models)
        draw_report(run)
        raise errors.Stopped(number)


def row_of_step(run, models, profiles, episodes, all_episodes, counts, metrics):
    """The line of metrics.jsonl for a training step. profiles: one for each group; metrics: of the
    update; the rest is what `hold_dialogues` returned."""
    cfg, state = run.cfg, run.state
    needs = [*map(named_need, profiles)]
    batch = batch_metrics(all_episodes, needs, cfg, state["failed"])
    replies = batch["episodes"] * batch["turns"]  # turns: the mean per dialogue
    sampled = sum(ranks.all_gather_list([tokens_sampled(e.segments) for e in episodes]))
    gap_max = max(ranks.all_gather_list([metrics["logp_gap_max"]]))
    return {
        "step": state["step"],
        **batch,
        **counts,
        "cut": sum(e.cut for e in all_episodes) / replies,
        "reply_tokens": metrics["tokens_trained"] / replies,
        **metrics,
        "logp_gap_max": gap_max,
        "kl_start": models.distance.kl(),
        # the training users' emotion minus the last score of the held-out users
        "gap": batch["emotion"] - state["evaluations"][-1]["score"] if cfg.eval_every else None,
        "tokens_sampled": sampled + counts["tokens_dropped"],
    }


# --------------------------------------------------------------------------------------------- main


def log_of_calls(cfg, out, name="calls"):
    """The log of this rank's calls to the user's model, in the run's directory. Where the user is a
    script, it has no file."""
    name += f"-{ranks.rank()}" if ranks.rank() else ""
    return CallLog(None if cfg.scripted else out / f"{name}.jsonl")


def draw_report(run):
    """Draw the picture and the page of the run so far, if it has a checkpoint."""
    if run.first and run.saved_step >= 0:
        report.draw(run.path, run.heldout)
        run.drawn = time.monotonic()


@contextmanager
def draw_at_end(run):
    """A context at whose end the report of the run is drawn, also if an error ends it."""
    try:
        yield
    except Exception:
        # (Stopped is none: `stop_if_asked` has drawn, and after a second Ctrl-C nobody waits.)
        draw_report(run)
        raise
    draw_report(run)


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    flags = vars(settings.make_parser().parse_args(argv))
    run, out, code, message = None, None, 0, ""
    try:
        refuse_nesting(in_main_thread=True)
        with stopping.interrupts():
            ranks.join_ranks(cuda=torch.cuda.is_available() and settings.model_of(flags) != "toy")
            cfg, out, finished = ranks.on_first_rank(settings.open_run, flags)
            if not finished:
                run = rundir.RunDir(out, cfg, log_of_calls(cfg, out), ranks.rank())
                with draw_at_end(run):
                    train(run)
                    ranks.on_first_rank(run.finish)
            if ranks.rank() == 0:
                print_summary(out)
                if finished:
                    print(f"{out} is finished; to go on: --resume {out} --steps N, N the total")
    except errors.WITH_A_MESSAGE as error:
        code, message = errors.explain(error, out, ranks.rank(), ranks.world_size())
    finally:
        if run:
            run.close()
    if message:  # the last thing on the screen
        print(message, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    ranks.leave_ranks(main())
