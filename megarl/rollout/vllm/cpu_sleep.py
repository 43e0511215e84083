"""Sleep of vLLM's workers without GPUs, where vLLM 0.30.0 has none: what leaves is what leaves a GPU's memory, and the calls are the same.

Only vLLM's own processes import this file.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from megarl.parking import Parking, file_buffer
from megarl.patching import expect

KEEP_WEIGHTS, DROP_WEIGHTS = 1, 2  # vLLM's levels


def install() -> None:
    """Gives CPU workers a sleep. RuntimeError where vLLM's own has changed (vllm/v1/worker/cpu_worker.py:193)."""
    # Its import replaces torch's streams, events and figures of a GPU's memory by a CPU's: no engine on a GPU may come here.
    from vllm.v1.worker.cpu_worker import CPUWorker

    for method in (CPUWorker.sleep, CPUWorker.wake_up):
        expect(method, "sleep mode is not supported on CPU, ignore it.")
    CPUWorker.sleep, CPUWorker.wake_up = _sleep, _wake_up


def _sleep(self: Any, level: int = KEEP_WEIGHTS) -> None:
    """Frees the cache of keys and values, and the weights: as files (level 1), or for good but for the model's buffers (level 2)."""
    model = self.model_runner.model
    if not hasattr(self, "_megarl_parked"):
        self._megarl_parked = Parking(file_buffer), Parking(file_buffer)
    cache, weights = self._megarl_parked
    cache.park(_cache(self), keep=False)
    weights.park(model.buffers())
    weights.park(model.parameters(), keep=level == KEEP_WEIGHTS)
    ctypes.CDLL(None).malloc_trim(0)  # what is freed in between goes back to the system, too


def _wake_up(self: Any, tags: list[str] | None = None) -> None:
    """Brings back the "weights", with any values where they were dropped, and the "kv_cache", empty."""
    cache, weights = self._megarl_parked
    if tags is None or "weights" in tags:
        weights.wake()
    if tags is None or "kv_cache" in tags:
        cache.wake()
        for tensor in _cache(self):
            tensor.zero_()


def _cache(worker: Any) -> list[Tensor]:
    return list(worker.model_runner.kv_caches)
