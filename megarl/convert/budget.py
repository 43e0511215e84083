"""Memory that threads share: each takes what its work needs, and waits until there is so much."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Budget:
    """At most `limit` bytes at any time."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held, self._room = limit, 0, threading.Condition()

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Holds `size` bytes inside. Nobody who holds some may take more."""
        assert size <= self._limit, f"{size} bytes of {self._limit}"
        with self._room:
            self._room.wait_for(lambda: self._held + size <= self._limit)
            self._held += size
        try:
            yield
        finally:
            with self._room:
                self._held -= size
                self._room.notify_all()
