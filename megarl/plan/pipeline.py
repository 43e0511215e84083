"""What a pipeline stage keeps for all micro-batches in flight, with the chosen recomputation."""

from collections import Counter
from dataclasses import dataclass

from megarl.config import Layout
from megarl.plan.activations import MicroBatchShape, head_bytes, head_working_bytes, layer_bytes, layer_working_bytes, predictor_bytes
from megarl.plan.facts import Facts


@dataclass(frozen=True)
class Recompute:
    """`model.recompute`, and the number of layers that are recomputed together."""

    kind: str  # none, selective, full
    together: int = 1
    modules: tuple[str, ...] = ("core_attn",)  # of selective recomputation


@dataclass(frozen=True)
class OutputHead:
    """The head on the last stage."""

    value: bool = False
    fp32: bool = False
    predicts: bool = False  # whether a multi-token prediction layer is trained beside it


def in_flight(layout: Layout, stage: int, micro_batches: int) -> list[int]:
    """The most micro-batches of each chunk that a stage holds at once (schedules.py: 1F1B, and the interleaved schedule's warm-up).

    Args:
        layout: the layout of the ranks.
        stage: the pipeline stage.
        micro_batches: the number of micro-batches of a mini-batch.
    """
    if layout.vpp is None:
        return [min(layout.pp - stage, micro_batches)]
    passes = min(2 * (layout.pp - stage - 1) + (layout.vpp - 1) * layout.pp + 1, micro_batches * layout.vpp)
    chunk = Counter(turn % (layout.pp * layout.vpp) // layout.pp for turn in range(passes))
    return [chunk[index] for index in range(layout.vpp)]


def stage_bytes(
    facts: Facts,
    shape: MicroBatchShape,
    chunks: list[range],
    flying: list[int],
    recompute: Recompute,
    head: OutputHead | None,
    *,
    working: bool = False,
) -> dict[str, int]:
    """Return the bytes by part at the stage's peak: while the head or while a layer runs backward.

    Args:
        facts: the model.
        shape: a micro-batch.
        chunks: the layers of each of the stage's chunks.
        flying: the result of `in_flight`.
        recompute: what is recomputed.
        head: the head; None on all stages but the last.
        working: whether the gradients of activations count, as `working set`: on a GPU, in training.
    """
    heads = head_bytes(facts, shape, value=head.value, fp32=head.fp32) if head is not None else {}
    if head is not None and head.predicts:
        heads = dict(Counter(heads) + Counter(predictor_bytes(facts, shape, fp32=head.fp32, full=recompute.kind == "full")))
    if head is not None and working:
        heads["working set"] = head_working_bytes(facts, shape, value=head.value, fp32=head.fp32)
    counts = Counter[tuple[bool, bool, str]]()  # of each kind of layer: with experts, with a gated delta net, a single block
    for part, times in zip(chunks, flying, strict=True):
        for one in part:
            counts[facts.has_experts(one), facts.is_linear(one), facts.block(one)] += times
    layers = {kind: _kept(facts, shape, recompute, *kind) for kind in counts}
    backward = dict[str, int]()
    if working and layers:
        backward["working set"] = max(layer_working_bytes(facts, shape, experts=experts) for experts, *_ in layers)
    if recompute.kind != "full":
        peak = max(backward, heads, key=_total)
        total = Counter(peak)
        for kind, count in counts.items():
            total.update({part: count * size for part, size in layers[kind].items()})
        return dict(total)
    entry = shape.shard * facts.n.hidden * shape.item
    inputs = sum(times * -(-len(part) // recompute.together) for part, times in zip(chunks, flying, strict=True)) * entry
    again = {part: recompute.together * size for part, size in max(layers.values(), key=_total).items()}
    if shape.spec != "local" or shape.item == 4:
        again["norms"] -= entry  # a layer's first norm keeps the same tensor as the stored layer input
    peak = max({**again, **backward}, heads, key=_total)
    return {"layer inputs": inputs, **peak}


def _total(parts: dict[str, int]) -> int:
    return sum(parts.values())


def _kept(facts: Facts, shape: MicroBatchShape, recompute: Recompute, experts: bool, linear: bool, block: str) -> dict[str, int]:
    parts = layer_bytes(facts, shape, experts=experts, linear=linear, block=block)
    return parts if recompute.kind != "selective" else {part: _spared(facts, shape, recompute, part, size) for part, size in parts.items()}


def _spared(facts: Facts, shape: MicroBatchShape, recompute: Recompute, part: str, size: int) -> int:
    """The bytes of a part that selective recomputation still keeps."""
    n, tp = facts.n, shape.layout.tp
    if part == "attention" and "core_attn" in recompute.modules:
        out = 0 if shape.spec == "te" else shape.item * n.heads * n.head_dim // tp  # the output projection keeps it in any case
        if facts.latents is not None and shape.spec != "te":
            width = facts.latents.plain + facts.latents.rotary
            out = shape.item * n.heads // tp * (2 * width - facts.latents.value)  # the values are kept as they were before padding
        mask = shape.item * shape.longest if facts.chooses_keys(shape.longest) else 0
        return size - shape.rows * (out + 4 * n.heads // tp + mask)
    if part == "norms" and "layernorm" in recompute.modules:
        return size - (1 if n.blocks else 2) * shape.shard * n.hidden * shape.item
    if part == "experts" and shape.spec == "te" and "moe_act" in recompute.modules:
        return size - size * n.expert_ffn // (n.hidden + 3 * n.expert_ffn)
    if "moe" in recompute.modules and part in ("experts", "router", "shared experts"):
        return 0
    if part == "mlp" and "mlp" in recompute.modules:
        return 0
    return size
