"""Muon against its definition in float64, and the same update of every matrix on every layout."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config import Layout
from megarl.parallel.export import export_weights
from megarl.parallel.grid import Grid
from megarl.parallel.muon import MuonBesideAdam
from megarl.parallel.optimizer import StepInfo
from megarl.parallel.weights import local_parameters
from megarl.sync.wire import each
from tests.distributed.test_layouts import LAYOUTS
from tests.distributed.tiny_families import Make
from tests.distributed.tiny_training import Job, build, exported, learn, make_checkpoint, moved
from tests.rank_pool import Pool
from tests.rows import rows
from tests.unit.parallel.test_muon import by_singular_values, distance

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ONE = Layout()
DP4 = Layout(ranks=4)


@dataclass(frozen=True)
class Step:
    """One step of one rank, by Hugging Face's names."""

    gradients: dict[str, Tensor]  # before clipping
    norm: float
    before: dict[str, Tensor]
    after: dict[str, Tensor]


def steps_of(grid: Grid, job: Job) -> list[Step]:
    """The steps of a job on one rank, whose gradient buffers hold the gradient."""
    policy, steps = build(grid, job), list[Step]()
    weights = [weight for weight in job.description.weights("lm") if not weight.alias]
    take = policy.step

    def step() -> StepInfo:
        buffers = {name: parameter.main_grad for name, parameter in local_parameters(policy.chunks, 0).items()}  # type: ignore[attr-defined]
        stacks = export_weights(weights, buffers, grid, torch.float32)
        gradients = {name: tensor.clone() for names, stack in stacks for name, tensor in each(names, stack)}
        before = exported(grid, policy, job)
        info = take()
        steps.append(Step(gradients, info.grad_norm, before, exported(grid, policy, job)))
        return info

    policy.step = step  # type: ignore[method-assign]
    learn(grid, policy, job)
    return steps


def trained(grid: Grid, job: Job) -> tuple[dict[str, Tensor], int]:
    """By how much each weight has fallen, on rank 0, and the number of matrices of which this rank's slices hold only a piece."""
    policy = build(grid, job)
    before = exported(grid, policy, job)
    learn(grid, policy, job)
    muons = [part.optimizer for part in policy.optimizer.chained_optimizers if isinstance(part.optimizer, MuonBesideAdam)]
    cut = sum(not one.whole for muon in muons for one in muon._held)
    return moved(before, exported(grid, policy, job)), cut


def expected(steps: list[Step], name: str, settings: Mapping[str, Any], lr: float, decay: float, clip: float) -> list[Tensor]:
    """By how much a matrix falls in each step, from its gradients, all in float64."""
    momentum, average, falls = settings.get("momentum", 0.95), torch.zeros(()).double(), []
    for step in steps:
        gradient = step.gradients[name].double() * min(1.0, clip / (step.norm + 1e-6))
        average = momentum * average + (1 - momentum) * gradient
        direction = (1 - momentum) * gradient + momentum * average if settings.get("nesterov", True) else average
        outputs, inputs = direction.shape
        factor = 0.2 * max(outputs, inputs) ** 0.5 if "adjust_lr" not in settings else max(1.0, outputs / inputs) ** 0.5
        update = factor * by_singular_values(direction, settings.get("ns_steps", 5))
        falls.append(lr * (update + decay * step.before[name].double()))
    return falls


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=2)


def is_matrix(name: str) -> bool:
    return name.split(".")[-2] in MATRICES


CASES: dict[str, dict[str, Any]] = {
    "default": {},
    "momentum": {"momentum": 0.7, "nesterov": False, "ns_steps": 3},
    "original": {"adjust_lr": "original", "lr": 0.02},
    "routers": {"routers": True},
}


