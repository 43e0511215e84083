"""Messages over a socket pair, each preceded by its length in four bytes (big-endian)."""

import select
import socket
import struct
import time
from collections.abc import Iterator

LENGTH = struct.Struct("!I")
ANSWER_BYTES = 1 << 16  # maximum size of a message from inside the sandbox
IMAGE_BYTES = 1 << 20  # of one that has images


class BadMessage(Exception):
    """The other end wrote an invalid message."""


class Channel:
    """One end of a socket pair. Reading raises BadMessage if a message announces more than `limit` bytes."""

    def __init__(self, end: socket.socket, limit: int) -> None:
        self.limit = limit
        self._end = end
        self._end.setblocking(False)
        self._arrived = bytearray()

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: bytes, within_s: float | None = None) -> None:
        """Send a message. Raises TimeoutError if the other end does not accept it in time, and ConnectionError if that is closed."""
        unsent = memoryview(LENGTH.pack(len(message)) + message)
        deadline = None if within_s is None else time.monotonic() + within_s
        while unsent:
            try:
                unsent = unsent[self._end.send(unsent, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline):
                    raise TimeoutError from None

    def receive(self) -> bytes:
        """Wait for a message and return it. Raises EOFError if the other end is closed."""
        while True:
            for message in self.arrived(1):
                return message
            self._wait(select.POLLIN, None)

    def send_descriptor(self, descriptor: int) -> None:
        """Send a duplicate of a file descriptor. The other end must not have messages that it has not received yet."""
        socket.send_fds(self._end, [b"."], [descriptor])

    def receive_descriptor(self, within_s: float | None = None) -> int:
        """Wait for a file descriptor and return it. Nothing else may have been sent before it since the last message was received.

        Raises TimeoutError if it does not come in time, EOFError if the other end is closed, and BadMessage if something else came.
        """
        if not self._wait(select.POLLIN, None if within_s is None else time.monotonic() + within_s):
            raise TimeoutError
        data, descriptors, _, _ = socket.recv_fds(self._end, 1, 1)
        if not data:
            raise EOFError
        if not descriptors:
            raise BadMessage("no descriptor")
        return descriptors[0]

    def arrived(self, most: int | None = None) -> Iterator[bytes]:
        """Yield arrived messages, at most `most`, without waiting. Raises EOFError if all are read and the other end is closed."""
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
        """Remove and return the first message from the buffer; None if it is incomplete."""
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
        """Wait, and return whether the event came before the deadline. Uses poll, since select refuses descriptors from 1,024 on."""
        poll = select.poll()
        poll.register(self._end, event)
        return bool(poll.poll(None if deadline is None else 1000 * max(0.0, deadline - time.monotonic())))

    def close(self) -> None:
        self._end.close()
