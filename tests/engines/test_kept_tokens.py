"""The tokens that vLLM's own sampler leaves under min-p, top-k and top-p are those that the trainer keeps."""

from types import SimpleNamespace
from typing import Any

import torch

from megarl.config import Truncation
from megarl.parallel.kept_tokens import kept_tokens
from tests.engines.engine_host import Host

RULES = [Truncation(top_p=0.9), Truncation(top_k=20), Truncation(min_p=0.05), Truncation(min_p=0.01, top_k=40, top_p=0.8)]


async def _counts() -> list[tuple[int, int]]:
    """For each of the rules, the number of kept tokens and of those that only one of the two keeps."""
    from vllm.v1.sample.logits_processor.builtin import MinPLogitsProcessor
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    threads, counts = torch.get_num_threads(), []
    torch.set_num_threads(1)  # engines fork from this process, and OpenMP's threads do not
    logits_NV = 3 * torch.randn(8, 5_000, generator=torch.Generator().manual_seed(1))
    for rules in RULES:
        x_NV = logits_NV / 0.8
        if rules.min_p:
            own: Any = SimpleNamespace(min_p_count=8, min_p=torch.full((8, 1), rules.min_p))
            x_NV = MinPLogitsProcessor.apply(own, x_NV)
        k_N = torch.full((8,), rules.top_k) if rules.top_k else None
        p_N = torch.full((8,), rules.top_p) if rules.top_p < 1 else None
        left_NV = apply_top_k_top_p_pytorch(x_NV, k_N, p_N).isfinite()
        kept = kept_tokens(logits_NV, torch.arange(8), logits_NV.argmax(-1), rules, 0.8)
        kept_NV = torch.zeros_like(left_NV)
        kept_NV[kept.entry_K, kept.column_K] = True
        counts.append((int(left_NV.sum()), int((left_NV ^ kept_NV).sum())))
    torch.set_num_threads(threads)
    return counts


def test_the_trainer_keeps_the_tokens_that_the_sampler_leaves(host: Host) -> None:
    for rules, (left, differing) in zip(RULES, host.run(_counts), strict=True):
        assert left > 8 and differing == 0, rules
