"""tools/lens.py - what one update does to every word: a training step is made again, and shown.

    python -m tools.lens runs/NAME                 the step after the older of the two checkpoints
    python -m tools.lens runs/NAME --step 1        the first step, from the starting policy

It writes RUN/lens.html and changes no other file. The step is made in this process, by the engine
in PyTorch: from the same weights, with the same seeds, and with the user's answers from the run's
log. The page says whether its dialogues are those of the run. (In bf16, with vLLM or several ranks
they may differ: then it is another step from these weights.) A user behind a server is asked only
with --ask; its answers are kept in RUN/lens-calls.jsonl, so that a second page asks nothing again.
"""

from support.calls import CallLog
from support.command_line import SCRIPTED, Parser, natural, positive, split_name
from support.errors import BadInput, SimulatorFailed
from support.files import lock, read_jsonl, write_file
from support.loading import load_model
from support.needs import need_of
from support.ranks import join_ranks
from support.rundir import RunDir, checkpoints, settings_of_run
from support.settings import Settings

import asyncio
import copy
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from emotion import TRAINING
from engine import TorchEngine
from models import Models
from people import profiles_of_step, refuse_other_heldout, users_of_run
from players import simulator_of_run
from policy import lay_out, split_batch
from ppo import log_probs_of, place_rewards, policy_loss
from rlver import UPDATES, hold_dialogues, make_agent
from toy import world

TEMPLATE = Path(__file__).with_name("lens.html.j2")
SHADES = 4  # of a colour: how far a log-prob moved, against the largest move on the page
TITLE = (
    "log pi {before:.3f}, after the step {after:.3f} (engine {engine:.3f}); advantage "
    "{advantage:+.3f}; ratio {ratio:.3f} at its mini-batch; entropy {entropy:.3f}"
)

# --------------------------------------------------------------------------------- the step, again


