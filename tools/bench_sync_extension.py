"""The calls that `tools/bench_sync.py` makes into the process of an engine."""

import time

import torch
from vllm.config import set_current_vllm_config

from megarl.engines.vllm import weight_loader
from megarl.engines.vllm.worker_extension import WorkerExtension
from megarl.sync.wire import each
from tools.peak_memory import PeakMemory


class BenchExtension(WorkerExtension):
    """The benchmark's calls into the engine's process, beside an update."""

    def bench_cpu(self) -> float:
        """CPU seconds of this process so far."""
        return time.process_time()

    def bench_start_peak(self) -> None:
        self._bench_peak = PeakMemory()

    def bench_peak(self) -> float:
        """The most memory, in MiB, that this process has held since `bench_start_peak` on top of what it held then."""
        return self._bench_peak.extra() / 2**20

    def bench_experts(self, own: bool, stacks: list[tuple[list[str], list[int]]]) -> float:
        """CPU seconds of loading random experts, by vLLM's own calls (`own`) or by stacks; the rest of the model stays as it is."""
        model, loader = self.get_model(), self._megarl_loader()
        tensors = [(names, torch.rand(shape)) for names, shape in stacks]
        begun = time.process_time()
        with set_current_vllm_config(self.vllm_config):
            weight_loader.reset_moe_kernels(model)
            weight_loader.initialize_layerwise_reload(model)
            if own:
                model.load_weights(iter([one for names, stack in tensors for one in each(names, stack)]))
            else:
                assert all([loader._experts[0].load(names, stack) for names, stack in tensors])
            weight_loader.finalize_layerwise_reload(model, self.vllm_config.model_config)
        return time.process_time() - begun
