#!/usr/bin/env bash
# Does it carry over? The toy's policy is trained with each of two users and met by each of them: by the strict one
# (toy) and by one that can be hacked (toy-weak). A table of two by two, three seeds each.
#   bash recipes/transfer.sh                              into runs/transfer
#   bash recipes/transfer.sh runs/short 8 --steps 2       directory, users to measure with, flags of rlver.py
# The same command goes on where it was stopped.
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
echo "trained with, met by: the score of each seed"
for trained in untrained $users; do
    for user in $users; do
        scores=$(for seed in 0 1 2; do python evaluate.py --score "$out/$trained-$seed-on-$user.jsonl"; done)
        echo "$trained, $user:" $(awk '/^all/ {print $2}' <<< "$scores")
    done
done
