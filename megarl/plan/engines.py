"""What a GPU of an engine (vLLM) holds: weights, buffers and the KV cache."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from megarl.config import RolloutSettings
from megarl.models.families import family_of
from megarl.models.weight_map import OUTPUT, QKV, Fused, Op
from megarl.plan.devices import GB
from megarl.plan.facts import Facts, facts
from megarl.plan.states import ITEM

OVERHEAD = 4 * GB  # CUDA's context, NCCL, graphs, activations of 8,192 prompt tokens: an estimate
VOCABULARY = 64  # vLLM pads the vocabulary to a multiple of this many rows (vocab_parallel_embedding.py)


@dataclass(frozen=True)
class EngineMemory:
    """One GPU of an engine, in bytes."""

    tp: int
    share: float  # of the GPU, for the engine
    weights: float
    overhead: float
    token: float  # KV cache of one token
    cache: float  # what is left for the KV cache; below 0: nothing fits
    longest: int  # tokens of the longest sequence

    @property
    def room(self) -> bool:
        """Whether the KV cache has room for one sequence of the greatest length."""
        return self.cache >= self.token * self.longest

    @property
    def live(self) -> float:
        """How many sequences of the greatest length the KV cache holds at once."""
        return max(0.0, self.cache) / (self.token * self.longest)


def engine_weights(hf: dict[str, Any], tp: int, dtype: str) -> int:
    """Bytes of weights on one rank of an engine. Each expert is sharded (no expert parallelism); norms, routers and latents are replicated.

    Args:
        hf: config.json of the model.
        tp: the number of ranks of the engine.
        dtype: the dtype of the weights.
    """
    family, its = family_of(hf), facts(hf)
    count = 0
    for one in [*family.weight_map(hf), family.heads["lm"].mapping(hf)]:
        if one.alias and one.megatron == OUTPUT:
            continue  # embedding and output share one table
        layers = 1 if "{layer}" not in one.megatron else its.n.layers if one.layers is None else len(one.layers)
        experts = its.n.experts if "{expert}" in one.megatron else 1
        count += _elements(one.op, tp) * layers * experts * (ITEM[dtype] if not one.float32 else 4)
    if its.latents is not None:  # the up-projection of the latents once more, transposed (mla_attention.py: W_UV, W_UK_T)
        up = its.n.heads // tp * (its.latents.plain + its.latents.value) * its.latents.key_value
        count += up * its.n.layers * ITEM[dtype]
    return count


def _elements(op: Op, tp: int) -> int:
    inner = op.parts if isinstance(op, Fused) else op
    if isinstance(inner, QKV):
        own = inner.heads // tp + 2 * max(1, inner.groups // tp)
        return own * inner.head_dim * prod(inner.rest)
    if op.axis is None:
        return prod(op.packed_shape)
    if op.pads:
        return -(-op.packed_shape[0] // VOCABULARY) * VOCABULARY // tp * prod(op.packed_shape[1:])
    return prod(op.packed_shape) // tp


def cache_bytes(its: Facts, tp: int, dtype: str) -> int:
    """Bytes of the KV cache for one token on one rank. Latents are replicated on every rank.

    Args:
        its: the model.
        tp: the number of ranks of the engine.
        dtype: the dtype of keys and values.
    """
    if its.latents is not None:
        return its.n.layers * (its.latents.key_value + its.latents.rotary) * ITEM[dtype]
    return 2 * its.n.layers * max(1, its.n.groups // tp) * its.n.head_dim * ITEM[dtype]


def plan_engine(hf: dict[str, Any], settings: RolloutSettings, dtype: str, memory: float) -> EngineMemory:
    """Plan the memory of one GPU of an engine.

    Args:
        hf: config.json of the model.
        settings: the section `rollout`.
        dtype: the dtype of the engine.
        memory: the GPU's memory in bytes.
    """
    its = facts(hf)
    weights = engine_weights(hf, settings.tp, dtype)
    scores = settings.max_num_seqs * its.n.vocab * 4 * 3  # logits in float32, sorted and normalised
    overhead = OVERHEAD + scores
    cache = memory * settings.gpu_memory_fraction - weights - overhead
    longest = settings.max_prompt_tokens + settings.max_response_tokens
    return EngineMemory(settings.tp, settings.gpu_memory_fraction, weights, overhead, cache_bytes(its, settings.tp, dtype), cache, longest)
