"""Choices of tokens over a whole mini-batch: the same tokens however they are split over ranks and micro-batches.

A choice depends on all tokens of the mini-batch, so it is made before an update, at the weights that the update starts from. Ranks
exchange sums alone: a bound between chosen and other tokens is found by bisection over all 64-bit keys, in 64 sums of two numbers.

Axes: T entries of whole sequences, X some of them.
"""

from __future__ import annotations

from collections.abc import Callable

from megarl.algorithms.ops import SumOver
from megarl.lazy_torch import Tensor, torch

LEAST, MOST = -(1 << 63), (1 << 63) - 1


def keys(value_T: Tensor) -> Tensor:
    """Integers in the order of these numbers, int64 [T]; none is NaN."""
    bits_T = (value_T.double() + 0.0).view(torch.int64)  # -0 + 0 is 0
    return torch.where(bits_T < 0, bits_T ^ MOST, bits_T)


def covariances(logp_T: Tensor, advantage_T: Tensor, mask_T: Tensor, sum_over: SumOver) -> tuple[Tensor, int]:
    """(log pi - mean log pi)(A - mean A) of each token, the means over the loss tokens of all ranks (arXiv:2505.22617).

    Args:
        logp_T: float [T], log pi; masked entries are not read, here and in the advantages.
        advantage_T: float [T], A.
        mask_T: bool [T], true at loss tokens.
        sum_over: sums over the ranks that hold the mini-batch.

    Returns:
        float64 [T], 0 at masked entries, and the number of loss tokens of all ranks.
    """
    lp_T, a_T = (torch.where(mask_T, value_T.double(), 0.0) for value_T in (logp_T, advantage_T))
    count, lp, a = sum_over(torch.stack([mask_T.sum(dtype=torch.float64), lp_T.sum(), a_T.sum()])).tolist()
    return ((lp_T - lp / max(count, 1)) * (a_T - a / max(count, 1))).masked_fill(~mask_T, 0.0), int(count)


def last_key(key_X: Tensor, value_X: Tensor, fits: Callable[[float, float], bool], sum_over: SumOver) -> int:
    """The largest key for which the tokens up to it fit: collective, in 64 sums whatever the numbers are.

    Args:
        key_X: int64 [X], this rank's keys.
        value_X: float [X], a number for each.
        fits: given the number of tokens of all ranks with a key up to some, and the sum of their values; once false, false for all larger.
        sum_over: sums over the ranks that hold the mini-batch.

    Returns:
        The key; `MOST` if all tokens fit.
    """
    order_X = key_X.argsort()
    key_X, total_X = key_X[order_X], torch.cat([value_X.new_zeros(1), value_X[order_X].cumsum(0)]).double()
    low, high = LEAST, MOST
    while low < high:
        middle = low + (high - low + 1) // 2
        count_below = torch.searchsorted(key_X, torch.tensor(middle, device=key_X.device), right=True)
        count, total = sum_over(torch.stack([count_below.double(), total_X[count_below]])).tolist()
        low, high = (middle, high) if fits(count, total) else (low, middle - 1)
    return low


def smallest(key_T: Tensor, lot_T: Tensor, among_T: Tensor, count: int, sum_over: SumOver) -> Tensor:
    """Choose the tokens of all ranks with the smallest keys, of equal keys those with the smallest lots.

    Args:
        key_T: int64 [T], the keys.
        lot_T: int64 [T], the lots that the tokens have drawn, all different.
        among_T: bool [T], the tokens to choose from.
        count: how many of all ranks' tokens to choose; if there are fewer, all are.
        sum_over: sums over the ranks that hold the mini-batch.

    Returns:
        bool [T].
    """

    def within(bound_T: Tensor, some_T: Tensor, most: int) -> int:
        key_X = bound_T[some_T]
        return last_key(key_X, torch.zeros_like(key_X, dtype=torch.float64), lambda held, _: held <= most, sum_over)

    bound = within(key_T, among_T, count)
    chosen_T = among_T & (key_T <= bound)
    if bound == MOST:
        return chosen_T
    equal_T = among_T & (key_T == bound + 1)  # more than there is room for
    room = count - int(sum_over(chosen_T.sum(dtype=torch.float64)))
    return chosen_T | (equal_T & (lot_T <= within(lot_T, equal_T, room)))