class Silent:
    """In the place of a language model that is not asked. Arguments of players.language_model."""

    def __init__(self, name, flag, temperature, *_):
        _, self.name, _ = split_name(name)
        self.temperature = temperature

    async def __call__(self, prompt, schema=None):
        raise SimulatorFailed("the run's log has no answer to a question")

    likeliest = __call__


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
    engine has the weights before it), simulator and dialogues: a list of (Episode, {name: [L] tensor
    of what the update did with each token of its row})."""
    users, heldout = users_of_run(cfg.profiles, cfg.eval_size)
    refuse_other_heldout(out, heldout)
    run = RunDir(out, cfg, rank=1)  # only rank 0 writes to the run's files
    costs = cfg.reader or cfg.simulator not in SCRIPTED
    run.calls, run.runner = CallLog(out / "lens-calls.jsonl" if ask and costs else None), runner
    for path in out.glob("*calls*.jsonl"):
        run.calls.read(path)
    simulator = simulator_of_run(cfg, run.calls, run.clock, find=None if ask else Silent)
    if ask:
        runner.run(simulator.check())
    elif simulator.reader:
        runner.run(simulator.reader.set_scale())
    models = Models(cfg, checkpoint, run.start_file, run.clock, runner)
    profiles = profiles_of_step(users, cfg.batch_size // cfg.group_size, cfg.seed, number)
    run.saved_step = number  # nothing is to be saved
    run.state = {"step": number}
    episodes, _, counts = hold_dialogues(
        run, simulator, models, profiles, cfg.group_size, "training", number
    )
    of_packing = {"max_tokens": cfg.tokens_per_gpu, "device": models.device, "reward": cfg.reward}
    minibatches = split_batch(
        episodes, cfg.batch_size, cfg.minibatches, seed=f"{cfg.seed} {number}", **of_packing
    )
    batches = sum(minibatches, [])
    old = log_probs_of(models.policy, batches)
    with torch.no_grad():
        values = [models.critic(batch) for batch in batches] if models.critic else old
    models.set_learning_rates(min(1.0, number / max(1, cfg.warmup)))
    rows = []
    UPDATES[cfg.algo](models, minibatches, cfg, observe=lambda *row: rows.append(row))
    after = log_probs_of(models.policy, batches)

    # A row of a batch does not say whose it is; its ids do. (Equal ids have had an equal fate.)
    owners = [(lay_out(episode)["ids"], episode) for episode in episodes]
    names = "before after move ratio engine entropy advantage clipped value turn reward".split()
    dialogues = []
    for (batch, during, entropy, advantage), before, value, end in zip(rows, old, values, after):
        ratio = (during - before).exp()
        _, clipped = policy_loss(during, before, advantage, batch.action_mask, cfg.clip_eps)
        columns = [before, end, end - before, ratio, batch.engine_log_probs, entropy, advantage]
        columns += [clipped, value, batch.turn, place_rewards(batch.reward, batch.turn)]
        for row, length in enumerate((batch.branch >= 0).sum(1).tolist()):
            k = [ids for ids, _ in owners].index(batch.ids[row, :length].tolist())
            tokens = {name: column[row, :length].cpu() for name, column in zip(names, columns)}
            dialogues.append((owners.pop(k)[1], tokens))
    dialogues.sort(key=lambda pair: pair[0].number)
    difference = compare(out, number, episodes, counts["dropped"])
    parts = dict(number=number, cfg=cfg, models=models, simulator=simulator, profiles=profiles)
    return SimpleNamespace(**parts, heldout=heldout, dialogues=dialogues, difference=difference)


def compare(out, number, episodes, n_dropped):
    """In words: are these dialogues those of the run's log?"""
    rows = [row for _, row, _ in read_jsonl(out / "dialogues.jsonl") if row]
    rows = [row for row in rows if (row["step"], row["split"]) == (number, "train")]
    logged = [(*[turn["reply"] for turn in row["turns"]], row["reward"]) for row in rows]
    n_others = sum((*[turn.reply for turn in e.turns], e.reward) not in logged for e in episodes)
    if not rows:
        return "The run's log does not have this step."
    if not n_others and not n_dropped:
        return "All replies and emotions are the same as in the run."
    how_far = f"{n_others} of {len(episodes)} dialogues differ, {n_dropped} are missing"
    return f"This is another step from the run's weights: {how_far}."


# ------------------------------------------------------------------------------------------ the group


def choose_group(step, number):
    """The dialogues of group `number`; by default of the one whose rewards differ most, and with
    PPO, whose groups have one dialogue, of the one with the largest advantage. Raises BadInput."""
    groups = {}
    for episode, tokens in step.dialogues:
        groups.setdefault(episode.group, []).append((episode, tokens))
    if number is not None and number not in groups:
        raise BadInput(f"--group {number}: the groups of this step are 0 to {max(groups)}")

    def interest(group):
        spread = np.std([episode.reward for episode, _ in group])
        return spread, max(tokens["advantage"].abs().max().item() for _, tokens in group)

    return max(groups.values(), key=interest) if number is None else groups[number]


def explain(episode, tokens, rewards, cfg):
    """How a dialogue got its advantages, in lines. rewards: of its group."""
    policy = tokens["turn"] > 0
    turn, value, reward, advantage = (
        tokens[name][policy] for name in ("turn", "value", "reward", "advantage")
    )
    if cfg.algo == "grpo" and cfg.reward == "terminal":
        r, others = episode.reward, (rewards.sum() - episode.reward) / (len(rewards) - 1)
        rule = {
            "grpo": f"({r:.2f} − {rewards.mean():.4f}) / {rewards.std():.4f}",
            "dr-grpo": f"{r:.2f} − {rewards.mean():.4f}",
            "rloo": f"{r:.2f} − {others:.4f} (of the others)",
        }
        return [f"{rule[cfg.advantage]} = {advantage[0]:+.3f}"]
    lines, error = [], reward + cfg.gamma * torch.cat([value[1:], torch.zeros(1)]) - value
    for k in range(1, int(turn.max()) + 1):
        here = turn == k
        line = f"turn {k}: reward {reward[here].sum():+.2f}"
        if cfg.algo == "ppo":
            line += f", V {value[here][0]:.3f}, sum of the TD errors {error[here].sum():+.3f}"
        first, last = advantage[here][0], advantage[here][-1]
        lines.append(f"{line}, advantage of its first word {first:+.3f}, of its last {last:+.3f}")
    return lines


