"""rlver.py - train a model to comfort people: the whole loop, from top to bottom.

    python rlver.py --steps 10 --eval-size 32       a demonstration of half a minute
    python rlver.py --algo grpo --think             the toy, thinking: about two minutes
    python rlver.py --algo ppo                      PPO, speaking without thinking

    1. converse     the policy replies, the user's emotion moves; at the end it is the reward
    2. roll out     many dialogues at once; a group is one user and one first line
    3. update       advantages and clipped policy-gradient steps (ppo.py, grpo.py)
    4. sync         the new weights go to the engine that samples
    5. log          a line of metrics, every dialogue word for word
    6. evaluate     held-out users, before and after; and save checkpoints

First come the dialogue and the rollout; then `train`, which is the whole loop. Flags, torchrun,
files, printing and pictures are in support/: a first reading may skip them.
"""

from support import errors, ranks, report, rundir, settings
from support.loading import return_freed_memory
from support.metrics import INITIAL_EMOTION, batch_metrics, summarise
from support.results import hidden_need
from support.rundir import dialogue_text, print_head, print_summary, progress

import asyncio
import os
import signal
import sys
import time
from functools import partial

import torch
from tqdm import tqdm

from grpo import check_groups, grpo_update
from models import Models
from policy import Agent, Episode, split_batch
from ppo import log_probs_of, ppo_update
from simulator import User, profiles_of_step, simulator_of_run, users_of_run

ROLLOUT_TIMEOUT = 3600  # seconds until a dialogue that has not ended is dropped

# ------------------------------------------------------------------------------------- the dialogue

TURN_FIELDS = ("reply", "thought", "user", "analysis", "change", "emotion")  # as logged


async def converse(agent, user, user_line, max_turns, group=0, floor=0):
    """One dialogue: at most `max_turns` replies to `user`, who opened with `user_line`; every reply
    is scored. Returns its Episode, `ended` by the first of these:

        context         no room for another reply; what is felt so far counts
        malformed       logged as it was sampled, never sent; emotion and reward 0
        emotion_max     the emotion reached 100
        emotion_min     the emotion fell to `floor` or below: 0 in training, 9 in the benchmark,
                        which stops below 10
        turn_limit      the last reply is scored; nobody answers it
        goodbye         the user said goodbye

    A turn is logged as a dict of TURN_FIELDS, None where it did not come to that. reply: what was
    sent; user: the answer to it; analysis: the whole answer of f_emo. Raises SimulatorFailed.
    """
    episode = Episode(user.profile.id, group, user_line, emotion=user.emotion, start=user.emotion)
    for turn in range(1, max_turns + 1):
        reply = await agent.reply(user_line)  # tokens in, tokens out; thoughts stay here
        if reply is None:
            episode.ended = "context"
            break
        record = dict.fromkeys(TURN_FIELDS)
        record["reply"] = reply.visible
        record["thought"] = reply.thought
        episode.turns.append(record)
        if reply.malformed:  # RLVER 2.3: zero reward
            record["reply"] = reply.text
            episode.ended = "malformed"
            episode.emotion = 0
            break
        # f_emo: the emotion moves
        record["analysis"], record["change"] = await user.feel(reply.visible)
        record["emotion"] = user.emotion
        episode.emotion = user.emotion
        if user.emotion >= 100 or user.emotion <= floor:
            episode.ended = "emotion_max" if user.emotion >= 100 else "emotion_min"
            break
        if turn == max_turns:  # its reward is known: no value stands in for it
            episode.ended = "turn_limit"
            break
        # f_reply: only when the dialogue goes on
        user_line, goodbye = await user.answer()
        record["user"] = user_line
        if goodbye:
            episode.ended = "goodbye"
            break
    episode.segments = agent.segments
    episode.cut = agent.cut
    episode.reward = episode.emotion / 100  # r = e_T / 100 (RLVER 2.1)
    return episode


# -------------------------------------------------------------------------------------- the rollout


