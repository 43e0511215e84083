"""Log-probs, entropies and their gradients from vocabulary-parallel logits, against the plain formula in float64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.distillation import divergence
from megarl.config import Layout
from megarl.parallel import logprobs_chunked
from megarl.parallel.grid import Grid
from megarl.parallel.logprobs import logprob_entropy, logprob_entropy_buckets, top_buckets
from tests.rank_pool import Pool

ROWS, WIDTH = 23, 64  # rows of logits and the whole padded vocabulary
Case = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def case(dtype: torch.dtype, rows: str, vocabulary: int, sharpness: float = 5.0) -> Case:
    """Logits with garbage in the padding, the rows to score, targets, and the loss's weights of log-prob and entropy."""
    generator = torch.Generator().manual_seed(3)
    logits_RV = (torch.randn(ROWS, WIDTH, generator=generator) * sharpness).to(dtype)
    logits_RV[:, vocabulary:] = 1e4
    everything = torch.arange(ROWS)
    row_T = {
        "all": everything,
        "gaps": everything[(everything % 5 != 4) & (everything > 1)],
        "shuffled": torch.randperm(ROWS, generator=generator)[:17],
    }[rows]
    target_T = torch.randint(0, vocabulary, (len(row_T),), generator=generator)
    target_T[0], target_T[1] = vocabulary - 1, int(logits_RV[row_T[1], :vocabulary].argmax())
    weights = torch.randn(2, len(row_T), generator=generator)
    return logits_RV, row_T, target_T, weights[0], weights[1]


