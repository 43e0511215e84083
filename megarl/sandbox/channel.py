"""Messages over one end of a socket pair, each behind its length in four bytes (big-endian)."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterator

LENGTH = struct.Struct("!I")
ANSWER_BYTES = 1 << 16  # most of one message from inside the sandbox


class BadMessage(Exception):
    """The other end wrote something that is no message."""


class Channel:
    """One end. Messages that arrive are at most `limit` bytes long; BadMessage where one says that it is longer."""

    def __init__(self, end: socket.socket, limit: int) -> None:
        self.limit = limit
        self._end = end
        self._end.setblocking(False)
        self._arrived = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: bytes, within_s: float | None = None) -> None:
        """Sends one message. TimeoutError where the other end does not take it in time, ConnectionError where it is gone."""
        left = memoryview(LENGTH.pack(len(message)) + message)
        deadline = None if within_s is None else time.monotonic() + within_s
        while left:
            try:
                left = left[self._end.send(left, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline):
                    raise TimeoutError from None

    def receive(self) -> bytes:
        """Waits for one message. EOFError where the other end is closed."""
        while True:
            for message in self.arrived(1):
                return message
            self._wait(select.POLLIN, None)

    def arrived(self, most: int | None = None) -> Iterator[bytes]:
        """The messages that are there, at most so many, without waiting. EOFError where the other end is closed and all are read."""
        while most is None or most > 0:
            while (message := self._taken()) is None:
                try:
                    data = self._end.recv(1 << 16)
                except BlockingIOError:
                    return
                if not data:
                    raise EOFError
                self._arrived += data
            most = None if most is None else most - 1
            yield message

    def _taken(self) -> bytes | None:
        """The first message, once it is whole."""
        if len(self._arrived) < LENGTH.size:
            return None
        [length] = LENGTH.unpack_from(self._arrived)
        if length > self.limit:
            raise BadMessage(f"a message of {length} bytes, more than {self.limit}")
        end = LENGTH.size + length
        if len(self._arrived) < end:
            return None
        message = bytes(self._arrived[LENGTH.size : end])
        del self._arrived[:end]
        return message

    def _wait(self, event: int, deadline: float | None) -> bool:
        """Whether the event came before the deadline. With poll, since select refuses descriptors from 1,024 on."""
        poll = select.poll()
        poll.register(self._end, event)
        return bool(poll.poll(None if deadline is None else 1000 * max(0.0, deadline - time.monotonic())))

    def close(self) -> None:
        self._end.close()
