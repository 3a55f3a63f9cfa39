"""rlver.py - train a model to comfort people: RLVER's Figure 1, from top to bottom.

    python rlver.py --steps 10 --eval-size 32       a demonstration of 20 seconds
    python rlver.py --algo grpo --think             the toy, thinking: one to two minutes
    python rlver.py --algo ppo                      PPO, speaking without thinking

    1. converse     the policy replies, the user's emotion moves; at the end it is the reward
    2. roll out     many dialogues at once; a group is one user and one first line
    3. update       advantages and clipped policy-gradient steps (ppo.py, grpo.py)
    4. sync         the new weights go to the engine that samples
    5. log          a line of metrics, every dialogue word for word, a checkpoint
    6. evaluate     held-out users, before and after

First come the dialogue and the rollout; then `Trainer`: its steps, what they call, and last how a
run is set up and closed. Flags, torchrun, files and pictures are in support/, which a first reading
may skip.
"""

from support import (
    STARTED,
    errors,
    llm,
    ranks,
    rundir,
    settings,
    signs,
    terminal,
)
from support.files import read_json
from support.loading import refuse_missing, return_freed_memory
from support.metrics import batch_metrics, cut_replies, summarise
from support.users import INITIAL_EMOTION

import asyncio
import contextlib
import os
import sys
import time

import torch
from tqdm import tqdm

from grpo import check_groups, grpo_update
from models import Models
from policy import Episode, split_batch
from ppo import all_micro_batches, log_probs_of, ppo_update
from simulator import (
    User,
    hidden_need,
    profiles_of_step,
    says_goodbye,
    simulator_of_run,
    users_of_run,
)

ROLLOUT_TIMEOUT = 3600  # seconds until a dialogue that has not ended is dropped

# ------------------------------------------------------------------------------------- the dialogue

TURN_FIELDS = ("reply", "thought", "user", "analysis", "change", "mark", "emotion")  # as logged


