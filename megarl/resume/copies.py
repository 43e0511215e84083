"""Copies of the last steps in the machines' memory, which outlive the ranks that made them (`save.rolling`)."""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from megarl.cluster import watch
from megarl.cluster.actor_group import LOOK_S, ActorGroup, WorkerDied
from megarl.cluster.on_node import live_nodes, on
from megarl.host.shared_memory import SharedMemory
from megarl.text.display import one_line

PIECE = 16 << 20  # bytes sent between machines at a time
KEPT = 2  # steps kept per rank
ANSWER_S = 10.0  # longest wait for a machine to list its copies
MAX_CHARS = 200  # largest number of characters of a failed copy's error

Owner = tuple[str, int]
"""A rank: the name of its group, and its number."""


class CopyStore:
    """An actor on each machine that holds the copies of the ranks there."""

    def __init__(self) -> None:
        self._held: dict[Owner, dict[int, tuple[int, int]]] = {}  # the descriptor and the size of each step's memory

    def keep(self, owner: Owner, step: int, path: str, size: int) -> None:
        """Take over a complete copy. Keep the one before it; release older ones, and later ones from before the run went back.

        Args:
            owner: the rank whose part it is.
            step: the step that was copied.
            path: the path at which processes of this machine can open it.
            size: the size in bytes.
        """
        steps = self._held.setdefault(owner, {})
        self._drop(steps, [other for other in steps if other >= step])
        steps[step] = os.open(path, os.O_RDONLY | os.O_CLOEXEC), size
        self._drop(steps, sorted(steps)[:-KEPT])

    def forget(self, owner: Owner, but: int) -> None:
        """Release an owner's copies except that of the step `but`: the others are about to be overwritten."""
        steps = self._held.get(owner, {})
        self._drop(steps, [step for step in steps if step != but])

    def steps(self) -> dict[Owner, list[int]]:
        """The steps of which there are copies, by owner."""
        return {owner: sorted(steps) for owner, steps in self._held.items()}

    def place(self, owner: Owner, step: int) -> tuple[str, int]:
        """The path at which processes of this machine can open a copy, and its size."""
        descriptor, size = self._held[owner][step]
        return f"/proc/{os.getpid()}/fd/{descriptor}", size

    def piece(self, owner: Owner, step: int, begin: int) -> bytes:
        """Read `PIECE` bytes of a copy, or the bytes that are left.

        Args:
            owner: the rank whose part it is.
            step: the step that was copied.
            begin: the offset of the first byte.
        """
        descriptor, size = self._held[owner][step]
        return os.pread(descriptor, min(PIECE, size - begin), begin)

    async def fetch(self, source: Any, owner: Owner, step: int) -> None:
        """Fetch a copy from another machine, which may be fetching one from here at the same time.

        Args:
            source: the other machine's store.
            owner: the rank whose part it is.
            step: the step that was copied.

        Raises:
            OSError: there is no room.
        """
        _, size = await source.place.remote(owner, step)
        memory = SharedMemory(size, "save.rolling")
        try:
            await asyncio.to_thread(memory.reserve, size)  # takes seconds, in which others' calls must be answered
            for begin in range(0, size, PIECE):
                piece = await source.piece.remote(owner, step, begin)
                memory.memory[begin : begin + len(piece)] = piece
            self.keep(owner, step, memory.path, size)
        finally:
            memory.close()

    def _drop(self, steps: dict[int, tuple[int, int]], old: Sequence[int]) -> None:
        for step in old:
            if step in steps:
                os.close(steps.pop(step)[0])


