"""rlver.py - train a model to comfort people: RLVER's Figure 1, from top to bottom.

    python rlver.py --algo grpo --think             the embedded world: minutes on a laptop
    python rlver.py --algo ppo                      PPO, speaking without thinking

    1. converse     the policy replies, the user's emotion moves; at the end it is the reward
    2. roll out     many dialogues at once, in groups with one first line each
    3. update       advantages and clipped policy-gradient steps (ppo.py, grpo.py)
    4. sync         the new weights go to the engine that samples
    5. log          a line of metrics, every dialogue word for word, a checkpoint
    6. evaluate     held-out users, before and after

First come the dialogue and the rollout; then `Trainer`: its steps, and below them what it is made
of. Flags, torchrun, files and pictures are in support/, which a first reading may skip.
"""

import time

STARTED = time.perf_counter()  # before the imports: they take seconds, and a run counts them

from support import plan, report
from support.errors import BadInput, SimulatorFailed, TooManyLost, UnreadableAnswers, explain
from support.llm import CallLog, Clock
from support.ranks import (
    all_gather_list,
    all_reduce_sum,
    broadcast,
    check_world,
    gather_episodes,
    interrupt_at_once,
    join_ranks,
    leave_ranks,
    raise_pending_interrupt,
    rank,
    wait_for_all,
    world,
)
from support.rundir import (
    RunDir,
    checkpoints,
    model_of,
    new_state,
    open_run,
    profile_files,
    read_json,
    record_heldout,
    refuse_edited,
)
from support.settings import gpu_is_there, read_flags
from support.signs import MOST_UNREADABLE, batch_metrics, cut_replies, flat_groups, summarise
from support.users import INITIAL_EMOTION

import asyncio
import contextlib
import os
import sys

import torch
from tqdm import tqdm

import toy
from grpo import check_groups, grpo_update
from models import Models
from policy import Episode, split_batch
from ppo import ppo_update
from simulator import (
    User,
    profiles_of_step,
    says_goodbye,
    simulator_of_run,
    users_of_run,
    watched,
    watcher_of_run,
)

# ------------------------------------------------------------------------------------- the dialogue


async def converse(agent, user, user_line, max_turns, group=0, floor=0):
    """One dialogue: at most `max_turns` replies to `user`, who opened with `user_line`; every reply
    is scored. Returns its Episode, `ended` by the first of these:

        context                     no room for another reply; what is felt so far counts
        malformed                   logged as it was sampled, never sent; emotion and reward 0
        emotion_max, emotion_min    100, or `floor` or less: 0 in training, 9 in the benchmark,
                                    which stops below 10
        turn_limit                  the last reply is scored; nobody answers it
        goodbye                     the user took leave

    A turn is logged as {reply (what was sent), thought, user, analysis, change, mark (by which the
    analysis is read), emotion}, None where it did not come to that. Raises SimulatorFailed if the
    user's model gives out.
    """
    episode = Episode(user.profile.id, group, user_line, emotion=user.emotion, start=user.emotion)
    for turn in range(1, max_turns + 1):
        reply = await agent.reply(user_line)  # tokens in, tokens out; thoughts stay here
        if reply is None:
            episode.ended = "context"
            break
        record = {
            "reply": reply.visible,
            "thought": reply.thought,
            "user": None,
            "analysis": None,
            "change": None,
            "mark": None,
            "emotion": None,
        }
        episode.turns.append(record)
        if reply.malformed:  # RLVER 2.3: zero reward
            record["reply"], episode.ended, episode.emotion = reply.text, "malformed", 0
            break
        # f_emo: the emotion moves
        record["analysis"], record["change"], record["mark"] = await user.feel(reply.visible)
        record["emotion"] = episode.emotion = user.emotion
        if user.emotion >= 100 or user.emotion <= floor:
            episode.ended = "emotion_max" if user.emotion >= 100 else "emotion_min"
            break
        if turn == max_turns:  # nothing is bootstrapped: the reward is observed, whoever ends it
            episode.ended = "turn_limit"
            break
        # f_reply: only when the dialogue goes on
        record["user"] = user_line = await user.answer()
        if says_goodbye(user_line):
            episode.ended = "goodbye"
            break
    episode.segments = agent.segments
    episode.reward = episode.emotion / 100  # r = e_T / 100 (RLVER 2.1)
    return episode


