"""Run environments in sandboxed processes. An environment that hangs, crashes or answers nonsense ends its own episode only.

A process holds the environments of many episodes. If it has to be killed because of one of them, the others are replayed from their
seeds in a new process, and must give the same answers again.
"""

from __future__ import annotations

import asyncio
import hashlib
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
    AgentEnvironment,
    ConfigError,
    EnvironmentSettings,
    FunctionEnvironment,
    GymnasiumEnvironment,
    SandboxSettings,
    ToolsEnvironment,
)
from megarl.environments.protocol import EnvironmentFailed, ProtocolFault, Turn, read_messages, read_numbers, text_size
from megarl.sandbox.channel import ANSWER_BYTES, IMAGE_BYTES, BadMessage
from megarl.sandbox.process import SandboxedProcess
from megarl.text.display import printable

START_S = 120.0  # time limit for a process to start and import its environment
GRACE_S = 1.0  # additional time after a request's limit, in which the process itself can report that it was exceeded

WorkerRequest = tuple[Any, ...]


class ProcessHost:
    """Runs `settings.workers` processes, each of which is started when its first episode begins. They end with this process."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        self._settings = settings
        self._count = count()
        self._processes: list[_EnvironmentProcess | None] = [None] * settings.workers
        self._locks = [asyncio.Lock() for _ in range(settings.workers)]
        # A pool as long-lived as the host: a sandboxed process dies with the thread that started it.
        self._threads = ThreadPoolExecutor(settings.workers, thread_name_prefix="environments")

    def open(self) -> ProcessEpisode:
        """Return a new episode."""
        return ProcessEpisode(self, next(self._count))

    async def ask(self, episode: ProcessEpisode, request: WorkerRequest) -> Turn:
        """Return the answer to a request, after earlier requests to the same process. Raises EnvironmentFailed if there is none."""
        place = episode.number % len(self._processes)
        async with self._locks[place]:
            work = asyncio.get_running_loop().run_in_executor(self._threads, self._ask, place, episode, request)
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                await asyncio.wait([work])  # a thread cannot be cancelled, and until it is done the process takes no other request
                raise

    def _ask(self, place: int, episode: ProcessEpisode, request: WorkerRequest) -> Turn:
        process = self._processes[place]
        if request[0] == "close" and (process is None or episode.home is not process):
            return Turn(None)  # the environment is gone, with its process
        try:
            if process is None:
                process = self._processes[place] = _EnvironmentProcess(self._settings)
                process.wait_ready()
            if episode.home is not process:
                episode.home = process  # before it is played again: where that fails, `close` must still reach it
                for past, answer in episode.history:
                    if _print(process.ask(past)) != answer:
                        raise EnvironmentFailed("not repeatable: replayed from its seed, it answered differently")
            return process.ask(request)
        except Gone as gone:
            assert process is not None
            process.kill()
            self._processes[place] = None
            raise EnvironmentFailed(str(gone)) from None

    def close(self) -> None:
        """End the processes. Can be called twice."""
        for process in self._processes:
            if process is not None:
                process.kill()
        self._processes = [None] * len(self._processes)
        self._threads.shutdown(wait=False, cancel_futures=True)


class ProcessEpisode:
    """One episode: first `reset`, then `step` for each turn, finally `close`; see `hosts.Episode`."""

    def __init__(self, host: ProcessHost, number: int) -> None:
        self.number = number
        self.home: _EnvironmentProcess | None = None
        self.history: list[tuple[WorkerRequest, bytes]] = []  # what was asked, and the answer's `_print`
        self._host = host

    async def reset(self, seed: int, task: dict[str, Any] | None) -> Turn:
        """Begin the episode and return its opening."""
        return await self._play(("reset", self.number, seed, task))

    async def step(self, text: str, tokens: Sequence[int], finished: bool) -> Turn:
        """Return the environment's answer to a turn."""
        return await self._play(("step", self.number, text, list(tokens), finished))

    async def _play(self, request: WorkerRequest) -> Turn:
        answer = await self._host.ask(self, request)
        self.history.append((request, _print(answer)))
        return answer

    async def close(self) -> None:
        """Close the environment in its process."""
        self.history.clear()
        if self.home is not None:
            await self._host.ask(self, ("close", self.number))


