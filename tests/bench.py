"""bench.py - how much the packing and the engine save. Ratios, measured side by side in one
process.

    python tests/bench.py            a table
    python tests/bench.py --json     the same as JSON
    python tests/bench.py --server   a user over a model server that takes 200 ms a call (two
                                     minutes)
    python tests/bench.py --faults   twenty steps over a server with every fault, against none (ten
                                     minutes)
    python tests/bench.py --threads  two runs at once on the same cores (goes on where it was)
    python tests/bench.py --trl      the same training by TRL, in turns (half an hour)
    python tests/bench.py --gpu      all that is to be known on a GPU (nine minutes)

packed/rows     one update of the policy (forward, loss, backward) from the same dialogues: one
                packed row a dialogue, against one row a turn, rows sorted by length, padded per
                micro-batch, with the same budget of tokens.
engine/generate sampled tokens a second on the same prompts, turn after turn: the torch engine,
                against `generate` of transformers.
server          32 dialogues of 8 turns over the slow server: all at once, against one call after
                another, and against the critical path (8 turns x 2 calls x 0.2 s, and the sampling
                measured alone).
faults          30 % of calls 429, 5 % garbage, 2 % hang, and once the server is away for 20 s; a
                deadline of 2 s and 8 retries.
threads         five steps of `grpo --think` alone, and two such runs at once, each with a thread a
                core: threads that spin for as long as libgomp has it while they wait, or for less;
                and with one thread each.
trl, gpu        bench_trl.py and bench_gpu.py say what is measured.
"""

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from support.chat_format import ChatFormat
from support.loading import load_model
from support.rundir import append_line, read_jsonl
from support.settings import resolve_settings

import numpy as np
import torch

import toy
from engine import TorchEngine
from policy import Agent, Episode, Policy, Segment, micro_batches
from ppo import policy_loss
from rlver import rollout
from server import start, steady, toy_people
from simulator import Simulator, make_simulator, toy_profiles

DEFAULTS = resolve_settings({})
BUDGET = DEFAULTS.tokens_per_gpu


def rows_per_turn(episode):
    """The same sampled tokens, each turn in a row of its own behind the history that it saw."""
    rows, trunk = [], []
    for s in episode.segments:
        if s.log_probs is not None:
            row = Episode(episode.profile_id, episode.group, "", reward=episode.reward)
            row.segments = [Segment(trunk), Segment(s.ids, log_probs=s.log_probs)]
            rows.append(row)
        if s.branch == 0:
            trunk = trunk + s.ids
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
    engine = TorchEngine(model, chat.stop_id)
    tokens, start = 0, time.perf_counter()
    for asked in turns.values():

        async def all_of_them():
            return await asyncio.gather(
                *[
                    engine.generate(prompt, max_tokens, np.random.default_rng(n), key=n)
                    for n, prompt in asked
                ]
            )

        tokens += sum(len(ids) for ids, _ in asyncio.run(all_of_them()))
    return tokens / (time.perf_counter() - start)


def with_generate(model, chat, turns, max_tokens, pad):
    tokens, start = 0, time.perf_counter()
    for asked in turns.values():
        width = max(len(prompt) for _, prompt in asked)  # padded on the left, as generate wants it
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for _, prompt in asked])
        mask = torch.tensor(
            [[0] * (width - len(prompt)) + [1] * len(prompt) for _, prompt in asked]
        )
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
        ended = (sampled == chat.stop_id).int().cumsum(1)
        tokens += int((ended - (sampled == chat.stop_id).int() == 0).sum())
    return tokens / (time.perf_counter() - start)


