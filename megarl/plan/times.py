"""Seconds of a step from FLOPs, bytes and the assumptions of `devices`: for comparing layouts, not as a promise."""

from __future__ import annotations

from dataclasses import dataclass

from megarl.config import DpoConfig, Layout, LearnConfig, RolloutSettings, SftConfig, StepSettings, TrainConfig
from megarl.plan.devices import (
    DECODE_SHARE,
    HOST_BANDWIDTH,
    HOST_MEMORY,
    IMBALANCE,
    MEAN_LENGTH,
    NETWORK_SHARE,
    NODE,
    PREFILL_MFU,
    TRAIN_MFU,
    Device,
)
from megarl.plan.engines import EngineMemory
from megarl.plan.facts import Facts
from megarl.plan.parameters import replicas

TAIL = 1 / 8  # share of an engine's sequences that still run while the longest responses finish


@dataclass(frozen=True)
class StepTimes:
    """Seconds of the phases of a step. They are sequential, except that engines that run ahead generate while ranks score and update."""

    generate: float
    score: float  # old log-probs, reference, values
    update: float
    sync: float
    park: float  # of models that take turns
    ahead: bool  # whether engines run ahead

    @property
    def step(self) -> float:
        ranks = self.score + self.update + self.park
        return (max(self.generate, ranks) if self.ahead else self.generate + ranks) + self.sync


def active_parameters(model: Facts, elements: int) -> float:
    """The number of parameters that a token is multiplied with: without the embedding, and only the experts that it is routed to."""
    n = model.n
    inactive = 3 * n.hidden * n.expert_ffn * (n.layers - n.dense) * (n.experts - model.topk) if n.experts else 0
    return elements - inactive - (0 if model.tied else n.vocab * n.hidden)


def forward_flops(model: Facts, elements: int, length: float) -> float:
    """FLOPs of one token's forward pass: two for each active parameter, and causal attention.

    Args:
        model: the model.
        elements: the number of its parameters.
        length: the number of tokens of the sequence.
    """
    n, width = model.n, model.n.head_dim if model.latents is None else (model.n.head_dim + model.latents.value) / 2
    return 2 * active_parameters(model, elements) + 4 * n.layers * n.heads * width * length / 2


def micro_batches(train: StepSettings, rollout: RolloutSettings, layout: Layout) -> int:
    """The number of micro-batches of a mini-batch on one data-parallel rank, at the mean length.

    Args:
        train: the section `train`.
        rollout: the section `rollout`, which has the lengths.
        layout: the layout of the ranks.
    """
    return max(1, round(_tokens(train, rollout) / train.mini_batches / layout.dp / train.micro_batch_tokens))


def plan_times(
    config: TrainConfig,
    model: Facts,
    elements: int,
    engine: EngineMemory,
    device: Device,
    waiting: float,
    offloaded: float,
    sent: float,
    *,
    ahead: bool,
) -> StepTimes:
    """Estimate the phases of a step of `megarl train`.

    Args:
        config: the run's configuration.
        model: the policy.
        elements: the number of its parameters.
        engine: a GPU of its engines.
        device: the type of every GPU.
        waiting: bytes of a rank's models that wait in host memory.
        offloaded: bytes of a rank's optimizers that work in host memory.
        sent: bytes of the weights that each engine is sent.
        ahead: whether engines generate while ranks work.
    """
    layout, train, rollout = config.layout, config.train, config.rollout
    tokens = _tokens(train, rollout)
    passes = 1 + config.algorithm.needs_reference + (config.critic is not None)
    forward = _forward(tokens, _length(rollout), model, elements, layout, device)
    bubble = 1 + (layout.pp - 1) / (micro_batches(train, rollout, layout) * (layout.vpp or 1))
    factor = 3 + (config.model.recompute == "full")
    critic = 0 if config.critic is None else config.critic.epochs
    updates = forward * factor * (train.epochs + critic) * bubble
    updates += train.mini_batches * train.epochs * (_reduced(elements, model, layout, device) + _in_host_memory(offloaded))
    return StepTimes(
        generate=_generate(rollout, train.prompts_per_step, model, elements, engine, device),
        score=forward * passes * bubble,
        update=updates,
        # Each sender's stream goes to all engines at once; GPUs of a node, each with a link of its own, pass on what one of them receives.
        sync=sent / (device.network * NETWORK_SHARE * min(config.senders, rollout.devices, NODE)),
        park=4 * waiting / HOST_BANDWIDTH,  # out and in, both for scoring and for the update
        ahead=ahead,
    )


def plan_learning(config: LearnConfig, model: Facts, elements: int, device: Device, offloaded: float) -> StepTimes:
    """Estimate the phases of a step of a supervised stage.

    Args:
        config: the configuration of the stage.
        model: the model.
        elements: the number of its parameters.
        device: the type of every GPU.
        offloaded: bytes of a rank's optimizer that works in host memory.
    """
    layout, learn, length = config.layout, config.learn, config.learn.max_tokens * MEAN_LENGTH
    tokens = learn.batch_size * length * (1 if isinstance(config, SftConfig) else 2)
    forward = _forward(tokens, length, model, elements, layout, device)
    bubble = 1 + (layout.pp - 1) / (max(1, round(tokens / layout.dp / learn.micro_batch_tokens)) * (layout.vpp or 1))
    return StepTimes(
        generate=0,
        score=forward * bubble if isinstance(config, DpoConfig) and config.algorithm.needs_reference else 0,
        update=forward * (3 + (config.model.recompute == "full")) * bubble
        + _reduced(elements, model, layout, device)
        + _in_host_memory(offloaded),
        sync=0,
        park=0,
        ahead=False,
    )


