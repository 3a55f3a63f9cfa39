"""speed.py - how much the packing and the engine save. Ratios, measured side by side in one
process.

    python benchmarks/speed.py            a table
    python benchmarks/speed.py --server   a user over a model server that takes 200 ms a call, as
                                          JSON (two minutes)

packed/rows     one update of the policy (forward, loss, backward) from the same dialogues: one
                packed row a dialogue, against one row a turn, rows sorted by length, padded per
                micro-batch, with the same budget of tokens.
engine/generate sampled tokens a second in a rollout: the torch engine, against `generate` of
                transformers with the same interface, without the log-probs that training needs.
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
from models.chat_format import ChatFormat
from models.engine import TorchEngine
from models.loading import load_model
from players.users import make_simulator
from support.settings import resolve_settings

from dataclasses import replace

import torch
from transformers import DynamicCache

from emotion import TRAINING
from people import toy_profiles
from policy import Policy, micro_batches
from ppo import policy_loss
from rollout import Agent, Episode, Segment, rollout
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


class GenerateEngine(TorchEngine):
    """`generate` of transformers with the same interface: one call for a turn of all dialogues."""

    def __init__(self, model, stop_id, pad):
        super().__init__(model, {stop_id})
        self.model, self.stop_id, self.pad = model, stop_id, pad

    async def work(self):
        while self.waiting:
            requests, self.waiting = self.waiting, []
            for request, ids in zip(requests, self.replies(requests)):
                request.result.set_result((ids, [0.0] * len(ids)))
            await asyncio.sleep(0)  # the toy's users answer at once: all wait

    @torch.inference_mode()
    def replies(self, requests):
        """One reply to each request, ids. A row of the cache is "pad prompt reply pad, pad prompt
        ...", the padding masked; rows of dialogues that are over are dropped."""
        new = [request.prompt for request in requests]
        past = torch.zeros(2, len(new), 0, dtype=torch.long)  # ids and mask, [2, R, W]
        in_slots = [self.ids_in_slot.get(request.key, (0, [None])) for request in requests]
        rows = [row for row, _ in in_slots]  # of the cache
        prefixes = [ids for _, ids in in_slots]  # what these rows hold
        if all(prompt[: len(ids)] == ids for ids, prompt in zip(prefixes, new)):
            self.cache.batch_select_indices(torch.tensor(rows))
            past = self.past[:, rows]
            new = [prompt[len(ids) :] for ids, prompt in zip(prefixes, new)]
        else:
            self.cache = DynamicCache(config=self.model.config)
        width = max(map(len, new))
        new_ids = [[self.pad] * (width - len(prompt)) + prompt for prompt in new]
        new_mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in new]
        ids, mask = torch.cat([past, torch.tensor([new_ids, new_mask])], 2)
        out = self.model.generate(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=self.cache,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            eos_token_id=self.stop_id,
            pad_token_id=self.pad,
            max_new_tokens=min(len(r.uniform) for r in requests),
        )
        sampled = out[:, ids.shape[1] :]
        stops = (sampled == self.stop_id).long()
        in_reply = (stops.cumsum(1) - stops == 0).long()  # up to the first stop token
        self.past = torch.stack([out, torch.cat([mask, in_reply], 1)])
        lengths = in_reply.sum(1).tolist()
        replies = [row[:length] for row, length in zip(sampled.tolist(), lengths)]
        self.ids_in_slot = {r.key: (i, r.prompt + replies[i]) for i, r in enumerate(requests)}
        return replies


def hold_dialogues(simulator, engine, chat, think, count, turns):
    """Dialogues of the toy's base policy with `count` users, as Episodes."""

    def make_agent(seed):
        return Agent(
            engine, chat, think=think, max_tokens=DEFAULTS.max_tokens, context=1024, seed=seed
        )

    people = dict(enumerate(toy_profiles("train", count)))
    episodes, _ = asyncio.run(
        rollout(simulator, people, 1, make_agent, replace(TRAINING, max_turns=turns))
    )
    return episodes


def token_count(episodes):
    return sum(len(segment.ids) for episode in episodes for segment in episode.segments)


def bench(think, dialogues=64, repeats=5):
    """The update and the sampling of one mode, each both ways."""
    model, tokenizer = load_model(world.base_policy(think))
    chat, policy = ChatFormat(tokenizer), Policy(model)
    engine = TorchEngine(model, chat.stop_ids)
    episodes = hold_dialogues(make_simulator("toy"), engine, chat, think, dialogues, 8)
    rows = [row for episode in episodes for row in rows_per_turn(episode)]
    # warm up
    update(policy, episodes)
    update(policy, rows)
    # in turn, so that drift hits both
    pairs = [(update(policy, episodes), update(policy, rows)) for _ in range(repeats)]
    engines = engine, GenerateEngine(model, chat.stop_id, tokenizer.pad_token_id)

    def tokens_per_s(engine):
        began = time.perf_counter()
        episodes = hold_dialogues(make_simulator("toy"), engine, chat, think, dialogues, 8)
        sampled = (s for e in episodes for s in e.segments if s.log_probs)
        return sum(len(s.ids) for s in sampled) / (time.perf_counter() - began)

    speeds = [[tokens_per_s(engine) for engine in engines] for _ in range(3)]
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
    engine = TorchEngine(model, chat.stop_ids)
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
        alone = seconds(make_simulator("steady", find=lambda *_: steady))
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
