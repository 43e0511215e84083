"""What the mends of megatron-core's faults change, where no other test would see it."""

import inspect
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

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


# Tokens of the packed sequences, by context-parallel size; the last one is padding.
LENGTHS = {1: [1, 1, 2, 5, 5, 13, 3], 2: [4, 4, 8, 12, 28, 4]}
HEAD = 16
# The arguments of a rotation; "width" is that of the rotated part of a head, "offset" the position of a sequence's first token.
ROTATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "partial": {"width": 8},
    "interleaved": {"rotary_interleaved": True},
    "latent": {"mla_rotary_interleaved": True, "mscale": 1.3},
    "yarn": {"mscale": 1.2, "scaling": "yarn"},
    "offset": {"offset": 3},
    "frequencies of every token": {"every_token": True},
}


@pytest.mark.parametrize("cp", LENGTHS)
def test_packed_sequences_are_rotated_at_once_as_one_by_one(pool: Pool, cp: int) -> None:
    """Values and gradients are those of Megatron's own function, bit for bit."""
    for rank in pool.run(rotations, Layout(ranks=cp, cp=cp)):
        assert rank.keys() == {(name, dtype) for name in ROTATIONS for dtype in (torch.float32, torch.bfloat16)}
        for case, (passes, [ours, theirs]) in rank.items():
            assert passes == (1, 1 if case[0] == "frequencies of every token" else len(LENGTHS[cp])), case
            assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True)), case


def rotations(grid: Grid) -> dict[tuple[str, torch.dtype], tuple[tuple[int, int], list[tuple[Tensor, Tensor]]]]:
    """For each case how many passes the patched and Megatron's own function take, then the values and gradients of each."""
    from megatron.core.models.common.embeddings import rope_utils

    ours = rope_utils._apply_rotary_pos_emb_thd
    turn = rope_utils._apply_rotary_pos_emb_bshd
    calls: list[Tensor] = []

    def counted(t: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(t)
        return turn(t, *args, **options)

    rope_utils._apply_rotary_pos_emb_bshd = counted
    lengths = torch.tensor(LENGTHS[grid.cp_size], dtype=torch.int32)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0, dtype=torch.int32)])
    generator = torch.Generator().manual_seed(5)
    results = {}
    for name, case in ROTATIONS.items():
        options = dict(case)
        freqs = frequencies(
            int(lengths.sum() if options.pop("every_token", False) else lengths.max()),
            options.pop("width", HEAD),
            options.pop("scaling", "none"),
            options.pop("offset", 0),
        )
        for dtype in (torch.float32, torch.bfloat16):
            heads = torch.randn(int(lengths.sum()) // grid.cp_size, 3, HEAD, generator=generator).to(dtype).requires_grad_()
            weight = torch.randn(heads.shape, generator=generator).to(dtype)
            passes, pairs = [], []
            for rotate in (ours, inspect.unwrap(ours)):
                calls.clear()
                rotated = rotate(heads, bounds, freqs, cp_group=grid.groups.cp, **options)
                [gradient] = torch.autograd.grad(rotated, heads, weight)
                passes.append(len(calls))
                pairs.append((rotated.detach(), gradient))
            results[name, dtype] = (passes[0], passes[1]), pairs
    return results


def frequencies(positions: int, width: int, scaling: str, offset: int) -> Tensor:
    """What the rotation is given for this many positions from `offset` on: float32 [positions, 1, 1, width]."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    if scaling == "yarn":
        yarn = YarnRotaryEmbedding(width, scaling_factor=4.0, original_max_position_embeddings=16, use_cpu_initialization=True)
        return yarn(positions, offset, packed_seq=True)[0]
    return RotaryEmbedding(width, rotary_percent=1.0, use_cpu_initialization=True)(positions, offset, packed_seq=True)
