"""The vLLM engine: vLLM's AsyncLLM with deterministic sampling, verified weight updates and typed failures.

One engine per process: vLLM keeps its settings in environment variables.
"""

import asyncio
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import psutil

from megarl.batch import VersionSpan
from megarl.config import LoraSettings, RolloutSettings, TrainRolloutSettings
from megarl.engines.affinity import Homes
from megarl.engines.engine import (
    Engine,
    EngineDead,
    Finished,
    Meeting,
    Part,
    Request,
    RequestId,
    RolloutError,
    RolloutTimeout,
    Scoring,
    Setup,
    Text,
    TokenScores,
    WeightSyncError,
)
from megarl.engines.vllm import checks
from megarl.engines.vllm.adapters import arguments as adapter_arguments
from megarl.engines.vllm.adapters import check as check_adapters
from megarl.engines.vllm.adapters import write as write_adapter
from megarl.engines.vllm.images import ImagePrompts
from megarl.engines.vllm.launch import (
    EXTENSION,
    engine_arguments,
    launch,
    open_directory,
    overruled,
    reads_anew,
    remove_files,
    unlink_shared_memory,
)
from megarl.engines.vllm.member import ENDED_S, VllmMember
from megarl.engines.vllm.requests import check_request, sample_of, sampling_parameters, scores_of, scoring_parameters
from megarl.engines.vllm.watched import WatchedProcesses
from megarl.models.adapters import target_names
from megarl.models.description import ModelDescription
from megarl.models.image_processor import ImageProcessor
from megarl.sync.fingerprint import Piece, Print, join

SLACK = 0.25  # of max_num_seqs: by so many unfinished requests a data-parallel rank may exceed the least busy one
_AGAIN_S = 1.0  # after which the processes of an engine that has lost a member in its start are looked for again


@dataclass
class _Open:
    """A submitted request whose response `receive` has not returned yet."""

    queue: Any  # vLLM's output queue
    waiting: asyncio.Task[None]  # waits for that queue
    rank: int  # the data-parallel rank that answers it
    prompt_length: int
    versions: list[VersionSpan]  # of the response


