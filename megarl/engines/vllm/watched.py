"""The processes of an engine, which are watched, and called with time limits: whoever waits for them hears of their end at once."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from megarl.engines.engine import EngineDead, RolloutError, RolloutTimeout
from megarl.text.display import one_line

Result = TypeVar("Result")


class WatchedProcesses:
    """vLLM's AsyncLLM and the processes behind it."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._llm: Any = None
        self._failure: Exception | None = None  # a failure of the engine seen by a request
        self._dead = asyncio.Event()  # one of them has ended
        self._watched: list[Any] = []

    def _watch(self) -> None:
        resources = self._llm.engine_core.resources
        self._watched = [*resources.engine_manager.processes, *([resources.coordinator.proc] if resources.coordinator else [])]
        for process in self._watched:
            asyncio.get_running_loop().add_reader(process.sentinel, self._dead.set)

    def check_health(self) -> None:
        if self._llm is None:
            raise EngineDead(f"{self.label}: is closed")
        if self._failure is not None:
            raise self._failure
        if self._dead.is_set() or self._llm.errored:
            for process in self._watched:
                process.join(0.5)  # it has ended, but may not be reaped yet
            exits = ", ".join(f"pid {process.pid}: exit code {process.exitcode}" for process in self._watched)
            raise EngineDead(f"{self.label}: its process has ended ({exits})")

    async def _call(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """Call `method` of the extension on every worker; return one result per worker, in the order of the ranks."""
        self.check_health()
        try:
            cores = await self._bounded(self._on_cores("collective_rpc", method, None, arguments, None), timeout_s, lambda: method)
            return [result for core in cores for result in core]
        except RolloutError:
            raise
        except Exception as error:  # a worker's error arrives as a bare Exception with its text
            raise RolloutError(f"{self.label}: {method}: {error}") from error

    async def _on_cores(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of vLLM's engine core on every data-parallel rank (AsyncLLM returns the first one's result alone)."""
        client = self._llm.engine_core
        return list(await asyncio.gather(*(client._call_utility_async(method, *arguments, engine=core) for core in client.core_engines)))

    async def _bounded(self, work: Awaitable[Result], timeout_s: float, late: Callable[[], str]) -> Result:
        """Await `work`, but no longer than until the engine dies or the time is over; `late` then describes the work for the error."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(work)
        death = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({task, death}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not self._dead.is_set():
                return task.result()
        except EngineDeadError as error:
            raise self._death(error) from error
        finally:
            for waiting in (task, death):
                waiting.cancel()
            await asyncio.gather(task, death, return_exceptions=True)
        self.check_health()
        raise RolloutTimeout(f"{self.label}: {late()} not done after {timeout_s:g} s")

    def _death(self, error: Exception) -> EngineDead:
        """Convert vLLM's error that its process has failed."""
        return EngineDead(f"{self.label}: its process has failed: {one_line(str(error.__cause__ or error))}")
