"""tools/lens.py - what one update does to every word: a training step is made again, and shown.

    python -m tools.lens runs/NAME                 the step after the older of the two checkpoints
    python -m tools.lens runs/NAME --step 1        the first step, from the starting policy

It writes RUN/lens.html and changes no other file. The step is made in this process, by the engine
in PyTorch: from the same weights, with the same seeds, and with the user's answers from the run's
log. The page says whether its dialogues are those of the run. (In bf16, with vLLM or several ranks
they may differ: then it is another step from these weights.) A user behind a server is asked only
with --ask; its answers are kept in RUN/lens-calls.jsonl, so that a second page asks nothing again.

`look` is the program. What it calls follows, in this order: what the run left; the step, again; the
words of a group; other people; the page.
"""

from models.build import Models
from models.engine import TorchEngine
from models.loading import load_model
from players.calls import CallLog
from players.check import check, learn
from players.heldout import heldout_as_begun
from players.users import simulator_of_run
from support.command_line import Parser, natural, positive, refuse_nesting, split_name
from support.errors import MAX_LOST, BadInput, SimulatorFailed, TooManyLost
from support.files import append_line, lock, read_jsonl, write_file
from support.needs import named_need
from support.ranks import join_ranks
from support.rundir import checkpoints, held_out_dialogues, settings_of_run
from support.settings import Settings

import asyncio
import copy
import math
import os
from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
import torch

from people import profiles_of_run, profiles_of_step
from ppo import log_probs_of, place_rewards
from rlver import log_of_calls, make_agent, rules_of, start_of, update
from rollout import rollout
from tools.first_replies import felt_by_all, one_of_each_need

TEMPLATE = Path(__file__).with_name("lens.html.j2")


@dataclass
class Word:
    """A token that the policy sampled, and what the update saw of it and did to it."""

    text: str
    following: str  # the text of the next two
    turn: int  # 1, 2, ...
    reward: float  # 0, but for the last word of a turn
    value: float  # V; 0 without a critic
    advantage: float
    engine: float  # log pi of the engine that sampled it
    before: float  # log pi before the step
    after: float  # log pi after it
    ratio: float  # pi / pi_old, when its mini-batch was computed
    clipped: bool
    entropy: float
    thought: bool = False
    shade: int = 0

    @property
    def move(self):
        return self.after - self.before

    @property
    def followed(self):
        """Did it move the way of its own advantage?"""
        return self.shade and self.move * self.advantage > 0

    @property
    def numbers(self):
        """Its numbers, for a reader."""
        return (
            f"{self.move:+.3f}: probability {math.exp(self.before):.4f} before the step, "
            f"{math.exp(self.after):.4f} after it; log pi {self.before:.3f}, after the step "
            f"{self.after:.3f} (engine {self.engine:.3f}); advantage {self.advantage:+.3f}; ratio "
            f"{self.ratio:.3f} at its mini-batch; entropy {self.entropy:.3f}"
        )


def look(args):
    """Make the step again and write the page. Returns the exit code; raises BadInput, or TooManyLost
    if more than a fifth of the dialogues need a question."""
    out = Path(args.path)
    config = settings_of_run(out)
    if config.keys() != vars(Settings()).keys():
        raise BadInput(f"{args.path}: there is no run here, or one of another version")
    cfg = replace(Settings(**config), engine="torch")
    number, checkpoint = find_step(out, args.step)
    refuse_nesting()
    join_ranks(cuda=torch.cuda.is_available() and not cfg.toy)
    if args.ask:
        # a question and an answer a turn, and a first line; two tables; the check
        calls = cfg.batch_size * (2 * cfg.max_turns + 1) + 2 * 64 + 63
        print(f"at most {calls} calls, minus the answers in {out}/calls.jsonl and lens-calls.jsonl")
    held = lock(out)  # raises BadInput if the run is running
    try:
        with asyncio.Runner() as runner:
            training, heldout = profiles_of_run(cfg.profiles, cfg.eval_size)
            people = one_of_each_need(held_out_dialogues(out), heldout_as_begun(out, heldout))
            simulator = user_of_run(cfg, out, args.ask, runner)
            models = Models(cfg, start_of(cfg), checkpoint, out / "start.pt", None, runner)
            profiles = profiles_of_step(
                training, cfg.batch_size // cfg.group_size, cfg.seed, number
            )
            groups = make_again(models, number, profiles, simulator, runner)
            group = choose_group(groups, args.group)
            around = look_around(models, people, simulator, runner)
        difference = compare_with_log(out, number, groups, cfg.batch_size)
        page = write_page(
            out,
            models,
            groups,
            group,
            number=number,
            profiles=profiles,
            around=around,
            difference=difference,
        )
    finally:
        os.close(held)
    print(f"step {number}: {difference}\nthe page is {page}")
    return 0


