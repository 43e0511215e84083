"""Generalised advantage estimation, discounted rewards-to-go, and whitening, over packed sequences.

Axes: T entries, N sequences. Every recursion here runs backwards over the loss tokens of a sequence; other tokens (prompt, tool output,
padding) are stepped over: the next state of a loss token is the next loss token.

All are one linear recurrence, H_t = x_t + a_t H_{t+1}, with a_t = 1 at masked tokens and 0 at the last entry of a sequence, and are solved
by odd-even reduction: neighbours are merged in pairs, the half as long recurrence is solved, the odd entries follow. That is O(T) work in
log2(T) vectorised steps, whatever the lengths and masks (nothing is padded or gathered), and no power of a coefficient is ever divided by,
so nothing under- or overflows. The coefficients are kept as their loss 1 - a: in float32, (1 - 1e-5)^30000 from a rounded factor is wrong
by 1e-3, from a rounded loss by 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.batch import Batch


@torch.no_grad()
def gae(reward_T: Tensor, value_T: Tensor, batch: Batch, gamma: float, lam: float | Tensor) -> Tensor:
    """A_t = delta_t + gamma lam A_{t+1} with delta_t = r_t + gamma V_{t+1} - V_t (arXiv:1506.02438, eq. 16).

    V and A after a sequence's last loss token are 0. reward_T, value_T: float [T] at the entries of `batch`, which holds every entry of each
    of its sequences, in any order; masked entries may hold any garbage. gamma in [0, 1]; lam in [0, 1], one for all or float [N], one a
    sequence (`length_adaptive_lambda`).
    Returns [T], 0 at masked entries, detached, float32 (float64 for float64 values); A + V is the lambda-return.
    Exact up to the rounding of sums for gamma lam = 1 (A = rewards to go - V) and for lam = 0 (A = delta).
    Raises ValueError where gamma or lam is out of range or a sequence is not whole.
    """
    # With H_t = (1 - lam) V_t + lam (r_t + gamma H_{t+1}), what a state is worth to the one before it: A_t = r_t + gamma H_{t+1} - V_t.
    _check_unit("gamma", gamma)
    _check_unit("lam", lam)
    if isinstance(lam, Tensor) and lam.shape != batch.length_N.shape:
        raise ValueError(f"gae: lam has shape {list(lam.shape)} for {len(batch.length_N)} sequences")
    if not len(batch):
        return torch.zeros_like(value_T)
    dtype = torch.float64 if value_T.dtype == torch.float64 else torch.float32
    chain = _Chain.of(batch)
    reward_T, value_T, mask_T = chain.sort(reward_T.to(dtype)), chain.sort(value_T.to(dtype)), chain.sort(batch.mask_T)
    if isinstance(lam, Tensor):
        lam_N, seq_T = lam.to(value_T.device, torch.float64), chain.sort(batch.seq_T)
        h_T = torch.lerp(reward_T, value_T, (1 - lam_N).to(dtype)[seq_T])
        loss_T = (1 - gamma * lam_N).to(dtype)[seq_T]
    else:
        h_T = torch.lerp(reward_T, value_T, 1 - lam)
        loss_T = torch.full_like(h_T, 1 - gamma * lam)
    _recur(_steps_over(loss_T, mask_T, chain.last_N), h_T.masked_fill_(~mask_T, 0.0))
    h_T[chain.first_N] = 0.0  # what follows the last entry of the sequence before is nothing
    advantage_T = torch.empty_like(h_T)
    torch.add(reward_T[:-1], h_T[1:], alpha=gamma, out=advantage_T[:-1])
    advantage_T[-1] = reward_T[-1]
    return chain.unsort(advantage_T.sub_(value_T).masked_fill_(~mask_T, 0.0))


@torch.no_grad()
def discounted_to_go(reward_T: Tensor, batch: Batch, gamma: float) -> Tensor:
    """G_t = sum over loss tokens k >= t of the sequence of gamma^(k - t) r_k, k and t counting loss tokens.

    Shapes, types, garbage and errors as in `gae`. Returns [T], 0 at masked entries.
    """
    _check_unit("gamma", gamma)
    if not len(batch):
        return torch.zeros_like(reward_T)
    chain = _Chain.of(batch)
    mask_T = chain.sort(batch.mask_T)
    total_T = chain.sort(reward_T.to(torch.float64 if reward_T.dtype == torch.float64 else torch.float32)).masked_fill(~mask_T, 0.0)
    _recur(_steps_over(torch.full_like(total_T, 1 - gamma), mask_T, chain.last_N), total_T)
    return chain.unsort(total_T.masked_fill_(~mask_T, 0.0))


def length_adaptive_lambda(count_N: Tensor, alpha: float) -> Tensor:
    """VAPO's lam = 1 - 1 / (alpha l), l loss tokens (arXiv:2504.05118, sec. 4.2), floored at 0 for l < 1 / alpha. float64 [N].

    count_N: int [N]; no loss tokens give 0. Raises ValueError unless alpha > 0.
    """
    if not alpha > 0:
        raise ValueError(f"length-adaptive GAE: alpha is {alpha:g}, must be above 0")
    return (1 - 1 / (alpha * count_N.double())).clamp(min=0.0)


@torch.no_grad()
def whiten(value_T: Tensor, mask_T: Tensor, sum_over: Callable[[Tensor], Tensor]) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the loss tokens of all ranks, var with n - 1 (0 for a single token); 0 at masked entries.

    value_T: float [T], garbage allowed where mask_T is false; `sum_over` sums a float64 tensor over the ranks that hold the batch.
    Returns [T] of value_T's type. The sums are float64 and about the mean, so any split of the tokens gives the same result.
    """
    kept_T = value_T.masked_fill(~mask_T, 0.0)
    count, total = sum_over(torch.stack([mask_T.sum(dtype=torch.float64), kept_T.sum(dtype=torch.float64)])).unbind()
    mean = total / count.clamp(min=1)
    centred_T = kept_T.double().sub_(mean).masked_fill_(~mask_T, 0.0)
    variance = sum_over(centred_T.square().sum()) / (count - 1).clamp(min=1)
    return centred_T.mul_((variance + 1e-8).rsqrt()).to(value_T.dtype)


