"""The learning rate of every schedule against its formula."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from megarl.config import OptimizerSettings
from megarl.parallel.backend import choose

W, T, LR, LOW = 5, 25, 0.4, 0.05  # warm-up, all steps, the highest rate, the lowest


def done(step: int) -> float:
    return (step - W) / (T - W)


def annealed(step: int) -> float:
    """How much of the last ten steps is over."""
    return max(0.0, (step - (T - 10)) / 10)


FORMULAS: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "constant": ({"decay": "constant"}, lambda step: LR),
    "linear": ({"decay": "linear"}, lambda step: LOW + (LR - LOW) * (1 - done(step))),
    "cosine": ({"decay": "cosine"}, lambda step: LOW + (LR - LOW) * (1 + math.cos(math.pi * done(step))) / 2),
    "wsd": ({"decay": "wsd", "anneal_fraction": 0.4}, lambda step: LOW + (LR - LOW) * (1 - annealed(step))),
    "wsd, 1 - sqrt": (
        {"decay": "wsd", "anneal_fraction": 0.4, "anneal": "minus_sqrt"},
        lambda step: LOW + (LR - LOW) * (1 - math.sqrt(annealed(step))),
    ),
    "inverse square root": ({"decay": "inverse_sqrt"}, lambda step: max(LOW, LR * math.sqrt(W / step))),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_rate_is_the_formula_s_whatever_step_was_asked_before(name: str) -> None:
    choose()
    from megarl.parallel.optimizer import learning_rate

    given, formula = FORMULAS[name]
    settings = OptimizerSettings(lr=LR, warmup_steps=W, min_lr_fraction=LOW / LR, **given)
    for step in [*reversed(range(W, T + 1)), *range(W, T + 1)]:  # a resumed run begins in the middle
        assert learning_rate(step, settings, T) == pytest.approx(formula(step), rel=1e-12), step
    assert [learning_rate(step, settings, T) for step in range(W)] == pytest.approx([LR * (step + 1) / W for step in range(W)])
    end = LR if name == "constant" else LOW
    assert learning_rate(T + 1, settings, T) == pytest.approx(end) == learning_rate(10 * T, settings, T)
    assert LOW <= learning_rate(W, settings, W - 2) <= LR, "a run that is over before its warm-up"
