"""The attacks of `hostile`, by name."""

from collections.abc import Callable
from typing import Any

HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {}


def hostile(function: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    HOSTILE[function.__name__] = function
    return function
