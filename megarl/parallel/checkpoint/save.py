"""Saves models, their optimizers and the random states of all ranks into one step directory."""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from megarl.checkpoints.files import Content, FileRecord, write_file
from megarl.checkpoints.step_writer import StepWriter
from megarl.checkpoints.steps import HF, Manifest, versions
from megarl.config import CheckpointSettings
from megarl.errors import ContentLost, SaveError
from megarl.parallel.checkpoint import sharded, torch_dist
from megarl.parallel.checkpoint.barrier import SaveBarrier
from megarl.parallel.checkpoint.dcp import Location, write_metadata
from megarl.parallel.checkpoint.rng import random_states
from megarl.parallel.checkpoint.staging import StagedWriter, StagingMemory
from megarl.parallel.checkpoint.state import RANDOM, ModelState
from megarl.parallel.grid import Grid
from megarl.text.display import one_line

GRACE = 0.2  # of a save's time limit: for rank 0 to learn what the ranks have written by then, and again for what it does after that
ENDED_S, _POLL_S = 10.0, 0.05  # how long threads of a save that was given up may take to return from their writes

Result = TypeVar("Result")


@dataclass(frozen=True)
class Staged:
    """What a save did before it returned."""

    bytes: int  # written by this rank
    seconds: float


@dataclass(frozen=True)
class _Pending:
    """A save that is being written."""

    step: int
    thread: threading.Thread
    barrier: SaveBarrier
    staged: StagedWriter
    deadline: float


