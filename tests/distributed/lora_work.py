"""What the ranks of the pool do in the tests of adapters."""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.models.adapters import adapted, factor_weights
from megarl.models.description import ModelDescription
from megarl.parallel.export import export_weights
from megarl.parallel.grid import Grid
from megarl.parallel.lora import factor_parameters, without_adapters
from megarl.parallel.optimizer import Trainable
from megarl.parallel.weights import local_parameters
from megarl.sync.wire import each
from tests.distributed.tiny_training import Job, Report, build, exported, learn, moved


def factors(grid: Grid, policy: Trainable, job: Job) -> dict[str, Tensor]:
    """All factors by PEFT's name, on rank 0."""
    assert job.lora is not None
    model = ModelDescription.read(job.path)
    weights = factor_weights(adapted(model, job.lora).values())
    stream = export_weights(weights, factor_parameters(policy.chunks), grid, torch.float32)
    return {name: tensor.clone() for names, stack in stream for name, tensor in each(names, stack)}


def factor_gradients(grid: Grid, job: Job) -> dict[str, Tensor]:
    """On rank 0 a thousand times the gradient of every factor; the base has not moved. `job` trains with `BY_GRADIENTS`."""
    policy = build(grid, job)
    before, base = factors(grid, policy, job), {name: one.clone() for name, one in local_parameters(policy.chunks, grid.ep_rank).items()}
    learn(grid, policy, job)
    assert all(torch.equal(one, base[name]) for name, one in local_parameters(policy.chunks, grid.ep_rank).items())
    return moved(before, factors(grid, policy, job))


def whole(grid: Grid, job: Job) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """On rank 0 the factors, and the merged model."""
    policy = build(grid, job)
    return factors(grid, policy, job), exported(grid, policy, job)


def with_and_without(grid: Grid, job: Job) -> tuple[Report, Report]:
    """A step's report with the adapters, and one without them, which changes nothing."""
    policy = build(grid, job)
    with without_adapters(policy.chunks):
        off = learn(grid, policy, job, forward_only=True)
    return learn(grid, policy, job, forward_only=True), off
