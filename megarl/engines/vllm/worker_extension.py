"""Code that runs inside vLLM's processes: executors that tie an engine's lifetime to its parent's, and the calls that a worker answers.

Only vLLM's own processes import this file.
"""

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from megarl.engines.vllm.adapters import held_adapter
from megarl.engines.vllm.cpu import delta_net as cpu_delta_net
from megarl.engines.vllm.cpu import drafts as cpu_drafts
from megarl.engines.vllm.cpu import experts as cpu_experts
from megarl.engines.vllm.cpu import logprobs as cpu_logprobs
from megarl.engines.vllm.cpu import mla as cpu_mla
from megarl.engines.vllm.cpu import packing as cpu_packing
from megarl.engines.vllm.cpu import router as cpu_router
from megarl.engines.vllm.cpu import rows as cpu_rows
from megarl.engines.vllm.cpu import sinks as cpu_sinks
from megarl.engines.vllm.cpu import sleep as cpu_sleep
from megarl.engines.vllm.draft import DraftCounter, draft_of
from megarl.engines.vllm.requests import BY_POSITION
from megarl.engines.vllm.weight_loader import WeightLoader
from megarl.engines.vllm.weight_reader import engine_weights
from megarl.engines.vllm.whole_responses import WholeResponses
from megarl.sync.fingerprint import Fingerprinter
from megarl.sync.gloo import one_device
from megarl.sync.receive import WeightError
from megarl.sync.wire import Header, Rendezvous
from megarl.text.display import one_line
from megarl.upstream.expect import expect


class SingleExecutor(UniProcExecutor):
    """One worker inside the engine's process."""

    def _init_executor(self) -> None:
        enter_engine_process()
        with rendezvous_directory(), one_device():
            super()._init_executor()


class TensorParallelExecutor(MultiprocExecutor):
    """One process per worker, which dies with the engine's process."""

    def _init_executor(self) -> None:
        enter_engine_process()
        with rendezvous_directory(), one_device():
            super()._init_executor()


def enter_engine_process() -> None:
    """Set up an engine's process, before its workers start: install the patches of `cpu/` but that of fp8 (`launch.py`)."""
    WholeResponses().install()
    if current_platform.is_cpu():
        cpu_sleep.install()
        cpu_experts.install()
        cpu_logprobs.install()
        cpu_mla.install()
        cpu_packing.install()
        cpu_router.install()
        cpu_delta_net.install()
        cpu_sinks.install()
        cpu_drafts.install()
        cpu_rows.install()
        _rest()
        if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
            # vLLM's AMX kernels (bf16) do not ask Linux for the tile registers first, and die of SIGILL. Workers inherit the permission.
            raise RuntimeError("Linux grants this process no AMX tile registers")


def _rest() -> None:
    """Let tensor-parallel workers wait on a socket instead of spinning, since others need the CPU's cores.

    vLLM's own spin for a second after each call (vllm/distributed/device_communicators/shm_broadcast.py:203); ours spin only in their
    first second, while the sockets connect. One that does not spin needs every wake-up, but vLLM drops those that follow
    another within a millisecond (line 172: a queue of one, which ZeroMQ does not find empty before), and the reader looks again only after
    5 s. So the queue has no limit here; it stays short, since a writer waits for readers that are ten messages late.
    """
    expect(SpinCondition.record_read, "self.last_read = time.monotonic()")
    prepare = SpinCondition.__init__
    expect(prepare, "setsockopt(zmq.SNDHWM, 1)", "self.local_notify_socket.bind(notify_address)")

    def prepared(self: Any, is_reader: bool, context: Any, notify_address: str, *arguments: Any, **named: Any) -> None:
        prepare(self, is_reader, context, notify_address, *arguments, **named)
        if not is_reader:
            self.local_notify_socket.unbind(notify_address)  # the limit counts for what is bound after it
            self.local_notify_socket.setsockopt(shm_broadcast.zmq.SNDHWM, 0)
            self.local_notify_socket.bind(notify_address)

    SpinCondition.__init__, SpinCondition.record_read = prepared, lambda self: None


@contextmanager
def rendezvous_directory() -> Iterator[None]:
    """Put the workers' rendezvous files in the engine's private directory (vllm/utils/network_utils.py:136 uses tempfile's).

    Only inside the block: the directory is removed once the engine has started, and later compilation (Triton, Inductor) needs the usual
    temporary directory.
    """
    tempfile.tempdir = os.environ["VLLM_RPC_BASE_PATH"]
    os.register_at_fork(after_in_child=_forget_directory)  # workers do not need it: they are given the file's name
    try:
        yield
    finally:
        _forget_directory()


def _forget_directory() -> None:
    tempfile.tempdir = None


