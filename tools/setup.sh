#!/usr/bin/env bash
# Makes .venv with the pinned CPU stack and this package in it; with --gpu .venv-gpu, with that of a node with GPUs. Python is 3.12, or 3.11 where
# 3.12 is not here or no index has torch's CPU build for it; PYTHON names another command. Nothing is done again: the stamp, written last, holds
# the hash of what was installed. Both commands of the README call it; it can be called by hand, from any directory.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

venv=.venv lock=tools/cpu.lock hashes=tools/cpu.hashes size="a minute, 2.5 GB if nothing is installed yet"
case "${1:-}" in
    "") ;;
    --gpu) venv=.venv-gpu lock=tools/gpu.lock hashes=tools/gpu.hashes size="10 GB" ;;
    *) echo "setup: error: unknown argument $1 (--gpu is the only one)" >&2; exit 2 ;;
esac

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: error: %s\n' "$*" >&2; exit 1; }

# The commands of the Pythons that serve, the main line first; PYTHON alone, where it is set.
pythons() {
    local version command commands
    for version in 3.12 3.11; do
        commands=("python$version" python3 python)
        [[ -z ${PYTHON:-} ]] || commands=("$PYTHON")
        for command in "${commands[@]}"; do
            if "$command" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
                command -v "$command"
                break
            fi
        done
    done
}

# On a CPU with the first Python for which an index has torch's CPU build, which it then has; with the first of all where none has.
make_venv() {
    local commands python why=
    mapfile -t commands < <(pythons)
    if [[ -z ${commands[0]:-} ]]; then
        [[ -z ${PYTHON:-} ]] || die "PYTHON=$PYTHON is no Python 3.12 or 3.11 with venv"
        command -v uv >/dev/null || die "no Python 3.12 or 3.11 with venv found (set PYTHON to one, or install uv, which fetches it)"
        say "making $venv with a Python 3.12 that uv finds or fetches"
        uv venv --quiet --seed --clear --python 3.12 "$venv" || die "uv has no Python 3.12 either (set PYTHON to one, or to a 3.11)"
        begin
        return
    fi
    [[ -n ${PYTHON:-} || $("${commands[0]}" --version) == "Python 3.12"* ]] || why=" (no Python 3.12 is here)"
    for python in "${commands[@]}"; do
        make_venv_with "$python" "$why"
        [[ $venv == .venv ]] || return 0
        if install_cpu_torch; then
            cpu_torch=there
            return
        fi
        why=" (no index has torch's CPU build for $("$python" --version))"
    done
    cpu_torch=nowhere
    [[ $python == "${commands[0]}" ]] || make_venv_with "${commands[0]}" " (nor for $("$python" --version))"
}

make_venv_with() {
    say "making $venv with $("$1" --version)$2"
    "$1" -m venv --clear "$venv"
    begin
}

