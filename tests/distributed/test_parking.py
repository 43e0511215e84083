"""A model leaves the device, or all of it but the weights, and comes back bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import Layout, ModelSettings, OptimizerSettings
from megarl.parallel.backend import choose
from megarl.parallel.grid import Grid
from megarl.ranks.model import Model
from tests.distributed.tiny_training import Job, Report, learn, make_checkpoint
from tests.rank_pool import Pool


def held(tensors: Any) -> int:
    """The bytes that the tensors' storages have on the device."""
    return sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def streamed(model: Model) -> dict[tuple[str, ...], torch.Tensor]:
    """The weights as they are sent."""
    return {tuple(names): tensor.clone() for names, tensor in model.stream(None, by_stage=False)}


def turns(grid: Grid, job: Job, away: bool) -> tuple[Report, bool]:
    """Two steps of training; between them, if `away`, the model leaves the device in all ways.

    Returns:
        A report of the second step, and whether the same weights were sent meanwhile.
    """
    settings = ModelSettings(path=job.path, dtype=job.dtype)
    model = Model(job.path, settings, grid.layout, choose(), grid, optimizer=OptimizerSettings(lr=1e-3), updates=2)
    assert (policy := model._trainable) is not None
    learn(grid, policy, job)
    same = True
    if away:
        weights = [weight for chunk in model.chunks for weight in chunk.parameters()]
        own = {weight.untyped_storage()._cdata for weight in weights}
        rest = [one for one in (*policy.gradients(), *policy.state()) if one.untyped_storage()._cdata not in own]
        whole, before = held(weights), streamed(model)
        for leave in (model.park_training, model.park, model.park_training):
            leave()
            alone = leave == model.park_training
            assert (held(weights), held(rest)) == (whole if alone else 0, 0)
            same &= not alone or all(torch.equal(tensor, before[names]) for names, tensor in streamed(model).items())
        model.wake()
        assert held(weights) == whole and held(rest) > 0
    return learn(grid, policy, job), same


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_goes_on_after_all_but_the_weights_have_left(pool: Pool, tmp_path: Path, dtype: Any) -> None:
    """In float32 the optimizer's weights are the model's own, and stay with them."""
    job = Job(make_checkpoint(tmp_path / "model"), micro_batches=2, sequences=4, dtype=dtype)
    layout = Layout(ranks=2, tp=2, ep=2)
    for stayed, left in zip(pool.run(turns, layout, job, False), pool.run(turns, layout, job, True), strict=True):
        assert left == stayed and left[1]
