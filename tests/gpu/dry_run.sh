#!/usr/bin/env bash
# The parts of tests/gpu on a simulated GPU, as a bare machine would run them: in its Python and its torch (a CUDA build: 3 GB to download, 6 GB in
# .venv-bare), from a copy of the files, megarl not installed, with nothing beside them but the wheels that the page names. Arguments are parts.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
venv=.venv-bare

if ! cmp -s tests/gpu/bare.txt "$venv"/installed.txt; then
    "${PYTHON:-python3.12}" -m venv --clear "$venv"
    "$venv"/bin/python -m pip install --quiet --disable-pip-version-check -r tests/gpu/bare.txt
    cp tests/gpu/bare.txt "$venv"/installed.txt
fi
python=$PWD/$venv/bin/python
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
mkdir "$copy"/files "$copy"/wheels
git ls-files --cached --others --exclude-standard -z | tar --create --null --files-from=- --ignore-failed-read | tar --extract --directory="$copy"/files
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 --dest "$copy"/wheels \
    -r tests/gpu/wheels.txt
cd "$copy"/files
PYTHON=$python bash tests/gpu.sh --bare --wheels "$copy"/wheels --simulated "$@"
