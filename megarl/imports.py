"""Import helpers: pause the garbage collector, skip a package's `__init__`, and look up objects named in text."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any


def find(place: str) -> Callable[..., Any]:
    """Import and return the object at "module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def add_current_folder() -> None:
    """Put the current folder on Python's path, where users' functions are named by module.

    A console script has its own folder there instead, and an interpreter that reads its program from a notebook or stdin an empty name,
    which means another folder in another process.
    """
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause the garbage collector in a block that creates very many objects. What the block imports is exempt from collection for good.

    Python would scan all objects again and again while they are created: a quarter of the time that vLLM, Megatron and transformers take
    to import, and half of the time it takes to read or write which tensors a checkpoint has. If the block imports nothing new, garbage that
    is left at its end is collected later as usual.
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
def without_package_init(package: str) -> Iterator[None]:
    """Let a block import modules of a package without running its `__init__`, which runs when the package is next imported.

    For a package whose `__init__` does a lot that those modules do not need. It may be a package inside another.
    """
    if package in sys.modules:
        yield
        return
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    stand_in = ModuleType(package)
    stand_in.__spec__, stand_in.__path__ = spec, list(spec.submodule_search_locations or ())
    sys.modules[package] = stand_in
    try:
        yield
    finally:
        del sys.modules[package]


def gym_factory(dataset: str) -> Any:
    """Return the module reasoning_gym.factory, with the data set of the given name among its DATASETS if there is one.

    The package imports a hundred data sets, with sympy and matplotlib, in 1.6 s. Most data sets have a module of their own name that needs
    neither.
    """
    with gc_paused():
        with without_package_init("reasoning_gym"):
            importlib.import_module("reasoning_gym.coaching")  # it and the factory import each other, and only this order works
            factory = importlib.import_module("reasoning_gym.factory")
            modules = Path(factory.__file__ or "").parent.glob("*/*.py")
            for package in [f"reasoning_gym.{module.parent.name}" for module in modules if module.stem == dataset]:
                with without_package_init(package):
                    importlib.import_module(f"{package}.{dataset}")
        if dataset not in factory.DATASETS:
            importlib.import_module("reasoning_gym")
    return factory