# ------------------------------------------------------------------------------- what the run left


def find_step(out, step):
    """(the step to make again, the checkpoint that it starts from; None: the starting policy).
    step: of --step, or None. Raises BadInput."""
    kept = {int(path.name[-6:]): path for path in checkpoints(out)}
    if not kept:
        raise BadInput(f"{out}: this run has not come to its first checkpoint")
    step = step or sorted(kept)[-2:][0] + 1
    if step - 1 not in {0, *kept}:
        steps = ", ".join(str(number + 1) for number in sorted({0, *kept}))
        raise BadInput(f"--step {step}: its weights are not kept; these steps can be made: {steps}")
    return step, kept.get(step - 1)


def user_of_run(cfg, out, ask, runner):
    """The run's Simulator, which answers from the logs of calls in `out`. Only with `ask` is its
    model asked what they do not have, and that is logged in lens-calls.jsonl."""
    calls = log_of_calls(cfg, out, "lens-calls") if ask else CallLog()
    for path in out.glob("*calls*.jsonl"):
        calls.read(path)
    simulator = simulator_of_run(cfg, calls, None, find=None if ask else silent)
    if calls.path:
        rows = read_jsonl(calls.path) if calls.path.exists() else []
        findings = [row["findings"] for _, row, _ in rows if row and "findings" in row]
        if findings:  # of an earlier page: the check is not asked again
            learn(simulator, findings[0])
        else:
            append_line(calls.path, {"findings": runner.run(check(simulator))})
    elif simulator.reader:
        runner.run(simulator.reader.set_scale())
    return simulator


def silent(name, flag, temperature, *_):
    """Stands in for players.users.language_model: its model is never asked."""

    async def model(*_):
        raise SimulatorFailed("the run's log has no answer to a question")

    _, model.name, _ = split_name(name)
    model.temperature, model.likeliest = temperature, model
    return model


def compare_with_log(out, number, groups, batch_size):
    """A sentence that says whether these dialogues are those of step `number` in the run's log."""
    log = [row for _, row, _ in read_jsonl(out / "dialogues.jsonl") if row]
    rows = [row["turns"] for row in log if (row["step"], row["split"]) == (number, "train")]
    logged = [[(turn["reply"], turn["emotion"]) for turn in turns] for turns in rows]
    made = [[(t.reply, t.emotion) for t in e.turns] for group in groups.values() for e, _ in group]
    n_same = sum(turns in logged for turns in made)
    if not logged:
        return "The run's log does not have this step."
    if n_same == batch_size:
        return "All replies and emotions are the same as in the run."
    how_far = f"{len(made) - n_same} of {len(made)} dialogues differ"
    return f"This is another step from the run's weights: {how_far}, {batch_size - len(made)} are missing."


# ---------------------------------------------------------------------------------- the step, again