def bench(think, dialogues=64, repeats=5):
    model, tokenizer = load_model(toy.base_policy(think))
    chat, policy = ChatFormat(tokenizer), Policy(model)
    max_tokens = DEFAULTS.max_tokens
    engine = TorchEngine(model, chat.stop_id)
    make_agent = lambda i: Agent(
        engine, chat, think=think, max_tokens=max_tokens, context=1024, seed=i
    )
    episodes, _ = asyncio.run(
        rollout(make_simulator("toy"), toy_profiles("train", dialogues), 1, make_agent, 8)
    )
    rows = [row for e in episodes for row in rows_per_turn(e)]
    size = lambda what: sum(len(s.ids) for e in what for s in e.segments)
    update(policy, episodes), update(policy, rows)  # warm up
    # in turn, so drift hits both
    pairs = [(update(policy, episodes), update(policy, rows)) for _ in range(repeats)]
    turns = prompts_of(episodes)
    speeds = [
        (
            with_engine(model, chat, turns, max_tokens),
            with_generate(model, chat, turns, max_tokens, tokenizer.pad_token_id),
        )
        for _ in range(3)
    ]
    median = statistics.median
    return {
        "packed_seconds": median(a for a, _ in pairs),
        "rows_seconds": median(b for _, b in pairs),
        "packed_speedup": median(b / a for a, b in pairs),
        "packed_tokens": size(episodes),
        "rows_tokens": size(rows),
        "engine_tokens_per_s": median(a for a, _ in speeds),
        "generate_tokens_per_s": median(b for _, b in speeds),
        "engine_speedup": median(a / b for a, b in speeds),
    }


def over_a_server(dialogues=32, turns=8, latency=0.2):
    """Seconds of a rollout: with a user who answers at once, over the slow server, and over it with
    one call at a time."""
    model, tokenizer = load_model(toy.base_policy(True))
    chat = ChatFormat(tokenizer)
    engine = TorchEngine(model, chat.stop_id)
    calls = []

    def seconds(simulator):
        engine.forget()
        make_agent = lambda i: Agent(
            engine, chat, think=True, max_tokens=DEFAULTS.max_tokens, context=1024, seed=i
        )
        began = time.perf_counter()
        episodes, dropped = asyncio.run(
            rollout(simulator, toy_profiles("train", dialogues), 1, make_agent, turns)
        )
        calls.append(sum(2 * len(e.turns) - (e.ended == "malformed") for e in episodes))
        return time.perf_counter() - began

    process, url = start("--latency", latency, "--steady")
    try:
        at = lambda concurrency: make_simulator(f"openai:scripted@{url}", concurrency=concurrency)
        seconds(at(64))  # warm up
        alone, together, serial = seconds(Simulator(steady)), seconds(at(64)), seconds(at(1))
    finally:
        process.kill()
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


def with_faults(steps=20, flags=("--algo", "grpo", "--think")):
    """A toy run over a server with every fault, and the same run without: what was lost, and the
    scores after."""
    faults = [
        "--faults",
        json.dumps({"429": 0.30, "garbage": 0.05, "hang": 0.02}),
        "--outage",
        f"[{300 * steps}, 20]",
    ]
    result = {}
    with tempfile.TemporaryDirectory() as place:
        for name, simulator in (("without", []), ("with", faults)):
            process, url = start(*simulator)
            try:
                out = Path(place) / name
                subprocess.run(
                    [
                        sys.executable,
                        "rlver.py",
                        *flags,
                        "--steps",
                        str(steps),
                        "--out",
                        str(out),
                        "--simulator",
                        f"openai:scripted@{url}",
                        *toy_people(out.parent),
                        "--simulator-timeout",
                        "2",
                        "--simulator-retries",
                        "8",
                    ],
                    check=True,
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                    env=os.environ,
                )
            finally:
                process.kill()
            rows = [
                json.loads(line) for line in (out / "metrics.jsonl").read_text().split("\n") if line
            ]
            summary = json.loads((out / "summary.json").read_text())
            dialogues = sum(1 for _ in open(out / "dialogues.jsonl", encoding="utf-8"))
            result[name] = {
                "steps": len(rows),
                "dropped": sum(r["dropped"] for r in rows),
                "dialogues": dialogues,
                **{k: summary["after"][k] for k in ("score", "stderr")},
                "seconds": summary["seconds"]["total"],
            }
    a, b = result["without"], result["with"]
    return {
        **result,
        "difference": b["score"] - a["score"],
        "two_combined_errors": 2 * (a["stderr"] ** 2 + b["stderr"] ** 2) ** 0.5,
    }


# The first is libgomp's own; where nothing is said, support/__init__.py sets the second.
THREADS = {
    "GOMP_SPINCOUNT=300000": {"GOMP_SPINCOUNT": "300000"},
    "GOMP_SPINCOUNT=1000": {"GOMP_SPINCOUNT": "1000"},
    "OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
}


