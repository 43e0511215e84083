"""Pickles of metadata that are hostile or broken are refused in one line, and nothing is executed."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megarl.errors import ConfigError
from megarl.parallel.checkpoint.dcp_index import read_dcp_index


class Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def metadata(file: str = "__0_0.distcp", offset: int = 0, length: int = 64, size: int = 4) -> Metadata:
    chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([size]))]
    tensor = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([4]), chunks)
    return Metadata({"w": tensor}, storage_data={MetadataIndex("w", [0]): _StorageInfo(file, offset, length)})


def folder(path: Path, data: bytes) -> Path:
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    (path / "__0_0.distcp").write_bytes(bytes(64))
    (path / ".metadata").write_bytes(data)
    return path


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    found = read_dcp_index(folder(tmp_path, pickle.dumps(metadata())))
    assert found.tensors["w"].shape == (4,) and found.tensors["w"].dtype == torch.float32 and not found.objects


def test_a_pickle_that_names_another_function_is_refused_and_not_executed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names posix.system, which is no part of it: nothing was executed"):
        read_dcp_index(folder(tmp_path, pickle.dumps(Hostile(tmp_path / "executed"))))
    assert not (tmp_path / "executed").exists()


BROKEN = {
    "nothing": (b"", "is broken"),
    "deep lists": (b"\x80\x04" + b"]" * 300_000 + b"a" * 299_999 + b".", "has something else where a Metadata"),
    "a deep key": (b"\x80\x04})" + b"\x85" * 300_000 + b"Ns.", "has a tuple as a key"),
    "a huge text": (b"\x80\x04X\xff\xff\xff\xff.", "ends within an item"),
    "a huge integer": (b"\x80\x04\x8a\xff" + b"\xff" * 255 + b".", "has an integer of 255 bytes"),
    "a huge memo": (b"\x80\x04Nr\xff\xff\xff\xff.", "has something else where a Metadata"),
    "another opcode": (b"\x80\x04\x82\x01.", "has opcode"),
    "a file elsewhere": (pickle.dumps(metadata(file="../w.distcp")), "is not a .distcp file of the folder"),
    "a place behind the file": (pickle.dumps(metadata(offset=1)), "at bytes 1 to 65 of __0_0.distcp, which has 64"),
    "a place too small": (pickle.dumps(metadata(length=8)), "only 8 bytes"),
    "a chunk outside": (pickle.dumps(metadata(size=5)), "outside its shape"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_or_lies_is_refused(tmp_path: Path, name: str) -> None:
    data, line = BROKEN[name]
    with pytest.raises(ConfigError) as refused:
        read_dcp_index(folder(tmp_path, data))
    assert line in str(refused.value) and str(refused.value).isprintable() and len(str(refused.value)) < 700


def test_every_changed_byte_gives_tensors_or_a_line(tmp_path: Path) -> None:
    data = pickle.dumps(metadata())
    for place in range(len(data)):
        harmed = bytearray(data)
        harmed[place] ^= 1 + place % 255
        try:
            read_dcp_index(folder(tmp_path, bytes(harmed)))
        except ConfigError as error:
            assert ".metadata" in str(error) and str(error).isprintable()
