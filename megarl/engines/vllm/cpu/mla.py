"""Multi-latent attention (MLA) on CPU engines: with plain RoPE, and with latents of any size.

vLLM 0.30.0 has a backend for it, CPU_MLA, which computes prompts with torch and responses with a kernel over the cache of latents.
Only vLLM's own processes import this file.

Axes: B sequences, N heads, C values of the cache for one token (latent and rotary key), L latent.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend, MLACommonMetadata
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from megarl.upstream.expect import expect

_KERNEL = (512, 64)  # latent and rotary key for which the kernel is compiled (csrc/cpu/mla_decode.cpp)


def install() -> None:
    """Patch vLLM's rotary embedding and its CPU_MLA."""
    _rotate_each_head()
    _decode_any_latent()


def _rotate_each_head() -> None:
    """Rotate queries [tokens, heads, rotary] with torch: vLLM 0.30.0's CPU kernel (rotary_embedding/base.py:298) takes their strides for
    those of [tokens, heads * rotary] and rotates other values than it should, silently.

    YaRN's embedding for MLA is another class, which uses torch already (deepseek_scaling_rope.py).
    """
    kernel = RotaryEmbedding.forward_cpu
    expect(kernel, "ops.rotary_embedding(", "query,", "key,", "return query, key")

    def forward_cpu(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if query.dim() == 3:
            return self.forward_native(positions, query, key)
        return kernel(self, positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu


def _decode_any_latent() -> None:
    """Decode with torch where the latents are not of 512 + 64 values, the only size of vLLM 0.30.0's kernel (mla/cpu_mla.py:62)."""
    expect(MLACommonMetadata.__post_init__, "not MLACommonBackend.supports_head_size(")
    decode = CPUMLAImpl.forward_mqa
    expect(decode, "q = torch.cat(q, dim=-1)", "attn_metadata.decode.block_table", "ops.mla_decode_kvcache_cpu(", "return out, None")

    def forward_mqa(self: Any, q: Any, cache: Tensor, metadata: Any, layer: Any) -> tuple[Tensor, None]:
        if (self.kv_lora_rank, self.qk_rope_head_dim) == _KERNEL:
            return decode(self, q, cache, metadata, layer)
        q_BNC = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        return attend(q_BNC, cache, metadata.decode.block_table, metadata.decode.seq_lens, self.kv_lora_rank, self.scale), None

    CPUMLAImpl.forward_mqa = forward_mqa
    MLACommonBackend.supports_head_size = classmethod(lambda cls, size: True)  # it is asked whatever the backend (mla_attention.py:1708)


def attend(q_BNC: Tensor, cache: Tensor, block_table: Tensor, lengths_B: Tensor, latent: int, scale: float) -> Tensor:
    """Return the attention of each sequence's last token over its cached tokens, [B, N, L].

    Args:
        q_BNC: its queries, multiplied by the keys' up-projection.
        cache: latents and rotary keys of all tokens, [blocks, tokens of a block, C].
        block_table: the blocks of each sequence, int [B, most blocks].
        lengths_B: the number of tokens of each sequence, the last one included.
        latent: the size of a latent (L).
        scale: the factor of the scores.
    """
    outputs = []
    for q_NC, blocks, length in zip(q_BNC, block_table.long(), lengths_B.tolist(), strict=True):
        kv_TC = cache[blocks].flatten(0, 1)[:length]
        share_NT = ((q_NC @ kv_TC.T).float() * scale).softmax(-1)
        outputs.append(share_NT.to(kv_TC.dtype) @ kv_TC[:, :latent])
    return torch.stack(outputs)
