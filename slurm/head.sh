#!/usr/bin/env bash
# head.sh ALLOCATION PYTHON VERB CONFIG: runs the driver on the first node of a job. It starts Ray there, and waits for the other nodes.
set -euo pipefail
allocation=$1 python=$2 verb=$3 config=$4
ulimit -n "$(ulimit -Hn)"
ulimit -l "$(ulimit -Hl)" # the limit on memory that InfiniBand can pin
: >"$allocation/started" # otherwise srun's own status would be taken for the driver's
exec "$python" -m megarl.cli "$verb" "$config" "cluster.allocation=$allocation"
