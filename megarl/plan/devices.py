"""What a GPU can do according to its maker, and what share of it this work reaches: the figures from which times are computed.

None was measured by megarl. The shares and latencies agree with speeds that others publish (`figures.md`, "Published layouts and speeds");
`megarl plan` prints the most important ones beside the results.
"""

from dataclasses import dataclass, replace

GB = 1_000_000_000
MEMORY_GB = 80.0  # of a GPU, if nothing says otherwise
NODE = 8  # GPUs of a node, if nothing says otherwise


@dataclass(frozen=True)
class Device:
    """A GPU, and the node in which it is; rates in bytes and FLOPs per second."""

    name: str
    memory_gb: float
    flops: float  # dense, bfloat16
    bandwidth: float  # of its memory
    link: float = 450e9  # to the GPUs that it is linked with, one way
    network: float = 50e9  # to all others, one way: 400 Gbit/s per GPU
    node: int = NODE  # GPUs of a node, which share its host memory
    linked: int = NODE  # GPUs that the links connect: those of a node, or of all nodes in a rack
    engines: "Device | None" = None  # the GPUs of the engines, if these are of another kind than the ranks'


# The makers' data sheets (of B200 and B300: HGX, of GB200: NVL72); dense figures, without structured sparsity.
DEVICES = {
    one.name: one
    for one in (
        Device("L40S", 48, 362e12, 0.864e12, 32e9, 25e9),
        Device("A100", 80, 312e12, 2.04e12, 300e9, 25e9),
        Device("H100", 80, 989e12, 3.35e12),
        Device("H20", 96, 148e12, 4.0e12),
        Device("H200", 141, 989e12, 4.8e12),
        Device("B200", 180, 2250e12, 8.0e12, 900e9),
        Device("GB200", 186, 2500e12, 8.0e12, 900e9, node=4, linked=72),
        Device("MI300X", 192, 1307e12, 5.3e12, 448e9),
        Device("B300", 270, 2250e12, 8.0e12, 900e9, 100e9),
    )
}
TRAIN_MFU, PREFILL_MFU = 0.4, 0.35  # share of `flops` that the matrix products of such an MoE reach
FLOAT32 = 16  # times as long as in bfloat16 takes a product in float32
STREAM_SHARE = 0.8  # of `bandwidth`, where weights, gradients, or keys and values pass through
NETWORK_SHARE = 0.8  # of `link` and `network`
LAYER_LATENCY = 0.4e-3  # seconds in which a host launches a layer's forward pass, however few its tokens are
EXCHANGE_LATENCY = 0.1e-3  # seconds that a layer waits for a collective of its tensor- or expert-parallel group, or a step of its ring
DECODE_LATENCY = 0.06e-3  # seconds of a layer in a decoding step, however few the sequences are
REDUCE_LATENCY = 0.015e-3  # seconds of one of the two sums over an engine's tensor-parallel group in such a layer
SEQUENCE_LATENCY = 0.7e-6  # seconds that each sequence adds to such a layer, beside its matrix products and its cache
HOST_BANDWIDTH = 25e9  # bytes per second between a GPU and its host's pinned memory
HOST_MEMORY = 40e9  # bytes per second of a GPU's share of its host's memory, in Adam's pass
IMAGE_SHARE, IMAGE_TOKENS = 0.5, 1024  # share of a sequence's tokens that are images', and the tokens of an image
IMBALANCE = 1.5  # tokens of the busiest rank's experts, relative to the mean
MEAN_LENGTH = 0.5  # of a response, as a share of the longest


def device_of(memory_gb: float, gpus_per_node: int | None = None, name: str | None = None) -> Device:
    """The GPU of that name; without one, the first of the table with enough memory, else the last, but no L40S, A100 or one of AMD.

    Args:
        memory_gb: the memory of a GPU.
        gpus_per_node: as for `in_nodes`.
        name: a name of the table; None: by memory.
    """
    if name is not None:
        return in_nodes(DEVICES[name], gpus_per_node)
    proposed = [one for one in DEVICES.values() if one.name not in ("L40S", "A100", "MI300X")]
    return in_nodes(next((one for one in proposed if one.memory_gb >= memory_gb), proposed[-1]), gpus_per_node)


def of_engines(device: Device, memory_gb: float) -> tuple[Device, float]:
    """The kind of the engines' GPUs and the memory of each: the ranks', unless they are of another kind.

    Args:
        device: the kind of the ranks' GPUs.
        memory_gb: the memory of each of these.
    """
    return (device, memory_gb) if device.engines is None else (device.engines, device.engines.memory_gb)


def in_nodes(device: Device, gpus_per_node: int | None) -> Device:
    """Return the device in nodes of so many GPUs, whose links end with the node unless those of its rack are linked; None: in its own."""
    if gpus_per_node is None:
        return device
    return replace(device, node=gpus_per_node, linked=device.linked if device.linked > device.node else gpus_per_node)


def device_named(name: str | None) -> Device | None:
    """The GPU that CUDA calls so, such as "NVIDIA GB200", which has the name of a B200 in it as well; None: not in the table."""
    named = [one for one in DEVICES.values() if name is not None and one.name in name]
    return max(named, key=lambda one: len(one.name), default=None)
