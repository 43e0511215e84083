"""The index of a checkpoint says what torch's `.metadata` says; what is forged or damaged is refused in one line."""

import json
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from xxhash import xxh3_128_hexdigest

from megarl.checkpoints.files import FileRecord
from megarl.checkpoints.steps import Manifest, SavedStep
from megarl.errors import ConfigError
from megarl.parallel.checkpoint.dcp import write_metadata
from megarl.parallel.checkpoint.index import INDEX, Location, Shard, StoredShard, encode_index, read_index

FILE, FILE_BYTES = "__0_0.distcp", 10_000
SHARDS = [
    (Shard("w", (2, 4, 8), (0, 0, 0), (1, 4, 8), torch.bfloat16), Location(FILE, 0, 1500, "0" * 32)),
    (Shard("w", (2, 4, 8), (1, 0, 0), (1, 4, 8), torch.bfloat16), Location(FILE, 1500, 1500, "1" * 32)),
    (Shard("optimizer.b", (70_000,), (0,), (70_000,), torch.float32), Location(FILE, 3000, 7000, "2" * 32)),
]


def step(path: Path, data: bytes) -> SavedStep:
    """A step directory whose policy has this index; only the manifest says that there is a file of shards."""
    (folder := path / "policy").mkdir(parents=True, exist_ok=True)
    (folder / INDEX).write_bytes(data)
    files = {f"policy/{INDEX}": FileRecord(len(data), xxh3_128_hexdigest(data)), f"policy/{FILE}": FileRecord(FILE_BYTES, "0" * 32)}
    return SavedStep(path, Manifest(1, 1, {}, {}, {"policy": {}}, files))


def test_the_index_says_what_torch_and_megatron_read_in_metadata(tmp_path: Path) -> None:
    write_metadata(tmp_path, SHARDS)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    found = read_index(step(tmp_path / "step", (tmp_path / INDEX).read_bytes()), "policy")
    assert found.keys() == metadata.state_dict_metadata.keys() == {"w", "optimizer.b"}
    for key, tensor in found.items():
        theirs = metadata.state_dict_metadata[key]
        assert (tensor.dtype, tensor.shape) == (theirs.properties.dtype, tuple(theirs.size))
        assert [(shard.offset, shard.size) for shard in tensor.shards] == [(tuple(one.offsets), tuple(one.sizes)) for one in theirs.chunks]
    theirs = {(index.fqn, tuple(index.offset)): info for index, info in metadata.storage_data.items()}
    for shard, location in SHARDS:
        info = theirs[shard.key, shard.offset]
        assert (info.relative_path, info.offset, info.length) == location[:3]
        assert StoredShard(shard.offset, shard.size, location) in found[shard.key].shards


def first(index: dict[str, Any]) -> list[Any]:
    """The first shard of "w": [offset, size, [file, offset, length, hash]]."""
    return index["w"][2][0]


FORGED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another file": (lambda index: first(index)[2].__setitem__(0, "../../elsewhere"), "which is no file of the checkpoint"),
    "no text as a file": (lambda index: first(index)[2].__setitem__(0, 7), ": w.2.0.2.0: Input should be a valid string (got 7)"),
    "an offset below nothing": (
        lambda index: first(index)[2].__setitem__(1, -1),
        ": w.2.0.2.1: Input should be greater than or equal to 0",
    ),
    "an offset of text": (lambda index: first(index)[2].__setitem__(1, "0"), ": w.2.0.2.1: Input should be a valid integer"),
    "a length that is true": (lambda index: first(index)[2].__setitem__(2, True), ": w.2.0.2.2: Input should be a valid integer"),
    "a length that is a fraction": (lambda index: first(index)[2].__setitem__(2, 1.5), ": w.2.0.2.2: Input should be a valid integer"),
    "a length behind the file": (lambda index: first(index)[2].__setitem__(2, FILE_BYTES + 1), "lies behind the end of"),
    "an integer of 2000 bits": (lambda index: first(index)[2].__setitem__(2, 1 << 2000), "lies behind the end of"),
    "no hash": (lambda index: first(index)[2].pop(), ": w.2.0.2.3: Field required"),
    "a place twice": (lambda index: index["w"][2].__setitem__(1, first(index)), "has two shards in one place"),
    "a shard too many": (lambda index: index["w"][2].append(first(index)), "has two shards in one place"),
    "no shards": (lambda index: index["w"][2].clear(), ": w.2: List should have at least 1 item"),
    "another dtype": (lambda index: index["w"].__setitem__(0, "int64"), "'w' has the unknown dtype 'int64'"),
    "a size of text": (lambda index: index["w"].__setitem__(1, "248"), ": w.1: Input should be a valid"),
    "a size below nothing": (lambda index: first(index)[1].__setitem__(0, -1), ": w.2.0.1.0: Input should be greater than or equal to 0"),
    "a size of 65 axes": (lambda index: index["w"].__setitem__(1, [1] * 65), ": w.1: Tuple should have at most 64 items"),
    "a shard outside": (lambda index: index["w"].__setitem__(1, [1, 4, 8]), "a shard of 'w' lies outside its shape [1, 4, 8]"),
    "fewer axes": (lambda index: index["w"].__setitem__(1, [2, 4]), "a shard of 'w' lies outside its shape [2, 4]"),
    "a tensor that is none": (lambda index: index.__setitem__("w", None), ": w: Input should be"),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_fields_are_refused(tmp_path: Path, name: str) -> None:
    forge, line = FORGED[name]
    index = json.loads(encode_index(SHARDS))
    forge(index)
    with pytest.raises(ConfigError) as refused:
        read_index(step(tmp_path, json.dumps(index).encode()), "policy")
    assert str(refused.value).startswith(f"checkpoint: {tmp_path}/policy/{INDEX}: ") and line in str(refused.value)


@pytest.mark.parametrize("data", [b"", b"[]", b"3", b"{", b'{"w": 1}', b"\xff", b"[" * 100_000, b'{"a\\u001b[2J": 1}'])
def test_what_is_no_index_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigError) as refused:
        read_index(step(tmp_path, data), "policy")
    assert str(refused.value).isprintable()


def test_every_changed_byte_gives_tensors_or_a_line(tmp_path: Path) -> None:
    """And never another error, whatever it makes of the file."""
    data = encode_index(SHARDS)
    refused = 0
    for place in range(len(data)):
        harmed = bytearray(data)
        harmed[place] ^= 1 + place % 255
        try:
            read_index(step(tmp_path, bytes(harmed)), "policy")
        except ConfigError as error:
            refused += 1
            assert f"policy/{INDEX}" in str(error) and str(error).isprintable() and len(str(error)) < 500
    assert refused > len(data) // 2


def test_a_file_larger_than_any_is_not_opened(tmp_path: Path) -> None:
    given = step(tmp_path, b"")
    record = {f"policy/{INDEX}": FileRecord(1 << 40, "0" * 32)}
    with pytest.raises(ConfigError, match=rf"policy/{INDEX} has 1099511627776 bytes, more than"):
        read_index(SavedStep(given.path, replace(given.manifest, files=record)), "policy")
