"""Generalised advantage estimation, discounted rewards-to-go, and whitening, over packed sequences.

Axes: T entries, N sequences. Every recursion here runs backwards over the loss tokens of a sequence; other tokens (prompt, tool output,
padding) are skipped: the next state of a loss token is the next loss token.

All of them are the same linear recurrence, H_t = x_t + a_t H_{t+1}, with a_t = 1 at masked tokens and 0 at the last entry of a sequence.
It is solved by odd-even reduction: neighbours are merged in pairs, the half-length recurrence is solved, and the odd entries follow from
it. That is O(T) work in log2(T) vectorised steps, whatever the lengths and masks (nothing is padded or gathered), and without dividing by
powers of coefficients, so nothing overflows or underflows. The coefficients are stored as their loss 1 - a: in float32, (1 - 1e-5)^30000
is off by 1e-3 with a rounded factor, but only by 1e-6 with a rounded loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from megarl.batch import Batch
from megarl.lazy_torch import Tensor, torch

PART = 1 << 19  # entries (of whole sequences) solved at a time, in buffers that are reused: no fresh pages for each operation

Variance = Annotated[
    Literal["sample", "population"],
    Field(description="The variance that whitening divides by: with n - 1 (sample) or with n (population)."),
]


def gae(reward_T: Tensor, value_T: Tensor, batch: Batch, gamma: float, lam: float | Tensor, *, least: float = 0.0) -> Tensor:
    """Generalised advantage estimation: A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t (arXiv:1506.02438, eq. 16).

    V and A after a sequence's last loss token are 0. Exact up to the rounding of sums for gamma lam = 1 (A = rewards to go - V) and for
    lam = 0 (A = delta).

    Args:
        reward_T: float [T], the reward of each entry of `batch`; masked entries are ignored.
        value_T: float [T], the critic's value of each entry; masked entries are ignored.
        batch: whole sequences, their entries in any order.
        gamma: discount, in [0, 1].
        lam: in [0, 1]: a number for all sequences, or float [N], one for each (`length_adaptive_lambda`).
        least: the smallest lam that is accepted.

    Returns:
        [T], 0 at masked entries, detached, float32 (float64 for float64 values). A + V is the lambda-return.

    Raises:
        ValueError: gamma or lam is out of range, or a sequence is not whole.
    """
    with torch.no_grad():
        # With H_t = (1 - lam) V_t + lam (r_t + gamma H_{t+1}), the worth of a state to the one before it: A_t = r_t + gamma H_{t+1} - V_t.
        _check_unit("gamma", gamma)
        _check_unit("lam", lam, least)
        lam_N = torch.as_tensor(lam, dtype=torch.float64, device=value_T.device)
        if lam_N.ndim and lam_N.shape != batch.length_N.shape:
            raise ValueError(f"gae: lam has shape {list(lam_N.shape)} for {len(batch.length_N)} sequences")
        chain = _Chain.of(batch)
        dtype = _float(value_T)
        reward_T, value_T, mask_T, seq_T = (chain.sort(x) for x in (reward_T.to(dtype), value_T.to(dtype), batch.mask_T, batch.seq_T))
        mix_N, loss_N = (1 - lam_N).to(dtype), (1 - gamma * lam_N).to(dtype)
        advantage_T = torch.empty_like(value_T)
        work = _Work(chain.longest_part, advantage_T)
        for part, last_N in chain.parts():
            reward, value, out = reward_T[part], value_T[part], advantage_T[part]
            h, loss = work.begin(mask_T[part])
            torch.lerp(reward, value, _at(mix_N, seq_T[part], loss), out=h)
            if gamma != 1 or not lam_N.ndim:  # otherwise the loss is 1 - lam, which `_at` has just left in the buffer
                loss.copy_(_at(loss_N, seq_T[part], loss))
            work.solve(last_N)
            h[last_N[:-1] + 1] = 0.0  # nothing follows a sequence's last entry
            torch.add(reward[:-1], h[1:], alpha=gamma, out=out[:-1])
            out[-1] = reward[-1]
            work.only(out.sub_(value))
        return chain.unsort(advantage_T)


def discounted_to_go(reward_T: Tensor, batch: Batch, gamma: float) -> Tensor:
    """G_t = sum over the sequence's loss tokens k >= t of gamma^(k - t) r_k, where k and t count loss tokens.

    Args:
        reward_T: float [T], the reward of each entry of `batch`; masked entries are ignored.
        batch: whole sequences, their entries in any order.
        gamma: discount, in [0, 1].

    Returns:
        [T], 0 at masked entries, float32 (float64 for float64 rewards).

    Raises:
        ValueError: gamma is out of range, or a sequence is not whole.
    """
    with torch.no_grad():
        _check_unit("gamma", gamma)
        chain = _Chain.of(batch)
        reward_T, mask_T = chain.sort(reward_T.to(_float(reward_T))), chain.sort(batch.mask_T)
        total_T = torch.empty_like(reward_T)
        work = _Work(chain.longest_part, total_T)
        for part, last_N in chain.parts():
            total, loss = work.begin(mask_T[part])
            total.copy_(reward_T[part])
            loss.fill_(1 - gamma)
            work.solve(last_N)
            total_T[part] = work.only(total)
        return chain.unsort(total_T)


def length_adaptive_lambda(count_N: Tensor, alpha: float, floor: float | None = 0.0) -> Tensor:
    """VAPO's lam = 1 - 1 / (alpha l) for l loss tokens (arXiv:2504.05118, sec. 4.2), which is below 0 for l < 1 / alpha.

    Args:
        count_N: int [N], l of each sequence; lam is 0 without loss tokens.
        alpha: above 0.
        floor: the smallest lam; None: the formula's own.

    Returns:
        float64 [N].

    Raises:
        ValueError: alpha is not above 0.
    """
    if not alpha > 0:
        raise ValueError(f"length-adaptive GAE: alpha is {alpha:g}, must be above 0")
    lam_N = 1 - 1 / (alpha * count_N.double())
    return torch.where(count_N > 0, lam_N if floor is None else lam_N.clamp(min=floor), 0.0)


def whiten(value_T: Tensor, mask_T: Tensor, sum_over: Callable[[Tensor], Tensor], variance: Variance = "sample") -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over the loss tokens of all ranks, var 0 for a single token.

    The sums are in float64 and about the mean, so any split of the tokens over ranks gives the same result.

    Args:
        value_T: float [T], x; may hold garbage where mask_T is false.
        mask_T: bool [T], true at loss tokens.
        sum_over: sums a float64 tensor over the ranks that hold the batch.
        variance: with n - 1 (sample) or n (population).

    Returns:
        [T] of value_T's type, 0 at masked entries.
    """
    with torch.no_grad():
        centred_T = value_T.to(_float(value_T), copy=True)
        bits_T = _bits(mask_T, centred_T.dtype)
        _only(bits_T, centred_T)
        count, total = sum_over(torch.stack([mask_T.sum(dtype=torch.float64), centred_T.sum(dtype=torch.float64)])).unbind()
        _only(bits_T, centred_T.sub_(total / count.clamp(min=1)))
        divisor = count - 1 if variance == "sample" else count
        var = sum_over(centred_T.square().sum(dtype=torch.float64)) / divisor.clamp(min=1)
        return centred_T.mul_((var + 1e-8).rsqrt()).to(value_T.dtype)


