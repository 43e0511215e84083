"""The trainer's side of a weight update: sends a stream in buckets to every engine. Each sender has a broadcast group of its own.

The control plane is the caller's: `Announce` hands a bucket's header to all engine workers at once and returns a function that blocks
until each has taken the bucket (and raises an engine's error, or on timeout). The data plane is here: a broadcast over gloo or NCCL,
shared memory, or CUDA IPC. While the engines take one bucket, the next is gathered.

Shared memory reaches only one device or one machine. If engines share the devices of several ranks, buckets are relayed: the engine worker
that shares this process's device opens them and broadcasts them to the others over a group of their own (gloo, NCCL). No other rank of the
trainer is involved, and no device is in that group twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend

from megarl.host.shared_memory import SharedMemory
from megarl.sync import wire
from megarl.sync.delta import DeltaSender
from megarl.sync.store import listen_store

Announce = Callable[[dict[str, Any]], Callable[[], object]]
TensorObserver = Callable[[Any, Tensor], None]  # (wire.TensorName, tensor)


@dataclass(frozen=True)
class Sent:
    """What one update transferred."""

    tensors: int
    nbytes: int
    buckets: int
    elements: int  # of all tensors
    changed: int  # of them, those that were sent


class Sender:
    """Sends updates to engine workers. A sender that fails is closed: its engines hold only part of an update.

    Args:
        transport: gloo, nccl, shm or cuda_ipc.
        workers: number of engine workers of all engines together.
        host: the address at which they meet this process (gloo and nccl).
        bucket_mb: capacity of a bucket in MiB; a larger tensor gets a bucket of its own, for which one of the two buffers grows.
        timeout_s: longest wait for the workers to join the group, and for one broadcast.
        device: the trainer's device; nccl and cuda_ipc need a GPU, and keep the buckets there.
        relay: the only worker that shared memory and CUDA IPC reach, which then broadcasts; None: they reach all.
        number: this sender's number.
        senders: how many there are, each with a group of its own; with shm and cuda_ipc, only if there is a relay.
        delta: send only the elements that changed since the update before, and everything in each update of this number; None: always
            everything.
    """

    def __init__(
        self,
        transport: str,
        *,
        workers: int,
        host: str,
        bucket_mb: int,
        timeout_s: float,
        device: torch.device,
        relay: int | None = None,
        number: int = 0,
        senders: int = 1,
        delta: int | None = None,
    ) -> None:
        assert transport in ("gloo", "nccl", "shm", "cuda_ipc"), transport
        assert device.type == "cuda" or transport in ("gloo", "shm"), f"{transport} needs tensors on a GPU"
        self._transport, self._workers, self._host, self._timeout_s = transport, workers, host, timeout_s
        self._relay = relay if transport in ("shm", "cuda_ipc") and workers > 1 else None
        self._place = device if transport in ("nccl", "cuda_ipc") else torch.device("cpu")
        self._capacity, self._number, self._senders = bucket_mb << 20, number, senders
        self._buffers: list[_Buffer] = []
        self._group: Backend | None = None
        self._store: Any = None
        self._delta = None if delta is None else DeltaSender(delta)

    def connect(self, announce: Announce) -> None:
        """Open the broadcast group (gloo, nccl): announce a `wire.Rendezvous`, where engine worker w has rank `first_rank` + w, and join.

        With a relay, this process does not join. Without one, shared memory and CUDA IPC need no group, and nothing is announced.
        """
        network = {"shm": "gloo", "cuda_ipc": "nccl"}.get(self._transport, self._transport)
        if self._relay is None and network != self._transport:
            return
        world = self.first_rank + self._workers
        self._store, port = listen_store(self._host, world, self._timeout_s)
        meeting = wire.Rendezvous(network, self._host, port, world, self._timeout_s, self._senders)
        joined = announce(meeting.plain())
        if self._relay is not None:
            joined()
            return
        # Join in a thread, so that an engine that fails to join is noticed at once, and not when the others time out.
        member: Future[Backend] = Future()
        threading.Thread(target=_resolve, args=(member, lambda: wire.join(meeting, self._store, 0)), daemon=True).start()
        joined()
        self._group = member.result(self._timeout_s)

    @property
    def first_rank(self) -> int:
        """The first engine worker's rank in the broadcast group."""
        return 0 if self._relay is not None else 1

    def send(
        self, stream: Iterable[tuple[wire.TensorName, Tensor]], announce: Announce, watch: TensorObserver | None = None, version: int = 0
    ) -> Sent:
        """Send a stream of tensors to every engine. Returns when all have taken everything.

        On any failure the sender is closed and the error raised.

        Args:
            stream: (Hugging Face name, tensor), or (names, stack), each in memory of its own or in memory that does not change.
            announce: hands a bucket's header (wire.Header.plain()) to the engine workers.
            watch: called with each (name, tensor), or part of a stack, while the engines take the bucket that holds it (for
                fingerprints). The tensors of one bucket are kept for it; with `delta`, whose buckets hold parts of many, it is called
                before.
            version: of the weights, by which `delta` counts.

        Returns:
            What was transferred.
        """
        with self._closed_on_failure():
            tensors = nbytes = buckets = elements = 0
            taken: Callable[[], object] | None = None
            if self._delta is not None:
                self._delta.begin(version)
                stream, watch = _watched(stream, watch), None
            for bucket, buffer, filled in self._fill(stream, keep=watch is not None):
                if taken is not None:
                    taken()
                taken = self._post(bucket, buffer, announce)
                if watch is not None:
                    for name, tensor in filled:
                        watch(name, tensor)
                tensors, nbytes, buckets = tensors + bucket.tensors, nbytes + bucket.nbytes, buckets + 1
                elements += bucket.elements
            if taken is not None:
                taken()
            return Sent(tensors, nbytes, buckets, elements, elements if self._delta is None else self._delta.changed)

    def close(self) -> None:
        """Leave the group and free the buffers: engines that still wait for a broadcast see the connection end."""
        for buffer in self._buffers:
            buffer.close()
        self._buffers, self._group, self._store = [], None, None

    def _fill(
        self, stream: Iterable[tuple[wire.TensorName, Tensor]], *, keep: bool
    ) -> Iterator[tuple[wire.Bucket, _Buffer, list[tuple[wire.TensorName, Tensor]]]]:
        """Yield full buckets, alternating between two buffers: one is overwritten only when the bucket after the next is requested.

        With `keep`, each bucket comes with the tensors that it was filled from, in a list that is cleared when the next is requested.
        """
        turn, bucket, buffer = 0, None, None
        filled = list[tuple[wire.TensorName, Tensor]]()
        for name, tensor in self._parts(stream):
            changes = None if self._delta is None else self._delta.pack(name, tensor)
            nbytes = tensor.nbytes if changes is None else changes[0].nbytes
            if bucket is None or not bucket.fits(nbytes):
                if bucket is not None and buffer is not None:
                    yield bucket, buffer, filled
                    filled.clear()
                buffer = self._buffer(turn, nbytes)
                room = max(self._capacity, wire.aligned(nbytes))  # even if an earlier tensor grew the buffer
                turn, bucket = 1 - turn, wire.Bucket(buffer.bytes_B[:room])
            assert buffer is not None
            buffer.reserve(bucket.nbytes + nbytes)
            bucket.add(name, tensor, changes)
            if keep:
                filled.append((name, tensor))
        if bucket is not None and buffer is not None:
            yield bucket, buffer, filled

    def _parts(self, stream: Iterable[tuple[wire.TensorName, Tensor]]) -> Iterator[tuple[wire.TensorName, Tensor]]:
        """The stream, with stacks that are too large for a bucket split into parts that fit."""
        for name, tensor in stream:
            if isinstance(name, str) or tensor.nbytes <= self._capacity:
                yield name, tensor
                continue
            count = max(1, self._capacity // tensor[0].nbytes)
            for start in range(0, len(name), count):
                yield name[start : start + count], tensor[start : start + count]

    def _buffer(self, turn: int, nbytes: int) -> _Buffer:
        """The buffer for this turn, with room for a tensor of `nbytes`."""
        capacity = max(self._capacity, wire.aligned(nbytes))
        if turn == len(self._buffers):
            self._buffers.append(self._make(capacity))
        elif len(self._buffers[turn].bytes_B) < capacity:
            self._buffers[turn].close()
            self._buffers[turn] = self._make(capacity)
        return self._buffers[turn]

    def _make(self, capacity: int) -> _Buffer:
        if self._transport == "shm":
            return _SharedBuffer(capacity)
        return _Buffer(torch.empty(capacity, dtype=torch.uint8, device=self._place))

    def _post(self, bucket: wire.Bucket, buffer: _Buffer, announce: Announce) -> Callable[[], object]:
        """Announce a bucket and start sending it; the returned function blocks until the engines have it."""
        header = replace(bucket.header(), sender=self._number, relay=self._relay, keep=self._delta is not None)
        if self._transport == "shm":
            assert isinstance(buffer, _SharedBuffer)
            return announce(replace(header, path=buffer.path, place=wire.place_of(self._place)).plain())
        if self._transport == "cuda_ipc":
            return announce(replace(header, handle=wire.share_cuda(buffer.bytes_B), place=wire.place_of(self._place)).plain())
        assert self._group is not None, "connect comes before send"
        taken = announce(header.plain())
        work = wire.broadcast(self._group, bucket.content_B)

        def done() -> None:
            taken()  # first: if an engine has failed, the broadcast would only time out
            work.wait()

        return done

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def _watched(stream: Iterable[tuple[wire.TensorName, Tensor]], watch: TensorObserver | None) -> Iterator[tuple[wire.TensorName, Tensor]]:
    for name, tensor in stream:
        if watch is not None:
            watch(name, tensor)
        yield name, tensor


def _resolve(future: Future[Backend], work: Callable[[], Backend]) -> None:
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


class _Buffer:
    """Memory that buckets are filled into."""

    def __init__(self, bytes_B: Tensor) -> None:
        self.bytes_B = bytes_B

    def reserve(self, nbytes: int) -> None:
        """Make sure that the first `nbytes` can be written."""

    def close(self) -> None:
        """Release the memory."""


class _SharedBuffer(_Buffer):
    """Shared memory that the engines of this machine open by `path`."""

    def __init__(self, capacity: int) -> None:
        self._memory = SharedMemory(capacity, "sync.transport=shm")
        self.path = self._memory.path
        super().__init__(self._memory.bytes_B)

    def reserve(self, nbytes: int) -> None:
        self._memory.reserve(nbytes)

    def close(self) -> None:
        self._memory.close()
