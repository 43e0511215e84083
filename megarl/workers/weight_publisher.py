"""Transfer of new weights from rank 0 to the engines: control calls go through Ray, the bytes through the sender's transport."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from megarl.cluster.actor_group import raise_cause
from megarl.config import SyncSettings
from megarl.observe.metrics import Last, Metric
from megarl.sync.fingerprint import Fingerprinter, check
from megarl.sync.send import Sender


class WeightPublisher:
    """Rank 0's connection to the engines.

    Args:
        engines: the engines' actors.
        workers_per_engine: the processes of each engine that hold weights.
        settings: the section `sync`.
        host: the address at which the engines reach this process.
        device: this rank's device.
        relay: whether the engines share the devices of several ranks (see `Sender`); the first engine shares this rank's.
    """

    def __init__(
        self, engines: Sequence[Any], workers_per_engine: int, settings: SyncSettings, host: str, device: torch.device, *, relay: bool
    ) -> None:
        self._engines, self._per_engine, self._settings = engines, workers_per_engine, settings
        self._sender = Sender(
            settings.transport,
            workers=len(engines) * workers_per_engine,
            host=host,
            bucket_mb=settings.most_bucket_mb,
            timeout_s=settings.timeout_s,
            device=device,
            relay=relay,
        )
        self._sender.connect(self._meet)

    def reaches(self, engines: Sequence[Any]) -> bool:
        """Whether it is connected to exactly these engines."""
        return [engine._actor_id for engine in engines] == [engine._actor_id for engine in self._engines]

    def publish(self, stream: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Metric]:
        """Send the whole stream to every engine, which then uses the weights as `version`; return metrics of the transfer.

        With `sync.verify`, raises FingerprintMismatch, which names the tensors whose bits in an engine differ from those exported, or
        FloatingPointError, which names those that are not finite. Also raises whatever an engine or the transport raised.
        """
        begun, timeout_s = time.perf_counter(), self._settings.timeout_s
        prints = Fingerprinter()
        self._all("start_update", timeout_s)()
        sent = self._sender.send(
            stream, lambda header: self._all("load_bucket", header, timeout_s), prints.add if self._settings.verify else None
        )
        self._all("finish_update", version, timeout_s)()
        moved = time.perf_counter()
        if self._settings.verify:
            mine = prints.digest()
            for index, theirs in enumerate(self._all("fingerprints", timeout_s)()):
                check(mine, theirs, f"engine {index}")
        return {
            "sync/tensors": Last(sent.tensors),
            "sync/mb": Last(sent.nbytes / 2**20),
            "timing_s/sync_move": Last(moved - begun),
            "timing_s/sync_verify": Last(time.perf_counter() - moved),
        }

    def _all(self, method: str, *arguments: Any) -> Callable[[], list[Any]]:
        """Start a call on every engine; the returned function waits for all of them."""
        references = [getattr(engine, method).remote(*arguments) for engine in self._engines]
        return lambda: self._wait(references, method)

    def _meet(self, rendezvous: dict[str, Any]) -> Callable[[], object]:
        references = [
            engine.connect.remote(rendezvous, self._sender.first_rank + index * self._per_engine)
            for index, engine in enumerate(self._engines)
        ]
        return lambda: self._wait(references, "connect")

    def _wait(self, references: list[Any], doing: str) -> list[Any]:
        """Wait for the engines' answers. Raise what the first failing engine raised, naming the engine if it died or is late."""
        deadline, answers = time.monotonic() + self._settings.timeout_s, []
        for index, reference in enumerate(references):
            try:
                answers.append(ray.get(reference, timeout=max(0.0, deadline - time.monotonic())))
            except RayError as error:
                raise_cause(error, f"engine {index}", f"sync ({doing})")
        return answers
