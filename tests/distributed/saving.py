"""What the ranks of the pool do in the tests of distributed checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megarl.checkpoints.steps import Verified, verify
from megarl.config import CheckpointSettings
from megarl.models.hf import read_config
from megarl.parallel.checkpoint import Part, Saver, load
from megarl.parallel.grid import Grid
from tests.distributed.work import Job, Report, build, learn


@dataclass(frozen=True)
class Resumed:
    """What one rank did after it loaded."""

    exact: bool
    report: Report
    random: list[float]  # drawn from torch and numpy after the load


def settings(**changes: object) -> CheckpointSettings:
    return CheckpointSettings.model_validate({"keep_last": 100, "asynchronous": False, **changes})


def verified(path: Path) -> Verified:
    entry = verify(path)
    assert entry.verified is not None, entry.faults
    return entry.verified


def train_and_save(grid: Grid, job: Job, root: Path, after: Job | None) -> Resumed | None:
    """Trains, saves as step `job.steps`, and goes on with `after`."""
    policy = build(grid, job)
    learn(grid, policy, job)
    saver = Saver(root, grid, settings())
    saver.save(job.steps, {"policy": Part(policy.chunks, read_config(job.path), policy)}, {"note.json": b"{}"})
    drawn = draw()
    return Resumed(True, learn(grid, policy, after), drawn) if after is not None else None


def resume(grid: Grid, job: Job, step: Path, root: Path | None) -> Resumed:
    """Loads a step into a fresh model, saves it again as it is, then trains."""
    policy = build(grid, job)
    part = {"policy": Part(policy.chunks, read_config(job.path), policy)}
    torch.manual_seed(99)
    np.random.seed(99)
    exact = load(verified(step), part, grid)
    if root is not None:
        Saver(root, grid, settings()).save(policy.steps, part, {})
    drawn = draw()
    return Resumed(exact, learn(grid, policy, job), drawn)


def draw() -> list[float]:
    """A number from each of the random states that a rank has."""
    import random

    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        forked = float(torch.rand(()))
    return [float(torch.rand(())), float(np.random.normal()), random.random(), forked]


def plain_tensors(grid: Grid, folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a saved model, whole, as Megatron's own loader reads it."""
    from megatron.core.dist_checkpointing.serialization import load_plain_tensors

    found = load_plain_tensors(str(folder))
    return {key: tensor for key, tensor in found.items() if isinstance(tensor, torch.Tensor)}