@pytest.mark.parametrize("name", rows(CASES, ["default"]))
def test_each_matrix_moves_by_the_definition_in_float64(pool: Pool, path: Path, name: str) -> None:
    """From the gradients of the step's own buffers: clipping, momentum, orthogonalisation by singular values, scale, decay. To 1e-5 of the
    update's norm: that of the polynomial of float64, not that of exact orthogonal factors, from which any Newton-Schulz differs by tenths.
    What is no matrix moves as by AdamW alone, to the bit in the first step."""
    muon, common = CASES[name], {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.5}
    job = Job(path, steps=3, optimizer={**common, "muon": muon})
    [steps], [plain] = pool.run(steps_of, ONE, job), pool.run(steps_of, ONE, replace(job, steps=1, optimizer=common))
    assert any(step.norm > common["clip_grad"] for step in steps)
    names = {one for one in steps[0].before if is_matrix(one) or (muon.get("routers") and one.endswith("mlp.gate.weight"))}
    assert len(names) == 2 * (4 + 4 * 3 + bool(muon.get("routers")))
    for one in names:
        for step, fall in zip(steps, expected(steps, one, muon, muon.get("lr", 0.02), 0.1, 0.5), strict=True):
            # The rows of a router's gradient add up to zero (its probabilities to one): the least singular value is float32's rounding,
            # 2^-24 of the norm, which five steps raise 3.4445^5-fold.
            router = one.endswith("mlp.gate.weight")
            assert not router or torch.linalg.svdvals(step.gradients[one])[-1] <= 1e-6 * step.gradients[one].norm()
            assert distance(step.before[one] - step.after[one], fall) <= (1e-4 if router else 1e-5), one
        assert not torch.equal(steps[0].after[one], plain[0].after[one])
    for one in steps[0].before.keys() - names:
        assert torch.equal(steps[0].after[one], plain[0].after[one]), one


Run = Callable[[Layout, Job], dict[str, Tensor]]


def assert_same_updates(pool: Pool, layout: Layout, job: Job) -> int:
    """To 1e-3 of each matrix's update, since the smallest singular values, of which a layout's rounding is not a small part, are raised
    500-fold. Returns the number of matrices that lie across the borders of slices."""
    [(one, _)] = pool.run(trained, ONE, job)
    ranks = pool.run(trained, layout, replace(job, micro_batches=4 if layout.dp > 1 else 2))
    many = ranks[0][0]
    assert many.keys() == one.keys()
    compared = [name for name in one if one[name].ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight"))]
    assert compared
    for name in compared:
        assert distance(many[name], one[name].double()) <= 1e-3, name
    return sum(cut for _, cut in ranks)


EVERY = {**LAYOUTS, "dp4": DP4}


@pytest.mark.parametrize("name", rows(EVERY, ["tp2_etp2_ep2"]))
def test_matrices_are_updated_whole_on_every_layout(pool: Pool, path: Path, tmp_path: Path, name: str) -> None:
    if EVERY[name].vpp:
        path = make_checkpoint(tmp_path / "model")  # of four layers
    cut = assert_same_updates(pool, EVERY[name], Job(path, steps=2, optimizer={"eps": 1e-3, "muon": {}}))
    assert cut or name != "dp4"


FAMILIES = {
    "gpt_oss": {"num_experts_per_tok": 8},  # gate and up in turn
    "qwen3_next": {"num_experts_per_tok": 8},  # delta nets
    "phi3": {},  # fused projections
    "deepseek_v3": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},  # projections that every tensor-parallel rank has
    "nemotron_h": {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1},  # Mamba
}


@pytest.mark.parametrize("family", rows(FAMILIES, []))
def test_matrices_of_every_kind_are_updated_whole(pool: Pool, make: Make, family: str) -> None:
    path = make(family, vocab_size=128, **FAMILIES[family])
    experts = 2 if family != "phi3" else 1
    assert_same_updates(pool, Layout(ranks=2, tp=2, ep=experts), Job(path, steps=2, optimizer={"eps": 1e-3, "muon": {}}))