def beside_each_other(log, limit=1800, flags=("--steps", "5", "--eval-size", "8")):
    """Seconds of one run alone and of two at once, for each of THREADS; what takes longer than
    `limit` is ended. `log` keeps each as soon as it is known; what it holds is not measured again.
    Returns a table."""
    log.parent.mkdir(exist_ok=True)
    known = {
        (row["threads"], row["runs"]): row["seconds"]
        for _, row, _ in (read_jsonl(log) if log.exists() else ())
    }
    toy.base_policy(True)  # once, before two runs would make it twice
    usual = {
        key: value
        for key, value in os.environ.items()
        if key not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    for name, runs in itertools.product(THREADS, (1, 2)):
        if (name, runs) in known:
            continue
        with tempfile.TemporaryDirectory() as place:
            began, codes = time.perf_counter(), None
            started = [
                subprocess.Popen(
                    [
                        sys.executable,
                        "rlver.py",
                        "--algo",
                        "grpo",
                        "--think",
                        *flags,
                        "--out",
                        f"{place}/{number}",
                    ],
                    cwd=ROOT,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    env={**usual, "OMP_NUM_THREADS": str(os.cpu_count()), **THREADS[name]},
                )
                for number in range(runs)
            ]
            try:
                codes = [run.wait(max(0, began + limit - time.perf_counter())) for run in started]
            except subprocess.TimeoutExpired:
                pass
            finally:
                seconds = round(time.perf_counter() - began, 1)
                for run in started:
                    run.kill()
                    run.wait()
        if codes and any(codes):
            raise RuntimeError(f"{name}: a run ended with exit code {max(codes)}")
        known[name, runs] = seconds if codes else None
        append_line(log, {"threads": name, "runs": runs, "seconds": known[name, runs]})
    told = lambda *key: f"more than {limit}" if known[key] is None else f"{known[key]:.0f}"
    return "\n".join(
        [f"| seconds, on {os.cpu_count()} cores | alone | two at once |", "|---|---|---|"]
        + [f"| {name} | {told(name, 1)} | {told(name, 2)} |" for name in THREADS]
    )


def main():
    parser = argparse.ArgumentParser(
        description="Packed update against one row a turn; torch "
        "engine against generate; model servers."
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--server", action="store_true", help="a user over a slow model server, instead"
    )
    parser.add_argument(
        "--faults", action="store_true", help="a run over a server with faults, instead"
    )
    parser.add_argument(
        "--threads",
        action="store_true",
        help="two runs at once on the same cores, instead; what is known already "
        "is in results/bench-threads.jsonl",
    )
    parser.add_argument(
        "--trl",
        action="store_true",
        help="the toy's training by TRL's GRPOTrainer and here, instead",
    )
    parser.add_argument("--gpu", action="store_true", help="speed and memory on a GPU, instead")
    args = parser.parse_args()
    if args.gpu:
        import bench_gpu

        sys.exit(bench_gpu.main())
    if args.trl:
        import bench_trl

        if not bench_trl.PYTHON.exists():
            parser.exit(2, f"bench.py --trl: {bench_trl.MISSING}\n")
        result = bench_trl.compare(seed=0, steps=DEFAULTS.steps)
        print(json.dumps(result, indent=2) if args.json else bench_trl.table(result))
        return
    if args.threads:
        print(beside_each_other(ROOT / "results" / "bench-threads.jsonl"))
        return
    if args.server or args.faults:
        print(json.dumps(over_a_server() if args.server else with_faults(), indent=2))
        return
    result = {"think": bench(True), "direct": bench(False), "threads": torch.get_num_threads()}
    if args.json:
        print(json.dumps(result, indent=2))
        return
    for mode in ("think", "direct"):
        r = result[mode]
        print(
            f"{mode:<7} update: packed {r['packed_seconds']:.2f} s ({r['packed_tokens']} "
            f"tokens), one row a turn {r['rows_seconds']:.2f} s ({r['rows_tokens']} tokens): "
            f"{r['packed_speedup']:.1f}x\n"
            f"{'':8}sampling: engine {r['engine_tokens_per_s']:.0f} tokens/s, "
            f"generate {r['generate_tokens_per_s']:.0f} tokens/s: {r['engine_speedup']:.1f}x"
        )


if __name__ == "__main__":
    main()
