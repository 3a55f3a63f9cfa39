#!/usr/bin/env bash
# One GPU: can the model behind the server play the user? Then a model is trained on it.
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct SIMULATOR=openai:MODEL@URL RLVER_API_KEY=... bash recipes/one_gpu.sh grpo --think
# docs/running.md says what fits on which card, and where there are more than the 16 people here, which are too few.
# The first measurement takes about 100 calls; the training begins unless the verdict is "unfit".
set -euo pipefail
cd "$(dirname "$0")/.."
algo=${1:?ppo or grpo is needed}
shift
user=${SIMULATOR:?openai:MODEL@URL is needed}
python -m tools.fitness --simulator "$user"
exec python rlver.py --algo "$algo" --lora-rank 32 --model "${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}" --simulator "$user" \
    --profiles prompts/profiles/en_train.jsonl prompts/profiles/en_test.jsonl "$@"
