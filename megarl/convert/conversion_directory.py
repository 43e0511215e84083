"""The directory that a conversion writes: under a temporary name until it is complete, beside a journal of the finished units.

Any number of processes may work on one conversion, on machines that share the file system: each takes units that no other holds, and the
last one completes the directory. A process that dies releases its unit (the kernel drops its file locks); running the same command again
continues where it stopped.
"""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.checkpoints.files import sync
from megarl.errors import ConfigError

UnitRecord = dict[str, Any]  # the JSON record of a finished unit
_PLAN, _COMMIT, _CHECKED = "plan.json", "commit", "checked"
COMMIT_S, _POLL_S = 3600.0, 0.2  # how long to wait for another process that completes the directory


@dataclass(frozen=True)
class ConversionDirectory:
    """The directory `final`, which is written as `partial`, with its journal in `journal`; all on one file system."""

    final: Path
    partial: Path
    journal: Path

    def begin(self, plan: dict[str, Any]) -> None:
        """Start the conversion, or join one with the same plan. Raise ConfigError if `final` exists or the plan differs."""
        if self.final.is_dir() and not any(self.final.iterdir()):
            self.final.rmdir()
        self._check_final()
        self.journal.mkdir(parents=True, exist_ok=True)
        self.partial.mkdir(parents=True, exist_ok=True)
        file, own_file = self.journal / _PLAN, self.journal / f"{_PLAN}.{os.getpid()}"
        text = json.dumps(plan, indent=1, sort_keys=True)
        own_file.write_text(text)
        try:
            os.link(own_file, file)  # atomic: only one of several processes succeeds
        except FileExistsError:
            begun = file.read_text()
            if begun != text:
                differing = _difference(json.loads(begun), plan)
                raise ConfigError(
                    f"convert: {self.partial} was started with other settings ({differing}): remove it and {self.journal}, or "
                    "convert to another place"
                ) from None
        finally:
            own_file.unlink()
        try:
            self._check_final()
        except ConfigError:  # another process has completed it meanwhile: remove the directories that were just created
            with suppress(OSError):
                self.partial.rmdir()
            shutil.rmtree(self.journal, ignore_errors=True)
            raise

    def _check_final(self) -> None:
        if self.final.exists():
            raise ConfigError(f"convert: {self.final} already exists: not overwritten")

    @property
    def checked(self) -> bool:
        """Whether `check_source` has found the source, identified in the plan by its files' sizes and times, intact."""
        return (self.journal / _CHECKED).exists()

    def check(self) -> None:
        """Record that `check_source` has found the source intact."""
        (self.journal / _CHECKED).touch()

    def record(self, unit: int) -> UnitRecord | None:
        """Return the record of a finished unit; None if it is not finished."""
        try:
            return json.loads(self._record(unit).read_text())
        except FileNotFoundError:
            return None

    def put(self, unit: int, record: UnitRecord | None) -> None:
        """Record that a unit is finished, with its bytes on disk; None: that it is not."""
        if record is None:
            self._record(unit).unlink(missing_ok=True)
            return
        new = self._record(unit).with_suffix(".new")
        new.write_text(json.dumps(record))
        new.replace(self._record(unit))

    @contextmanager
    def hold(self, unit: int) -> Iterator[bool]:
        """Try to lock the unit until the end of the block; yields False if another process holds it."""
        with self._lock(f"{unit:06d}.lock", wait=False) as locked:
            yield locked

    def finish(self, complete: Callable[[], None]) -> None:
        """Call `complete`, which writes what is still missing, and rename `partial` to `final`; only one of the processes does so."""
        with self._lock(_COMMIT, wait=True):
            if not self.partial.exists():
                return
            complete()
            for folder, _, names in os.walk(self.partial):
                for name in names:
                    sync(Path(folder, name))
                sync(Path(folder))
            self.partial.rename(self.final)
            sync(self.final.parent)
        shutil.rmtree(self.journal, ignore_errors=True)

    def _record(self, unit: int) -> Path:
        return self.journal / f"{unit:06d}.json"

    @contextmanager
    def _lock(self, name: str, *, wait: bool) -> Iterator[bool]:
        try:
            descriptor = os.open(self.journal / name, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:  # another process has completed everything
            yield False
            return
        deadline = time.monotonic() + (COMMIT_S if wait else 0.0)
        while not _locked(descriptor):
            if time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            os.close(descriptor)
            if wait:
                raise ConfigError(f"convert: {self.journal / name}: another process has been completing {self.final} for {COMMIT_S:g} s")
            yield False
            return
        try:
            yield True
        finally:
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Lock a file, and return whether that was possible."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _difference(one: dict[str, Any], two: dict[str, Any]) -> str:
    keys = [key for key in sorted(one.keys() | two.keys()) if one.get(key) != two.get(key)]
    key = keys[0]
    if isinstance(one.get(key), dict) and isinstance(two.get(key), dict):
        return f"{key}.{_difference(one[key], two[key])}"
    return f"{key}: {json.dumps(one.get(key))[:120]} then, {json.dumps(two.get(key))[:120]} now"
