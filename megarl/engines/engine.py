"""The interface between megarl and a rollout engine: what every engine accepts, returns and raises.

An engine holds one replica of the policy and answers requests with sampled responses. `megarl.engines.registry` lists the available
engines; `megarl.engines.generate` answers a whole list of prompts with any of them. This file imports neither an engine nor Ray.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

import numpy as np

from megarl.batch import Sample
from megarl.config import LoraSettings, RolloutSettings, TeacherEngines
from megarl.errors import ConfigError
from megarl.images import PlacedImage

if TYPE_CHECKING:
    from megarl.models.description import ModelDescription
    from megarl.sync.fingerprint import Print

RequestId = Hashable
Part = Literal["weights", "kv_cache"]  # the parts of an engine's device memory
SCORED_TOKENS = 2048  # that a teacher's engine on GPUs computes in a step, since it computes the logits of all of them


@dataclass(frozen=True)
class Request:
    """A request for one response.

    The response's log-probs are those of the distribution it is sampled from: after temperature, top-p, top-k and min-p.
    """

    id: RequestId  # chosen by the caller, unique among the engine's unfinished requests
    tokens: list[int]  # the prompt
    max_tokens: int  # longest response
    temperature: float  # 0: greedy
    seed: int  # of this response's random draws; 63 bits
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    stop_token_ids: Sequence[int] = ()  # tokens that end the response, besides the model's end tokens: the tokenizer's, and `hf.end_tokens`
    stop: Sequence[str] = ()  # texts that end the response; it ends with the token that completes one
    by_position: bool = False  # draw each token by the seed and its position, so that a request continued from a prefix draws the same
    images: Sequence[PlacedImage] = ()  # those of the prompt, in order, whose tokens it has already
    experts_from: int = 0  # the prompt token with which `Sample.routed_experts` begins
    conversation: Hashable | None = None  # which its prompt continues; unique among those of an engine


@dataclass(frozen=True)
class Finished:
    """The response to a request, perhaps partial: `sample.finish_reason` is the reason it ended, "abort" if the caller aborted it."""

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


@dataclass(frozen=True)
class Scoring:
    """What a teacher's engine reports of each token of a text."""

    named: int  # of so many of the likeliest tokens, too
    temperature: float  # the logits are divided by it


@dataclass(frozen=True)
class Text:
    """A context whose tokens a teacher scores."""

    tokens: list[int]
    images: Sequence[PlacedImage] = ()  # in order; their tokens are among these


@dataclass(frozen=True)
class TokenScores:
    """A teacher's log-probs at the T tokens of a text that have tokens before them; C is 1 + `Scoring.named`."""

    token_TC: np.ndarray  # int32, the text's own token, and the likeliest ones, the first of them the likeliest
    logp_TC: np.ndarray  # float32


def as_rollout(engines: TeacherEngines, longest: int) -> RolloutSettings:
    """Return the settings of a teacher's engine as those of an engine.

    Args:
        engines: the section `placement.teacher_engines`.
        longest: the most tokens of a context; the engine has to sample another one after them.
    """
    given = {name: getattr(engines, name) for name in TeacherEngines.model_fields}
    return RolloutSettings(**given, max_prompt_tokens=longest, max_response_tokens=1)


@dataclass(frozen=True)
class Setup:
    """What an engine runs."""

    model: Path  # a Hugging Face directory
    dtype: str  # of weights and activations, "float32" or "bfloat16"
    settings: RolloutSettings
    seed: int  # of all randomness that the requests' own seeds do not fix
    gpu: bool  # whether it has GPUs
    report_experts: bool = False  # fill `routed_experts` of its samples if the model has experts; requires the class's `reports_experts`
    sleeps: bool = False  # whether `sleep` will be called
    scoring: Scoring | None = None  # it is a teacher's: only `score` is called
    affinity: bool = False  # `rollout.request_routing=affinity`: keep the cache of prefixes, and conversations where theirs are
    blank: bool = False  # do not read the directory's weights; an update must bring some before the first request
    pixels: tuple[int | None, int | None] = (None, None)  # of an image, at least and at most; None: as its processor has them
    drop_images: bool = False  # `model.drop_images`
    lora: LoraSettings | None = None  # it computes with an adapter beside the directory's weights; updates bring adapters alone


@dataclass(frozen=True)
class Meeting:
    """Where the members of one engine meet: the first listens there."""

    host: str  # an address of its node
    port: int


