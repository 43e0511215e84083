"""The interface of hosts, which run the environments of episodes, and the choice of a host for `environment.source`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from megarl.config import (
    AgentEnvironment,
    CommandContainers,
    EnvironmentSettings,
    HttpEnvironment,
    LocalContainers,
    SandboxSettings,
    SoftwareEnvironment,
    ToolsEnvironment,
)
from megarl.data.calls import JSON, Calls
from megarl.data.tokenizer import first_line
from megarl.environments.processes import ProcessHost, code_of
from megarl.environments.protocol import EnvironmentFailed, Turn
from megarl.errors import Absent
from megarl.sandbox import process
from megarl.sandbox.level import Level, level

if TYPE_CHECKING:
    from megarl.environments.agents.host import AgentHost

Rendered = TypeVar("Rendered")


class Episode(Protocol):
    """One episode, as the run uses it. Each method returns or raises EnvironmentFailed in bounded time."""

    async def reset(self, seed: int, task: dict[str, Any] | None) -> Turn:
        """Begin the episode; must be called first. The same seed begins the same episode.

        Args:
            seed: the seed of the episode.
            task: the data's prompt, {"prompt", "answer", "meta"}; None if it has none.

        Returns:
            The opening. Without messages, the data's prompt is used as it is.

        Raises:
            EnvironmentFailed: the environment failed or exceeded its time limit.
        """
        ...

    async def step(self, text: str, tokens: Sequence[int], finished: bool) -> Turn:
        """Return the environment's answer to a turn of the policy.

        Args:
            text: the text of the turn.
            tokens: its tokens.
            finished: whether the turn ended by itself, not by the length limit.

        Raises:
            EnvironmentFailed: the environment failed or exceeded its time limit.
        """
        ...

    async def close(self) -> None:
        """End the episode; must be called last, even after a failure."""


class Host(Protocol):
    """Runs the environments of many episodes."""

    def open(self) -> Episode:
        """Return a new episode."""
        ...

    def close(self) -> None:
        """End everything that it has started. Can be called twice."""


def host_of(settings: EnvironmentSettings, calls: Calls) -> Host | AgentHost:
    """Return the host of `settings.source`, agent or environment; see `open_host`. It starts processes as needed."""
    return agent_host(settings) if isinstance(settings.source, AgentEnvironment) else open_host(settings, calls)


def agent_host(settings: EnvironmentSettings) -> AgentHost:
    """Return the host of `settings.source`, an agent."""
    from megarl.environments.agents.host import AgentHost

    process.check(settings.sandbox, "environment.sandbox")
    check_reach(settings.sandbox)
    return AgentHost(settings)


def open_host(settings: EnvironmentSettings, calls: Calls = JSON) -> Host:
    """Return the host of `settings.source`, with at most `settings.max_concurrent` concurrent episodes. It starts processes as needed.

    Args:
        settings: the `environment` section.
        calls: how the model calls tools.
    """
    host = _host(settings, calls)
    return host if settings.max_concurrent is None else BoundedHost(host, settings.max_concurrent)


def _host(settings: EnvironmentSettings, calls: Calls) -> Host:
    if isinstance(settings.source, HttpEnvironment):
        from megarl.environments.http import HttpHost

        return HttpHost(settings.source, settings.step_s)
    if isinstance(settings.source, SoftwareEnvironment):
        from megarl.environments.software.host import SoftwareHost

        check_containers(settings)
        return SoftwareHost(settings, calls)
    process.check(settings.sandbox, "environment.sandbox")  # again, since an engine may be restarted on another machine
    if isinstance(settings.source, ToolsEnvironment):
        from megarl.environments.tools import ToolsHost

        return ToolsHost(settings, calls)
    return ProcessHost(settings)


def check_containers(settings: EnvironmentSettings) -> None:
    """Raise Absent if this machine has not what the containers of `settings.source`, a SoftwareEnvironment, need."""
    assert isinstance(settings.source, SoftwareEnvironment)
    kind = settings.source.containers
    if isinstance(kind, LocalContainers):
        process.check(settings.sandbox, "environment.sandbox")
    elif isinstance(kind, CommandContainers):
        from megarl.environments.containers.commands import program

        program(kind)
    else:
        from megarl.environments.containers import hosted

        hosted.check()


def guarantee(settings: EnvironmentSettings) -> str | None:
    """Describe for the console how the processes of `settings.source` are isolated on this machine; None if megarl starts none.

    Raises ConfigError if the machine cannot isolate them as well as the settings require.
    """
    if isinstance(settings.source, HttpEnvironment):
        return None
    if isinstance(settings.source, SoftwareEnvironment) and not isinstance(settings.source.containers, LocalContainers):
        return None
    if isinstance(settings.source, AgentEnvironment):
        check_reach(settings.sandbox)
    return process.guarantee(settings.sandbox, "environment.sandbox", code_of(settings.source))


def check_reach(sandbox: SandboxSettings) -> None:
    """Raise Absent if an agent could not reach the endpoint on this machine."""
    if level() < Level.NAMESPACES and not sandbox.network:
        raise Absent(
            f"environment.sandbox.network=false: agents ask over a loopback address, which a sandbox of level {level()} does not have: "
            "set it to true, or allow namespaces (megarl/sandbox/README.md)"
        )


class BoundedHost:
    """Limits a host to `most` episodes at a time, from `reset` to `close`; further episodes wait in order of arrival."""

    def __init__(self, host: Host, most: int) -> None:
        self._host, self._room = host, asyncio.Semaphore(most)

    def open(self) -> Episode:
        """Return a new episode, whose `reset` waits until the limit allows it."""
        return _BoundedEpisode(self._host.open(), self._room)

    def close(self) -> None:
        """End everything that the host has started. Can be called twice."""
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


def in_tokens(render: Callable[..., Rendered], *arguments: Any) -> Rendered:
    """Return `render(*arguments)`, of an environment's messages. Raises EnvironmentFailed if the chat template cannot render them."""
    try:
        return render(*arguments)
    except Exception as error:  # a template may raise anything, for example for an unknown role
        raise EnvironmentFailed(f"bad return: the model's chat template refuses it: {first_line(error)}") from None