async def rollout(
    simulator,
    profiles_by_group,  # {group number in the whole batch: Profile}
    group_size,
    make_agent,  # make_agent(number) is the policy's side of dialogue `number`
    max_turns,
    bar=None,  # a progress bar, moved on by one for each dialogue
    name="",  # of the rollout, in the log of calls
    timeout=None,  # seconds until an open dialogue is dropped, as if its simulator had failed
    own_first_line=False,  # evaluations open with the line of a profile that has one
):
    """Hold `group_size` dialogues with each of `profiles_by_group`, all at the same time. Returns
    (episodes, dropped), in the order of the groups: `dropped` has a row for each dialogue that
    is lost: its user failed, time ran out, or the first line left no room for a reply.

    All users of a group open with the same first line, made once, and are separate from there on.
    """
    deadline = asyncio.get_running_loop().time() + timeout if timeout else None
    if bar is None:
        bar = tqdm(disable=True)

    async def run_dialogue(number, user, user_line, group):
        agent = make_agent(number)
        try:
            async with asyncio.timeout_at(deadline):
                episode = await converse(agent, user, user_line, max_turns, group)
        except (errors.SimulatorFailed, TimeoutError) as error:
            return None, row_of_dropped(error, user, agent)
        finally:
            bar.update()
        if not episode.tokens_sampled:
            reason = "the user's first line leaves no room in the context for a reply"
            return None, row_of_dropped(errors.SimulatorFailed(reason), user)
        episode.number = number
        return episode, None

    async def run_group(group, profile):
        user = User(simulator, profile, INITIAL_EMOTION["training"], f"{name} group {group}")
        try:
            async with asyncio.timeout_at(deadline):
                # In training the user's model makes the first line. In evaluations it is the
                # profile's own, if it has one.
                if own_first_line:
                    user_line = await user.open()
                else:
                    user_line, _ = await user.answer()
        except (errors.SimulatorFailed, TimeoutError) as error:
            bar.update(group_size)
            return [(None, row_of_dropped(error, user)) for _ in range(group_size)]
        numbers = range(group * group_size, (group + 1) * group_size)  # in the whole batch
        return await asyncio.gather(
            *[run_dialogue(n, user.copy(f"{name} {n}"), user_line, group) for n in numbers]
        )

    groups = await asyncio.gather(
        *[run_group(n, profile) for n, profile in profiles_by_group.items()]
    )
    results = [result for group in groups for result in group]
    episodes = [episode for episode, _ in results if episode]
    return episodes, [row for _, row in results if row]


def row_of_dropped(error, user, agent=None):
    """What dropped.jsonl keeps of a dialogue that `error` ended: what was said until then. The last
    reply of the policy is part of it: it may have made the user's model answer unreadably."""
    reason = "the rollout ran out of time" if isinstance(error, TimeoutError) else str(error)
    return {
        "profile_id": user.profile.id,
        "reason": reason,
        "unreadable": isinstance(error, errors.UnreadableAnswers),
        "tokens": sum(len(s.ids) for s in agent.segments if s.log_probs is not None)
        if agent
        else 0,
        "dialogue": user.dialogue,
    }


# ----------------------------------------------------------------------------------------- training

KINDS = ("training", "evaluation")  # of rollouts; the index is a part of each dialogue's seed