begin() {
    check_compiler
    : >"$venv"/setup.log
    say "installing $(grep -c == "$lock") pinned packages ($size)"
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
# pip may, which can be told of proxies and certificates that uv does not read.
install_cpu_torch() {
    local torch
    torch=$(grep '^torch==' "$lock")
    mapfile -t indexes < <(pip_indexes)
    if pip uv && { uv_install "${indexes[@]}" "$torch+cpu" || uv_install "${indexes[@]}" --torch-backend cpu "$torch"; }; then return; fi
    pip "$torch+cpu"
}

# What torch's CUDA build loads when it is imported. Without Triton: where vLLM finds that, it takes another path on a CPU.
install_cuda_torch() {
    local package
    say "no index has torch's CPU build for $("$venv"/bin/python --version) (PIP_EXTRA_INDEX_URL names others): taking the CUDA build, 3.5 GB more"
    for package in torch nvidia-{cublas,cuda-cupti,cuda-nvrtc,cuda-runtime,cudnn-cu13,cufft,cufile,curand,cusolver,cusparse,cusparselt-cu13} \
        nvidia-{nccl-cu13,nvjitlink,nvshmem-cu13,nvtx}; do
        grep "^$package==" tools/gpu.hashes
    done >"$venv"/cuda.txt
    install_hashed "$venv"/cuda.txt
}

# Every file must have a hash of the list.
install_hashed() {
    uv_install "${indexes[@]}" --require-hashes -r "$1" && return
    say "uv could not install them (see $venv/setup.log): trying pip"
    install --require-hashes -r "$1"
}

# Its wheels for Python 3.11 run there; only their metadata asks for 3.12.
install_megatron() {
    grep '^megatron-core==' "$hashes" >"$venv"/megatron.txt
    install --ignore-requires-python --require-hashes -r "$venv"/megatron.txt
}

# Transformer Engine's part for torch is C++ that is compiled here: g++, and CUDA's headers from the packages that torch came with.
install_transformer_engine() {
    local package nvidia
    package=$(grep '^transformer-engine-torch==' "$lock")
    grep '^transformer-engine-torch==' "$hashes" >"$venv"/transformer-engine.txt
    nvidia=$("$venv"/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    say "building $package against $(grep '^torch==' "$lock") (33 files; MAX_JOBS limits how many at a time)"
    # NVTE_PYTORCH_FORCE_BUILD: else it looks for a wheel elsewhere first. NVTE_WITH_NCCL_EP: that dispatcher needs NCCL 2.30.4, newer than torch's.
    PATH=$PWD/$venv/bin:$PATH CUDA_HOME=$nvidia/cu13 CPATH=$nvidia/cudnn/include:$nvidia/nccl/include NVTE_PYTORCH_FORCE_BUILD=TRUE \
        NVTE_WITH_NCCL_EP=0 install --no-build-isolation --require-hashes -r "$venv"/transformer-engine.txt
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
        lacking "no $include/Python.h: install ${include##*/}-dev (Debian, Ubuntu) or ${include##*/}-devel (RHEL), or set PYTHON to one of uv's"
    fi
}

# On a CPU it is no error, because pip's cache may have pycosat.
lacking() {
    [[ $venv == .venv ]] || die "transformer-engine-torch and pycosat are built here, and there is $1"
    "$venv"/bin/python -c 'import pycosat' 2>/dev/null || say "pycosat is built here, and there is $1"
}

# What a GPU run would meet first, by name. Transformer Engine loads only beside a driver (its core is linked to libcuda); `choose` loads it.
check_gpu_stack() {
    "$venv"/bin/python - <<'EOF' || die "the GPU stack does not work"
import torch
import vllm

assert torch.version.cuda, f"torch {torch.__version__} is no CUDA build"
if torch.cuda.is_available():
    from megarl.parallel.backend import choose

    print(f"setup: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}, megarl runs on {choose(gpus=True).device}")
else:
    print("setup: torch and vLLM import; this machine shows no GPU, and Transformer Engine does not load without a driver")
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

cpu_torch=unknown indexes=()
if "$venv"/bin/python -m pip --version >/dev/null 2>&1; then begin; else make_venv; fi
if [[ $venv == .venv ]]; then
    case $cpu_torch in
        unknown) install_cpu_torch || install_cuda_torch ;;
        nowhere) install_cuda_torch ;;
    esac
    grep -v '^megatron-core==' "$hashes" >"$venv"/packages.txt
    install_hashed "$venv"/packages.txt
else
    # "===" takes no other build of the same version (2.13.0+cpu), which pip prefers where an index has one.
    grep -Ev '^(transformer-engine-torch|megatron-core)==' "$hashes" | sed 's/^\(torch[a-z]*\)==/\1===/' >"$venv"/gpu.txt
    install --require-hashes -r "$venv"/gpu.txt
fi
install_megatron
[[ $venv == .venv ]] || install_transformer_engine
"$venv"/bin/python -c 'import torch' 2>>"$venv"/setup.log || die "torch does not import; see $venv/setup.log"
say "installing megarl"
install --no-build-isolation -e .
[[ $venv == .venv ]] || check_gpu_stack
printf '%s\n' "$wanted" >"$venv"/setup.stamp
say "ready after ${SECONDS}s"