async def rollout(
    simulator,
    people,
    group_size,
    make_agent,
    max_turns,
    bar=None,
    groups=None,
    name="",
    timeout=None,
    own_first_line=False,
):
    """Hold `group_size` dialogues with each of `people`, all at the same time. Returns (episodes,
    the dropped dialogues, each as `dropped` describes it).

    All users of a group open with the same first line, made once, and are separate from there on.
    make_agent(number): the policy's side of dialogue `number`. bar: a progress bar, moved on by one
    for each dialogue. groups: the number of each of `people` in the whole batch. name: of the
    rollout, in the log of calls. timeout: seconds after which a dialogue that is still open is
    dropped, as if its simulator had failed. own_first_line: open with the profile's own line, where
    it has one, as evaluations do; in training the user's model says it.
    """
    deadline = asyncio.get_running_loop().time() + timeout if timeout else None
    if bar is None:
        bar = tqdm(disable=True)

    async def run_dialogue(number, user, user_line, group):
        try:
            async with asyncio.timeout_at(deadline):
                episode = await converse(make_agent(number), user, user_line, max_turns, group)
        except (SimulatorFailed, TimeoutError) as error:
            return dropped(error, user)
        finally:
            bar.update()
        episode.number = number
        if episode.tokens_sampled:
            return episode
        return dropped(
            SimulatorFailed("the user's first line leaves no room in the context for a reply"), user
        )

    async def run_group(group, profile):
        user = User(simulator, profile, INITIAL_EMOTION["training"], f"{name} group {group}")
        try:
            async with asyncio.timeout_at(deadline):
                user_line = await (user.open() if own_first_line else user.answer())
        except (SimulatorFailed, TimeoutError) as error:
            bar.update(group_size)
            return [dropped(error, user) for _ in range(group_size)]
        numbers = range(group * group_size, (group + 1) * group_size)
        return await asyncio.gather(
            *[run_dialogue(n, user.copy(f"{name} {n}"), user_line, group) for n in numbers]
        )

    if groups is None:
        groups = range(len(people))
    finished = await asyncio.gather(*map(run_group, groups, people))
    dialogues = [dialogue for group in finished for dialogue in group]
    return (
        [d for d in dialogues if isinstance(d, Episode)],
        [d for d in dialogues if not isinstance(d, Episode)],
    )


def dropped(error, user):
    """What is kept of a dialogue that `error` ended: what was said until then. The last reply of
    the policy is part of it, because it may have made the user's model answer unreadably."""
    reason = "the rollout ran out of time" if isinstance(error, TimeoutError) else str(error)
    return {
        "profile_id": user.profile.id,
        "reason": reason,
        "unreadable": isinstance(error, UnreadableAnswers),
        "dialogue": user.dialogue,
    }


# ------------------------------------------------------------------------------- the steps of a run

LOGGED = ("profile_id", "group", "first_line", "turns", "ended", "reward")  # of an Episode
KINDS = ("training", "evaluation")  # of rollouts; the index is a part of each dialogue's seed


