"""rlver.py - train a model to comfort people: RLVER's Figure 1, from top to bottom.

    python rlver.py --algo grpo --think             the embedded world: minutes on a laptop
    python rlver.py --algo ppo                      PPO, speaking without thinking

    1. converse     the policy replies, the user's emotion moves; at the end it is the reward
    2. roll out     many dialogues at once, in groups with one first line each
    3. update       advantages and clipped policy-gradient steps (ppo.py, grpo.py)
    4. sync         the new weights go to the engine that samples
    5. log          a line of metrics, every dialogue word for word, a checkpoint
    6. evaluate     held-out users, before and after

First the dialogue and the rollout; then `Trainer`, its steps above what it is made of. Flags,
torchrun, files and pictures are in support/, which a first reading may skip.
"""

import time

STARTED = time.perf_counter()  # before the imports: they take seconds, and a run counts them

from support import plan, report
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
    raise_lost_interrupt,
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
from support.settings import (
    BadInput,
    SimulatorFailed,
    TooManyLost,
    UnreadableAnswers,
    explain,
    gpu_is_there,
    read_flags,
)
from support.signs import batch_metrics, cut_replies, flat_groups, summarise
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
    bar=tqdm(disable=True),
    groups=None,
    name="",
    timeout=None,
    own_first_line=False,
):
    """Hold `group_size` dialogues with each of `people`, all at the same time. Returns (episodes,
    the dropped dialogues, as `dropped` has them).

    All users of a group open with the same first line, made once, and are separate from there on.
    make_agent(number): the policy's side of dialogue `number`. groups: the number of each of
    `people` in the whole batch. name: of the rollout, in the log of calls. timeout: seconds after
    which a dialogue that is still open is given up, as if its simulator had failed. own_first_line:
    open with the profile's own, where it has one, as evaluations do; in training a model says it.
    """
    deadline = asyncio.get_running_loop().time() + timeout if timeout else None

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
        return await asyncio.gather(
            *[
                run_dialogue(number, user.copy(f"{name} {number}"), user_line, group)
                for number in range(group * group_size, (group + 1) * group_size)
            ]
        )

    ended = await asyncio.gather(*map(run_group, groups or range(len(people)), people))
    dialogues = [dialogue for group in ended for dialogue in group]
    return (
        [d for d in dialogues if isinstance(d, Episode)],
        [d for d in dialogues if not isinstance(d, Episode)],
    )


def dropped(error, user):
    """What is kept of a dialogue that `error` ended: what was said until then, the last reply of
    the policy among it. It may be that reply that made the user's model say nothing readable."""
    reason = "the rollout ran out of time" if isinstance(error, TimeoutError) else str(error)
    return {
        "profile_id": user.profile.id,
        "reason": reason,
        "unreadable": isinstance(error, UnreadableAnswers),
        "dialogue": user.dialogue,
    }


# ------------------------------------------------------------------------------- the steps of a run

LOGGED = ("profile_id", "group", "first_line", "turns", "ended", "reward")  # of an Episode


