"""What a rank fetches of a response is in its place, however many parts it comes in."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.ranks import assemble

STAGES = [[0, 2], [1]]


def test_experts_of_a_response_in_parts_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entry t of layer l has the experts 10 t + l; the second response was not reported."""
    monkeypatch.setattr(assemble, "ray", SimpleNamespace(get=lambda references: list(references)))

    def part(begin: int, end: int) -> list[Any]:
        return [
            (10 * np.arange(begin, end)[:, None, None] + np.array(stage)[:, None]).repeat(2, axis=2).astype(np.uint8) for stage in STAGES
        ]

    plan: Any = SimpleNamespace(stages=STAGES, experts_N=[[part(0, 4), part(4, 5), part(5, 9)], None, [part(0, 3)]])
    found = assemble.routed_experts(plan, [2, 1, 0], torch.tensor([3, 2, 9]), [1, 2])
    assert found is not None and found.shape == (14, 2, 2)
    rows = [*range(3), None, None, *range(9)]
    assert found[:, :, 0].tolist() == [[-1, -1] if row is None else [10 * row + 1, 10 * row + 2] for row in rows]
    assert found[:, :, 1].equal(found[:, :, 0])
