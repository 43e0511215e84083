#!/usr/bin/env bash
# worker.sh ALLOCATION PYTHON: runs on every other node of a job. It joins the driver's Ray session, and ends with it.
set -euo pipefail
allocation=$1 python=$2
ulimit -n "$(ulimit -Hn)"
ulimit -l "$(ulimit -Hl)" # the limit on memory that InfiniBand can pin
exec "$python" -m megarl.cluster.join "$allocation"
