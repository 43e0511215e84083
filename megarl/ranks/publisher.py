"""Transfer of new weights to the engines: control calls go through Ray, the bytes through the senders' transport."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from torch import Tensor

from megarl.cluster.actor_group import raise_cause
from megarl.config import SyncSettings
from megarl.observe.metrics import Last, Mean, Metric
from megarl.sync.fingerprint import Fingerprinter, Print, check
from megarl.sync.send import Sender, Sent
from megarl.sync.senders import SenderRounds, SenderStopped


@dataclass(frozen=True)
class SenderReport:
    """The last message of a further sender to rank 0: what it has sent. It travels as JSON."""

    tensors: int
    nbytes: int
    elements: int
    changed: int
    prints: list[tuple[str, int, int]]  # name, value and number of elements of each fingerprint
    fault: str | None  # names the tensors that are not finite


class Publisher:
    """A rank's connection to the engines. Every sender has one, and makes and uses it at the same time as the others.

    Args:
        engines: the engines' actors.
        workers_per_engine: the processes of each engine that hold weights.
        settings: the section `sync`.
        host: the address at which the engines reach this process.
        device: this rank's device.
        rounds: this sender's part in the rounds of all.
        relay: the engine worker, counted through all engines, that shares this rank's device; None: the engines have their own.
        drafts: the engines draft, and say how many drafts they have accepted.
    """

    def __init__(
        self,
        engines: Sequence[Any],
        workers_per_engine: int,
        settings: SyncSettings,
        host: str,
        device: torch.device,
        rounds: SenderRounds,
        *,
        relay: int | None,
        drafts: bool = False,
    ) -> None:
        self._drafts = drafts
        self._engines, self._per_engine, self._settings, self._rounds = engines, workers_per_engine, settings, rounds
        rounds.begin()
        try:
            self._sender = Sender(
                settings.transport,
                workers=len(engines) * workers_per_engine,
                host=host,
                bucket_mb=settings.most_bucket_mb,
                timeout_s=settings.timeout_s,
                device=device,
                relay=relay,
                number=rounds.sender,
                senders=rounds.senders,
                delta=settings.delta,
            )
            self._connect()
        except BaseException as error:
            rounds.fail(str(error))
            raise

    def reaches(self, engines: Sequence[Any]) -> bool:
        """Whether it is connected to exactly these engines."""
        return [engine._actor_id for engine in engines] == [engine._actor_id for engine in self._engines]

    def publish(self, stream: Iterable[tuple[str, Tensor]], version: int) -> dict[str, Metric]:
        """Send the stream to every engine, which then uses the weights of all senders as `version`; return metrics of the transfer.

        With `sync.verify`, raises FingerprintMismatch, which names the tensors whose bits in an engine differ from those exported, or
        FloatingPointError, which names those that are not finite. Also raises whatever an engine or the transport raised;
        and SenderStopped if another sender has raised.
        """
        self._rounds.begin()
        try:
            return self._publish(stream, version, Fingerprinter())
        except SenderStopped:
            self._sender.close()
            raise
        except BaseException as error:
            self._rounds.fail(str(error))
            raise

    def _connect(self) -> None:
        raise NotImplementedError

    def _publish(self, stream: Iterable[tuple[str, Tensor]], version: int, prints: Fingerprinter) -> dict[str, Metric]:
        raise NotImplementedError


class FurtherPublisher(Publisher):
    """A sender other than rank 0: sends its stage's weights, or a part of its experts, of which rank 0 tells the engines."""

    def _connect(self) -> None:
        self._sender.connect(self._rounds.offer)
        self._rounds.leave(None)

    def _publish(self, stream: Iterable[tuple[str, Tensor]], version: int, prints: Fingerprinter) -> dict[str, Metric]:
        sent = self._sender.send(stream, self._rounds.offer, prints.add if self._settings.verify else None, version)
        fault: FloatingPointError | None = None
        expected = list[tuple[str, int, int]]()
        try:
            expected = [(name, one.value, one.numel) for name, one in prints.digest().items()]
        except FloatingPointError as error:  # raised once the engines have a whole update
            fault = error
        report = SenderReport(sent.tensors, sent.nbytes, sent.elements, sent.changed, expected, None if fault is None else str(fault))
        self._rounds.leave(vars(report))
        if fault is not None:
            raise fault
        return {}