def _forward(tokens: float, length: float, model: Facts, elements: int, layout: Layout, device: Device) -> float:
    """Seconds of a forward pass over a step's tokens, without the pipeline's bubble."""
    computed = tokens * forward_flops(model, elements, length) / layout.ranks / (device.flops * TRAIN_MFU)
    return computed + tokens / layout.dp * _exchanged(model, layout, device)


def _length(rollout: RolloutSettings) -> float:
    return (rollout.max_prompt_tokens + rollout.max_response_tokens) * MEAN_LENGTH


def _tokens(train: StepSettings, rollout: RolloutSettings) -> float:
    return train.prompts_per_step * rollout.samples_per_prompt * _length(rollout)


def _exchanged(model: Facts, layout: Layout, device: Device) -> float:
    """Seconds per token of a data-parallel replica in tensor-, expert- and context-parallel collectives, forward, bfloat16."""
    n, stages = model.n, layout.pp
    rows = 1 / layout.cp  # the share of a token on each context-parallel rank
    link = device.link * NETWORK_SHARE
    far = device.network * NETWORK_SHARE
    tensor = 4 * rows * n.hidden * 2 * (layout.tp - 1) / layout.tp / (link if layout.tp <= NODE else far)
    experts = 2 * rows / layout.tp * model.topk * n.hidden * 2 * layout.etp * (layout.ep - 1) / layout.ep
    experts /= link if layout.ep * layout.etp <= NODE else far
    ring = rows * 4 * n.groups * n.head_dim / layout.tp * (layout.cp - 1) / (link if layout.cp * layout.tp <= NODE else far)
    return n.layers / stages * (tensor + experts + ring)


def _reduced(elements: int, model: Facts, layout: Layout, device: Device) -> float:
    """Seconds of reducing gradients and gathering new weights."""
    n = model.n
    experts = 3 * n.hidden * n.expert_ffn * n.experts * (n.layers - n.dense) if n.experts else 0
    dense, routed = replicas(layout)
    elements_per_rank = (elements - experts) / (layout.tp * layout.pp) * (dense - 1) / dense
    elements_per_rank += experts / (layout.etp * layout.ep * layout.pp) * (routed - 1) / routed
    near = layout.ranks <= NODE
    return elements_per_rank * (4 + 2) / ((device.link if near else device.network) * NETWORK_SHARE)


def _in_host_memory(offloaded: float) -> float:
    """Seconds of Adam's step in host memory: of the 16 bytes per element, 8 (moments) are read and written, 4 (weights) too, and 4
    (gradients) read; gradients come from the GPU, and weights go back.
    """
    return offloaded * (28 / 16 / HOST_MEMORY + 8 / 16 / HOST_BANDWIDTH)


def _generate(rollout: RolloutSettings, prompts: int, model: Facts, elements: int, engine: EngineMemory, device: Device) -> float:
    """Seconds of generation: prompts by their FLOPs, responses by what an engine reads in each decoding step, weights and KV cache.

    If its attention is data parallel, add the exchange of tokens with the experts.
    """
    n, ranks = model.n, engine.devices
    sequences = prompts * rollout.samples_per_prompt / rollout.replicas
    response = rollout.max_response_tokens * MEAN_LENGTH
    cached_sequences = max(1.0, engine.cache / (engine.token * _length(rollout)))  # by the cache of a data-parallel rank
    live = min(sequences, engine.dp * min(rollout.max_num_seqs, cached_sequences))
    active, exchanged = active_parameters(model, elements), _met(model, engine, device)
    routed = 3 * n.hidden * n.expert_ffn * (n.layers - n.dense) * model.topk
    computed = active + (IMBALANCE - 1) * routed * (rollout.expert_parallel and ranks > 1)  # whole experts are unequally busy

    def each(running: float) -> float:
        touched = min(1.0, running * model.topk / n.experts) if n.experts else 0.0
        read = engine.weights - engine.experts * (1 - touched) + running / engine.dp * engine.token * _length(rollout)
        compute = 2 * computed * running / ranks / (device.flops * PREFILL_MFU)
        return max(read / (device.bandwidth * DECODE_SHARE), compute) + running * exchanged

    full = sequences * response / live
    tail = max(0.0, rollout.max_response_tokens - full)  # while only the longest responses run
    reading = prompts / rollout.replicas * rollout.max_prompt_tokens * MEAN_LENGTH  # tokens of prompts
    read_s = reading * (2 * computed / ranks / (device.flops * PREFILL_MFU) + exchanged)
    return full * each(live) + tail * each(live * TAIL) + read_s


def _met(model: Facts, engine: EngineMemory, device: Device) -> float:
    """Seconds per token in which the tokens of all data-parallel ranks are gathered where their experts are, and the results go back.

    Between nodes each GPU receives as much as the network of those GPUs of its node brings that gather the same tokens.
    """
    if engine.dp == 1:
        return 0.0
    together = NODE if engine.split else max(1, NODE // engine.tp)
    rate = device.link if engine.devices <= NODE else min(device.link, together * device.network)
    moved = 2 * model.n.hidden * 2 * (engine.dp - 1) / engine.dp  # both ways, in bfloat16
    return (model.n.layers - model.n.dense) * moved / (rate * NETWORK_SHARE)
