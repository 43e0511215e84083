"""A step of training is the same on every layout for every kind of family; a router's expert bias is no parameter of it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from megarl.config import Layout
from megarl.models.description import ModelDescription
from megarl.parallel.grid import Grid
from tests.distributed.exported import tensors_of
from tests.distributed.test_export import stored
from tests.distributed.tiny_families import Make
from tests.distributed.tiny_training import Job, Report, build, learn, train
from tests.rank_pool import Pool
from tests.rows import rows

EVERY_EXPERT = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}  # no near-ties for a layout to break differently
LAYOUTS = {
    "tp2": Layout(ranks=2, tp=2),
    "tp2_ep2": Layout(ranks=2, tp=2, ep=2),
    "pp2": Layout(ranks=2, pp=2),
    "cp2": Layout(ranks=2, cp=2),
    "dp2": Layout(ranks=2),
    "cp2_tp2": Layout(ranks=4, cp=2, tp=2),
    "tp2_pp2": Layout(ranks=4, tp=2, pp=2),
    "ep4": Layout(ranks=4, ep=4),
    "tp2_etp2_ep2": Layout(ranks=4, tp=2, etp=2, ep=2),
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_tied": ("qwen2_tied", {}),
    "deepseek_v3": ("deepseek_v3", EVERY_EXPERT),
    "moonlight": ("moonlight", EVERY_EXPERT),
    "deepseek_v2": ("deepseek_v2", {**EVERY_EXPERT, "topk_method": "greedy"}),
    "deepseek_v2_lite": ("deepseek_v2_lite", EVERY_EXPERT),
    "glm4_moe_lite": ("glm4_moe_lite", EVERY_EXPERT),
    "deepseek_v32": ("deepseek_v32", EVERY_EXPERT),
    "glm_moe_dsa": ("glm_moe_dsa", EVERY_EXPERT),
    "glm4_moe": ("glm4_moe", EVERY_EXPERT),
    "ministral": ("ministral", {}),
    "gpt_oss": ("gpt_oss", {"num_experts_per_tok": 8}),
    "qwen3_next": ("qwen3_next", {"num_experts_per_tok": 8}),
    "qwen3_5_moe": ("qwen3_5_moe", {"num_experts_per_tok": 8}),
    "glm4_moe_dense_stage": ("glm4_moe", {**EVERY_EXPERT, "first_k_dense_replace": 2}),
    "minimax_m2": ("minimax_m2", EVERY_EXPERT),
    "qwen2_moe": ("qwen2_moe", EVERY_EXPERT),
    "olmoe": ("olmoe", EVERY_EXPERT),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_k": 8}),
    "granitemoe": ("granitemoe", {"num_experts_per_tok": 8}),
    "nemotron_h": ("nemotron_h", EVERY_EXPERT),
    "granite": ("granite", {}),
}
CASES = [
    *(("qwen2_tied", name) for name in ("tp2", "pp2", "tp2_pp2", "cp2", "dp2")),
    *(("deepseek_v3", name) for name in ("tp2_ep2", "pp2", "cp2", "tp2_pp2", "ep4", "tp2_etp2_ep2")),
    ("moonlight", "tp2_ep2"),
    *(("moonlight", name) for name in ("pp2", "cp2")),
    *((family, name) for family in ("deepseek_v2", "deepseek_v2_lite", "glm4_moe_lite") for name in ("tp2_ep2", "pp2", "cp2")),
    *(("qwen3_next", name) for name in ("tp2_ep2", "pp2", "cp2", "tp2_pp2", "ep4", "tp2_etp2_ep2", "cp2_tp2")),
    *(("qwen3_5_moe", name) for name in ("tp2_ep2", "pp2", "cp2")),
    *((family, name) for family in ("deepseek_v32", "glm_moe_dsa") for name in ("tp2_ep2", "cp2", "pp2")),
    ("glm4_moe", "tp2_ep2"),
    ("glm4_moe", "cp2"),
    ("glm4_moe_dense_stage", "pp2"),
    *(("gpt_oss", name) for name in ("tp2_ep2", "pp2", "cp2", "tp2_pp2", "ep4")),
    *(("ministral", name) for name in ("tp2", "pp2", "cp2", "dp2", "tp2_pp2")),
    *(("minimax_m2", name) for name in ("tp2_ep2", "pp2", "cp2", "tp2_pp2", "tp2_etp2_ep2")),
    *(("qwen2_moe", name) for name in ("tp2_ep2", "pp2", "cp2", "tp2_pp2")),
    *(("ernie4_5_moe", name) for name in ("tp2_ep2", "pp2", "cp2", "tp2_etp2_ep2")),
    *(("nemotron_h", name) for name in ("tp2_ep2", "pp2", "cp2", "tp2_pp2", "tp2_etp2_ep2", "cp2_tp2")),
    *(("olmoe", name) for name in ("tp2_ep2", "pp2", "cp2")),
    *(("granite", name) for name in ("tp2", "pp2", "cp2")),
    *(("granitemoe", name) for name in ("tp2_ep2", "pp2", "cp2", "tp2_etp2_ep2")),
]
SUITE = [
    ("qwen2_tied", "tp2"),
    ("qwen2_tied", "dp2"),
    ("deepseek_v3", "tp2_etp2_ep2"),
    ("deepseek_v32", "cp2"),
    ("glm4_moe", "cp2"),
    ("ministral", "cp2"),
    ("gpt_oss", "tp2_ep2"),
    ("minimax_m2", "tp2_pp2"),
    ("qwen3_next", "cp2_tp2"),
    ("nemotron_h", "cp2_tp2"),
]
Step = tuple[list[float], list[float], dict[tuple[int, int], float]]  # of training: losses, gradient norms, log-probs


def trained(pool: Pool, layout: Layout, job: Job) -> Step:
    reports: list[Report] = pool.run(train, layout, job)
    logp = {token: value for report in reports for token, value in report.logp.items()}
    norms = [report.grad_norm for report in reports]
    assert all(norm == pytest.approx(norms[0], rel=1e-6) for norm in norms), "ranks disagree about the norm"
    return [sum(step) for step in zip(*(report.loss for report in reports), strict=True)], norms[0], logp


@pytest.fixture(scope="module")
def alone(pool: Pool) -> Callable[[Job], Step]:
    """A job on one rank, each once."""
    known: dict[str, Step] = {}

    def step(job: Job) -> Step:
        if repr(job) not in known:
            known[repr(job)] = trained(pool, Layout(), job)
        return known[repr(job)]

    return step


@pytest.mark.parametrize(("model", "name"), rows(CASES, SUITE))
def test_loss_and_gradient_are_independent_of_the_layout(
    pool: Pool, make: Make, alone: Callable[[Job], Step], model: str, name: str
) -> None:
    variant, changes = MODELS[model]
    job = Job(make(variant, vocab_size=128, **changes), steps=2)
    layout = LAYOUTS[name]
    (loss, norm, logp), others = alone(job), trained(pool, layout, replace(job, micro_batches=4 if layout.dp > 1 else 2))
    assert others[0] == pytest.approx(loss, rel=1e-5) and others[1] == pytest.approx(norm, rel=1e-5)
    assert others[2].keys() == logp.keys() and max(abs(others[2][token] - logp[token]) for token in logp) < 1e-4


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_windows_give_the_same_gradient(
    pool: Pool, make: Make, alone: Callable[[Job], Step], recompute: Literal["selective", "full"]
) -> None:
    """On two stages, whose layers know their own windows."""
    job = Job(make("ministral", vocab_size=128), steps=2)
    (loss, norm, _), others = alone(job), trained(pool, LAYOUTS["pp2"], replace(job, micro_batches=2, recompute=recompute))
    assert others[0] == pytest.approx(loss, rel=1e-5) and others[1] == pytest.approx(norm, rel=1e-5)


ROUTED = [(family, name) for family in ("deepseek_v3", "deepseek_v2", "glm4_moe", "minimax_m2") for name in ("tp2_ep2", "pp2", "cp2")]


@pytest.mark.parametrize(("family", "name"), rows(ROUTED, [("deepseek_v3", "tp2_ep2"), ("deepseek_v3", "cp2"), ("glm4_moe", "pp2")]))
def test_chosen_groups_and_experts_give_the_same_gradient_on_every_layout(
    pool: Pool, make: Make, alone: Callable[[Job], Step], family: str, name: str
) -> None:
    """One step of the real routing, from weights without near-ties."""
    job = Job(make(family, vocab_size=128))
    (loss, norm, _), others = alone(job), trained(pool, LAYOUTS[name], replace(job, micro_batches=2))
    assert others[0] == pytest.approx(loss, rel=1e-5) and others[1] == pytest.approx(norm, rel=1e-5)


def stepped(grid: Grid, job: Job) -> dict[str, Tensor]:
    """The exported tensors after the job's steps."""
    policy = build(grid, job)
    learn(grid, policy, job)
    return tensors_of(policy.chunks, ModelDescription.read(job.path), grid, torch.float32)


