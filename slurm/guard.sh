#!/usr/bin/env bash
# On one or two nodes of a job that are not its first, outside of a container: guard.sh FIRST RESTARTS_LEFT. It lasts as long as the job.
# Where the first node is lost, so is the script that would queue the job again; and Slurm, which is not to end a job that loses a node
# (--no-kill), keeps this one without it. So a node that is left does it, once Slurm has given the first one up.
set -uo pipefail
first=$1 restarts_left=$2 # how often the job may still be queued again

field() { grep -oP " $1=\K\S+" <<<"$job"; } # of what Slurm says of the job

while sleep $((30 + RANDOM % 30)); do # neither all jobs nor both nodes ask at the same time
    job=$(timeout 60 scontrol --oneliner show job "$SLURM_JOB_ID") || continue
    # Not of this start: a node that was cut off for a while finds the next one.
    [[ $(field JobState) == RUNNING && $(field Restarts) == "${SLURM_RESTART_COUNT:-0}" ]] || continue
    nodes=$(scontrol show hostnames "$(field NodeList)") || continue
    if [[ -z $nodes ]] || grep -qx "$first" <<<"$nodes"; then continue; fi
    answer=$(timeout 5 bash -c ": <'/dev/tcp/$first/1'" 2>&1)
    [[ $answer != *refused* ]] || continue # it is there, and so is its script: only its slurmd has ended
    if ((restarts_left > 0)); then
        echo "megarl: $first, the first node, is lost: queued again"
        # Of two nodes one comes first: for the other the job runs no more. A controller that is late (124) is asked again.
        timeout 60 scontrol requeue "$SLURM_JOB_ID" || (($? == 124)) || scancel --state=RUNNING "$SLURM_JOB_ID"
    else
        echo "megarl: $first, the first node, is lost: cancelled, for no restart is left (--max-restarts, or a chain)"
        scancel "$SLURM_JOB_ID"
    fi
done
