"""Checks that refuse a job before it is submitted."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megarl.cli import VERBS
from megarl.cluster.allocation import NODES
from megarl.cluster.demand import demand
from megarl.cluster.placement import Node, NoRoom, ProcessKind, place
from megarl.config import ConfigError, RunSettings
from megarl.http_client import elsewhere
from megarl.imports import find
from megarl.slurm.commands import NoAnswer, call
from megarl.slurm.job import Job
from megarl.text import one_line

MOST = 100_000  # upper limit of any number
EARLY_S = 60  # how much earlier Slurm may warn
REGISTRY = re.compile(r"[a-z]+://|[^/]+[/#:]")


@dataclass(frozen=True)
class Partition:
    """The nodes that a job may get."""

    name: str
    nodes: int
    sizes: tuple[tuple[int, int], ...]  # CPUs and GPUs of each node that is switched on


def check(job: Job, config: RunSettings, asked: bool) -> Job:
    """Refuse a job that could not run as requested.

    Args:
        job: what is asked of Slurm.
        config: the run's configuration.
        asked: whether the script is only printed, which needs no Slurm on this machine.

    Returns:
        The job in the form that this cluster's Slurm accepts.

    Raises:
        ConfigError: the job is refused; the message gives the numbers.
    """
    check_texts(job)
    check_numbers(job)
    check_container(job)
    if config.cluster.address is not None or config.cluster.allocation is not None:
        raise ConfigError("slurm: cluster.address and cluster.allocation are the job's own: leave them out")
    if config.cluster.gpus != bool(job.gpus_per_node):
        gpus = str(config.cluster.gpus).lower()
        raise ConfigError(f"slurm: --gpus-per-node {job.gpus_per_node} does not go with cluster.gpus={gpus}")
    cpus = None
    try:
        job = replace(job, counts_gpus=not job.gpus_per_node or counts_gpus())
        partition = partition_of(job)
        check_partition(job, partition)
        cpus = min((cpus for cpus, gpus in partition.sizes if gpus >= job.counted_gpus), default=None)
    except NoAnswer as error:
        if not asked:
            raise
        print(f"megarl: not compared with the cluster: {error}", file=sys.stderr)
    check_filled(job, demand(config), cpus)
    check_python(job, version("torch"))
    with tempfile.TemporaryDirectory() as directory:
        planned: dict[str, Any] = {"nodes": [f"node {n}" for n in range(job.nodes)], "needed": job.nodes, "gpus": job.gpus_per_node}
        Path(directory, NODES).write_text(json.dumps(planned))
        cluster = config.cluster.model_copy(update={"allocation": Path(directory)})
        with elsewhere():
            find(VERBS[job.verb].check)(config.model_copy(update={"cluster": cluster}))
    return job


def check_numbers(job: Job) -> None:
    """Raise ConfigError for a number that is out of range."""
    lowest = {"nodes": 1, "gpus_per_node": 0, "spare": 0, "grace": 10, "max_restarts": 0, "chain": 1}
    for name, least in lowest.items():
        value = getattr(job, name)
        if not least <= value <= MOST:
            raise ConfigError(f"slurm: --{name.replace('_', '-')} {value} is not between {least} and {MOST:,}")
    if job.seconds is not None and job.seconds <= job.grace + EARLY_S:
        raise ConfigError(
            f"slurm: --time {job.time} is {job.seconds} s, of which --grace {job.grace}, and {EARLY_S} that Slurm may warn earlier, "
            "leave nothing to train in"
        )
    for option in job.sbatch:
        if not option.startswith("-"):
            raise ConfigError(f"slurm: --sbatch {option!r} is not an sbatch option, such as --sbatch=--reservation=x")


def check_texts(job: Job) -> None:
    """Raise ConfigError for text that cannot go into the script: a second line of it would be an option of its own."""
    texts: dict[str, object] = {
        "--partition": job.partition,
        "--account": job.account,
        "--qos": job.qos,
        "--time": job.time,
        "--exclude": job.exclude,
    }
    texts |= {"--container": job.container, "--python": job.python, "the directory": job.here, "run_dir": job.directory}
    for name, text in (*texts.items(), *(("--mount", mount) for mount in job.mount), *(("--sbatch", option) for option in job.sbatch)):
        if text is not None and not str(text).isprintable():
            raise ConfigError(f"slurm: {name} {str(text)!r:.300} is not printable text on one line")


def check_container(job: Job) -> None:
    """Raise ConfigError for an image or a mount that does not exist."""
    if job.container is None:
        if job.mount:
            raise ConfigError(f"slurm: --mount {job.mount[0]}: needs --container")
        return
    if not Path(job.container).exists() and (job.container.startswith(("/", ".")) or not REGISTRY.match(job.container)):
        raise ConfigError(f"slurm: --container: no such file: {job.container}")
    for mount in job.mount:
        if not Path(mount.partition(":")[0]).exists():
            raise ConfigError(f"slurm: --mount: no such file: {mount.partition(':')[0]}")


def check_python(job: Job, torch: str) -> None:
    """Raise ConfigError if the job would use GPUs with this very Python, which has torch's CPU build. `torch`: torch's version."""
    if job.gpus_per_node and job.container is None and job.python == sys.executable and torch.endswith("+cpu"):
        raise ConfigError("slurm: this Python has torch's CPU build: bash tools/setup.sh --gpu, then .venv-gpu/bin/megarl slurm ...")


def partition_of(job: Job) -> Partition:
    """Return the job's partition, or the default one. Raises ConfigError if there is none, NoAnswer if Slurm's output is not understood."""
    rows = [
        dict(part.partition("=")[::2] for part in line.split()) for line in call("scontrol", "--oneliner", "show", "partition").splitlines()
    ]
    known = {row["PartitionName"]: row for row in rows if "PartitionName" in row}
    wanted = job.partition or next((name for name, row in known.items() if row.get("Default") == "YES"), None)
    if wanted not in known:
        given = f"--partition {job.partition}" if job.partition else "no --partition, and no default one"
        raise ConfigError(f"slurm: {given}: this cluster has {', '.join(known) or 'none'}")
    nodes = call("sinfo", "--noheader", "--Node", f"--partition={wanted}", "--format=%c|%G").splitlines()
    try:
        sizes = [(int(cpus), _gpus(of)) for cpus, of in (line.split("|", 1) for line in nodes)]
        return Partition(wanted, int(known[wanted]["TotalNodes"]), tuple(sizes))
    except (KeyError, ValueError):
        said = one_line(f"{known[wanted]}, {nodes}", 200)
        raise NoAnswer(f"slurm: cannot read what scontrol and sinfo say of partition {wanted}: {said}") from None


def _gpus(resources: str) -> int:
    """The GPUs in what sinfo calls GRES: "gpu:h100:8(S:0-1),tmp:1"."""
    return sum(int(found) for found in re.findall(r"\bgpu:(?:[^:,(]+:)?(\d+)", resources))


def counts_gpus() -> bool:
    """Whether Slurm knows about its nodes' GPUs. Raises NoAnswer if it cannot be asked."""
    return bool(re.search(r"^GresTypes\s*=.*\bgpu\b", call("scontrol", "show", "config"), re.MULTILINE))


