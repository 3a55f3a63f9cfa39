"""speed.py - how much the packing and the engine save. Ratios, measured side by side in one
process.

    python benchmarks/speed.py            a table
    python benchmarks/speed.py --server   a user over a model server that takes 200 ms a call, as
                                          JSON (two minutes)

packed/rows     one update of the policy (forward, loss, backward) from the same dialogues: one
                packed row a dialogue, against one row a turn, rows sorted by length, padded per
                micro-batch, with the same budget of tokens.
engine/generate sampled tokens a second on the same prompts, turn after turn: the torch engine,
                against `generate` of transformers.
server          32 dialogues of 8 turns over the slow server: all at once, against one call after
                another, and against the critical path (8 turns x 2 calls x 0.2 s, and the sampling
                measured alone).
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from support.chat_format import ChatFormat
from support.loading import load_model
from support.settings import resolve_settings

import numpy as np
import torch

from engine import TorchEngine
from people import toy_profiles
from policy import Policy, micro_batches
from ppo import policy_loss
from rollout import Agent, Episode, Segment, rollout
from simulator import Simulator, make_simulator
from toy import world

DEFAULTS = resolve_settings({})
BUDGET = DEFAULTS.tokens_per_gpu


def rows_per_turn(episode):
    """The same sampled tokens, each turn in a row of its own behind the history that it saw."""
    rows = []
    trunk = []
    for segment in episode.segments:
        if segment.log_probs is not None:
            row = Episode(episode.profile_id, episode.group, "", reward=episode.reward)
            row.segments = [Segment(trunk), Segment(segment.ids, log_probs=segment.log_probs)]
            rows.append(row)
        if segment.branch == 0:
            trunk = trunk + segment.ids
    return rows


def update(policy, episodes):
    """Seconds of one policy-gradient step's work, packing included."""
    start = time.perf_counter()
    for batch in micro_batches(episodes, BUDGET):
        log_probs, _ = policy(batch)
        loss, _ = policy_loss(
            log_probs,
            batch.engine_log_probs,
            batch.reward.sum(1)[:, None].expand_as(log_probs),
            batch.action_mask,
            0.2,
        )
        loss.backward()
    policy.zero_grad()
    return time.perf_counter() - start


def prompts_of(episodes):
    """turn -> [(dialogue, prompt)]: the prompts that the policy answered, over all dialogues."""
    turns = {}
    for number, episode in enumerate(episodes):
        for turn, row in enumerate(rows_per_turn(episode)):
            turns.setdefault(turn, []).append((number, row.segments[0].ids))
    return turns


def with_engine(model, chat, turns, max_tokens):
    """Tokens a second of the torch engine. turns: see `prompts_of`."""
    engine = TorchEngine(model, chat.stop_id)

    async def answer_all(prompts):
        calls = []
        for number, prompt in prompts:
            rng = np.random.default_rng(number)
            calls.append(engine.generate(prompt, max_tokens, rng, key=number))
        return await asyncio.gather(*calls)

    tokens = 0
    start = time.perf_counter()
    for prompts in turns.values():
        replies = asyncio.run(answer_all(prompts))
        tokens += sum(len(ids) for ids, _ in replies)
    return tokens / (time.perf_counter() - start)


def with_generate(model, chat, turns, max_tokens, pad):
    """Tokens a second of `generate` of transformers, log-probs included."""
    tokens = 0
    start = time.perf_counter()
    for numbered_prompts in turns.values():
        prompts = [prompt for _, prompt in numbered_prompts]
        width = max(map(len, prompts))  # padded on the left, as generate wants it
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = model.generate(
            ids,
            attention_mask=mask,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_tokens,
            eos_token_id=chat.stop_id,
            pad_token_id=pad,
            return_dict_in_generate=True,
            output_logits=True,
        )
        sampled = out.sequences[:, width:]
        # generate owes us the log-probs as well
        logits = torch.stack(out.logits, 1).float().log_softmax(-1)
        logits.gather(-1, sampled[..., None])
        is_stop = (sampled == chat.stop_id).int()
        stops_before = is_stop.cumsum(1) - is_stop
        tokens += int((stops_before == 0).sum())
    return tokens / (time.perf_counter() - start)


def hold_dialogues(simulator, engine, chat, think, count, turns):
    """Dialogues of the toy's base policy with `count` users, as Episodes."""

    def make_agent(seed):
        return Agent(
            engine, chat, think=think, max_tokens=DEFAULTS.max_tokens, context=1024, seed=seed
        )

    people = dict(enumerate(toy_profiles("train", count)))
    episodes, _ = asyncio.run(rollout(simulator, people, 1, make_agent, turns))
    return episodes


