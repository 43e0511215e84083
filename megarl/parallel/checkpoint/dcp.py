"""The files of torch's distributed checkpoints as used by Megatron's torch_dist, without process groups, Megatron or unsafe unpickling.

A folder holds `*.distcp` files, in which tensors are saved one after the other, and `.metadata`, which lists the tensors and where each of
their rectangular chunks lies. megarl writes it for Megatron, and reads an index of its own.
"""

import ctypes
import io
import json
import math
import os
import pickle
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from xxhash import xxh3_128

from megarl.checkpoints.files import FileRecord, StoredFile, write_file
from megarl.checkpoints.steps import COMMON, FLIPPED
from megarl.errors import ConfigError, DamagedFile
from megarl.imports import gc_paused
from megarl.parallel.checkpoint.index import INDEX, Location, Shard, StoredShard, StoredTensor, encode_index
from megarl.text.display import one_line

METADATA = ".metadata"
FORMAT = "metadata.json"  # from which Megatron recognises the format (dist_checkpointing/core.py)
METADATA_FILES = (METADATA, INDEX, FORMAT, COMMON)  # what `write_metadata` writes
_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}


def write_metadata(folder: Path, shards: Iterable[tuple[Shard, Location]]) -> dict[str, FileRecord]:
    """Write the metadata files that make the shards one checkpoint. Returns the files' records by name."""
    common = io.BytesIO()
    torch.save({}, common)
    shards = list(shards)
    return {
        METADATA: write_file(folder / METADATA, _pickled(shards)),
        INDEX: write_file(folder / INDEX, encode_index(shards)),
        FORMAT: write_file(folder / FORMAT, json.dumps(_FORMAT).encode()),
        COMMON: write_file(folder / COMMON, common.getvalue()),
    }


@gc_paused()  # as in `encode_index`
def _pickled(shards: Iterable[tuple[Shard, Location]]) -> bytes:
    tensors: dict[str, TensorStorageMetadata] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for shard, location in shards:
        whole = TensorStorageMetadata(TensorProperties(dtype=shard.dtype), torch.Size(shard.shape), [])
        chunk = ChunkStorageMetadata(torch.Size(shard.offset), torch.Size(shard.size))
        tensors.setdefault(shard.key, whole).chunks.append(chunk)
        stored[MetadataIndex(shard.key, shard.offset)] = _StorageInfo(location.file, location.offset, location.length)
    return pickle.dumps(Metadata({**tensors}, storage_data=stored, storage_meta=StorageMeta(), version=CURRENT_DCP_VERSION))


class DcpReader:
    """Reads the tensors of one folder, and checks their hashes where they are known.

    Args:
        folder: the folder.
        tensors: its index.
    """

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self._folder, self._tensors, self._finder = folder, tensors, ChunkFinder()
        self.shapes = {key: tensor.shape for key, tensor in self._tensors.items()}
        self.dtypes = {key: tensor.dtype for key, tensor in self._tensors.items()}

    def shards(self, keys: Iterable[str]) -> Iterator[Shard]:
        """Every stored piece of these tensors."""
        for key in keys:
            tensor = self._tensors[key]
            for shard in tensor.shards:
                yield Shard(key, tensor.shape, shard.offset, shard.size, tensor.dtype)

    def read(self, wanted: Shard) -> Tensor:
        """Read part of a tensor, in its stored dtype. Raises ConfigError if a file cannot be read, or does not hold what was saved."""
        overlaps = list(self._tensors[wanted.key].overlaps(wanted))
        whole: Tensor | None = None
        for shard, source, target in overlaps:
            piece = self._read(wanted, shard, source)
            if len(overlaps) == 1 and piece.shape == wanted.size:
                return piece
            whole = torch.empty(wanted.size, dtype=wanted.dtype) if whole is None else whole
            whole[target] = piece
            del piece
        assert whole is not None, f"{wanted.key} is nowhere"
        return whole

    def _read(self, wanted: Shard, shard: StoredShard, part: tuple[slice, ...]) -> Tensor:
        file = self._folder / shard.location.file
        with open_shards(file) as stored:
            saved = self._finder.find(stored, shard.location, wanted.key)
            if tuple(saved.layout.shape) != shard.size or saved.layout.dtype != wanted.dtype:
                raise ConfigError(
                    f"checkpoint: {file}: {wanted.key} is {saved.layout.dtype} {list(saved.layout.shape)}, "
                    f"declared {wanted.dtype} {list(shard.size)}"
                )
            return saved.read_part(part)


@contextmanager
def open_shards(file: Path) -> Iterator[StoredFile]:
    """Open a file of saved tensors. Raises DamagedFile if it cannot be read."""
    try:
        with StoredFile(file) as stored:
            yield stored
    except OSError as error:
        raise DamagedFile(str(file), f"unreadable: {error.strerror}") from None