class WorkerExtension:
    """Mixed into vLLM's worker class; its methods are called through AsyncLLM.collective_rpc.

    A refused update is returned as text, since the call does not carry an exception's type.
    """

    vllm_config: Any
    device: Any
    rank: int
    get_model: Callable[[], Any]
    model_runner: Any
    use_v2_model_runner: bool

    def megarl_connect(self, rendezvous: list[dict[str, Any]], first_rank: int) -> str | None:
        rank = self.vllm_config.parallel_config.data_parallel_rank * self.vllm_config.parallel_config.world_size + self.rank
        return _refusal(lambda: self._megarl_loader().connect([Rendezvous(**one) for one in rendezvous], first_rank + rank))

    def megarl_read(self, directory: str, expected: Mapping[str, tuple[Sequence[int], str]], drop_images: bool) -> str | None:
        """See `WeightLoader.read`: `directory`, `expected` and `drop_images` are its own."""
        return _refusal(lambda: self._megarl_loader().read(Path(directory), expected, drop_images))

    def megarl_start_update(self, expected: Mapping[str, tuple[Sequence[int], str]]) -> str | None:
        return _refusal(lambda: self._megarl_loader().start(expected))

    def megarl_abandon_update(self) -> str | None:
        return _refusal(lambda: self._megarl_loader().abandon())

    def megarl_load_buckets(self, headers: list[dict[str, Any]]) -> str | None:
        return _refusal(lambda: self._megarl_loader().load_buckets([Header.parse(header) for header in headers]))

    def megarl_receive_buckets(self, headers: list[dict[str, Any]]) -> str | None:
        return _refusal(lambda: self._megarl_loader().receive([Header.parse(header) for header in headers]))

    def megarl_received(self) -> bool | str:
        """Whether the buckets of the last `megarl_receive_buckets` are there, or why not."""
        there = list[bool]()
        return _refusal(lambda: there.append(self._megarl_loader().received())) or there[0]

    def megarl_load_received(self) -> str | None:
        return _refusal(lambda: self._megarl_loader().load_received())

    def megarl_finish_update(self) -> str | None:
        return _refusal(lambda: self._megarl_loader().finish())

    def megarl_fingerprints(self, tied: bool) -> dict[str, list[tuple[int, ...]]] | str:
        fingerprints = dict[str, list[tuple[int, ...]]]()

        def read() -> None:
            draft = draft_of(self.model_runner)
            pieces = engine_weights(self.get_model(), tied, self.vllm_config.model_config.dtype, draft)
            fingerprints.update({name: [astuple(piece) for piece in places] for name, places in pieces.items()})

        return _refusal(read) or fingerprints

    def megarl_draw_by_position(self) -> None:
        """From now on, draw each token of a request with BY_POSITION from the request's seed and the token's position.

        vLLM seeds a request's generator once, when it is added (v1/worker/gpu_model_runner.py:1305): a response continued in a new request
        would repeat the noise of its beginning. vLLM's second model runner, used on GPUs, draws by position anyway
        (v1/worker/gpu/sample/gumbel.py).
        """
        if self.use_v2_model_runner:
            return
        runner = self.model_runner
        assert hasattr(runner.input_batch, "generators"), "vLLM draws in another way than v1/worker/gpu_model_runner.py does"
        sample: Callable[..., Any] = runner._sample

        def seeded(*arguments: Any, **options: Any) -> Any:
            batch = runner.input_batch
            for row, generator in batch.generators.items():
                parameters = runner.requests[batch.req_ids[row]].sampling_params
                if BY_POSITION in (parameters.extra_args or ()):
                    generator.manual_seed(mixed(parameters.seed, int(batch.num_tokens_no_spec[row])))
            return sample(*arguments, **options)

        runner._sample = seeded

    def megarl_divide_logits(self, temperature: float) -> None:
        """From now on, divide the logits by `temperature`, in float32: vLLM does so for sampled tokens, but not for those of a prompt."""
        model = self.get_model()
        compute: Callable[..., Any] = model.compute_logits

        def divided(*arguments: Any, **named: Any) -> Any:
            logits = compute(*arguments, **named)
            return None if logits is None else logits.float() / temperature

        model.compute_logits = divided

    def megarl_adapter_fingerprints(self, targets: list[str]) -> dict[str, tuple[int, int]] | str:
        fingerprints = Fingerprinter()

        def read() -> None:
            for name, factor in held_adapter(self.get_model(), targets):
                fingerprints.add(name, factor)

        return _refusal(read) or {name: (one.value, one.numel) for name, one in fingerprints.digest().items()}

    def megarl_drafted(self) -> tuple[int, int]:
        """Return how many tokens were drafted since the last call, and how many of these accepted; the first call begins to count."""
        counter: DraftCounter | None = getattr(self, "_megarl_drafts", None)
        if counter is None:
            counter = self._megarl_drafts = DraftCounter(self.model_runner)
        return counter.taken()

    def megarl_pid(self) -> int:
        return os.getpid()

    def _megarl_loader(self) -> WeightLoader:
        loader: WeightLoader | None = getattr(self, "_megarl_state", None)
        if loader is None:
            loader = self._megarl_state = WeightLoader(self.get_model(), self.vllm_config, self.device, draft_of(self.model_runner))
        return loader


def mixed(seed: int, position: int) -> int:
    """Hash seed and position to a seed of 63 bits, of which a CPU generator uses the lower 32."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest(), "big") >> 1


def _refusal(action: Callable[[], None]) -> str | None:
    """Run one action of a weight update; return its error as text, or None.

    No exception may escape: if one worker raises, vLLM leaves the other workers' answers in the queue from which it reads those of the
    next call (v1/executor/multiproc_executor.py:426).
    """
    try:
        action()
    except Exception as error:
        return str(error) if isinstance(error, WeightError) else f"{type(error).__name__}: {one_line(str(error))}"
    return None
