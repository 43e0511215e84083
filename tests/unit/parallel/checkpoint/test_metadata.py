"""`.metadata`, the one pickle of a checkpoint, is read as plain data: what torch writes is read as torch reads it, what is forged is
refused in one line, at once, in little memory, and does nothing."""

from __future__ import annotations

import copyreg
import os
import pickle
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.serialization import _get_layout
from xxhash import xxh3_128_hexdigest

from megarl.checkpoints.files import FileRecord
from megarl.checkpoints.steps import Manifest, SavedStep
from megarl.errors import ConfigError
from megarl.parallel.checkpoint.dcp import Location, Shard, tensors, write_metadata
from megarl.parallel.checkpoint.metadata import read_metadata

CLASSES = "torch.distributed.checkpoint.metadata"
FILE, FILE_BYTES = "__0_0.distcp", 10_000
SECONDS, MEMORY = 1.0, 50 << 20
MARK, DICT, LIST, TUPLE, SET, SETS, BUILD, NEW, CALL, NONE, STOP = b"(", b"}", b"]", b"t", b"s", b"u", b"b", b"\x81", b"R", b"N", b"."


def steps(data: bytes) -> SavedStep:
    """A step directory, verified, whose policy has this `.metadata`; only the manifest says that there is a shard."""
    (folder := Path("step_000001", "policy")).mkdir(parents=True)
    (folder / ".metadata").write_bytes(data)
    files = {
        "policy/.metadata": FileRecord(len(data), xxh3_128_hexdigest(data)),
        f"policy/{FILE}": FileRecord(FILE_BYTES, "0" * 32),
    }
    return SavedStep(folder.parent, Manifest(1, 1, {}, {}, {"policy": {}}, files))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written() -> bytes:
    """The `.metadata` of a tensor in two chunks and of another in one, as megarl writes it."""
    shards = [
        (Shard("w", (2, 4, 8), (0, 0, 0), (1, 4, 8), torch.bfloat16), Location(FILE, 0, 1500, "0" * 32)),
        (Shard("w", (2, 4, 8), (1, 0, 0), (1, 4, 8), torch.bfloat16), Location(FILE, 1500, 1500, "0" * 32)),
        (Shard("optimizer.b", (70_000,), (0,), (70_000,), torch.float32), Location(FILE, 3000, 7000, "0" * 32)),
    ]
    write_metadata(Path(), shards)
    return Path(".metadata").read_bytes()


def test_what_megarl_writes_is_read_as_torch_reads_it() -> None:
    data = written()
    expected, found = pickle.loads(data), read_metadata(steps(data), "policy")
    assert found.state_dict_metadata == expected.state_dict_metadata and found.storage_data == expected.storage_data
    assert [type(one.size) for one in tensors(found).values()] == [torch.Size] * 2
    assert list(found.storage_data) == list(expected.storage_data)


def test_what_torch_writes_is_read_as_torch_reads_it() -> None:
    """With the notes of torch's planner, and its hints in the indices."""
    state = {"a": torch.ones(3, 4), "b": {"c": torch.ones(5, dtype=torch.float16)}}
    dcp.save(state, checkpoint_id="torch", no_dist=True)
    expected = pickle.loads(Path("torch", ".metadata").read_bytes())
    assert expected.planner_data and any(index.index is not None for index in expected.storage_data)
    found = read_metadata(steps(pickle.dumps(replace(expected, storage_meta=None))), "policy")
    assert found.state_dict_metadata == expected.state_dict_metadata and found.storage_data == expected.storage_data


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value.encode())]) + value.encode()


def name(full: str, module: str = CLASSES) -> bytes:
    return text(module) + text(full) + b"\x93"


def size(*extents: bytes) -> bytes:
    return name("Size", "torch") + MARK + b"".join(extents) + TUPLE + b"\x85" + CALL


def entry(value: bytes) -> bytes:
    """One entry of a state."""
    return text("x") + value + SET


