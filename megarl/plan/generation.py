"""Seconds in which engines generate the responses of a step, from FLOPs, bytes and the assumptions of `devices`."""

from megarl.config import TrainRolloutSettings
from megarl.plan.devices import (
    DECODE_LATENCY,
    EXCHANGE_LATENCY,
    IMBALANCE,
    NETWORK_SHARE,
    PREFILL_MFU,
    REDUCE_LATENCY,
    SEQUENCE_LATENCY,
    STREAM_SHARE,
    Device,
)
from megarl.plan.engines import EngineMemory
from megarl.plan.facts import Facts
from megarl.plan.forward import active_parameters

TAIL = 1 / 8  # share of an engine's sequences that still run while the longest responses finish


def generate_seconds(
    rollout: TrainRolloutSettings, prompts: int, model: Facts, elements: int, engine: EngineMemory, device: Device, mean_length: float
) -> float:
    """Seconds of generation: prompts by their FLOPs, responses by decoding steps.

    Args:
        rollout: the section `rollout`.
        prompts: of a step.
        model: the policy.
        elements: the number of its parameters.
        engine: a GPU of an engine.
        device: the type of that GPU.
        mean_length: of a prompt and of a response, as a share of the longest.
    """
    sequences = prompts * rollout.samples_per_prompt / rollout.replicas
    response = rollout.max_response_tokens * mean_length
    size = rollout.max_prompt_tokens * mean_length + response / 2  # tokens of a sequence, halfway through its response
    cached_sequences = max(1.0, engine.cache / engine.sequence(size))  # by the cache of a data-parallel rank
    ready = sequences * (1 + (rollout.max_lag or 0))  # with mode free, where those of later steps fill what the longest leave empty
    live = min(ready, engine.dp * min(rollout.max_num_seqs, cached_sequences))

    def each(running: float) -> float:
        return decode_seconds(model, elements, engine, device, running, size, expert_parallel=rollout.expert_parallel)

    full = sequences * response / live
    tail = max(0.0, rollout.max_response_tokens - full) if rollout.mode != "free" else 0.0  # while only the longest responses run
    reading = prompts / rollout.replicas * rollout.max_prompt_tokens * mean_length  # tokens of prompts
    read_s = reading * (_compute(model, elements, engine, device, rollout.expert_parallel) + _met(model, engine, device))
    return full * each(live) + tail * each(live * TAIL) + read_s


def decode_seconds(
    model: Facts, elements: int, engine: EngineMemory, device: Device, running: float, tokens: float, *, expert_parallel: bool
) -> float:
    """Seconds of a decoding step: what an engine reads, weights and KV cache, or computes if that takes longer; the sums over its tensor
    parallel group, the exchange of tokens with the experts, and what each layer takes beside that.

    Args:
        model: the model.
        elements: the number of its parameters.
        engine: a GPU of the engine.
        device: the type of that GPU.
        running: the sequences that run in the whole engine.
        tokens: of each of them.
        expert_parallel: whether each GPU has whole experts, which are unequally busy.
    """
    n, own = model.n, running / engine.dp
    touched = 1 - (1 - model.topk / n.experts) ** running if n.experts else 0.0
    read = engine.weights - engine.experts * (1 - touched) + own * (engine.sequence(tokens) + engine.state)  # states are written, too
    compute = running * _compute(model, elements, engine, device, expert_parallel)
    summed = 4 * n.layers * own * n.hidden * 2 * (engine.tp - 1) / engine.tp / (device.link * NETWORK_SHARE)
    collectives = 2 * REDUCE_LATENCY * (engine.tp > 1) + 2 * EXCHANGE_LATENCY * (engine.dp > 1)
    waits = n.layers * (DECODE_LATENCY + collectives + own * SEQUENCE_LATENCY)
    return summed + max(read / (device.bandwidth * STREAM_SHARE), compute) + running * _met(model, engine, device) + waits


def _compute(model: Facts, elements: int, engine: EngineMemory, device: Device, expert_parallel: bool) -> float:
    """Seconds of the matrix products of a token, of which each GPU of the engine has its share; the busiest experts have more."""
    n = model.n
    routed = n.matrices * n.hidden * n.expert_ffn * n.mixtures * model.topk
    computed = active_parameters(model, elements) + (IMBALANCE - 1) * routed * (expert_parallel and engine.devices > 1)
    return 2 * computed / engine.devices / (device.flops * PREFILL_MFU)


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
