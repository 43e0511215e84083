"""What `optimizer.ddp` and `optimizer.megatron` set changes when work is done and where, not what comes out."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.config import Layout
from megarl.host.parking import Parking
from megarl.models.description import ModelDescription
from megarl.parallel.backend import choose
from megarl.parallel.grid import Grid
from tests.distributed.exported import tensors_of
from tests.distributed.tiny_training import Job, Report, build, learn, make_checkpoint
from tests.rank_pool import Pool

OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True, "bucket_size": 20_000, "pad_buckets_for_high_nccl_busbw": True}


def train_and_export(grid: Grid, job: Job) -> tuple[Report, dict[str, Tensor]]:
    """The steps, and on rank 0 the weights after the last one."""
    policy = build(grid, job)
    report = learn(grid, policy, job)
    policy.wait_for_weights()
    return report, tensors_of(policy.chunks, ModelDescription.read(job.path), grid, torch.float32)


def park_twice(grid: Grid, job: Job) -> bool:
    """Trains, and parks the weights; whether they are what they were after they were asked for once more, and came back."""
    policy, parking = build(grid, job), Parking(choose().parking_buffer)
    learn(grid, policy, job)
    policy.wait_for_weights()
    parameters = [parameter.detach() for chunk in policy.chunks for parameter in chunk.parameters()]
    before = [parameter.clone() for parameter in parameters]
    parking.park(parameters)
    policy.wait_for_weights()
    parking.wake()
    return all(map(torch.equal, before, parameters))


def test_weights_that_are_parked_are_not_gathered_once_more(pool: Pool, tmp_path: Path) -> None:
    job = Job(make_checkpoint(tmp_path / "model"), steps=1, optimizer={"ddp": OVERLAPPED})
    assert pool.run(park_twice, Layout(ranks=2), job) == [True, True]


def test_overlapped_communication_gives_the_same_weights_bit_for_bit(pool: Pool, tmp_path: Path) -> None:
    """No gradient is clipped: other buckets sum the norm in another order."""
    job = Job(make_checkpoint(tmp_path / "model"), steps=2, optimizer={"clip_grad": 1e9})
    layout = Layout(ranks=2)
    (plain, weights), *_ = pool.run(train_and_export, layout, job)
    (report, overlapped), *_ = pool.run(train_and_export, layout, replace(job, optimizer={**job.optimizer, "ddp": OVERLAPPED}))
    assert (report.loss, report.logp) == (plain.loss, plain.logp) and report.grad_norm == pytest.approx(plain.grad_norm, rel=1e-6)
    assert [name for name, tensor in weights.items() if not torch.equal(tensor, overlapped[name])] == []
