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
    python tests/bench.py --small    a step of smollm2, by part (20 minutes; needs its package)
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
trl, small, gpu bench_trl.py, bench_small.py and bench_gpu.py say what is measured.
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
from support.files import append_line, read_jsonl
from support.loading import load_model
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
    model, tokenizer = load_model(toy.base_policy(think))
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


def over_a_server(dialogues=32, turns=8, latency=0.2):
    """Seconds of a rollout: with a user who answers at once, over the slow server, and over it with
    one call at a time."""
    model, tokenizer = load_model(toy.base_policy(True))
    chat = ChatFormat(tokenizer)
    engine = TorchEngine(model, chat.stop_id)
    calls = []

    def seconds(simulator):
        engine.forget()
        began = time.perf_counter()
        episodes = hold_dialogues(simulator, engine, chat, True, dialogues, turns)
        calls.append(sum(2 * len(e.turns) - (e.ended == "malformed") for e in episodes))
        return time.perf_counter() - began

    process, url = start("--latency", latency, "--steady")

    def over_the_server(concurrency):
        return make_simulator(f"openai:scripted@{url}", concurrency=concurrency)

    try:
        seconds(over_the_server(64))  # warm up
        alone = seconds(Simulator(steady))
        together = seconds(over_the_server(64))
        serial = seconds(over_the_server(1))
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
    shares = {"429": 0.30, "garbage": 0.05, "hang": 0.02}
    outage = f"[{300 * steps}, 20]"
    faults = ["--faults", json.dumps(shares), "--outage", outage]
    with tempfile.TemporaryDirectory() as place:
        without = run_over_server(Path(place) / "without", [], steps, flags)
        with_them = run_over_server(Path(place) / "with", faults, steps, flags)
    errors = without["stderr"] ** 2 + with_them["stderr"] ** 2
    return {
        "without": without,
        "with": with_them,
        "difference": with_them["score"] - without["score"],
        "two_combined_errors": 2 * errors**0.5,
    }


def run_over_server(out, server_flags, steps, flags):
    """One run over a server in the directory `out`: what came of it."""
    process, url = start(*server_flags)
    try:
        command = [sys.executable, "rlver.py", *flags, "--steps", str(steps), "--out", str(out)]
        command += ["--simulator", f"openai:scripted@{url}", *toy_people(out.parent)]
        command += ["--simulator-timeout", "2", "--simulator-retries", "8"]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ)
    finally:
        process.kill()
    rows = [row for _, row, _ in read_jsonl(out / "metrics.jsonl")]
    summary = json.loads((out / "summary.json").read_text())
    with open(out / "dialogues.jsonl", encoding="utf-8") as file:
        dialogues = sum(1 for _ in file)
    return {
        "steps": len(rows),
        "dropped": sum(row["dropped"] for row in rows),
        "dialogues": dialogues,
        "score": summary["after"]["score"],
        "stderr": summary["after"]["stderr"],
        "seconds": summary["seconds"]["total"],
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
    known = {}  # (name in THREADS, runs at once): seconds, None if it was ended
    for _, row, _ in read_jsonl(log) if log.exists() else ():
        known[row["threads"], row["runs"]] = row["seconds"]
    toy.base_policy(True)  # once, before two runs would make it twice
    for name, runs in itertools.product(THREADS, (1, 2)):
        if (name, runs) not in known:
            seconds = seconds_of_runs(name, runs, limit, flags)
            known[name, runs] = seconds
            append_line(log, {"threads": name, "runs": runs, "seconds": seconds})
    lines = [f"| seconds, on {os.cpu_count()} cores | alone | two at once |", "|---|---|---|"]
    for name in THREADS:
        cells = [known[name, 1], known[name, 2]]
        texts = [f"more than {limit}" if cell is None else f"{cell:.0f}" for cell in cells]
        lines.append(f"| {name} | {' | '.join(texts)} |")
    return "\n".join(lines)


def seconds_of_runs(name, runs, limit, flags):
    """Seconds of so many runs at once, with the environment THREADS[name]; None if they take longer
    than `limit`. Raises RuntimeError if one fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())}
    for variable in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        environment.pop(variable, None)
    environment.update(THREADS[name])
    command = [sys.executable, "rlver.py", "--algo", "grpo", "--think", *flags, "--out"]
    codes = None
    with tempfile.TemporaryDirectory() as place:
        began = time.perf_counter()
        processes = [
            subprocess.Popen(
                [*command, f"{place}/{number}"],
                cwd=ROOT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
            )
            for number in range(runs)
        ]
        end = began + limit
        try:
            codes = [process.wait(max(0, end - time.perf_counter())) for process in processes]
        except subprocess.TimeoutExpired:
            pass
        finally:
            seconds = round(time.perf_counter() - began, 1)
            for process in processes:
                process.kill()
                process.wait()
    if codes is None:
        return None
    if any(codes):
        raise RuntimeError(f"{name}: a run ended with exit code {max(codes)}")
    return seconds


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
    parser.add_argument("--small", action="store_true", help="a step of smollm2 by part, instead")
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
    if args.small:
        import bench_small

        result = bench_small.compare()
        print(json.dumps(result, indent=2) if args.json else bench_small.table(result))
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
