"""Saved tensors, found and read without torch's way to each byte: as torch reads them, or refused in one line."""

import sys
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from xxhash import xxh3_128_hexdigest

from megarl.checkpoints.files import StoredFile
from megarl.errors import ConfigError, DamagedFile
from megarl.parallel.checkpoint.dcp import ChunkFinder
from megarl.parallel.checkpoint.index import Location


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def part(name: str, offset: int, length: int) -> Location:
    """A part of a file, with the hash that it has now."""
    return Location(name, offset, length, xxh3_128_hexdigest(Path(name).read_bytes()[offset : offset + length]))


def whole(name: str) -> Location:
    return part(name, 0, Path(name).stat().st_size)


def test_a_flipped_bit_is_found_wherever_it_is_and_however_the_tensor_is_read() -> None:
    """In what torch.save writes before the elements, in them, and behind them; also if the finder knows tensors of this length."""
    tensor = torch.randn(70, 60)
    torch.save(tensor, "one")
    place, data, known = whole("one"), Path("one").read_bytes(), ChunkFinder()
    start = data.index(tensor.numpy().tobytes())
    with StoredFile(Path("one")) as file:
        assert torch.equal(known.find(file, place, "w").read(), tensor)
    for at in [*range(0, start, 7), start, start + 9999, start + tensor.nbytes - 1, *range(start + tensor.nbytes, len(data), 7)]:
        Path("one").write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        for finder in (ChunkFinder(), known):
            with StoredFile(Path("one")) as file, pytest.raises(DamagedFile, match="^checkpoint: one: w: flipped: ") as error:
                finder.find(file, place, "w").read()
            assert error.value.file == "one"
            with StoredFile(Path("one")) as file, pytest.raises(DamagedFile):
                stored = finder.find(file, place, "w")
                assert not stored.read_into(torch.empty_like(tensor))
                stored.read()


@pytest.mark.filterwarnings("ignore")  # torch's, of protocols that are none
def test_a_broken_shard_is_told_whatever_torch_makes_of_it() -> None:
    """Each byte of a stored tensor's own pickle, which torch reads with `weights_only`, replaced by some others."""
    torch.save(torch.arange(12.0).reshape(3, 4), "shard")
    data = Path("shard").read_bytes()
    start = data.index(b"\x80\x02ctorch")
    with Path("shard").open("r+b") as file:
        for place in range(start, data.index(b".PK", start) + 1):
            for value in (place * 7 % 256, *b"(0)}R"):
                file.seek(0)
                file.write(data[:place] + bytes([value]) + data[place + 1 :])
                file.flush()
                with suppress(ConfigError), StoredFile(Path("shard")) as stored:
                    assert isinstance(ChunkFinder().find(stored, whole("shard"), "w").read(), torch.Tensor)


def test_a_shard_that_unpacks_to_a_thousand_times_its_size_is_refused() -> None:
    torch.save(torch.zeros(1 << 24), "shard")
    with zipfile.ZipFile("shard") as large, zipfile.ZipFile("small", "w", zipfile.ZIP_DEFLATED) as small:
        for entry in large.namelist():
            small.writestr(entry, large.read(entry))
    size = Path("small").stat().st_size
    assert size < 1 << 17 and float(torch.load("small", weights_only=True).sum()) == 0, "torch reads it"
    with StoredFile(Path("small")) as file, pytest.raises(ConfigError, match="checkpoint: small: w: ValueError: is compressed"):
        ChunkFinder().find(file, whole("small"), "w")


def test_a_stored_tensor_is_read_as_torch_reads_it_or_into_memory_that_is_laid_out_alike() -> None:
    large = torch.randn(700, 600)
    for tensor in (large, large.t(), large[3:], large[:, 1::2], large.bfloat16(), torch.zeros(0, 3), torch.tensor(2.5)):
        torch.save(tensor, "one")
        alike = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        with StoredFile(Path("one")) as file:
            stored = ChunkFinder().find(file, whole("one"), "w")
            target = torch.full(tensor.shape, -1.0, dtype=tensor.dtype)
            assert stored.read_into(target) == alike
            assert torch.equal(target, tensor if alike else torch.full_like(target, -1.0))
            found = stored.read()
            assert torch.equal(found, tensor) and found.dtype == tensor.dtype
            assert not stored.read_into(torch.zeros(tensor.shape, dtype=torch.float16)) and not stored.read_into(torch.zeros(1, 2, 3))


def test_a_tensor_that_is_larger_than_its_place_is_refused() -> None:
    """One whose elements go on behind its storage; one whose storage goes on behind its place."""
    torch.save(torch.zeros(600, 700), "long")
    data = Path("long").read_bytes()
    rows = b"M" + (600).to_bytes(2, "little") + b"M" + (700).to_bytes(2, "little") + b"\x86"  # (600, 700): two BININT2, a tuple
    assert data.count(rows) == 1
    Path("long").write_bytes(data.replace(rows, rows.replace((600).to_bytes(2, "little"), (601).to_bytes(2, "little"))))
    with StoredFile(Path("long")) as file, pytest.raises(ConfigError, match="long: w: ValueError: is larger than its place"):
        ChunkFinder().find(file, whole("long"), "w")


def test_tensors_of_one_length_are_not_taken_for_each_other() -> None:
    """Whether torch has looked at one of them or at another before."""
    tensors = [
        torch.randn(40, 60),
        torch.randn(60, 40),
        torch.randn(40, 60),
        torch.randint(9, (40, 60), dtype=torch.int32),
        torch.randn(60, 40).t(),
    ]
    places, finder = list[tuple[int, int]](), ChunkFinder()
    with Path("several").open("wb") as file:
        for tensor in tensors:
            start = file.tell()
            torch.save(tensor, file)
            places.append((start, file.tell() - start))
    assert len({length for _, length in places}) < len(tensors)
    with StoredFile(Path("several")) as file:
        for _ in range(2):
            for tensor, place in zip(tensors, places, strict=True):
                found = finder.find(file, part("several", *place), "w").read()
                assert torch.equal(found, tensor) and (found.dtype, found.stride()) == (tensor.dtype, tensor.stride())


def test_a_tensor_of_another_byte_order_is_refused() -> None:
    """Torch would swap the bytes of a storage that has none yet, and crash."""
    other = b"big" if sys.byteorder == "little" else b"little"
    torch.save(torch.zeros(4), "mine")
    with zipfile.ZipFile("mine") as mine, zipfile.ZipFile("theirs", "w", zipfile.ZIP_STORED) as theirs:
        for entry in mine.namelist():
            theirs.writestr(entry, other if entry.endswith("byteorder") else mine.read(entry))
    with StoredFile(Path("theirs")) as file, pytest.raises(ConfigError, match="theirs: w: ValueError: is not in this machine's byte order"):
        ChunkFinder().find(file, whole("theirs"), "w")
