"""Imports without garbage collection, and without a package's own `__init__`."""

from __future__ import annotations

import gc
import importlib
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megarl import light_transformers
from megarl.imports import parts_alone, uncollected
from megarl.light_transformers import Distributions


def test_the_collector_rests_and_leaves_alone_what_was_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_for_the_first_time.py").write_text("held = [[] for _ in range(1000)]")
    monkeypatch.syspath_prepend(tmp_path)
    frozen = gc.get_freeze_count()
    with uncollected():
        assert not gc.isenabled()
        importlib.import_module("imported_for_the_first_time")
    assert gc.isenabled() and gc.get_freeze_count() >= frozen + 1000


def test_nothing_is_left_alone_where_nothing_was_imported() -> None:
    frozen = gc.get_freeze_count()
    with uncollected():
        held: list[list[int]] = [[] for _ in range(1000)]
    assert held and gc.isenabled() and gc.get_freeze_count() <= frozen


def test_the_collector_comes_back_after_a_failure() -> None:
    with pytest.raises(ModuleNotFoundError), uncollected():
        importlib.import_module("no_such_module_anywhere")
    assert gc.isenabled()


def test_a_module_comes_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heavy_package").mkdir()
    (tmp_path / "heavy_package/__init__.py").write_text("from heavy_package.part import VERSION, Kind\nwhole = True")
    (tmp_path / "heavy_package/part.py").write_text("from heavy_package import __version__ as VERSION\nclass Kind: ...")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(metadata, "version", {"heavy_package": "1.2"}.__getitem__)
    with parts_alone("heavy_package"):
        part = importlib.import_module("heavy_package.part")
    assert part.VERSION == "1.2" and "heavy_package" not in sys.modules
    package = importlib.import_module("heavy_package")
    assert package.whole and package.Kind is part.Kind
    with parts_alone("heavy_package"):
        assert sys.modules["heavy_package"] is package


def test_distributions_are_those_of_the_standard_library(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, found = metadata.packages_distributions(), Distributions()
    monkeypatch.setattr(light_transformers, "_of_all", lambda: pytest.fail("the files of all distributions are read"))
    assert found.get("torch") == whole["torch"] == ["torch"]
    monkeypatch.setattr(light_transformers, "_of_all", lambda: whole)
    assert found["yaml"] == whole["yaml"] == ["PyYAML"] and found.get("no_such_package", []) == [] and dict(found).keys() == whole.keys()


def test_transformers_asks_for_no_more_when_it_is_imported() -> None:
    code = """
from megarl import light_transformers
light_transformers._of_all = None
with light_transformers.light_transformers():
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast
    from transformers.utils.import_utils import PACKAGE_DISTRIBUTION_MAPPING
print(type(PACKAGE_DISTRIBUTION_MAPPING).__name__, light_transformers.metadata.packages_distributions.__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "Distributions packages_distributions\n"


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
