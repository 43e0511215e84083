"""Several teachers by data source: each response gets the column of its own teacher, whatever micro-batches and layout it is scored in."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter

from megarl.algorithms import Algorithm, PolicyAlgorithm
from megarl.config import DistillationSettings, Layout, OptimizerSettings
from megarl.parallel.grid import Grid
from megarl.ranks.step_worker import RLSpec
from tests.distributed.loop_ranks import object_store, rl_rank, teacher_column
from tests.distributed.replayed_steps import Token
from tests.distributed.split_episodes import SMALL, episodes, plan_of
from tests.distributed.tiny_training import make_checkpoint
from tests.rank_pool import Pool
from tests.rows import rows

OF = (1, 0, 1, 0)  # the teacher of each episode
LAYOUTS = {
    "one": Layout(),
    "dp2": Layout(ranks=2),
    "tp2": Layout(ranks=2, tp=2),
    "cp2": Layout(ranks=2, cp=2),
    "pp2": Layout(ranks=2, pp=2),
    "ep2": Layout(ranks=2, ep=2),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The policy and two teachers of other weights."""
    directory = tmp_path_factory.mktemp("teachers")
    return [make_checkpoint(directory / str(seed), seed, num_experts=8, num_experts_per_tok=2) for seed in range(3)]


def taught(grid: Grid, policy: Path, teachers: Sequence[Path], top_k: int | None) -> dict[Token, list[float]]:
    """The teachers' column, by response and number of its token, of the loss tokens that this rank speaks for."""
    algorithm: PolicyAlgorithm = TypeAdapter(Algorithm).validate_python({"type": "reinforce"})
    given = {"teacher": teachers[0]} if len(teachers) == 1 else {"teachers": {f"source {n}": path for n, path in enumerate(teachers)}}
    distillation = DistillationSettings.model_validate({**given, "top_k": top_k})
    spec = RLSpec(algorithm, OptimizerSettings(), updates=1, temperature=0.7, distillation=distillation)
    rank = rl_rank(grid, policy, spec, "policy", "teacher")
    plan = plan_of(algorithm, episodes(apart=False), grid.dp_size, SMALL)
    with object_store():
        rank.forward(plan if len(teachers) == 1 else replace(plan, teacher_N=np.array(OF)))
    return teacher_column(rank)


@pytest.mark.parametrize(
    ("name", "top_k"),
    rows([(name, top_k) for name in LAYOUTS for top_k in (None, 3)], [("one", 3)]),
)
def test_a_response_is_scored_by_the_teacher_of_its_source(pool: Pool, paths: list[Path], name: str, top_k: int | None) -> None:
    policy, *teachers = paths
    alone = [pool.run(taught, Layout(), policy, [teacher], top_k)[0] for teacher in teachers]
    mixed = {token: row for rank in pool.run(taught, LAYOUTS[name], policy, teachers, top_k) for token, row in rank.items()}
    assert mixed.keys() == alone[0].keys() == alone[1].keys() and len(mixed) == 49
    for token, row in mixed.items():
        assert row == pytest.approx(alone[OF[token[0]]][token], abs=3e-5), token
        assert row != pytest.approx(alone[1 - OF[token[0]]][token], abs=3e-5), token
