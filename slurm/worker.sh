#!/usr/bin/env bash
# Every other node of a job: worker.sh ALLOCATION PYTHON. It joins the driver's Ray session, and ends with it.
set -euo pipefail
allocation=$1 python=$2
ulimit -n "$(ulimit -Hn)"
ulimit -l "$(ulimit -Hl)" # memory that InfiniBand may pin
exec "$python" -m megarl.cluster.join "$allocation"
