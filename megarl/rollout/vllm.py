"""A rollout engine: vLLM's AsyncLLM behind deterministic generation, checked weight updates and typed failures.

The class is plain; the cluster makes a Ray actor of it, and tests run it under asyncio. One engine a process: vLLM keeps its settings
in environment variables. vLLM itself is imported in `start`, after those are set.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megarl.batch import Sample
from megarl.config import ConfigError, RolloutSettings
from megarl.imports import uncollected
from megarl.models.families import family_of
from megarl.models.hf import read_config
from megarl.rollout.engine import (
    EngineDead,
    EngineInfo,
    Generated,
    Prompt,
    RolloutError,
    RolloutTimeout,
    Sampling,
    WeightSyncError,
    check_engine,
    request_seed,
)
from megarl.sync.fingerprint import Piece, Print, join

VLLM_VERSION = "0.30.0"  # what the mends in here and in megarl/sync/receive.py were checked against
_CPU_STEP_TOKENS = 8192  # most prompt tokens computed in one step
_SHUTDOWN_S = 3.0  # then SIGKILL: an engine has nothing to save

Result = TypeVar("Result")


def environment(gpu: bool) -> dict[str, str]:
    """Environment variables that an engine's process must start with (torch and Ray read some of them at import)."""
    safe = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_PLUGINS": "",  # no code of installed packages but vLLM's own
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    if gpu:
        return safe
    return {
        **safe,
        "OMP_NUM_THREADS": "1",
        "TORCH_COMPILE_DISABLE": "1",  # else two sampler functions are compiled at the first token: 7 to 14 s
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the worker lives in the engine's process
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines and trainers share cores
    }