# ------------------------------------------------------------------------------------------ the words


def parts_of(episode, tokens, chat, think, largest):
    """The segments of a dialogue as the page shows them: (the Turn that the policy sampled it in, or
    None, its words), each word {"text", "thought", "shade": from -SHADES to SHADES, "clipped",
    "title"}; of what was not sampled only a text. largest: the largest |move| of a log-prob."""
    parts, k, turns = [], 0, iter(episode.turns)
    for segment in episode.segments:
        if segment.log_probs is None:
            parts.append((None, chat.decode(segment.ids)))
            k += len(segment.ids)
            continue
        words, text = [], ""
        for token in segment.ids:
            word = {"text": chat.decode([token]), "thought": think and "</think>" not in text}
            text += word["text"]
            row = {name: column[k].item() for name, column in tokens.items()}
            word |= {"shade": round(SHADES * row["move"] / largest), "clipped": row["clipped"]}
            words.append(word | {"title": TITLE.format(**row)})
            k += 1
        parts.append((next(turns), words))
    return parts


# ---------------------------------------------------------------------------- other people, in words


def held_out_people(step, out):
    """[(profile, first line in the log)] of up to eight held-out people, one for each need."""
    lines, chosen = {}, {}
    for _, row, _ in read_jsonl(out / "dialogues.jsonl", containing=b'"heldout"'):
        if row and row["split"] == "heldout":
            lines.setdefault(row["profile_id"], row["first_line"])
    for profile in step.heldout:
        if profile.id in lines:
            chosen.setdefault(profile.need or profile.id, (profile, lines[profile.id]))
    return list(chosen.values())[:8]


async def reply_to_all(step, engine, people):
    """What the policy with the weights of `engine` says first: [(text, Agent)] of `people`."""
    engine.forget()
    models = copy.copy(step.models)
    models.engine = engine
    agents = [make_agent(models, step.cfg, "evaluation", 0, n) for n in range(len(people))]
    replies = [agent.reply(line) for agent, (_, line) in zip(agents, people)]
    return [(r.visible if r else "", a) for r, a in zip(await asyncio.gather(*replies), agents)]


async def hear_all(step, people, replies):
    """How far each reply moves each person, [replies, people]. Raises SimulatorFailed."""

    async def change(reply, profile, line, name):
        user = step.simulator.user(profile, TRAINING.start, name)
        user.dialogue.append({"speaker": "me", "text": line})
        return (await user.feel(reply))[1]

    pairs = [(i, j) for i in range(len(replies)) for j in range(len(people))]
    calls = [change(replies[i], *people[j], f"lens {i} {j}") for i, j in pairs]
    return np.reshape(await asyncio.gather(*calls), (len(replies), len(people)))


def next_words(engine, ids, chat):
    """The five likeliest tokens behind `ids`: [(text, probability)]."""
    engine.forget()
    hidden = engine.compute([0], [ids])[0, -1]
    logits = engine.model.get_output_embeddings()(hidden).float() / (engine.temperature or 1.0)
    best = logits.softmax(-1).topk(5)
    return [(chat.decode([i]), p) for i, p in zip(best.indices.tolist(), best.values.tolist())]


