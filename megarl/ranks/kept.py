"""The tokens that a truncated sampling keeps, found by the policy at the start of a step and held until its last update.

Axes: T entries of a micro-batch on this rank, of which S are scored; K kept columns of these entries.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megarl.batch import Batch
from megarl.config import Truncation
from megarl.observe.metrics import Max, Mean, Metric, merge
from megarl.parallel.grid import Grid
from megarl.parallel.kept_tokens import KeptTokens, kept_logprob_entropy, kept_tokens

NUMBER = "micro_batch"  # the column that says to which micro-batch of the step an entry belongs


@dataclass(frozen=True)
class _Stored:
    """Kept tokens in host memory: 4 bytes each, and 5 for each scored entry."""

    count_S: Tensor  # int32
    column_K: Tensor  # int32
    outside_S: Tensor  # bool

    @staticmethod
    def of(kept: KeptTokens) -> _Stored:
        count_S = torch.bincount(kept.entry_K, minlength=len(kept.outside_T))
        return _Stored(count_S.int().cpu(), kept.column_K.int().cpu(), kept.outside_T.cpu())

    def on(self, device: torch.device) -> KeptTokens:
        entry_K = torch.arange(len(self.count_S), device=device).repeat_interleave(self.count_S.to(device))
        return KeptTokens(entry_K, self.column_K.to(device).long(), self.outside_S.to(device))

    @property
    def nbytes(self) -> int:
        return self.count_S.nbytes + self.column_K.nbytes + self.outside_S.nbytes


class KeptLogprobs:
    """Log-probs and entropies over the tokens that a truncated sampling keeps, on one rank.

    Whatever reads a micro-batch, the reference or the policy after some updates, reads the columns that the policy kept when it first saw
    it: ratios and KL are then of two distributions over the same tokens.

    Args:
        truncation: the rules of the sampling.
        temperature: its temperature.
        grid: this rank's grid.
        vocabulary: tokens of the policy's vocabulary.
        hold: keep what is found until the next step; False: every micro-batch is read once.
        reports: whether this rank reports the metrics of its tokens.
    """

    def __init__(self, truncation: Truncation, temperature: float, grid: Grid, vocabulary: int, *, hold: bool, reports: bool) -> None:
        self._truncation, self._temperature, self._grid, self._vocabulary = truncation, temperature, grid, vocabulary
        self._hold, self._reports = hold, reports
        self._stored: dict[int, _Stored] = {}
        self._metrics: list[dict[str, Metric]] = []

    def begin(self, batches: list[Batch]) -> list[Batch]:
        """Forget the last step; return this step's micro-batches with their numbers."""
        self._stored.clear()
        return [batch.with_extra(**{NUMBER: torch.full((len(batch),), number)}) for number, batch in enumerate(batches)]

    def read(self, role: str, logits_RV: Tensor, row_T: Tensor, batch: Batch, overwrite: bool) -> tuple[Tensor, Tensor]:
        """Compute log-probs and entropies, each [T]; both are 0 at entries that nothing learns from.

        Args:
            role: whose logits they are. Those of the policy say what is kept if this micro-batch is new.
            logits_RV, row_T: as in `logprob_entropy`.
            batch: the entries, of one micro-batch of `begin`.
            overwrite: backward writes the gradient over the logits.
        """
        scored_S = batch.extra_T.get("compared", batch.mask_T).nonzero()[:, 0]
        row_S, target_S, group = row_T[scored_S], batch.target_T[scored_S], self._grid.groups.tp
        number = int(batch.extra_T[NUMBER][0]) if len(batch) else -1
        if number in self._stored:
            kept = self._stored[number].on(logits_RV.device)
        else:
            assert role == "policy" or number < 0, "the policy's pass comes first"
            kept = kept_tokens(logits_RV, row_S, target_S, self._truncation, self._temperature, group, self._vocabulary)
            if self._hold and number >= 0:
                self._stored[number] = _Stored.of(kept)
            self._metrics.append(self._found(kept, batch.mask_T[scored_S]))
        lp_S, entropy_S = kept_logprob_entropy(logits_RV, row_S, target_S, kept, self._temperature, group, overwrite)
        nothing_T = lp_S.new_zeros(len(batch))
        return nothing_T.index_copy(0, scored_S, lp_S), nothing_T.index_copy(0, scored_S, entropy_S)

    def metrics(self) -> dict[str, Metric]:
        """Metrics of what was found since the last call, on the last stage's ranks.

        sampling/kept is the mean number of kept tokens at a loss token, outside_frac the share of loss tokens that were sampled though the
        trainer's logits would not have kept them, kept_mb the host memory of what this rank holds.
        """
        metrics, self._metrics = self._metrics, []
        memory = {"sampling/kept_mb": Max(sum(one.nbytes for one in self._stored.values()) / 2**20)} if self._stored else {}
        return merge(metrics) | memory

    def _found(self, kept: KeptTokens, learned_S: Tensor) -> dict[str, Metric]:
        columns = float(learned_S[kept.entry_K].sum())  # each rank of the vocabulary adds its own
        if not self._reports:
            return {"sampling/kept": Mean(columns, 0.0)}
        tokens = float(learned_S.sum())
        return {
            "sampling/kept": Mean(columns, tokens),
            "sampling/outside_frac": Mean(float((kept.outside_T & learned_S).sum()), tokens),
        }
