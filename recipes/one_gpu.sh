#!/usr/bin/env bash
# One GPU: can the model behind the server play the user? Then a model is trained on it.
#   MODEL=Qwen/Qwen2.5-1.5B-Instruct SIMULATOR=openai:USER_MODEL@URL RLVER_API_KEY=... PROFILES="TRAIN TEST" \
#       bash recipes/one_gpu.sh grpo --think
#   MODEL=DIR READER=local:DIR bash recipes/one_gpu.sh grpo --think --engine torch --steps 24 --warmup 2
#       no server: the toy's user speaks, and the model READER determines what it feels
#   CARD=24 ...                                         on a larger card, as if it had 24 GB (benchmarks/card.py)
# docs/running.md says what fits on which card, and where there are more people.
# The first measurement takes about 100 calls; the training begins unless the verdict is "unfit".
set -euo pipefail
cd "$(dirname "$0")/.."
algo=${1:?ppo or grpo is needed}
shift
if [ -n "${READER:-}" ]; then
    user=(--simulator toy --reader "$READER")
    people=()
else
    user=(--simulator "${SIMULATOR:?openai:USER_MODEL@URL is needed, or READER}")
    people=(--profiles ${PROFILES:-prompts/profiles/en_train.jsonl prompts/profiles/en_test.jsonl})
    [ -n "${PROFILES:-}" ] || echo 'The sixteen people here are too few to learn what helps others; better: PROFILES="TRAIN TEST"'
fi
python=(python ${CARD:+benchmarks/card.py "$CARD"})
"${python[@]}" -m tools.fitness "${user[@]}"
exec "${python[@]}" rlver.py --algo "$algo" --lora-rank 32 --model "${MODEL:-Qwen/Qwen2.5-1.5B-Instruct}" \
    "${user[@]}" "${people[@]}" "$@"
