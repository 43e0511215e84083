#!/usr/bin/env bash
# The tests that need a GPU, on a node that has one, in an environment of their own: .venv-gpu. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1

bash tools/setup.sh --gpu
.venv-gpu/bin/python -c 'import torch; torch.cuda.init()' || { echo "gpu.sh: CUDA shows no GPU here" >&2; exit 1; }
exec .venv-gpu/bin/python -m pytest -m gpu --durations=15 "$@"
