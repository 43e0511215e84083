#!/usr/bin/env bash
# Makes .venv (Python 3.11) with the pinned CPU stack and this package in it; with --gpu .venv-gpu, with that of a node with GPUs. Nothing is
# done again: the stamp, written last, holds the hash of what was installed. Both commands of the README call it; it can be called by hand, from
# any directory.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv lock=tools/cpu.lock hashes=tools/cpu.hashes
case "${1:-}" in
    "") ;;
    --gpu) venv=.venv-gpu lock=tools/gpu.lock hashes=tools/gpu.hashes ;;
    *) echo "setup: error: unknown argument $1 (--gpu is the only one)" >&2; exit 2 ;;
esac

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3.11}" python3 python; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            command -v "$candidate" && return
        fi
    done
    return 1
}

make_venv() {
    local python
    if python=$(find_python); then
        say "making $venv with $("$python" --version)"
        "$python" -m venv --clear "$venv"
    elif command -v uv >/dev/null; then
        say "making $venv with a Python 3.11 that uv finds or fetches"
        uv venv --quiet --seed --clear --python 3.11 "$venv" || die "uv has no Python 3.11 either (set PYTHON to one)"
    else
        die "no Python 3.11 with venv found (set PYTHON to one, or install uv, which fetches it)"
    fi
}

# One quiet pip run: its whole output goes to the log, its milestones to the console.
pip() {
    "$venv"/bin/python -m pip install --disable-pip-version-check --no-input --no-deps "$@" 2>&1 | tee -a "$venv"/setup.log | awk '
        /^Collecting / && ++found % 32 == 0 { print "setup:   " found " packages found"; fflush() }
        /^Installing collected packages/ { print "setup:   unpacking"; fflush() }'
}

install() {
    pip "$@" || {
        tail -n 15 "$venv"/setup.log >&2
        die "pip failed; the whole log: $venv/setup.log"
    }
}