class Member(Protocol):
    """A data-parallel rank of an engine, other than the first, which is the `Engine` itself. It may be on another node.

    The first member's engine serves all requests and calls; a member only holds processes, which end with its own.
    """

    def __init__(self, label: str) -> None: ...

    def start(self, setup: Setup, meeting: Meeting, rank: int) -> None:
        """Start the processes, and return at once; the engine's `start` returns when they are ready, too.

        Args:
            setup: as given to the engine.
            meeting: as given to the engine.
            rank: its data-parallel rank, from 1.

        Raises:
            RolloutError: they cannot be started.
        """

    def settle(self) -> list[int]:
        """Remove the files that the start has left, once the engine has started; return the pids of the member's processes."""
        ...

    async def ended(self) -> str:
        """Wait until a process has ended, and say which; an engine cannot go on without it."""
        ...

    def close(self) -> None:
        """End the processes. May be called twice."""


class Engine(Protocol):
    """One replica. Call `start` first. Every later call may raise EngineDead, and RolloutTimeout if it takes longer than `timeout_s`.

    `receive` returns every request that `submit` has accepted exactly once, however it ended. New weights are loaded between requests:
    `start_update`, `load_buckets` for each round of buckets, `finish_update`. With `rollout.mode=free` they are loaded while requests are
    unfinished: these pause and continue with the new weights alone; their samples record the first token of each weight version.
    """

    label: str  # the prefix of its error messages
    member: ClassVar[type[Member] | None] = None  # the class of its other members; None: rollout.dp must be 1
    reports_experts: ClassVar[bool] = False  # whether it can fill `Sample.routed_experts`; if not, MoE runs need routing.sample=0

    def __init__(self, label: str) -> None: ...

    @staticmethod
    def check(model: ModelDescription, dtype: str, settings: RolloutSettings, *, gpu: bool) -> None:
        """Check that an engine could run the model with these settings, without starting anything.

        Args:
            model: the model.
            dtype: the dtype of its weights and activations, "float32" or "bfloat16".
            settings: the engine's settings.
            gpu: whether the engine has GPUs.

        Raises:
            ConfigError: it could not; the message is one line.
        """

    @staticmethod
    def check_adapters(model: ModelDescription, dtype: str, lora: LoraSettings, *, gpu: bool) -> None:
        """Check that engines compute with adapters of a model (`sync.adapters`).

        Args:
            model: the model.
            dtype: of weights and activations.
            lora: the adapters.
            gpu: whether the engines have GPUs.

        Raises:
            ConfigError: they do not.
        """
        raise ConfigError("sync.adapters=true: this engine takes no adapters (rollout.engine.type)")

    @staticmethod
    def with_cache(model: ModelDescription, dtype: str, settings: RolloutSettings, most_mb: int) -> RolloutSettings:
        """Choose the KV cache size of a CPU engine for which the user has set none.

        Args:
            model: the model.
            dtype: the dtype of its weights and activations.
            settings: the engine's settings.
            most_mb: most megabytes for all concurrent sequences; exceeded if a single longest sequence needs more.

        Returns:
            The settings with that size, or unchanged if this engine needs none.
        """
        return settings

    @staticmethod
    def overruled(environ: Mapping[str, str], *, gpu: bool) -> list[str]:
        """Return the environment variables of a shell that an engine does not use, although they are meant for it.

        Args:
            environ: the environment of the shell.
            gpu: whether the engine has GPUs.
        """
        return []

    async def start(self, setup: Setup, meeting: Meeting | None = None) -> list[int]:
        """Load a model, and return when the engine can accept requests.

        Args:
            setup: what it runs.
            meeting: where its members meet; required if `settings.dp` is above 1. They are waited for.

        Returns:
            The pids of the engine's processes, without those of its other members.

        Raises:
            ConfigError: as in `check`.
            RolloutError: the engine does not start.
        """
        ...

    def lose(self, why: str) -> None:
        """End the engine, which has lost a member: waiting and later calls raise EngineDead with this reason. Any thread may call it."""

    def check_health(self) -> None:
        """Raise EngineDead if a process of the engine has ended or `close` was called, RolloutError if it has failed in another way."""

    async def ping(self, timeout_s: float) -> None:
        """Wait until every process of the engine has answered."""

    async def submit(self, requests: Sequence[Request], timeout_s: float) -> None:
        """Accept all of the requests or none.

        Without `Setup.affinity`, an idle engine starts none before all are accepted, and none with anything cached, so that the same
        requests get the same responses, bit for bit. Raises
        ValueError for a request that is too long or whose id is in use, WeightSyncError between the start and the end of an update.
        """

    async def receive(self, timeout_s: float) -> list[Finished]:
        """Wait for at least one finished request; return all since the last call in the order they finished, none after the timeout."""
        ...

    async def abort(self, ids: Iterable[RequestId], timeout_s: float) -> None:
        """Abort requests: `receive` returns their partial responses with the finish reason "abort". Unknown ids are ignored."""

    async def score(self, texts: Sequence[Text], timeout_s: float) -> list[TokenScores]:
        """Compute the log-probs of given tokens, as `Setup.scoring` says. An engine that cannot is no teacher's.

        Args:
            texts: each of at least two tokens, and at most one less than the settings' lengths.
            timeout_s: the time limit for all of them.
        """
        raise RolloutError(f"{self.label}: an engine of its type gives no log-probs of given tokens")

    async def sleep(self, timeout_s: float, *, keep_weights: bool) -> None:
        """Free the device's memory for others: drop the KV cache, and either keep the weights elsewhere or drop them too.

        Raises RolloutError if requests are unfinished. No requests are accepted until both parts are awake again.
        """
        raise RolloutError(f"{self.label}: an engine of its type does not sleep (placement.engines)")

    async def wake(self, part: Part, timeout_s: float) -> None:
        """Bring a part back onto the device. Weights that were dropped come back with arbitrary values: an update must follow."""
        raise RolloutError(f"{self.label}: an engine of its type does not sleep (placement.engines)")

    async def connect(self, rendezvous: list[dict[str, Any]], first_rank: int) -> None:
        """Let each worker join each sender's broadcast group (wire.Rendezvous.plain()); worker w becomes rank `first_rank` + w.

        With gloo it returns when all members of the groups, senders included, have joined; with NCCL they meet in their first broadcast.
        """
        raise RolloutError(f"{self.label}: an engine of its type joins no group (sync.transport)")

    async def start_update(self, timeout_s: float) -> None:
        """Prepare for buckets, which bring every tensor once. Raises RolloutError if requests are unfinished and the mode forbids it."""

    async def load_buckets(self, headers: list[dict[str, Any]], timeout_s: float) -> None:
        """Receive buckets (wire.Header.plain()), at most one of each sender, sent at the same time.

        Raises WeightSyncError naming a tensor that does not fit.
        """

    async def receive_buckets(self, headers: list[dict[str, Any]], timeout_s: float) -> None:
        """Receive buckets before `start_update`, beside the engine's work (`sync.overlap`), and keep them for `load_received`.

        Raises RolloutError if engines of this type cannot.
        """
        raise RolloutError(f"{self.label}: an engine of its type receives no weights beside its work (sync.overlap)")

    async def load_received(self, timeout_s: float) -> None:
        """Take all that `receive_buckets` has kept, in place of `load_buckets`. Raises WeightSyncError likewise."""
        raise RolloutError(f"{self.label}: an engine of its type receives no weights beside its work (sync.overlap)")

    async def finish_update(self, version: int, timeout_s: float) -> None:
        """Put the new weights into use as `version`. Raises WeightSyncError naming a tensor that has not arrived."""

    async def load_adapter(self, weights: bytes, config: dict[str, Any], version: int, timeout_s: float) -> None:
        """Use another adapter, as weights `version`.

        Args:
            weights: the content of PEFT's file of weights.
            config: that of its adapter_config.json.
            version: the number of the weights.
            timeout_s: see above.
        """
        raise RolloutError(f"{self.label}: takes no adapters")

    async def adapter_fingerprints(self, timeout_s: float) -> dict[str, list[Print]]:
        """Fingerprint the adapter, as `fingerprints` does the base model."""
        raise RolloutError(f"{self.label}: takes no adapters")

    async def drafted(self, timeout_s: float) -> tuple[int, int]:
        """Return how many tokens were drafted since the last call, and how many of them accepted; of engines that do not draft, none."""
        return 0, 0

    async def fingerprints(self, timeout_s: float) -> dict[str, list[Print]]:
        """Fingerprint the weights, for `megarl.sync.fingerprint.compare`: by Hugging Face name, one entry for each place that holds it."""
        ...

    async def close(self) -> None:
        """End every process of the engine and remove its files. May be called twice."""
