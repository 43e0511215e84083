#!/usr/bin/env bash
# What needs a GPU, on a node that has one: the tests marked gpu (arguments go to pytest), then the five parts of tests/gpu, in an environment
# of their own, .venv-gpu. With --bare the parts alone (the arguments say which), in the Python that is there: see tests/gpu/__main__.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" HF_HUB_OFFLINE=1

if [[ ${1:-} == --bare ]]; then
    exec "${PYTHON:-python3}" -m tests.gpu "${@:2}"
fi
bash tools/setup.sh --gpu
.venv-gpu/bin/python -c 'import torch; torch.cuda.init()' || { echo "gpu.sh: CUDA shows no GPU here" >&2; exit 1; }
.venv-gpu/bin/python -m pytest -m gpu --durations=15 "$@"
exec .venv-gpu/bin/python -m tests.gpu
