"""The core attention of the local spec, and of GPUs without another: causal, over packed sequences, with context parallelism.

It runs on torch's scaled_dot_product_attention.

Axes: T local tokens of this context-parallel rank, H query heads and G key/value heads (of this tensor-parallel shard), D head size of
queries and keys, C head size of values, N sequences of equal length, L tokens of a whole sequence.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor


def zigzag(length: int, rank: int, ranks: int) -> Tensor:
    """The positions of a sequence that one context-parallel rank holds: of 2 * ranks equal chunks, the rank-th from each end.

    This is the layout of megatron.core.utils.get_batch_on_this_cp_rank and rope_utils.py:140.

    Args:
        length: tokens of the sequence; must be divisible by 2 * ranks if ranks > 1.
        rank: the rank's place in its context-parallel group.
        ranks: size of that group; with 1 the rank holds all positions.

    Returns:
        int64 [length / ranks], ascending, on the CPU.
    """
    if ranks == 1:
        return torch.arange(length)
    chunk, rest = divmod(length, 2 * ranks)
    assert rest == 0, f"a sequence of {length} tokens does not divide into {2 * ranks} chunks"
    return torch.cat([torch.arange(chunk) + start * chunk for start in (rank, 2 * ranks - 1 - rank)])


_Run = tuple[Tensor, Tensor, Tensor, int, int]  # queries, keys, values, length of each sequence, their number


class PackedAttention(MegatronModule):
    """softmax(q k^T / sqrt(D)) v inside each packed sequence, causal, with grouped key/value heads, in some layers with a sliding window.

    With sinks (config.softmax_type "learnable") the sum under each head's softmax has one more term, exp(sink), which attends to nothing.

    Neighbouring sequences of equal length go through one batched call (`packing` sorts them by length). Under context parallelism
    keys and values are gathered over the group and every rank computes its own two chunks of queries.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        cp_comm_type: str | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        assert config.attention_dropout == 0.0, "the packed attention has no dropout"
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5
        self.cp_group, self.tp_group = pg_collection.cp, pg_collection.tp
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.softmax_offset: torch.nn.Parameter | None = None  # Transformer Engine's name of the sinks, [H]
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, is_parallel=True, dim=0, stride=1)
        self.window = config.window_size[0] + 1 if windowed else None  # the tokens that a query sees, its own among them

    def forward(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGC: Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend inside each packed sequence. The signature is that of Megatron's core attention.

        Args:
            q_THD: queries [T, H, D] of the tokens that this rank holds, sequence by sequence.
            k_TGD: keys [T, G, D].
            v_TGC: values [T, G, C].
            attention_mask: must be None; attention is causal.
            attn_mask_type: ignored.
            attention_bias: must be None.
            packed_seq_params: `cu_seqlens_q` holds the bounds of the sequences, counted over all context-parallel ranks.

        Returns:
            The attended values [T, H * C] of the local tokens.
        """
        assert packed_seq_params is not None and attention_mask is None and attention_bias is None
        return torch.cat([self._attend(*run) for run in self._runs(q_THD, k_TGD, v_TGC, packed_seq_params)]).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Describe the sinks to Megatron's checkpoints: each tensor-parallel rank has those of its heads. The signature is Megatron's."""
        assert metadata is not None
        state, replicas = self.state_dict(prefix="", keep_vars=True), metadata["dp_cp_group"]
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets, tp_group=self.tp_group, dp_cp_group=replicas
        )

    def _runs(self, q_THD: Tensor, k_TGD: Tensor, v_TGC: Tensor, packed: PackedSeqParams) -> list[_Run]:
        """Each run of equally long sequences: the local queries, the keys and values of the whole sequences, their length and number."""
        ranks = self.cp_group.size()
        lengths = [end - start for start, end in itertools.pairwise(packed.cu_seqlens_q.tolist())]
        groups = [(length, len(list(run))) for length, run in itertools.groupby(lengths)]
        sizes = [length // ranks * count for length, count in groups]
        ks, vs = (k_TGD.split(sizes), v_TGC.split(sizes)) if ranks == 1 else self._gather(k_TGD, v_TGC, sizes, groups)
        return [(*qkv, *group) for *qkv, group in zip(q_THD.split(sizes), ks, vs, groups, strict=True)]

    def _gather(
        self, k_TGD: Tensor, v_TGC: Tensor, sizes: list[int], groups: list[tuple[int, int]]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Gather the keys and values of the whole sequences over the context-parallel ranks, by run of equally long sequences."""
        ranks, widths = self.cp_group.size(), [k_TGD.shape[-1], v_TGC.shape[-1]]
        kv = torch.cat([k_TGD, v_TGC], dim=-1)
        all_ranks = gather_from_sequence_parallel_region(kv, tensor_parallel_output_grad=True, group=self.cp_group)
        parts = all_ranks.unflatten(0, (ranks, -1)).split(sizes, dim=1)
        whole = [_unzigzag(part, count).split(widths, dim=-1) for part, (_, count) in zip(parts, groups, strict=True)]
        return [k for k, _ in whole], [v for _, v in whole]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, length: int, count: int) -> Tensor:
        q, k, v = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q, k, v))  # N heads tokens D
        mask, width = self._mask(length), v.shape[-1]
        mask = mask if mask is None else mask.to(q.device)
        if self.softmax_offset is not None:
            q, k, v, mask = _with_sinks(q, k, v, mask, self.softmax_offset, self.scale)
        if q.is_cuda and (mask is not None or q.dtype == torch.float32):
            # The only GPU kernel that shares keys between heads supports neither case; the fallback would keep all scores in memory.
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        shared = q.shape[1] != k.shape[1]
        out = repeatable(
            lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=self.scale, enable_gqa=shared)
        )
        if self.softmax_offset is not None:
            out = out[:, :, 1:, :width]
        return out.transpose(1, 2).flatten(0, 1)

    def _mask(self, length: int) -> Tensor | None:
        """Which keys of a whole sequence each local query sees, bool [local tokens, L]; None: all up to its own."""
        ranks, window = self.cp_group.size(), length if self.window is None else self.window
        if ranks == 1 and window >= length:
            return None
        query, key_L = zigzag(length, self.cp_group.rank(), ranks)[:, None], torch.arange(length)
        return (key_L <= query) & (key_L > query - window)


def _with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sink_H: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Give attention a first token that stands for the sinks: its key scores sink_h for every query of head h, and its value is 0.

    Queries and keys are eight wider, which keeps what kernels ask of their alignment: a query has sink / scale there, and the key of the
    first token ones. In 16 bits sink / scale is the sum of two numbers, and the gradient is that of the first.

    Args:
        q: queries [N, H, tokens, D].
        k: keys [N, G, L, D].
        v: values [N, G, L, C].
        mask: which keys each query sees, [tokens, L]; None: all up to its own.
        sink_H: the sinks.
        scale: the factor of the scores.

    Returns:
        The same with a first token, whose row of the result means nothing, and eight further columns.
    """
    offset_H = sink_H.float() / scale
    high_H = offset_H.to(q.dtype)
    low_H = (offset_H - high_H.float()).detach().to(q.dtype)
    own = torch.stack([high_H, low_H, *[torch.zeros_like(high_H)] * 6], dim=-1)  # H 8
    q = F.pad(torch.cat([q, own[None, :, None].expand(*q.shape[:3], 8)], dim=-1), (0, 0, 1, 0))
    k, v = F.pad(k, (0, 8, 1, 0)), F.pad(v, (0, 8, 1, 0))
    first = torch.arange(k.shape[-1], device=k.device) >= k.shape[-1] - 8
    k = torch.where((torch.arange(k.shape[2], device=k.device) == 0)[:, None] & first, 1.0, k).to(q.dtype)
    return q, k, v, mask if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)


def repeatable(attend: Callable[[], Tensor]) -> Tensor:
    """Call `attend`, whose result's last operation is an attention kernel; where torch warns of what is not deterministic, this is.

    CUDA's attention kernels add up gradients in a fixed order only where torch refuses what is not deterministic (torch 2.13,
    ATen/native/transformers/cuda/attention_backward.cu), so it refuses it during this kernel, forward and backward. It cannot do so for a
    whole model, some of whose operations have no deterministic version.
    """
    if not torch.is_deterministic_algorithms_warn_only_enabled():
        return attend()
    _refuse()
    try:
        out = attend()
    finally:
        _warn()
    if out.grad_fn is not None:
        assert "Attention" in out.grad_fn.name(), f"{out.grad_fn.name()}: the backward pass of no attention kernel"
        out.grad_fn.register_prehook(lambda _: _refuse())
        out.grad_fn.register_hook(lambda *_: _warn())
    return out


def _refuse() -> None:
    torch.use_deterministic_algorithms(True)


def _warn() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)


def _unzigzag(part: Tensor, count: int) -> Tensor:
    """Reorder all ranks' zigzag halves [ranks, N * L / ranks, G, C] by position in each sequence: [N * L, G, C]."""
    halves = part.unflatten(1, (count, 2, -1))  # ranks N 2 chunk G C
    ordered = torch.cat([halves[:, :, 0], halves[:, :, 1].flip(0)])  # 2 * ranks, N, chunk, ...
    return ordered.transpose(0, 1).flatten(0, 2)
