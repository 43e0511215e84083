"""Seconds of a step from FLOPs, bytes and the assumptions of `devices`: for comparing layouts, not as a promise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.config import DpoConfig, Layout, RolloutSettings, SftConfig, StepSettings, SupervisedConfig, TrainConfig
from megarl.plan.devices import (
    DECODE_LATENCY,
    DECODE_SHARE,
    EXCHANGE_LATENCY,
    HOST_BANDWIDTH,
    HOST_MEMORY,
    IMBALANCE,
    MEAN_LENGTH,
    NETWORK_SHARE,
    PREFILL_MFU,
    REDUCE_LATENCY,
    SEQUENCE_LATENCY,
    Device,
)
from megarl.plan.engines import EngineMemory
from megarl.plan.facts import Facts
from megarl.plan.forward import Pipeline, active_parameters, stage_seconds
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
    teachers: Sequence[tuple[Facts, int]],
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
        teachers: each teacher and the number of its parameters; each scores the same share of the tokens.
        ahead: whether engines generate while ranks work.
    """
    layout, train, rollout = config.layout, config.train, config.rollout
    count, length, fields = micro_batches(train, rollout, layout), _length(rollout), config.model.megatron
    tokens = _tokens(train, rollout) / layout.dp

    def forward(of: int, *, training: bool) -> float:
        """Seconds of a forward pass through one of so many parts of a step."""
        return _forward(model, elements, layout, fields, device, tokens / of, count * train.mini_batches // of, length, training=training)

    passes = 1 + config.algorithm.needs_reference + (config.critic is not None)
    factor = 3 + (config.model.recompute == "full")
    critic = 0 if config.critic is None else config.critic.epochs
    updates = forward(train.mini_batches, training=True) * train.mini_batches * factor * (train.epochs + critic)
    updates += train.mini_batches * train.epochs * (_reduced(elements, model, layout, device) + _in_host_memory(offloaded))
    if config.algorithm.selects:  # the policy scores each mini-batch before its update; the first has its old log-probs
        updates += forward(train.mini_batches, training=False) * (train.mini_batches * train.epochs - (config.old_logp == "forward"))
    score = forward(1, training=False) * passes
    if teachers:
        own, engines = config.placement.teacher, config.placement.teacher_engines
        if engines is not None:  # those of a teacher score their share of the tokens at the same time as those of the others
            own = Layout(
                ranks=engines.replicas * engines.tp * len(teachers), tp=engines.tp, ep=engines.tp if engines.expert_parallel else 1
            )
        taught = sum(_scored_by(teacher, config, own or layout, device) for teacher in teachers) / len(teachers)
        score = max(score, taught) if own is not None else score + taught
    return StepTimes(
        generate=_generate(rollout, train.prompts_per_step, model, elements, engine, device),
        score=score,
        update=updates,
        # Each sender's stream goes to all engines at once; GPUs of a node, each with a link of its own, pass on what one of them receives.
        sync=sent / (device.network * NETWORK_SHARE * min(config.senders, rollout.devices, device.node)),
        park=4 * waiting / HOST_BANDWIDTH,  # out and in, both for scoring and for the update
        ahead=ahead,
    )


def _scored_by(teacher: tuple[Facts, int], config: TrainConfig, layout: Layout, device: Device) -> float:
    """Seconds in which a teacher scores a step's tokens, on ranks of this layout."""
    model, elements = teacher
    tokens = _tokens(config.train, config.rollout) / layout.dp
    count = max(1, round(tokens / config.train.micro_batch_tokens))
    fields = config.model.megatron if layout is config.layout else {}
    return _forward(model, elements, layout, fields, device, tokens, count, _length(config.rollout), training=False)


def _forward(
    model: Facts,
    elements: int,
    layout: Layout,
    megatron: Mapping[str, Any],
    device: Device,
    tokens: float,
    micro_batches: int,
    length: float,
    *,
    training: bool,
) -> float:
    """Seconds of a forward pass of a data-parallel rank's tokens in so many micro-batches; the other arguments as for `stage_seconds`."""
    stages = stage_seconds(model, elements, layout, megatron, device, tokens / micro_batches, length, training=training)
    return Pipeline(stages, micro_batches, layout.vpp or 1).seconds


def plan_supervised(config: SupervisedConfig, model: Facts, elements: int, device: Device, offloaded: float) -> StepTimes:
    """Estimate the phases of a step of a supervised stage.

    Args:
        config: the configuration of the stage.
        model: the model.
        elements: the number of its parameters.
        device: the type of every GPU.
        offloaded: bytes of a rank's optimizer that works in host memory.
    """
    layout, settings, length = config.layout, config.supervised, config.supervised.max_tokens * MEAN_LENGTH
    tokens = settings.batch_size * length * (1 if isinstance(config, SftConfig) else 2) / layout.dp
    count = max(1, round(tokens / settings.micro_batch_tokens))
    forward = _forward(model, elements, layout, config.model.megatron, device, tokens, count, length, training=True)
    return StepTimes(
        generate=0,
        score=forward if isinstance(config, DpoConfig) and config.algorithm.needs_reference else 0,
        update=forward * (3 + (config.model.recompute == "full")) + _reduced(elements, model, layout, device) + _in_host_memory(offloaded),
        sync=0,
        park=0,
        ahead=False,
    )


def _length(rollout: RolloutSettings) -> float:
    return (rollout.max_prompt_tokens + rollout.max_response_tokens) * MEAN_LENGTH


def _tokens(train: StepSettings, rollout: RolloutSettings) -> float:
    return train.prompts_per_step * rollout.samples_per_prompt * _length(rollout)


def _reduced(elements: int, model: Facts, layout: Layout, device: Device) -> float:
    """Seconds of reducing gradients and gathering new weights."""
    n = model.n
    experts = n.matrices * n.hidden * n.expert_ffn * n.experts * n.mixtures
    dense, routed = replicas(layout)
    elements_per_rank = (elements - experts) / (layout.tp * layout.pp) * (dense - 1) / dense
    elements_per_rank += experts / (layout.etp * layout.ep * layout.pp) * (routed - 1) / routed
    near = layout.ranks <= device.linked
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
    size = (rollout.max_prompt_tokens + rollout.max_response_tokens / 2) * MEAN_LENGTH  # tokens of a sequence, halfway through its response
    cached = engine.sequence(size)
    cached_sequences = max(1.0, engine.cache / cached)  # by the cache of a data-parallel rank
    live = min(sequences, engine.dp * min(rollout.max_num_seqs, cached_sequences))
    active, exchanged = active_parameters(model, elements), _met(model, engine, device)
    routed = n.matrices * n.hidden * n.expert_ffn * n.mixtures * model.topk
    computed = active + (IMBALANCE - 1) * routed * (rollout.expert_parallel and ranks > 1)  # whole experts are unequally busy
    waits = n.layers * (DECODE_LATENCY + 2 * REDUCE_LATENCY * (engine.tp > 1) + 2 * EXCHANGE_LATENCY * (engine.dp > 1))

    def each(running: float) -> float:
        touched = 1 - (1 - model.topk / n.experts) ** running if n.experts else 0.0
        read = engine.weights - engine.experts * (1 - touched) + running / engine.dp * (cached + engine.state)  # states are written, too
        compute = 2 * computed * running / ranks / (device.flops * PREFILL_MFU)
        summed = 4 * n.layers * running / engine.dp * n.hidden * 2 * (engine.tp - 1) / engine.tp / (device.link * NETWORK_SHARE)
        on_device = summed + max(read / (device.bandwidth * DECODE_SHARE), compute) + running * exchanged + waits
        return on_device + running / engine.dp * SEQUENCE_LATENCY

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
    together = device.linked if engine.split else max(1, device.linked // engine.tp)
    rate = device.link if engine.devices <= device.linked else min(device.link, together * device.network)
    moved = 2 * model.n.hidden * 2 * (engine.dp - 1) / engine.dp  # both ways, in bfloat16
    return model.n.mixtures * moved / (rate * NETWORK_SHARE)
