"""Play episodes on a server of the user's, which can be any program with this protocol, such as `python -m megarl.environments.server`.

    POST <url>/reset    {"seed": 7, "task": null} -> {"episode": "a1", "observation": "12-42"}
    POST <url>/step     {"episode": "a1", "text": "27", "tokens": [..], "finished": true}
         -> {"observation": "28-42", "reward": 0, "done": false}
    POST <url>/close    {"episode": "a1"} -> {}

Headers: Content-Type: application/json and, if token_env is set, Authorization: Bearer <token>. An observation is a text or a list of
chat messages, whose contents are texts or lists of parts, an image as a data URL; without one in the answer to a reset, the data's prompt
is used as it is. The answer to a step may contain "info", a dictionary of numbers. An invalid or late answer ends the episode; requests
are never repeated, since a step has side effects.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from megarl.config import HttpEnvironment
from megarl.environments.protocol import EnvironmentFailed, ProtocolFault, Turn, read_reset, read_step
from megarl.host.http_client import connected, target, token_of
from megarl.text.display import printable

MAX_BYTES = 1 << 20  # maximum size of an answer
CLOSE_S = 5.0  # for a /close to be answered; nothing depends on it
SHOWN = 200  # bytes of the body that are quoted with an error status
TOKEN_KEY = "environment.source.token_env"


class HttpHost:
    """Sends requests to the server, at most `source.connections` at a time."""

    def __init__(self, source: HttpEnvironment, step_s: float) -> None:
        self._source, self._step_s = source, step_s
        token = token_of(source.token_env, TOKEN_KEY)
        self._headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
        self._threads = ThreadPoolExecutor(source.connections, thread_name_prefix="environments")
        self._warned = False

    def open(self) -> HttpEpisode:
        """Return a new episode."""
        return HttpEpisode(self)

    async def ask(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request to /`what` and return the answer, a JSON object. Raises EnvironmentFailed if there is no valid one."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._ask, what, json.dumps(body).encode(), self._step_s)

    async def ask_to_close(self, episode: Any) -> None:
        """Send a request to /close, and wait up to CLOSE_S for the answer: a server that is late with it holds up no other episode.

        It is still sent if it has to wait longer for its turn. The first that fails is told on stderr, the others are not.
        """
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._close, json.dumps({"episode": episode}).encode())
        await asyncio.wait([work], timeout=CLOSE_S)

    def _close(self, body: bytes) -> None:
        try:
            self._ask("close", body, min(self._step_s, CLOSE_S))
        except EnvironmentFailed as fault:
            if not self._warned:
                self._warned = True
                print(f"megarl: warning: environment.source.url={self._source.url}: /close: {fault}", file=sys.stderr, flush=True)

    def _ask(self, what: str, body: bytes, within_s: float) -> dict[str, Any]:
        place = urlsplit(f"{self._source.url.rstrip('/')}/{what}")
        try:
            with connected(place, within_s) as connection:
                connection.request("POST", target(place), body, self._headers)
                answer = connection.getresponse()
                read = answer.read(MAX_BYTES + 1)
        except TimeoutError:
            raise EnvironmentFailed("timeout") from None
        except (OSError, http.client.HTTPException) as error:
            raise EnvironmentFailed(printable(f"no answer: {type(error).__name__}: {error}")) from None
        if not 200 <= answer.status < 300:
            raise EnvironmentFailed(printable(f"status {answer.status}: {read[:SHOWN].decode(errors='replace')}"))
        if len(read) > MAX_BYTES:
            raise EnvironmentFailed(f"bad return: /{what} answered more than {MAX_BYTES} bytes")
        try:
            fields = json.loads(read)
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise EnvironmentFailed(f"bad return: /{what} answered {read[:80]!r}, not a JSON object")
        return fields

    def close(self) -> None:
        """Cancel queued requests, without waiting for those in progress. Can be called twice."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class HttpEpisode:
    """One episode; see `hosts.Episode`."""

    def __init__(self, host: HttpHost) -> None:
        self._host, self._episode = host, None

    async def reset(self, seed: int, task: dict[str, Any] | None) -> Turn:
        """Begin the episode on the server and return its opening."""
        answer = await self._host.ask("reset", {"seed": seed, "task": task})
        self._episode = answer.get("episode")
        if self._episode is None:
            raise EnvironmentFailed("bad return: /reset answered without 'episode'")
        return _read(lambda: read_reset(answer.get("observation")))

    async def step(self, text: str, tokens: Sequence[int], finished: bool) -> Turn:
        """Return the server's answer to a turn."""
        body = {"episode": self._episode, "text": text, "tokens": list(tokens), "finished": finished}
        answer = await self._host.ask("step", body)
        fields = (answer.get("observation"), answer.get("reward"), answer.get("done"), answer.get("info") or {})
        return _read(lambda: read_step(fields))

    async def close(self) -> None:
        """Tell the server that the episode is over; its answer changes nothing."""
        if self._episode is not None:
            await self._host.ask_to_close(self._episode)


def _read(reading: Any) -> Turn:
    try:
        return reading()
    except ProtocolFault as fault:
        raise EnvironmentFailed(printable(f"bad return: {fault}")) from None


def check(source: HttpEnvironment) -> None:
    """Raise ConfigError if the token is missing or invalid."""
    token_of(source.token_env, TOKEN_KEY)
