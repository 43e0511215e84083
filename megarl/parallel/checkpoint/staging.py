"""Writes tensors to disk: copies them, if necessary, into host memory of bounded size, from which threads write and hash them."""

import os
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megarl.checkpoints.files import FileRecord, HashedFile
from megarl.errors import SaveError
from megarl.host.parking import BLOCK
from megarl.parallel.backend import choose
from megarl.parallel.checkpoint.dcp import memory_of
from megarl.parallel.checkpoint.index import Location

ALIGN = 64
WRITERS = 2  # threads, and so files per model, of each rank: one hashes while the other waits for the disk


@dataclass(frozen=True)
class Written:
    """What one rank wrote."""

    files: Mapping[str, FileRecord]  # by path inside the step directory
    locations: Mapping[str, list[Location]]  # by model, in the order of `put`


class StagingMemory:
    """Host memory for copies, kept from one save to the next: allocating it takes longer than the copy. For one save at a time."""

    def __init__(self) -> None:
        self._backend = choose()
        self._blocks: list[Tensor] = []
        self._block = self._used = 0  # the block that is being filled, and its bytes in use

    def restart(self) -> None:
        """Mark all of it as free."""
        self._block = self._used = 0

    def take(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Return uninitialised memory. After `restart`, the same shapes in the same order get the same memory."""
        size = shape.numel() * dtype.itemsize
        while self._block < len(self._blocks) and self._used + size > len(self._blocks[self._block]):
            self._block, self._used = self._block + 1, 0
        if self._block == len(self._blocks):
            self._blocks.append(self._backend.staging_buffer(torch.Size([max(size, BLOCK)]), torch.uint8))
        memory = self._blocks[self._block][self._used : self._used + size]
        self._used += -(-size // ALIGN) * ALIGN
        return memory.view(dtype).view(shape)


class StagedWriter:
    """Writes tensors into `directory`/<model>/__<rank>_<thread>.distcp, each as torch.save does.

    `put` copies into host memory and returns; it waits while `budget` bytes (or one tensor) are in flight. So a state within the budget
    costs the caller only a copy, and a larger one is written in pieces, the last of them in the background.

    Args:
        directory: the step's directory.
        rank: this rank's number.
        budget: most bytes in flight.
        memory: memory for the copies that outlives this writer; everything that is put must then fit into the budget.
        still: whether the caller leaves its tensors unchanged until they are written (`written` or `finish`): those in host memory are
            then not copied.
        limit: the setting that the time limits come from, for errors.
    """

    def __init__(
        self,
        directory: Path,
        rank: int,
        budget: int,
        memory: StagingMemory | None = None,
        still: bool = False,
        limit: str = "save.timeout_s",
    ) -> None:
        self._directory, self._rank, self._budget, self._memory, self._still = directory, rank, budget, memory, still
        self._limit = limit
        self._room = threading.Condition()
        self._held = 0  # bytes in flight
        self._begin = threading.Event()  # set when the budget is used up or all is staged: writers would keep the GIL from the copies
        if still:
            self._begin.set()
        self._error: Exception | None = None
        self._queue: queue.SimpleQueue[tuple[str, int, Tensor] | None] = queue.SimpleQueue()
        self._locations: dict[str, list[Location | None]] = {}
        self._files: dict[str, FileRecord] = {}
        self._ended = 0  # threads that have closed their files
        self._writing: dict[int, Path] = {}  # the file that each thread is opening, writing or closing
        self._backend = choose()
        self._threads = [threading.Thread(target=self._write, args=(number,), daemon=True) for number in range(WRITERS)]
        for thread in self._threads:
            thread.start()

    def put(self, model: str, tensor: Tensor, timeout_s: float) -> None:
        """Take the tensor, or a copy of it. After a failed write, or if there is no room in time, it takes nothing: `finish` raises."""
        with self._room:
            if self._held + tensor.nbytes > self._budget:
                self._begin.set()
            if not self._room.wait_for(lambda: self._error or not self._held or self._held + tensor.nbytes <= self._budget, timeout_s):
                self._error = self._late()
            if self._error is not None:
                return
        if not (self._still and tensor.is_cpu and tensor.is_contiguous()):
            new = self._backend.staging_buffer if self._memory is None else self._memory.take
            tensor = new(tensor.shape, tensor.dtype).copy_(tensor)
        with self._room:
            self._held += tensor.nbytes  # not before: there may be no memory for the copy
        locations = self._locations.setdefault(model, [])
        locations.append(None)
        self._queue.put((model, len(locations) - 1, tensor))

    def written(self, timeout_s: float) -> bool:
        """Wait until no thread reads the tensors any more: they are written, or a write has failed. Returns whether that was in time.

        If not, `finish` raises.
        """
        deadline = time.monotonic() + timeout_s
        self._begin.set()
        with self._room:
            if not self._room.wait_for(lambda: self._error or not self._held, timeout_s):
                self._error = self._late()
                return False
        if self._error is None:
            return True
        self.close()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def give_up(self) -> None:
        """Abandon what is not yet written; `finish` raises. The tensors may change from now on, so the files are no checkpoint."""
        with self._room:
            self._error = self._error or SaveError("was given up")
            self._room.notify_all()

    def close(self) -> None:
        """Announce that no more tensors follow."""
        self._begin.set()
        for _ in self._threads:
            self._queue.put(None)

    def finish(self, timeout_s: float) -> Written:
        """Wait until everything is on disk; call it after `close`.

        Raises:
            OSError: a write has failed; names the file.
            SaveError: a write has not returned in time; names the file, too.
        """
        with self._room:
            if not self._room.wait_for(lambda: self._error or self._ended == WRITERS, timeout_s):
                self._error = self._late()
        if self._error is not None:
            raise self._error
        whole = {model: [one for one in locations if one is not None] for model, locations in self._locations.items()}
        assert all(len(whole[model]) == len(locations) for model, locations in self._locations.items())
        return Written(self._files, whole)

    @property
    def hanging(self) -> list[Path]:
        """The files that threads are writing."""
        with self._room:
            return list(self._writing.values())

    def _late(self) -> SaveError:
        """Return the error of writes that have not returned in time. The caller holds the lock."""
        where = ", ".join(map(str, list(self._writing.values()))) or str(self._directory)
        return SaveError(f"{where}: not written within {self._limit}")

    def _write(self, number: int) -> None:
        name, files = f"__{self._rank}_{number}.distcp", dict[str, HashedFile]()
        torch.serialization.set_crc32_options(False)  # of this thread; torch reads no CRC; megarl has its own hashes
        self._begin.wait()
        try:
            while (item := self._queue.get()) is not None:
                model, index, tensor = item
                if self._error is not None:
                    break
                self._writing[number] = self._directory / model / name
                if model not in files:
                    files[model] = HashedFile(self._writing[number], direct=not self._still)
                file = files[model]
                torch.save(_alone(tensor), file)  # type: ignore[arg-type]  # it only calls `write` and `flush`
                file.check()
                self._locations[model][index] = Location(name, *file.end_part())
                nbytes = tensor.nbytes
                del item, tensor
                with self._room:
                    self._held -= nbytes
                    del self._writing[number]
                    self._room.notify_all()
            for model, file in files.items():
                self._writing[number] = file.path
                self._files[os.path.join(model, name)] = file.close()
        except Exception as error:
            with self._room:
                self._error = self._error or error
                self._room.notify_all()
        finally:
            for file in files.values():
                file.discard()
            with self._room:
                self._writing.pop(number, None)
                self._ended += 1
                self._room.notify_all()


def _alone(tensor: Tensor) -> Tensor:
    """The tensor's memory, while the tensor is alive, as a storage of its own: torch.save writes the whole storage of a tensor."""
    return torch.frombuffer(memory_of(tensor), dtype=tensor.dtype).view(tensor.shape) if tensor.numel() else torch.empty_like(tensor)
