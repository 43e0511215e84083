"""Every loss, its gradient, its advantages and its metrics are the same on every layout."""

import math
from dataclasses import replace

import numpy as np
import pytest

from megarl.config import Layout
from megarl.observe.metrics import merge, scalars
from tests.distributed.algorithm_losses import SETTINGS, Cut, Part, Step, losses, through_the_model
from tests.distributed.tiny_training import Job, make_checkpoint
from tests.rank_pool import Pool
from tests.unit.algorithms.cases import ALGORITHMS

# With each layout the losses that the suite tries on it, which gives every loss two layouts; `--long` tries all.
SPLITS: dict[str, tuple[Layout, Cut, int, slice]] = {
    "micro_batches": (Layout(), "zigzag", 7, slice(0, None, 3)),
    "dp2_cp2_zigzag": (Layout(ranks=4, cp=2), "zigzag", 2, slice(0, None, 2)),
    "dp2_cp2_contiguous": (Layout(ranks=4, cp=2), "contiguous", 3, slice(1, None, 2)),
    "cp4_zigzag": (Layout(ranks=4, cp=4), "zigzag", 1, slice(1, None, 3)),
    "dp4": (Layout(ranks=4), "contiguous", 2, slice(2, None, 3)),  # the last rank has one pair and an empty micro-batch
}
MODEL = {
    "tp2": (Layout(ranks=2, tp=2), slice(0, None, 3)),
    "pp2": (Layout(ranks=2, pp=2), slice(1, None, 3)),
    "cp2": (Layout(ranks=2, cp=2), slice(0, None, 2)),
    "ep2": (Layout(ranks=2, ep=2), slice(2, None, 3)),
}


@pytest.fixture(scope="module")
def whole(pool: Pool) -> dict[str, Part]:
    """Every loss on one rank, in one piece."""
    return pool.run(losses, Layout(), "contiguous", 1, list(SETTINGS))[0]


@pytest.mark.parametrize("name", SPLITS)
def test_losses_are_independent_of_the_split(pool: Pool, whole: dict[str, Part], name: str, long: bool) -> None:
    layout, cut, micro_batches, some = SPLITS[name]
    tried = list(SETTINGS)[slice(None) if long else some]
    ranks = pool.run(losses, layout, cut, micro_batches, tried)
    for loss in tried:
        one, parts = whole[loss], [rank[loss] for rank in ranks]
        assert math.fsum(part.total for part in parts) == pytest.approx(one.total, rel=1e-12), loss
        for array in ("gradient_T", "advantage_T"):
            expected = getattr(one, array)
            gap = np.abs(sum(getattr(part, array) for part in parts) - expected).max()
            assert gap <= 1e-12 * np.abs(expected).max(), (loss, array)
        assert scalars(merge(part.metrics for part in parts)) == pytest.approx(scalars(one.metrics), rel=1e-11, abs=1e-13), loss


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=2), micro_batches=1)


@pytest.fixture(scope="module")
def one_rank(pool: Pool, job: Job) -> dict[str, Step]:
    return pool.run(through_the_model, Layout(), job, list(ALGORITHMS))[0]


@pytest.mark.parametrize("name", MODEL)
def test_gradient_through_the_model_is_independent_of_the_layout(
    pool: Pool, job: Job, one_rank: dict[str, Step], name: str, long: bool
) -> None:
    layout, some = MODEL[name]
    tried = list(ALGORITHMS)[slice(None) if long else some]
    ranks = pool.run(through_the_model, layout, replace(job, micro_batches=layout.dp * layout.pp), tried)
    for loss in tried:
        one, steps = one_rank[loss], [rank[loss] for rank in ranks]
        assert one.grad_norm > 1e-4
        assert [step.grad_norm for step in steps] == pytest.approx([one.grad_norm] * len(steps), rel=1e-5), loss
        assert sum(step.total for step in steps) == pytest.approx(one.total, rel=1e-5, abs=1e-6), loss
        assert scalars(merge(step.metrics for step in steps)) == pytest.approx(scalars(one.metrics), rel=1e-4, abs=1e-6), loss
        assert {slopes.others for step in steps for slopes in step.slopes} == {0.0}, loss


def test_prompts_and_what_an_environment_said_have_no_gradient(one_rank: dict[str, Step]) -> None:
    """Not even a small one: the slope of every loss by the logits that predict them is 0."""
    for loss, step in one_rank.items():
        [slopes] = step.slopes
        assert slopes.others == 0.0 < 1e-6 < slopes.learned, loss