@dataclass(frozen=True)
class _Chain:
    """The entries of whole sequences, one sequence after another, each in order of position. Here N counts the non-empty ones."""

    order_T: Tensor | None  # the batch's entries in that order; None: they already are in it
    first_N: Tensor  # int64, first entry of each sequence in that order
    last_N: Tensor

    @staticmethod
    def of(batch: Batch) -> _Chain:
        """Find the order, which is guaranteed by `pack` or checked here. Raise ValueError if a sequence is not whole."""
        if batch.in_order:
            return _Chain._over(batch.length_N[batch.length_N > 0])
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
        if len(seq_T) != (int(self.last_N[-1]) + 1 if len(sequence_N) else 0):
            return False
        ends = (
            torch.equal(seq_T[self.first_N], sequence_N)
            and torch.equal(seq_T[self.last_N], sequence_N)
            and not position_T[self.first_N].any()
        )
        if not ends:
            return False
        # Sequence numbers never fall, and positions rise except from one sequence to the next.
        rises = position_T[1:] > position_T[:-1]
        rises[self.first_N[1:] - 1] = True
        return bool(rises.logical_and_(seq_T[1:] >= seq_T[:-1]).all())

    def parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield runs of whole sequences with at most `PART` entries in total, or of one longer sequence.

        Each is the slice of its entries, and the index of every sequence's last entry within the slice.
        """
        done = 0  # sequences
        while done < len(self.last_N):
            start = int(self.first_N[done])
            to = max(done + 1, int(torch.searchsorted(self.last_N, start + PART)))
            yield slice(start, int(self.last_N[to - 1]) + 1), self.last_N[done:to] - start
            done = to

    @property
    def longest_part(self) -> int:
        return max((part.stop - part.start for part, _ in self.parts()), default=0)

    def sort(self, value_T: Tensor) -> Tensor:
        return value_T if self.order_T is None else value_T[self.order_T]

    def unsort(self, value_T: Tensor) -> Tensor:
        return value_T if self.order_T is None else torch.empty_like(value_T).index_copy_(0, self.order_T, value_T)


class _Work:
    """Buffers for solving one part after another; fresh pages for every operation would cost more than the arithmetic."""

    def __init__(self, size: int, like: Tensor) -> None:
        self._buffers = like.new_empty(2, size)
        self._scratch = like.new_empty(4 * size + 256)  # of all levels: twice their sizes 1 + 1/2 + 1/4 ..., and the odd entries
        self._bits = torch.empty(size, dtype=_integer(like.dtype), device=like.device)

    def begin(self, mask_T: Tensor) -> tuple[Tensor, Tensor]:
        """Begin the next part; return the buffers of its recurrence's x and of its coefficients' losses, to be filled in."""
        self._mask_T = _bits(mask_T, self._buffers.dtype, self._bits[: len(mask_T)])
        self._x_T, self._loss_T = self._buffers[:, : len(mask_T)]
        return self._x_T, self._loss_T

    def solve(self, last_N: Tensor) -> None:
        """Replace x by H. The loss is set to 0 at masked tokens and to 1 at the end of each sequence."""
        self.only(self._x_T)
        self.only(self._loss_T)[last_N] = 1.0
        _recur(self._loss_T, self._x_T, self._scratch)

    def only(self, value_T: Tensor) -> Tensor:
        return _only(self._mask_T, value_T)


def _recur(loss_T: Tensor, x_T: Tensor, scratch: Tensor) -> None:
    """Solve H_t = x_t + (1 - loss_t) H_{t+1}, with H = 0 after the end, in place of x."""
    entries, pairs = len(x_T), len(x_T) // 2
    if entries == 1:
        return
    half = entries - pairs
    keep_T, x_P, loss_P, rest = scratch.tensor_split([entries, entries + half, entries + 2 * half])
    torch.sub(torch.ones_like(loss_T[0]), loss_T, out=keep_T)
    left = slice(0, 2 * pairs, 2)
    # A pair is one step of x + a x' with the loss 1 - a a' = loss + a loss'.
    torch.addcmul(x_T[left], keep_T[left], x_T[1::2], out=x_P[:pairs])
    torch.addcmul(loss_T[left], keep_T[left], loss_T[1::2], out=loss_P[:pairs])
    if half > pairs:
        x_P[-1], loss_P[-1] = x_T[-1], loss_T[-1]
    _recur(loss_P, x_P, rest)
    x_T[0::2] = x_P
    x_T[1::2][: half - 1].addcmul_(keep_T[1::2][: half - 1], x_P[1:])


def _bits(mask_T: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """A mask for the bits of floats: as exact as masked_fill_, whatever is masked, and five times as fast on CPU."""
    out = torch.empty(len(mask_T), dtype=_integer(dtype), device=mask_T.device) if out is None else out
    return out.copy_(mask_T).neg_()


def _only(bits_T: Tensor, value_T: Tensor) -> Tensor:
    """Set the masked entries of `value_T` to 0 and return it."""
    value_T.view(bits_T.dtype).bitwise_and_(bits_T)
    return value_T


def _at(value_N: Tensor, seq_T: Tensor, out: Tensor) -> Tensor:
    """Spread a number per sequence over its entries, in `out`; a single number for all is returned as is."""
    return torch.index_select(value_N, 0, seq_T, out=out) if value_N.ndim else value_N


def _integer(dtype: torch.dtype) -> torch.dtype:
    return torch.int64 if dtype == torch.float64 else torch.int32


def _float(value_T: Tensor) -> torch.dtype:
    return torch.float64 if value_T.dtype == torch.float64 else torch.float32


def _check_unit(name: str, value: float | Tensor, least: float = 0.0) -> None:
    for one in torch.as_tensor(value, dtype=torch.float64).flatten().aminmax() if torch.as_tensor(value).numel() else ():
        if not least <= float(one) <= 1:
            raise ValueError(f"gae: {name} is {float(one):g}, must be from {least:g} to 1")
