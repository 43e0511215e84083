"""The correction's weights by hand, what is shown of them, and what the loss divides by. Value, gradient and splits: with the losses."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.batch import Batch, Sample, pack
from megarl.observe.metrics import merge, scalars
from megarl.ranks.assemble import corrections, mismatch, mismatch_of_sequences, weight_metrics
from tests.unit.algorithms.cases import make, ragged, same


def gapped(*gaps: list[float]) -> Batch:
    """Responses whose tokens' old log-probs are the given gaps above the engine's."""
    samples = [Sample(np.arange(1 + len(gap), dtype=np.int32), 1, np.full(len(gap), -1.0, np.float32), "stop") for gap in gaps]
    batch = pack(samples)
    old_T = torch.tensor([g - 1.0 for gap in gaps for g in gap], dtype=torch.float64)
    return batch.with_extra(old_logp=old_T, rollout_logp=batch.extra_T["rollout_logp"].double())


LN = math.log(2)
BATCH = gapped([LN, -LN], [2 * LN], [-LN / 2, -LN / 2])  # products 1, 4 and 1/2
KEPT: Any = {"denominator": "kept"}
WEIGHTS: list[tuple[dict[str, Any], list[float]]] = [
    ({"type": "tis", "cap": 3.0}, [2, 0.5, 3, 0.5**0.5, 0.5**0.5]),
    ({"type": "tis", "cap": 3.0, "floor": 0.6}, [2, 0.6, 3, 0.5**0.5, 0.5**0.5]),
    ({"type": "tis", "cap": 3.0, "level": "sequence"}, [1, 1, 3, 0.5, 0.5]),
    ({"type": "tis", "cap": 3.0, "level": "geometric"}, [1, 1, 3, 0.5**0.5, 0.5**0.5]),
    ({"type": "tis", "cap": 3.0, "veto": 0.6}, [0, 0, 3, 0.5**0.5, 0.5**0.5]),
    ({"type": "tis", "cap": 3.5, "level": "sequence", "normalise": True}, [0.6, 0.6, 2.1, 0.3, 0.3]),  # mean of 1, 3.5 and 0.5: 5/3
    ({"type": "mis", "lo": 0.6, "hi": 3.0}, [2, 0, 0, 0.5**0.5, 0.5**0.5]),
    ({"type": "mis", "lo": 0.6, "hi": 3.0, "level": "sequence"}, [1, 1, 0, 0, 0]),
    ({"type": "icepop", "lo": 0.4}, [2, 0.5, 4, 0.5**0.5, 0.5**0.5]),
    ({"type": "rejection", "reject": [{"lo": 0.6, "hi": 3.0}]}, [1, 0, 0, 1, 1]),
    ({"type": "rejection", "reject": [{"lo": 0.6, "hi": 3.0, "over": "max"}]}, [0, 0, 0, 1, 1]),
    ({"type": "rejection", "reject": [{"lo": 0.6, "over": "sum"}]}, [1, 1, 1, 0, 0]),
    ({"type": "rejection", "reject": [{"lo": 0.6, "over": "mean"}]}, [1, 1, 1, 1, 1]),
    ({"type": "rejection", "reject": [{"by": "k2", "over": "sum", "hi": 0.4}]}, [0, 0, 0, 1, 1]),  # ln(2)^2 = 0.48, twice that, 0.12
    ({"type": "tis", "reject": [{"by": "k3", "hi": 0.25}, {"over": "mean", "lo": 0.9}]}, [0, 0.5, 0, 0, 0]),  # 1 - ln 2 = 0.31, 0.19
]


@pytest.mark.parametrize(("config", "expected"), WEIGHTS)
def test_weights_by_hand(config: dict[str, Any], expected: list[float]) -> None:
    correction = make({"type": "grpo", "correction": config}).correction
    assert correction is not None
    assert correction.weights(BATCH, same).tolist() == pytest.approx(expected)
    assert correction.weights(BATCH.with_extra(rollout_logp=BATCH.extra_T["old_logp"]), same).tolist() == pytest.approx([1] * 5)


@pytest.mark.parametrize(
    ("aggregation", "weights"),
    [("token-mean", [0, 0.25, 0.25, 0.25, 0.25]), ("seq-mean-token-mean", [0, 1 / 3, 1 / 3, 1 / 6, 1 / 6])],
)
def test_dropped_tokens_leave_the_denominator_where_asked(aggregation: str, weights: list[float]) -> None:
    """The first token is dropped: by itself, or with its response in the second mini-batch, of which then nothing is left."""
    rule = {"by": "k1", "lo": 0.1, "hi": 1.9}
    batch = gapped([LN, -LN], [0.0], [0.0, 0.0], [3.0])
    mini_batches = [[0, 1, 2], [3]]

    def added(**more: Any) -> dict[str, list[float]]:
        algorithm = make({"type": "grpo", "aggregation": aggregation, "correction": {"type": "rejection", "reject": [rule], **more}})
        assert algorithm.correction is not None
        made = corrections(algorithm, algorithm.correction, batch, [0, 1, 2, 3], mini_batches, torch.ones(4, dtype=torch.bool), same)
        return {name: value.tolist() for name, value in made.items()}

    kept = [0.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert added() == {"correction": kept}
    assert added(**KEPT) == {"correction": kept, "weight": pytest.approx([*weights, 0])}


def test_nothing_left_to_weigh_is_no_division_by_zero() -> None:
    correction = make({"type": "grpo", "correction": {"type": "mis", "lo": 8.0, "hi": 9.0, "normalise": True}}).correction
    assert correction is not None and correction.weights(BATCH, same).tolist() == [0] * 5


def test_effective_sample_size_of_the_weights() -> None:
    weight_T = torch.tensor([2.0, 0.0, 1.0, 1.0, 1.0])
    parts = [weight_metrics(weight_T[part], BATCH.take(part)) for part in (torch.tensor([0, 3]), torch.tensor([1, 2, 4]))]
    found = scalars(merge(parts))
    assert found == pytest.approx(
        {f"rollout_corr/weight_{name}": value for name, value in dict(mean=1.0, max=2.0, zeroed=0.2, ess=25 / (5 * 7)).items()}
    )
    assert weight_metrics(weight_T[:0], BATCH.take(torch.tensor([], dtype=torch.int64))) == {}
    assert "rollout_corr/weight_ess" not in scalars(weight_metrics(torch.zeros(5), BATCH))


def test_perplexities_and_chi_squared() -> None:
    batch, _, _ = ragged(3, [1, 5, 20])
    found = scalars(merge([mismatch(batch), mismatch_of_sequences(batch)]))
    d = (batch.extra_T["old_logp"] - batch.extra_T["rollout_logp"])[batch.mask_T]
    assert found["rollout_corr/chi2"] == pytest.approx(float((2 * d).exp().mean()) - 1)
    rows = [[batch.extra_T[name][batch.mask_T & (batch.seq_T == n)].mean() for name in ("old_logp", "rollout_logp")] for n in range(3)]
    old, rollout = torch.tensor(rows, dtype=torch.float64).unbind(1)
    expected = {
        "training_ppl": (-old).exp(),
        "rollout_ppl": (-rollout).exp(),
        "log_ppl_diff": rollout - old,
        "log_ppl_abs_diff": (rollout - old).abs(),
        "ppl_ratio": (rollout - old).exp(),
    }
    for name, value in expected.items():
        assert found[f"rollout_corr/{name}"] == pytest.approx(float(value.mean())), name
    nothing = replace(batch, count_N=torch.zeros_like(batch.count_N), mask_T=torch.zeros_like(batch.mask_T))
    assert mismatch_of_sequences(nothing) == {}
