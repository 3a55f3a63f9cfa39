"""tools/lens.py - what one update does to every word: a training step is made again, and shown.

    python -m tools.lens runs/NAME                 the step after the older of the two checkpoints
    python -m tools.lens runs/NAME --step 1        the first step, from the starting policy

It writes RUN/lens.html and changes no other file. The step is made in this process, by the engine
in PyTorch: from the same weights, with the same seeds, and with the user's answers from the run's
log. The page says whether its dialogues are those of the run. (In bf16, with vLLM or several ranks
they may differ: then it is another step from these weights.) A user behind a server is asked only
with --ask; its answers are kept in RUN/lens-calls.jsonl, so that a second page asks nothing again.
"""

from models.build import Models
from models.engine import TorchEngine
from models.loading import load_model
from players.calls import CallLog
from players.check import check, learn
from players.users import simulator_of_run
from support.command_line import Parser, natural, positive, refuse_nesting, split_name
from support.errors import MAX_LOST, BadInput, SimulatorFailed, TooManyLost
from support.files import append_line, lock, read_jsonl, write_file
from support.needs import named_need, need_of
from support.ranks import join_ranks
from support.rundir import checkpoints, held_out_dialogues, settings_of_run
from support.settings import Settings

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from people import heldout_as_begun, profiles_of_run, profiles_of_step
from ppo import log_probs_of, place_rewards
from rlver import log_of_calls, make_agent, one_step, rollout_of, start_of
from tools.first_replies import felt_by_all, one_of_each_need

TEMPLATE = Path(__file__).with_name("lens.html.j2")

# --------------------------------------------------------------------------------- the step, again


def silent(name, flag, temperature, *_):
    """Stands in for players.users.language_model: its model is never asked."""

    async def model(*_):
        raise SimulatorFailed("the run's log has no answer to a question")

    _, model.name, _ = split_name(name)
    model.temperature, model.likeliest = temperature, model
    return model


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


