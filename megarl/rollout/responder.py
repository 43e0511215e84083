"""One engine, asked by many coroutines, each for one response at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from megarl.batch import Sample
from megarl.rollout.engine import Engine, Request, RequestId, RolloutError
from megarl.rollout.generate import withdraw


class Responder:
    """`await responder(request)` is the response. What is asked at the same moment goes to the engine together."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine, self._timeout_s = engine, timeout_s
        self._waiting: dict[RequestId, asyncio.Future[Sample]] = {}
        self._new: list[Request] = []
        self._asked, self._taken = asyncio.Event(), asyncio.Event()

    @property
    def waiting(self) -> int:
        """How many responses are awaited."""
        return len(self._waiting)

    async def __call__(self, request: Request) -> Sample:
        assert request.id not in self._waiting
        self._waiting[request.id] = asyncio.get_running_loop().create_future()
        self._new.append(request)
        self._asked.set()
        return await self._waiting[request.id]

    async def work(self) -> None:
        """Serves all who ask until it is cancelled. Raises what the engine raises."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._submit())
            group.create_task(self._receive())

    async def _submit(self) -> None:
        while True:
            await self._asked.wait()
            await asyncio.sleep(0)  # others of this moment join
            self._asked.clear()
            new, self._new = self._new, []
            await self._engine.submit(new, self._timeout_s)
            self._taken.set()

    async def _receive(self) -> None:
        while True:
            await self._taken.wait()
            for finished in await self._engine.receive(self._timeout_s):
                if not (waiting := self._waiting.pop(finished.id)).done():  # who asked has been cancelled
                    waiting.set_result(finished.sample)
            if not self._waiting:
                self._taken.clear()
            await asyncio.sleep(0)

    async def close(self) -> None:
        """Withdraws what is still awaited."""
        left = self._waiting.keys() - {request.id for request in self._new}
        if left:
            with suppress(RolloutError):  # of an engine that has failed: the first error counts
                await withdraw(self._engine, left)


@asynccontextmanager
async def serving(engine: Engine, timeout_s: float) -> AsyncIterator[tuple[Responder, asyncio.Task[None]]]:
    """A responder at work; the task ends only with the failure of the engine."""
    responder = Responder(engine, timeout_s)
    task = asyncio.create_task(responder.work())
    try:
        yield responder, task
    finally:
        task.cancel()
        await asyncio.wait([task])
        await responder.close()
