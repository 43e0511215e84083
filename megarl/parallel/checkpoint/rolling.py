"""A copy of this rank's part of a step in shared memory, for the same rank of the same layout. It needs no disk and no other ranks.

The bytes: the length of a header, the header (JSON), the random states, then every tensor that the rank holds, in the model's own order.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megarl.host.shared_memory import SharedMemory
from megarl.parallel.checkpoint import sharded
from megarl.parallel.checkpoint.rng import random_states, restore_random_states
from megarl.parallel.checkpoint.state import ModelState
from megarl.parallel.grid import Grid

ALIGN = 64
SLACK = 1 << 16  # bytes to spare: the numbers in the header grow


class RollingCopy:
    """Writes this rank's part of successive steps into two slots: while one is being written, the other is complete.

    Args:
        grid: this rank's grid.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._slots: dict[int, SharedMemory] = {}
        self._steps: dict[int, int] = {}  # the step in each slot

    def write(self, step: int, last: int, models: Mapping[str, ModelState]) -> tuple[str, int]:
        """Copy the models, their optimizers and the random states as they are now.

        Args:
            step: the step's number.
            last: the step whose copy must not be overwritten.
            models: by name; they are woken one after the other.

        Returns:
            The path at which other processes of this machine open the copy, and its size.

        Raises:
            OSError: there is no room.
        """
        header: dict[str, Any] = {"models": {}, "sizes": {}}
        random = torch.frombuffer(bytearray(random_states()), dtype=torch.uint8)
        for name, model in models.items():
            model.wake()
            trainable = model.trainable
            header["models"][name] = None if trainable is None else [trainable.steps, sharded.adam_step(trainable)]
            header["sizes"][name] = [tensor.nbytes for tensor in _tensors(model, self._grid)]
        header["random"] = len(random)
        head = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        sizes = [8, len(head), len(random), *(size for own in header["sizes"].values() for size in own)]
        memory = self._slot(step, last, sum(map(_aligned, sizes)))
        room = _Room(memory.bytes_B)
        room.take(8).view(torch.int64)[0] = len(head)
        room.take(len(head)).copy_(head)
        room.take(len(random)).copy_(random)
        for model in models.values():
            model.wake()
            for tensor in _tensors(model, self._grid):
                room.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return memory.path, room.taken

    def _slot(self, step: int, last: int, size: int) -> SharedMemory:
        """The slot that does not hold `last`, with room for `size` bytes."""
        slot = int(self._steps.get(0) == last)
        memory, self._steps[slot] = self._slots.get(slot), step
        if memory is None or len(memory.bytes_B) < size:
            if memory is not None:
                self._slots.pop(slot).close()  # first: if there is no room for another, none is left
            memory = self._slots[slot] = SharedMemory(size + SLACK, "save.rolling")
        memory.reserve(size)
        return memory


@torch.no_grad()
def restore(bytes_B: Tensor, models: Mapping[str, ModelState], grid: Grid) -> None:
    """Restore models, optimizers and this process's random states from a copy by `RollingCopy.write` on the same rank and layout.

    Args:
        bytes_B: uint8 [B], the copy.
        models: the models to restore, by name.
        grid: this rank's grid.
    """
    room = _Room(bytes_B)
    header = json.loads(bytes(room.take(int(room.take(8).view(torch.int64)[0])).numpy()))
    random = bytes(room.take(header["random"]).numpy())
    for name, model in models.items():
        model.wake()
        counts = header["models"][name]
        if model.trainable is not None:
            sharded.start_optimizer(model.trainable)
        tensors = list(_tensors(model, grid))
        assert [tensor.nbytes for tensor in tensors] == header["sizes"][name], f"{name}: a copy of another model or layout"
        for tensor in tensors:
            tensor.copy_(room.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape))
        if model.trainable is not None:
            model.trainable.steps, adam_step = counts
            sharded.finish_optimizer(model.trainable, adam_step)
    restore_random_states(random)


def _tensors(model: ModelState, grid: Grid) -> Iterator[Tensor]:
    """What this rank holds of a model: the weights, and its slices of the optimizer's state."""
    yield from sharded.tensors(sharded.model_state(model.chunks, grid))
    if model.trainable is not None:
        yield from sharded.local_optimizer_state(model.trainable)


class _Room:
    """Hands out consecutive pieces of memory."""

    def __init__(self, bytes_B: Tensor) -> None:
        self._bytes_B, self.taken = bytes_B, 0

    def take(self, size: int) -> Tensor:
        piece = self._bytes_B[self.taken : self.taken + size]
        self.taken += _aligned(size)
        return piece


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN
