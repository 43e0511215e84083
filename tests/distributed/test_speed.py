"""The FLOPs that speeds are told by are those that torch counts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from megarl.batch import Batch
from megarl.config import Layout
from megarl.models.description import ModelDescription
from megarl.observe.metrics import merge, scalars
from megarl.parallel import schedule
from megarl.parallel.grid import Grid
from megarl.parallel.predictor import PredictorPass
from megarl.ranks.speed import speed, training_flops
from tests.distributed.predictor_models import with_predictor
from tests.distributed.tiny_families import Make
from tests.distributed.tiny_training import Job, build, global_batch, make_checkpoint, shares
from tests.rank_pool import Pool

aten = torch.ops.aten


def _attention(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    """Of the CPU's kernel, which torch's counter does not know; causal attention skips half of it."""
    return int(sdpa_flop_count(q, k, v)) // 2


def _attention_backward(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    return 2 * _attention(q, k, v)


KERNELS = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def counted(grid: Grid, jobs: list[Job]) -> list[tuple[int, list[int]]]:
    """Of each job what torch counts in one update, and the lengths of the sequences."""
    return [_counted(grid, job) for job in jobs]


def _counted(grid: Grid, job: Job) -> tuple[int, list[int]]:
    policy = build(grid, job)
    batches = shares(global_batch(job.sequences), job.micro_batches)

    def loss_fn(logits_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, None]:
        return logits_RV.float().mean(), None

    policy.zero_grad()
    predictor = PredictorPass(policy.chunks, grid, job.description.vocab, job.mtp_loss_weight) if job.mtp == "train" else None
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        schedule.run(policy.chunks, batches, loss_fn, grid, forward_only=False, predictor=predictor)
    return counter.get_total_flops(), [length for batch in batches for length in batch.length_N[batch.seq_T.unique()].tolist()]


def test_flops_of_an_update_are_those_that_torch_counts(pool: Pool, tmp_path: Path) -> None:
    """All experts, two of them, tied embeddings; nothing is recomputed."""
    variants: list[dict[str, Any]] = [{}, {"num_experts_per_tok": 2}, {"tie_word_embeddings": True}]
    paths = [make_checkpoint(tmp_path / str(index), num_hidden_layers=2, **changes) for index, changes in enumerate(variants)]
    [found] = pool.run(counted, Layout(), [Job(path, sequences=8, micro_batches=2) for path in paths])
    for path, (counts, lengths) in zip(paths, found, strict=True):
        assert training_flops(ModelDescription.read(path), "lm", lengths) == pytest.approx(counts, rel=0.02)


def test_flops_of_a_predictor_are_those_that_torch_counts(pool: Pool, make: Make, tmp_path: Path) -> None:
    """What it adds to an update; the output layer that it borrows gets no gradient from it."""
    job = Job(with_predictor(make, tmp_path / "model", "glm4_moe"), sequences=8, micro_batches=2, mtp="train")
    jobs = [job, replace(job, mtp="drop")]
    [[(whole, lengths), (trunk, _)]] = pool.run(counted, Layout(), jobs)
    planned = [training_flops(job.description, "lm", lengths) for job in jobs]
    assert planned[0] - planned[1] == pytest.approx(whole - trunk, rel=0.02)


def test_speed_is_work_over_time_whoever_reports_it() -> None:
    whole = speed(6e12, 2, 3.0, "NVIDIA H100 80GB HBM3", "bfloat16")
    assert scalars(whole) == {"perf/tflops_per_gpu": pytest.approx(1.0), "perf/mfu": pytest.approx(1 / 989)}
    halves = merge([speed(4e12, 2, 1.0, None, "bfloat16"), speed(2e12, 2, 2.0, None, "bfloat16")])
    assert scalars(halves) == {"perf/tflops_per_gpu": pytest.approx(1.0)}
    assert "perf/mfu" not in speed(1.0, 1, 1.0, "NVIDIA H100 80GB HBM3", "float32")
