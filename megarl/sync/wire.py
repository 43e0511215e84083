"""The wire format of a weight update, shared by the trainer (`send.py`) and the engines (`receive.py`). Needs only torch.

An update is a sequence of buckets. A bucket is a `Header` (plain data, sent through the control plane) and one run of bytes (the data
plane: a broadcast, a shared file or a CUDA IPC handle). Each tensor lies in the bytes at its offset, contiguous and aligned. Tensors of one
shape, such as the experts of a layer, may travel as a stack, which costs as much to handle as a single tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend

from megarl.host.network import choose_nccl_interface, interface_towards
from megarl.sync import gloo

ALIGN = 64  # bytes: any dtype may be viewed at an aligned offset
CTAS = 64  # thread blocks of NCCL for the broadcasts of several senders together: about half of a GPU's multiprocessors
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3fn": torch.float8_e4m3fn}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TensorName = str | list[str]  # the name of a tensor, or the names of tensors that are stacked along a first axis


@dataclass(frozen=True)
class Change:
    """Describes the changed elements of a tensor (`delta.py`)."""

    count: int  # of changed elements
    narrow: bool  # each distance takes 2 bytes, else 4

    def nbytes(self, itemsize: int) -> int:
        """Bytes of the distances and of the values, whose elements have `itemsize` bytes."""
        return aligned(self.count * (2 if self.narrow else 4)) + self.count * itemsize


@dataclass(frozen=True)
class Header:
    """What one bucket holds and where its bytes are."""

    names: list[TensorName]
    dtypes: list[str]  # keys of DTYPES
    shapes: list[list[int]]
    offsets: list[int]  # bytes, multiples of ALIGN
    nbytes: int  # of the whole bucket
    sender: int = 0  # whose broadcast group brings it
    path: str | None = None  # transport shm: the file to map
    handle: list[Any] | None = None  # transport cuda_ipc: see `share_cuda`
    place: str | None = None  # where path or handle is valid: see `place_of`
    relay: int | None = None  # the worker that path or handle is for; it broadcasts the bytes to the others. None: each opens them
    changes: list[Change | None] | None = None  # by tensor, what came of it; None: each came whole
    keep: bool = False  # the next update may bring changes of these tensors only

    @property
    def first(self) -> str:
        """The name of the bucket's first tensor."""
        return self.names[0] if isinstance(self.names[0], str) else self.names[0][0]

    @property
    def each_change(self) -> list[Change | None]:
        """What came of each tensor; None: all of it."""
        return self.changes or [None] * len(self.names)

    def plain(self) -> dict[str, Any]:
        """The header as a dictionary of strings, numbers, lists and bytes, which any serializer supports."""
        return asdict(self)

    @staticmethod
    def parse(plain: dict[str, Any]) -> Header:
        """The inverse of `plain`. Raises ValueError for an invalid header, such as a tensor outside the bucket."""
        changes = plain.get("changes") and [None if one is None else Change(**one) for one in plain["changes"]]
        header = Header(**{**plain, "changes": changes})
        for name, dtype, shape, offset, change in zip(
            header.names, header.dtypes, header.shapes, header.offsets, header.each_change, strict=True
        ):
            if dtype not in DTYPES:
                raise ValueError(f"bucket: {name} has the unknown dtype {dtype!r}")
            size = DTYPES[dtype].itemsize
            end = offset + (math.prod(shape) * size if change is None else change.nbytes(size))
            if offset < 0 or offset % ALIGN or min(shape, default=0) < 0 or end > header.nbytes:
                raise ValueError(f"bucket: {name} covers bytes {offset} to {end} of {header.nbytes}")
            if not isinstance(name, str) and len(name) != shape[0]:
                raise ValueError(f"bucket: {len(name)} names of a stack of {shape[0]}")
        return header


@dataclass(frozen=True)
class Rendezvous:
    """How an engine reaches a sender's broadcast group (transports gloo and nccl); plain data.

    Rank 0 is the sender, and the engine workers are ranks 1 .. world-1. If buckets are relayed, the trainer is not a member, and the first
    worker of all engines is rank 0.
    """

    transport: str  # gloo | nccl
    host: str
    port: int
    world: int
    timeout_s: float
    senders: int = 1  # that broadcast at the same time, each in a group of its own

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class Bucket:
    """Fills the bytes of one bucket, tensor by tensor."""

    def __init__(self, bytes_B: Tensor) -> None:
        self._bytes_B = bytes_B  # uint8 [capacity]
        self._header, self.nbytes, self.tensors = Header([], [], [], [], 0), 0, 0  # nbytes: in use, padding included
        self._changes: list[Change | None] = []
        self.elements = 0  # of its tensors, changed or not

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for so many bytes more."""
        return self.nbytes + aligned(nbytes) <= len(self._bytes_B)

    def add(self, name: TensorName, tensor: Tensor, changes: tuple[Tensor, Change] | None = None) -> None:
        """Copy a tensor, or a stack, into the bucket: all of it, or only its changes, from `DeltaSender.pack`.

        Raises ValueError for a dtype that the wire does not carry.
        """
        if tensor.dtype not in _NAMES:
            raise ValueError(f"bucket: {name} has the dtype {tensor.dtype}, which the wire does not carry")
        nbytes = tensor.nbytes if changes is None else changes[0].nbytes
        assert self.fits(nbytes), f"{name} of {nbytes} bytes does not fit"
        room_B = self._bytes_B[self.nbytes : self.nbytes + nbytes]
        if changes is None:
            room_B.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        else:
            room_B.copy_(changes[0])
        self._changes.append(None if changes is None else changes[1])
        self.elements += tensor.numel()
        self._header.names.append(name)
        self._header.dtypes.append(_NAMES[tensor.dtype])
        self._header.shapes.append(list(tensor.shape))
        self._header.offsets.append(self.nbytes)
        self.nbytes += aligned(nbytes)
        self.tensors += 1 if isinstance(name, str) else len(name)

    def header(self) -> Header:
        """The header for what the bucket holds now, without path, handle or place."""
        return replace(self._header, nbytes=self.nbytes, changes=self._changes if any(self._changes) else None)

    @property
    def content_B(self) -> Tensor:
        """The bytes in use: uint8 [nbytes]."""
        return self._bytes_B[: self.nbytes]


def each(name: TensorName, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The (name, tensor) pairs of a single tensor or of a stack."""
    return [(name, tensor)] if isinstance(name, str) else list(zip(name, tensor, strict=True))


