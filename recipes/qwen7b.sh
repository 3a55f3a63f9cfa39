#!/usr/bin/env bash
# The paper's model and settings on one node with eight GPUs; the user is a model behind a server.
#   SIMULATOR=openai:MODEL@https://HOST/v1 RLVER_API_KEY=... PROFILES="TRAIN TEST" bash recipes/qwen7b.sh ppo --think
# The first word is ppo or grpo; flags of rlver.py may follow. The defaults for a real model are the paper's (appendix B):
# days. For an hour that teaches something and loses nothing:  ... qwen7b.sh grpo --think --steps 12 --warmup 2 --save-every 4
# torchrun gives each rank one thread, with which loading a 7B takes minutes. At Ctrl-C or SIGTERM it waits 30 seconds,
# but a step may have to be finished, and a checkpoint of 176 GB written.
set -euo pipefail
cd "$(dirname "$0")/.."
algo=${1:?ppo or grpo is needed}
shift
[ -n "${PROFILES:-}" ] || echo 'The sixteen people here are too few to learn what helps others; better: PROFILES="TRAIN TEST"'
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
exec torchrun --nproc-per-node "${GPUS:-8}" --shutdown-timeout 900 rlver.py --algo "$algo" --engine vllm \
    --model "${MODEL:-Qwen/Qwen2.5-7B-Instruct}" --simulator "${SIMULATOR:?openai:USER_MODEL@URL is needed}" \
    --profiles ${PROFILES:-prompts/profiles/en_train.jsonl prompts/profiles/en_test.jsonl} "$@"
