"""The same global batch and weights give the same loss and gradient norm on every layout. Always compared with one rank."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from megarl.config import Layout
from tests.distributed.tiny_training import BY_GRADIENTS, Job, Report, assert_same_gradients, gradients, make_checkpoint, plain, train
from tests.rank_pool import Pool
from tests.rows import rows

LAYOUTS = {
    "tp2_ep2": Layout(ranks=4, tp=2, ep=2),
    "pp2_ep2": Layout(ranks=4, pp=2, ep=2),
    "tp2_pp2": Layout(ranks=4, tp=2, pp=2),
    "pp2_vpp2": Layout(ranks=2, pp=2, vpp=2),
    "ep4": Layout(ranks=4, ep=4),
    "cp2": Layout(ranks=2, cp=2),
    "cp2_tp2": Layout(ranks=4, cp=2, tp=2),
    "cp2_pp2": Layout(ranks=4, cp=2, pp=2),
    "tp2_etp2_ep2": Layout(ranks=4, tp=2, etp=2, ep=2),
    "tp2_etp1": Layout(ranks=2, tp=2),
    "dp2": Layout(ranks=2),
}

Run = Callable[[Layout, Job], list[Report]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def top2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "top2", num_experts_per_tok=2)


@pytest.fixture(scope="module")
def run(pool: Pool) -> Run:
    """Reports of a job on a layout; the one-rank answers are kept."""
    known: dict[str, list[Report]] = {}

    def answer(layout: Layout, job: Job) -> list[Report]:
        if layout.ranks > 1:
            return pool.run(train, layout, job)
        if repr(job) not in known:
            known[repr(job)] = pool.run(train, layout, job)
        return known[repr(job)]

    return answer


def assert_equal(run: Run, layout: Layout, job: Job, rel: float, reference: Job | None = None) -> None:
    [one] = run(Layout(), reference or job)
    many = run(layout, job)
    logp: dict[tuple[int, int], float] = {}
    for report in many:
        assert not logp.keys() & report.logp.keys(), "two ranks report one token"
        logp |= report.logp
    assert logp.keys() == one.logp.keys()
    for step in range(job.steps):
        assert sum(report.loss[step] for report in many) == pytest.approx(one.loss[step], rel=rel)
        for report in many:
            assert report.grad_norm[step] == pytest.approx(one.grad_norm[step], rel=rel)
    assert max(abs(value - one.logp[token]) for token, value in logp.items()) < 10 * rel


@pytest.mark.parametrize("name", rows(LAYOUTS, ["pp2_vpp2", "cp2_pp2", "tp2_etp2_ep2", "dp2"]))
def test_loss_and_gradient_are_independent_of_the_layout(run: Run, path: Path, name: str) -> None:
    layout, job = LAYOUTS[name], Job(path, steps=2)
    assert_equal(run, layout, replace(job, micro_batches=4 if layout.dp > 1 else 2), rel=1e-5, reference=job)


@pytest.mark.parametrize("name", rows(LAYOUTS, ["cp2_tp2", "tp2_etp2_ep2"]))
def test_each_element_of_the_gradient_is_independent_of_the_layout(pool: Pool, path: Path, name: str) -> None:
    layout, job = LAYOUTS[name], Job(path, optimizer=BY_GRADIENTS)
    [one] = pool.run(gradients, Layout(), job)
    assert_same_gradients(pool.run(gradients, layout, replace(job, micro_batches=4 if layout.dp > 1 else 2))[0], one)


def test_gradient_is_that_of_the_summed_loss(run: Run, path: Path, pool: Pool) -> None:
    """Schedule, gradient buffers and optimizer together are autograd of the sum and torch's AdamW."""
    job = Job(path, steps=3)
    [ours], [reference] = run(Layout(), job), pool.run(plain, Layout(), job)
    assert ours.loss == pytest.approx(reference.loss, rel=1e-5)
    assert ours.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5)
    assert ours.logp == pytest.approx(reference.logp, abs=1e-4)


def test_packing_changes_nothing(run: Run, path: Path) -> None:
    together, alone = Job(path, micro_batches=1), Job(path, micro_batches=12)
    assert run(Layout(), alone)[0].runs == 12
    assert_equal(run, Layout(), alone, rel=1e-5, reference=together)


@pytest.mark.parametrize("layout", [Layout(ranks=2, pp=2), Layout(ranks=2, pp=2, vpp=2)], ids=["pp2", "pp2_vpp2"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_any_number_of_micro_batches_fits_the_pipeline(run: Run, path: Path, layout: Layout, micro_batches: int) -> None:
    assert_equal(run, layout, Job(path, micro_batches=micro_batches), rel=1e-5, reference=Job(path, micro_batches=1))


@pytest.mark.parametrize("name", rows(["tp2_ep2", "pp2_ep2", "ep4", "cp2_tp2", "tp2_pp2", "pp2_vpp2"], ["pp2_ep2", "ep4"]))
def test_auxiliary_loss_is_independent_of_the_layout(run: Run, top2: Path, name: str) -> None:
    """Averaged over micro-batches and data-parallel ranks, padding and filler micro-batches not counted. One step from weights without
    near-ties; with every expert chosen the loss would be constant."""
    layout = LAYOUTS[name]
    job = Job(top2, micro_batches=4 if layout.dp > 1 else 3, megatron={"moe_aux_loss_coeff": 10.0})
    [one], [without] = run(Layout(), job), run(Layout(), Job(top2, micro_batches=job.micro_batches))
    assert one.grad_norm[0] != pytest.approx(without.grad_norm[0], rel=1e-2)
    assert_equal(run, layout, job, rel=1e-5)


@pytest.mark.parametrize("recompute", rows(["selective", "full"], ["full"]))
def test_recomputation_changes_nothing(run: Run, path: Path, recompute: Literal["selective", "full"]) -> None:
    assert_equal(run, LAYOUTS["tp2_pp2"], Job(path, micro_batches=2, recompute=recompute), rel=1e-5, reference=Job(path))


@pytest.mark.parametrize("name", rows(["tp2_ep2", "pp2_vpp2", "cp2"], ["tp2_ep2", "cp2"]))
def test_bfloat16_follows_float32(run: Run, path: Path, name: str) -> None:
    """Logits and gradients of bfloat16 carry 8 bits: a few parts in a thousand of the float32 values."""
    assert_equal(run, LAYOUTS[name], Job(path, dtype="bfloat16"), rel=3e-2, reference=Job(path))
