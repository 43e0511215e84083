#!/usr/bin/env bash
# The driver, on the first node of a job: head.sh ALLOCATION PYTHON VERB CONFIG. It starts Ray here, and waits for the other nodes.
set -euo pipefail
allocation=$1 python=$2 verb=$3 config=$4
ulimit -n "$(ulimit -Hn)"
ulimit -l "$(ulimit -Hl)" # memory that InfiniBand may pin
exec "$python" -m megarl.cli "$verb" "$config" "cluster.allocation=$allocation"
