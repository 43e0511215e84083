"""What a supervised stage needs from its loss: demonstrations (`sft`), a reward model (`reward_model`), preferences (`dpo`)."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

from megarl.algorithms.base import Loss
from megarl.algorithms.ops import SumOver
from megarl.batch import Batch
from megarl.lazy_torch import Tensor


class Objective(Protocol):
    """A loss on responses from a data set. Axes: T entries of a batch, N sequences."""

    name: ClassVar[str]
    """Prefix of its metrics; `<name>/loss` and `<name>/accuracy` decide which evaluation is the best."""
    head: ClassVar[Literal["lm", "value"]]
    """The model's output: a distribution over the vocabulary, or one number per token."""
    responses: ClassVar[int]
    """Number of responses per item, adjacent in the batch: 1, or 2 for a pair (the better one first)."""
    needs_reference: ClassVar[bool]
    """Whether `batch.extra_T["ref_logp"]` is read: the log-probs under the frozen model that the stage starts from."""

    def weights(self, count_N: Tensor) -> Tensor:
        """The weight of each loss token of a sequence.

        Args:
            count_N: int64 [N], the loss tokens of each sequence of the global mini-batch.

        Returns:
            float64 [N].
        """

    def loss(self, output_T: Tensor, batch: Batch, sum_over: SumOver) -> Loss:
        """The loss of each token, 0 at masked entries, with the metrics to report.

        Args:
            output_T: log-probs of the targets (head "lm", with `batch.extra_T["entropy"]`), or the head's numbers (head "value").
            batch: whole items.
            sum_over: sums over the context-parallel ranks that share the sequences.
        """
