#!/usr/bin/env bash
# The paper's Table 3 on the toy: which user should one train with? Four policies, thinking and direct, trained
# with the vanilla and with the challenging user, are each measured with both. Eight minutes on two cores.
#   bash recipes/environments.sh                                      into runs/environments
#   bash recipes/environments.sh runs/short 8 --steps 2               directory, users to measure with, flags of rlver.py
# The same command continues a run that was stopped.
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/environments}
limit=${2:-128}
shift $(($# < 2 ? $# : 2))

for mode in think direct; do
    for trained in vanilla challenging; do
        run="$out/$mode-$trained"
        think=()
        [ "$mode" = direct ] || think=(--think)
        if [ -e "$run/config.json" ]; then
            python rlver.py --resume "$run"
        else
            python rlver.py --algo grpo "${think[@]}" --difficulty "$trained" --out "$run" "$@"
        fi
        for user in vanilla challenging; do
            python evaluate.py --policy "$run" --difficulty "$user" --limit "$limit" --out "$run/on-$user.jsonl"
        done
    done
done
echo "policy, measured with: score, its standard error, success, failure, users"
for file in "$out"/*/on-*.jsonl; do
    name=$(basename "$(dirname "$file")") user=$(basename "$file" .jsonl)
    echo "$name, ${user#on-}: $(python evaluate.py --score "$file" | grep '^all' | tr -s ' ')"
done
