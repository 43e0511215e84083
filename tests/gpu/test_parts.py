"""The parts' bodies on the CPU: on a GPU that is pretended, and where they ask for memory on the CPU alone."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Layout
from tests.gpu import handing_over, numbers, shards, storing, training
from tests.gpu.process import Rank, Run, imported
from tests.rank_pool import Pool

# What megarl needs for more than these parts.
ABSENT = {
    "aiohttp",
    "math_verify",
    "matplotlib",
    "pyarrow",
    "pytest",
    "ray",
    "reasoning_gym",
    "rich",
    "sentencepiece",
    "tokenizers",
}
ABSENT |= {"transformer_engine", "transformers", "vllm"}


@pytest.fixture(scope="module")
def there() -> Iterator[Rank]:
    rank = Rank("pretend")
    yield rank
    rank.close()


@pytest.fixture
def cpu(pool: Pool) -> Run:
    return partial(_first, pool)


def _first(pool: Pool, function: Any, *arguments: Any) -> Any:
    return pool.run(function, Layout(), *arguments)[0]


def test_losses_fingerprints_and_logprobs_are_the_cpus(there: Run, cpu: Run) -> None:
    numbers.check(there, cpu, small=True)


def test_the_gpus_path_mixes_no_devices_and_trains_as_the_cpu_does(there: Run, cpu: Run, tmp_path: Path) -> None:
    """The path of a GPU without Transformer Engine, on Megatron's own sources."""
    [figures] = training.check(there, cpu, tmp_path).values()
    assert figures["layers"] == "GPU: the layers of float32 are Megatron's local ones with torch's attention"


def test_checkpoints_cross_from_the_cpu_to_the_gpu_and_back(there: Run, cpu: Run, tmp_path: Path) -> None:
    storing.check(there, cpu, tmp_path, memory=False)


def test_an_optimizer_that_is_offloaded_trains_saves_and_loads_as_one_that_is_not(there: Run, tmp_path: Path, long: bool) -> None:
    path, plain, half = tmp_path / "tiny", tmp_path / "plain", tmp_path / "half"
    report, none = there(storing.offload, path, plain, None, 0.0)
    offloaded, some = there(storing.offload, path, half, None, 0.5)
    assert none == 0 < some and offloaded == report
    for root, share in ((plain, 0.5), (half, 0.0))[: 1 + long]:
        again, _ = there(storing.offload, path, root, root / "step_000001", share)
        assert again == report


def test_what_a_bare_machine_lacks_is_not_imported(there: Run) -> None:
    """After the three parts above."""
    assert "megatron" in there(imported)
    assert there(imported) & ABSENT == set()


def test_a_parked_model_exports_what_it_did(cpu: Run, tmp_path: Path) -> None:
    cpu(storing.begin, tmp_path / "tiny", tmp_path / "root")
    parked = cpu(storing.park, tmp_path / "tiny")
    assert parked["before"] == parked["after"] and parked["bytes away"] == 0 < parked["bytes there"]


def test_every_bucket_arrives_once_in_order_and_none_stays(cpu: Run) -> None:
    figures = handing_over.check(cpu, "shm", buckets=60, megabytes=2)
    assert figures["buckets"] == 60


def test_a_shard_holds_what_is_planned(cpu: Run) -> None:
    assert shards.check(cpu, small=True).keys() == {"recompute none", "recompute full"}
