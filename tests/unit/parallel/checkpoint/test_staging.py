"""The copies and threads that write a rank's part of a save."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from megarl.checkpoints.files import StoredFile, read_record
from megarl.errors import SaveError
from megarl.parallel.checkpoint.dcp import ChunkFinder
from megarl.parallel.checkpoint.staging import BLOCK, StagedWriter, StagingMemory


def test_staged_tensors_stay_within_the_budget(tmp_path: Path) -> None:
    """And a tensor larger than the budget passes alone."""
    (tmp_path / "m").mkdir()
    tensors = [torch.full((1 << 18,), float(number)) for number in range(24)] + [torch.ones(1 << 21)]
    budget = 4 << 20
    writer = StagedWriter(tmp_path, rank=0, budget=budget)
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            held = writer._held
            most = max(most, held if held != tensors[-1].nbytes else 0)
            time.sleep(0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for tensor in tensors:
        writer.put("m", tensor, 60.0)
        tensor.zero_()  # the caller goes on
    writer.close()
    written = writer.finish(60.0)
    done.set()
    watcher.join()
    assert tensors[0].nbytes <= most <= budget
    assert all(read_record(tmp_path / name) == record for name, record in written.files.items())
    for number, place in enumerate(written.locations["m"]):
        with (tmp_path / "m" / place.file).open("rb") as file:
            file.seek(place.offset)
            (tmp_path / "one").write_bytes(file.read(place.length))
        assert float(torch.load(tmp_path / "one", weights_only=True)[-1]) == (number if number < 24 else 1.0)


def test_one_save_after_the_other_is_copied_into_the_same_memory(tmp_path: Path) -> None:
    """Tensors of odd sizes, an empty one, and one larger than what is got at a time; the caller changes them as soon as they are taken."""
    memory, used = StagingMemory(), list[list[int]]()
    shapes = [(3, 5), (0, 4), (1 << 20,), (7,), ((BLOCK >> 1) + 1,), (2, 2)]
    for save in (1, 2):
        (tmp_path / str(save) / "m").mkdir(parents=True)
        memory.restart()
        writer = StagedWriter(tmp_path / str(save), 0, 1 << 30, memory)
        for number, shape in enumerate(shapes):
            tensor = torch.full(shape, float(10 * save + number), dtype=torch.bfloat16)
            writer.put("m", tensor, 60.0)
            tensor.zero_()
        writer.close()
        places = writer.finish(60.0).locations["m"]
        for number, (shape, place) in enumerate(zip(shapes, places, strict=True)):
            with StoredFile(tmp_path / str(save) / "m" / place.file) as file:
                assert torch.equal(
                    ChunkFinder().find(file, place, "m").read(), torch.full(shape, float(10 * save + number), dtype=torch.bfloat16)
                )
        used.append([block.data_ptr() for block in memory._blocks])
    assert used[0] == used[1] and len(used[0]) == 3


def test_what_stays_still_is_written_without_a_copy(tmp_path: Path) -> None:
    """A part of a larger tensor as itself alone, and one with holes; what was written can be resized afterwards, as parking does."""
    (tmp_path / "m").mkdir()
    whole = torch.arange(1 << 21, dtype=torch.float32)
    given = [whole[5 : 5 + (1 << 20)].view(1 << 10, 1 << 10), whole[::7]]
    writer = StagedWriter(tmp_path, 0, 1 << 30, still=True)
    for tensor in given:
        writer.put("m", tensor, 60.0)
    assert writer.written(60.0)
    whole.untyped_storage().resize_(0)
    writer.close()
    written = writer.finish(60.0)
    assert sum(record.size for record in written.files.values()) < (6 << 20)  # the larger tensor has 8 MiB
    expected = torch.arange(1 << 21, dtype=torch.float32)
    for place, wanted in zip(written.locations["m"], [expected[5 : 5 + (1 << 20)].view(1 << 10, 1 << 10), expected[::7]], strict=True):
        with StoredFile(tmp_path / "m" / place.file) as file:
            assert torch.equal(ChunkFinder().find(file, place, "m").read(), wanted)


def test_nobody_reads_what_stayed_still_once_a_write_has_failed(tmp_path: Path) -> None:
    """So that the memory may be given back; and after a save was given up, nothing that is written later counts."""
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "__0_0.distcp").write_bytes(b"")  # in the way of one of the two threads
    (tmp_path / "m" / "__0_1.distcp").write_bytes(b"")
    writer = StagedWriter(tmp_path, 0, 1 << 30, still=True)
    for _ in range(4):
        writer.put("m", torch.ones(1 << 20), 60.0)
    assert writer.written(60.0) and not any(thread.is_alive() for thread in writer._threads)
    with pytest.raises(FileExistsError):
        writer.finish(60.0)
    (tmp_path / "n").mkdir()
    other = StagedWriter(tmp_path, 1, 1 << 30)
    other.put("n", torch.ones(5), 60.0)
    other.give_up()
    other.close()
    with pytest.raises(SaveError, match="given up"):
        other.finish(60.0)


def test_a_disk_that_stands_still_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    goes_on, write = threading.Event(), torch.save
    monkeypatch.setattr(torch, "save", lambda *given: goes_on.wait(60.0) and write(*given))
    writer = StagedWriter(tmp_path, 0, budget=1 << 10)
    for _ in range(3):
        writer.put("m", torch.ones(1 << 8), 0.1)
    writer.close()
    goes_on.set()
    with pytest.raises(SaveError, match=r"/m/__0_\d\.distcp: not written within save\.timeout_s$"):
        writer.finish(60.0)


HANGING = """
import sys, threading, torch
from pathlib import Path
from megarl.errors import SaveError
from megarl.parallel.checkpoint.staging import StagedWriter

torch.save = lambda *_: threading.Event().wait()
writer = StagedWriter(Path(sys.argv[1]), 0, 1 << 20, limit="save.timeout_s=0.5")
writer.put("m", torch.ones(5), 0.5)
writer.close()
try:
    writer.finish(0.5)
except SaveError as error:
    print(error)
"""


def test_a_write_that_never_returns_is_named_and_does_not_keep_the_process_from_ending(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    done = subprocess.run([sys.executable, "-c", HANGING, str(tmp_path)], capture_output=True, text=True, timeout=60)
    said = [line for line in done.stderr.splitlines() if "No CUDA runtime is found" not in line]  # of torch's CUDA build
    assert done.returncode == 0 and said == []
    assert re.fullmatch(rf"{re.escape(str(tmp_path))}/m/__0_\d\.distcp: not written within save\.timeout_s=0\.5\n", done.stdout)


def test_a_copy_for_which_there_is_no_memory_takes_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    writer, tensor = StagedWriter(tmp_path, 0, budget=1 << 10), torch.ones(1 << 8)
    with monkeypatch.context() as patch:
        patch.setattr(writer._backend, "staging_buffer", lambda *_: torch.empty(1 << 60))
        with pytest.raises(RuntimeError, match="allocate"):
            writer.put("m", tensor, 60.0)
    writer.put("m", tensor, 0.1)
    writer.close()
    assert len(writer.finish(60.0).locations["m"]) == 1
