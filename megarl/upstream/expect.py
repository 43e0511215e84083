"""Check, before patching an upstream fault, that it is still there: a changed upstream stops the program instead of being patched."""

import inspect
from typing import Any


def expect(function: Any, *lines: str) -> None:
    """Raise RuntimeError unless the source of `function`, or of a class or module, contains the given lines, in this order."""
    source, place = inspect.getsource(function), 0
    for line in lines:
        place = source.find(line, place)
        if place < 0:
            name = function.__name__ if inspect.ismodule(function) else f"{function.__module__}.{function.__qualname__}"
            raise RuntimeError(f"{name} no longer holds {line!r}: megarl's patch for it must be reviewed")
