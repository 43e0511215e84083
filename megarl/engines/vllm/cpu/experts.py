"""Let vLLM's CPU experts work without gates (Nemotron-H), and where they are spread over the workers of an engine: expert parallelism and
data-parallel attention.

Each worker then holds whole experts, but not all of them; data-parallel ranks gather their tokens before the experts of a layer, and add
up what the experts made of them. Only vLLM's own processes import this file.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator, _CPUSHMDistributed
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

from megarl.engines.vllm.cpu.rows import filled
from megarl.upstream.expect import expect


def install() -> None:
    """Patch vLLM's CPU experts, and the CPU's communicators."""
    _admit_experts_without_gates()
    _respect_the_map()
    _gather_and_scatter()
    _gather_integers()


def _admit_experts_without_gates() -> None:
    """Let CPUs have experts of two matrices, with the square of ReLU between them, and leave these as they are loaded.

    vLLM 0.30.0 has such experts on GPUs alone (fused_moe/config.py:1385); the CPU's packing and kernel want a gate.
    """
    configure, pack = FusedMoEConfig.__post_init__, CPUUnquantizedExperts.process_weights_after_loading
    expect(configure, 'raise NotImplementedError(\n                "is_act_and_mul=False is supported only for CUDA, XPU and ROCm for now"')
    expect(CPUUnquantizedExperts._supports_no_act_and_mul, "return False")
    supports = CPUUnquantizedExperts._supports_activation
    expect(supports, "return activation in (")
    expect(pack, "self._use_zentorch = is_zentorch_moe_supported(layer)", "cpu_prepack_moe_weight(layer.w13_weight, self.isa)")

    def configured(config: Any) -> None:
        with suppress(NotImplementedError):  # raised by its last statement
            configure(config)

    def packed(experts: Any, layer: Any) -> None:
        if experts.moe_config.is_act_and_mul:
            pack(experts, layer)

    FusedMoEConfig.__post_init__ = configured
    CPUUnquantizedExperts._supports_no_act_and_mul = staticmethod(lambda: True)
    CPUUnquantizedExperts._supports_activation = staticmethod(lambda one: one == MoEActivation.RELU2_NO_MUL or supports(one))
    CPUUnquantizedExperts.process_weights_after_loading = packed


def _ungated(
    _: Any, *, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, **others: Any
) -> None:
    """Compute experts without gates, as CPUUnquantizedExperts.apply does those with gates.

    Args:
        output: filled with the weighted sums of what a token's experts put out [T, H].
        hidden_states: the tokens [T, H].
        w1: the experts' first matrices [E, F, H].
        w2: their second ones [E, H, F].
        topk_weights: of a token's experts [T, K].
        topk_ids: which experts these are [T, K].
        others: what concerns gates and other kernels.
    """
    assert not others["apply_router_weight_on_input"], "ReLU's square is not linear"
    total_TH = torch.zeros(hidden_states.shape)
    for expert in topk_ids.unique().tolist():
        token, place = (topk_ids == expert).nonzero(as_tuple=True)
        out_NH = F.relu(filled(hidden_states[token]) @ w1[expert].T).square() @ w2[expert].T
        total_TH.index_add_(0, token, out_NH[: len(token)].float() * topk_weights[token, place, None])
    output.copy_(total_TH)


def _respect_the_map() -> None:
    """Renumber a token's experts to those of the worker, and give those of other workers the weight 0; without gates, `_ungated` has them.

    vLLM 0.30.0 passes the map (from the model's experts to the worker's own; -1: another worker's) to its CPU experts, which ignore it
    (vllm/model_executor/layers/fused_moe/experts/cpu_moe.py:262) although they claim to fit any parallel layout (line 178): they would read
    beyond their weights.
    """
    compute = CPUUnquantizedExperts.apply
    expect(
        compute, "self.w1_bias,\n            self.w2_bias,\n            topk_weights,\n            topk_ids,\n            activation.value,"
    )

    def apply(experts: Any, *, topk_weights: Tensor, topk_ids: Tensor, expert_map: Tensor | None, **others: Any) -> None:
        if expert_map is not None:
            assert not others["apply_router_weight_on_input"], "a weight on the input excludes no expert"
            own_TK = expert_map[topk_ids]
            topk_weights = topk_weights.masked_fill(own_TK < 0, 0)
            topk_ids = own_TK.clamp(min=0).to(topk_ids.dtype)
        kernel = _ungated if others["activation"] == MoEActivation.RELU2_NO_MUL else compute
        kernel(experts, topk_weights=topk_weights, topk_ids=topk_ids, expert_map=expert_map, **others)

    CPUUnquantizedExperts.apply = apply


def _gather_and_scatter() -> None:
    """Add the two collectives with which AgRsAll2AllManager (vllm/distributed/device_communicators/all2all.py) moves tokens.

    vLLM 0.30.0 chooses that manager on a CPU (cpu_communicator.py:61), whose communicator has neither.
    """
    expect(DeviceCommunicatorBase.all_gatherv, "raise NotImplementedError")
    expect(DeviceCommunicatorBase.reduce_scatterv, "raise NotImplementedError")
    assert "all_gatherv" not in vars(CpuCommunicator) and "reduce_scatterv" not in vars(CpuCommunicator)
    CpuCommunicator.all_gatherv, CpuCommunicator.reduce_scatterv = _all_gatherv, _reduce_scatterv


def _all_gatherv(self: Any, given: Tensor | list[Tensor], dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor | list[Tensor]:
    """Join the ranks' rows; `sizes`: how many each has (None: all as many as this one)."""
    if isinstance(given, list):
        return [_gathered(self, one, sizes) for one in given]
    return _gathered(self, given, sizes)


def _gathered(self: Any, rows: Tensor, sizes: Sequence[int] | None) -> Tensor:
    counts = [len(rows)] * self.world_size if sizes is None else sizes
    padded = rows.new_zeros(max(counts), *rows.shape[1:])  # gloo gathers equal shapes only
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    self.dist_module.all_gather(parts, padded, group=self.device_group)
    return torch.cat([one[:count] for one, count in zip(parts, counts, strict=True)])


def _reduce_scatterv(self: Any, rows: Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """Add up the ranks' rows, and return this rank's share of them."""
    counts = [len(rows) // self.world_size] * self.world_size if sizes is None else list(sizes)
    total = rows.clone()
    self.dist_module.all_reduce(total, group=self.device_group)
    return total.split(counts)[self.rank_in_group].clone()


def _gather_integers() -> None:
    """Gather 32-bit integers, a token's experts, as if they were floating.

    vLLM 0.30.0 gathers the experts that it reports (routed_experts_capturer.py:198) through shared memory, which knows only floating
    dtypes (csrc/cpu/shm.cpp: "shm_all_gather_impl" not implemented for 'Int'), but copies their bits.
    """
    gather = _CPUSHMDistributed.all_gather_into_tensor
    expect(gather, "torch.ops._C.shm_all_gather(self.handle, input, output)")

    def all_gather_into_tensor(self: Any, output: Tensor, given: Tensor, group: Any = None) -> None:
        if given.dtype == torch.int32:
            output, given = output.view(torch.float32), given.view(torch.float32)
        gather(self, output, given, group)

    _CPUSHMDistributed.all_gather_into_tensor = all_gather_into_tensor
