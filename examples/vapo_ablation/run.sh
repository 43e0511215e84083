#!/usr/bin/env bash
# VAPO, and VAPO without each of its seven parts, on the tiny model: a table and a picture in runs/vapo-ablation.
#
#     bash examples/vapo_ablation/run.sh [a.b=c ...] [--seeds 1 2 3]
#
# Run the quickstart first (it makes the tiny model). What is done is not done again: delete a run's directory to repeat it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

[[ -e runs/vapo-ablation/demonstrations.jsonl ]] || .venv/bin/python examples/make_data.py vapo-ablation
[[ -e runs/vapo-ablation/sft/summary.json ]] || .venv/bin/megarl sft examples/vapo_ablation/sft.yaml
exec .venv/bin/python tools/ablation.py examples/vapo_ablation/variants.yaml "$@"
