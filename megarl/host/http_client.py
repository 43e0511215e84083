"""Requests to the user's servers, each of which succeeds or fails within its time limit, and goes to the given address and no other."""

import http.client
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from urllib.parse import SplitResult

from megarl.errors import Absent, ConfigError
from megarl.text.display import escaped

_elsewhere: ContextVar[bool] = ContextVar("elsewhere", default=False)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Mark checks made outside the run, which may start later and on other machines, with servers that do not answer here and now."""
    token = _elsewhere.set(True)
    try:
        yield
    finally:
        _elsewhere.reset(token)


def unanswered(fault: str) -> None:
    """Refuse a run whose server does not answer as it should (ConfigError); inside `elsewhere`, only warn on stderr."""
    if not _elsewhere.get():
        raise ConfigError(fault)
    print(f"megarl: warning: from here: {escaped(fault)}; the run asks again when it starts", file=sys.stderr)


def token_of(variable: str | None, key: str) -> str | None:
    """The bearer token in the environment variable that the setting `key` names. Absent if it is unset or no header can hold it."""
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token or not all("!" <= letter <= "~" for letter in token):
        fault = "holds no token: letters that a header cannot carry" if token else "is not set"
        raise Absent(f"{key}: the environment variable {variable} {fault}")
    return token


def target(place: SplitResult) -> str:
    """The target in the first line of a request."""
    return place._replace(scheme="", netloc="", fragment="", path=place.path or "/").geturl()


@contextmanager
def connected(place: SplitResult, within_s: float, sockets: set[socket.socket] | None = None) -> Iterator[http.client.HTTPConnection]:
    """Open a connection for the block that is shut down after `within_s` seconds, with a TimeoutError whatever the block made of that.

    The time limits of HTTP clients (http.client's, httpx's) apply to one operation each, so a byte now and then satisfies them. Any client
    would need this alarm, and with it the simplest one is enough.

    Args:
        place: the server's URL.
        within_s: the longest time for connecting and the block together.
        sockets: holds the connection's socket while it is open. To end the connection earlier, `shut` the socket.
    """
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    assert place.hostname is not None, "as the configuration has checked"
    begun, late = time.monotonic(), threading.Event()
    connection = kind(place.hostname, place.port, timeout=within_s)
    _connect(connection, within_s)
    open_socket: socket.socket = connection.sock
    sockets = set() if sockets is None else sockets

    def ring() -> None:
        late.set()
        shut(open_socket)

    alarm = threading.Timer(max(begun + within_s - time.monotonic(), 0.0), ring)
    alarm.daemon = True
    alarm.start()
    sockets.add(open_socket)
    try:
        yield connection
    except (OSError, http.client.HTTPException):
        if not late.is_set():
            raise
    finally:
        alarm.cancel()
        sockets.discard(open_socket)
        connection.close()
    if late.is_set():
        raise TimeoutError


def _connect(connection: http.client.HTTPConnection, within_s: float) -> None:
    """Connect, or raise TimeoutError after `within_s` seconds.

    This takes a thread: no call looks up a name in bounded time, and each of the name's addresses would be given the whole time limit.
    """
    faults, given_up = list[Exception](), threading.Event()

    def work() -> None:
        try:
            connection.connect()
        except Exception as error:
            faults.append(error)
        if given_up.is_set():
            connection.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(within_s)
    if thread.is_alive():
        given_up.set()
        connection.close()
        raise TimeoutError
    if faults:
        raise faults[0]


def shut(open_socket: socket.socket) -> None:
    """Shut a connection down, and wake the thread that reads from it."""
    with suppress(OSError):  # it may be closed already
        open_socket.shutdown(socket.SHUT_RDWR)
