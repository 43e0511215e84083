#!/usr/bin/env bash
# From nothing to a trained policy: set-up, tiny model, data, supervised warm start, reinforcement learning.
#
#     bash examples/quickstart.sh [a.b=c ...]     SEED=2 bash examples/quickstart.sh layout.ranks=2 layout.tp=2 layout.ep=2
#
# SEED (1) seeds all of it and names the runs. Arguments are overrides of the RL job's configuration. What is done is not done again:
# delete runs/quickstart-seed$SEED to start over.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

seed=${SEED:-1}
[[ $seed =~ ^[0-9]+$ ]] || { echo "quickstart: error: SEED: $seed is not a number" >&2; exit 2; }
run=quickstart-seed$seed
base=runs/$run/tiny
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

report=()
# step NAME OUTPUT COMMAND...: runs the command unless its output, which it makes last, is there.
step() {
    local name=$1 output=$2 begun=$SECONDS
    shift 2
    if [[ -e $output ]]; then
        report+=("$(printf '%-12s %s' "$name" "was there: $output")")
        return
    fi
    echo "quickstart: $name"
    "$@"
    report+=("$(printf '%-12s %4ds' "$name" $((SECONDS - begun)))")
}

make_model() {
    rm -rf "$base.partial"
    .venv/bin/python tools/make_tiny_model.py "$base.partial" --seed "$seed"
    mv "$base.partial" "$base"
}

begun=$SECONDS
bash tools/setup.sh
report+=("$(printf '%-12s %4ds' set-up $((SECONDS - begun)))")
mkdir -p "runs/$run"
data=runs/$run/demonstrations.jsonl
step "tiny model" "$base" make_model
step "data" "$data" .venv/bin/python examples/make_data.py quickstart --seed "$seed" --out "$data"
step "warm start" "runs/$run/sft/summary.json" \
    .venv/bin/megarl sft examples/quickstart/sft.yaml "name=$run/sft" "seed=$seed" "model.path=$base" "data.train.path=$data"
if (($#)) && [[ -e runs/$run/rl/summary.json ]]; then
    echo "quickstart: error: runs/$run/rl is done, and the overrides ($*) would not be used: delete it, or choose another SEED" >&2
    exit 2
fi
step "RL" "runs/$run/rl/summary.json" \
    .venv/bin/megarl train examples/quickstart/rl.yaml "name=$run/rl" "seed=$seed" "model.path=runs/$run/sft/model" "model.base=$base" "$@"

echo
printf 'quickstart: %s\n' "${report[@]}"
echo "quickstart: runs/$run/rl/summary.json:"
cat "runs/$run/rl/summary.json"
