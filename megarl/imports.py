"""Heavy imports, made lighter."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For a block that imports large packages: the garbage collector rests in it, and leaves what is there at its end alone for good.

    Where the block imports nothing new, nothing is left alone: what is garbage by then will be collected.

    An import makes hundreds of thousands of objects that live as long as the process. Python would look through all of them again and
    again while they come, which is a quarter of the time that vLLM, Megatron and transformers take to import.
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
