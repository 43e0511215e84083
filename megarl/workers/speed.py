"""How fast a model is trained, by the formula of `megarl plan`: FLOPs of weights and causal attention, whatever is recomputed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megarl.models.weight_map import HeadKind
from megarl.observe.metrics import Mean, Metric
from megarl.plan.devices import DEVICES
from megarl.plan.facts import facts
from megarl.plan.parameters import model_elements
from megarl.plan.times import forward_flops

PASSES = 3  # forward, and a backward of twice its FLOPs


def training_flops(hf: Mapping[str, Any], head: HeadKind, lengths: Sequence[int]) -> float:
    """Of one update on sequences of these many tokens.

    Args:
        hf: config.json.
        head: a scalar one has no vocabulary's FLOPs.
        lengths: of the sequences.
    """
    its = facts(dict(hf))
    without = 0 if head == "lm" or its.tied else its.n.vocab * its.n.hidden
    elements = model_elements(dict(hf)) - without
    return PASSES * sum(length * forward_flops(its, elements, length) for length in lengths)


def speed(flops: float, ranks: int, seconds: float, device: str | None, dtype: str) -> dict[str, Metric]:
    """Metrics of work that `ranks` GPUs did together.

    Args:
        flops: of the whole.
        ranks: that shared it: of one data-parallel replica.
        seconds: that it took.
        device: as CUDA calls it; None: no GPU.
        dtype: of the model: the share of the peak (`devices.py`) is told of bfloat16.
    """
    reached = flops / ranks / 1e12  # of each, in `seconds`
    metrics: dict[str, Metric] = {"perf/tflops_per_gpu": Mean(reached, seconds)}
    known = next((one for name, one in DEVICES.items() if device is not None and name in device), None)
    if known is not None and dtype == "bfloat16":
        metrics["perf/mfu"] = Mean(reached / (known.flops / 1e12), seconds)
    return metrics
