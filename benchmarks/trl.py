"""trl.py - the same training by TRL's GRPOTrainer and here.

    python benchmarks/trl.py             a table (half an hour)

The same toy policy, users, dialogues (`rollout.rollout`), batch, groups, optimizer steps and learning
rates, direct mode. Each side is a process, TRL's with a Python of its own. They take turns, a cycle
(rollout and update) each, so that other load on the machine affects all of them. Evaluation and
checkpoints are not counted. TRL's settings are the fastest found on a CPU: fp32, no recomputed
activations, a mini-batch in one piece, no log-probs of the sampler (it uses them only to correct
vLLM's). The loss is divided by the tokens of the batch, as here. Keys and values of earlier turns
are kept, which samples a fifth faster than reading the dialogues again.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Without the directory of this file, in which `import trl` would import this file.
sys.path[:] = [str(ROOT), *(place for place in sys.path if Path(place) != ROOT / "benchmarks")]
from models.build import Models
from players.calls import CallLog
from players.users import simulator_of_run
from support.metrics import summarise
from support.rundir import RunDir
from support.settings import resolve_settings

import numpy as np
from transformers import TrainerCallback

from benchmarks.speed import GenerateEngine
from people import profiles_of_run, profiles_of_step
from rlver import make_agent, rules_of, start_of, train
from rollout import rollout

BATCH, GOAL = 64, 75  # dialogues a cycle; the held-out score to be passed
SETTINGS = {"algo": "grpo", "eval_every": 5}  # of both, with the usual seed and number of steps
PYTHON = ROOT / ".venv-trl" / "bin" / "python"
MISSING = (
    "TRL is not installed. It needs an environment of its own: python3 -m venv .venv-trl && "
    ".venv-trl/bin/pip install -r requirements.txt -r requirements-trl.txt"
)
SIDES = {"TRL": {}, "here": {}, "here, --reward delta": {"reward": "delta"}}


class TimedRun(RunDir):
    """A run of rlver.py without checkpoints. A cycle ends with a step, or with the evaluation
    behind it."""

    def __init__(self, path, cfg, cycles):
        super().__init__(path, cfg, CallLog())
        self.cycles, self.sampling, self.cycle = cycles, 0.0, cycles.take()

    def log_step(self, episodes, row):
        super().log_step(episodes, row)
        sampling = self.state["seconds"]["rollout"]
        self.cycle, self.sampling = self.cycles.take(sampling - self.sampling), sampling
        if row["step"] % self.cfg.eval_every and row["step"] < self.cfg.steps:
            self.cycles.end(self.cycle)

    def log_evaluation(self, episodes, scores):
        super().log_evaluation(episodes, scores)
        self.cycle = self.cycle if scores["step"] else self.cycles.take()
        self.cycles.end({**self.cycle, "score": scores["score"]})

    def save(self, write):
        pass


def train_with_trl(run, cycles):
    """The same training by TRL, whose trainer has a loop of its own. The model, the optimizer, the
    users and the evaluations are those of rlver.py."""
    import trl
    from datasets import Dataset
    from torch.optim.lr_scheduler import LambdaLR

    cfg = run.cfg
    simulator = simulator_of_run(cfg, None, None)
    training, heldout = profiles_of_run(cfg.profiles, cfg.eval_size)
    m = Models(cfg, start_of(cfg), None, run.start_file, None, run.runner)
    users = cfg.batch_size // cfg.group_size
    torch_engine = m.engine
    sampler = GenerateEngine(m.policy.model, m.chat.stop_id, m.tokenizer.pad_token_id or 0)

    def hold_dialogues(profiles, group_size, kind, step):
        groups, rules = dict(enumerate(profiles)), rules_of(cfg, kind)
        m.begin_sampling()
        agent = partial(make_agent, m, cfg, kind, step)
        return run.runner.run(rollout(simulator, groups, group_size, agent, rules))[0]

    def end_cycle(step, sampling=0.0):
        cycle = cycles.take(sampling)
        if step % cfg.eval_every == 0:
            m.sync()  # here each step ends with it
            cycle["score"] = summarise(hold_dialogues(heldout, 1, "evaluation", step))["score"]
        cycles.end(cycle)

    def rollout_func(prompts, trl_trainer):
        """Dialogues in TRL's terms: the prompt is what stands before the first reply, the
        completion all that follows, env_mask says which of its tokens the policy sampled."""
        began, step = time.perf_counter(), trl_trainer.state.global_step // cfg.minibatches + 1
        profiles = profiles_of_step(training, users, cfg.seed, step)
        m.engine = sampler
        episodes = hold_dialogues(profiles, cfg.group_size, "training", step)
        m.engine = torch_engine
        clock.sampling = time.perf_counter() - began
        rest = [e.segments[1:] for e in episodes]
        return {
            "prompt_ids": [e.segments[0].ids for e in episodes],
            "logprobs": None,
            "completion_ids": [[i for s in row for i in s.ids] for row in rest],
            "env_mask": [[int(bool(s.log_probs)) for s in row for _ in s.ids] for row in rest],
            "final": [e.reward for e in episodes],
        }

    class Clock(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            end_cycle(0)

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step % cfg.minibatches == 0:
                end_cycle(state.global_step // cfg.minibatches, self.sampling)

    def rate(update):
        return min(1.0, (update // cfg.minibatches + 1) / cfg.warmup)

    clock = Clock()
    trl.GRPOTrainer(
        m.policy.model,
        [lambda final, **kwargs: final],
        args=trl.GRPOConfig(
            output_dir=str(run.path),
            seed=cfg.seed,
            max_steps=cfg.steps * cfg.minibatches,
            per_device_train_batch_size=cfg.batch_size // cfg.minibatches,
            steps_per_generation=cfg.minibatches,
            num_generations=cfg.group_size,
            max_grad_norm=1.0,
            epsilon=cfg.clip_eps,
            entropy_coef=cfg.entropy_coef,
            loss_type="dapo",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["a user"] * users * cfg.steps}),
        processing_class=m.tokenizer,
        callbacks=[clock],
        rollout_func=rollout_func,
        optimizers=(m.optimizer, LambdaLR(m.optimizer, rate)),
    ).train()


class Cycles:
    """Writes the cost of each cycle to `file`, a line of JSON, and waits for a line on stdin."""

    def __init__(self, file):
        self.file, self.began = file, self.now()

    def now(self):
        return np.array([time.perf_counter(), time.process_time()])

    def take(self, sampling=0.0):
        """The seconds since the last cycle ended."""
        return dict(zip(("seconds", "cpu"), self.now() - self.began), sampling=sampling)

    def end(self, cycle):
        print(json.dumps(cycle), file=self.file, flush=True)
        sys.stdin.readline()
        self.began = self.now()


def one_side(side):
    """One side, in a process of its own; see Cycles for what it writes and reads."""
    out, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints
    cfg = resolve_settings(SETTINGS | SIDES[side])
    with tempfile.TemporaryDirectory() as place:
        cycles = Cycles(out)
        if side == "TRL":
            return train_with_trl(RunDir(Path(place), cfg, None), cycles)
        train(TimedRun(Path(place), cfg, cycles))


def compare():
    """{side: [before training, cycle, cycle, ...]}."""
    result, workers = {side: [] for side in SIDES}, {}
    try:
        for side in SIDES:
            command = [str(PYTHON if side == "TRL" else sys.executable), __file__, side]
            workers[side] = subprocess.Popen(
                command,
                text=True,
                bufsize=1,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        for step in range(resolve_settings(SETTINGS).steps + 1):
            for side in list(SIDES)[:: 1 if step % 2 else -1]:
                if step:
                    workers[side].stdin.write("\n")
                line = workers[side].stdout.readline()
                if not line:
                    raise RuntimeError(f"it ended, alone it says why: {workers[side].args}")
                result[side].append(json.loads(line))
    finally:
        for worker in workers.values():
            worker.kill()
    return result


def seconds_until(cycles):
    """Seconds of training until the held-out score first passes GOAL, evaluations joined by
    straight lines; NaN if it never does."""
    ends = np.cumsum([0] + [c["seconds"] for c in cycles[1:]])  # of each cycle
    scores = [(step, c["score"]) for step, c in enumerate(cycles) if "score" in c]
    for (step, score), (next_step, next_score) in itertools.pairwise(scores):
        if score < GOAL <= next_score:
            share = (GOAL - score) / (next_score - score)
            return np.interp(step + (next_step - step) * share, range(len(cycles)), ends)
    return np.nan


def median(cycles, key):
    """The median over the cycles of training. (The first one is the time before training.)"""
    return statistics.median(cycle[key] for cycle in cycles[1:])


def median_ratio(theirs, ours, key):
    """The median over the cycles of the ratio of what both sides took."""
    pairs = zip(theirs[1:], ours[1:])
    return statistics.median(a[key] / b[key] for a, b in pairs)


def table(result):
    """The table of BENCHMARKS.md."""
    theirs = result["TRL"]
    head = (
        f"|seconds a cycle|of which sampling|dialogues/s|times faster|in processor time|"
        f"seconds until {GOAL}|times sooner|held-out scores, every 5 steps"
    )
    columns = [head.split("|")]
    for side, cycles in result.items():
        seconds = median(cycles, "seconds")
        numbers = [
            seconds,
            median(cycles, "sampling"),
            BATCH / seconds,
            median_ratio(theirs, cycles, "seconds"),
            median_ratio(theirs, cycles, "cpu"),
            seconds_until(cycles),
            seconds_until(theirs) / seconds_until(cycles),
        ]
        scores = ", ".join(f"{cycle['score']:.0f}" for cycle in cycles if "score" in cycle)
        columns.append([side, *(f"{number:.2f}" for number in numbers), scores])
    first, *rows = (f"| {' | '.join(row)} |" for row in zip(*columns))
    return "\n".join([first, "|---" * len(columns) + "|", *rows])


def main():
    parser = argparse.ArgumentParser(
        description="The toy's training by TRL's GRPOTrainer and here."
    )
    parser.parse_args()
    if not PYTHON.exists():
        parser.exit(2, f"trl.py: {MISSING}\n")
    print(table(compare()))


if __name__ == "__main__":
    if sys.argv[-1] in SIDES:  # a process of `compare`
        one_side(sys.argv[-1])
    else:
        main()
