"""The memory that a weight update takes beside the weights, on rank 0 and on a GPU of an engine."""

from __future__ import annotations

from typing import Any

from megarl.config import SyncSettings
from megarl.models.families import family_of
from megarl.plan.states import ITEM

GATHERED = 256 << 20  # megarl.parallel.export.GATHER_BYTES, copied here because importing it would import Megatron
HASHED = (1 << 26) * 20  # bytes of the temporaries of megarl.sync.fingerprint: two of int64 and two of int16 for each of 2^26 elements


def sender_bytes(hf: dict[str, Any], sync: SyncSettings, dtype: str) -> int:
    """Bytes on rank 0: two buckets; the largest tensor or part of a layer's experts, gathered and joined; for fingerprints, a third bucket.

    Args:
        hf: config.json of the policy.
        sync: the section `sync`.
        dtype: the dtype of the weights that are sent.
    """
    table, bucket = largest_tensor(hf, dtype), _bucket(hf, sync, dtype)
    return (2 + sync.verify) * bucket + 2 * max(GATHERED, table) + HASHED * sync.verify


def kept_bytes(hf: dict[str, Any], sync: SyncSettings, dtype: str) -> int:
    """Bytes that rank 0's GPU keeps between weight updates: the two buckets, if the transport keeps them on the GPU.

    Args:
        hf: config.json of the policy.
        sync: the section `sync`.
        dtype: the dtype of the weights that are sent.
    """
    return 2 * _bucket(hf, sync, dtype) if sync.transport in ("nccl", "cuda_ipc") else 0


def receiver_bytes(hf: dict[str, Any], sync: SyncSettings, dtype: str, tp: int) -> int:
    """Bytes on a GPU of an engine: a bucket, the experts of one layer as they are unpacked, and fingerprints.

    Args:
        hf: config.json of the policy.
        sync: the section `sync`.
        dtype: the dtype of the weights that are sent.
        tp: the number of ranks of the engine.
    """
    n = family_of(hf).sizes(hf)
    layer = 3 * n.experts * n.expert_ffn * n.hidden * ITEM[dtype] // tp
    return _bucket(hf, sync, dtype) + (layer + HASHED) * sync.verify


def _bucket(hf: dict[str, Any], sync: SyncSettings, dtype: str) -> int:
    """Bytes of a bucket, which is enlarged for the largest tensor."""
    return max(sync.bucket_mb << 20, largest_tensor(hf, dtype))


def largest_tensor(hf: dict[str, Any], dtype: str) -> int:
    """Bytes of the embedding, which no expert or projection exceeds."""
    n = family_of(hf).sizes(hf)
    return n.vocab * n.hidden * ITEM[dtype]
