"""Environments in processes in the sandbox: one that hangs, crashes or talks nonsense ends its episode, and no other.

A process holds the environments of many episodes. Where one of them has to be ended with its process, the other episodes are played again
from their seeds in the next one, and must say the same again.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import select
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import Any

from megarl.config import (
    ConfigError,
    EnvironmentSettings,
    FunctionEnvironment,
    GymnasiumEnvironment,
    SandboxSettings,
    ToolsEnvironment,
)
from megarl.environments.protocol import EnvironmentFailed, ProtocolFault, Turn, read_messages, read_numbers
from megarl.sandbox.channel import BadMessage
from megarl.sandbox.process import SandboxedProcess
from megarl.text import printable

START_S = 120.0  # a process that has not imported its environment by then never will
GRACE_S = 1.0  # after the time of a request, for the process to say itself that it is late

WorkerRequest = tuple[Any, ...]


class ProcessHost:
    """`settings.workers` processes, each of which is started when its first episode begins. They die with this process."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._count = count()
        self._processes: list[_EnvironmentProcess | None] = [None] * settings.workers
        self._locks = [asyncio.Lock() for _ in range(settings.workers)]
        # Its threads live as long as it does: a process in the sandbox dies with the thread that has started it.
        self._threads = ThreadPoolExecutor(settings.workers, thread_name_prefix="environments")

    def open(self) -> ProcessEpisode:
        """A new episode, whose `reset` comes first."""
        return ProcessEpisode(self, next(self._count))

    async def ask(self, episode: ProcessEpisode, request: WorkerRequest) -> Turn:
        """The answer to a request; requests to one process wait for each other. EnvironmentFailed where there is none."""
        place = episode.number % len(self._processes)
        async with self._locks[place]:
            work = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, place, episode, request)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])  # a thread cannot be called off, and nobody else may ask meanwhile
                raise

    def _ask(self, place: int, episode: ProcessEpisode, request: WorkerRequest) -> Turn:
        process = self._processes[place]
        if request[0] == "close" and (process is None or episode.home is not process):
            return Turn(None)  # it ended with its process
        try:
            if process is None:
                process = self._processes[place] = _EnvironmentProcess(self._settings)
                process.wait_ready()
            if episode.home is not process:
                episode.home = process  # before it is played again: where that fails, `close` must still reach it
                for past, answer in episode.history:
                    if process.ask(past) != answer:
                        raise EnvironmentFailed("not repeatable: replayed from its seed, it answered differently")
            return process.ask(request)
        except Gone as gone:
            assert process is not None
            process.kill()
            self._processes[place] = None
            raise EnvironmentFailed(str(gone)) from None

    def close(self) -> None:
        """Ends the processes. Can be called twice."""
        for process in self._processes:
            if process is not None:
                process.kill()
        self._processes = [None] * len(self._processes)
        self._threads.shutdown(wait=False, cancel_futures=True)


class ProcessEpisode:
    """One episode: `reset`, `step` as often as there are turns, `close`."""

    def __init__(self, host: ProcessHost, number: int) -> None:
        self.number = number
        self.home: _EnvironmentProcess | None = None
        self.history: list[tuple[WorkerRequest, Turn]] = []
        self._host = host

    async def reset(self, seed: int, task: dict[str, Any] | None) -> Turn:
        """The opening."""
        return await self._play(("reset", self.number, seed, task))

    async def step(self, text: str, tokens: Sequence[int], finished: bool) -> Turn:
        """The answer to a turn."""
        return await self._play(("step", self.number, text, list(tokens), finished))

    async def _play(self, request: WorkerRequest) -> Turn:
        answer = await self._host.ask(self, request)
        self.history.append((request, answer))
        return answer

    async def close(self) -> None:
        """The process forgets it."""
        self.history.clear()
        if self.home is not None:
            await self._host.ask(self, ("close", self.number))


def code_of(source: Any) -> list[str]:
    """The modules of one's own that a process of `environment.source` imports."""
    if isinstance(source, ToolsEnvironment):
        return [path.partition(":")[0] for path in source.own]
    return [source.path.partition(":")[0]] if isinstance(source, FunctionEnvironment | GymnasiumEnvironment) else []


NO_ANSWER = "worker died: it wrote an invalid answer"


class Gone(Exception):
    """A process has to be ended, or has ended, with the reason."""


class AskedProcess:
    """One process in the sandbox, asked by one thread at a time.

    Args:
        module: of megarl, that runs in it.
        first: what it is told first.
        step_s: longest time of one request.
        sandbox: what it may do.
        code: modules of the user's that it imports.
    """

    def __init__(self, module: str, first: Any, step_s: float, sandbox: SandboxSettings, code: Sequence[str]) -> None:
        self.step_s = step_s
        self._sandboxed = SandboxedProcess(module, sandbox, code)
        self.send(first)

    def wait_ready(self) -> None:
        """Until its code is imported. ConfigError where it cannot be, Gone where that ends the process."""
        match self.receive(START_S):
            case ["ready"]:
                return
            case ["refused", str(text)]:
                raise ConfigError(f"environment.source.{printable(text)}")
        raise Gone(NO_ANSWER)

    def send(self, message: Any) -> None:
        """Pickled."""
        try:
            self._sandboxed.channel.send(pickle.dumps(message), self.step_s + GRACE_S)
        except (ConnectionError, TimeoutError):  # it is dead or stopped, as `receive` will find
            return

    def asked(self, message: Any) -> Any:
        """What is answered to a message. Gone as from `receive`."""
        self.send(message)
        return self.receive(self.step_s + GRACE_S)

    def receive(self, within_s: float) -> Any:
        """The next message. Gone where none comes in time, or none that is JSON."""
        channel, deadline = self._sandboxed.channel, time.monotonic() + within_s
        poll = select.poll()
        poll.register(channel.fileno(), select.POLLIN)
        try:
            while True:
                for message in channel.arrived(1):
                    return json.loads(message)
                if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                    raise Gone("timeout")
        except (EOFError, ConnectionError):
            raise Gone(self._sandboxed.death()) from None
        except (BadMessage, ValueError, RecursionError):
            raise Gone(NO_ANSWER) from None

    def kill(self) -> None:
        """Ends it and all that it has started."""
        self._sandboxed.kill()


class _EnvironmentProcess(AskedProcess):
    def __init__(self, settings: EnvironmentSettings) -> None:
        source, step_s = settings.source, settings.step_s
        super().__init__("megarl.environments.worker", (source.model_dump(), step_s), step_s, settings.sandbox, code_of(source))

    def ask(self, request: WorkerRequest) -> Turn:
        """The answer. EnvironmentFailed where the environment has none, Gone where the process is done with."""
        match self.asked(request):
            case ["turn", messages, reward, bool(done), info]:
                with suppress(ProtocolFault):  # which the worker has looked at, unless the environment has written itself
                    said = None if messages is None else read_messages(messages, request[0])
                    earned, numbers = read_numbers(reward, info)
                    if said is not None or done or request[0] != "step":
                        return Turn(said, earned, done, {printable(name): value for name, value in numbers.items()})
            case ["failed", str(text)]:
                raise EnvironmentFailed(printable(text))
        raise Gone(NO_ANSWER)
