"""Where all ranks' background threads wait for one another at the end of a save."""

from __future__ import annotations

import time
from pathlib import Path

import torch.distributed as dist

from megarl.errors import SaveError
from megarl.parallel.grid import Grid

_POLL_S = 0.02


class Meeting:
    """Where the ranks' threads meet for one save: the store, since the process groups belong to the main threads."""

    def __init__(self, grid: Grid, root: Path, number: int) -> None:
        self._store = dist.PrefixStore(f"checkpoint/{root}/{number}", grid.store)
        self._rank, self._ranks = grid.rank, range(grid.world)

    def report(self, text: str) -> None:
        """This rank's word."""
        self._store.set(f"rank/{self._rank}", text)

    def reports(self, timeout_s: float) -> list[str]:
        """Every rank's word. Raises SaveError naming the ranks that are late."""
        deadline = time.monotonic() + timeout_s
        while not self._store.check([f"rank/{rank}" for rank in self._ranks]):
            if time.monotonic() > deadline:
                late = [rank for rank in self._ranks if not self._store.check([f"rank/{rank}"])]
                raise SaveError(f"ranks {late} did not finish writing in {timeout_s:g} s")
            time.sleep(_POLL_S)
        words = [self._store.get(f"rank/{rank}").decode() for rank in self._ranks]
        for rank in self._ranks:
            self._store.delete_key(f"rank/{rank}")
        return words

    def conclude(self, fault: str) -> None:
        """Rank 0's last word: what went wrong, or nothing."""
        self._store.set("verdict", fault or "saved")

    def verdict(self, timeout_s: float) -> str:
        """What went wrong, or nothing."""
        deadline = time.monotonic() + timeout_s
        while not self._store.check(["verdict"]):
            if time.monotonic() > deadline:
                return f"rank 0 did not finish in {timeout_s:g} s"
            time.sleep(_POLL_S)
        fault = self._store.get("verdict").decode()
        return "" if fault == "saved" else fault
