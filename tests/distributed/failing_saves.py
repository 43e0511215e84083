"""Saves that fail: what they say, and what is there afterwards. Apart from checkpoint_work.py, which runs where there is no Ray."""

import os
import resource
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ray.exceptions import ObjectLostError

from megarl.batch import Sample
from megarl.checkpoints.files import Content
from megarl.errors import ContentLost, SaveError
from megarl.parallel.checkpoint.save import Saver
from megarl.parallel.checkpoint.staging import StagedWriter
from megarl.parallel.grid import Grid
from megarl.ranks import response_file
from megarl.ranks.response_file import ResponseFile
from megarl.response import Response
from tests.distributed.checkpoint_work import build_part, settings

LIMIT_S, WITHIN_S = 4.0, 8.0  # of a save, and of the phase that waits for it
GONE = "gone"  # a reference to what is in no object store any more


def fetch(references: list[Any]) -> list[Any]:
    """Ray's `get`, where each reference is what it refers to."""
    if GONE in references:
        raise ObjectLostError("ab" * 28, None, "")
    return references


def half_gone() -> ResponseFile:
    """The responses to two prompts; those to the second are lost."""
    sample = Sample(np.arange(5, dtype=np.int32), 2, np.zeros(3, np.float32), "stop")
    groups = [([Response(0, "", 2, 3, 3, True, payload, 0)], {"place": 0}) for payload in (sample, GONE)]
    return ResponseFile(groups, {}, [])


def fail_then_recover(grid: Grid, path: Path, root: Path) -> tuple[str, str, str]:
    """Step 1 is saved; step 2 does not fit on the last rank's disk, which the next call says; step 3 is saved again.

    What the failures said: of step 2, of a step 2 that nobody was to wait for, and of one with responses that cannot be fetched any more.
    """
    part = {"policy": build_part(grid, path)}
    saver = Saver(root, grid, settings(asynchronous=True))
    saver.save(1, part, {})
    saver.wait()
    said = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    further: list[dict[str, Content]] = [{}, {}, {"ahead.npz": half_gone()}]
    for extra in further:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(response_file, "ray", SimpleNamespace(get=fetch))
            if grid.rank == grid.world - 1 and not extra:
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # writes beyond it fail, as on a full disk
            saver.save(2, part, extra)
            try:
                saver.wait()
            except SaveError as error:
                assert isinstance(error, ContentLost) == bool(extra)
                said.append(str(error))
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        dist.barrier()
        assert sorted(entry.name for entry in root.iterdir()) == ["latest", "step_000001"]
    saver.save(3, part, {})
    saver.wait()
    return said[0], said[1], said[2]


def fail_on_one_rank_alone(grid: Grid, path: Path, root: Path) -> tuple[str, list[bool]]:
    """The last rank stops short in step 1; step 2 is saved. What the failure said, and of which of the saves a verdict is kept."""

    def stop_short(*_: object) -> None:
        raise SaveError("not written in 5 s")

    part = {"policy": build_part(grid, path)}
    saver, said = Saver(root, replace(grid, timeout_s=5.0), settings()), ""
    with pytest.MonkeyPatch.context() as patch:
        if grid.rank == grid.world - 1:
            patch.setattr(StagedWriter, "written", stop_short)
        try:
            saver.save(1, part, {})
        except SaveError as error:
            said = str(error)
    saver.save(2, part, {})
    dist.barrier()
    return said, [grid.store.check([f"checkpoint/{root}/{number}/verdict"]) for number in (0, 1)]


def stand_still(grid: Grid, path: Path, root: Path, rank: int, asynchronous: bool) -> tuple[str, str, bool, bool, int]:
    """The disk of one rank stands still in a save and in the next one, then a step is saved.

    What the failures said, whether the first was in time, whether the memory for copies is another, and how many threads that write are
    left.
    """
    part, goes_on, write = {"policy": build_part(grid, path)}, threading.Event(), torch.save
    saver, before = Saver(root, replace(grid, timeout_s=WITHIN_S), settings(asynchronous=asynchronous)), set(threading.enumerate())
    memory, begun = saver._memory, time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if grid.rank == rank:
            patch.setattr(torch, "save", lambda *given: goes_on.wait(60.0) and write(*given))
        with pytest.raises(SaveError) as failed:
            saver.save(1, part, {})
            assert asynchronous and time.monotonic() - begun < LIMIT_S, "a save in the background holds nobody up"
            saver.wait()
        in_time = time.monotonic() - begun < WITHIN_S
        with pytest.raises(SaveError) as failed_again:
            saver.save(2, part, {})
        goes_on.set()
        writing = set(threading.enumerate()) - before
        for thread in writing:
            thread.join(10.0)
    dist.barrier()
    assert list(root.iterdir()) == []
    saver.save(3, part, {})
    saver.wait()
    left = sum(thread.is_alive() for thread in writing)
    return str(failed.value), str(failed_again.value), in_time, saver._memory is not memory, left


def stand_still_on_rank_0(grid: Grid, path: Path, root: Path, where: str) -> tuple[str, bool]:
    """The disk stands still where rank 0 creates or commits the step directory; then the step is saved.

    What the failure said, and whether that was in time.
    """
    part, goes_on, free = {"policy": build_part(grid, path)}, threading.Event(), os.statvfs

    class Endless:
        def write(self, file: Any) -> None:
            assert goes_on.wait(60.0)

    saver, begun = Saver(root, replace(grid, timeout_s=WITHIN_S), settings(asynchronous=True)), time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if where == "create":
            patch.setattr(os, "statvfs", lambda *given: goes_on.wait(60.0) and free(*given))
        with pytest.raises(SaveError) as failed:
            saver.save(1, part, {"ahead.npz": Endless()} if where == "commit" else {})
            saver.wait()
    in_time = time.monotonic() - begun < WITHIN_S
    goes_on.set()
    saver.save(1, part, {})
    saver.wait()
    return str(failed.value), in_time
