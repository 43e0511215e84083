"""A memory budget that threads share: each reserves what its work needs, waiting until that much is free."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Budget:
    """A budget of `limit` bytes, which limits what all threads together hold at any time."""

    def __init__(self, limit: int) -> None:
        self._limit, self._held, self._room = limit, 0, threading.Condition()

    @contextmanager
    def take(self, size: int) -> Iterator[None]:
        """Reserve `size` bytes within the block. A thread that already holds a reservation must not take another, or it may deadlock."""
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
