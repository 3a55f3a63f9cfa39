"""vllm_gpu.py - does vLLM sample from the weights that were trained? On the GPU of this machine, in
a few minutes:

    python benchmarks/vllm_gpu.py

A small random model, whose tokens are not equally likely, is trained for three steps with a high
learning rate, with vLLM's first model runner (VLLM_USE_V2_MODEL_RUNNER=0) and with the one that it
takes. Each run must end well, with log-probs near the trainer's (gap below 0.05) and far from the
starting policy (KL above 1). Then vLLM keeps the weights of the start: this run must be stopped,
because engine and trainer disagree.

(With vLLM's CPU build it runs without a GPU, in fp32, and both runners are the first.)
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from models.vllm_engine import VllmEngine
from support.files import read_jsonl
from support.ranks import leave_ranks
from support.settings import vllm_is_there

from transformers import Qwen2Config

import rlver
from benchmarks import gpu

# in heads of 128 numbers, and with tied embeddings, like the small Qwens
SHAPE = dict(zip(gpu.SIZES, (256, 512, 2, 2, 1, 1024, True)))
FLAGS = (
    "--engine vllm --algo ppo --steps 3 --batch-size 8 --max-turns 2 --max-tokens 16 "
    "--eval-size 4 --lr 1e-2 --warmup 0 --save-every 99"
)


def stale(flags):
    """rlver.py whose vLLM is given the first weights at every sync."""
    load, first = VllmEngine.load_weights, []

    def load_first(self, named_tensors):
        named_tensors = [(name, tensor.clone()) for name, tensor in named_tensors]
        first[:] = first or named_tensors
        load(self, first)

    VllmEngine.load_weights = load_first
    return rlver.main(flags)


def main():
    """Print a line for each of the three runs. Returns the exit code."""
    if not vllm_is_there():
        print("vllm_gpu.py: vLLM is not installed: see requirements-vllm.txt", file=sys.stderr)
        return 2
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        model, out = f"{folder}/model", f"{folder}/run"
        config = Qwen2Config(**SHAPE, max_position_embeddings=2048, initializer_range=0.2)
        gpu.make_model("small", model, config)
        flags = ["--model", model, *FLAGS.split(), "--out"]
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        for runner in ("first", "usual"):
            code, outcome, seconds = gpu.child("rlver.py", *flags, out + runner, limit=240)
            if code == 0:
                rows = [row for _, row, _ in read_jsonl(f"{out}{runner}/metrics.jsonl")]
                gap, kl = max(row["logp_gap"] for row in rows), rows[-1]["kl_start"]
                code = not (gap < 0.05 and kl > 1)
                outcome = f"gap {gap:.1e}, KL from the start {kl:.1f}, {seconds:.0f} s"
            failed |= code != 0
            print(f"{runner} model runner: {outcome}")
            os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
        code, outcome, _ = gpu.child(__file__, "stale", *flags, out, limit=240)
        failed |= code != 1 or "engine and trainer disagree" not in outcome
        print(f"stale weights, exit code {code}: {outcome}\n{'failed' if failed else 'passed'}")
    return int(failed)


if __name__ == "__main__":
    leave_ranks(stale(sys.argv[2:]) if sys.argv[1:] else main())
