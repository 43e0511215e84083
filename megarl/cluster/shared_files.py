"""Check that every machine of a run sees the files of the one that started it."""

import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.cluster import watch
from megarl.cluster.actor_group import LOOK_S, WorkerLate, task_fault
from megarl.cluster.on_node import on
from megarl.cluster.reserve import nodes_of as reserved_nodes
from megarl.cluster.server import ask
from megarl.errors import ConfigError, Unfit

SETTLE_S = 15.0  # how much later a shared disk may show a new file to other machines
POLL_S = 0.5
DOING = "looking for the run's files"


def nodes_of(places: Sequence[PlacementGroupSchedulingStrategy]) -> dict[str, str]:
    """The nodes that hold reserved places, as id -> address."""
    reserved = reserved_nodes(places)
    return {node["NodeID"]: node["NodeManagerAddress"] for node in ask(DOING, ray.nodes) if node["NodeID"] in reserved}


def check_shared(nodes: Mapping[str, str], inputs: Mapping[str, Path], outputs: Mapping[str, Path], timeout_s: float) -> None:
    """Check from every node that it sees the run's files.

    Args:
        nodes: id -> address.
        inputs: files and directories by their dotted key; each node must see the same as this one.
        outputs: directories by their dotted key; each node must see a file that is now created there.
        timeout_s: for the answers of all nodes.

    Raises:
        ConfigError: a directory in `outputs` cannot be written to.
        Unfit: a node does not see the same; names the key, the path and the node.
        WorkerDied: a node was lost meanwhile.
        WorkerLate: a node did not answer in time.
    """
    with ExitStack() as stack:
        contents = {key: (path, content(path)) for key, path in inputs.items()}
        for key, path in outputs.items():
            canary = stack.enter_context(fresh_file(path))
            contents[key] = (canary, content(canary))
        look: Any = ray.remote(differences)
        references = {node: look.options(**on(node)).remote(contents) for node in nodes}
        deadline = time.monotonic() + timeout_s
        for node, reference in references.items():
            try:
                while not ray.wait([reference], timeout=LOOK_S)[0]:
                    watch.check(DOING, {})
                    if time.monotonic() > deadline:
                        raise WorkerLate(f"{DOING}: node {nodes[node]} has not answered in {timeout_s:g} s", timeout_s)
                differing = ray.get(reference)
            except RayError as error:
                raise task_fault(error, f"node {nodes[node]}", DOING) from error
            for key in differing:
                path = outputs.get(key) or inputs[key]
                raise Unfit(f"{key}: {path} is not, on {nodes[node]}, what it is here: every machine of a run must see the same disk")


@contextmanager
def fresh_file(directory: Path) -> Iterator[Path]:
    """Create a file for the block that other machines see too. It is synced: NFS shows them no byte of an open file that is only flushed.

    Raises ConfigError if it cannot be written: a full disk or quota is no node's fault.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(tempfile.NamedTemporaryFile(dir=directory, prefix=".seen-"))
            file.write(b"seen")
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            raise ConfigError(f"{directory}: cannot write there: {error.strerror}") from None
        yield Path(file.name)


def differences(contents: Mapping[str, tuple[Path, str]]) -> list[str]:
    """The keys whose files look different from this machine. `contents`: the path of each key, and its `content` as the driver sees it."""
    deadline = time.monotonic() + SETTLE_S
    while True:
        differing = [key for key, (path, summary) in contents.items() if content(path) != summary]
        if not differing or time.monotonic() > deadline:
            return differing
        time.sleep(POLL_S)


def content(path: Path) -> str:
    """A summary of what is at a path: a file's size, or the names and sizes of a directory's files; "" if there is nothing."""
    try:
        if path.is_dir():
            files = sorted((one.name, one.stat().st_size) for one in path.iterdir() if one.is_file())
            return hashlib.sha256(repr(files).encode()).hexdigest()
        return f"a file of {path.stat().st_size} bytes"
    except OSError:
        return ""
