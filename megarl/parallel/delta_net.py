"""Gated delta nets (https://arxiv.org/abs/2412.06464) over packed sequences: Megatron's module, with its kernels or torch's.

In each head a state S [D, C], zero before a sequence's first token, is decayed, corrected by what it returns for the token's key, and read:

    S_t = exp(g_t) S_{t-1} + k_t (beta_t (v_t - exp(g_t) S_{t-1}^T k_t))^T,    o_t = S_t^T q_t / sqrt(D)

with k and q of length 1 and g_t <= 0. The chunked form below multiplies matrices instead (section 3.3 there, and its appendix).

Axes: T tokens of the packed row, H value heads of this rank, D size of keys and queries, C size of values, K chunks, L tokens of a chunk,
N sequences.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.models.delta_nets import CHUNK


class DeltaNet(GatedDeltaNet):
    """Megatron's, with the decay of each head computed in float32 throughout."""

    def _compute_g_and_beta(self, A_log_local_cp: Tensor, dt_bias_local_cp: Tensor, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-decays g, in float32, and learning rates beta. Upstream's takes exp(A_log) in the model's dtype (common.py:433), and a
        bfloat16 decay is wrong by up to 0.4 % in every token, unlike transformers' and vLLM's."""
        return -A_log_local_cp.float().exp() * F.softplus(alpha.float() + dt_bias_local_cp.float()), beta.sigmoid()


class TorchDeltaNet(DeltaNet):
    """Megatron's with torch's operations in place of its kernels (see `upstream._torch_delta_net`), which are deterministic."""

    def __init__(self, config: TransformerConfig, *args: Any, **named: Any) -> None:
        config = copy.copy(config)
        config.deterministic_mode = False  # upstream's own takes no packed sequences (gdn.py:101)
        super().__init__(config, *args, **named)

    def _setup_variant_attrs(self) -> None:
        super()._setup_variant_attrs()
        self.gated_delta_rule = delta_rule
        self.use_qk_l2norm = False  # the rule normalises in float32


def causal_conv1d(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, cu_seqlens: Tensor, **rest: Any) -> tuple[Tensor, None]:
    """Convolve each channel over the tokens of each packed sequence up to the current one, then apply SiLU.

    Args:
        x: [1, T, channels].
        weight: [channels, width].
        bias: [channels], or None.
        activation: "silu".
        cu_seqlens: bounds of the sequences [N + 1].
        **rest: upstream's further arguments, which ask for nothing here.

    Returns:
        [1, T, channels], and None for the last state.
    """
    assert activation == "silu"
    width, bounds = weight.shape[1], cu_seqlens.long()
    sequence_T = torch.repeat_interleave(torch.arange(len(bounds) - 1, device=x.device), bounds.diff())
    place_T = torch.arange(x.shape[1], device=x.device) + (width - 1) * (sequence_T + 1)  # each sequence follows width - 1 zeros
    spaced = x.new_zeros(x.shape[1] + (width - 1) * (len(bounds) - 1), x.shape[2]).index_copy(0, place_T, x[0])
    out = F.conv1d(spaced.T[None], weight[:, None], bias, groups=len(weight))[0].T
    return F.silu(out[place_T - (width - 1)])[None], None


def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **rest: Any) -> tuple[Tensor, None]:
    """Apply the gated delta rule to each packed sequence.

    Args:
        q: queries [1, T, H, D], not yet normalised.
        k: keys [1, T, H, D], not yet normalised.
        v: values [1, T, H, C].
        g: log-decays [1, T, H].
        beta: learning rates [1, T, H].
        cu_seqlens: bounds of the sequences [N + 1].
        **rest: upstream's further arguments, which ask for nothing here.

    Returns:
        The states' answers [1, T, H, C] in the dtype of the values, and None for the last states.
    """
    place_T, sequence_K = spread(cu_seqlens, CHUNK)
    chunks_N = sequence_K.bincount(minlength=len(cu_seqlens) - 1).tolist()
    firsts_N = [sum(chunks_N[:n]) for n in range(len(chunks_N))]

    def chunked(x: Tensor) -> Tensor:
        """[1, T, H, ...] -> [K, H, L, ...] in float32; the ends of the sequences' last chunks are 0."""
        spaced = torch.zeros(len(sequence_K) * CHUNK, *x.shape[2:], device=x.device).index_copy(0, place_T, x[0].float())
        return spaced.unflatten(0, (-1, CHUNK)).transpose(1, 2)

    q_, k_, v_, g_, beta_ = (chunked(x) for x in (_unit(q) * q.shape[-1] ** -0.5, _unit(k), v, g, beta))
    decay = g_.cumsum(-1)  # of the state at a chunk's begin, until each token
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    between = (decay[..., :, None] - decay[..., None, :]).masked_fill(~lower, -torch.inf).exp()  # from one token to a later one
    # What each token writes depends on what those before it in the chunk wrote: a triangular system for all at once.
    effect = (k_ * beta_[..., None]) @ k_.mT * between
    wanted = torch.cat([v_, k_ * decay.exp()[..., None]], dim=-1) * beta_[..., None]
    solved = torch.linalg.solve_triangular(effect.tril(-1), wanted, upper=False, unitriangular=True)
    values, keys = solved.split([v_.shape[-1], k_.shape[-1]], dim=-1)
    seen, queries = q_ @ k_.mT * between, q_ * decay.exp()[..., None]
    last = decay[..., -1:]
    written, kept = k_ * (last - decay).exp()[..., None], last.exp()[..., None]

    answers: list[Tensor] = []
    order: list[int] = []
    going = list(range(len(chunks_N)))
    state_NHDC = q.new_zeros(len(going), *k_.shape[1:2], k_.shape[-1], v_.shape[-1], dtype=torch.float32)
    for step in range(max(chunks_N)):
        longer = [index for index, n in enumerate(going) if chunks_N[n] > step]
        if len(longer) < len(going):
            going, state_NHDC = [going[index] for index in longer], state_NHDC[longer]
        now = [firsts_N[n] + step for n in going]
        new = values[now] - keys[now] @ state_NHDC
        answers.append(queries[now] @ state_NHDC + seen[now] @ new)
        state_NHDC = state_NHDC * kept[now] + written[now].mT @ new
        order += now
    back = torch.empty(len(order), dtype=torch.int64, device=q.device)
    back[order] = torch.arange(len(order), device=q.device)
    out = torch.cat(answers)[back].transpose(1, 2).flatten(0, 1)
    return out[place_T][None].to(v.dtype), None


def spread(bounds: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Divide packed sequences into chunks of `size` tokens, of which each sequence's last one may have fewer.

    Returns:
        The place of each token among those of all chunks [T], and the sequence of each chunk [K].
    """
    lengths_N = bounds.long().diff()
    chunks_N = (lengths_N + size - 1) // size
    shift_N = (chunks_N.cumsum(0) - chunks_N) * size - bounds[:-1]
    place_T = torch.arange(int(lengths_N.sum()), device=bounds.device) + shift_N.repeat_interleave(lengths_N)
    return place_T, torch.arange(len(lengths_N), device=bounds.device).repeat_interleave(chunks_N)


def _unit(x: Tensor) -> Tensor:
    """Scale the last axis to length 1, in float32, as flash-linear-attention's l2norm does."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
