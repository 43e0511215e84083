"""The reductions of metrics."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.observe.metrics import Last, Max, Mean, Metric, Min, Std, Sum, merge, scalars


def report(values: list[float]) -> dict[str, Metric]:
    """What a rank that holds these values says."""
    if not values:
        return {"mean": Mean(0.0, 0.0), "sum": Sum(0.0)}
    return {
        "mean": Mean(math.fsum(values), float(len(values))),
        "std": Std(math.fsum(values), math.fsum(value * value for value in values), float(len(values))),
        "sum": Sum(math.fsum(values)),
        "max": Max(max(values)),
        "min": Min(min(values)),
    }


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-100, 100)), min_size=1, max_size=6))
def test_metrics_do_not_depend_on_the_layout(shards: list[list[float]]) -> None:
    merged, whole = scalars(merge(report(shard) for shard in shards)), scalars(report([value for shard in shards for value in shard]))
    assert merged == pytest.approx(whole, rel=1e-9, abs=1e-5)


def test_merged_std_is_the_std_of_all_values() -> None:
    values = list(np.random.default_rng(0).normal(3.0, 0.5, 1000))
    assert scalars(merge([report(values[:400]), report(values[400:])]))["std"] == pytest.approx(float(np.std(values)), rel=1e-9)


def test_an_empty_mean_has_no_value_and_last_keeps_the_order() -> None:
    assert scalars(merge([{"a": Mean(0.0, 0.0), "b": Last(1.0)}, {"b": Last(2.0)}])) == {"b": 2.0}


@pytest.mark.parametrize("order", [1, -1])
def test_nan_survives_every_reduction(order: int) -> None:
    for kind in (Max, Min, Sum):
        [value] = scalars(merge([{"x": kind(math.nan)}, {"x": kind(1.0)}][::order])).values()
        assert math.isnan(value)


def test_one_name_with_two_reductions_is_refused() -> None:
    with pytest.raises(AssertionError, match="loss: Mean merged with Sum"):
        merge([{"loss": Mean(1.0, 1.0)}, {"loss": Sum(1.0)}])


def test_metrics_travel_between_processes() -> None:
    metrics = report([1.0, 2.0]) | {"last": Last(3.0)}
    assert pickle.loads(pickle.dumps(metrics)) == metrics
