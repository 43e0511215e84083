"""The KL to the reference: its estimators, as a term of the loss or in the reward, and its adaptive coefficient.

Axes: T predicted tokens, N sequences.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, model_validator

from megarl.algorithms.ops import Term, bounded_ratio, log_ratio
from megarl.algorithms.settings import Settings
from megarl.batch import Batch
from megarl.lazy_torch import Tensor, torch

KlKind = Literal["k1", "k2", "k3"]
SLOWEST = 0.1  # least factor on the adaptive coefficient per step: 1 - 0.2 responses / horizon is <= 0 from 5 horizons on; 0 would stay 0


class KlToReference(Settings):
    """The settings of an algorithm's KL to the reference, and the terms computed from them."""

    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the reference; above 0, a frozen reference is kept."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Whether the KL is a term of the loss or subtracted from the reward."""
    kl_kind: KlKind = "k3"
    """The KL's estimator; in the reward the default is k1."""
    kl_straight_through: bool = False
    """Use the estimator's value with the gradient of k2, which is the KL's own on-policy gradient."""
    kl_importance_weighted: bool = False
    """Multiply the estimator by the ratio to the old policy, with the gradient through both: the KL's own gradient, even off-policy."""
    kl_clamp: PositiveFloat | None = 10.0
    """Limit on a token's estimate, with no gradient beyond it (k1 in the reward is never clamped); null: none.

    k3 and its slope grow as exp(ref - lp): without a limit, one token 20 nats below the reference has a slope of 5e8, and after gradient
    clipping the whole step's gradient is that token's. At 10, as in verl and slime, the slope stays below 13.
    """
    kl_target: PositiveFloat | None = None
    """Adapt kl_coef towards this KL, in nats per response (arXiv:1909.08593, section 2.2); null: kl_coef is fixed."""
    kl_horizon: Annotated[int, Field(ge=1)] = 10_000
    """Number of responses over which kl_coef may grow or shrink by about a fifth."""

    @model_validator(mode="before")
    @classmethod
    def _kind_in_reward(cls, data: Any) -> Any:
        """Make k1 the default estimator if the KL is in the reward."""
        if isinstance(data, dict) and data.get("kl_in", cls.model_fields["kl_in"].default) == "reward":
            return {"kl_kind": "k1", **data}
        return data

    @model_validator(mode="after")
    def _kl_makes_sense(self) -> KlToReference:
        for key in ("kl_straight_through", "kl_importance_weighted"):
            if getattr(self, key) and self.kl_in == "reward":
                raise ValueError(f"{key}=true with kl_in=reward: the reward has no gradient; it belongs to kl_in=loss")
        if self.kl_straight_through and self.kl_importance_weighted:
            raise ValueError("kl_straight_through=true with kl_importance_weighted=true: either makes the gradient right, both do not")
        if self.kl_in == "loss" and self.kl_kind == "k1" and not (self.kl_straight_through or self.kl_importance_weighted):
            raise ValueError(
                "kl_kind=k1 with kl_in=loss: its gradient has expectation 0 on policy, so it would be noise alone; "
                "set kl_straight_through=true or kl_importance_weighted=true, or kl_kind to k2 or k3, or kl_in=reward"
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError(
                f"kl_target={self.kl_target:g} with kl_coef=0: the coefficient is multiplied, and 0 stays 0; give its start value"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0

    @property
    def kl_per_sequence(self) -> bool:
        """Whether the driver subtracts kl_coef * sum_t `old_kl`_t from each response's reward before `advantages`."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    def old_kl(self, batch: Batch) -> Tensor:
        """The estimate of KL(old || ref) at each loss token [T], 0 elsewhere: subtracted from the reward, reported, used to adapt kl_coef.

        The estimator is `kl_kind` if the KL is in the reward, else k1. Reads `batch.extra_T["old_logp"]` and `["ref_logp"]`.
        """
        d_T = log_ratio(batch.extra_T["old_logp"], batch.extra_T["ref_logp"], batch)
        if self.kl_in == "loss" or self.kl_kind == "k1":
            return d_T
        return estimate(d_T, self.kl_kind, self.kl_clamp).value_T

    def token_rewards(self, batch: Batch, kl_coef: float) -> Tensor:
        """r_t = R at the last loss token of the response and, with the KL in the reward, -kl_coef `old_kl`_t at every loss token [T].

        In an episode with turn rewards, each of them is at the last token of its turn, and the rest of R is at the end.

        Needs whole sequences; 0 at masked entries. Reads `batch.extra_T["reward"]` (R, spread over the tokens), and "turn_reward" if given.
        """
        kept_T = batch.mask_T.nonzero().squeeze(1)
        last_N = torch.full_like(batch.length_N, -1).scatter_reduce(0, batch.seq_T[kept_T], batch.position_T[kept_T], "amax")
        ends_T = batch.mask_T & (batch.position_T == batch.spread(last_N))
        reward_T = torch.where(ends_T, batch.extra_T["reward"], 0.0)
        if "turn_reward" in batch.extra_T:
            turn_T = torch.where(batch.mask_T, batch.extra_T["turn_reward"], 0.0)
            reward_T = reward_T + turn_T - torch.where(ends_T, batch.spread(batch.sequence_sum(turn_T)), 0.0)
        return reward_T - kl_coef * self.old_kl(batch) if kl_coef > 0 and self.kl_in == "reward" else reward_T

    def kl_term(self, lp_T: Tensor, d_T: Tensor, bound: float, batch: Batch) -> Term:
        """The KL term of the loss, before `kl_coef` is applied: value and slope [T], undefined at masked entries.

        Args:
            lp_T: float [T], log-probs under the policy, detached.
            d_T: float [T], lp - old; read only if the term is importance weighted.
            bound: the bound on `d_T` in that case (`ops.bounded_ratio`).
            batch: the entries; `extra_T` has "ref_logp".
        """
        term = estimate(log_ratio(lp_T, batch.extra_T["ref_logp"], batch), self.kl_kind, self.kl_clamp, self.kl_straight_through)
        if not self.kl_importance_weighted:
            return term
        ratio = bounded_ratio(d_T, bound)
        return Term(ratio.value_T * term.value_T, ratio.slope_T * term.value_T + ratio.value_T * term.slope_T)

    def next_kl_coef(self, current: float, observed_kl: float, responses: int) -> float:
        """The coefficient after a step: beta (1 + clip(KL / target - 1, -0.2, 0.2) responses / horizon) (arXiv:1909.08593, eq. 4).

        Args:
            current: beta, the coefficient of the step.
            observed_kl: mean over the kept responses of the sum of `old_kl`, in nats.
            responses: number of kept responses.

        Returns:
            A number > 0, at least a tenth of beta, since 0 would stay 0 forever. Without a target, `current`.
        """
        if self.kl_target is None:
            return current
        error = min(max(observed_kl / self.kl_target - 1, -0.2), 0.2)
        return current * max(SLOWEST, 1 + error * responses / self.kl_horizon)


def estimate(d_T: Tensor, kind: KlKind, clamp: float | None, straight_through: bool = False) -> Term:
    """The per-token estimate of KL(pi || ref) (Schulman, 2020), with d = lp - ref.

    | kind | value           | slope      |
    | k1   | d               | 1          |
    | k2   | d^2 / 2         | d          |
    | k3   | exp(-d) - 1 + d | 1 - exp(-d) |

    On-policy, E[d grad lp] is the gradient of the KL: k2's slope is right, k1's has expectation 0 and k3's is right to first order.
    Weighted with r = pi / old, E_old[d(r k) / d lp grad lp] is right for k1 (slope r (d + 1)) and k3 (slope r d), on-policy or off-policy.

    Args:
        d_T: float [T], 0 at masked entries, detached.
        kind: a row of the table.
        clamp: values are clamped to +-clamp, with slope 0 beyond; None: they are not.
        straight_through: keep the kind's value but use k2's slope.

    Returns:
        Value and slope [T], in new tensors; 0 where d is 0, except the slope of k1, which is 1.
    """
    if kind == "k1":
        value_T, slope_T = d_T.clone(), torch.ones_like(d_T)
    elif kind == "k2":
        value_T, slope_T = d_T.square().mul_(0.5), d_T
    else:
        grown_T = torch.neg(d_T).expm1_()
        value_T, slope_T = grown_T + d_T, grown_T.neg_()
    if straight_through:
        slope_T = d_T
    if clamp is None:
        return Term(value_T, slope_T.clone())
    slope_T = slope_T.masked_fill(value_T.abs() > clamp, 0.0)
    return Term(value_T.clamp_(-clamp, clamp), slope_T)