@dataclass(frozen=True)
class SavedTensor:
    """A tensor whose elements are still in their file."""

    file: StoredFile
    location: Location
    what: str  # names the tensor in an error
    beginning: bytes  # the bytes before its storage
    layout: Tensor  # on the device `meta`: dtype, shape, strides, and the offset in its storage

    def read(self) -> Tensor:
        """Read the tensor into new memory. Raises DamagedFile or OSError."""
        layout = self.layout
        storage = torch.empty(layout.untyped_storage().nbytes(), dtype=torch.uint8)
        self._read(memory_of(storage))
        tensor = torch.empty(0, dtype=layout.dtype)
        return tensor.set_(storage.untyped_storage(), layout.storage_offset(), layout.shape, layout.stride())

    def read_part(self, part: tuple[slice, ...]) -> Tensor:
        """Read a part of the tensor: only its rows if there is no hash of the whole. Raises DamagedFile or OSError."""
        layout = self.layout
        axis = next((axis for axis, extent in enumerate(layout.shape) if extent != 1), None)
        if self.location.xxh128 or axis is None or not layout.is_contiguous():
            return self.read()[part]
        rows = part[axis]
        tensor = torch.empty((*layout.shape[:axis], rows.stop - rows.start, *layout.shape[axis + 1 :]), dtype=layout.dtype)
        first = layout.storage_offset() + rows.start * math.prod(layout.shape[axis + 1 :])
        self.file.read(self.location.offset + len(self.beginning) + first * layout.element_size(), memory_of(tensor))
        return tensor[(*part[:axis], slice(None), *part[axis + 1 :])]

    def read_into(self, target: Tensor) -> bool:
        """Read the tensor into the memory of `target`. Raises DamagedFile or OSError.

        Returns False, and reads nothing, if elements are not laid out there as in the file.
        """
        layout = self.layout
        same = (layout.dtype, layout.shape, layout.device) == (target.dtype, target.shape, torch.device("meta"))
        if not same or target.device.type != "cpu" or not layout.is_contiguous() or not target.is_contiguous():
            return False
        if layout.untyped_storage().nbytes() != target.nbytes:
            return False
        self._read(memory_of(target))
        return True

    def _read(self, storage: memoryview) -> None:
        """Read the whole storage, and compare the hash of all that was saved for the tensor, if it is known."""
        location = self.location
        start = location.offset + len(self.beginning)
        end = start + len(storage)
        self.file.read(start, storage)
        rest = bytearray(location.offset + location.length - end)
        self.file.read(end, memoryview(rest))
        digest = xxh3_128(self.beginning)
        digest.update(storage)
        digest.update(rest)
        if location.xxh128 and digest.hexdigest() != location.xxh128:
            raise DamagedFile(str(self.file.path), f"{self.what}: {FLIPPED}")


class ChunkFinder:
    """Finds saved tensors in files. torch.load passes each byte through Python, twenty times slower than reading the file.

    Everything that torch.save writes before the elements describes them. So a saved tensor with the same beginning and the same length as
    an earlier one has the same layout: of all the experts of a model, torch parses only one.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[bytes, Tensor]] = {}  # by length: the bytes before the elements, and their layout

    def find(self, file: StoredFile, location: Location, what: str) -> SavedTensor:
        """Find one tensor.

        Args:
            file: an open file.
            location: the tensor's location in the file.
            what: names the tensor in an error.

        Raises:
            ConfigError: there is no tensor; DamagedFile if its bytes have changed since they were written.
        """
        known = self._known.get(location.length)
        if known is None or _bytes(file, location, len(known[0])) != known[0]:
            try:
                start, layout = _inspect(file, location, what)
            except ConfigError:
                if location.xxh128 and xxh3_128(_bytes(file, location, location.length)).hexdigest() != location.xxh128:
                    raise DamagedFile(str(file.path), f"{what}: {FLIPPED}") from None
                raise
            known = self._known[location.length] = _bytes(file, location, start), layout
        return SavedTensor(file, location, what, *known)


def _bytes(file: StoredFile, location: Location, count: int) -> bytes:
    """The first bytes of a saved tensor."""
    data = bytearray(count)
    file.read(location.offset, memoryview(data))
    return bytes(data)


def _inspect(file: StoredFile, location: Location, what: str) -> tuple[int, Tensor]:
    """(where the storage begins inside a saved tensor, how the elements are laid out in the storage)."""
    try:
        window = cast(IO[bytes], _Window(file, location.offset, location.length))
        with zipfile.ZipFile(window) as entries:
            if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.infolist()):
                raise ValueError("is compressed, which torch never writes")
        window.seek(0)
        records = cast(Any, torch._C).PyTorchFileReader(window)
        # torch (2.13, serialization.py:2135) would swap the bytes of a storage on `meta`, which has none
        if records.has_record("byteorder") and records.get_record("byteorder") != sys.byteorder.encode():
            raise ValueError(f"is not in this machine's byte order, {sys.byteorder}")
        window.seek(0)
        layout = torch.load(window, map_location="meta", weights_only=True)
        if isinstance(layout, Tensor):
            # torch (2.13, serialization.py:2100) records where in the zip file the storage lies
            start, size = cast(int, layout.untyped_storage()._checkpoint_offset), layout.untyped_storage().nbytes()
            last = layout.storage_offset() + sum((n - 1) * stride for n, stride in zip(layout.shape, layout.stride(), strict=True))
            if start + size > location.length or (layout.numel() and (last + 1) * layout.element_size() > size):
                raise ValueError("is larger than its place")
    except OSError:
        raise
    except Exception as error:  # torch raises any type of error for a broken file
        raise ConfigError(f"checkpoint: {file.path}: {what}: {type(error).__name__}: {one_line(str(error))}") from None
    if not isinstance(layout, Tensor):
        raise ConfigError(f"checkpoint: {file.path}: {what} is a {type(layout).__name__}, and no tensor")
    return start, layout


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor on the CPU, valid while the tensor is alive.

    Unlike `Tensor.numpy`, this leaves the storage resizable, which parking needs.
    """
    assert tensor.is_cpu and tensor.is_contiguous()
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


class _Window(io.RawIOBase):
    """A section of an open file, as a file of its own."""

    def __init__(self, file: StoredFile, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, min(len(view), self._length - self._at))]
        count = self._file.read_part(self._start + self._at, view) if len(view) else 0
        self._at += count
        return count
