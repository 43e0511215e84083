"""What a GPU can do according to its maker, and what share of it this work reaches: the figures from which times are computed.

Every figure is an assumption that `megarl plan` prints beside the results; none was measured by megarl.
"""

from __future__ import annotations

from dataclasses import dataclass

GB = 1_000_000_000
MEMORY_GB = 80.0  # of a GPU, if nothing says otherwise
NODE = 8  # GPUs per node


@dataclass(frozen=True)
class Device:
    """One GPU of a node of 8 (SXM); rates in bytes and FLOPs per second."""

    name: str
    memory_gb: float
    flops: float  # dense, bfloat16
    bandwidth: float  # of its memory
    link: float = 450e9  # to the other GPUs of its node, one way
    network: float = 50e9  # to other nodes, one way: 400 Gbit/s per GPU


# NVIDIA's data sheets; dense figures, without structured sparsity.
DEVICES = {
    one.name: one
    for one in (
        Device("A100", 80, 312e12, 2.04e12, 300e9, 25e9),
        Device("H100", 80, 989e12, 3.35e12),
        Device("H200", 141, 989e12, 4.8e12),
        Device("B200", 180, 2250e12, 8.0e12, 900e9),
    )
}
TRAIN_MFU, PREFILL_MFU = 0.25, 0.35  # share of `flops` that the matrix products of such an MoE reach
FLOAT32 = 16  # times as long as in bfloat16 takes a product in float32
DECODE_SHARE, STREAM_SHARE = 0.6, 0.8  # of `bandwidth`: in decoding, and where weights and gradients pass through
NETWORK_SHARE = 0.6  # of `link` and `network`
LAYER_LATENCY = 0.4e-3  # seconds in which a host launches a layer's forward pass, however few its tokens are
EXCHANGE_LATENCY = 0.1e-3  # seconds that a layer waits for a collective of its tensor- or expert-parallel group, or a step of its ring
DECODE_LATENCY = 0.1e-3  # seconds of a layer in a decoding step, however few the sequences are
REDUCE_LATENCY = 0.03e-3  # seconds of one of the two sums over an engine's tensor-parallel group in such a layer
SEQUENCE_LATENCY = 15e-6  # seconds in which an engine's host schedules and reads a token of one of its sequences
HOST_BANDWIDTH = 25e9  # bytes per second between a GPU and its host's pinned memory
HOST_MEMORY = 40e9  # bytes per second of a GPU's share of its host's memory, in Adam's pass
IMBALANCE = 1.5  # tokens of the busiest rank's experts, relative to the mean
MEAN_LENGTH = 0.5  # of a response, as a share of the longest


def device_of(memory_gb: float) -> Device:
    """The first GPU of the table, other than the A100, with at least this much memory, else the B200."""
    return next((one for one in DEVICES.values() if one.memory_gb >= memory_gb and one.name != "A100"), DEVICES["B200"])
