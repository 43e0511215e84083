"""Checks made where a run is written, not where it runs: what this machine lacks is named as not checked instead of refused."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from megarl.errors import Absent
from megarl.text.display import escaped

_printed: ContextVar[set[str] | None] = ContextVar("printed", default=None)


@contextmanager
def naming_unchecked() -> Iterator[None]:
    """Mark checks of a run on machines that have what this one may lack: the weights, the data, a token, a kernel's protection."""
    token = _printed.set(set())
    try:
        yield
    finally:
        _printed.reset(token)


def is_naming() -> bool:
    """Whether the checks are made inside `naming_unchecked`."""
    return _printed.get() is not None


def unchecked(what: str) -> None:
    """Print a line about something that is not checked on this machine: on stderr, and once inside `naming_unchecked`."""
    printed = _printed.get()
    if printed is None or what not in printed:
        print(f"megarl: not checked: {escaped(what)}", file=sys.stderr)
    if printed is not None:
        printed.add(what)


@contextmanager
def where_present(what: str) -> Iterator[None]:
    """Mark a check that reads what this machine may lack: inside `naming_unchecked`, `Absent` ends the block with a line about `what`."""
    try:
        yield
    except Absent as absent:
        if not is_naming():
            raise
        unchecked(f"{what}: {absent}")
