"""The engine's side of a weight update, for any engine: receives the buckets and checks that every tensor came. Needs only torch."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.host.shared_memory import mapped
from megarl.sync.delta import DeltaReceiver
from megarl.sync.wire import Header, Rendezvous, TensorName, broadcast, each, join, open_cuda, place_of, unpack_stacks

Own = Callable[[list[str]], tuple[int, int]]


class WeightError(ValueError):
    """A weight stream does not fit the model; the message names the tensor."""


class Inventory:
    """The tensors that one update must bring: each once, in its shape and dtype."""

    def __init__(self, expected: Mapping[str, tuple[Sequence[int], str]]) -> None:
        self._expected = {name: (list(shape), dtype) for name, (shape, dtype) in expected.items()}
        self._seen: set[str] = set()

    def take(self, name: str, shape: Sequence[int], dtype: str) -> None:
        """Tick off one tensor.

        Args:
            name: its Hugging Face name.
            shape: its shape as received.
            dtype: its dtype as received, a key of `wire.DTYPES`.

        Raises:
            WeightError: the tensor is unknown, came before, or has another shape or dtype than expected.
        """
        if name not in self._expected:
            raise WeightError(f"{name}: the engine's model has no such tensor")
        if name in self._seen:
            raise WeightError(f"{name}: came twice in one update")
        known_shape, known_dtype = self._expected[name]
        if list(shape) != known_shape:
            raise WeightError(f"{name}: came with shape {list(shape)}, and the engine's model has {known_shape}")
        if dtype != known_dtype:
            raise WeightError(f"{name}: came as {dtype}, and the engine's model has {known_dtype}")
        self._seen.add(name)

    def take_all(self, name: TensorName, shape: Sequence[int], dtype: str) -> None:
        """Tick off one tensor, or all tensors of a stack, as `take` does.

        Args:
            name: its name, or theirs.
            shape: as received; that of a stack begins with their number.
            dtype: as received.
        """
        if isinstance(name, str):
            self.take(name, shape, dtype)
        else:
            for one in name:
                self.take(one, shape[1:], dtype)

    def complete(self) -> None:
        """Raise WeightError if a tensor has not come."""
        missing = [name for name in self._expected if name not in self._seen]
        if missing:
            raise WeightError(f"{missing[0]}: did not come ({len(missing)} of {len(self._expected)} tensors missing)")


class BucketReceiver:
    """Receives the buckets that are sent to one worker of an engine.

    Args:
        device: the worker's device.
        own: the range of a stack's tensors that this worker needs; it gets no others. None: all of every stack.
    """

    def __init__(self, device: torch.device, own: Own | None = None) -> None:
        self._device, self._own = device, own
        self._groups: list[Any] = []  # ProcessGroupGloo or ProcessGroupNCCL, by sender
        self._stores: list[Any] = []
        self._rank = 0
        self._delta = DeltaReceiver()

    def connect(self, meetings: Sequence[Rendezvous], rank: int) -> None:
        """Join each sender's broadcast group as `rank`; waits for the others as `wire.join` does."""
        self._delta = DeltaReceiver()
        self._rank, self._groups, self._stores = rank, [], []
        for meeting in meetings:
            timeout = timedelta(seconds=meeting.timeout_s)
            self._stores.append(dist.TCPStore(meeting.host, meeting.port, None, False, timeout, wait_for_workers=False))
            self._groups.append(join(meeting, self._stores[-1], rank))

    def receive(self, headers: Sequence[Header]) -> list[tuple[str, Tensor]]:
        """Receive the (name, tensor) pairs of buckets that are sent at the same time, in memory of this worker's own.

        A sender reuses a shared buffer.
        """
        return [one for name, tensor in self.receive_stacks(headers) for one in each(name, tensor)]

    def receive_stacks(
        self, headers: Sequence[Header], place: torch.device | None = None, read_at_once: Callable[[TensorName], bool] | None = None
    ) -> Iterator[tuple[TensorName, Tensor]]:
        """Like `receive`, with stacks as they were sent, or this worker's part of them, when all have arrived.

        Tensors of which only changes came are put together as they are asked for, since a bucket may hold the changes of a whole model; the
        next update changes their memory, if they are on the CPU.

        Args:
            headers: the buckets' headers.
            place: where the tensors are wanted; None: on this worker's device.
            read_at_once: tells of which tensors the memory is not needed once the sender has its answer: from host memory that it shares
                they are not copied. None: of none.
        """
        delta = self._delta  # which a new connection replaces: buckets of the one before must not get into it
        copied = read_at_once is None
        coming = [self._start(header, copied) for header in headers]
        arrived = [(one(), header) for one, header in zip(coming, headers, strict=True)]
        return chain.from_iterable(self._unpacked(bytes_B, header, delta, place, read_at_once) for bytes_B, header in arrived)

    def _unpacked(
        self,
        bytes_B: Tensor,
        header: Header,
        delta: DeltaReceiver,
        place: torch.device | None,
        read_at_once: Callable[[TensorName], bool] | None,
    ) -> Iterator[tuple[TensorName, Tensor]]:
        stays = header.keep or place is not None
        shared = read_at_once is not None and header.path is not None and header.relay in (None, self._rank)
        for (name, tensor), shape, change in zip(unpack_stacks(bytes_B, header), header.shapes, header.each_change, strict=True):
            start, stop = (0, 1) if isinstance(name, str) else (0, len(name)) if self._own is None else self._own(name)
            if start == stop:
                continue
            part = name if isinstance(name, str) else name[start:stop]
            if change is not None:
                first = start * math.prod(shape[1:]) if start else 0
                yield part, delta.merge(name, tensor, change, first).to(place or self._device)
                continue
            own = tensor if isinstance(name, str) else tensor[start:stop]
            part_tensor = own.to(place or self._device)
            # A view of what is kept would keep the others' experts in memory, too; and the sender reuses shared memory.
            if part_tensor is own and (stays and own.numel() < tensor.numel() or shared and not (read_at_once and read_at_once(name))):
                part_tensor = own.clone()
            if header.keep:
                delta.keep(name, part_tensor)
            yield part, part_tensor

    def _start(self, header: Header, copied: bool) -> Callable[[], Tensor]:
        """Start receiving a bucket; the returned function waits for its bytes: in shared host memory, unless they are to be `copied`."""
        if header.relay is None and (header.path is not None or header.handle is not None):
            bytes_B = self._opened(header, copied)
            return lambda: bytes_B
        if header.relay != self._rank:
            return self._broadcast(header, torch.empty(header.nbytes, dtype=torch.uint8, device=self._device))
        try:
            return self._broadcast(header, self._opened(header, copied))
        except Exception as error:  # of opening; the others wait for this worker's bytes, and the update fails with its error
            fault = error
        sent = self._broadcast(header, torch.zeros(header.nbytes, dtype=torch.uint8, device=self._device))

        def failed() -> Tensor:
            sent()
            raise fault

        return failed

    def _opened(self, header: Header, copied: bool) -> Tensor:
        """A bucket in memory that the sender shares with this worker, or a copy of it; of a GPU's memory always a copy."""
        if header.path is not None:
            self._require(header, torch.device("cpu"), "shm")
            bytes_B = mapped(header.path, header.nbytes)
            return bytes_B.clone() if copied else bytes_B
        assert header.handle is not None
        self._require(header, self._device, "cuda_ipc")
        bytes_B = open_cuda(header.handle, self._device.index).clone()
        torch.accelerator.current_stream(self._device).synchronize()  # of this stream only: others' broadcasts may be under way
        return bytes_B

    def _broadcast(self, header: Header, bytes_B: Tensor) -> Callable[[], Tensor]:
        if header.sender >= len(self._groups):
            raise WeightError(f"{header.first}: came before this worker joined the broadcast group")
        work = broadcast(self._groups[header.sender], bytes_B, header.relay or 0)

        def arrived() -> Tensor:
            work.wait()
            return bytes_B

        return arrived

    def _require(self, header: Header, device: torch.device, transport: str) -> None:
        """Raise WeightError if this worker does not share the sender's memory."""
        here = place_of(device)
        if header.place != here:
            raise WeightError(
                f"sync.transport={transport}: shares memory, and the trainer's is on {header.place}, this worker's on {here} "
                "(nccl and gloo send)"
            )
