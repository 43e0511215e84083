"""The checks of this machine, or of the nodes of a Slurm job: open files, shared memory, the network interface, GPUs."""

import os
import resource
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from megarl.cluster.allocation import Allocation
from megarl.cluster.machine import gpus_here
from megarl.cluster.placement import Node, NoRoom, ProcessKind, place
from megarl.config import ClusterSettings, ConfigError
from megarl.host.unchecked import is_naming
from megarl.parallel.toolchain import lacking

SHARED_MEMORY, MIN_SHARED_MB = "/dev/shm", 32
MIN_FILES = 1024  # the default of every Linux, unless someone lowered it


def check_cluster(settings: ClusterSettings, kinds: Sequence[ProcessKind]) -> None:
    """Check this machine.

    Args:
        settings: the section `cluster`.
        kinds: the kinds of processes that the run starts.

    Raises:
        ConfigError: the machine lacks open files, shared memory, the network interface or, for a session of its own, GPUs or
            what Triton compiles its driver with.
    """
    if is_naming() and settings.allocation is not None:  # the limits of this machine are not the nodes'
        check_allocation(settings.allocation, settings, kinds)
        return
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files < MIN_FILES:
        raise ConfigError(f"cluster: the open-file limit is {files} (ulimit -n); Ray and the engines need at least {MIN_FILES}")
    if os.path.isdir(SHARED_MEMORY) and (room := shutil.disk_usage(SHARED_MEMORY).free >> 20) < MIN_SHARED_MB:
        raise ConfigError(f"cluster: {SHARED_MEMORY} has {room} MB free; Ray and the engines need at least {MIN_SHARED_MB}")
    if settings.address is not None:
        return
    if settings.allocation is not None:
        check_allocation(settings.allocation, settings, kinds)
        return
    known = psutil.net_if_addrs()
    if settings.interface is not None and settings.interface not in known:
        raise ConfigError(f"cluster.interface={settings.interface}: not one of this machine's ({', '.join(sorted(known))})")
    if settings.gpus:
        check_gpus(kinds, gpus_here())
        if (lack := lacking()) is not None:
            raise ConfigError(f"cluster.gpus=true: {lack}")


def check_allocation(directory: Path, settings: ClusterSettings, kinds: Sequence[ProcessKind]) -> None:
    """Check that a job's nodes are what the run needs.

    Args:
        directory: the directory of the allocation.
        settings: the section `cluster`.
        kinds: the kinds of processes that the run starts.

    Raises:
        ConfigError: the allocation lacks GPUs for them, or its nodes could not reach each other.
    """
    allocation = Allocation.read(directory)
    if len(allocation.nodes) > 1 and settings.interface is None:
        nodes = len(allocation.nodes)
        raise ConfigError(f"cluster.interface: required on {nodes} nodes, which must reach each other (`ip -br address` lists those there)")
    if settings.gpus:
        try:
            place(kinds, [Node(name, sys.maxsize, allocation.gpus) for name in allocation.nodes[: allocation.needed]])
        except NoRoom as error:
            raise ConfigError(f"cluster.allocation: {error}") from None


def check_gpus(kinds: Sequence[ProcessKind], here: int) -> None:
    """ConfigError if the `here` GPUs of this machine are too few for the processes of a session on this machine alone."""
    if not here:
        raise ConfigError(
            "cluster.gpus=true: this machine has no GPU; what is to run on a cluster's is checked by "
            "`megarl slurm CONFIG.yaml --nodes N --gpus-per-node 8 --dry-run` (cluster.gpus=false is for small models on a CPU)"
        )
    try:
        place(kinds, [Node("this machine", sys.maxsize, here)])
    except NoRoom as error:
        raise ConfigError(f"cluster.gpus=true: {error}; cluster.address joins a cluster that has more") from None