def train(cfg, run):  # noqa: C901, PLR0915 - one function, to be read from top to bottom
    """The whole loop: what the Settings `cfg` ask for, in the RunDir `run`. A run without a
    checkpoint begins with an evaluation, another where its newest checkpoint stands. Returns the
    state. Raises BadInput, BadModel, TooManyLost or CannotWrite before config.json is written;
    later SimulatorRefused, TooManyLost, SelfCheckFailed or CannotWrite.

    With many ranks each has its own dialogues, its own engine and a shard of the models. `state` is
    what a checkpoint keeps of the run: step, seconds, evaluations.
    """
    # ---- the people, the model behind them, and the models that are trained
    simulator = simulator_of_run(cfg, run.calls, run.clock)
    users, heldout = users_of_run(cfg.profiles, cfg.eval_size, cfg.simulator)
    rundir.refuse_other_heldout(run.path, heldout)
    checkpoint = run.enter(ranks.all_gather_list)
    # Three questions before anything is paid for: a wrong key or model shows at once.
    if cfg.reader or cfg.simulator not in settings.SCRIPTED:
        run.tell(f"asking {cfg.reader or simulator.name}, the user's model, three questions")
        # the first rank finds out what the server takes, and tells the others
        simulator.learn(ranks.broadcast(lambda: run.runner.run(simulator.check())))
    models = Models(cfg, checkpoint, run.clock, run.runner)
    if checkpoint:
        models.start_dialogues = models.read_start(run.start_file)  # if it is whole
    run.try_to_save(models.write, models.checkpoint_bytes())
    state = run.begin(checkpoint, heldout)
    ranks.all_gather_list([])  # wait for all ranks
    if run.first:
        sizes = len(users), len(heldout), ranks.world_size()
        print_head(cfg, run.path, *sizes, state["step"])

    # ---- what the loop below calls
    def hold_dialogues(profiles, group_size, kind, step):
        """Steps 1 and 2: `group_size` dialogues with each of `profiles`. Returns this
        rank's episodes, those of all ranks (without tokens), and what run.log_dropped counts.
        Raises TooManyLost, after a checkpoint, if more than a fifth were dropped.

        Every dialogue has an rng of its own, seeded by (seed, kind, step, its number in the whole
        batch): resumed or not, on however many ranks, the same is drawn."""
        models.engine.forget()
        if not cfg.toy:  # which needs little memory and would be slower by a twentieth
            return_freed_memory()
        # A group never crosses ranks.
        n_ranks, rank = ranks.world_size(), ranks.rank()
        here = {n: p for n, p in enumerate(profiles) if n % n_ranks == rank}

        def make_agent(number):
            return Agent(
                models.engine,
                models.chat,
                think=cfg.think,
                max_tokens=cfg.max_tokens,
                context=models.context,
                seed=[cfg.seed, KINDS.index(kind), step, number],
            )

        # The toy's dialogues in training are over too soon for a bar.
        hidden = not run.first or (kind == "training" and cfg.toy)
        title, total = f"{kind}, step {step}", len(here) * group_size
        with tqdm(total=total, desc=title, unit="dialogue", leave=False, disable=hidden) as bar:
            dialogues = rollout(
                simulator,
                here,
                group_size,
                make_agent,
                cfg.max_turns,
                bar,
                name=f"{kind} {step}",
                timeout=ROLLOUT_TIMEOUT,
                own_first_line=kind == "evaluation",
            )
            episodes, dropped_here = run.runner.run(dialogues)
        dropped = ranks.all_gather_list(dropped_here)
        begun = len(profiles) * group_size
        too_many = len(dropped) > begun / 5
        if too_many:
            # Save first: a resume cuts dropped.jsonl to its length at the checkpoint. Rows logged
            # before the save would survive the cut, and the repeated step would log them again.
            save()
        counts = run.log_dropped(kind, step, dropped)
        if too_many:
            raise errors.TooManyLost(
                f"{len(dropped)} of {begun} dialogues are lost, the first because of: "
                f"{dropped[0]['reason']} (dropped.jsonl holds what was said in them)"
            )
        return episodes, ranks.gather_episodes(episodes), counts

    # episodes as mini-batches, each a list of micro-batches of packed rows
    split = partial(
        split_batch,
        max_tokens=cfg.tokens_per_gpu,
        pad_id=models.pad,
        device=models.device,
        all_gather_list=ranks.all_gather_list,
        reward=cfg.reward,
    )

    def evaluate(step):
        """Step 6: one dialogue with every held-out user. Returns the episodes of all ranks, without
        tokens; the scores are kept in the state."""
        began = time.perf_counter()
        episodes, all_episodes, counts = hold_dialogues(heldout, 1, "evaluation", step)
        if step == 0:
            models.keep_start(episodes, run.start_file)
        perplexity = None  # of what the policy said, under the starting policy if that is in memory
        if models.reference:
            return_freed_memory()
            [batches] = split(episodes, len(heldout), 1, seed=0)
            log_probs_of(models.reference, batches)
            perplexity = models.reference.take_perplexity()
        scores = {"step": step, **summarise(all_episodes), **counts, "ref_perplexity": perplexity}
        state["seconds"]["evaluate"] += time.perf_counter() - began
        state["evaluations"].append(scores)
        run.log_evaluation(all_episodes, scores)
        return all_episodes

    def evaluation_is_due():
        """Is there an evaluation after the step that is done? (The last one is always made.)"""
        step = state["step"]
        return bool(cfg.eval_every) and 0 < step < cfg.steps and step % cfg.eval_every == 0

    def save():
        """A checkpoint of the last whole step. All ranks gather, the first one writes."""
        run.save(state, models.gather())
        if state["step"] > 0:
            draw_report(run)

    # ---- 6. Evaluate, before.
    if state["step"] < 0:  # not even this evaluation is done
        first = evaluate(0)[0]
        state["step"] = 0
        save()
        run.tell(dialogue_text("before training", first, hidden_need(heldout[first.group])))
    elif evaluation_is_due() and state["evaluations"][-1]["step"] != state["step"]:
        evaluate(state["step"])  # the run was stopped between a step and its evaluation

    steps = range(state["step"] + 1, cfg.steps + 1)
    bar = tqdm(
        steps, "training", cfg.steps, initial=state["step"], unit="step", disable=not run.first
    )
    for step in bar:
        began, simulator_before = time.perf_counter(), run.clock.simulator

        # ---- 1. Converse, and 2. roll out: whole groups, all dialogues at the same time.
        profiles = profiles_of_step(users, cfg.batch_size // cfg.group_size, cfg.seed, step)
        episodes, all_episodes, counts = hold_dialogues(profiles, cfg.group_size, "training", step)
        check_groups(all_episodes)
        rolled_out = time.perf_counter()

        # ---- 3. Update: advantages, then clipped steps on the tokens that the policy sampled.
        models.engine.sleep()  # the memory of its cache is the update's now
        if not cfg.toy:
            return_freed_memory()
        minibatches = split(episodes, cfg.batch_size, cfg.minibatches, seed=f"{cfg.seed} {step}")
        # Both learning rates rise from 0 to their full value in the first `warmup` steps.
        lr_share = min(1.0, step / max(1, cfg.warmup))
        models.optimizer.param_groups[0]["lr"] = cfg.lr * lr_share
        if models.critic:
            models.critic_optimizer.param_groups[0]["lr"] = cfg.critic_lr * lr_share
        update = ppo_update if cfg.algo == "ppo" else grpo_update
        metrics = update(models, minibatches, cfg)

        # ---- 4. Sync: the engine gets the new weights.
        models.sync()
        synced = time.perf_counter()

        # ---- 5. Log: every dialogue, a line of metrics.
        state["step"] = step
        state["seconds"]["rollout"] += rolled_out - began
        state["seconds"]["simulator"] += run.clock.simulator - simulator_before
        state["seconds"]["update"] += synced - rolled_out
        batch = batch_metrics(all_episodes, cfg.think, cfg.algo)
        sampled = sum(e.tokens_sampled for e in episodes)
        sampled = ranks.all_reduce_sum(torch.tensor(sampled)).item()
        row = {
            "step": step,
            **batch,
            **counts,
            "cut": sum(e.cut for e in all_episodes) / batch["episodes"] / batch["turns"],
            "reply_tokens": metrics["tokens_trained"] / batch["episodes"] / batch["turns"],
            **metrics,
            "logp_gap_max": max(ranks.all_gather_list([metrics["logp_gap_max"]])),
            "kl_start": models.kl_start(run.start_file),
            # None without a KL: then the reference scores nothing while training
            "ref_perplexity": models.reference and models.reference.take_perplexity(),
            # the training users' emotion, less the last score of the held-out ones
            "gap": batch["emotion"] - state["evaluations"][-1]["score"] if cfg.eval_every else None,
            "tokens_sampled": sampled + counts["tokens_dropped"],
            "seconds": synced - began,
        }
        run.log_step(all_episodes, row)
        bar.set_postfix_str(progress(row, rolled_out - began))

        # ---- 6. Evaluate, and save.
        if evaluation_is_due():
            evaluate(step)
        if step % cfg.save_every == 0 or step == cfg.steps:
            save()

    # ---- 6. Evaluate, after. (With --steps 0 the one evaluation was made above.)
    if state["step"] > 0:
        first = evaluate(state["step"])[0]
        run.tell(dialogue_text("after training", first, hidden_need(heldout[first.group])))
    return state


# --------------------------------------------------------------------------------------------- main


def draw_report(run):
    """Draw the picture and the page of the run so far."""
    if run.first:
        report.draw(run.path, run.heldout)


def interrupt(*_):
    """What Ctrl-C does in a run. (asyncio would cancel its main task, and forget the Ctrl-C if that
    task ends without waiting for anything, as the toy's dialogues do.)"""
    raise KeyboardInterrupt


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    rank = int(os.environ.get("RANK", 0))  # ranks.rank() knows it only after join_ranks()
    given = vars(settings.make_parser().parse_args(argv))
    run, out, code, message = None, None, 0, ""
    usual_handler = signal.signal(signal.SIGINT, interrupt)
    try:
        ranks.join_ranks(cuda=torch.cuda.is_available() and rundir.model_of(given) != "toy")
        cfg, out, finished = ranks.broadcast(rundir.open_run, given)
        if finished:
            if rank == 0:
                print_summary(out)
                print(f"{out} is finished; to go on: --resume {out} --steps N, N the total")
            return 0
        run = rundir.RunDir(out, cfg, ranks.rank())
        run.finish(train(cfg, run))
        draw_report(run)
        if run.first:
            print_summary(out)
    except (Exception, KeyboardInterrupt) as error:
        code, message = errors.explain(error, out, rank, ranks.world_size())
    finally:
        signal.signal(signal.SIGINT, usual_handler)
        if run:
            run.close()
    if message:
        print(message, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    ranks.leave_ranks(main())
