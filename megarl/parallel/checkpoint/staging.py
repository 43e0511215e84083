"""Tensors on their way to the disk: copied into host memory of a bounded size, then written and hashed by background threads."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.checkpoints.files import FileRecord, HashedFile
from megarl.parallel.backend import choose
from megarl.parallel.checkpoint.dcp import Location

WRITERS = 2  # threads, and so files a model, of each rank: one hashes while the other waits for the disk


@dataclass(frozen=True)
class Written:
    """What one rank wrote."""

    files: Mapping[str, FileRecord]  # by path inside the step directory
    locations: Mapping[str, list[Location]]  # by model, in the order of `put`


class StagedWriter:
    """Writes tensors into `directory`/<model>/__<rank>_<thread>.distcp, each as torch.save does.

    `put` copies into host memory and returns; it waits while `budget` bytes (or one tensor) are on their way. So a state within the budget
    costs its caller a copy, and a larger one is written in pieces, the last ones behind its back.
    """

    def __init__(self, directory: Path, rank: int, budget: int) -> None:
        self._directory, self._rank, self._budget = directory, rank, budget
        self._room = threading.Condition()
        self._held = 0  # bytes staged
        self._begin = threading.Event()  # until the room is taken or all is staged: writers would hold Python's lock from the copies
        self._error: Exception | None = None
        self._queue: queue.SimpleQueue[tuple[str, int, Tensor] | None] = queue.SimpleQueue()
        self._locations: dict[str, list[Location | None]] = {}
        self._files: dict[str, FileRecord] = {}
        self._backend = choose()
        self._threads = [threading.Thread(target=self._write, args=(number,), daemon=True) for number in range(WRITERS)]
        for thread in self._threads:
            thread.start()

    def put(self, model: str, tensor: Tensor) -> None:
        """Takes a copy of the tensor. After a failed write it takes nothing: `finish` tells."""
        with self._room:
            if self._held + tensor.nbytes > self._budget:
                self._begin.set()
            self._room.wait_for(lambda: self._error or not self._held or self._held + tensor.nbytes <= self._budget)
            if self._error is not None:
                return
            self._held += tensor.nbytes
        copy = self._backend.staging_buffer(tensor.shape, tensor.dtype)
        copy.copy_(tensor)
        locations = self._locations.setdefault(model, [])
        locations.append(None)
        self._queue.put((model, len(locations) - 1, copy))

    def close(self) -> None:
        """Says that nothing more comes."""
        self._begin.set()
        for _ in self._threads:
            self._queue.put(None)

    def finish(self) -> Written:
        """Waits until everything lies on the disk; after `close`. Raises what a write raised: OSError names its file."""
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        whole = {model: [one for one in locations if one is not None] for model, locations in self._locations.items()}
        assert all(len(whole[model]) == len(locations) for model, locations in self._locations.items())
        return Written(self._files, whole)

    def _write(self, number: int) -> None:
        name, files = f"__{self._rank}_{number}.distcp", dict[str, HashedFile]()
        self._begin.wait()
        try:
            while (item := self._queue.get()) is not None:
                model, index, tensor = item
                if model not in files:
                    files[model] = HashedFile(self._directory / model / name)
                file = files[model]
                offset = file.size
                torch.save(tensor, file)  # type: ignore[arg-type]  # it asks for `write` and `flush` alone
                file.check()
                self._locations[model][index] = Location(name, offset, file.size - offset)
                nbytes = tensor.nbytes
                del item, tensor
                with self._room:
                    self._held -= nbytes
                    self._room.notify_all()
            for model, file in files.items():
                self._files[os.path.join(model, name)] = file.close()
        except Exception as error:
            with self._room:
                self._error = error
                self._room.notify_all()
        finally:
            for file in files.values():
                file.discard()
