"""Share one engine among many concurrent callers, each of whom gets its own responses."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from typing import Any

from megarl.batch import Sample
from megarl.engines.engine import Engine, Request, RequestId, RolloutError, RolloutTimeout

_WITHDRAW_S = 10.0  # longest wait for an engine to abort requests whose callers have gone
_POLL_S = 0.01


class Responder:
    """Answers requests: `await responder(request)` returns the response. Simultaneous requests are submitted to the engine together.

    An error of the engine is raised in every waiting caller. Requests of different callers may have the same id.

    Args:
        engine: the engine; nobody else may request responses from it.
        timeout_s: the longest time that may pass without any request finishing.
    """

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self.label = engine.label
        self._engine, self._timeout_s = engine, timeout_s
        self._numbers = count()
        self._new: list[Request] = []
        self._taken: dict[RequestId, asyncio.Future[Sample]] = {}  # of submitted requests, by our own numbers
        self._futures: dict[RequestId, asyncio.Future[Sample]] = {}  # of the new ones
        self._tasks = set[asyncio.Task[None]]()
        self._receiving = False

    async def __call__(self, request: Request) -> Sample:
        own = replace(request, id=next(self._numbers))
        future = self._futures[own.id] = asyncio.get_running_loop().create_future()
        self._new.append(own)
        if len(self._new) == 1:
            self._start(self._submit())
        return await future

    async def all(self, requests: Sequence[Request], timeout_s: float) -> list[Sample]:
        """Return the responses to all requests, at least one. On failure all are withdrawn; RolloutTimeout says how many are late."""
        tasks = [asyncio.create_task(self(request)) for request in requests]
        try:
            await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            late = [task for task in tasks if not task.done() or isinstance(task.exception(), RolloutTimeout)]
            samples = [task.result() for task in tasks if task not in late]
        finally:
            await self.withdraw(tasks)
        if late:
            raise RolloutTimeout(f"{self.label}: {len(late)} of {len(tasks)} responses not done after {timeout_s:g} s")
        return samples

    async def withdraw(self, tasks: Iterable[asyncio.Task[Any]]) -> None:
        """Cancel these tasks unless they are done; return when the engine has dropped the requests they waited for."""
        tasks = list(tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(RolloutError, TimeoutError):  # an engine that has failed already: the first error counts
            async with asyncio.timeout(_WITHDRAW_S):
                while unwanted := [number for number, future in self._taken.items() if future.done()]:
                    await self._engine.abort(unwanted, _WITHDRAW_S)
                    await asyncio.sleep(_POLL_S)

    async def _submit(self) -> None:
        await asyncio.sleep(0)  # let simultaneous callers join
        new = [request for request in self._new if not self._futures[request.id].done()]
        self._taken |= {request.id: self._futures[request.id] for request in new}
        self._new.clear()
        self._futures.clear()
        if not new:
            return
        try:
            await self._engine.submit(new, self._timeout_s)
        except Exception as error:
            for request in new:
                self._resolve(request.id, error)
        if self._taken and not self._receiving:
            self._receiving = True
            self._start(self._receive())

    async def _receive(self) -> None:
        """Hand each response to its caller, until no caller waits."""
        try:
            while self._taken:
                finished = await self._engine.receive(self._timeout_s)
                if not finished:
                    await self._give_up()
                for one in finished:
                    self._resolve(one.id, one.sample)
                await asyncio.sleep(0)
        except Exception as error:
            for number in list(self._taken):
                self._resolve(number, error)
        finally:
            self._receiving = False

    async def _give_up(self) -> None:
        """Fail all waiting callers with RolloutTimeout and abort their requests."""
        late = RolloutTimeout(f"{self.label}: {len(self._taken)} responses not done after {self._timeout_s:g} s")
        for future in self._taken.values():
            if not future.done():
                future.set_exception(late)
        await self._engine.abort(list(self._taken), _WITHDRAW_S)
        while self._taken and (finished := await self._engine.receive(_WITHDRAW_S)):
            for one in finished:
                self._resolve(one.id, one.sample)
        if self._taken:
            raise late

    def _resolve(self, number: RequestId, result: Sample | Exception) -> None:
        future = self._taken.pop(number, None)
        if future is None or future.done():  # the caller has been told of a failure while this was being submitted, or was cancelled
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