MKDIR = name("mkdir", "posix") + text("harm") + b"\x85" + CALL
METADATA = name("Metadata")
RAW: dict[str, tuple[bytes, str]] = {
    "BUILD on a class": (METADATA + DICT + text("__eq__") + NONE + SET + BUILD, "a GlobalName in the place of a PickledObject"),
    "BUILD on a class, by slots": (METADATA + NONE + DICT + entry(NONE) + b"\x86" + BUILD, "a GlobalName in the place of a PickledObject"),
    "BUILD on a function": (name("_get_layout", "torch.serialization") + DICT + entry(NONE) + BUILD, "a GlobalName in the place"),
    "BUILD on a dtype": (name("float32", "torch") + DICT + entry(NONE) + BUILD, "a GlobalName in the place of a PickledObject"),
    "BUILD on a list": (LIST + DICT + BUILD, "a list in the place of a PickledObject"),
    "BUILD on what a call gives": (size() + DICT + entry(NONE) + BUILD, "lacks a Metadata"),
    "BUILD twice": (METADATA + b")" + NEW + DICT + BUILD + DICT + BUILD, "sets the state of a"),
    "a call": (MKDIR, "asks for posix.mkdir, which no checkpoint of megarl holds: not loaded"),
    "a call of what a call gives": (size() + b")" + CALL, "a PickledObject in the place of a GlobalName"),
    "a method of a class": (name("Metadata.__init__") + b")" + CALL, "asks for torch.distributed.checkpoint.metadata.Metadata.__init__"),
    "a module through a module": (name("os.mkdir"), "metadata.os.mkdir, which no checkpoint"),
    "a builtin": (name("eval", "builtins"), "asks for builtins.eval"),
    "a name of control characters": (name("\x1b[2J\n", "a"), r"asks for 'a.\x1b[2J\n'"),
    "a name with text for a call": (b"cposix\nmkdir\n" + text("harm") + b"\x85" + CALL, "holds GLOBAL, which no checkpoint needs"),
    "INST": (MARK + text("harm") + b"iposix\nmkdir\n", "holds INST"),
    "OBJ": (MARK + METADATA + b"o", "holds OBJ"),
    "NEWOBJ_EX": (METADATA + b")" + DICT + b"\x92", "holds NEWOBJ_EX"),
    "a persistent object": (b"Pharm\n", "holds PERSID"),
    "a persistent object, by number": (text("harm") + b"Q", "holds BINPERSID"),
    "EXT1": (b"\x82\xf0)R", "holds EXT1"),
    "EXT2": (b"\x83\xf0\x00)R", "holds EXT2"),
    "EXT4": (b"\x84\xf0\x00\x00\x00)R", "holds EXT4"),
    "a buffer outside": (b"\x97", "holds NEXT_BUFFER"),
    "LONG4 of 2 GB": (b"\x8b\xff\xff\xff\x7f", "long4"),
    "LONG4 below nothing": (b"\x8b\x00\x00\x00\x80", "long4"),
    "LONG of a million digits": (b"L" + b"9" * 1_000_000 + b"L\n", "is damaged: "),
    "LONG1 of 255 bytes": (b"\x8a\xff" + b"\x7f" * 255, "holds an integer of 2039 bits"),
    "BINUNICODE8 of 8 EB": (b"\x8d" + b"\xff" * 7 + b"\x7f", "unicodestring8"),
    "BINUNICODE8 of more": (b"\x8d" + b"\xff" * 8, "unicodestring8"),
    "BINUNICODE of 4 GB": (b"X\xff\xff\xff\xff", "unicodestring4"),
    "BINBYTES8 of 8 EB": (b"\x8e" + b"\xff" * 7 + b"\x7f", "bytes8"),
    "BYTEARRAY8 of 1 TB": (b"\x96" + b"\x00" * 5 + b"\x01\x00\x00", "bytearray8"),
    "FRAME of 8 EB": (b"\x95" + b"\xff" * 7 + b"\x7f", "ends within a value"),
    "a long text": (b"X\xa0\x86\x01\x00" + b"a" * 100_000, "holds a text of 100000 characters"),
    "LONG_BINPUT of 2**32 - 1": (NONE + b"r\xff\xff\xff\xff", "holds LONG_BINPUT"),
    "PUT of 10**9": (NONE + b"p1000000000\n", "holds PUT"),
    "BINGET of nothing": (b"h\x07", "takes what it has not put there"),
    "LONG_BINGET of nothing": (b"j\xff\xff\xff\xff", "takes what it has not put there"),
    "a list doubled 64 times": (LIST + b"\x94" + b"".join(MARK + b"h" + bytes([n, 104, n]) + b"l" for n in range(64)), "holds LIST"),
    "lists doubled 200 times": (LIST + b"\x94" + b"".join(LIST + b"\x94(h%ch%ce" % (n, n) for n in range(200)), "ends within"),
    "a tuple doubled 250 times as a key": (
        b")\x94" + b"".join(b"h%ch%c\x86\x94" % (n, n) for n in range(250)) + DICT + b"h\xfaNs",
        "a tuple as a key",
    ),
    "a million marks": (MARK * 1_000_000, "is nested deeper"),
    "a tuple of a hundred thousand levels": (b")" + b"\x85" * 100_000, "lacks a Metadata"),
    "lists of a hundred thousand levels": (LIST * 2 + b"a" + (LIST + NONE + b"a") * 100_000, "is nested deeper, or has more"),
    "a million values": (NONE * 1_000_000, "is nested deeper, or has more in one place"),
    "a list that holds itself": (LIST + b"\x94h\x00a", "lacks a Metadata"),
    "a dictionary that is its own key": (DICT + b"\x94h\x00Ns", "a dict as a key"),
    "an object that is its own state": (METADATA + b")" + NEW + b"\x94h\x00" + BUILD, "lacks a Metadata"),
    "a number as a key": (DICT + b"K\x01Ns", "a int as a key"),
    "a key without a value": (DICT + MARK + text("x") + SETS, "a key without a value"),
    "a fraction": (b"G" + b"\x00" * 8, "holds BINFLOAT"),
    "bytes": (b"C\x01x", "holds SHORT_BINBYTES"),
    "a set": (b"\x8f", "holds EMPTY_SET"),
    "an opcode that is none": (b"\xff", "opcode"),
    "no UTF-8": (b"\x8c\x01\xff", "utf-8"),
    "half a value": (NONE + NONE, "ends within a value"),
    "an open mark": (MARK + NONE, "ends within a value"),
    "a tuple without a mark": (NONE + TUPLE, "takes what it has not put there"),
    "a pop": (NONE + b"0", "holds POP"),
    "no dataclass": (text("harmless"), "lacks a Metadata where there should be one"),
    "another dataclass": (name("StorageMeta") + b")" + NEW + DICT + BUILD, "lacks a Metadata"),
    "an empty dataclass": (METADATA + b")" + NEW + DICT + BUILD, "has a NoneType as state_dict_metadata, not a dict"),
}


