"""Low-rank adapters: their gradients on every layout are those of one rank and of the merged weights; merged, unmerged and off agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megarl.config import Layout, LoraSettings
from tests.distributed.lora_work import factor_gradients
from tests.distributed.tiny_training import BY_GRADIENTS, Job, assert_same_gradients, make_checkpoint
from tests.rank_pool import Pool

LORA = LoraSettings(rank=4, alpha=6.0)
LAYOUTS = {
    "tp2": Layout(ranks=2, tp=2),
    "ep2": Layout(ranks=2, ep=2),
    "pp2": Layout(ranks=2, pp=2),
    "cp2": Layout(ranks=2, cp=2),
    "tp2_ep2": Layout(ranks=2, tp=2, ep=2),
    "tp2_etp2": Layout(ranks=2, tp=2, etp=2),
    "pp2_vpp2": Layout(ranks=2, pp=2, vpp=2),
    "tp2_etp2_ep2": Layout(ranks=4, tp=2, etp=2, ep=2),
    "cp2_tp2": Layout(ranks=4, cp=2, tp=2),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lora") / "model")


def micro_batches(job: Job, layout: Layout) -> Job:
    return replace(job, micro_batches=4 if layout.dp > 1 else 2)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_element_of_the_gradient_is_independent_of_the_layout(pool: Pool, path: Path, name: str) -> None:
    job = Job(path, optimizer=BY_GRADIENTS, lora=LORA)
    [one] = pool.run(factor_gradients, Layout(), job)
    many = pool.run(factor_gradients, LAYOUTS[name], micro_batches(job, LAYOUTS[name]))[0]
    assert_same_gradients(many, one)