# The indexes that pip would ask, as uv's options: of its environment, else of its files. `pip config get` fails where there is none.
pip_indexes() {
    local name variable value
    for name in index-url extra-index-url find-links; do
        variable=PIP_${name^^}
        variable=${variable//-/_}
        for value in ${!variable:-$("$venv"/bin/python -m pip config get "global.$name" 2>/dev/null)}; do
            printf '%s\n' "--$name" "$value"
        done
    done
}

# uv takes a third of pip's time. Like pip, it takes the version asked for from whichever index has it.
uv_install() {
    "$venv"/bin/uv pip install --python "$venv"/bin/python --no-deps --compile-bytecode --system-certs --index-strategy unsafe-best-match \
        "$@" >>"$venv"/setup.log 2>&1
}

# The public index holds torch's CUDA build under the same version. uv knows where PyTorch keeps the CPU build; where uv does not get through,
# pip may, which can be told of proxies and certificates that uv does not read. Every other file must have a hash of the list.
install_cpu_stack() {
    local torch indexes
    torch=$(grep '^torch==' "$lock")
    mapfile -t indexes < <(pip_indexes)
    if pip uv && { uv_install "${indexes[@]}" "$torch+cpu" || uv_install "${indexes[@]}" --torch-backend cpu "$torch"; }; then
        uv_install "${indexes[@]}" --require-hashes -r "$hashes" && return
    fi
    say "uv could not install them (see $venv/setup.log): trying pip"
    pip "$torch+cpu" && pip --require-hashes -r "$hashes" && return
    tail -n 15 "$venv"/setup.log >&2
    die "could not install the packages of $lock; if torch's CPU build is the problem, set PIP_EXTRA_INDEX_URL to an index that has it"
}

# Transformer Engine's part for torch is C++ that is compiled here: g++, and CUDA's headers from the packages that torch came with.
install_transformer_engine() {
    local package nvidia
    package=$(grep '^transformer-engine-torch==' "$lock")
    grep '^transformer-engine-torch==' "$hashes" >"$venv"/transformer-engine.txt
    nvidia=$PWD/$venv/lib/python3.11/site-packages/nvidia
    say "building $package against $(grep '^torch==' "$lock") (28 files; MAX_JOBS limits how many at a time)"
    # NVTE_PYTORCH_FORCE_BUILD: else it looks for a wheel elsewhere first.
    PATH=$PWD/$venv/bin:$PATH CUDA_HOME=$nvidia/cu13 CPATH=$nvidia/cudnn/include:$nvidia/nccl/include NVTE_PYTORCH_FORCE_BUILD=TRUE install --no-build-isolation \
        --require-hashes -r "$venv"/transformer-engine.txt
}

# Without a wheel for the machine's C library pip would build from source. Most need glibc 2.28; llguidance, which vLLM imports whenever it
# starts (v1/structured_output/backend_guidance.py:144), needs 2.31, or Rust to be built with.
check_libc() {
    local version
    version=$(getconf GNU_LIBC_VERSION 2>/dev/null) || die "the packages need glibc 2.28 or later, and this machine has another C library"
    version=${version#glibc }
    at_least 2.28 "$version" || die "the packages need glibc 2.28 or later (RHEL 8), and this machine has $version"
    if ! at_least 2.31 "$version" && ! command -v cargo >/dev/null; then
        die "llguidance has no wheel for glibc $version: install Rust (cargo), which builds it, or use glibc 2.31 or later (RHEL 9, Ubuntu 20.04)"
    fi
}

at_least() { [[ $(printf '%s\n' "$@" | sort -V | head -n 1) == "$1" ]]; }

# No wheel exists of pycosat, nor of Transformer Engine's part for torch: a compiler builds them with Python's headers. On GPU nodes Triton
# compiles its driver with both.
check_compiler() {
    local include
    include=$("$venv"/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')
    if ! command -v ${CC:-gcc clang} >/dev/null; then
        lacking "no C compiler (${CC:-gcc})"
    elif [[ ! -f $include/Python.h ]]; then
        lacking "no $include/Python.h: install python3.11-dev (Debian, Ubuntu) or python3.11-devel (RHEL), or set PYTHON to one of uv's"
    fi
}

# On a CPU it is no error, because pip's cache may have pycosat.
lacking() {
    [[ $venv == .venv ]] || die "transformer-engine-torch and pycosat are built here, and there is $1"
    "$venv"/bin/python -c 'import pycosat' 2>/dev/null || say "pycosat is built here, and there is $1"
}

# What a GPU run would meet first, by name.
check_gpu_stack() {
    "$venv"/bin/python - <<'EOF' || die "the GPU stack does not work"
import torch
import vllm
import transformer_engine.pytorch

assert torch.version.cuda, f"torch {torch.__version__} is no CUDA build"
if torch.cuda.is_available():
    from megarl.parallel.backend import choose

    print(f"setup: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, megarl runs on {choose(gpus=True).device}")
else:
    print("setup: everything imports; this machine shows no GPU, on which it would run")
EOF
}

exec 9<tools/setup.sh
command -v flock >/dev/null && flock 9 # two commands at once set up once

wanted=$(cat "$lock" "$hashes" pyproject.toml <(grep '^__version__' megarl/__init__.py) | sha256sum | cut -d' ' -f1)
if [[ -x $venv/bin/megarl && $(cat "$venv"/setup.stamp 2>/dev/null) == "$wanted" ]]; then
    exit 0
fi
rm -f "$venv"/setup.stamp
check_libc
# torch/utils/cpp_extension.py:866 adds -std=c++20.
if [[ $venv != .venv ]] && ! g++ -std=c++20 -fsyntax-only -x c++ - </dev/null 2>/dev/null; then
    die "transformer-engine-torch is built here and needs g++ 10 or later, which knows C++20 (on RHEL 8: gcc-toolset-12)"
fi

if ! "$venv"/bin/python -m pip --version >/dev/null 2>&1; then
    make_venv
fi
check_compiler
: >"$venv"/setup.log
if [[ $venv == .venv ]]; then
    say "installing $(grep -c == "$lock") pinned packages (a minute, 2.5 GB if nothing is installed yet)"
    install_cpu_stack
else
    say "installing $(grep -c == "$lock") pinned packages (10 GB)"
    # "===" takes no other build of the same version (2.13.0+cpu), which pip prefers where an index has one.
    grep -v '^transformer-engine-torch==' "$hashes" | sed 's/^\(torch[a-z]*\)==/\1===/' >"$venv"/gpu.txt
    install --require-hashes -r "$venv"/gpu.txt
    install_transformer_engine
fi
"$venv"/bin/python -c 'import torch' 2>>"$venv"/setup.log || die "torch does not import; see $venv/setup.log"
say "installing megarl"
install --no-build-isolation -e .
[[ $venv == .venv ]] || check_gpu_stack
printf '%s\n' "$wanted" >"$venv"/setup.stamp
say "ready after ${SECONDS}s"
