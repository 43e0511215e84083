"""Episodes of several contexts on the ranks: log-probs of each context by itself, and the same step on any layout and any micro-batches."""

from pathlib import Path

import pytest

from megarl.config import Layout
from tests.distributed.split_episodes import LARGE, SMALL, Case, assert_same_updates, learn, moved, shown
from tests.distributed.tiny_training import make_checkpoint
from tests.rank_pool import Pool
from tests.rows import rows

LAYOUTS = {"dp2": Layout(ranks=2), "tp2": Layout(ranks=2, tp=2), "cp2": Layout(ranks=2, cp=2), "pp2": Layout(ranks=2, pp=2)}
GSPO = {"type": "gspo", "clip_low": 0.5, "clip_high": 0.5}
SELECTING = [
    {"type": "kl_cov", "cov_ratio": 0.2},
    {"type": "clip_cov", "cov_ratio": 0.2, "cov_low": -0.5, "cov_high": 0.5},
    {"type": "m2po", "m2_threshold": 0.5},
]
NUMBERS = ("actor/selected", "actor/grad_norm", "actor/pg_loss", "actor/ppo_kl", "critic/grad_norm", "critic/loss")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "top2", num_experts=8, num_experts_per_tok=2)


def test_log_probs_are_those_of_each_context_by_itself(pool: Pool, path: Path) -> None:
    apart, whole = (pool.run(learn, Layout(), Case(path, GSPO, LARGE, apart))[0].logp for apart in (True, False))
    assert len(whole) == 49 and whole == pytest.approx(moved(apart), abs=2e-6)


@pytest.mark.parametrize(
    "algorithm",
    rows([GSPO, {"type": "ppo"}, {"type": "grpo"}, *SELECTING], [GSPO]),
    ids=lambda one: one["type"],
)
def test_a_step_is_the_same_on_any_layout(pool: Pool, path: Path, algorithm: dict[str, object]) -> None:
    """Two updates, so that the ratios of the second are not 1, with the contexts of an episode in one micro-batch or in several."""
    [one] = pool.run(learn, Layout(), Case(path, algorithm, LARGE))
    assert one.divided == [False]
    assert algorithm not in SELECTING or 0 < shown([one])[1]["actor/selected"] < 1
    for layout in [Layout(), *LAYOUTS.values()]:
        ranks = pool.run(learn, layout, Case(path, algorithm, SMALL))
        assert ranks[0].divided == [True]
        assert_same_updates(one, ranks, NUMBERS, layout)
