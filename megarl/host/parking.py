"""Moves tensors that are not in use off the device and back, bit for bit."""

import os
import tempfile
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

BLOCK = 256 << 20  # bytes of host memory allocated at a time: pinned memory comes in powers of two


class Parking:
    """Moves storages out of the device's memory, and back.

    Whole storages are moved, not tensors, so that every view into them stays valid.

    Args:
        buffer: allocates the given number of bytes outside the device, as uint8.
    """

    def __init__(self, buffer: Callable[[int], Tensor]) -> None:
        self._buffer = buffer
        self._away: list[tuple[torch.UntypedStorage, int, list[Tensor] | None]] = []
        self._places: dict[int, list[Tensor]] = {}  # where each storage went last time, in pieces: buffers are slow to allocate
        self._free = torch.empty(0, dtype=torch.uint8)

    def park(self, tensors: Iterable[Tensor], *, keep: bool = True) -> None:
        """Move the storages of the tensors out. keep=False drops their contents: they come back with arbitrary values."""
        for storage in {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}.values():
            size = storage.nbytes()
            if size:  # otherwise it is already parked
                self._away.append((storage, size, self._copy(storage) if keep else None))
                storage.resize_(0)

    def wake(self) -> None:
        """Bring everything back."""
        for storage, size, place in self._away:
            storage.resize_(size)
            for piece, part in zip(place or (), _parts(storage, place or ()), strict=True):
                part.copy_(piece)
        self._away.clear()

    def _copy(self, storage: torch.UntypedStorage) -> list[Tensor]:
        place = self._places.get(storage._cdata)
        if place is None or sum(map(len, place)) != storage.nbytes():
            place = self._places[storage._cdata] = self._room(storage.nbytes())
        for piece, part in zip(place, _parts(storage, place), strict=True):
            piece.copy_(part)
        return place

    def _room(self, size: int) -> list[Tensor]:
        pieces = list[Tensor]()
        while size:
            if not len(self._free):
                self._free = self._buffer(BLOCK)
            pieces.append(self._free[:size])
            self._free = self._free[len(pieces[-1]) :]
            size -= len(pieces[-1])
        return pieces


def file_buffer(size: int) -> Tensor:
    """Allocate `size` bytes for parking when the device is the CPU: in an unnamed file in TMPDIR, whose pages the kernel may evict."""
    handle, path = tempfile.mkstemp()
    try:
        os.truncate(handle, size)
        return torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
    finally:
        os.close(handle)
        os.unlink(path)


def _parts(storage: torch.UntypedStorage, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
    """Split the bytes of a storage into parts as long as the pieces."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).split([len(piece) for piece in pieces]) if pieces else ()
