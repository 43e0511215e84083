"""DeepSeek's sparse attention on CPU engines, in float32 where vLLM 0.30.0 has it on GPUs alone, with keys of the indexer in fp8.

A layer's cache has the indexer's key of a token behind its latent and rotary key. All queries, of prompts and of responses, go one way.
Only vLLM's own processes import this file.

Axes: T tokens of this step, Q those of one sequence, S the tokens of that sequence so far, N heads, K chosen keys, L latent, R rotary key,
I heads of the indexer, D their size.
"""

from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers import mla
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.layernorm import LayerNorm
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, ReplicatedLinear
from vllm.model_executor.models import deepseek_v2

from megarl.models.indexer import chosen
from megarl.upstream.expect import expect

_TOGETHER = 1 << 24  # numbers of one kind that are computed for queries together


@cache  # a process may start several engines
def install() -> None:
    """Replace vLLM's indexer, which needs DeepGEMM, and its attention over what that chooses (platforms/cpu.py: "not supported on CPU")."""
    expect(deepseek_v2.Indexer.__init__, "self.wk_weights_proj = MergedColumnParallelLinear(", "self.indexer_op = SparseAttnIndexer(")
    expect(mla.MultiHeadLatentAttentionWrapper.__init__, "self.mla_attn = MLAAttention(", "use_sparse=self.is_sparse")
    expect(mla.MultiHeadLatentAttentionWrapper.forward, "self.indexer(hidden_states, q_c, positions, ", ".impl.record_logical_topk_ready()")
    deepseek_v2.Indexer = FloatIndexer
    deepseek_v2.DeepseekV2ForCausalLM.packed_modules_mapping["wk_weights_proj"] = ["wk", "weights_proj"]

    def attention(*, use_sparse: bool, **options: Any) -> MLAAttention:
        return ChosenKeysAttention(**options) if use_sparse else MLAAttention(**options)

    mla.MLAAttention = attention


class FloatIndexer(nn.Module):
    """The indexer's projections, by the names of vLLM's own, which its loader knows. The attention takes what the last call left."""

    def __init__(
        self, vllm_config: Any, config: Any, hidden_size: int, q_lora_rank: int, quant_config: Any, *rest: Any, **options: Any
    ) -> None:
        super().__init__()
        self.topk_tokens, self.heads, self.head_dim = config.index_topk, config.index_n_heads, config.index_head_dim
        self.rotated = config.qk_rope_head_dim
        self.wq_b = ReplicatedLinear(q_lora_rank, self.heads * self.head_dim, bias=False, quant_config=quant_config)
        self.wk_weights_proj = MergedColumnParallelLinear(hidden_size, [self.head_dim, self.heads], bias=False, disable_tp=True)
        self.k_norm = LayerNorm(self.head_dim, eps=1e-6)
        self.query_TID = self.key_TD = self.weight_TI = torch.empty(0)

    def forward(self, hidden_states: Tensor, latent: Tensor, positions: Tensor, rotary: Any) -> None:
        """Compute queries, keys and weights of heads of all tokens."""
        query_TID = self.wq_b(latent)[0].unflatten(-1, (self.heads, self.head_dim))
        key_TD, weight_TI = self.wk_weights_proj(hidden_states)[0].split([self.head_dim, self.heads], dim=-1)
        key_T1D = self.k_norm(key_TD)[:, None]
        query, key = rotary(positions, query_TID[..., : self.rotated].contiguous(), key_T1D[..., : self.rotated].contiguous())
        self.query_TID = torch.cat([query.view(-1, self.heads, self.rotated), query_TID[..., self.rotated :]], dim=-1)
        self.key_TD = torch.cat([key.view(-1, 1, self.rotated), key_T1D[..., self.rotated :]], dim=-1)[:, 0]
        self.weight_TI = weight_TI.float() * self.heads**-0.5


