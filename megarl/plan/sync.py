"""The memory that a weight update takes beside the weights, on a rank that sends and on a GPU of an engine."""

from megarl.config import RolloutSettings, SyncSettings
from megarl.models.description import ModelDescription
from megarl.plan.engines import FP8_BYTES, absorbed_bytes, engine_weights
from megarl.plan.facts import facts
from megarl.plan.states import ITEM

GATHERED = 256 << 20  # megarl.parallel.export.GATHER_BYTES, copied here because importing it would import Megatron
HASHED = (1 << 26) * 20  # bytes of the temporaries of megarl.sync.fingerprint: two of int64 and two of int16 for each of 2^26 elements
QUANTIZED = (1 << 24) * 12  # bytes of the temporaries of megarl.sync.quantize: 12 for each of the 2^24 elements quantised together


def sender_bytes(model: ModelDescription, sync: SyncSettings, dtype: str, *, fp8: bool = False) -> int:
    """Bytes on a sender: two buckets; the largest tensor, or part of a layer's experts, gathered and joined; a third one for fingerprints.

    Args:
        model: the policy.
        sync: the section `sync`.
        dtype: the dtype of the policy's weights.
        fp8: whether it quantises what it has gathered: the result then lies beside it.
    """
    table, bucket = largest_tensor(model, dtype), _bucket(model, sync, dtype)
    quantized = QUANTIZED + round(GATHERED / ITEM[dtype] * FP8_BYTES) if fp8 else 0
    return (2 + sync.verify) * bucket + 2 * max(GATHERED, table) + quantized + HASHED * sync.verify


def kept_bytes(model: ModelDescription, sync: SyncSettings, dtype: str) -> int:
    """Bytes that a sender's GPU keeps between weight updates: the two buckets, if the transport keeps them on the GPU.

    Args:
        model: the policy.
        sync: the section `sync`.
        dtype: the dtype of the weights that are sent.
    """
    return 2 * _bucket(model, sync, dtype) if sync.transport in ("nccl", "cuda_ipc") else 0


def receiver_bytes(model: ModelDescription, sync: SyncSettings, dtype: str, rollout: RolloutSettings, senders: int = 1) -> int:
    """Bytes on a GPU of an engine: a bucket of each sender, its part of the experts of one layer as they are unpacked, and fingerprints.

    A bucket is no smaller with fp8, since it has room for the embedding, which is not quantised; but there are half as many.

    Args:
        model: the policy.
        sync: the section `sync`.
        dtype: the dtype of the engine's weights that are not quantised.
        rollout: the section `rollout`.
        senders: the number of ranks that send; the first has the embedding, and the last the output layer.
    """
    n = model.sizes
    experts = -(-n.experts // rollout.devices) if rollout.expert_parallel else n.experts / rollout.devices
    layer = 3 * experts * n.expert_ffn * n.hidden * (FP8_BYTES if rollout.quantization == "fp8" else ITEM[dtype])
    buckets = min(senders, 2) * _bucket(model, sync, dtype) + max(0, senders - 2) * (sync.most_bucket_mb << 20)
    return buckets + (round(layer) + HASHED) * sync.verify


def sent_bytes(model: ModelDescription, rollout: RolloutSettings, dtype: str) -> int:
    """Bytes of all weights as they are sent to the engines. What an engine makes of them for itself is not among them.

    Args:
        model: the policy.
        rollout: the section `rollout`.
        dtype: the dtype of the engine's weights that are not quantised.
    """
    return engine_weights(model, 1, dtype, fp8=rollout.quantization == "fp8") - absorbed_bytes(facts(model), 1, dtype)


def _bucket(model: ModelDescription, sync: SyncSettings, dtype: str) -> int:
    """Bytes of a bucket, which is enlarged for the largest tensor."""
    return max(sync.most_bucket_mb << 20, largest_tensor(model, dtype))


def largest_tensor(model: ModelDescription, dtype: str) -> int:
    """Bytes of the embedding, which no expert or projection exceeds."""
    n = model.sizes
    return n.vocab * n.hidden * ITEM[dtype]