def _print(answer: Turn) -> bytes:
    """Return a hash of an answer, which may hold megabytes of images."""
    return hashlib.sha256(repr(answer).encode(errors="replace")).digest()


def code_of(source: Any) -> list[str]:
    """Return the names of the user's modules that a process of `environment.source` imports."""
    if isinstance(source, ToolsEnvironment):
        return [path.partition(":")[0] for path in source.own]
    if isinstance(source, AgentEnvironment):
        return [] if source.function is None else [source.function.partition(":")[0]]
    return [source.path.partition(":")[0]] if isinstance(source, FunctionEnvironment | GymnasiumEnvironment) else []


NO_ANSWER = "worker died: it wrote an invalid answer"


class Gone(Exception):
    """A process has ended or has to be killed; the message is the reason."""


class AskedProcess:
    """A sandboxed process that answers requests, for use by one thread at a time.

    Args:
        module: the module of megarl that runs in it.
        first: the first message sent to it.
        step_s: time limit of one request.
        sandbox: what the process may do.
        code: the user's modules that it imports.
    """

    def __init__(self, module: str, first: Any, step_s: float, sandbox: SandboxSettings, code: Sequence[str]) -> None:
        self.step_s = step_s
        self._sandboxed = SandboxedProcess(module, sandbox, code)
        self.send(first)

    def wait_ready(self) -> None:
        """Wait until its code is imported. Raises ConfigError if the code is refused, and Gone if the process does not get that far."""
        match self.receive(START_S):
            case ["ready"]:
                return
            case ["refused", str(text)]:
                raise ConfigError(f"environment.source.{printable(text)}")
        raise Gone(NO_ANSWER)

    def send(self, message: Any) -> None:
        """Send a message, pickled. If the process does not take it, the next `receive` raises Gone."""
        try:
            self._sandboxed.channel.send(pickle.dumps(message), self.step_s + GRACE_S)
        except (ConnectionError, TimeoutError):  # it has ended or is stopped, which `receive` will notice
            return

    def asked(self, message: Any) -> Any:
        """Send a message and return the answer. Raises Gone as `receive` does."""
        self.send(message)
        return self.receive(self.step_s + GRACE_S)

    def receive(self, within_s: float) -> Any:
        """Return the next message. Raises Gone if there is none in time, or if it is not JSON."""
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
        """Kill the process and everything that it has started."""
        self._sandboxed.kill()


class _EnvironmentProcess(AskedProcess):
    def __init__(self, settings: EnvironmentSettings) -> None:
        source, step_s = settings.source, settings.step_s
        super().__init__("megarl.environments.worker", (source.model_dump(), step_s), step_s, settings.sandbox, code_of(source))
        self._sandboxed.channel.limit = IMAGE_BYTES

    def ask(self, request: WorkerRequest) -> Turn:
        """Return the answer. Raises EnvironmentFailed if the environment failed, and Gone if the process cannot be used any more."""
        match self.asked(request):
            case ["turn", messages, reward, bool(done), info]:
                with suppress(ProtocolFault):  # the worker checked it, unless the environment itself wrote the answer
                    messages_read = None if messages is None else read_messages(messages, request[0])
                    earned, numbers = read_numbers(reward, info)
                    if text_size(messages_read or ()) > ANSWER_BYTES:
                        raise Gone(NO_ANSWER)
                    if messages_read is not None or done or request[0] != "step":
                        return Turn(messages_read, earned, done, {printable(name): value for name, value in numbers.items()})
            case ["failed", str(text)]:
                raise EnvironmentFailed(printable(text))
        raise Gone(NO_ANSWER)
