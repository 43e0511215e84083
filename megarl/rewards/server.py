"""The server's side of `megarl.rewards.http`: a model that scores behind a bounded HTTP server (aiohttp's).

A request is judged by its headers before its body is read. Requests that come while the model is busy wait, and are then scored together.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import resource
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol, Self

from aiohttp import web

from megarl.text import one_line

CONNECTIONS = 1024  # at a time, or half as many as there may be descriptors
BACKLOG = 4096  # connections that wait in the kernel to be taken (it may have a bound of its own)
HEADERS_S, BODY_S = 30.0, 60.0  # longest time from a connection to the end of the headers, and for the body
UNREAD_S = 60.0  # longest time that a client takes nothing of its answer
LARGEST, LARGEST_ALL = 64 << 20, 256 << 20  # bytes of a body, and of all that are being read or wait for their scores
HEADER_BYTES, HEADERS = 4096, 64  # of each, and how many
READ_AHEAD = 1 << 16  # bytes of a body that are taken before they are asked for
TOGETHER = 1024  # samples, from which on no further request joins those that are scored next
SHOWN = 500  # characters of an error
LINGER_S = 2.0  # for the rest of a body that is not wanted: its client reads the answer only when all is sent
WAKE_S = 1.0  # between looks for a signal: one that comes just before a wait, or to another thread, does not end it
ACCEPT_S, END_S = 0.1, 2.0  # pause where there is no descriptor left; longest time for the last answers


class ServedModel(Protocol):
    """What scores. Each method is called in one thread, one call at a time; the two may run at the same time."""

    def read(self, samples: Sequence[Any]) -> list[Any]:
        """What `scores` takes, one for each sample as it has come. Raises where a sample cannot be scored: its client is told."""
        ...

    def scores(self, read: Sequence[Any]) -> list[float]:
        """One score each, of the samples of any number of requests. What it raises ends the server."""
        ...


class Refused(Exception):
    """A request that gets no scores: the status, and one line that says why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True, eq=False)
class _Asked:
    """The samples of a request, read, and where their scores are awaited."""

    read: list[Any]
    scores: asyncio.Future[list[float]]


