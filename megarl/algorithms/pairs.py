"""What the losses on pairs of responses share.

Sequences 2k and 2k + 1 of a batch are the chosen and the rejected response to one prompt: a micro-batch holds whole pairs in this order.
The loss of a pair depends on both through one number each, summed over the ranks that share them; each token then carries its part of
the value and its slope, so that no gradient crosses ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megarl.algorithms.ops import Average
from megarl.batch import Batch


def pair_weights(count_N: Tensor) -> Tensor:
    """1 / (pairs of the global mini-batch) for every token of its sequences, float64 [N]. ValueError without whole pairs."""
    if len(count_N) == 0 or len(count_N) % 2 or bool((count_N == 0).any()):
        raise ValueError(f"{len(count_N)} sequences, {int((count_N == 0).sum())} of them without loss tokens, are no whole pairs")
    return torch.full((len(count_N),), 2.0 / len(count_N), dtype=torch.float64)


def sign(batch: Batch) -> Tensor:
    """+1 for chosen, -1 for rejected sequences, int64 [N]."""
    return 1 - 2 * (torch.arange(len(batch.length_N), device=batch.length_N.device) % 2)


def difference(score_N: Tensor) -> Tensor:
    """chosen - rejected of each pair, at both of its sequences [N]."""
    return (score_N[0::2] - score_N[1::2]).repeat_interleave(2)


def pair_mean(value_N: Tensor, batch: Batch) -> Average:
    """The mean of a number of each pair [N] over all pairs, whoever holds how much of them: every loss token speaks for its share."""
    share_T = torch.where(batch.mask_T, batch.spread(0.5 / batch.count_N.clamp(min=1).to(value_N.dtype)), 0.0)
    return Average((share_T * batch.spread(value_N)).sum(), share_T.sum())