class VllmEngine(WatchedProcesses, Engine):
    """One vLLM replica. The class is independent of Ray: an actor holds it, and tests run it under asyncio."""

    reports_experts = True
    member = VllmMember
    extension = EXTENSION

    def __init__(self, label: str) -> None:
        super().__init__(label)
        self._version = 0
        self._asleep: set[Part] = set()  # the parts that are not on the device
        self._updating = False  # weights are partly loaded: nothing may be generated
        self._blank = False  # no weights are loaded
        self._up = False  # it has started
        self._started = threading.Event()  # or it has failed to
        self._count = 0  # requests so far
        self._scoring: Scoring | None = None
        self._by_position = False  # the workers are set up to draw by position
        self._targets: list[str] = []  # modules with adapters
        self._adapter: Any = None  # vLLM's LoRARequest of the adapter in use
        self._open: dict[RequestId, _Open] = {}
        self._counts: dict[str, int] = {}  # tokens of vLLM's requests when the update began
        self._finished: list[Finished] = []  # not yet returned by `receive`
        self._images: ImagePrompts | None = None

    @staticmethod
    def check(model: ModelDescription, dtype: str, settings: RolloutSettings, *, gpu: bool) -> None:
        checks.check(model, dtype, settings, gpu=gpu)

    @staticmethod
    def check_adapters(model: ModelDescription, dtype: str, lora: LoraSettings, *, gpu: bool) -> None:
        check_adapters(model, dtype, lora, gpu=gpu)

    @staticmethod
    def with_cache(model: ModelDescription, dtype: str, settings: RolloutSettings, most_mb: int) -> RolloutSettings:
        return checks.with_cache(model, dtype, settings, most_mb)

    @staticmethod
    def overruled(environ: Mapping[str, str], *, gpu: bool) -> list[str]:
        return overruled(environ, gpu)

    # ---------------------------------------------------------------- lifecycle

    async def start(self, setup: Setup, meeting: Meeting | None = None) -> list[int]:
        """Must run in a thread that lives as long as the engine: the engine's process dies with the thread that started it."""
        assert self._llm is None, "start comes once"
        assert (meeting is not None) == (setup.settings.dp > 1), "members meet, and there are members to meet"
        settings = setup.settings
        drafts = isinstance(settings, TrainRolloutSettings) and settings.speculative is not None
        model = ModelDescription.read(setup.model, mtp="train" if drafts else "drop", drop_images=setup.drop_images)
        self.check(model, setup.dtype, settings, gpu=setup.gpu)
        self._limit = settings.max_prompt_tokens + settings.max_response_tokens
        self._tied = model.tied
        self._expected = model.update(setup.dtype, settings.quantization)
        self._in_flight = isinstance(settings, TrainRolloutSettings) and settings.mode == "free"
        self._lock, self._arrival, self._updated = asyncio.Lock(), asyncio.Event(), asyncio.Event()
        self._updated.set()
        self._blank, self._scoring, self._affinity = setup.blank, setup.scoring, setup.affinity
        self._homes = Homes(settings.dp, ceil(SLACK * settings.max_num_seqs))
        directory = open_directory(setup.gpu, *([] if meeting is None else [meeting.host]))
        self._targets = [] if setup.lora is None else target_names(model, setup.lora)
        adapters = {} if setup.lora is None else adapter_arguments(setup.lora.rank, self._targets)
        arguments = engine_arguments(setup, model) | adapters | {"worker_extension_cls": self.extension}
        try:
            self._llm = launch(self.label, arguments, model, gpu=setup.gpu, meeting=meeting)
            if model.sizes.vision is not None:
                cache = self._llm.renderer.mm_processor_cache
                self._images = ImagePrompts(ImageProcessor(setup.model, *setup.pixels), model.sizes.vision.image_token, cache)
            self._watch()
            workers = (await self._call("megarl_pid", timeout_s=settings.timeout_s))[: settings.tp]
            if reads_anew(model, settings) and not setup.blank:
                await self._weights("megarl_read", str(setup.model), self._expected, setup.drop_images, timeout_s=settings.timeout_s)
            if drafts:
                await self.drafted(settings.timeout_s)  # it counts from now on
            if setup.scoring is not None and setup.scoring.temperature != 1:
                await self._call("megarl_divide_logits", setup.scoring.temperature, timeout_s=settings.timeout_s)
        except BaseException as error:
            await self.close()
            if self._failure is not None:
                raise self._failure from error
            raise
        finally:
            self._started.set()
            remove_files(directory)
        pids = sorted({process.pid for process in self._watched} | set(workers))
        unlink_shared_memory(pids)
        self._up = True
        return pids

    def lose(self, why: str) -> None:
        self._failure = EngineDead(f"{self.label}: {why}")
        while True:
            for process in multiprocessing.active_children():
                process.kill()
            if self._started.wait(_AGAIN_S):  # until then there may be more of them: `launch` waits for its members without end
                return

    async def ping(self, timeout_s: float) -> None:
        await self._call("megarl_pid", timeout_s=timeout_s)

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        for one in self._open.values():
            one.waiting.cancel()
        if llm is not None:
            for process in self._watched:
                asyncio.get_running_loop().remove_reader(process.sentinel)
            # SIGKILL: an engine has nothing to save, and its own shutdown takes three times as long as its start.
            for process in () if self._up else self._watched:
                with suppress(psutil.NoSuchProcess):
                    unlink_shared_memory([process.pid, *(one.pid for one in psutil.Process(process.pid).children(recursive=True))])
            llm.shutdown(timeout=0)
            for process in self._watched:
                process.join(ENDED_S)

    # ---------------------------------------------------------------- requests

    async def submit(self, requests: Sequence[Request], timeout_s: float) -> None:
        """Each response draws from its own generator. Without affinity, in an idle engine all requests are queued before the first is
        scheduled, and the prefix cache starts empty. So the same requests run in the same batches and give the same bits."""
        while True:
            if self._in_flight:
                await self._bounded(self._updated.wait(), timeout_s, lambda: "a weight update")
            async with self._lock:
                if not (self._in_flight and self._updating):  # another update may have started first
                    await self._take(requests, timeout_s)
                    return

    async def _take(self, requests: Sequence[Request], timeout_s: float) -> None:
        self.check_health()
        if self._updating:
            raise WeightSyncError(f"{self.label}: a weight update was begun and not finished")
        if self._asleep:
            raise RolloutError(f"{self.label}: asleep ({', '.join(sorted(self._asleep))}): it takes no requests")
        if self._blank:
            raise RolloutError(f"{self.label}: has no weights before the next update")
        taken = set(self._open)
        for request in requests:
            check_request(request, self._limit)
            if request.id in taken:
                raise ValueError(f"request {request.id!r}: another request of this id is unfinished")
            taken.add(request.id)
        if not self._by_position and any(request.by_position for request in requests):
            await self._call("megarl_draw_by_position", timeout_s=timeout_s)
            self._by_position = True
        await self._bounded(self._add(requests), timeout_s, lambda: f"taking {len(requests)} requests")

    async def _add(self, requests: Sequence[Request]) -> None:
        anew, ranks = not self._open and not self._affinity, self._ranks(requests)
        queues: list[Any] = []
        try:
            if anew:
                await self._llm.pause_generation(mode="keep", clear_cache=False)
                await self._llm.reset_prefix_cache()
            for request, rank in zip(requests, ranks, strict=True):
                self._count += 1
                more = {"data_parallel_rank": rank, "lora_request": self._adapter}
                taking = self._llm.add_request(str(self._count), await self._prompt(request), sampling_parameters(request), **more)
                queues.append(await taking)
            if anew:
                await self._llm.resume_generation()
        except BaseException:
            if not self._dead.is_set():
                with suppress(Exception):
                    await self._llm.abort([queue.request_id for queue in queues], internal=True)
                    if anew:
                        await self._llm.resume_generation()
            raise
        for request, queue, rank in zip(requests, queues, ranks, strict=True):
            waiting = asyncio.create_task(self._wait_for(request, queue))
            self._open[request.id] = _Open(queue, waiting, rank, len(request.tokens), [VersionSpan(0, self._version)])

    async def _prompt(self, request: Request | Text) -> Any:
        if not request.images:
            return {"prompt_token_ids": list(request.tokens)}
        assert self._images is not None, "requests with images are for models that see them"
        return await asyncio.to_thread(self._images.prompt, request)

    def _ranks(self, requests: Sequence[Request]) -> list[int]:
        """Give each new request a data-parallel rank, not vLLM's choice, which varies: its conversation's with affinity, the least busy one
        otherwise."""
        loads = [0] * len(self._llm.engine_core.core_engines)
        for one in self._open.values():
            loads[one.rank] += 1
        ranks = []
        for request in requests:
            ranks.append(self._homes.place(request.conversation if self._affinity else None, loads))
            loads[ranks[-1]] += 1
        return ranks

    async def _wait_for(self, request: Request, queue: Any) -> None:
        """Wait for a request's output, and store its response or failure for `receive`."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            output = await queue.get()
            self._finished.append(Finished(request.id, sample_of(request, output, self._open[request.id].versions, self.label)))
        except EngineDeadError as error:
            self._failure = self._death(error)
        except RolloutError as error:
            self._failure = error
        except Exception as error:
            self._failure = RolloutError(f"{self.label}: request {request.id!r}: {type(error).__name__}: {error}")
            self._failure.__cause__ = error
        self._arrival.set()

    async def receive(self, timeout_s: float) -> list[Finished]:
        self.check_health()
        if not self._finished:
            self._arrival.clear()
            with suppress(RolloutTimeout):
                await self._bounded(self._arrival.wait(), timeout_s, lambda: "responses")
            self.check_health()
        finished, self._finished = self._finished, []
        for one in finished:
            del self._open[one.id]
        return finished

    async def abort(self, ids: Iterable[RequestId], timeout_s: float) -> None:
        self.check_health()
        names = [self._open[id_].queue.request_id for id_ in ids if id_ in self._open]
        aborting = self._on_cores("megarl_abort", names)  # their tokens are still in the cores
        await self._bounded(aborting, timeout_s, lambda: f"aborting {len(names)} requests")

    async def score(self, texts: Sequence[Text], timeout_s: float) -> list[TokenScores]:
        """All texts are queued before the first is scheduled, so that the same texts run in the same batches and give the same bits."""
        assert self._scoring is not None, "a teacher's engine"
        self.check_health()
        named, queues = self._scoring.named, list[Any]()

        async def one(text: Text, queue: Any) -> TokenScores:
            return scores_of(text.tokens, await queue.get(), named, self.label)  # vLLM's lists are large: each is converted as it comes

        async def all_() -> list[TokenScores]:
            prompts = [await self._prompt(text) for text in texts]
            await self._llm.pause_generation(mode="keep", clear_cache=False)
            for prompt in prompts:
                self._count += 1
                queues.append(await self._llm.add_request(str(self._count), prompt, scoring_parameters(named)))
            await self._llm.resume_generation()
            return list(await asyncio.gather(*(one(text, queue) for text, queue in zip(texts, queues, strict=True))))

        return await self._bounded(all_(), timeout_s, lambda: f"scoring {len(texts)} texts")

    # ---------------------------------------------------------------- the device

    async def sleep(self, timeout_s: float, *, keep_weights: bool) -> None:
        async with self._lock:
            self.check_health()
            if self._open:
                raise RolloutError(f"{self.label}: {len(self._open)} requests are unfinished: an engine sleeps between requests")
            if self._updating:  # the ranks have failed midway; vLLM would copy tensors without memory (v1/worker/gpu_worker.py:253)
                await self._weights("megarl_abandon_update", timeout_s=timeout_s)
            # vLLM counts as asleep until all parts are awake (v1/executor/abstract.py:338), and would not sleep again.
            if self._asleep == {"kv_cache"}:
                await self._bounded(self._llm.wake_up(tags=["kv_cache"]), timeout_s, lambda: "waking its kv_cache")
            await self._bounded(self._llm.sleep(level=1 if keep_weights else 2, mode="keep"), timeout_s, lambda: "falling asleep")
            self._homes.forget()  # vLLM has dropped the cache of prefixes, too
            self._asleep, self._blank = {"weights", "kv_cache"}, self._blank or not keep_weights or self._updating

    async def wake(self, part: Part, timeout_s: float) -> None:
        async with self._lock:
            self.check_health()
            if part in self._asleep:
                await self._bounded(self._llm.wake_up(tags=[part]), timeout_s, lambda: f"waking its {part}")
                self._asleep.remove(part)

    # ---------------------------------------------------------------- weights

    async def connect(self, rendezvous: list[dict[str, Any]], first_rank: int) -> None:
        await self._weights("megarl_connect", rendezvous, first_rank, timeout_s=rendezvous[0]["timeout_s"])

    async def start_update(self, timeout_s: float) -> None:
        async with self._lock:
            self.check_health()
            if self._open and not self._in_flight:
                raise RolloutError(f"{self.label}: {len(self._open)} requests are unfinished: new weights come between requests")
            if "weights" in self._asleep:
                raise RolloutError(f"{self.label}: asleep: new weights come into an engine whose weights are awake")
            self._updating = True
            self._updated.clear()
            await self._bounded(self._llm.pause_generation(mode="keep", clear_cache=False), timeout_s, lambda: "pausing")
            if self._open:
                counts = await self._bounded(self._on_cores("megarl_counts"), timeout_s, lambda: "counting tokens")
                self._counts = {name: count for core in counts for name, count in core.items()}
            await self._weights("megarl_start_update", self._expected, timeout_s=timeout_s)

    async def load_buckets(self, headers: list[dict[str, Any]], timeout_s: float) -> None:
        await self._weights("megarl_load_buckets", headers, timeout_s=timeout_s)

    async def receive_buckets(self, headers: list[dict[str, Any]], timeout_s: float) -> None:
        await self._weights("megarl_receive_buckets", headers, timeout_s=timeout_s)
        begun = time.monotonic()
        while not all(answers := await self._call("megarl_received", timeout_s=timeout_s)):
            waited = time.monotonic() - begun
            if waited > timeout_s:
                raise RolloutTimeout(f"{self.label}: receiving weights not done after {timeout_s:g} s")
            await asyncio.sleep(min(0.02, max(0.001, waited / 4)))  # each question costs the model's work a little
        if faults := [answer for answer in answers if answer is not True]:
            raise WeightSyncError(f"{self.label}: {faults[0]}")

    async def load_received(self, timeout_s: float) -> None:
        await self._weights("megarl_load_received", timeout_s=timeout_s)

    async def finish_update(self, version: int, timeout_s: float) -> None:
        async with self._lock:
            await self._weights("megarl_finish_update", timeout_s=timeout_s)
            for one in self._open.values():
                if not one.waiting.done() and version != self._version:  # a response that has ended ended before the update
                    begun = max(0, self._counts.get(one.queue.request_id, 0) - one.prompt_length)
                    one.versions = [span for span in one.versions if span.start < begun] + [VersionSpan(begun, version)]
            await self._bounded(self._resume(version), timeout_s, lambda: "resuming")
            self._version, self._updating, self._blank = version, False, False
            self._updated.set()

    async def _resume(self, version: int) -> None:
        # Drop the old weights' keys and values, also those of running requests, which are recomputed (otherwise vLLM would reset nothing).
        await self._llm.reset_prefix_cache(reset_running_requests=True)
        if self._images is not None:  # features of images
            await self._on_cores("reset_encoder_cache")
        self._homes.forget()
        await self._llm.update_weight_version(str(version))
        await self._llm.resume_generation()

    async def load_adapter(self, weights: bytes, config: dict[str, Any], version: int, timeout_s: float) -> None:
        """The adapter has a number of its own, so that no prefix that was computed with another can be taken for one of its."""
        from vllm.lora.request import LoRARequest

        async with self._lock:
            self.check_health()
            if self._open:
                raise RolloutError(f"{self.label}: {len(self._open)} requests are unfinished: new weights come between requests")
            self._updating = True
            await self._bounded(self._llm.pause_generation(mode="keep", clear_cache=False), timeout_s, lambda: "pausing")
            before, self._adapter = self._adapter, None
            if before is not None:
                await self._bounded(self._llm.remove_lora(before.lora_int_id), timeout_s, lambda: "removing an adapter")
            with tempfile.TemporaryDirectory(prefix="megarl-adapter-") as folder:
                write_adapter(Path(folder), weights, config)
                number = 1 if before is None else before.lora_int_id + 1
                adapter = LoRARequest(f"adapter {number}", number, folder)
                if not await self._bounded(self._llm.add_lora(adapter), timeout_s, lambda: "loading an adapter"):
                    raise WeightSyncError(f"{self.label}: vLLM has not loaded the adapter of weights {version}")
            await self._bounded(self._resume(version), timeout_s, lambda: "resuming")
            self._adapter, self._version, self._updating = adapter, version, False

    async def adapter_fingerprints(self, timeout_s: float) -> dict[str, list[Print]]:
        workers = await self._call("megarl_adapter_fingerprints", self._targets, timeout_s=timeout_s)
        for worker in workers:
            if isinstance(worker, str):
                raise RolloutError(f"{self.label}: megarl_adapter_fingerprints: {worker}")
        [held] = workers
        return {name: [Print(*one)] for name, one in held.items()}

    async def drafted(self, timeout_s: float) -> tuple[int, int]:
        first, *_ = await self._call("megarl_drafted", timeout_s=timeout_s)
        return int(first[0]), int(first[1])

    async def fingerprints(self, timeout_s: float) -> dict[str, list[Print]]:
        workers = await self._call("megarl_fingerprints", self._tied, timeout_s=timeout_s)
        for worker in workers:
            if isinstance(worker, str):
                raise RolloutError(f"{self.label}: megarl_fingerprints: {worker}")
        return join({name: [Piece(*piece) for piece in pieces] for name, pieces in worker.items()} for worker in workers)

    async def _weights(self, method: str, *arguments: Any, timeout_s: float) -> None:
        faults = [fault for fault in await self._call(method, *arguments, timeout_s=timeout_s) if fault is not None]
        if faults:
            raise WeightSyncError(f"{self.label}: {faults[0]}")
