"""The barrier at the end of a save: rank 0 waits for every rank's report, and every rank for rank 0's verdict."""

import json
import time
from pathlib import Path

import torch.distributed as dist

from megarl.errors import SaveError
from megarl.parallel.grid import Grid

_POLL_S = 0.02


class SaveBarrier:
    """The barrier of one save. It uses the store: the process groups belong to the main threads, and this runs in background threads.

    Args:
        grid: the grid of the ranks that save; none of them is still waiting for the previous save.
        root: the directory of the steps.
        number: the save's number, the same on all ranks.
        limit: the setting that the time limits come from, and its value, for errors.
    """

    def __init__(self, grid: Grid, root: Path, number: int, limit: str) -> None:
        self._store, before = (dist.PrefixStore(f"checkpoint/{root}/{one}", grid.store) for one in (number, number - 1))
        if grid.rank == 0:
            before.delete_key("verdict")
        self._rank, self._ranks, self._limit = grid.rank, range(grid.world), limit
        self.concluded = False
        """On rank 0, whether the verdict is out."""

    def report(self, text: str) -> None:
        """Publish what this rank wrote."""
        self._store.set(f"rank/{self._rank}", text)

    def reports(self, timeout_s: float) -> list[str]:
        """Wait for every rank's report, and return them by rank. Raises SaveError naming the ranks that are late."""
        deadline = time.monotonic() + timeout_s
        while not self._store.check([f"rank/{rank}" for rank in self._ranks]):
            if time.monotonic() > deadline:
                late = [rank for rank in self._ranks if not self._store.check([f"rank/{rank}"])]
                raise SaveError(f"ranks {late} did not finish writing within {self._limit}")
            time.sleep(_POLL_S)
        reports = [self._store.get(f"rank/{rank}").decode() for rank in self._ranks]
        for rank in self._ranks:
            self._store.delete_key(f"rank/{rank}")
        return reports

    def conclude(self, fault: str, *, lost: bool = False) -> None:
        """Publish, on rank 0, what went wrong, or the empty string; and whether content was lost."""
        self.concluded = True
        self._store.set("verdict", json.dumps([fault, lost]))

    def verdict(self, timeout_s: float) -> tuple[str, bool]:
        """Wait for rank 0's conclusion: what went wrong, or the empty string; and whether content was lost."""
        deadline = time.monotonic() + timeout_s
        while not self._store.check(["verdict"]):
            if time.monotonic() > deadline:
                return f"rank 0 did not finish within {self._limit}", False
            time.sleep(_POLL_S)
        fault, lost = json.loads(self._store.get("verdict"))
        return fault, lost
