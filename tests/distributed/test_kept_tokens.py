"""Kept tokens and the log-probs over them, from vocabulary-parallel logits, against a sorted vocabulary in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config import Layout, Truncation
from megarl.parallel import kept_tokens as module
from megarl.parallel.grid import Grid
from megarl.parallel.kept_tokens import KeptTokens, kept_logprob_entropy, kept_tokens
from tests.rank_pool import Pool

ROWS, WIDTH, VOCABULARY, TEMPERATURE = 23, 64, 45, 0.7  # the last of four ranks holds padding alone
RULES = [
    Truncation(top_p=0.9),
    Truncation(top_k=20),
    Truncation(min_p=0.05),
    Truncation(min_p=0.02, top_k=7, top_p=0.8),
    Truncation(top_k=WIDTH),
    Truncation(top_p=1e-6),
]


def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits of the sampling and of the trained policy with garbage in the padding, rows, and targets of which some are unlikely."""
    generator = torch.Generator().manual_seed(3)
    old_RV = torch.randn(ROWS, WIDTH, generator=generator) * 2
    new_RV = old_RV + 0.3 * torch.randn(ROWS, WIDTH, generator=generator)
    old_RV[:, VOCABULARY:] = new_RV[:, VOCABULARY:] = 1e4
    row_T = torch.randperm(ROWS, generator=generator)[:17]
    target_T = torch.randint(0, VOCABULARY, (17,), generator=generator)
    target_T[::2] = old_RV[row_T[::2], :VOCABULARY].argmax(-1)
    return old_RV, new_RV, row_T, target_T


def plain_kept(logits_TV: Tensor, rules: Truncation) -> Tensor:
    """The rules one after the other, on sorted probabilities, bool [T, V]."""
    x = logits_TV.double() / TEMPERATURE
    p = x.softmax(-1)
    x = x.masked_fill(p < rules.min_p * p.amax(-1, keepdim=True), -torch.inf)
    if 0 < rules.top_k < x.shape[1]:
        x = x.masked_fill(x < x.topk(rules.top_k).values[:, -1:], -torch.inf)
    order = x.softmax(-1).sort(-1, descending=True)
    likely = (order.values.cumsum(-1) - order.values < rules.top_p).gather(1, order.indices.argsort(-1))
    return likely & x.isfinite()


def results(grid: Grid | None, rules: Truncation, double: bool = False) -> list[Tensor]:
    """This rank's kept mask, what was outside, log-probs, entropies, and the gradient of this rank's shard."""
    old_RV, new_RV, row_T, target_T = case()
    ranks, rank = (grid.layout.tp, grid.tp_rank) if grid is not None else (1, 0)
    group = grid.groups.tp if grid is not None else None
    kept = kept_tokens(old_RV.chunk(ranks, 1)[rank], row_T, target_T, rules, TEMPERATURE, group, VOCABULARY)
    leaf = new_RV.chunk(ranks, 1)[rank].to(torch.float64 if double else torch.float32).clone().requires_grad_()
    lp_T, entropy_T = kept_logprob_entropy(leaf, row_T, target_T, kept, TEMPERATURE, group)
    weight_T = torch.linspace(-1, 1, len(row_T))
    ((lp_T * weight_T).sum() + 0.5 * (entropy_T * weight_T.flip(0)).sum()).backward()
    assert leaf.grad is not None
    mask_TV = torch.zeros(len(row_T), leaf.shape[1], dtype=torch.bool)
    mask_TV[kept.entry_K, kept.column_K] = True
    return [mask_TV, kept.outside_T, lp_T.detach(), entropy_T.detach(), leaf.grad]


def plain(rules: Truncation) -> list[Tensor]:
    """The same by autograd of a masked log-softmax in float64."""
    old_RV, new_RV, row_T, target_T = case()
    kept_TV = torch.zeros(len(row_T), WIDTH, dtype=torch.bool)
    kept_TV[:, :VOCABULARY] = plain_kept(old_RV[row_T, :VOCABULARY], rules)
    outside_T = ~kept_TV.gather(1, target_T[:, None])[:, 0]
    kept_TV.scatter_(1, target_T[:, None], True)
    leaf = new_RV.double().requires_grad_()
    log_p = (leaf[row_T] / TEMPERATURE).masked_fill(~kept_TV, -torch.inf).log_softmax(-1)
    lp_T = log_p.gather(1, target_T[:, None])[:, 0]
    entropy_T = -(log_p.exp() * log_p.masked_fill(~kept_TV, 0.0)).sum(-1)
    weight_T = torch.linspace(-1, 1, len(row_T))
    ((lp_T * weight_T).sum() + 0.5 * (entropy_T * weight_T.flip(0)).sum()).backward()
    assert leaf.grad is not None
    return [kept_TV, outside_T, lp_T.detach(), entropy_T.detach(), leaf.grad]


