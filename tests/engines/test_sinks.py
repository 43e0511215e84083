"""Attention with sinks in float32 on a CPU: what a plain softmax over a sequence's keys and its sink gives, also after cached tokens."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engines.engine_host import Host

HEADS, GROUPS, SIZE, BLOCK = 4, 2, 32, 128
LENGTHS, LATER = (300, 5), (40, 3)  # of two sequences, and how many of their tokens come in a second step
BLOCKS = torch.tensor([[3, 1, 7], [2, 8, 8]])


def expected(q_TND: Tensor, k_TGD: Tensor, v_TGD: Tensor, sink_N: Tensor, window: int | None) -> Tensor:
    """In float64, over all keys at once."""
    k_TND, v_TND = (x_TGD.double().repeat_interleave(HEADS // GROUPS, 1) for x_TGD in (k_TGD, v_TGD))
    distance_TT = torch.arange(len(q_TND))[:, None] - torch.arange(len(q_TND))
    hidden_TT = (distance_TT < 0) | (distance_TT >= (window or len(q_TND)))
    mass_NTT = (torch.einsum("tnd,snd->nts", q_TND.double(), k_TND) * SIZE**-0.5).masked_fill(hidden_TT, -torch.inf).exp()
    share_NTT = mass_NTT / (mass_NTT.sum(-1, keepdim=True) + sink_N.double().exp()[:, None, None])
    return torch.einsum("nts,snd->tnd", share_NTT, v_TND)


async def _errors(window: int | None) -> list[float]:
    """Return the largest error of each sequence."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    from megarl.engines.vllm.cpu import sinks

    kept, threads = (CPUAttentionBackendImpl.forward, CPUAttentionBackendImpl.do_kv_cache_update), torch.get_num_threads()
    torch.set_num_threads(1)  # engines fork from this process, and OpenMP's threads do not
    sinks.install()
    try:
        return _attended(CPUAttentionBackendImpl, window)
    finally:
        CPUAttentionBackendImpl.forward, CPUAttentionBackendImpl.do_kv_cache_update = kept
        torch.set_num_threads(threads)


def _attended(kind: Any, window: int | None) -> list[float]:
    drawn = torch.Generator().manual_seed(0)
    sink_N = torch.randn(HEADS, generator=drawn)
    layer = kind(HEADS, SIZE, SIZE**-0.5, GROUPS, None, window, "auto", sinks=sink_N)
    cache = torch.full((9, GROUPS, BLOCK, 2 * SIZE), torch.nan)  # what is not this sequence's must not be read
    q, k, v = ([torch.randn(length, heads, SIZE, generator=drawn) for length in LENGTHS] for heads in (HEADS, GROUPS, GROUPS))
    firsts = [length - later for length, later in zip(LENGTHS, LATER, strict=True)]
    found = [list[Tensor](), list[Tensor]()]
    for spans in (list(zip((0, 0), firsts, strict=True)), list(zip(firsts, LENGTHS, strict=True))):
        slots = [int(BLOCKS[n, t // BLOCK]) * BLOCK + t % BLOCK for n, span in enumerate(spans) for t in range(*span)]
        query, key, value = (torch.cat([one[start:stop] for one, (start, stop) in zip(x, spans, strict=True)]) for x in (q, k, v))
        layer.do_kv_cache_update(None, key, value, cache, torch.tensor(slots))
        starts = [0, spans[0][1] - spans[0][0], len(query)]
        metadata = SimpleNamespace(
            query_start_loc=torch.tensor(starts), seq_lens=torch.tensor([stop for _, stop in spans]), block_table=BLOCKS.int()
        )
        output = torch.empty(len(query), HEADS, SIZE)
        layer.forward(None, query, key, value, cache, metadata, output=output)
        for n, (start, stop) in enumerate(pairwise(starts)):
            found[n].append(output[start:stop])
    return [float((torch.cat(found[n]) - expected(q[n], k[n], v[n], sink_N, window)).abs().max()) for n in range(2)]


@pytest.mark.parametrize("window", [None, 12, 130])
def test_sinks_take_their_share_of_the_softmax(host: Host, window: int | None) -> None:
    """Of a sequence of three blocks and one of less than one, with windows below and above a block."""
    assert max(host.run(_errors, window)) < 2e-6
