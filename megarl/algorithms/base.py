"""The base class of the RL algorithms: their settings, with the mathematics as methods on them.

The driver calls `advantages`, `keep`, `weights`, `positive_weights` and `next_kl_coef`. Each rank calls `token_advantages` once a step, on
whole sequences (with a critic, `returns` and `outcomes` too), and `loss` on its share of each micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field, NonNegativeFloat, model_validator

from megarl.algorithms.blocks import LossStats, blocks
from megarl.algorithms.correction import Correction
from megarl.algorithms.kl import KlToReference
from megarl.algorithms.ops import Aggregation, Average, Block, SequenceCount, SumOver, Term, attach, log_ratio, token_weights
from megarl.algorithms.peers import Peer
from megarl.batch import Batch
from megarl.lazy_torch import Tensor, torch

Fraction = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class Loss:
    """A loss before aggregation, with the metrics to report.

    The batch's loss is sum_T weight * loss + weighted. Masked entries contribute 0, with zero gradient, to both terms. `mean` is averaged
    over the global batch; of `peak` (0-dim) the maximum is taken, and a share without tokens has none.
    """

    loss_T: Tensor
    weighted: Tensor | None = None  # another term, 0-dim, already weighted and summed
    mean: Mapping[str, Average] = field(default_factory=dict)
    peak: Mapping[str, Tensor] = field(default_factory=dict)


class PolicyAlgorithm(KlToReference):
    """A policy-gradient algorithm: rewards to advantages, and a loss per token."""

    needs_critic: ClassVar[bool] = False
    needs_greedy: ClassVar[bool] = False  # the driver also samples each prompt once at temperature 0
    reads_advantages: ClassVar[bool] = True  # False: the loss imitates what `keep` has chosen, whatever its advantage
    needs_parts: ClassVar[bool] = False  # the driver calls `part_advantages` instead of `advantages`
    needs_lengths: ClassVar[bool] = False  # the driver calls `length_advantages` instead of `advantages`
    sequence_from: ClassVar[Literal["old_logp", "rollout_logp"]] = "old_logp"  # what lp is compared with in the d_T of `sequence_term`
    selects: ClassVar[bool] = False  # the ranks call `selection` before each update, and `loss` finds its choice in "chosen"

    model_config = ConfigDict(serialize_by_alias=True)  # `as` is a word of Python

    as_: Annotated[
        Peer | None,
        Field(
            alias="as",
            description="Compute what this system does: its settings stand below the keys that are given, and are printed at the start. "
            "paper: the defaults. null: nothing is added.",
        ),
    ] = None
    aggregation: Aggregation
    horizon: Annotated[int, Field(ge=1)] | None = None
    """The constant that a response's loss is divided by: the maximum response length. Required by seq-mean-token-sum-norm, else unused."""
    sequence_count: SequenceCount = None
    ratio_bound: Annotated[float, Field(gt=0, le=40)] = 20.0
    """Log ratios to the old policy are clamped to +- this value, with no gradient beyond it; exp(20) is 5e8."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""
    correction: Correction | None = None
    """Importance weights for the gap between the engine's and the trainer's probabilities."""

    @model_validator(mode="after")
    def _has_its_horizon(self) -> PolicyAlgorithm:
        if self.aggregation == "seq-mean-token-sum-norm" and self.horizon is None:
            raise ValueError("horizon: required by aggregation=seq-mean-token-sum-norm; give the maximum response length")
        if self.aggregation != "seq-mean-token-sum-norm" and self.horizon is not None:
            raise ValueError(f"horizon={self.horizon}: aggregation={self.aggregation} has none; leave it out")
        if self.aggregation == "token-mean" and self.sequence_count is not None:
            raise ValueError(f"sequence_count={self.sequence_count}: aggregation=token-mean counts no responses; leave it out")
        return self

    @property
    def min_group(self) -> int:
        """The fewest responses to a prompt that give a signal; a prompt with fewer scored ones is not trained on."""
        return 1

    def advantages(self, reward_N: Tensor, group_N: Tensor, greedy_N: Tensor | None = None) -> Tensor:
        """Compute one number per response, on the driver.

        Args:
            reward_N: float64 [N], the rewards of all responses that take part in the step, less the KL if `kl_per_sequence`. Those that
                could not be scored are not among them, here and in `keep`.
            group_N: int64 [N], the prompt that each response answers.
            greedy_N: float64 [N], the reward of the greedy response to the same prompt; given only if `needs_greedy`.

        Returns:
            float32 [N].
        """
        raise NotImplementedError

    def part_advantages(self, reward_NK: Tensor, weight_K: Tensor, group_N: Tensor) -> Tensor:
        """Compute one number per response from the reward's parts.

        Args:
            reward_NK: float64 [N, K], the parts before their weights are applied.
            weight_K: float64 [K], the weights.
            group_N: int64 [N], the prompt that each response answers.

        Returns:
            float32 [N].
        """
        raise NotImplementedError

    def length_advantages(self, reward_N: Tensor, group_N: Tensor, count_N: Tensor) -> Tensor:
        """Compute one number per response from rewards and lengths.

        Args:
            reward_N, group_N: as in `advantages`.
            count_N: int64 [N], the loss tokens of each response; 0 for one that is not trained on.

        Returns:
            float32 [N].
        """
        raise NotImplementedError

    def keep(self, reward_N: Tensor, group_N: Tensor) -> Tensor:
        """Which responses are trained on, bool [N]."""
        return torch.ones_like(group_N, dtype=torch.bool)

    def token_advantages(self, batch: Batch, sum_over: SumOver, kl_coef: float) -> Tensor:
        """Compute the advantage of each token, on the whole sequences of one data-parallel rank.

        Args:
            batch: `extra_T` has "advantage" and "reward" (the driver's numbers and the rewards, spread over the tokens) and "old_logp";
                with a reference "ref_logp", with a critic "value".
            sum_over: sums over ALL data-parallel ranks.
            kl_coef: the KL coefficient in this step.

        Returns:
            float [T]; masked entries are not read.
        """
        return batch.extra_T["advantage"]

    def selection(self, logp_T: Tensor, batch: Batch, sum_over: SumOver) -> Tensor:
        """Choose tokens of a global mini-batch that `policy_term` treats otherwise, on the whole sequences of one data-parallel rank.

        Args:
            logp_T: float [T], log-probs under the weights that the update starts from; masked entries are not read.
            batch: `extra_T` has "old_logp", "advantage", and "lot" (int64, a random number of each token that no split changes).
            sum_over: sums over ALL data-parallel ranks.

        Returns:
            bool [T], false at masked entries.
        """
        raise NotImplementedError

    def sequence_term(self, d_T: Tensor, advantage_T: Tensor) -> Tensor | None:
        """Compute the number per token [T] whose mean over the whole sequence `policy_term` needs, 0 where d = 0; None: not needed.

        d is lp - old, or lp - rollout where `sequence_from` says so.
        """
        return None

    @property
    def joins_tokens(self) -> bool:
        """Whether there is a `sequence_term`."""
        return type(self).sequence_term is not PolicyAlgorithm.sequence_term

    def policy_loss(self, block: Block) -> Tensor:
        """Compute the policy's loss of each token [T], as a formula of `block` that autograd can differentiate.

        An algorithm needs only this, or else a `policy_term` of its own that also returns the slope. Gradients flow through `lp_T`, `d_T`
        and `mean_T`; the latter two are clamped to +-`ratio_bound`, without gradient beyond. If `mean_T` is used, d loss / d mean must be
        the same for all tokens of a sequence, and a sum `mean_T * count_T` that is exponentiated needs a clamp too.
        """
        raise NotImplementedError

    def policy_term(self, block: Block) -> Term:
        """Compute the policy's loss per token, its value and slope d loss / d lp, in new tensors; no token depends on another.

        By default, autograd differentiates `policy_loss`. A slope derived by hand saves the graph and its temporaries.
        """
        with torch.enable_grad():
            lp_T = block.lp_T.detach().requires_grad_()
            d_T, mean_T = block.d_T + (lp_T - block.lp_T), block.mean_T
            if mean_T is not None:
                own_T = self.sequence_term(d_T, block.advantage_T)
                assert own_T is not None
                mean_T = mean_T + (own_T - own_T.detach())  # the mean's 1 / |o_i| is the token's weight in the loss
                mean_T = mean_T.clamp(-self.ratio_bound, self.ratio_bound)
            d_T = d_T.clamp(-self.ratio_bound, self.ratio_bound)
            value_T = self.policy_loss(replace(block, lp_T=lp_T, d_T=d_T, mean_T=mean_T))
            [slope_T] = torch.autograd.grad(value_T.sum(), lp_T)
        return Term(value_T.detach().clone(), slope_T.clone())  # the caller may change them in place

    def weights(self, count_N: Tensor) -> Tensor:
        """The weight of each loss token of a sequence, float64 [N], from the loss-token counts of the global mini-batch's sequences."""
        return token_weights(count_N, self.aggregation, self.horizon, self.sequence_count)

    def positive_weights(self, count_N: Tensor, reward_N: Tensor) -> Tensor | None:
        """The weight of each loss token of a sequence in a second, imitation term, float64 [N]; None: there is no such term."""
        return None

    def loss(self, logp_T: Tensor, entropy_T: Tensor, batch: Batch, sum_over: SumOver, kl_coef: float) -> Loss:
        """Compute correction weight * policy term + kl_coef * KL(pi || ref) - entropy_coef * entropy, per token.

        Args:
            logp_T: float [T], log-probs of the targets under the current weights, at the sampling temperature.
            entropy_T: float [T], the entropies of the same distributions.
            batch: the entries, any share of a micro-batch. `extra_T` has "old_logp" and "advantage"; "ref_logp" with a KL in the loss,
                "correction" (`Correction.weights`) with a correction, "rollout_logp"; "sequence_mean" (the mean of `sequence_term` over the
                loss tokens of the whole sequence) if there is such a term and a sequence is in several micro-batches; "chosen"
                (`selection`) if the algorithm selects.
            sum_over: sums over the context-parallel ranks that share the sequences.
            kl_coef: the KL coefficient in this step; used only with `kl_in` loss.

        Returns:
            The loss [T], before `weights` are applied, with the metrics to report.
        """
        with torch.no_grad():
            value_T, slope_T, shown = self._detached(logp_T.detach(), entropy_T.detach(), batch, sum_over, kl_coef)
        loss_T = attach(logp_T, value_T, slope_T)
        if self.entropy_coef > 0:
            loss_T = loss_T - self.entropy_coef * torch.where(batch.mask_T, entropy_T, 0.0)
        tokens = batch.mask_T.count_nonzero()
        mean = {name: Average(total, tokens) for name, total in shown.totals.items()}
        return Loss(loss_T, mean=mean | shown.averages, peak=shown.peaks)

    def _detached(
        self, lp_T: Tensor, entropy_T: Tensor, batch: Batch, sum_over: SumOver, kl_coef: float
    ) -> tuple[Tensor, Tensor, LossStats]:
        """Compute value and slope of the whole loss except the entropy, 0 at masked entries, with the metrics."""
        value_T, slope_T, zero, shown = torch.empty_like(lp_T), torch.empty_like(lp_T), lp_T.new_zeros(()), LossStats()
        mean_N = None if "sequence_mean" in batch.extra_T else self._sequence_means(lp_T, batch, sum_over)
        for here, part in blocks(batch):
            d_T = log_ratio(lp_T[here], part.extra_T["old_logp"], part)
            term = self._corrected(lp_T[here], d_T, mean_N, part, shown)
            if kl_coef > 0 and self.kl_in == "loss":
                kl = self.kl_term(lp_T[here], d_T, self.ratio_bound, part)
                term.value_T.add_(kl.value_T, alpha=kl_coef)
                term.slope_T.add_(kl.slope_T, alpha=kl_coef)
                shown.add({"actor/kl_loss": torch.where(part.mask_T, kl.value_T, zero).sum()})
            torch.where(part.mask_T, term.value_T, zero, out=value_T[here])
            torch.where(part.mask_T, term.slope_T, zero, out=slope_T[here])
            shown.add({"actor/entropy": torch.where(part.mask_T, entropy_T[here], zero).sum()})
        return value_T, slope_T, shown

    def _corrected(self, lp_T: Tensor, d_T: Tensor, mean_N: Tensor | None, part: Batch, shown: LossStats) -> Term:
        """Compute the policy's term times the correction's weights."""
        mean_T = part.extra_T.get("sequence_mean") if mean_N is None else part.spread(mean_N)
        mean_T = None if mean_T is None else mean_T.masked_fill(~part.mask_T, 0.0)
        count_T = part.spread(part.count_N.clamp(min=1).to(lp_T.dtype))
        chosen_T = part.extra_T["chosen"] if self.selects else None
        block = Block(lp_T, d_T, part.extra_T["advantage"], count_T, mean_T, part.extra_T["rollout_logp"], part.mask_T, chosen_T)
        term = self.policy_term(block)
        shown.add(term.counts)
        shown.drift(d_T, self.ratio_bound)
        if mean_T is not None and term.clips_T is not None:
            shown.clipped_sequences(term.clips_T, part, lp_T.dtype)
        if self.correction is not None:
            term.value_T.mul_(part.extra_T["correction"])
            term.slope_T.mul_(part.extra_T["correction"])
        return term

    def _sequence_means(self, lp_T: Tensor, batch: Batch, sum_over: SumOver) -> Tensor | None:
        """Compute the mean of `sequence_term` over whole sequences [N], in one collective; without such a term None, and no collective."""
        total_N = torch.zeros(len(batch.length_N), dtype=lp_T.dtype, device=lp_T.device)
        for here, part in blocks(batch):
            own_T = self.sequence_term(log_ratio(lp_T[here], part.extra_T[self.sequence_from], part), part.extra_T["advantage"])
            if own_T is None:
                return None
            total_N.index_add_(0, part.seq_T, own_T)
        return sum_over(total_N) / batch.count_N.clamp(min=1)