async def converse(agent, user, user_line, max_turns, group=0, floor=0):
    """One dialogue: at most `max_turns` replies to `user`, who opened with `user_line`; every reply
    is scored. Returns its Episode, `ended` by the first of these:

        context         no room for another reply; what is felt so far counts
        malformed       logged as it was sampled, never sent; emotion and reward 0
        emotion_max     the emotion reached 100
        emotion_min     the emotion fell to `floor` or below: 0 in training, 9 in the benchmark,
                        which stops below 10
        turn_limit      the last reply is scored; nobody answers it
        goodbye         the user took leave

    A turn is logged as a dict of TURN_FIELDS, None where it did not come to that. reply: what was
    sent; user: the answer to it; mark: the four letters behind the headers of the analysis.
    Raises SimulatorFailed if the user's model gives out.
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
        record["analysis"], record["change"], record["mark"] = await user.feel(reply.visible)
        record["emotion"] = user.emotion
        episode.emotion = user.emotion
        if user.emotion >= 100 or user.emotion <= floor:
            episode.ended = "emotion_max" if user.emotion >= 100 else "emotion_min"
            break
        if turn == max_turns:  # nothing is bootstrapped: the reward is observed, whoever ends it
            episode.ended = "turn_limit"
            break
        # f_reply: only when the dialogue goes on
        user_line = await user.answer()
        record["user"] = user_line
        if says_goodbye(user_line):
            episode.ended = "goodbye"
            break
    episode.segments = agent.segments
    episode.reward = episode.emotion / 100  # r = e_T / 100 (RLVER 2.1)
    return episode


# -------------------------------------------------------------------------------------- the rollout


async def rollout(
    simulator,
    people,  # {group number in the whole batch: Profile}
    group_size,
    make_agent,  # make_agent(number) is the policy's side of dialogue `number`
    max_turns,
    bar=None,  # a progress bar, moved on by one for each dialogue
    name="",  # of the rollout, in the log of calls
    timeout=None,  # seconds until an open dialogue is dropped, as if its simulator had failed
    own_first_line=False,  # evaluations open with the line of a profile that has one
):
    """Hold `group_size` dialogues with each of `people`, all at the same time. Returns (episodes,
    lost): `lost` has a row for each dialogue that was dropped, made by `row_of_dropped`.

    All users of a group open with the same first line, made once, and are separate from there on.
    """
    deadline = asyncio.get_running_loop().time() + timeout if timeout else None
    if bar is None:
        bar = tqdm(disable=True)

    async def run_dialogue(number, user, user_line, group):
        try:
            async with asyncio.timeout_at(deadline):
                episode = await converse(make_agent(number), user, user_line, max_turns, group)
        except (errors.SimulatorFailed, TimeoutError) as error:
            return row_of_dropped(error, user)
        finally:
            bar.update()
        if not episode.tokens_sampled:
            reason = "the user's first line leaves no room in the context for a reply"
            return row_of_dropped(errors.SimulatorFailed(reason), user)
        episode.number = number
        return episode

    async def run_group(group, profile):
        user = User(simulator, profile, INITIAL_EMOTION["training"], f"{name} group {group}")
        try:
            async with asyncio.timeout_at(deadline):
                # In training the user's model makes the first line (`answer`). In evaluations it is
                # the profile's own, if it has one (`open`).
                user_line = await (user.open() if own_first_line else user.answer())
        except (errors.SimulatorFailed, TimeoutError) as error:
            bar.update(group_size)
            return [row_of_dropped(error, user) for _ in range(group_size)]
        numbers = range(group * group_size, (group + 1) * group_size)  # in the whole batch
        return await asyncio.gather(
            *[run_dialogue(n, user.copy(f"{name} {n}"), user_line, group) for n in numbers]
        )

    results = await asyncio.gather(*[run_group(n, profile) for n, profile in people.items()])
    return by_outcome(results)


def by_outcome(results):
    """(episodes, lost) of a rollout. results: for each group, a list of what `run_dialogue`
    returned, each an Episode or a row."""
    episodes, lost = [], []
    for dialogues in results:
        for dialogue in dialogues:
            if isinstance(dialogue, Episode):
                episodes.append(dialogue)
            else:
                lost.append(dialogue)
    return episodes, lost


def row_of_dropped(error, user):
    """What dropped.jsonl keeps of a dialogue that `error` ended: what was said until then. The last
    reply of the policy is part of it: it may have made the user's model answer unreadably."""
    reason = "the rollout ran out of time" if isinstance(error, TimeoutError) else str(error)
    return {
        "profile_id": user.profile.id,
        "reason": reason,
        "unreadable": isinstance(error, errors.UnreadableAnswers),
        "dialogue": user.dialogue,
    }


# ------------------------------------------------------------------------------- the steps of a run

LOGGED = ("profile_id", "group", "first_line", "turns", "ended", "reward")  # of an Episode
KINDS = ("training", "evaluation")  # of rollouts; the index is a part of each dialogue's seed


