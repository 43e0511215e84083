"""The parts' bodies on the CPU: on a simulated GPU, and where they ask for memory on the CPU alone; and the command that runs them."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.config import Layout
from tests.gpu import adapting, converting, handing_over, layers, memory, numbers, shards, storing, training
from tests.gpu.__main__ import PART_S, PARTS, main
from tests.gpu.process import Rank, Run, imported
from tests.gpu.report import Report, largest
from tests.rank_pool import Pool

ROOT = Path(__file__).resolve().parents[2]
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


@pytest.fixture
def report() -> Iterator[Report]:
    """Of a part that must have figures and no faults."""
    report = Report()
    yield report
    assert report.faults == [] and report.figures


def _first(pool: Pool, function: Any, *arguments: Any) -> Any:
    return pool.run(function, Layout(), *arguments)[0]


def test_losses_fingerprints_and_logprobs_are_the_cpus(there: Run, cpu: Run, report: Report) -> None:
    numbers.check(there, cpu, report, small=True)
    assert len(report.figures) == 2 + len(numbers.WAYS)


def test_the_gpus_path_mixes_no_devices_and_trains_as_the_cpu_does(there: Run, cpu: Run, report: Report, tmp_path: Path) -> None:
    """The path of a GPU without Transformer Engine, on Megatron's own sources."""
    training.check(there, cpu, report, tmp_path)
    [figures] = report.figures.values()
    assert figures["layers"] == "GPU: the layers of float32 are Megatron's local ones with torch's attention"


def test_adapters_have_the_cpus_gradients(there: Run, cpu: Run, report: Report, tmp_path: Path) -> None:
    adapting.check(there, cpu, report, tmp_path)


def test_checkpoints_cross_from_the_cpu_to_the_gpu_and_back(there: Run, cpu: Run, report: Report, tmp_path: Path) -> None:
    storing.check(there, cpu, report, tmp_path, memory=False)


def test_an_optimizer_that_is_offloaded_trains_saves_and_loads_as_one_that_is_not(there: Run, report: Report, tmp_path: Path) -> None:
    storing.check_offload(there, report, tmp_path, equal=True)
    assert report.figures["moments in host memory"]["half in host memory"] > 0


def test_layers_in_the_shapes_of_a_rank_equal_another_way_to_compute_them(there: Run, report: Report) -> None:
    layers.check(there, report, small=True)
    assert report.figures.keys() == {"experts", "attention"}


def test_bytes_that_move_in_every_step_arrive(there: Run, report: Report) -> None:
    memory.check(there, report, memory.device, memory.weights, memory.parking, memory.optimizer, small=True)
    assert len(report.figures) == 4


def test_a_directory_of_many_experts_goes_to_the_gpu_and_back(there: Run, report: Report, tmp_path: Path) -> None:
    converting.check(there, report, tmp_path / "model", small=True)
    assert report.figures["tensors"] == report.figures["exported"] > 100


def test_what_a_bare_machine_lacks_is_not_imported(there: Run) -> None:
    """After the parts above."""
    assert "megatron" in there(imported)
    assert there(imported) & ABSENT == set()


def test_a_parked_model_exports_what_it_did(cpu: Run, tmp_path: Path) -> None:
    cpu(storing.begin, tmp_path / "tiny", tmp_path / "root")
    parked = cpu(storing.park, tmp_path / "tiny")
    assert parked["before"] == parked["after"] and parked["bytes away"] == 0 < parked["bytes there"]


def test_every_bucket_arrives_once_in_order_and_none_stays(cpu: Run, report: Report) -> None:
    handing_over.check(cpu, report, "shm", buckets=60, megabytes=2)
    assert report.figures["buckets"] == 60


def test_a_shard_holds_what_is_planned(cpu: Run, report: Report) -> None:
    shards.check(cpu, report, small=True)
    assert report.figures.keys() == {"recompute none", "recompute full"}


def kit(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120)


