#!/usr/bin/env bash
# Does training with one user help with another? The toy's policy is trained with each of two users, the strict one
# (toy) and one that can be hacked (toy-weak). It is measured with both, and so is the untrained policy. Three seeds.
#   bash recipes/transfer.sh                              into runs/transfer
#   bash recipes/transfer.sh runs/short 8 --steps 2       directory, users to measure with, flags of rlver.py
# The same command continues a run that was stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/transfer}
limit=${2:-128}
shift $(($# < 2 ? $# : 2))

users="toy toy-weak"

for seed in 0 1 2; do
    for trained in $users; do
        run="$out/$trained-$seed"
        if [ -e "$run/config.json" ]; then
            python rlver.py --resume "$run"
        else
            python rlver.py --algo grpo --simulator "$trained" --seed "$seed" --out "$run" "$@"
        fi
        for user in $users; do
            python evaluate.py --policy "$run" --simulator "$user" --limit "$limit" --out "$run-on-$user.jsonl"
        done
    done
    for user in $users; do
        python evaluate.py --policy "$out/toy-$seed" --step 0 --simulator "$user" --limit "$limit" \
            --out "$out/untrained-$seed-on-$user.jsonl"
    done
done
echo "trained with, measured with: the score of each seed"
for trained in untrained $users; do
    for user in $users; do
        scores=$(for seed in 0 1 2; do python evaluate.py --score "$out/$trained-$seed-on-$user.jsonl"; done)
        echo "$trained, $user:" $(awk '/^all/ {print $2}' <<< "$scores")
    done
done