class RolloutEngine:
    """One vLLM replica. `start` first; every method may raise EngineDead or RolloutTimeout."""

    extension = "megarl.rollout.extension.WorkerExtension"

    def __init__(self, label: str = "rollout engine") -> None:
        self._label = label
        self._llm: Any = None
        self._version = 0
        self._updating = False  # weights are partly loaded: nothing may be generated
        self._requests = 0
        self._watched: list[Any] = []
        self._segments: set[Path] = set()

    # ---------------------------------------------------------------- life

    async def start(self, model: Path, dtype: str, settings: RolloutSettings, seed: int, *, gpu: bool) -> EngineInfo:
        """Loads `model` (a Hugging Face directory) and returns when the engine can generate.

        Must run in a thread that lives as long as the engine: the engine's process dies with the thread that made it.
        Raises ConfigError as `check_engine` does, RolloutError where vLLM is another version or does not start.
        """
        begun = time.monotonic()
        assert self._llm is None, "start comes once"
        self._settings, self._gpu, self._dtype = settings, gpu, dtype
        hf = read_config(model)
        check_engine(hf, dtype, settings, gpu=gpu)
        self._tied = bool(hf.get("tie_word_embeddings", False))
        self._expected = _expected(hf, dtype)
        self._lock, self._dead = asyncio.Lock(), asyncio.Event()
        for name, value in environment(gpu).items():
            os.environ.setdefault(name, value)
        directory = Path(tempfile.mkdtemp(prefix="megarl-"))  # mode 0700: sockets and rendezvous files
        os.environ["VLLM_RPC_BASE_PATH"] = str(directory)
        try:
            self._llm = self._make(model, seed)
            self._watch()
            workers = await self._call("megarl_pid", timeout_s=settings.timeout_s)
        except BaseException:
            await self.close()
            raise
        finally:
            _remove_files(directory)
        pids = sorted({process.pid for process in self._watched} | set(workers))
        self._segments = {segment for pid in pids for segment in _message_queues(pid)}
        for segment in self._segments:  # all who use them have mapped them: without a name nothing is left, however the engine ends
            segment.unlink(missing_ok=True)
        return EngineInfo(workers=settings.tp, vllm=VLLM_VERSION, start_s=time.monotonic() - begun, pids=pids)

    def _make(self, model: Path, seed: int) -> Any:
        with uncollected():
            import vllm

            if vllm.__version__ != VLLM_VERSION:
                raise RolloutError(f"{self._label}: vLLM {vllm.__version__} is installed, and {VLLM_VERSION} is needed")
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            from megarl.rollout.extension import SingleExecutor, TensorParallelExecutor

            if not self._gpu:
                _register_model(read_config(model))
        arguments = AsyncEngineArgs(**self._arguments(model, seed))
        executor = SingleExecutor if self._settings.tp == 1 else TensorParallelExecutor
        try:
            config = arguments.create_engine_config()
            with _fork_cheaply(enabled=not self._gpu):
                return AsyncLLM(vllm_config=config, executor_class=executor, log_stats=False, log_requests=False)
        except (ValueError, RuntimeError) as error:
            raise RolloutError(f"{self._label}: vLLM does not start: {' '.join(str(error).split())}") from error

    def _arguments(self, model: Path, seed: int) -> dict[str, Any]:
        settings = self._settings
        common: dict[str, Any] = {
            "model": str(model),
            "dtype": self._dtype,
            "seed": seed,
            "tensor_parallel_size": settings.tp,
            "max_model_len": settings.max_prompt_tokens + settings.max_response_tokens,
            "max_num_seqs": settings.max_num_seqs,
            "logprobs_mode": "processed_logprobs",  # of the distribution that was sampled: temperature included
            "enable_return_routed_experts": settings.return_routes and _has_experts(read_config(model)),
            "worker_extension_cls": self.extension,
            "trust_remote_code": False,
            "disable_log_stats": True,
        }
        if self._gpu:
            return {**common, "gpu_memory_utilization": settings.gpu_memory_fraction}
        return {
            **common,
            "kv_cache_memory_bytes": (settings.kv_cache_mb or 0) << 20,
            "enforce_eager": True,
            # A prompt computed in parts throws samples away and rewinds the request's generator, which a CPU generator cannot do
            # (vllm/v1/worker/gpu_model_runner.py:3723: the engine dies). So prompts are computed whole.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(_CPU_STEP_TOKENS, common["max_model_len"]),
            "use_tqdm_on_load": False,
        }

    async def close(self) -> None:
        """Ends every process of the engine and removes its files. May be called twice."""
        llm, self._llm = self._llm, None
        if llm is not None:
            for process in self._watched:
                asyncio.get_running_loop().remove_reader(process.sentinel)
            llm.shutdown(timeout=_SHUTDOWN_S)
        for segment in self._segments:
            segment.unlink(missing_ok=True)

    # ---------------------------------------------------------------- generation

    async def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Generated]:
        """`sampling.n` responses to each prompt, in the order of the prompts.

        Deterministic: every request is queued before the first is scheduled, the prefix cache starts empty, and each response draws from
        its own generator, so the same call gives the same tokens and log-probs. The end-of-sequence token is part of a response that
        ends by itself. Raises ValueError for prompts that do not fit, RolloutTimeout naming how many responses are late.
        """
        self._check(prompts, sampling)
        requests = [(prompt, sample) for prompt in prompts for sample in range(sampling.n)]
        done: list[Sample | None] = [None] * len(requests)

        def late() -> str:
            return f"{sum(sample is None for sample in done)} of {len(done)} responses"

        async with self._lock:
            self._check_alive()
            if self._updating:
                raise WeightSyncError(f"{self._label}: a weight update was begun and not finished")
            await self._bounded(self._respond(requests, sampling, done), self._settings.timeout_s, late)
        samples = [sample for sample in done if sample is not None]
        assert len(samples) == len(requests)
        return [Generated(prompt.id, samples[i * sampling.n : (i + 1) * sampling.n]) for i, prompt in enumerate(prompts)]

    def _check(self, prompts: Sequence[Prompt], sampling: Sampling) -> None:
        limit = self._settings.max_prompt_tokens + self._settings.max_response_tokens
        for prompt in prompts:
            if not prompt.tokens or len(prompt.tokens) + sampling.max_tokens > limit:
                held = f"{len(prompt.tokens)} tokens and up to {sampling.max_tokens} more"
                raise ValueError(f"prompt {prompt.id!r}: {held}; the engine takes 1 + 1 to {limit} in all")
        if len({prompt.id for prompt in prompts}) != len(prompts):
            raise ValueError("two prompts of one call have the same id, and would draw the same responses")

    async def _respond(self, requests: list[tuple[Prompt, int]], sampling: Sampling, done: list[Sample | None]) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        queues: list[Any] = []
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        try:
            await self._llm.reset_prefix_cache()
            for prompt, sample in requests:
                parameters = SamplingParams(
                    temperature=sampling.temperature,
                    max_tokens=sampling.max_tokens,
                    seed=request_seed(sampling.seed, prompt.id, sample) if sampling.temperature else None,
                    logprobs=0,  # the sampled token's alone
                    flat_logprobs=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                    skip_clone=True,
                )
                self._requests += 1
                queues.append(await self._llm.add_request(str(self._requests), {"prompt_token_ids": prompt.tokens}, parameters))
            await self._llm.resume_generation()
            for index, queue in enumerate(queues):
                done[index] = self._sample(requests[index][0], await queue.get())
        except BaseException:
            if not self._dead.is_set():
                with suppress(Exception):
                    await self._llm.abort([queue.request_id for queue in queues], internal=True)
                    await self._llm.resume_generation()
            raise

    def _sample(self, prompt: Prompt, output: Any) -> Sample:
        (response,) = output.outputs
        if response.finish_reason not in ("stop", "length", "abort"):
            raise RolloutError(f"{self._label}: prompt {prompt.id!r} ended with {response.finish_reason!r}")
        tokens = np.array([*prompt.tokens, *response.token_ids], dtype=np.int32)
        logp = np.array(response.logprobs.logprobs, dtype=np.float32)
        assert list(response.logprobs.token_ids) == list(response.token_ids), "vLLM returns one log-prob a token: the sampled one's"
        routes = response.routed_experts
        if routes is not None and routes.shape[0] != len(tokens) - 1:
            raise RolloutError(f"{self._label}: prompt {prompt.id!r}: {routes.shape[0]} rows of routed experts for {len(tokens)} tokens")
        return Sample(tokens, len(prompt.tokens), logp, response.finish_reason, self._version, routes)

    # ---------------------------------------------------------------- weights

    async def connect(self, rendezvous: dict[str, Any], first_rank: int) -> None:
        """Each worker joins the trainer's broadcast group (wire.Rendezvous.plain()); worker w becomes rank `first_rank` + w.

        Returns when all members of the group, the trainer too, are there.
        """
        await self._weights("megarl_connect", rendezvous, first_rank, timeout_s=rendezvous["timeout_s"])

    async def start_update(self, timeout_s: float) -> None:
        """Stops generating and gets ready for buckets that bring every tensor of the checkpoint once."""
        async with self._lock:
            self._check_alive()
            self._updating = True
            await self._bounded(self._llm.pause_generation(mode="keep", clear_cache=False), timeout_s, lambda: "pausing")
            await self._weights("megarl_start", self._expected, timeout_s=timeout_s)

    async def receive(self, header: dict[str, Any], timeout_s: float) -> None:
        """Takes one bucket (wire.Header.plain()), sent at the same time. Raises WeightSyncError naming a tensor that does not fit."""
        await self._weights("megarl_receive", header, timeout_s=timeout_s)

    async def finish_update(self, version: int, timeout_s: float) -> None:
        """Puts the new weights to work under `version`. Raises WeightSyncError naming a tensor that has not come."""
        async with self._lock:
            await self._weights("megarl_finish", timeout_s=timeout_s)
            await self._bounded(self._resume(version), timeout_s, lambda: "resuming")
            self._version, self._updating = version, False

    async def _resume(self, version: int) -> None:
        await self._llm.reset_prefix_cache(reset_running_requests=True)  # keys and values of the old weights
        await self._llm.update_weight_version(str(version))
        await self._llm.resume_generation()

    async def fingerprints(self, timeout_s: float) -> dict[str, list[Print]]:
        """What the engine holds, for `megarl.sync.fingerprint.compare`: per Hugging Face name one entry for each place that holds it."""
        held = await self._call("megarl_held", self._tied, timeout_s=timeout_s)
        return join({name: [Piece(*piece) for piece in pieces] for name, pieces in worker.items()} for worker in held)

    async def _weights(self, method: str, *arguments: Any, timeout_s: float) -> None:
        faults = [fault for fault in await self._call(method, *arguments, timeout_s=timeout_s) if fault is not None]
        if faults:
            raise WeightSyncError(f"{self._label}: {faults[0]}")

    # ---------------------------------------------------------------- bounded waits

    async def _call(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """`method` of the extension on every worker; one result each."""
        self._check_alive()
        try:
            return await self._bounded(self._llm.collective_rpc(method, args=arguments), timeout_s, lambda: method)
        except RolloutError:
            raise
        except Exception as error:  # what a worker raises arrives as a bare Exception with the text
            raise RolloutError(f"{self._label}: {method}: {error}") from error

    async def _bounded(self, work: Awaitable[Result], timeout_s: float, late: Callable[[], str]) -> Result:
        """`work`, unless the engine dies or the time is over first: neither waits for the other."""
        from vllm.v1.engine.exceptions import EngineDeadError

        task = asyncio.ensure_future(work)
        death = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({task, death}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not self._dead.is_set():
                return task.result()
        except EngineDeadError as error:
            said = " ".join(str(error.__cause__ or error).split())
            raise EngineDead(f"{self._label}: its process has failed: {said}") from error
        finally:
            for waiting in (task, death):
                waiting.cancel()
            await asyncio.gather(task, death, return_exceptions=True)
        self._check_alive()
        raise RolloutTimeout(f"{self._label}: {late()} not done after {timeout_s:g} s")

    def _watch(self) -> None:
        self._watched = list(self._llm.engine_core.resources.engine_manager.processes)
        for process in self._watched:
            asyncio.get_running_loop().add_reader(process.sentinel, self._dead.set)

    def _check_alive(self) -> None:
        if self._llm is None:
            raise EngineDead(f"{self._label}: is closed")
        if self._dead.is_set() or self._llm.errored:
            for process in self._watched:
                process.join(0.5)  # gone already, but perhaps not yet reaped
            exits = ", ".join(f"pid {process.pid}: exit code {process.exitcode}" for process in self._watched)
            raise EngineDead(f"{self._label}: its process has ended ({exits})")


def _expected(config: dict[str, Any], dtype: str) -> dict[str, tuple[list[int], str]]:
    """The shape and dtype of every tensor that an update brings, by Hugging Face name."""
    return {
        name: (list(shape), "float32" if weight.float32 else dtype)
        for weight in family_of(config).weights(config)
        for name, shape in zip(weight.hf, weight.op.shapes, strict=True)
    }


def _has_experts(config: dict[str, Any]) -> bool:
    return any(config.get(key) for key in ("num_experts", "num_local_experts", "n_routed_experts"))


def _register_model(config: dict[str, Any]) -> None:
    """Registers the model's class itself: for a name vLLM would start a subprocess to look at it (8 CPU seconds)."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.registry import _VLLM_MODELS

    for architecture in config["architectures"]:
        if architecture not in _VLLM_MODELS:
            raise ConfigError(f"model.path: vLLM {VLLM_VERSION} does not know the architecture {architecture}")
        module, name = _VLLM_MODELS[architecture]
        ModelRegistry.register_model(architecture, getattr(importlib.import_module(f"vllm.model_executor.models.{module}"), name))


@contextmanager
def _fork_cheaply(enabled: bool) -> Iterator[None]:
    """Lets vLLM fork its process instead of importing everything again in a new one.

    vllm/platforms/cpu.py:385 asks for spawn, and vllm/utils/system_utils.py:134 insists on it inside of a Ray actor; CPU engines need
    neither: nothing here has started an OpenMP pool or a CUDA context, and the child talks to no Ray.
    """
    if not enabled:
        yield
        return
    from vllm.utils import system_utils

    before = system_utils.is_in_ray_actor
    system_utils.is_in_ray_actor = lambda: False
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
    gc.freeze()  # the child's collections leave the parent's objects alone: pages stay shared, and it starts in 1.1 s, not 1.7
    try:
        yield
    finally:
        system_utils.is_in_ray_actor = before


def _remove_files(directory: Path) -> None:
    """Removes the engine's sockets, rendezvous file and CPU shared memory. The processes that use them have them open already."""
    for rendezvous in directory.glob("vllm_dist_*"):  # vllm/v1/worker/cpu_worker.py:163 names the shared memory after this file
        for segment in Path("/dev/shm").glob(f"{rendezvous.name}-*"):
            segment.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _message_queues(pid: int) -> set[Path]:
    """The shared memory over which an engine talks with its tensor-parallel workers. Whoever of them is killed leaves it behind."""
    fields = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {Path(line[5]) for line in fields if len(line) == 6 and line[5].startswith("/dev/shm/psm_")}
