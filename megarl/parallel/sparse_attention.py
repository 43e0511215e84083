"""DeepSeek's sparse attention (https://arxiv.org/abs/2512.02556): a lightning indexer chooses the keys that each query attends to.

    score[t, s] = sum over i of weight[t, i] * relu(q[t, i] . k[s] / sqrt(D)) / sqrt(I)

Query t attends to the `topk` keys s <= t of the highest scores, of equal ones to the earliest; to all of them where there are no more.
This module is used instead of Megatron's DSAttention (experimental_attention_variant/dsa.py:1530), which needs a CUDA package for its
Hadamard transform (orthogonal: it changes no score), keeps the scores of all packed sequences against each other, and has another order of
keys under context parallelism. Scores are computed in float32, as transformers does; the attention itself is dense with a mask.

Axes: R local rows of this context-parallel rank, S those of this rank's sequence-parallel shard, L tokens of a whole sequence, Q some of
its queries, K chosen keys, I heads of the indexer, D their size.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.models.indexer import SCORES, chosen
from megarl.models.rope import Rope
from megarl.models.sizes import Indexer
from megarl.parallel.attention import PackedAttention, repeatable, zigzag
from megarl.parallel.spec import ReplicatedLinear


class LayerNorm(torch.nn.LayerNorm):
    """torch's, whose gradient is summed over the shards of the sequence."""

    def __init__(self, config: TransformerConfig, size: int, eps: float) -> None:
        super().__init__(size, eps=eps, dtype=config.params_dtype)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class LightningIndexer(torch.nn.Module):
    """Queries, keys and weights of heads, from a layer's input and its latent queries; replicated on all tensor-parallel ranks."""

    def __init__(self, config: Any, indexer: Indexer, rope: Rope) -> None:
        super().__init__()
        self.shape, self.interleaved = (indexer.heads, indexer.head_dim), indexer.interleaved
        self.rope, self.rotated = rope, config.qk_pos_emb_head_dim

        def linear(inputs: int, outputs: int) -> ReplicatedLinear:
            return ReplicatedLinear(inputs, outputs, parallel_mode="duplicated", config=config, bias=False)

        self.linear_wq_b = linear(config.q_lora_rank, indexer.heads * indexer.head_dim)
        self.linear_wk = linear(config.hidden_size, indexer.head_dim)
        self.k_norm = LayerNorm(config, indexer.head_dim, 1e-6)
        self.linear_weights_proj = linear(config.hidden_size, indexer.heads)

    def forward(self, x: Tensor, latent: Tensor, position_S: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q [S, I, D], k [S, D] and float32 weights [S, I].

        Args:
            x: the layer's normalised input [S, hidden].
            latent: the normalised latent of queries [S, rank].
            position_S: positions inside the sequences.
        """
        q = self._rotated(self.linear_wq_b(latent)[0].unflatten(-1, self.shape), position_S)
        k = self._rotated(self.k_norm(self.linear_wk(x)[0])[:, None], position_S)[:, 0]
        return q, k, self.linear_weights_proj(x)[0].float() * self.shape[0] ** -0.5

    def _rotated(self, x: Tensor, position_S: Tensor) -> Tensor:
        """Rotate the first dimensions of each head: neighbours if interleaved, else the two halves."""
        angle = position_S[:, None].float() * self.rope.frequencies(self.rotated).to(x.device)
        cos, sin = ((turn * self.rope.attention_factor).to(x.dtype)[:, None] for turn in (angle.cos(), angle.sin()))
        turned, kept = x.split([self.rotated, x.shape[-1] - self.rotated], dim=-1)
        one, two = (turned[..., 0::2], turned[..., 1::2]) if self.interleaved else turned.chunk(2, dim=-1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin, kept], dim=-1)


class SparseAttention(PackedAttention):
    """`PackedAttention` over the keys that the layer's indexer chooses."""

    requires_dsa_inputs = True  # multi_latent_attention.py:373 then passes the layer's input and its latent queries

    def __init__(self, config: Any, layer_number: int, *args: Any, indexer: Indexer, rope: Rope, **options: Any) -> None:
        super().__init__(config, layer_number, *args, **options)
        self.topk, self.indexer = indexer.topk, LightningIndexer(config, indexer, rope)

    def forward(  # type: ignore[override]
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGC: Tensor,
        attention_mask: None,
        attn_mask_type: Any = None,
        attention_bias: None = None,
        packed_seq_params: PackedSeqParams | None = None,
        *,
        x: Tensor,
        qr: Tensor,
    ) -> Tensor:
        """As `PackedAttention.forward`; x [S, 1, hidden] and qr [S, rank] are the layer's input and its latent of queries."""
        assert packed_seq_params is not None and attention_mask is None and attention_bias is None
        runs = self._runs(q_THD, k_TGD, v_TGC, packed_seq_params)
        lengths = [length for *_, length, count in runs for _ in range(count)]
        chosen_RK = None
        if max(lengths) > self.topk:
            chosen_RK = self._chosen(x.detach().squeeze(1), qr.detach(), lengths)
        outputs, start = [], 0
        for q, k, v, length, count in runs:
            if length <= self.topk or chosen_RK is None:
                outputs.append(self._attend(q, k, v, length, count))
            else:
                parts = zip(*(part.unflatten(0, (count, -1)) for part in (q, k, v, chosen_RK[start : start + len(q)])), strict=True)
                outputs += [self._attend_chosen(*part) for part in parts]
            start += len(q)
        return torch.cat(outputs).flatten(1)

    @torch.no_grad()
    def _chosen(self, x: Tensor, latent: Tensor, lengths: list[int]) -> Tensor:
        """The keys [R, K] of every query, by their places in its sequence; those of queries in short sequences are arbitrary."""
        rank, ranks = self.cp_group.rank(), self.cp_group.size()
        position_R = torch.cat([zigzag(length, rank, ranks) for length in lengths]).to(x.device)
        begin, rows = (self.tp_group.rank() * len(x), len(x)) if len(x) < len(position_R) else (0, len(x))
        query_position = position_R[begin : begin + rows]
        q_SID, k_SD, weight_SI = self.indexer(x, latent, query_position)
        k_RD = _gathered(k_SD, self.tp_group) if rows < len(position_R) else k_SD
        parts_RD = _gathered(k_RD, self.cp_group).unflatten(0, (ranks, -1)) if ranks > 1 else k_RD[None]
        chosen_SK = torch.zeros(rows, self.topk, dtype=torch.int32, device=x.device)
        start = 0
        for length in lengths:
            local = length // ranks
            first, last = max(start - begin, 0), min(start + local - begin, rows)
            if length > self.topk and first < last:
                k_LD = torch.empty_like(parts_RD[0][:1]).expand(length, -1).clone()
                for other in range(ranks):
                    k_LD[zigzag(length, other, ranks).to(x.device)] = parts_RD[other][start : start + local]
                chosen_SK[first:last] = self._best(q_SID[first:last], k_LD, weight_SI[first:last], query_position[first:last])
            start += local
        return _gathered(chosen_SK, self.tp_group) if rows < len(position_R) else chosen_SK

    def _best(self, q: Tensor, k_LD: Tensor, weight: Tensor, position: Tensor) -> Tensor:
        """The places [Q, K] of the keys of the highest scores."""
        step, parts = max(1, SCORES // (q.shape[1] * len(k_LD))), []
        places = torch.arange(len(k_LD), device=k_LD.device)
        for part, weights, at in zip(q.split(step), weight.split(step), position.split(step), strict=True):
            score = F.relu(part.float() @ k_LD.float().T * q.shape[-1] ** -0.5)
            score = (weights[:, None] @ score)[:, 0].masked_fill(places > at[:, None], -torch.inf)
            parts.append(chosen(score, self.topk).int())
        return torch.cat(parts)

    def _attend_chosen(self, q: Tensor, k: Tensor, v: Tensor, chosen: Tensor) -> Tensor:
        """Attend to the chosen keys of one sequence: [Q, H, C]."""
        query_position = zigzag(len(k), self.cp_group.rank(), self.cp_group.size()).to(q.device)
        mask = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device).scatter_(1, chosen.long(), True)
        mask &= torch.arange(len(k), device=q.device) <= query_position[:, None]
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = repeatable(lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale))
        return out[0].transpose(0, 1)


def _gathered(rows: Tensor, group: Any) -> Tensor:
    """Join the rows of all ranks of a group, in their order."""
    joined = rows.new_empty(group.size() * len(rows), *rows.shape[1:])
    dist.all_gather_into_tensor(joined, rows.contiguous(), group=group)
    return joined