def make_again(models, number, profiles, simulator, runner):
    """Make step `number` with `profiles`. Returns its groups, {number: [(Episode, [Word])]}. The
    policy has the weights after the step then, the engine still those before it."""
    cfg, rows = models.cfg, []
    models.begin_sampling()
    dialogues = rollout(
        simulator,
        dict(enumerate(profiles)),
        cfg.group_size,
        partial(make_agent, models, cfg, "training", number),
        rules_of(cfg, "training"),
        name=f"training {number}",
    )
    episodes, dropped = runner.run(dialogues)
    if len(dropped) > MAX_LOST * cfg.batch_size:
        reason = dropped[0]["reason"]
        raise TooManyLost(f"{len(dropped)} of {cfg.batch_size} dialogues are missing: {reason}")
    update(models, cfg, number, episodes, observe=lambda *row: rows.append(row))
    words, groups = words_of_step(models, rows), {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append((episode, words[episode.number]))
    return groups


def words_of_step(models, rows):
    """{number of a dialogue: its Words}. rows: what `ppo.optimize` told of each micro-batch."""
    words, decode = {}, models.chat.decode
    for batch, before, during, entropy, advantage, value, clipped in rows:
        [after] = log_probs_of(models.policy, [batch])
        columns = (  # [B, L] each, in the order of the fields of Word
            batch.turn,
            place_rewards(batch.reward, batch.turn),
            torch.zeros_like(before) if value is None else value,
            advantage,
            batch.engine_log_probs,
            before,
            after,
            (during - before).exp(),
            clipped,
            entropy,
        )
        for k, (number, mask) in enumerate(zip(batch.number.tolist(), batch.action_mask)):
            ids = batch.ids[k][mask].tolist()
            rows_of_words = zip(*[column[k][mask].tolist() for column in columns])
            words[number] = [
                Word(decode([ids[i]]), decode(ids[i + 1 : i + 3]), *row)
                for i, row in enumerate(rows_of_words)
            ]
    return words


# --------------------------------------------------------------------------- a group and its words


def choose_group(groups, number):
    """The dialogues of group `number`; by default of the one whose rewards differ most, and with
    PPO, whose groups have one dialogue, of the one with the largest advantage. Raises BadInput."""

    def interest(group):
        spread = np.std([episode.reward for episode, _ in group])
        return spread, max(abs(word.advantage) for _, words in group for word in words)

    if number is None:
        return max(groups.values(), key=interest)
    if number not in groups:
        raise BadInput(f"--group {number}: the groups of this step are 0 to {max(groups)}")
    return groups[number]


def explain_dialogue(episode, group, cfg):
    """How all words of a dialogue got their advantage; "" if there is nothing to compare."""
    r, rewards = episode.reward, np.array([other.reward for other, _ in group])
    if (rewards == r).all():
        return ""
    others = (rewards.sum() - r) / (len(group) - 1)
    rule = {
        "grpo": f"({r:.2f} − {rewards.mean():.4f}) / {rewards.std(ddof=1):.4f}",
        "dr-grpo": f"{r:.2f} − {rewards.mean():.4f}",
        "rloo": f"{r:.2f} − {others:.4f} (of the others)",
    }
    return rule[cfg.advantage]


def explain_turn(turn, words, cfg):
    """How the words of a turn got their advantages, if each turn has its own. words: of the whole
    dialogue."""
    here = [word for word in words if word.turn == turn]
    line = f"reward {sum(word.reward for word in here):+.2f}"
    if cfg.algo == "ppo":
        values = [word.value for word in words[1:]] + [0.0]  # of the next word
        errors = [
            w.reward + cfg.gamma * v - w.value for w, v in zip(words, values) if w.turn == turn
        ]
        line += f", V {here[0].value:.3f}, sum of the TD errors {sum(errors):+.3f}"
    line += f", advantage of its first word {here[0].advantage:+.3f}"
    return f"{line}, of its last {here[-1].advantage:+.3f}"


def segments_of(episode, words, chat, think):
    """The segments of a dialogue: (the Turn that the policy sampled it in, its Words), or (None, a
    text) of one that was not sampled. It marks the words of thoughts."""
    turns, words = iter(episode.turns), iter(words)
    for segment in episode.segments:
        if segment.log_probs is None:
            yield None, chat.decode(segment.ids)
            continue
        here = list(islice(words, len(segment.ids)))
        texts_before = accumulate([word.text for word in here], initial="")
        for word, text in zip(here, texts_before):
            word.thought = think and "</think>" not in text
        yield next(turns), here


def shade(words):
    """Shade the words that moved from 1 to 4, by the rank of their move: the half that moved least, a
    quarter, an eighth, and the eighth that moved most. (Beside the largest move of a late step all
    others would be white.) A move that would be printed as 0.000 has shade 0."""
    moved = sorted(abs(word.move) for word in words if abs(word.move) >= 0.0005)
    edges = [moved[int(len(moved) * share)] for share in (0, 1 / 2, 3 / 4, 7 / 8) if moved]
    for word in words:
        word.shade = bisect_right(edges, abs(word.move))


def moved_most(words):
    """(the three words that moved up most, the three that moved down most), or fewer: by their
    probability. (By log pi they would mostly be words that were hardly ever said.)"""

    def moved(word):
        return abs(math.exp(word.after) - math.exp(word.before))

    words = [word for word in sorted(words, key=moved, reverse=True) if word.shade]
    return [w for w in words if w.move > 0][:3], [w for w in words if w.move < 0][:3]


# ---------------------------------------------------------------------------- other people, in words


def look_around(models, people, simulator, runner):
    """What the page shows of other people: "people", as `one_of_each_need`; "words", {when: the next
    ones}, behind the "thought"; "tables", {when: (replies, *what `felt_by_all` returns)}, or
    "silence", why they are not whole. The engine has the weights after the step then."""
    cfg, chat, engine = models.cfg, models.chat, models.engine
    model, _ = load_model(start_of(cfg))
    start = TorchEngine(model, chat.stop_ids, cfg.temperature, device=models.device)
    [(_, ids)] = runner.run(first_replies(models, start, people[:1]))
    to_thoughts_end = (ids[:n] for n in range(len(ids)) if "</think>" in chat.decode(ids[:n]))
    thought = next(to_thoughts_end, [])
    prompt = chat.first_prompt(people[0][1]["first_line"]) + chat.opening + thought
    words = {"before training": next_words(start, prompt, chat)}
    words["before this step"] = next_words(engine, prompt, chat)
    models.sync()
    words["after it"] = next_words(engine, prompt, chat)
    around = dict(people=people, thought=chat.decode(thought), words=words, tables={})
    try:
        for when, weights in (("before training", start), ("after this step", engine)):
            replies = [text for text, _ in runner.run(first_replies(models, weights, people))]
            around["tables"][when] = replies, *runner.run(felt_by_all(simulator, people, replies))
    except SimulatorFailed as error:
        around["silence"] = str(error)
    return around


async def first_replies(models, engine, people):
    """What the policy with the weights of `engine` says first: [(text, sampled ids)] of `people`."""
    engine.forget()
    models = copy.copy(models)
    models.engine = engine

    async def reply(number, first_line):
        agent = make_agent(models, models.cfg, "evaluation", 0, number)
        reply = await agent.reply(first_line)
        [ids] = [segment.ids for segment in agent.segments if segment.log_probs]
        return reply.visible, ids

    lines = [row["first_line"] for _, row in people]
    return await asyncio.gather(*[reply(number, line) for number, line in enumerate(lines)])


def next_words(engine, ids, chat):
    """The five likeliest tokens behind `ids`: [(text, probability)]."""
    engine.forget()
    hidden = engine.compute([0], [ids])[0, -1]
    logits = engine.model.get_output_embeddings()(hidden).float() / (engine.temperature or 1.0)
    best = logits.softmax(-1).topk(5)
    return [(chat.decode([i]), p) for i, p in zip(best.indices.tolist(), best.values.tolist())]


# ------------------------------------------------------------------------------------------ the page


def write_page(out, models, groups, group, **shown):
    """Write RUN/lens.html, of `group`, one of `groups`. shown: what the page shows as it is. Returns
    its path."""
    from jinja2 import Template

    words = [word for _, words in group for word in words]
    shade(words)
    functions = explain_dialogue, explain_turn, segments_of, moved_most, named_need, math.exp
    template = TEMPLATE.read_text("utf-8")
    template = Template(template, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    html = template.render(
        shown,
        title=out.name,
        cfg=models.cfg,
        chat=models.chat,
        group=group,
        words=words,
        batch=[word for others in groups.values() for _, words in others for word in words],
        **{function.__name__: function for function in functions},
    )
    write_file(out / "lens.html", html)
    return out / "lens.html"


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    text = "Make a training step again, and write a page of what it did to every word."
    parser = Parser(prog="python -m tools.lens", description=text)
    add = parser.add_argument
    add("path", help="directory of a run", metavar="RUN")
    add("--step", type=positive, metavar="N", help="default: the one after the older checkpoint")
    add("--group", type=natural, metavar="N", help="default: the one whose rewards differ most")
    add("--ask", action="store_true", help="ask the user's model what the run's log does not have")
    return parser.run(look, argv)


if __name__ == "__main__":
    raise SystemExit(main())