class Trainer:
    """A run: its steps, and below them what it is made of. With many ranks each has its own
    dialogues, its own engine and a shard of the models; what is written, rank 0 writes."""

    def train(self):
        """The loop: evaluate, train and save, evaluate. Goes on where `self.state` says."""
        cfg, state = self.cfg, self.state
        if state["step"] < 0:
            # 6. Evaluate, before.
            episodes, state["step"] = self.evaluate(0), 0
            self.save()
            self.tell(report.dialogue_text("before training", episodes[0]))
        elif self.evaluation_is_due() and state["evaluations"][-1]["step"] != state["step"]:
            self.evaluate(state["step"])  # what the run did not get to before it was stopped
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
            raise_lost_interrupt()
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
        return (
            report.finish(self.run.path, self.state, self.heldout, toy if cfg.toy else None)
            if self.first
            else None
        )

    def train_step(self, step):
        """Steps 1 to 5, once. Returns the step's metrics."""
        cfg, began, waited = self.cfg, time.perf_counter(), self.clock.simulator

        # 1. Converse, and 2. roll out: whole groups, all dialogues at the same time.
        people = profiles_of_step(self.people, cfg.batch_size // cfg.group_size, cfg.seed, step)
        own, lost = self.hold_dialogues(
            dict(enumerate(people)),
            cfg.group_size,
            "training",
            step,
            None if cfg.toy else f"step {step}",
        )
        own, lost, refilled, wasted = self.refill(own, lost, step)
        episodes = gather_episodes(own)
        check_groups(episodes)
        rolled_out = time.perf_counter()

        # 3. Update: advantages, then clipped steps on the tokens that the policy sampled.
        update_metrics = self.update(own, step)

        # 4. Sync: the engine gets the new weights.
        self.models.sync()
        done = time.perf_counter()

        # 5. Log: every dialogue, a line of metrics. (The loop below saves checkpoints.)
        sampled = wasted + int(all_reduce_sum(torch.tensor(sum(e.tokens_sampled for e in own))))
        self.count(
            "rollout",
            rolled_out - began,
            simulator=self.clock.simulator - waited,
            update=done - rolled_out,
        )
        self.state["tokens"]["sampled"] += sampled
        self.state["tokens"]["trained"] += update_metrics["tokens_trained"]
        self.state["step"] = step
        self.log_dialogues(step, "train", episodes)
        batch = batch_metrics(episodes, cfg.think)
        cut, replies = all_reduce_sum(torch.tensor(cut_replies(own, self.models.engine.stop_id)))
        metrics = {
            "step": step,
            **batch,
            **lost,
            "refilled": refilled,
            "cut": float(cut / max(1, replies)),
            "reply_tokens": update_metrics["tokens_trained"] / len(episodes) / batch["turns"],
            **update_metrics,
            "kl_start": self.models.kl_start(self.start),
            # training users above held-out ones, where there are evaluations on the way
            "gap": (
                batch["emotion"] - self.state["evaluations"][-1]["score"]
                if cfg.eval_every
                else None
            ),
            # a second user's opinion of the same replies
            "watched": None
            if not self.watcher or step % cfg.watch_every
            else self.runner.run(watched(self.watcher, own, self.people, all_gather_list)),
            "tokens_sampled": sampled,
            "seconds": done - began,
        }
        self.run.append("metrics.jsonl", metrics)
        self.run.log_numbers("train", metrics)
        self.warn_of_unreadable(len(episodes), metrics)
        return metrics

    def refill(self, own, lost, step):
        """Groups whose dialogues all earned the same teach GRPO nothing; --refill N gives their
        places to new users, up to N times (DAPO's dynamic sampling). Returns (this rank's episodes;
        over all ranks: what was lost, groups replaced, tokens sampled in vain)."""
        cfg, refilled, wasted = self.cfg, 0, 0
        for again in range(1, cfg.refill + 1):
            flat = flat_groups(gather_episodes(own))  # of all ranks, so all agree
            if not flat:
                break
            people = profiles_of_step(self.people, len(flat), f"{cfg.seed} {again}", step)
            new, lost_again = self.hold_dialogues(
                dict(zip(flat, people)), cfg.group_size, "training", step, again=again
            )
            wasted += sum(e.tokens_sampled for e in own if e.group in flat)
            own = [e for e in own if e.group not in flat] + new
            refilled += len(flat)
            lost = {key: lost[key] + lost_again[key] for key in lost}
        return own, lost, refilled, int(all_reduce_sum(torch.tensor(wasted)))

    def evaluate(self, step):
        """Step 6. One dialogue with every held-out user. Returns the episodes; the scores are kept
        in the state."""
        began = time.perf_counter()
        own, lost = self.hold_dialogues(
            dict(enumerate(self.heldout)), 1, "evaluation", step, f"evaluating, step {step}"
        )
        if step == 0:
            self.models.keep_start(own, self.start)
        episodes = gather_episodes(own)
        self.log_dialogues(step, "heldout", episodes)
        self.count("evaluate", time.perf_counter() - began)
        if lost["dropped"]:
            self.tell(
                f"evaluation at step {step}: {lost['dropped']} dialogues failed and do not count"
            )
        self.state["evaluations"].append({"step": step, **summarise(episodes), **lost})
        self.run.log_numbers("heldout", self.state["evaluations"][-1])
        return episodes

    def hold_dialogues(self, people, group_size, kind, step, title=None, again=0):
        """Steps 1 and 2 for this rank's share of `people`, {number of the group: profile}. Returns
        (its episodes; over all ranks, {"dropped": dialogues, "unreadable": those of them whose
        user's answers could not be read}).

        Every dialogue has an rng of its own, seeded by (seed, kind, step, its number in the whole
        batch): resumed or not, on however many ranks, the same is drawn. Raises TooManyLost."""
        cfg = self.cfg
        self.models.engine.forget()
        own = [g for g in people if g % world() == rank()]  # whole groups, so each rank has its
        stream = [cfg.seed, ["training", "evaluation"].index(kind), step]
        with tqdm(
            total=len(own) * group_size,
            desc=title,
            unit="dialogue",
            leave=False,
            disable=not (title and self.first),
        ) as bar:
            episodes, lost_here = self.runner.run(
                rollout(
                    self.simulator,
                    [people[g] for g in own],
                    group_size,
                    lambda n: self.models.make_agent([*stream, n, *[again] * (again > 0)]),
                    cfg.max_turns,
                    bar,
                    own,
                    f"{kind} {step}" + f" again {again}" * (again > 0),
                    cfg.rollout_timeout,
                    own_first_line=kind == "evaluation",
                )
            )
        rows = [{"step": step, "kind": kind, **row} for row in all_gather_list(lost_here)]
        tried = len(people) * group_size
        too_many = len(rows) * 5 > max(tried, cfg.batch_size * (again > 0))
        if too_many:  # before the rows are logged: the step, and they, will be done again
            self.save_what_is_done()
        for row in rows:
            self.run.append("dropped.jsonl", row)
        unreadable = sum(row["unreadable"] for row in rows)
        if too_many and 2 * unreadable > len(rows):
            raise TooManyLost(
                f"in {unreadable} of {tried} dialogues nothing that the user's model "
                f"said could be read, or it refused the prompt: {rows[0]['reason']}; "
                "what was said before stands in dropped.jsonl"
            )
        if too_many:
            raise TooManyLost(
                f"the simulator failed in {len(rows)} of {tried} dialogues: {rows[0]['reason']}"
            )
        return episodes, {"dropped": len(rows), "unreadable": unreadable}

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
        warm = min(1.0, step / max(1, cfg.warmup))
        m.optimizer.param_groups[0]["lr"] = cfg.lr * warm
        shared = dict(
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
        if cfg.algo == "grpo":
            metrics = grpo_update(
                m.policy,
                m.optimizer,
                minibatches,
                kind=cfg.advantage,
                per_turn=cfg.reward == "delta",
                **shared,
            )
        else:
            m.critic_optimizer.param_groups[0]["lr"] = cfg.critic_lr * warm
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
                **shared,
            )
        metrics["logp_gap_max"] = max(all_gather_list([metrics["logp_gap_max"]]))
        return metrics

    # --------------------------------------------------------------------- what a run is made of

    def __init__(self, cfg, out, new=False):
        """cfg: Settings; out: the run's directory. Goes on from its newest checkpoint, if there is
        one and the run is not `new`. Raises BadInput or BadModel before anything is left behind."""
        check_world()
        self.cfg, self.first = cfg, rank() == 0
        self.run = RunDir(out, self.first, cfg.tensorboard)
        self.start = self.run.path / "start.json"  # a few dialogues of the starting policy
        self.tried, self.unreadable, self.warned = 0, 0, False  # `warn_of_unreadable`
        self.clock, self.runner, self.state = Clock(), asyncio.Runner(), new_state()
        server = any(name and not name.startswith("toy") for name in (cfg.simulator, cfg.watch))
        name = f"calls-{rank()}.jsonl" if rank() else "calls.jsonl"
        self.calls = CallLog(self.run.path / name if server else None, cfg.simulator_cache)
        self.simulator = simulator_of_run(cfg, self.calls, self.clock)
        files = cfg.profiles if new else profile_files(self.run.path, cfg.profiles)
        self.people, self.heldout = users_of_run(files, cfg.eval_size, cfg.simulator)
        self.watcher = cfg.watch and watcher_of_run(cfg, self.people, self.calls, self.clock)
        for name, user in ((cfg.simulator, self.simulator), (cfg.watch, self.watcher)):
            if name:
                broadcast(lambda: self.runner.run(user.check()))
                user.checked = True  # on all ranks
        self.run.lock()
        if new:
            self.run.clear()
        checkpoint = self.run.agree_on_checkpoint(broadcast, all_gather_list)
        if checkpoint:
            refuse_edited(checkpoint, cfg)
        # A bad --model must leave nothing behind; a Ctrl-C while the toy's policy is made must
        # leave a run that can be resumed.
        if cfg.toy and not checkpoint:
            self.run.write_config(cfg)
        self.models = Models(cfg, checkpoint, self.clock, self.runner)
        if checkpoint:
            self.state = read_json(checkpoint / "state.json")
        self.count("toy_policy", self.models.toy_seconds)
        self.seconds_before = self.state["seconds"]["total"]
        if cfg.steps < self.state["step"]:
            raise BadInput(f"--steps {cfg.steps}: this run has done {self.state['step']} already")
        self.run.cut_logs(self.state["log_bytes"])  # logged after the checkpoint: done again ...
        for path in self.run.path.glob("calls*.jsonl") if server else ():  # ... but not paid again
            self.calls.read(path, self.state["call_bytes"].get(path.name, 0))
        self.run.write_config(cfg)
        if self.first and not (self.run.path / "heldout.json").exists():
            record_heldout(self.run.path, cfg.profiles, [p.id for p in self.heldout])
        wait_for_all()
        self.run.path.mkdir(parents=True, exist_ok=True)  # on a node without the first one's files

    def count(self, kind, seconds, **more):
        """Add to the run's seconds."""
        for key, value in {kind: seconds, **more}.items():
            self.state["seconds"][key] += value

    def evaluation_is_due(self):
        """On the way, after the step that is done. (The one after the last step is always made.)"""
        cfg, step = self.cfg, self.state["step"]
        return bool(cfg.eval_every) and 0 < step < cfg.steps and step % cfg.eval_every == 0

    def log_dialogues(self, step, split, episodes):
        """Step 5's dialogues, word for word, with all that led to each change of emotion."""
        for e in episodes:
            self.run.append(
                "dialogues.jsonl",
                {"step": step, "split": split, **{key: getattr(e, key) for key in LOGGED}},
            )

    def warn_of_unreadable(self, held, metrics):
        """Say once if more than one dialogue in a hundred was dropped because nothing that its user
        said could be read: a policy that learns to bring this about loses no reward by it."""
        self.tried += held + metrics["dropped"]
        self.unreadable += metrics["unreadable"]
        if self.unreadable > 0.01 * self.tried and not self.warned:
            self.warned = True
            self.tell(
                f"step {metrics['step']}: {self.unreadable} of {self.tried} dialogues were "
                "dropped because the user's answers could not be read, or the prompt was "
                "refused; dropped.jsonl has what was said before (docs/marks.md)"
            )

    def tell(self, text):
        """A line above the progress bar."""
        if self.first:
            tqdm.write(text)

    def save_what_is_done(self):
        """A checkpoint of the last whole step, if there is none yet."""
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
        self.state["call_bytes"].update(
            all_gather_list(
                [(p.name, p.stat().st_size) for p in [self.calls.path] if p and p.exists()]
            )
        )
        write = self.models.gather()
        if self.first:
            self.run.save_checkpoint(self.state, write, self.cfg)
            report.draw_while_running(self.run.path, self.state, self.heldout)

    def close(self):
        """Give the directory free, and end the dialogues that are still open: silently, each would
        tell of its end in ten lines."""
        self.run.close()
        self.runner.get_loop().set_exception_handler(lambda loop, context: None)
        with contextlib.suppress(KeyboardInterrupt):  # an interrupted dialogue tells it once more
            self.runner.close()


# --------------------------------------------------------------------------------------------- main


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    number = int(os.environ.get("RANK", 0))  # of this process, before the ranks have met
    given, trainer, out = read_flags(argv, quiet=number > 0), None, None
    usual, code, words = interrupt_at_once(), 0, ""
    try:
        if given["plan"]:
            print(plan.report(open_run(given)[0], given))
            return 0
        join_ranks(cuda=gpu_is_there() and model_of(given) != "toy")
        cfg, out, finished = broadcast(lambda: open_run(given))
        if finished:
            if number == 0:
                report.print_finished(out)
            return 0
        trainer = Trainer(cfg, out, new=given["resume"] is None)
        if trainer.first:
            report.print_settings(cfg, out, len(trainer.people), len(trainer.heldout), world())
            if trainer.calls.path:
                print(plan.calls_of(cfg, given["price"]))
        trainer.train()
    except (Exception, KeyboardInterrupt) as error:
        code, words = explain(error, out, number, world())
    finally:
        interrupt_at_once(usual)
        if trainer:
            trainer.close()
    if words:
        print(words, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    code = main()
    leave_ranks(code)
    sys.exit(code)
