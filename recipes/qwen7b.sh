#!/usr/bin/env bash
# The paper's model and settings on one node with eight GPUs; the user is a model behind a server. The 16 people here
# are too few (docs/running.md).
#   SIMULATOR=openai:deepseek-chat@https://HOST/v1 RLVER_API_KEY=... bash recipes/qwen7b.sh ppo --think
# The first word is ppo or grpo; flags of rlver.py may follow. The defaults for a real model are the paper's (appendix B).
set -euo pipefail
cd "$(dirname "$0")/.."
algo=${1:?ppo or grpo is needed}
shift
exec torchrun --nproc-per-node "${GPUS:-8}" rlver.py --algo "$algo" \
    --model "${MODEL:-Qwen/Qwen2.5-7B-Instruct}" --simulator "${SIMULATOR:?openai:MODEL@URL is needed}" \
    --profiles prompts/profiles/en_train.jsonl prompts/profiles/en_test.jsonl "$@"
