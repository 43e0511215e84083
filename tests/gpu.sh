#!/usr/bin/env bash
# What needs a GPU, on a node that has one: the tests marked gpu (arguments go to pytest), then the parts of tests/gpu, in an environment of
# their own, .venv-gpu. On a machine with nothing but PyTorch:
#
#     bash tests/gpu.sh --bare [--wheels DIR] [ARGUMENT ...]
#
# runs the parts alone, in the Python that is there, with what the folder of wheels has; the arguments are those of tests/gpu/__main__.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

if [[ ${1:-} == --bare ]]; then
    shift
    python=${PYTHON:-python3}
    cores=$(nproc)
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cores < 8 ? cores : 8))}"
    if [[ ${1:-} == --wheels ]]; then
        site=$(mktemp -d)
        trap 'rm -rf "$site"' EXIT
        "$python" -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check --target "$site" "$2"/*.whl
        export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
        shift 2
    fi
    "$python" -m tests.gpu "$@"
    exit
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
bash tools/setup.sh --gpu
.venv-gpu/bin/python -c 'import torch; torch.cuda.init()' || { echo "gpu.sh: CUDA shows no GPU here" >&2; exit 1; }
status=0
.venv-gpu/bin/python -m pytest -m gpu --durations=15 "$@" || status=$?
.venv-gpu/bin/python -m tests.gpu || status=$?
exit $status