def token_count(episodes):
    return sum(len(segment.ids) for episode in episodes for segment in episode.segments)


def bench(think, dialogues=64, repeats=5):
    """The update and the sampling of one mode, each both ways."""
    model, tokenizer = load_model(world.base_policy(think))
    chat, policy = ChatFormat(tokenizer), Policy(model)
    engine = TorchEngine(model, chat.stop_id)
    episodes = hold_dialogues(make_simulator("toy"), engine, chat, think, dialogues, 8)
    rows = [row for episode in episodes for row in rows_per_turn(episode)]
    # warm up
    update(policy, episodes)
    update(policy, rows)
    # in turn, so that drift hits both
    pairs = [(update(policy, episodes), update(policy, rows)) for _ in range(repeats)]
    turns = prompts_of(episodes)
    max_tokens, pad = DEFAULTS.max_tokens, tokenizer.pad_token_id
    speeds = []
    for _ in range(3):
        engine_speed = with_engine(model, chat, turns, max_tokens)
        generate_speed = with_generate(model, chat, turns, max_tokens, pad)
        speeds.append((engine_speed, generate_speed))
    median = statistics.median
    return {
        "packed_seconds": median(a for a, _ in pairs),
        "rows_seconds": median(b for _, b in pairs),
        "packed_speedup": median(b / a for a, b in pairs),
        "packed_tokens": token_count(episodes),
        "rows_tokens": token_count(rows),
        "engine_tokens_per_s": median(a for a, _ in speeds),
        "generate_tokens_per_s": median(b for _, b in speeds),
        "engine_speedup": median(a / b for a, b in speeds),
    }


async def steady(prompt, schema):
    """A user who never leaves: a mild change, a plain line. So every dialogue takes all its
    turns."""
    decision = {"change": 1} if "change" in schema else {"goodbye": False, "response": "Hm, go on."}
    return json.dumps({**dict.fromkeys(schema, "-"), "code": world.code_in(prompt), **decision})


def over_a_server(dialogues=32, turns=8, latency=0.2):
    """Seconds of a rollout: with a user who answers at once, over the slow server, and over it with
    one call at a time."""
    model, tokenizer = load_model(world.base_policy(True))
    chat = ChatFormat(tokenizer)
    engine = TorchEngine(model, chat.stop_id)
    calls = []

    def seconds(simulator):
        engine.forget()
        began = time.perf_counter()
        episodes = hold_dialogues(simulator, engine, chat, True, dialogues, turns)
        calls.append(sum(2 * len(e.turns) - (e.ended == "malformed") for e in episodes))
        return time.perf_counter() - began

    command = [sys.executable, "tests/server.py", "--latency", str(latency), "--steady"]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    url = server.stdout.readline().strip()

    def over_the_server(concurrency):
        return make_simulator(f"openai:scripted@{url}", concurrency=concurrency)

    try:
        seconds(over_the_server(64))  # warm up
        alone = seconds(Simulator(steady))
        together = seconds(over_the_server(64))
        serial = seconds(over_the_server(1))
    finally:
        server.kill()
    path = turns * 2 * latency + alone
    return {
        "sampling_seconds": alone,
        "critical_path_seconds": path,
        "together_seconds": together,
        "serial_seconds": serial,
        "over_critical_path": together / path,
        "speedup_over_serial": serial / together,
        "calls": calls[-1],
    }


def main():
    parser = argparse.ArgumentParser(
        description="Packed update against one row a turn; torch engine against generate."
    )
    parser.add_argument(
        "--server", action="store_true", help="a user over a slow model server, instead"
    )
    args = parser.parse_args()
    if args.server:
        print(json.dumps(over_a_server(), indent=2))
        return
    for mode in ("think", "direct"):
        r = bench(mode == "think")
        print(
            f"{mode:<7} update: packed {r['packed_seconds']:.2f} s ({r['packed_tokens']} "
            f"tokens), one row a turn {r['rows_seconds']:.2f} s ({r['rows_tokens']} tokens): "
            f"{r['packed_speedup']:.1f}x\n"
            f"{'':8}sampling: engine {r['engine_tokens_per_s']:.0f} tokens/s, "
            f"generate {r['generate_tokens_per_s']:.0f} tokens/s: {r['engine_speedup']:.1f}x"
        )


if __name__ == "__main__":
    main()
