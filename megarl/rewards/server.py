"""The server's side of `megarl.rewards.http`: a scoring model behind an HTTP server (aiohttp's) with bounded resources.

A request is accepted or refused by its headers before its body is read. Requests that arrive while the model is busy are scored together
afterwards.
"""

import asyncio
import hmac
import json
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol, Self

from aiohttp import web

from megarl.host.http_server import BoundedServer, Refused, receive
from megarl.text.display import one_line

BACKLOG = 4096  # connections that wait in the kernel to be accepted (the kernel may have a lower limit)
LARGEST, LARGEST_ALL = 64 << 20, 256 << 20  # bytes of a body, and of all bodies being received or waiting for their scores
TOGETHER = 1024  # samples in a batch from which on no further request joins it
SHOWN = 500  # characters of an error
WAKE_S = 1.0  # between looks, and checks for a signal: one that arrives just before a wait, or in another thread, does not end the wait
END_S = 2.0  # longest time for the last answers


class ServedModel(Protocol):
    """A model that scores samples. Each method has its own thread and is called once at a time; the two may run concurrently."""

    @property
    def sees(self) -> bool:
        """Whether prompts may have images."""
        ...

    def read(self, samples: Sequence[Any]) -> list[Any]:
        """Convert each sample from JSON to what `scores` takes. If it raises, the client is told that its samples cannot be scored."""
        ...

    def scores(self, inputs: Sequence[Any]) -> list[float]:
        """Return one score per sample; the samples may be those of several requests. An error ends the server."""
        ...


@dataclass(frozen=True, eq=False)
class _Asked:
    """The samples of a request, converted by `ServedModel.read`, and the future of their scores."""

    read: list[Any]
    scores: asyncio.Future[list[float]]


class RewardServer:
    """Serves a model. Listens once constructed, and answers inside a `with`, in its own threads: signals stay with the caller's thread.

    Args:
        model: the model that scores.
        host: an address of this machine.
        port: the port to listen on; 0 lets the system choose. The attribute `port` has the actual one.
        path: the path of the URL.
        token: the bearer token that clients must send; None: no token is needed.

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
        self._end: Refused | None = None  # once the server ends, the answer to all requests
        self._held = 0  # bytes of all bodies
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._loop.run_forever, name="http", daemon=True)
        self._thread.start()
        self._serving = asyncio.run_coroutine_threadsafe(self._serve(), self._loop)
        return self

    def wait(self, look: Callable[[], object] = lambda: None) -> None:
        """Block until the model fails, and raise its error, or until the caller is interrupted.

        Args:
            look: called every WAKE_S seconds, whether or not the model has anything to score; what it raises is raised.
        """
        while not self._serving.done():
            look()
            wait([self._serving], WAKE_S)
        self._serving.result()

    def __exit__(self, *error: Any) -> None:
        self._serving.cancel()
        asyncio.run_coroutine_threadsafe(_ended(), self._loop).result(4 * END_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_S)
        self._loop.close()
        self._socket.close()

    async def _serve(self) -> NoReturn:
        http = BoundedServer(self._answer, _error)
        accepting = asyncio.create_task(http.accept(self._socket))
        end = Refused(503, "the server has been stopped")
        try:
            await self._score()
        except Exception as error:
            end = Refused(500, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._end = end
            accepting.cancel()
            for request in [*self._scoring, *self._waiting]:
                if not request.scores.done():
                    request.scores.set_exception(end)
            await http.end(END_S)

    async def _score(self) -> NoReturn:
        """Score the waiting requests in order of arrival, for ever."""
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
            for request in self._scoring:
                own_scores, scores = scores[: len(request.read)], scores[len(request.read) :]
                if not request.scores.done():  # otherwise its client has disconnected
                    request.scores.set_result(own_scores)

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
                inputs = await self._reader.call(partial(self._read, body))
            except Exception as error:  # the client's fault: nothing has been scored
                raise Refused(400, str(error)) from None
            if not inputs:
                return []
            return await self._turn(_Asked(inputs, self._loop.create_future()))
        finally:
            self._held -= len(body)

    async def _turn(self, request: _Asked) -> list[float]:
        if self._end is not None:
            raise self._end
        self._waiting.append(request)
        self._came.set()
        try:
            return await request.scores
        finally:
            if request in self._waiting:  # its client has disconnected
                self._waiting.remove(request)

    def _admit(self, request: web.BaseRequest) -> None:
        authorization = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if self._authorization is not None and not hmac.compare_digest(authorization, self._authorization):
            raise Refused(401, "another token is asked for")
        if request.raw_path != self._path:
            raise Refused(404, f"scores are at {self._path}")
        if request.method != "POST":
            raise Refused(405, "scores are asked for with POST")

    async def _receive(self, request: web.BaseRequest, body: bytearray) -> None:
        """Receive the body within the limits of size and time. Raises Refused."""

        def take(part: bytes) -> None:
            if self._held + len(part) > LARGEST_ALL:
                raise Refused(503, f"all requests together have at most {LARGEST_ALL} bytes")
            body.extend(part)
            self._held += len(part)

        await receive(request, LARGEST, take)

    def _read(self, body: bytearray) -> list[Any]:
        request = json.loads(body)
        samples = request.get("samples") if isinstance(request, dict) else None
        if not isinstance(samples, list):
            raise ValueError("the request has no list `samples`")
        if request.get("images") and not self._model.sees:
            raise ValueError("the model sees no images (reward.source.images=true asks for that)")
        return self._model.read(samples)


class _Lane:
    """Makes calls one after another in a daemon thread, which does not keep the process from ending."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], list[Callable[[], Any]]]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    async def call(self, call: Callable[[], Any]) -> Any:
        """Return or raise what call() does. If the task is cancelled before its turn, the call is never made, and not kept in memory."""
        future, calls = Future[Any](), [call]
        self._calls.put((future, calls))
        try:
            return await asyncio.wrap_future(future)
        finally:
            calls.clear()

    def _run(self) -> NoReturn:
        while True:
            self._next(*self._calls.get())  # keeps no reference to a call while it waits

    @staticmethod
    def _next(future: Future[Any], calls: list[Callable[[], Any]]) -> None:
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(calls[0]())
            except BaseException as error:
                future.set_exception(error)


def _json(status: int, answer: dict[str, Any]) -> web.Response:
    """Return a response that closes the connection, so that no client can send requests without reading their answers."""
    response = web.json_response(answer, status=status)
    response.force_close()
    return response


def _error(status: int, reason: str) -> web.Response:
    return _json(status, {"error": one_line(reason, SHOWN)})


async def _ended() -> None:
    """Wait until every other task of the loop has ended, at most 3 * END_S seconds."""
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(tasks, timeout=3 * END_S)
