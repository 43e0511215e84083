"""A model that scores without ranks, the server around it, and clients that ask it."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from megarl.rewards.server import RewardServer

TOKEN = "s3cret-of-the-test"
HEAD = b"POST /score HTTP/1.1\r\nHost: test\r\n"


class Lengths:
    """Scores the length of a response, while `free` is set; `calls` are the responses that it was asked for together."""

    sees = False

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.free = threading.Event()
        self.free.set()
        self.failure: Exception | None = None

    def read(self, samples: Sequence[Any]) -> list[str]:
        for number, sample in enumerate(samples):
            if not isinstance(sample, str):
                raise ValueError(f"sample {number}: {sample} is no text")
        return list(samples)

    def scores(self, read: Sequence[str]) -> list[float]:
        self.calls.append(list(read))
        assert self.free.wait(20)
        if self.failure is not None:
            raise self.failure
        return [float(len(response)) for response in read]


@contextmanager
def serving(model: Lengths, token: str | None = None) -> Iterator[RewardServer]:
    with RewardServer(model, "127.0.0.1", 0, "/score", token) as server:
        yield server


def ask(port: int, body: bytes | Iterator[bytes], **headers: str) -> tuple[int, Any]:
    """An iterator is sent in chunks, without a Content-Length."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", "/score", body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def asking(*samples: Any) -> bytes:
    return json.dumps({"samples": samples}).encode()


def raw(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """All that comes back for these bytes until the server hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        try:
            for part in parts:
                client.sendall(part)
                time.sleep(pause_s)
        except OSError:
            pass  # it has hung up: what has it said?
        found = b""
        try:
            while part := client.recv(1 << 16):
                found += part
        except ConnectionResetError:
            pass
        return found


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def until_waiting(server: RewardServer, requests: int) -> None:
    """So many requests wait behind those that are being scored."""
    eventually(lambda: len(server._waiting) == requests)


def assert_alive(port: int, **headers: str) -> None:
    assert ask(port, asking("abc"), **headers) == (200, {"scores": [3.0]})
