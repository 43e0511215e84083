"""Which evaluation of a run is its best."""

from __future__ import annotations

from math import nan
from pathlib import Path

from megarl.stages.best import Best


def test_numbers_that_are_none_are_never_the_best_for_long(tmp_path: Path) -> None:
    best = Best(tmp_path)
    assert best.improves(1, nan, -1.0) and best.improves(2, 0.5, -1.0)
    assert not best.improves(3, nan, -0.5) and not best.improves(4, 0.5, nan) and not best.improves(5, 0.5, -1.0)
    assert (best.step, best.waited) == (2, 3)
    assert best.improves(6, 0.5, -0.9) and (best.step, best.waited) == (6, 0)
