"""Gated delta nets of CPU engines, in any dtype and with heads of any size.

vLLM 0.30.0's kernels take bfloat16 alone and a few sizes of heads (vllm/model_executor/layers/mamba/ops/cpu/gdn_attention.py:57). Here a
plain recurrence takes their place: request by request, and token by token. Only vLLM's own processes import this file.
"""

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

from megarl.upstream.expect import expect


def install() -> None:
    """Give CPU engines this recurrence."""
    expect(
        gdn_attention.cpu_gdn_attention_core,
        "layer = forward_context.no_compile_layers[layer_name]",
        'assert mixed_qkv.dtype == torch.bfloat16, "CPU GDN attention requires BF16."',
    )
    expect(gdn_attention.register_cpu_gdn_attention_ops, "op_func=cpu_gdn_attention_core,", 'mutates_args=["core_attn_out"],')
    gdn_attention.cpu_gdn_attention_core = attend


def attend(
    mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor, layer_name: gdn_attention.LayerNameType
) -> None:
    """Compute the delta nets of all requests of a step, and keep their states.

    Args:
        mixed_qkv: queries, keys and values before the convolution [T, channels].
        b: what gives the learning rates [T, H].
        a: what gives the decays [T, H].
        core_attn_out: filled with the answers [T, H, C].
        layer_name: vLLM's name of the layer.
    """
    context = get_forward_context()
    layer = context.no_compile_layers[gdn_attention._resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return  # vLLM measures memory
    meta = context.attn_metadata[layer.prefix]
    assert meta.spec_sequence_masks is None, "no speculation"
    begun = [True] * meta.num_decodes
    if meta.num_prefills:
        begun += meta.has_initial_state.tolist()[-meta.num_prefills :]
    bounds, slots = meta.non_spec_query_start_loc.tolist(), meta.non_spec_state_indices_tensor.tolist()
    for (start, stop), slot, known in zip(pairwise(bounds), slots, begun, strict=False):
        if start < stop:
            core_attn_out[start:stop] = _request(layer, slot, known, mixed_qkv[start:stop], b[start:stop], a[start:stop])


def _request(layer: Any, slot: int, known: bool, mixed_TD: Tensor, b_TH: Tensor, a_TH: Tensor) -> Tensor:
    """The answers [T, H, C] of one request, whose states are in `slot`; `known`: it has computed tokens before."""
    before, state = gdn_attention._conv_buffer_view(layer)[slot], gdn_attention._ssm_state_view(layer)[slot]
    if not known:
        before.zero_()
        state.zero_()
    weight = layer.conv1d.weight.view(layer.conv1d.weight.shape[0], 1, -1)
    x_DT = torch.cat([before.to(mixed_TD.dtype), mixed_TD.T], dim=1)
    before.copy_(x_DT[:, -before.shape[1] :])
    convolved_TD = F.silu(F.conv1d(x_DT[None], weight, groups=len(weight)))[0].T
    q, k, v = (x[0].float() for x in layer.rearrange_mixed_qkv(convolved_TD))
    q, k = (_unit(x).repeat_interleave(v.shape[1] // x.shape[1], dim=1) for x in (q, k))
    decay_TH = (-layer.A_log.float().exp() * F.softplus(a_TH.float() + layer.dt_bias.float())).exp()
    rate_TH, q, now, answers = b_TH.float().sigmoid(), q * q.shape[-1] ** -0.5, state.float(), []
    for t in range(len(q)):
        now = now * decay_TH[t, :, None, None]
        change = (v[t] - torch.einsum("hd,hdc->hc", k[t], now)) * rate_TH[t, :, None]
        now = now + k[t, :, :, None] * change[:, None]
        answers.append(torch.einsum("hd,hdc->hc", q[t], now))
    state.copy_(now)
    return torch.stack(answers).to(mixed_TD.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
