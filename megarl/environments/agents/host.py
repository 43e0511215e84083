"""Run agents: programs that ask the policy by themselves, each in a process of its own, in sandboxes.

A function is imported once in each of `environment.workers` sandboxes, which fork a process for each of its episodes. A command has a
sandbox of its own in each episode. Whatever an agent does ends its own episode only.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from megarl.config import AgentEnvironment, EnvironmentSettings
from megarl.environments.agents.endpoint import MOST_REFUSED, Endpoint, Session
from megarl.environments.agents.questions import Policy
from megarl.environments.processes import NO_ANSWER, START_S, AskedProcess, Gone, code_of
from megarl.environments.protocol import EnvironmentFailed, ProtocolFault, Turn, read_numbers
from megarl.sandbox.channel import ANSWER_BYTES, BadMessage
from megarl.text.display import printable

WORKER = "megarl.environments.agents.worker"


class AgentHost:
    """Plays the episodes of the agent that is `settings.source`."""

    def __init__(self, settings: EnvironmentSettings) -> None:
        assert isinstance(source := settings.source, AgentEnvironment)
        self._source, self._settings = source, settings
        self._room = asyncio.Semaphore(source.processes)
        self._count, self._notes = count(), set[str]()
        self._shared: list[_Sandbox | None] = [None] * settings.workers
        self._locks = [asyncio.Lock() for _ in range(settings.workers)]
        # A pool as long-lived as the host: a sandboxed process dies with the thread that started it.
        self._threads = ThreadPoolExecutor(settings.workers, thread_name_prefix="agents")

    async def play(self, seed: int, task: dict[str, Any] | None, policy: Policy) -> Turn:
        """Play an episode.

        Args:
            seed: the seed of the episode.
            task: the data's prompt, {"prompt", "answer", "meta"}; None if it has none.
            policy: answers the agent.

        Returns:
            The reward of the whole episode, and the agent's numbers.

        Raises:
            EnvironmentFailed: the agent failed, or neither asked nor ended within `step_s`.
        """
        async with self._room:
            number, key = next(self._count), secrets.token_hex(16)
            own_end, agents_end = socket.socketpair()
            own_end.setblocking(False)
            with own_end, agents_end:
                async with self._sandbox(number) as sandbox:
                    session = sandbox.endpoint.sessions[key] = Session(policy)
                    try:
                        await self._apart(sandbox.process.start, agents_end.fileno(), number, seed, task, key)
                        agents_end.close()  # so that only the agent holds it
                        session.begin()
                        outcome = await self._outcome(own_end, session)
                    finally:
                        del sandbox.endpoint.sessions[key]
                        how = await self._apart(sandbox.process.end, number)
            return self._read(outcome, how)

    async def try_(self) -> None:
        """Start a sandbox and import the agent. Raises ConfigError or EnvironmentFailed."""
        async with self._sandbox(0):
            pass

    @asynccontextmanager
    async def _sandbox(self, number: int) -> AsyncIterator[_Sandbox]:
        """Give an episode its sandbox, which is its own if the agent is a command."""
        if self._source.command is not None:
            sandbox = await self._opened()
            try:
                yield sandbox
            finally:
                await self._ended(sandbox)
            return
        place = number % len(self._shared)
        async with self._locks[place]:
            shared = self._shared[place]
            if shared is not None and shared.process.gone:
                self._shared[place] = None
                await self._ended(shared)
            if self._shared[place] is None:
                self._shared[place] = await self._opened()
            shared = self._shared[place]
        assert shared is not None
        yield shared

    async def _opened(self) -> _Sandbox:
        process = await self._apart(lambda: AgentProcess(self._source, self._settings), unwanted=AgentProcess.kill)
        agents = 1 if self._source.command is not None else self._source.processes
        return _Sandbox(process, Endpoint(self._source.model, process.listener, agents, self._notes))

    async def _ended(self, sandbox: _Sandbox) -> None:
        await self._apart(sandbox.process.kill)
        await sandbox.endpoint.close()

    async def _apart(self, work: Callable[..., Any], *given: Any, unwanted: Callable[[Any], object] = lambda _: None) -> Any:
        """Return `work(*given)`, called in a thread of the pool. If this is cancelled meanwhile, `unwanted` gets what it returns."""
        doing = asyncio.get_running_loop().run_in_executor(self._threads, work, *given)
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            await asyncio.wait([doing])
            if doing.exception() is None:
                unwanted(doing.result())
            raise
        except Gone as gone:
            raise EnvironmentFailed(str(gone)) from None

    async def _outcome(self, own_end: socket.socket, session: Session) -> bytes:
        """Wait for the agent's outcome; empty if it died."""
        reading, flooded = asyncio.create_task(_line(own_end)), asyncio.create_task(session.flooded.wait())
        try:
            while not reading.done():
                left = self._settings.step_s - session.idle()
                if left <= 0:
                    raise EnvironmentFailed("timeout")
                await asyncio.wait({reading, flooded}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if flooded.done():
                    raise EnvironmentFailed(f"flood: more than {MOST_REFUSED} of its requests were refused")
            return reading.result()
        finally:
            for task in (reading, flooded):
                task.cancel()

    def _read(self, outcome: bytes, how: str) -> Turn:
        if not outcome:
            raise EnvironmentFailed(f"worker died: {how}")
        try:
            read = json.loads(outcome)
        except (ValueError, RecursionError):
            read = None
        match read:
            case ["failed", str(text)]:
                raise EnvironmentFailed(printable(text))
            case ["returned", value]:
                return self._turn(value)
        raise EnvironmentFailed(NO_ANSWER)

    def _turn(self, value: Any) -> Turn:
        info = value if isinstance(value, dict) else {"reward": value}
        reward = info.get("reward")
        if not self._source.rewards:
            reward = 0.0 if reward is None else reward
        try:
            reward, numbers = read_numbers(reward, {name: number for name, number in info.items() if name != "reward"})
        except ProtocolFault as fault:
            raise EnvironmentFailed(printable(f"bad return: {str(fault).removeprefix('step returned ')}")) from None
        return Turn(None, reward, True, {printable(name): number for name, number in numbers.items()})

    def close(self) -> None:
        """End every agent. Can be called twice."""
        for sandbox in self._shared:
            if sandbox is not None:
                sandbox.process.kill()
                sandbox.endpoint.stop()
        self._shared = [None] * len(self._shared)
        self._threads.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class _Sandbox:
    """A sandbox and the endpoint that its agents reach."""

    process: AgentProcess
    endpoint: Endpoint


class AgentProcess(AskedProcess):
    """A sandboxed process that starts agents. Its methods block.

    Args:
        source: the agent.
        settings: the `environment` section.
    """

    def __init__(self, source: AgentEnvironment, settings: EnvironmentSettings) -> None:
        own, first, sandbox = code_of(source), source.model_dump(), settings.sandbox
        if source.command is not None:
            files = {word: Path(word).absolute() for word in source.command if Path(word).exists()}
            first["command"] = [str(files.get(word, word)) for word in source.command]
            sandbox = sandbox.model_copy(update={"readable": [*sandbox.readable, *files.values()]})
        self.gone = False
        self._lock = threading.Lock()
        super().__init__(WORKER, first, settings.step_s, sandbox, own)
        try:
            self.listener = socket.socket(fileno=self._sandboxed.channel.receive_descriptor(START_S))
        except (EOFError, ConnectionError, TimeoutError, BadMessage):
            death = self._sandboxed.death()
            self.kill()
            raise Gone(death) from None
        try:
            self.wait_ready()
        except BaseException:
            self.listener.close()
            self.kill()
            raise

    def start(self, outcome: int, number: int, seed: int, task: dict[str, Any] | None, key: str) -> None:
        """Start the agent of an episode. `outcome`: the descriptor to which it writes its outcome. Raises Gone."""
        with self._lock, self._marked():
            if self.asked(("start", number, seed, task, key)) != ["send"]:
                raise Gone(NO_ANSWER)
            with suppress(ConnectionError):
                self._sandboxed.channel.send_descriptor(outcome)
            if self.receive(START_S) != ["started"]:
                raise Gone(NO_ANSWER)

    def end(self, number: int) -> str:
        """End the agent of an episode, and say how it ended if that was before."""
        with self._lock, suppress(Gone), self._marked():
            match self.asked(("end", number)):
                case ["ended", str(how)]:
                    return printable(how)
            raise Gone(NO_ANSWER)
        return "with its sandbox"

    @contextmanager
    def _marked(self) -> Iterator[None]:
        """Note that the process cannot be used any more if something goes wrong."""
        try:
            if self.gone:
                raise Gone("worker died: with its sandbox")
            yield
        except BaseException:
            self.gone = True
            raise


async def _line(end: socket.socket) -> bytes:
    """Return the line that an agent writes; what it wrote so far if it ends before, or writes too much."""
    read, loop = bytearray(), asyncio.get_running_loop()
    while not read.endswith(b"\n") and len(read) <= ANSWER_BYTES:
        with suppress(ConnectionError):
            if part := await loop.sock_recv(end, 1 << 16):
                read += part
                continue
        break
    return bytes(read)
