"""The real actors of training on the ranks of the pool, whose grid is there already, without Ray."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import ModelSettings, RunSettings
from megarl.parallel.backend import choose
from megarl.parallel.grid import Grid
from megarl.ranks import assemble
from megarl.ranks.megatron_worker import RankSettings
from megarl.ranks.model_worker import ModelWorker
from megarl.ranks.step_worker import RLSpec
from megarl.ranks.supervised_worker import SupervisedWorker, TrainSpec


def settings_of(grid: Grid, path: Path, **model: Any) -> RankSettings:
    config = RunSettings(name="x", model=ModelSettings(path=path, dtype="float32", **model), layout=grid.layout)
    return RankSettings.of(config, grid.layout)


def rl_rank(grid: Grid, path: Path, spec: RLSpec, *roles: Any, blank: bool = False, **model: Any) -> ModelWorker:
    """A rank of the RL loop with the models of these roles; `model`: settings of the policy, which is in float32."""
    rank = ModelWorker(grid.rank, settings_of(grid, path, **model), spec, roles)
    rank._backend, rank._grid, rank._blank = choose(), grid, blank
    rank.build_models()
    return rank


def supervised_rank(grid: Grid, path: Path, spec: TrainSpec, **model: Any) -> SupervisedWorker:
    """A rank of a supervised stage."""
    rank = SupervisedWorker(grid.rank, settings_of(grid, path, **model), spec)
    rank._backend, rank._grid = choose(), grid
    rank.build_models()
    return rank


def teacher_column(rank: ModelWorker) -> dict[tuple[int, int], list[float]]:
    """The teacher's column of the loss tokens that this rank speaks for, by response and number of the response's token."""
    column = dict[tuple[int, int], list[float]]()
    for numbers, batch in zip(rank._members, rank._flat(), strict=True):
        given_T = batch.extra_T["teacher_logp"]
        for entry in batch.mask_T.nonzero().squeeze(1).tolist() if rank._reports_tokens else []:
            n = int(batch.seq_T[entry])
            if not given_T[entry].isnan().any():
                column[numbers[n], int(batch.position_T[entry] - batch.start_N[n])] = given_T[entry].flatten().tolist()
    return column


@contextmanager
def object_store(store: Any = None) -> Iterator[None]:
    """Another store in the place of Ray's; without one, a reference is the value itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "ray", store or SimpleNamespace(get=list))
        yield
