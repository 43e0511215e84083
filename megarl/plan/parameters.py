"""The number of parameters that each rank holds, from config.json's weight map and the layout.

All ranks of a pipeline stage hold equally many, whatever their tensor-parallel and expert-parallel rank: what does not divide is padded.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm, prod
from typing import Any

from megarl.config import Layout, LoraSettings
from megarl.models.adapters import adapted_matrices, factor_ops
from megarl.models.description import ModelDescription
from megarl.models.family import HeadKind
from megarl.models.weight_map import OUTPUT, VISION, WeightMapping, is_frozen, is_matrix

ALIGNED, BUCKET = 64, 128  # elements: alignment of each parameter in Megatron's buffer, and what the buffer's end is a multiple of
EMBEDDING = "embedding.word_embeddings.weight"

SizeCounts = tuple[tuple[int, int], ...]
"""Parameters by size: (elements, number of parameters of that size)."""


@dataclass(frozen=True)
class ChunkParameters:
    """The parameters of one model chunk on one rank. Dense and expert parameters are apart, since different ranks hold their copies."""

    dense: SizeCounts
    experts: SizeCounts
    buffers: int = 0  # float32 elements that are not parameters
    frozen: int = 0  # elements of parameters that are never trained
    dense_matrices: int = 0  # elements of those among the dense parameters that Muon would update
    expert_matrices: int = 0  # and among the experts

    @property
    def elements(self) -> int:
        """The elements of all parameters."""
        return count(self.dense) + count(self.experts) + self.frozen


def count(sizes: SizeCounts) -> int:
    """The elements of all these parameters."""
    return sum(size * times for size, times in sizes)


def model_elements(model: ModelDescription, head: HeadKind = "lm") -> int:
    """The number of parameters of the whole model, without a multi-token prediction layer."""
    return sum(
        prod(one.op.packed_shape) * _layers(one, model.sizes.layers) * _experts(one, model.sizes.experts)
        for one in model.trunk.mappings(head)
        if not one.alias and not one.float32
    )


def language_elements(model: ModelDescription) -> int:
    """The number of parameters of the language model: all but those of a vision tower, through which no token of text passes."""
    tower = sum(prod(one.op.packed_shape) for one in model.mappings("lm") if one.megatron.startswith(VISION))
    return model_elements(model) - tower


def stage_layers(layers: int, layout: Layout, megatron: Mapping[str, Any]) -> list[list[range]]:
    """The layers of each pipeline stage's chunks, as Megatron assigns them (transformer_layer.py: get_transformer_layer_offset).

    Args:
        layers: the number of layers of the model.
        layout: the layout of the ranks.
        megatron: `model.megatron`, which may give the first and the last stage a number of layers of their own.

    Returns:
        [stage][chunk] -> layers.
    """
    chunks, last = layout.vpp or 1, layout.pp - 1
    counts = {0: _number(megatron, "num_layers_in_first_pipeline_stage"), last: _number(megatron, "num_layers_in_last_pipeline_stage")}
    uneven = {stage: count for stage, count in counts.items() if count}
    between = layout.pp - len(uneven)
    each = (layers - sum(uneven.values())) // between if between else 0
    sizes = [uneven.get(stage, each) // chunks for stage in range(layout.pp)]
    starts = [[chunk * sum(sizes) + sum(sizes[:stage]) for chunk in range(chunks)] for stage in range(layout.pp)]
    return [[range(start, start + size) for start in own] for own, size in zip(starts, sizes, strict=True)]


def _number(fields: Mapping[str, Any], key: str) -> int:
    """A number in `model.megatron`; 0 if it is not given."""
    return int(fields.get(key) or 0)


def shards(
    model: ModelDescription,
    head: HeadKind,
    layout: Layout,
    megatron: Mapping[str, Any],
    lora: LoraSettings | None = None,
    tower: bool = False,
) -> list[list[ChunkParameters]]:
    """What a rank of each pipeline stage holds, chunk by chunk.

    Args:
        model: the model, which the layout divides (`families.check_layout`).
        head: the kind of the model's head.
        layout: the layout of its ranks.
        megatron: `model.megatron`, for stages of unequal size.
        lora: `model.lora` of a trained model: then only adapters are trained, and a value head.
        tower: its vision tower is trained.
    """
    mappings, stages, experts = model.mappings(head), stage_layers(model.sizes.layers, layout, megatron), model.sizes.experts
    first, last = stages[0][0], stages[-1][-1]

    def chunk(part: range) -> ChunkParameters:
        return _chunk(mappings, experts, layout, part, lora, first=part is first, last=part is last, tower=tower)

    return [[chunk(part) for part in stage] for stage in stages]


def _chunk(
    mappings: list[WeightMapping],
    experts: int,
    layout: Layout,
    layers: range,
    lora: LoraSettings | None,
    *,
    first: bool,
    last: bool,
    tower: bool,
) -> ChunkParameters:
    dense, routed, buffers, frozen = list[tuple[int, int]](), list[tuple[int, int]](), 0, 0
    dense_matrices = expert_matrices = 0
    for one in mappings:
        if "{layer}" in one.megatron:
            times = len(layers) if one.layers is None else sum(layer in one.layers for layer in layers)
        elif one.megatron == EMBEDDING or one.megatron.startswith(VISION):
            times = int(first)
        elif one.megatron == OUTPUT and one.alias and first:  # tied, and the embedding is in this chunk
            times = 0
        else:
            times = int(last)
        expert = "{expert}" in one.megatron
        if lora is not None and not one.float32 and not (one.megatron == OUTPUT and prod(one.op.packed_shape[:-1]) == 1):
            split, each = (layout.etp, times * experts // layout.ep) if expert else (layout.tp, times)
            frozen += prod(one.op.shard_shape(split)) * each
            for index in adapted_matrices(one.megatron, one.hf, lora):
                (routed if expert else dense).extend((prod(op.shard_shape(split)), each) for op in factor_ops(one.op, index, lora.rank))
        elif expert:
            routed.append((prod(one.op.shard_shape(layout.etp)), times * experts // layout.ep))
            expert_matrices += prod(routed[-1]) * is_matrix(one.megatron)
        elif one.float32:
            buffers += 2 * times * experts  # the bias, and the number of tokens that each expert was given
        elif is_frozen(one.megatron, tower):
            frozen += prod(one.op.packed_shape) * times
        else:
            dense.append((prod(one.op.shard_shape(layout.tp)), times))
            dense_matrices += prod(dense[-1]) * is_matrix(one.megatron)
    return ChunkParameters(tuple(dense), tuple(routed), buffers, frozen, dense_matrices, expert_matrices)


def replicas(layout: Layout) -> tuple[int, int]:
    """The number of ranks that hold the same dense parameters, and the same experts; Megatron shards the optimizer's state over these."""
    return layout.ranks // (layout.tp * layout.pp), layout.ranks // (layout.etp * layout.ep * layout.pp)


def buffer_elements(parameters: SizeCounts, copies: int) -> int:
    """The length of Megatron's buffer for these parameters, aligned and in equal shards (param_and_grad_buffer.py: _ParamAndGradBuffer)."""
    aligned = sum(-(-size // ALIGNED) * ALIGNED * times for size, times in parameters)
    unit = lcm(copies, BUCKET)
    return -(-aligned // unit) * unit


def _layers(mapping: WeightMapping, layers: int) -> int:
    if "{layer}" not in mapping.megatron:
        return 1
    return layers if mapping.layers is None else len(mapping.layers)


def _experts(mapping: WeightMapping, experts: int) -> int:
    return experts if "{expert}" in mapping.megatron else 1
