#!/usr/bin/env bash
# guard.sh FIRST RESTARTS_LEFT: requeues a job that has lost its first node. It runs for as long as the job, on one or two of the other nodes,
# outside any container. With the first node, the script that would requeue the job is lost too, and because of --no-kill Slurm keeps the job
# running without it. So one of the remaining nodes requeues the job, once Slurm has removed the first node from it.
set -uo pipefail
first=$1 restarts_left=$2 # how many more times the job may be requeued

field() { grep -oP " $1=\K\S+" <<<"$job"; } # prints a field of Slurm's description of the job

while sleep $((30 + RANDOM % 30)); do # random, so that jobs, and the two nodes of a job, ask at different times
    job=$(timeout 60 scontrol --oneliner show job "$SLURM_JOB_ID") || continue
    # Act only on the start of the job that this script belongs to: a node that was cut off for a while may see a later one.
    [[ $(field JobState) == RUNNING && $(field Restarts) == "${SLURM_RESTART_COUNT:-0}" ]] || continue
    nodes=$(scontrol show hostnames "$(field NodeList)") || continue
    if [[ -z $nodes ]] || grep -qx "$first" <<<"$nodes"; then continue; fi
    answer=$(timeout 5 bash -c ": <'/dev/tcp/$first/1'" 2>&1)
    [[ $answer != *refused* ]] || continue # the node is up, and so is the job's script on it: only slurmd has ended there
    if ((restarts_left > 0)); then
        echo "megarl: $first, the first node, is lost: queued again"
        # If two nodes do this, the second one finds the job no longer running. After a timeout (124), the loop tries again.
        timeout 60 scontrol requeue "$SLURM_JOB_ID" || (($? == 124)) || scancel --state=RUNNING "$SLURM_JOB_ID"
    else
        echo "megarl: $first, the first node, is lost: cancelled, for no restart is left (--max-restarts, or a chain)"
        scancel "$SLURM_JOB_ID"
    fi
done
