#!/usr/bin/env bash
# The paper's model on two nodes with eight GPUs each (docs/running.md). On the first node, then on the second:
#   HOST=first-node NODE=0 SIMULATOR=openai:MODEL@URL bash recipes/two_nodes.sh ppo --think
#   HOST=first-node NODE=1 SIMULATOR=openai:MODEL@URL bash recipes/two_nodes.sh ppo --think
# To resume, add --resume DIR to a torchrun command of your own.
set -euo pipefail
cd "$(dirname "$0")/.."
algo=${1:?ppo or grpo is needed}
shift
exec torchrun --nnodes 2 --node-rank "${NODE:?0 or 1 is needed}" --nproc-per-node "${GPUS:-8}" \
    --master-addr "${HOST:?the address of the first node is needed}" --master-port 29500 rlver.py --algo "$algo" \
    --model "${MODEL:-Qwen/Qwen2.5-7B-Instruct}" --simulator "${SIMULATOR:?openai:MODEL@URL is needed}" \
    --profiles prompts/profiles/en_train.jsonl prompts/profiles/en_test.jsonl "$@"
