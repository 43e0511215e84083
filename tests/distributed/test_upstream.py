"""What the mends of megatron-core's faults change, where no other test would see it."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import torch

from megarl.config import Layout
from megarl.parallel.grid import Grid
from tests.rank_pool import Pool

PLAIN = {"linear_q_proj": "columns", "linear_q_up_proj": None, "linear_kv_up_proj": "columns", "q_layernorm": None, "kv_layernorm": "norm"}


def test_queries_without_a_latent_get_no_norm_of_their_own(pool: Pool) -> None:
    """With Transformer Engine Megatron would put one before their projection, in silence."""
    assert pool.run(query_parts, Layout()) == [PLAIN]


def query_parts(grid: Grid) -> dict[str, Any]:
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    config = SimpleNamespace(q_lora_rank=None, qk_layernorm=True, qk_l2_norm=False)
    return dict(MLASelfAttention._resolve_qk_norm_config(SimpleNamespace(config=config), SimpleNamespace(**PLAIN)))


def test_a_tensor_from_a_rank_is_read_without_megatron(pool: Pool) -> None:
    [pickled] = pool.run(pickled_tensor, Layout())
    assert b"torch" in pickled and b"megatron" not in pickled


def pickled_tensor(grid: Grid) -> bytes:
    return pickle.dumps(torch.zeros(2))


def test_values_stay_as_narrow_as_cudnn_takes_them(pool: Pool) -> None:
    """Padded to DeepSeek's 192 they would be left to the attention that keeps all scores, on Blackwell."""
    assert pool.run(widths, Layout()) == [[128, 64, 256]]


def widths(grid: Grid) -> list[int]:
    """Of the values that the attention gets, for heads of 192 and 128, 96 and 64, 256 and 128."""
    from megatron.core.transformer import multi_latent_attention as latent_attention

    from megarl.parallel import upstream

    packed = SimpleNamespace(qkv_format="thd")
    attention = SimpleNamespace(config=SimpleNamespace(experimental_attention_variant=None))
    prepare = latent_attention._prepare_mla_core_attention_value
    try:
        upstream._unpadded_values(latent_attention)
        pairs = [(torch.zeros(1, 1, query), torch.zeros(1, 1, value)) for query, value in ((192, 128), (96, 64), (256, 128))]
        return [latent_attention._prepare_mla_core_attention_value(attention, *pair, packed)[0].shape[-1] for pair in pairs]
    finally:
        latent_attention._prepare_mla_core_attention_value = prepare