class Trainer:
    """A run. With many ranks each has its own dialogues, its own engine and a shard of the models;
    only rank 0 writes files, but each has its log of calls. The attributes are set in `__init__`,
    below the steps. The main ones:

        cfg                 the Settings
        first               is this rank 0, the one that writes and prints?
        run                 the RunDir: the run's directory and its logs
        state               what a checkpoint keeps of the run: step, seconds, tokens, evaluations
        models              the policy, its engine, critic, reference and optimizers
        simulator           the model behind the users
        training_profiles   the users to train on
        heldout             the users to evaluate with
        runner              the asyncio.Runner in which all dialogues are held
        clock, calls        seconds in which only the simulator is at work; the log of its calls
        start_file          holds a few dialogues of the starting policy, to measure the KL from it
    """

    def train(self):
        """The loop: evaluate, train and save, evaluate. Begins where `self.state` says."""
        cfg, state = self.cfg, self.state
        if state["step"] < 0:  # -1: a new run, which has not even been evaluated
            # 6. Evaluate, before.
            episodes = self.evaluate(0)
            self.warn_of_malformed(state["evaluations"][-1]["malformed"])
            state["step"] = 0
            self.save()
            self.show_dialogue("before training", episodes)
        elif self.evaluation_was_missed():
            self.evaluate(state["step"])

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
            bar.set_postfix_str(terminal.progress(metrics))
            if self.evaluation_is_due():
                self.evaluate(step)
                self.tell(terminal.score_text(step, state["evaluations"][-1]["score"], vars(cfg)))
            if step % cfg.save_every == 0 or step == cfg.steps:
                self.save()

        # 6. Evaluate, after. (With --steps 0 the one evaluation was made above.)
        if state["step"] > 0:
            episodes = self.evaluate(state["step"])
            self.show_dialogue("after training", episodes)
        self.set_total_seconds()
        if self.first:
            from tools.report import draw

            summary = rundir.write_summary(self.run.path, self.state)
            draw(self.run.path)
            terminal.print_summary(summary, self.run.path)

    def train_step(self, step):
        """Steps 1 to 5, once. Returns the step's metrics."""
        cfg = self.cfg
        began = time.perf_counter()
        simulator_seconds_before = self.clock.simulator

        # 1. Converse, and 2. roll out: whole groups, all dialogues at the same time.
        n_groups = cfg.batch_size // cfg.group_size
        profiles = profiles_of_step(self.training_profiles, n_groups, cfg.seed, step)
        people = dict(enumerate(profiles))
        title = None if cfg.toy else f"step {step}"  # the toy's are over too soon for a bar
        episodes, counts = self.hold_dialogues(people, cfg.group_size, "training", step, title)
        episodes_of_all = ranks.gather_episodes(episodes)
        check_groups(episodes_of_all)
        rolled_out = time.perf_counter()

        # 3. Update: advantages, then clipped steps on the tokens that the policy sampled.
        update_metrics = self.update(episodes, step)

        # 4. Sync: the engine gets the new weights.
        self.models.sync()
        synced = time.perf_counter()

        # 5. Log: every dialogue, a line of metrics. (`train` saves the checkpoints.)
        self.add_seconds("rollout", rolled_out - began)
        self.add_seconds("simulator", self.clock.simulator - simulator_seconds_before)
        self.add_seconds("update", synced - rolled_out)
        self.log_dialogues(step, "train", episodes_of_all)
        metrics = self.metrics_of_step(step, episodes, episodes_of_all, counts, update_metrics)
        metrics["seconds"] = synced - began
        self.state["step"] = step
        self.log_metrics(metrics)
        return metrics

    def hold_dialogues(self, people, group_size, kind, step, title=None):
        """Steps 1 and 2: this rank's share of the dialogues with `people`, {group number: Profile}.

        kind: "training" or "evaluation". title: of a progress bar, or None. Returns (this rank's
        episodes, counts): over all ranks, {"dropped": number of dialogues, "unreadable": of those
        whose user's answers could not be read}. Raises TooManyLost.

        Every dialogue has an rng of its own, seeded by (seed, kind, step, its number in the whole
        batch): resumed or not, on however many ranks, the same is drawn.
        """
        self.models.engine.forget()
        self.make_room()
        # A group never crosses ranks.
        people_here = {n: p for n, p in people.items() if n % ranks.world() == ranks.rank()}

        def make_agent(number):
            return self.models.make_agent([self.cfg.seed, KINDS.index(kind), step, number])

        with self.dialogue_bar(title, len(people_here) * group_size) as bar:
            dialogues = rollout(
                self.simulator,
                people_here,
                group_size,
                make_agent,
                self.cfg.max_turns,
                bar,
                name=f"{kind} {step}",
                timeout=ROLLOUT_TIMEOUT,
                own_first_line=kind == "evaluation",
            )
            episodes, lost_here = self.runner.run(dialogues)
        lost = [{"step": step, "kind": kind, **row} for row in ranks.all_gather_list(lost_here)]
        self.log_or_give_up(lost, len(people) * group_size)
        unreadable = sum(row["unreadable"] for row in lost)
        return episodes, {"dropped": len(lost), "unreadable": unreadable}

    def update(self, episodes, step):
        """Step 3. Returns the update's metrics."""
        cfg, m = self.cfg, self.models
        m.engine.sleep()  # the memory of its cache is the update's now
        self.make_room()
        minibatches = split_batch(
            episodes,
            batch_size=cfg.batch_size,
            n_minibatches=cfg.minibatches,
            max_tokens=cfg.tokens_per_gpu,
            seed=f"{cfg.seed} {step}",
            pad_id=m.pad,
            device=m.device,
            all_gather_list=ranks.all_gather_list,
            reward=cfg.reward,
        )
        # Both learning rates rise from 0 to their full value in the first `warmup` steps.
        lr_share = min(1.0, step / max(1, cfg.warmup))
        m.optimizer.param_groups[0]["lr"] = cfg.lr * lr_share
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
            m.critic_optimizer.param_groups[0]["lr"] = cfg.critic_lr * lr_share
            metrics = ppo_update(
                m.policy,
                m.optimizer,
                m.critic,
                m.critic_optimizer,
                minibatches,
                gamma=cfg.gamma,
                lam=cfg.lam,
                value_clip=cfg.value_clip,
                **self.loss_settings(),
            )
        metrics["logp_gap_max"] = max(ranks.all_gather_list([metrics["logp_gap_max"]]))
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
            # `fresh`: nothing has been trained since the start or the resume. Then log pi_old has
            # a forward pass of its own, so that the check of the first ratio can fail.
            check_ratio=m.fresh,
            ratio_limit=m.limits["ratio_limit"],  # how far the first ratio may be from 1
            gap_limits=m.limits["gap_limits"],  # between the engine's log-probs and the trainer's
            reduce=ranks.all_reduce_sum,
            ranks=ranks.world(),
        )

    def evaluate(self, step):
        """Step 6. One dialogue with every held-out user. Returns the episodes; the scores are kept
        in the state."""
        began = time.perf_counter()
        people = dict(enumerate(self.heldout))  # groups of one dialogue each
        title = f"evaluating, step {step}"
        episodes, counts = self.hold_dialogues(people, 1, "evaluation", step, title)
        if step == 0:
            self.models.keep_start(episodes, self.start_file)
        episodes_of_all = ranks.gather_episodes(episodes)
        self.log_dialogues(step, "heldout", episodes_of_all)
        perplexity = self.ref_perplexity(episodes)
        self.add_seconds("evaluate", time.perf_counter() - began)
        n_dropped = counts["dropped"]
        if n_dropped:
            self.tell(f"evaluation at step {step}: {n_dropped} dialogues failed and do not count")
        scores = {"step": step, **summarise(episodes_of_all), **counts}
        scores["ref_perplexity"] = perplexity
        self.state["evaluations"].append(scores)
        self.run.log_numbers("heldout", scores)
        return episodes_of_all

    def ref_perplexity(self, episodes):
        """The perplexity of what the policy said in an evaluation, under the starting policy; None
        if that is not in memory (it is with adapters, or with a KL)."""
        cfg, m = self.cfg, self.models
        if not m.reference:
            return None
        self.make_room()
        minibatches = split_batch(
            episodes,
            batch_size=len(self.heldout),
            n_minibatches=1,
            max_tokens=cfg.tokens_per_gpu,
            seed=0,
            pad_id=m.pad,
            device=m.device,
            all_gather_list=ranks.all_gather_list,
        )
        log_probs_of(m.reference, all_micro_batches(minibatches))
        return m.take_perplexity()

    # ------------------------------------------------------------------------ the metrics of a step

    def metrics_of_step(self, step, episodes, episodes_of_all, counts, update_metrics):
        """The step's line of metrics.jsonl, but for its seconds. episodes: of this rank, with their
        tokens; counts: as `hold_dialogues` returned them."""
        batch = batch_metrics(episodes_of_all, self.cfg.think)
        tokens_per_dialogue = update_metrics["tokens_trained"] / batch["episodes"]
        return {
            "step": step,
            **batch,
            **counts,
            "cut": self.share_of_cut_replies(episodes),
            "reply_tokens": tokens_per_dialogue / batch["turns"],
            **update_metrics,
            "kl_start": self.models.kl_start(self.start_file),
            # where the KL has asked the reference anyway
            "ref_perplexity": self.models.take_perplexity(),
            "gap": self.gap_to_held_out(batch["emotion"]),
            "tokens_sampled": sum_over_ranks(e.tokens_sampled for e in episodes),
        }

    def share_of_cut_replies(self, episodes):
        """The share of replies, over all ranks, that --max-tokens has cut."""
        counts = cut_replies(episodes, self.models.engine.stop_id)
        cut, replies = ranks.all_reduce_sum(torch.tensor(counts))
        return float(cut / max(1, replies))

    def gap_to_held_out(self, emotion):
        """How far the training users' `emotion` is above the held-out users' last score; None if
        there are no evaluations during training."""
        if not self.cfg.eval_every:
            return None
        return emotion - self.state["evaluations"][-1]["score"]

    def evaluation_is_due(self):
        """Is there an evaluation after the step that is done? Not the evaluation after the last
        step: `train` always makes that one."""
        cfg, step = self.cfg, self.state["step"]
        return bool(cfg.eval_every) and 0 < step < cfg.steps and step % cfg.eval_every == 0

    def evaluation_was_missed(self):
        """Was the run stopped between a step and the evaluation that was due after it?"""
        if not self.evaluation_is_due():
            return False
        return self.state["evaluations"][-1]["step"] != self.state["step"]

    def tell(self, text):
        """Print a line above the progress bar."""
        if self.first:
            tqdm.write(text)

    def show_dialogue(self, title, episodes):
        """Print the first dialogue of an evaluation, and what its user needed."""
        episode = episodes[0]
        profile = self.heldout[episode.group]  # `evaluate` numbers its groups by held-out user
        self.tell(terminal.dialogue_text(title, episode, hidden_need(profile)))

    def make_room(self):
        """Return freed memory to the system, before a part of a step that needs much memory for
        something else. Not for the toy, which needs little and would be slower by a twentieth."""
        if not self.cfg.toy:
            return_freed_memory()

    def add_seconds(self, kind, seconds):
        """Add `seconds` to those that the run has spent on work of this kind."""
        self.state["seconds"][kind] += seconds

    def set_total_seconds(self):
        """Set the run's seconds so far, those before it was resumed among them."""
        self.state["seconds"]["total"] = self.seconds_before + time.perf_counter() - STARTED

    def dialogue_bar(self, title, total):
        """A progress bar of `total` dialogues; invisible if it has no title."""
        hidden = title is None or not self.first
        return tqdm(total=total, desc=title, unit="dialogue", leave=False, disable=hidden)

    def log_dialogues(self, step, split, episodes):
        """Step 5's dialogues, word for word, with all that led to each change of emotion."""
        for episode in episodes:
            row = {"step": step, "split": split, **{key: getattr(episode, key) for key in LOGGED}}
            self.run.append("dialogues.jsonl", row)

    def log_metrics(self, metrics):
        """Step 5's line of metrics; its tokens are added to those of the run."""
        self.state["tokens"]["sampled"] += metrics["tokens_sampled"]
        self.state["tokens"]["trained"] += metrics["tokens_trained"]
        self.run.append("metrics.jsonl", metrics)
        self.run.log_numbers("train", metrics)
        self.warn_of_unreadable(metrics)
        self.warn_of_faults(metrics)

    def warn_of_unreadable(self, metrics):
        """Warn once if more than one dialogue in a hundred was dropped because the user's answers
        could not be read: a policy that learns to bring this about loses no reward by it."""
        self.n_dialogues += metrics["episodes"] + metrics["dropped"]
        self.n_unreadable += metrics["unreadable"]
        if self.n_unreadable > signs.MOST_UNREADABLE * self.n_dialogues:
            self.warn_once(
                "unreadable",
                f"step {metrics['step']}: {self.n_unreadable} of {self.n_dialogues} dialogues were "
                "dropped because the user's answers could not be read, or the prompt was "
                "refused; dropped.jsonl has what was said before (docs/hacking.md)",
            )

    def warn_of_faults(self, metrics):
        """Warn, once of each, of faults of the training that its own numbers show."""
        self.rows.append(metrics)
        for sentence in signs.training_faults(self.rows):
            text = f"warning, step {metrics['step']}: {sentence} (docs/troubleshooting.md)"
            self.warn_once(sentence, text)

    def warn_once(self, subject, text):
        """Print the warning `text`, unless there was one of this subject before."""
        if subject not in self.warned_of:
            self.warned_of.add(subject)
            self.tell(text)

    def warn_of_malformed(self, percent):
        """Warn if most dialogues of the starting policy end malformed: they all earn 0, so there is
        hardly anything to learn from. percent: of the dialogues."""
        if percent > 50:
            self.tell(
                f"{percent:.0f} % of the dialogues before training ended malformed, at a reward of "
                "0: the model does not write <think>...</think> and a reply within --max-tokens, "
                "and it will hardly learn to. Give it more tokens, or train without --think"
            )

    def log_or_give_up(self, lost, n_dialogues):
        """Write `lost`, the rows of the dropped dialogues, to dropped.jsonl. If they are more than
        a fifth of the `n_dialogues` that were begun, save what is done and raise TooManyLost."""
        too_many = len(lost) > n_dialogues / 5
        if too_many:
            # Save first: a resume cuts dropped.jsonl to its length at the checkpoint. Rows logged
            # before the save would survive the cut, and the repeated step would log them again.
            self.save_what_is_done()
        for row in lost:
            self.run.append("dropped.jsonl", row)
        if too_many:
            raise errors.TooManyLost(why_too_many(lost, n_dialogues))

    def save_what_is_done(self):
        """Save a checkpoint of the last whole step, if there is none yet."""
        done = self.state["step"]
        newest = rundir.checkpoints(self.run.path)[-1:]
        checkpoint = self.run.path / f"checkpoint-{done:06d}"
        if done >= 0 and ranks.broadcast(lambda: newest != [checkpoint]):
            self.save()

    def save(self):
        """Step 5's checkpoint. All ranks gather, the first one writes."""
        self.set_total_seconds()
        log = self.calls.path
        sizes = []  # of this rank's log of calls
        if log and log.exists():
            sizes = [(log.name, log.stat().st_size)]
        self.state["call_bytes"].update(ranks.all_gather_list(sizes))
        write = self.models.gather()
        if self.first:
            self.run.save_checkpoint(self.state, write, self.cfg)
            if self.state["step"] > 0:
                from tools.report import draw

                draw(self.run.path)

    def print_head(self):
        """What is printed before the first dialogue."""
        users = len(self.training_profiles), len(self.heldout)
        terminal.print_head(self.cfg, self.run.path, *users, ranks.world(), self.state["step"])
        if self.calls.path:
            print(terminal.calls_text(self.cfg, self.state["step"], self.tokens_of_check))

    # --------------------------------------------------------------- how a run is set up and closed

    def __init__(self, cfg, out, new=False):
        """cfg: Settings; out: the run's directory. Goes on from its newest checkpoint, if there is
        one and the run is not `new`. Raises BadInput or BadModel before anything is left behind."""
        ranks.check_world()
        if new:
            refuse_missing(cfg.model)
        self.cfg = cfg
        self.first = ranks.rank() == 0  # the one rank that writes and prints
        self.run = rundir.RunDir(out, self.first, cfg.tensorboard)
        self.start_file = self.run.path / "start.json"  # a few dialogues of the starting policy
        self.clock = llm.Clock()  # counts the seconds in which only the simulator is at work
        self.runner = asyncio.Runner()
        self.state = rundir.new_state()
        # what `warn_of_unreadable` counts, since the start or the resume
        self.n_dialogues = 0
        self.n_unreadable = 0
        self.rows = []  # the metrics that `warn_of_faults` looks at, likewise
        self.warned_of = set()  # the subjects of `warn_once`
        self.make_users(new)
        checkpoint = self.enter_directory(new)
        self.models = Models(cfg, checkpoint, self.clock, self.runner)
        if checkpoint:
            self.state = read_json(checkpoint / "state.json")
        self.seconds_before = self.state["seconds"]["total"]
        if cfg.steps < self.state["step"]:
            raise errors.BadInput(
                f"--steps {cfg.steps}: this run has done {self.state['step']} steps already; "
                "--steps is the total"
            )
        self.open_logs()
        self.run.write_config(cfg)
        if self.first and not (self.run.path / "heldout.json").exists():
            rundir.record_heldout(self.run.path, cfg.profiles, [p.id for p in self.heldout])
        ranks.wait_for_all()
        self.run.path.mkdir(parents=True, exist_ok=True)  # on a node without the first one's files

    def make_users(self, new):
        """The user's model, the users to train on and those held out."""
        cfg = self.cfg
        self.calls = llm.CallLog(self.path_of_calls())
        self.simulator = simulator_of_run(cfg, self.calls, self.clock)
        files = cfg.profiles if new else rundir.profile_files(self.run.path, cfg.profiles)
        self.training_profiles, self.heldout = users_of_run(files, cfg.eval_size, cfg.simulator)
        if not new:
            rundir.refuse_other_heldout(self.run.path, [p.id for p in self.heldout])
        self.check_simulator()

    def path_of_calls(self):
        """The file in which this rank logs its calls; None if a scripted user is asked."""
        if self.cfg.simulator in settings.SCRIPTED:
            return None
        return self.run.path / (f"calls-{ranks.rank()}.jsonl" if ranks.rank() else "calls.jsonl")

    def check_simulator(self):
        """Let the first rank ask the user's model once. Sets `tokens_of_check`, what question and
        answer had. Raises BadInput or TooManyLost, on all ranks, if that fails."""
        model = self.simulator.model
        if isinstance(model, llm.LocalModel):
            self.tell(f"asking {model.name}, the user's model, one question")
        self.tokens_of_check = ranks.broadcast(lambda: self.runner.run(self.simulator.check()))
        self.simulator.checked = True  # on all ranks

    def enter_directory(self, new):
        """Lock the run's directory, and empty it if the run is `new`. Returns the checkpoint to go
        on from, or None."""
        self.run.lock()
        if new:
            self.run.clear()
        return self.run.agree_on_checkpoint(ranks.broadcast, ranks.all_gather_list)

    def open_logs(self):
        """Cut off what was logged after the checkpoint, because it will be done again. Calls that
        were made after it are not paid for again: their answers are read from the log."""
        self.run.cut_logs(self.state["log_bytes"])
        if self.calls.path is None:
            return
        for path in self.run.path.glob("calls*.jsonl"):
            self.calls.read(path, self.state["call_bytes"].get(path.name, 0))

    def close(self):
        """Release the lock, and cancel the dialogues that are still open. asyncio would print ten
        lines about each of them; they are cancelled quietly."""
        self.run.close()
        self.runner.get_loop().set_exception_handler(lambda loop, context: None)
        with contextlib.suppress(KeyboardInterrupt):  # a cancelled dialogue raises it once more
            self.runner.close()