def make_again(cfg, out, number, checkpoint, ask, runner):
    """Make step `number` again. Returns its settings, people, models (after the update, but the
    engine has the weights before it), simulator, the dialogues of the run's evaluations, its
    difference from the run's log, and its groups, {number: [(Episode, {name: [N] tensor}, see
    `seen_tokens`)]}. Raises BadInput, or TooManyLost if more than a fifth of the dialogues need a
    question."""
    users, heldout = profiles_of_run(cfg.profiles, cfg.eval_size)
    heldout = heldout_as_begun(out, heldout)
    evaluated = held_out_dialogues(out)
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
    models = Models(cfg, start_of(cfg), checkpoint, out / "start.pt", None, runner)
    profiles = profiles_of_step(users, cfg.batch_size // cfg.group_size, cfg.seed, number)

    def hold(profiles):
        groups = dict(enumerate(profiles))
        dialogues = rollout_of(simulator, models, cfg, "training", number, groups, cfg.group_size)
        episodes, dropped = runner.run(dialogues)
        if len(dropped) > MAX_LOST * cfg.batch_size:
            reason = dropped[0]["reason"]
            raise TooManyLost(f"{len(dropped)} of {cfg.batch_size} dialogues are missing: {reason}")
        return episodes

    rows = []  # of each micro-batch what `observe` is told
    episodes, _, _ = one_step(
        models, cfg, number, profiles, hold, observe=lambda *row: rows.append(row)
    )
    tokens_of = seen_tokens(models, rows)
    groups = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append((episode, tokens_of[episode.number]))
    step = SimpleNamespace(number=number, cfg=cfg, models=models, simulator=simulator)
    step.profiles, step.groups = profiles, groups
    step.heldout, step.evaluated = heldout, evaluated
    log = [row for _, row, _ in read_jsonl(out / "dialogues.jsonl") if row]
    step.difference = compare(log, number, episodes, cfg.batch_size - len(episodes))
    return step


def seen_tokens(models, rows):
    """{number of the dialogue: {name: [N] tensor}}, what the update did with each of the N tokens
    that the policy sampled there. rows: what `ppo.optimize` told of each micro-batch; models: after
    the step."""
    tokens_of = {}
    for batch, before, during, entropy, advantage, value, clipped in rows:
        [after] = log_probs_of(models.policy, [batch])
        columns = {
            "before": before,
            "after": after,
            "move": after - before,
            "ratio": (during - before).exp(),
            "engine": batch.engine_log_probs,
            "entropy": entropy,
            "advantage": advantage,
            "clipped": clipped,
            "value": value,
            "turn": batch.turn,
            "reward": place_rewards(batch.reward, batch.turn),
        }
        for k, (number, mask) in enumerate(zip(batch.number.tolist(), batch.action_mask)):
            tokens_of[number] = {
                name: column[k][mask].cpu()
                for name, column in columns.items()
                if column is not None  # without a critic there are no values
            }
    return tokens_of


def compare(log, number, episodes, n_dropped):
    """A sentence that says whether these dialogues are those of step `number` in the run's log."""
    rows = [row["turns"] for row in log if (row["step"], row["split"]) == (number, "train")]
    logged = [[(turn["reply"], turn["emotion"]) for turn in turns] for turns in rows]
    n_others = sum([(t.reply, t.emotion) for t in e.turns] not in logged for e in episodes)
    if not logged:
        return "The run's log does not have this step."
    if not n_others and not n_dropped:
        return "All replies and emotions are the same as in the run."
    how_far = f"{n_others} of {len(episodes)} dialogues differ, {n_dropped} are missing"
    return f"This is another step from the run's weights: {how_far}."


# --------------------------------------------------------------------------- a group and its words


def choose_group(groups, number):
    """The dialogues of group `number`; by default of the one whose rewards differ most, and with
    PPO, whose groups have one dialogue, of the one with the largest advantage. Raises BadInput."""
    if number is not None and number not in groups:
        raise BadInput(f"--group {number}: the groups of this step are 0 to {max(groups)}")

    def interest(group):
        spread = np.std([episode.reward for episode, _ in group])
        return spread, max(tokens["advantage"].abs().max().item() for _, tokens in group)

    return max(groups.values(), key=interest) if number is None else groups[number]


def explain(episode, tokens, group, cfg):
    """How a dialogue of a group got its advantages, in lines."""
    advantage = tokens["advantage"]
    if cfg.algo == "grpo" and cfg.reward == "terminal":
        r, rewards = episode.reward, torch.tensor([other.reward for other, _ in group])
        if len(group) == 1:
            return [
                f"{advantage[0]:+.3f}: the group has no other dialogue to compare this one with"
            ]
        if (rewards == r).all():
            equal = (
                "all rewards are equal: no dialogue is better, nothing is learned from this group"
            )
            return [f"{advantage[0]:+.3f}: {equal}"]
        others = (rewards.sum() - r) / (len(group) - 1)
        rule = {
            "grpo": f"({r:.2f} − {rewards.mean():.4f}) / {rewards.std():.4f}",
            "dr-grpo": f"{r:.2f} − {rewards.mean():.4f}",
            "rloo": f"{r:.2f} − {others:.4f} (of the others)",
        }
        return [f"{rule[cfg.advantage]} = {advantage[0]:+.3f}"]
    lines, reward = [], tokens["reward"]
    if cfg.algo == "ppo":
        value = tokens["value"]
        error = reward + cfg.gamma * torch.cat([value[1:], torch.zeros(1)]) - value
    for k in tokens["turn"].unique().tolist():
        here = tokens["turn"] == k
        line = f"turn {k}: reward {reward[here].sum():+.2f}"
        if cfg.algo == "ppo":
            line += f", V {value[here][0]:.3f}, sum of the TD errors {error[here].sum():+.3f}"
        first, last = advantage[here][0], advantage[here][-1]
        lines.append(f"{line}, advantage of its first word {first:+.3f}, of its last {last:+.3f}")
    return lines


def parts_of(episode, tokens, chat, think):
    """The segments of a dialogue: (the Turn that the policy sampled it in, its words), or (None, a
    text) of one that was not sampled. A word has the numbers of its token, "text" and "thought"."""
    turns = iter(episode.turns)
    rows = zip(*[column.tolist() for column in tokens.values()])
    for segment in episode.segments:
        if segment.log_probs is None:
            yield None, chat.decode(segment.ids)
            continue
        words, text = [], ""
        for token, numbers in zip(segment.ids, rows):
            thought = think and "</think>" not in text
            words.append(dict(zip(tokens, numbers), text=chat.decode([token]), thought=thought))
            text += words[-1]["text"]
        yield next(turns), words


# ---------------------------------------------------------------------------- other people, in words


async def first_replies(step, engine, people):
    """What the policy with the weights of `engine` says first: [(text, sampled ids)] of `people`."""
    engine.forget()
    models = SimpleNamespace(**vars(step.models) | {"engine": engine})
    agents = [make_agent(models, step.cfg, "evaluation", 0, n) for n in range(len(people))]
    replies = [agent.reply(row["first_line"]) for agent, (_, row) in zip(agents, people)]
    texts = [reply.visible for reply in await asyncio.gather(*replies)]
    sampled = [[s.ids for s in agent.segments if s.log_probs] for agent in agents]
    return [(text, ids) for text, [ids] in zip(texts, sampled)]


def next_words(engine, ids, chat):
    """The five likeliest tokens behind `ids`: [(text, probability)]."""
    engine.forget()
    hidden = engine.compute([0], [ids])[0, -1]
    logits = engine.model.get_output_embeddings()(hidden).float() / (engine.temperature or 1.0)
    best = logits.softmax(-1).topk(5)
    return [(chat.decode([i]), p) for i, p in zip(best.indices.tolist(), best.values.tolist())]


def look_around(step, runner):
    """What the page shows of other people: "people", as `one_of_each_need`; "words", {when: the next
    ones}, behind the "thought"; "tables", {when: (replies, *what `felt_by_all` returns)}, or
    "silence", why there are none. The engine has the weights after the step then."""
    models, cfg = step.models, step.cfg
    chat, engine = models.chat, models.engine
    people = one_of_each_need(step.evaluated, step.heldout)
    model, _ = load_model(start_of(cfg))
    start = TorchEngine(model, chat.stop_ids, cfg.temperature, device=models.device)
    [(_, ids)] = runner.run(first_replies(step, engine, people[:1]))
    to_thoughts_end = (ids[:n] for n in range(len(ids)) if "</think>" in chat.decode(ids[:n]))
    thought = next(to_thoughts_end, [])
    prompt = chat.first_prompt(people[0][1]["first_line"]) + chat.opening + thought
    words = {"before training": next_words(start, prompt, chat)}
    words["before this step"] = next_words(engine, prompt, chat)
    models.sync()
    words["after it"] = next_words(engine, prompt, chat)
    tables, silence = {}, ""
    try:
        for when, weights in (("before training", start), ("after this step", engine)):
            replies = [text for text, _ in runner.run(first_replies(step, weights, people))]
            tables[when] = replies, *runner.run(felt_by_all(step.simulator, people, replies))
    except SimulatorFailed as error:
        tables, silence = {}, str(error)
    thought = chat.decode(thought)
    return dict(people=people, thought=thought, words=words, tables=tables, silence=silence)


# ------------------------------------------------------------------------------------------- the page


def write_page(step, group, around, out):
    """Write RUN/lens.html. Returns its path."""
    from jinja2 import Template

    profile = step.profiles[group[0][0].group]
    need, _ = need_of(profile.task, profile.need)
    clipped = [tokens["clipped"] for dialogues in step.groups.values() for _, tokens in dialogues]
    values = dict(title=out.name, group=group, profile=profile, need=need, around=around)
    values["named_need"] = named_need
    values["largest"] = max(tokens["move"].abs().max().item() for _, tokens in group) or 1.0
    values["clipped"] = torch.cat(clipped)
    template = TEMPLATE.read_text("utf-8")
    template = Template(template, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    html = template.render(vars(step), **values, explain=explain, parts_of=parts_of)
    write_file(out / "lens.html", html)
    return out / "lens.html"


# --------------------------------------------------------------------------------------------- main


def look(args):
    """Make the step again and write the page. Returns the exit code; raises BadInput."""
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
            step = make_again(cfg, out, number, checkpoint, args.ask, runner)
            group = choose_group(step.groups, args.group)
            page = write_page(step, group, look_around(step, runner), out)
    finally:
        os.close(held)
    print(f"step {number}: {step.difference}\nthe page is {page}")
    return 0


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