def refuse(data: bytes, line: str) -> None:
    """The file is refused with a line, within the bounds, and nothing has happened."""
    before = snapshot()
    step = steps(data)
    began = time.perf_counter()
    with pytest.raises(ConfigError) as refused:
        read_metadata(step, "policy")
    spent = time.perf_counter() - began
    told = str(refused.value)
    tracemalloc.start()  # and once more: tracing takes its time
    try:
        with pytest.raises(ConfigError):
            read_metadata(step, "policy")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert line in told and told.startswith("checkpoint: step_000001/policy/.metadata ")
    assert told.isprintable() and len(told) < 400
    assert spent < SECONDS and most < MEMORY, (spent, most)
    assert snapshot() == before and not Path("harm").exists()


def snapshot() -> list[Any]:
    """What a forged file could have changed."""
    kinds = (Metadata, MetadataIndex, TensorStorageMetadata, _StorageInfo)
    return [(kind.__eq__, dict(vars(kind))) for kind in kinds] + [dict(vars(_get_layout)), dict(vars(torch.Size))]


@pytest.fixture
def extensions() -> Iterator[None]:
    """Code 0xf0 is os.mkdir."""
    copyreg.add_extension("posix", "mkdir", 0xF0)
    yield
    copyreg.remove_extension("posix", "mkdir", 0xF0)


@pytest.mark.usefixtures("extensions")
@pytest.mark.parametrize("forged", RAW)
def test_a_forged_pickle_is_refused(forged: str) -> None:
    body, line = RAW[forged]
    refuse(b"\x80\x04" + body + STOP, line)


def change(**changes: Any) -> Callable[[Metadata], None]:
    """Sets fields of where the first chunk is."""

    def apply(metadata: Metadata) -> None:
        index, info = next(iter(metadata.storage_data.items()))
        metadata.storage_data[index] = replace(info, **changes)

    return apply


def set_field(pick: Callable[[Metadata], Any], field: str, value: Any) -> Callable[[Metadata], None]:
    return lambda metadata: object.__setattr__(pick(metadata), field, value)


def share(metadata: Metadata) -> None:
    """Many tensors with one list of as many chunks."""
    whole = metadata.state_dict_metadata["w"]
    assert isinstance(whole, TensorStorageMetadata)
    chunks = [whole.chunks[0]] * 3000
    metadata.state_dict_metadata = {str(n): replace(whole, chunks=chunks) for n in range(3000)}


