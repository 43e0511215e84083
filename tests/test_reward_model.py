"""What a rank makes of a reward model's output."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megarl.batch import Sample, pack_scored
from megarl.workers.reward import _values


def test_a_score_that_is_not_finite_is_an_error_and_elsewhere_nothing_is_asked() -> None:
    """NaN marks the entries that another rank computes: a model's own must not pass for one."""
    batch = pack_scored([Sample(np.array([3, 4, 5, 6], np.int32), 2, np.zeros(2, np.float32), "stop", 0)])
    row_T, value_R1 = torch.arange(len(batch)), torch.ones(len(batch), 1)
    last = int(batch.mask_T.nonzero())
    value_R1[:last] = torch.nan
    assert _values(value_R1, row_T, batch)[last] == 1
    for bad in (torch.nan, torch.inf):
        value_R1[last] = bad
        with pytest.raises(FloatingPointError, match="reward: the reward model gave a score that is not finite"):
            _values(value_R1, row_T, batch)
