#!/usr/bin/env bash
# Does training with one user help with another (docs/results.md)? The toy's policy is trained with the toy's script
# and with a reader; both policies and the untrained one are measured with both users. Three seeds.
#   READER=DIR bash recipes/transfer.sh                   into runs/transfer; READER as in smollm2.sh
#   bash recipes/transfer.sh runs/short 8 --steps 2       directory, users to measure with, flags of rlver.py
#   SEEDS=1 bash recipes/transfer.sh                      one seed; several can run side by side
# The same command continues a run that was stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/transfer} limit=${2:-64} seeds=${SEEDS:-0 1 2} users="toy reader"
shift $(($# < 2 ? $# : 2))
toy=(--simulator toy)
reader=("${toy[@]}" --reader "local:${READER:-Qwen/Qwen2.5-Coder-1.5B-Instruct}")

# On two cores the reader takes seconds for a reply. So dialogues, batches and the runs' own evaluations are smaller
# than usual, and the rate is higher; it was chosen with seed 100 and the toy alone. ("${!flags}" is the array above
# whose name is in flags.)
for seed in $seeds; do
    for trained in $users untrained; do
        run="$out/$trained-$seed" policy=(--policy "$out/$trained-$seed") flags="$trained[@]"
        if [ "$trained" = untrained ]; then policy=(--policy "$out/toy-$seed" --step 0)
        elif [ -e "$run/config.json" ]; then python rlver.py --resume "$run"
        else python rlver.py --algo grpo "${!flags}" --max-turns 3 --steps 24 --batch-size 24 --lr 8e-4 --eval-size 8 \
            --seed "$seed" --out "$run" "$@"
        fi
        for user in $users; do
            flags="$user[@]"
            python evaluate.py "${policy[@]}" "${!flags}" --seed "$seed" --start 30 --max-turns 3 --limit "$limit" \
                --out "$out/$trained-$seed-on-$user.jsonl"
        done
    done
done
echo "trained with, measured with: the score of each seed"
for trained in untrained $users; do for user in $users; do
    scores=$(for seed in $seeds; do python evaluate.py --score "$out/$trained-$seed-on-$user.jsonl"; done)
    echo "$trained, $user:" $(awk '/^all/ {print $2}' <<< "$scores")
done; done
