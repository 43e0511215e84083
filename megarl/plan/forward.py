"""FLOPs of a token, and seconds of a forward pass through the stages of a pipeline."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config import Layout
from megarl.plan.devices import (
    EXCHANGE_LATENCY,
    FLOAT32,
    IMAGE_SHARE,
    IMAGE_TOKENS,
    LAYER_LATENCY,
    NETWORK_SHARE,
    STREAM_SHARE,
    TRAIN_MFU,
    Device,
)
from megarl.plan.facts import Facts
from megarl.plan.parameters import stage_layers
from megarl.plan.tower import tower_flops


def active_parameters(model: Facts, elements: int) -> float:
    """The number of parameters that a token is multiplied with: without the embedding, and only the experts that it is routed to."""
    n = model.n
    inactive = n.matrices * n.hidden * n.expert_ffn * n.mixtures * (n.experts - model.topk)
    return elements - inactive - (0 if model.tied else n.vocab * n.hidden)


def forward_flops(model: Facts, elements: int, length: float) -> float:
    """FLOPs of one token's forward pass: two for each active parameter, and those of attention or of recurrent states.

    Args:
        model: the model.
        elements: the number of its parameters.
        length: the number of tokens of the sequence.
    """
    return 2 * active_parameters(model, elements) + _attention_flops(model, length)


def predictor_flops(model: Facts, length: float) -> float:
    """FLOPs of one token's forward pass through a multi-token prediction layer that is trained, a third of its training; 0: there is none.

    Of the output layer it borrows training computes two passes, since the layer gives it no gradient: here it has two thirds.

    Args:
        model: the model.
        length: the number of tokens of the sequence.
    """
    if model.predictor is None:
        return 0.0
    n, layer = model.n, model.predictor
    active = layer.dense + (layer.experts * model.topk / n.experts if n.experts else 0)
    return 2 * active + 4 * n.heads * _head_width(model) * length / 2 + 2 * n.vocab * n.hidden * 2 / 3


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline, and the micro-batches that pass through them."""

    stages: list[float]  # seconds in which each stage computes a micro-batch forward
    micro_batches: int
    chunks: int  # of a stage: `layout.vpp`, or 1

    @property
    def seconds(self) -> float:
        """Seconds of a forward pass: the slowest stage computes each micro-batch; the others fill and drain the pipeline."""
        slowest = max(self.stages)
        return self.micro_batches * slowest + (sum(self.stages) - slowest) / self.chunks


def stage_seconds(
    model: Facts,
    elements: int,
    layout: Layout,
    megatron: Mapping[str, Any],
    device: Device,
    tokens: float,
    length: float,
    *,
    training: bool,
) -> list[float]:
    """Return the seconds in which each pipeline stage computes a micro-batch forward: its own layers, and on the last the output layer and,
    if the model has one, a multi-token prediction layer.

    Args:
        model: the model.
        elements: the number of its parameters.
        layout: the layout of the ranks.
        megatron: `model.megatron`, for stages of unequal size and the dispatcher of tokens.
        device: the type of every GPU.
        tokens: of the micro-batch, on all ranks that share it.
        length: the number of tokens of a sequence.
        training: whether the pass is one of the three of training, of which the forward pass has a third of the memory traffic: each
            weight is read in all of them, and its float32 gradient is read and written once.
    """
    n, rate = model.n, device.flops * TRAIN_MFU * layout.tp * layout.cp
    traffic = (4 if training else 2) / (device.bandwidth * STREAM_SHARE)
    dense, mixture = (_layer_flops(model, elements, length, experts=experts) for experts in (False, True))
    waits = [
        _wait(model, layout, megatron, device, tokens, length, experts=experts)
        + traffic * _layer_elements(model, elements, layout, experts=experts)
        for experts in (False, True)
    ]
    near = layout.ranks <= device.linked
    hop = tokens * n.hidden * 2 / (layout.tp * layout.cp) / ((device.link if near else device.network) * NETWORK_SHARE)
    seconds = []
    for stage, chunks in enumerate(stage_layers(n.layers, layout, megatron)):
        layers = [layer for chunk in chunks for layer in chunk]
        mixtures = sum(model.has_experts(layer) for layer in layers)
        flops = mixture * mixtures + dense * (len(layers) - mixtures) + 2 * n.vocab * n.hidden * (stage == layout.pp - 1)
        exchanged = waits[True] * mixtures + waits[False] * (len(layers) - mixtures) + hop * len(chunks) * (layout.pp > 1)
        seconds.append(tokens * flops / rate + exchanged)
    if (layer := model.predictor) is not None:
        held = layer.dense / layout.tp + layer.experts / (layout.ep * layout.etp)
        exchanged = _wait(model, layout, megatron, device, tokens, length, experts=bool(n.experts)) + traffic * held
        seconds[-1] += tokens * predictor_flops(model, length) / rate + exchanged
    if n.vision is not None:  # which every rank of the first stage computes, in one of the three passes of training
        seen = tokens * IMAGE_SHARE / IMAGE_TOKENS * tower_flops(n.vision, IMAGE_TOKENS)
        seconds[0] += seen / (device.flops * TRAIN_MFU) / (3 if training else 1)
    return seconds


