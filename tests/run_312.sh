#!/usr/bin/env bash
# The whole suite on Python 3.12 where no index has torch's CPU build for it: in .python312, a copy of the files with an environment of its own
# (6 GB, with PyTorch's CUDA build; delete the folder when done). Arguments go to pytest, PYTHON names the command.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
copy=.python312
mkdir -p "$copy"
find "$copy" -mindepth 1 -maxdepth 1 ! -name .venv -exec rm -rf {} +
git ls-files --cached --others --exclude-standard -z | tar --create --null --files-from=- --ignore-failed-read | tar --extract --directory="$copy"
cd "$copy"
export PYTHON=${PYTHON:-python3.12}
bash tools/setup.sh # which takes longer here than run.sh waits for
exec bash tests/run.sh "$@"
