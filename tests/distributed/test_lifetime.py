"""A model that was dropped is gone, with its memory, its process groups and their threads: one process can start and end many."""

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore

from megarl.config import Layout
from megarl.host.parking import Parking
from megarl.parallel.backend import choose
from megarl.parallel.grid import Grid, destroy_grid, init_grid
from tests.distributed.tiny_training import Job, build, learn, make_checkpoint
from tests.rank_pool import Pool
from tests.rows import rows

LIVES = 4
LAYOUTS = {
    "one": Layout(),
    "tp2_ep2": Layout(ranks=2, tp=2, ep=2),
    "pp2_vpp2": Layout(ranks=2, pp=2, vpp=2),
    "cp2": Layout(ranks=2, cp=2),
}


def park_and_wake(policy: Any) -> None:
    """The policy leaves the device and comes back."""
    parking = Parking(choose().parking_buffer)
    parking.park(policy.gradients(), keep=False)
    parking.park(policy.state())
    parking.wake()


def live(grid: Grid, job: Job) -> list[weakref.ref[Any]]:
    """Builds a model, takes a step, parks it and leaves the grid; what there was of the model."""
    policy = build(grid, job)
    learn(grid, policy, job)
    park_and_wake(policy)
    destroy_grid()
    return [weakref.ref(one) for one in (*policy.chunks, policy.optimizer, *policy.gradients())]


def lives(grid: Grid, job: Job) -> list[tuple[int, int]]:
    """Of several models, each on a grid of its own in this one process, after its end: (threads, what is still alive of the model)."""
    place: dict[str, Any] = {"rank": grid.rank, "seed": 1, "timeout_s": grid.timeout_s}
    destroy_grid()
    seen = []
    for life in range(LIVES):
        past = live(init_grid(grid.layout, store=PrefixStore(str(life), grid.store), **place), job)
        gc.collect()
        seen.append((len(os.listdir("/proc/self/task")), sum(ref() is not None for ref in past)))
    init_grid(grid.layout, store=PrefixStore("last", grid.store), **place)  # for the harness to leave
    return seen


@pytest.mark.parametrize("name", rows(LAYOUTS, ["tp2_ep2", "pp2_vpp2"]))
def test_a_model_and_its_grid_that_were_dropped_leave_nothing(pool: Pool, tmp_path: Path, name: str) -> None:
    """The routers' auxiliary loss too: it has a graph of its own."""
    path = make_checkpoint(tmp_path / "model", num_experts_per_tok=2)
    job = Job(path, micro_batches=2, sequences=4, megatron={"moe_aux_loss_coeff": 0.01}, recompute="full" if name == "one" else "none")
    for seen in pool.run(lives, LAYOUTS[name], job):
        assert [alive for _, alive in seen] == [0] * LIVES
        assert len({threads for threads, _ in seen}) == 1, seen