class ChosenKeysAttention(MLAAttention):
    """Multi-latent attention over the keys that a `FloatIndexer` chooses."""

    def __init__(self, *, indexer: FloatIndexer, topk_indices_buffer: Any, index_group_builder: Any, **options: Any) -> None:
        super().__init__(**options)
        self.indexer = indexer
        self.head_size += indexer.head_dim
        self.impl.record_logical_topk_ready = lambda: None

    def forward(self, q: Tensor, kv_c_normed: Tensor, k_pe: Tensor, output_shape: Any = None, q_dcp_replicated: None = None) -> Tensor:
        """Return the attended values [T, N * value size].

        Args:
            q: queries [T, N, size], the rotary part last.
            kv_c_normed: latents [T, L].
            k_pe: rotary keys [T, 1, R].
            output_shape: of the result.
            q_dcp_replicated: None.
        """
        out, context = torch.zeros(output_shape, dtype=q.dtype), get_forward_context()
        if context.attn_metadata is None:  # vLLM measures memory
            return out
        metadata, indexer = context.attn_metadata[self.layer_name], self.indexer
        tail = torch.cat([k_pe[:, 0], indexer.key_TD], dim=-1)[:, None]
        self.impl.do_kv_cache_update(
            kv_c_normed, tail, self.kv_cache, context.slot_mapping[self.layer_name], self.kv_cache_dtype, self._k_scale
        )
        plain, rotary = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], dim=-1)
        q_TNC = torch.cat([torch.einsum("tnp,npl->tnl", plain, self.W_UK_T), rotary], dim=-1)
        for start, stop, blocks, length in _sequences(metadata):
            cached_SC = self.kv_cache[blocks.long()].flatten(0, 1)[:length]
            kv_SC, key_SD = cached_SC.split([q_TNC.shape[-1], indexer.head_dim], dim=-1)
            step = max(1, _TOGETHER // max(indexer.heads * length, min(indexer.topk_tokens, length) * kv_SC.shape[1]))
            for first in range(start, stop, step):
                rows = slice(first, min(first + step, stop))
                position_Q = torch.arange(rows.start, rows.stop) + length - stop
                chosen_QK = choose(indexer.query_TID[rows], key_SD, indexer.weight_TI[rows], position_Q, indexer.topk_tokens)
                latent_QNL = attend(q_TNC[rows], kv_SC, chosen_QK, position_Q, self.kv_lora_rank, self.scale)
                out[rows] = torch.einsum("qnl,nlv->qnv", latent_QNL, self.W_UV).flatten(1)
        return out


def _sequences(metadata: Any) -> Iterator[tuple[int, int, Tensor, int]]:
    """Yield each sequence's first row in this step and its last plus one, the blocks of its cache, and its length.

    A prompt is computed whole (`launch.py`).
    """
    bounds, decodes = metadata.query_start_loc.tolist(), metadata.num_decodes
    for n, (start, stop) in enumerate(pairwise(bounds[: metadata.num_reqs + 1])):
        if n < decodes:
            yield start, stop, metadata.decode.block_table[n], int(metadata.decode.seq_lens[n])
        else:
            yield start, stop, metadata.prefill.block_table[n - decodes], stop - start


def choose(query_QID: Tensor, key_SD: Tensor, weight_QI: Tensor, position_Q: Tensor, topk: int) -> Tensor:
    """Return the places [Q, K] of the keys of the highest scores, K = min(topk, S); see `parallel/sparse_attention.py`."""
    score_QIS = (query_QID.float() @ key_SD.float().T * key_SD.shape[-1] ** -0.5).relu()
    later_QS = torch.arange(len(key_SD)) > position_Q[:, None]
    score_QS = (weight_QI[:, None] @ score_QIS)[:, 0].masked_fill(later_QS, -torch.inf)
    return chosen(score_QS, topk)


def attend(q_QNC: Tensor, kv_SC: Tensor, chosen_QK: Tensor, position_Q: Tensor, latent: int, scale: float) -> Tensor:
    """Return each query's attention over the latents of its chosen keys that are not later than it, [Q, N, L].

    Args:
        q_QNC: queries, multiplied by the keys' up-projection, with their rotary part.
        kv_SC: latents and rotary keys.
        chosen_QK: the places of chosen keys.
        position_Q: the queries' places.
        latent: the size of a latent.
        scale: the factor of the scores.
    """
    kv_QKC = kv_SC[chosen_QK]
    score_QNK = (q_QNC @ kv_QKC.transpose(1, 2)).float() * scale
    share_QNK = score_QNK.masked_fill((chosen_QK > position_Q[:, None])[:, None], -torch.inf).softmax(-1)
    return share_QNK.to(kv_SC.dtype) @ kv_QKC[..., :latent]
