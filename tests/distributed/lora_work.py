"""What the ranks of the pool do in the tests of adapters."""

from pathlib import Path

import torch
from torch import Tensor

from megarl.config import LoraSettings, OptimizerSettings
from megarl.models.adapters import adapted, factor_weights
from megarl.models.description import ModelDescription
from megarl.observe.metrics import Metric, scalars
from megarl.parallel.backend import choose
from megarl.parallel.export import export_weights, print_of_base, save_hf
from megarl.parallel.grid import Grid
from megarl.parallel.lora import adapters_of, factor_parameters, without_adapters
from megarl.parallel.optimizer import Trainable
from megarl.parallel.weights import local_parameters
from megarl.ranks.supervised_worker import SupervisedWorker, TrainSpec
from megarl.sync.wire import each
from tests.distributed import fused_layers
from tests.distributed.loop_ranks import supervised_rank
from tests.distributed.test_supervised_worker import OBJECTIVES, plan
from tests.distributed.tiny_training import Job, Report, build, learn, moved


def factors(grid: Grid, policy: Trainable, job: Job) -> dict[str, Tensor]:
    """All factors by PEFT's name, on rank 0."""
    assert job.lora is not None
    weights = factor_weights(adapted(ModelDescription.read(job.path), job.lora).values())
    stream = export_weights(weights, factor_parameters(policy.chunks), grid, torch.float32)
    return {name: tensor.clone() for names, stack in stream for name, tensor in each(names, stack)}


def factor_gradients(grid: Grid, job: Job) -> dict[str, Tensor]:
    """On rank 0 a thousand times the gradient of every factor; the base has not moved. `job` trains with `BY_GRADIENTS`."""
    policy = build(grid, job)
    before, base = factors(grid, policy, job), {name: one.clone() for name, one in local_parameters(policy.chunks, grid.ep_rank).items()}
    learn(grid, policy, job)
    assert all(torch.equal(one, base[name]) for name, one in local_parameters(policy.chunks, grid.ep_rank).items())
    return moved(before, factors(grid, policy, job))


def scores(grid: Grid, job: Job) -> tuple[Report, Report, str]:
    """The log-probs with the adapters, and those without them (job.lora is None: twice the model's); the base's fingerprint."""
    policy = build(grid, job)
    on = learn(grid, policy, job, forward_only=True)
    if job.lora is None:
        return on, on, print_of_base(policy.chunks, ModelDescription.read(job.path), grid)
    with without_adapters(policy.chunks):
        off = learn(grid, policy, job, forward_only=True)
    return on, off, print_of_base(policy.chunks, ModelDescription.read(job.path), grid)


def saved(grid: Grid, job: Job, target: Path) -> dict[str, Tensor]:
    """Writes the model as a directory; its factors, on rank 0."""
    policy = build(grid, job)
    save_hf(policy.chunks, ModelDescription.read(job.path), grid, target)
    return factors(grid, policy, job)


def dropped(grid: Grid, job: Job) -> dict[str, Tensor]:
    """What dropout leaves of ones in front of the adapters, in updates, by the name of their parameter."""
    adapters = adapters_of(build(grid, job).chunks)
    return {name: adapter.train().dropped(torch.ones(64, 32)) for name, adapter in adapters.items()}


def beside_fused_layers(grid: Grid, job: Job) -> tuple[dict[str, Tensor], Report, Report]:
    """As `factor_gradients`, and the log-probs with the adapters and without them, of a model of grouped experts, with Megatron's spec for
    Transformer Engine; see `fused_layers`."""
    fused_layers.install(choose())
    policy = build(grid, job)
    names = [name for chunk in policy.chunks for name, _ in chunk.named_parameters()]
    assert any("experts.linear_fc1.weight0" in name for name in names) and not any("layer_norm_weight" in name for name in names)
    on = learn(grid, policy, job, forward_only=True)
    with without_adapters(policy.chunks):
        off = learn(grid, policy, job, forward_only=True)
    return factor_gradients(grid, job), on, off


def read_back(grid: Grid, job: Job) -> dict[str, Tensor]:
    """The factors of a model that begins from `job.lora.init`."""
    return factors(grid, build(grid, job), job)


def worker(grid: Grid, path: Path, name: str, lora: LoraSettings | None) -> SupervisedWorker:
    """A rank of a supervised stage."""
    return supervised_rank(grid, path, TrainSpec(OBJECTIVES[name], OptimizerSettings(lr=1e-3), updates=3), lora=lora)


def memorised(grid: Grid, path: Path, lora: LoraSettings | None, steps: int) -> list[float]:
    """The loss of each of so many steps on the same texts."""
    rank, texts = worker(grid, path, "sft", lora), plan(OBJECTIVES["sft"], grid.dp_size)
    return [scalars(rank.train(texts))["sft/loss"] for _ in range(steps)]


def supervised(grid: Grid, path: Path, name: str, lora: LoraSettings) -> list[dict[str, Metric]]:
    """Held-out numbers of a supervised stage, a step, held-out numbers."""
    objective, rank = OBJECTIVES[name], worker(grid, path, name, lora)
    held_out = plan(objective, grid.dp_size, seed=5)
    return [rank.measure(held_out), rank.train(plan(objective, grid.dp_size)), rank.measure(held_out)]
