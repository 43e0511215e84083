"""Mamba-2 (https://arxiv.org/abs/2405.21060) over packed sequences: Megatron's mixer, with the kernels of mamba_ssm or torch's operations.

In each head a state S [P, N], zero before a sequence's first token, decays, takes a token in and is read:

    S_t = exp(dt_t A) S_{t-1} + dt_t x_t B_t^T,    y_t = S_t C_t + D x_t

with A < 0 and dt_t > 0; the heads of a group share B and C. The chunked form below multiplies matrices instead (section 6 there).

Axes: T tokens of the packed row, H heads of this rank, P size of a head, G groups, N size of a state for each of a head's dimensions,
K chunks, L tokens of a chunk.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from megarl.models.delta_nets import CHUNK
from megarl.parallel.delta_net import causal_conv1d, spread


class GroupedRMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight with the mean over each group of a head's states, in float32. Its arguments are those of
    mamba_ssm's gated norm, in whose place `upstream.py` puts it: the gate has been applied before."""

    def __init__(self, size: int, *, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: torch.dtype) -> None:
        super().__init__()
        assert not norm_before_gate
        self.eps, self.group_size = eps, group_size
        self.tp_group: Any = None  # upstream sets it (mamba_mixer.py:427)
        self.weight = torch.nn.Parameter(torch.ones(size, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each group of the last axis."""
        groups = F.rms_norm(x.float().unflatten(-1, (-1, self.group_size)), (self.group_size,), eps=self.eps)
        return (self.weight.float() * groups.flatten(-2)).to(x.dtype)

    def sharded_state_dict(
        self, prefix: str, sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the weight to Megatron's checkpoints: each tensor-parallel rank has that of its heads. The signature is Megatron's."""
        assert metadata is not None
        state, replicas = self.state_dict(prefix="", keep_vars=True), metadata["dp_cp_group"]
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"weight": 0}, sharded_offsets, tp_group=self.tp_group, dp_cp_group=replicas
        )


class Mamba(MambaMixer):
    """Megatron's mixer in the place of a layer's attention, with all its parameters in the model's dtype."""

    def __init__(
        self, config: TransformerConfig, submodules: MambaMixerSubmodules, layer_number: int, pg_collection: Any, **rest: Any
    ) -> None:
        super().__init__(config, submodules, config.hidden_size, layer_number=layer_number, pg_collection=pg_collection)
        self.norm.eps = config.layernorm_epsilon  # upstream's is 1e-5 (mamba_mixer.py:421)
        for parameter in (self.A_log, self.D):  # upstream keeps them in float32, unlike published checkpoints
            parameter.data = parameter.data.to(config.params_dtype)

    def forward(self, hidden: Tensor, *, packed_seq_params: PackedSeqParams, **rest: Any) -> tuple[Tensor, Tensor | None]:
        """Mix the tokens of each packed sequence, [S, 1, hidden] of this rank's shard. The signature is that of Megatron's attention."""
        if packed_seq_params.seq_idx is None:  # the sequence of each token, which mamba_ssm's kernels ask for
            lengths = packed_seq_params.cu_seqlens_q.diff()
            numbers = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
            packed_seq_params.seq_idx = numbers.repeat_interleave(lengths)[None]
        mixed: tuple[Tensor, Tensor | None] = super().forward(hidden, packed_seq_params=packed_seq_params)
        return mixed


