"""Imports without garbage collection, and without a package's own `__init__`."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.imports import gc_paused, without_package_init


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


def test_a_module_comes_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heavy_package").mkdir()
    (tmp_path / "heavy_package/__init__.py").write_text("from heavy_package.part import Kind\nwhole = True")
    (tmp_path / "heavy_package/part.py").write_text("class Kind: ...")
    monkeypatch.syspath_prepend(tmp_path)
    with without_package_init("heavy_package"):
        part = importlib.import_module("heavy_package.part")
    assert "heavy_package" not in sys.modules
    package = importlib.import_module("heavy_package")
    assert package.whole and package.Kind is part.Kind
    with without_package_init("heavy_package"):
        assert sys.modules["heavy_package"] is package


ALONE = """
import sys
from megarl.imports import gym_factory
drawn = {}
for name in sys.argv[2:]:
    dataset = gym_factory(name).create_dataset(name, seed=3, size=3)
    drawn[name] = [dataset[index] for index in range(3)]
assert ("reasoning_gym" in sys.modules) == (sys.argv[1] == "whole"), sorted(sys.modules)
import reasoning_gym
for name, entries in drawn.items():
    again = reasoning_gym.create_dataset(name, seed=3, size=3)
    assert [again[index] for index in range(3)] == entries, name
from reasoning_gym.factory import DATASETS
print(len(DATASETS))
"""


@pytest.mark.parametrize(
    ("way", "names"), [("alone", ["spell_backward", "chain_sum", "simple_equations", "game_of_life"]), ("whole", ["figlet_font"])]
)
def test_a_gyms_data_set_comes_without_the_others_and_is_the_same(way: str, names: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", ALONE, way, *names], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 100