class Saver:
    """Saves one step at a time. Every method is collective over the ranks of the grid, and ends within its time limit on each.

    A save has `save.timeout_s` seconds. What has not returned from the disk by then is given up, and the save has failed on every rank;
    while it has not returned, later saves fail, too, at once: they would be written to the same disk, and take further memory.

    Args:
        root: the directory of the steps.
        grid: this rank's grid.
        settings: the section `save`.
    """

    def __init__(self, root: Path, grid: Grid, settings: CheckpointSettings) -> None:
        self._root, self._grid, self._settings = root, grid, settings
        self._plans: dict[str, torch_dist.SavePlan] = {}
        self._memory = StagingMemory()
        self._saves = 0
        self._limit_s = settings.limit_s(grid.timeout_s)
        self._limit, self._grace_s = f"save.timeout_s={self._limit_s:g}", GRACE * self._limit_s
        self._pending: _Pending | None = None
        self._given_up: list[StagedWriter] = []
        self._late: list[threading.Thread] = []  # each named after what it writes

    def save(self, step: int, models: Mapping[str, ModelState], extra: Mapping[str, Content]) -> Staged:
        """Save a step. Returns when its tensors are copied or, if not asynchronous, when everything is on disk.

        Waits for the previous save first.

        Args:
            step: the step's number.
            models: by the name of their folder; they are woken one after the other.
            extra: further files by plain name, of which only rank 0's count; content that is not bytes is produced as it is written.

        Returns:
            How much this rank writes, and how long the caller waited.

        Raises:
            SaveError: on every rank, if the previous save failed or, as far as is known, this one did.
        """
        self.wait()
        begun, number = time.perf_counter(), self._saves
        self._saves += 1  # here, so that a failure on one rank alone does not leave it with a different number from the others
        planned, described = dict[str, list[Tensor]](), dict[str, Any]()
        for name, model in models.items():
            model.wake()
            planned[name], described[name] = self._plan(name, model), _description(model)
        size = sum(tensor.nbytes for tensors in planned.values() for tensor in tensors)
        writer = StepWriter(self._root, step)
        files = {f"{name}/{HF}/{file}": data for name, model in models.items() for file, data in model.described.items()}
        deadline = self._begin(writer, [*models, *sorted({os.path.dirname(file) for file in files}), RANDOM], size)
        still, budget = not self._settings.asynchronous, self._settings.staging_mb << 20
        self._memory.restart()
        memory = self._memory if size <= budget else None
        staged = StagedWriter(writer.path, self._grid.rank, budget, memory, still, self._limit)
        try:
            for name in reversed(planned):  # the last model is awake
                models[name].wake()
                for tensor in planned[name]:
                    staged.put(name, tensor, _left(deadline))
                if still and not staged.written(_left(deadline)):  # the next model would take this one's place in memory
                    break
        except Exception:
            self._give_up(staged)
            raise
        finally:
            staged.close()
        barrier = SaveBarrier(self._grid, self._root, number, self._limit)
        work = (writer, staged, random_states(), described, {**files, **extra}, barrier, deadline)
        thread = threading.Thread(target=self._finish, args=work, daemon=True)
        thread.start()
        self._pending = _Pending(step, thread, barrier, staged, deadline)
        if not self._settings.asynchronous:
            self.wait()
        return Staged(size, time.perf_counter() - begun)

    def wait(self) -> None:
        """Wait until the last save is complete. If it failed, raises SaveError on every rank, once."""
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        fault, lost = pending.barrier.verdict(_left(pending.deadline) + 3 * self._grace_s)
        if fault:
            self._give_up(pending.staged)
            raise (ContentLost if lost else SaveError)(f"checkpoint: step {pending.step} was not saved: {fault}")
        pending.thread.join(self._grace_s)

    def _give_up(self, staged: StagedWriter) -> None:
        staged.give_up()
        self._given_up.append(staged)
        self._memory = StagingMemory()  # a thread may still be reading the old one

    def _hanging(self) -> list[str]:
        """Return what earlier saves are still writing. Waits a moment for writes that are merely slow."""
        deadline = time.monotonic() + min(ENDED_S, self._grace_s)
        while True:
            self._given_up = [staged for staged in self._given_up if staged.hanging]
            self._late = [thread for thread in self._late if thread.is_alive()]
            hanging = [*(str(path) for staged in self._given_up for path in staged.hanging), *(thread.name for thread in self._late)]
            if not hanging or time.monotonic() > deadline:
                return hanging
            time.sleep(_POLL_S)

    def _in_time(self, work: Callable[[], Result], what: Path, deadline: float) -> Result:
        """Return or raise what a call does that may not return from the disk; it is made in a thread of its own.

        Args:
            work: the call.
            what: the file or directory that it is about.
            deadline: when it must have returned.

        Raises:
            SaveError: it has not returned. Names the file, and the time limit.
        """
        results, faults = list[Result](), list[Exception]()

        def attempt() -> None:
            try:
                results.append(work())
            except Exception as error:
                faults.append(error)

        thread = threading.Thread(target=attempt, name=str(what), daemon=True)
        thread.start()
        thread.join(_left(deadline))
        if thread.is_alive():
            self._late.append(thread)
            raise SaveError(f"{what}: not written within {self._limit}")
        for fault in faults:
            raise fault
        return results[0]

    def _plan(self, name: str, model: ModelState) -> list[Tensor]:
        """This rank's tensors of one model."""
        state: dict[str, Any] = {"model": sharded.model_state(model.chunks, self._grid)}
        if model.trainable is not None:
            state["optimizer"] = sharded.optimizer_state(model.trainable, state["model"])
        sharded.share_writing(state["model"], self._grid)
        self._plans[name], tensors = torch_dist.make_plan(state, self._grid, self._plans.get(name))
        return tensors

    def _begin(self, writer: StepWriter, folders: list[str], size: int) -> float:
        """Create the directory on rank 0, if the disk has room for the `size` bytes of every rank, and no earlier write hangs on it.

        Returns the deadline of the save.
        """
        told: list[Any] = [None] * self._grid.world
        dist.all_gather_object(told, (size, self._hanging()), group=self._grid.groups.control)
        deadline = time.monotonic() + self._limit_s  # not before: another rank may only now have learned how the last save ended
        fault: list[str | None] = [None]
        if self._grid.rank == 0:
            try:
                for rank, (_, hanging) in enumerate(told):
                    if hanging:
                        raise SaveError(f"rank {rank}: {', '.join(hanging)}: the write of an earlier save has not returned yet")
                self._in_time(partial(self._create, writer, folders, sum(part for part, _ in told)), writer.path, deadline)
            except Exception as error:
                fault = [_fault(error)]
        dist.broadcast_object_list(fault, group=self._grid.groups.control, group_src=0)
        if fault[0] is not None:
            raise SaveError(f"checkpoint: step {writer.step} was not saved: {fault[0]}")
        return deadline

    def _create(self, writer: StepWriter, folders: list[str], size: int) -> None:
        writer.begin(folders)
        free = os.statvfs(self._root)
        if free.f_bavail * free.f_frsize < size:
            writer.discard()
            raise SaveError(f"{self._root}: {size} bytes to write, {free.f_bavail * free.f_frsize} free")

    def _finish(
        self,
        writer: StepWriter,
        staged: StagedWriter,
        random: bytes,
        models: Mapping[str, Any],
        extra: Mapping[str, Content],
        barrier: SaveBarrier,
        deadline: float,
    ) -> None:
        """Finish a save in a background thread: every rank reports to rank 0 what it wrote, and rank 0 commits the step directory.

        Rank 0 publishes its verdict at most two graces after the deadline, even if the disk hangs; the ranks wait for one more.
        """
        try:
            written = staged.finish(_left(deadline))
            name = f"{RANDOM}/{self._grid.rank:05d}.safetensors"
            path = writer.path / name
            files = {**written.files, name: self._in_time(partial(write_file, path, random), path, deadline)}
            barrier.report(json.dumps({"files": {name: astuple(record) for name, record in files.items()}, "locations": written.locations}))
        except Exception as error:
            barrier.report(json.dumps({"fault": _fault(error)}))
        if self._grid.rank != 0:
            return
        try:
            reports = [json.loads(report) for report in barrier.reports(_left(deadline) + self._grace_s)]
            faults = [f"rank {rank}: {report['fault']}" for rank, report in enumerate(reports) if "fault" in report]
            if faults:
                raise SaveError(faults[0])
            self._in_time(partial(self._commit, writer, reports, models, extra, barrier), writer.path, deadline + self._grace_s)
            barrier.conclude("")
        except Exception as error:
            with suppress(SaveError):  # the disk hangs
                self._in_time(writer.discard, writer.path, time.monotonic() + self._grace_s)
            barrier.conclude(_fault(error), lost=isinstance(error, ContentLost))

    def _commit(
        self, writer: StepWriter, reports: list[Any], models: Mapping[str, Any], extra: Mapping[str, Content], barrier: SaveBarrier
    ) -> None:
        files = {name: FileRecord(*record) for report in reports for name, record in report["files"].items()}
        for model in models:
            ranks = [report["locations"].get(model, []) for report in reports]
            written = [
                (shard, Location(*location))
                for shards, locations in zip(self._plans[model].ranks, ranks, strict=True)
                for shard, location in zip(shards, locations, strict=True)
            ]
            records = write_metadata(writer.path / model, written)
            files |= {f"{model}/{name}": record for name, record in records.items()}
        for name, data in extra.items():
            files[name] = write_file(writer.path / name, data)
        if barrier.concluded:
            raise SaveError("was given up")
        layout = self._grid.layout.model_dump()
        manifest = Manifest(writer.step, self._grid.world, layout, versions(), models, files)
        writer.commit(manifest, keep_last=self._settings.keep_last, keep_every=self._settings.keep_every)


def _left(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _description(model: ModelState) -> dict[str, Any]:
    trainable = model.trainable
    optimizer = None
    if trainable is not None:
        optimizer = {"steps": trainable.steps, "adam_step": sharded.adam_step(trainable), **({"muon": True} if trainable.muon else {})}
    lora = {} if model.lora is None else {"lora": dict(model.lora)}
    return {**model.description.identity, "optimizer": optimizer, **lora, **({"mtp": True} if model.description.predicts else {})}


def _fault(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename}"
    return str(error) if isinstance(error, SaveError) else f"{type(error).__name__}: {one_line(str(error))}"
