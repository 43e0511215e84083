"""What the mends of megatron-core's faults change, where no other test would see it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
