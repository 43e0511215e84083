"""Processing of a batch one block of entries at a time, so that the temporaries of a loss take almost no memory.

Axes: T entries of the batch or of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from megarl.algorithms.ops import Average
from megarl.batch import Batch
from megarl.lazy_torch import Tensor, torch

ENTRIES = 1 << 17  # half a megabyte of float32 per tensor; a typical micro-batch is one block


def blocks(batch: Batch) -> Iterator[tuple[slice, Batch]]:
    """Yield the slice of each block's entries and a view of the batch for them; one empty block if the batch is empty."""
    for start in range(0, max(1, len(batch)), ENTRIES):
        here = slice(start, start + ENTRIES)
        yield here, batch.take(here)


@dataclass(frozen=True)
class LossStats:
    """The metrics of a loss over its loss tokens, collected block by block, all 0-dim.

    `totals` are sums that are reported as means over the tokens, `averages` have weights of their own, `peaks` are maxima.
    """

    totals: dict[str, Tensor] = field(default_factory=dict)
    averages: dict[str, Average] = field(default_factory=dict)
    peaks: dict[str, Tensor] = field(default_factory=dict)

    def add(self, counts: Mapping[str, Tensor]) -> None:
        """Add sums over the loss tokens of a block."""
        for name, count in counts.items():
            self.totals[name] = self.totals[name] + count if name in self.totals else count

    def rise(self, highs: Mapping[str, Tensor]) -> None:
        """Record the largest values of a block."""
        for name, high in highs.items():
            self.peaks[name] = torch.maximum(self.peaks[name], high) if name in self.peaks else high

    def drift(self, d_T: Tensor, bound: float) -> None:
        """Record how far the policy has moved since the step began, given d = lp - old, 0 at masked entries.

        ppo_kl: mean of old - lp; ratio_gt_2: share of tokens with |d| > ln 2; ratio_max and ratio_inverse_max: from 1 to exp(bound).
        """
        self.add({"actor/ppo_kl": -d_T.sum(), "actor/ratio_gt_2": (d_T.abs() > math.log(2)).count_nonzero()})
        if len(d_T):
            low, high = d_T.aminmax()
            self.rise({"actor/ratio_max": high.clamp(0, bound).exp(), "actor/ratio_inverse_max": (-low).clamp(0, bound).exp()})

    def clipped_sequences(self, clips_T: Tensor, part: Batch, dtype: torch.dtype) -> None:
        """Record the share of clipped sequences, for a clip that applies to whole sequences; each token counts for its share of one.

        Args:
            clips_T: bool [T], whether the token's sequence is clipped.
            part: the block's entries.
            dtype: the dtype of the sums.
        """
        share_T = part.spread(1 / part.count_N.clamp(min=1).to(dtype)).masked_fill_(~part.mask_T, 0.0)
        whole = share_T.sum()
        before, now = self.averages.get("actor/seq_clipfrac"), Average(share_T.masked_fill_(~clips_T, 0.0).sum(), whole)
        self.averages["actor/seq_clipfrac"] = now if before is None else Average(*(a + b for a, b in zip(before, now, strict=True)))
