"""The seam between megarl and a rollout engine: what every engine takes, gives and raises.

An engine holds one replica of the policy and answers requests with sampled responses. `megarl.rollout.registry` names the engines that
there are; `megarl.rollout.generate` answers a whole list of prompts with any of them. This file imports neither an engine nor Ray.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from megarl.batch import Sample
from megarl.config import RolloutSettings

if TYPE_CHECKING:
    from megarl.sync.fingerprint import Print

RequestId = Hashable
Part = Literal["weights", "kv_cache"]  # of what an engine holds on its device


@dataclass(frozen=True)
class Request:
    """One response that is wanted. Its log-probs are those of the distribution that was sampled: temperature and cuts included."""

    id: RequestId  # the caller's name for it, unique among the engine's unfinished requests
    tokens: list[int]  # the prompt
    max_tokens: int  # longest response
    temperature: float  # 0: greedy
    seed: int  # of the response's own random draws; 63 bits
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    stop_token_ids: Sequence[int] = ()  # end the response, beside the model's end token
    stop: Sequence[str] = ()  # texts that do; the response ends with the token that completes one
    by_position: bool = False  # each token is drawn by the seed and its own position: with what was drawn as the prompt, the rest follows
    experts_from: int = 0  # `Sample.routed_experts` begins with those of this token of the prompt


@dataclass(frozen=True)
class Finished:
    """The response to a request, as far as it got: `sample.finish_reason` says why it ended, "abort" where the caller ended it."""

    id: RequestId
    sample: Sample


class RolloutError(RuntimeError):
    """The rollout side failed; the message names the engine."""


class EngineDead(RolloutError):
    """A process of the engine has ended. Every pending and every later call raises this."""


class RolloutTimeout(RolloutError):
    """A call took longer than its limit; the message says what is late."""


class WeightSyncError(RolloutError):
    """A weight update was refused; the message names the tensor. The engine generates no more until an update has succeeded."""


class Engine(Protocol):
    """One replica. `start` comes first. Every later call may raise EngineDead, and RolloutTimeout where it takes longer than `timeout_s`.

    Every request that `submit` has taken comes out of `receive` exactly once, whatever ended it. New weights come between requests:
    `start_update`, `load_bucket` as often as there are buckets, `finish_update`. With `rollout.mode=free` they come while requests are
    unfinished: these wait, go on from the new weights alone, and their samples say which token was the first of which version.
    """

    label: str  # begins the messages of its errors
    reports_experts: ClassVar[bool] = False  # it can fill `Sample.routed_experts`; without it runs of a mixture need routing.sample=0

    def __init__(self, label: str) -> None: ...

    @staticmethod
    def check(hf: Mapping[str, Any], dtype: str, settings: RolloutSettings, *, gpu: bool) -> None:
        """Refuses, without starting anything, what an engine could not run.

        Args:
            hf: config.json of the model.
            dtype: of its weights and activations, "float32" or "bfloat16".
            settings: of the engine.
            gpu: whether it has GPUs.

        Raises:
            ConfigError: in one line.
        """

    @staticmethod
    def with_cache(hf: Mapping[str, Any], dtype: str, settings: RolloutSettings, most_mb: int) -> RolloutSettings:
        """Sizes the cache of a CPU engine, where the user has not.

        Args:
            hf: config.json of the model.
            dtype: of its weights and activations.
            settings: of the engine.
            most_mb: for all sequences that run at once; a single one gets more where it needs it.

        Returns:
            The settings with that cache; of an engine that needs none, as they are.
        """
        return settings

    async def start(
        self,
        model: Path,
        dtype: str,
        settings: RolloutSettings,
        seed: int,
        *,
        gpu: bool,
        report_experts: bool = False,
        sleeps: bool = False,
        blank: bool = False,
    ) -> list[int]:
        """Loads a model and returns when the engine can answer.

        Args:
            model: a Hugging Face directory.
            dtype: of weights and activations, "float32" or "bfloat16".
            settings: of the engine.
            seed: of what no request's own seed decides.
            gpu: whether the engine has GPUs.
            report_experts: its samples are to have `routed_experts` where the model has experts. Only where `reports_experts` says that
                they can.
            sleeps: `sleep` will be called.
            blank: the directory's weights are not read; an update must bring some before the first request.

        Returns:
            The ids of its processes.

        Raises:
            ConfigError: as `check` does.
            RolloutError: the engine does not start.
        """
        ...

    def check_health(self) -> None:
        """Raises EngineDead where a process of the engine has ended or `close` was called, RolloutError where it failed in another way."""

    async def ping(self, timeout_s: float) -> None:
        """Returns when every process of the engine has answered."""

    async def submit(self, requests: Sequence[Request], timeout_s: float) -> None:
        """Takes requests, all or none.

        An idle engine works on none before all are taken, so that the same requests get the same responses, bit for bit. Raises
        ValueError for a request that does not fit or whose id is in use, WeightSyncError between the start and the end of an update.
        """

    async def receive(self, timeout_s: float) -> list[Finished]:
        """What has finished since the last call, in the order in which it did; waits for the first. Empty when the time is over."""
        ...

    async def abort(self, ids: Iterable[RequestId], timeout_s: float) -> None:
        """Ends requests where they are: `receive` gives what they have, with the finish reason "abort". Other ids are passed over."""

    async def sleep(self, timeout_s: float, *, keep_weights: bool) -> None:
        """Leaves the device to others: the cache is dropped, the weights are kept elsewhere or dropped, too.

        Raises RolloutError where requests are unfinished. Until both parts are awake again no request is taken.
        """

    async def wake(self, part: Part, timeout_s: float) -> None:
        """Takes its place on the device again. Weights that were dropped come back with any values: an update must follow."""

    async def connect(self, rendezvous: dict[str, Any], first_rank: int) -> None:
        """Each worker joins the trainer's broadcast group (wire.Rendezvous.plain()); worker w becomes rank `first_rank` + w.

        Over gloo it returns when all members of the group, the trainer too, are there; NCCL's meet in their first broadcast.
        """

    async def start_update(self, timeout_s: float) -> None:
        """Gets ready for buckets, which bring every tensor once. RolloutError where requests are unfinished and may not be."""

    async def load_bucket(self, header: dict[str, Any], timeout_s: float) -> None:
        """Takes one bucket (wire.Header.plain()), sent at the same time. Raises WeightSyncError naming a tensor that does not fit."""

    async def finish_update(self, version: int, timeout_s: float) -> None:
        """Puts the new weights to work under `version`. Raises WeightSyncError naming a tensor that has not come."""

    async def fingerprints(self, timeout_s: float) -> dict[str, list[Print]]:
        """What the engine holds, for `megarl.sync.fingerprint.compare`: per Hugging Face name one entry for each place that holds it."""
        ...

    async def close(self) -> None:
        """Ends every process of the engine and removes its files. May be called twice."""
