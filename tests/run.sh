#!/usr/bin/env bash
# The whole suite: set-up, lint, format, types, tests. Stops at the first that fails and says which; every part has a time limit.
# Arguments go to pytest.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE # each of the suite's processes would compile megarl anew

# part NAME SECONDS COMMAND...
part() {
    local name=$1 limit=$2 begun=$SECONDS status=0
    shift 2
    echo "== $name"
    # SIGINT, as from a person: pytest then tears its fixtures down and no process is left.
    timeout --foreground --signal=INT --kill-after=30 "$limit" "$@" </dev/null || status=$?
    if ((status)); then
        ((status == 124)) && echo "run.sh: $name: not done after ${limit}s"
        [[ $name == tests ]] || echo "run.sh: FAILED: $name (exit $status)"
        exit "$status"
    fi
    [[ $name == tests ]] || echo "   passed in $((SECONDS - begun))s" # pytest's own closing line is the last
}

# Slurm for the tests of tests/slurm, which are skipped without it: from Debian's packages, where root can install them.
slurm() {
    [[ -n $(PATH=$PATH:/usr/sbin type -P slurmctld slurmd munged shellcheck | sed -n 4p) ]] && return
    if ((EUID)) || ! type -P apt-get >/dev/null; then
        echo "   not here, and not installed: that needs root and apt-get"
        return
    fi
    local install=(timeout 200 apt-get -qq install --yes --no-install-recommends slurm-wlm munge shellcheck)
    export DEBIAN_FRONTEND=noninteractive
    { "${install[@]}" || { timeout 60 apt-get -qq update && "${install[@]}"; }; } &>/dev/null || echo "   apt-get cannot install it here"
}

# Triton, in whose interpreter the tests run the GPU's kernels (8 s, 690 MB): in a directory of its own, since on a CPU vLLM takes another path
# where it can import Triton. Nothing is done again: the copy of the hashes is written last.
triton() {
    cmp -s tools/triton.hashes .venv/triton/hashes && return
    rm -rf .venv/triton
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-deps --require-hashes --target .venv/triton \
        -r tools/triton.hashes && cp tools/triton.hashes .venv/triton/hashes && return
    echo "   cannot be installed here: its tests are skipped"
    [[ ${CI:-} != true ]]
}
export -f triton

part set-up 600 bash tools/setup.sh
part Triton 600 bash -c triton
echo "== Slurm"
slurm
part lint 60 .venv/bin/ruff check megarl tests tools examples
part format 60 .venv/bin/ruff format --check megarl tests tools examples
# On a busy machine its workers miss the 3 s in which they must start (mypy/defaults.py:60): then without them.
part types 300 bash -c '.venv/bin/mypy -n 2 || { (($? == 2)) && exec .venv/bin/mypy; }'
part tests 4200 .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=15 "$@"