def check_partition(job: Job, partition: Partition) -> None:
    """Raise ConfigError if the partition has too few nodes, or too few GPUs in each."""
    fitting = partition.nodes - sum(gpus < job.counted_gpus for _, gpus in partition.sizes)
    if not fitting and partition.sizes:
        most = max(gpus for _, gpus in partition.sizes)
        raise ConfigError(f"slurm: --gpus-per-node {job.gpus_per_node}: a node of partition {partition.name} has {most}")
    if job.nodes + job.spare > fitting:
        of = f" with {job.gpus_per_node} GPUs" if job.counted_gpus else ""
        spare = f" and --spare {job.spare}" if job.spare else ""
        raise ConfigError(f"slurm: --nodes {job.nodes}{spare}: partition {partition.name} has {fitting}{of}")


def check_filled(job: Job, kinds: Sequence[ProcessKind], cpus: int | None) -> None:
    """Raise ConfigError if the run's processes do not fit on the nodes, or leave GPUs or nodes without work.

    Args:
        job: what is asked of Slurm.
        kinds: the run's processes, from `demand`.
        cpus: the number of CPUs of a node; None if unknown.
    """
    try:
        places = place(kinds, [Node(f"node {n}", cpus or sys.maxsize, job.gpus_per_node) for n in range(job.nodes)])
    except NoRoom as error:
        raise ConfigError(f"slurm: --nodes {job.nodes}: {error}") from None
    used, there_are = sum(kind.processes * kind.gpus for kind in kinds), job.nodes * job.gpus_per_node
    if used < there_are:
        raise ConfigError(f"slurm: --nodes {job.nodes}: of {there_are} GPUs the run uses {used} ({_words(kinds)}); the others would idle")
    busy = {name for names in places for name in names}
    if cpus is not None and len(busy) < job.nodes:
        raise ConfigError(f"slurm: --nodes {job.nodes}: the run's processes ({_words(kinds)}) fit on {len(busy)} of {cpus} CPUs each")


def _words(kinds: Sequence[ProcessKind]) -> str:
    return ", ".join(f"{kind.name} {kind.processes}{f'x{kind.gpus}' if kind.gpus else ''}" for kind in kinds)
