"""What a store holds of the steps that it is given, without Ray."""

import asyncio
import errno
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest

from megarl.host.shared_memory import MemoryFile, SharedMemory
from megarl.resume.copies import KEPT, CopyStore

OWNER = ("model", 0)


@contextmanager
def nothing_left_open() -> Iterator[None]:
    def nameless() -> list[str]:
        gc.collect()  # of a failure's frames, which hold what they had open
        return sorted(name for one in Path("/proc/self/fd").iterdir() if (name := os.path.realpath(one)).startswith("/dev/shm/#"))

    before = nameless()
    yield
    assert nameless() == before


def kept(store: CopyStore, step: int) -> None:
    memory = SharedMemory(64, "test")
    store.keep(OWNER, step, memory.path, 64)
    memory.close()


def test_a_run_that_has_gone_back_replaces_the_steps_that_it_does_again() -> None:
    """The next machine's store is told nothing of a run that goes back: what comes then is newer, whatever its number."""
    with nothing_left_open():
        store = CopyStore()
        for step in (9, 10, 11):
            kept(store, step)
        assert store.steps() == {OWNER: [10, 11]} and KEPT == 2
        kept(store, 6)
        assert store.steps() == {OWNER: [6]}
        kept(store, 7)
        assert store.steps() == {OWNER: [6, 7]}
        store.forget(OWNER, but=7)
        store.forget(OWNER, but=-1)


def test_a_copy_that_breaks_off_on_its_way_leaves_no_memory() -> None:
    async def answer(value: Any) -> Any:
        if isinstance(value, Exception):
            raise value
        return value

    source = SimpleNamespace(
        place=SimpleNamespace(remote=lambda owner, step: answer(("/proc/1/fd/3", 1 << 20))),
        piece=SimpleNamespace(remote=lambda owner, step, begin: answer(ConnectionError("gone"))),
    )
    with nothing_left_open():
        store = CopyStore()
        said = ""
        try:
            asyncio.run(store.fetch(source, OWNER, 3))
        except ConnectionError as error:
            said = str(error)
        assert said == "gone"
        assert store.steps() == {}


def test_a_file_in_memory_is_there_as_long_as_its_object_and_gone_where_it_does_not_fit() -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"0123456789")

    def fail(file: BinaryIO) -> None:
        file.write(b"0")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with nothing_left_open():
        file = MemoryFile(write)
        assert [Path(file).read_bytes() for _ in range(2)] == [b"0123456789"] * 2
        with pytest.raises(OSError, match="No space left on device"):
            MemoryFile(fail)
        place = os.fspath(file)
        del file
        assert not Path(place).exists()


def test_memory_that_is_closed_twice_closes_no_file_of_others() -> None:
    memory = SharedMemory(64, "test")
    memory.close()
    read, write = os.pipe()  # takes the number that is free
    memory.close()
    os.close(read)
    os.close(write)
