"""What one rank holds of a step under a truncated sampling: what the policy kept first is what everything else reads."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.batch import Batch, Sample, pack
from megarl.config import Truncation
from megarl.observe.metrics import scalars
from megarl.ranks.kept import KeptLogprobs
from tests.distributed.test_kept_tokens import TEMPERATURE, plain_kept

VOCABULARY = 40
RULES = Truncation(top_k=12, top_p=0.85)
GRID: Any = SimpleNamespace(groups=SimpleNamespace(tp=None))


def case() -> tuple[list[Batch], list[Tensor], list[Tensor]]:
    """Two micro-batches, and the logits of their entries before and after an update."""
    generator = torch.Generator().manual_seed(5)
    batches, before, after = [], [], []
    for length in (9, 14):
        tokens = torch.randint(0, VOCABULARY, (length,), generator=generator).int().numpy()
        batches.append(pack([Sample(tokens, 4, torch.zeros(length - 4).numpy(), "stop")]))
        before.append(2 * torch.randn(length - 1, VOCABULARY, generator=generator))
        after.append(before[-1] + torch.randn(length - 1, VOCABULARY, generator=generator))
    return batches, before, after


def masked(logits_RV: Tensor, kept_from_RV: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by a masked log-softmax in float64, at the loss tokens."""
    kept_RV = plain_kept(kept_from_RV, RULES).scatter(1, batch.target_T[:, None], True)
    log_p = (logits_RV.double() / TEMPERATURE).masked_fill(~kept_RV, -torch.inf).log_softmax(-1)
    entropy_T = -(log_p.exp() * log_p.masked_fill(~kept_RV, 0.0)).sum(-1)
    return log_p.gather(1, batch.target_T[:, None])[batch.mask_T, 0], entropy_T[batch.mask_T]


def read(kept: KeptLogprobs, role: str, logits_RV: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    leaf = logits_RV.clone().requires_grad_()
    lp_T, entropy_T = kept.read(role, leaf * 1.0, torch.arange(len(batch)), batch, overwrite=True)
    (lp_T.sum() + entropy_T.sum()).backward()
    assert leaf.grad is not None
    return lp_T.detach(), entropy_T.detach(), leaf.grad


def test_what_the_policy_kept_first_is_what_all_others_read() -> None:
    batches, before, after = case()
    kept = KeptLogprobs(RULES, TEMPERATURE, GRID, VOCABULARY, hold=True, reports=True)
    numbered = kept.begin(batches)
    for batch, logits_RV in zip(numbered, before, strict=True):
        read(kept, "policy", logits_RV, batch)
    shown = scalars(kept.metrics())
    assert shown["sampling/kept"] >= 1 and 0 < shown["sampling/outside_frac"] < 1 and shown["sampling/kept_mb"] > 0
    assert scalars(kept.metrics()).keys() == {"sampling/kept_mb"}, "each is counted once"
    for role in ("reference", "policy"):
        for batch, old_RV, new_RV in reversed(list(zip(numbered, before, after, strict=True))):
            lp_T, entropy_T, grad_RV = read(kept, role, new_RV, batch)
            for got_T, wanted_T in zip((lp_T, entropy_T), masked(new_RV, old_RV, batch), strict=True):
                torch.testing.assert_close(got_T[batch.mask_T].double(), wanted_T, rtol=1e-5, atol=1e-5)
                assert not got_T[~batch.mask_T].any()
            read_RV = plain_kept(old_RV, RULES).scatter(1, batch.target_T[:, None], True) & batch.mask_T[:, None]
            assert grad_RV[read_RV].all() and not grad_RV[~read_RV].any(), "only tokens that were kept have a slope"
    again = kept.begin(batches)
    with pytest.raises(AssertionError, match="the policy's pass comes first"):
        read(kept, "reference", after[0], again[0])


def test_without_a_hold_each_pass_keeps_its_own() -> None:
    batches, before, after = case()
    kept = KeptLogprobs(RULES, TEMPERATURE, GRID, VOCABULARY, hold=False, reports=True)
    [batch, _] = kept.begin(batches)
    for logits_RV in (before[0], after[0]):
        lp_T, _, _ = read(kept, "policy", logits_RV, batch)
        torch.testing.assert_close(lp_T[batch.mask_T].double(), masked(logits_RV, logits_RV, batch)[0], rtol=1e-5, atol=1e-5)
    assert "sampling/kept_mb" not in kept.metrics()


def test_responses_that_are_only_compared_are_scored_and_not_counted() -> None:
    [batch, _], before, _ = case()
    kept = KeptLogprobs(RULES, TEMPERATURE, GRID, VOCABULARY, hold=True, reports=True)
    compared = batch.with_extra(compared=batch.mask_T)
    [left_out] = kept.begin([Batch(**{**vars(compared), "mask_T": torch.zeros_like(batch.mask_T)})])
    lp_T, _, _ = read(kept, "policy", before[0], left_out)
    torch.testing.assert_close(lp_T[batch.mask_T].double(), masked(before[0], before[0], batch)[0], rtol=1e-5, atol=1e-5)
    assert scalars(kept.metrics()).keys() == {"sampling/kept_mb"}