class Trainer:
    """A run: first its steps, then what it is made of. With many ranks each has its own dialogues,
    its own engine and a shard of the models; only rank 0 writes files."""

    def train(self):
        """The loop: evaluate, train and save, evaluate. Begins where `self.state` says."""
        cfg, state = self.cfg, self.state
        if state["step"] < 0:
            # 6. Evaluate, before.
            episodes, state["step"] = self.evaluate(0), 0
            self.save()
            self.tell(report.dialogue_text("before training", episodes[0]))
        elif self.evaluation_is_due() and state["evaluations"][-1]["step"] != state["step"]:
            self.evaluate(state["step"])  # the run was stopped between this step and its evaluation
        bar = tqdm(
            range(state["step"] + 1, cfg.steps + 1),
            initial=state["step"],
            total=cfg.steps,
            desc="training",
            unit="step",
            disable=not self.first,
        )
        for step in bar:
            metrics = self.train_step(step)
            raise_pending_interrupt()
            bar.set_postfix_str(report.progress(metrics))
            if self.evaluation_is_due():
                self.evaluate(step)
                self.tell(f"step {step}: held-out score {state['evaluations'][-1]['score']:.1f}")
            if step % cfg.save_every == 0 or step == cfg.steps:
                self.save()
        # 6. Evaluate, after.
        if state["step"]:
            self.tell(report.dialogue_text("after training", self.evaluate(state["step"])[0]))
        self.count_total()
        if self.first:
            report.finish(self.run.path, self.state, self.heldout, toy if cfg.toy else None)

    def train_step(self, step):
        """Steps 1 to 5, once. Returns the step's metrics."""
        cfg, began, waited = self.cfg, time.perf_counter(), self.clock.simulator

        # 1. Converse, and 2. roll out: whole groups, all dialogues at the same time.
        people = profiles_of_step(self.people, cfg.batch_size // cfg.group_size, cfg.seed, step)
        groups = dict(enumerate(people))
        title = None if cfg.toy else f"step {step}"
        episodes, lost = self.hold_dialogues(groups, cfg.group_size, "training", step, title)
        episodes, counts, wasted = self.refill(episodes, lost, step)
        episodes_of_all = gather_episodes(episodes)
        check_groups(episodes_of_all)
        rolled_out = time.perf_counter()

        # 3. Update: advantages, then clipped steps on the tokens that the policy sampled.
        update_metrics = self.update(episodes, step)

        # 4. Sync: the engine gets the new weights.
        self.models.sync()
        synced = time.perf_counter()

        # 5. Log: every dialogue, a line of metrics. (`train` saves the checkpoints.)
        self.count("rollout", rolled_out - began)
        self.count("simulator", self.clock.simulator - waited)
        self.count("update", synced - rolled_out)
        self.log_dialogues(step, "train", episodes_of_all)
        batch = batch_metrics(episodes_of_all, cfg.think)
        watched_emotion = self.watch(episodes, step)
        metrics = {
            "step": step,
            **batch,
            **counts,
            "cut": self.share_of_cut_replies(episodes),
            "reply_tokens": update_metrics["tokens_trained"] / batch["episodes"] / batch["turns"],
            **update_metrics,
            "kl_start": self.models.kl_start(self.start),
            "gap": self.gap_to_held_out(batch["emotion"]),
            "watched": watched_emotion,
            "tokens_sampled": wasted + sum_over_ranks(e.tokens_sampled for e in episodes),
            "seconds": synced - began,
        }
        self.state["tokens"]["sampled"] += metrics["tokens_sampled"]
        self.state["tokens"]["trained"] += metrics["tokens_trained"]
        self.state["step"] = step
        self.run.append("metrics.jsonl", metrics)
        self.run.log_numbers("train", metrics)
        self.warn_of_unreadable(metrics)
        return metrics

    def refill(self, episodes, lost, step):
        """Groups whose dialogues all earned the same teach GRPO nothing; --refill N gives their
        places to new users, up to N times (DAPO's dynamic sampling). episodes, lost: what
        `hold_dialogues` returned. Returns (this rank's episodes; over all ranks: `lost` with the
        number of groups "refilled"; over all ranks: tokens sampled in vain)."""
        cfg, wasted = self.cfg, 0
        counts = {**lost, "refilled": 0}
        for again in range(1, cfg.refill + 1):
            flat = flat_groups(gather_episodes(episodes))  # over all ranks, so all agree
            if not flat:
                break
            people = profiles_of_step(self.people, len(flat), f"{cfg.seed} {again}", step)
            new_episodes, newly_lost = self.hold_dialogues(
                dict(zip(flat, people)), cfg.group_size, "training", step, again=again
            )
            wasted += sum(e.tokens_sampled for e in episodes if e.group in flat)
            episodes = [e for e in episodes if e.group not in flat] + new_episodes
            counts["refilled"] += len(flat)
            for key, number in newly_lost.items():
                counts[key] += number
        return episodes, counts, sum_over_ranks([wasted])

    def evaluate(self, step):
        """Step 6. One dialogue with every held-out user. Returns the episodes; the scores are kept
        in the state."""
        began = time.perf_counter()
        groups = dict(enumerate(self.heldout))  # of one dialogue each
        title = f"evaluating, step {step}"
        episodes, lost = self.hold_dialogues(groups, 1, "evaluation", step, title)
        if step == 0:
            self.models.keep_start(episodes, self.start)
        episodes_of_all = gather_episodes(episodes)
        self.log_dialogues(step, "heldout", episodes_of_all)
        self.count("evaluate", time.perf_counter() - began)
        if lost["dropped"]:
            self.tell(
                f"evaluation at step {step}: {lost['dropped']} dialogues failed and do not count"
            )
        self.state["evaluations"].append({"step": step, **summarise(episodes_of_all), **lost})
        self.run.log_numbers("heldout", self.state["evaluations"][-1])
        return episodes_of_all

    def hold_dialogues(self, groups, group_size, kind, step, title=None, again=0):
        """Steps 1 and 2: this rank's share of the dialogues with `groups`, {number of the group:
        profile}. kind: "training" or "evaluation"; title: of a progress bar, or None; again: the
        round of `refill`, from 1. Returns (this rank's episodes; over all ranks, {"dropped":
        dialogues, "unreadable": those of them whose user's answers could not be read}).

        Every dialogue has an rng of its own, seeded by (seed, kind, step, its number in the whole
        batch): resumed or not, on however many ranks, the same is drawn. Raises TooManyLost."""
        self.models.engine.forget()
        own_groups = [g for g in groups if g % world() == rank()]  # a group never crosses ranks
        name = f"{kind} {step}" if not again else f"{kind} {step} again {again}"

        def make_agent(number):
            seed = [self.cfg.seed, KINDS.index(kind), step, number]
            if again:
                seed.append(again)
            return self.models.make_agent(seed)

        with tqdm(
            total=len(own_groups) * group_size,
            desc=title,
            unit="dialogue",
            leave=False,
            disable=not (title and self.first),
        ) as bar:
            dialogues = rollout(
                self.simulator,
                [groups[g] for g in own_groups],
                group_size,
                make_agent,
                self.cfg.max_turns,
                bar,
                groups=own_groups,
                name=name,
                timeout=self.cfg.rollout_timeout,
                own_first_line=kind == "evaluation",
            )
            episodes, lost_here = self.runner.run(dialogues)
        lost = [{"step": step, "kind": kind, **row} for row in all_gather_list(lost_here)]
        # a round of `refill` may be small: there a fifth of a whole batch is too many
        held = len(groups) * group_size
        self.log_lost(lost, held, most=max(held, self.cfg.batch_size if again else 0) / 5)
        return episodes, {"dropped": len(lost), "unreadable": sum(d["unreadable"] for d in lost)}

    def log_lost(self, lost, held, most):
        """Log the dialogues that were dropped, `lost` of `held`, in dropped.jsonl. Raises
        TooManyLost if they are more than `most`."""
        if len(lost) > most:
            # Saved before they are logged: the step will be done again, and they with it.
            self.save_what_is_done()
        for row in lost:
            self.run.append("dropped.jsonl", row)
        if len(lost) <= most:
            return
        reason, unreadable = lost[0]["reason"], sum(row["unreadable"] for row in lost)
        if 2 * unreadable > len(lost):
            raise TooManyLost(
                f"in {unreadable} of {held} dialogues nothing that the user's model "
                f"said could be read, or it refused the prompt: {reason}; "
                "what was said before stands in dropped.jsonl"
            )
        raise TooManyLost(f"the simulator failed in {len(lost)} of {held} dialogues: {reason}")

    def update(self, episodes, step):
        """Step 3. Returns the update's metrics."""
        cfg, m = self.cfg, self.models
        if m.device.type == "cuda":
            m.engine.sleep()  # the GPU's memory is the update's now
        minibatches = split_batch(
            episodes,
            cfg.batch_size,
            cfg.minibatches,
            cfg.tokens_per_gpu,
            f"{cfg.seed} {step}",
            m.pad,
            m.device,
            all_gather_list,
            cfg.reward,
        )
        warmup = min(1.0, step / max(1, cfg.warmup))  # the share of the learning rates in use
        m.optimizer.param_groups[0]["lr"] = cfg.lr * warmup
        if cfg.algo == "grpo":
            metrics = grpo_update(
                m.policy,
                m.optimizer,
                minibatches,
                kind=cfg.advantage,
                per_turn=cfg.reward == "delta",
                **self.loss_settings(),
            )
        else:
            m.critic_optimizer.param_groups[0]["lr"] = cfg.critic_lr * warmup
            metrics = ppo_update(
                m.policy,
                m.optimizer,
                m.critic,
                m.critic_optimizer,
                minibatches,
                gamma=cfg.gamma,
                lam=cfg.lam,
                value_clip=cfg.value_clip,
                frozen=step <= cfg.critic_warmup,
                **self.loss_settings(),
            )
        metrics["logp_gap_max"] = max(all_gather_list([metrics["logp_gap_max"]]))
        return metrics

    def loss_settings(self):
        """What grpo_update and ppo_update are both given."""
        cfg, m = self.cfg, self.models
        return dict(
            clip_eps=cfg.clip_eps,
            entropy_coef=cfg.entropy_coef,
            kl_coef=cfg.kl_coef,
            kl_estimator=cfg.kl_estimator,
            reference=m.reference,
            check_ratio=m.fresh,
            reduce=all_reduce_sum,
            ranks=world(),
            **m.limits,
        )

    # ----------------------------------------------------------------------------- further metrics

    def share_of_cut_replies(self, episodes):
        """The share of replies, over all ranks, that --max-tokens has cut."""
        counts = cut_replies(episodes, self.models.engine.stop_id)
        cut, replies = all_reduce_sum(torch.tensor(counts))
        return float(cut / max(1, replies))

    def gap_to_held_out(self, emotion):
        """How far the training users' `emotion` is above the held-out users' last score; None if
        there are no evaluations during training."""
        if not self.cfg.eval_every:
            return None
        return emotion - self.state["evaluations"][-1]["score"]

    def watch(self, episodes, step):
        """The mean final emotion of the second user, of --watch, who is told the same replies; None
        in a step in which nobody watches."""
        if not self.watcher or step % self.cfg.watch_every:
            return None
        return self.runner.run(watched(self.watcher, episodes, self.people, all_gather_list))

    # --------------------------------------------------------------------- what a run is made of

    def __init__(self, cfg, out, new=False):
        """cfg: Settings; out: the run's directory. Goes on from its newest checkpoint, if there is
        one and the run is not `new`. Raises BadInput or BadModel before anything is left behind."""
        check_world()
        self.cfg, self.first = cfg, rank() == 0
        self.run = RunDir(out, self.first, cfg.tensorboard)
        self.start = self.run.path / "start.json"  # a few dialogues of the starting policy
        self.clock, self.runner, self.state = Clock(), asyncio.Runner(), new_state()
        # counted by `warn_of_unreadable`, since the start or the resume
        self.dialogues, self.unreadable, self.warned = 0, 0, False
        self.make_users(new)
        checkpoint = self.enter_directory(new)
        # A Ctrl-C while the toy's policy is made must leave a run that can be resumed. For other
        # models config.json is written later: a bad --model must leave nothing behind.
        if cfg.toy and not checkpoint:
            self.run.write_config(cfg)
        self.models = Models(cfg, checkpoint, self.clock, self.runner)
        if checkpoint:
            self.state = read_json(checkpoint / "state.json")
        self.count("toy_policy", self.models.toy_seconds)
        self.seconds_before = self.state["seconds"]["total"]
        if cfg.steps < self.state["step"]:
            raise BadInput(f"--steps {cfg.steps}: this run has done {self.state['step']} already")
        self.open_logs()
        self.run.write_config(cfg)
        if self.first and not (self.run.path / "heldout.json").exists():
            record_heldout(self.run.path, cfg.profiles, [p.id for p in self.heldout])
        wait_for_all()
        self.run.path.mkdir(parents=True, exist_ok=True)  # on a node without the first one's files

    def make_users(self, new):
        """The user's model, the users to train on and those held out, and who watches."""
        cfg = self.cfg
        self.calls = CallLog(self.path_of_calls(), cfg.simulator_cache)
        self.simulator = simulator_of_run(cfg, self.calls, self.clock)
        files = cfg.profiles if new else profile_files(self.run.path, cfg.profiles)
        self.people, self.heldout = users_of_run(files, cfg.eval_size, cfg.simulator)
        self.watcher = None
        if cfg.watch:
            self.watcher = watcher_of_run(cfg, self.people, self.calls, self.clock)
        self.check_simulator(self.simulator)
        if self.watcher:
            self.check_simulator(self.watcher)

    def path_of_calls(self):
        """The file in which this rank logs its calls; None if no model is asked but the toy's."""
        models = [self.cfg.simulator, self.cfg.watch or "toy"]
        if all(model.startswith("toy") for model in models):
            return None
        return self.run.path / (f"calls-{rank()}.jsonl" if rank() else "calls.jsonl")

    def check_simulator(self, simulator):
        """Let the first rank ask the model once. Raises BadInput, on all ranks, if that fails."""
        broadcast(lambda: self.runner.run(simulator.check()))
        simulator.checked = True  # on all ranks

    def enter_directory(self, new):
        """Lock the run's directory, and empty it if the run is `new`. Returns the checkpoint to go
        on from, or None."""
        self.run.lock()
        if new:
            self.run.clear()
        checkpoint = self.run.agree_on_checkpoint(broadcast, all_gather_list)
        if checkpoint:
            refuse_edited(checkpoint, self.cfg)
        return checkpoint

    def open_logs(self):
        """Cut off what was logged after the checkpoint, because it will be done again. Calls that
        were made after it are not paid for again: their answers are read from the log."""
        self.run.cut_logs(self.state["log_bytes"])
        if self.calls.path is None:
            return
        for path in self.run.path.glob("calls*.jsonl"):
            self.calls.read(path, self.state["call_bytes"].get(path.name, 0))

    def count(self, kind, seconds):
        """Add to the run's seconds."""
        self.state["seconds"][kind] += seconds

    def evaluation_is_due(self):
        """Is there an evaluation after the step that is done? (The one after the last step is not
        meant; it is always made.)"""
        cfg, step = self.cfg, self.state["step"]
        return bool(cfg.eval_every) and 0 < step < cfg.steps and step % cfg.eval_every == 0

    def log_dialogues(self, step, split, episodes):
        """Step 5's dialogues, word for word, with all that led to each change of emotion."""
        for episode in episodes:
            row = {"step": step, "split": split, **{key: getattr(episode, key) for key in LOGGED}}
            self.run.append("dialogues.jsonl", row)

    def warn_of_unreadable(self, metrics):
        """Warn once if more than one dialogue in a hundred was dropped because the user's answers
        could not be read: a policy that learns to bring this about loses no reward by it."""
        self.dialogues += metrics["episodes"] + metrics["dropped"]
        self.unreadable += metrics["unreadable"]
        if self.unreadable > MOST_UNREADABLE * self.dialogues and not self.warned:
            self.warned = True
            self.tell(
                f"step {metrics['step']}: {self.unreadable} of {self.dialogues} dialogues were "
                "dropped because the user's answers could not be read, or the prompt was "
                "refused; dropped.jsonl has what was said before (docs/marks.md)"
            )

    def tell(self, text):
        """Print a line above the progress bar."""
        if self.first:
            tqdm.write(text)

    def save_what_is_done(self):
        """Save a checkpoint of the last whole step, if there is none yet."""
        done = self.state["step"]
        newest = checkpoints(self.run.path)[-1:]
        if done >= 0 and broadcast(lambda: newest != [self.run.path / f"checkpoint-{done:06d}"]):
            self.save()

    def count_total(self):
        """The run's seconds so far, those before it was resumed among them."""
        self.state["seconds"]["total"] = self.seconds_before + time.perf_counter() - STARTED

    def save(self):
        """Step 5's checkpoint. All ranks gather, the first one writes."""
        self.count_total()
        log, sizes = self.calls.path, []
        if log and log.exists():
            sizes = [(log.name, log.stat().st_size)]
        self.state["call_bytes"].update(all_gather_list(sizes))
        write = self.models.gather()
        if self.first:
            self.run.save_checkpoint(self.state, write, self.cfg)
            report.draw_while_running(self.run.path, self.state, self.heldout)

    def close(self):
        """Release the lock, and cancel the dialogues that are still open. asyncio would print ten
        lines about each of them; they are cancelled quietly."""
        self.run.close()
        self.runner.get_loop().set_exception_handler(lambda loop, context: None)
        with contextlib.suppress(KeyboardInterrupt):  # a cancelled dialogue raises it once more
            self.runner.close()


def sum_over_ranks(numbers):
    """The sum of the whole `numbers` of all ranks."""
    return int(all_reduce_sum(torch.tensor(sum(numbers))))


# --------------------------------------------------------------------------------------------- main


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    rank_here = int(os.environ.get("RANK", 0))  # rank() knows it only after join_ranks()
    given = read_flags(argv, quiet=rank_here > 0)
    usual_handler = interrupt_at_once()
    trainer, out, code, message = None, None, 0, ""
    try:
        if given["plan"]:
            print(plan.report(open_run(given)[0], given))
            return 0
        join_ranks(cuda=gpu_is_there() and model_of(given) != "toy")
        cfg, out, finished = broadcast(lambda: open_run(given))
        if finished:
            if rank_here == 0:
                report.print_finished(out)
            return 0
        trainer = Trainer(cfg, out, new=given["resume"] is None)
        if trainer.first:
            report.print_settings(cfg, out, len(trainer.people), len(trainer.heldout), world())
            if trainer.calls.path:
                print(plan.calls_of(cfg, given["price"]))
        trainer.train()
    except (Exception, KeyboardInterrupt) as error:
        code, message = explain(error, out, rank_here, world())
    finally:
        interrupt_at_once(usual_handler)
        if trainer:
            trainer.close()
    if message:
        print(message, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    code = main()
    leave_ranks(code)
    sys.exit(code)