def test_without_a_gpu_the_command_says_so_and_exits_1() -> None:
    done = kit()
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.strip().endswith("sees no CUDA device") and "usage" not in done.stderr


def test_a_part_that_is_not_there_is_refused_by_name() -> None:
    done = kit("numbers", "6")
    assert done.returncode == 2 and "6: there is no such part; there are device, shards, numbers" in done.stderr


def test_every_part_prints_its_line_and_none_keeps_another_from_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One part fails after its first figure, one takes too long, one dies with its process."""

    def failing(work: Any) -> None:
        work.report.figures["one"] = 1
        work.report.check(False, "a bound is missed")
        raise RuntimeError("and then this")

    def dying(work: Any) -> None:
        work.ranks.gpu()(end_the_process)

    def hanging(work: Any) -> None:
        assert 100 < work.ranks.deadline - time.monotonic() <= PART_S
        work.ranks.deadline = time.monotonic() + 2
        work.ranks.gpu()(wait_for_ever)

    parts = {"failing": failing, "device": PARTS["device"], "hanging": hanging, "dying": dying}
    monkeypatch.setattr("tests.gpu.__main__.PARTS", parts)
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--simulated", "--out", str(tmp_path / "out")])
    assert main() == 1
    head, *lines, end = capsys.readouterr().out.splitlines()
    assert head.startswith("a simulated GPU, torch ")
    assert end == "tests.gpu: 1 of 4 parts passed; faults in failing, hanging, dying"
    told = {line["part"]: line for line in map(json.loads, lines)}
    assert told["failing"]["figures"] == {"one": 1}
    assert told["failing"]["faults"][0] == "a bound is missed" and told["failing"]["faults"][1].endswith("RuntimeError: and then this\n")
    assert "the process died (exit code 3)" in told["dying"]["faults"][0]
    assert told["device"]["faults"] == [] and told["device"]["figures"]["device"]["copy GB/s"] > 0
    assert "wait_for_ever on pretend: not done in 2 s" in told["hanging"]["faults"][0]
    assert [json.loads(line) for line in (tmp_path / "out" / "parts.jsonl").read_text().splitlines()] == list(map(json.loads, lines))
    assert "torch==" in (tmp_path / "out" / "machine.txt").read_text()


def test_no_part_begins_after_the_time_of_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("tests.gpu.__main__.TOTAL_S", -1.0)
    monkeypatch.setattr(sys, "argv", ["tests.gpu", "--simulated", "device", "storing"])
    assert main() == 1
    lines = capsys.readouterr().out.splitlines()[1:-1]
    assert [json.loads(line)["faults"] for line in lines] == [["not run: -1 s are over"]] * 2


def test_what_is_not_a_number_is_a_fault() -> None:
    assert math.isnan(largest([1.0, math.nan, 2.0])) and largest([1.0, 3.0, 2.0]) == 3.0
    report = Report()
    nothing = torch.full((3,), math.nan)
    errors = numbers._errors(torch.randn(3, 5), torch.zeros(3, dtype=torch.int64), nothing, nothing, torch.full((3, 5), math.nan))
    assert all(map(math.isnan, errors.values()))
    report.check(largest(errors.values()) < 1.0, "too large")
    assert report.faults == ["too large"]


def test_a_call_that_reads_past_an_end_is_told_as_what_it_is(there: Run) -> None:
    with pytest.raises(AssertionError, match="EOFError: nothing is left"):
        there(read_past_the_end)
    assert there(imported)


def read_past_the_end(grid: Any) -> None:
    raise EOFError("nothing is left")


def end_the_process(grid: Any) -> None:
    os._exit(3)


def wait_for_ever(grid: Any) -> None:
    time.sleep(1_000)


def test_the_wheels_of_a_bare_machine_are_the_locked_ones() -> None:
    locked = (ROOT / "tools" / "cpu.lock").read_text().splitlines()
    wheels = (ROOT / "tests" / "gpu" / "wheels.txt").read_text().splitlines()
    assert len(wheels) > 5 and set(wheels) <= set(locked)
