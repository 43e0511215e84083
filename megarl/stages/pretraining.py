"""Value pretraining of VC-PPO and VAPO (arXiv:2503.01491, arXiv:2504.05118): the policy is frozen, the critic learns its returns.

Decides how long it takes, for RL runs and for `megarl value`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megarl.config import CriticSettings
from megarl.observe.metrics import Metric, scalars

PATIENCE = 10  # steps


class ValuePretraining:
    """Counts the steps in which only the critic is trained.

    Ends after `pretrain_steps`, or once both have converged: the mean value loss of the last 10 steps is less than `pretrain_tolerance` (a
    share) below that of the 10 before, and the mean explained variance is less than that (a difference) above it.
    """

    def __init__(self, settings: CriticSettings | None) -> None:
        self._left = 0 if settings is None else settings.pretrain_steps
        self._tolerance = 0.0 if settings is None else settings.pretrain_tolerance
        self._losses: list[float] = []
        self._explained: list[float] = []

    @property
    def active(self) -> bool:
        """Whether the policy is still frozen."""
        return self._left > 0

    def state(self) -> dict[str, Any]:
        """As plain values for JSON."""
        return {"left": self._left, "losses": self._losses, "explained": self._explained}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restores `state`."""
        self._left, self._losses, self._explained = state["left"], list(state["losses"]), list(state["explained"])

    def observe(self, metrics: Mapping[str, Metric]) -> None:
        """Takes the metrics of a pretraining step."""
        self._left -= 1
        values = scalars(metrics)
        self._losses.append(values["critic/vf_loss"])
        self._explained.append(values.get("critic/explained_variance", 0.0))  # missing where the returns do not vary
        if len(self._losses) >= 2 * PATIENCE:
            loss, explained = _last_two(self._losses), _last_two(self._explained)
            if loss[1] > (1 - self._tolerance) * loss[0] and explained[1] < explained[0] + self._tolerance:
                self._left = 0


def _last_two(values: list[float]) -> tuple[float, float]:
    """The means of the last PATIENCE values but PATIENCE, and of the last PATIENCE."""
    return sum(values[-2 * PATIENCE : -PATIENCE]) / PATIENCE, sum(values[-PATIENCE:]) / PATIENCE
