"""What a rollout engine takes and gives: plain data and typed failures. Imports neither vLLM nor Ray."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from megarl.batch import Sample


@dataclass(frozen=True)
class Prompt:
    """What an engine needs of a prompt: a name that is unique in the call, and the tokens."""

    id: int | str
    tokens: list[int]


@dataclass(frozen=True)
class Sampling:
    """How to respond. top_p and top_k stay off: the sampled log-probs are those of the whole distribution."""

    n: int  # responses a prompt
    temperature: float  # 0: greedy
    max_tokens: int  # longest response
    seed: int  # with the prompt's id and the sample's number it fixes the random draws, on whatever replica and in whatever order

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1 or self.temperature < 0:
            given = f"n={self.n}, max_tokens={self.max_tokens}, temperature={self.temperature}"
            raise ValueError(f"sampling: {given}: must be at least 1, 1 and 0")


@dataclass(frozen=True)
class Generated:
    """The responses to one prompt, sample 0 .. n-1."""

    prompt_id: int | str
    samples: list[Sample]


@dataclass(frozen=True)
class EngineInfo:
    """A started engine."""

    workers: int  # processes that take weights: the tensor-parallel size
    vllm: str  # version
    start_s: float  # seconds by vLLM itself, imports included
    pids: list[int]  # the engine's own process first, then its children


class RolloutError(RuntimeError):
    """The rollout side failed; the message names the engine."""


class EngineDead(RolloutError):
    """A process of the engine has ended. Every pending and every later call raises this."""


class RolloutTimeout(RolloutError):
    """A call took longer than its limit; the message says what is late."""


class WeightSyncError(RolloutError):
    """A weight update was refused; the message names the tensor. The engine generates no more until an update has succeeded."""


def request_seed(seed: int, prompt_id: int | str, sample: int) -> int:
    """The seed of one response: 63 bits that depend on the call's seed, the prompt and the sample's number, and on nothing else."""
    text = f"{seed}/{prompt_id!r}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