class WeightPublisher(Publisher):
    """Rank 0's connection: it sends its own part of the weights, or all of them, and makes the calls to the engines."""

    def _connect(self) -> None:
        self._sender.connect(self._meet)
        further = self._rounds.gathered()
        assert not further, "each sender has one meeting"
        self._rounds.end()

    def _publish(self, stream: Iterable[tuple[str, Tensor]], version: int, prints: Fingerprinter) -> dict[str, Metric]:
        begun, timeout_s, overlap = time.perf_counter(), self._settings.timeout_s, self._settings.overlap
        if not overlap:
            self._all("start_update", timeout_s)()
        sent = self._sender.send(stream, self._load, prints.add if self._settings.verify else None, version)
        while headers := self._rounds.gathered():  # other senders may have more
            self._load_all(headers)()
        paused = begun
        if overlap:
            paused = time.perf_counter()
            self._all("start_update", timeout_s)()
            self._all("load_received", timeout_s)()
        self._all("finish_update", version, timeout_s)()
        moved, accepted = time.perf_counter(), dict[str, Metric]()
        if self._drafts:
            counts = self._all("drafted", timeout_s)()
            accepted["rollout/draft_accepted"] = Mean(float(sum(one for _, one in counts)), float(sum(drafted for drafted, _ in counts)))
        expected = prints.digest()
        reports = [SenderReport(**message) for message in self._rounds.last]
        for report in reports:
            expected |= {name: Print(value, numel) for name, value, numel in report.prints}
            if report.fault is not None:
                raise FloatingPointError(report.fault)
        if self._settings.verify:
            for index, engine_prints in enumerate(self._all("fingerprints", timeout_s)()):
                check(expected, engine_prints, f"engine {index}")
        self._rounds.end()
        all_sent: list[Sent | SenderReport] = [sent, *reports]
        return {
            "sync/senders": Last(self._rounds.senders),
            "sync/tensors": Last(sum(one.tensors for one in all_sent)),
            "sync/mb": Last(sum(one.nbytes for one in all_sent) / 2**20),
            "sync/sent_frac": Last(sum(one.changed for one in all_sent) / max(1, sum(one.elements for one in all_sent))),
            "timing_s/sync_move": Last(moved - begun),
            "timing_s/sync_pause": Last(moved - paused),  # a part of it: from the pause of the engines' work to its end
            "timing_s/sync_verify": Last(time.perf_counter() - moved),
            **accepted,
        }

    def _load(self, header: dict[str, Any]) -> Callable[[], object]:
        """Announce this rank's bucket, with those that the other senders send in the same round."""
        return self._load_all([header, *self._rounds.gathered()])

    def _load_all(self, headers: list[dict[str, Any]]) -> Callable[[], object]:
        return self._settled(self._all("receive_buckets" if self._settings.overlap else "load_buckets", headers, self._settings.timeout_s))

    def _settled(self, done: Callable[[], object]) -> Callable[[], object]:
        """Let the other senders know that the engines have been told of something, and when they have done it."""
        self._rounds.told()

        def settle() -> None:
            done()
            self._rounds.settle()

        return settle

    def _all(self, method: str, *arguments: Any) -> Callable[[], list[Any]]:
        """Start a call on every engine; the returned function waits for all of them."""
        references = [getattr(engine, method).remote(*arguments) for engine in self._engines]
        return lambda: self._wait(references, method)

    def _meet(self, rendezvous: dict[str, Any]) -> Callable[[], object]:
        meetings = [rendezvous, *self._rounds.gathered()]
        references = [
            engine.connect.remote(meetings, self._sender.first_rank + index * self._per_engine)
            for index, engine in enumerate(self._engines)
        ]
        return self._settled(lambda: self._wait(references, "connect"))

    def _wait(self, references: list[Any], doing: str) -> list[Any]:
        return waited(references, doing, self._settings.timeout_s)


def waited(references: list[Any], doing: str, timeout_s: float) -> list[Any]:
    """Wait for the engines' answers.

    Args:
        references: to the answers, engine by engine.
        doing: names the call in errors.
        timeout_s: time limit of all together.

    Raises:
        Exception: what the first failing engine raised, with the engine's name if it died or is late.
    """
    deadline, answers = time.monotonic() + timeout_s, []
    for index, reference in enumerate(references):
        try:
            answers.append(ray.get(reference, timeout=max(0.0, deadline - time.monotonic())))
        except RayError as error:
            raise_cause(error, f"engine {index}", f"sync ({doing})")
    return answers
