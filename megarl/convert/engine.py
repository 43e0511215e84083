"""Run a conversion: convert units on threads, show a progress bar, stop at the first error."""

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
    """Another thread has failed, or the user has interrupted the conversion."""


class Control:
    """The state that a conversion's threads share: a memory budget and a stop flag."""

    def __init__(self, limit: int) -> None:
        self._budget, self._stop = Budget(limit), threading.Event()

    def stop(self) -> None:
        """Make every thread stop at its next parameter."""
        self._stop.set()

    @contextmanager
    def parameter(self, item: PlannedParameter) -> Iterator[None]:
        """Reserve memory for one parameter within the block. Raise Cancelled if the conversion has been stopped."""
        with self._budget.take(item.memory):
            if self._stop.is_set():
                raise Cancelled
            yield


class Conversion(ABC):
    """A planned conversion in one of the two directions."""

    items: Sequence[PlannedParameter]
    units: Sequence[Unit]

    @abstractmethod
    def plan(self) -> dict[str, Any]:
        """Return the source and options, which must be the same in every process that works on this conversion."""

    @abstractmethod
    def check_source(self) -> None:
        """Raise ConfigError if what is read without comparing hashes is damaged."""

    @abstractmethod
    def convert(self, unit: Unit, control: Control) -> UnitRecord:
        """Write a unit to disk, replacing anything that an earlier attempt left."""

    @abstractmethod
    def verify(self, unit: Unit, record: UnitRecord) -> bool:
        """Return whether the files that a finished unit wrote are still unchanged."""

    @abstractmethod
    def complete(self, records: Mapping[int, UnitRecord]) -> None:
        """Write the files that need all units to be finished."""


def run(conversion: Conversion, directory: ConversionDirectory, workers: int) -> bool:
    """Convert the units that are not finished yet; finished units are kept whatever happens.

    Args:
        conversion: the conversion.
        directory: the directory to write.
        workers: number of threads.

    Returns:
        Whether the conversion is complete; False if other processes still hold units.

    Raises:
        ConfigError: the source is damaged, the directory was started with a different plan, there is not enough space, or the disk fails.
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
    with directory.hold(unit.index) as locked:
        record = directory.record(unit.index)
        if not locked or record is not None and (not before or conversion.verify(unit, record)):
            return
        directory.put(unit.index, None)
        directory.put(unit.index, conversion.convert(unit, control))