def unpack_stacks(bytes_B: Tensor, header: Header) -> Iterator[tuple[TensorName, Tensor]]:
    """Yield views of a bucket's bytes (uint8 [>= nbytes]) as (name, tensor), with stacks as they were sent: valid as long as the bytes are.

    Of a tensor of which only changes came, the view is of the bytes that describe them.
    """
    for name, dtype, shape, offset, change in zip(
        header.names, header.dtypes, header.shapes, header.offsets, header.each_change, strict=True
    ):
        kind = DTYPES[dtype]
        if change is None:
            yield name, bytes_B[offset : offset + math.prod(shape) * kind.itemsize].view(kind).view(shape)
        else:
            yield name, bytes_B[offset : offset + change.nbytes(kind.itemsize)]


def place_of(device: torch.device) -> str:
    """The identity of a device's memory: this machine's current boot, and for a GPU its UUID."""
    machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if device.type == "cpu":
        return machine
    return f"{machine}/GPU-{torch.get_device_module(device).get_device_properties(device).uuid}"


def share_cuda(bytes_B: Tensor) -> list[Any]:
    """A handle with which another process opens this CUDA buffer on the same GPU; the reader waits for the writes made so far.

    torch attaches what belongs to a handle (an event, a counter) to the shared storage, with one more wrapper each time; a separate storage
    for each handle lets all of that be freed.
    """
    assert bytes_B.is_cuda and bytes_B.storage_offset() == 0, "a bucket owns its whole storage"
    storage = bytes_B.untyped_storage()
    alias: Any = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), bytes_B.device, storage.nbytes())
    return list(alias._share_cuda_())


def open_cuda(handle: list[Any], device: int) -> Tensor:
    """The buffer behind `share_cuda`'s handle as uint8. `device` is the index under which this process sees the same GPU.

    The result is valid until it is dropped; finish reading (synchronize) before you tell the sender that the bucket is done.
    """
    torch.zeros(1, device=f"cuda:{device}")  # a CUDA context must exist before a handle is opened
    storage = torch.UntypedStorage._new_shared_cuda(device, *handle[1:])
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage)


def join(rendezvous: Rendezvous, store: dist.Store, rank: int) -> Backend:
    """Join the broadcast group, and return this process's member.

    With gloo it blocks until all members have joined; NCCL's members meet in their first broadcast.

    It listens on the interface through which it reaches the trainer. (NCCL reads the variable for it once per process: an engine, whose
    tensor-parallel workers use NCCL earlier, has it set from its start.)

    Args:
        rendezvous: the transport, the number of members, and how many seconds to wait for them.
        store: a client (or, on rank 0, the server) of the store at rendezvous.host:port.
        rank: this process's rank in the group.
    """
    timeout = timedelta(seconds=rendezvous.timeout_s)
    members = dist.PrefixStore("weights", store)
    interface = interface_towards(rendezvous.host)
    if rendezvous.transport == "gloo":
        return gloo.group(members, rank, rendezvous.world, timeout, interface)
    assert rendezvous.transport == "nccl", rendezvous.transport
    choose_nccl_interface(interface)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    if rendezvous.senders > 1:  # so that the broadcasts of all of them fit on a GPU at once
        options.config.max_ctas = max(1, CTAS // rendezvous.senders)
    return dist.ProcessGroupNCCL(members, rank, rendezvous.world, options)


def broadcast(group: Backend, bytes_B: Tensor, root: int = 0) -> dist.Work:
    """Start the broadcast of a bucket's bytes; wait on the result.

    Args:
        group: this process's member, from `join`.
        bytes_B: exactly header.nbytes on every member; what is sent, or memory for it.
        root: the rank that sends.
    """
    options = dist.BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    return group.broadcast([bytes_B], options)  # type: ignore[attr-defined]  # torch's stubs lack it


def aligned(nbytes: int) -> int:
    """Round up to a multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN
