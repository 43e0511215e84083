#!/usr/bin/env bash
# Runs on one or two nodes of a job other than its first, outside any container: guard.sh FIRST RESTARTS_LEFT. It lasts as long as the job.
# If the first node is lost, so is the script that would requeue the job; and Slurm, which must not end a job that loses a node
# (--no-kill), keeps the job running without it. So one of the remaining nodes requeues it, once Slurm has given up the first.
set -uo pipefail
first=$1 restarts_left=$2 # how often the job may still be requeued

field() { grep -oP " $1=\K\S+" <<<"$job"; } # a field of Slurm's description of the job

while sleep $((30 + RANDOM % 30)); do # so that neither all jobs nor both nodes ask at the same time
    job=$(timeout 60 scontrol --oneliner show job "$SLURM_JOB_ID") || continue
    # Only this start of the job counts: a node that was cut off for a while may find the next start.
    [[ $(field JobState) == RUNNING && $(field Restarts) == "${SLURM_RESTART_COUNT:-0}" ]] || continue
    nodes=$(scontrol show hostnames "$(field NodeList)") || continue
    if [[ -z $nodes ]] || grep -qx "$first" <<<"$nodes"; then continue; fi
    answer=$(timeout 5 bash -c ": <'/dev/tcp/$first/1'" 2>&1)
    [[ $answer != *refused* ]] || continue # the node is up, and so is its script: only its slurmd has ended
    if ((restarts_left > 0)); then
        echo "megarl: $first, the first node, is lost: queued again"
        # One of two nodes comes first: for the other, the job is no longer running. A controller that is late (124) is asked again.
        timeout 60 scontrol requeue "$SLURM_JOB_ID" || (($? == 124)) || scancel --state=RUNNING "$SLURM_JOB_ID"
    else
        echo "megarl: $first, the first node, is lost: cancelled, for no restart is left (--max-restarts, or a chain)"
        scancel "$SLURM_JOB_ID"
    fi
done