def look_around(step, out, runner):
    """What the page shows of other people: "people"; "words", {when: the next ones}, behind the
    "thought"; "tables", {when: (replies, changes, mean of the own ones, of others)}, or "silence",
    why there are none."""
    models, cfg = step.models, step.cfg
    chat, people = models.chat, held_out_people(step, out)
    model, _ = load_model(world.POLICY / cfg.mode if cfg.toy else cfg.model)
    start = TorchEngine(model, chat.stop_ids, cfg.temperature, device=models.device)
    [(_, agent)] = runner.run(reply_to_all(step, models.engine, people[:1]))
    *_, ids = [segment.ids for segment in agent.segments if segment.log_probs]
    ends = [n for n in range(len(ids)) if "</think>" in chat.decode(ids[:n])]
    thought = ids[: ends[0]] if ends else []
    prompt = chat.first_prompt(people[0][1]) + chat.opening + thought
    words = {"before training": next_words(start, prompt, chat)}
    words["before this step"] = next_words(models.engine, prompt, chat)
    models.sync()
    words["after it"] = next_words(models.engine, prompt, chat)
    tables = {}
    try:
        for when, engine in (("before training", start), ("after this step", models.engine)):
            replies = [text for text, _ in runner.run(reply_to_all(step, engine, people))]
            changes = runner.run(hear_all(step, people, replies))
            others = changes[~np.eye(len(people), dtype=bool)]
            mean_of_others = others.mean() if others.size else None
            tables[when] = replies, changes.tolist(), changes.diagonal().mean(), mean_of_others
        silence = ""
    except SimulatorFailed as error:
        tables, silence = {}, str(error)
    thought = chat.decode(thought)
    return dict(people=people, thought=thought, words=words, tables=tables, silence=silence)


# ------------------------------------------------------------------------------------------- the page


def write_page(step, group, around, out):
    """Write RUN/lens.html. Returns its path."""
    from jinja2 import Environment

    cfg, chat = step.cfg, step.models.chat
    largest = max(tokens["move"].abs().max().item() for _, tokens in group) or 1.0
    rewards = torch.tensor([episode.reward for episode, _ in group])
    dialogues = []
    for episode, tokens in group:
        mean = tokens["advantage"][tokens["turn"] > 0].mean().item()
        parts = parts_of(episode, tokens, chat, cfg.think, largest)
        lines = explain(episode, tokens, rewards, cfg)
        dialogues.append((episode, lines, mean, tokens["move"].sum().item(), parts))
    profile = step.profiles[group[0][0].group]
    need, _ = need_of(profile.task, profile.need)
    clipped = [sum(tokens["clipped"].sum().item() for _, tokens in step.dialogues)]
    clipped += [sum((tokens["turn"] > 0).sum().item() for _, tokens in step.dialogues)]
    values = dict(
        clipped=clipped,
        title=out.name,
        step=step,
        cfg=cfg,
        profile=profile,
        need=need,
        around=around,
    )
    page = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = page.from_string(TEMPLATE.read_text("utf-8"))
    html = template.render(values, dialogues=dialogues, largest=largest)
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
    join_ranks(cuda=torch.cuda.is_available() and not cfg.toy)
    if args.ask:
        calls = cfg.batch_size * (2 * cfg.max_turns + 1) + 2 * 64 + 63
        print(f"at most {calls} calls, minus the answers in {out}/calls.jsonl and lens-calls.jsonl")
    held_lock = lock(out)  # raises BadInput if the run is running
    try:
        with asyncio.Runner() as runner:
            step = make_again(cfg, out, number, checkpoint, args.ask, runner)
            group = choose_group(step, args.group)
            page = write_page(step, group, look_around(step, out, runner), out)
    finally:
        os.close(held_lock)
    print(f"step {number}: {step.difference}\nopen {page}")
    return 0


def main(argv=None):
    """Run what the flags say. Returns the exit code."""
    text = "Make a training step again, and write a page of what it did to every word."
    parser = Parser(prog="python -m tools.lens", description=text)
    add = parser.add_argument
    add("path", help="directory of a run", metavar="RUN")
    text = "the step (default: the one after the older of the two checkpoints)"
    add("--step", type=positive, metavar="N", help=text)
    text = "the group that is shown (default: the one whose rewards differ most)"
    add("--group", type=natural, metavar="N", help=text)
    add("--ask", action="store_true", help="ask the user's model what the run's log does not have")
    return parser.run(look, argv)


if __name__ == "__main__":
    raise SystemExit(main())
