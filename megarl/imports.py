"""Imports: heavy ones, made lighter, and those of a place that is named in text."""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any


def find(place: str) -> Callable[..., Any]:
    """What stands at "module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


@contextmanager
def uncollected() -> Iterator[None]:
    """For a block that makes very many objects: the garbage collector rests in it. What it has imported is left alone for good.

    Python would look through all objects again and again while they come: a quarter of the time that vLLM, Megatron and transformers take
    to import, and half of what it takes to read or write which tensors a checkpoint has. Where the block imports nothing new, what is
    garbage at its end will be collected.
    """
    was, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > modules:
            gc.freeze()
        if was:
            gc.enable()


@contextmanager
def parts_alone(package: str) -> Iterator[None]:
    """For a block that imports modules of a package: its own `__init__` does not run there, but where the package is next imported.

    For one whose `__init__` makes much that those modules do without, and of which they need `__version__` at most. May be a package
    inside another.
    """
    if package in sys.modules:
        yield
        return
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    stand_in = ModuleType(package)
    stand_in.__spec__, stand_in.__path__ = spec, list(spec.submodule_search_locations or ())
    if "." not in package:
        from importlib.metadata import version  # takes longer than all else that a scoring process imports

        vars(stand_in)["__version__"] = version(package)
    sys.modules[package] = stand_in
    try:
        yield
    finally:
        del sys.modules[package]


def gym_factory(dataset: str) -> Any:
    """reasoning_gym.factory, with the data set of that name among its DATASETS if there is one.

    The package imports a hundred data sets, with sympy and matplotlib: 1.6 s. Most have a module of their own name that needs neither.
    """
    with uncollected():
        with parts_alone("reasoning_gym"):
            importlib.import_module("reasoning_gym.coaching")  # it and the factory import each other, and only this order works
            factory = importlib.import_module("reasoning_gym.factory")
            modules = Path(factory.__file__ or "").parent.glob("*/*.py")
            for package in [f"reasoning_gym.{module.parent.name}" for module in modules if module.stem == dataset]:
                with parts_alone(package):
                    importlib.import_module(f"{package}.{dataset}")
        if dataset not in factory.DATASETS:
            importlib.import_module("reasoning_gym")
    return factory
