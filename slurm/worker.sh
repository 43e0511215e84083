#!/usr/bin/env bash
# Each further node of a job: worker.sh ALLOCATION PYTHON RESTARTS_LEFT. It joins the driver's Ray session, and ends with it.
set -euo pipefail
allocation=$1 python=$2 restarts_left=$3 # how often the job may still be queued again
ulimit -n "$(ulimit -Hn)"
ulimit -l "$(ulimit -Hl)" # memory that InfiniBand may pin
status=0
"$python" -m megarl.cluster.join "$allocation" || status=$?

# Where the first node is lost, so is the script that would queue the job again; and Slurm, which is not to end a job that loses a node
# (--no-kill), keeps this one without it. So a node that is left does it, once Slurm has given the first one up.
command -v scontrol >/dev/null || exit "$status"
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)
answer=$(timeout 5 bash -c ": <'/dev/tcp/$first/1'" 2>&1) || true
[[ $answer != *refused* ]] || exit "$status" # it is there
for ((tries = 0; tries < 120; tries++)); do
    nodes=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N) || exit "$status"
    if [[ -n $nodes ]] && ! scontrol show hostnames "$nodes" | grep -qx "$first"; then
        if ((restarts_left > 0)); then
            echo "megarl: $first, the first node, is lost: queued again"
            # Of several nodes one comes first: for the others the job runs no more.
            scontrol requeue "$SLURM_JOB_ID" || scancel --state=RUNNING "$SLURM_JOB_ID"
        else
            echo "megarl: $first, the first node, is lost: cancelled, for no restart is left (--max-restarts, or a chain)"
            scancel "$SLURM_JOB_ID"
        fi
        exit "$status"
    fi
    sleep 5
done
exit "$status"
