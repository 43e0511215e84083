"""On-policy distillation: each token that the student has sampled is rewarded by how much likelier the teacher finds it (Lu et al.,
Thinking Machines, 2025; Agarwal et al., arXiv:2306.13649), or the two distributions are compared on the teacher's likeliest tokens
(arXiv:2604.13016).

Axes: T predicted tokens, K tokens that the teacher names, B = K + 1 buckets: these tokens one by one, and all others together.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from megarl.algorithms.base import Fraction
from megarl.algorithms.gae import discounted_to_go
from megarl.algorithms.ops import log_ratio
from megarl.algorithms.settings import Settings
from megarl.batch import Batch
from megarl.lazy_torch import Tensor, torch

Divergence = Literal["reverse_kl", "forward_kl", "jsd"]
FLOOR = -80.0  # the log-prob of a bucket is taken to be at least this


class Distillation(Settings):
    """A_t = task_weight A^task_t - coef sum_{k >= t} gamma^(k - t) (log pi_old(y_k) - log pi_teacher(y_k)).

    At gamma = 0 its expected policy gradient, on policy, is that of -coef KL(pi || teacher) at each token, given the tokens before it; at
    gamma = 1 that of the KL of whole responses.
    """

    coef: PositiveFloat = 1.0
    """Weight of the divergence from the teacher, per token."""
    gamma: Fraction = 0.0
    """Discount per token of the KL of later tokens; 0: a token answers for itself alone."""
    task_weight: NonNegativeFloat = 0.0
    """Factor of the advantages that the algorithm computes from the reward; 0: the reward is only reported."""
    top_k: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Compare whole distributions: the teacher's K likeliest tokens of each position one by one, all others together; the divergence is a
    term of the loss. null: only the sampled token's log-probs are compared, in its advantage."""
    divergence: Divergence = "reverse_kl"
    """With `top_k`: KL(policy || teacher), KL(teacher || policy), or the Jensen-Shannon divergence."""

    @model_validator(mode="after")
    def _fits_its_form(self) -> Distillation:
        if self.top_k is None and self.divergence != "reverse_kl":
            raise ValueError(f"divergence={self.divergence}: needs top_k; one sampled token gives the reverse KL alone")
        if self.top_k is not None and self.gamma:
            raise ValueError(f"gamma={self.gamma:g}: discounts the sampled tokens' advantages, of which top_k={self.top_k} makes none")
        return self

    def advantages(self, task_T: Tensor, batch: Batch) -> Tensor:
        """Compute the advantage of each token from the task's and the teacher's.

        Args:
            task_T: float [T], the algorithm's advantages; masked entries are not read.
            batch: whole sequences; without `top_k`, `extra_T` has "old_logp" and "teacher_logp", both at the sampling temperature.

        Returns:
            [T], 0 at masked entries.
        """
        task_T = (self.task_weight * task_T).masked_fill(~batch.mask_T, 0.0)
        if self.top_k is not None:
            return task_T
        gap_T = log_ratio(batch.extra_T["old_logp"], batch.extra_T["teacher_logp"], batch)
        return task_T - self.coef * discounted_to_go(gap_T, batch, self.gamma)

    def loss(self, policy_TB: Tensor, teacher_TB: Tensor, mask_T: Tensor) -> Tensor:
        """Compute the term of each token's loss with `top_k`: coef times the divergence.

        Args:
            policy_TB, teacher_TB: as in `divergence`.
            mask_T: bool [T], the loss tokens.

        Returns:
            [T], 0 at masked entries.
        """
        return self.coef * divergence(policy_TB, teacher_TB, self.divergence).masked_fill(~mask_T, 0.0)


def divergence(policy_TB: Tensor, teacher_TB: Tensor, kind: Divergence) -> Tensor:
    """The divergence of two distributions over the same buckets, a lower bound of that over the whole vocabulary.

    reverse_kl: sum_b p_b (log p_b - log q_b) with p the policy's and q the teacher's; forward_kl: sum_b q_b (log q_b - log p_b); jsd: half
    the sum of the two KL to (p + q) / 2. Differentiable in the policy's log-probs.

    Args:
        policy_TB: float [T, B], the policy's log-probs of the buckets.
        teacher_TB: float [T, B], the teacher's.
        kind: which divergence.

    Returns:
        [T], in nats.
    """
    p_TB, q_TB = policy_TB.clamp(min=FLOOR), teacher_TB.clamp(min=FLOOR)
    if kind == "reverse_kl":
        return (p_TB.exp() * (p_TB - q_TB)).sum(-1)
    if kind == "forward_kl":
        return (q_TB.exp() * (q_TB - p_TB)).sum(-1)
    middle_TB = torch.logaddexp(p_TB, q_TB) - math.log(2)
    return 0.5 * (p_TB.exp() * (p_TB - middle_TB) + q_TB.exp() * (q_TB - middle_TB)).sum(-1)
