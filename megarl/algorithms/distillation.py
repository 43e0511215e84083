"""On-policy distillation: each token that the student has sampled is rewarded by how much likelier the teacher finds it (Lu et al.,
Thinking Machines, 2025; Agarwal et al., arXiv:2306.13649).

Axes: T predicted tokens.
"""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat

from megarl.algorithms.base import Fraction
from megarl.algorithms.gae import discounted_to_go
from megarl.algorithms.ops import log_ratio
from megarl.algorithms.settings import Settings
from megarl.batch import Batch
from megarl.lazy_torch import Tensor


class Distillation(Settings):
    """A_t = task_weight A^task_t - coef sum_{k >= t} gamma^(k - t) (log pi_old(y_k) - log pi_teacher(y_k)).

    At gamma = 0 its expected policy gradient, on policy, is that of -coef KL(pi || teacher) at each token, given the tokens before it; at
    gamma = 1 that of the KL of whole responses.
    """

    coef: PositiveFloat = 1.0
    """Weight of the reverse KL to the teacher, per token."""
    gamma: Fraction = 0.0
    """Discount per token of the KL of later tokens; 0: a token answers for itself alone."""
    task_weight: NonNegativeFloat = 0.0
    """Factor of the advantages that the algorithm computes from the reward; 0: the reward is only reported."""

    def advantages(self, task_T: Tensor, batch: Batch) -> Tensor:
        """Compute the advantage of each token from the task's and the teacher's.

        Args:
            task_T: float [T], the algorithm's advantages; masked entries are not read.
            batch: whole sequences; `extra_T` has "old_logp" and "teacher_logp", both at the sampling temperature.

        Returns:
            [T], 0 at masked entries.
        """
        gap_T = log_ratio(batch.extra_T["old_logp"], batch.extra_T["teacher_logp"], batch)
        task_T = (self.task_weight * task_T).masked_fill(~batch.mask_T, 0.0)
        return task_T - self.coef * discounted_to_go(gap_T, batch, self.gamma)
