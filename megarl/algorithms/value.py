"""The critic's loss, and how much of the returns the critic explains."""

from __future__ import annotations

from megarl.algorithms.base import Loss
from megarl.algorithms.ops import Average, Averaging, attach, token_weights
from megarl.batch import Batch
from megarl.lazy_torch import Tensor, torch


def value_weights(count_N: Tensor, aggregation: Averaging = "token-mean") -> Tensor:
    """The weight of each loss token of a sequence in the critic's loss, float64 [N]; PPO and VAPO take the mean over tokens."""
    return token_weights(count_N, aggregation)


def value_loss(value_T: Tensor, batch: Batch, clip: float | None, coef: float) -> Loss:
    """coef max((v - R)^2, (clamp(v, v_old - c, v_old + c) - R)^2) per token, without the second term if `clip` (c) is None.

    As in PPO2 of OpenAI baselines; see arXiv:2005.12729, section 3.

    Args:
        value_T: float [T], v, the critic's values, in the graph.
        batch: the entries. `extra_T` has "return" (R) and, with a clip, "value" (v_old).
        clip: c, how far a value may move from its value before the step.
        coef: the factor; PPO2's is 1/2.

    Returns:
        The loss [T], before `value_weights` are applied, 0 with zero gradient at masked entries, with the metrics to report.
    """
    with torch.no_grad():
        v_T, return_T, masked_T = value_T.detach(), batch.extra_T["return"], ~batch.mask_T
        slope_T = (v_T - return_T).masked_fill_(masked_T, 0.0)
        loss_T = slope_T.square().mul_(coef)
        slope_T.mul_(2 * coef)
        clipped = torch.zeros((), dtype=torch.int64, device=v_T.device)
        if clip is not None:
            old_T = batch.extra_T["value"]
            bound_T = (torch.clamp(v_T, old_T - clip, old_T + clip) - return_T).masked_fill_(masked_T, 0.0).square_().mul_(coef)
            clips_T = bound_T > loss_T
            torch.maximum(bound_T, loss_T, out=loss_T)
            slope_T.masked_fill_(clips_T, 0.0)
            clipped = clips_T.count_nonzero()
        tokens = batch.mask_T.count_nonzero()
        mean = {
            "critic/vf_loss": Average(loss_T.sum(), tokens),
            "critic/vf_clipfrac": Average(clipped, tokens),
            "critic/value": Average(torch.where(batch.mask_T, v_T, 0.0).sum(), tokens),
        }
    return Loss(attach(value_T, loss_T, slope_T), mean=mean)


def explained_variance_sums(value_T: Tensor, return_T: Tensor, mask_T: Tensor) -> Tensor:
    """The sums that make up the explained variance, over this rank's loss tokens.

    The sums add up over ranks and batches; `observe.metrics.Explained` computes the explained variance 1 - Var(R - v) / Var(R) from them.

    Args:
        value_T: float [T], v.
        return_T: float [T], R.
        mask_T: bool [T], the entries that count; the others may hold garbage.

    Returns:
        float64 [5]: the number of tokens and the sums of R, R^2, R - v and (R - v)^2.
    """
    goal, error = return_T[mask_T].double(), (return_T - value_T)[mask_T].double()
    count = torch.tensor(float(len(goal)), dtype=torch.float64, device=goal.device)
    return torch.stack([count, goal.sum(), goal.square().sum(), error.sum(), error.square().sum()])
