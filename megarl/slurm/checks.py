"""Checks that refuse a job before it is submitted."""

import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from megarl.cluster.allocation import NODES
from megarl.cluster.placement import Node, NoRoom, ProcessKind, place
from megarl.cluster.process_kinds import demand
from megarl.config import ConfigError, RunSettings
from megarl.errors import Absent
from megarl.host.http_client import elsewhere
from megarl.host.unchecked import naming_unchecked, unchecked, where_present
from megarl.imports import find
from megarl.slurm.commands import NoAnswer, call
from megarl.slurm.job import Job, seconds
from megarl.slurm.options import TIME_MIN, given, options
from megarl.slurm.partition import check_grace, check_limits, check_partition, partition_of
from megarl.verbs import VERBS

MAX_NUMBER = 100_000  # upper limit of any number
REGISTRY = re.compile(r"[a-z]+://|[^/]+[/#:]")


def check(job: Job, config: RunSettings, dry_run: bool) -> Job:
    """Refuse a job that could not run as requested.

    A dry run where no Slurm answers is made where configurations are written: what is not on that machine is named as not checked.

    Args:
        job: what is asked of Slurm.
        config: the run's configuration.
        dry_run: whether the script is only printed, which needs no Slurm on this machine; what only the nodes can show is named, too.

    Returns:
        The job in the form that this cluster's Slurm accepts.

    Raises:
        ConfigError: the job is refused; the message gives the numbers.
    """
    check_texts(job)
    check_numbers(job)
    check_options(job)
    if config.cluster.address is not None or config.cluster.allocation is not None:
        raise ConfigError("slurm: cluster.address and cluster.allocation are the job's own: leave them out")
    if config.cluster.gpus != bool(job.gpus_per_node):
        gpus = str(config.cluster.gpus).lower()
        raise ConfigError(f"slurm: --gpus-per-node {job.gpus_per_node} does not go with cluster.gpus={gpus}")
    if config.cluster.gpus_per_node is not None and job.gpus_per_node > config.cluster.gpus_per_node:
        raise ConfigError(f"slurm: --gpus-per-node {job.gpus_per_node}: more than cluster.gpus_per_node={config.cluster.gpus_per_node}")
    cpus: int | None = None
    scope: AbstractContextManager[None] = nullcontext()
    try:
        job = replace(job, counts_gpus=not job.gpus_per_node or counts_gpus())
        partition = partition_of(job)
        check_partition(job, partition)
        check_limits(job, partition)
        cpus = min((cpus for cpus, gpus in partition.sizes if gpus >= job.counted_gpus), default=None)
    except NoAnswer as error:
        if not dry_run:
            raise
        unchecked(f"partition, nodes, GPUs and limits, not compared with the cluster: {error}")
        scope = naming_unchecked()
    check_filled(job, demand(config), cpus)
    with scope, elsewhere(), tempfile.TemporaryDirectory() as directory:
        check_container(job)
        with where_present("the nodes' Python"):
            check_python(job, version("torch"))
        planned: dict[str, Any] = {"nodes": [f"node {n}" for n in range(job.nodes)], "needed": job.nodes, "gpus": job.gpus_per_node}
        Path(directory, NODES).write_text(json.dumps(planned))
        cluster = config.cluster.model_copy(update={"allocation": Path(directory)})
        with where_present("the data"):
            find(VERBS[job.verb].check)(config.model_copy(update={"cluster": cluster}))
    for line in on_nodes(job, config) if dry_run else ():
        unchecked(line)
    return job


def on_nodes(job: Job, config: RunSettings) -> Iterator[str]:
    """What only the nodes of a job can show, and a job checks there before it loads weights: a line each."""
    yield f"the nodes: {job.python}{' in the container' if job.container else ''}, open files, shared memory, free disk"
    if (interface := config.cluster.interface) is not None:
        yield f"cluster.interface={interface}: whether the nodes have it (`srun -N 1 ip -br address`)"
    if not job.gpus_per_node:
        return
    if (memory := config.cluster.gpu_memory_gb) is None:
        yield "cluster.gpu_memory_gb: not set, so nothing compares what the run needs with its GPUs (`megarl plan` does, for GPUs of 80 GB)"
    else:
        yield f"cluster.gpu_memory_gb={memory:g}: whether the nodes' GPUs have as much"
    yield "the nodes' GPUs: driver, compute capability, Transformer Engine, what Triton compiles with, NCCL"


def check_numbers(job: Job) -> None:
    """Raise ConfigError for a number that is out of range."""
    lowest = {"nodes": 1, "gpus_per_node": 0, "spare": 0, "grace": 10, "max_restarts": 0, "chain": 1}
    for name, least in lowest.items():
        value = getattr(job, name)
        if not least <= value <= MAX_NUMBER:
            raise ConfigError(f"slurm: --{name.replace('_', '-')} {value} is not between {least} and {MAX_NUMBER:,}")
    if job.seconds is not None:
        check_grace(f"--time {job.time} is {job.seconds} s", job.seconds, job.grace)


def check_options(job: Job) -> None:
    """Raise ConfigError for an option of sbatch that the run relies on, or by which Slurm may shorten it too much."""
    options(job)
    for option in given(job):
        if option.name == TIME_MIN:
            try:
                shortest = seconds(option.value)
            except ValueError as error:
                raise ConfigError(f"slurm: --sbatch {option.word!r}: {error}") from None
            if shortest is not None:
                check_grace(f"--sbatch {option.word!r} is {shortest} s", shortest, job.grace)


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
    """Raise ConfigError for mounts without a container, Absent for an image or a mount that does not exist."""
    if job.container is None:
        if job.mount:
            raise ConfigError(f"slurm: --mount {job.mount[0]}: needs --container")
        return
    with where_present("the container"):
        if not Path(job.container).exists() and (job.container.startswith(("/", ".")) or not REGISTRY.match(job.container)):
            raise Absent(f"slurm: --container: no such file: {job.container}")
    for mount in job.mount:
        with where_present("the container"):
            if not Path(mount.partition(":")[0]).exists():
                raise Absent(f"slurm: --mount: no such file: {mount.partition(':')[0]}")


def check_python(job: Job, torch: str) -> None:
    """Raise Absent if the job would use GPUs with this very Python, which has torch's CPU build. `torch`: torch's version."""
    if job.gpus_per_node and job.container is None and job.python == sys.executable and torch.endswith("+cpu"):
        raise Absent("slurm: this Python has torch's CPU build: bash tools/setup.sh --gpu, then .venv-gpu/bin/megarl slurm ...")


def counts_gpus() -> bool:
    """Whether Slurm knows about its nodes' GPUs. Raises NoAnswer if it cannot be asked."""
    return bool(re.search(r"^GresTypes\s*=.*\bgpu\b", call("scontrol", "show", "config"), re.MULTILINE))


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
