"""Packing samples into a bag of tokens, and spreading sequences over micro-batches."""

from __future__ import annotations

import numpy as np
import pytest

from megarl.batch import Sample, balance, bins_needed, pack


def test_pack_lays_out_entries_and_masks() -> None:
    first = Sample(np.array([5, 6, 7, 8], np.int32), 2, np.array([-1.0, -2.0], np.float32), "stop", 3)
    second = Sample(np.array([9, 10], np.int32), 1, np.array([-3.0], np.float32), "length", 3)
    batch = pack([first, second])
    assert batch.input_T.tolist() == [5, 6, 7, 9] and batch.target_T.tolist() == [6, 7, 8, 10]
    assert batch.mask_T.tolist() == [False, True, True, True]
    assert batch.extra_T["rollout_logp"].tolist() == [0.0, -1.0, -2.0, -3.0]
    assert batch.position_T.tolist() == [0, 1, 2, 0] and batch.count_N.tolist() == [2, 1]
    assert len(pack([])) == 0


def test_balance_fills_every_bin_evenly() -> None:
    lengths = list(np.random.default_rng(0).integers(1, 4000, 512))
    bins = balance(lengths, 16)
    assert sorted(n for group in bins for n in group) == list(range(512))
    loads = [sum(lengths[n] for n in group) for group in bins]
    assert max(loads) / (sum(loads) / 16) < 1.002
    assert bins_needed([4, 4, 4], 8) == 2
    with pytest.raises(ValueError, match="9 tokens does not fit into a micro-batch of 8"):
        bins_needed([9], 8)
