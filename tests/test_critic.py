"""What the driver knows of the critic: explained variance that merges, the end of value pretraining, health by position."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.algorithms.value import explained_variance, explained_variance_sums
from megarl.batch import Sample, pack
from megarl.config import CriticSettings
from megarl.observe.metrics import Explained, Mean, Metric, merge, scalars
from megarl.stages.pretraining import PATIENCE, ValuePretraining
from megarl.workers.critic import critic_metrics


def test_explained_variance_is_the_same_from_any_parts() -> None:
    generator = torch.Generator().manual_seed(0)
    goal, guess = torch.randn(50, generator=generator), torch.randn(50, generator=generator)
    mask = torch.ones(50, dtype=torch.bool)
    whole = explained_variance(explained_variance_sums(guess, goal, mask))
    parts = [Explained(*explained_variance_sums(guess[s], goal[s], mask[s]).tolist()) for s in (slice(0, 7), slice(7, 50))]
    assert scalars(merge([{"x": part} for part in parts]))["x"] == pytest.approx(whole, rel=1e-12)
    flat = explained_variance_sums(guess, torch.ones(50), mask)
    assert scalars({"x": Explained(*flat.tolist())}) == {}, "a goal that does not vary has nothing to explain"


def test_a_critic_that_is_biased_by_position_shows_in_the_metrics() -> None:
    samples = [Sample(np.arange(5, 5 + 4 + 9, dtype=np.int32), 4, np.zeros(9, np.float32), "stop", 0) for _ in range(3)]
    batch = pack(samples)
    late = (batch.position_T - 3 >= 6) & batch.mask_T
    batch = batch.with_extra(value=torch.where(late, 0.9, 0.1), advantage=torch.where(late, -0.4, 0.4))
    batch = batch.with_extra(**{"return": torch.full((len(batch),), 0.5)})
    shown = scalars(critic_metrics(batch))
    assert shown["critic/value_early"] == pytest.approx(0.1) and shown["critic/value_late"] == pytest.approx(0.9)
    assert shown["critic/advantage_early"] == pytest.approx(0.4) and shown["critic/advantage_late"] == pytest.approx(-0.4)


def losses(value: float) -> dict[str, Metric]:
    return {"critic/vf_loss": Mean(value, 1.0)}


def test_value_pretraining_ends_at_its_limit_or_when_the_loss_falls_no_more() -> None:
    assert not ValuePretraining(None).active
    limited = ValuePretraining(CriticSettings(pretrain_steps=3))
    for _ in range(3):
        assert limited.active
        limited.observe(losses(1.0))
    assert not limited.active
    falling, flat = (ValuePretraining(CriticSettings(pretrain_steps=100, pretrain_tolerance=0.01)) for _ in range(2))
    for step in range(2 * PATIENCE):
        assert falling.active and flat.active
        falling.observe(losses(0.98**step))
        flat.observe(losses(1.0))
    assert falling.active and not flat.active
