"""Saves models, their optimizers and the random states of all ranks into one step directory."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.checkpoints.aside import Aside
from megarl.checkpoints.files import Record, write_file
from megarl.checkpoints.steps import HF, Manifest
from megarl.config import CheckpointSettings
from megarl.errors import SaveError
from megarl.parallel.checkpoint import sharded, torch_dist
from megarl.parallel.checkpoint.barrier import Meeting
from megarl.parallel.checkpoint.dcp import write_metadata
from megarl.parallel.checkpoint.rng import random_states
from megarl.parallel.checkpoint.staging import StagedWriter
from megarl.parallel.checkpoint.state import IDENTITY, RANDOM, Part
from megarl.parallel.grid import Grid


@dataclass(frozen=True)
class Staged:
    """The part of a save that its caller waited for."""

    bytes: int  # that this rank writes
    seconds: float


class Saver:
    """Saves into `root`, one step at a time. Every method is collective over the ranks of the grid."""

    def __init__(self, root: Path, grid: Grid, settings: CheckpointSettings) -> None:
        self._root, self._grid, self._settings = root, grid, settings
        self._plans: dict[str, torch_dist.Plan] = {}
        self._saves = 0
        self._pending: tuple[threading.Thread, Meeting, int] | None = None

    def save(self, step: int, parts: Mapping[str, Part], extra: Mapping[str, bytes]) -> Staged:
        """Saves the models of `parts` and rank 0's files `extra` (plain names); returns when the tensors are copied, if asynchronous, or
        everything lies on the disk.

        Waits for the save before this one. Raises SaveError, on every rank, where that one or, as far as it is known, this one failed.
        """
        self.wait()
        begun = time.perf_counter()
        planned = {name: self._plan(name, part) for name, part in parts.items()}
        size = sum(tensor.nbytes for tensors in planned.values() for tensor in tensors)
        aside = Aside(self._root, step)
        files = {f"{name}/{HF}/{file}": data for name, part in parts.items() for file, data in part.described.items()}
        self._begin(aside, [*parts, *sorted({os.path.dirname(file) for file in files}), RANDOM], size)
        writer = StagedWriter(aside.path, self._grid.rank, self._settings.staging_mb << 20)
        for name, tensors in planned.items():
            for tensor in tensors:
                writer.put(name, tensor)
        writer.close()
        models = {name: _description(part) for name, part in parts.items()}
        work = (aside, writer, random_states(), models, {**files, **extra}, Meeting(self._grid, self._root, self._saves))
        thread = threading.Thread(target=self._finish, args=work, daemon=True)
        thread.start()
        self._pending, self._saves = (thread, work[-1], step), self._saves + 1
        if not self._settings.asynchronous:
            self.wait()
        return Staged(size, time.perf_counter() - begun)

    def wait(self) -> None:
        """Waits until the last save is complete. Raises SaveError where it failed, on every rank, once."""
        if self._pending is None:
            return
        thread, meeting, step = self._pending
        self._pending = None
        fault = meeting.verdict(2 * self._grid.timeout_s)
        if fault:
            raise SaveError(f"checkpoint: step {step} was not saved: {fault}")
        thread.join()

    def _plan(self, name: str, part: Part) -> list[Tensor]:
        """This rank's tensors of one model."""
        state: dict[str, Any] = {"model": sharded.model_state(part.chunks, self._grid)}
        if part.trainable is not None:
            state["optimizer"] = sharded.optimizer_state(part.trainable, state["model"])
        sharded.share_writing(state["model"], self._grid)
        self._plans[name], tensors = torch_dist.make_plan(state, self._grid, self._plans.get(name))
        return tensors

    def _begin(self, aside: Aside, folders: list[str], size: int) -> None:
        """Makes the directory, on rank 0, where there is room for `size` bytes of each rank."""
        total = torch.tensor(size)
        dist.all_reduce(total, group=self._grid.groups.control)
        fault: list[str | None] = [None]
        if self._grid.rank == 0:
            try:
                aside.begin(folders)
                free = os.statvfs(self._root)
                if free.f_bavail * free.f_frsize < int(total):
                    aside.discard()
                    fault = [f"{self._root}: {int(total)} bytes to write, {free.f_bavail * free.f_frsize} free"]
            except OSError as error:
                fault = [f"{error.strerror}: {error.filename}"]
        dist.broadcast_object_list(fault, group=self._grid.groups.control, group_src=0)
        if fault[0] is not None:
            raise SaveError(f"checkpoint: step {aside.step} was not saved: {fault[0]}")

    def _finish(
        self,
        aside: Aside,
        writer: StagedWriter,
        random: bytes,
        models: Mapping[str, Any],
        extra: Mapping[str, bytes],
        meeting: Meeting,
    ) -> None:
        """In a background thread: every rank tells rank 0 what it wrote, and rank 0 makes it a checkpoint."""
        try:
            written = writer.finish()
            name = f"{RANDOM}/{self._grid.rank:05d}.safetensors"
            files = {**written.files, name: write_file(aside.path / name, random)}
            meeting.report(json.dumps({"files": _plain(files), "places": _plain(written.places)}))
        except Exception as error:
            meeting.report(json.dumps({"fault": _one_line(error)}))
        if self._grid.rank != 0:
            return
        try:
            reports = [json.loads(report) for report in meeting.reports(self._grid.timeout_s)]
            faults = [f"rank {rank}: {report['fault']}" for rank, report in enumerate(reports) if "fault" in report]
            if faults:
                raise SaveError(faults[0])
            self._commit(aside, reports, models, extra)
            meeting.conclude("")
        except Exception as error:
            aside.discard()
            meeting.conclude(_one_line(error))

    def _commit(self, aside: Aside, reports: list[Any], models: Mapping[str, Any], extra: Mapping[str, bytes]) -> None:
        files = {name: Record(*record) for report in reports for name, record in report["files"].items()}
        for model in models:
            ranks = [report["places"].get(model, []) for report in reports]
            written = zip(self._plans[model].ranks, ranks, strict=True)
            placed = [(shard, tuple(place)) for shards, places in written for shard, place in zip(shards, places, strict=True)]
            found = write_metadata(aside.path / model, placed)
            files |= {f"{model}/{name}": record for name, record in found.items()}
        for name, data in extra.items():
            files[name] = write_file(aside.path / name, data)
        layout = self._grid.layout.model_dump()
        manifest = Manifest(aside.step, self._grid.world, layout, _versions(), models, files)
        aside.commit(manifest, keep_last=self._settings.keep_last, keep_every=self._settings.keep_every)


def _description(part: Part) -> dict[str, Any]:
    trainable = part.trainable
    optimizer = None if trainable is None else {"steps": trainable.steps, "adam_step": sharded.adam_step(trainable)}
    return {**{key: part.hf[key] for key in IDENTITY}, "optimizer": optimizer}


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("megarl", "torch", "megatron-core")} | {"python": platform.python_version()}


def _plain(found: Mapping[str, Any]) -> dict[str, Any]:
    """Records and lists of locations as JSON has them."""
    return {name: [astuple(item) for item in value] if isinstance(value, list) else astuple(value) for name, value in found.items()}


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename}"
    return str(error) if isinstance(error, SaveError) else f"{type(error).__name__}: {' '.join(str(error).split())}"