@dataclass(frozen=True)
class _Chain:
    """The entries of whole sequences, one sequence after the other, each in order of position."""

    order_T: Tensor | None  # the batch's entries in that order; None where they already are
    first_N: Tensor  # int64, first entry of each sequence that has any
    last_N: Tensor

    @staticmethod
    def of(batch: Batch) -> _Chain:
        """Finds the order; the usual one, as `pack` makes it, is only checked. ValueError where a sequence is not whole."""
        chain = _Chain._over(batch.length_N[batch.length_N > 0])
        if chain._holds(batch.seq_T, batch.position_T, (batch.length_N > 0).nonzero().squeeze(1)):
            return chain
        held_N = torch.bincount(batch.seq_T, minlength=len(batch.length_N))
        if partial := ((held_N > 0) & (held_N != batch.length_N)).nonzero().flatten().tolist():
            n = partial[0]
            raise ValueError(f"whole sequences are needed: sequence {n} has {int(held_N[n])} of its {int(batch.length_N[n])} entries")
        sequence_N, chain = held_N.nonzero().squeeze(1), _Chain._over(held_N[held_N > 0])
        if chain._holds(batch.seq_T, batch.position_T, sequence_N):
            return chain
        order_T = torch.argsort(batch.seq_T * int(batch.length_N.max()) + batch.position_T)
        if not chain._holds(batch.seq_T[order_T], batch.position_T[order_T], sequence_N):
            raise ValueError("whole sequences are needed: an entry is there twice")
        return _Chain(order_T, chain.first_N, chain.last_N)

    @staticmethod
    def _over(length_N: Tensor) -> _Chain:
        end_N = length_N.cumsum(0)
        return _Chain(None, end_N - length_N, end_N - 1)

    def _holds(self, seq_T: Tensor, position_T: Tensor, sequence_N: Tensor) -> bool:
        """Whether the entries lie in this chain's order, sequence after sequence."""
        if not len(sequence_N) or int(self.last_N[-1]) != len(seq_T) - 1:
            return False
        ends = (
            torch.equal(seq_T[self.first_N], sequence_N)
            and torch.equal(seq_T[self.last_N], sequence_N)
            and not position_T[self.first_N].any()
        )
        if not ends:
            return False
        # Sequence numbers never fall, and positions rise but from one sequence to the next.
        rises = position_T[1:] > position_T[:-1]
        rises[self.first_N[1:] - 1] = True
        return bool(rises.all()) and bool((seq_T[1:] >= seq_T[:-1]).all())

    def sort(self, value_T: Tensor) -> Tensor:
        return value_T if self.order_T is None else value_T[self.order_T]

    def unsort(self, value_T: Tensor) -> Tensor:
        return value_T if self.order_T is None else torch.empty_like(value_T).index_copy_(0, self.order_T, value_T)


def _steps_over(loss_T: Tensor, mask_T: Tensor, last_N: Tensor) -> Tensor:
    """The coefficients' losses: nothing is lost at masked tokens, everything at the end of a sequence. In place."""
    loss_T.masked_fill_(~mask_T, 0.0)
    loss_T[last_N] = 1.0
    return loss_T


def _recur(loss_T: Tensor, x_T: Tensor) -> None:
    """Solves H_t = x_t + (1 - loss_t) H_{t+1}, H after the end = 0, in place of x."""
    if len(x_T) == 1:
        return
    pairs = len(x_T) // 2
    keep_T = 1 - loss_T
    left = slice(0, 2 * pairs, 2)
    # A pair as one step: x + a x', and the loss 1 - a a' = loss + a loss'.
    x_P = torch.addcmul(x_T[left], keep_T[left], x_T[1::2])
    loss_P = torch.addcmul(loss_T[left], keep_T[left], loss_T[1::2])
    if len(x_T) % 2:
        x_P, loss_P = torch.cat([x_P, x_T[-1:]]), torch.cat([loss_P, loss_T[-1:]])
    _recur(loss_P, x_P)
    x_T[0::2] = x_P
    followed = len(x_P) - 1
    x_T[1::2][:followed].addcmul_(keep_T[1::2][:followed], x_P[1:])


def _check_unit(name: str, value: float | Tensor) -> None:
    low, high = (float(value.min()), float(value.max())) if isinstance(value, Tensor) and len(value) else (value, value)
    if not (low >= 0 and high <= 1):
        raise ValueError(f"gae: {name} is {low if low < 0 else high:g}, must be from 0 to 1")