def why_too_many(lost, n_dialogues):
    """The message of a run that stops because too many of its `n_dialogues` dialogues were dropped:
    `lost`, their rows."""
    reason = lost[0]["reason"]
    unreadable = sum(row["unreadable"] for row in lost)
    if 2 * unreadable > len(lost):
        return (
            f"in {unreadable} of {n_dialogues} dialogues nothing that the user's model "
            f"said could be read, or it refused the prompt: {reason}; "
            "what was said before stands in dropped.jsonl"
        )
    return f"the simulator failed in {len(lost)} of {n_dialogues} dialogues: {reason}"


def sum_over_ranks(numbers):
    """The sum of the integers `numbers`, over all ranks."""
    return int(ranks.all_reduce_sum(torch.tensor(sum(numbers))))


# --------------------------------------------------------------------------------------------- main


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    rank_here = int(os.environ.get("RANK", 0))  # ranks.rank() knows it only after join_ranks()
    given = settings.read_flags(argv, quiet=rank_here > 0)
    trainer, out = None, None
    code, message = 0, ""
    try:
        ranks.join_ranks(cuda=settings.gpu_is_there() and rundir.model_of(given) != "toy")
        cfg, out, finished = ranks.broadcast(lambda: rundir.open_run(given))
        if finished:
            if rank_here == 0:
                terminal.print_finished(out)
            return 0
        trainer = Trainer(cfg, out, new=given["resume"] is None)
        if trainer.first:
            trainer.print_head()
        trainer.train()
    except (Exception, KeyboardInterrupt) as error:
        code, message = errors.explain(error, out, rank_here, ranks.world())
    finally:
        if trainer:
            trainer.close()
    if message:
        print(message, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    code = main()
    ranks.leave_ranks(code)
    sys.exit(code)
