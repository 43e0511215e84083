"""Where the environments of a run live: which host each source has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megarl.config import EnvironmentSettings, HttpEnvironment, ToolsEnvironment
from megarl.data.tokenizer import first_line
from megarl.environments.processes import ProcessHost, code_of
from megarl.environments.protocol import EnvironmentFailed, Turn
from megarl.sandbox import process


class Episode(Protocol):
    """One episode, as the run sees it. Each method returns or raises EnvironmentFailed in bounded time."""

    async def reset(self, seed: int, task: dict[str, Any] | None) -> Turn:
        """Comes first; the same seed begins the same episode. Without messages the prompt stands as it is."""
        ...

    async def step(self, text: str, tokens: Sequence[int], finished: bool) -> Turn:
        """The answer to a turn of the policy.

        Args:
            text: what the policy said.
            tokens: the same as tokens.
            finished: it ended by itself, not by the length limit.

        Raises:
            EnvironmentFailed: the environment did, or was late.
        """
        ...

    async def close(self) -> None:
        """Comes last, whatever has happened."""


class Host(Protocol):
    """Holds the environments of many episodes."""

    def open(self) -> Episode:
        """A new episode."""
        ...

    def close(self) -> None:
        """Ends what it has started. Can be called twice."""


def open_host(settings: EnvironmentSettings) -> Host:
    """The host of `settings.source`, which holds `settings.max_concurrent` episodes. Processes are started as they are needed."""
    host = _host(settings)
    return host if settings.max_concurrent is None else BoundedHost(host, settings.max_concurrent)


def _host(settings: EnvironmentSettings) -> Host:
    if isinstance(settings.source, HttpEnvironment):
        from megarl.environments.http import HttpHost

        return HttpHost(settings.source, settings.step_s)
    process.check(settings.sandbox, "environment.sandbox")  # an engine may be started again, on another machine
    if isinstance(settings.source, ToolsEnvironment):
        from megarl.environments.tools import ToolsHost

        return ToolsHost(settings.source, settings)
    return ProcessHost(settings)


def guarantee(settings: EnvironmentSettings) -> str | None:
    """What the processes of `settings.source` are kept from on this machine, for the console; None where it has none here.

    Raises ConfigError where the machine grants less than is asked for.
    """
    if isinstance(settings.source, HttpEnvironment):
        return None
    return process.guarantee(settings.sandbox, "environment.sandbox", code_of(settings.source))


class BoundedHost:
    """Begins an episode only when fewer than so many others have begun and are not closed; those that wait take turns in order."""

    def __init__(self, host: Host, most: int) -> None:
        self._host, self._room = host, asyncio.Semaphore(most)

    def open(self) -> Episode:
        """A new episode, whose `reset` waits for room."""
        return _BoundedEpisode(self._host.open(), self._room)

    def close(self) -> None:
        """Ends what has been started. Can be called twice."""
        self._host.close()


class _BoundedEpisode:
    def __init__(self, episode: Episode, room: asyncio.Semaphore) -> None:
        self._episode, self._room, self._inside = episode, room, False

    async def reset(self, seed: int, task: dict[str, Any] | None) -> Turn:
        await self._room.acquire()
        self._inside = True
        return await self._episode.reset(seed, task)

    async def step(self, text: str, tokens: Sequence[int], finished: bool) -> Turn:
        return await self._episode.step(text, tokens, finished)

    async def close(self) -> None:
        try:
            await self._episode.close()
        finally:
            if self._inside:
                self._inside = False
                self._room.release()


def in_tokens(render: Callable[..., list[int]], *said: Any) -> list[int]:
    """An environment's messages in tokens, by `render`. EnvironmentFailed where the model's template has no way to write them."""
    try:
        return render(*said)
    except Exception as error:  # a template may raise anything, of a role that it does not know for one
        raise EnvironmentFailed(f"bad return: the model's chat template refuses it: {first_line(error)}") from None
