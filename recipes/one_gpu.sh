#!/usr/bin/env bash
# One GPU: can the model behind the server play the user? Then a model is trained on it.
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct SIMULATOR=openai:MODEL@URL RLVER_API_KEY=... bash recipes/one_gpu.sh grpo --think
# What fits is in the table "What fits on which card?" of docs/running.md (computed, not measured):
#   24 GB   0.5B and 1.5B with adapters, as below; with --lora-rank 0 the 0.5B by GRPO
#   80 GB   0.5B to 7B with adapters; with --lora-rank 0 the 0.5B, and the 1.5B by GRPO
# The first measurement takes about 100 calls; the training begins unless the verdict is "unfit". The 16 people here are
# too few; --profiles names others (docs/running.md).
set -euo pipefail
cd "$(dirname "$0")/.."
algo=${1:?ppo or grpo is needed}
shift
user=${SIMULATOR:?openai:MODEL@URL is needed}
python -m tools.fitness --simulator "$user"
exec python rlver.py --algo "$algo" --lora-rank 32 --model "${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}" --simulator "$user" \
    --profiles prompts/profiles/en_train.jsonl prompts/profiles/en_test.jsonl "$@"
