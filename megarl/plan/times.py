"""Seconds of a step from FLOPs, bytes and the assumptions of `devices`: for comparing layouts, not as a promise."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megarl.config import DpoConfig, Layout, RolloutSettings, SftConfig, StepSettings, SupervisedConfig, TrainConfig
from megarl.plan.devices import HOST_BANDWIDTH, HOST_MEMORY, MEAN_LENGTH, NETWORK_SHARE, Device
from megarl.plan.engines import EngineMemory
from megarl.plan.facts import Facts
from megarl.plan.forward import Pipeline, stage_seconds
from megarl.plan.generation import generate_seconds
from megarl.plan.parameters import replicas


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
    """The most micro-batches of a mini-batch on one data-parallel rank: all responses have the greatest length.

    Args:
        train: the section `train`.
        rollout: the section `rollout`, which has the lengths.
        layout: the layout of the ranks.
    """
    return max(1, round(_tokens(train, rollout, 1.0) / train.mini_batches / layout.dp / train.micro_batch_tokens))


def plan_times(
    config: TrainConfig,
    model: Facts,
    elements: int,
    engine: EngineMemory,
    device: Device,
    parked: float,
    offloaded: float,
    sent: float,
    teachers: Sequence[tuple[Facts, int]],
    *,
    ahead: bool,
    engine_device: Device,
    mean_length: float,
) -> StepTimes:
    """Estimate the phases of a step of `megarl train`.

    Args:
        config: the run's configuration.
        model: the policy.
        elements: the number of its parameters.
        engine: a GPU of its engines.
        device: the type of every GPU of the ranks.
        parked: bytes of a rank's models that go to host memory and come back in a step.
        offloaded: bytes of a rank's optimizers that work in host memory.
        sent: bytes of the weights that each engine is sent.
        teachers: each teacher and the number of its parameters; each scores the same share of the tokens.
        ahead: whether engines generate while ranks work.
        engine_device: the type of every GPU of the engines.
        mean_length: of a prompt and of a response, as a share of the longest.
    """
    layout, train, rollout = config.layout, config.train, config.rollout
    longest, fields = _length(rollout, 1.0), config.model.megatron
    tokens = _tokens(train, rollout, mean_length) / layout.dp

    trunk = replace(model, predictor=None)  # what scores, and what the critic is like

    def forward(part: Facts, of: int, *, training: bool) -> float:
        """Seconds of a forward pass through one of so many parts of a step, on the data-parallel rank that has the longest sequence."""
        own = max(tokens / of, longest)
        count = max(1, round(own / train.micro_batch_tokens))
        return _forward(part, elements, layout, fields, device, own, count, longest * mean_length, training=training)

    passes = 1 + config.algorithm.needs_reference + (config.critic is not None)
    factor = 3 + (config.model.recompute == "full")
    critic = 0 if config.critic is None else config.critic.epochs
    updates = forward(model, train.mini_batches, training=True) * train.mini_batches * factor * train.epochs
    updates += forward(trunk, train.mini_batches, training=True) * train.mini_batches * factor * critic
    updates += train.mini_batches * train.epochs * (reduce_seconds(elements, model, layout, device) + _in_host_memory(offloaded))
    if config.algorithm.selects:  # the policy scores each mini-batch before its update; the first has its old log-probs
        updates += forward(trunk, train.mini_batches, training=False) * (train.mini_batches * train.epochs - (config.old_logp == "forward"))
    score = forward(trunk, 1, training=False) * passes
    if teachers:
        own, engines = config.placement.teacher, config.placement.teacher_engines
        if engines is not None:  # those of a teacher score their share of the tokens at the same time as those of the others
            own = Layout(
                ranks=engines.replicas * engines.tp * len(teachers), tp=engines.tp, ep=engines.tp if engines.expert_parallel else 1
            )
        taught = sum(_scored_by(teacher, config, own or layout, device, mean_length) for teacher in teachers) / len(teachers)
        score = max(score, taught) if own is not None else score + taught
    return StepTimes(
        generate=generate_seconds(rollout, train.prompts_per_step, model, elements, engine, engine_device, mean_length),
        score=score,
        update=updates,
        # Each sender's stream goes to all engines at once; GPUs of a node, each with a link of its own, pass on what one of them receives.
        sync=sent / (min(device.network, engine_device.network) * NETWORK_SHARE * min(config.senders, rollout.devices, engine_device.node)),
        park=2 * parked / HOST_BANDWIDTH,
        ahead=ahead,
    )


def _scored_by(teacher: tuple[Facts, int], config: TrainConfig, layout: Layout, device: Device, mean_length: float) -> float:
    """Seconds in which a teacher scores a step's tokens, on ranks of this layout."""
    model, elements = teacher
    tokens = _tokens(config.train, config.rollout, mean_length) / layout.dp
    count = max(1, round(tokens / config.train.micro_batch_tokens))
    fields = config.model.megatron if layout is config.layout else {}
    return _forward(model, elements, layout, fields, device, tokens, count, _length(config.rollout, mean_length), training=False)


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
    exchanged = reduce_seconds(elements, model, layout, device)
    return StepTimes(
        generate=0,
        score=forward if isinstance(config, DpoConfig) and config.algorithm.needs_reference else 0,
        update=forward * (3 + (config.model.recompute == "full")) + exchanged + _in_host_memory(offloaded),
        sync=0,
        park=0,
        ahead=False,
    )


def _length(rollout: RolloutSettings, mean_length: float) -> float:
    return (rollout.max_prompt_tokens + rollout.max_response_tokens) * mean_length


def _tokens(train: StepSettings, rollout: RolloutSettings, mean_length: float) -> float:
    return train.prompts_per_step * rollout.samples_per_prompt * _length(rollout, mean_length)


def reduce_seconds(elements: int, model: Facts, layout: Layout, device: Device) -> float:
    """Seconds of reducing gradients and gathering new weights.

    Args:
        elements: the number of the model's parameters.
        model: the model.
        layout: the layout of the ranks.
        device: the type of every GPU.
    """
    n = model.n
    experts = n.matrices * n.hidden * n.expert_ffn * n.experts * n.mixtures
    dense, routed = replicas(layout)
    elements_per_rank = (elements - experts) / (layout.tp * layout.pp) * (dense - 1) / dense
    elements_per_rank += experts / (layout.etp * layout.ep * layout.pp) * (routed - 1) / routed
    if (layer := model.predictor) is not None:  # on the last stage
        elements_per_rank += layer.dense / layout.tp * (dense - 1) / dense
        elements_per_rank += layer.experts / (layout.etp * layout.ep) * (routed - 1) / routed
    near = layout.ranks <= device.linked
    return elements_per_rank * (4 + 2) / ((device.link if near else device.network) * NETWORK_SHARE)


def _in_host_memory(offloaded: float) -> float:
    """Seconds of Adam's step in host memory: of the 16 bytes per element, 8 (moments) are read and written, 4 (weights) too, and 4
    (gradients) read; gradients come from the GPU, and weights go back.
    """
    return offloaded * (28 / 16 / HOST_MEMORY + 8 / 16 / HOST_BANDWIDTH)
