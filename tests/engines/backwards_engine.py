"""A second engine, as small as one can be: it answers a prompt with the prompt's tokens backwards."""

import asyncio
import os
import time
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import torch

from megarl.batch import Sample, VersionSpan
from megarl.config import ConfigError, RolloutSettings, Section
from megarl.engines.engine import Engine, Finished, Meeting, Request, RequestId, Setup
from megarl.models.description import ModelDescription
from megarl.sync.fingerprint import Fingerprinter, Print
from megarl.sync.receive import BucketReceiver
from megarl.sync.wire import Header

PLACE = "tests.engines.backwards_engine:BackwardsEngine"
STUCK = 2  # a prompt that begins with this token is never answered


class BackwardsSettings(Section):
    type: Literal["backwards"] = "backwards"


class BackwardsEngine(Engine):
    """Finishes one request at a call, the shortest prompt first. Of its weights it keeps the fingerprints."""

    def __init__(self, label: str) -> None:
        self.label, self.open, self.version = label, dict[RequestId, Request](), 0
        self._aborted: set[RequestId] = set()

    @staticmethod
    def check(model: ModelDescription, dtype: str, settings: RolloutSettings, *, gpu: bool) -> None:
        if settings.tp > 1:
            raise ConfigError(f"rollout.tp={settings.tp}: the engine has one worker")

    async def start(self, setup: Setup, meeting: Meeting | None = None) -> list[int]:
        return [os.getpid()]

    def check_health(self) -> None:
        pass

    def lose(self, why: str) -> None:
        pass

    async def ping(self, timeout_s: float) -> None:
        pass

    async def submit(self, requests: Sequence[Request], timeout_s: float) -> None:
        self.open |= {request.id: request for request in requests}

    async def receive(self, timeout_s: float) -> list[Finished]:
        deadline = time.monotonic() + timeout_s
        while not (ready := [one for one in self.open.values() if one.id in self._aborted or one.tokens[0] != STUCK]):
            if time.monotonic() > deadline:
                return []
            await asyncio.sleep(0.005)
        request = self.open.pop(min(ready, key=lambda one: len(one.tokens)).id)
        response = [] if request.id in self._aborted else self.response(request)[: request.max_tokens]
        tokens = np.array([*request.tokens, *response], dtype=np.int32)
        reason = "stop" if response else "abort"
        return [
            Finished(
                request.id,
                Sample(tokens, len(request.tokens), np.zeros(len(response), np.float32), reason, (VersionSpan(0, self.version),)),
            )
        ]

    def response(self, request: Request) -> list[int]:
        """The tokens of an answer."""
        return request.tokens[::-1]

    async def abort(self, ids: Iterable[RequestId], timeout_s: float) -> None:
        self._aborted |= set(ids)

    async def start_update(self, timeout_s: float) -> None:
        self._buckets, self._prints = BucketReceiver(torch.device("cpu")), Fingerprinter()

    async def load_buckets(self, headers: list[dict[str, Any]], timeout_s: float) -> None:
        for name, tensor in self._buckets.receive([Header.parse(header) for header in headers]):
            self._prints.add(name, tensor)

    async def finish_update(self, version: int, timeout_s: float) -> None:
        self.version = version

    async def fingerprints(self, timeout_s: float) -> dict[str, list[Print]]:
        return {name: [value] for name, value in self._prints.digest().items()}

    async def close(self) -> None:
        pass
