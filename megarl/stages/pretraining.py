"""When the critic may start: value pretraining of VC-PPO and VAPO (arXiv:2503.01491, arXiv:2504.05118)."""

from __future__ import annotations

from collections.abc import Mapping

from megarl.config import CriticSettings
from megarl.observe.metrics import Metric, scalars

PATIENCE = 10  # steps


class ValuePretraining:
    """Counts the steps in which the critic alone is trained, on the responses of the frozen policy.

    Over after `pretrain_steps`, or once the mean value loss of the last 10 steps is less than `pretrain_tolerance` (a share) below that
    of the 10 before.
    """

    def __init__(self, settings: CriticSettings | None) -> None:
        self._left = 0 if settings is None else settings.pretrain_steps
        self._tolerance = 0.0 if settings is None else settings.pretrain_tolerance
        self._losses: list[float] = []

    @property
    def active(self) -> bool:
        """Whether the policy is still frozen."""
        return self._left > 0

    def observe(self, metrics: Mapping[str, Metric]) -> None:
        """Takes the metrics of a pretraining step."""
        self._left -= 1
        self._losses.append(scalars(metrics)["critic/vf_loss"])
        if len(self._losses) >= 2 * PATIENCE:
            before, after = sum(self._losses[-2 * PATIENCE : -PATIENCE]), sum(self._losses[-PATIENCE:])
            if after > (1 - self._tolerance) * before:
                self._left = 0
