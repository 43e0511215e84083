"""Imports without garbage collection."""

import gc
import importlib
from pathlib import Path

import pytest

from megarl.imports import gc_paused


def test_the_collector_rests_and_leaves_alone_what_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_for_the_first_time.py").write_text("held = [[] for _ in range(1000)]")
    monkeypatch.syspath_prepend(tmp_path)
    frozen = gc.get_freeze_count()
    with gc_paused():
        assert not gc.isenabled()
        importlib.import_module("imported_for_the_first_time")
    assert gc.isenabled() and gc.get_freeze_count() >= frozen + 1000


def test_nothing_is_left_alone_where_nothing_was_imported() -> None:
    frozen = gc.get_freeze_count()
    with gc_paused():
        held: list[list[int]] = [[] for _ in range(1000)]
    assert held and gc.isenabled() and gc.get_freeze_count() <= frozen


def test_the_collector_comes_back_after_a_failure() -> None:
    with pytest.raises(ModuleNotFoundError), gc_paused():
        importlib.import_module("no_such_module_anywhere")
    assert gc.isenabled()
