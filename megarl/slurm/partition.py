"""The partition in which a job is to run: its nodes, and what it refuses, compared before the job would wait in the queue for ever."""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from megarl.errors import ConfigError
from megarl.slurm.commands import NoAnswer, call
from megarl.slurm.job import Job, seconds
from megarl.text.display import one_line

EARLY_S = 60  # how much earlier Slurm may warn


@dataclass(frozen=True)
class Partition:
    """The nodes that a job may get, and the limits of jobs there."""

    name: str
    nodes: int
    sizes: tuple[tuple[int, int], ...]  # CPUs and GPUs of each node that is switched on
    state: str = "UP"
    default_time: int | None = None  # in seconds, of a job without a time limit; None for no limit, as below
    max_time: int | None = None
    max_nodes: int | None = None
    accounts: tuple[str, ...] | None = None  # that may use it; None for all
    denied: tuple[str, ...] = ()  # accounts
    qos: tuple[str, ...] | None = None  # that jobs may have; None for all
    denied_qos: tuple[str, ...] = ()


def partition_of(job: Job) -> Partition:
    """Return the job's partition, or the default one. Raises ConfigError if there is none, NoAnswer if Slurm's output is not understood."""
    rows = [
        dict(part.partition("=")[::2] for part in line.split()) for line in call("scontrol", "--oneliner", "show", "partition").splitlines()
    ]
    partitions = {row["PartitionName"]: row for row in rows if "PartitionName" in row}
    target = job.partition or next((name for name, row in partitions.items() if row.get("Default") == "YES"), None)
    if target not in partitions:
        request = f"--partition {job.partition}" if job.partition else "no --partition, and no default one"
        raise ConfigError(f"slurm: {request}: this cluster has {', '.join(partitions) or 'none'}")
    row = partitions[target]
    nodes = call("sinfo", "--noheader", "--Node", f"--partition={target}", "--format=%c|%G").splitlines()
    try:
        sizes = [(int(cpus), _gpus(of)) for cpus, of in (line.split("|", 1) for line in nodes)]
        most = row.get("MaxNodes", "UNLIMITED")
        max_time = seconds(row.get("MaxTime", "UNLIMITED"))
        default = row.get("DefaultTime", "NONE")
        return Partition(
            target,
            int(row["TotalNodes"]),
            tuple(sizes),
            state=row.get("State", "UP"),
            default_time=max_time if default == "NONE" else seconds(default),
            max_time=max_time,
            max_nodes=None if most == "UNLIMITED" else int(most),
            accounts=None if (names := row.get("AllowAccounts", "ALL")) == "ALL" else _names(names),
            denied=_names(row.get("DenyAccounts", "")),
            qos=None if (names := row.get("AllowQos", "ALL")) == "ALL" else _names(names),
            denied_qos=_names(row.get("DenyQos", "")),
        )
    except (KeyError, ValueError):
        answers = one_line(f"{row}, {nodes}", 200)
        raise NoAnswer(f"slurm: cannot read what scontrol and sinfo say of partition {target}: {answers}") from None


def _names(names: str) -> tuple[str, ...]:
    return tuple(name.lower() for name in names.split(",") if name)


def _gpus(resources: str) -> int:
    """The GPUs in what sinfo calls GRES: "gpu:h100:8(S:0-1),tmp:1"."""
    return sum(int(count) for count in re.findall(r"\bgpu:(?:[^:,(]+:)?(\d+)", resources))


def check_partition(job: Job, partition: Partition) -> None:
    """Raise ConfigError if the partition has too few nodes, or too few GPUs in each."""
    fitting = partition.nodes - sum(gpus < job.counted_gpus for _, gpus in partition.sizes)
    if not fitting and partition.sizes:
        most = max(gpus for _, gpus in partition.sizes)
        raise ConfigError(f"slurm: --gpus-per-node {job.gpus_per_node}: a node of partition {partition.name} has {most}")
    spare = f" and --spare {job.spare}" if job.spare else ""
    if job.nodes + job.spare > fitting:
        of = f" with {job.gpus_per_node} GPUs" if job.counted_gpus else ""
        raise ConfigError(f"slurm: --nodes {job.nodes}{spare}: partition {partition.name} has {fitting}{of}")
    if partition.max_nodes is not None and job.nodes + job.spare > partition.max_nodes:
        raise ConfigError(f"slurm: --nodes {job.nodes}{spare}: partition {partition.name} gives a job {partition.max_nodes} (MaxNodes)")


def check_limits(job: Job, partition: Partition) -> None:
    """Raise ConfigError if the partition takes no jobs, none of this account or QOS, or none of this time limit."""
    if partition.state != "UP":
        raise ConfigError(f"slurm: partition {partition.name} is {partition.state.lower()}: it starts no jobs (State)")
    if job.account is not None:
        check_account(job.account.lower(), partition)
    if job.qos is not None:
        check_qos(job.qos, partition)
    if job.time is None:
        if partition.default_time is not None:
            by = "MaxTime" if partition.default_time == partition.max_time else "DefaultTime"
            limit = f"no --time: partition {partition.name} ends a job after {partition.default_time} s ({by})"
            check_grace(limit, partition.default_time, job.grace)
    elif partition.max_time is not None and (job.seconds is None or job.seconds > partition.max_time):
        request = "no limit" if job.seconds is None else f"{job.seconds} s"
        raise ConfigError(f"slurm: --time {job.time} is {request}: partition {partition.name} allows {partition.max_time} s (MaxTime)")


def check_account(account: str, partition: Partition) -> None:
    """Raise ConfigError if the partition takes no jobs of an account. A newer Slurm takes those of accounts below the allowed ones, too."""
    if partition.accounts is None:
        if account in partition.denied:
            raise ConfigError(f"slurm: --account {account}: partition {partition.name} takes none of its jobs (DenyAccounts)")
    elif account not in partition.accounts and not set(_above(account)) & set(partition.accounts):
        accounts = ", ".join(partition.accounts)
        raise ConfigError(f"slurm: --account {account}: partition {partition.name} takes jobs of {accounts} (AllowAccounts)")


def check_qos(qos: str, partition: Partition) -> None:
    """Raise ConfigError if the partition takes no jobs of a QOS, or of any of several, separated by commas."""
    names = set(_names(qos))
    if partition.qos is None:
        if names and names <= set(partition.denied_qos):
            raise ConfigError(f"slurm: --qos {qos}: partition {partition.name} takes none of its jobs (DenyQos)")
    elif not names & set(partition.qos):
        raise ConfigError(f"slurm: --qos {qos}: partition {partition.name} takes jobs of {', '.join(partition.qos)} (AllowQos)")


def _above(account: str) -> Iterator[str]:
    """The accounts above one, as far as the accounting tells."""
    accounts = {account}
    with suppress(NoAnswer):
        while True:
            where = ("show", "associations", f"account={account}", "format=parentname")
            parents = call("sacctmgr", "--noheader", "--parsable2", *where).lower().split()
            if not parents or parents[0] in accounts:
                return
            account = parents[0]
            accounts.add(account)
            yield account


def check_grace(limit: str, limit_s: int, grace: int) -> None:
    """Raise ConfigError if a time limit leaves nothing to train in: the job would start, save and requeue for ever.

    Args:
        limit: what sets the limit, for the message.
        limit_s: the limit.
        grace: how long before it Slurm is to warn.
    """
    if limit_s <= grace + EARLY_S:
        raise ConfigError(f"slurm: {limit}, of which --grace {grace}, and {EARLY_S} that Slurm may warn earlier, leave nothing to train in")