class Copies:
    """The driver's handle to all copies, with its own record of each step.

    Args:
        peers: whether every copy is also held on another machine.
    """

    def __init__(self, peers: bool) -> None:
        self._peers = peers
        self._stores: dict[str, Any] = {}  # by node
        self._records: dict[int, Any] = {}  # by step
        self._owners: list[Owner] = []  # all ranks that must have a copy
        self._travelling: list[Any] = []  # calls that send the last step's copies to the next machine

    def save(self, step: int, groups: Mapping[str, ActorGroup], timeout_s: float, record: Any) -> None:
        """Copy a step of all groups.

        Args:
            step: the step's number.
            groups: the groups of ranks that train, by name.
            timeout_s: time limit for each group.
            record: the driver's record, which `newest` returns with the step.

        Raises:
            OSError: there is no room for the step, and the earlier copies stay; or the previous step's copy has not reached the next
                machine, in which case this step's copy is complete.
            Exception: whatever a rank raises.
        """
        lost, self._travelling = _failed(self._travelling, timeout_s), []
        last = max(self._records, default=-1)
        self._owners = [(name, rank) for name, group in groups.items() for rank in range(len(group.actors))]
        for name, group in groups.items():
            nodes = group.call("node", timeout_s=timeout_s)
            stores = [self._store(node) for node in nodes]
            calls = [actor.copy.remote(store, name, step, last) for actor, store in zip(group.actors, stores, strict=True)]
            group.wait(calls, "copy", timeout_s)
            self._travelling += self._mirror(name, step, nodes)
        self._records = {old: kept for old, kept in self._records.items() if old == last} | {step: record}
        if lost is not None:
            raise OSError(f"step {last} is not on the next machine: {lost}")

    def newest(self) -> tuple[int, Any] | None:
        """The newest step of which every rank's copy exists, and its record; None if there is none."""
        if not self._records:
            return None
        steps_of: dict[Owner, set[int]] = {}
        for here in self._held().values():
            for owner, steps in here.items():
                steps_of.setdefault(owner, set()).update(steps)
        whole = [step for step in self._records if all(step in steps_of.get(owner, ()) for owner in self._owners)]
        self._records = {step: self._records[step] for step in whole}
        return max(self._records.items(), default=None, key=lambda item: item[0])

    def load(self, step: int, groups: Mapping[str, ActorGroup], timeout_s: float) -> None:
        """Restore every rank from its copy of a step, which is first fetched if the rank is on another machine now.

        Args:
            step: the step's number.
            groups: the groups of ranks that train, by name.
            timeout_s: time limit for each group.

        Raises:
            WorkerDied: a rank's copy is lost.
        """
        copies = self._held()
        for name, group in groups.items():
            places = [(self._store(node), copies.get(node, {})) for node in group.call("node", timeout_s=timeout_s)]
            stores, fetched = [], []
            for rank, (store, here) in enumerate(places):
                owner = name, rank
                if step not in here.get(owner, []):
                    source = next((self._stores[node] for node, steps in copies.items() if step in steps.get(owner, [])), None)
                    if source is None:
                        raise WorkerDied(f"save.rolling: no machine has the copy of {name} rank {rank} at step {step} any more")
                    stores.append(store)
                    fetched.append(store.fetch.remote(source, owner, step))
            ActorGroup("copy store", stores).wait(fetched, "fetch a copy", timeout_s)
            calls = [actor.restore.remote(store, name, step) for actor, (store, _) in zip(group.actors, places, strict=True)]
            group.wait(calls, "restore", timeout_s)
        self._records = {step: self._records[step]}

    def _store(self, node: str) -> Any:
        if node not in self._stores:
            self._stores[node] = ray.remote(CopyStore).options(**on(node)).remote()
        return self._stores[node]

    def _mirror(self, name: str, step: int, nodes: Sequence[str]) -> list[Any]:
        """Start sending the copies to the next machine, in the background; return the calls."""
        others = sorted(self._stores)
        if not self._peers or len(others) < 2:
            return []
        after = {node: self._stores[others[(index + 1) % len(others)]] for index, node in enumerate(others)}
        return [after[node].fetch.remote(self._stores[node], (name, rank), step) for rank, node in enumerate(nodes)]

    def _held(self) -> dict[str, dict[Owner, list[int]]]:
        """The copies that each store holds, by node. Forget stores that do not answer, and those of lost nodes."""
        nodes = live_nodes()
        self._stores = {node: store for node, store in self._stores.items() if node in nodes}
        calls = {node: store.steps.remote() for node, store in self._stores.items()}
        copies = dict[str, dict[Owner, list[int]]]()
        for node, call in calls.items():
            try:
                copies[node] = ray.get(call, timeout=ANSWER_S)
            except RayError:
                del self._stores[node]
        return copies


def _failed(calls: Sequence[Any], timeout_s: float) -> str | None:
    """Wait for background calls. Return the error of the first that failed or was late; None if all are done."""
    deadline = time.monotonic() + timeout_s
    for call in calls:
        while not ray.wait([call], timeout=LOOK_S)[0]:
            watch.check("copying to the next machine", {})
            if time.monotonic() > deadline:
                return f"no answer within {timeout_s:g} s"
        try:
            ray.get(call)
        except RayError as error:
            return one_line(str(error.cause if isinstance(error, RayTaskError) else error), MAX_CHARS)
    return None
