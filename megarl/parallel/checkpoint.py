"""Distributed checkpoints: models, their optimizers and random states of all ranks in one step directory, on any layout.

    saver = Saver(root, grid, settings)                      # on every rank, once
    saver.save(step, {"policy": Part(chunks, hf, trainable), "critic": ...}, {"trainer.json": b"..."})
    saver.wait()                                             # before the end; raises what went wrong behind
    load(verified, {"policy": Part(...)}, grid)              # any layout; a Part without its optimizer loads the weights alone
    load_random(verified, grid)                              # the same layout: from here on, bit for bit

A step directory (`megarl.checkpoints.steps`): `<name>/` in Megatron's torch_dist format for each model, with `hf/` inside that says what it
is (config.json, tokenizer), `random/<rank>.safetensors`, the caller's own files (rank 0's), and the manifest.
"""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.checkpoints.aside import Aside
from megarl.checkpoints.files import Record, write_file
from megarl.checkpoints.steps import HF, Manifest, Verified
from megarl.config import CheckpointSettings
from megarl.errors import ConfigError, SaveError
from megarl.parallel import sharded, torch_dist
from megarl.parallel.dcp import write_metadata
from megarl.parallel.grid import Grid
from megarl.parallel.optimizer import Trainable
from megarl.parallel.rng import random_states, restore_random_states
from megarl.parallel.staging import StagedWriter

RANDOM = "random"  # folder of the random states
_POLL_S = 0.02
_IDENTITY = ("model_type", "vocab_size")  # of config.json; everything else shows in the shapes


@dataclass(frozen=True)
class Part:
    """One model of a checkpoint: this rank's chunks, and the optimizer if it is to be saved or loaded with them."""

    chunks: Sequence[Any]  # of models/build.py, in data-parallel wrappers or not
    hf: Mapping[str, Any]  # config.json
    trainable: Trainable | None = None
    described: Mapping[str, bytes] = field(default_factory=dict)  # what is saved beside the weights (rank 0's): see `hf.described`


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


class Meeting:
    """Where the ranks' threads meet for one save: the store, since the process groups belong to the main threads."""

    def __init__(self, grid: Grid, root: Path, number: int) -> None:
        self._store = dist.PrefixStore(f"checkpoint/{root}/{number}", grid.store)
        self._rank, self._ranks = grid.rank, range(grid.world)

    def report(self, text: str) -> None:
        """This rank's word."""
        self._store.set(f"rank/{self._rank}", text)

    def reports(self, timeout_s: float) -> list[str]:
        """Every rank's word. Raises SaveError naming the ranks that are late."""
        deadline = time.monotonic() + timeout_s
        while not self._store.check([f"rank/{rank}" for rank in self._ranks]):
            if time.monotonic() > deadline:
                late = [rank for rank in self._ranks if not self._store.check([f"rank/{rank}"])]
                raise SaveError(f"ranks {late} did not finish writing in {timeout_s:g} s")
            time.sleep(_POLL_S)
        words = [self._store.get(f"rank/{rank}").decode() for rank in self._ranks]
        for rank in self._ranks:
            self._store.delete_key(f"rank/{rank}")
        return words

    def conclude(self, fault: str) -> None:
        """Rank 0's last word: what went wrong, or nothing."""
        self._store.set("verdict", fault or "saved")

    def verdict(self, timeout_s: float) -> str:
        """What went wrong, or nothing."""
        deadline = time.monotonic() + timeout_s
        while not self._store.check(["verdict"]):
            if time.monotonic() > deadline:
                return f"rank 0 did not finish in {timeout_s:g} s"
            time.sleep(_POLL_S)
        fault = self._store.get("verdict").decode()
        return "" if fault == "saved" else fault


def load(step: Verified, parts: Mapping[str, Part], grid: Grid) -> None:
    """Gives the models (and optimizers, where a part has one) what a step directory holds of them, on any layout. Collective.

    Raises ConfigError, on all ranks: a model that the directory lacks, of another family or size (key and both shapes), or without the
    optimizer that is asked for.
    """
    for name, part in parts.items():
        saved = _saved(step, name, part)
        state: dict[str, Any] = {"model": sharded.model_state(part.chunks, grid)}
        if part.trainable is not None:
            state["optimizer"] = sharded.empty_optimizer_state(part.trainable, state["model"])
        allowed_extra = ("optimizer.",) if part.trainable is None else ()
        torch_dist.read(step, name, state, int(part.hf["vocab_size"]), allowed_extra, grid)
        if part.trainable is not None:
            sharded.put_optimizer(part.trainable, state["optimizer"], saved["optimizer"]["adam_step"])
            part.trainable.steps = saved["optimizer"]["steps"]


def load_random(step: Verified, grid: Grid) -> bool:
    """Sets every random state of this process to the one saved. False, and nothing done, where the layout is another. Collective."""
    if step.manifest.layout != grid.layout.model_dump():
        return False
    restore_random_states(torch_dist.agreed(grid, lambda: step.read(f"{RANDOM}/{grid.rank:05d}.safetensors")))
    return True


def _saved(step: Verified, name: str, part: Part) -> Mapping[str, Any]:
    """What the manifest says of a model. Raises ConfigError where the model at hand cannot be it."""
    saved = step.manifest.models.get(name)
    if saved is None:
        raise ConfigError(f"checkpoint: {step.path} has no model {name!r}; it has {', '.join(sorted(step.manifest.models))}")
    for key in _IDENTITY:
        if saved[key] != part.hf[key]:
            raise ConfigError(f"checkpoint: {step.path / name}: {key} is {saved[key]!r}, and the model's is {part.hf[key]!r}")
    if part.trainable is not None and saved["optimizer"] is None:
        raise ConfigError(f"checkpoint: {step.path / name} holds no optimizer: it was saved as a frozen model")
    return saved


def _description(part: Part) -> dict[str, Any]:
    trainable = part.trainable
    optimizer = None if trainable is None else {"steps": trainable.steps, "adam_step": sharded.adam_step(trainable)}
    return {**{key: part.hf[key] for key in _IDENTITY}, "optimizer": optimizer}


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("megarl", "torch", "megatron-core")} | {"python": platform.python_version()}


def _plain(found: Mapping[str, Any]) -> dict[str, Any]:
    """Records and lists of locations as JSON has them."""
    return {name: [astuple(item) for item in value] if isinstance(value, list) else astuple(value) for name, value in found.items()}


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror}: {error.filename}"
    return str(error) if isinstance(error, SaveError) else f"{type(error).__name__}: {' '.join(str(error).split())}"