def plain(args: Case, temperature: float, vocabulary: int, entropy_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, in float64, by autograd; the gradient with respect to all logits."""
    logits_RV, row_T, target_T, weight_T, weight_entropy_T = args
    x = logits_RV.double().requires_grad_()
    log_p = torch.log_softmax(x[row_T, :vocabulary] / temperature, -1)
    lp_T = log_p.gather(-1, target_T[:, None]).squeeze(-1)
    entropy_T = -(log_p.exp() * log_p).sum(-1)
    (lp_T * weight_T + entropy_weight * entropy_T * weight_entropy_T).sum().backward()
    assert x.grad is not None
    return lp_T.detach(), entropy_T.detach(), x.grad


def ours(grid: Grid | None, args: Case, temperature: float, vocabulary: int, entropy_weight: float, overwrite: bool) -> list[Tensor]:
    """The same on this rank's shard; the gradient is the shard's."""
    logits_RV, row_T, target_T, weight_T, weight_entropy_T = args
    ranks, rank = (grid.layout.tp, grid.tp_rank) if grid is not None else (1, 0)
    leaf = logits_RV.chunk(ranks, dim=1)[rank].clone().requires_grad_()
    logits = leaf * 1.0  # as from an output layer, so that it may be overwritten
    group = grid.groups.tp if grid is not None else None
    lp_T, entropy_T = logprob_entropy(logits, row_T, target_T, temperature, group, vocabulary, overwrite)
    loss = (lp_T * weight_T).sum()
    if entropy_weight:
        loss = loss + entropy_weight * (entropy_T * weight_entropy_T).sum()
    loss.backward()
    assert leaf.grad is not None and lp_T.dtype == entropy_T.dtype == torch.float32
    return [lp_T.detach(), entropy_T.detach(), leaf.grad]


def close(got: list[Tensor], expected: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype) -> None:
    lp_T, entropy_T, grad_RV = got
    torch.testing.assert_close(lp_T.double(), expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy_T.double(), expected[1], rtol=1e-5, atol=1e-5)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5  # a gradient in bf16 has eight bits
    torch.testing.assert_close(grad_RV.double(), expected[2], rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", ["all", "gaps", "shuffled"])
@pytest.mark.parametrize("chunk_rows", [1, 4, 1000])
@pytest.mark.parametrize("overwrite", [False, True])
def test_one_rank_equals_the_formula(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, rows: str, chunk_rows: int, overwrite: bool
) -> None:
    for vocabulary, temperature, entropy_weight in ((WIDTH, 1.0, 0.0), (50, 0.7, 0.5)):
        monkeypatch.setattr(logprobs_chunked, "CHUNK_ELEMENTS", chunk_rows * vocabulary)
        args = case(dtype, rows, vocabulary)
        expected = plain(args, temperature, vocabulary, entropy_weight)
        got = ours(None, args, temperature, vocabulary, entropy_weight, overwrite)
        close(got, expected, dtype)
        left_out = torch.ones(ROWS, dtype=torch.bool)
        left_out[args[1]] = False
        assert bool((got[2][left_out] == 0).all()) and bool((got[2][:, vocabulary:] == 0).all())


def each(grid: Grid, several: list[tuple[Any, ...]]) -> list[list[Tensor]]:
    """`ours` with each of these arguments."""
    return [ours(grid, *arguments) for arguments in several]


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_any_vocabulary_split_equals_the_formula(pool: Pool, tp: int) -> None:
    kinds = [(torch.float32, "shuffled", 0.5), (torch.float32, "all", 0.0), (torch.bfloat16, "gaps", 0.5)]
    # Of the vocabularies, 16 leaves the last rank of two or four padding alone.
    cases = [(*kind, vocabulary) for vocabulary in (64, 50, 30, 16) for kind in kinds]
    several = [(case(dtype, rows, vocabulary), 0.9, vocabulary, weight) for dtype, rows, weight, vocabulary in cases]
    ranks = pool.run(each, Layout(ranks=tp, tp=tp), [(*arguments, True) for arguments in several])
    for (dtype, *_), arguments, results in zip(cases, several, zip(*ranks, strict=True), strict=True):
        for lp_T, entropy_T, _ in results[1:]:
            assert torch.equal(lp_T, results[0][0]) and torch.equal(entropy_T, results[0][1])
        close([*results[0][:2], torch.cat([result[2] for result in results], dim=1)], plain(*arguments), dtype)


def counted(grid: Grid, args: Case, chunk_elements: int) -> list[str]:
    """The reductions of forward and backward."""
    seen: list[str] = []
    reduce = torch.distributed.all_reduce

    def count(tensor: Tensor, **settings: Any) -> object:
        seen.append(f"{tensor.numel()}")
        return reduce(tensor, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_reduce", count)
        patch.setattr(logprobs_chunked, "CHUNK_ELEMENTS", chunk_elements)
        ours(grid, args, 1.0, WIDTH, 0.5, False)
    return seen


def test_ranks_exchange_four_numbers_a_token_and_no_logits(pool: Pool) -> None:
    args = case(torch.float32, "all", WIDTH)
    for seen in pool.run(counted, Layout(ranks=2, tp=2), args, 64):
        assert seen == [str(ROWS), str(3 * ROWS)]


def test_confident_and_hopeless_tokens_stay_exact() -> None:
    """Differences of logits of thousands: log-probs near 0 and far below float32's smallest exponent."""
    args = case(torch.float32, "all", WIDTH, sharpness=2000.0)
    got = ours(None, args, 1.0, WIDTH, 0.5, False)
    assert all(bool(tensor.isfinite().all()) for tensor in got)
    assert float(got[0][1]) == 0 and float(got[0].min()) < -1000
    close(got, plain(args, 1.0, WIDTH, 0.5), torch.float32)


def test_gradient_of_a_likely_token_is_rounded_once() -> None:
    """The target's gradient is 1 - p, here 7e-4: not 1 less a p that bf16 has rounded to 1."""
    args = (torch.tensor([[8.0, 0.0, 0.0]]).bfloat16(), torch.tensor([0]), torch.tensor([0]), torch.ones(1), torch.zeros(1))
    grad = ours(None, args, 1.0, 3, 0.0, False)[2].double()
    torch.testing.assert_close(grad, plain(args, 1.0, 3, 0.0)[2], rtol=4e-3, atol=0)


def test_no_row_to_score_gives_zero_gradient() -> None:
    logits = torch.randn(3, WIDTH).requires_grad_()
    none = torch.empty(0, dtype=torch.int64)
    lp_T, entropy_T = logprob_entropy(logits, none, none)
    (lp_T.sum() + entropy_T.sum()).backward()
    assert len(lp_T) == len(entropy_T) == 0 and logits.grad is not None and not logits.grad.any()


def test_without_gradients_nothing_is_kept() -> None:
    logits_RV, row_T, target_T, *_ = case(torch.float32, "all", WIDTH)
    with torch.no_grad():
        lp_T, entropy_T = logprob_entropy(logits_RV.requires_grad_(), row_T, target_T)
    assert lp_T.grad_fn is None and entropy_T.grad_fn is None


def test_overwritten_logits_cannot_be_used_again() -> None:
    logits_RV, row_T, target_T, *_ = case(torch.float32, "all", WIDTH)
    logits = logits_RV.requires_grad_() * 1.0
    square = logits.square()  # its backward needs the logits
    lp_T, _ = logprob_entropy(logits, row_T, target_T, overwrite=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (square.sum() + lp_T.sum()).backward()


def plain_buckets(args: Case, token_TK: Tensor, weight_TB: Tensor, temperature: float, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The buckets' log-probs by their definition, in float64, and the gradient of a sum of them, log-probs and entropies."""
    logits_RV, row_T, target_T, weight_T, weight_entropy_T = args
    x = logits_RV.double().requires_grad_()
    log_p = torch.log_softmax(x[row_T, :vocabulary] / temperature, -1)
    others_TV = log_p.scatter(1, token_TK, -torch.inf)
    lp_TB = torch.cat([log_p.gather(1, token_TK), others_TV.logsumexp(1, keepdim=True)], dim=1)
    entropy_T = -(log_p.exp() * log_p).sum(-1)
    lp_T = log_p.gather(-1, target_T[:, None]).squeeze(-1)
    ((lp_TB * weight_TB).sum() + (lp_T * weight_T).sum() + (entropy_T * weight_entropy_T).sum()).backward()
    assert x.grad is not None
    return lp_TB.detach(), x.grad


def buckets(grid: Grid | None, args: Case, count: int, weight_TB: Tensor, temperature: float, vocabulary: int) -> list[Tensor]:
    """The likeliest tokens, found and scored on this rank's shard; the gradient is the shard's."""
    logits_RV, row_T, target_T, weight_T, weight_entropy_T = args
    ranks, rank, group = (grid.layout.tp, grid.tp_rank, grid.groups.tp) if grid is not None else (1, 0, None)
    leaf = logits_RV.chunk(ranks, dim=1)[rank].clone().requires_grad_()
    logits = leaf * 1.0
    token_TK, found_TB = top_buckets(logits.detach(), row_T, count, vocabulary, temperature, group, vocabulary)
    lp_T, entropy_T, lp_TB = logprob_entropy_buckets(logits, row_T, target_T, token_TK, temperature, group, vocabulary, overwrite=True)
    assert torch.equal(found_TB, lp_TB) and torch.equal(logits, leaf)
    ((lp_TB * weight_TB).sum() + (lp_T * weight_T).sum() + (entropy_T * weight_entropy_T).sum()).backward()
    assert leaf.grad is not None
    return [token_TK, lp_TB.detach(), leaf.grad]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_buckets_of_any_vocabulary_split_equal_the_formula(pool: Pool, tp: int, count: int) -> None:
    for dtype, vocabulary in ((torch.float32, 50), (torch.bfloat16, 64), (torch.float32, 30)):
        args = case(dtype, "shuffled", vocabulary)
        distinct = args[0] + (torch.arange(args[0].shape[1]) * 1e-4).to(dtype)  # bfloat16 has ties
        args = (distinct, *args[1:])
        weight_TB = torch.randn(len(args[1]), count + 1, generator=torch.Generator().manual_seed(1))
        ranks = pool.run(buckets, Layout(ranks=tp, tp=tp), args, count, weight_TB, 0.9, vocabulary)
        token_TK, lp_TB, _ = ranks[0]
        assert all(torch.equal(rank[0], token_TK) and torch.equal(rank[1], lp_TB) for rank in ranks)
        best_TK = args[0][args[1], :vocabulary].float().topk(count, dim=1).values
        assert torch.equal(args[0][args[1]].float().gather(1, token_TK), best_TK)
        expected_TB, gradient_RV = plain_buckets(args, token_TK, weight_TB, 0.9, vocabulary)
        torch.testing.assert_close(lp_TB.double(), expected_TB, rtol=1e-5, atol=1e-5)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(torch.cat([rank[2] for rank in ranks], dim=1).double(), gradient_RV, rtol=tolerance, atol=tolerance)


def test_a_remainder_far_below_float32_is_exact_and_one_of_nothing_has_no_slope() -> None:
    logits_RV, row_T = torch.tensor([[30.0, 0.0, -1.0, 0.5]]), torch.tensor([0])
    token_TK, lp_TB = top_buckets(logits_RV, row_T, 1, 4)
    rest = torch.logsumexp(logits_RV[0, 1:].double(), 0) - torch.logsumexp(logits_RV[0].double(), 0)
    assert int(token_TK) == 0 and float(lp_TB[0, 1]) == pytest.approx(float(rest), rel=1e-6), "1 - p is 0 in float32"
    leaf = torch.tensor([[1.0, 0.0, -1.0, 0.5]]).requires_grad_()
    *_, all_TB = logprob_entropy_buckets(leaf * 1.0, row_T, row_T, torch.tensor([[0, 1, 2, 3]]))
    assert float(all_TB.detach()[0, -1]) < -1e29
    divergence(all_TB, torch.cat([leaf.detach().flip(1).log_softmax(1), torch.tensor([[-1e30]])], 1), "reverse_kl").sum().backward()
    assert leaf.grad is not None and bool(leaf.grad.isfinite().all()) and float(leaf.grad.abs().max()) > 0.1