class TorchMamba(Mamba):
    """Megatron's with torch's operations in place of its kernels (see `upstream._torch_mamba`), which are deterministic."""

    def _ssm_training(self, zxBCdt: Tensor, packed_seq_params: PackedSeqParams | None = None) -> Tensor:
        assert packed_seq_params is not None
        bounds, states = packed_seq_params.cu_seqlens_q, self.cp.ngroups_local_tpcp * self.d_state
        widths = [self.cp.d_inner_local_tpcp, self.cp.d_inner_local_tpcp + 2 * states, self.cp.nheads_local_tpcp]
        z, xBC, dt = zxBCdt[:, 0].split(widths, dim=-1)
        kernel, bias = self.cp.get_conv1d_weight()[:, 0], self.cp.get_conv1d_bias()
        xBC = causal_conv1d(xBC[None], kernel, bias, self.activation, bounds)[0][0]
        x, B, C = xBC.split([widths[0], states, states], dim=-1)
        y = state_space(
            x.unflatten(-1, (-1, self.headdim)),
            F.softplus(dt.float() + self.cp.get_dt_bias().float()),
            -self.cp.get_A_log().float().exp(),
            B.unflatten(-1, (-1, self.d_state)),
            C.unflatten(-1, (-1, self.d_state)),
            self.cp.get_D(),
            bounds,
        )
        gated = (y.flatten(1) * F.silu(z.float())).to(zxBCdt.dtype)
        normed: Tensor = self.norm(self.cp.post_conv_ssm(gated[:, None], packed_seq_params))
        return normed


def state_space(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, bounds: Tensor) -> Tensor:
    """Run the states of each packed sequence.

    Args:
        x: inputs [T, H, P].
        dt: time steps [T, H], positive, float32.
        A: rates [H], negative, float32.
        B: what inputs write to [T, G, N].
        C: what is read [T, G, N].
        D: the share of the input in the output [H].
        bounds: bounds of the sequences.

    Returns:
        The outputs [T, H, P] in float32.
    """
    place_T, sequence_K = spread(bounds, CHUNK)
    shared = x.shape[1] // B.shape[1]

    def chunked(given: Tensor) -> Tensor:
        """[T, ...] -> [K, L, ...]; the ends of the sequences' last chunks are 0."""
        spaced = torch.zeros(len(sequence_K) * CHUNK, *given.shape[1:], device=x.device).index_copy(0, place_T, given)
        return spaced.unflatten(0, (-1, CHUNK))

    x = x.float()
    steps, inputs = chunked(dt * A).transpose(1, 2), chunked(x * dt[..., None])
    writes, reads = chunked(B.float()), chunked(C.float())
    within = _decays(steps)  # K H L L, from one token to a later one
    seen = torch.einsum("klgn,ksgn->kgls", reads, writes).repeat_interleave(shared, dim=1) * within
    writes, reads = (one.repeat_interleave(shared, dim=2) for one in (writes, reads))
    written = torch.einsum("khs,kshn,kshp->khpn", within[:, :, -1], writes, inputs)  # by a chunk, until its end
    same = sequence_K[:, None] == sequence_K
    across = _decays(steps.sum(-1).T).where(same, 0.0)  # H K K, from the end of one chunk to that of a later one
    ends = torch.einsum("hkj,jhpn->khpn", across, written)
    begins = F.pad(ends, (0, 0, 0, 0, 0, 0, 1, 0))[:-1] * F.pad(same.diagonal(-1), (1, 0))[:, None, None, None]
    before = torch.einsum("klhn,khpn,khl->klhp", reads, begins, steps.cumsum(-1).exp())
    out = (torch.einsum("khls,kshp->klhp", seen, inputs) + before).flatten(0, 1)
    return out[place_T] + D.float()[:, None] * x


def _decays(steps: Tensor) -> Tensor:
    """exp of the sums of [..., n] log-decays after index j up to index i, [..., i, j]; 0 for j > i.

    Differences of one cumulative sum would lose digits: a step may be thousands of times as large as the sum that counts.
    """
    lower = torch.ones(steps.shape[-1], steps.shape[-1], dtype=torch.bool, device=steps.device).tril()
    sums = steps[..., :, None].expand(*steps.shape, steps.shape[-1]).masked_fill(~lower.tril(-1), 0.0).cumsum(-2)
    return sums.masked_fill(~lower, -torch.inf).exp()
