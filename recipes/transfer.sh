#!/usr/bin/env bash
# Does it carry over? The toy's policy is trained with each of two users and met by each of them: the toy's script
# (toy), and the same people when a language model hears (reader). A table of two by two, three seeds each.
#   READER=DIR bash recipes/transfer.sh                   into runs/transfer
#   bash recipes/transfer.sh runs/short 8 --steps 2       directory, users to measure with, flags of rlver.py
# The same command goes on where it was stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/transfer}
limit=${2:-32}
shift $(($# < 2 ? $# : 2))
declare -A hears=([toy]="" [reader]="--reader local:${READER:-Qwen/Qwen2.5-Coder-1.5B-Instruct}")
# Three replies from 30, so 60 is the most: a language model takes more than a second to hear a reply.
measure() {   # policy, its name, further flags
    for user in toy reader; do
        python evaluate.py --policy "$1" --simulator toy ${hears[$user]} --start 30 --max-turns 3 --limit "$limit" \
            --out "$out/$2-on-$user.jsonl" "${@:3}"
    done
}
for seed in 0 1 2; do
    for trained in toy reader; do
        run="$out/$trained-$seed"
        if [ -e "$run/config.json" ]; then
            python rlver.py --resume "$run"
        else
            python rlver.py --algo grpo ${hears[$trained]} --max-turns 3 --batch-size 24 --group-size 6 --steps 24 \
                --lr 8e-4 --eval-size 8 --seed "$seed" --out "$run" "$@"
        fi
        measure "$run" "$trained-$seed"
    done
    measure "$out/toy-$seed" "untrained-$seed" --step 0
done
echo "trained with, met by: the score of each seed"
for name in {untrained,toy,reader},{toy,reader}; do
    scores=$(for seed in 0 1 2; do python evaluate.py --score "$out/${name%,*}-$seed-on-${name#*,}.jsonl"; done)
    echo "$name:" $(awk '/^all/ {print $2}' <<< "$scores")
done
