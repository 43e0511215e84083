"""Carries a conversion out: units on threads, a progress bar, a stop at the first fault."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from megarl.convert.budget import Budget
from megarl.convert.conversion_directory import ConversionDirectory, UnitRecord
from megarl.convert.plan import PlannedParameter, Unit, largest_layer
from megarl.errors import ConfigError


class Cancelled(Exception):
    """Another thread has failed, or the user has had enough."""


class Control:
    """What the threads of a conversion share."""

    def __init__(self, limit: int) -> None:
        self._budget, self._stop = Budget(limit), threading.Event()

    def stop(self) -> None:
        """Lets every thread leave at its next parameter."""
        self._stop.set()

    @contextmanager
    def parameter(self, item: PlannedParameter) -> Iterator[None]:
        """Room for one parameter. Raises Cancelled."""
        with self._budget.take(item.memory):
            if self._stop.is_set():
                raise Cancelled
            yield


class Conversion(ABC):
    """One direction, planned."""

    items: Sequence[PlannedParameter]
    units: Sequence[Unit]

    @abstractmethod
    def plan(self) -> dict[str, Any]:
        """What another process must agree on to work on the same conversion: source, options."""

    @abstractmethod
    def check_source(self) -> None:
        """Raises ConfigError where the source is damaged."""

    @abstractmethod
    def convert(self, unit: Unit, control: Control) -> UnitRecord:
        """Writes a unit onto the disk, over whatever an earlier attempt left of it."""

    @abstractmethod
    def verify(self, unit: Unit, record: UnitRecord) -> bool:
        """Whether what a finished unit wrote is still there as it was."""

    @abstractmethod
    def complete(self, records: Mapping[int, UnitRecord]) -> None:
        """Writes what all units together need."""


def run(conversion: Conversion, directory: ConversionDirectory, workers: int) -> bool:
    """Converts the units that are not done yet; what is done stays done whatever happens.

    Args:
        conversion: the work.
        directory: where it is written.
        workers: threads.

    Returns:
        False where other processes still hold units.

    Raises:
        ConfigError: a damaged source, another plan, no room, a failing disk.
    """
    try:
        directory.begin(conversion.plan())
        if not directory.checked:
            conversion.check_source()
            directory.check()
        _room(conversion, directory)
        _units(conversion, directory, workers)
        records = {unit.index: directory.record(unit.index) for unit in conversion.units}
        done = {index: record for index, record in records.items() if record is not None}
        if len(done) < len(conversion.units):
            return directory.final.exists()
        directory.finish(lambda: conversion.complete(done))
    except OSError as error:
        raise ConfigError(
            f"convert: {error.filename or directory.partial}: {error.strerror}; the same command continues from here"
        ) from None
    return True


def _room(conversion: Conversion, directory: ConversionDirectory) -> None:
    missing = sum(unit.size for unit in conversion.units if directory.record(unit.index) is None)
    free = os.statvfs(directory.partial)
    if free.f_bavail * free.f_frsize < missing:
        raise ConfigError(f"convert: {directory.partial}: {missing} bytes to write, {free.f_bavail * free.f_frsize} free")


def _units(conversion: Conversion, directory: ConversionDirectory, workers: int) -> None:
    control = Control(2 * largest_layer(conversion.items).size)
    before = {unit.index for unit in conversion.units if directory.record(unit.index) is not None}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress, ThreadPoolExecutor(workers) as pool:
        bar = progress.add_task("converting", total=sum(unit.size for unit in conversion.units))

        def work(unit: Unit) -> None:
            _unit(conversion, unit, directory, control, unit.index in before)
            progress.advance(bar, unit.size)

        futures = [pool.submit(work, unit) for unit in conversion.units]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            control.stop()
            pool.shutdown(cancel_futures=True)
            raise


def _unit(conversion: Conversion, unit: Unit, directory: ConversionDirectory, control: Control, before: bool) -> None:
    with directory.hold(unit.index) as held:
        record = directory.record(unit.index)
        if not held or record is not None and (not before or conversion.verify(unit, record)):
            return
        directory.put(unit.index, None)
        directory.put(unit.index, conversion.convert(unit, control))
