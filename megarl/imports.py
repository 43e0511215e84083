"""Import helpers: pause the garbage collector, skip a package's `__init__`, and look up objects named in text."""

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