BIASED = [(family, name) for family in ("deepseek_v3", "glm4_moe", "minimax_m2") for name in ("tp2_ep2", "pp2")]


@pytest.mark.parametrize(("family", "name"), rows(BIASED, [("deepseek_v3", "pp2"), ("glm4_moe", "tp2_ep2")]))
def test_expert_bias_is_the_one_tensor_that_a_step_leaves_alone(pool: Pool, make: Make, family: str, name: str) -> None:
    job = Job(make(family, vocab_size=128, **EVERY_EXPERT), micro_batches=2)
    before, after = stored(job.path), pool.run(stepped, LAYOUTS[name], job)[0]
    assert after.keys() == before.keys()
    kept = {name.split(".")[-1] for name, tensor in before.items() if torch.equal(after[name], tensor)}
    assert kept == {"e_score_correction_bias"}


def test_a_step_leaves_a_frozen_indexer_alone(pool: Pool, make: Make) -> None:
    job = Job(make("deepseek_v32", vocab_size=128, **EVERY_EXPERT), micro_batches=2)
    before, after = stored(job.path), pool.run(stepped, LAYOUTS["tp2_ep2"], job)[0]
    kept = {key for key, tensor in before.items() if torch.equal(after[key], tensor)}
    assert after.keys() == before.keys()
    assert kept == {key for key in before if ".indexer." in key or key.endswith("e_score_correction_bias")}


def test_expert_bias_moves_where_it_is_asked_to(pool: Pool, make: Make) -> None:
    job = Job(make("deepseek_v3", vocab_size=128), micro_batches=2, megatron={"moe_router_bias_update_rate": 0.5})
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    before = stored(job.path)[name]
    one, two = (pool.run(stepped, layout, job)[0][name] for layout in (Layout(), Layout(ranks=4, tp=2, ep=2)))
    assert torch.equal(one, two) and not torch.equal(one, before)
    assert set(((one - before) / 0.5).round().tolist()) <= {-1.0, 0.0, 1.0}
