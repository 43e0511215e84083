"""What the user's shell sets is used or named: no variable changes what a run computes, or contradicts its configuration, unseen."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import RunSettings, TrainConfig, load
from megarl.driver.engines import engine_environment, overruled
from megarl.engines.vllm.launch import _KEPT, environment
from megarl.parallel.backend import DETERMINISTIC
from megarl.step import context
from tests.e2e.job import Job

HOSTILE = {
    "VLLM_USE_DEEP_GEMM": "1",
    "VLLM_CPU_KVCACHE_SPACE": "40",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_PLUGINS": "anything",
    "VLLM_MODEL_REDIRECT_PATH": "/other/models",
    "VLLM_USE_MODELSCOPE": "1",
    "VLLM_HOST_IP": "10.0.0.1",
    "VLLM_PORT": "tcp://10.0.0.2:80",  # as Kubernetes sets it
    "VLLM_ATTENTION_BACKEND": "TRITON_ATTN",  # of earlier releases
    "HF_HUB_OFFLINE": "0",
}
SITE = {"VLLM_CACHE_ROOT": "/local/vllm", "OMP_NUM_THREADS": "7", "VLLM_LOGGING_LEVEL": "DEBUG", "GLOO_SOCKET_IFNAME": "eth9"}


@pytest.mark.parametrize("gpu", [False, True])
def test_an_engine_s_process_has_the_environment_that_megarl_decides(tmp_path: Path, gpu: bool) -> None:
    code = f"""
        import json, os
        from megarl.engines.vllm.launch import open_directory
        open_directory({gpu}).rmdir()
        print(json.dumps(dict(os.environ)))
    """
    shell = {**os.environ, **HOSTILE, **SITE, "NVIDIA_TF32_OVERRIDE": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=shell, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    own = environment(gpu)
    assert {name: found[name] for name in own if name not in SITE} == {name: value for name, value in own.items() if name not in SITE}
    assert {name: found[name] for name in SITE} == SITE
    assert found["VLLM_HOST_IP"] == "127.0.0.1" and found["HF_HUB_OFFLINE"] == "1"
    assert (found.get("VLLM_USE_DEEP_GEMM"), found["NVIDIA_TF32_OVERRIDE"]) == (("0", "0") if gpu else (None, "1"))
    assert {name for name in found if name.startswith("VLLM_")} <= own.keys() | {"VLLM_CACHE_ROOT", "VLLM_RPC_BASE_PATH"}


def test_vllm_knows_the_variables_that_engines_are_given() -> None:
    [package] = importlib.util.find_spec("vllm").submodule_search_locations or []  # type: ignore[union-attr]
    known = set(re.findall(r'^    "(VLLM_\w+)": ', Path(package, "envs.py").read_text(), re.MULTILINE))
    given = {name for gpu in (False, True) for name in environment(gpu) if name.startswith("VLLM_")}
    assert len(known) > 200 and (given | _KEPT) - known == set()


def run(tmp_path: Path, tiny_model: Path, *overrides: str) -> RunSettings:
    return load(Job(tmp_path, tiny_model).write(), list(overrides), TrainConfig)


def test_what_a_run_does_not_use_is_named_once(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("VLLM_", "NCCL_", "NVTE_", "CUBLAS_"))]:
        monkeypatch.delenv(name)
    gpus = ("cluster.gpus=true", "sync.transport=nccl")
    config = run(tmp_path, tiny_model)
    assert overruled(config) is None
    for name, value in SITE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    assert overruled(run(tmp_path, tiny_model, *gpus)) is None, "what the shell says is what the engines are told"
    for name, value in {**HOSTILE, "VLLM_BATCH_INVARIANT": "1", "NCCL_ALGO": "Tree", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}.items():
        monkeypatch.setenv(name, value)

    def names(config: RunSettings) -> set[str]:
        line = overruled(config) or ""
        assert line.startswith("of the environment, not used: ")
        return set(line.partition(": ")[2].partition(" (")[0].split(", "))

    assert names(config) == {*HOSTILE, "VLLM_BATCH_INVARIANT"}
    assert names(run(tmp_path, tiny_model, *gpus)) == {*HOSTILE, "VLLM_BATCH_INVARIANT", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"}
    repeating = run(tmp_path, tiny_model, *gpus, "cluster.deterministic=true")
    assert names(repeating) == {*HOSTILE, "NCCL_ALGO", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"} and "NCCL_ALGO" in DETERMINISTIC


def test_a_run_names_it_at_its_start(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = list[str]()
    monkeypatch.setattr(context, "ray_session", lambda *_: nullcontext())
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "40")
    stand_in: Any = SimpleNamespace(note=notes.append, starts_on=lambda gpus: None, starting=lambda what: nullcontext())
    with context.session(run(tmp_path, tiny_model), stand_in):
        pass
    assert len(notes) == 1 and notes[0].startswith("of the environment, not used: VLLM_CPU_KVCACHE_SPACE (")


def test_an_engine_may_take_as_long_to_start_as_the_configuration_says(tmp_path: Path, tiny_model: Path) -> None:
    config = run(tmp_path, tiny_model, "cluster.start_timeout_s=3600.5")
    assert engine_environment(config.cluster)["VLLM_ENGINE_READY_TIMEOUT_S"] == "3601"


@pytest.mark.long
def test_float32_on_a_gpu_is_multiplied_in_full_precision_whatever_the_shell_says() -> None:
    """Transformer Engine's layers, which ask for TF32 where it is enough, are not for float32."""
    code = """
        import os, torch
        print(torch.get_float32_matmul_precision())
        torch.cuda.device_count, torch.cuda.set_device, torch.cuda.get_device_name = lambda: 1, lambda device: None, lambda device: "a GPU"
        from megarl.parallel import backend
        backend.Cuda(exact=True)
        print(torch.get_float32_matmul_precision(), os.environ["NVIDIA_TF32_OVERRIDE"])
        torch.cuda.get_device_capability, backend.has_transformer_engine = lambda device: (9, 0), lambda: True
        os.environ["NVIDIA_TF32_OVERRIDE"] = "1"
        backend.Cuda()
        print(torch.get_float32_matmul_precision(), os.environ.get("NVIDIA_TF32_OVERRIDE"))
    """
    shell = {**os.environ, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "NVIDIA_TF32_OVERRIDE": "1"}  # the first as in NVIDIA's containers
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)], env=shell, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["high", "highest 0", "highest None"], done.stderr
