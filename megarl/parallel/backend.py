"""The hardware, chosen once: CUDA with NCCL and Transformer Engine, or the CPU with gloo and Megatron's local modules."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import resource
from dataclasses import dataclass
from typing import Any, Literal

import torch

from megarl.config import ConfigError
from megarl.parallel import upstream
from megarl.parallel.cpu import hook

MEGATRON = "0.16.1"  # the one release whose faults and semantics this folder knows


@dataclass(frozen=True)
class Backend:
    """What differs between the two kinds of machine. Code branches on this object at construction and nowhere else."""

    name: Literal["cuda", "cpu"]
    collective: Literal["nccl", "gloo"]
    device: torch.device

    def layer_spec(self, config: Any, vp_stage: int | None = None) -> Any:
        """Megatron's block spec (TransformerBlockSubmodules) of the layers that this rank builds for the given virtual stage."""
        from megarl.parallel import spec

        return spec.transformer_engine(config, vp_stage) if self.name == "cuda" else spec.local(config, vp_stage)

    @property
    def transformer_overrides(self) -> dict[str, Any]:
        """The TransformerConfig fields that follow from the hardware."""
        fused = self.name == "cuda"
        return {
            "moe_grouped_gemm": fused,
            "moe_permute_fusion": fused,
            "apply_rope_fusion": fused,
            "bias_dropout_fusion": fused,
            "bias_activation_fusion": fused,
            "masked_softmax_fusion": False,  # belongs to the unfused attention, which neither spec uses
            "gradient_accumulation_fusion": False,  # needs apex's CUDA extension
        }

    def peak_memory_mb(self) -> float:
        """The largest memory this process has held: of the GPU on CUDA, resident otherwise."""
        if self.name == "cuda":
            return torch.cuda.max_memory_allocated() / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

    def random_state(self) -> torch.Tensor:
        """The device's random state (the CPU's own on a CPU)."""
        return torch.cuda.get_rng_state() if self.name == "cuda" else torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """Sets the device's random state."""
        if self.name == "cuda":
            torch.cuda.set_rng_state(state)
        else:
            torch.set_rng_state(state)

    def synchronize(self) -> None:
        """Wait for the work queued on the device."""
        if self.name == "cuda":
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Give cached device memory back to the driver."""
        if self.name == "cuda":
            torch.cuda.empty_cache()


@functools.cache
def choose() -> Backend:
    """The backend of this process. Call it before anything imports megatron: it mends megatron, and on a CPU installs the hook.

    Raises ConfigError for any Megatron-core but the supported release.
    """
    found = importlib.metadata.version("megatron-core")
    if found != MEGATRON:
        raise ConfigError(f"megatron-core: megarl runs on {MEGATRON}, and {found} is installed")
    upstream.quiet()
    if not torch.cuda.is_available():
        hook.install()
        from megarl.parallel.cpu import patches

        patches.apply()
        upstream.apply()
        return Backend("cpu", "gloo", torch.device("cpu"))
    upstream.apply()

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return Backend("cuda", "nccl", device)