def _attention_elements(model: Facts, elements: int) -> float:
    """The parameters of a layer without its MLP."""
    n = model.n
    widths = _active_width(model, experts=True) * n.mixtures + _active_width(model, experts=False) * (n.layers - n.mixtures)
    mlp = n.matrices * n.hidden * widths
    return (active_parameters(model, elements) - n.vocab * n.hidden - mlp) / n.layers


def _active_width(model: Facts, *, experts: bool) -> float:
    """The width of the MLP that a token passes through."""
    return model.n.expert_ffn * model.topk + model.n.shared_ffn if experts else model.n.dense_width


def _layer_flops(model: Facts, elements: int, length: float, *, experts: bool) -> float:
    """FLOPs of one token's forward pass through a layer, dense or with experts."""
    mlp = model.n.matrices * model.n.hidden * _active_width(model, experts=experts)
    return 2 * (_attention_elements(model, elements) + mlp) + _attention_flops(model, length) / model.n.layers


def _layer_elements(model: Facts, elements: int, layout: Layout, *, experts: bool) -> float:
    """The parameters of a layer, dense or with experts, on one rank."""
    n = model.n
    routed = n.expert_ffn * n.experts / (layout.ep * layout.etp) if experts else 0.0
    width = (n.shared_ffn if experts else n.dense_width) / layout.tp
    return _attention_elements(model, elements) / layout.tp + n.matrices * n.hidden * (routed + width)


def _wait(
    model: Facts, layout: Layout, megatron: Mapping[str, Any], device: Device, tokens: float, length: float, *, experts: bool
) -> float:
    """Seconds of a layer's forward pass that are not computation: collectives, bfloat16, and the time to launch it.

    Args:
        model: the model.
        layout: the layout of the ranks.
        megatron: `model.megatron`, for the dispatcher of tokens.
        device: the type of every GPU.
        tokens: of the micro-batch, on all ranks that share it.
        length: the number of tokens of a sequence.
        experts: whether the layer's MLP is a mixture of experts.
    """
    n, rows = model.n, tokens / layout.cp
    link, far = device.link * NETWORK_SHARE, device.network * NETWORK_SHARE
    blocks = 1 if experts and layout.etp == 1 else 2  # of attention and MLP, those whose matrices are divided: gather, then scatter
    waits = LAYER_LATENCY
    if layout.tp > 1:
        moved = 2 * blocks * rows * n.hidden * 2 * (layout.tp - 1) / layout.tp
        waits += moved / (link if layout.tp <= device.linked else far) + blocks * EXCHANGE_LATENCY
    if experts and layout.ep * layout.etp > 1:
        ranks = layout.ep * layout.etp
        moved = 2 * rows / layout.tp * n.hidden * 2 * layout.etp  # there and back, of one copy of each token
        outside = max(0.0, 1 - device.linked / ranks)
        copies = model.topk * outside
        if outside and megatron.get("moe_token_dispatcher_type") == "flex":  # DeepEP, HybridEP: one copy for all experts of a node
            nodes = ranks / device.linked
            copies = (nodes - 1) * min(model.chosen / min(nodes, model.groups), 1 - (1 - 1 / nodes) ** model.topk)
        waits += max(moved * copies / far, moved * model.topk * (1 - outside - 1 / ranks) / link) + 2 * EXCHANGE_LATENCY
    if layout.cp > 1:
        moved = rows * 4 * n.groups * n.head_dim / layout.tp * (layout.cp - 1) * model.attention_layers
        if (nets := model.delta_nets) is not None:  # each rank sends its tokens' heads to the ranks that have these, and gets their answers
            moved += rows * 2 * (nets.channels + 2 * nets.values) / layout.tp * (layout.cp - 1) / layout.cp * model.linear_layers
        moved /= n.layers  # of the average layer
        ring = moved / (link if layout.cp * layout.tp <= device.linked else far)
        attention = rows / layout.tp * _attention_flops(model, length) / n.layers / (device.flops * TRAIN_MFU)
        waits += max(0.0, ring - attention) + (layout.cp - 1) * EXCHANGE_LATENCY  # keys and values travel beside the attention to others
    return waits


def _attention_flops(model: Facts, length: float) -> float:
    """FLOPs of one token's causal attention in all layers, forward, in a sequence of so many tokens; and of the states of gated delta nets,
    each of whose numbers is decayed and asked, changed, and asked once more. FLOPs in float32 count as those in which that time passes.
    """
    n = model.n
    seen = (1 - model.windowed) * length / 2 + model.windowed * min(length / 2, model.window or 0)  # keys of the mean query and layer
    flops = 4 * model.attention_layers * n.heads * _head_width(model) * seen
    if n.indexer is not None and model.chooses_keys(length):  # torch computes all scores, later keys' too; those of the indexer in float32
        flops = 2 * flops + 2 * n.layers * n.indexer.heads * n.indexer.head_dim * length * FLOAT32
    return flops if model.delta_nets is None else flops + 7 * model.linear_layers * model.delta_nets.values * model.delta_nets.key_dim


def _head_width(model: Facts) -> float:
    """The mean width of a head's keys and values."""
    return model.n.head_dim if model.latents is None else (model.n.head_dim + model.latents.value) / 2
