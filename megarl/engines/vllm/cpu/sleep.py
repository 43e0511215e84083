"""Sleep mode for vLLM's CPU workers, which vLLM 0.30.0 lacks: it frees what leaves a GPU's memory there, by the same calls.

Only vLLM's own processes import this file.
"""

import ctypes
from typing import Any

from torch import Tensor

from megarl.host.parking import Parking, file_buffer
from megarl.upstream.expect import expect

KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2  # vLLM's sleep levels


def install() -> None:
    """Give CPU workers a sleep mode. Raises RuntimeError if vLLM's own methods have changed (vllm/v1/worker/cpu_worker.py:193)."""
    # Importing it replaces torch's GPU streams, events and memory statistics with CPU ones: a GPU engine must never do so.
    from vllm.v1.worker.cpu_worker import CPUWorker

    for method in (CPUWorker.sleep, CPUWorker.wake_up):
        expect(method, "sleep mode is not supported on CPU, ignore it.")
    CPUWorker.sleep, CPUWorker.wake_up = _sleep, _wake_up


def _sleep(self: Any, level: int = KEEP_WEIGHTS) -> None:
    """Free the KV cache and the weights: level 1 moves the weights to files, level 2 drops all but the model's buffers."""
    model = self.model_runner.model
    if not hasattr(self, "_megarl_parked"):
        self._megarl_parked = Parking(file_buffer), Parking(file_buffer)
    cache, weights = self._megarl_parked
    cache.park(_cache(self), keep=False)
    weights.park(model.buffers())
    weights.park(model.parameters(), keep=level == KEEP_WEIGHTS)
    ctypes.CDLL(None).malloc_trim(0)  # return other freed memory to the system, too


def _wake_up(self: Any, tags: list[str] | None = None) -> None:
    """Bring back the "weights", with arbitrary values if they were dropped, and the "kv_cache", empty."""
    cache, weights = self._megarl_parked
    if tags is None or "weights" in tags:
        weights.wake()
    if tags is None or "kv_cache" in tags:
        cache.wake()
        for tensor in _cache(self):
            tensor.zero_()


def _cache(worker: Any) -> list[Tensor]:
    return list(worker.model_runner.kv_caches)