@pytest.mark.parametrize("rules", RULES, ids=str)
@pytest.mark.parametrize("chunk", [WIDTH * 4, 1 << 24])
def test_one_rank_equals_a_sorted_vocabulary(monkeypatch: pytest.MonkeyPatch, rules: Truncation, chunk: int) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    expected = plain(rules)
    for got, wanted in zip(results(None, rules, double=True), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
    for got, wanted in zip(results(None, rules), expected, strict=True):
        torch.testing.assert_close(got.double(), wanted.double(), rtol=1e-5, atol=1e-5)


def test_tokens_tied_at_a_threshold_are_kept() -> None:
    logits_RV = torch.tensor([[2.0, 1.0, 1.0, -0.0, 0.0, -3.0]])
    for rules, count in ((Truncation(top_k=2), 3), (Truncation(top_k=4), 5), (Truncation(top_p=0.6), 3), (Truncation(top_k=1), 1)):
        kept = kept_tokens(logits_RV, torch.tensor([0]), torch.tensor([0]), rules)
        assert kept.column_K.tolist() == list(range(count)), rules


def test_a_gradient_over_the_logits_has_the_same_bits() -> None:
    old_RV, new_RV, row_T, target_T = case()
    kept, grads = kept_tokens(old_RV, row_T, target_T, RULES[3], TEMPERATURE, None, VOCABULARY), []
    for overwrite in (False, True):
        leaf = new_RV.clone().requires_grad_()
        logits_RV = leaf * 1.0
        lp_T, entropy_T = kept_logprob_entropy(logits_RV, row_T, target_T, kept, TEMPERATURE, overwrite=overwrite)
        (lp_T.square().sum() + entropy_T.sum()).backward()
        assert leaf.grad is not None and torch.equal(logits_RV.detach(), leaf.grad if overwrite else new_RV)
        grads.append(leaf.grad)
    assert torch.equal(*grads) and grads[0].any()


def test_no_entries() -> None:
    none = torch.empty(0, dtype=torch.int64)
    logits_RV = torch.zeros(2, 4, requires_grad=True)
    kept = kept_tokens(logits_RV, none, none, RULES[0])
    assert isinstance(kept, KeptTokens) and kept.entry_K.numel() == 0
    kept_logprob_entropy(logits_RV, none, none, kept)[0].sum().backward()
    assert logits_RV.grad is not None and not logits_RV.grad.any()


def each(grid: Grid) -> tuple[list[list[Tensor]], list[int]]:
    """The results of all rules, and the sizes of the reductions of the last of them."""
    seen: list[int] = []
    reduce = torch.distributed.all_reduce

    def count(tensor: Tensor, **settings: Any) -> object:
        seen.append(tensor.numel())
        return reduce(tensor, **settings)

    several = [results(grid, rules) for rules in RULES]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", count)
        results(grid, RULES[2])
    return several, seen


@pytest.mark.parametrize("tp", [2, 4])
def test_any_vocabulary_split_equals_a_sorted_vocabulary(pool: Pool, tp: int) -> None:
    ranks = pool.run(each, Layout(ranks=tp, tp=tp))
    for index, rules in enumerate(RULES):
        mine = [several[index] for several, _ in ranks]
        for mask_outside_lp_entropy in mine[1:]:
            for here, there in zip(mask_outside_lp_entropy[1:4], mine[0][1:4], strict=True):
                assert torch.equal(here, there), rules
        mask_TV, grad_RV = (torch.cat([result[axis] for result in mine], 1) for axis in (0, 4))
        expected = plain(rules)
        assert torch.equal(mask_TV, expected[0]) and torch.equal(mine[0][1], expected[1]), rules
        for got, wanted in zip([*mine[0][2:4], grad_RV], expected[2:], strict=True):
            torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)


def test_min_p_exchanges_two_numbers_a_token_and_the_log_probs_four(pool: Pool) -> None:
    for _, seen in pool.run(each, Layout(ranks=2, tp=2)):
        assert seen == [17, 17, 17, 3 * 17]
