"""Distillation from the teacher's likeliest tokens has the same loss and gradient on every layout, the teacher's and the policy's."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megarl.algorithms.distillation import Distillation, Divergence
from megarl.batch import Batch
from megarl.config import Layout
from megarl.parallel import schedule
from megarl.parallel.grid import Grid
from megarl.parallel.logprobs import logprob_entropy_buckets, top_buckets
from tests.distributed.tiny_training import TINY, Job, build, global_batch, make_checkpoint, shares
from tests.rank_pool import Pool

K = 6
KINDS: tuple[Divergence, ...] = ("reverse_kl", "forward_kl", "jsd")
LAYOUTS = {
    "tp2": Layout(ranks=2, tp=2),
    "pp2": Layout(ranks=2, pp=2),
    "cp2": Layout(ranks=2, cp=2),
    "tp2_cp2": Layout(ranks=4, tp=2, cp=2),
    "ep2": Layout(ranks=2, ep=2),
}


@dataclass(frozen=True)
class Step:
    """What one rank saw of one divergence."""

    grad_norm: float
    total: float


def taught(grid: Grid, job: Job) -> dict[str, Step]:
    """Gradient norms of the divergences from a teacher that is the model itself at half the temperature; no optimizer step."""
    trainable, batch = build(grid, job), global_batch(job.sequences)
    weight_T = torch.where(batch.mask_T, 1.0 / int(batch.mask_T.sum()), 0.0)
    mine = shares(batch.with_extra(weight=weight_T), job.micro_batches)[grid.dp_rank :: grid.dp_size]
    steps = dict[str, Step]()
    for kind in KINDS:
        settings = Distillation(top_k=K, divergence=kind)

        def loss_fn(logits_RV: Tensor, row_T: Tensor, part: Batch, settings: Distillation = settings) -> tuple[Tensor, float]:
            vocabulary, group = TINY["vocab_size"], grid.groups.tp
            token_TK, teacher_TB = top_buckets(logits_RV.detach(), row_T, K, vocabulary, 0.5, group, vocabulary)
            _, _, policy_TB = logprob_entropy_buckets(logits_RV, row_T, part.target_T, token_TK, 1.0, group, vocabulary, overwrite=True)
            total = (settings.loss(policy_TB, teacher_TB, part.mask_T) * part.extra_T["weight"]).sum()
            return total, float(total.detach())

        trainable.zero_grad()
        results = schedule.run(trainable.chunks, mine, loss_fn, grid, forward_only=False)
        trainable.optimizer.prepare_grads()
        reports = grid.is_last_stage and grid.tp_rank == 0
        steps[kind] = Step(float(trainable.optimizer.get_grad_norm()), sum(results) if reports else 0.0)
    return steps


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model", num_hidden_layers=2)


@pytest.fixture(scope="module")
def one_rank(pool: Pool, checkpoint: Path) -> dict[str, Step]:
    return pool.run(taught, Layout(), Job(checkpoint, micro_batches=1))[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_and_gradient_are_independent_of_the_layout(pool: Pool, checkpoint: Path, one_rank: dict[str, Step], name: str) -> None:
    layout = LAYOUTS[name]
    ranks = pool.run(taught, layout, Job(checkpoint, micro_batches=layout.dp * layout.pp))
    for kind, one in one_rank.items():
        assert one.grad_norm > 1e-4 and one.total > 1e-4
        assert [rank[kind].grad_norm for rank in ranks] == pytest.approx([one.grad_norm] * len(ranks), rel=1e-5), kind
        assert sum(rank[kind].total for rank in ranks) == pytest.approx(one.total, rel=1e-5), kind
