"""Attention sinks in float32 on CPU engines: vLLM 0.30.0's kernel takes them in bfloat16 alone.

Layers that have such sinks attend with torch, and keep keys and values in an order of their own: [blocks, groups, tokens of a block,
key and value]. Only vLLM's own processes import this file.

Axes: T query tokens of a sequence, S its keys, N heads, G groups, R heads of a group, D values of a head.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from megarl.upstream.expect import expect


def install() -> None:
    """Attend with torch where sinks are in float32.

    vLLM 0.30.0's kernel (vllm/v1/attention/backends/cpu_attn.py:415) refuses them in every other dtype than bfloat16.
    """
    attention, update = CPUAttentionBackendImpl.forward, CPUAttentionBackendImpl.do_kv_cache_update
    expect(attention, "if attn_metadata is None:", "ops.cpu_attention_with_kv_cache(", "s_aux=self.sinks,")
    expect(update, "num_blocks, num_kv_heads, block_size, _ = kv_cache.size()", "ops.cpu_attn_reshape_and_cache(")

    def forward(
        self: Any, layer: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor, metadata: Any, output: Tensor, **others: Any
    ) -> Tensor:
        if metadata is None or not _by_torch(self):
            attention(self, layer, query, key, value, cache, metadata, output, **others)
            return output
        starts, lengths, tables = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist(), metadata.block_table.long()
        for index, length in enumerate(lengths):
            start, stop = starts[index : index + 2]
            if stop > start:
                attended = attend(query[start:stop], cache, tables[index], length, self.sinks, self.scale, self.sliding_window)
                output[start:stop] = attended.view(output[start:stop].shape)
        return output

    def do_kv_cache_update(self: Any, layer: Any, key: Tensor, value: Tensor, cache: Tensor, slots: Tensor) -> None:
        if not _by_torch(self):
            update(self, layer, key, value, cache, slots)
            return
        kept = (slots >= 0).nonzero().squeeze(1)  # the others are padding
        slot, size = slots[kept].long(), cache.shape[2]
        cache[slot // size, :, slot % size] = torch.cat([key[kept], value[kept]], -1)

    CPUAttentionBackendImpl.forward, CPUAttentionBackendImpl.do_kv_cache_update = forward, do_kv_cache_update


def _by_torch(layer: Any) -> bool:
    return layer.sinks is not None and layer.sinks.dtype == torch.float32


def attend(q_TND: Tensor, cache: Tensor, blocks: Tensor, length: int, sink_N: Tensor, scale: float, window: int) -> Tensor:
    """Return the attention of a sequence's last T tokens over all its tokens and the sink of each head, [T, N, D].

    Args:
        q_TND: their queries.
        cache: keys and values of all sequences, [blocks, G, tokens of a block, 2 D].
        blocks: the sequence's blocks, int64, as many or more than it fills.
        length: the number of its tokens (S), the last T included.
        sink_N: the scores of the sinks, which have no values.
        scale: the factor of the other scores.
        window: how many keys a query sees, its own among them; -1: all.
    """
    tokens, heads, size = q_TND.shape
    block, query_T = cache.shape[2], torch.arange(length - tokens, length)
    first = max(0, length - tokens + 1 - window) if window > 0 else 0  # key that any query sees; blocks before may have been freed
    kept = slice(first % block, first % block + length - first)
    kv_GSC = cache[blocks[first // block : -(-length // block)]].transpose(0, 1).flatten(1, 2)[:, kept]
    key_GSD, value_GSD = kv_GSC.chunk(2, -1)
    q_TGRD = q_TND.view(tokens, cache.shape[1], -1, size)
    score_GRTS = torch.einsum("tgrd,gsd->grts", q_TGRD, key_GSD) * scale
    distance_TS = query_T[:, None] - torch.arange(first, length)
    hidden_TS = (distance_TS < 0) | (distance_TS >= (window if window > 0 else length))
    sink_GRT1 = sink_N.detach().view(*score_GRTS.shape[:2], 1, 1).expand(-1, -1, tokens, 1)
    share_GRTS = torch.cat([score_GRTS.masked_fill(hidden_TS, -torch.inf), sink_GRT1], -1).softmax(-1)[..., :-1]
    return torch.einsum("grts,gsd->tgrd", share_GRTS, value_GSD).reshape(tokens, heads, size)
