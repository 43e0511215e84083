"""Connections: none takes longer than it may, whatever it waits for."""

import socket
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import pytest

from megarl.host.http_client import connected


def test_a_name_that_is_looked_up_for_long_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the connection that comes of it later is closed."""
    found, ended, look = threading.Event(), threading.Event(), socket.getaddrinfo

    def slow(host: str, *rest: Any) -> Any:
        found.wait(60.0)
        ended.set()
        return look("127.0.0.1", *rest)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60.0)
        monkeypatch.setattr(socket, "getaddrinfo", slow)
        begun = time.monotonic()
        with pytest.raises(TimeoutError), connected(urlsplit(f"http://slow:{server.getsockname()[1]}"), 0.2):
            pass
        assert time.monotonic() - begun < 30.0 and not ended.is_set()
        found.set()
        late, _ = server.accept()
        with late:
            late.settimeout(60.0)
            assert late.recv(1) == b""


def test_what_a_connection_fails_with_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with pytest.raises(ConnectionRefusedError), connected(urlsplit(f"http://127.0.0.1:{port}"), 5.0):
        pass
