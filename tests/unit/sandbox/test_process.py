"""Processes that do not start, and those that a signal does not reach in time."""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from megarl.config import SandboxSettings
from megarl.sandbox import process
from megarl.sandbox.level import Level, level


def test_a_process_that_cannot_be_started_leaves_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(process, "level", lambda: Level.LIMITS)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "no python"))
    with pytest.raises(FileNotFoundError, match="no python"):
        process.SandboxedProcess("megarl.rewards.worker", SandboxSettings())
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that a disk holds up."""
    if level() < Level.NAMESPACES:
        pytest.skip(f"this machine grants {level()}")
    started = process.SandboxedProcess("megarl.rewards.worker", SandboxSettings())
    monkeypatch.setattr(process, "END_S", 0.2)
    monkeypatch.setattr(os, "waitid", lambda kind, pid, options: None if options & os.WNOHANG else pytest.fail("waits without end"))
    started.kill()
    monkeypatch.undo()
    assert started.ended(10.0) == "SIGKILL"
