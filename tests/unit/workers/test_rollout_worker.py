"""What an engine reports is checked before it is kept."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.batch import Sample
from megarl.rollout.engine import RolloutError
from megarl.workers.rollout_worker import ExpertsWanted, RolloutWorker
from tests.rollout.backwards_engine import PLACE


@pytest.mark.parametrize("shape", [(4, 4, 2), (5, 3, 2), (5, 4, 3)], ids=["tokens", "layers", "experts a token"])
def test_experts_of_another_shape_are_refused(shape: tuple[int, int, int]) -> None:
    worker, wanted = RolloutWorker("engine 0", PLACE, {}), ExpertsWanted([[0, 1], [2, 3]], layers=4, topk=2, every=1)
    sample = Sample(np.zeros(6, np.int32), 2, np.zeros(4, np.float32), "stop", routed_experts=np.zeros(shape, np.uint8))
    with pytest.raises(RolloutError, match=rf"^engine 0: reports routed experts \[{shape[0]}, {shape[1]}, {shape[2]}\], .* \[5, 4, 2\]$"):
        worker._kept(sample, wanted)
