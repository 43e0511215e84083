"""aiohttp's server with bounded resources, for clients that may do anything."""

import asyncio
import resource
import socket
from collections.abc import Awaitable, Callable
from typing import NoReturn

from aiohttp import web

CONNECTIONS = 1024  # most at a time; fewer if that is more than half of the process's file descriptors
HEADERS_S, BODY_S = 30.0, 60.0  # longest time from a connection to the end of the headers, and for the body
UNREAD_S = 60.0  # longest time that a client may leave its answer unread
HEADER_BYTES, HEADERS = 4096, 64  # most bytes of a header, and most headers
READ_AHEAD = 1 << 16  # bytes of a body that are buffered before they are read
LINGER_S = 2.0  # to receive the rest of a refused body: a client may read the answer only once it has sent everything
ACCEPT_S = 0.1  # pause after an accept that failed, such as for lack of descriptors


class Refused(Exception):
    """A refused request: the HTTP status, and the reason in one line."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class BoundedServer(web.Server):
    """aiohttp's server without its own listener, and with a limit on connections.

    Args:
        answer: answers a request; cancelled if the client disconnects.
        refusal: makes the answer to what is no valid HTTP, from a status and a reason.
        connections: the most at a time, if that is less than CONNECTIONS; further ones wait in the kernel.
    """

    def __init__(
        self,
        answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        refusal: Callable[[int, str], web.Response],
        connections: int | None = None,
    ) -> None:
        super().__init__(answer, handler_cancellation=True)
        self.refusal = refusal
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = min(CONNECTIONS, connections or CONNECTIONS)
        self._free = asyncio.Semaphore(min(most, max(1, descriptors // 2)) if descriptors > 0 else most)

    async def accept(self, listener: socket.socket) -> NoReturn:
        """Accept connections for ever. `listener`: a listening socket that does not block."""
        loop = asyncio.get_running_loop()
        while True:
            await self._free.acquire()
            try:
                connection, _ = await loop.sock_accept(listener)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_S))
                await loop.connect_accepted_socket(self._connection, connection)
            except OSError:  # no descriptor is left, or the client has already disconnected
                self._free.release()
                await asyncio.sleep(ACCEPT_S)

    async def end(self, within_s: float) -> None:
        """Close all connections, after the answers that are done within this time."""
        self.pre_shutdown()
        await self.shutdown(within_s)

    def _connection(self) -> web.RequestHandler:
        """Return the protocol of a new connection."""
        return _Connection(
            self,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=HEADERS_S,
            lingering_time=LINGER_S,
            access_log=None,  # type: ignore[arg-type]  # as aiohttp documents it
            auto_decompress=False,  # a small body must not become a large one
            read_bufsize=READ_AHEAD,
            max_field_size=HEADER_BYTES,
            max_headers=HEADERS,
        )

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._free.release()


class _Connection(web.RequestHandler):
    """A connection that answers invalid HTTP with an error of the server's own form, and logs nothing."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        server = self._manager
        if status >= 500 or not isinstance(server, BoundedServer):
            return super().handle_error(request, status, exc, message)
        return server.refusal(status, message or "")


async def receive(request: web.BaseRequest, most: int, take: Callable[[bytes], None]) -> None:
    """Receive the body of a request part by part.

    Args:
        request: the request.
        most: the most bytes.
        take: is given each part.

    Raises:
        Refused: it is too large, late or malformed; or by `take`.
    """
    if (request.content_length or 0) > most:
        raise Refused(413, f"a request has at most {most} bytes")
    if request.headers.get("Expect", "").lower() == "100-continue":
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # of the answer alone, as aiohttp's router does (web_urldispatcher.py, _default_expect_handler)
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.content.iter_any():
                size += len(part)
                if size > most:
                    raise Refused(413, f"a request has at most {most} bytes")
                take(part)
    except TimeoutError:
        raise Refused(408, f"the request was not complete within {BODY_S:g} s") from None
    except web.RequestPayloadError as error:
        raise Refused(400, str(error)) from None
