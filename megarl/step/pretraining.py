"""Value pretraining of VC-PPO and VAPO (arXiv:2503.01491, arXiv:2504.05118): the critic learns the returns of the frozen policy.

This module decides how long it lasts, for RL runs and for `megarl value`.
"""

from collections.abc import Mapping
from typing import Any

from megarl.config import CriticSettings
from megarl.observe.metrics import Metric, scalars

PATIENCE = 10  # steps


class ValuePretraining:
    """Counts the steps in which only the critic is trained.

    Pretraining ends after `pretrain_steps`, or once both loss and explained variance have converged: over the last 10 steps compared with
    the 10 before, the mean value loss is lower by less than the fraction `pretrain_tolerance`, and the mean explained variance is higher by
    less than `pretrain_tolerance` in absolute terms.
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
        """Return the state as plain values for JSON."""
        return {"left": self._left, "losses": self._losses, "explained": self._explained}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore `state`."""
        self._left, self._losses, self._explained = state["left"], list(state["losses"]), list(state["explained"])

    def observe(self, metrics: Mapping[str, Metric]) -> None:
        """Count a pretraining step, and decide from its metrics whether it was the last."""
        self._left -= 1
        values = scalars(metrics)
        self._losses.append(values["critic/vf_loss"])
        self._explained.append(values.get("critic/explained_variance", 0.0))  # missing where the returns do not vary
        if len(self._losses) >= 2 * PATIENCE:
            loss, explained = _last_two(self._losses), _last_two(self._explained)
            if loss[1] > (1 - self._tolerance) * loss[0] and explained[1] < explained[0] + self._tolerance:
                self._left = 0


def _last_two(values: list[float]) -> tuple[float, float]:
    """The mean of the second-to-last PATIENCE values, and the mean of the last PATIENCE values."""
    return sum(values[-2 * PATIENCE : -PATIENCE]) / PATIENCE, sum(values[-PATIENCE:]) / PATIENCE