class RewardServer:
    """Listens from the beginning, and answers inside a `with`, in threads of its own: signals stay with the caller's.

    Args:
        model: what scores.
        host: an address of this machine.
        port: 0 lets the system choose; `port` says which it is.
        path: of the URL.
        token: that clients must show; None: they need none.

    Raises:
        OSError: it cannot listen.
    """

    def __init__(self, model: ServedModel, host: str, port: int, path: str, token: str | None) -> None:
        self._model, self._path = model, path
        self._authorization = None if token is None else f"Bearer {token}".encode()
        self._socket = socket.create_server((host, port), backlog=BACKLOG)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._reader, self._scorer = _Lane(), _Lane()
        self._waiting: list[_Asked] = []
        self._scoring: list[_Asked] = []
        self._came = asyncio.Event()
        self._end: Refused | None = None  # what is said to all from then on
        self._held = 0  # bytes of all bodies
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(), self._loop)
        return self

    def wait(self) -> None:
        """Until the model fails, whose error is raised, or the caller is interrupted."""
        while not self._serving.done():
            wait([self._serving], WAKE_S)
        self._serving.result()

    def __exit__(self, *error: Any) -> None:
        self._serving.cancel()
        asyncio.run_coroutine_threadsafe(_ended(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._socket.close()

    async def _serve(self) -> NoReturn:
        http = _Http(self._answer, handler_cancellation=True)
        accepting = asyncio.create_task(self._accept(http))
        end = Refused(503, "the server has been stopped")
        try:
            await self._score()
        except Exception as error:
            end = Refused(500, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._end = end
            accepting.cancel()
            for asked in [*self._scoring, *self._waiting]:
                if not asked.scores.done():
                    asked.scores.set_exception(end)
            http.pre_shutdown()
            await http.shutdown(END_S)

    async def _accept(self, http: _Http) -> NoReturn:
        while True:
            await http.free.acquire()
            try:
                connection, _ = await self._loop.sock_accept(self._socket)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * UNREAD_S))
                await self._loop.connect_accepted_socket(http.connection, connection)
            except OSError:  # no descriptor is left, or the client has gone again
                http.free.release()
                await asyncio.sleep(ACCEPT_S)

    async def _score(self) -> NoReturn:
        """Scores what waits, in the order in which it came."""
        while True:
            while not self._waiting:
                self._came.clear()
                await self._came.wait()
            samples: list[Any] = []
            self._scoring = []
            while self._waiting and len(samples) < TOGETHER:
                self._scoring.append(self._waiting.pop(0))
                samples += self._scoring[-1].read
            scores = await self._scorer.call(partial(self._model.scores, samples))
            for asked in self._scoring:
                mine, scores = scores[: len(asked.read)], scores[len(asked.read) :]
                if not asked.scores.done():  # else its client has gone
                    asked.scores.set_result(mine)

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        try:
            return _json(200, {"scores": await self._scores(request)})
        except Refused as refused:
            return _error(refused.status, str(refused))

    async def _scores(self, request: web.BaseRequest) -> list[float]:
        self._admit(request)
        body = bytearray()
        try:
            await self._receive(request, body)
            try:
                read = await self._reader.call(partial(self._read, body))
            except Exception as error:  # of the client's making: nothing has reached the model
                raise Refused(400, str(error)) from None
            if not read:
                return []
            return await self._turn(_Asked(read, self._loop.create_future()))
        finally:
            self._held -= len(body)

    async def _turn(self, asked: _Asked) -> list[float]:
        if self._end is not None:
            raise self._end
        self._waiting.append(asked)
        self._came.set()
        try:
            return await asked.scores
        finally:
            if asked in self._waiting:  # its client has gone
                self._waiting.remove(asked)

    def _admit(self, request: web.BaseRequest) -> None:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self._authorization is not None and not hmac.compare_digest(given, self._authorization):
            raise Refused(401, "another token is asked for")
        if request.raw_path != self._path:
            raise Refused(404, f"scores are at {self._path}")
        if request.method != "POST":
            raise Refused(405, "scores are asked for with POST")

    async def _receive(self, request: web.BaseRequest, body: bytearray) -> None:
        """The body, as far as the bounds go."""
        if (request.content_length or 0) > LARGEST:
            raise Refused(413, f"a request has at most {LARGEST} bytes")
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # of the answer, as aiohttp's router does (web_urldispatcher.py, _default_expect_handler)
        try:
            async with asyncio.timeout(BODY_S):
                async for part in request.content.iter_any():
                    if len(body) + len(part) > LARGEST:
                        raise Refused(413, f"a request has at most {LARGEST} bytes")
                    if self._held + len(part) > LARGEST_ALL:
                        raise Refused(503, f"all requests together have at most {LARGEST_ALL} bytes")
                    body += part
                    self._held += len(part)
        except TimeoutError:
            raise Refused(408, f"the request was not complete within {BODY_S:g} s") from None
        except web.RequestPayloadError as error:
            raise Refused(400, str(error)) from None

    def _read(self, body: bytearray) -> list[Any]:
        asked = json.loads(body)
        samples = asked.get("samples") if isinstance(asked, dict) else None
        if not isinstance(samples, list):
            raise ValueError("the request has no list `samples`")
        return self._model.read(samples)


class _Http(web.Server):
    """aiohttp's server, without a listener of its own: it counts its connections."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.free = asyncio.Semaphore(min(CONNECTIONS, max(1, descriptors // 2)) if descriptors > 0 else CONNECTIONS)

    def connection(self) -> web.RequestHandler:
        """The protocol of one more."""
        return _Connection(
            self,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=HEADERS_S,
            lingering_time=LINGER_S,
            access_log=None,  # type: ignore[arg-type]  # as aiohttp documents it
            auto_decompress=False,  # a short body stays a short one
            read_bufsize=READ_AHEAD,
            max_field_size=HEADER_BYTES,
            max_headers=HEADERS,
        )

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self.free.release()


class _Connection(web.RequestHandler):
    """Whose client is told in JSON, and whose console is not, what no HTTP is."""

    __slots__ = ()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if status >= 500:
            return super().handle_error(request, status, exc, message)
        return _error(status, message or "")


class _Lane:
    """Calls, one after another, in a thread that keeps no process from ending."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], list[Callable[[], Any]]]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    async def call(self, call: Callable[[], Any]) -> Any:
        """What call() returns or raises. Where the task is cancelled before its turn, it is never made, and nothing of it is kept."""
        future, calls = Future[Any](), [call]
        self._calls.put((future, calls))
        try:
            return await asyncio.wrap_future(future)
        finally:
            calls.clear()

    def _run(self) -> NoReturn:
        while True:
            self._next(*self._calls.get())  # holds nothing while it waits

    @staticmethod
    def _next(future: Future[Any], calls: list[Callable[[], Any]]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(calls[0]())
            except BaseException as error:
                future.set_exception(error)


def _json(status: int, answer: dict[str, Any]) -> web.Response:
    """The one answer of a connection: nobody sends requests whose answers he does not take."""
    response = web.json_response(answer, status=status)
    response.force_close()
    return response


def _error(status: int, reason: str) -> web.Response:
    return _json(status, {"error": one_line(reason, SHOWN)})


async def _ended() -> None:
    """Until every task of the loop but this one has ended."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=3 * END_S)
