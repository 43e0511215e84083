"""Environments of OpenEnv: its servers, through its client (`pip install openenv==0.10.0`, in an environment of its own).

    python -m megarl.environments.server megarl.environments.hubs.openenv:OpenEnv      # there, with OPENENV_URL set
    environment: {source: {type: http, url: "http://127.0.0.1:8000"}}

An action is JSON, or a text for the only field that the server's schema requires. This module needs nothing of megarl.
"""

import importlib
import json
import os
import urllib.request
from collections.abc import Sequence
from typing import Any

try:
    openenv: Any = importlib.import_module("openenv")
except ImportError as error:
    raise ImportError(f"OpenEnv's package is missing: {error} (pip install openenv==0.10.0)") from None

SCHEMA_S = 30.0


class OpenEnv:
    """One episode.

    Args:
        url: the server's address; None: the variable OPENENV_URL.
        reset: further arguments of the environment's `reset`.
        shown: the field of an observation that the policy reads; None: the whole of it, as JSON.
    """

    def __init__(self, url: str | None = None, reset: dict[str, Any] | None = None, shown: str | None = None) -> None:
        self._url = (url or os.environ["OPENENV_URL"]).rstrip("/")
        self._arguments, self._shown = reset or {}, shown or os.environ.get("OPENENV_SHOWN")
        self._client = openenv.GenericEnvClient(base_url=self._url).sync()

    def reset(self, seed: int) -> str:
        """Begin an episode. Environments that draw nothing take no seed."""
        with urllib.request.urlopen(f"{self._url}/schema", timeout=SCHEMA_S) as answer:
            self._required = json.load(answer)["action"].get("required", [])
        self._client.connect()
        return self._read(self._client.reset(seed=seed, **self._arguments).observation)

    def step(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[str, float, bool]:
        """Take the action that a turn writes. One that the server does not take costs nothing, and is told."""
        try:
            result = self._client.step(self._action(text.strip()))
        except (ValueError, RuntimeError) as error:
            return f"error: {error}"[:500], 0.0, False
        return self._read(result.observation), float(result.reward or 0.0), bool(result.done)

    def close(self) -> None:
        """End the session."""
        self._client.close()

    def _action(self, text: str) -> dict[str, Any]:
        try:
            action = json.loads(text)
        except ValueError:
            action = text
        if isinstance(action, dict):
            return action
        if len(self._required) != 1:
            raise ValueError(f"an action is JSON with the fields {', '.join(self._required)}")
        return {self._required[0]: text}

    def _read(self, observation: dict[str, Any]) -> str:
        return str(observation[self._shown]) if self._shown else json.dumps(observation, ensure_ascii=False)