def whole(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata["w"]


def first(metadata: Metadata) -> Any:
    return next(iter(metadata.storage_data))


FIELDS: dict[str, tuple[Callable[[Metadata], Any], str]] = {
    "a field of nobody": (set_field(lambda metadata: metadata, "evil", 1), "sets 'evil' of a Metadata"),
    "__setstate__ as a field": (set_field(lambda metadata: metadata, "__setstate__", 1), "sets '__setstate__' of a Metadata"),
    "__class__ as a field": (lambda metadata: vars(first(metadata)).update(__class__=1), "sets '__class__' of a MetadataIndex"),
    "a descriptor of a transformation": (change(transform_descriptors=["zstd"]), "sets 'transform_descriptors' of a _StorageInfo"),
    "another file": (change(relative_path="../../elsewhere"), "which is no file of the checkpoint"),
    "no text as a file": (change(relative_path=7), "has a int as relative_path"),
    "an offset below nothing": (change(offset=-1), "has -1 as offset"),
    "an offset of text": (change(offset="0"), "has a str as offset"),
    "a length that is true": (change(length=True), "has a bool as length"),
    "a length behind the file": (change(length=FILE_BYTES + 1), "behind the end of"),
    "an integer of 2000 bits": (change(length=1 << 2000), "holds an integer of 2001 bits"),
    "no name": (set_field(first, "fqn", None), "has a NoneType as fqn"),
    "an index without an offset": (set_field(first, "offset", None), "lacks a torch.Size"),
    "another offset": (set_field(first, "offset", torch.Size((0, 1, 0))), "does not say where the chunk of 'w' at [0, 0, 0] is"),
    "a place too few": (lambda metadata: metadata.storage_data.pop(first(metadata)), "describes 3 chunks, and says of 2 where they are"),
    "no places": (set_field(lambda metadata: metadata, "storage_data", None), "has a NoneType as storage_data"),
    "places by name": (set_field(lambda metadata: metadata, "storage_data", {"w": 1}), "lacks a MetadataIndex"),
    "an object among the tensors": (
        lambda metadata: metadata.state_dict_metadata.update(o=BytesStorageMetadata()),
        "asks for torch.distributed.checkpoint.metadata.BytesStorageMetadata",
    ),
    "no tensor": (
        set_field(lambda metadata: metadata, "state_dict_metadata", {"w": "w"}),
        "lacks a TensorStorageMetadata",
    ),
    "another dtype": (set_field(lambda metadata: whole(metadata).properties, "dtype", torch.int64), "asks for torch.int64"),
    "a size of numbers": (set_field(whole, "size", (2, 4, 8)), "lacks a torch.Size"),
    "a size below nothing": (set_field(lambda metadata: whole(metadata).chunks[0], "sizes", torch.Size((-1, 4, 8))), "has -1 as a size"),
    "a size of 65 axes": (set_field(whole, "size", torch.Size([1] * 65)), "has a malformed size"),
    "a chunk outside": (set_field(whole, "size", torch.Size((1, 4, 8))), "puts a chunk of 'w' outside its shape [1, 4, 8]"),
    "fewer axes": (set_field(whole, "size", torch.Size((2, 4))), "puts a chunk of 'w' outside its shape [2, 4]"),
    "chunks as a tuple": (set_field(whole, "chunks", ()), "has a tuple as chunks, not a list"),
    "a chunk of text": (set_field(whole, "chunks", ["a", "b"]), "lacks a ChunkStorageMetadata"),
    "chunks that hold themselves": (lambda metadata: whole(metadata).chunks.__setitem__(0, whole(metadata).chunks), "lacks a ChunkStorage"),
    "three thousand tensors that share three thousand chunks": (share, "describes 9000000 chunks"),
    "properties that are none": (set_field(whole, "properties", None), "has malformed tensor properties"),
}


@pytest.mark.parametrize("forged", FIELDS)
def test_forged_fields_are_refused(forged: str) -> None:
    metadata = pickle.loads(written())
    forge, line = FIELDS[forged]
    forge(metadata)
    refuse(pickle.dumps(metadata), line)


def test_a_file_that_is_cut_or_goes_on_is_refused() -> None:
    data = written()
    for harmed in [data[:end] for end in range(0, len(data), 41)] + [data + b".", data + data, data[:-1] + b"N."]:
        refuse(harmed, " is damaged: ")
        for path in sorted(Path("step_000001").rglob("*"), reverse=True):
            os.unlink(path) if path.is_file() else path.rmdir()
        Path("step_000001").rmdir()


def test_every_changed_byte_gives_tensors_or_a_line() -> None:
    """And never another error, whatever it makes of the file."""
    data = bytearray(written())
    for place in range(len(data)):
        harmed = bytearray(data)
        harmed[place] ^= 1 + place % 255
        path = Path(str(place))
        path.mkdir()
        os.chdir(path)
        step = steps(bytes(harmed))
        try:
            read_metadata(step, "policy")
        except ConfigError as error:
            assert "policy/.metadata" in str(error) and str(error).isprintable()
        finally:
            os.chdir("..")


def test_a_file_larger_than_any_is_not_opened() -> None:
    step = steps(b"")
    record = {"policy/.metadata": FileRecord(1 << 40, "0" * 32)}
    with pytest.raises(ConfigError, match=r"policy/\.metadata has 1099511627776 bytes, more than"):
        read_metadata(SavedStep(step.path, replace(step.manifest, files=record)), "policy")
