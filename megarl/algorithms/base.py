"""What an algorithm is: its settings, and the mathematics as methods on them.

Who calls what. The driver: `advantages`, `keep`, `weights`, `positive_weights`, `next_kl_coef`. A rank, once a step on whole sequences:
`token_advantages` (and `returns` of those with a critic). A rank, on each share of a micro-batch: `loss`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, model_validator
from torch import Tensor

from megarl.algorithms.blocks import Shown, blocks
from megarl.algorithms.correction import Correction
from megarl.algorithms.ops import Aggregation, Average, Block, KlKind, SumOver, Term, attach, kl_to_reference, log_ratio, token_weights
from megarl.batch import Batch

Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Loss:
    """A loss before aggregation, and what to show of it.

    The batch's loss is sum_T weight * loss + weighted. Both are 0 with zero gradient at masked entries. `mean` is averaged over
    the global batch, `peak` (0-dim) maximised; a share without tokens has no peak.
    """

    loss_T: Tensor
    weighted: Tensor | None = None  # a further term, 0-dim, that already carries its weights and is summed
    mean: Mapping[str, Average] = field(default_factory=dict)
    peak: Mapping[str, Tensor] = field(default_factory=dict)


class PolicyAlgorithm(BaseModel):
    """A policy-gradient algorithm: rewards to advantages, and a loss per token."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True)

    aggregation: ClassVar[Aggregation]  # how the tokens' losses become one number; the paper's
    min_group: ClassVar[int] = 1  # fewest responses to a prompt that give it a signal
    needs_critic: ClassVar[bool] = False
    needs_greedy: ClassVar[bool] = False  # the driver also samples each prompt once at temperature 0

    kl_coef: NonNegativeFloat = 0.0
    """Weight of the KL to the reference; above 0 a frozen reference is kept."""
    kl_in: Literal["loss", "reward"] = "loss"
    """A term of the loss, or subtracted from the reward (always estimated by k1)."""
    kl_kind: KlKind = "k3"
    """The KL's estimator."""
    kl_straight_through: bool = False
    """Take the estimator's value with the gradient of k2, which is the KL's own."""
    kl_target: PositiveFloat | None = None
    """Nats a response: kl_coef is steered towards this KL (arXiv:1909.08593, section 2.2); null: kl_coef stays."""
    kl_horizon: Annotated[int, Field(ge=1)] = 10_000
    """Responses in which kl_coef may grow or shrink by about a fifth of itself."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    correction: Correction | None = None
    """Importance weights for the gap between the engine's and the trainer's probabilities."""

    @model_validator(mode="before")
    @classmethod
    def _kind_in_reward(cls, data: Any) -> Any:
        """In the reward the estimator is k1; it need not be said."""
        if isinstance(data, dict) and data.get("kl_in", cls.model_fields["kl_in"].default) == "reward":
            return {"kl_kind": "k1", **data}
        return data

    @model_validator(mode="after")
    def _kl_makes_sense(self) -> PolicyAlgorithm:
        if self.kl_in == "reward" and self.kl_kind != "k1":
            raise ValueError(
                f"kl_kind={self.kl_kind} with kl_in=reward: in the reward the estimator is k1 (a number has no gradient to choose)"
            )
        if self.kl_in == "reward" and self.kl_straight_through:
            raise ValueError("kl_straight_through=true with kl_in=reward: the reward has no gradient; it belongs to kl_in=loss")
        if self.kl_in == "loss" and self.kl_kind == "k1" and not self.kl_straight_through:
            raise ValueError(
                "kl_kind=k1 with kl_in=loss: its gradient has expectation 0 on policy, so it would be noise alone; "
                "set kl_straight_through=true, or kl_kind to k2 or k3, or kl_in=reward"
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
        """Whether the driver subtracts kl_coef * sum_t (old_t - ref_t) from each response's reward before `advantages`."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        """One number per response, on the driver.

        Args:
            reward_N: float64 [N], the rewards of all responses of the step, less the KL where `kl_per_sequence`.
            group_N: int64 [N], the prompt that each response answers.
            greedy_N: float64 [N], where `needs_greedy`: the reward of the greedy response to the same prompt.

        Returns:
            float32 [N].
        """
        raise NotImplementedError

    def keep(self, reward_N: Tensor, group_N: Tensor) -> Tensor:
        """Which responses are trained on, bool [N]."""
        return torch.ones_like(group_N, dtype=torch.bool)

    def token_advantages(self, batch: Batch, sum_over: SumOver, kl_coef: float) -> Tensor:
        """The advantage of each token, on the whole sequences of one data-parallel rank.

        Args:
            batch: `extra_T` has "advantage" and "reward" (the driver's numbers and the rewards, spread), "old_logp"; "ref_logp" and "value"
                where there is a reference or a critic.
            sum_over: joins ALL data-parallel ranks.
            kl_coef: the KL's coefficient in this step.

        Returns:
            float [T]; masked entries are not read.
        """
        return batch.extra_T["advantage"]

    def sequence_term(self, d_T: Tensor, advantage_T: Tensor) -> Tensor | None:
        """A number of each token, 0 where d = 0, whose mean over the whole sequence `policy_term` needs; None: it needs none."""
        return None

    def policy_loss(self, block: Block) -> Tensor:
        """The policy's loss of each token [T], as a formula of `block` that autograd can differentiate.

        All that an algorithm needs to say here; one that gives `policy_term` a slope of its own need not have it. Where `mean_T` is used,
        d loss / d mean must be the same for all tokens of a sequence.
        """
        raise NotImplementedError

    def policy_term(self, block: Block) -> Term:
        """The policy's loss: value and slope d loss / d lp per token, in tensors of its own; each token by itself.

        By default `policy_loss`, differentiated. A slope that is derived by hand spares the graph and its temporaries.
        """
        with torch.enable_grad():
            lp_T = block.lp_T.detach().requires_grad_()
            d_T, mean_T = block.d_T + (lp_T - block.lp_T), block.mean_T
            if mean_T is not None:
                own_T = self.sequence_term(d_T, block.advantage_T)
                assert own_T is not None
                mean_T = mean_T + (own_T - own_T.detach())  # the mean's 1 / |o_i| is the token's weight in the loss
            value_T = self.policy_loss(Block(lp_T, d_T, block.advantage_T, mean_T))
            [slope_T] = torch.autograd.grad(value_T.sum(), lp_T)
        return Term(value_T.detach().clone(), slope_T.clone())  # which the caller may change in place

    def weights(self, count_N: Tensor) -> Tensor:
        """The weight of a loss token of each sequence of the global mini-batch, float64 [N], from their numbers of loss tokens."""
        return token_weights(count_N, self.aggregation)

    def positive_weights(self, count_N: Tensor, reward_N: Tensor) -> Tensor | None:
        """The weight of a loss token of each sequence in a second, imitating term, float64 [N]; None: there is no such term."""
        return None

    def next_kl_coef(self, current: float, observed_kl: float, responses: int) -> float:
        """The coefficient after a step: beta (1 + clip(KL / target - 1, -0.2, 0.2) responses / horizon) (arXiv:1909.08593, eq. 4).

        Args:
            current: beta, the coefficient of the step.
            observed_kl: mean of `ops.sequence_kl` over the responses that were kept, in nats.
            responses: how many those are.

        Returns:
            A number >= 0; without a target `current`.
        """
        if self.kl_target is None:
            return current
        error = min(max(observed_kl / self.kl_target - 1, -0.2), 0.2)
        return current * max(0.0, 1 + error * responses / self.kl_horizon)

    def loss(self, logp_T: Tensor, entropy_T: Tensor, batch: Batch, sum_over: SumOver, kl_coef: float) -> Loss:
        """correction weight * policy term + kl_coef * KL(pi || ref) - entropy_coef * entropy, per token.

        Args:
            logp_T: float [T], log-probs of the targets under the current weights, at the temperature that was sampled at.
            entropy_T: float [T], the entropies of the same distributions.
            batch: the entries, any share of a micro-batch's. `extra_T` has "old_logp" and "advantage"; "ref_logp" with a KL in the loss,
                "rollout_logp" with a correction.
            sum_over: joins the context-parallel ranks that share the sequences.
            kl_coef: the KL's coefficient in this step; read with `kl_in` loss alone.

        Returns:
            The loss before `weights`, [T], and what to show of it.
        """
        with torch.no_grad():
            value_T, slope_T, shown = self._detached(logp_T.detach(), entropy_T.detach(), batch, sum_over, kl_coef)
        loss_T = attach(logp_T, value_T, slope_T)
        if self.entropy_coef > 0:
            loss_T = loss_T - self.entropy_coef * torch.where(batch.mask_T, entropy_T, 0.0)
        tokens = batch.mask_T.count_nonzero()
        return Loss(loss_T, mean={name: Average(total, tokens) for name, total in shown.totals.items()}, peak=shown.peaks)

    def _detached(self, lp_T: Tensor, entropy_T: Tensor, batch: Batch, sum_over: SumOver, kl_coef: float) -> tuple[Tensor, Tensor, Shown]:
        """Value and slope of all of the loss but the entropy, 0 at masked entries."""
        value_T, slope_T, zero, shown = torch.empty_like(lp_T), torch.empty_like(lp_T), lp_T.new_zeros(()), Shown()
        sums = self._sums(lp_T, batch, sum_over)
        for here, part in blocks(batch):
            term = self._corrected(lp_T[here], part, sums, shown)
            if kl_coef > 0 and self.kl_in == "loss":
                kl = kl_to_reference(lp_T[here], part.extra_T["ref_logp"], part, self.kl_kind, self.kl_straight_through)
                term.value_T.add_(kl.value_T, alpha=kl_coef)
                term.slope_T.add_(kl.slope_T, alpha=kl_coef)
                shown.add({"actor/kl_loss": kl.value_T.sum()})
            torch.where(part.mask_T, term.value_T, zero, out=value_T[here])
            torch.where(part.mask_T, term.slope_T, zero, out=slope_T[here])
            shown.add({"actor/entropy": torch.where(part.mask_T, entropy_T[here], zero).sum()})
        return value_T, slope_T, shown

    def _corrected(self, lp_T: Tensor, part: Batch, sums: _Sums, shown: Shown) -> Term:
        """The policy's term times the correction's weights."""
        d_T = log_ratio(lp_T, part.extra_T["old_logp"], part)
        mean_T = None if sums.mean_N is None else part.spread(sums.mean_N).masked_fill_(~part.mask_T, 0.0)
        term = self.policy_term(Block(lp_T, d_T, part.extra_T["advantage"], mean_T))
        shown.add(term.counts)
        shown.drift(d_T)
        if self.correction is not None:
            weight_T = self.correction.weight(_gap(part), [part.spread(sum_N) for sum_N in sums.correction])
            term.value_T.mul_(weight_T)
            term.slope_T.mul_(weight_T)
            shown.weights(weight_T, part.mask_T)
        return term

    def _sums(self, lp_T: Tensor, batch: Batch, sum_over: SumOver) -> _Sums:
        """What the terms need of whole sequences, in one collective, or none where they need nothing."""
        total: Tensor | None = None
        own: Tensor | None = None
        for here, part in blocks(batch):
            own = self.sequence_term(log_ratio(lp_T[here], part.extra_T["old_logp"], part), part.extra_T["advantage"])
            terms = [] if self.correction is None else self.correction.sequence_terms(_gap(part))
            terms = terms if own is None else [own, *terms]
            if not terms:
                return _Sums(None, [])
            if total is None:
                total = torch.zeros(len(terms), len(batch.length_N), dtype=lp_T.dtype, device=lp_T.device)
            for sum_N, term_T in zip(total, terms, strict=True):
                sum_N.index_add_(0, part.seq_T, term_T)
        assert total is not None
        sums = list(sum_over(total))
        return _Sums(None, sums) if own is None else _Sums(sums[0] / batch.count_N.clamp(min=1), sums[1:])


@dataclass(frozen=True)
class _Sums:
    """Of whole sequences: the mean of the algorithm's `sequence_term`, and the sums of the correction's, [N] each."""

    mean_N: Tensor | None
    correction: list[Tensor]


def _gap(part: Batch) -> Tensor:
    """How much more likely the trainer thinks each token than the engine that sampled it: old - rollout; 0 at masked entries."""
    return log_ratio(part.extra_T["old_logp"], part.extra_T["rollout_logp"], part)
