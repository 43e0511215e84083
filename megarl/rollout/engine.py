"""What a rollout engine takes and gives: plain data and typed failures. Imports neither vLLM nor Ray."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.batch import Sample
from megarl.config import ConfigError, RolloutSettings

_BLOCK = 128  # tokens that vLLM gives out together on CPU (vllm/platforms/cpu.py)


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


def check_engine(hf: Mapping[str, Any], dtype: str, settings: RolloutSettings, *, gpu: bool) -> None:
    """ConfigError, before any process starts, where an engine could not run the model of this config.json.

    A CPU engine needs `kv_cache_mb`, with room for one longest sequence, and has no multi-latent attention.
    """
    heads, kv_heads = int(hf["num_attention_heads"]), int(hf.get("num_key_value_heads") or hf["num_attention_heads"])
    if heads % settings.tp or (kv_heads % settings.tp and settings.tp % kv_heads):
        raise ConfigError(f"rollout.tp={settings.tp}: does not divide the model's {heads} attention heads and {kv_heads} KV heads")
    for key in ("intermediate_size", "moe_intermediate_size"):
        if hf.get(key) and int(hf[key]) % settings.tp:
            raise ConfigError(f"rollout.tp={settings.tp}: does not divide the model's {key}={hf[key]}")
    if gpu:
        return
    if hf.get("kv_lora_rank"):
        # vLLM 0.30.0's CPU_MLA decodes latents of 512+64 alone (v1/attention/backends/mla/cpu_mla.py:26), its AMX_MLA takes no float32.
        raise ConfigError(
            f"model.path: config.json's kv_lora_rank={hf['kv_lora_rank']}: multi-latent attention needs GPU engines (cluster.gpus=true)"
        )
    if settings.kv_cache_mb is None:
        raise ConfigError("rollout.kv_cache_mb: a CPU engine needs it")
    head_dim = int(hf.get("head_dim") or int(hf["hidden_size"]) // heads)
    token_bytes = 2 * int(hf["num_hidden_layers"]) * max(1, kv_heads // settings.tp) * head_dim * (4 if dtype == "float32" else 2)
    longest = settings.max_prompt_tokens + settings.max_response_tokens
    needed = token_bytes * _BLOCK * (-(-longest // _BLOCK) + 1)  # one block stays empty
    if needed > settings.kv_cache_mb << 20:
        raise ConfigError(
            f"rollout.kv_cache_mb={settings.kv_cache_mb}: one sequence of max_prompt_tokens+max_response_tokens={longest} tokens "
            f"needs {-(-needed // 2**20)}"
        )
