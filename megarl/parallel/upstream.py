"""Patches for bugs of megatron-core 0.16.1 that occur on all hardware; those for the CPU alone are in `cpu/patches.py`.

Each patch names the upstream file and line and first checks that the faulty lines are still there.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.patching import expect

# Warnings about upstream's own code, printed at every start and on every rank; users cannot act on them.
_NOISE = (
    ".*Apex (is|are) not installed",  # known: see `cpu/`
    "full scope is deprecated",  # transformer_config.py:1705 complains about its own default
    "`sequence_parallel` is set to `True`, but tensor model parallel size is 1",  # about experts, if etp is 1 and tp is not
    "The .grad attribute of a Tensor that is not a leaf",  # optimizer.py:66 probes every parameter
    "`torch.distributed.(reduce_scatter_tensor|all_gather_into_tensor)` is deprecated",
)


def quiet() -> None:
    """Keep upstream's standing warnings off the console."""
    for message in _NOISE:
        warnings.filterwarnings("ignore", message=message)


def apply(device: torch.device, synchronize: Callable[[], None], *, transformer_engine: bool) -> None:
    """Patch megatron.core.

    Args:
        device: this process's device.
        synchronize: waits for the work queued on the device.
        transformer_engine: whether the layers are built from Transformer Engine; without it there is more to patch.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter

    _shape_exchange(P2PCommunicator, device, synchronize)
    _padded_counts(TopKRouter)
    if transformer_engine:
        from megatron.core.extensions import transformer_engine as extension
        from transformer_engine.pytorch.cpp_extensions import general_gemm

        _router_gemm_of_te(moe_utils, extension, general_gemm)
    else:
        _router_gemm(moe_utils)
        _replicated_projections(multi_latent_attention)


def _shape_exchange(communicator: Any, device: torch.device, synchronize: Callable[[], None]) -> None:
    """p2p_communication.py:216-243 posts sends and receives in the order previous, next, and waits for all of them.

    With two pipeline stages both neighbours are the same process, and what it sends to its previous stage reaches us from our next one:
    when both directions are in flight (the interleaved schedule), the two shapes come out swapped. Receives must be posted in the order of
    the peer's sends. In addition, a stage may send a gradient to one that is still waiting for its own activation to be received: waiting
    for that send deadlocks wherever small sends are not buffered (gloo), so a send is only waited for in the next exchange.
    """
    expect(
        communicator._communicate_shapes, "ops.append(send_prev_op)", "ops.append(recv_prev_op)", "ops.append(recv_next_op)", "req.wait()"
    )

    def communicate_shapes(
        self: Any, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        from_prev, from_next = torch.zeros(2, 3, dtype=torch.int64, device=device)
        receives = [(from_next, self.next_rank)] * recv_next + [(from_prev, self.prev_rank)] * recv_prev
        sends = [
            (torch.tensor(tensor.shape, device=device), peer)
            for tensor, peer in ((tensor_send_prev, self.prev_rank), (tensor_send_next, self.next_rank))
            if tensor is not None
        ]
        for request in getattr(self, "_megarl_sends", ()):
            request.wait()
        ops = [dist.P2POp(dist.irecv, shape, peer, self.pp_group) for shape, peer in receives]
        ops += [dist.P2POp(dist.isend, shape, peer, self.pp_group) for shape, peer in sends]
        requests = dist.batch_isend_irecv(ops) if ops else []
        for request in requests[: len(receives)]:  # NCCL returns one request for all, gloo one for each
            request.wait()
        self._megarl_sends = requests[len(receives) :]
        synchronize()  # as upstream does, because of a race in batch_isend_irecv
        return from_prev.tolist(), from_next.tolist()

    communicator._communicate_shapes = communicate_shapes


def _padded_counts(router: Any) -> None:
    """router.py:558 counts the tokens of each expert by applying a mask [tokens] to a map [tokens, experts], which fails for most sizes
    and masks experts instead of tokens for the others."""
    expect(router._apply_expert_bias, "routing_map = routing_map & (~padding_mask)", "local_tokens_per_expert += routing_map.sum(dim=0)")
    count = router._apply_expert_bias

    def apply_expert_bias(self: Any, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        count(self, routing_map, padding_mask if padding_mask is None else padding_mask[:, None])

    router._apply_expert_bias = apply_expert_bias


def _router_gemm(moe_utils: Any) -> None:
    """moe_utils.py:22-40 imports `te_general_gemm` inside a try without an else; moe_utils.py:1192 then raises NameError without TE."""
    expect(moe_utils.RouterGatingLinearFunction, "if te_general_gemm is not None")
    if hasattr(moe_utils, "te_general_gemm"):
        raise RuntimeError("megatron.core.transformer.moe.moe_utils now defines te_general_gemm: megarl's patch for it must be reviewed")
    moe_utils.te_general_gemm = None


def _router_gemm_of_te(moe_utils: Any, extension: Any, general_gemm: Callable[..., Any]) -> None:
    """transformer_engine.py:2446 imports `get_workspace`, which Transformer Engine no longer has since 2.10: line 2485 silently sets
    `te_general_gemm` to None, and moe_utils.py:1192 and 1225 cast the router's operands to float32 and multiply without tensor cores.

    `general_gemm` takes a workspace by itself now (2.11, cpp_extensions/gemm.py:120), so this one gives it none, as that of megatron-core
    0.19.2 does. Forward it multiplies bfloat16 and sums in float32; backward it multiplies in TF32 (2.11, cublaslt_gemm.cu:447), in which
    inputs and weights, from bfloat16, are exact, unless NVIDIA_TF32_OVERRIDE=0 forbids cuBLAS to do so. It reads every operand as if it
    were contiguous (2.11, csrc/common.cpp:98), which autograd does not promise of a gradient.
    """
    expect(
        extension,
        "from transformer_engine.pytorch.module.base import get_workspace",
        "workspace=get_workspace(),",
        "te_general_gemm = None",
    )
    expect(
        moe_utils.RouterGatingLinearFunction,
        'te_general_gemm(weight, inp, router_dtype, layout="TN", bias=bias)',
        'weight.to(ctx.router_dtype), grad_output, ctx.router_dtype, layout="NN", grad=True',
        'inp.to(ctx.router_dtype), grad_output, ctx.router_dtype, layout="NT", grad=True',
    )
    if moe_utils.te_general_gemm is not None:
        return  # Transformer Engine 2.9 still has `get_workspace`

    def te_general_gemm(
        a: Tensor, b: Tensor, out_dtype: torch.dtype, *, layout: str, bias: Tensor | None = None, grad: bool = False
    ) -> Any:
        return general_gemm(a.contiguous(), b.contiguous(), out_dtype=out_dtype, layout=layout, bias=bias, grad=grad)

    moe_utils.te_general_gemm = te_general_gemm


def _replicated_projections(multi_latent_attention: Any) -> None:
    """multi_latent_attention.py:421 recognises a replicated projection only if it is Transformer Engine's TELinear."""
    from megarl.parallel.spec import ReplicatedLinear

    expect(
        multi_latent_attention.MLASelfAttention.__init__,
        "if submodules.linear_q_down_proj in [TELinear]:",
        "q_down_proj_kwargs['parallel_mode'] = 'duplicated'",
        "if submodules.linear_kv_down_proj in [TELinear]:",
    )
    multi_latent_attention.TELinear = ReplicatedLinear
