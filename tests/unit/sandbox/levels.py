"""Tests of each level of isolation, on a machine that has higher ones."""

import landlockpy
import pytest

from megarl.sandbox import process
from megarl.sandbox.level import Level, level


def grant(asked: Level, monkeypatch: pytest.MonkeyPatch) -> Level:
    """Isolate processes at a level, where the machine has it."""
    if asked > level() or (asked == Level.LANDLOCK and not landlockpy.supported()):
        pytest.skip(f"this machine grants {level()}")
    monkeypatch.setattr(process, "level", lambda: asked)
    return asked
