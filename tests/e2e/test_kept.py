"""A truncated sampling in the real loop: engine and trainer have log-probs of the same distribution, that over the kept tokens."""

from pathlib import Path

import pytest

from tests.e2e.job import Job
from tests.e2e.lab import Lab
from tests.rows import rows

CUT = ("train.steps=1", "rollout.top_p=0.9")
SPLIT = ("layout={ranks: 2, tp: 2}", "algorithm.kl_coef=0.01")
OTHERS = [
    ("rollout.temperature=0.7", "rollout.top_k=20", "rollout.min_p=0.02"),
    ("train.mini_batches=1", "layout={ranks: 2, pp: 2}"),
]


@pytest.mark.parametrize("further", rows([(SPLIT,), *((one,) for one in OTHERS)], [(SPLIT,)]), ids=" ".join)
def test_engine_and_trainer_agree_about_a_truncated_sampling(lab: Lab, tmp_path: Path, tiny_model: Path, further: tuple[str, ...]) -> None:
    """No correction, and a gap of what rounding explains."""
    [row] = lab.run(Job(tmp_path, tiny_model, (*CUT, "train.logp_over=kept", *further))).steps()
    assert row["training/logprob_gap_mean"] <= 1e-5 and row["rollout_corr/rollout_is_mean"] == pytest.approx(1.0, abs=1e-5)
    assert row["sampling/outside_frac"] <= 1e-3 and 1 < row["sampling/kept"] < 0.9 * 128 and row["actor/grad_norm"] > 0


@pytest.mark.long
def test_without_the_kept_tokens_they_do_not(lab: Lab, tmp_path: Path, tiny_model: Path) -> None:
    [row] = lab.run(Job(tmp_path, tiny_model, (*CUT, "algorithm.correction={type: tis}"))).steps()
    assert row["training/logprob_gap_mean"] > 0.05 and row["rollout_corr/rollout_is_mean"] < 0.95
    assert "sampling/kept" not in row
