"""Training speed, by the formula of `megarl plan`: FLOPs of weights and attention, not counting recomputation."""

from collections.abc import Sequence

from megarl.images import Image
from megarl.models.description import ModelDescription
from megarl.models.family import HeadKind
from megarl.observe.metrics import Mean, Metric
from megarl.plan.devices import device_named
from megarl.plan.facts import facts
from megarl.plan.forward import forward_flops, predictor_flops
from megarl.plan.parameters import language_elements
from megarl.plan.tower import tower_flops

PASSES = 3  # a forward, and a backward with twice its FLOPs


def training_flops(
    model: ModelDescription, head: HeadKind, lengths: Sequence[int], images: Sequence[Image] = (), *, tower: bool = False
) -> float:
    """The FLOPs of one update on sequences of the given lengths.

    Args:
        model: the model, with a multi-token prediction layer if one is trained.
        head: its head; a scalar head has none of the output layer's FLOPs.
        lengths: the number of tokens of each sequence.
        images: those of the sequences.
        tower: whether the vision tower is trained; else it has no backward.
    """
    counts = facts(model)
    without = 0 if head == "lm" or counts.tied else counts.n.vocab * counts.n.hidden
    elements = language_elements(model) - without
    seen = 0.0 if (sizes := model.sizes.vision) is None else sum(tower_flops(sizes, image.tokens) for image in images)
    text = sum(length * (forward_flops(counts, elements, length) + predictor_flops(counts, length)) for length in lengths)
    return PASSES * text + seen * (PASSES if tower else 1)


def speed(flops: float, ranks: int, seconds: float, device: str | None, dtype: str) -> dict[str, Metric]:
    """The speed metrics of work that `ranks` GPUs did together.

    Args:
        flops: the FLOPs of all the work.
        ranks: the number of ranks that shared it: those of one data-parallel replica.
        seconds: the time that it took.
        device: CUDA's name of the GPU; None: no GPU.
        dtype: the model's dtype; the share of the peak (`devices.py`) is reported for bfloat16 only.
    """
    reached = flops / ranks / 1e12  # by each rank, in `seconds`
    metrics: dict[str, Metric] = {"perf/tflops_per_gpu": Mean(reached, seconds)}
    known = device_named(device)
    if known is not None and dtype == "bfloat16":
        metrics["perf/mfu"] = Mean(reached / (known.flops / 1e12), seconds)
    return metrics
