"""Check the contents of a checkpoint against its manifest, with every machine of a run reading a part."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from megarl import termination
from megarl.checkpoints.files import FileRecord
from megarl.checkpoints.steps import damaged
from megarl.cluster.actor_group import WorkerLate, task_fault
from megarl.cluster.on_node import live_nodes, on

DOING = "checking a checkpoint"
PARTS = 16  # per machine, read one after the other; progress is reported after each


def damaged_anywhere(
    files: Mapping[Path, FileRecord], machines: Collection[str], timeout_s: float, progress: Callable[[int, int], object]
) -> dict[Path, str]:
    """Compare files with the manifest byte for byte, and return what is wrong with them, as `steps.damaged` does.

    A file that looks wrong from another machine counts only if it is wrong from this one too: the other may see an older state of a shared
    disk, or none of it.

    Args:
        files: the files, with their records in the manifest.
        machines: Ray's ids of the nodes that read; nodes that are gone are ignored. With fewer than two, this machine reads alone.
        timeout_s: the longest wait for a machine to read one more part.
        progress: called with the number of bytes read so far, and that of all files.

    Raises:
        WorkerDied: a machine was lost meanwhile.
        WorkerLate: a machine did not read its next part in time.
    """
    nodes = sorted(live_nodes().keys() & machines)
    parts = _dealt(files, max(1, len(nodes)) * PARTS)
    size, done = sum(record.size for record in files.values()), 0
    if len(nodes) < 2:
        found = dict[Path, str]()
        for part in parts:
            termination.poll()
            found |= damaged(part)
            progress(done := done + _size(part), size)
        return found
    suspects = list[Path]()
    read: Any = ray.remote(damaged)
    waiting = {nodes[n]: parts[n :: len(nodes)] for n in range(len(nodes))}
    begun = {node: time.monotonic() for node in nodes}
    running: dict[Any, tuple[str, int]] = {}

    def start(node: str) -> None:
        if waiting[node]:
            part = waiting[node].pop()
            running[read.options(**on(node), max_retries=0).remote(part)] = node, _size(part)
            begun[node] = time.monotonic()

    for node in nodes:
        start(node)
    while running:
        ready, _ = ray.wait(list(running), timeout=1.0)
        termination.poll()  # and not the watch, whose last finding may be what the run is recovering from
        for reference in ready:
            node, nbytes = running.pop(reference)
            try:
                suspects += ray.get(reference)
            except RayError as error:
                raise task_fault(error, f"node {node[:8]}", DOING) from error
            progress(done := done + nbytes, size)
            start(node)
        late = [node for node, _ in running.values() if time.monotonic() - begun[node] > timeout_s]
        if late:
            raise WorkerLate(f"{DOING}: node {late[0][:8]} has not read a part in {timeout_s:g} s", timeout_s)
    return damaged({path: files[path] for path in suspects})


def _dealt(files: Mapping[Path, FileRecord], count: int) -> list[dict[Path, FileRecord]]:
    """Split the files into at most `count` parts of about equal size."""
    ordered = sorted(files, key=lambda path: files[path].size, reverse=True)
    parts = [{path: files[path] for path in ordered[n::count]} for n in range(count)]
    return [part for part in parts if part]


def _size(part: Mapping[Path, FileRecord]) -> int:
    return sum(record.size for record in part.values())
